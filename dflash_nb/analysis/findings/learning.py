"""Who learns and who does not: ranges of lengths, later slots of a block, acceptance, decoding, held-out data."""

import numpy as np

from dflash_nb.analysis.findings.finding import Finding, Log, Severity, listed
from dflash_nb.analysis.running import MEDIAN_ERROR, median_of, running_median, scale_of

LEARNED_LITTLE = 0.25  # fall of a range of lengths over the fall of the others
SINCE = (0.05, 0.15, 0.3, 0.5)  # shares of the steps from which falls are counted: the steep start is shared by all lengths
MATTERS = 0.04  # fall of the others, as a share of the loss, from which it says something
SURE = 4.0  # standard errors; many ranges and times are asked
LEAST_BATCHES = 5
STANDS_STILL, FALLS_ON, FAR_APART = 0.05, 0.1, 0.15  # of the loss: held-out fall that is none, training fall that is one, a wide gap
DECODED = 0.12  # tokens that decoding accepts over those that blocks of text do
SLOT_LEARNED_LITTLE = 0.1  # rise of a slot's accuracy over the first slot's


def group_not_learning(log: Log) -> Finding | None:
    """A range of lengths whose loss stays while that of the others falls, from some time on to the end."""
    found = []
    for since in SINCE:
        rows = falls_by_group(log, since)
        for row in rows:
            others = [other for other in rows if other is not row]
            if not others:
                continue
            weight = np.array([1 / max(other["error"], 1e-9) ** 2 for other in others])
            usual = float(np.average([other["fall"] for other in others], weights=weight))
            error = float(np.hypot(LEARNED_LITTLE / np.sqrt(weight.sum()), row["error"]))
            sure = (LEARNED_LITTLE * usual - row["fall"]) / max(error, 1e-9)
            if sure > SURE and usual > MATTERS * abs(row["early"]):
                found.append({**row, "usual": usual, "sure": sure, "rows": rows})
    slow = {row["lengths"] for row in found}
    if not slow or len(slow) > len(log.parts.groups) / 2:
        return None
    worst = max(found, key=lambda row: row["usual"])
    names = [name for name in log.parts.groups if name in slow]
    steps = log.step_N[log.run.batches["at"][np.isin(log.parts.group_M, [log.parts.groups.index(name) for name in names])]]
    return Finding(
        "group does not learn",
        Severity.LOOK,
        f"Lengths {listed(names)} do not learn: their loss fell by {worst['fall']:.2f} since step {worst['since']:,}, "
        f"that of the others by {worst['usual']:.2f}",
        tuple(f"lengths {row['lengths']}: {row['early']:.3f} → {row['late']:.3f} (± {2 * row['error']:.3f})" for row in worst["rows"]),
        0.98,
        np.unique(steps),
        "Look at the labels and the loss mask of samples of these lengths: truncated, shuffled or without supervision?",
        {"rows": worst["rows"], "slow": names},
    )


def falls_by_group(log: Log, since: float = SINCE[0]) -> list[dict]:
    """A row a range of lengths: loss after the share ``since`` of the steps and over the last fifth, its fall and the error of that.

    Losses are trend + level of the range, both medians over the same steps for all ranges. A range with too few batches has no row.
    """
    parts, at, n = log.parts, log.run.batches["at"] if len(log) else np.zeros(0), len(log)
    start = int(since * n)
    early, late = (at >= start) & (at < start + max(n // 8, 1)), at >= n - max(n // 5, 1)
    trend_early, trend_late = (median_of(parts.trend_M[where]) for where in (early, late))
    rows = []
    for g, name in enumerate(parts.groups if n else ()):
        around = parts.loss_M - parts.trend_M
        sides = [around[where & (parts.group_M == g) & np.isfinite(around)] for where in (early, late)]
        if min(map(len, sides)) < LEAST_BATCHES:
            continue
        before, after = trend_early + float(np.median(sides[0])), trend_late + float(np.median(sides[1]))
        error = MEDIAN_ERROR * np.hypot(*(max(scale_of(side), 1e-6) / np.sqrt(len(side)) for side in sides))
        rows.append(
            {
                "lengths": name,
                "batches": int((parts.group_M == g).sum()),
                "since": int(log.step_N[start]),
                "early": before,
                "late": after,
                "fall": before - after,
                "error": float(error),
            }
        )
    return rows


def later_slots(log: Log) -> Finding | None:
    """Slots at the end of a block that gain nothing while the first ones do."""
    accuracy = log.run.steps["slot_accuracy"]
    if accuracy.ndim != 2 or accuracy.shape[1] < 3:
        return None
    early, late = slot_profile(log)
    first = late[0]
    if not first > 0.15 or not first - early[0] > 0.1:
        return None
    rise = late - early
    dead = np.flatnonzero(rise < SLOT_LEARNED_LITTLE * rise[0])
    dead = dead[dead > 0]
    expected = first ** np.arange(1, len(late) + 1)
    dead = dead[late[dead] < 0.35 * np.maximum(expected[dead], 0.25 * first)]
    if not len(dead) or dead[-1] != len(late) - 1 or len(dead) < max(1, len(late) // 3):
        return None
    return Finding(
        "later slots do not learn",
        Severity.LOOK,
        f"Slots {dead[0] + 1} to {len(late)} of a block do not learn: accuracy {late[dead[0]]:.0%} where slot 1 has {first:.0%}",
        tuple(f"slot {k + 1}: {early[k]:.1%} → {late[k]:.1%}" for k in range(len(late))),
        0.95,
        log.step_N,
        "Look at the block mask and the positions of the slots: each must see the context and the whole block; look at gamma as well",
        {"early": early, "late": late},
    )


def slot_profile(log: Log) -> tuple[np.ndarray, np.ndarray]:
    """Mean accuracy of each slot over the first tenth and the last fifth of the steps."""
    accuracy, weight = log.run.steps["slot_accuracy"], np.nan_to_num(log.run.steps["blocks"].astype(float), nan=1.0)
    n = len(accuracy)
    parts = accuracy[: max(1, n // 10)], accuracy[-max(1, n // 5) :]
    weights = weight[: max(1, n // 10)], weight[-max(1, n // 5) :]
    return tuple(_column_means(part, w) for part, w in zip(parts, weights, strict=True))


def _column_means(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    known = np.isfinite(values)
    total = (known * weight[:, None]).sum(axis=0)
    return np.where(total > 0, (np.nan_to_num(values) * weight[:, None]).sum(axis=0) / np.maximum(total, 1e-12), np.nan)


def acceptance_stuck(log: Log) -> Finding | None:
    """The loss has fallen, and still no drafted token is accepted: in training blocks, or in decoding only."""
    acceptance = running_median(log.run.steps["acceptance"], 20)
    loss = log.parts.adjusted_N
    known = loss[np.isfinite(loss)]
    if len(known) < 100 or log.phase.name == "warm-up":
        return None
    now = float(np.median(acceptance[-max(20, len(acceptance) // 10) :]))
    taus = [(event["step"], event["tau"]) for event in log.run.events_of("eval") if event.get("tau") is not None and event["step"] > 0]
    accuracy = slot_profile(log)[1] if log.has("slot_accuracy") else np.array([np.nan])
    if now < 1.05 and np.nanmax(accuracy) > 0.2:
        return Finding(
            "acceptance stuck",
            Severity.STOP,
            f"Acceptance is stuck at {now:.2f} although {np.nanmax(accuracy):.0%} of a later slot's tokens are right",
            tuple(f"slot {k + 1}: {value:.1%}" for k, value in enumerate(accuracy)),
            0.95,
            log.step_N,
            "Stop. Labels and slots are shifted against each other: slot k must predict the token k places after the anchor",
        )
    if taus and now > 1.8 and taus[-1][1] - 1 < DECODED * (now - 1):
        return Finding(
            "decoding accepts nothing",
            Severity.STOP,
            f"Decoding accepts next to nothing (tau {taus[-1][1]:.2f}) although blocks of text are accepted for {now:.2f} tokens",
            (f"training blocks {now:.2f}", *(f"tau {tau:.2f} at step {step:,}" for step, tau in taus[-3:])),
            0.95,
            np.array([step for step, _ in taus]),
            "Stop. Training sees what decoding does not: its own future, another mask token, or texts that the target would not write",
        )
    return None


def heldout_drift(log: Log) -> Finding | None:
    """Held-out loss rises from its best, or stands still, while the training loss falls on."""
    evals = [(event["step"], event["loss"]) for event in log.evaluations()]
    if len(log) < 2 * len(evals):
        return None
    steps, held = (np.array(values, float) for values in zip(*evals, strict=True))
    adjusted = running_median(log.parts.adjusted_N, int(np.clip(len(log) // 30, 3, 50)))
    train = adjusted[np.clip(np.searchsorted(log.step_N, steps), 0, len(log) - 1)]
    best, third = int(np.argmin(held)), 2 * len(held) // 3
    noise = float(np.median(np.abs(np.diff(held, 2)))) / 2 if len(held) > 3 else 0.0
    rise, fell = float(held[-1] - held[best]), float(train[best] - train[-1])
    rises = best < len(held) - 1 and rise > max(0.02 * held[best], 3 * noise) and fell > 0.3 * rise
    apart = (held[-1] - train[-1]) - (held[third - 1] - train[third - 1])
    stands = (
        len(held) > 3
        and held[third - 1] - held[-1] < STANDS_STILL * held[-1]
        and train[third - 1] - train[-1] > FALLS_ON * train[third - 1]
        and held[-1] - train[-1] > FAR_APART * held[-1]
        and apart > 3 * noise
    )
    if not rises and not stands:
        return None
    since = steps[best] if rises else steps[third - 1]
    how = f"has risen from {held[best]:.2f} at step {since:,.0f} to" if rises else f"no longer falls since step {since:,.0f},"
    return Finding(
        "held-out drifts",
        Severity.LOOK,
        f"Held-out loss {how} {held[-1]:.2f}, while the training loss falls on, to {train[-1]:.2f}",
        tuple(f"step {step:,.0f}: held-out {a:.3f}, training {b:.3f}" for step, a, b in zip(steps, held, train, strict=True))[-6:],
        0.95,
        steps.astype(int),
        f"The drafter learns its data by heart: use the checkpoint near step {steps[best]:,.0f}, fewer epochs, or more data",
        {"steps": steps, "heldout": held, "train": train},
    )
