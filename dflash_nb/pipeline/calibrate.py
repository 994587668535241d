"""Measure a cost model in a minute: real batches of telling shapes through target and drafter, in the pipeline that trains.

    python -m dflash_nb.pipeline.calibrate --target sample --out cost.json
    python -m dflash_nb.pipeline.calibrate --target smollm2 --dataset data/chats --token-budget 2560 --max-batch 8 --seconds 60

Stages overlap as in training, so what they cost each other on shared cores is measured too. The shapes come round after round in
another order, so a machine that slows down for a while does not look like a slow shape. Nothing is trained: the rate is 0.
"""

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.environment import describe_environment
from dflash_nb.pipeline.job import Job, prepare_job
from dflash_nb.pipeline.local import bytes_per_token, device_names, intra_op_threads, target_pool
from dflash_nb.pipeline.measured import WARM_UP_STEPS, about, identity, report, to_measured, writable
from dflash_nb.pipeline.models import load_models
from dflash_nb.pipeline.prefetch import Prefetcher
from dflash_nb.pipeline.step import accumulate, finish_step
from dflash_nb.pipeline.window import WAITING_BATCHES, Window
from dflash_nb.planner.batches import PlannedBatch
from dflash_nb.planner.cost import CostError, CostModel
from dflash_nb.planner.fit import FEWEST_BATCHES, STAGES, Measured, fit_cost
from dflash_nb.planner.shapes import candidate_shapes, telling_shapes
from dflash_nb.progress import clock, ticking

SHAPES = 10  # for each of target and drafter


def calibrate(config: TrainConfig, seconds: float = 60.0) -> tuple[CostModel, Measured]:
    """Measure for about ``seconds`` (loading comes on top) and fit. Returns the model and what it was fitted to.

    Every shape is run at least once, however long that takes. Raises CostError for seconds without end, else what ``prepare_job`` raises.
    """
    if not 0 <= seconds < math.inf:
        raise CostError(f"seconds is {seconds} and must be a number of 0 or more; give for example 60")
    job = prepare_job(config)
    started = time.monotonic()
    shapes = Shapes(job)
    if len(shapes.shapes) < 2:
        raise CostError(
            f"{config.dataset} with max_batch {config.max_batch} has batches of one shape only, which tell no terms apart; "
            "raise max_batch, or take data of several lengths"
        )
    with Bench(job) as bench:
        planned = shapes.planned(time.monotonic() + seconds, WARM_UP_STEPS + max(FEWEST_BATCHES, len(shapes.shapes)))
        records = list(ticking(bench.records(job, planned), partial(_line, seconds)))[WARM_UP_STEPS:]
    return fit_records(job, records, f"{len(records)} batches in {time.monotonic() - started:.0f} s of calibration")


def fit_records(job: Job, records: list[dict[str, Any]], how: str) -> tuple[CostModel, Measured]:
    """The cost model of step records of ``Shapes``' batches, and what it was fitted to. ``how`` says where they come from."""
    config = job.config
    batches = [record["batches"][0] | {"blocks": record["blocks"]} for record in records]
    columns = {
        name: np.array([batch[name] for batch in batches]) for name in ("rows", "tokens", "padded_length", "padded_tokens", "blocks")
    }
    columns["shape"] = np.array([batch["bucket"] for batch in batches])
    columns |= {f"seconds_{stage}": np.array([batch["seconds"][stage] for batch in batches]) for stage in STAGES}
    spent = [record["seconds"] for record in records]
    step = float(np.median([each["step"] - each["wait"] - each["drafter"] for each in spent]))
    measured = to_measured(columns, config.block_size, step)
    environment = describe_environment() | {"devices": {"names": device_names(job.placement)}}
    belongs_to = identity(asdict(config), environment, asdict(job.info))
    return fit_cost(measured, **about(asdict(config), belongs_to, measured, how)), measured


def _line(seconds: float, done: int, spent: float) -> str:
    return f"calibrating: {done:,} batches, ETA {clock(max(0.0, seconds - spent))}"


def chosen_shapes(job: Job) -> np.ndarray:
    """Shapes (rows, length), int64[S, 2], that tell the terms of target and drafter apart, from what the job's data and limits allow."""
    config = job.config
    shapes = candidate_shapes(_lengths(job), config.token_budget, config.max_batch)
    rows, length = shapes.T.astype(np.float64)
    tokens, slots = rows * length, rows * np.minimum(config.anchors, length / 2) * config.block_size
    nothing = {stage: np.zeros(len(rows)) for stage in STAGES}
    guess = Measured(rows, tokens, length, tokens, slots, slots * length, nothing)
    places = np.concatenate([telling_shapes(guess.terms(stage), SHAPES) for stage in ("target", "drafter")])
    return shapes[np.unique(places)]


def _lengths(job: Job) -> np.ndarray:
    return np.minimum(job.dataset.lengths[job.dataset.n_supervised > 1], job.longest)


class Shapes:
    """Batches of a job's chosen shapes in rounds, each round in another order and with other samples of about the length."""

    def __init__(self, job: Job) -> None:
        self.shapes = chosen_shapes(job)
        self._dataset, self._longest = job.dataset, job.longest
        usable = np.flatnonzero(job.dataset.n_supervised > 1)
        self._usable = usable[np.argsort(job.dataset.lengths[usable], kind="stable")]
        self._rng = np.random.default_rng(0)
        self._next: list[int] = []

    def planned(self, until: float, fewest: int) -> Iterator[tuple[int, PlannedBatch]]:
        """Batches until the clock (``time.monotonic``) is at ``until``, ``fewest`` at least; a later call goes on where this one ended.

        A batch's bucket is the number of its shape.
        """
        lengths = np.minimum(self._dataset.lengths[self._usable], self._longest)
        for index in itertools.count():
            if time.monotonic() > until and index >= fewest:
                return
            self._next = self._next or self._rng.permutation(len(self.shapes)).tolist()
            shape = self._next.pop()
            rows, length = self.shapes[shape].tolist()
            last = int(np.searchsorted(lengths, length, side="right")) - int(self._rng.integers(0, rows))
            here = slice(max(0, last - rows), max(rows, last))
            yield 0, PlannedBatch(index, self._usable[here], int(lengths[here].max()), shape, int(lengths[here].sum()))


class Bench:
    """The models of a job in the pipeline that trains, without a run folder: what batches cost, and nothing that lasts.

    A context manager. Jobs of other plans, with the same models, may be run on it one after another.
    packed: load the target so that ``targets[k].packed`` can be switched between batches.
    """

    def __init__(self, job: Job, packed: bool = False) -> None:
        self.job, self.packed = job, packed
        self._stack = ExitStack()

    def __enter__(self) -> "Bench":
        with ExitStack() as stack:
            job, config, device = self.job, self.job.config, self.job.placement.drafter
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            torch.set_num_threads(intra_op_threads(config.threads, len(job.placement.targets)))
            torch.manual_seed(config.seed)
            models = load_models(job, self.packed)
            self.targets, self.head, self.settings = models.targets, models.head, models.settings
            self.drafter, self.optimizer = models.drafter, models.optimizer
            self.pool = target_pool(self.targets, device)
            stack.callback(self.pool.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def records(self, job: Job, planned: Iterator[tuple[int, PlannedBatch]], learning_rate: float = 0.0) -> Iterator[dict[str, Any]]:
        """Step records, one batch a step, as ``planned`` gives them; closing the iterator drops what is in flight and waits for it."""
        config, token_bytes = job.config, bytes_per_token(self.targets[0])
        source = Prefetcher(planned, job.collate, config.prefetch)
        window = Window(
            source,
            self.pool,
            size_of=lambda batch: batch.real_tokens * token_bytes,
            max_items=len(self.targets) + WAITING_BATCHES,
            max_bytes=config.q_hs_mb << 20,
        )
        try:
            while True:
                try:
                    total = accumulate(window, 1, self.drafter, self.head, self.settings)
                except StopIteration:
                    return
                yield finish_step(total, self.optimizer, learning_rate, config.grad_clip)
        finally:
            window.close()
            small = job.collate((0, PlannedBatch(0, np.array([int(job.dataset.lengths.argmin())]), int(job.dataset.lengths.min()), -1, 1)))
            for future in [self.pool.submit(small) for _ in self.targets]:
                future.result()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to measure")
    parser.add_argument("--out", type=Path, default=Path("cost.json"), help="where to write the model")
    for name in ("dataset", "target", "device", "topology"):
        parser.add_argument(f"--{name}", default=getattr(TrainConfig, name))
    for name in ("token_budget", "max_batch", "anchors", "draft_layers", "block_size", "threads"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(TrainConfig, name))
    options = vars(parser.parse_args(arguments))
    out, seconds = options.pop("out"), options.pop("seconds")
    try:
        writable(out)
        cost, measured = calibrate(TrainConfig(**options), seconds)
        print(report(cost, measured), flush=True)
        cost.save(out)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print("written:", out)


if __name__ == "__main__":
    main()
