"""Matrix products of trainable layers, through oneDNN where torch would use MKL.

torch multiplies float32 matrices on x86 CPUs with MKL, which takes its slow path on AMD cores: 4096 x 576 x 1536 runs at 71 GFLOP/s on
one Zen 5 core, and at 151 through the oneDNN operator that torch's own compiler uses; products with a 49,152-row head at 100 and 190.
Everything is float32 as before; only the order of summation differs. Where that operator is missing, and for any other dtype or
device, this is `torch.nn.functional.linear`.
"""

import torch
import torch.nn.functional as F
from torch import nn

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`input [..., I] @ weight [O, I].T`, differentiable."""
    if runs_on_onednn(input, weight):
        return _OneDnnLinear.apply(input, weight)
    return F.linear(input, weight)


def runs_on_onednn(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `product` takes these."""
    if not HAS_ONEDNN or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    return input.dtype == weight.dtype == torch.float32 and input.numel() > 0


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """`left [M, K] @ right [N, K].T` by oneDNN, without a gradient. Both may be transposed views."""
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


class Linear(nn.Linear):
    """`nn.Linear` without bias on `linear`."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight)


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight):
        ctx.save_for_backward(input, weight)
        return product(input.flatten(0, -2), weight).view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        d_input = product(grad, weight.t()).view_as(input) if ctx.needs_input_grad[0] else None
        d_weight = product(grad.t(), input.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        return d_input, d_weight
