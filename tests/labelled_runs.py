"""Real short runs with a label: the trainer on real batches, healthy or with one fault switched on.

Half of them train on the embedded sample with its target (100 steps, rows up to 96 tokens). What its drafter cannot show in so few steps
(wrong labels of one bucket, a poisoned sample, a leak, learning by heart) is shown by a tiny target that was taught a language, and text
that it wrote. Faults are switched on by configuration (the rate, the decay over slots), in the data (a poisoned sample, labels of one
range of lengths, little of it), or by replacing one function of the trainer for the time of the run. A run takes 3 to 8 s of one core.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from labelled_logs import Case, killed
from tiny_targets import MASK_TOKEN, save_target
from transformers import AutoModelForCausalLM

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline import evaluate, models
from dflash_nb.pipeline import train as trainer
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.optimizer import make_optimizer

PROMPT = 6
EDGES = (24, 40, 64)
UNUSED = (0, 1)  # tokens that the language does not have: what a poisoned sample is made of
SAMPLE = {
    "dataset": "sample",
    "target": "sample",
    "buckets": "32,64",
    "max_length": 96,
    "too_long": "drop",
    "anchors": 8,
    "optimizer": "muon",
    "learning_rate": 1e-3,
    "max_steps": 100,
    "eval_rows": 8,
    "eval_prompts": 1,
    "eval_tokens": 8,
}
JUMP = 0.1  # how often a text leaves the chain


@dataclass(frozen=True)
class World:
    """A target and rows that it wrote, from 14 to 160 tokens: long ones greedily, short ones drawn, so that lengths differ in loss."""

    folder: Path
    target: Path
    rows: tuple[np.ndarray, ...]
    heldout: tuple[np.ndarray, ...]

    def dataset(self, name: str, change: Callable[[list[np.ndarray]], None] | None = None, count: int = 0) -> Path:
        """A prepared dataset of the first ``count`` rows (0: all) after ``change`` was made to them; written once."""
        path = self.folder / name
        if not path.exists():
            rows = [row.copy() for row in self.rows[: count or None]]
            if change is not None:
                change(rows)
            write_rows(path, "train", rows)
            write_rows(path, "heldout", list(self.heldout))
            about = {"format": 1, "source": name, "rows": {"train": len(rows), "heldout": len(self.heldout)}}
            (path / "dataset.json").write_text(json.dumps(about))
        return path


def make_world(folder: Path, seed: int = 0, rows: int = 1200) -> World:
    """Teach a tiny target a language, save it, and let it write; about 15 s of one core."""
    target = save_target(folder / "target", "qwen3", seed=seed + 1, num_hidden_layers=4)
    model = AutoModelForCausalLM.from_pretrained(target)
    teach(model, np.random.default_rng([seed, 0]))
    model.save_pretrained(target)
    model.eval()
    return World(folder, target, tuple(written(model, rows, seed)), tuple(written(model, 60, seed + 500)))


def texts(count: int, length: int, following: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Chains int[count, length]: each token decides the next one, but for jumps."""
    rows = np.empty((count, length), np.int64)
    rows[:, 0] = rng.integers(len(UNUSED), MASK_TOKEN, count)
    for at in range(1, length):
        jumps = rng.random(count) < JUMP
        rows[:, at] = np.where(jumps, rng.integers(len(UNUSED), MASK_TOKEN, count), following[rows[:, at - 1]])
    return rows


def teach(model, rng: np.random.Generator, steps: int = 300) -> None:
    """Next-token training until the model writes the chain."""
    following = np.concatenate([UNUSED, rng.permutation(np.arange(len(UNUSED), MASK_TOKEN))])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        rows = torch.tensor(texts(24, 24, following, rng))
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@torch.no_grad()
def written(model, count: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng([seed, 1])
    torch.manual_seed(seed)
    lengths = np.sort(np.clip(np.exp(rng.normal(3.6, 0.6, count)), 14, 160).astype(int))
    rows, short = [], int((lengths < EDGES[1]).sum())
    for first in [*range(0, short, 100), *range(short, count, 100)]:
        some = lengths[first : min(first + 100, short if first < short else count)]
        prompts = torch.tensor(rng.integers(len(UNUSED), MASK_TOKEN, (len(some), PROMPT)))
        drawn = first < short
        kept = {"do_sample": drawn, "suppress_tokens": [*UNUSED, MASK_TOKEN], "pad_token_id": 0}
        answers = model.generate(prompts, max_new_tokens=int(some.max()) - PROMPT, **kept)
        rows += [answer[:length].numpy().astype(np.int32) for answer, length in zip(answers, some, strict=True)]
    return [rows[i] for i in rng.permutation(count)]


def write_rows(folder: Path, split: str, rows: list[np.ndarray]) -> None:
    masks = [(np.arange(len(row)) >= PROMPT).astype(np.uint8) for row in rows]
    table = pa.table(
        {
            "input_ids": pa.array(rows, pa.list_(pa.int32())),
            "loss_mask": pa.array(masks, pa.list_(pa.uint8())),
            "seq_len": pa.array([len(row) for row in rows], pa.int32()),
            "n_supervised": pa.array([int(mask.sum()) for mask in masks], pa.int32()),
        }
    )
    (folder / split).mkdir(parents=True)
    with pa.ipc.new_file(folder / split / "data-00000.arrow", table.schema) as writer:
        writer.write_table(table)


@dataclass(frozen=True)
class Trained:
    """A run to make: settings, the data, and what is replaced while it runs. ``finish`` gets the folder when the run has ended.

    Without a ``world`` the settings name the dataset and the target.
    """

    world: World | None
    settings: dict = field(default_factory=dict)
    data: str = "plain"
    change: Callable[[list[np.ndarray]], None] | None = None
    count: int = 0
    fault: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ends: type[BaseException] | None = None
    finish: Callable[[Path, TrainConfig], None] | None = None

    def config(self, folder: Path) -> TrainConfig:
        world = self.world
        own = {"dataset": str(world.dataset(self.data, self.change, self.count)), "target": str(world.target)} if world else {}
        values = {
            **own,
            "runs_dir": str(folder.parent),
            "run_name": folder.name,
            "buckets": ",".join(map(str, EDGES)),
            "token_budget": 512,
            "max_batch": 16,
            "draft_layers": 1,
            "block_size": 5,
            "anchors": 6,
            "learning_rate": 2e-3,
            "epochs": 6,
            "max_steps": 240,
            "eval_rows": 16,
            "eval_prompts": 6,
            "eval_tokens": 16,
            "checkpoint_every": 0,
            "log_every": 600.0,
            "device": "cpu",
            "optimizer": "adamw",
            "threads": 1,
        }
        return TrainConfig(**{**values, **self.settings})

    def __call__(self, folder: Path) -> Path:
        config = self.config(folder)
        with self.fault(), contextlib.redirect_stdout(None):
            if self.ends is None:
                trainer.train(config)
            else:
                with contextlib.suppress(self.ends):
                    trainer.train(config)
        if self.finish is not None:
            self.finish(folder, config)
        return folder


@contextlib.contextmanager
def stepping(step: Callable[[torch.optim.Optimizer, Callable, int], None]) -> Iterator[None]:
    """The optimiser's n-th step is ``step(optimizer, its real step, n)``."""

    def make(*arguments):
        optimizer, made = make_optimizer(*arguments), [0]
        real = optimizer.step

        def counted(*_):
            made[0] += 1
            step(optimizer, real, made[0])

        optimizer.step = counted
        return optimizer

    with mock.patch.object(models, "make_optimizer", make):
        yield


def frozen() -> contextlib.AbstractContextManager:
    """The optimiser's steps do nothing."""
    return stepping(lambda optimizer, real, made: None)


def weight_lost(after: int) -> contextlib.AbstractContextManager:
    """A row of weights becomes NaN once ``after`` steps were made."""

    def step(optimizer, real, made):
        real()
        if made == after:
            optimizer.param_groups[0]["params"][0].data[0] = float("nan")

    return stepping(step)


@contextlib.contextmanager
def rate_raised(after: int, factor: float) -> Iterator[None]:
    """A schedule that multiplies the rate by ``factor`` once ``after`` steps were made."""
    planned = trainer.Job.learning_rate

    def wrong(self, step):
        return planned(self, step) * (factor if step > after else 1.0)

    with mock.patch.object(trainer.Job, "learning_rate", wrong):
        yield


@contextlib.contextmanager
def slow_target(seconds: float) -> Iterator[None]:
    """A target that takes ``seconds`` longer for a batch."""
    compute = FrozenTarget.features

    def late(self, batch):
        time.sleep(seconds)
        return compute(self, batch)

    with mock.patch.object(FrozenTarget, "features", late):
        yield


@contextlib.contextmanager
def future_leaks(tokens: int = 4) -> Iterator[None]:
    """Features of a position come from ``tokens`` later: a block sees its own future in training, and not in decoding."""
    draft = DFlashDrafter.draft_blocks

    def leaking(self, features, *arguments):
        return draft(self, features.roll(-tokens, 0), *arguments)

    with mock.patch.object(DFlashDrafter, "draft_blocks", leaking):
        yield


@contextlib.contextmanager
def other_mask_token() -> Iterator[None]:
    """Decoding fills the slots with another token than training did."""
    measure = evaluate.measure_tau

    def wrong(target, drafter, *arguments, **named):
        trained = drafter.config
        drafter.config = replace(trained, mask_token_id=UNUSED[0])
        try:
            return measure(target, drafter, *arguments, **named)
        finally:
            drafter.config = trained

    with mock.patch.object(evaluate, "measure_tau", wrong):
        yield


@contextlib.contextmanager
def interrupted_after(step: int) -> Iterator[None]:
    console = trainer.Console.step

    def counting(self, record):
        console(self, record)
        if record["step"] == step:
            raise KeyboardInterrupt

    with mock.patch.object(trainer.Console, "step", counting):
        yield


def resume(folder: Path, _: TrainConfig, lose_weights: bool = False) -> None:
    """Continue a run from its checkpoint; with ``lose_weights`` as a broken restore would."""

    def restore(path, module, optimizer):
        before = {name: value.clone() for name, value in module.state_dict().items()}
        trainer_restore(path, module, optimizer)
        if lose_weights:
            module.load_state_dict(before)

    trainer_restore = trainer.restore
    with mock.patch.object(trainer, "restore", restore), contextlib.redirect_stdout(None):
        trainer.train(TrainConfig(resume=str(folder)))


def resume_from_older(folder: Path, config: TrainConfig) -> None:
    """As ``resume``, from the checkpoint before the last one, as after ``kill -9``: some steps are made twice."""
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    shutil.rmtree(newest)
    resume(folder, config)


def cut(folder: Path, _: TrainConfig) -> None:
    killed(folder)


def shuffled_labels(low: int, high: int) -> Callable[[list[np.ndarray]], None]:
    """Answers of rows with ``low`` to ``high`` - 1 tokens become random tokens."""

    def change(rows):
        rng = np.random.default_rng(5)
        for row in rows:
            if low <= len(row) < high:
                row[PROMPT:] = rng.integers(2, MASK_TOKEN, len(row) - PROMPT)

    return change


def poisoned(sample: int) -> Callable[[list[np.ndarray]], None]:
    """One row of tokens in an order that nothing foretells."""

    def change(rows):
        rows[sample][PROMPT:] = np.random.default_rng(3).integers(len(UNUSED), MASK_TOKEN, len(rows[sample]) - PROMPT)

    return change


def longest_row(world: World, among: int) -> int:
    return int(np.argmax([len(row) for row in world.rows[:among]]))


def labelled(kind: str, name: str, made: Trained) -> Case:
    return Case(f"real, {name}" if kind == "healthy" else f"real, {kind}: {name}", kind, made)


def sample_cases(half: int = 0) -> list[Case]:
    """Runs on the embedded sample; the second half has other seeds."""
    cases = []

    def add(kind: str, name: str, settings: dict | None = None, seed: int = 0, **rest) -> None:
        settings = {**SAMPLE, **(settings or {}), "seed": 100 * half + seed}
        cases.append(labelled(kind, f"{name}, on the sample", Trained(None, settings, **rest)))

    twice = {"checkpoint_every": 25, "keep_checkpoints": 3}
    cut_at_60 = {"fault": partial(interrupted_after, 60), "ends": KeyboardInterrupt}
    add("healthy", "bucketed")
    add("healthy", "random", {"strategy": "random"}, seed=1)
    add("healthy", "killed and resumed", twice, seed=2, finish=resume_from_older, **cut_at_60)
    add("static composition", "sorted", {"strategy": "sorted"})
    adamw = {"optimizer": "adamw"}  # Muon learns at thirty times this rate
    add("rate too high", "x 30", {**adamw, "learning_rate": 30 * SAMPLE["learning_rate"]})
    add("rate too low", "/ 100", {"learning_rate": SAMPLE["learning_rate"] / 100})
    add("nothing learned", "frozen drafter", fault=frozen)
    add("not finite", "a weight is NaN", fault=partial(weight_lost, 50), ends=FloatingPointError)
    add("starved", "throttled target", {"max_steps": 24}, fault=partial(slow_target, 4.0))
    add("not finished", "killed", finish=cut, **cut_at_60)
    return cases


def world_cases(world: World, half: int = 0) -> list[Case]:
    """Runs of a tiny target; the second half has other seeds, and should be given another world."""
    few = 600
    cases = []

    def add(kind: str, name: str, settings: dict | None = None, seed: int = 0, **rest) -> None:
        cases.append(labelled(kind, name, Trained(world, {**(settings or {}), "seed": 100 * half + seed}, **rest)))

    stopped = {"ends": KeyboardInterrupt}
    add("healthy", "bucketed")
    add("healthy", "pooled", {"strategy": "pooled"}, seed=1)
    add("healthy", "constant rate, D-PACE", {"decay": "constant", "objective": "dpace"}, seed=2)
    add("healthy", "twenty steps", {"max_steps": 20}, seed=3)
    add("warm-up", "half of it", {"warmup": 300, "max_steps": 1000}, seed=4, fault=partial(interrupted_after, 120), **stopped)
    add("divergence", "rate x 1000 on the way", fault=partial(rate_raised, 160, 1000.0))
    add("group does not learn", "labels of 40 to 63 tokens shuffled", data="shuffled", change=shuffled_labels(40, 64))
    add(
        "spikes",
        "a poisoned sample",
        {"epochs": 20, "max_steps": 400, "learning_rate": 6e-3},
        data="poisoned",
        change=poisoned(longest_row(world, few)),
        count=few,
    )
    add("later slots do not learn", "decay hides them", {"gamma": 0.05})
    add("decoding accepts nothing", "wrong mask", fault=future_leaks)
    add("decoding accepts nothing", "wrong mask token", fault=other_mask_token)
    by_heart = {"epochs": 200, "max_steps": 320, "eval_every": 40, "learning_rate": 4e-3}
    add("held-out drifts", "thirty rows", by_heart, data="thirty", count=30)
    add(
        "resume jump",
        "weights lost",
        fault=partial(interrupted_after, 100),
        finish=partial(resume, lose_weights=True),
        **stopped,
    )
    return cases
