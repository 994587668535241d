"""Matrix products through oneDNN: the plain product's values, with a handful of kernel shapes however ragged the batches are.

Run alone: python -m pytest tests/test_linear.py
"""

import pytest
import torch
from torch.nn import functional as F

from dflash_nb.model import linear as module
from dflash_nb.model.linear import linear


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


def test_leading_dimensions_are_kept():
    assert linear(torch.ones(2, 3, 5), torch.ones(4, 5)).shape == (2, 3, 4)
