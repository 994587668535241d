"""How well batches mix: who meets again, what an optimiser step sees, and what follows what.

Every function takes planned batches (a ``BatchPlan``) or achieved ones (``AchievedBatches`` from a run log) and returns an
``Estimate``: a float that carries its noise, so that two numbers are not called different when they are not. All of them
together take 0.3 s on an epoch of 902,087 samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from dflash_nb.planner.limits import whole
from dflash_nb.progress import announced, one_work

SHUFFLES = 20
LENGTH_CLASSES = 8


class Batches(Protocol):
    """Batch b holds sample_ids[offsets[b]:offsets[b + 1]], real_tokens[b] tokens, and lies in bucket_ids[b] (-1: several)."""

    sample_ids: np.ndarray
    offsets: np.ndarray
    real_tokens: np.ndarray
    bucket_ids: np.ndarray


@dataclass(frozen=True, eq=False)
class AchievedBatches:
    """Batches that ran, in the order in which they ran."""

    sample_ids: np.ndarray
    offsets: np.ndarray
    real_tokens: np.ndarray
    bucket_ids: np.ndarray


class Estimate(float):
    """A number and its noise: one standard error, or one standard deviation under chance where the function says so."""

    noise: float

    def __new__(cls, value: float, noise: float) -> "Estimate":
        estimate = super().__new__(cls, value)
        estimate.noise = float(noise)
        return estimate

    def __repr__(self) -> str:
        return f"{float(self):.4g} ± {self.noise:.2g}"


def repeated_mates(plan_a: Batches, plan_b: Batches) -> Estimate:
    """Share of the mate pairs of ``plan_a`` that are mates in ``plan_b`` again, over all pairs. Noise: standard error over batches."""
    pairs = _pairs(np.diff(plan_a.offsets))
    return _ratio(_met_again(plan_a, *_batch_numbers(plan_a, plan_b)), pairs) if pairs.sum() else Estimate(0.0, 0.0)


def possible_mates(plan_a: Batches, plan_b: Batches) -> Estimate:
    """How many samples a sample can meet, judged by how many it meets again. Noise: standard error over batches.

    A sample with m mates in one plan and m' in the other, drawn evenly from a circle of S others, meets m m' / S again; so S is the sum
    of m m' over the sum of what was met again: the whole data for random batches, a bucket for bucketed ones, the batch itself
    for sorted ones, a harmonic mean where circles differ. Infinite when no pair met again.
    """
    batch_a, batch_b = _batch_numbers(plan_a, plan_b)
    mates_a, mates_b = np.diff(plan_a.offsets)[batch_a] - 1, np.diff(plan_b.offsets)[batch_b] - 1
    chances = np.bincount(batch_a, weights=np.where(batch_b >= 0, mates_a * mates_b, 0), minlength=len(plan_a.offsets) - 1)
    again = 2 * _met_again(plan_a, batch_a, batch_b)
    if not again.sum():
        return Estimate(np.inf, np.nan) if chances.sum() else Estimate(0.0, 0.0)
    return _ratio(chances, again)


def window_w1(plan: Batches, lengths: np.ndarray, window: int = 8) -> Estimate:
    """Mean distance between the token-length mix of ``window`` consecutive batches and that of all batches, over the mean length.

    The mix is the distribution of lengths weighted by tokens, the distance Wasserstein-1 in tokens; windows are the optimiser
    steps of one rank, counted from the first batch, whole ones only. lengths: int[samples of the data]. Noise: standard error over
    windows. 0 is a step that sees the data's mix exactly.
    """
    whole("window", window)
    rows = np.diff(plan.offsets)
    steps = max(1, len(rows) // window)
    used = plan.offsets[min(len(rows), steps * window)]
    lengths_N = np.asarray(lengths)[plan.sample_ids].astype(np.int64)
    step_N = np.repeat(np.arange(len(rows)) // window, rows)[:used]
    distance = _w1_by_group(step_N, lengths_N[:used], lengths_N) / lengths_N.mean()
    return _mean(distance)


def lag1(plan: Batches) -> Estimate:
    """Correlation of a batch's mean length with the next batch's. Noise: standard deviation for a random order, 1 / sqrt(batches).

    A batch whose mean length is not known counts as the mean of all; NaN where none is known.
    """
    means = _mean_lengths(plan)
    known = np.isfinite(means)
    centred = np.where(known, means - means[known].mean(), 0.0) if known.any() else means
    total = float(centred @ centred)
    return Estimate(float(centred[1:] @ centred[:-1]) / total if total else 0.0, 1 / np.sqrt(max(1, len(means))))


def longest_run(plan: Batches) -> Estimate:
    """Most consecutive batches of one bucket; batches that span several buckets end a run. Without buckets, of one eighth of the
    batches ranked by mean length.

    Noise: standard deviation of the longest run over random orders of the same batches (``chance_run`` is their mean).
    """
    classes = _classes(plan)
    return Estimate(_longest(classes), np.std(_shuffled_runs(classes)))


def chance_run(plan: Batches) -> Estimate:
    """The longest run that random orders of the same batches have on average. Noise: standard error over the orders tried."""
    return _mean(_shuffled_runs(_classes(plan)))


def within_batch_spread(plan: Batches, lengths: np.ndarray) -> Estimate:
    """Standard deviation of the lengths inside a batch over that of all lengths, averaged over samples: 0 for equal lengths, about 1 for
    random batches. Noise: standard error over batches."""
    rows = np.diff(plan.offsets)
    lengths_N = np.asarray(lengths)[plan.sample_ids].astype(np.float64)
    if not len(lengths_N) or not lengths_N.std():
        return Estimate(0.0, 0.0)
    means = np.add.reduceat(lengths_N, plan.offsets[:-1]) / rows
    squares = np.add.reduceat((lengths_N - np.repeat(means, rows)) ** 2, plan.offsets[:-1])
    return _ratio(rows * np.sqrt(squares / rows) / lengths_N.std(), rows)


def mixing_report(plan: Batches, lengths: np.ndarray, next_plan: Batches | None = None, window: int = 8) -> dict[str, Estimate]:
    """Every number of this module by name; those about meeting again only with the plan of another epoch."""
    numbers: dict[str, Callable[[], Estimate]] = {}
    if next_plan is not None:
        numbers = {"repeated_mates": partial(repeated_mates, plan, next_plan), "possible_mates": partial(possible_mates, plan, next_plan)}
    numbers |= {
        "w1": partial(window_w1, plan, lengths, window),
        "lag1": partial(lag1, plan),
        "longest_run": partial(longest_run, plan),
        "chance_run": partial(chance_run, plan),
        "spread": partial(within_batch_spread, plan, lengths),
    }
    with one_work():
        return {name: measure() for name, measure in announced(numbers.items(), "measuring how batches mix, numbers")}


def _batch_numbers(plan_a: Batches, plan_b: Batches) -> tuple[np.ndarray, np.ndarray]:
    """For each sample of ``plan_a``, in its order: the number of its batch there, and in ``plan_b`` or -1."""
    rows_a, rows_b = np.diff(plan_a.offsets), np.diff(plan_b.offsets)
    batch_b = np.full(1 + max(plan_a.sample_ids.max(initial=0), plan_b.sample_ids.max(initial=0)), -1, dtype=np.int64)
    batch_b[plan_b.sample_ids] = np.repeat(np.arange(len(rows_b)), rows_b)
    return np.repeat(np.arange(len(rows_a)), rows_a), batch_b[plan_a.sample_ids]


def _met_again(plan_a: Batches, batch_a: np.ndarray, batch_b: np.ndarray) -> np.ndarray:
    """Pairs of each batch of ``plan_a`` that share a batch again: c samples with the same two batch numbers are c (c - 1) / 2 pairs."""
    both = batch_b >= 0
    groups, sizes = _run_lengths(np.sort(batch_a[both] << 32 | batch_b[both]))
    return np.bincount(groups >> 32, weights=_pairs(sizes), minlength=len(plan_a.offsets) - 1)


def _pairs(sizes: np.ndarray) -> np.ndarray:
    return sizes * (sizes - 1) // 2


def _mean(values: np.ndarray) -> Estimate:
    return Estimate(values.mean(), values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0)


def _ratio(parts: np.ndarray, wholes: np.ndarray) -> Estimate:
    """Sum of parts over sum of wholes, with the standard error of a ratio estimate."""
    ratio = parts.sum() / wholes.sum()
    return Estimate(ratio, np.sqrt(((parts - ratio * wholes) ** 2).sum()) / wholes.sum())


def _mean_lengths(plan: Batches) -> np.ndarray:
    rows = np.diff(plan.offsets)
    return np.where(rows > 0, plan.real_tokens / np.maximum(rows, 1), np.nan)


def _classes(plan: Batches) -> np.ndarray:
    if (plan.bucket_ids >= 0).any():
        return plan.bucket_ids
    rank = np.empty(len(plan.bucket_ids), dtype=np.int64)
    rank[np.argsort(_mean_lengths(plan), kind="stable")] = np.arange(len(rank))
    return rank * LENGTH_CLASSES // max(1, len(rank))


def _run_lengths(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value and the length of each run of equal neighbours."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return values[starts], np.diff(starts, append=len(values))


def _longest(classes: np.ndarray) -> int:
    values, runs = _run_lengths(classes)
    return int(runs[values >= 0].max(initial=0))


def _shuffled_runs(classes: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(0)
    orders = announced(range(SHUFFLES), "measuring how batches mix, random orders")
    return np.array([_longest(rng.permutation(classes)) for _ in orders], dtype=np.float64)


def _w1_by_group(group_N: np.ndarray, lengths_N: np.ndarray, data: np.ndarray) -> np.ndarray:
    """Wasserstein-1 distance in tokens between each group's token-weighted lengths and the data's, exactly.

    It is the area between two cumulative shares. A group's share is constant between its sorted lengths, the data's rises, so
    on each such stretch they cross at most once, and the area follows from the data's integrated share at three points.
    """
    values, counts = np.unique(data, return_counts=True)
    share = np.cumsum(values * counts) / (values * counts).sum()
    area = np.concatenate([[0.0], np.cumsum(share[:-1] * np.diff(values))])

    keys = np.sort(group_N << 32 | lengths_N)
    group, low = keys >> 32, keys & 0xFFFFFFFF
    first = np.flatnonzero(np.diff(group, prepend=-1))
    last = np.append(first[1:], len(low)) - 1
    high = np.append(low[1:], values[-1])
    high[last] = values[-1]
    tokens = np.cumsum(low)
    before = (tokens - low)[first]
    sizes = last - first + 1
    level = (tokens - np.repeat(before, sizes)) / np.repeat(tokens[last] - before, sizes)

    low_at, high_at = np.searchsorted(values, low), np.searchsorted(values, high)
    cross_at = np.clip(np.searchsorted(share, level), low_at, high_at)
    below = level * (values[cross_at] - low) - (area[cross_at] - area[low_at])
    above = area[high_at] - area[cross_at] - level * (high - values[cross_at])
    return np.add.reduceat(below + above, first) + area[low_at[first]]
