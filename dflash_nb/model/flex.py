"""The same block attention as `attention`, as one FlexAttention call for accelerators with Triton.

Queries are all slots, keys are all context tokens followed by all slots. The kernel visits only tiles of 128 x 128 in which some slot
sees some key; tiles that are visible throughout skip the mask. The tile map is computed from each slot's interval of visible
tokens, so no A*B x (N + A*B) mask is ever built, and one compiled kernel with dynamic shapes serves every batch.
On a CPU this is checked against `attention`, forward only, because torch has no FlexAttention backward there.
"""

import functools
import importlib.util

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

TILE = 128


def is_usable(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


@functools.cache
def _compiled():
    return torch.compile(flex_attention, dynamic=True)


def flex_block_attention(query_ABHD, context_key_NGD, context_value_NGD, block_key_ABGD, block_value_ABGD, layout, mask) -> torch.Tensor:
    """As `attention.block_attention`."""
    joined = ([context_key_NGD, block_key_ABGD.flatten(0, 1)], [context_value_NGD, block_value_ABGD.flatten(0, 1)])
    key, value = (torch.cat(parts).transpose(0, 1)[None] for parts in joined)
    block_mask = layout.tile_masks.get(mask)
    if block_mask is None:
        block_mask = layout.tile_masks[mask] = tile_mask(layout, mask, context_key_NGD.shape[0])
    query = query_ABHD.flatten(0, 1).transpose(0, 1)[None]
    call = _compiled() if query.device.type == "cuda" else flex_attention
    mixed = call(query, key.to(query.dtype), value.to(query.dtype), block_mask=block_mask, enable_gqa=True)
    return mixed[0].transpose(0, 1).reshape(query_ABHD.shape)


def tile_mask(layout, mask, context: int) -> BlockMask:
    """Tiles that hold a visible pair, and those visible throughout, for `context` tokens followed by the slots."""
    device, slots = layout.position_A.device, layout.block_size
    start_A, anchor_A, window = layout.start_A, layout.position_A, mask.window
    inside_BB = mask.inside_block(slots, device)

    def visible(batch, head, query, key):
        block, slot, token = query // slots, query % slots, key - start_A[query // slots]
        seen = (key < context) & (token >= 0) & (token < anchor_A[block])
        if window is not None:
            seen = seen & (token > anchor_A[block] + slot - window)
        own = (key >= context) & ((key - context) // slots == block)
        return seen | (own & inside_BB[slot, (key - context) % slots])

    queries = len(anchor_A) * slots
    query_Q = torch.arange(queries, device=device)
    block_Q = query_Q // slots
    first_Q, last_Q = start_A[block_Q], (start_A + anchor_A)[block_Q]
    if window is not None:
        first_Q = first_Q + (anchor_A[block_Q] + query_Q % slots - window + 1).clamp(min=0)
    keys = context + queries
    edge_K = torch.arange(0, keys, TILE, device=device)
    own_Q = context + block_Q * slots
    meets_QK = (first_Q[:, None] < (edge_K + TILE)) & (last_Q[:, None] > edge_K) & (first_Q < last_Q)[:, None]
    meets_QK |= (own_Q[:, None] < (edge_K + TILE)) & ((own_Q + slots)[:, None] > edge_K)
    holds_QK = (first_Q[:, None] <= edge_K) & (last_Q[:, None] >= edge_K + TILE)
    meets, holds = (F.pad(tiles, (0, 0, 0, -queries % TILE)).unflatten(0, (-1, TILE)) for tiles in (meets_QK, holds_QK))
    meets, holds = meets.any(1), holds.all(1)
    return BlockMask.from_kv_blocks(
        *_ordered(meets & ~holds), *_ordered(holds), BLOCK_SIZE=TILE, mask_mod=visible, seq_lengths=(queries, keys)
    )


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of chosen tiles of each query tile, and all key tiles with the chosen ones first."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
