"""Everything that decides a plan besides the lengths, the seed and the epoch, checked in one place.

The defaults live here and nowhere else: ``plan_epoch``, the sampler, the simulation and the resume fingerprint all build a
``PlanOptions``, so an option left out and the same option spelt out are the same plan.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np

from dflash_nb.errors import PlainError

STRATEGIES = ("sorted", "random", "bucketed", "pooled", "packed")
ORDERS = ("balanced", "uniform")
TOO_LONG = ("error", "drop", "truncate")
LARGEST_BUDGET = 2**28


class PlanError(PlainError, ValueError):
    """Lengths or options from which no plan can be made. The message names the row or the option and says what to do."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of a plan.

    strategy: ``sorted`` static groups of equal lengths; ``random`` full shuffle; ``bucketed`` shuffle inside buckets;
        ``pooled`` shuffle, then sort inside pools of ``pool_size``; ``packed`` documents behind each other, no padding.
    boundaries: increasing edges, the first 0, the last above the longest sample; a bucket is ``[lo, hi)``. Needed by ``bucketed``.
    token_budget: a batch never computes more tokens than this, padding included.
    max_batch: most samples in a batch, also in a packed row.
    pad_multiple: the padded length is rounded up to it.
    order: ``balanced`` or ``uniform`` order of the batches. window: batches per optimiser step on one rank, which ``balanced`` mixes.
    too_long: what happens to samples above the limit: ``error``, ``drop`` or ``truncate``. max_length: that limit, if it is
        lower than what the budget allows.
    slots_per_row, slot_budget: drafted slots of a sample (anchors x block size) and the most that a batch may draft; 0 is no limit.
    pool_size: samples in a pool (``pooled``, ``packed``).
    world: ranks that share the plan.
    """

    strategy: str = "bucketed"
    boundaries: tuple[int, ...] | None = None
    token_budget: int = 49152
    max_batch: int = 64
    pad_multiple: int = 1
    order: str = "balanced"
    window: int = 8
    too_long: str = "error"
    max_length: int | None = None
    slots_per_row: int = 0
    slot_budget: int = 0
    pool_size: int = 2048
    world: int = 1

    def __post_init__(self) -> None:
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("order", self.order, ORDERS)
        _one_of("too_long", self.too_long, TOO_LONG)
        for name in ("token_budget", "max_batch", "pad_multiple", "window", "pool_size", "world"):
            self._whole(name, smallest=1)
        for name in ("slots_per_row", "slot_budget"):
            self._whole(name, smallest=0)
        if self.max_length is not None:
            self._whole("max_length", smallest=1)
        if self.token_budget > LARGEST_BUDGET:
            raise PlanError(f"token_budget must be at most {LARGEST_BUDGET}, not {self.token_budget}")
        if self.pad_multiple > self.token_budget:
            raise PlanError(f"pad_multiple {self.pad_multiple} is above token_budget {self.token_budget}: no sample would fit")
        if self.slot_budget and not self.slots_per_row:
            raise PlanError("slot_budget needs slots_per_row (anchors x block size of a sample)")
        if self.slot_budget and self.slots_per_row > self.slot_budget:
            raise PlanError(
                f"one row drafts {self.slots_per_row} slots, above slot_budget {self.slot_budget}: raise it or use fewer anchors"
            )
        object.__setattr__(self, "boundaries", _edges(self.boundaries))
        if self.strategy == "bucketed" and self.boundaries is None:
            raise PlanError("strategy 'bucketed' needs boundaries, for example optimize_buckets(histogram).boundaries")

    def _whole(self, name: str, smallest: int) -> None:
        try:
            value = operator.index(getattr(self, name))
        except TypeError:
            raise PlanError(f"{name} must be a whole number, not {getattr(self, name)!r}") from None
        if value < smallest:
            raise PlanError(f"{name} must be at least {smallest}, not {value}")
        object.__setattr__(self, name, value)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that runs: its padded length is within the budget, and it is within ``max_length``."""
        by_budget = self.token_budget // self.pad_multiple * self.pad_multiple
        return by_budget if self.max_length is None else min(self.max_length, by_budget)

    def padded(self, tokens: np.ndarray) -> np.ndarray:
        """Tokens rounded up to ``pad_multiple``."""
        return tokens if self.pad_multiple == 1 else -(-tokens // self.pad_multiple) * self.pad_multiple

    @property
    def most_rows(self) -> int:
        """Samples that a batch may hold at most, by ``max_batch`` and by the slot budget."""
        return min(self.max_batch, self.slot_budget // self.slots_per_row) if self.slot_budget else self.max_batch

    def to_json(self) -> dict[str, Any]:
        """Plain values by name, as they go into a plan fingerprint."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"boundaries": None if self.boundaries is None else list(self.boundaries)}


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise PlanError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _edges(boundaries: Sequence[int] | None) -> tuple[int, ...] | None:
    if boundaries is None:
        return None
    try:
        edges = tuple(operator.index(edge) for edge in boundaries)
    except TypeError:
        raise PlanError(f"boundaries must be whole numbers, not {boundaries!r}") from None
    if len(edges) < 2 or edges[0] != 0 or any(low >= high for low, high in pairwise(edges)):
        raise PlanError(f"boundaries must increase from 0 to above the longest sample, not {list(edges)}")
    return edges
