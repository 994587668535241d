"""The drafter's first weights, where the target's head decides them.

A final-normed hidden state has unit mean square, so a head row w gives logits of standard deviation |w|: SmolLM2's rows make an
untrained drafter lose 98 nats a token where an even guess loses 10.8. And an untrained slot still is, nearly, the mask token's own
embedding, which a tied head answers with logits far from its usual spread (33 nats if only the rows are looked at). So both are
scaled to at most 1, and the first hundred steps learn the text instead of the scale.
"""

import torch
import torch.nn.functional as F

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import TargetHead

TINY = 1e-6


@torch.no_grad()
def scale_to_head(drafter: DFlashDrafter, head: TargetHead) -> float:
    """Set the final norm's weight so that neither a typical head row nor the mask token's embedding gives logits beyond about 1."""
    rows_VE = head.weight_VH[: head.valid_vocab].float() * head.logit_scale
    mask_E = head.embed(torch.tensor(drafter.config.mask_token_id, device=head.weight_VH.device)).float()
    of_mask_V = rows_VE @ F.rms_norm(mask_E, mask_E.shape)
    largest = max(float(rows_VE.norm(dim=1).median()), float((of_mask_V - of_mask_V.mean()).abs().max()), TINY)
    drafter.norm.weight.fill_(1.0 / largest)
    return 1.0 / largest
