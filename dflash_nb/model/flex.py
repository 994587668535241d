"""The same block attention as `attention`, as one FlexAttention call for accelerators with Triton.

Queries are all slots, keys are all context tokens followed by all slots. The kernel visits only tiles of 128 x 128 in which some slot
sees some key; tiles that are visible throughout skip the mask. The tile map is computed from each slot's interval of visible
tokens, so no A*B x (N + A*B) mask is ever built. Tokens and blocks are padded to powers of two, which costs next to nothing because
nothing looks at the padding, and leaves a handful of shapes to compile for however ragged the batches are.
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
    return torch.compile(flex_attention, dynamic=False)


def flex_block_attention(query_ABHD, context_key_NGD, context_value_NGD, block_key_ABGD, block_value_ABGD, layout, mask) -> torch.Tensor:
    """As `attention.block_attention`."""
    blocks = len(layout.position_A)
    more_tokens, more_blocks = (_power_of_two(n) - n for n in (context_key_NGD.shape[0], blocks))

    def join(context_NGD, block_ABGD):
        parts = (
            F.pad(context_NGD, (0, 0, 0, 0, 0, more_tokens)),
            F.pad(block_ABGD.flatten(0, 1), (0, 0, 0, 0, 0, more_blocks * layout.block_size)),
        )
        return torch.cat(parts).transpose(0, 1)[None].to(query_ABHD.dtype)

    if mask not in layout.tile_masks:
        start_A, position_A = (F.pad(tensor, (0, more_blocks)) for tensor in (layout.start_A, layout.position_A))
        layout.tile_masks[mask] = tile_mask(start_A, position_A, layout.block_size, mask, context_key_NGD.shape[0] + more_tokens)
    query = F.pad(query_ABHD, (0, 0, 0, 0, 0, 0, 0, more_blocks)).flatten(0, 1).transpose(0, 1)[None]
    call = _compiled() if query.device.type == "cuda" else flex_attention
    keys, values = join(context_key_NGD, block_key_ABGD), join(context_value_NGD, block_value_ABGD)
    mixed = call(query, keys, values, block_mask=layout.tile_masks[mask], enable_gqa=True)
    return mixed[0].transpose(0, 1).unflatten(0, (-1, layout.block_size))[:blocks]


def tile_mask(start_A: torch.Tensor, position_A: torch.Tensor, slots: int, mask, context: int) -> BlockMask:
    """Tiles that hold a visible pair, and those visible throughout, for `context` tokens followed by the slots of all blocks."""
    device, window = position_A.device, mask.window
    inside_BB = mask.inside_block(slots, device)

    def visible(batch, head, query, key):
        block, slot, token = query // slots, query % slots, key - start_A[query // slots]
        seen = (key < context) & (token >= 0) & (token < position_A[block])
        if window is not None:
            seen = seen & (token > position_A[block] + slot - window)
        own = (key >= context) & ((key - context) // slots == block)
        return seen | (own & inside_BB[slot, (key - context) % slots])

    queries = len(position_A) * slots
    query_Q = torch.arange(queries, device=device)
    block_Q = query_Q // slots
    first_Q, last_Q = start_A[block_Q], (start_A + position_A)[block_Q]
    if window is not None:
        first_Q = first_Q + (position_A[block_Q] + query_Q % slots - window + 1).clamp(min=0)
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


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _ordered(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number of chosen tiles of each query tile, and all key tiles with the chosen ones first."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]
