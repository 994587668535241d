"""A batch sampler over plans, for loaders that expect one: lists of row numbers, ``len()`` and ``set_epoch``.

It yields the batches of all ranks in turn, batch i for rank i % world, and always a whole number of turns, so that a wrapper
that deals batches out one by one (accelerate does, with ``even_batches=False``) gives every rank as many. There is no
``batch_size``: batches differ in size, and wrappers that are told one silently skip the others.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from dflash_nb.planner.batches import BatchPlan, plan_epoch


class PlanSampler:
    """Batches of the current epoch. lengths and options are those of ``plan_epoch``; ``world`` is the number of ranks."""

    batch_size = None
    drop_last = False

    def __init__(self, lengths: np.ndarray, **options: Any):
        self._lengths, self._options = lengths, options
        self.set_epoch(options.pop("epoch", 0))

    def set_epoch(self, epoch: int) -> None:
        """Plan another epoch; its number of batches may differ."""
        self.plan: BatchPlan = plan_epoch(self._lengths, epoch=epoch, **self._options)
        self._turns = self.plan.ranks().batches

    @property
    def sampler(self) -> "PlanSampler":
        """Itself: accelerate passes the epoch on to a batch sampler's sampler only, and would repeat the first epoch for ever."""
        return self

    def __len__(self) -> int:
        return self._turns.size

    def __iter__(self) -> Iterator[list[int]]:
        for index in self._turns.flat:
            yield self.plan.batch(index).sample_ids.tolist()
