"""What real training with every strategy measured, beside what the cost model said: results of ``benchmarks/strategies.py``.

Two are shipped, ``sample`` and ``smollm2``, so that notebook 02 shows predictions next to measurements without a run of one's own. They
speak of the two-core machine, target and data that they were made on, and the picture says so: half an hour each to measure, a
millisecond to read.
"""

import reprlib
import sys
from pathlib import Path
from typing import Any

from dflash_nb.errors import PlainError
from dflash_nb.home import asset, did_you_mean
from dflash_nb.stored import parsed

SHIPPED = ("sample", "smollm2")
COLUMNS = ("strategy", "padding", "predicted_ratio", "measured_ratio", "ratio_error", "predicted_over_measured")
AUTO = "bucketed auto"  # the strategy that the picture speaks of


class ExperimentError(PlainError, ValueError):
    """A file that holds no measured strategies; the text says what to do."""


def read_experiment(source: str | Path) -> dict[str, Any] | None:
    """The results in a ``strategies.json``, or the shipped ones named ``source``; None for an empty name.

    Raises ExperimentError for a file that is not there or not such a file.
    """
    if not str(source):
        return None
    shipped = str(source) in SHIPPED
    path = asset(f"strategies_{source}.json") if shipped else Path(source)
    try:
        found = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ExperimentError(
            f"experiment: {path} is not there; choose {', '.join(SHIPPED)} or make one with benchmarks/strategies.py."
            f"{did_you_mean(source, SHIPPED)}"
        ) from None
    except OSError as error:
        raise ExperimentError(f"experiment: {path} cannot be read: {error.strerror}; give the path of a strategies.json") from error
    except ValueError as error:
        raise ExperimentError(f"experiment: {path} is no JSON ({error}); make it with benchmarks/strategies.py") from error
    if problem := _problem(found):
        raise ExperimentError(f"experiment: {path} {problem}; make it with benchmarks/strategies.py --part speed")
    return found


def _problem(found: Any) -> str:
    """What of ``found`` the table and the picture cannot show, as a predicate; empty for good results."""
    if not isinstance(found, dict):
        return "holds no object of results"
    speed, learning = found.get("speed"), found.get("learning", [])
    if not isinstance(speed, list) or not speed or not all(isinstance(row, dict) for row in speed):
        return "holds no measured speeds"
    for number, row in enumerate(speed, 1):
        if lacking := [name for name in COLUMNS if name not in row]:
            return f"lacks {lacking[0]} in row {number} of speed"
        nameless = not isinstance(row["strategy"], str)
        wrong = [name for name in COLUMNS[1:] if not _finite(row[name]) and (name != "ratio_error" or row[name] is not None)]
        if nameless or wrong or row["measured_ratio"] <= 0:
            name = "strategy" if nameless else (wrong or ["measured_ratio"])[0]
            return f"holds {reprlib.repr(row[name])} as {name} in row {number} of speed"
    if (count := sum(row["strategy"] == AUTO for row in speed)) != 1:
        return f"has {count} rows of the strategy {AUTO!r} and needs one"
    for place in (("options", "target"), ("options", "rounds"), ("cost", "source"), ("cost", "belongs_to", "hardware")):
        value = found
        for key in place:
            value = value.get(key) if isinstance(value, dict) else None
        if value is None:
            return f"lacks {'.'.join(place)}"
    if not str(found["cost"]["source"]).startswith("measured"):
        return "lacks a measured cost model"
    if not isinstance(learning, list) or not all(isinstance(row, dict) for row in learning):
        return "holds a learning that is no list of rows"
    return ""


def _finite(value: Any) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return abs(value) <= sys.float_info.max


def speed_rows(experiment: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A row a strategy, the fastest first: padding, speed relative to sorted as predicted and as measured with its standard error, and
    predicted over measured tokens a second."""
    rows = [] if experiment is None else [{name: row[name] for name in COLUMNS} for row in experiment["speed"]]
    return sorted(rows, key=lambda row: -row["measured_ratio"])


def learning_rows(experiment: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A row a strategy: held-out loss and tau at equal real tokens, over seeds, with standard errors. Empty where that was not measured."""
    return [] if experiment is None else experiment.get("learning", [])
