"""Which samples go together in an epoch: a visiting order for each strategy, cut into batches.

The order in which the batches run is decided elsewhere. A sample's place is drawn once and its length is looked up once: at 100
million samples every further pass over memory in random order costs a second.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dflash_nb.planner.buckets import bucket_of
from dflash_nb.planner.documents import pack_documents
from dflash_nb.planner.options import PlanOptions
from dflash_nb.planner.packing import pack_padded
from dflash_nb.planner.samples import Samples
from dflash_nb.progress import announced

CHUNK = 1 << 17
COUNTED = 1 << 16


@dataclass(frozen=True)
class Composition:
    """Batch b holds positions[offsets[b]:offsets[b + 1]] of the samples. positions, lengths int32[n]; offsets int64[batches + 1]."""

    positions: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray


def compose(samples: Samples, options: PlanOptions, rng: np.random.Generator) -> Composition:
    """Put every sample into one batch, by the strategy of the options."""
    if options.strategy == "packed":
        row_tokens = options.token_budget // options.pad_multiple * options.pad_multiple
        positions, offsets = pack_documents(
            samples.lengths, _shuffle(len(samples.lengths), rng), row_tokens, options.most_rows, options.pool_size
        )
        return Composition(positions, samples.lengths[positions], offsets)
    if options.strategy == "bucketed":
        positions, group_ends = _shuffle_buckets(samples.lengths, options.boundaries, rng)
        return _merge_tails(_pack(samples, positions, options, group_ends), group_ends, options)
    if options.strategy == "sorted":
        positions = _by_length(samples.lengths, np.arange(len(samples.lengths), dtype=np.int32))
    else:
        positions = _shuffle(len(samples.lengths), rng)
    if options.strategy == "pooled":
        _sort_pools(samples.lengths, positions, options.pool_size)
    return _pack(samples, positions, options)


def _pack(samples: Samples, positions: np.ndarray, options: PlanOptions, group_ends: np.ndarray | None = None) -> Composition:
    lengths = samples.lengths[positions]
    return Composition(positions, lengths, pack_padded(options.padded(lengths), options.token_budget, options.most_rows, group_ends))


def _by_length(lengths: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Positions sorted by length along the last axis, ties by position: the same on every machine."""
    keys = lengths[positions].astype(np.int64) << 32
    keys |= positions
    keys.sort(axis=-1)
    return keys.astype(np.int32)


def _sort_pools(lengths: np.ndarray, positions: np.ndarray, pool_size: int) -> None:
    """Sort inside pools, up and down by turns, so that a batch across the border of two pools has equal lengths too. In place."""
    step = -(-CHUNK // (2 * pool_size)) * 2 * pool_size
    for low in announced(range(0, len(positions), step), "planning, sorting pools"):
        part = positions[low : low + step]
        pools = part[: len(part) // pool_size * pool_size].reshape(-1, pool_size)
        rest = part[pools.size :]
        pools[:], rest[:] = _by_length(lengths, pools), _by_length(lengths, rest)
        pools[1::2] = pools[1::2, ::-1]
        if len(pools) % 2:
            rest[:] = rest[::-1]


def _shuffle_buckets(lengths: np.ndarray, boundaries: tuple[int, ...], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions bucket by bucket, shuffled inside each, and the ends of the buckets that hold any."""
    bucket_of_length = bucket_of(np.arange(int(lengths.max()) + 1), boundaries).astype(np.min_scalar_type(len(boundaries)))
    return _shuffle_groups(bucket_of_length[lengths], rng)


def _shuffle(n: int, rng: np.random.Generator) -> np.ndarray:
    """A random permutation int32[n], by random groups small enough for the processor's cache: any order is equally likely."""
    groups = min(256, 1 << (n // CHUNK).bit_length())
    return _shuffle_groups(np.frombuffer(rng.bytes(n), dtype=np.uint8) & np.uint8(groups - 1), rng)[0]


def _shuffle_groups(group: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Positions int32[n] group by group, shuffled inside each, and the ends of the groups that have any. group: unsigned int[n].

    A counting sort by chunks: one argsort of the whole would touch four times the memory, and page faults are half of its time.
    """
    n, groups = len(group), int(group.max()) + 1
    parts = [slice(low, low + COUNTED) for low in range(0, n, COUNTED)]
    ends = np.cumsum(sum(np.bincount(group[part], minlength=groups) for part in parts))
    positions, filled = np.empty(n, dtype=np.int32), np.concatenate([[0], ends[:-1]])
    for part in announced(parts, "planning, grouping samples"):
        counts = np.bincount(group[part], minlength=groups)
        place = np.repeat(filled - (np.cumsum(counts) - counts), counts)
        place += np.arange(len(place))
        positions[place] = np.argsort(group[part], kind="stable") + part.start
        filled += counts
    ends = np.unique(ends[ends > 0])
    for start, end in announced([*pairwise([0, *ends.tolist()])], "planning, shuffling groups"):
        positions[start:end] = positions[start:end][rng.permutation(end - start)]
    return positions, ends


def _merge_tails(composed: Composition, group_ends: np.ndarray, options: PlanOptions) -> Composition:
    """Sort the last batches of all buckets together and pack them again, if that saves a batch: buckets come in order of length, so
    it never takes more. The arrays are changed in place."""
    positions, lengths, offsets = composed.positions, composed.lengths, composed.offsets
    last = np.searchsorted(offsets, group_ends) - 1
    tails = [slice(start, end) for start, end in zip(offsets[last], group_ends, strict=True)]
    tail_positions = np.concatenate([positions[tail] for tail in tails])
    tail_lengths = np.concatenate([lengths[tail] for tail in tails])
    order = np.lexsort((tail_positions, tail_lengths))
    tail_offsets = pack_padded(options.padded(tail_lengths[order]), options.token_budget, options.most_rows)
    if len(tail_offsets) > len(group_ends):
        return composed
    moved = 0
    for start, tail in zip([0, *group_ends[:-1]], tails, strict=True):
        end = moved + tail.start - start
        positions[moved:end], lengths[moved:end] = positions[start : tail.start], lengths[start : tail.start]
        moved = end
    positions[moved:], lengths[moved:] = tail_positions[order], tail_lengths[order]
    sizes = np.concatenate([np.delete(np.diff(offsets), last), np.diff(tail_offsets)])
    return Composition(positions, lengths, np.concatenate([[0], np.cumsum(sizes)]))
