"""Matrix products through oneDNN: the plain product's values, with a handful of kernel shapes however ragged the batches are."""

import pytest
import torch
from torch.nn import functional as F

from dflash_nb.model import linear as module
from dflash_nb.model.linear import Linear, linear


@pytest.mark.parametrize("one_dnn", [True, False])
@pytest.mark.parametrize("shape", [(7,), (33, 7), (5, 3, 7), (1, 7), (0, 7)])
def test_values_and_gradients_equal_torch(shape, one_dnn, monkeypatch):
    monkeypatch.setattr(module, "HAS_ONEDNN", module.HAS_ONEDNN and one_dnn)
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(11, 7, requires_grad=True)
    ours, reference = linear(x, weight), F.linear(x, weight)
    assert ours.shape == reference.shape and torch.allclose(ours, reference, atol=1e-5)
    upstream = torch.randn_like(reference)
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), upstream) for y in (ours, reference)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 7, 63, 64, 65, 100, 1000, 8200])
def test_values_and_gradients_are_those_of_the_plain_product(rows):
    torch.manual_seed(rows)
    input, weight, grad = torch.randn(rows, 48), torch.randn(32, 48), torch.randn(rows, 32)
    results = []
    for multiply in (linear, F.linear):
        x, w = input.clone().requires_grad_(), weight.clone().requires_grad_()
        y = multiply(x, w)
        y.backward(grad)
        results.append((y.detach(), x.grad, w.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * rows**0.5)


@pytest.mark.skipif(not module.HAS_ONEDNN, reason="this PyTorch has no oneDNN product")
def test_any_number_of_row_counts_need_a_handful_of_shapes(monkeypatch):
    """oneDNN keeps a kernel and a scratchpad for each shape: without this, 200 steps grew by gigabytes."""
    shapes, compute = set(), module._onednn

    def counting(left, right):
        shapes.add((left.shape, right.shape))
        return compute(left, right)

    monkeypatch.setattr(module, "_onednn", counting)
    weight = torch.ones(8, 16)
    for rows in range(1, 2000, 37):
        module.product(torch.ones(rows, 16), weight)
    assert len(shapes) <= 16


def test_transposed_weights_and_strided_inputs_are_taken():
    x, weight = torch.randn(6, 20)[:, ::2], torch.randn(10, 4)
    assert torch.allclose(linear(x, weight.t()), x @ weight, atol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours():
    x, weight = torch.randn(40, 16), torch.randn(300, 16)
    changed = x.clone()
    changed[20:] = 1e3
    assert torch.equal(linear(x, weight)[:20], linear(changed, weight)[:20])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_as_they_are(dtype):
    layer = Linear(8, 4).to(dtype)
    assert layer(torch.randn(3, 8, dtype=dtype)).dtype == dtype
    assert layer.bias is None and list(layer.state_dict()) == ["weight"]


def test_autocast_decides_the_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert Linear(8, 4)(torch.randn(3, 8)).dtype == torch.bfloat16
