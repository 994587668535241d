"""Seconds and bytes of a batch from its shape, for each stage of the pipeline.

Without a measurement the coefficients are assumed, and ``source`` says so. The target's two come from the only numbers that the
reference run published about time: 32, 25.1 and 12 thousand real tokens a second for sorted, bucketed and random batches on 7
target GPUs. Padded tokens and tokens x length explain all three within 0.8 %, padded tokens alone miss by 14 %. The drafter's
and the transfer's are 6 x 1.7 B operations a slot at 250 Tflop/s, and five layers of features at 25 GB/s. Measured coefficients come
from ``fit.fit_cost``.

The stages overlap, so an epoch takes about as long as the stage with the largest sum over its batches: ``plan_seconds``, and what cuts by
time minimise. With a bounded window and short plans it takes longer; ``timeline`` says how much.

Shapes: every function takes ints or arrays that broadcast, and returns float64 of the broadcast shape.
"""

import json
import reprlib
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dflash_nb.errors import PlainError
from dflash_nb.home import did_you_mean, write_aside
from dflash_nb.planner.batches import BatchPlan
from dflash_nb.stored import parsed

TERMS = {
    "fetch": ("constant", "row", "token"),
    "target": ("constant", "padded token", "padded token x length", "length", "chunk"),
    "transfer": ("constant", "token"),
    "drafter": ("constant", "row", "token", "slot", "slot x context"),
    "memory": ("constant", "padded token", "slot"),
}
FORMAT = 2
KINDS = {"source": str, "belongs_to": dict, "errors": dict, "points": dict}  # of the fields that are no numbers
CHUNK = 64  # tokens: recurrent layers compute a row in whole chunks, in transformers as in flash-linear-attention


class CostError(PlainError, ValueError):
    """A cost model that cannot be read, made or used here; the text says why."""


@dataclass(frozen=True)
class CostModel:
    """Coefficients by term, in the order of ``TERMS``; every stage is a sum of its terms.

    fetch, target, transfer, drafter: seconds. The target computes padding (x length is full attention, length alone the steps of
    recurrent layers, a chunk 64 tokens of a row that they compute at once, be they there or not); the drafter and the transfer see real
    tokens only. memory: bytes.
    step: seconds of an optimiser step beside its batches; accumulation: batches of a step.
    shape: seconds that the target pays once an epoch for each shape (rows x padded length) it has not met: compiling, choosing kernels.
    slots_per_row: most drafted slots of a sample (anchors x block size). slots_per_token: drafted slots for a token of a sample too short
    for all of them, 0 if there are none such. target_workers: target devices that work side by side.
    source: ``assumed``, or what it was measured on. belongs_to: hardware, target and drafter, by name. errors: by stage, on batches of
    shapes that it was not fitted on; points: predicted and measured seconds of some of these batches.
    """

    fetch: tuple[float, ...] = (0.0, 0.0, 0.0)
    target: tuple[float, ...] = (0.0, 8.95e-5, 4.5e-8, 0.0, 0.0)
    transfer: tuple[float, ...] = (0.0, 2e-6)
    drafter: tuple[float, ...] = (0.05, 0.0, 0.0, 4e-5, 0.0)
    memory: tuple[float, ...] = (0.0, 2e5, 1e6)
    step: float = 0.0
    accumulation: int = 1
    shape: float = 0.0
    slots_per_row: int = 512
    slots_per_token: float = 0.0
    target_workers: int = 7
    source: str = "assumed"
    belongs_to: dict[str, str] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    points: dict[str, list[list[float]]] = field(default_factory=dict)
    stages: ClassVar[tuple[str, ...]] = ("target", "transfer", "drafter", "fetch")

    def __post_init__(self) -> None:
        for name, terms in TERMS.items():
            values = tuple(float(value) for value in getattr(self, name))
            if len(values) != len(terms) or not all(np.isfinite(values)) or min(values) < 0:
                raise CostError(f"{name} needs {len(terms)} coefficients of 0 or more ({', '.join(terms)}), not {getattr(self, name)!r}")
            object.__setattr__(self, name, values)
        for name in ("step", "shape", "slots_per_token", "slots_per_row"):
            if not 0 <= getattr(self, name) <= sys.float_info.max:
                raise CostError(f"{name} must be 0 or more, not {getattr(self, name)!r}")
        for name in ("target_workers", "accumulation"):
            value = getattr(self, name)
            if not 1 <= value <= sys.float_info.max or value != int(value):
                raise CostError(f"{name} must be a whole number of at least 1, not {value!r}")

    def fetch_seconds(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Reading and collating ``rows`` samples of ``tokens`` tokens together."""
        return _sum_of(self.fetch, 1.0, rows, tokens)

    def target_seconds(self, rows: np.ndarray, padded: np.ndarray) -> np.ndarray:
        """One forward of ``rows`` samples padded to ``padded`` tokens."""
        tokens = np.multiply(rows, padded, dtype=np.float64)
        return _sum_of(self.target, 1.0, tokens, tokens * padded, padded, chunks(rows, padded))

    def transfer_seconds(self, tokens: np.ndarray) -> np.ndarray:
        """Moving the features of ``tokens`` tokens from target to drafter."""
        return _sum_of(self.transfer, 1.0, tokens)

    def drafter_seconds(self, rows: np.ndarray, tokens: np.ndarray, slots: np.ndarray, pairs: np.ndarray) -> np.ndarray:
        """Forward and backward of ``slots`` drafted slots of ``rows`` samples of ``tokens`` real tokens together.

        pairs: the sum over slots of the tokens of their sample, which they attend to half of in the mean.
        """
        return _sum_of(self.drafter, 1.0, rows, tokens, slots, pairs)

    def slots(self, lengths: np.ndarray) -> np.ndarray:
        """Drafted slots of a sample of each length, as far as lengths tell: a short one has fewer supervised tokens than anchors."""
        lengths = np.asarray(lengths, dtype=np.float64)
        most = np.full_like(lengths, self.slots_per_row)
        return np.minimum(most, self.slots_per_token * lengths) if self.slots_per_token else most

    def batch_seconds(self, rows: np.ndarray, padded: np.ndarray, stage: str) -> np.ndarray:
        """How long a batch of ``rows`` samples of ``padded`` tokens keeps one stage busy, for choosing cuts.

        A target worker moves its own features before it takes the next batch. Its time is divided by the number of workers, since they
        take batches by turns; ``transfer`` is what a link that all of them share is busy.
        """
        tokens = np.multiply(rows, padded, dtype=np.float64)
        if stage == "target":
            return (self.target_seconds(rows, padded) + self.transfer_seconds(tokens)) / self.target_workers
        if stage == "transfer":
            return self.transfer_seconds(tokens)
        if stage == "fetch":
            return self.fetch_seconds(rows, tokens)
        if stage == "drafter":
            slots = rows * self.slots(padded)
            return self.drafter_seconds(rows, tokens, slots, slots * padded) + self.step / self.accumulation
        raise CostError(f"stage must be one of {', '.join(self.stages)}, not {stage!r}")

    def shape_seconds(self, stage: str) -> float:
        """What a stage pays for each distinct shape of a plan; every worker meets it."""
        return self.shape if stage == "target" else 0.0

    def memory_bytes(self, rows: np.ndarray, padded: np.ndarray) -> np.ndarray:
        """What a batch needs at its worst in either model: the larger of the target's tokens and the drafter's slots."""
        constant, by_token, by_slot = self.memory
        tokens, slots = np.multiply(rows, padded, dtype=np.float64), np.multiply(rows, self.slots_per_row, dtype=np.float64)
        return constant + np.maximum(by_token * tokens, by_slot * slots)

    def for_plan(self, plan: BatchPlan) -> "CostModel":
        """This model with the plan's slots a row and batches of a step, where the plan counts them."""
        return replace(self, slots_per_row=plan.options.slots_per_row or self.slots_per_row, accumulation=plan.options.window)

    def plan_batch_seconds(self, plan: BatchPlan, lengths: np.ndarray, stage: str, slots: np.ndarray | None = None) -> np.ndarray:
        """What every batch of a plan takes in one stage, float64[batches]; as ``batch_seconds``, but from the lengths of its samples.

        lengths: int[samples of the data]. slots: drafted slots of each of these samples where they are known, else ``self.slots``.
        A packed row attends inside its documents: for the target it counts as documents of equal length with the same sum of squares.
        """
        model, starts = self.for_plan(plan), plan.offsets[:-1]
        if stage == "target":
            shapes = (plan.rows, plan.padded_lengths)
            if plan.strategy == "packed":
                documents = _sample_lengths(plan, lengths)
                alike = np.add.reduceat(documents**2, starts) / plan.real_tokens
                shapes = (plan.padded_lengths / alike, alike)
            return (model.target_seconds(*shapes) + model.transfer_seconds(plan.real_tokens)) / model.target_workers
        if stage == "transfer":
            return model.transfer_seconds(plan.real_tokens)
        if stage == "fetch":
            return model.fetch_seconds(plan.rows, plan.real_tokens)
        if stage == "drafter":
            own = _sample_lengths(plan, lengths)
            slots = model.slots(own) if slots is None else _of_samples(plan, "slots", slots).astype(np.float64)
            sums = (np.add.reduceat(values, starts) for values in (slots, slots * own))
            return model.drafter_seconds(plan.rows, plan.real_tokens, *sums) + model.step / model.accumulation
        raise CostError(f"stage must be one of {', '.join(self.stages)}, not {stage!r}")

    def plan_seconds(self, plan: BatchPlan, lengths: np.ndarray, slots: np.ndarray | None = None) -> dict[str, float]:
        """Seconds of an epoch by stage, and ``pipeline``: that of the slowest stage."""
        by_stage = {stage: float(self.plan_batch_seconds(plan, lengths, stage, slots).sum()) for stage in self.stages}
        by_stage["target"] += self.shape * distinct_shapes(plan)
        return by_stage | {"pipeline": max(by_stage.values())}

    def require(self, **wanted: str) -> "CostModel":
        """This model, if it belongs to what is ``wanted`` (hardware, target, drafter); an assumed one belongs to nothing and everything.

        Raises CostError that names each difference.
        """
        if self.source == "assumed":
            return self
        other = [
            f"{name} {self.belongs_to.get(name, 'unknown')!r}, not {value!r}"
            for name, value in wanted.items()
            if self.belongs_to.get(name) != value
        ]
        if other:
            raise CostError(f"the cost model was measured on {'; '.join(other)}. Measure again there, or leave the model out")
        return self

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT} | asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "CostModel":
        names = {entry.name for entry in fields(cls)}
        of_this_version = isinstance(saved, dict) and saved.get("format") == FORMAT
        if not of_this_version or saved.keys() - names - {"format"}:
            raise CostError(f"not a cost model of this version: expected the JSON of CostModel.save, with format {FORMAT}; measure again")
        for name, value in saved.items():
            kind = list if name in TERMS else KINDS.get(name, int | float)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise CostError(f"{name} holds {reprlib.repr(value)}, which is of the wrong kind; measure again")
        errors, points = saved.get("errors", {}), saved.get("points", {})
        if not all(isinstance(error, dict) and _numbers(error.get(name) for name in ("median", "total")) for error in errors.values()):
            raise CostError("errors: the numbers median and total of each stage are needed; measure again")
        if points and not (points.keys() == errors.keys() == set(cls.stages) and all(map(_pairs, points.values()))):
            raise CostError("points: pairs of seconds of each stage are needed, and errors of the same stages; measure again")
        model = cls(**{name: value for name, value in saved.items() if name in names})
        if lacking := [name for name in asdict(model) if name not in saved and name not in ("errors", "points")]:
            raise CostError(f"not a cost model of this version: it lacks {', '.join(lacking)}; measure again")
        return model

    def save(self, path: Path) -> None:
        """Write the model as JSON, whole or not at all."""
        with write_aside(path) as aside:
            aside.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "CostModel":
        try:
            return cls.from_json(parsed(path.read_text(encoding="utf-8")))
        except OSError as error:
            near = did_you_mean(path) if isinstance(error, FileNotFoundError) else ""
            raise CostError(f"{path} cannot be read: {error.strerror}; give the path of a cost.json.{near}") from error
        except (ValueError, TypeError, OverflowError) as error:
            raise CostError(f"{path}: {error}") from error


def chunks(rows: np.ndarray, padded: np.ndarray) -> np.ndarray:
    """Chunks that the recurrent layers compute of ``rows`` samples padded to ``padded`` tokens, float64."""
    return np.multiply(rows, np.ceil(np.divide(padded, CHUNK)), dtype=np.float64)


def distinct_shapes(plan: BatchPlan) -> int:
    """Different rows x padded length of a plan; a packed row has one shape for each of its lengths."""
    rows = np.ones_like(plan.rows) if plan.strategy == "packed" else plan.rows
    return len(np.unique(rows << 32 | plan.padded_lengths))


def _sample_lengths(plan: BatchPlan, lengths: np.ndarray) -> np.ndarray:
    """Tokens that run of each sample of the plan, in its order."""
    return np.minimum(_of_samples(plan, "lengths", lengths), plan.options.longest).astype(np.float64)


def _of_samples(plan: BatchPlan, name: str, values: np.ndarray) -> np.ndarray:
    """The values of the plan's samples in its order, out of one for each sample of the data."""
    values, last = np.asarray(values), int(plan.sample_ids.max(initial=0))
    if values.ndim != 1 or len(values) <= last:
        raise CostError(f"{name} has the shape {values.shape}, but the plan runs sample {last}; give the data that it was planned for")
    return values[plan.sample_ids]


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and abs(value) <= sys.float_info.max for value in values)


def _pairs(rows: Any) -> bool:
    return isinstance(rows, list) and bool(rows) and all(isinstance(row, list) and len(row) == 2 and _numbers(row) for row in rows)


def _sum_of(coefficients: tuple[float, ...], *terms: np.ndarray | float) -> np.ndarray:
    return sum(coefficient * np.asarray(term, dtype=np.float64) for coefficient, term in zip(coefficients, terms, strict=True))
