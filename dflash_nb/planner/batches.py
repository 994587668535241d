"""The batches of one epoch: which samples go together, how long they are padded, and in which order they run.

A plan is a pure function of lengths, options, seed and epoch, kept as flat arrays. 902,087 lengths are planned in about 0.05 s,
so nothing is cached or saved: whoever needs the plan makes it again, and a resumed run needs only its position.
Batches are cut greedily, which leaves the budget's last few percent unused (fill .95 of at most .956 for any padded plan on the
reference lengths); a solver would gain less than one point of it and would make mates predictable.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dflash_nb.planner.buckets import bucket_of
from dflash_nb.planner.documents import pack_documents
from dflash_nb.planner.options import PlanError, PlanOptions
from dflash_nb.planner.order import batch_order
from dflash_nb.planner.packing import pack_padded
from dflash_nb.planner.ranks import RankBatches, share_batches
from dflash_nb.planner.samples import Samples, select_samples

MIXED = -1
CHUNK = 1 << 17


@dataclass(frozen=True)
class PlannedBatch:
    """One batch: the samples, the padded length of its rows (of the one row, if packed), its bucket or -1, its real tokens."""

    index: int
    sample_ids: np.ndarray
    padded_length: int
    bucket: int
    real_tokens: int


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """One epoch. Batch b holds sample_ids[offsets[b]:offsets[b + 1]].

    sample_ids int64[n]; offsets int64[batches + 1]; padded_lengths, real_tokens int64[batches]; bucket_ids int32[batches], -1
    where a batch spans several buckets or no boundaries were given. excluded: ids that do not run, by reason (``too_long``,
    ``unsupervised``). truncated: ids that run cut to the longest allowed length.
    """

    sample_ids: np.ndarray
    offsets: np.ndarray
    padded_lengths: np.ndarray
    bucket_ids: np.ndarray
    real_tokens: np.ndarray
    seed: int
    epoch: int
    options: PlanOptions
    excluded: dict[str, np.ndarray] = field(default_factory=dict)
    truncated: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.padded_lengths)

    @property
    def strategy(self) -> str:
        return self.options.strategy

    @property
    def rows(self) -> np.ndarray:
        """Samples of each batch, int64[batches]."""
        return np.diff(self.offsets)

    @property
    def padded_tokens(self) -> np.ndarray:
        """Tokens that each batch computes, int64[batches]: rows x padded length, or the one row of a packed plan."""
        return self.padded_lengths if self.strategy == "packed" else self.rows * self.padded_lengths

    @property
    def efficiency(self) -> float:
        """Padding efficiency: real tokens / computed tokens."""
        return int(self.real_tokens.sum()) / int(self.padded_tokens.sum())

    @property
    def fill(self) -> float:
        """Real tokens / (batches x token budget)."""
        return int(self.real_tokens.sum()) / (len(self) * self.options.token_budget)

    def batch(self, index: int) -> PlannedBatch:
        """The batch at ``index``, 0 to len - 1; a view, nothing is copied."""
        if not 0 <= index < len(self):
            raise IndexError(f"batch {index} of a plan with {len(self)} batches")
        rows = self.sample_ids[self.offsets[index] : self.offsets[index + 1]]
        return PlannedBatch(index, rows, int(self.padded_lengths[index]), int(self.bucket_ids[index]), int(self.real_tokens[index]))

    def ranks(self, world: int | None = None, seconds: np.ndarray | None = None, remainder: str = "repeat") -> RankBatches:
        """The batches of each rank, by padded tokens or by modelled ``seconds`` of each batch; ``world`` as planned if not given."""
        cost = self.padded_tokens if seconds is None else seconds
        return share_batches(cost, self.options.world if world is None else world, self.options.window, remainder)

    def rank(self, rank: int, world: int | None = None) -> np.ndarray:
        """Indices int64[steps] of the batches that ``rank`` runs, in order; as many for every rank."""
        return self.ranks(world).batches[:, rank]

    def sha256(self) -> str:
        """Hash of everything that runs, equal for equal plans on every machine."""
        digest = hashlib.sha256()
        for values in (self.sample_ids, self.offsets, self.padded_lengths):
            digest.update(np.ascontiguousarray(values, dtype="<i8"))
        return digest.hexdigest()


def plan_epoch(
    lengths: np.ndarray,
    strategy: str = "bucketed",
    boundaries: Iterable[int] | None = None,
    *,
    seed: int = 0,
    epoch: int = 0,
    n_supervised: np.ndarray | None = None,
    **options: Any,
) -> BatchPlan:
    """Plan one epoch: every eligible sample exactly once, no batch above a budget.

    lengths: int[n] tokens of each sample, any integer width. n_supervised: int[n] tokens with a loss; samples with none are left
    out. options: the fields of ``PlanOptions`` (token_budget, max_batch, pad_multiple, order, window, too_long, ...).
    Raises PlanError, naming rows or the option, for lengths or options from which no plan can be made.
    """
    chosen = PlanOptions(strategy=strategy, boundaries=boundaries, **options)
    samples = select_samples(lengths, n_supervised, chosen)
    longest = int(samples.lengths.max())
    if chosen.boundaries is not None and longest >= chosen.boundaries[-1]:
        raise PlanError(f"the longest sample has {longest} tokens; the last boundary must be above it, not {chosen.boundaries[-1]}")
    composition, ordering = _generators(seed, epoch)
    visit, offsets = _compose(samples, chosen, composition)
    ordered = _order_batches(samples, visit, offsets, chosen, ordering)
    return _describe(samples, *ordered, chosen, seed, epoch)


def total_batches(lengths: np.ndarray, epochs: Iterable[int] | int, **options: Any) -> list[int]:
    """Batches of each epoch. Epochs differ by a few, so a schedule counts them all instead of multiplying the first."""
    return [len(plan_epoch(lengths, epoch=epoch, **options)) for epoch in (range(epochs) if isinstance(epochs, int) else epochs)]


def _generators(seed: int, epoch: int) -> tuple[np.random.Generator, np.random.Generator]:
    """One stream for what goes together and one for the order, so that both orders have the same batches."""
    if seed < 0 or epoch < 0:
        raise PlanError(f"seed and epoch must not be negative: seed {seed}, epoch {epoch}")
    return tuple(np.random.Generator(np.random.SFC64(np.random.SeedSequence([seed, epoch, use]))) for use in (0, 1))


def _compose(samples: Samples, options: PlanOptions, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Put samples together: positions int32[n] in visiting order, and the offsets of the batches in it."""
    padded = samples.padded
    if options.strategy == "bucketed":
        return _bucketed(samples, options, rng)
    if options.strategy == "sorted":
        visit = _by_length(padded, np.arange(len(padded), dtype=np.int32))
    else:
        visit = rng.permutation(len(padded)).astype(np.int32)
    if options.strategy == "packed":
        row_tokens = options.token_budget // options.pad_multiple * options.pad_multiple
        return pack_documents(samples.lengths, visit, row_tokens, options.most_rows, options.pool_size)
    if options.strategy == "pooled":
        _sort_pools(padded, visit, options.pool_size)
    return visit, pack_padded(padded[visit], options.token_budget, options.most_rows)


def _by_length(padded: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Positions sorted by padded length along the last axis, ties by position: the same on every machine."""
    keys = padded[positions].astype(np.int64) << 32
    keys |= positions
    keys.sort(axis=-1)
    return keys.astype(np.int32)


def _sort_pools(padded: np.ndarray, visit: np.ndarray, pool_size: int) -> None:
    """Sort inside pools, up and down by turns, so that a batch across the border of two pools has equal lengths too. In place."""
    step = -(-CHUNK // (2 * pool_size)) * 2 * pool_size
    for low in range(0, len(visit), step):
        part = visit[low : low + step]
        whole = part[: len(part) // pool_size * pool_size].reshape(-1, pool_size)
        rest = part[whole.size :]
        whole[:], rest[:] = _by_length(padded, whole), _by_length(padded, rest)
        whole[1::2] = whole[1::2, ::-1]
        if len(whole) % 2:
            rest[:] = rest[::-1]


def _bucketed(samples: Samples, options: PlanOptions, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle inside each bucket, pack each bucket, then pack the last batches of all buckets again if that saves any."""
    longest = int(samples.lengths.max())
    bucket_of_length = bucket_of(np.arange(longest + 1), options.boundaries)
    buckets = bucket_of_length.astype(np.min_scalar_type(len(options.boundaries)))[samples.lengths]
    visit = np.argsort(buckets, kind="stable")
    ends = np.cumsum(np.bincount(buckets, minlength=len(options.boundaries) - 1))
    for start, end in zip(np.concatenate([[0], ends[:-1]]), ends, strict=True):
        rng.shuffle(visit[start:end])
    visit = visit.astype(np.int32)
    ends = np.unique(ends[ends > 0])
    offsets = pack_padded(samples.padded[visit], options.token_budget, options.most_rows, ends)
    last = np.searchsorted(offsets, ends) - 1
    tails = np.zeros(len(visit), dtype=bool)
    for start, end in zip(offsets[last], ends, strict=True):
        tails[start:end] = True
    tail_visit = _by_length(samples.padded, visit[tails])
    tail_offsets = pack_padded(samples.padded[tail_visit], options.token_budget, options.most_rows)
    if len(tail_offsets) - 1 >= len(ends):
        return visit, offsets
    sizes = np.concatenate([np.delete(np.diff(offsets), last), np.diff(tail_offsets)])
    return np.concatenate([visit[~tails], tail_visit]), np.concatenate([[0], np.cumsum(sizes)])


def _order_batches(
    samples: Samples, visit: np.ndarray, offsets: np.ndarray, options: PlanOptions, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The visiting order and offsets with whole batches moved to their place in the epoch."""
    rows = np.diff(offsets)
    mean_lengths = np.add.reduceat(samples.lengths[visit], offsets[:-1], dtype=np.int64) / rows
    running = batch_order(mean_lengths, options.order, options.window, rng)
    rows = rows[running]
    moved = np.concatenate([[0], np.cumsum(rows)])
    shift = offsets[running] - moved[:-1]
    placed = np.empty_like(visit)
    step = -(-CHUNK * len(rows) // len(visit))
    for low in range(0, len(rows), step):
        part = slice(low, low + step)
        begin, end = moved[low], moved[min(low + step, len(rows))]
        placed[begin:end] = visit[np.arange(begin, end) + np.repeat(shift[part], rows[part])]
    return placed, moved


def _describe(samples: Samples, visit: np.ndarray, offsets: np.ndarray, options: PlanOptions, seed: int, epoch: int) -> BatchPlan:
    starts = offsets[:-1]
    lengths = samples.lengths[visit]
    real = np.add.reduceat(lengths, starts, dtype=np.int64)
    longest = np.maximum.reduceat(lengths, starts)
    padded = (real if options.strategy == "packed" else longest).astype(np.int64)
    padded = -(-padded // options.pad_multiple) * options.pad_multiple
    if options.boundaries is None:
        buckets = np.full(len(starts), MIXED, dtype=np.int32)
    else:
        low = bucket_of(np.minimum.reduceat(lengths, starts), options.boundaries)
        buckets = np.where(low == bucket_of(longest, options.boundaries), low, np.int32(MIXED))
    ids = visit.astype(np.int64) if samples.ids is None else samples.ids[visit]
    return BatchPlan(ids, offsets, padded, buckets, real, seed, epoch, options, samples.excluded, samples.truncated)
