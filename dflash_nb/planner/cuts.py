"""The best cuts by exact dynamic programmes over the expected cost of buckets: for every count, and with a price on poor mixing.

Costs of buckets add up. So the best K cuts of the lengths up to an edge are, for some lower edge, the best K-1 cuts up to there
and one bucket in between: the global optimum of all splits on the grid. The costs of all buckets that end at an edge
arrive as one row; all counts take their minimum over it and it is forgotten. 902,087 lengths and 240 edges take 0.3 s of CPU,
with all 5,378 lengths as edges 45 s and 65 MB.

Buckets mix less the fewer batches they have: the chance that a mate is met again is about rows of a batch / samples of the bucket.
Its mean over all samples adds up over buckets too. ``mixing_cuts`` weighs both, and so finds cuts that no count alone gives:
on the reference lengths 109 buckets in which .31 % of the mates meet again, against .44 % in the cheapest 109; padding is 1.02 and
.93 %. Any price of mixing from 0.34 to 0.46 leads to 80 to 127 buckets, 98.6 to 99.1 % efficiency and .22 to .35 % of mates again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.epoch_cost import epoch_costs
from dflash_nb.planner.limits import BatchCost, Limits, padded_tokens

MIXING_PRICE = 0.4
SHAPES_PRICE = 0.005
RULE = (
    f"of all cuts and counts those with the lowest avoidable cost + {MIXING_PRICE} / sqrt(batches per bucket): one more cut saves "
    "padding, and leaves the samples of two buckets fewer batches to meet in. With pad_multiple, cuts that give every bucket one batch "
    f"size where they add at most {SHAPES_PRICE} to that: a padded length then has two shapes at most, that of full batches and of a tail"
)


@dataclass(frozen=True)
class Cuts:
    """Boundaries, and what is expected of them.

    cost: of an epoch. batches_per_bucket: in the bucket of a sample, harmonic mean over samples.
    """

    boundaries: tuple[int, ...]
    cost: float
    batches_per_bucket: float

    @property
    def count(self) -> int:
        return len(self.boundaries) - 1


def best_cuts(
    histogram: LengthHistogram,
    most: int,
    limits: Limits,
    batch_cost: BatchCost = padded_tokens,
    grid: int | None = None,
    model: str = "packing",
    shape_cost: float = 0.0,
) -> list[Cuts]:
    """The cheapest cuts into 1, 2, .. ``most`` buckets, as far as the grid and the lengths allow."""
    edges = candidate_edges(histogram, limits, grid)
    most = min(most, len(edges) - 1)
    every_K = np.arange(most)
    cost_KE = np.full((most + 1, len(edges)), np.inf)
    cost_KE[0, 0] = 0.0
    repeat_KE = np.zeros_like(cost_KE)
    lower_KE = np.zeros(cost_KE.shape, np.int64)
    for upper, (cost_L, repeat_L) in enumerate(_bucket_rows(histogram, edges, limits, batch_cost, model, shape_cost), start=1):
        through_KL = cost_KE[:-1, :upper] + cost_L
        lower_K = through_KL.argmin(axis=1)
        lower_KE[1:, upper] = lower_K
        cost_KE[1:, upper] = through_KL[every_K, lower_K]
        repeat_KE[1:, upper] = repeat_KE[every_K, lower_K] + repeat_L[lower_K]
    found = []
    for count in range(1, most + 1):
        path = [len(edges) - 1]
        for buckets in range(count, 0, -1):
            path.append(lower_KE[buckets, path[-1]])
        found.append(Cuts(tuple(edges[path[::-1]].tolist()), float(cost_KE[count, -1]), float(1 / repeat_KE[count, -1])))
    return found


def auto_cuts(
    histogram: LengthHistogram,
    limits: Limits,
    batch_cost: BatchCost = padded_tokens,
    grid: int | None = None,
    model: str = "packing",
    shape_cost: float = 0.0,
) -> tuple[Cuts, list[dict[str, float]]]:
    """The cuts that ``RULE`` picks, and what it weighed."""
    chosen, weighed = choose(mixing_cuts(histogram, limits, batch_cost, grid, model, shape_cost), histogram, limits, batch_cost)
    one_size = mixing_cuts(histogram, limits, batch_cost, grid, model, shape_cost, one_size=True) if limits.pad_multiple > 1 else []
    if one_size:
        few_shapes, weighed_few = choose(one_size, histogram, limits, batch_cost)
        if min(entry["sum"] for entry in weighed_few) <= min(entry["sum"] for entry in weighed) + SHAPES_PRICE:
            return few_shapes, weighed_few
    return chosen, weighed


def mixing_cuts(
    histogram: LengthHistogram,
    limits: Limits,
    batch_cost: BatchCost = padded_tokens,
    grid: int | None = None,
    model: str = "packing",
    shape_cost: float = 0.0,
    one_size: bool = False,
) -> list[Cuts]:
    """The cuts that win at some price of mixing, fewest buckets first; of all others one is cheaper or mixes better.

    one_size: only buckets whose shortest and longest samples allow as many rows; no cuts where the grid has none such.

    The prices are the marginal ones of ``RULE`` from 1 to 10^8 batches a bucket, in steps of 19 %. Its optimum is among them: where a
    concave charge is lowest, the straight charge with its slope there is lowest too.
    """
    edges = candidate_edges(histogram, limits, grid)
    price_P = unavoidable_cost(histogram, limits, batch_cost) * MIXING_PRICE / 2 * 2 ** (np.arange(56) / 4)
    every_P = np.arange(len(price_P))
    cost_PE, repeat_PE = np.zeros((2, len(price_P), len(edges)))
    lower_PE = np.zeros(cost_PE.shape, np.int64)
    splits, rows = np.searchsorted(histogram.lengths, edges), limits.rows(limits.padded(histogram.lengths))
    for upper, (cost_L, repeat_L) in enumerate(_bucket_rows(histogram, edges, limits, batch_cost, model, shape_cost), start=1):
        if one_size:
            cost_L = np.where(rows[splits[:upper]] == rows[splits[upper] - 1], cost_L, np.inf)
        sum_PL = cost_PE[:, :upper] + cost_L + price_P[:, None] * (repeat_PE[:, :upper] + repeat_L)
        lower_P = sum_PL.argmin(axis=1)
        lower_PE[:, upper] = lower_P
        cost_PE[:, upper] = cost_PE[every_P, lower_P] + cost_L[lower_P]
        repeat_PE[:, upper] = repeat_PE[every_P, lower_P] + repeat_L[lower_P]
    found = {}
    for price in every_P[::-1] if np.isfinite(cost_PE[0, -1]) else []:
        path = [len(edges) - 1]
        while path[-1]:
            path.append(lower_PE[price, path[-1]])
        boundaries = tuple(edges[path[::-1]].tolist())
        found[boundaries] = Cuts(boundaries, float(cost_PE[price, -1]), float(1 / repeat_PE[price, -1]))
    return list(found.values())


def choose(found: list[Cuts], histogram: LengthHistogram, limits: Limits, batch_cost: BatchCost) -> tuple[Cuts, list[dict[str, float]]]:
    """The cuts with the lowest sum of ``RULE``, and what was weighed for each: avoidable cost as a share of the unavoidable."""
    least = unavoidable_cost(histogram, limits, batch_cost)
    weighed = []
    for cuts in found:
        avoidable = cuts.cost / least - 1
        charge = MIXING_PRICE / cuts.batches_per_bucket**0.5
        weighed.append(
            {"count": cuts.count, "avoidable": avoidable, "batches_per_bucket": cuts.batches_per_bucket, "sum": avoidable + charge}
        )
    return found[min(range(len(found)), key=lambda place: weighed[place]["sum"])], weighed


def unavoidable_cost(histogram: LengthHistogram, limits: Limits, batch_cost: BatchCost) -> float:
    """Cost of an epoch of full batches without padding other than to ``pad_multiple``."""
    padded = limits.padded(histogram.lengths)
    rows = limits.rows(padded)
    return float((histogram.counts * batch_cost(rows, padded) / rows).sum())


def candidate_edges(histogram: LengthHistogram, limits: Limits, grid: int | None) -> np.ndarray:
    """Where a cut may lie, int64[E]: 0, one above each multiple of the step, above the longest; the lowest of edges that split alike.

    The step is ``grid`` tokens. Without a grid it follows the length: 1/32 of it up to 32 tokens, and 1/256 of it above 16,384, both
    rounded down to a power of two. It is rounded up to ``pad_multiple``, since a cut inside one padded length gains nothing. One
    above, because a bucket is padded to its longest sample: 64 rows of 768 tokens fill a budget of 49,152, and 769 break it.
    """
    if grid is None:
        octave = np.maximum(np.searchsorted(1 << np.arange(62), histogram.lengths) - 1, 0)
        grid = 1 << np.maximum(np.clip(octave - 5, 0, 5), octave - 8)
    step = limits.padded(grid)
    above = -(-histogram.lengths // step) * step + 1
    edges = np.unique(np.concatenate([[0], above[above <= histogram.max], [histogram.max + 1]]))
    _, first = np.unique(np.searchsorted(histogram.lengths, edges), return_index=True)
    return edges[first]


def _bucket_rows(
    histogram: LengthHistogram, edges: np.ndarray, limits: Limits, batch_cost: BatchCost, model: str, shape_cost: float
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each upper edge: the cost of the bucket and its share of the mean of rows / samples, for every lower edge."""
    splits = np.searchsorted(histogram.lengths, edges)
    samples_below = np.concatenate([[0], np.cumsum(histogram.counts)])[splits].astype(float)
    costs = epoch_costs(histogram.lengths, histogram.counts, splits, limits, batch_cost, model, shape_cost)
    for upper, (cost_L, rows_L) in enumerate(costs, start=1):
        yield cost_L, np.minimum(rows_L, samples_below[upper] - samples_below[:upper]) / samples_below[-1]
