"""Who learns and who does not: ranges of lengths, later slots of a block, acceptance, decoding, held-out data."""

import numpy as np

from dflash_nb.analysis.findings.finding import Finding, Log, Severity, listed
from dflash_nb.analysis.running import MEDIAN_ERROR, running_median, scale_of

LEARNED_LITTLE = 0.4  # fall of a range of lengths over the fall of the others
SLOT_LEARNED_LITTLE = 0.1  # rise of a slot's accuracy over the first slot's


def group_not_learning(log: Log) -> Finding | None:
    """A range of lengths whose loss falls much less than that of the others."""
    rows = falls_by_group(log)
    if len(rows) < 2:
        return None
    slow = []
    for row in rows:
        others = [other for other in rows if other is not row]
        weight = np.array([1 / max(other["error"], 1e-9) ** 2 for other in others])
        usual = float(np.average([other["fall"] for other in others], weights=weight))
        error = float(1 / np.sqrt(weight.sum()))
        sure = (usual - row["fall"]) / max(1e-9, float(np.hypot(error, row["error"])))
        if usual > 4 * error and sure > 5 and row["fall"] < LEARNED_LITTLE * usual:
            slow.append({**row, "usual": usual, "sure": sure})
    if not slow or len(slow) > len(rows) / 2:
        return None
    worst = max(slow, key=lambda row: row["sure"])
    steps = log.step_N[log.run.batches["at"][log.parts.group_M == log.parts.groups.index(worst["lengths"])]]
    return Finding(
        "group does not learn",
        Severity.LOOK,
        f"Lengths {listed([row['lengths'] for row in slow])} hardly learn: their loss fell {worst['fall']:.2f}, "
        f"that of the others {worst['usual']:.2f}",
        tuple(f"lengths {row['lengths']}: {row['early']:.3f} → {row['late']:.3f} (± {2 * row['error']:.3f})" for row in rows),
        0.98,
        np.unique(steps),
        "Look at the labels and the loss mask of samples of these lengths: truncated, shuffled or without supervision?",
        {"rows": rows, "slow": [row["lengths"] for row in slow]},
    )


def falls_by_group(log: Log) -> list[dict]:
    """A row a range of lengths: median loss early and late, their difference and its standard error."""
    if not len(log):
        return []
    parts, rows = log.parts, []
    for g, name in enumerate(parts.groups):
        mine = np.flatnonzero((parts.group_M == g) & np.isfinite(parts.loss_M))
        if len(mine) < 20:
            continue
        early, late = mine[: max(4, len(mine) // 10)], mine[-max(6, len(mine) // 5) :]
        spread = [scale_of(parts.residual_M[part]) for part in (early, late)]
        error = MEDIAN_ERROR * np.hypot(spread[0] / np.sqrt(len(early)), spread[1] / np.sqrt(len(late)))
        before, after = float(np.median(parts.loss_M[early])), float(np.median(parts.loss_M[late]))
        rows.append({"lengths": name, "batches": len(mine), "early": before, "late": after, "fall": before - after, "error": float(error)})
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
    if taus and taus[-1][1] < 1.1 and now > 1.8:
        return Finding(
            "decoding accepts nothing",
            Severity.STOP,
            f"Decoding accepts nothing (tau {taus[-1][1]:.2f}) although blocks of text are accepted for {now:.2f} tokens",
            (f"training blocks {now:.2f}", *(f"tau {tau:.2f} at step {step:,}" for step, tau in taus[-3:])),
            0.95,
            np.array([step for step, _ in taus]),
            "Stop. Training sees what decoding does not: a block sees its own future, or the target would not write these texts",
        )
    return None


def heldout_drift(log: Log) -> Finding | None:
    """Held-out loss rises while the training loss falls on."""
    evals = [(event["step"], event["loss"]) for event in log.run.events_of("eval") if event.get("loss") is not None and event["step"] > 0]
    if len(evals) < 3:
        return None
    steps, held = (np.array(values, float) for values in zip(*evals, strict=True))
    adjusted = running_median(log.parts.adjusted_N, int(np.clip(len(log) // 30, 3, 50)))
    train = adjusted[np.clip(np.searchsorted(log.step_N, steps), 0, len(log) - 1)]
    best = int(np.argmin(held))
    rise, fell = float(held[-1] - held[best]), float(train[best] - train[-1])
    noise = float(np.median(np.abs(np.diff(held, 2)))) / 2 if len(held) > 3 else 0.0
    if best == len(held) - 1 or rise < max(0.02 * held[best], 3 * noise) or fell < 0.3 * rise:
        return None
    return Finding(
        "held-out drifts",
        Severity.LOOK,
        f"Held-out loss has risen from {held[best]:.2f} at step {steps[best]:,.0f} to {held[-1]:.2f} while the training loss fell on",
        tuple(f"step {step:,.0f}: held-out {a:.3f}, training {b:.3f}" for step, a, b in zip(steps, held, train, strict=True))[-6:],
        0.95,
        steps.astype(int),
        f"The drafter learns its data by heart: use the checkpoint near step {steps[best]:,.0f}, fewer epochs, or more data",
        {"steps": steps, "heldout": held, "train": train},
    )
