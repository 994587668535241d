"""Several runs side by side: adjusted curves at equal steps and at equal tokens, and what differs in their configurations.

Runs with different batches can only be compared with the mix of lengths taken off. So the same ranges of lengths are laid over all of
them, and each curve is the loss that the run would have had with the mix of all runs together. A run whose lengths come in order cannot
tell level from trend; it takes the levels of the first run that can, at the same steps. A step of one run is not a step of another, so
the fairer axis is supervised tokens seen. Where objective, block size, target or dataset differ the losses are no one quantity, and then
no gap between them is given.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from dflash_nb.analysis.csvlog import read_log
from dflash_nb.analysis.decompose import Parts, decompose, joined_edges, mean_lengths
from dflash_nb.analysis.findings.finding import Log, listed, plural
from dflash_nb.analysis.findings.process import static_composition
from dflash_nb.analysis.running import MEDIAN_ERROR, running_median, scale_of

NO_BEARING = frozenset(
    (
        "run_name", "runs_dir", "resume", "watch", "log_every", "tracker", "threads",
        "checkpoint_every", "checkpoint_minutes", "keep_checkpoints",
    )
)  # fmt: skip
FEWEST = 12  # steps below which their spread around a running median of seven says nothing
NOT_IN_LOG = "not in the log"
SETTING = "setting"  # column of the settings that differ, beside one named after each run
ONE_QUANTITY = ("at equal steps", "at equal tokens", "error")  # columns that mean nothing beside another quantity
OTHER_LOSS = ("objective", "gamma", "block_size", "target", "dataset")  # settings under which two losses are not one quantity


@dataclass(frozen=True, eq=False)
class Line:
    """One run's curve: the adjusted loss by ``step`` and by ``tokens`` seen so far.

    noise: robust sd of a step around it. jumps: robust sd of the changes from step to step as logged; adjusted_jumps: with the mix off.
    All three are NaN below FEWEST steps.
    """

    name: str
    step: np.ndarray
    tokens: np.ndarray
    adjusted: np.ndarray
    noise: float
    jumps: float
    adjusted_jumps: float


@dataclass(frozen=True, eq=False)
class Comparison:
    """Curves of several runs, what they say in a sentence, a row a setting that differs, and a row a run with its losses."""

    lines: tuple[Line, ...]
    finding: str
    note: str
    tokens_word: str
    differs: list[dict[str, Any]]
    rows: list[dict[str, Any]]


def compare_with(log: Log, others: Sequence[str], columns: str = "") -> Comparison:
    """``compare`` a log with those at the paths ``others``; run folders and CSV exports may be mixed."""
    return compare([log, *(Log(read_log(path, columns if Path(path).is_file() else "")) for path in others)])


def compare(logs: Sequence[Log]) -> Comparison:
    """Compare the runs at the last step, and at the last token, that all of them have reached. Logs without a loss, of steps or
    of batches, are left out by name.
    """
    logs = list(logs)
    empty = [log for log in logs if not len(log) or not np.isfinite(log.run.steps["loss"]).any()]
    bare = [log for log in logs if log not in empty and not np.isfinite(log.parts.adjusted_N).any()]
    logs = [log for log in logs if log not in empty and log not in bare]
    names = _names(logs)
    word = _tokens_word(logs)
    static = [static_composition(log) for log in logs]
    ordered = [finding is not None and finding.data["ordered"] for finding in static]
    lines = _lines(logs, names, word, ordered)
    differs = differing_settings(logs, names)
    other, unknown = _other_losses(differs, names)
    rows, sentence = _at_equals(lines, word, bool(other))
    if lines and all(ordered):
        sentence += "; lengths come in order in all of them, so their mix cannot be taken off"
    smooth = [name for name, finding in zip(names, static, strict=True) if finding is not None]
    if smooth and len(lines) > 1:
        sentence += f"; {listed(smooth)} {'is' if len(smooth) == 1 else 'are'} smooth by composition"
    if other and len(lines) > 1:
        differ = f"{listed(other)} {'differs' if len(other) == 1 else 'differ'}"
        sentence = f"These {len(lines)} losses are not one quantity, {differ}: no gap is given, compare the shapes only{sentence}"
    elif unknown and len(lines) > 1:
        sentence += f"; whether {listed(unknown)} agree is not in every log"
    note = f"without a loss: {listed([log.run.folder.name for log in empty])}. " if empty else ""
    note += f"without losses and weights of batches: {listed([log.run.folder.name for log in bare])}. " if bare else ""
    return Comparison(tuple(lines), sentence, f"{note}adjusted to the common mix of lengths", word, differs, rows)


def differing_settings(logs: Sequence[Log], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row a setting that is not the same in all configurations, with its value in each run as text."""
    keys = sorted({key for log in logs for key in log.run.config} - NO_BEARING)
    rows = []
    for key in keys:
        values = [str(log.run.config.get(key, NOT_IN_LOG)) for log in logs]
        if len(set(values)) > 1:
            rows.append({SETTING: key, **dict(zip(names, values, strict=True))})
    return rows


def _other_losses(differs: Sequence[dict[str, Any]], names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings by which the losses are known to be different quantities, and those of which a log does not say."""
    other, unknown = [], []
    for row in differs:
        if row[SETTING] in OTHER_LOSS:
            known = {row[name] for name in names} - {NOT_IN_LOG}
            (other if len(known) > 1 else unknown).append(row[SETTING])
    return other, unknown


def _names(logs: Sequence[Log]) -> list[str]:
    """Folder names, numbered where they repeat or are called as a column of ours: no two are one."""
    folders = [log.run.folder.name for log in logs]
    taken, names = {SETTING, *folders}, []
    for folder in folders:
        name = folder
        if folders.count(folder) > 1 or folder == SETTING:
            name = next(numbered for number in count(1) if (numbered := f"{folder} ({number})") not in taken)
            taken.add(name)
        names.append(name)
    return names


def _tokens_word(logs: Sequence[Log]) -> str:
    for column, word in (("supervised", "supervised tokens seen"), ("tokens", "tokens seen")):
        if logs and all(np.isfinite(np.asarray(log.run.steps[column], float)).all() for log in logs):
            return word
    return "steps (a log counts no tokens)"


def _lines(logs: Sequence[Log], names: Sequence[str], word: str, ordered: Sequence[bool]) -> list[Line]:
    edges = _common_edges(logs)
    taken = [decompose(log.run, edges) if edges is not None else log.parts for log in logs]
    standard = _standard(logs, taken)
    mixed = next((i for i, in_order in enumerate(ordered) if not in_order), None) if edges is not None else None
    lines = []
    for log, parts, name, in_order in zip(logs, taken, names, ordered, strict=True):
        if in_order and mixed is not None:
            values = _with_levels_of(logs[mixed], taken[mixed], standard, log, parts)
        else:
            values = parts.adjusted_N + _shift(log, parts, standard, log.step_N)
        known = np.isfinite(values)
        values = values[known]
        column = {"supervised tokens seen": "supervised", "tokens seen": "tokens"}.get(word)
        seen = np.cumsum(log.run.steps[column]) if column else log.step_N
        curve = running_median(values, int(np.clip(len(values) // 30, 3, 200)))
        seen = np.asarray(seen, float)[known]
        scattered = values - curve, np.diff(log.run.steps["loss"][known]), np.diff(values)
        spreads = [scale_of(part) if len(values) >= FEWEST else np.nan for part in scattered]
        lines.append(Line(name, log.step_N[known], seen, curve, *spreads))
    return lines


def _common_edges(logs: Sequence[Log]) -> np.ndarray | None:
    """Edges of one set of ranges for all runs; None where a log knows no lengths."""
    means = [mean_lengths(log.run) for log in logs]
    if not means or any(not np.isfinite(mean).all() or not mean.any() for mean in means):
        return None
    return joined_edges(np.concatenate(means))


def _standard(logs: Sequence[Log], taken: Sequence[Parts]) -> dict[str, float]:
    """Share of each range of lengths in the slot weights of all runs, each run counting the same."""
    share: dict[str, float] = {}
    for log, parts in zip(logs, taken, strict=True):
        weight = np.nan_to_num(log.run.batches["weight"])
        total = np.bincount(parts.group_M, weight, minlength=len(parts.groups)) / max(weight.sum(), 1e-12)
        for name, part in zip(parts.groups, total, strict=True):
            share[name] = share.get(name, 0.0) + float(part) / len(logs)
    return share


def _shift(log: Log, parts: Parts, standard: dict[str, float], steps: np.ndarray) -> np.ndarray:
    """What the standard mix adds to the run's own at each of ``steps``; ranges that the run never saw are left out."""
    total, shift = 0.0, np.zeros(len(steps))
    for g, name in enumerate(parts.groups):
        level = _level(log, parts, g, steps)
        if np.isfinite(level).all():
            total += standard[name]
            shift += standard[name] * level
    return shift / max(total, 1e-12)


def _with_levels_of(mixed: Log, mixed_parts: Parts, standard: dict[str, float], log: Log, parts: Parts) -> np.ndarray:
    """Loss of every step of ``log`` with its mix taken off by the levels that the run ``mixed`` has at the same steps."""
    at, weight = log.run.batches["at"], np.nan_to_num(log.run.batches["weight"])
    level = np.full(len(at), np.nan)
    for g in range(len(parts.groups)):
        mine = parts.group_M == g
        level[mine] = _level(mixed, mixed_parts, g, log.step_N[at[mine]])
    mix = np.bincount(at, weight * level, len(log)) / np.maximum(np.bincount(at, weight, len(log)), 1e-12)
    return log.run.steps["loss"] - mix + _shift(mixed, mixed_parts, standard, log.step_N)


def _level(log: Log, parts: Parts, group: int, steps: np.ndarray) -> np.ndarray:
    """Level of a range of lengths at ``steps``; NaN where the run never saw it."""
    mine = np.flatnonzero(parts.group_M == group)
    known = log.step_N[log.run.batches["at"][mine]]
    return np.interp(steps, known, parts.level_M[mine]) if len(mine) else np.full(len(steps), np.nan)


def _at_equals(lines: Sequence[Line], word: str, apart: bool) -> tuple[list[dict[str, Any]], str]:
    """Rows of the table and what they say; without losses where these are known to be ``apart``."""
    if len(lines) < 2:
        one = f"{lines[0].name}, {lines[0].step[-1]:,} steps, stands alone" if lines else "0 runs with a loss to compare"
        return _rows(lines, None, None), f"{one}: name other runs with compare to see them on one axis"
    step, tokens = min(line.step[-1] for line in lines), min(line.tokens[-1] for line in lines)
    rows = _rows(lines, step, tokens)
    if apart:
        return [{name: value for name, value in row.items() if name not in ONE_QUANTITY} for row in rows], ""
    best, other = sorted(rows, key=lambda row: row["at equal tokens"])[:2]
    gap = other["at equal tokens"] - best["at equal tokens"]
    noise = 2 * float(np.hypot(best["error"], other["error"]))
    few = [line for line in lines if line.name in (best["run"], other["run"]) and not np.isfinite(line.noise)]
    apart_by = f"{best['run']} is {gap:.3f} lower than {other['run']}"
    lead = apart_by if few or gap > noise else f"{best['run']} and {other['run']} are not apart"
    steps = other["at equal steps"] - best["at equal steps"]
    too_few = listed([f"{plural(len(line.step), 'step')} of {line.name}" for line in few])
    sure = f"too few steps to know the noise: {too_few}" if few else f"noise {noise:.3f}"
    return rows, f"At {tokens:,.0f} {word} {lead} ({sure}); at step {step:,} by {steps:+.3f}"


def _rows(lines: Sequence[Line], step: float | None, tokens: float | None) -> list[dict[str, Any]]:
    rows = []
    for line in lines:
        window = min(len(line.step), 2 * int(np.clip(len(line.step) // 30, 3, 200)) + 1)
        rows.append(
            {
                "run": line.name,
                "steps": int(line.step[-1]),
                "at equal steps": float(np.interp(line.step[-1] if step is None else step, line.step, line.adjusted)),
                "at equal tokens": float(np.interp(line.tokens[-1] if tokens is None else tokens, line.tokens, line.adjusted)),
                "error": MEDIAN_ERROR * line.noise / np.sqrt(window),
                "jumps as logged": line.jumps,
                "jumps, mix off": line.adjusted_jumps,
            }
        )
    return rows
