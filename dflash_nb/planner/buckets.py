"""Cut the length axis into buckets: the best cuts for every count from one exact dynamic programme, and the plan that reports them.

A bucket is ``[lo, hi)``. The last edge lies above the longest sample, so a length of 8192 needs a last edge of 8193. The expected
cost of buckets adds up, so the best K cuts are the best K-1 cuts of everything below plus one bucket, for every place of that
bucket: the optimum over all splits on the grid, not a local one. All counts come from the same pass.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.home import write_aside
from dflash_nb.planner.expectation import MODELS, BatchCost, BucketError, Limits, bucket_costs, padded_tokens

REFERENCE_BOUNDARIES = (0, 770, 1216, 1728, 2432, 3296, 8192)
OBJECTIVES = ("padding", "time")
MOST_BUCKETS = 256
MIXING_PRICE = 0.6


@dataclass(frozen=True)
class BucketRow:
    """One bucket ``[lo, hi)``. Lengths in tokens; batch_size, expected_padded and batches are expectations under the plan's model.

    expected_padded: padded tokens for each sample. efficiency: mean / expected_padded.
    """

    lo: int
    hi: int
    samples: int
    tokens: int
    mean: float
    batch_size: float
    expected_padded: float
    efficiency: float
    batches: float


@dataclass(frozen=True)
class BucketPlan:
    """Cuts, what each bucket is expected to cost, and what that was computed under. ``why`` is what ``auto`` weighed."""

    boundaries: tuple[int, ...]
    rows: tuple[BucketRow, ...]
    token_budget: int
    max_batch: int
    pad_multiple: int
    objective: str = "padding"
    model: str = "packing"
    why: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Real tokens of an epoch."""
        return sum(row.tokens for row in self.rows)

    @property
    def efficiency(self) -> float:
        """Real tokens over padded tokens."""
        return self.tokens / sum(row.samples * row.expected_padded for row in self.rows)

    @property
    def batches(self) -> float:
        """Batches of an epoch."""
        return sum(row.batches for row in self.rows)

    @property
    def fill(self) -> float:
        """Real tokens over batches x token budget."""
        return self.tokens / (self.batches * self.token_budget)

    @property
    def mates_again(self) -> float:
        """Share of the pairs of samples in one batch that are expected to share a batch again in the next epoch."""
        pairs = [row.samples * (row.batch_size - 1) for row in self.rows]
        again = [(row.batch_size - 1) / (row.samples - 1) if row.samples > 1 else 0.0 for row in self.rows]
        return sum(p * a for p, a in zip(pairs, again, strict=True)) / sum(pairs) if sum(pairs) else 0.0

    def table(self) -> list[dict[str, Any]]:
        """The rows as plain dicts."""
        return [asdict(row) for row in self.rows]

    def to_json(self) -> dict[str, Any]:
        """Plain values, with the totals for whoever reads the file."""
        totals = {name: getattr(self, name) for name in ("efficiency", "batches", "fill", "mates_again")}
        return {"format": 1} | asdict(self) | {"boundaries": list(self.boundaries), "rows": self.table(), "totals": totals}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "BucketPlan":
        """The plan of ``to_json``.

        Raises:
            BucketError: something is missing or another format.
        """
        if not isinstance(values, dict) or values.get("format") != 1:
            raise BucketError("not a bucket plan: expected the JSON of BucketPlan.save, with format 1")
        try:
            rows = tuple(BucketRow(**row) for row in values["rows"])
            rest = {name: values[name] for name in ("token_budget", "max_batch", "pad_multiple", "objective", "model", "why")}
            return cls(tuple(int(edge) for edge in values["boundaries"]), rows, **rest)
        except (KeyError, TypeError, ValueError) as error:
            raise BucketError(f"not a whole bucket plan: {error}") from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``buckets.json``, whole or not at all."""
        path = Path(path)
        with write_aside(path) as aside:
            aside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BucketPlan":
        """Read what ``save`` wrote.

        Raises:
            BucketError: the file is not a bucket plan; it names the file.
        """
        try:
            return cls.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as error:
            raise BucketError(f"{path}: {error}") from error


def bucket_of(lengths: np.ndarray, boundaries: Sequence[int]) -> np.ndarray:
    """The bucket of each length, int32[n]: the only place where a length meets an edge. Edges belong to the bucket above them.

    Raises:
        BucketError: a length is in no bucket; it names the row.
    """
    lengths = np.asarray(lengths)
    bucket = np.searchsorted(np.asarray(boundaries, np.int64), lengths, "right") - 1
    outside = (bucket < 0) | (bucket >= len(boundaries) - 1)
    if outside.any():
        row = int(np.argmax(outside))
        raise BucketError(
            f"row {row} has length {lengths.flat[row]}, outside the buckets [{boundaries[0]}, {boundaries[-1]}): "
            f"{int(outside.sum()):,} of {lengths.size:,} rows. Raise the last edge or drop these rows."
        )
    return bucket.astype(np.int32)


def full_boundaries(edges: Sequence[int], histogram: LengthHistogram) -> tuple[int, ...]:
    """Edges from 0 to above the longest sample, without those that leave a bucket empty.

    0 is added in front. A last edge equal to the longest length is raised by one; below it, longest + 1 is added.
    """
    edges = [0, *(int(edge) for edge in edges if edge != 0)]
    if edges[-1] == histogram.max:
        edges[-1] += 1
    elif edges[-1] < histogram.max:
        edges.append(histogram.max + 1)
    _, first = np.unique(np.searchsorted(histogram.lengths, edges), return_index=True)
    return tuple(edges[place] for place in first)


def evaluate_buckets(
    histogram: LengthHistogram,
    boundaries: Sequence[int],
    token_budget: int = 49152,
    max_batch: int = 64,
    pad_multiple: int = 1,
    model: str = "packing",
) -> BucketPlan:
    """What given cuts are expected to cost.

    boundaries: increasing edges, inner ones or all. Edges that leave a bucket empty are left out.
    model: ``packing`` follows the greedy packer; ``reference`` gives every batch floor(budget / mean) rows.

    Raises:
        BucketError: edges that do not increase, an unknown model, or a sample longer than the budget.
    """
    limits = Limits(token_budget, max_batch, pad_multiple)
    check_fit(histogram, limits)
    return _plan(histogram, _increasing(boundaries), limits, "padding", model, {})


def optimize_buckets(
    histogram: LengthHistogram,
    count: int | str = "auto",
    token_budget: int = 49152,
    max_batch: int = 64,
    pad_multiple: int = 1,
    objective: str = "padding",
    cost: Any = None,
    grid: int = 32,
    model: str = "packing",
) -> BucketPlan:
    """The cuts with the lowest expected cost of all splits on the grid.

    count: number of buckets, or ``auto``, which takes the count with the lowest padding + 0.6 / sqrt(batches per bucket). If the
        lengths do not allow so many, there are fewer.
    objective: ``padding`` (padded tokens) or ``time`` (seconds, by ``cost.batch_seconds(rows, padded_lengths)``).
    grid: a cut lies just above a multiple of this many tokens; ``pad_multiple`` widens it to its own multiples.

    Raises:
        BucketError: a parameter outside its range, or a sample longer than the budget.
    """
    limits = Limits(token_budget, max_batch, pad_multiple)
    check_fit(histogram, limits)
    batch_cost = _batch_cost(objective, cost)
    if count == "auto":
        best = best_cuts(histogram, MOST_BUCKETS, limits, batch_cost, grid, model)
        chosen, why = _choose(best, histogram, limits, batch_cost)
    else:
        best = best_cuts(histogram, _at_least_one("count", count), limits, batch_cost, grid, model)
        chosen, why = len(best) - 1, {}
    return _plan(histogram, best[chosen].boundaries, limits, objective, model, why)


@dataclass(frozen=True)
class Cuts:
    """The best cuts for one count: their expected cost and batches of an epoch."""

    boundaries: tuple[int, ...]
    cost: float
    batches: float


def best_cuts(
    histogram: LengthHistogram, most: int, limits: Limits, batch_cost: BatchCost = padded_tokens, grid: int = 32, model: str = "packing"
) -> list[Cuts]:
    """The best cuts into 1, 2, .. ``most`` buckets, as far as the grid and the lengths allow."""
    _check_model(model)
    edges = _candidate_edges(histogram, limits, _at_least_one("grid", grid))
    splits = np.searchsorted(histogram.lengths, edges)
    most = min(most, len(edges) - 1)
    samples_below = np.concatenate([[0], np.cumsum(histogram.counts)])[splits].astype(float)
    cost_KE = np.full((most + 1, len(edges)), np.inf)
    batches_KE = np.zeros_like(cost_KE)
    before_KE = np.zeros(cost_KE.shape, np.int64)
    cost_KE[0, 0] = 0.0
    layers = np.arange(most)
    costs = bucket_costs(histogram.lengths, histogram.counts, splits, limits, batch_cost, model)
    for upper, (cost_L, rows_L) in enumerate(costs, start=1):
        through_KL = cost_KE[:-1, :upper] + cost_L
        lower_K = through_KL.argmin(axis=1)
        batches_L = (samples_below[upper] - samples_below[:upper]) / rows_L
        before_KE[1:, upper] = lower_K
        cost_KE[1:, upper] = through_KL[layers, lower_K]
        batches_KE[1:, upper] = batches_KE[layers, lower_K] + batches_L[lower_K]
    return [Cuts(tuple(edges[_path(before_KE, k)].tolist()), float(cost_KE[k, -1]), float(batches_KE[k, -1])) for k in range(1, most + 1)]


def _path(before_KE: np.ndarray, count: int) -> list[int]:
    path = [before_KE.shape[1] - 1]
    for k in range(count, 0, -1):
        path.append(int(before_KE[k, path[-1]]))
    return path[::-1]


def _candidate_edges(histogram: LengthHistogram, limits: Limits, grid: int) -> np.ndarray:
    """0, one above each multiple of the grid, and above the longest; of edges that split the samples alike, the lowest.

    One above, since a bucket that ends on a multiple pads to it, and the row counts of a batch change there.
    """
    step = -(-grid // limits.pad_multiple) * limits.pad_multiple
    edges = np.append(np.arange(histogram.min // step * step, histogram.max, step) + 1, histogram.max + 1)
    edges = np.concatenate([[0], edges[edges > histogram.min]])
    _, first = np.unique(np.searchsorted(histogram.lengths, edges), return_index=True)
    return edges[first]


def _choose(best: list[Cuts], histogram: LengthHistogram, limits: Limits, batch_cost: BatchCost) -> tuple[int, dict[str, Any]]:
    """The count with the lowest sum of avoidable cost and the price of mixing less, and the weighed counts."""
    padded = limits.padded(histogram.lengths)
    rows = limits.rows(padded)
    floor = float((histogram.counts * batch_cost(rows, padded) / rows).sum())
    weighed = [
        {"count": k, "avoidable": 1 - floor / cuts.cost, "batches_per_bucket": cuts.batches / k, "boundaries": None}
        for k, cuts in enumerate(best, start=1)
    ]
    for entry in weighed:
        del entry["boundaries"]
        entry["score"] = entry["avoidable"] + MIXING_PRICE / entry["batches_per_bucket"] ** 0.5
    chosen = min(range(len(best)), key=lambda place: weighed[place]["score"])
    return chosen, {"weighed": weighed}


def _plan(histogram: LengthHistogram, edges: Sequence[int], limits: Limits, objective: str, model: str, why: dict[str, Any]) -> BucketPlan:
    _check_model(model)
    boundaries = full_boundaries(edges, histogram)
    splits = np.searchsorted(histogram.lengths, boundaries)
    rows = [
        _row(histogram.lengths[first:last], histogram.counts[first:last], lo, hi, limits, model)
        for lo, hi, first, last in zip(boundaries, boundaries[1:], splits, splits[1:], strict=False)
    ]
    return BucketPlan(boundaries, tuple(rows), limits.token_budget, limits.max_batch, limits.pad_multiple, objective, model, why)


def _row(lengths: np.ndarray, counts: np.ndarray, lo: int, hi: int, limits: Limits, model: str) -> BucketRow:
    ((cost_L, rows_L),) = bucket_costs(lengths, counts, np.array([0, len(lengths)]), limits, model=model)
    samples, tokens, padded, batch_size = int(counts.sum()), int(lengths @ counts), float(cost_L[0]), float(rows_L[0])
    return BucketRow(lo, hi, samples, tokens, tokens / samples, batch_size, padded / samples, tokens / padded, samples / batch_size)


def check_fit(histogram: LengthHistogram, limits: Limits) -> None:
    """Refuse lengths of which not even one row fits."""
    too_long = limits.padded(histogram.lengths) > limits.token_budget
    if too_long.any():
        raise BucketError(
            f"{int(histogram.counts[too_long].sum()):,} samples are longer than token_budget {limits.token_budget} when padded to a "
            f"multiple of {limits.pad_multiple}; the longest has {histogram.max} tokens. Raise token_budget, or truncate with "
            f"histogram.clip({int(limits.longest(1))})."
        )


def _batch_cost(objective: str, cost: Any) -> BatchCost:
    if objective not in OBJECTIVES:
        raise BucketError(f"objective must be one of {', '.join(OBJECTIVES)}, not {objective!r}")
    if objective == "padding":
        return padded_tokens
    if not hasattr(cost, "batch_seconds"):
        raise BucketError("objective 'time' needs cost, a model with batch_seconds(rows, padded_lengths), for example CostModel()")
    return cost.batch_seconds


def _check_model(model: str) -> None:
    if model not in MODELS:
        raise BucketError(f"model must be one of {', '.join(MODELS)}, not {model!r}")


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise BucketError(f"{name} must be a whole number of at least 1{', or auto' if name == 'count' else ''}, not {value!r}")
    return int(value)


def _increasing(boundaries: Sequence[int]) -> list[int]:
    edges = [int(edge) for edge in boundaries]
    if any(low >= high for low, high in zip(edges, edges[1:], strict=False)) or (edges and edges[0] < 0):
        raise BucketError(f"edges must increase from 0 or above, not {edges}")
    return edges
