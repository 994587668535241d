"""The loss of every batch taken apart: trend + level of its lengths + residual, by medians, so that no spike bends what it is held against.

Trend and levels are fitted in turn (backfitting, three rounds): a running median over all batches of what the levels leave, then for
each group of lengths a slower running median of what the trend leaves. Levels may drift, since lengths part only as learning goes on.
They are centred on the run's own mix, so the trend is the curve that a run with a constant mix of lengths would have had: the
*adjusted* curve. Where lengths come one after the other (sorted order) level and trend cannot be told apart, and the trend takes all.
With all checks on top 500,000 steps take 1.8 s of one core.

Shapes: N steps, M batches, G groups of lengths.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dflash_nb.analysis.running import median_interval, median_of, running_median, running_scale, scale_of
from dflash_nb.pipeline.run import Run

MOST_GROUPS = 12
LEAST_OF_A_GROUP = 8
NOT_KNOWN = "not known"
ROUNDS = 3
TREND_HALF, LEVEL_HALF, SCALE_HALF = (4, 250), (12, 500), (50, 500)  # fewest and most batches on each side of a running median
BLOCK, RESAMPLES = 20, 400


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class Parts:
    """``loss`` of each batch = ``trend`` + ``level`` + ``residual``; the step's loss = its trend + ``mix`` + the rest.

    groups: names from short to long; group_M: each batch's group. scale_M: the robust standard deviation of a residual there, z_M
    their ratio. loss_N, mix_N: loss of a step and the weighted level of its batches; adjusted_N = loss_N - mix_N; trend_N; noise_N: the
    standard deviation of a step's adjusted loss. movement: share of the variance of step-to-step changes that the mix explains.
    """

    groups: tuple[str, ...]
    group_M: np.ndarray
    loss_M: np.ndarray
    trend_M: np.ndarray
    level_M: np.ndarray
    residual_M: np.ndarray
    scale_M: np.ndarray
    loss_N: np.ndarray
    mix_N: np.ndarray
    trend_N: np.ndarray
    noise_N: np.ndarray
    movement: Interval | None

    @property
    def z_M(self) -> np.ndarray:
        return self.residual_M / self.scale_M

    @property
    def adjusted_N(self) -> np.ndarray:
        """What the loss of each step would have been with the run's mean mix of lengths."""
        return self.loss_N - self.mix_N

    def level_of(self, group: int) -> Interval:
        """Level of a group against the mix over the last third of its batches."""
        mine = np.flatnonzero(self.group_M == group)
        late = mine[2 * len(mine) // 3 :]
        return Interval(*median_interval(self.loss_M[late] - self.trend_M[late]))


def decompose(run: Run, edges: np.ndarray | None = None) -> Parts:
    """Take the loss of every batch of ``run`` apart, by its own groups of lengths or by ranges with the given ``edges``.

    Works on any number of steps, also none; batches without a loss get NaN.
    """
    names, group = length_groups(run) if edges is None else _by_edges(mean_lengths(run), edges)
    at, loss = run.batches["at"], run.batches["loss"]
    weight = np.where(np.isfinite(loss) & (run.batches["weight"] > 0), run.batches["weight"], 0.0)
    steps = len(run)
    trend, level = _backfit(loss, group, weight, len(names))
    residual = loss - trend - level
    scale = _scales(residual, trend, group, weight)
    total = np.bincount(at, weight, minlength=steps)
    mix = _weighted(at, weight, level, total)
    step_trend = np.interp(np.arange(steps), *_last_of_each(at, trend)) if len(at) else np.full(steps, np.nan)
    noise = np.sqrt(np.bincount(at, (weight * scale) ** 2, minlength=steps)) / np.where(total > 0, total, np.nan)
    step_loss = run.steps["loss"]
    return Parts(
        groups=tuple(names),
        group_M=group,
        loss_M=loss,
        trend_M=trend,
        level_M=level,
        residual_M=residual,
        scale_M=scale,
        loss_N=step_loss,
        mix_N=mix,
        trend_N=step_trend,
        noise_N=noise,
        movement=_movement(step_loss - step_trend, mix, noise) if len(names) > 1 else None,
    )


def mean_lengths(run: Run) -> np.ndarray:
    """Mean real tokens of a sample of each batch, float64[M]; where the log does not know them the padded length, else NaN."""
    mean = np.asarray(run.batches["tokens"], float) / np.maximum(np.nan_to_num(np.asarray(run.batches["rows"], float), nan=np.inf), 1)
    return mean if np.isfinite(mean).all() and mean.all() else np.asarray(run.batches["padded_length"], float)


def length_groups(run: Run) -> tuple[list[str], np.ndarray]:
    """Groups of batches of like length, from short to long, and the group of each batch.

    They are the run's buckets; a batch that spans several belongs to the bucket of its mean length. Without buckets they are half-octaves
    of the mean length. Neighbours are joined until every group has LEAST_OF_A_GROUP batches and there are at most MOST_GROUPS. A log
    that knows neither has one group, NOT_KNOWN.
    """
    mean = np.nan_to_num(mean_lengths(run))
    if not mean.any() and not (run.batches["bucket"] >= 0).any():
        return [NOT_KNOWN], np.zeros(len(mean), dtype=np.int64)
    edges = np.asarray((run.buckets or {}).get("boundaries") or (), dtype=np.float64)
    bucket = run.batches["bucket"]
    if len(edges) > 1:
        _, cell = _by_edges(mean, edges)
        cell = np.where((bucket >= 0) & (bucket < len(edges) - 1), bucket, cell)
    elif 2 * (bucket >= 0).sum() > len(bucket):
        names = ["several buckets", *(f"bucket {i}" for i in range(bucket.max() + 1))]
        members, lookup = _join(np.maximum(bucket, -1) + 1, len(names))
        return [names[each[0]] + (f" to {names[each[-1]]}" if len(each) > 1 else "") for each in members], lookup
    else:
        edges = half_octaves(mean)
        _, cell = _by_edges(mean, edges)
    members, group = _join(cell, len(edges) - 1)
    return [_range(edges[each[0]], edges[each[-1] + 1]) for each in members], group


def half_octaves(lengths: np.ndarray) -> np.ndarray:
    """Edges of ranges of lengths, each 1.41 times as long as the one before, that hold all ``lengths``."""
    low, high = (np.floor(2 * np.log2(max(length, 1))) for length in (lengths.min(), lengths.max()))
    return np.unique([0, *np.round(2 ** (np.arange(low, high + 2) / 2))])


def joined_edges(lengths: np.ndarray) -> np.ndarray:
    """Edges of half-octaves with sparse neighbours joined, as ``length_groups`` makes them."""
    edges = half_octaves(lengths)
    members, _ = _join(_by_edges(lengths, edges)[1], len(edges) - 1)
    return np.array([edges[members[0][0]], *(edges[each[-1] + 1] for each in members)])


def _range(low: float, high: float) -> str:
    return f"{low:,.0f} - {high - 1:,.0f}"


def _by_edges(lengths: np.ndarray, edges: np.ndarray) -> tuple[list[str], np.ndarray]:
    names = [_range(low, high) for low, high in pairwise(edges)]
    return names, np.clip(np.searchsorted(edges, lengths, side="right") - 1, 0, len(edges) - 2)


def _join(cell: np.ndarray, cells: int) -> tuple[list[list[int]], np.ndarray]:
    """Join neighbouring cells, each time the one with the fewest batches to its smaller neighbour: the cells of each group, and the
    group of each batch."""
    counts = np.bincount(cell, minlength=cells)
    groups = [[int(i)] for i in np.flatnonzero(counts)]
    size = [int(counts[i]) for i in np.flatnonzero(counts)]
    while len(groups) > 1 and (min(size) < LEAST_OF_A_GROUP or len(groups) > MOST_GROUPS):
        i = int(np.argmin(size))
        j = min((k for k in (i - 1, i + 1) if 0 <= k < len(size)), key=lambda k: size[k])
        low, high = min(i, j), max(i, j)
        groups[low] += groups.pop(high)
        size[low] += size.pop(high)
    lookup = np.zeros(cells, dtype=np.int64)
    for number, members in enumerate(groups):
        lookup[members] = number
    return groups, lookup[cell]


def _backfit(loss: np.ndarray, group: np.ndarray, weight: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:
    level = np.zeros(len(loss))
    members = [np.flatnonzero(group == g) for g in range(groups)]
    share = np.array([weight[mine].sum() for mine in members]) + 1e-12
    share /= share.sum()
    everywhere = np.arange(len(loss))
    half = int(np.clip(len(loss) // 30, *TREND_HALF))
    for _ in range(ROUNDS if groups > 1 else 1):
        trend = running_median(loss - level, half)
        if groups == 1:
            break
        centre, of_group = np.zeros(len(loss)), []
        for mine, part in zip(members, share, strict=True):
            own = running_median(loss[mine] - trend[mine], int(np.clip(len(mine) // 6, *LEVEL_HALF)))
            own = np.nan_to_num(own)
            of_group.append(own)
            centre += part * (np.interp(everywhere, mine, own) if len(mine) else 0.0)
        for mine, own in zip(members, of_group, strict=True):
            level[mine] = own - centre[mine]
    return running_median(loss - level, half), level


def _scales(residual: np.ndarray, trend: np.ndarray, group: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The spread to expect of each residual: of its group and its time, whichever is wider; wider for a lighter batch, and where the
    trend is steep, since a level cannot be told there. The first windows hold so few batches that they follow each; they do not count."""
    scale = np.full(len(residual), np.nan)
    groups = int(group.max(initial=-1)) + 1
    settled = np.arange(len(residual)) >= min(50, len(residual) // 4)
    overall = scale_of(residual[settled])
    steepness = _steepness(trend, 2 * groups)
    for g in range(groups):
        mine = np.flatnonzero(group == g)
        late = residual[mine][settled[mine]]
        known = int(np.isfinite(late).sum())
        of_group = np.sqrt((known * scale_of(late) ** 2 + LEAST_OF_A_GROUP * overall**2) / (known + LEAST_OF_A_GROUP))
        local = np.nan_to_num(running_scale(residual[mine], int(np.clip(len(mine) // 4, *SCALE_HALF))))
        usual = np.median(weight[mine][weight[mine] > 0]) if (weight[mine] > 0).any() else 1.0
        lighter = np.sqrt(np.maximum(1.0, usual / np.maximum(weight[mine], 1e-3 * usual)))
        scale[mine] = np.hypot(np.maximum(local, of_group) * lighter, np.nan_to_num(steepness[mine]))
    floor = 1e-4 * np.nan_to_num(median_of(np.abs(trend)))
    return np.maximum(scale, max(floor, 1e-9))


def _steepness(trend: np.ndarray, reach: int) -> np.ndarray:
    """How far the trend moves from one batch to the next, over ``reach`` batches on each side."""
    place = np.arange(len(trend))
    before, after = np.maximum(place - reach, 0), np.minimum(place + reach, len(trend) - 1)
    return np.abs(trend[after] - trend[before]) / np.maximum(after - before, 1)


def _weighted(at: np.ndarray, weight: np.ndarray, values: np.ndarray, total: np.ndarray) -> np.ndarray:
    return np.bincount(at, weight * np.nan_to_num(values), minlength=len(total)) / np.where(total > 0, total, np.nan)


def _last_of_each(at: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    last = np.append(np.flatnonzero(np.diff(at)), len(at) - 1)
    return at[last], values[last]


def _movement(around_trend: np.ndarray, mix: np.ndarray, noise: np.ndarray) -> Interval | None:
    """Share of the mean square of step-to-step changes that goes away when the mix is taken off, with a block bootstrap interval.

    The first tenth of the run is left out (the trend moves there), and so are changes from or to a spike.
    """
    rest = around_trend - mix
    calm = np.isfinite(rest) & (np.abs(rest - median_of(rest)) < 6 * noise)
    calm[: min(50, len(calm) // 10)] = False
    pairs = calm[1:] & calm[:-1]
    before, after = (np.diff(values)[pairs] ** 2 for values in (around_trend, rest))
    if len(before) < BLOCK or not before.sum():
        return None
    blocks = len(before) // BLOCK
    sums = [values[: blocks * BLOCK].reshape(blocks, BLOCK).sum(axis=1) for values in (before, after)]
    if blocks > 2000:
        sums = [values[: blocks // 2000 * 2000].reshape(2000, -1).sum(axis=1) for values in sums]
    drawn = np.random.default_rng(0).integers(0, len(sums[0]), (RESAMPLES, len(sums[0])))
    shares = 1 - sums[1][drawn].sum(axis=1) / np.maximum(sums[0][drawn].sum(axis=1), 1e-300)
    low, high = np.percentile(shares, [2.5, 97.5])
    return Interval(float(1 - after.sum() / before.sum()), float(low), float(high))
