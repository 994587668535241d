"""A bucket plan: cuts, what each bucket is expected to cost, and what that was computed under. It is the file ``buckets.json``."""

import json
import math
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dflash_nb.errors import NotFoundError
from dflash_nb.home import did_you_mean, exists, write_aside
from dflash_nb.planner.edges import increasing
from dflash_nb.planner.limits import BucketError, Limits
from dflash_nb.stored import NUMBER, fault, parsed


@dataclass(frozen=True)
class BucketRow:
    """One bucket ``[lo, hi)``. Lengths in tokens; what is expected is expected under the plan's model.

    samples, tokens: real ones. mean: tokens a sample. batch_size: expected rows of a batch. expected_padded: padded tokens a
    sample. efficiency: mean / expected_padded. batches: samples / batch_size; a tail counts as the part of a batch that it fills.
    """

    lo: int
    hi: int
    samples: int
    tokens: int
    mean: float
    batch_size: float
    expected_padded: float
    efficiency: float
    batches: float


ROW = {each.name: int if each.type is int else NUMBER for each in fields(BucketRow)}
LIMITS = {"token_budget": int, "max_batch": int, "pad_multiple": int}
SHAPE = {"boundaries": [NUMBER], "rows": [ROW], **LIMITS, "objective": str, "model": str, "why": dict, "made_for": dict | None}


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a length distribution. ``why``: the rule of ``auto`` and what it weighed, empty for other cuts. ``made_for``: whose
    lengths these were, as notebook 01 notes it (dataset and column), empty where nobody said."""

    boundaries: tuple[int, ...]
    rows: tuple[BucketRow, ...]
    token_budget: int
    max_batch: int
    pad_multiple: int
    objective: str = "padding"
    model: str = "packing"
    why: dict[str, Any] = field(default_factory=dict)
    made_for: dict[str, str] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Real tokens of an epoch."""
        return sum(row.tokens for row in self.rows)

    @property
    def padded_tokens(self) -> float:
        """Real tokens and padding of an epoch."""
        return sum(row.samples * row.expected_padded for row in self.rows)

    @property
    def efficiency(self) -> float:
        """Real tokens / padded tokens."""
        return self.tokens / self.padded_tokens

    @property
    def batches(self) -> int:
        """Batches of an epoch, when the tails of all buckets have been packed together."""
        return math.ceil(round(sum(row.batches for row in self.rows), 6))

    @property
    def fill(self) -> float:
        """Real tokens / (batches x token budget)."""
        return self.tokens / (self.batches * self.token_budget)

    @property
    def mates_again(self) -> float:
        """Of the pairs of samples that share a batch, the share expected to share one again in the next epoch."""
        mates = [min(row.batch_size, row.samples) - 1 for row in self.rows]
        pairs = [row.samples * mate for row, mate in zip(self.rows, mates, strict=True)]
        again = sum(pair * mate / (row.samples - 1) for row, pair, mate in zip(self.rows, pairs, mates, strict=True) if mate > 0)
        return again / sum(pairs) if sum(pairs) > 0 else 0.0

    def unlike(self, **wanted: Any) -> list[str]:
        """What the plan was made for, or under, that is not as ``wanted``: ``token_budget 49152, not 8192``."""
        made = self.made_for | {name: getattr(self, name) for name in ("token_budget", "max_batch", "pad_multiple")}
        return [f"{name} {made.get(name, 'unknown')}, not {value}" for name, value in wanted.items() if made.get(name) != value]

    def table(self) -> list[dict[str, Any]]:
        """The rows as plain dicts."""
        return [asdict(row) for row in self.rows]

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``totals`` is for whoever reads the file."""
        totals = {name: getattr(self, name) for name in ("efficiency", "fill", "batches", "mates_again")}
        return {"format": 1} | asdict(self) | {"boundaries": list(self.boundaries), "rows": self.table(), "totals": totals}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "BucketPlan":
        """The plan that ``to_json`` described.

        Raises:
            BucketError: it is not whole, or of another format.
        """
        if not isinstance(saved, dict) or saved.get("format") != 1:
            raise BucketError("not a bucket plan: expected the JSON of BucketPlan.save, with format 1")
        if problem := fault(saved, SHAPE):
            raise BucketError(f"not a whole bucket plan: it {problem}")
        rows = tuple(BucketRow(**{name: row[name] for name in ROW}) for row in saved["rows"])
        under = {name: saved[name] for name in (*LIMITS, "objective", "model", "why")}
        made_for = saved.get("made_for") or {}  # older files do not say
        Limits(**{name: saved[name] for name in LIMITS})
        try:
            boundaries = increasing([int(edge) if edge == int(edge) else edge for edge in saved["boundaries"]])
        except BucketError as problem:
            raise BucketError(f"its boundaries must increase from 0: {problem}") from None
        if len(boundaries) < 2 or boundaries[0] != 0:
            raise BucketError(f"its boundaries must begin with 0 and hold a second edge at least, not {boundaries[:3]}")
        return cls(boundaries=tuple(boundaries), rows=rows, made_for=made_for, **under)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan as JSON, whole or not at all."""
        path = Path(path)
        with write_aside(path) as aside:
            aside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "BucketPlan":
        """Read what ``save`` wrote.

        Raises:
            BucketError: the file is not a bucket plan; it names the file.
            FileNotFoundError: it does not exist.
        """
        if not exists(path):
            raise NotFoundError(f"{path} does not exist. Name the buckets.json that notebook 01 wrote.{did_you_mean(path)}")
        try:
            return cls.from_json(parsed(Path(path).read_text(encoding="utf-8")))
        except (IsADirectoryError, ValueError) as error:
            raise BucketError(f"{path}: {error}. Make it again with notebook 01") from error
