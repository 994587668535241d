"""Where a run stands in its plan, and whether the plan it comes back to is still the same one.

A plan can be made again from a few numbers, so the position is three integers. What must not happen is a resume onto other
batches: the fingerprint names whatever changed, and the hash of the plan itself catches the rest (another NumPy that draws
other numbers). Both together take 0.01 s for 902,087 lengths.
"""

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dflash_nb.planner.batches import BatchPlan
from dflash_nb.planner.options import PlanError, PlanOptions
from dflash_nb.stored import fault

SHAPE = {"seed": int, "epoch": int, "next_batch": int, "plan_sha256": str, "fingerprint": dict}


class PlanChangedError(PlanError):
    """The plan of a saved position is not the plan at hand."""


@dataclass(frozen=True)
class PlanState:
    """A position in a run's plans: ``next_batch`` of ``epoch`` has not been trained yet. Plain values, for JSON."""

    seed: int
    epoch: int
    next_batch: int
    plan_sha256: str
    fingerprint: dict[str, Any]

    @classmethod
    def at(cls, plan: BatchPlan, next_batch: int, fingerprint: dict[str, Any]) -> "PlanState":
        """The position before ``next_batch``, which may be ``len(plan)``: the epoch is done."""
        if not 0 <= next_batch <= len(plan):
            raise PlanError(f"next_batch {next_batch} is outside a plan of {len(plan)} batches; it must be 0 to {len(plan)}")
        return cls(plan.seed, plan.epoch, next_batch, plan.sha256(), fingerprint)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "PlanState":
        """What ``to_json`` gave. Raises PlanError that names what is missing or of the wrong kind."""
        if problem := fault(saved, SHAPE):
            raise PlanError(f"the saved position {problem}: take the position of another checkpoint, or start a new run")
        return cls(**{name: saved[name] for name in SHAPE})

    def resume(self, plan: BatchPlan, fingerprint: dict[str, Any]) -> int:
        """The batch to go on with in ``plan``, the plan made again for this seed and epoch. Raises PlanChangedError by name."""
        check_fingerprint(self.fingerprint, fingerprint)
        if (plan.seed, plan.epoch) != (self.seed, self.epoch):
            raise PlanChangedError(
                f"saved in epoch {self.epoch} of seed {self.seed}, resumed in epoch {plan.epoch} of seed {plan.seed}: plan the saved epoch"
            )
        if plan.sha256() != self.plan_sha256:
            raise PlanChangedError(
                f"same lengths and options, but other batches: the plan was made by NumPy {self.fingerprint.get('numpy')}, "
                f"this is NumPy {np.__version__}. Resume with that version, or start a new epoch"
            )
        return self.next_batch


def plan_fingerprint(lengths: np.ndarray, n_supervised: np.ndarray | None = None, **options: Any) -> dict[str, Any]:
    """Everything that a plan depends on besides seed and epoch, as plain values: the options by name, and hashes of the arrays.

    An option left out counts as its default. The integer width of the arrays does not matter.
    """
    return {
        "rows": len(lengths),
        "lengths_sha256": _sha256(lengths),
        "n_supervised_sha256": None if n_supervised is None else _sha256(n_supervised),
        **PlanOptions(**options).to_json(),
        "numpy": np.__version__,
    }


def check_fingerprint(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise PlanChangedError naming every field that differs. The NumPy version is recorded, not compared."""
    names = sorted((saved.keys() | current.keys()) - {"numpy"})
    changed = [f"{name}: saved {saved.get(name)!r}, now {current.get(name)!r}" for name in names if saved.get(name) != current.get(name)]
    if changed:
        raise PlanChangedError(
            f"the saved position belongs to another plan; changed: {'; '.join(changed)}. Restore these, or start a new epoch"
        )


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, dtype="<i8")).hexdigest()
