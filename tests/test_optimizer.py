"""The update of a step.

Run alone: python -m pytest tests/test_optimizer.py
"""

import math
from functools import partial

import pytest
import torch
from torch import nn

from dflash_nb.pipeline.optimizer import KINDS, make_optimizer, update


def make_small(kind, seed=0, learning_rate=1e-2):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    return module, make_optimizer(module, kind, learning_rate, (0.9, 0.95), 0.0)


@pytest.fixture(params=KINDS)
def small(request):
    return partial(make_small, request.param)


def gradients(module):
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).clone()


def test_batches_of_any_size_share_the_gradient_by_their_slots(small):
    """64 short and 6 long samples, as one window or as their union: the same weights afterwards."""
    x = torch.randn(70, 4)
    module, optimizer = small()
    for part in (x[:64], x[64:]):
        module(part).square().sum().backward()
    update(optimizer, 70.0, 1e-2)
    whole, whole_optimizer = small()
    module_mean = whole(x).square().sum() / 70
    module_mean.backward()
    update(whole_optimizer, 1.0, 1e-2)
    assert torch.allclose(weights(module), weights(whole), atol=1e-6)


def test_clipping_is_by_the_norm_of_the_mean_gradient(small):
    module, optimizer = small()
    (100 * module(torch.ones(2, 4)).sum()).backward()
    norm = gradients(module).norm().item() / 50
    result = update(optimizer, 50.0, 0.0, max_norm=1e9)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert not result.clipped

    torch.manual_seed(0)
    stepped = nn.Linear(3, 1, bias=False)
    sgd = torch.optim.SGD(stepped.parameters(), lr=1.0)
    before = weights(stepped)
    (7 * stepped(torch.ones(1, 3)).sum()).backward()
    assert update(sgd, 1.0, 1.0, max_norm=0.5).clipped
    assert (weights(stepped) - before).norm().item() == pytest.approx(0.5, rel=1e-5)


def test_a_window_without_anchors_is_an_update_like_any_other(small):
    module, optimizer = small()
    module(torch.ones(1, 4)).sum().backward()
    update(optimizer, 1.0, 1e-2)
    result = update(optimizer, 0.0, 1e-2, max_norm=1.0)
    assert result.grad_norm == 0.0
    assert torch.isfinite(weights(module)).all()
    assert all(state["step"].item() == 2 for state in optimizer.state.values() if "step" in state)
    assert len(optimizer.state) == 4


def test_a_gradient_that_is_not_finite_changes_nothing(small):
    module, optimizer = small()
    before = weights(module)
    (module(torch.ones(1, 4)).sum() * math.inf).backward()
    with pytest.raises(FloatingPointError, match="norm is"):
        update(optimizer, 1.0, 1e-2)
    assert torch.equal(weights(module), before)


def test_moments_are_float32_and_a_rate_of_a_millionth_still_moves_weights(small):
    module, optimizer = small(learning_rate=1e-6)
    before = weights(module)
    with torch.autocast("cpu", torch.bfloat16):
        loss = module(torch.ones(3, 4)).float().square().sum()
    loss.backward()
    update(optimizer, 3.0, 1e-6)
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}
    moved = (weights(module) - before).abs()
    assert 0 < moved.max().item() < 1.1e-6


def test_weights_in_half_precision_are_refused():
    with pytest.raises(ValueError, match=r"weights are torch.bfloat16; they must be float32"):
        make_optimizer(nn.Linear(2, 2).bfloat16(), "muon", 1e-3, (0.9, 0.95), 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_only_matrices_decay_and_every_parameter_is_held_once(kind):
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    groups = make_optimizer(module, kind, 1e-2, (0.9, 0.95), 0.1).param_groups
    assert [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups] == [(0.1, {2}), (0.0, {1})]
    assert sorted(map(id, module.parameters())) == sorted(id(p) for group in groups for p in group["params"])


def test_muon_moves_every_direction_of_a_matrix_alike_and_as_far_as_adamw():
    """A gradient of one large and many small directions: the update's singular values stay within a factor of three of the middle one."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64, bias=False)
    before = module.weight.detach().clone()
    optimizer = make_optimizer(module, "muon", 1e-2, (0.9, 0.95), 0.0)
    module.weight.grad.copy_(torch.randn(64, 64) + 100 * torch.randn(64, 1) @ torch.randn(1, 64))
    update(optimizer, 1.0, 1e-2)
    moved = module.weight.detach() - before
    values = torch.linalg.svdvals(moved)
    assert values[0] / values[values.numel() // 2] < 3  # the gradient: over 100
    assert 0.1 < moved.square().mean().sqrt() / 1e-2 < 0.3


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ValueError, match="optimizer 'sgd' is not known; choose one of muon, adamw"):
        make_optimizer(nn.Linear(2, 2), "sgd", 1e-3, (0.9, 0.95), 0.0)
