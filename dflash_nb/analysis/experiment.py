"""What real training with every strategy measured, beside what the cost model said: results of ``benchmarks/strategies.py``.

Two are shipped, ``sample`` and ``smollm2``, so that notebook 02 shows predictions next to measurements without a run of one's own. They
speak of the two-core machine, target and data that they were made on, and the picture says so: half an hour each to measure, a
millisecond to read.
"""

import json
from pathlib import Path
from typing import Any

from dflash_nb.errors import PlainError
from dflash_nb.home import asset

SHIPPED = ("sample", "smollm2")
COLUMNS = ("strategy", "padding", "predicted_ratio", "measured_ratio", "ratio_error", "predicted_over_measured")


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
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [name for row in found["speed"] for name in COLUMNS if name not in row]
        source_of_cost = found["cost"]["source"]
    except FileNotFoundError:
        raise ExperimentError(
            f"experiment: {path} is not there; choose {', '.join(SHIPPED)} or make one with benchmarks/strategies.py"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise ExperimentError(f"experiment: {path} holds no measured speeds ({error!r}); make it with benchmarks/strategies.py") from error
    if missing or not source_of_cost.startswith("measured"):
        raise ExperimentError(f"experiment: {path} lacks {missing[0] if missing else 'a measured cost model'}; make it again")
    return found


def speed_rows(experiment: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A row a strategy, the fastest first: padding, speed relative to sorted as predicted and as measured with its standard error, and
    predicted over measured tokens a second."""
    rows = [] if experiment is None else [{name: row[name] for name in COLUMNS} for row in experiment["speed"]]
    return sorted(rows, key=lambda row: -row["measured_ratio"])


def learning_rows(experiment: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A row a strategy: held-out loss and tau at equal real tokens, over seeds, with standard errors. Empty where that was not measured."""
    return [] if experiment is None else experiment.get("learning", [])
