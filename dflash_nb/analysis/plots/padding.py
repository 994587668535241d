"""Notebook 02: what does each strategy cost, and how well does it mix?

Takes the rows of :func:`dflash_nb.planner.simulate.simulate` and plans themselves. Efficiency never stands without fill, speed never
without saying whether its cost model was measured or assumed, and every mean carries its spread over seeds.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from dflash_nb.analysis.experiment import AUTO, speed_rows
from dflash_nb.planner.batches import BatchPlan
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.diversity import lag1, longest_run

from .style import FAINT, INK, WARN, Plot, count, finish, length_axis, new_figure, percent, strategy_color

MEANS = ("efficiency", "fill", "batches", "repeated_mates", "w1", "lag1", "longest_run", "spread", "seconds", "tokens_per_second")


def by_strategy(rows: Sequence[dict]) -> list[dict]:
    """Mean of every number of a strategy over seeds and epochs, and its standard deviation as ``<name>_sd``; one row a strategy."""
    table = []
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        own = [row for row in rows if row["strategy"] == strategy]
        line = {"strategy": strategy, "n": len(own), "cost": own[0]["cost"], "real_tokens": own[0]["real_tokens"]}
        for name in MEANS:
            values = np.array([row[name] for row in own], dtype=float)
            line |= {name: float(values.mean()), f"{name}_sd": float(values.std(ddof=1)) if len(values) > 1 else 0.0}
        line["mixing"] = mixing_score(line["repeated_mates"], line["w1"])
        table.append(line)
    return table


def mixing_score(repeated_mates: float, w1: float) -> float:
    """0 for fixed groups, near 1 for a full shuffle: (share of mates not met again) / (1 + W1 of an accumulation window).

    W1 counts in mean lengths and is above 1 for short windows of heavy-tailed data; the quotient still tells plans apart there.
    """
    return (1 - repeated_mates) / (1 + w1)


def strategies(rows: Sequence[dict], name: str = "") -> Plot:
    """Real tokens and padding of all computed tokens, a bar a strategy, with the modelled time of an epoch and the speed-up over random."""
    table = sorted(by_strategy(rows), key=lambda line: line["seconds"])
    figure, axes = new_figure(height=1.5 + 0.42 * len(table))
    axis = axes[0, 0]
    axis.grid(False)
    slowest = next((line for line in table if line["strategy"] == "random"), table[-1])
    for y, line in enumerate(table):
        real = 100 * line["efficiency"]
        axis.barh(y, real, color=strategy_color(line["strategy"]), height=0.62)
        axis.barh(y, 100 - real, left=real, color="white", edgecolor=WARN, hatch="////", height=0.62, linewidth=0.6)
        axis.errorbar(real, y, xerr=100 * line["efficiency_sd"], color=INK, capsize=3, linewidth=1)
        text = f"{percent(1 - line['efficiency'])} padding, fill {percent(line['fill'])}\n{duration(line['seconds'])} an epoch"
        speed = slowest["seconds"] / line["seconds"]
        text += "" if line is slowest else f", {speed:.2f} x {slowest['strategy']}"
        axis.text(102, y, text, va="center", fontsize=7.5)
    axis.set_yticks(range(len(table)), [line["strategy"] for line in table])
    axis.invert_yaxis()
    axis.set(xlabel="share of computed tokens (%)", xlim=(0, 150))
    axis.set_xticks(range(0, 101, 20))
    # The one to look at first: fixed groups (sorted) and what only some targets can take (packed) are no plain answer.
    best = next((line for line in table if line["strategy"] not in ("packed", "sorted")), table[0])
    finding = f"{best['strategy']} pads {percent(1 - best['efficiency'])} of its tokens and would take {duration(best['seconds'])} an epoch"
    if best is not slowest:
        finding += f", {slowest['strategy']} {percent(1 - slowest['efficiency'])} and {duration(slowest['seconds'])}"
    finding += f" (cost model: {best['cost']})"
    return finish(figure, finding, f"{name + ': ' if name else ''}bars: spread over {table[0]['n']} seeds; hatched: padding")


def speeds(rows: Sequence[dict], cost: CostModel, runs: Sequence[dict] = (), name: str = "") -> Plot:
    """Predicted real tokens a second of each strategy with its uncertainty, and what runs of it reached.

    ``runs``: from :func:`dflash_nb.pipeline.measured.run_speeds`, each with ``strategy``, ``tokens_per_second`` and ``noise``. A whisker is
    the spread over seeds and, for a measured model, its error of the sum on held-out shapes; an assumed model's own error is unknown.
    """
    table = sorted(by_strategy(rows), key=lambda line: -line["tokens_per_second"])
    error = model_error(cost)
    figure, axes = new_figure(height=1.6 + 0.42 * len(table))
    axis = axes[0, 0]
    axis.grid(False)
    for y, line in enumerate(table):
        speed = line["tokens_per_second"]
        spread = float(np.hypot(line["tokens_per_second_sd"], speed * error))
        axis.barh(y, speed, color=strategy_color(line["strategy"]), alpha=0.45 if cost.source == "assumed" else 1.0, height=0.5)
        axis.errorbar(speed, y, xerr=spread, color=INK, capsize=3, linewidth=1)
        axis.text(speed + spread, y, f"  {speed:,.0f} ± {spread:,.0f}", va="center", fontsize=8)
    order = [line["strategy"] for line in table]
    shown = [run for run in runs if run["strategy"] in order]
    for run in shown:
        y = order.index(run["strategy"]) + 0.34
        axis.errorbar(run["tokens_per_second"], y, xerr=2 * run["noise"], fmt="D", color=WARN, markersize=5, capsize=2)
    axis.set_yticks(range(len(table)), order)
    axis.invert_yaxis()
    most = max([line["tokens_per_second"] for line in table] + [run["tokens_per_second"] for run in shown])
    axis.set(xlabel="real tokens a second", xlim=(0, 1.3 * most))
    axis.xaxis.set_major_formatter("{x:,.0f}")
    best = table[0]
    model = "assumed" if cost.source == "assumed" else f"{cost.source}, off by {percent(error)} in all on shapes it was not fitted on"
    finding = f"{best['strategy']} would be the fastest with {best['tokens_per_second']:,.0f} real tokens/s (cost model: {model})"
    if shown:
        predicted = {line["strategy"]: line["tokens_per_second"] for line in table}
        off = [predicted[run["strategy"]] / run["tokens_per_second"] - 1 for run in shown]
        finding += f"; the prediction for {len(shown)} measured run{'s' * (len(shown) > 1)} is off by {percent(max(map(abs, off)))} at most"
    pale = "pale: assumed; " if cost.source == "assumed" else ""
    note = (
        f"{name + ': ' if name else ''}{pale}whiskers: spread over {table[0]['n']} plans and model error; diamonds: runs, 2 standard errors"
    )
    return finish(figure, finding, note)


def trained(experiment: dict, name: str) -> Plot:
    """Speed of real training with each strategy, relative to sorted: as the cost model predicted it and as measured.

    experiment: from :func:`dflash_nb.analysis.experiment.read_experiment`.
    """
    rows = speed_rows(experiment)
    figure, axes = new_figure(height=1.6 + 0.42 * len(rows))
    axis = axes[0, 0]
    axis.grid(False)
    most = 0.0
    for y, row in enumerate(rows):
        noise = 2 * (row["ratio_error"] or 0.0)
        color = strategy_color(row["strategy"])
        axis.barh(y, row["measured_ratio"], xerr=noise, color=color, height=0.5, error_kw={"ecolor": INK, "capsize": 3, "linewidth": 1})
        axis.plot(row["predicted_ratio"], y, "D", color=WARN, markersize=5)
        right = max(row["measured_ratio"] + noise, row["predicted_ratio"])
        most = max(most, right)
        error = f"± {noise:.2f}" if row["ratio_error"] is not None else "(one round: no error known)"
        axis.text(right, y, f"  {row['measured_ratio']:.2f} {error}, {percent(row['padding'])} padding", va="center", fontsize=8)
    axis.set_yticks(range(len(rows)), [row["strategy"] for row in rows])
    axis.invert_yaxis()
    axis.set(xlabel="real tokens a second, relative to sorted", xlim=(0, 1.3 * most))
    off = max(abs(row["predicted_ratio"] / row["measured_ratio"] - 1) for row in rows)  # of what is drawn
    [auto] = [row["measured_ratio"] for row in rows if row["strategy"] == AUTO]
    finding = (
        f"In real training, auto buckets have {auto:.2f} times the speed of sorted batches; predictions are off by {percent(off)} at most"
    )
    options = experiment["options"]
    how = f"target {options['target']}, {experiment['cost']['belongs_to']['hardware']}, {options['rounds']} interleaved rounds"
    return finish(figure, finding, f"{name}: {how}; bars measured, whiskers two standard errors, diamonds predicted")


def model_error(cost: CostModel) -> float:
    """The largest relative error of the sum of target's or drafter's seconds on held-out shapes; 0 where nothing was measured."""
    return max((abs(error["total"]) for stage, error in cost.errors.items() if stage in ("target", "drafter")), default=0.0)


def front(rows: Sequence[dict], name: str = "") -> Plot:
    """Padding against mixing, a point a strategy with its spread; strategies that another padded one beats in both are hollow.

    ``packed`` is drawn as the reference that only some targets can reach: it beats nobody.
    """
    table = by_strategy(rows)
    x = np.array([100 * (1 - line["efficiency"]) for line in table])
    y = np.array([line["mixing"] for line in table])
    padded = np.array([line["strategy"] != "packed" for line in table])
    better = [padded & (x <= x[i]) & (y >= y[i]) & ((x < x[i]) | (y > y[i])) for i in range(len(table))]
    dominated = [bool(beaten.any()) for beaten in better]
    figure, axes = new_figure()
    axis = axes[0, 0]
    for i, line in enumerate(table):
        color = strategy_color(line["strategy"])
        scores = [mixing_score(row["repeated_mates"], row["w1"]) for row in rows if row["strategy"] == line["strategy"]]
        axis.errorbar(
            x[i], y[i], xerr=100 * line["efficiency_sd"], yerr=np.std(scores), marker="o" if padded[i] else "*", markersize=9, color=color,
            capsize=2,
            fillstyle="none" if dominated[i] else "full", markeredgewidth=1.6,
        )  # fmt: skip
        close = sum(1 for j in range(i) if abs(x[j] - x[i]) < 6 and abs(y[j] - y[i]) < 0.07)
        label = line["strategy"] if padded[i] else "packed (targets that can)"
        axis.annotate(label, (x[i], y[i]), (9, 6 - 13 * close), textcoords="offset points", fontsize=9)
    axis.annotate(
        "good corner", (0.01, 0.985), xycoords="axes fraction", color=FAINT, fontsize=8, va="top",
        bbox={"boxstyle": "round", "facecolor": "none", "edgecolor": FAINT},
    )  # fmt: skip
    axis.set(xlabel="padding (% of padded tokens)", ylabel="mixing (0 fixed groups, 1 full shuffle)", ylim=(-0.05, 1.15))
    axis.set_xlim(-2, max(10, x.max() * 1.25))
    names, own = [line["strategy"] for line in table], np.flatnonzero(padded if padded.any() else ~padded)
    first = own[np.argmax(((100 - x) * y)[own])]
    finding = f"{names[first]} pads {x[first]:.1f} % at a mixing of {y[first]:.2f} of 1"
    for other in dict.fromkeys((own[np.argmax(y[own])], own[np.argmin(x[own])])):
        if other != first:
            finding += f"; {names[other]} pads {x[other]:.1f} % at {y[other]:.2f}"
    if beaten := [names[i] for i in own if dominated[i]]:
        finding += f"; another beats {', '.join(beaten)} in both"
    return finish(
        figure, finding, f"{name + ': ' if name else ''}mixing: (1 - mates met again) / (1 + W1 of a step); hollow: beaten in both"
    )


def order(plans: Mapping[str, BatchPlan], steps: int = 300) -> Plot:
    """Padded length of the first ``steps`` batches of each strategy on one scale, with lag-1 correlation and longest run of one bucket."""
    figure, axes = new_figure(len(plans), 1, height=1.0 + 1.15 * len(plans), sharex=True, sharey=True)
    shortest = min(plan.padded_lengths.min() for plan in plans.values())
    longest = max(plan.padded_lengths.max() for plan in plans.values())
    correlations = {}
    for axis, (strategy, plan) in zip(axes[:, 0], plans.items(), strict=True):
        lengths = plan.padded_lengths[:steps]
        axis.plot(np.arange(1, len(lengths) + 1), lengths, color=strategy_color(strategy), linewidth=0.7, marker=".", markersize=2)
        correlations[strategy] = lag1(plan)
        text = f"{strategy}: lag-1 {float(correlations[strategy]):+.2f}, longest run of one bucket {float(longest_run(plan)):.0f}"
        axis.text(0.005, 1.02, text, transform=axis.transAxes, fontsize=8, va="bottom")
        length_axis(axis, shortest, max(longest, shortest + 1) * 1.1, which="y")
        axis.tick_params(labelsize=6)
    axes[-1, 0].set_xlabel("batch")
    figure.supylabel("padded length (tokens)", fontsize=9)
    padded = [name for name, plan in plans.items() if plan.strategy != "packed"] or list(plans)  # packed rows are all alike
    strongest = max(padded, key=lambda key: abs(correlations[key]))
    value = correlations[strongest]
    finding = (
        f"After a long batch comes a {'long' if value > 0 else 'short'} one most often under {strongest}: lag-1 {float(value):+.2f}, "
        f"where chance alone gives ± {value.noise:.2f}"
    )
    return finish(figure, finding, f"first {steps} batches of epoch 0; packed rows have nearly the budget's length")


def spread(plans: Mapping[str, BatchPlan], worst: Sequence[dict], name: str = "") -> Plot:
    """Padding of each batch (box: quartiles, whiskers 5-95 %, dot: worst) and its computed tokens against the budget.

    ``worst``: rows of ``worst_batches`` of the plan that is to run; the first by memory is named.
    """
    figure, axes = new_figure(1, 2, width=7.6)
    left, right = axes[0]
    waste = [100 * (1 - plan.real_tokens / plan.padded_tokens) for plan in plans.values()]
    use = [100 * plan.padded_tokens / plan.options.token_budget for plan in plans.values()]
    for axis, values in ((left, waste), (right, use)):
        boxes = axis.boxplot(
            values, whis=(5, 95), widths=0.6, showfliers=False, patch_artist=True, medianprops={"color": INK, "linewidth": 1.6},
            whiskerprops={"color": FAINT}, capprops={"color": FAINT},
        )  # fmt: skip
        for box, strategy in zip(boxes["boxes"], plans, strict=True):
            box.set(facecolor=strategy_color(strategy), edgecolor=INK, alpha=0.7)
        axis.plot(np.arange(1, len(values) + 1), [v.max() for v in values], ".", color=INK, markersize=5)
        axis.set_xticks(range(1, len(values) + 1), list(plans), rotation=30, fontsize=8)
    left.set(ylabel="padding of a batch (%)", ylim=(-1, 100))
    right.axhline(100, color=WARN, linewidth=1.2, linestyle="--")
    right.set(ylabel="computed tokens (% of the budget)", ylim=(0, 108))
    case = next(row for row in worst if row["by"] == "memory")
    ids = ", ".join(str(i) for i in case["sample_ids"][:4]) + (", ..." if len(case["sample_ids"]) > 4 else "")
    finding = (
        f"No batch exceeds its budget: the fullest uses {max(v.max() for v in use):.1f} %. Most memory: batch {case['index']}, "
        f"{case['rows']} rows of {case['padded_length']:,} tokens (samples {ids})"
    )
    if max(v.max() for v in use) > 100:
        finding = f"A batch exceeds its budget: the fullest uses {max(v.max() for v in use):.1f} %"
    return finish(figure, finding, f"{name + ': ' if name else ''}box: quartiles, whiskers 5-95 %, dot: the extreme")


def mates(rows: Sequence[dict], name: str = "") -> Plot:
    """What planning by length costs, a bar a strategy: mates that meet again, and the distance of a step's mix from the data's."""
    table = by_strategy(rows)
    figure, axes = new_figure(1, 2, width=7.6)
    colors = [strategy_color(line["strategy"]) for line in table]
    for axis, key, scale, label in (
        (axes[0, 0], "repeated_mates", 100, "mates met again next epoch (%)"),
        (axes[0, 1], "w1", 1, "W1 of a step's mix / mean length"),
    ):
        values = np.array([scale * line[key] for line in table])
        axis.bar(range(len(table)), values, yerr=[scale * line[f"{key}_sd"] for line in table], color=colors, capsize=3)
        axis.set_xticks(range(len(table)), [line["strategy"] for line in table], rotation=30, fontsize=8)
        axis.set_ylabel(label)
        if key == "repeated_mates":
            axis.set_yscale("symlog", linthresh=0.01)
            axis.set_ylim(0, 150)
            axis.set_yticks([0, 0.01, 0.1, 1, 10, 100], ["0", "0.01", "0.1", "1", "10", "100"])
        for x, value in enumerate(values):
            axis.text(x, value, f"{value:.3g}", ha="center", va="bottom", fontsize=7)
    fixed = [line["strategy"] for line in table if line["repeated_mates"] > 0.5]
    best = min(table, key=lambda line: line["w1"])
    finding = f"A step's mix is closest to the data's under {best['strategy']} (W1 {best['w1']:.3f} of the mean length)"
    if fixed:
        finding += f"; more than half of the mates meet again in the next epoch under {' and '.join(fixed)}"
    return finish(figure, finding, f"{name + ': ' if name else ''}{table[0]['n']} seeds; {count(table[0]['real_tokens'])} tokens an epoch")


def duration(seconds: float) -> str:
    """Seconds as people read them: 45 s, 12.3 min, 19.8 h, 4.0 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s"
