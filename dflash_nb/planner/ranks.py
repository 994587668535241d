"""Share an epoch's batches between ranks that step together.

The batches of one optimiser step (``window`` on each rank) are sorted by modelled time and dealt in groups of ``world``, so that
ranks wait for each other as little as possible while the step keeps its mix. Of 8 ranks on the reference lengths the slowest takes
1.05 times the mean's modelled time; dealt in plan order it takes 1.2 times.
"""

from dataclasses import dataclass

import numpy as np

from dflash_nb.planner.options import PlanError


@dataclass(frozen=True, eq=False)
class RankBatches:
    """batches int64[steps, world]: the plan's batch that each rank runs at each of its steps; every rank has as many.
    repeated, dropped: the batches that run twice or not at all, fewer than ``world``."""

    batches: np.ndarray
    repeated: np.ndarray
    dropped: np.ndarray


def share_batches(seconds: np.ndarray, world: int, window: int, remainder: str = "repeat") -> RankBatches:
    """Deal batches to ``world`` ranks.

    seconds: float[batches] modelled time of each batch, in plan order; any unit, padded tokens do. window: batches per optimiser
    step on one rank. remainder: with ``repeat`` the last step is filled with the epoch's last full batches again, with ``drop``
    it is left out. A plan with fewer batches than ranks can only be repeated.
    """
    if not isinstance(remainder, str) or remainder not in ("repeat", "drop"):
        raise PlanError(f"remainder must be repeat or drop, not {remainder!r}")
    for name, value in (("world", world), ("window", window)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise PlanError(f"{name} must be a whole number of at least 1, not {value!r}")
    seconds = np.asarray(seconds)
    if seconds.ndim != 1 or not len(seconds) or seconds.dtype.kind not in "iuf" or not np.isfinite(seconds).all():
        raise PlanError(f"seconds must be a finite number for each batch, not an array of {seconds.dtype} with shape {seconds.shape}")
    n = len(seconds)
    over = n % world
    none = np.empty(0, dtype=np.int64)
    if over and remainder == "drop":
        if n < world:
            raise PlanError(f"{n} batches give none to some of {world} ranks: use fewer ranks, or remainder repeat")
        dealt, repeated, dropped = np.arange(n - over), none, np.arange(n - over, n)
    else:
        repeated = np.resize(np.arange(max(0, n - world), n), -n % world)
        dealt, dropped = np.concatenate([np.arange(n), repeated]), none
    optimiser_step = np.arange(len(dealt)) // (world * window)
    alike = dealt[np.lexsort((seconds[dealt], optimiser_step))].reshape(-1, world)
    alike.sort(axis=1)
    order = np.lexsort((alike[:, 0], optimiser_step[::world]))
    return RankBatches(alike[order], repeated, dropped)
