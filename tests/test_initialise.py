"""An untrained drafter guesses evenly, whatever the size of the target's head rows."""

import math

import pytest
import torch
import torch.nn.functional as F
from tiny_drafter import VOCAB, TinyHead, lively_drafter, tiny_config

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.initialise import scale_to_head


@pytest.mark.parametrize("row_scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("logit_scale", [1.0, 0.1])
def test_first_loss_is_that_of_an_even_guess(row_scale, logit_scale):
    head = TinyHead(scale=logit_scale)
    head.weight_VH *= row_scale
    drafter = DFlashDrafter(tiny_config())
    scale_to_head(drafter, head)
    unit = F.normalize(torch.randn(4096, drafter.config.hidden_size, generator=torch.Generator().manual_seed(0)), dim=1)
    hidden = drafter.norm(unit * drafter.config.hidden_size**0.5)
    loss = F.cross_entropy(head.logits(hidden), torch.arange(4096) % VOCAB)
    assert math.log(VOCAB) < loss < math.log(VOCAB) + 1


def test_only_the_final_norm_changes():
    drafter = lively_drafter(tiny_config())
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    weight = scale_to_head(drafter, TinyHead())
    changed = [name for name, value in drafter.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["norm.weight"] and torch.all(drafter.norm.weight == weight)
