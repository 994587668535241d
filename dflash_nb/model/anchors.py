"""Anchors: the positions whose token starts a block, and how many slots of each block have a label.

A position can be an anchor if its own token and the next one are supervised and in the same row. Slot k (1..B-1) predicts token
`anchor + k` of that row; the first unsupervised or missing token ends the block, since a drafter that fails there never gets
further. So a block's labels are the first `slots_A` slots, and blocks that start in a row's last tokens are short, not dropped.

Which positions are drawn depends on (seed, epoch, sample id, loss mask) alone: each candidate gets a hash of
(seed, epoch, sample id, position), and the smallest `max_anchors` hashes of a row are kept. Batch composition, worker count and
row order cannot change the draw. 49,152 tokens in 64 rows take 8 ms.

Shapes: N real tokens of all rows, rows after one another; B rows; A anchors.
"""

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Anchors:
    """Blocks of one batch, ordered by row and then by position (the grouped attention relies on it).

    row_A       row of the batch
    position_A  position of the anchor token in its row
    start_A     index of the row's first token among the batch's N tokens; the anchor token is `start_A + position_A`
    slots_A     number of slots with a label, 0..block_size-1; 0 is a block that takes no part in the loss
    """

    row_A: torch.Tensor
    position_A: torch.Tensor
    start_A: torch.Tensor
    slots_A: torch.Tensor
    block_size: int

    def __len__(self) -> int:
        return self.row_A.numel()

    @property
    def token_A(self) -> torch.Tensor:
        """Index of each anchor token among the batch's N tokens."""
        return self.start_A + self.position_A

    def to(self, device: torch.device | str) -> "Anchors":
        moved = (tensor.to(device) for tensor in (self.row_A, self.position_A, self.start_A, self.slots_A))
        return Anchors(*moved, self.block_size)


def place_anchors(row_A, position_A, loss_mask_N, lengths_B, block_size: int) -> Anchors:
    """Blocks at given positions (int arrays, any order). Positions without a supervised next token get 0 slots.

    Raises ValueError if a position lies outside its row.
    """
    if block_size < 2:
        raise ValueError(f"block_size is {block_size}; a block needs its anchor and at least one drafted slot, so 2 or more")
    mask_N, lengths_B, starts_B = _ragged(loss_mask_N, lengths_B)
    row_A, position_A = np.asarray(row_A, np.int64), np.asarray(position_A, np.int64)
    outside = np.flatnonzero((row_A < 0) | (row_A >= lengths_B.size))
    if not outside.size:
        outside = np.flatnonzero((position_A < 0) | (position_A >= lengths_B[row_A]))
    if outside.size:
        worst = outside[0]
        raise ValueError(f"anchor {position_A[worst]} of row {row_A[worst]} is outside the batch (row lengths {lengths_B.tolist()[:8]})")
    order = np.lexsort((position_A, row_A))
    row_A, position_A = row_A[order], position_A[order]
    start_A = starts_B[row_A]
    run_N = _supervised_run(mask_N, starts_B)
    slots_A = np.clip(run_N[start_A + position_A] - 1, 0, block_size - 1)
    return Anchors(*(torch.from_numpy(array.astype(np.int64)) for array in (row_A, position_A, start_A, slots_A)), block_size)


def draw_anchors(loss_mask_N, lengths_B, sample_ids_B, max_anchors: int, block_size: int, seed: int, epoch: int) -> Anchors:
    """Up to `max_anchors` anchors of each row, drawn without replacement from all valid positions.

    loss_mask_N  bool, tensor or array, rows after one another      lengths_B, sample_ids_B  int64
    A row with fewer valid positions gives them all; a row with none gives none. The result may be empty.
    """
    if max_anchors < 1:
        raise ValueError(f"max_anchors is {max_anchors}; it must be at least 1")
    mask_N, lengths_B, starts_B = _ragged(loss_mask_N, lengths_B)
    sample_ids_B = np.asarray(sample_ids_B, np.int64)
    if sample_ids_B.shape != lengths_B.shape:
        raise ValueError(f"{sample_ids_B.size} sample ids for {lengths_B.size} rows; there must be one a row")
    candidate_C = np.flatnonzero(_supervised_run(mask_N, starts_B) >= 2)
    row_C = np.searchsorted(starts_B, candidate_C, side="right") - 1
    position_C = candidate_C - starts_B[row_C]
    key_C = _hash(seed, epoch, sample_ids_B[row_C], position_C)
    order = np.lexsort((position_C, key_C, row_C))
    per_row = np.bincount(row_C, minlength=lengths_B.size)
    rank_C = np.arange(order.size) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    kept = order[rank_C < max_anchors]
    return place_anchors(row_C[kept], position_C[kept], mask_N, lengths_B, block_size)


def _ragged(loss_mask_N, lengths_B) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    mask_N, lengths_B = np.asarray(loss_mask_N).astype(bool), np.asarray(lengths_B, np.int64)
    if lengths_B.size == 0 or lengths_B.min() < 1:
        raise ValueError(f"row lengths must all be at least 1, got {lengths_B.tolist()[:8]}")
    if mask_N.shape != (lengths_B.sum(),):
        raise ValueError(f"the loss mask has shape {mask_N.shape}, but the row lengths sum to {lengths_B.sum()}; give real tokens only")
    return mask_N, lengths_B, np.cumsum(lengths_B) - lengths_B


def _supervised_run(mask_N: np.ndarray, starts_B: np.ndarray) -> np.ndarray:
    """Number of supervised tokens from each position on, up to the first unsupervised one or the row's end."""
    index = np.arange(mask_N.size)
    stops = np.flatnonzero(~mask_N)
    barriers = np.unique(np.concatenate([stops, starts_B, [mask_N.size]]))
    next_barrier = barriers[np.searchsorted(barriers, index, side="right")]
    return np.where(mask_N, next_barrier - index, 0)


def _hash(seed: int, epoch: int, sample_id: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Uniform 64-bit key of (seed, epoch, sample, position): splitmix64's finaliser applied after each field (Steele et al. 2014)."""
    key = np.zeros(position.shape, np.uint64)
    for field in (seed, epoch, sample_id, position):
        key = _splitmix64(key ^ (np.asarray(field, np.int64).astype(np.uint64)))
    return key


def _splitmix64(value: np.ndarray) -> np.ndarray:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
