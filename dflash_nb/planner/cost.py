"""Seconds and bytes of a batch from its shape, for each stage of the pipeline.

Without a measurement the coefficients are assumed, and ``source`` says so. The target's two come from the only numbers that the
reference run published about time: 32, 25.1 and 12 thousand real tokens a second for sorted, bucketed and random batches on 7
target GPUs. Padded tokens and tokens x length explain all three within 0.6 %, padded tokens alone miss by 14 %. The drafter's
and the transfer's are 6 x 1.7 B operations a slot at 250 Tflop/s, and five layers of features at 25 GB/s.

The stages overlap, so an epoch takes as long as the stage with the largest sum over its batches: ``plan_seconds``, and what cuts by
time minimise. Simulated batch by batch with 7 workers and 14 or more batches in flight, the reference lengths' epoch takes that within
0.1 %; the sum of every batch's slowest stage would be 3 to 15 % more. With one batch a worker in flight it takes 8 to 11 % more.

Shapes: every function takes ints or arrays that broadcast, and returns float64 of the broadcast shape.
"""

import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dflash_nb.home import write_aside
from dflash_nb.planner.batches import BatchPlan


@dataclass(frozen=True)
class CostModel:
    """Coefficients by term; every stage is a sum of its terms.

    target: seconds constant, for a padded token, for padded tokens x padded length (full attention).
    transfer: constant, for a token. drafter: constant, for a row, for a slot, for slots x context length.
    memory: bytes constant, for a padded token of the target, for a slot of the drafter.
    slots_per_row: drafted slots of a sample (anchors x block size). target_workers: target devices that work side by side.
    source: ``assumed``, or what it was measured on. belongs_to: hardware, target and drafter, by name.
    """

    target: tuple[float, float, float] = (0.0, 9.1e-5, 4.5e-8)
    transfer: tuple[float, float] = (0.0, 2e-6)
    drafter: tuple[float, float, float, float] = (0.05, 0.0, 4e-5, 0.0)
    memory: tuple[float, float, float] = (0.0, 2e5, 1e6)
    slots_per_row: int = 512
    target_workers: int = 7
    source: str = "assumed"
    belongs_to: dict[str, str] = field(default_factory=dict)
    stages: ClassVar[tuple[str, ...]] = ("target", "transfer", "drafter")

    def __post_init__(self) -> None:
        for name, terms in (("target", 3), ("transfer", 2), ("drafter", 4), ("memory", 3)):
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != terms or not all(np.isfinite(values)) or min(values) < 0:
                raise ValueError(f"{name} needs {terms} coefficients of 0 or more, not {getattr(self, name)!r}")
            object.__setattr__(self, name, values)
        if self.target_workers < 1 or self.slots_per_row < 0:
            raise ValueError(f"target_workers must be at least 1 and slots_per_row at least 0: {self.target_workers}, {self.slots_per_row}")

    def target_seconds(self, rows: np.ndarray, padded: np.ndarray) -> np.ndarray:
        """One forward of ``rows`` samples padded to ``padded`` tokens."""
        tokens = np.multiply(rows, padded, dtype=np.float64)
        return self.target[0] + self.target[1] * tokens + self.target[2] * tokens * padded

    def transfer_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Moving the features of ``tokens`` tokens from target to drafter."""
        return self.transfer[0] + self.transfer[1] * np.asarray(tokens, dtype=np.float64)

    def drafter_seconds(self, rows: np.ndarray, slots: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Forward and backward of ``slots`` drafted slots of ``rows`` samples that see ``context`` tokens each."""
        slots = np.asarray(slots, dtype=np.float64)
        constant, by_row, by_slot, by_context = self.drafter
        return constant + by_row * np.asarray(rows, dtype=np.float64) + by_slot * slots + by_context * slots * context

    def batch_seconds(self, rows: np.ndarray, padded: np.ndarray, stage: str) -> np.ndarray:
        """How long a batch keeps one stage busy. The target's time is divided by its workers, since they take batches by turns."""
        if stage == "target":
            return self.target_seconds(rows, padded) / self.target_workers
        if stage == "transfer":
            return self.transfer_seconds(np.multiply(rows, padded, dtype=np.float64))
        if stage == "drafter":
            return self.drafter_seconds(rows, np.multiply(rows, self.slots_per_row, dtype=np.float64), padded)
        raise ValueError(f"stage must be one of {', '.join(self.stages)}, not {stage!r}")

    def memory_bytes(self, rows: np.ndarray, padded: np.ndarray) -> np.ndarray:
        """What a batch needs at its worst in either model: the larger of the target's tokens and the drafter's slots."""
        constant, by_token, by_slot = self.memory
        tokens, slots = np.multiply(rows, padded, dtype=np.float64), np.multiply(rows, self.slots_per_row, dtype=np.float64)
        return constant + np.maximum(by_token * tokens, by_slot * slots)

    def for_plan(self, plan: BatchPlan) -> "CostModel":
        """This model with the plan's slots a row, where the plan counts them."""
        return replace(self, slots_per_row=plan.options.slots_per_row or self.slots_per_row)

    def plan_batch_seconds(self, plan: BatchPlan, lengths: np.ndarray, stage: str) -> np.ndarray:
        """``batch_seconds`` of every batch of a plan, float64[batches]. lengths: int[samples of the data].

        A packed row attends inside its documents: for the target it counts as documents of equal length with the same sum of squares.
        """
        model = self.for_plan(plan)
        if plan.strategy != "packed":
            return model.batch_seconds(plan.rows, plan.padded_lengths, stage)
        if stage == "target":
            documents = np.minimum(np.asarray(lengths)[plan.sample_ids], plan.options.longest).astype(np.float64)
            alike = np.add.reduceat(documents**2, plan.offsets[:-1]) / plan.real_tokens
            return model.batch_seconds(plan.padded_lengths / alike, alike, stage)
        return model.batch_seconds(plan.rows, plan.padded_lengths / plan.rows, stage)

    def plan_seconds(self, plan: BatchPlan, lengths: np.ndarray) -> dict[str, float]:
        """Seconds of an epoch by stage, and ``pipeline``: that of the slowest stage."""
        by_stage = {stage: float(self.plan_batch_seconds(plan, lengths, stage).sum()) for stage in self.stages}
        return by_stage | {"pipeline": max(by_stage.values())}

    def to_json(self) -> dict[str, Any]:
        return {"format": 1} | asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "CostModel":
        names = {entry.name for entry in fields(cls)}
        if saved.get("format") != 1 or saved.keys() - names - {"format"}:
            raise ValueError("not a cost model: expected the JSON of CostModel.save, with format 1")
        return cls(**{name: value for name, value in saved.items() if name in names})

    def save(self, path: Path) -> None:
        """Write the model as JSON, whole or not at all."""
        with write_aside(path) as aside:
            aside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error
