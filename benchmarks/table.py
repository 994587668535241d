"""Rows of numbers as the aligned table that a benchmark prints."""

from collections.abc import Mapping, Sequence
from typing import Any


def show(rows: Sequence[Mapping[str, Any]], title: str = "") -> None:
    """Print ``rows``, which share their columns, under ``title`` and the names of the columns, and an empty line."""
    columns = list(rows[0])
    texts = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    if title:
        print(title)
    for row in texts:
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)), flush=True)
    print()
