"""What an examination is: checks, each one line with its level, its evidence and what to do."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from dflash_nb.errors import PlainError


class Level(IntEnum):
    """OK; LOOK: training works, but something is likely not as meant; STOP: training would fail, or learn the wrong thing."""

    OK = 0
    LOOK = 1
    STOP = 2


class DoctorError(PlainError, RuntimeError):
    """A run that should not start. The text lists every STOP with what to do."""


@dataclass(frozen=True)
class Check:
    """One question and its answer. ``advice`` says what to do; it is empty for OK."""

    name: str
    level: Level
    evidence: str
    advice: str = ""

    def line(self) -> str:
        """Level, name, evidence and advice in one line."""
        return f"{self.level.name:<5} {self.name:<20} {self.evidence}{f'  -> {self.advice}' if self.advice else ''}"


@dataclass(frozen=True)
class Examination:
    """All checks of a configuration. ``left_out`` says why the rest could not be examined, and is empty if everything was."""

    checks: tuple[Check, ...]
    seconds: float = 0.0
    left_out: str = ""

    @property
    def verdict(self) -> str:
        """The worst level: OK, LOOK or STOP."""
        return max((check.level for check in self.checks), default=Level.OK).name

    def of(self, name: str) -> Check | None:
        """The check of this name, if it was made."""
        return next((check for check in self.checks if check.name == name), None)

    def table(self) -> list[dict[str, str]]:
        """A row a check for a notebook."""
        return [
            {"level": check.level.name, "check": check.name, "evidence": check.evidence, "what to do": check.advice}
            for check in self.checks
        ]

    def text(self) -> str:
        """One line a check and the verdict below; without any check, why there is none."""
        if not self.checks:
            return f"Not examined: {self.left_out}"
        counts = ", ".join(f"{sum(check.level == level for check in self.checks)} {level.name}" for level in Level)
        rest = f"; {self.left_out}" if self.left_out else ""
        return "\n".join([*(check.line() for check in self.checks), f"{self.verdict}: {counts} in {self.seconds:.1f} s{rest}"])

    def require(self) -> None:
        """Raise DoctorError if there is any STOP."""
        stops = [check for check in self.checks if check.level == Level.STOP]
        if stops:
            lines = "\n".join(f"  {check.name}: {check.evidence} -> {check.advice}" for check in stops)
            raise DoctorError(f"{len(stops)} of {len(self.checks)} checks say that this run should not start:\n{lines}")


def explained(name: str, error: Exception) -> Check:
    """An error as a STOP."""
    text = " ".join(str(error).split())[:400] or "no message"
    return Check(name, Level.STOP, f"{type(error).__name__}: {text}", "mend what the error names and examine again")


Finding = tuple[Level, str, str]


def ok(evidence: str) -> Finding:
    return Level.OK, evidence, ""


def look(evidence: str, advice: str) -> Finding:
    return Level.LOOK, evidence, advice


def stop(evidence: str, advice: str) -> Finding:
    return Level.STOP, evidence, advice


def check(name: str) -> Callable[[Callable[..., Finding]], Callable[..., Check]]:
    """Make a function that returns a finding return a Check of this name. What it raises becomes a STOP, so the others still run."""

    def decorate(function: Callable[..., Finding]) -> Callable[..., Check]:
        @functools.wraps(function)
        def checked(*args, **kwargs) -> Check:
            try:
                return Check(name, *function(*args, **kwargs))
            except Exception as error:
                return explained(name, error)

        return checked

    return decorate
