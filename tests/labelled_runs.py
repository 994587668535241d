"""Real short runs with a label: a tiny target, text that it wrote itself, and a drafter that learns it, with a fault switched on.

Faults are switched on by configuration (the rate, clipping, the decay over slots), in the data (a poisoned sample, labels of one range of
lengths, little of it), or by replacing one function of the trainer for the time of the run. A run of 240 steps takes about 6 s of one core.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from labelled_logs import Case, killed
from tiny_targets import MASK_TOKEN, save_target
from transformers import AutoModelForCausalLM

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline import train as trainer
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.optimizer import make_optimizer

PROMPT = 6
EDGES = (24, 40, 64)
UNUSED = (0, 1)  # tokens that the language does not have: what a poisoned sample is made of
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
    """A run to make: settings, the data, and what is replaced while it runs. ``finish`` gets the folder when the run has ended."""

    world: World
    settings: dict = field(default_factory=dict)
    data: str = "plain"
    change: Callable[[list[np.ndarray]], None] | None = None
    count: int = 0
    fault: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    ends: type[BaseException] | None = None
    finish: Callable[[Path, TrainConfig], None] | None = None

    def config(self, folder: Path) -> TrainConfig:
        values = {
            "dataset": str(self.world.dataset(self.data, self.change, self.count)),
            "target": str(self.world.target),
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
def frozen(after: int = 0) -> Iterator[None]:
    """The optimiser's steps do nothing once ``after`` of them were made."""

    def make(*arguments):
        optimizer, made = make_optimizer(*arguments), [0]
        real = optimizer.step

        def step(*_):
            made[0] += 1
            return real() if made[0] <= after else None

        optimizer.step = step
        return optimizer

    with mock.patch.object(trainer, "make_optimizer", make):
        yield


@contextlib.contextmanager
def slow_target(seconds: float, after: int = 0) -> Iterator[None]:
    """A target that takes ``seconds`` longer for a batch, from its ``after``-th batch on."""
    compute, made = FrozenTarget.features, [0]

    def late(self, batch):
        made[0] += 1
        time.sleep(seconds if made[0] > after else 0)
        return compute(self, batch)

    with mock.patch.object(FrozenTarget, "features", late):
        yield


@contextlib.contextmanager
def slow_reading(seconds: float) -> Iterator[None]:
    collate = TokenDataset.collate

    def late(self, *arguments, **named):
        time.sleep(seconds)
        return collate(self, *arguments, **named)

    with mock.patch.object(TokenDataset, "collate", late):
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
def not_finite_at(batch_number: int) -> Iterator[None]:
    compute, made = FrozenTarget.features, [0]

    def broken(self, batch):
        features = compute(self, batch)
        made[0] += 1
        if made[0] == batch_number:
            features.features_ND[0] = float("inf")
        return features

    with mock.patch.object(FrozenTarget, "features", broken):
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


def resume(folder: Path, _: TrainConfig, lose: str = "") -> None:
    """Continue a run from its checkpoint; with ``lose`` without its ``moments`` or without its ``weights``, as a broken restore would."""

    def restore(path, module, optimizer):
        before = {name: value.clone() for name, value in module.state_dict().items()}
        trainer_restore(path, module, optimizer)
        if lose == "weights":
            module.load_state_dict(before)
        optimizer.state.clear()

    trainer_restore = trainer.restore
    with mock.patch.object(trainer, "restore", restore if lose else trainer_restore), contextlib.redirect_stdout(None):
        trainer.train(TrainConfig(resume=str(folder)))


def resume_from_older(folder: Path, config: TrainConfig, lose: str = "") -> None:
    """As ``resume``, from the checkpoint before the last one, as after ``kill -9``: some steps are made twice."""
    newest = max((folder / "checkpoints").glob("step-*"), key=lambda path: int(path.name[5:]))
    shutil.rmtree(newest)
    resume(folder, config, lose)


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


def seeded(world: World, offset: int, settings: dict | None = None, **rest) -> Trained:
    settings = settings or {}
    return Trained(world, {**settings, "seed": settings.get("seed", 0) + offset}, **rest)


def real_cases(world: World, half: int = 0) -> list[Case]:
    """The runs of one half; the second half has other seeds, and should be given another world."""
    run = partial(seeded, world, 100 * half)
    few = 240
    poison = longest_row(world, few)
    constant = {"decay": "constant"}
    healthy = {
        "bucketed": run(),
        "bucketed, seed 1": run({"seed": 1}),
        "bucketed, uniform order": run({"seed": 2, "order": "uniform"}),
        "random": run({"strategy": "random"}),
        "random, seed 1": run({"strategy": "random", "seed": 1}),
        "pooled": run({"strategy": "pooled"}),
        "accumulation": run({"accumulation": 4, "max_steps": 80}),
        "automatic buckets": run({"buckets": "auto", "seed": 3}),
        "constant rate": run({**constant, "seed": 4}),
        "linear decay, low end": run({"decay": "linear", "min_lr_ratio": 0.0, "seed": 5}),
        "evaluated on the way": run({"eval_every": 60, "seed": 6}),
        "one short epoch": run({"epochs": 1, "max_steps": 60, "seed": 7}),
        "twenty steps": run({"max_steps": 20, "seed": 8}),
        "interrupted and resumed": run({"seed": 9}, fault=partial(interrupted_after, 120), ends=KeyboardInterrupt, finish=resume),
        "killed and resumed": run(
            {"seed": 10, "checkpoint_every": 50, "keep_checkpoints": 3},
            fault=partial(interrupted_after, 120),
            ends=KeyboardInterrupt,
            finish=resume_from_older,
        ),
        "one bucket": run({"buckets": "auto:1", "seed": 11}),
        "D-PACE": run({"objective": "dpace", "seed": 12}),
    }
    cases = [Case(f"real, {name}", "healthy", made) for name, made in healthy.items()]

    def add(kind: str, name: str, made: Trained) -> None:
        cases.append(Case(f"real, {kind}: {name}", kind, made))

    add("static composition", "sorted", run({"strategy": "sorted"}))
    add("static composition", "sorted, seed 1", run({"strategy": "sorted", "seed": 1}))
    add(
        "warm-up",
        "half of the run",
        run({"warmup": 400, "max_steps": 1000, "seed": 13}, fault=partial(interrupted_after, 150), ends=KeyboardInterrupt),
    )
    add("divergence", "rate x 30", run({"learning_rate": 6e-2}))
    add("divergence", "rate x 30, no clipping", run({"learning_rate": 6e-2, "grad_clip": 0.0, "seed": 1}))
    add("divergence", "rate x 30, constant", run({"learning_rate": 6e-2, "seed": 2, **constant}))
    add("rate too low", "rate / 100", run({"learning_rate": 2e-5}))
    add("rate too low", "rate / 100, seed 1", run({"learning_rate": 2e-5, "seed": 1}))
    add("rate too low", "rate / 1000", run({"learning_rate": 2e-6}))
    add("nothing learned", "frozen drafter", run(fault=frozen))
    add("nothing learned", "frozen drafter, random batches", run({"strategy": "random", "seed": 1}, fault=frozen))
    add("plateau", "frozen on the way", run({**constant, "max_steps": 600, "seed": 1}, fault=partial(frozen, 150)))
    add("group does not learn", "labels of 40 to 63 tokens", run(data="shuffled", change=shuffled_labels(40, 64)))
    add("group does not learn", "labels of 24 to 39 tokens", run({"seed": 1}, data="shuffled-short", change=shuffled_labels(24, 40)))
    add("spikes", "a poisoned sample", run({"epochs": 20}, data="poisoned", change=poisoned(poison), count=few))
    add("spikes", "a poisoned sample, seed 1", run({"epochs": 20, "seed": 1}, data="poisoned", change=poisoned(poison), count=few))
    add("later slots do not learn", "decay hides them", run({"gamma": 0.05}))
    add("decoding accepts nothing", "wrong mask", run(fault=future_leaks))
    add("decoding accepts nothing", "wrong mask, seed 1", run({"seed": 1}, fault=future_leaks))
    add(
        "held-out drifts",
        "thirty rows",
        run({"epochs": 200, "max_steps": 480, "eval_every": 60, "learning_rate": 4e-3}, data="tiny", count=30),
    )
    add(
        "held-out drifts",
        "sixty rows",
        run({"epochs": 200, "max_steps": 600, "eval_every": 60, "learning_rate": 4e-3, "seed": 1}, data="tiny-60", count=60),
    )
    add("starved", "slow target", run({"max_steps": 100}, fault=partial(slow_target, 0.3)))
    add("starved", "slow reading", run({"max_steps": 100, "seed": 1}, fault=partial(slow_reading, 0.3)))
    add("slower", "target slows down", run({"max_steps": 160}, fault=partial(slow_target, 0.4, 100)))
    add(
        "not finished",
        "killed",
        run({"max_steps": 1000, "warmup": 20}, fault=partial(interrupted_after, 130), ends=KeyboardInterrupt, finish=cut),
    )
    add("not finite", "infinite features", run({"seed": 1}, fault=partial(not_finite_at, 130), ends=FloatingPointError))
    add("always clipped", "limit 0.01", run({"grad_clip": 0.01}))
    kept = {"checkpoint_every": 50, "keep_checkpoints": 3}
    add(
        "resume jump",
        "moments lost",
        run(
            {**kept, "seed": 2},
            fault=partial(interrupted_after, 120),
            ends=KeyboardInterrupt,
            finish=partial(resume_from_older, lose="moments"),
        ),
    )
    add(
        "resume jump",
        "weights lost",
        run({"seed": 3}, fault=partial(interrupted_after, 150), ends=KeyboardInterrupt, finish=partial(resume, lose="weights")),
    )
    return cases
