"""The learning-rate schedule as the log shows it, and where the run stands in it."""

from dataclasses import dataclass

import numpy as np

from dflash_nb.pipeline.run import Run

AT_PEAK = 0.999  # share of the highest rate from which a step counts as at the peak


@dataclass(frozen=True)
class Phase:
    """The phase of the last step.

    name: ``warm-up``, ``peak``, ``decay``, ``constant`` or ``unknown``. rate: learning rate, NaN if unknown. peak: the planned one, or
    the highest seen. warmup_steps: as planned, or as seen. total_steps: as planned, 0 where the log does not say.
    """

    name: str
    rate: float
    peak: float
    warmup_steps: int
    total_steps: int

    @property
    def share(self) -> float:
        """The rate as a share of the peak."""
        return self.rate / self.peak if self.peak else float("nan")


def phase_of(run: Run) -> Phase:
    """The phase of the last step of ``run``."""
    rate = np.asarray(run.steps.get("lr", ()), dtype=np.float64)
    known = rate[np.isfinite(rate)]
    total = int((run.plan or {}).get("total_steps") or 0)
    planned = _planned_warmup(run, total)
    if not len(known):
        return Phase("unknown", float("nan"), float(run.config.get("learning_rate") or 0), planned or 0, total)
    peak = float(run.config.get("learning_rate") or known.max())
    rising = rising_steps(known)
    warmup = rising if planned is None else planned
    last_step = int(run.steps["step"][-1])
    if last_step < warmup or (planned is None and rising == len(known) > 2):
        name = "warm-up"
    elif known.max() <= known.min() * 1.0001:
        name = "constant"
    else:
        name = "decay" if known[-1] < AT_PEAK * known.max() else "peak"
    return Phase(name, float(known[-1]), peak, warmup, total)


def rising_steps(rate: np.ndarray) -> int:
    """How many steps from the first on the rate rises without a stop; 0 where it does not rise at all."""
    still = np.flatnonzero(np.diff(rate) <= 0)
    steps = int(still[0]) + 1 if len(still) else len(rate)
    return steps if steps > 1 else 0


def _planned_warmup(run: Run, total: int) -> int | None:
    planned = (run.plan or {}).get("warmup_steps")
    if planned is not None:
        return int(planned)
    warmup = run.config.get("warmup")
    if warmup is None or (warmup < 1 and not total):
        return None
    return int(warmup) if warmup >= 1 else round(warmup * total)
