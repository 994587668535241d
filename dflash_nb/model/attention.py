"""Attention of draft blocks to their context: exact, and no block pays for another block or for tokens after its anchor.

A block at anchor a sees the context tokens t < a of its own row and its own B slots. A dense mask over all blocks costs
A*B x (S + A*B) scores. Here up to 16 neighbouring anchors of a row form a group, which reads one slice of the context that ends at
its last anchor; the B x B scores inside the blocks are one batched product. 256 blocks of 16 over 2,048 tokens compute 18 % of the
dense scores. Forward keeps none of them (backward recomputes a group's), so memory grows with A*B + S.

Shapes: A blocks, B slots, N context tokens (rows after one another), H query heads, G key/value heads, R = H / G,
D head size, T context tokens of a group, Q = group's blocks * R * B queries.
"""

import itertools
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from dflash_nb.model.flex import flex_block_attention, is_usable

GROUP = 16


@dataclass(frozen=True)
class Group:
    """Blocks first:last, all of one row, whose context starts at token `start`; anchors are positions in the row, increasing."""

    first: int
    last: int
    start: int
    anchors: np.ndarray


@dataclass(frozen=True)
class BlockLayout:
    """Where the blocks of a batch stand: row start and anchor position of each, ordered by row and position."""

    start_A: torch.Tensor
    position_A: torch.Tensor
    block_size: int
    tile_masks: dict = field(default_factory=dict)  # of FlexAttention, a layer mask each

    @cached_property
    def groups(self) -> list[Group]:
        starts, anchors = self.start_A.cpu().numpy(), self.position_A.cpu().numpy()
        edges = np.flatnonzero(np.diff(starts, prepend=-1, append=-1))
        groups = []
        for row_first, row_last in itertools.pairwise(edges):
            parts = -(-(row_last - row_first) // GROUP)
            cuts = row_first + (row_last - row_first) * np.arange(parts + 1) // parts
            groups += [Group(int(a), int(b), int(starts[a]), anchors[a:b]) for a, b in itertools.pairwise(cuts)]
        return groups


@dataclass(frozen=True)
class LayerMask:
    """What a layer lets a slot at position q see: keys from q-window+1 on, up to q if causal, else up to q+window-1 inside the block."""

    causal: bool
    window: int | None

    def inside_block(self, block_size: int, device: torch.device) -> torch.Tensor:
        """Bool [B, B]: slot k (rows) sees slot k' (columns) of its own block."""
        slot = torch.arange(block_size, device=device)
        distance = slot[:, None] - slot[None, :]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            visible &= distance >= 0
        if self.window is not None:
            visible &= distance.abs() < self.window
        return visible


def block_attention(
    query_ABHD: torch.Tensor,
    context_key_NGD: torch.Tensor,
    context_value_NGD: torch.Tensor,
    block_key_ABGD: torch.Tensor,
    block_value_ABGD: torch.Tensor,
    layout: BlockLayout,
    mask: LayerMask,
) -> torch.Tensor:
    """Softmax attention with scale D**-0.5 of every slot over its visible context and block; returns [A, B, H, D] in the query's dtype.

    Keys and queries come rotated. Scores are float32 (float64 for float64 inputs).
    """
    blocks, slots, heads, head_dim = query_ABHD.shape
    if blocks > GROUP and is_usable(query_ABHD.device):
        return flex_block_attention(query_ABHD, context_key_NGD, context_value_NGD, block_key_ABGD, block_value_ABGD, layout, mask)
    kv_heads = block_key_ABGD.shape[2]
    dtype = torch.promote_types(query_ABHD.dtype, torch.float32)
    query_GAXD = query_ABHD.view(blocks, slots, kv_heads, -1, head_dim).permute(2, 0, 3, 1, 4).reshape(kv_heads, blocks, -1, head_dim)
    block_GABD = [tensor.permute(2, 0, 1, 3).to(dtype).contiguous() for tensor in (block_key_ABGD, block_value_ABGD)]
    context_GND = [tensor.permute(1, 0, 2).to(dtype).contiguous() for tensor in (context_key_NGD, context_value_NGD)]
    with torch.autocast(query_ABHD.device.type, enabled=False):
        mixed = _GroupedAttention.apply(query_GAXD.to(dtype) * head_dim**-0.5, *context_GND, *block_GABD, layout, mask)
    mixed = mixed.view(kv_heads, blocks, heads // kv_heads, slots, head_dim).permute(1, 3, 0, 2, 4)
    return mixed.reshape(blocks, slots, heads, head_dim).to(query_ABHD.dtype)


class _GroupedAttention(torch.autograd.Function):
    """Inputs: scaled query [G, A, X, D] with X = R * B queries a block; context key, value [G, N, D]; block key, value [G, A, B, D]."""

    @staticmethod
    def forward(ctx, query, context_key, context_value, block_key, block_value, layout: BlockLayout, mask: LayerMask):
        inside = _scores_inside(query, block_key, layout, mask)
        output = torch.empty_like(query)
        for group in layout.groups:
            blocks = slice(group.first, group.last)
            tokens, weights = _group_weights(query[:, blocks], context_key, inside[:, blocks], group, layout, mask)
            torch.bmm(weights[:, :, : tokens.stop - tokens.start], context_value[:, tokens], out=output[:, blocks].flatten(1, 2))
            inside[:, blocks] = weights[:, :, tokens.stop - tokens.start :].view_as(inside[:, blocks])
        output += inside @ block_value
        ctx.save_for_backward(query, context_key, context_value, block_key, block_value, output)
        ctx.layout, ctx.mask = layout, mask
        return output

    @staticmethod
    def backward(ctx, grad):
        query, context_key, context_value, block_key, block_value, output = ctx.saved_tensors
        grad = grad.contiguous()
        delta = (grad * output).sum(-1, keepdim=True)
        inside = _scores_inside(query, block_key, ctx.layout, ctx.mask)
        d_inside = (grad @ block_value.transpose(-1, -2)).sub_(delta)
        d_query = torch.empty_like(query)
        d_context_key, d_context_value = torch.zeros_like(context_key), torch.zeros_like(context_value)
        for group in ctx.layout.groups:
            blocks = slice(group.first, group.last)
            tokens, weights = _group_weights(query[:, blocks], context_key, inside[:, blocks], group, ctx.layout, ctx.mask)
            inside[:, blocks] = weights[:, :, tokens.stop - tokens.start :].view_as(inside[:, blocks])
            weights = weights[:, :, : tokens.stop - tokens.start]
            group_query, group_grad = query[:, blocks].flatten(1, 2), grad[:, blocks].flatten(1, 2)
            d_context_value[:, tokens].baddbmm_(weights.transpose(1, 2), group_grad)
            d_scores = torch.bmm(group_grad, context_value[:, tokens].transpose(1, 2))
            d_scores.sub_(delta[:, blocks].flatten(1, 2)).mul_(weights)
            d_context_key[:, tokens].baddbmm_(d_scores.transpose(1, 2), group_query)
            torch.bmm(d_scores, context_key[:, tokens], out=d_query[:, blocks].flatten(1, 2))
        d_inside.mul_(inside)
        d_query += d_inside @ block_key
        d_block_key = d_inside.transpose(-1, -2) @ query
        d_block_value = inside.transpose(-1, -2) @ grad
        return d_query, d_context_key, d_context_value, d_block_key, d_block_value, None, None


def _scores_inside(query, block_key, layout: BlockLayout, mask: LayerMask) -> torch.Tensor:
    """Scores of each block's queries to its own slots, [G, A, X, B], hidden ones at -inf. No row is all -inf: a slot sees itself."""
    scores = query @ block_key.transpose(-1, -2)
    hidden = ~mask.inside_block(layout.block_size, query.device)
    if hidden.any():
        scores.unflatten(2, (-1, layout.block_size)).masked_fill_(hidden, -torch.inf)
    return scores


def _group_weights(query, context_key, inside, group: Group, layout: BlockLayout, mask: LayerMask) -> tuple[slice, torch.Tensor]:
    """Token slice that the group reads, and its softmax weights [G, Q, T + B] (context first, own slots last)."""
    kv_heads, blocks, _, _ = query.shape
    slots = layout.block_size
    low = 0 if mask.window is None else max(0, int(group.anchors[0]) - mask.window + 1)
    high = int(group.anchors[-1])
    low = min(low, high)
    tokens = slice(group.start + low, group.start + high)
    scores = query.new_empty(kv_heads, blocks * query.shape[2], high - low + slots)
    torch.bmm(query.flatten(1, 2), context_key[:, tokens].transpose(1, 2), out=scores[:, :, : high - low])
    scores[:, :, high - low :] = inside.flatten(1, 2)
    by_block = scores.view(kv_heads, blocks, -1, slots, high - low + slots)
    anchor = torch.from_numpy(group.anchors).to(query.device)[:, None]
    first = int(group.anchors[0])
    if first < high:
        future = torch.arange(first, high, device=query.device) >= anchor
        by_block[..., first - low : high - low].masked_fill_(future[None, :, None, None], -torch.inf)
    if mask.window is not None:
        edge = max(low, min(high, high + slots - mask.window))
        oldest = anchor + torch.arange(slots, device=query.device) - mask.window + 1
        passed = torch.arange(low, edge, device=query.device) < oldest[..., None]
        by_block[..., : edge - low].masked_fill_(passed[None, :, None], -torch.inf)
    return tokens, torch.softmax(scores, -1, out=scores)
