"""What a run will do, decided and checked before any model is loaded.

Everything that can be wrong with data, target, cuts, plan or devices is found here, from JSON files and length columns: 0.3 s for the
sample, about 10 s for 902,087 rows (most of it the scan for token ids that the target does not have).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from dflash_nb.data.dataset import Batch, TokenDataset, dataset_path
from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.data.source import DatasetError
from dflash_nb.model.drafter import DrafterConfig
from dflash_nb.model.identity import target_identity
from dflash_nb.model.packing import PackingError, require_packable
from dflash_nb.model.target_info import TargetInfo, read_target_info
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.local import Placement, PlacementError, place, place_drafter
from dflash_nb.pipeline.schedule import learning_rate, optimizer_steps, warmup_length
from dflash_nb.planner.batches import BatchPlan, PlannedBatch, plan_epoch
from dflash_nb.planner.buckets import BucketPlan, resolve_buckets
from dflash_nb.planner.diversity import mixing_report
from dflash_nb.planner.options import PlanOptions
from dflash_nb.planner.ranks import share_batches
from dflash_nb.planner.samples import select_samples
from dflash_nb.planner.state import plan_fingerprint
from dflash_nb.progress import announced


@dataclass(frozen=True)
class Job:
    """A checked run.

    options: the arguments of ``plan_epoch`` besides lengths and epoch. longest: tokens of the longest sample that runs. plans: a summary
    of each epoch's plan. steps: optimiser steps of each epoch. tokens_by_step: real tokens of every step, in order. notes: what is done
    otherwise than asked, in sentences.
    """

    config: TrainConfig
    dataset: TokenDataset
    heldout: TokenDataset
    info: TargetInfo
    drafter: DrafterConfig
    placement: Placement
    buckets: BucketPlan
    options: dict[str, Any]
    longest: int
    plans: tuple[dict[str, Any], ...]
    steps: tuple[int, ...]
    tokens_by_step: np.ndarray
    notes: tuple[str, ...] = ()

    @property
    def total_steps(self) -> int:
        return sum(self.steps)

    @property
    def warmup_steps(self) -> int:
        return warmup_length(self.config.warmup, self.total_steps)

    @property
    def schedule(self) -> dict[str, Any]:
        """The arguments of ``schedule.learning_rate`` that stay the same for the whole run."""
        config = self.config
        return {
            "total_steps": self.total_steps,
            "peak": config.learning_rate,
            "warmup_steps": self.warmup_steps,
            "decay": config.decay,
            "min_ratio": config.min_lr_ratio,
        }

    @cached_property
    def data(self) -> dict[str, Any]:
        """What identifies the training rows."""
        return self.dataset.fingerprint()

    @cached_property
    def target(self) -> dict[str, Any]:
        """What identifies the target's files."""
        return target_identity(self.info.path)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What identifies the plan."""
        return plan_fingerprint(self.dataset.lengths, **{name: value for name, value in self.options.items() if name != "seed"})

    def learning_rate(self, step: int) -> float:
        """The rate of ``step``, counted from 1."""
        return learning_rate(step, **self.schedule)

    def plan(self, epoch: int) -> BatchPlan:
        """The plan of one epoch, made again: it is a pure function."""
        return plan_epoch(self.dataset.lengths, epoch=epoch, **self.options)

    def position(self, step: int) -> tuple[int, int]:
        """Epoch and batch that follow after ``step`` finished steps; after the last one the end of its epoch."""
        ends = np.cumsum(self.steps)
        epoch = int(np.searchsorted(ends, step, side="right"))
        if step == self.total_steps:
            epoch = int(np.searchsorted(ends, step, side="left"))
        done = step - (int(ends[epoch - 1]) if epoch else 0)
        return epoch, min(done * self.config.accumulation, self.plans[epoch]["batches"])

    def planned_from(self, step: int) -> Iterator[tuple[int, PlannedBatch]]:
        """Epoch and batch of everything that runs after ``step`` finished steps, in order."""
        first_epoch, first = self.position(step)
        for epoch in range(first_epoch, len(self.steps)):
            plan = self.plan(epoch)
            order = self._running_order(plan)
            for index in order[first : self.steps[epoch] * self.config.accumulation]:
                yield epoch, plan.batch(int(index))
            first = 0

    def drafter_of(self, epoch: int, index: int) -> int:
        """Which drafter trains a batch, from 0."""
        return int(self._drafters[epoch][index])

    @cached_property
    def _drafters(self) -> list[np.ndarray]:
        """The drafter of every batch of every epoch: in running order they take turns."""
        return [np.argsort(self._running_order(self.plan(epoch))) % self.config.workers[1] for epoch in range(len(self.steps))]

    def _running_order(self, plan: BatchPlan) -> np.ndarray:
        """Batches in the order in which they run. Within a step, drafters that work at the same time get batches of like size."""
        drafters = self.config.workers[1]
        if drafters == 1:
            return np.arange(len(plan))
        shared = share_batches(plan.padded_tokens, drafters, self.config.accumulation // drafters, remainder="drop")
        return np.concatenate([shared.batches.ravel(), shared.dropped])

    def collate(self, planned: tuple[int, PlannedBatch]) -> Batch:
        """The rows of a planned batch, right-padded; those of a packed one to the longest of them."""
        epoch, batch = planned
        packed = self.config.strategy == "packed"
        longest = min(self.longest, int(self.dataset.lengths[batch.sample_ids].max()))
        return self.dataset.collate(
            batch.sample_ids,
            longest if packed else batch.padded_length,
            pad_id=self.info.pad_token_id or 0,
            max_length=self.longest,
            epoch=epoch,
            index=batch.index,
            bucket=batch.bucket,
        )


def prepare_job(config: TrainConfig) -> Job:
    """Open the data, read the target's facts, choose the cuts and count the steps.

    Raises the error of the room that found the problem (DatasetError, TargetError, BucketError, PlanError, PlacementError). Nothing is
    written.
    """
    placement = placement_of(config)
    info = read_target_info(config.target, config.mask_token_id)
    notes: tuple[str, ...] = ()
    if config.strategy == "packed":
        try:
            require_packable(info, placement.targets[0])
        except PackingError as refusal:
            config, notes = padded_instead(config, refusal)
    path = dataset_path(config.dataset)
    dataset = TokenDataset.open(path, withhold=config.heldout_rows)
    heldout = TokenDataset.open(path, "heldout", withhold=config.heldout_rows)
    drafter = DrafterConfig.for_target(
        info,
        num_layers=config.draft_layers,
        block_size=config.block_size,
        target_layer_ids=config.layer_ids,
        sliding_window=config.sliding_window or None,
    )
    for split in (dataset, heldout):
        _check_tokens(split, info, drafter.mask_token_id)
    if not dataset.n_supervised.any():
        raise DatasetError(f"{path} has no supervised token: every loss_mask is 0, so there is nothing to learn. Prepare it again")
    options = {
        "strategy": config.strategy,
        "token_budget": config.token_budget,
        "max_batch": config.max_batch,
        "pad_multiple": config.pad_multiple,
        "order": config.order,
        "window": config.accumulation,
        "too_long": config.too_long,
        "max_length": min(config.max_length or info.max_positions, info.max_positions),
        "slots_per_row": config.anchors * config.block_size,
        "slot_budget": config.slot_budget,
    }
    without_cuts = PlanOptions(**{**options, "strategy": "random"})
    eligible = select_samples(dataset.lengths, dataset.n_supervised, without_cuts)
    buckets = resolve_buckets(
        config.buckets,
        LengthHistogram.from_lengths(eligible.lengths.astype(np.int64)),
        token_budget=config.token_budget,
        max_batch=without_cuts.most_rows,
        pad_multiple=config.pad_multiple,
    )
    options |= {"boundaries": buckets.boundaries, "seed": config.seed, "n_supervised": dataset.n_supervised}
    plans = [plan_epoch(dataset.lengths, epoch=epoch, **options) for epoch in announced(range(config.epochs), "planning epochs")]
    _check_blocks(dataset, plans[0], config)
    _check_share(plans, config)
    steps = optimizer_steps([len(plan) for plan in plans], config.accumulation, config.max_steps)
    tokens = [
        np.add.reduceat(plan.real_tokens, np.arange(0, len(plan), config.accumulation))[:count]
        for plan, count in zip(plans, steps, strict=True)
    ]
    return Job(
        config=config,
        dataset=dataset,
        heldout=heldout,
        info=info,
        drafter=drafter,
        placement=placement,
        buckets=buckets,
        options=options,
        longest=plans[0].options.longest,
        plans=tuple(_describe(*each, dataset.lengths) for each in zip(plans, [*plans[1:], None], steps, strict=True)),
        steps=tuple(steps),
        tokens_by_step=np.concatenate(tokens),
        notes=notes,
    )


def padded_instead(config: TrainConfig, refusal: PackingError) -> tuple[TrainConfig, tuple[str]]:
    """The configuration with padded batches, and the sentence that says why. Raises PackingError for a run that packed until now."""
    if config.resume:
        raise PackingError(f"{refusal}; this run packed its rows, so continue it where it was started, or start a new run") from refusal
    return replace(config, strategy="bucketed"), (f"{refusal}; so batches are padded, as with strategy bucketed",)


def placement_of(config: TrainConfig) -> Placement:
    """The devices of a run. With engine ray the workers' devices are Ray's choice; the drafter's device stands for their kind."""
    if config.engine == "local":
        return place(config.device, *config.workers)
    if find_spec("ray") is None:
        raise ImportError("engine ray needs the package ray: pip install 'dflash-nb[ray]', or use engine local")
    targets, drafters = config.workers
    if config.accumulation % drafters:
        raise PlacementError(
            f"topology {config.topology}: the {drafters} drafters share the batches of a step, but accumulation {config.accumulation} is "
            f"not a multiple of {drafters}; change one of them"
        )
    if drafters > 1 and config.probe:
        raise PlacementError(f"probe: the largest batches are tried with one drafter, topology is {config.topology}; leave probe out")
    drafter = place_drafter(config.device)
    return Placement((drafter,) * targets, drafter)


def _check_tokens(dataset: TokenDataset, info: TargetInfo, mask_token_id: int) -> None:
    made_by = (dataset.tokenizer or {}).get("fingerprint")
    if made_by and info.tokenizer_fingerprint and made_by != info.tokenizer_fingerprint:
        raise DatasetError(
            f"{dataset.path} was tokenised with {dataset.tokenizer.get('name')}, whose vocabulary is not that of target {info.name}. "
            f"Prepare it again with --tokenizer {info.name}, or choose the target it was made for"
        )
    dataset.check_vocabulary(info.vocab_size, mask_token_id)


def _check_share(plans: Sequence[BatchPlan], config: TrainConfig) -> None:
    """Refuse an epoch in which a drafter gets no batch."""
    fewest, drafters = min(len(plan) for plan in plans), config.workers[1]
    if fewest < drafters:
        raise PlacementError(
            f"topology {config.topology}: an epoch has {fewest} batches, too few for {drafters} drafters; use at most {fewest}, more data, "
            "or smaller batches (token_budget, max_batch)"
        )


def _check_blocks(dataset: TokenDataset, plan: BatchPlan, config: TrainConfig) -> None:
    """Refuse a plan in which no row starts a block, which takes two supervised tokens behind each other; the first row mostly does."""
    for row in plan.sample_ids:
        mask = dataset.row(int(row))[1][: plan.options.longest].astype(bool)
        if (mask[1:] & mask[:-1]).any():
            return
    raise DatasetError(
        f"{dataset.path}: none of the {len(plan.sample_ids):,} rows of an epoch has two supervised tokens behind each other in its first "
        f"{plan.options.longest:,} tokens (max_length {config.max_length}, too_long {config.too_long}), so there is nothing to draft. "
        "Raise max_length, or prepare data with longer answers"
    )


def _describe(plan: BatchPlan, next_plan: BatchPlan | None, steps: int, lengths: np.ndarray) -> dict[str, Any]:
    mixing = mixing_report(plan, lengths, next_plan, plan.options.window)
    return {
        "epoch": plan.epoch,
        "batches": len(plan),
        "steps": steps,
        "samples": len(plan.sample_ids),
        "tokens": int(plan.real_tokens.sum()),
        "padded_tokens": int(plan.padded_tokens.sum()),
        "most_tokens": int(plan.real_tokens.max()),
        "efficiency": plan.efficiency,
        "fill": plan.fill,
        "mixing": {name: float(value) for name, value in mixing.items()},
        "excluded": {reason: len(ids) for reason, ids in plan.excluded.items()},
        "truncated": len(plan.truncated),
        "sha256": plan.sha256(),
    }
