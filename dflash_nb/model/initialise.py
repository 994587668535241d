"""The drafter's first weights, where the target's head decides them.

A final-normed hidden state has unit mean square, so a head row w gives logits of standard deviation |w|: SmolLM2's rows make an
untrained drafter lose 98 nats a token where a uniform guess loses 10.8. Scaled to logits of standard deviation 1, the first loss
is ln(vocabulary) + 0.5, and the first hundred steps learn the text instead of the scale.
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
