"""What a finding is, and the log that every check reads.

A check is a pure function from a :class:`Log` to a :class:`Finding` or None. It names the columns that it needs and the fewest steps it
can judge, so that a short or narrow log gets fewer findings and says which are missing, never a guess.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from dflash_nb.analysis.decompose import Parts, decompose
from dflash_nb.analysis.phase import Phase, phase_of
from dflash_nb.pipeline.run import Run


class Severity(IntEnum):
    """NOTE explains and leaves a run healthy; LOOK wants a person; STOP says that more steps are wasted."""

    NOTE = 0
    LOOK = 1
    STOP = 2


@dataclass(frozen=True, eq=False)
class Finding:
    """One thing seen in a log.

    kind: which check. text: the finding as a sentence with numbers. evidence: the numbers it rests on, a sentence each. confidence: 0 to
    1, one for what is counted. steps: the optimiser steps it rests on. advice: what to do. data: numbers for tables and plots.
    """

    kind: str
    severity: Severity
    text: str
    evidence: tuple[str, ...]
    confidence: float
    steps: np.ndarray
    advice: str
    data: dict[str, Any] = field(default_factory=dict)

    def where(self) -> str:
        """Its steps in words: ``steps 40, 41 and 57``, ``steps 120 to 300``."""
        steps = [int(step) for step in self.steps]
        if not steps:
            return "the whole run"
        if len(steps) > 6 or (len(steps) > 2 and steps == list(range(steps[0], steps[-1] + 1))):
            return f"{len(steps):,} steps, {steps[0]:,} to {steps[-1]:,}"
        return ("steps " if len(steps) > 1 else "step ") + listed([f"{step:,}" for step in steps])


@dataclass(frozen=True, eq=False)
class Log:
    """A run and what was computed of it once: its loss in parts and where it stands in its schedule."""

    run: Run

    @cached_property
    def parts(self) -> Parts:
        return decompose(self.run)

    @cached_property
    def phase(self) -> Phase:
        return phase_of(self.run)

    @property
    def step_N(self) -> np.ndarray:
        return self.run.steps["step"]

    def __len__(self) -> int:
        return len(self.run)

    def has(self, name: str) -> bool:
        """Whether the log holds ``name``: a column of steps, the plan, held-out evaluations, or the lengths of batches."""
        if name == "lengths":
            batches = self.run.batches
            return any(np.isfinite(batches[each]).any() for each in ("tokens", "padded_length")) or bool((batches["bucket"] >= 0).any())
        if name == "evaluations":
            return any(event.get("loss") is not None for event in self.run.events_of("eval"))
        if name == "plan":
            return bool(self.run.plan)
        column = self.run.steps.get(name)
        return column is not None and len(column) > 0 and bool(np.isfinite(np.asarray(column, float)).any())

    def evaluations(self) -> list[dict]:
        """Held-out evaluations after the first step, in order."""
        return [event for event in self.run.events_of("eval") if event.get("loss") is not None and event["step"] > 0]

    def after_warmup(self) -> np.ndarray:
        """Which steps lie after warm-up, bool[N]."""
        return np.arange(len(self)) >= self.phase.warmup_steps


@dataclass(frozen=True)
class Check:
    """A question that is asked of a log. ``needs``: what the log must hold. Fewer than ``least_steps`` steps, or ``least_evaluations``
    after training began, cannot answer it."""

    kind: str
    asks: str
    find: Callable[[Log], Finding | None]
    needs: tuple[str, ...] = ("loss",)
    least_steps: int = 1
    least_evaluations: int = 0


WORDS = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "clipped": "word on clipping",
    "lengths": "lengths or buckets of its batches",
    "evaluations": "held-out evaluation",
    "slot_accuracy": "accuracy by slot",
    "seconds_wait": "waiting times",
    "seconds_step": "step times",
    "plan": "plan",
}


def listed(words: list[str], most: int = 6) -> str:
    """``a, b and c``; after ``most`` of them ``a, b and 5 more``."""
    if len(words) > most:
        return f"{', '.join(words[: most - 1])} and {len(words) - most + 1:,} more"
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def plural(count: int, word: str) -> str:
    """``1 step``, ``1,200 steps``, ``3 batches``."""
    ending = "es" if word.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {word}{'' if count == 1 else ending}"
