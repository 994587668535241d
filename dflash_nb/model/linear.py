"""Matrix products of trainable layers, through oneDNN where torch would use MKL.

torch multiplies float32 matrices on x86 CPUs with MKL, which takes its slow path on AMD cores: 4096 x 576 x 1536 runs at 71 GFLOP/s on
one Zen 5 core, and at 151 through the oneDNN operator that torch's own compiler uses; products with a 49,152-row head at 100 and 190.
Everything is float32 as before; only the order of summation differs. Where that operator is missing, and for any other dtype or
device, this is `torch.nn.functional.linear`.

oneDNN compiles a kernel and keeps a scratchpad for every new shape, up to 1,024 of them: 1,000 different row counts of a
[3000..4000, 160] x [448, 160] product cost 7 ms and 5 MB each. Row counts of ragged batches hardly ever repeat, so rows are taken in
pieces whose lengths are powers of two, the last few padded to a multiple of eight: sixteen shapes instead of thousands, and memory
that stays flat. A product in pieces takes 1.2 times as long as a whole one whose kernel is there already.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

SMALLEST, LARGEST = 64, 8192
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
    """`left [M, I] @ right [O, I].T` by oneDNN, without a gradient. M may be any number; both may be transposed views."""
    pieces = list(_pieces(len(left)))
    if len(pieces) == 1 and len(left) % 8 == 0:
        return _onednn(left, right)
    out = left.new_empty(len(left), len(right))
    for rows in pieces:
        out[rows] = _onednn(_padded(left[rows]), right)[: rows.stop - rows.start]
    return out


def weight_gradient(grad: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """`grad [M, O].T @ input [M, I]`, a sum over any number of rows M, by oneDNN."""
    out = grad.new_zeros(grad.shape[1], input.shape[1])
    for rows in _pieces(len(grad)):
        out += _onednn(_padded(grad[rows]).t(), _padded(input[rows]).t())
    return out


def _onednn(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")


def _pieces(rows: int) -> Iterator[slice]:
    """All rows in runs of falling powers of two from LARGEST to SMALLEST, then the rest."""
    start = 0
    while rows - start >= SMALLEST:
        size = min(LARGEST, 1 << ((rows - start).bit_length() - 1))
        yield slice(start, start + size)
        start += size
    if start < rows:
        yield slice(start, rows)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Zero rows added up to a multiple of 8; they change no product that is kept."""
    return F.pad(rows, (0, 0, 0, -len(rows) % 8)) if len(rows) % 8 else rows


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
        return product(input.reshape(-1, input.shape[-1]), weight).view(*input.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        input, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        d_input = product(grad, weight.t()).view_as(input) if ctx.needs_input_grad[0] else None
        d_weight = weight_gradient(grad, input.reshape(-1, input.shape[-1])) if ctx.needs_input_grad[1] else None
        return d_input, d_weight
