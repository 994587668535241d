"""The drafter's first weights, where the target's head decides them.

A final-normed hidden state has unit mean square, so a head row w gives logits of standard deviation |w|: SmolLM2's rows make an
untrained drafter lose 98 nats a token where an even guess loses 10.8. Scaled by a typical row, wrong tokens get logits of standard
deviation 1 and a state that points at a token gives it the root of the hidden size, so the scale is right for a trained drafter too.
What is left is the answer of a tied head to the mask token's own embedding (33 nats on SmolLM2), gone after ten steps. Scaling that
away as well was tried and is worse: the scale then has to grow tenfold, and 240 steps of AdamW on the sample ended at 6.2 nats.
"""

import torch

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import TargetHead


@torch.no_grad()
def scale_to_head(drafter: DFlashDrafter, head: TargetHead) -> float:
    """Set the final norm's weight so that a typical head row gives logits of standard deviation 1; returns that weight."""
    row_norms = head.weight_VH[: head.valid_vocab].float().norm(dim=1) * head.logit_scale
    weight = 1.0 / max(float(row_norms.median()), 1e-6)
    drafter.norm.weight.fill_(weight)
    return weight
