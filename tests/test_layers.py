import pytest
import torch
import torch.nn.functional as F

from dflash_nb.model import linear
from dflash_nb.model.layers import GatedMlp, RMSNorm


def test_norm_equals_torch_with_its_gradient():
    x = torch.randn(5, 3, 16, dtype=torch.float64, requires_grad=True)
    norm = RMSNorm(16, 1e-3).double()
    with torch.no_grad():
        norm.weight.normal_()
    assert torch.allclose(norm(x), F.rms_norm(x, (16,), norm.weight, 1e-3))
    assert torch.autograd.gradcheck(norm, (x,))
    weight_grad = torch.autograd.grad(norm(x).square().sum(), norm.weight)[0]
    reference = torch.autograd.grad(F.rms_norm(x, (16,), norm.weight, 1e-3).square().sum(), norm.weight)[0]
    assert torch.allclose(weight_grad, reference)


def test_norm_is_computed_in_float32_and_returned_in_the_inputs_dtype():
    x = torch.full((2, 64), 300.0, dtype=torch.float16)  # its square overflows float16
    assert RMSNorm(64, 1e-6)(x).dtype == torch.float16
    assert torch.equal(RMSNorm(64, 1e-6)(x), torch.ones_like(x))


def test_a_row_of_zeros_has_a_finite_gradient():
    x = torch.zeros(2, 8, requires_grad=True)
    RMSNorm(8, 1e-6)(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("one_dnn", [True, False])
def test_mlp_equals_its_composition_with_all_gradients(one_dnn, monkeypatch):
    monkeypatch.setattr(linear, "HAS_ONEDNN", linear.HAS_ONEDNN and one_dnn)
    mlp = GatedMlp(12, 20)
    x = torch.randn(2, 7, 12, requires_grad=True)
    gate, up, down = (layer.weight for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj))
    ours, reference = mlp(x), F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    assert torch.allclose(ours, reference, atol=1e-6)
    upstream = torch.randn_like(reference)
    for a, b in zip(*(torch.autograd.grad(y, (x, gate, up, down), upstream) for y in (ours, reference)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)
