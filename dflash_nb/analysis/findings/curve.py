"""What the curve as a whole does: not finite, rising, flat, falling too slowly, clipped, and the two harmless causes of movement.

Everything is asked of the adjusted loss (the mix of lengths taken off), and a change counts when it exceeds its standard error several
times and is large enough to matter. Standard errors of medians are 1.25 times those of means (normal noise).
"""

import numpy as np

from dflash_nb.analysis.findings.finding import Finding, Log, Severity, plural
from dflash_nb.analysis.running import MEDIAN_ERROR, median_of, running_median, scale_of

SURE = 6.0  # standard errors of a rise that stops a run
MOSTLY_CLIPPED = 0.5  # share of the steps from which clipping is the rule: the median norm is above the limit
FAR_OVER = 10.0  # median gradient norm over its limit from which clipping is more than a scale, which AdamW ignores
STANDSTILL = 0.01  # fall over half of a run that counts as none, as a share of the loss (and a third of that of the whole fall)
STRAIGHT = 0.4  # least fall a unit of summed rate, second half over first, of a loss that falls in a straight line
SLOW_RATE, FAST_RATE = 1e-4, 1e-2  # peak rates beyond these are unusual for a drafter, AdamW or Muon
USUAL_RATE = "published drafters train with AdamW at 6e-4, this project's sample with Muon at 5e-3"


def not_finite(log: Log) -> Finding | None:
    """A loss or gradient that is NaN or infinite, in the log or as the error that ended the run."""
    run = log.run
    bad = np.flatnonzero(~run.steps["finite"]) if len(log) else np.zeros(0, int)
    error = (run.summary or {}).get("error") or ""
    ended = error.startswith("FloatingPointError")
    if not len(bad) and not ended:
        return None
    steps = run.steps["step"][bad] if len(bad) else run.steps["step"][-1:] + 1
    ids = _ids_of_steps(log, bad[:1])
    where = f"first at step {steps[0]:,}" if len(bad) else f"the run ended on it after step {run.steps['step'][-1]:,}"
    evidence = [f"{plural(len(steps), 'step')} without a finite loss or gradient norm"]
    evidence += [f"error: {error}"] if ended else []
    evidence += [f"samples of the first such step: {', '.join(map(str, ids[:16]))}"] if len(ids) else []
    return Finding(
        "not finite",
        Severity.STOP,
        f"Loss or gradient is not a finite number: {plural(len(steps), 'step')}, {where}",
        tuple(evidence),
        1.0,
        steps,
        "Stop. Go back to the last checkpoint before it, look at that step's samples, and lower learning_rate or the peak of warm-up",
        {"ids": ids},
    )


def diverged(log: Log) -> Finding | None:
    """The loss has risen above its best and stays there."""
    loss, step = _adjusted(log)
    if len(loss) < 20:
        return None
    window = int(np.clip(len(loss) // 20, 5, 100))
    trend = running_median(loss, max(3, window // 2))
    noise = scale_of(loss - trend)
    settled = slice(window // 2, len(loss) - window)
    best_at = int(np.argmin(trend[settled])) + window // 2
    best, now, first = trend[best_at], float(np.median(loss[-window:])), float(np.median(loss[: max(1, window // 4)]))
    error = MEDIAN_ERROR * noise * np.sqrt(2 / window)
    rise = now - best
    if rise < SURE * error or rise < 0.25 * noise or rise < 0.05 * abs(best) or not _same_lengths(log, step, best_at, window):
        return None
    norm = log.run.steps["grad_norm"]
    known = norm[np.isfinite(norm)]
    evidence = [
        f"best: {best:.3f} at step {step[best_at]:,}; now {now:.3f}, {rise:.3f} higher, {rise / error:.0f} standard errors",
        f"first loss {first:.3f}" + (", so it is above its start" if now > first else ""),
    ]
    if len(known) > 2 * window:
        evidence.append(f"gradient norm: median {np.median(known[:-window]):.3g} before, {np.median(known[-window:]):.3g} now")
    return Finding(
        "divergence",
        Severity.STOP,
        f"The loss has left its best, {best:.2f} at step {step[best_at]:,}, and stands at {now:.2f}",
        tuple(evidence),
        0.99,
        step[best_at:],
        "Stop. Resume from a checkpoint before that step with a third of learning_rate, or a longer warm-up",
        {"best": best, "now": now, "at": int(step[best_at])},
    )


def nothing_learned(log: Log) -> Finding | None:
    """The loss is where it started, and was nowhere else, at a rate that should have moved it."""
    loss, step = _adjusted(log)
    if len(loss) < 60 or log.after_warmup().sum() < 40 or log.phase.peak < SLOW_RATE:
        return None
    noise = scale_of(loss)
    first = loss[: max(10, len(loss) // 12)]
    parts = [first, *np.array_split(loss, 4)]
    medians = np.array([np.median(part) for part in parts])
    error = MEDIAN_ERROR * noise / np.sqrt(len(first))
    moved = float(np.ptp(medians))
    x = np.linspace(-1, 1, len(loss))
    pace = abs(float(x @ (loss - np.median(loss)))) / (max(noise, 1e-12) * float(np.sqrt(x @ x)))  # slope in standard errors
    logged = log.run.steps["loss"][np.isfinite(log.run.steps["loss"])]
    fell_at_once = logged[0] - logged[10:].max() > noise  # a level cannot be told for one batch, so as logged
    if fell_at_once or pace > SURE or moved > max(SURE * error, 0.002 * abs(medians[0])) or moved > 0.05 * abs(medians[0]):
        return None
    return Finding(
        "nothing learned",
        Severity.STOP,
        f"The loss is where it began: {medians[0]:.3f} at first, {medians[-1]:.3f} now",
        (f"medians of the quarters differ by {moved:.4f}, noise {2 * error:.4f}", f"learning rate {log.phase.peak:.1e} at its peak"),
        0.98,
        step,
        "Stop. The weights do not move: see that the drafter's parameters are in the optimiser and not frozen",
    )


def rate_too_low(log: Log) -> Finding | None:
    """A small rate, and a loss that falls in a straight line or not at all: far from any bend."""
    loss, step = _adjusted(log)
    warm = int(min(log.phase.warmup_steps, len(loss)))
    after = loss[warm:]
    if len(after) < 60 or not log.phase.peak < SLOW_RATE or log.phase.name == "warm-up":
        return None
    rate = np.nan_to_num(log.run.steps["lr"][np.isfinite(log.run.steps["loss"])][warm:])
    third = len(after) // 3
    first, middle, last = (part for part in np.array_split(after, 3))
    early, late = _fall(first, middle), _fall(middle, last)
    spent = [rate[:third].sum() + rate[third : 2 * third].sum(), rate[third : 2 * third].sum() + rate[2 * third :].sum()]
    early_speed, late_speed = early[0] / max(spent[0], 1e-300), late[0] / max(spent[1], 1e-300)
    moved = early[0] + late[0]
    flat = abs(moved) < 3 * np.hypot(early[1], late[1])
    if not flat and not late_speed > STRAIGHT * early_speed > 0:
        return None
    pace = moved / (2 * len(after) / 3) * 1000
    how = "does not move" if flat else f"falls in a straight line, {pace:.2f} in 1,000 steps"
    return Finding(
        "rate too low",
        Severity.LOOK,
        f"The learning rate, {log.phase.peak:.1e} at most, is low: the loss {how}",
        (
            f"fall from the first third after warm-up to the second {early[0]:.4f} ± {2 * early[1]:.4f}",
            f"and from the second to the last {late[0]:.4f} ± {2 * late[1]:.4f}",
            USUAL_RATE,
        ),
        0.9,
        step[warm:],
        "Raise learning_rate ten times (6e-4 to 5e-3 is usual) and start again",
    )


def rate_too_high(log: Log) -> Finding | None:
    """A rate far above the usual ones, and a loss that hardly falls after its first steps."""
    loss, step = _adjusted(log)
    after = loss[min(log.phase.warmup_steps, len(loss)) :]
    if len(after) < 60 or not log.phase.peak > FAST_RATE:
        return None
    first, middle, last = (float(np.median(part)) for part in np.array_split(after, 3))
    accepted = median_of(log.run.steps["acceptance"][-max(20, len(loss) // 5) :])
    if first - last > 0.15 * first or accepted > 1.1:
        return None
    evidence = [f"medians of the thirds after warm-up: {first:.3f}, {middle:.3f}, {last:.3f}", USUAL_RATE]
    evidence += [f"acceptance {accepted:.2f}"] if np.isfinite(accepted) else []
    return Finding(
        "rate too high",
        Severity.LOOK,
        f"The learning rate, {log.phase.peak:.1e} at its peak, is high, and the loss hardly falls: {first:.2f} to {last:.2f}",
        tuple(evidence),
        0.9,
        step[-len(after) :],
        "Lower learning_rate (6e-4 to 5e-3 is usual) and start again",
    )


def plateau(log: Log) -> Finding | None:
    """No fall over more than the last half of the planned steps, at a rate that is still high."""
    loss, step = _adjusted(log)
    total = max(log.phase.total_steps, len(loss))
    window = max(200, total // 2)
    if len(loss) - log.phase.warmup_steps < window or not log.phase.share > 0.3:
        return None
    tail = loss[-window:]
    parts = np.array_split(tail, 4)
    fall, error = _fall(np.concatenate(parts[:2]), np.concatenate(parts[2:]))
    whole = float(np.median(loss[: max(5, len(loss) // 20)]) - np.median(parts[-1]))
    if fall + 2 * error > min(STANDSTILL * abs(float(np.median(tail))), 3 * STANDSTILL * whole):
        return None
    return Finding(
        "plateau",
        Severity.LOOK,
        f"No progress over the last {window:,} steps: the loss stays at {np.median(tail):.3f}",
        (f"fall between the halves of that stretch {fall:.4f} ± {2 * error:.4f}", f"learning rate still {log.phase.share:.0%} of its peak"),
        0.9,
        step[-window:],
        "Let the rate decay (the curve usually falls again), or end the run; look for lengths that still learn",
    )


def late_steps(log: Log) -> np.ndarray:
    """Rows of the second half of the steps after warm-up that say whether they were clipped; none where they are fewer than 30."""
    after = np.flatnonzero(log.after_warmup())
    late = after[len(after) // 2 :]
    late = late[np.isfinite(log.run.steps["clipped"][late])]
    return late if len(late) >= 30 else late[:0]


def always_clipped(log: Log) -> Finding | None:
    """Clipping is the rule, not the exception. AdamW and Muon hardly feel a common factor: only far above the limit is it more than a note.

    On the embedded sample, with the defaults, 62 % of the late steps are clipped at 1.1 times the limit, and the run learns.
    """
    limit = float(log.run.config.get("grad_clip") or 0)
    late = late_steps(log)
    if not len(late):
        return None
    clipped, norm = log.run.steps["clipped"][late].astype(bool), log.run.steps["grad_norm"][late]
    share, over = float(clipped.mean()), median_of(norm) / limit if limit else np.nan
    if share < MOSTLY_CLIPPED:
        return None
    severity = Severity.LOOK if over > FAR_OVER else Severity.NOTE
    twice = f"{2 * median_of(norm):.2g}"
    return Finding(
        "always clipped",
        severity,
        f"{share:.0%} of the last {plural(len(late), 'step')} were clipped"
        + (f"; the gradient norm is {over:.1f} times the limit of {limit:g}" if limit else ""),
        (f"median gradient norm {median_of(norm):.3g}",),
        1.0,
        log.step_N[late],
        f"Raise grad_clip to about {twice}, twice the median norm, so that it cuts spikes only"
        if severity
        else f"No action needed: grad_clip acts as a scale; about {twice}, twice the median norm, would cut spikes only",
        {"share": share, "over": over},
    )


def warming_up(log: Log) -> Finding | None:
    """The rate still rises to its peak."""
    phase = log.phase
    if phase.name != "warm-up":
        return None
    step = int(log.step_N[-1])
    of = f" of {phase.warmup_steps:,}" if phase.warmup_steps > step else ""
    share = f", {phase.share:.0%} of the peak {phase.peak:.1e}" if of else ""
    return Finding(
        "warm-up",
        Severity.NOTE,
        f"Still warming up, step {step:,}{of}, learning rate {phase.rate:.1e}{share}",
        (
            f"the rate has risen at every step so far; the peak comes at step {phase.warmup_steps:,}"
            if of
            else "the rate rose at every step",
        ),
        1.0,
        log.step_N,
        "Let it run. Judge the pace of the loss after warm-up",
        {"step": step, "share": phase.share},
    )


def bucket_mix(log: Log) -> Finding | None:
    """How much of the step-to-step movement is the mix of lengths."""
    movement = log.parts.movement
    if movement is None or movement.low < 0.2:
        return None
    levels = [log.parts.level_of(g) for g in range(len(log.parts.groups))]
    order = np.argsort([level.value for level in levels])  # NaN last
    low, high = order[0], order[np.isfinite([levels[g].value for g in order]).sum() - 1]
    return Finding(
        "bucket mix",
        Severity.NOTE,
        f"{movement.value:.0%} of the step-to-step movement is bucket mix",
        (
            f"95 % interval {movement.low:.0%} to {movement.high:.0%}",
            f"lengths {log.parts.groups[high]} lie {levels[high].value:+.2f}, lengths {log.parts.groups[low]} {levels[low].value:+.2f} "
            "from the mean of the mix",
        ),
        0.95,
        log.step_N,
        "No action: batches of different lengths have different levels of loss. Read the adjusted curve",
        {"movement": movement, "levels": levels},
    )


def _adjusted(log: Log) -> tuple[np.ndarray, np.ndarray]:
    """Adjusted loss and number of the steps that have one."""
    adjusted = log.parts.adjusted_N
    known = np.isfinite(adjusted)
    return adjusted[known], log.step_N[known]


def _fall(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """How far the median fell, and its standard error; correlated noise is counted by the spread of ten blocks' medians."""
    error = np.hypot(_median_error(before), _median_error(after))
    return float(np.median(before) - np.median(after)), float(error)


def _median_error(values: np.ndarray) -> float:
    detrended = values - np.polyval(np.polyfit(np.arange(len(values)), values, 1), np.arange(len(values))) if len(values) > 2 else values
    plain = MEDIAN_ERROR * scale_of(detrended) / np.sqrt(max(1, len(values)))
    if len(values) < 50:
        return float(plain)
    blocks = [np.median(block) for block in np.array_split(detrended, 10)]
    return float(max(plain, np.std(blocks, ddof=1) / np.sqrt(10)))


def _same_lengths(log: Log, step: np.ndarray, best_at: int, window: int) -> bool:
    """Whether the steps around the best and the last ones hold like lengths; where they do not, a rise may be composition."""
    at, group = log.run.batches["at"], log.parts.group_M
    where = np.searchsorted(log.step_N, [step[max(0, best_at - window // 2)], step[min(len(step) - 1, best_at + window // 2)]])
    count = len(log.parts.groups)
    best = np.bincount(group[(at >= where[0]) & (at <= where[1])], minlength=count)
    last = np.bincount(group[at >= len(log) - window], minlength=count)
    return bool(np.minimum(best / max(1, best.sum()), last / max(1, last.sum())).sum() > 0.4)


def _ids_of_steps(log: Log, rows: np.ndarray) -> list[int]:
    batches = np.flatnonzero(np.isin(log.run.batches["at"], rows)) if len(rows) else []
    return [int(i) for batch in batches for i in log.run.sample_ids(batch)]
