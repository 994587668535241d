"""The vital signs of a diagnosis: a table with a row a question, and OK or LOOK.

OK means that a check was made and found nothing. Where the log does not hold the number, or is too short for its checks, the mark is empty.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import chi2

from dflash_nb.analysis.findings import CHECKS
from dflash_nb.analysis.findings.curve import late_steps
from dflash_nb.analysis.findings.finding import Log, Severity
from dflash_nb.analysis.findings.spikes import find_spikes
from dflash_nb.analysis.running import slope

if TYPE_CHECKING:
    from dflash_nb.analysis.diagnose import Diagnosis

TAIL = 0.2  # share of the steps, at the end, whose slope is the trend
TAU = "tau, tokens a target pass"
TELLS = {
    "finite losses": ("not finite",),
    "trend of the last fifth": ("divergence", "nothing learned", "rate too low", "plateau"),
    "spikes in 1,000 steps": ("spikes",),
    "steps until a spike is over": ("divergence",),
    "held-out loss": ("held-out drifts",),
    TAU: ("acceptance stuck", "decoding accepts nothing"),
    "clipped": ("always clipped",),
    "waited for the target": ("starved",),
}
NOT_KNOWN = ("not known", "")


def signs(diagnosis: "Diagnosis") -> list[dict[str, Any]]:
    """Rows of sign, value, interval and OK, note, LOOK or STOP; ``not known`` where the log does not hold it."""
    log = diagnosis.log
    if not len(log):
        return [{"sign": name, "value": "no step yet", "interval": "", "": ""} for name in TELLS]
    values = {
        "finite losses": (f"{np.mean(log.run.steps['finite']):.2%} of the steps", ""),
        "trend of the last fifth": _trend(log),
        "spikes in 1,000 steps": _spike_rate(log),
        "steps until a spike is over": _recovery(log),
        "held-out loss": _heldout(log),
        TAU: _tau(log),
        "clipped": _clipped(log),
        "waited for the target": (_waited(log), ""),
    }
    silent = {name for name, value in values.items() if value == NOT_KNOWN}
    silent |= set() if len(late_steps(log)) else {"clipped"}
    silent |= set() if _accepts(log) else {TAU}
    judged = {check.kind for check in CHECKS} - {each.check.kind for each in diagnosis.unjudged}
    worst = {finding.kind: finding.severity for finding in diagnosis.findings}
    words = {None: "OK", Severity.NOTE: "note", Severity.LOOK: "LOOK", Severity.STOP: "STOP"}
    rows = []
    for name, (value, interval) in values.items():
        found = max((worst[kind] for kind in TELLS[name] if kind in worst), default=None)
        known = found is not None or (name not in silent and not judged.isdisjoint(TELLS[name]))
        rows.append({"sign": name, "value": value, "interval": interval, "": words[found] if known else ""})
    return rows


def _trend(log: Log) -> tuple[str, str]:
    """Slope of the adjusted loss over the last fifth of the steps."""
    pace, interval = _pace(log, slice(len(log) - max(20, int(TAIL * len(log))), None)) if len(log) >= 30 else ("not known", "")
    return (f"{pace} nats in 1,000 steps" if interval else pace), interval


def _pace(log: Log, inside: slice) -> tuple[str, str]:
    step, loss = log.step_N[inside], log.parts.adjusted_N[inside]
    known = np.isfinite(loss)
    found = slope(step[known], loss[known])
    if found is None:
        return "not known", ""
    value, error = 1000 * found[0], 1000 * found[1]
    return f"{value:+.3f}", f"{value - 2 * error:+.3f} to {value + 2 * error:+.3f}"


def _spike_rate(log: Log) -> tuple[str, str]:
    if len(log) < 30:
        return "not known", ""
    count = len(np.unique(find_spikes(log).step_S))
    steps = max(np.ptp(log.step_N) + _apart(log), len(log))
    low, high = (1000 * bound / steps for bound in _poisson(count))
    return f"{1000 * count / steps:.1f}", f"{low:.1f} to {high:.1f}"


def _apart(log: Log) -> int:
    """Steps from one row of the log to the next: programs log every step, or every tenth."""
    return max(1, int(np.median(np.diff(log.step_N)))) if len(log) > 1 else 1


def _poisson(count: int) -> tuple[float, float]:
    """Exact 95 % interval of a Poisson mean after ``count`` events (Garwood 1936)."""
    return (float(chi2.ppf(0.025, 2 * count) / 2) if count else 0.0), float(chi2.ppf(0.975, 2 * count + 2) / 2)


def _recovery(log: Log) -> tuple[str, str]:
    """Median and longest number of steps until the adjusted loss is within two sd of its trend again."""
    found = find_spikes(log)
    if not len(found):
        return "no spike", ""
    z = (log.parts.adjusted_N - log.parts.trend_N) / log.parts.noise_N
    calm = np.flatnonzero(z < 2)
    rows = np.unique(log.run.batches["at"][found.batch_S])
    after = np.searchsorted(calm, rows)
    step = np.append(log.step_N, log.step_N[-1] + _apart(log))
    times = step[np.append(calm, len(log))[after]] - step[rows]
    return f"{int(np.median(times))}", f"longest {times.max()}"


def _heldout(log: Log) -> tuple[str, str]:
    """First and last held-out loss; the first is that of the untrained drafter where it was measured."""
    found = [(event["step"], event["loss"]) for event in log.run.events_of("eval") if event.get("loss") is not None]
    if not found:
        return NOT_KNOWN
    return f"{_ends([loss for _, loss in found], 3)} at step {found[-1][0]:,}", ""


def _tau(log: Log) -> tuple[str, str]:
    """First and last tau, and the interval of the last over prompts."""
    found = _taus(log)
    if not found:
        return NOT_KNOWN
    last = found[-1]
    low, high = last.get("tau_low"), last.get("tau_high")
    interval = f"{low:.2f} to {high:.2f}" if None not in (low, high) else ""
    return f"{_ends([event['tau'] for event in found], 2)} at step {last['step']:,}", interval


def _accepts(log: Log) -> bool:
    """Whether decoding surely accepts drafts after training: a tau whose interval is above 1."""
    found = _taus(log)
    return bool(found) and found[-1]["step"] > 0 and (found[-1].get("tau_low") or found[-1]["tau"]) > 1


def _taus(log: Log) -> list[dict[str, Any]]:
    return [event for event in log.run.events_of("eval") if event.get("tau") is not None]


def _ends(values: list[float], digits: int) -> str:
    return " → ".join(f"{value:.{digits}f}" for value in values[: 1 if len(values) > 1 else 0] + values[-1:])


def _clipped(log: Log) -> tuple[str, str]:
    """Share of all steps, and of the late ones that are judged: a steep start is clipped in many healthy runs."""
    if not log.has("grad_norm") or not log.has("clipped"):
        return NOT_KNOWN
    clipped, late = log.run.steps["clipped"], late_steps(log)
    value = f"{np.nanmean(clipped):.0%} of the steps"
    return (f"{value}, {clipped[late].mean():.0%} of the last {len(late):,}" if len(late) else value), ""


def _waited(log: Log) -> str:
    seconds, wait = log.run.steps["seconds_step"], log.run.steps["seconds_wait"]
    if not np.isfinite(wait).any() or not np.nansum(seconds):
        return "not known"
    return f"{np.nansum(wait) / np.nansum(seconds):.0%} of the time"
