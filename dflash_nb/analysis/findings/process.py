"""How the run was run: order and make-up of its batches, borders, resumes, stages, plan, and how it ended."""

import numpy as np

from dflash_nb.analysis.findings.finding import Finding, Log, Severity, plural
from dflash_nb.analysis.findings.spikes import is_short
from dflash_nb.analysis.running import median_of, scale_of
from dflash_nb.planner.diversity import AchievedBatches, chance_run, lag1, longest_run, repeated_mates

LOST = 0.25  # rise at a resume over what had been learned from which the weights count as lost
MOSTLY_WAITING = 0.8  # share of the time
MUCH_SLOWER = 3.0


def static_composition(log: Log) -> Finding | None:
    """Groups that stay the same, or lengths in order: a curve that is smooth for the wrong reason."""
    run = log.run
    evidence = []
    again = mates_again(log)
    if again is not None and again > 0.5:
        evidence.append(f"{again:.0%} of the pairs that share a batch in the second epoch shared one in the first")
    if len(run.ids) and len(run.batches["at"]) >= 40:
        ran = _achieved(log, slice(None))
        order, run_length = lag1(ran), longest_run(ran)
        if order > max(0.5, 5 * order.noise):
            evidence.append(
                f"a batch's mean length follows the last one's (correlation {float(order):.2f}); {int(run_length)} batches of one "
                f"length in a row, {float(chance_run(ran)):.0f} by chance"
            )
    if not evidence and run.config.get("strategy") == "sorted":
        evidence.append("strategy sorted: the same samples share a batch in every epoch")
    if not evidence:
        return None
    ordered = any("follows" in text for text in evidence)
    return Finding(
        "static composition",
        Severity.NOTE,
        "The curve is smooth by composition: "
        + ("batches come in order of length" if ordered else "the same samples share a batch in every epoch"),
        tuple(evidence),
        1.0,
        log.step_N,
        "Do not read its smoothness as quality; bucketed batches mix anew in every epoch",
        {"mates": again, "ordered": ordered},
    )


def mates_again(log: Log) -> float | None:
    """Share of the mate pairs of the second epoch that were mates in the first; None before the second epoch has 20 batches."""
    run = log.run
    epoch = run.steps["epoch"][run.batches["at"]]
    numbers = np.unique(epoch)
    if not len(run.ids) or len(numbers) < 2 or (epoch == numbers[1]).sum() < 20:
        return None
    first, second = (_achieved(log, np.flatnonzero(epoch == number)) for number in numbers[:2])
    return float(repeated_mates(second, first))


def _achieved(log: Log, which) -> AchievedBatches:
    run = log.run
    rows = np.arange(len(run.batches["at"]))[which]
    low, high = int(run.batches["ids_from"][rows[0]]), int(run.batches["ids_to"][rows[-1]])
    ids = run.ids[low:high]
    offsets = np.concatenate([[0], run.batches["ids_to"][rows] - low])
    return AchievedBatches(ids, offsets, run.batches["tokens"][rows], log.parts.group_M[rows].astype(np.int32))


def epoch_steps(log: Log) -> Finding | None:
    """The loss steps down (or up) at the border of an epoch."""
    epoch, adjusted = log.run.steps["epoch"], log.parts.adjusted_N
    borders = np.flatnonzero(np.diff(epoch) > 0) + 1
    marks = np.concatenate([[0, len(log)], borders, _resumes(log)])
    found = []
    for border in borders:
        window = int(min(40, np.abs(marks[marks != border] - border).min()))
        change = _step_at(adjusted, border, window) if window >= 10 else None
        if change and abs(change[0]) > max(6 * change[1], 0.02 * abs(median_of(adjusted))):
            found.append((int(log.step_N[border]), *change))
    if not found:
        return None
    down = found[0][1] < 0
    return Finding(
        "epoch border",
        Severity.NOTE if down else Severity.LOOK,
        f"The loss steps {'down' if down else 'up'} by {abs(found[0][1]):.2f} at the border of an epoch (step {found[0][0]:,})",
        tuple(f"step {step:,}: {change:+.3f} ± {2 * error:.3f}" for step, change, error in found),
        0.95,
        np.array([step for step, _, _ in found]),
        "Samples are seen again and known by heart: watch the held-out loss"
        if down
        else "Look at what changes with the epoch: order, data, seed",
    )


def resume_jump(log: Log) -> Finding | None:
    """The loss or the rate is another after a resume, or steps that ran twice had other losses."""
    run, found, evidence = log.run, [], []
    for event in run.events_of("dropped"):
        rows = np.searchsorted(log.step_N, np.arange(event["first"], event["last"] + 1))
        before = np.array(event.get("losses") or [], dtype=float)
        fits = rows < len(log)
        rows, before = rows[fits][: len(before)], before[: int(fits.sum())]
        again = run.steps["loss"][rows]
        differ = np.abs(again - before) > 1e-3 * np.abs(before)
        if len(before) and differ.mean() > 0.5:
            found.append(event["first"])
            evidence.append(
                f"steps {event['first']:,} to {event['last']:,} ran twice with other losses: {before[0]:.3f}, then {again[0]:.3f}"
            )
    adjusted, rate, lost = log.parts.adjusted_N, run.steps["lr"], False
    for at in _resumes(log):
        step = int(log.step_N[at - 1]) if at else 0
        window = int(min(at, len(log) - at, 30))
        change = _step_at(adjusted, at, window) if window >= 8 else None
        if change and change[0] > max(6 * change[1], 0.02 * abs(median_of(adjusted))):
            found.append(step)
            evidence.append(f"the loss rises by {change[0]:.3f} ± {2 * change[1]:.3f} at the resume after step {step:,}")
            lost |= change[0] > LOST * (median_of(adjusted[: max(5, at // 20)]) - median_of(adjusted[at - window : at]))
        if 3 < at < len(rate) and np.isfinite(rate[at - 1 : at + 1]).all() and not 0.5 < rate[at] / max(rate[at - 1], 1e-300) < 2:
            found.append(step)
            evidence.append(f"the learning rate goes from {rate[at - 1]:.1e} to {rate[at]:.1e} at the resume after step {step:,}")
    if not found:
        return None
    return Finding(
        "resume jump",
        Severity.STOP if lost else Severity.LOOK,
        f"The run goes on otherwise than before after the resume at step {found[0]:,}",
        tuple(evidence),
        0.97,
        np.unique(found),
        ("Stop. The weights were not restored: " if lost else "")
        + "See that weights, moments, schedule and the plan's position were restored, then start again from the checkpoint",
    )


def _resumes(log: Log) -> np.ndarray:
    """Rows of the first steps after a resume."""
    return np.array([np.searchsorted(log.step_N, event["step"], side="right") for event in log.run.events_of("resume")], dtype=np.int64)


def _step_at(values: np.ndarray, at: int, window: int) -> tuple[float, float] | None:
    """Change of the level at ``at`` beyond what the slope of both sides explains, and its standard error."""
    x = np.arange(-window, window) + 0.5
    y = values[at - window : at + window]
    known = np.isfinite(y)
    if known.sum() < 12:
        return None
    design = np.stack([np.ones(2 * window), x, (x > 0).astype(float)], axis=1)[known]
    weight = np.ones(known.sum())
    for _ in range(5):
        fitted, *_ = np.linalg.lstsq(design * weight[:, None], y[known] * weight, rcond=None)
        rest = y[known] - design @ fitted
        spread = max(scale_of(rest), 1e-12)
        weight = np.sqrt(np.minimum(1, 2 * spread / np.maximum(np.abs(rest), 1e-12)))
    error = spread * np.sqrt(np.linalg.pinv(design.T @ design)[2, 2])
    return float(fitted[2]), float(error)


def short_batches(log: Log) -> Finding | None:
    """Batches with less than half of the usual tokens: the last of a bucket."""
    short = np.flatnonzero(is_short(log))
    if not len(short) or len(short) > 0.2 * len(log.parts.group_M):
        return None
    spread = scale_of(log.parts.residual_M[short])
    usual = scale_of(log.parts.residual_M)
    if len(short) < 3 or spread < 1.3 * usual:
        return None
    return Finding(
        "short batches",
        Severity.NOTE,
        f"{plural(len(short), 'short batch')} scatter {spread / usual:.1f} times as far: fewer samples, more noise",
        (f"less than half of the usual tokens of their lengths; {len(short) / len(log.parts.group_M):.1%} of all batches",),
        1.0,
        np.unique(log.step_N[log.run.batches["at"][short]]),
        "No action: the last batch of a bucket holds what is left",
        {"batches": short},
    )


def starved(log: Log) -> Finding | None:
    """The drafter waits for hidden states for most of the time."""
    steps = log.run.steps
    seconds, wait = steps["seconds_step"], steps["seconds_wait"]
    skip = min(10, len(log) // 10)
    total = float(np.nansum(seconds[skip:]))
    share = float(np.nansum(wait[skip:])) / total if total else 0.0
    if share < 0.3:
        return None
    prefetch = steps["q_prefetch"][skip:]
    reading = bool(np.nansum(steps["seconds_fetch"]) > np.nansum(steps["seconds_target"]))
    side = "reading and collating" if reading else "the target"
    return Finding(
        "starved",
        Severity.LOOK if share > MOSTLY_WAITING else Severity.NOTE,
        f"The drafter waited {share:.0%} of the time: {side} limits the speed",
        (
            f"{total * share / 60:,.1f} of {total / 60:,.1f} minutes waited",
            f"reading took {np.nansum(steps['seconds_fetch']):,.1f} s, the target {np.nansum(steps['seconds_target']):,.1f} s; "
            f"q_prefetch median {median_of(prefetch):.0f}, q_hs median {median_of(steps['q_hs'][skip:]):.0f}",
        ),
        1.0,
        log.step_N[skip:],
        "More prefetch, or faster storage" if reading else "More target workers (topology), or a smaller target batch",
        {"share": share},
    )


def slower(log: Log) -> Finding | None:
    """Batches of the same lengths take much longer than before: in one stage, or in all of them, as on a machine with other work."""
    steps = log.run.steps
    whole = _slowdown(log, steps["seconds_step"])
    if whole is None or whole[0] < 1.7 or np.log(whole[0]) < 2 * whole[1]:
        return None
    own = _slowdown(log, steps["seconds_drafter"] + steps["seconds_optimizer"])
    everything = own is not None and own[0] > 0.5 * whole[0]
    return Finding(
        "slower",
        Severity.LOOK if whole[0] > MUCH_SLOWER and not everything else Severity.NOTE,
        f"A step takes {whole[0]:.1f} times as long as earlier for the same lengths"
        + (", in all stages" if everything else ", the drafter's own part does not" if own is not None else ""),
        ("medians of the last quarter of the batches against the second",),
        0.95,
        log.step_N[-(len(log) // 4) :],
        "Look for other work on the machine, or heat" if everything else "Look at the target workers, the storage and the queues",
        {"factor": whole[0]},
    )


def _slowdown(log: Log, seconds_N: np.ndarray) -> tuple[float, float] | None:
    """Factor between the last and the second quarter of the batches, lengths taken off, and the spread (logarithm) in the second."""
    at = log.run.batches["at"]
    rest = np.log(np.maximum(seconds_N[at], 1e-9)) - np.log(np.bincount(at, minlength=len(log))[at])
    for g in range(len(log.parts.groups)):
        mine = log.parts.group_M == g
        rest[mine] -= median_of(rest[mine])
    quarter = len(rest) // 4
    if quarter < 25 or not np.isfinite(rest).any():
        return None
    before = rest[quarter : 2 * quarter]
    return float(np.exp(median_of(rest[-quarter:]) - median_of(before))), scale_of(before)


def off_plan(log: Log) -> Finding | None:
    """Padding or speed is not what the plan promised."""
    run = log.run
    epochs = run.plan.get("epochs") or []
    padded, tokens = (sum(epoch.get(name) or 0 for epoch in epochs) for name in ("padded_tokens", "tokens"))
    evidence = []
    made_N, whole_N, seconds_N = (run.steps[name] for name in ("tokens", "padded_tokens", "seconds_step"))
    counted = np.isfinite(made_N) & np.isfinite(whole_N)
    done = float(whole_N[counted].sum())
    if padded and done and len(log) >= 50:
        planned, achieved = 1 - tokens / padded, 1 - float(made_N[counted].sum()) / done
        if abs(achieved - planned) > 0.05:
            evidence.append(f"padding {achieved:.1%} of padded tokens, planned {planned:.1%}")
    promised = run.plan.get("tokens_per_second")
    timed = np.isfinite(made_N) & np.isfinite(seconds_N)
    seconds = float(seconds_N[timed].sum())
    if promised and seconds and len(log) >= 50:
        rate = float(made_N[timed].sum()) / seconds
        if rate < 0.8 * promised:
            evidence.append(f"{rate:,.0f} real tokens/s, planned {promised:,.0f}")
    if not evidence:
        return None
    return Finding(
        "off plan",
        Severity.NOTE,
        f"Not as planned: {evidence[0]}",
        tuple(evidence),
        1.0,
        log.step_N,
        "Look at notebook 02's cost model and at the queues in notebook 03; a run in its first epoch may still even out",
    )


def not_finished(log: Log) -> Finding | None:
    """The run ended before its plan did."""
    run = log.run
    if run.status not in ("unfinished", "interrupted", "failed"):
        return None
    total = log.phase.total_steps
    of = f" of {total:,}" if total else ""
    last = int(log.step_N[-1])
    words = {"unfinished": "stopped without a word", "interrupted": "was interrupted", "failed": "failed"}[run.status]
    evidence = [run.status_text()]
    if run.status == "failed":
        evidence.append(str((run.summary or {}).get("error") or "no error was written"))
    if run.half_line:
        evidence.append("the last line of the log is half-written: the process was killed")
    return Finding(
        "not finished",
        Severity.NOTE if run.status == "interrupted" else Severity.LOOK,
        f"The run {words} at step {last:,}{of}",
        tuple(evidence),
        1.0,
        log.step_N[-1:],
        f"Continue it: notebook 03 with -p resume {run.folder}",
    )


def holes(log: Log) -> Finding | None:
    """Lines of the log that cannot be read, or steps that are missing."""
    missing = np.flatnonzero(np.diff(log.step_N) != 1)
    usual = len(missing) > 0.5 * len(log)  # a tracker that keeps every tenth step
    if not log.run.bad_lines and (usual or not len(missing)):
        return None
    evidence = [f"{plural(log.run.bad_lines, 'line')} could not be read"] if log.run.bad_lines else []
    evidence += [f"step {log.step_N[i]:,} is followed by step {log.step_N[i + 1]:,}" for i in missing[:3]] if not usual else []
    return Finding(
        "holes",
        Severity.NOTE,
        f"The log has holes: {evidence[0]}",
        tuple(evidence),
        1.0,
        log.step_N[missing] if not usual else log.step_N[:0],
        "Findings rest on the lines that are there",
    )
