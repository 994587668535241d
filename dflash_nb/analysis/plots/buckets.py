"""Notebook 01: where to cut, how many times, and why there?

Takes :class:`~dflash_nb.planner.buckets.BucketPlan` and the rows that the planner's ``elbow``, ``sensitivity`` and ``holdout_gap``
return. Padding is always a share of *padded* tokens, so efficiency and padding add to one.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.bucket_plan import BucketPlan
from dflash_nb.planner.cost import CostModel

from .lengths import _octave_bins, _shares
from .padding import duration
from .style import ACCENT, FAINT, INK, WARN, Plot, bucket_colors, count, finish, length_axis, new_figure, percent, plain_log

STAGE_STYLE = {
    "target": (ACCENT, "-", "o"),
    "drafter": (WARN, "--", "s"),
    "transfer": ("#7a7a7a", ":", "^"),
    "fetch": ("#a8a8a8", "-.", "v"),
}

RULE_STYLE = {
    "best": (ACCENT, "-", "o"),
    "equal-token": ("#7a7a7a", "--", "s"),
    "quantile": ("#7a7a7a", ":", "^"),
    "geometric": ("#a8a8a8", "-.", "D"),
    "pow2": ("#a8a8a8", "--", "v"),
}


def elbow(rows: Sequence[dict], chosen: BucketPlan, name: str = "") -> Plot:
    """Padding against the number of buckets for the best cuts and for the field's common rules; the chosen cuts ringed.

    The ring may lie above the curve of the best cuts, which know padding alone: ``auto`` weighs mixing too. The small print says so.
    ``rows``: from :func:`dflash_nb.planner.rules.elbow`, each with ``rule``, ``count`` and ``efficiency``.
    """
    figure, axes = new_figure()
    axis = axes[0, 0]
    curves = {}
    for rule, (color, line, marker) in RULE_STYLE.items():
        points = sorted((row["count"], 1 - row["efficiency"]) for row in rows if row["rule"] == rule)
        if not points:
            continue
        x, y = np.array(points).T
        curves[rule] = (x, y)
        axis.plot(
            x, 100 * y, color=color, linestyle=line, marker=marker, markersize=3.5, linewidth=1.6 if rule == "best" else 1.1, label=rule
        )
    k, waste = len(chosen.rows), 1 - chosen.efficiency
    axis.plot(k, 100 * waste, "o", color=WARN, markersize=11, fillstyle="none", markeredgewidth=1.8)
    axis.annotate(f"chosen: {k} buckets, {percent(waste)}", (k, 100 * waste), (-8, -16), textcoords="offset points", fontsize=9, ha="right")
    axis.set_xscale("log", base=2)
    largest = max(k, *(x.max() for x, _ in curves.values()))
    ticks = 2 ** np.arange(0, np.ceil(np.log2(max(2, largest))) + 1)
    axis.set_xticks(ticks, [f"{int(t)}" for t in ticks])
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(FixedLocator([0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(NullLocator())
    axis.set(xlabel="number of buckets", ylabel="padding (% of padded tokens)")
    axis.legend(frameon=False, fontsize=8, title="cuts", title_fontsize=8)
    finding = f"{k} bucket{'s' * (k > 1)} pad{'s' * (k == 1)} {percent(waste, 2)} of the computed tokens"
    best = curves.get("best")
    if best is not None and k > 1:
        half = min(k // 2, int(best[0].max()))
        finding += f"; the best {half} would pad {percent(float(np.interp(half, *best)), 2)}"
    note = f"{name + ': ' if name else ''}budget {chosen.token_budget:,}, at most {chosen.max_batch} rows, multiple {chosen.pad_multiple}"
    if best is not None and k <= best[0].max() and waste > 1.001 * (least := float(np.interp(k, *best))):
        reason = "these also weigh mixing" if chosen.why.get("rule") else "these were given"
        note = f"ring: the chosen cuts; {reason}, {k} for padding alone would reach {percent(least, 2)}. {note}"
    return finish(figure, finding, note)


def bands(lengths: LengthHistogram, plan: BucketPlan, name: str = "") -> Plot:
    """The length histogram (share of tokens) cut into the plan's buckets, with batch size and padding of each where there is room."""
    bins = _octave_bins(lengths.min, lengths.max)
    _, tokens = _shares(lengths, bins)
    figure, axes = new_figure(height=4.4)
    axis = axes[0, 0]
    colors = bucket_colors(len(plan.rows))
    for row, color in zip(plan.rows, colors, strict=True):
        axis.axvspan(max(row.lo, bins[0]), min(row.hi, bins[-1]), color=color, alpha=0.22, linewidth=0)
        if row.lo > bins[0]:
            axis.axvline(row.lo, ymin=0 if len(plan.rows) <= 24 else 0.94, color=color, linewidth=0.7)
    axis.bar(bins[:-1], 100 * tokens, width=np.diff(bins), align="edge", color=INK, alpha=0.55, edgecolor="white", linewidth=0.4)
    axis.set_ylim(0, 100 * tokens.max() * 1.35)
    if len(plan.rows) <= 12:
        for row in plan.rows:
            middle = np.sqrt(max(row.lo, bins[0]) * min(row.hi, bins[-1]))
            text = f"{row.batch_size:.0f} rows\n{percent(1 - row.efficiency, 0)}"
            axis.text(middle, 0.985, text, transform=axis.get_xaxis_transform(), fontsize=7, ha="center", va="top", color=INK)
    axis.set(xlabel="length (tokens)", ylabel="share of tokens (%)")
    length_axis(axis, bins[0], bins[-1])
    worst = min(plan.rows, key=lambda row: row.efficiency)
    finding = (
        f"{len(plan.rows)} buckets keep {percent(plan.efficiency)} of the computed tokens real; the worst, "
        f"[{worst.lo:,}, {worst.hi:,}), pads {percent(1 - worst.efficiency)}"
    )
    above = "above each band: rows a batch and padding (% of padded tokens); " if len(plan.rows) <= 12 else ""
    note = f"{name + ': ' if name else ''}{above}n = {count(lengths.n_samples)}"
    return finish(figure, finding, note)


def price(plan: BucketPlan, name: str = "", few_batches: int = 20) -> Plot:
    """What each bucket computes in an epoch, real tokens and padding stacked; buckets with fewer than ``few_batches`` batches marked."""
    lows = np.array([row.lo for row in plan.rows])
    real = np.array([row.tokens for row in plan.rows], dtype=float)
    padded = real / np.array([row.efficiency for row in plan.rows])
    batches = np.array([row.batches for row in plan.rows])
    figure, axes = new_figure()
    axis = axes[0, 0]
    x = np.arange(len(plan.rows))
    unit, word = (1e6, "million") if padded.max() >= 1e6 else (1e3, "thousand")
    axis.bar(x, real / unit, color=bucket_colors(len(x)), width=0.85)
    axis.bar(x, (padded - real) / unit, bottom=real / unit, color="white", edgecolor=WARN, hatch="////", width=0.85, linewidth=0.6)
    thin = batches < few_batches
    axis.plot(x[thin], (padded / unit)[thin] + 0.03 * padded.max() / unit, "v", color=WARN, markersize=5)
    step = max(1, int(np.ceil(len(x) / 12)))
    axis.set_xticks(x[::step], [f"{low:,}" for low in lows[::step]], rotation=35 if len(x) > 8 else 0)
    if len(x) <= 12:
        for at, top, number in zip(x, padded / unit, batches, strict=True):
            axis.text(at, top, f"{number:,.0f}", ha="center", va="bottom", fontsize=7)
    axis.set(xlabel="bucket (its shortest length, tokens)", ylabel=f"tokens computed an epoch ({word})")
    axis.set_ylim(0, 1.15 * padded.max() / unit)
    waste = padded - real
    heaviest = int(np.argmax(waste))
    row, share = plan.rows[heaviest], waste[heaviest] / max(waste.sum(), 1e-9)
    finding = f"Bucket [{row.lo:,}, {row.hi:,}) costs {percent(share)} of all padding"
    if thin.any():
        finding += f"; {int(thin.sum())} of {len(x)} buckets have fewer than {few_batches} batches an epoch and mix poorly"
    else:
        finding += f"; the smallest bucket still has {batches.min():,.0f} batches an epoch"
    numbers = "; numbers: batches an epoch" if len(x) <= 12 else ""
    return finish(figure, finding, f"{name + ': ' if name else ''}solid: real tokens, hatched: padding{numbers}")


def robustness(shifts: Sequence[dict], gaps: Sequence[dict], plan: BucketPlan, name: str = "") -> Plot:
    """How much the cuts matter: padding when every edge moves by a share, and cuts fitted on a sample against cuts fitted on all.

    ``shifts``: from ``sensitivity``, each with ``shift`` (share of the edge) and ``efficiency``. ``gaps``: from ``holdout_gap``, each
    with ``samples`` (size of the fitted sample) and ``gap`` (lost efficiency on all data).
    """
    figure, axes = new_figure(1, 2)
    left, right = axes[0]
    moves = sorted((row["shift"], 1 - row["efficiency"]) for row in shifts)
    x, y = np.array(moves).T
    left.plot(100 * x, 100 * y, color=ACCENT, marker="o", markersize=4)
    left.axhline(100 * (1 - plan.efficiency), color=FAINT, linewidth=0.8, linestyle=":")
    left.set(xlabel="every edge moved by (%)", ylabel="padding (% of padded tokens)", ylim=(0, 100 * y.max() * 1.3))
    sizes = np.array([row["samples"] for row in gaps], dtype=float)
    lost = np.array([row["gap"] for row in gaps])
    right.plot(sizes, 100 * lost, "o", color=ACCENT, alpha=0.5, markersize=4)
    for size in np.unique(sizes):
        right.plot(size, 100 * np.median(lost[sizes == size]), "_", color=INK, markersize=22, markeredgewidth=1.5)
    right.set_xscale("log")
    plain_log(right.xaxis, wide=sizes.max() > 30 * sizes.min())
    right.xaxis.set_major_formatter(lambda value, _: count(value))
    right.set(xlabel="lengths the cuts were fitted on", ylabel="efficiency lost on all data (points)", ylim=(0, None))
    worst_shift = 100 * (y.max() - (1 - plan.efficiency))
    largest = np.unique(sizes)[-1]
    finding = (
        f"Moving every edge by up to {percent(np.abs(x).max(), 0)} costs at most {worst_shift:.2f} points; cuts fitted on "
        f"{largest:,.0f} lengths lose {100 * np.median(lost[sizes == largest]):.2f} points on all of them"
    )
    return finish(figure, finding, f"{name + ': ' if name else ''}dash: median of {len(lost) // len(np.unique(sizes))} draws a size")


def reference_gap(plan: BucketPlan, published: float) -> Plot:
    """The reference run's buckets under its own model: batch size and efficiency of each, ours against the published total."""
    figure, axes = new_figure(height=3.4)
    axis = axes[0, 0]
    x = np.arange(len(plan.rows))
    values = [100 * row.efficiency for row in plan.rows]
    axis.bar(x, values, color=bucket_colors(len(x)), width=0.8)
    for at, row in zip(x, plan.rows, strict=True):
        text = f"{percent(row.efficiency, 0)}\n{row.batch_size:.0f} rows"
        axis.text(at, 8, text, ha="center", fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 2})
    axis.axhline(100 * plan.efficiency, color=INK, linewidth=1)
    axis.axhline(100 * published, color=WARN, linewidth=1, linestyle="--")
    axis.set_xticks(x, [f"[{row.lo:,}, {row.hi:,})" for row in plan.rows], fontsize=7)
    axis.set(ylabel="padding efficiency (%)", ylim=(0, 100), xlabel="bucket (tokens)")
    finding = (
        f"The reference cuts keep {percent(plan.efficiency)} of computed tokens real on the reference run's lengths; "
        f"{percent(published)} was published, for a column with a lighter tail"
    )
    return finish(figure, finding, "line: all buckets here; dashed: published")


def stage_times(cost: CostModel, seconds: Mapping[str, float], plan: BucketPlan, name: str = "") -> Plot:
    """What the cost model says: how long a full batch keeps each stage busy, by padded length, and what each takes in an epoch; for a
    measured model also what it predicted for batches of shapes that it was not fitted on, against what they took.

    ``seconds``: of an epoch by stage, from :func:`dflash_nb.planner.buckets.expected_seconds`. A full batch has as many rows as the
    plan's limits allow. The title says whether the model was measured or assumed.
    """
    stages = {stage: look for stage, look in STAGE_STYLE.items() if seconds[stage] > 0}
    widths = [3, 2, 3] if cost.points else [3, 2]
    figure, axes = new_figure(1, len(widths), width=9.6 if cost.points else 7.6, gridspec_kw={"width_ratios": widths})
    left, right = axes[0, :2]
    lowest, highest = plan.rows[0].tokens // plan.rows[0].samples, plan.boundaries[-1] - 1
    padded = np.unique(np.geomspace(max(1, lowest / 2), max(2, highest), 300).astype(int))
    rows = np.minimum(plan.max_batch, plan.token_budget // padded)
    for stage, (color, line, _) in stages.items():
        left.plot(padded, cost.batch_seconds(rows, padded, stage), color=color, linestyle=line, linewidth=1.6, label=stage)
    left.set(xlabel="padded length (tokens)", ylabel="seconds a full batch")
    left.set_ylim(0, None)
    length_axis(left, padded[0], padded[-1])
    left.tick_params(axis="x", rotation=35)
    left.legend(frameon=False, fontsize=8)
    right.grid(False)
    for y, (stage, (color, *_)) in enumerate(stages.items()):
        right.barh(y, seconds[stage], color=color, height=0.6)
        right.text(seconds[stage], y, f" {duration(seconds[stage])}", va="center", fontsize=8)
    right.set_yticks(range(len(stages)), stages)
    right.invert_yaxis()
    right.set(xlabel="seconds an epoch", xlim=(0, 1.45 * max(seconds.values())))
    right.xaxis.set_major_formatter("{x:,.0f}")
    right.tick_params(axis="x", rotation=35)
    slowest = max(seconds, key=seconds.get)
    model = "assumed, not measured" if cost.source == "assumed" else cost.source
    finding = (
        f"Cost model ({model}): the {slowest} sets the pace with {duration(seconds[slowest])} an epoch in {len(plan.rows)} buckets, and "
        + " and ".join(f"the {stage} is busy for {duration(seconds[stage])}" for stage in stages if stage not in (slowest, "fetch"))
    )
    if cost.points:
        _predicted_against_measured(axes[0, 2], cost)
        finding += (
            f"; on shapes it was not fitted on the {slowest}'s seconds are off by {percent(cost.errors[slowest]['median'])} in the median"
        )
    note = (
        f"{name + ': ' if name else ''}full batch: budget {plan.token_budget:,}, at most {plan.max_batch} rows; "
        f"{cost.target_workers} target workers, {cost.slots_per_row} slots a sample at most"
    )
    return finish(figure, finding, note)


def _predicted_against_measured(axis: Axes, cost: CostModel) -> None:
    """Held-out batches on equal logarithmic axes; the dotted lines are 10 % off."""
    ends = []
    for stage in ("target", "drafter"):
        predicted, measured = np.maximum(np.array(cost.points[stage]).T, 1e-9)
        color, _, marker = STAGE_STYLE[stage]
        label = f"{stage}: {percent(cost.errors[stage]['median'])}"
        axis.plot(measured, predicted, marker, color=color, markersize=3, alpha=0.5, label=label)
        ends += [measured.min(), measured.max(), predicted.min(), predicted.max()]
    span = np.array([min(ends) / 1.2, max(ends) * 1.2])
    for factor, line in ((1, "-"), (1.1, ":"), (1 / 1.1, ":")):
        axis.plot(span, factor * span, line, color=FAINT, linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlim=span, ylim=span, xlabel="measured seconds of a batch", ylabel="predicted, shape held out")
    axis.legend(frameon=False, fontsize=8, title="median error", title_fontsize=8)
