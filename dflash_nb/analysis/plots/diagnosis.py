"""Notebook 04: is the run healthy, and what makes the curve move? Every function takes a :class:`~dflash_nb.analysis.diagnose.Diagnosis`.

A group of lengths keeps its colour and marker on every picture. A log without lengths, without spikes, or of one step draws too: what
cannot be shown is said in words. At most 4,000 points are drawn, always with every spike.
"""

import textwrap

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from dflash_nb.analysis.compare import Comparison
from dflash_nb.analysis.diagnose import EARLY, Diagnosis
from dflash_nb.analysis.findings.learning import falls_by_group, slot_profile
from dflash_nb.analysis.findings.spikes import Spikes, find_spikes, spike_rates
from dflash_nb.analysis.running import median_of

from .style import ACCENT, FAINT, INK, OKABE_ITO, WARN, Plot, bucket_colors, bucket_marker, finish, new_figure, percent, plain_log

MOST_POINTS = 4000
BAND = 4  # robust standard deviations on each side of the baseline
LEGEND_LINE = 100  # characters
DASHES = ("-", "--", "-.", ":")
ZOOM = 50  # steps on each side of the worst spike


def curve(diagnosis: Diagnosis) -> Plot:
    """Loss of every batch by step, coloured by length, with the adjusted curve and the spikes; gradient norm, rate and waiting below."""
    log = diagnosis.log
    figure, axes = new_figure(4, 1, height=7.0, sharex=True, gridspec_kw={"height_ratios": [4, 1.2, 1, 1]})
    top, norm, rate, wait = axes[:, 0]
    if not len(log):
        return _nothing(diagnosis, figure, top)
    spikes = find_spikes(log)
    _batches(top, diagnosis, spikes)
    parts, step = log.parts, log.step_N
    thin = _thin(len(step))
    width = BAND * parts.noise_N
    top.fill_between(step[thin], (parts.trend_N - width)[thin], (parts.trend_N + width)[thin], color=ACCENT, alpha=0.12, linewidth=0)
    top.plot(step[thin], parts.trend_N[thin], color=ACCENT, linewidth=1.8)
    top.set_ylabel("loss (nats)")
    _robust_limits(top, parts.loss_M, spikes)
    run = log.run
    _strip(norm, step, run.steps["grad_norm"], "gradient\nnorm", log_scale=True)
    _strip(rate, step, run.steps["lr"], "learning\nrate")
    waited = 100 * run.steps["seconds_wait"] / np.where(run.steps["seconds_step"] > 0, run.steps["seconds_step"], np.nan)
    _strip(wait, step, waited, "waited\n(% of time)", top=100)
    wait.set_xlabel("optimiser step")
    for event in run.events_of("resume"):
        for axis in axes[:, 0]:
            axis.axvline(event["step"] + 0.5, color=INK, linewidth=0.8, linestyle=":")
    first, last = _ends(parts.trend_N)
    finding = f"{diagnosis.verdict}: adjusted loss {first:.2f} → {last:.2f} over {len(log):,} steps"
    finding += f", {len(spikes)} spike{'' if len(spikes) == 1 else 's'} above the baseline" if len(log) >= EARLY else ", too few to judge"
    return finish(
        figure, finding, f"line: adjusted loss (mix of lengths taken off), band ± {BAND} robust sd; dotted: resume. {_note(diagnosis)}"
    )


def zoom(diagnosis: Diagnosis) -> Plot:
    """The worst spike and the 50 steps on each side; without one the highest batch."""
    log = diagnosis.log
    figure, axes = new_figure(height=3.2)
    axis = axes[0, 0]
    if not len(log) or not np.isfinite(log.parts.z_M).any():
        return _nothing(diagnosis, figure, axis)
    spikes, parts = find_spikes(log), log.parts
    worst = int(np.nanargmax(parts.z_M))
    at = int(log.run.batches["at"][worst])
    low, high = max(0, at - ZOOM), min(len(log) - 1, at + ZOOM)
    inside = (log.run.batches["at"] >= low) & (log.run.batches["at"] <= high)
    _batches(axis, diagnosis, spikes, inside)
    axis.plot(log.step_N[low : high + 1], parts.trend_N[low : high + 1], color=ACCENT, linewidth=1.8)
    own = inside & (parts.group_M == parts.group_M[worst])
    axis.plot(log.step_N[log.run.batches["at"][own]], (parts.trend_M + parts.level_M)[own], color=INK, linewidth=1.2, linestyle="--")
    axis.set(xlabel="optimiser step", ylabel="loss (nats)")
    name = "The worst spike" if len(spikes) else "No spike; the highest batch"
    finding = (
        f"{name} is at step {log.step_N[at]:,}: {parts.residual_M[worst]:+.2f} from the baseline of lengths "
        f"{parts.groups[parts.group_M[worst]]}, {parts.z_M[worst]:.1f} robust sd"
    )
    note = f"± {ZOOM} steps; line: adjusted loss, dashed: baseline of these lengths. {_note(diagnosis)}"
    return finish(figure, finding, note)


def by_length(diagnosis: Diagnosis) -> Plot:
    """Loss by step, a panel a range of lengths with one shared axis: levels differ, and that is no spike."""
    log = diagnosis.log
    if not len(log):
        figure, axes = new_figure()
        return _nothing(diagnosis, figure, axes[0, 0])
    parts = log.parts
    count = len(parts.groups)
    columns = 2 if count == 4 else min(3, count)
    rows = -(-count // columns)
    figure, axes = new_figure(rows, columns, height=1.6 + 1.7 * rows, sharex=True, sharey=True)
    colors, step_M = bucket_colors(count), log.step_N[log.run.batches["at"]]
    for g, axis in enumerate(axes.flat):
        if g >= count:
            axis.set_visible(False)
            continue
        mine = np.flatnonzero(parts.group_M == g)
        mine = mine[_thin(len(mine), MOST_POINTS // count)] if len(mine) else mine
        axis.plot(step_M[mine], parts.loss_M[mine], bucket_marker(g), color=colors[g], markersize=2.5, alpha=0.5, markeredgewidth=0)
        axis.plot(step_M[mine], (parts.trend_M + parts.level_M)[mine], color=INK, linewidth=1.2)
        axis.set_title(f"{parts.groups[g]}  (n = {int((parts.group_M == g).sum()):,})", fontsize=8)
    _robust_limits(axes.flat[0], parts.loss_M, find_spikes(log))
    figure.supylabel("loss (nats)", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("optimiser step")
    levels = [parts.level_of(g) for g in range(count)]
    order = np.argsort([level.value for level in levels])
    known = int(np.isfinite([level.value for level in levels]).sum())
    if known > 1:
        low, high = order[0], order[known - 1]  # NaN come last
        gap = levels[high].value - levels[low].value
        finding = f"Lengths {parts.groups[high]} lie {gap:.2f} nats above lengths {parts.groups[low]}: a level, not a spike"
    else:
        losses = int(np.isfinite(parts.loss_M).sum())
        finding = f"{losses:,} of {len(parts.loss_M):,} batches have a loss, in lengths {parts.groups[0]}: no levels to tell apart"
    return finish(figure, finding, f"line: baseline of these lengths. {_note(diagnosis)}")


def adjusted(diagnosis: Diagnosis) -> Plot:
    """The loss of each step as logged and with the mix of lengths taken off, one above the other on one scale."""
    log = diagnosis.log
    figure, axes = new_figure(2, 1, height=4.6, sharex=True, sharey=True)
    if not len(log):
        return _nothing(diagnosis, figure, axes[0, 0])
    parts, step = log.parts, log.step_N
    thin = _thin(len(step))
    for axis, values, word in zip(axes[:, 0], (parts.loss_N, parts.adjusted_N), ("as logged", "mix of lengths taken off"), strict=True):
        axis.plot(step[thin], values[thin], color=FAINT, linewidth=0.7, marker="o" if len(step) == 1 else None)
        axis.plot(step[thin], parts.trend_N[thin], color=ACCENT, linewidth=1.6)
        axis.text(0.99, 0.93, word, transform=axis.transAxes, ha="right", va="top", fontsize=8)
        axis.set_ylabel("loss (nats)")
    _robust_limits(axes[0, 0], parts.loss_N)
    axes[1, 0].set_xlabel("optimiser step")
    if parts.movement is None:
        finding = f"{len(step):,} steps hold no mix of lengths that could be taken off"
    else:
        m = parts.movement
        value, low, high = (percent(max(0.0, share), 0) for share in (m.value, m.low, m.high))
        around = f"{low} to {high}" if m.low <= m.value <= m.high and m.low < m.high else f"{len(step):,} steps are too few for an interval"
        finding = f"{value} of the step-to-step movement is bucket mix ({around})"
    return finish(figure, finding, f"share of the mean square of changes; 95 % block bootstrap. {_note(diagnosis)}")


def attribution(diagnosis: Diagnosis) -> Plot:
    """Share of spikes against share of batches, a row a range of lengths, with the exact interval of its spike rate in words."""
    log = diagnosis.log
    figure, axes = new_figure(height=3.4)
    axis = axes[0, 0]
    if not len(log):
        return _nothing(diagnosis, figure, axis)
    spikes = find_spikes(log)
    rows = sorted(spike_rates(log, spikes), key=lambda row: log.parts.groups.index(row["lengths"]))
    colors = bucket_colors(len(rows))
    for i, row in enumerate(rows):
        x = 100 * row["share of batches"], 100 * row["share of spikes"]
        axis.plot(x, (i, i), color=FAINT, linewidth=1.5, zorder=1)
        axis.plot(x[0], i, "o", color="white", markeredgecolor=colors[i], markersize=8)
        axis.plot(x[1], i, bucket_marker(i), color=colors[i], markersize=8)
        text = f"{row['spikes']} of {row['batches']:,}: {percent(row['rate'], 2)} ({percent(row['low'], 2)} to {percent(row['high'], 2)})"
        axis.annotate(text, (1.02, i), xycoords=("axes fraction", "data"), fontsize=7, va="center")
    axis.set_yticks(range(len(rows)), [row["lengths"] for row in rows])
    axis.set(xlabel="% of batches (hollow), % of spikes (filled)", ylabel="lengths (tokens)", xlim=(-3, 103), ylim=(-0.6, len(rows) - 0.4))
    out = [row for row in rows if row["stands out"]]
    if not len(spikes):
        finding = f"No spike in {sum(row['batches'] for row in rows):,} batches, so there is nothing to attribute"
    elif out:
        share = percent(out[0]["share of batches"], 0)
        finding = f"Lengths {out[0]['lengths']} spike: {out[0]['spikes']} of {len(spikes)} spikes in {share} of the batches"
    else:
        finding = f"No range of lengths stands out among {len(rows)} (n = {len(spikes)} spikes)"
    return finish(figure, finding, f"intervals 95 %, exact, for all ranges together. {_note(diagnosis)}")


def residuals(diagnosis: Diagnosis) -> Plot:
    """Residual and gradient norm, a box a range of lengths."""
    log = diagnosis.log
    figure, axes = new_figure(1, 2, height=3.6)
    if not len(log):
        return _nothing(diagnosis, figure, axes[0, 0])
    parts = log.parts
    count = len(parts.groups)
    norm = log.run.steps["grad_norm"][log.run.batches["at"]]
    for axis, values, label in zip(
        axes[0], (parts.residual_M, norm), ("loss minus its baseline (nats)", "gradient norm of its step"), strict=True
    ):
        groups = [values[(parts.group_M == g) & np.isfinite(values)] for g in range(count)]
        boxes = axis.boxplot(
            groups, orientation="horizontal", patch_artist=True, widths=0.6, whis=(5, 95), flierprops={"markersize": 2, "alpha": 0.4}
        )
        for box, color in zip(boxes["boxes"], bucket_colors(count), strict=True):
            box.set(facecolor=color, alpha=0.6)
        for line in boxes["medians"]:
            line.set(color=INK)
        axis.set_yticks(range(1, count + 1), parts.groups)
        axis.set_xlabel(label)
    if np.nanmin(norm, initial=np.inf) > 0 and np.isfinite(norm).any():
        axes[0, 1].set_xscale("log")
        plain_log(axes[0, 1].xaxis)
    elif not np.isfinite(norm).any():
        axes[0, 1].text(0.5, 0.5, "no gradient norm in this log", ha="center", transform=axes[0, 1].transAxes, fontsize=8)
    spread = np.array([median_of(np.abs(parts.residual_M[parts.group_M == g])) for g in range(count)])
    if not np.isfinite(spread).any():
        finding = f"None of {len(parts.loss_M):,} batches has a loss that could scatter"
    else:
        widest = int(np.nanargmax(spread))
        who = f"Lengths {parts.groups[widest]} scatter most: half of their batches lie" if count > 1 else "Half of the batches lie"
        finding = f"{who} within ± {spread[widest]:.3f} nats of the baseline"
    return finish(figure, finding, f"boxes: quartiles, whiskers 5 to 95 %. {_note(diagnosis)}")


def slots(diagnosis: Diagnosis) -> Plot:
    """Accuracy by slot of the block, early against late in the run."""
    log = diagnosis.log
    figure, axes = new_figure(height=3.4)
    axis = axes[0, 0]
    early, late = slot_profile(log)
    if not len(late) or not np.isfinite([early[0], early[-1], late[0], late[-1]]).all():
        axis.text(0.5, 0.5, "no accuracy by slot in this log", ha="center", transform=axis.transAxes)
        return finish(figure, f"The log of {len(log):,} steps holds no accuracy by slot of the block", _note(diagnosis))
    slot = np.arange(1, len(late) + 1)
    for values, color, word, marker in ((early, FAINT, "first tenth", "o"), (late, ACCENT, "last fifth", "s")):
        axis.plot(slot, 100 * values, marker=marker, color=color, linewidth=1.6)
        axis.annotate(word, (slot[-1], 100 * values[-1]), xytext=(6, 0), textcoords="offset points", color=color, fontsize=8, va="center")
    axis.set(xlabel="slot of the block (1 follows the known token)", ylabel="tokens right (%)", ylim=(0, None), xlim=(0.8, len(slot) + 0.9))
    axis.set_xticks(slot)
    finding = f"Slot 1 went from {percent(early[0])} to {percent(late[0])} right"
    finding += f", slot {len(slot)} from {percent(early[-1])} to {percent(late[-1])}" if len(slot) > 1 else ""
    return finish(figure, finding, _note(diagnosis))


def learning(diagnosis: Diagnosis) -> Plot:
    """How far the loss of each range of lengths fell, early to late, with its 95 % interval."""
    log = diagnosis.log
    figure, axes = new_figure(height=3.2)
    axis = axes[0, 0]
    rows = falls_by_group(log) if len(log) else []
    if not rows:
        axis.text(0.5, 0.5, "too few batches of any length", ha="center", transform=axis.transAxes)
        return finish(figure, f"{len(log):,} steps hold too few batches of any length to see it learn", _note(diagnosis))
    colors = bucket_colors(len(log.parts.groups))
    for i, row in enumerate(rows):
        g = log.parts.groups.index(row["lengths"])
        axis.errorbar(row["fall"], i, xerr=2 * row["error"], fmt=bucket_marker(g), color=colors[g], capsize=3)
        axis.annotate(f"{row['early']:.2f} → {row['late']:.2f}", (1.01, i), xycoords=("axes fraction", "data"), fontsize=7, va="center")
    axis.axvline(0, color=INK, linewidth=0.8)
    axis.set_yticks(range(len(rows)), [row["lengths"] for row in rows])
    axis.set(xlabel="fall of the loss (nats), early to late", ylabel="lengths (tokens)", ylim=(-0.6, len(rows) - 0.4))
    least, most = (pick(rows, key=lambda row: row["fall"]) for pick in (min, max))
    if len(rows) > 1:
        finding = (
            f"The loss fell by {most['fall']:.2f} in lengths {most['lengths']}, and by {least['fall']:.2f} in lengths {least['lengths']}"
        )
    else:
        finding = f"The loss fell by {most['fall']:.2f}, from {most['early']:.2f} to {most['late']:.2f}, in lengths {most['lengths']}"
    return finish(figure, finding, _note(diagnosis))


def comparison(compared: Comparison) -> Plot:
    """Adjusted curves of several runs on one axis: at equal steps, and at equal supervised tokens. Names of any length stand below."""
    names = ["\n".join(textwrap.wrap(line.name, LEGEND_LINE)) for line in compared.lines]
    columns = 2 if max(map(len, names), default=0) <= LEGEND_LINE // 2 else 1
    note = textwrap.wrap(compared.note, LEGEND_LINE)
    lines_of_text = len(note) + sum(name.count("\n") + 1 for name in names) / columns
    figure, axes = new_figure(1, 2, height=3.7 + 0.16 * lines_of_text, sharey=True)
    for axis, x_of, label in zip(axes[0], ("step", "tokens"), ("optimiser step", compared.tokens_word), strict=True):
        for i, line in enumerate(compared.lines):
            x = getattr(line, x_of)
            thin = _thin(len(x))
            color, dash = run_style(i)
            axis.plot(x[thin], line.adjusted[thin], color=color, linewidth=1.6, linestyle=dash, marker="o" if len(x) == 1 else None)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel(label)
    axes[0, 0].set_ylabel("adjusted loss (nats)")
    if not names:
        return finish(figure, compared.finding, compared.note)
    below = {"loc": "outside lower left", "alignment": "left", "frameon": False, "handlelength": 3.5, "fontsize": 7, "title_fontsize": 7}
    # The small print is the legend's title: the layout gives the two one strip, where long names would run into it.
    legend = figure.legend(axes[0, 0].lines, names, title="\n".join(note), ncols=columns, **below)
    legend.get_title().set_color("#666666")
    return finish(figure, compared.finding)


def run_style(index: int) -> tuple[str, str]:
    """Colour and dash of a run among others: 32 combinations, each round of the eight colours one dash further on."""
    turn = index // len(OKABE_ITO)
    return OKABE_ITO[(index + OKABE_ITO.index(ACCENT)) % len(OKABE_ITO)], DASHES[(index + turn) % len(DASHES)]


def _batches(axis: Axes, diagnosis: Diagnosis, spikes: Spikes, inside: np.ndarray | None = None) -> None:
    """Points of batches by group, spikes ringed and the six highest named."""
    log = diagnosis.log
    parts, step_M = log.parts, log.step_N[log.run.batches["at"]]
    shown = np.flatnonzero(np.ones(len(step_M), bool) if inside is None else inside)
    keep = np.union1d(shown[_thin(len(shown))], np.intersect1d(shown, spikes.batch_S)).astype(int)
    colors = bucket_colors(len(parts.groups))
    for g, name in enumerate(parts.groups):
        mine = keep[parts.group_M[keep] == g]
        axis.plot(
            step_M[mine], parts.loss_M[mine], bucket_marker(g), color=colors[g], markersize=3, alpha=0.55, markeredgewidth=0, label=name
        )
    ringed = np.intersect1d(shown, spikes.batch_S).astype(int)
    axis.plot(step_M[ringed], parts.loss_M[ringed], "o", color="none", markeredgecolor=WARN, markersize=9, markeredgewidth=1.4)
    for batch in ringed[np.argsort(-parts.z_M[ringed])][:6]:
        axis.annotate(
            f"{step_M[batch]:,}", (step_M[batch], parts.loss_M[batch]), xytext=(6, 2), textcoords="offset points", fontsize=7, color=WARN
        )
    if len(parts.groups) > 1:
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 1.0), "borderaxespad": 0.0}
        axis.legend(fontsize=7, ncols=min(6, len(parts.groups)), frameon=False, handletextpad=0.2, columnspacing=1.2, **place)


def _strip(axis: Axes, step: np.ndarray, values: np.ndarray, label: str, log_scale: bool = False, top: float | None = None) -> None:
    axis.set_ylabel(label, fontsize=8)
    if not np.isfinite(values).any():
        axis.text(0.5, 0.5, "not in this log", ha="center", va="center", transform=axis.transAxes, fontsize=8, color=FAINT)
        axis.set_yticks([])
        return
    thin = _thin(len(step))
    axis.plot(step[thin], values[thin], color=INK, linewidth=0.6, marker="o" if len(step) == 1 else None, markersize=3)
    if log_scale and np.nanmin(values) > 0:
        axis.set_yscale("log")
        plain_log(axis.yaxis, wide=np.nanmax(values) > 30 * np.nanmin(values))
    else:
        axis.set_ylim(0, top)


def _robust_limits(axis: Axes, losses: np.ndarray, spikes: Spikes | None = None) -> None:
    """A y axis that a steep start does not flatten: where the first eighth of the losses takes most of the range, it is cut off."""
    known = losses[np.isfinite(losses)]
    rest = known[len(known) // 8 :]
    if len(rest) < 20:
        return
    low, high = float(rest.min()), float(rest.max())
    if spikes is not None and len(spikes):
        high = max(high, float(np.nanmax(losses[spikes.batch_S])))
    if known.max() - low > 2.5 * (high - low):
        axis.set_ylim(low - 0.08 * (high - low), high + 0.3 * (high - low) + 1e-6)
        axis.text(0.995, 0.03, "steep start cut off", transform=axis.transAxes, fontsize=7, ha="right", color=FAINT)


def _thin(n: int, most: int = MOST_POINTS) -> np.ndarray:
    return np.unique(np.linspace(0, n - 1, min(n, max(1, most))).astype(int)) if n else np.zeros(0, int)


def _ends(values: np.ndarray) -> tuple[float, float]:
    known = values[np.isfinite(values)]
    return (float(known[0]), float(known[-1])) if len(known) else (0.0, 0.0)


def _nothing(diagnosis: Diagnosis, figure, axis: Axes) -> Plot:
    axis.text(0.5, 0.5, "no step yet", ha="center", transform=axis.transAxes, color=INK)
    return finish(
        figure,
        f"No loss was written yet (0 of {len(diagnosis.log):,} steps): the run is {diagnosis.log.run.status}",
        diagnosis.log.run.folder.name,
    )


def _note(diagnosis: Diagnosis) -> str:
    run = diagnosis.log.run
    return f"{run.folder.name}, {run.status}, {len(run):,} steps, seed {run.config.get('seed', 'unknown')}"
