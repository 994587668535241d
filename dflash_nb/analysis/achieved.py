"""What a run achieved, as tables: beside what the plan promised, and by length. For notebook 03 and whoever compares runs.

Rates are tokens over the seconds of the steps themselves; order is measured on the log by the functions that notebook 02 uses on plans.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from dflash_nb.analysis.running import median_of
from dflash_nb.pipeline.run import Run
from dflash_nb.planner.diversity import AchievedBatches, lag1, longest_run, repeated_mates

MOST_RANGES = 8
STAGES = ("wait", "drafter", "optimizer")  # one after another; fetch, target and transfer run beside them


def planned_against_achieved(run: Run) -> list[dict[str, Any]]:
    """What the plan promised beside what ran, as rows for a table: steps, padding, order, mates, speed.

    Speed is promised by the run's first steps, so a run has no planned one before step 25. What rests on a number that a step or batch
    does not hold is unknown.
    """
    epochs = (run.plan or {}).get("epochs") or []
    planned = _sums(epochs)
    steps, batches = run.steps, run.batches
    tokens, padded, seconds = (float(steps[name].sum()) if len(run) else 0.0 for name in ("tokens", "padded_tokens", "seconds_step"))
    made = len(batches.get("index", ()))
    budget = run.config.get("token_budget") or 0
    ran = AchievedBatches(run.ids, np.concatenate([[0], batches["ids_to"]]), batches["tokens"], batches["bucket"]) if len(run.ids) else None
    rate = tokens / seconds if seconds else None
    rows = [
        ("optimiser steps", planned["steps"], len(run)),
        ("batches", _planned_batches(run, epochs), made if made or not len(run) else None),
        ("padding, % of padded tokens", _padding(planned["tokens"], planned["padded_tokens"]), _padding(tokens, padded)),
        ("fill, % of the budget", _fill(planned, budget), 100 * tokens / (made * budget) if made and budget else None),
        ("neighbours alike (lag-1 of mean length)", _mixing(epochs, "lag1"), _measured(lag1, ran)),
        ("longest run of one bucket, batches", _mixing(epochs, "longest_run"), _measured(longest_run, ran)),
        ("real tokens/s", (run.plan or {}).get("tokens_per_second"), rate),
        ("minutes an epoch", _minutes(planned, epochs, (run.plan or {}).get("tokens_per_second")), _minutes(planned, epochs, rate)),
    ]
    if len(epochs) > 1:
        rows.insert(6, ("mates met again in the next epoch, %", _percent(_mixing(epochs, "repeated_mates")), _percent(_mates(run, ran))))
    return [{"measure": name, "planned": _rounded(plan), "achieved": _rounded(got)} for name, plan, got in rows]


def by_length(run: Run) -> list[dict[str, Any]]:
    """A row a range of lengths, for a table: batches, padding, loss, milliseconds, tokens/s, highest memory."""
    if not len(run):
        return []
    labels, group = length_ranges(run)
    batches, parts = run.batches, np.array(list(batch_seconds(run).values()))
    timed = np.isfinite(parts).any(axis=0)
    seconds = np.where(timed, np.nansum(parts, axis=0), np.nan)
    memory = run.steps["memory_bytes"][batches["at"]] / 2**30
    rows = []
    for i, label in enumerate(labels):
        mine = group == i
        tokens, padded = batches["tokens"][mine].sum(), batches["padded_tokens"][mine].sum()
        late = np.flatnonzero(mine)[-max(1, int(mine.sum()) // 4) :]
        weight = np.where(np.isfinite(batches["loss"][late]), np.nan_to_num(batches["weight"][late]), 0.0)
        spent = seconds[mine & timed].sum()
        rows.append(
            {
                "lengths": label,
                "batches": int(mine.sum()),
                "padding %": _padding(tokens, padded),
                "loss, last quarter": float(np.nansum(batches["loss"][late] * weight) / weight.sum()) if weight.sum() else np.nan,
                "ms a batch": median_of(seconds[mine]) * 1000,
                "real tokens/s": float(batches["tokens"][mine & timed].sum() / spent) if spent else np.nan,
                "peak memory GiB": float(np.nanmax(memory[mine])) if np.isfinite(memory[mine]).any() else np.nan,
            }
        )
    return rows


def length_ranges(run: Run, most: int = MOST_RANGES) -> tuple[list[str], np.ndarray]:
    """At most ``most`` ranges of lengths with something in them, and the range of each batch.

    They are the run's buckets, neighbours joined where there are more (to about equal numbers of batches), or octaves of the padded
    length for a run without buckets. Batches that say neither have one range, not known; without a batch there is none.
    """
    lengths, buckets = run.batches["padded_length"], run.batches["bucket"]
    if not len(lengths):
        return [], np.zeros(0, dtype=np.int64)
    edges = np.array((run.buckets or {}).get("boundaries") or ())
    if not len(edges) or (buckets < 0).any() or buckets.max() >= len(edges) - 1:
        if not np.isfinite(lengths).all():
            return ["not known"], np.zeros(len(lengths), dtype=np.int64)
        edges = 2.0 ** np.arange(np.floor(np.log2(max(lengths.min(), 1))), np.ceil(np.log2(lengths.max() + 1)) + 1)
        buckets = np.searchsorted(edges, lengths, side="right") - 1
    used, group = np.unique(buckets, return_inverse=True)
    if len(used) > most:
        before = np.cumsum(np.bincount(group)) - np.bincount(group) / 2
        joined = (before / len(group) * most).astype(int)
        _, joined = np.unique(joined, return_inverse=True)
        group = joined[group]
    spans = [(buckets[group == i].min(), buckets[group == i].max()) for i in range(group.max() + 1)]
    return [f"{int(edges[low]):,} - {int(edges[high + 1]) - 1:,}" for low, high in spans], group


def batch_seconds(run: Run) -> dict[str, np.ndarray]:
    """Seconds of each batch by stage, as logged for the batch; where only its step was timed, an equal share of that."""
    at = run.batches["at"]
    share = 1.0 / np.bincount(at, minlength=len(run))[at]
    parts = {}
    for stage in STAGES:
        of_step = run.steps[f"seconds_{stage}"][at] * share
        of_batch = run.batches[f"seconds_{stage}"]
        parts[stage] = np.where(np.isfinite(of_batch), of_batch, of_step)
    return parts


def _sums(epochs: list[dict[str, Any]]) -> dict[str, int | None]:
    names = ("steps", "batches", "tokens", "padded_tokens")
    known = {name: [epoch[name] for epoch in epochs if epoch.get(name) is not None] for name in names}
    return {name: sum(values) if values and len(values) == len(epochs) else None for name, values in known.items()}


def _planned_batches(run: Run, epochs: list[dict[str, Any]]) -> int | None:
    """Batches that the planned steps take: all of an epoch, or fewer where ``max_steps`` ends it."""
    if any(epoch.get(name) is None for epoch in epochs for name in ("batches", "steps")):
        return None
    window = run.config.get("accumulation", 1)
    return sum(min(epoch["batches"], epoch["steps"] * window) for epoch in epochs) or None


def _padding(tokens: int | None, padded: int | None) -> float | None:
    return 100 * (1 - tokens / padded) if tokens and padded else None


def _fill(planned: dict[str, int | None], budget: int) -> float | None:
    return 100 * planned["tokens"] / (planned["batches"] * budget) if planned["tokens"] and planned["batches"] and budget else None


def _mixing(epochs: list[dict[str, Any]], name: str) -> float | None:
    values = [value for epoch in epochs if (value := (epoch.get("mixing") or {}).get(name)) is not None]
    return float(np.mean(values)) if values else None


def _measured(measure: Callable[[AchievedBatches], float], ran: AchievedBatches | None) -> float | None:
    return float(measure(ran)) if ran is not None and len(ran.real_tokens) > 2 else None


def _mates(run: Run, ran: AchievedBatches | None) -> float | None:
    """Share of the second epoch's pairs that were mates in the first."""
    epoch = run.steps["epoch"][run.batches["at"]] if ran is not None else np.zeros(0)
    first, second = ((epoch == number).nonzero()[0] for number in (0, 1))
    if not len(second) or not len(first):
        return None
    return float(repeated_mates(_part(ran, second), _part(ran, first)))


def _part(ran: AchievedBatches, batches: np.ndarray) -> AchievedBatches:
    """Consecutive batches of those that ran."""
    low, high = batches[0], batches[-1] + 1
    offsets = ran.offsets[low : high + 1]
    ids = ran.sample_ids[offsets[0] : offsets[-1]]
    return AchievedBatches(ids, offsets - offsets[0], ran.real_tokens[low:high], ran.bucket_ids[low:high])


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _minutes(planned: dict[str, int | None], epochs: list[dict[str, Any]], rate: float | None) -> float | None:
    return planned["tokens"] / len(epochs) / rate / 60 if planned["tokens"] and rate else None


def _rounded(value: float | None) -> str:
    """As text, since the rows of the table hold different kinds."""
    if value is None or not np.isfinite(value):
        return "unknown"
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:,.2f}"
