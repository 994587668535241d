"""Notebook 03: is it running well? Every function takes a :class:`~dflash_nb.pipeline.run.Run` and draws whatever it holds.

Nothing is averaged over batches: losses are the log's own weighted means, rates are sums of tokens over sums of seconds. A run of one
step, without evaluation, or still going draws too. All plots of 500,000 steps together take 1.4 s.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from dflash_nb.analysis.achieved import batch_seconds, length_ranges
from dflash_nb.analysis.running import median_of
from dflash_nb.pipeline.advice import window_room
from dflash_nb.pipeline.run import Run
from dflash_nb.pipeline.summary import estimate_agreement, repetition, tau_words

from .style import ACCENT, FAINT, INK, OKABE_ITO, WARN, Plot, count, finish, new_figure, percent, plain_log

MOST_POINTS = 4000
BINS = 60
STAGE_COLORS = {"wait": WARN, "drafter": ACCENT, "optimizer": OKABE_ITO[3]}
STAGE_WORDS = {"wait": "wait for target", "drafter": "drafter and loss", "optimizer": "optimizer"}


def smoothed(values: np.ndarray, window: int | None = None) -> np.ndarray:
    """Running median over ``window`` steps (default 1/15 of them, 9 at least), shorter at the ends; NaN are left out."""
    window = window or max(9, len(values) // 15 | 1)
    return pd.Series(values).rolling(window, center=True, min_periods=1).median().to_numpy()


def loss(run: Run) -> Plot:
    """Loss against step (faint: each step, line: running median, dots: held-out), then against supervised tokens seen; learning rate."""
    figure, axes = new_figure(3, 1, height=6.2, gridspec_kw={"height_ratios": [3, 2, 1.2]})
    by_step, by_tokens, rate = axes[:, 0]
    if not len(run):
        return _nothing(run, figure, by_step)
    steps, losses = run.steps["step"], run.steps["loss"]
    seen = np.cumsum(run.steps["supervised"])
    median = smoothed(losses)
    for axis, x in ((by_step, steps), (by_tokens, seen)):
        thin = _thin(len(x))
        axis.plot(x[thin], losses[thin], color=FAINT, linewidth=0.6, alpha=0.7)
        axis.plot(x[thin], median[thin], color=ACCENT, linewidth=1.8, marker="o" if len(x) == 1 else None)
        axis.set_ylabel("loss (nats)")
        if np.isfinite(losses).any() and np.nanmin(losses) > 0 and np.nanmax(median) > 4 * np.nanmedian(median):
            axis.set_yscale("log")
            plain_log(axis.yaxis, wide=np.nanmax(losses) > 30 * np.nanmin(losses))
    evals = [(event["step"], event["loss"]) for event in run.events_of("eval") if event.get("loss") is not None]
    for axis, x_of in ((by_step, lambda step: step), (by_tokens, lambda step: _at(steps, seen, step))):
        if evals:
            axis.plot([x_of(step) for step, _ in evals], [value for _, value in evals], "D", color=WARN, markersize=5, zorder=3)
    _mark_events(run, by_step)
    by_step.set_xlabel("optimiser step")
    by_tokens.set_xlabel("supervised tokens seen")
    by_tokens.xaxis.set_major_formatter(lambda value, _: count(value))
    thin = _thin(len(steps))
    rate.plot(steps[thin], run.steps["lr"][thin], color=INK, linewidth=1.2, marker="o" if len(steps) == 1 else None)
    rate.set(xlabel="optimiser step", ylabel="learning rate", ylim=(0, None))
    first, last, over = _ends(losses)
    supervised = f"{count(seen[-1])} supervised tokens" if np.isfinite(seen[-1]) else "an unknown number of supervised tokens"
    if not over:
        finding = f"None of the {len(run):,} optimiser steps has a finite loss: there is no curve to read"
    elif len(run) == 1:
        finding = f"Loss {last:.2f} nats at the only step, over {supervised}"
    else:
        finding = f"Loss {first:.2f} → {last:.2f} nats over {len(run):,} steps and {supervised}"
    if evals:
        finding += f", {evals[-1][1]:.2f} on held-out samples"
    if over and not run.steps["finite"].all():
        finding += f"; {int((~run.steps['finite']).sum()):,} steps were not finite"
    ends = "first and last step" if over == 1 else f"median of {over} steps"
    note = f"ends: {ends}; orange: held-out; dotted: resume; ticks: checkpoints. {_note(run)}"
    return finish(figure, finding, note)


def acceptance(run: Run) -> Plot:
    """Tokens accepted a target pass against step: training blocks (faint, running median), held-out blocks, and measured decoding."""
    figure, axes = new_figure()
    axis = axes[0, 0]
    if not len(run):
        return _nothing(run, figure, axis)
    steps, trained = run.steps["step"], run.steps["acceptance"]
    thin = _thin(len(steps))
    axis.plot(steps[thin], trained[thin], color=FAINT, linewidth=0.6, alpha=0.7)
    axis.plot(steps[thin], smoothed(trained)[thin], color=ACCENT, linewidth=1.8, marker="o" if len(steps) == 1 else None)
    labels = [(steps[-1], smoothed(trained)[-1], "training blocks", ACCENT)]
    finding = f"{labels[0][1]:.2f} tokens a pass would be accepted on training text at step {steps[-1]:,}"
    if not np.isfinite(trained).any():
        labels, finding = [], f"Acceptance was not measured in any of the {len(run):,} optimiser steps"
    for key, word, color, marker in (("acceptance", "held-out blocks", OKABE_ITO[3], "s"), ("tau", "decoding (tau)", WARN, "D")):
        if measured := [event for event in run.events_of("eval") if event.get(key) is not None]:
            last, (x, y) = measured[-1], zip(*((event["step"], event[key]) for event in measured), strict=True)
            axis.plot(x, y, marker=marker, color=color, linewidth=1.0, linestyle=":", markersize=5)
            labels.append((x[-1], y[-1], word, color))
            if key == "tau":
                finding = f"tau, tokens a target pass: {y[0]:.2f} at step {x[0]:,}, {tau_words(last)} at step {x[-1]:,}"
                finding += repetition(last.get("tau_repeated"))
                ranges = [
                    (event["step"], event["tau_low"], event["tau_high"])
                    for event in measured
                    if None not in (event.get("tau_low"), event.get("tau_high"))
                ]
                for at, low, high in ranges:
                    axis.vlines(at, low, high, color=color, linewidth=1.2)
    axis.axhline(1.0, color=INK, linewidth=0.8, linestyle="--")
    axis.text(0.5, 1.0, "1: no draft token accepted", fontsize=7, transform=axis.get_yaxis_transform(), ha="center", va="top", color=INK)
    _label_ends(axis, labels)
    axis.set(xlabel="optimiser step", ylabel="accepted tokens a pass, bonus included")
    agreement = estimate_agreement(run)
    return finish(figure, finding, f"{agreement + '; ' if agreement else ''}bars: 95 % intervals over prompts. {_note(run)}")


def throughput(run: Run) -> Plot:
    """Real and padded tokens a second against training minutes; shaded until the rate is steady.

    Dashed: the plan's prediction where it holds one (``tokens_per_second``), else the run's mean.
    """
    figure, axes = new_figure()
    axis = axes[0, 0]
    if not len(run):
        return _nothing(run, figure, axis)
    told = np.isfinite(run.steps["seconds_step"]) & np.isfinite(run.steps["tokens"])
    seconds, tokens, padded = (run.steps[name][told] for name in ("seconds_step", "tokens", "padded_tokens"))
    if not seconds.sum() > 0:
        return _not_told(run, figure, axis, "step with both its seconds and its tokens")
    minutes = np.cumsum(seconds) / 60
    bins = np.minimum((minutes / minutes[-1] * BINS).astype(int), BINS - 1) if len(seconds) > BINS else np.arange(len(seconds))
    middle = np.bincount(bins, minutes) / np.maximum(np.bincount(bins), 1)
    used = np.bincount(bins) > 0
    spent = np.bincount(bins, seconds)
    rates = {name: np.bincount(bins, made) / np.maximum(spent, 1e-9) for name, made in (("padded", padded), ("real", tokens))}
    labels = []
    for (word, values), color in zip(rates.items(), (FAINT, ACCENT), strict=True):
        axis.plot(middle[used], values[used], color=color, linewidth=1.8, marker="o" if used.sum() < 3 else None)
        labels.append((middle[used][-1], values[used][-1], f"{word} tokens", color))
    mean = float(tokens.sum() / seconds.sum())
    predicted = (run.plan or {}).get("tokens_per_second")
    axis.axhline(predicted or mean, color=ACCENT, linewidth=0.9, linestyle="--")
    steady = np.flatnonzero(rates["real"][used] >= 0.9 * np.median(rates["real"][used]))
    if len(steady) and steady[0] > 0:
        axis.axvspan(0, middle[used][steady[0]], color=FAINT, alpha=0.2, linewidth=0)
    _label_ends(axis, labels)
    axis.set(xlabel="training time (min), evaluation and checkpoints left out", ylabel="tokens/s", ylim=(0, None), xlim=(0, None))
    axis.yaxis.set_major_formatter(lambda value, _: count(value))
    whole = padded > 0
    wasted = 1 - tokens[whole].sum() / padded[whole].sum() if whole.any() else np.nan
    padding = f"{percent(wasted)} of the padded tokens are padding" if whole.any() else "how many are padding is not in the log"
    finding = f"{mean:,.0f} real tokens/s over {_span(seconds.sum())}; {padding}"
    dashed = f"the plan's, {(run.plan or {}).get('speed_source', 'predicted')}" if predicted else "mean"
    return finish(figure, finding, f"dashed: {dashed}; shaded: start-up. {_note(run)}")


def time_by_length(run: Run) -> Plot:
    """Median milliseconds a batch spends waiting for the target, in drafter and optimiser; a bar a range of lengths.

    What the workers do at the same time (target, transfer) is in it only as waiting.
    """
    figure, axes = new_figure()
    axis = axes[0, 0]
    if not len(run):
        return _nothing(run, figure, axis)
    labels, group = length_ranges(run)
    parts = {stage: values for stage, values in batch_seconds(run).items() if np.isfinite(values).any()}
    if not parts:
        return _not_told(run, figure, axis, "seconds of a batch")
    counts = np.bincount(group, minlength=len(labels))
    medians = {stage: 1000 * np.nan_to_num([median_of(values[group == i]) for i in range(len(labels))]) for stage, values in parts.items()}
    left = np.zeros(len(labels))
    for stage, values in medians.items():
        axis.barh(np.arange(len(labels)), values, left=left, color=STAGE_COLORS[stage], edgecolor="white", linewidth=0.5)
        left += values
    for i, (end, n) in enumerate(zip(left, counts, strict=True)):
        axis.text(end, i, f"  {end:,.0f} ms, n = {n:,}", va="center", fontsize=8)
    longest = int(np.argmax(left))
    start = 0.0
    for stage, values in medians.items():
        if values[longest] > 0.08 * left.max():
            axis.text(
                start + values[longest] / 2, longest, STAGE_WORDS[stage], ha="center", va="center", fontsize=7, color="white", clip_on=True
            )
        start += values[longest]
    axis.set_yticks(np.arange(len(labels)), labels)
    axis.xaxis.set_major_formatter(lambda value, _: count(value))
    axis.set(xlabel="median time a batch (ms)", ylabel="length range (tokens)", xlim=(0, left.max() * 1.25 or 1))
    axis.grid(False)
    total = {stage: float(np.nansum(values)) for stage, values in parts.items()}
    whole = sum(total.values()) or 1.0
    most = max(total, key=total.get)
    finding = f"{percent(total[most] / whole)} of the training time goes into {STAGE_WORDS[most]}"
    if most != "wait" and "wait" in total:
        finding += f", {percent(total['wait'] / whole)} into waiting for the target"
    words = ", ".join(f"{STAGE_WORDS[stage]} {percent(value / whole)}" for stage, value in total.items())
    return finish(figure, finding, f"in order: {words}. {_note(run)}")


def queues(run: Run) -> Plot:
    """What waited in q_prefetch and q_hs at each step, against capacity, with the share of time empty and full.

    q_hs has two limits, places and bytes. It is drawn in the unit of the one that binds, so that a full window looks full.
    """
    figure, axes = new_figure(2, 1, height=4.6, sharex=True)
    if not len(run):
        return _nothing(run, figure, axes[0, 0])
    if not np.isfinite(run.steps["seconds_step"]).any():
        return _not_told(run, figure, axes[0, 0], "seconds of a step")
    seconds = np.maximum(np.nan_to_num(run.steps["seconds_step"]), 1e-9)
    minutes = np.cumsum(seconds) / 60
    thin = _thin(len(run))
    prefetch, (places, fitting) = run.config.get("prefetch"), window_room(run)
    mebibytes, limit = run.steps["q_hs_bytes"] / 2**20, run.config.get("q_hs_mb")
    # Full is where no usual batch has room. When the log is written, the place of the batch just taken is being computed for.
    if places <= fitting:
        q_hs = ("q_hs (batches)", run.steps["q_hs"], places, places - 1)
        held = f"never held more than {np.nanmax(mebibytes, initial=0):,.0f} of {limit:,} MiB" if limit else ""
        binds = f"q_hs: its {places} places bind" + (f", it {held}" if held else "")
        if not np.isfinite(run.steps["q_hs"]).any() or (limit and not np.isfinite(mebibytes).any()):
            binds = f"q_hs: {places} places; which limit binds is not in the log"
    else:
        q_hs = ("q_hs (MiB)", mebibytes, limit, limit - limit / fitting)
        binds = f"q_hs: its {limit:,} MiB bind, about {fitting:.1f} batches, before its {places} places do"
    rows = (("q_prefetch (batches)", run.steps["q_prefetch"], prefetch, 0.9 * (prefetch or np.inf)), q_hs)
    empty_share = []
    for axis, (label, depth, capacity, enough) in zip(axes[:, 0], rows, strict=True):
        axis.set_ylabel(label)
        if not np.isfinite(depth).any():
            axis.text(0.5, 0.5, "not in this log", ha="center", va="center", transform=axis.transAxes, fontsize=8, color=INK)
            empty_share.append(np.nan)
            continue
        empty = depth == 0
        full = ~empty & (depth >= enough)
        axis.fill_between(minutes[thin], depth[thin], color=ACCENT, alpha=0.35, step="post", linewidth=0)
        axis.plot(minutes[thin], smoothed(depth.astype(float))[thin], color=ACCENT, linewidth=1.4, marker="o" if len(run) == 1 else None)
        for where, color in ((empty, WARN), (full, FAINT)):
            transform = axis.get_xaxis_transform()
            axis.fill_between(minutes[thin], 0, 1, where=where[thin], color=color, alpha=0.2, transform=transform, step="post", linewidth=0)
        if capacity:
            axis.axhline(capacity, color=INK, linewidth=0.8, linestyle="--")
            axis.text(0.995, capacity, f"capacity {capacity:,}", fontsize=7, transform=axis.get_yaxis_transform(), ha="right", va="bottom")
        empty_share.append(float(seconds[empty].sum() / seconds.sum()))
        shares = f"empty {percent(empty_share[-1], 0)}, full {percent(seconds[full].sum() / seconds.sum(), 0)} of the time"
        axis.text(0.01, 0.97, shares, fontsize=8, transform=axis.transAxes, va="top")
        axis.set(ylim=(0, max(float(np.nanmax(depth)), capacity or 0) * 1.25 or 1))
    axes[1, 0].set_xlabel("training time (min)")
    wait = run.steps["seconds_wait"]
    waiting = float(np.nansum(wait) / seconds.sum())
    # A short plan is read to its end at once, and q_prefetch is empty from then on: reading must also take longer than the target.
    fetch, target = (float(np.nansum(run.steps[f"seconds_{stage}"])) for stage in ("fetch", "target"))
    if not np.isfinite(wait).any():
        finding = f"What limits is not known: none of {len(run):,} steps says how long the drafter waited"
    elif waiting > 0.1 and empty_share[0] > 0.5 and fetch > target:
        finding = f"Reading data limits: the drafter waited {percent(waiting)} of the time, and no batch stood ready for the target"
    elif waiting > 0.1:
        finding = f"The target limits: the drafter waited {percent(waiting)} of the time"
    else:
        finding = f"The drafter limits: it waited only {percent(waiting)} of the time"
    return finish(figure, finding, f"orange: empty; grey: full; dashed: capacity. {binds}. {_note(run)}")


def _nothing(run: Run, figure, axis: Axes) -> Plot:
    axis.text(0.5, 0.5, "no step yet", ha="center", transform=axis.transAxes, color=INK)
    return finish(figure, f"0 optimiser steps were written so far: the run is {run.status}", run.folder.name)


def _not_told(run: Run, figure, axis: Axes, what: str) -> Plot:
    axis.text(0.5, 0.5, "not in this log", ha="center", transform=axis.transAxes, color=INK)
    return finish(figure, f"The log of {len(run):,} optimiser steps holds no {what}, so there is nothing to draw", _note(run))


def _thin(n: int) -> np.ndarray:
    """Indices of at most MOST_POINTS points for the eye, the last one among them."""
    return np.unique(np.linspace(0, n - 1, min(n, MOST_POINTS)).astype(int))


def _ends(losses: np.ndarray) -> tuple[float, float, int]:
    """Median loss at both ends over 5 % of the steps, between 1 and 20, and over how many."""
    finite = losses[np.isfinite(losses)]
    over = max(1, min(20, round(len(finite) * 0.05)))
    return (float(np.median(finite[:over])), float(np.median(finite[-over:])), over) if len(finite) else (np.nan, np.nan, 0)


def _mark_events(run: Run, axis: Axes) -> None:
    for event in run.events_of("resume"):
        axis.axvline(event["step"] + 0.5, color=INK, linewidth=0.9, linestyle=":")
    saved = [event["step"] for event in run.events_of("checkpoint")]
    axis.plot(saved, np.full(len(saved), 0.01), "|", color=INK, markersize=6, transform=axis.get_xaxis_transform())


def _at(steps: np.ndarray, values: np.ndarray, step: int) -> float:
    """The value after ``step``; 0 before the first."""
    index = int(np.searchsorted(steps, step, side="right")) - 1
    return float(values[index]) if index >= 0 else 0.0


def _label_ends(axis: Axes, labels: list[tuple[float, float, str, str]]) -> None:
    """Names of lines at their right ends, pushed apart where they would overlap."""
    low, high = axis.get_ylim()
    placed: list[float] = []
    for x, y, text, color in sorted((label for label in labels if np.isfinite(label[1])), key=lambda label: label[1]):
        place = max([y, *(other + 0.055 * (high - low) for other in placed[-1:])])
        placed.append(place)
        axis.annotate(text, (x, place), xytext=(4, 0), textcoords="offset points", color=color, fontsize=8, va="center")
    axis.margins(x=0.02)
    left, right = axis.get_xlim()
    axis.set_xlim(left, right + 0.2 * (right - left))


def _note(run: Run) -> str:
    return f"{run.folder.name}, {run.status}, {len(run):,} steps, seed {run.config.get('seed', 'unknown')}"


def _span(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds < 120 else f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
