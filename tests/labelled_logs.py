"""Logs with a label: synthetic run folders through the real ``RunLog``, each healthy in its own way or with one planted fault.

A case names what the verdict should rest on. There are two halves of the same kinds with other seeds, noise and starts: thresholds are set
on the first and reported on the second. One log of 300 steps is written in about 40 ms.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from runs import Recipe, evaluation, padded_tokens, real_tokens, records

from dflash_nb.pipeline import lock
from dflash_nb.pipeline.runlog import RunLog

NOTES = ("warm-up", "bucket mix", "static composition", "epoch border", "short batches", "off plan", "holes")
LEVELS = Recipe().levels
MANY_EDGES = (0, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1025)
HELD: list[int] = []  # locks of the runs that are to look as if they were going on


@dataclass(frozen=True)
class Case:
    """A log and what is to be found first. ``write`` fills a folder that does not exist yet and returns what is to be read.

    ``alarm``: a finding that is a note elsewhere calls for a person here.
    """

    name: str
    kind: str
    write: Callable[[Path], Path]
    alarm: bool = False

    @property
    def healthy(self) -> bool:
        return (self.kind == "healthy" or self.kind in NOTES) and not self.alarm


@dataclass(frozen=True)
class Planted:
    """A recipe and what is done to its records, events, and ending."""

    recipe: Recipe
    change: Callable[[list[dict], np.random.Generator], None] | None = None
    events: Callable[[RunLog, dict], None] | None = None  # called after each step is written
    status: str | None = "finished"  # None: killed, "running": the folder stays locked by this process
    config: dict | None = None
    plan: dict | None = None
    error: str = ""
    after: Callable[[Path], None] | None = None

    def __call__(self, folder: Path) -> Path:
        recipe = self.recipe
        made = records(recipe)
        if self.change is not None:
            self.change(made, np.random.default_rng([recipe.seed, 7]))
        for record in made:
            record["loss"] = weighted(record)
        total = recipe.total_steps or recipe.steps
        folder.mkdir(parents=True)
        config = {**recipe.train_config().__dict__, **(self.config or {})}
        with RunLog.create(folder, config, {"devices": ["cpu"]}) as log:
            log.write("buckets", {"boundaries": list(recipe.edges)})
            tokens, padded = (int(np.mean(of(recipe)) * total * recipe.accumulation) for of in (real_tokens, padded_tokens))
            plan = {"batches": total * recipe.accumulation, "steps": total, "tokens": tokens, "padded_tokens": padded}
            warmup = int(recipe.warmup * total) if recipe.warmup < 1 else int(recipe.warmup)
            epochs = [{"epoch": epoch, **plan} for epoch in range(recipe.epochs)]
            log.write("plan", {"epochs": epochs, "total_steps": total, "warmup_steps": warmup, **(self.plan or {})})
            if 0 in recipe.evals:
                log.event("eval", **evaluation(recipe, 0))
            for record in made:
                log.step(record)
                if self.events is not None:
                    self.events(log, record)
                elif record["step"] in recipe.evals:
                    log.event("eval", **evaluation(recipe, record["step"]))
            if self.status not in (None, "running"):
                log.finish(self.status, steps=recipe.steps, **({"error": self.error} if self.error else {}))
        if self.after is not None:
            self.after(folder)
        if self.status == "running":
            HELD.append(lock.lock(folder))
        return folder


def release() -> None:
    """Let go of every run that was to look as if it were going on."""
    while HELD:
        os.close(HELD.pop())


def weighted(record: dict) -> float | None:
    """The step's loss: its batches' losses by weight; None when one is not a number."""
    losses, weights = ([batch[name] for batch in record["batches"]] for name in ("loss", "weight"))
    return None if None in losses else float(np.average(losses, weights=weights))


def each_loss(change: Callable[[dict, dict, np.random.Generator], float]) -> Callable:
    """A change that adds ``change(record, batch, rng)`` to the loss of every batch."""

    def apply(made, rng):
        for record in made:
            for batch in record["batches"]:
                batch["loss"] += change(record, batch, rng)

    return apply


def each_step(change: Callable[[dict, np.random.Generator], dict]) -> Callable:
    """A change that updates every record with ``change(record, rng)``."""

    def apply(made, rng):
        for record in made:
            record.update(change(record, rng))

    return apply


def wandering(size: float, pull: float = 0.95) -> Callable:
    """A slow random walk around the trend (AR(1)), as real curves have."""

    def apply(made, rng):
        walk = 0.0
        for record in made:
            walk = pull * walk + rng.normal(0, size)
            for batch in record["batches"]:
                batch["loss"] += walk

    return apply


def constant_rate(made, rng):
    peak = max(record["lr"] for record in made)
    for row, record in enumerate(made):
        record["lr"] = peak if row else record["lr"]


def both(*changes: Callable) -> Callable:
    def apply(made, rng):
        for change in changes:
            change(made, rng)

    return apply


def short_last_batches(made, rng):
    """Every 40th batch has a sixth of its samples and scatters accordingly."""
    for record in made[::40]:
        for batch in record["batches"]:
            batch["loss"] += rng.normal(0, 0.35)
            for name in ("tokens", "padded_tokens", "weight", "slots", "supervised"):
                batch[name] = max(1, int(batch[name] / 6))
            batch["rows"] = max(1, batch["rows"] // 6)
            batch["sample_ids"] = batch["sample_ids"][: batch["rows"]]


def poison(sample: int, height: float, every: int) -> Callable:
    """A sample that is met every ``every`` steps and lifts the loss of its batch."""

    def apply(made, rng):
        for record in made:
            for batch in record["batches"]:
                batch["sample_ids"] = [i if i != sample else i + 1 for i in batch["sample_ids"]]
        for record in made[every // 2 :: every]:
            batch = record["batches"][0]
            batch["sample_ids"][0] = sample
            batch["loss"] += height * (1 + 0.2 * rng.normal())
            record["grad_norm"] *= 5

    return apply


def spikes_in(bucket: int, count: int, height: float) -> Callable:
    """``count`` outliers in batches of one bucket, at steps that are at least 12 apart."""

    def apply(made, rng):
        rows = [row for row, record in enumerate(made) if record["batches"][0]["bucket"] == bucket and row > 20]
        chosen = []
        for row in rng.permutation(rows):
            if all(abs(row - other) > 12 for other in chosen) and len(chosen) < count:
                chosen.append(row)
                made[row]["batches"][0]["loss"] += height

    return apply


def rising(at: int, to: float, over: int, norm: float = 30.0) -> Callable:
    """The loss leaves its trend after step ``at`` and stands ``to`` higher ``over`` steps later; gradients grow ``norm`` times."""

    def apply(made, rng):
        for record in made:
            part = float(np.clip((record["step"] - at) / over, 0, 1))
            record["grad_norm"] *= norm**part
            record["clipped"] = record["grad_norm"] > 1.0
            for batch in record["batches"]:
                batch["loss"] += part * to + part * rng.normal(0, 0.1 * to)

    return apply


def stays_behind(bucket: int, share: float, recipe: Recipe) -> Callable:
    """A bucket's loss falls only ``share`` of what the others' falls."""
    return each_loss(
        lambda record, batch, rng: (
            (1 - share) * (float(recipe.trend(1)) - float(recipe.trend(record["step"]))) if batch["bucket"] == bucket else 0.0
        )
    )


def profile(accuracy: Callable[[float], list[float]]) -> Callable:
    """Accuracy by slot as a function of how far the run has come, 0 to 1; acceptance follows from it."""

    def apply(made, rng):
        for record in made:
            values = [float(np.clip(a + rng.normal(0, 0.01), 0, 1)) for a in accuracy(record["step"] / len(made))]
            record["slot_accuracy"], record["acceptance"] = values, 1 + float(np.cumprod(values).sum())

    return apply


def same_mates(made, rng):
    """The second epoch has the batches of the first in another order."""
    half = len(made) // 2
    for record, row in zip(made[half:], rng.permutation(half), strict=False):
        for batch, other in zip(record["batches"], made[row]["batches"], strict=True):
            batch["loss"] += LEVELS[other["bucket"]] - LEVELS[batch["bucket"]]
            for name in ("bucket", "rows", "tokens", "padded_tokens", "padded_length", "sample_ids", "weight", "slots", "supervised"):
                batch[name] = other[name]


def waits(share: float, prefetch: int = 8, after: int = 0, slower: float = 1.0) -> Callable:
    """The drafter waits ``share`` of the time after step ``after``; every part takes ``slower`` times as long from there on."""

    def apply(made, rng):
        for record in made[after:]:
            seconds = record["seconds"]
            busy = seconds["drafter"] + seconds["optimizer"]
            jitter = float(np.exp(rng.normal(0, 0.3)))
            seconds["wait"] = busy * share / (1 - share) * jitter
            for name in ("wait", "drafter", "optimizer"):
                seconds[name] *= slower * jitter
            seconds["step"] = seconds["wait"] + seconds["drafter"] + seconds["optimizer"]
            record["q_prefetch"] = prefetch
            seconds["target" if prefetch else "fetch"] = seconds["wait"]

    return apply


def drifting_evals(recipe: Recipe, best: int, rise: float) -> Callable:
    """Held-out loss that rises by ``rise`` nats in a thousand steps after step ``best``."""

    def event(log, record):
        if record["step"] in recipe.evals:
            result = evaluation(recipe, record["step"])
            result["loss"] += rise * max(0, record["step"] - best) / 1000
            log.event("eval", **result)

    return event


def taus(recipe: Recipe, value: float) -> Callable:
    def event(log, record):
        if record["step"] in recipe.evals:
            log.event("eval", **{**evaluation(recipe, record["step"]), "tau": value})

    return event


def resumed(at: int, first_losses: str = "same", again: int = 6) -> Callable:
    """A resume after step ``at``: ``again`` steps had run before; their losses were the ``same`` or ``other`` ones."""
    seen: list[dict] = []

    def event(log, record):
        seen.append(record)
        if record["step"] == at + again + 1:
            losses = [
                float(line["loss"]) + (0.05 if first_losses == "other" else 0.0) * (i + 1) for i, line in enumerate(seen[at : at + again])
            ]
            log.event("dropped", step=at, first=at + 1, last=at + again, losses=losses)
            log.event("resume", step=at, after="unfinished", dropped=again, versions_changed={})

    return event


def killed(folder: Path) -> None:
    """Leave the folder as ``kill -9`` does: no summary, the last line half-written."""
    (folder / "summary.json").unlink(missing_ok=True)
    path = folder / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-150])


def without_steps(first: int, last: int) -> Callable:
    def apply(made, rng):
        del made[first:last]

    return apply


def as_csv(names: dict[str, str], folder_name: str = "export.csv") -> Callable[[Path], None]:
    """Write the run's steps as a tracker's CSV export beside it; ``names``: our column -> the header."""

    def after(folder: Path) -> None:
        lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        rows = [",".join(names.values())]
        for line in lines:
            batch = line["batches"][0]
            rows.append(",".join(str({**line, **batch, "loss": line["loss"]}[ours]) for ours in names))
        (folder / folder_name).write_text("\n".join(rows) + "\n")

    return after


@dataclass(frozen=True)
class Exported:
    """A planted log, read through its CSV export."""

    planted: Planted

    def __call__(self, folder: Path) -> Path:
        return self.planted(folder) / "export.csv"


WANDB = {"step": "_step", "loss": "train/loss", "lr": "train/lr", "grad_norm": "train/grad_norm", "bucket": "train/bucket"}
STEEP = {"first_loss": 65.0, "last_loss": 6.0, "decay_steps": 6.0, "noise": 0.1}
SCENE = Recipe(steps=300, total_steps=181_000, warmup=3598, peak_lr=6e-4, decay_steps=250, first_loss=6.0, last_loss=2.2, noise=0.05)


def varied(half: int, **values) -> Recipe:
    """The recipe with these values; in the second half with other seeds, more noise and another start."""
    recipe = Recipe(**values)
    if half:
        recipe = replace(recipe, seed=recipe.seed + 1000, noise=1.3 * recipe.noise, first_loss=recipe.first_loss + 0.4)
    return recipe


def healthy_cases(half: int = 0) -> list[Case]:
    """Logs that must raise nothing above a note."""
    made_of = partial(varied, half)
    made = {
        "plain": Planted(made_of(seed=1)),
        "plain, another seed": Planted(made_of(seed=2, noise=0.2)),
        "tails of Student t with 3 degrees": Planted(
            made_of(seed=3, steps=600, noise=0.01), each_loss(lambda record, batch, rng: 0.08 * rng.standard_t(3))
        ),
        "tails of Student t, long": Planted(
            made_of(seed=4, steps=3000, noise=0.01, decay_steps=600), each_loss(lambda record, batch, rng: 0.05 * rng.standard_t(3))
        ),
        "noise skewed to the right": Planted(
            made_of(seed=5, steps=800, noise=0.01), each_loss(lambda record, batch, rng: 0.08 * (rng.gamma(1.5) - 1.5))
        ),
        "accumulation of 8": Planted(made_of(seed=6, accumulation=8, steps=200)),
        "twelve buckets, few steps each": Planted(
            made_of(
                seed=7,
                steps=150,
                edges=MANY_EDGES,
                levels=tuple(np.linspace(0.6, -0.6, 12)),
                shares=(1 / 12,) * 12,
                batch_rows=(32,) * 12,
                step_seconds=(0.2,) * 12,
            )
        ),
        "short last batches": Planted(made_of(seed=8, steps=400), short_last_batches),
        "five thousand steps": Planted(made_of(seed=9, steps=5000, decay_steps=1500)),
        "flat at the end of its decay": Planted(made_of(seed=10, steps=1500, decay_steps=100)),
        "resumed as it was": Planted(made_of(seed=11), events=resumed(150)),
        "held-out falls along": Planted(made_of(seed=12, steps=600, evals=tuple(range(0, 601, 100)))),
        "levels part as it learns": Planted(
            made_of(seed=13, steps=500),
            each_loss(lambda record, batch, rng: (batch["bucket"] - 1.5) * 0.6 * (1 - np.exp(-record["step"] / 150))),
        ),
        "noise grows": Planted(
            made_of(seed=14, steps=800, noise=0.02), each_loss(lambda record, batch, rng: rng.normal(0, 0.15 * record["step"] / 800))
        ),
        "wandering trend": Planted(made_of(seed=15, steps=1200, decay_steps=300), wandering(0.02)),
        "one bucket learns at half the pace": Planted(made_of(seed=16, steps=500), stays_behind(1, 0.55, made_of(seed=16, steps=500))),
        "clipped at every step, mildly": Planted(made_of(seed=17, grad_norm=2.5)),
        "steep start": Planted(made_of(seed=18, **STEEP)),
        "falls in its first steps": Planted(made_of(seed=29, steps=100, first_loss=9.2, last_loss=6.1, decay_steps=2.0, noise=0.2)),
        "constant rate": Planted(made_of(seed=19, steps=600, decay_steps=250, config={"decay": "constant"}), constant_rate),
        "forty steps": Planted(made_of(seed=20, steps=40, total_steps=2000, warmup=20), status="running"),
        "twelve steps": Planted(made_of(seed=21, steps=12)),
        "CSV export": Exported(Planted(made_of(seed=22, steps=400), after=as_csv(WANDB))),
        "CSV export, steep": Exported(Planted(made_of(seed=23, steps=400, **STEEP), after=as_csv(WANDB))),
        "slot profile falls off": Planted(
            made_of(seed=24, steps=500), profile(lambda part: [0.02 + 0.7 * min(1, 2 * part) * 0.75**k for k in range(7)])
        ),
        "waits for a third of the time": Planted(made_of(seed=25), waits(0.35)),
        "interrupted by hand": Planted(made_of(seed=26, steps=200, total_steps=400), status="interrupted"),
        "learns slowly and late": Planted(made_of(seed=27, steps=900, first_loss=6.5, last_loss=2.0, decay_steps=1500)),
        "one bucket is rare": Planted(made_of(seed=28, steps=400, shares=(0.4, 0.3, 0.28, 0.02))),
    }
    return [Case(name, "healthy", write) for name, write in made.items()]


def note_cases(half: int = 0) -> list[Case]:
    """Logs whose verdict is HEALTHY and whose first note is known."""
    made_of = partial(varied, half)
    two_epochs = made_of(seed=40, steps=400, epochs=2, config={"strategy": "sorted"})
    flat = {"levels": (0.0, 0.0, 0.0, 0.0)}
    return [
        Case("reference run, bucketed", "warm-up", Planted(replace(SCENE, seed=1000 * half), status="running")),
        Case(
            "reference run, sorted",
            "static composition",
            Planted(replace(SCENE, order="sorted", seed=1 + 1000 * half), config={"strategy": "sorted"}, status="running"),
        ),
        Case(
            "warming up, no levels",
            "warm-up",
            Planted(made_of(seed=41, steps=200, total_steps=9000, warmup=1000, **flat), status="running"),
        ),
        Case("warming up, steep", "warm-up", Planted(made_of(seed=42, steps=80, total_steps=9000, warmup=0.1, **STEEP), status="running")),
        Case(
            "warming up, CSV", "warm-up", Exported(Planted(made_of(seed=43, steps=200, total_steps=9000, warmup=1000), after=as_csv(WANDB)))
        ),
        Case("bucket mix, far apart", "bucket mix", Planted(made_of(seed=44, levels=(1.5, 0.5, -0.5, -1.5)))),
        Case(
            "bucket mix, two",
            "bucket mix",
            Planted(
                made_of(seed=45, edges=(0, 256, 1025), levels=(0.3, -0.3), shares=(0.8, 0.2), batch_rows=(24, 8), step_seconds=(0.2, 0.3))
            ),
        ),
        Case("bucket mix, CSV", "bucket mix", Exported(Planted(made_of(seed=46, steps=500), after=as_csv(WANDB)))),
        Case("sorted groups, second epoch", "static composition", Planted(two_epochs, same_mates)),
        Case("one length after the other", "static composition", Planted(made_of(seed=47, order="sorted", steps=500))),
        Case(
            "epoch border, down",
            "epoch border",
            Planted(
                made_of(seed=48, steps=300, epochs=3, decay_steps=600, **flat), each_loss(lambda record, batch, rng: -0.4 * record["epoch"])
            ),
        ),
        Case(
            "epoch border, small",
            "epoch border",
            Planted(
                made_of(seed=49, steps=400, epochs=2, decay_steps=800, noise=0.05, **flat),
                each_loss(lambda record, batch, rng: -0.25 * record["epoch"]),
            ),
        ),
    ]


def fault_cases(half: int = 0) -> list[Case]:
    """Logs with one fault each."""
    made_of = partial(varied, half)
    cases = []

    def add(kind: str, name: str, write: Callable[[Path], Path], alarm: bool = False) -> None:
        cases.append(Case(f"{kind}: {name}", kind, write, alarm))

    for seed, (at, to, over) in enumerate(((150, 2.0, 60), (60, 5.0, 20), (220, 1.0, 60))):
        add("divergence", f"at step {at}", Planted(made_of(seed=60 + seed), rising(at, to, over), status="running"))
    add("divergence", "slow, long", Planted(made_of(seed=63, steps=3000, decay_steps=300), rising(1800, 0.8, 1000, 3.0)))
    add("divergence", "CSV", Exported(Planted(made_of(seed=64), rising(120, 3.0, 50), after=as_csv(WANDB))))

    for seed, rate in enumerate((1e-6, 1e-5, 3e-5)):
        recipe = made_of(seed=70 + seed, steps=400, peak_lr=rate, first_loss=7.0, last_loss=-20.0, decay_steps=3e9 * rate)
        add("rate too low", f"{rate:g}", Planted(recipe))
    for seed, noise in enumerate((0.03, 0.2)):
        recipe = made_of(seed=75 + seed, steps=300, noise=noise)
        recipe = replace(recipe, last_loss=recipe.first_loss)
        add("nothing learned", f"noise {noise}", Planted(recipe, profile(lambda part: [0.01] * 7)))
    for seed in (0, 1):
        recipe = made_of(seed=78 + seed, steps=1500, decay_steps=60, config={"decay": "constant"})
        add("plateau", f"seed {seed}", Planted(recipe, both(constant_rate, wandering(0.003 * seed))))

    for seed, (every, height) in enumerate(((60, 1.5), (100, 0.9), (45, 4.0))):
        add("spikes", f"a sample every {every} steps", Planted(made_of(seed=80 + seed, steps=450), poison(17, height, every)))
    add("spikes", "five in one bucket", Planted(made_of(seed=83, steps=400), spikes_in(2, 5, 1.2)))
    add(
        "spikes",
        "among heavy tails",
        Planted(
            made_of(seed=84, steps=600, noise=0.01),
            both(each_loss(lambda record, batch, rng: 0.05 * rng.standard_t(4)), spikes_in(1, 4, 2.5)),
        ),
    )
    add("spikes", "CSV", Exported(Planted(made_of(seed=85, steps=400), spikes_in(0, 4, 1.5), after=as_csv(WANDB))))
    add("spikes", "in steps of four batches", Planted(made_of(seed=86, steps=300, accumulation=4), poison(5, 1.5, 50)))

    for seed, (bucket, share) in enumerate(((0, 0.0), (2, 0.1), (3, 0.12))):
        recipe = made_of(seed=90 + seed, steps=400)
        add("group does not learn", f"bucket {bucket}", Planted(recipe, stays_behind(bucket, share, recipe)))
    steep = made_of(seed=93, steps=500, **STEEP)
    add(
        "group does not learn",
        "after a steep start",
        Planted(steep, each_loss(lambda record, batch, rng: 0.0 if batch["bucket"] == 1 else -3.0 * (1 - np.exp(-record["step"] / 150)))),
    )
    add(
        "later slots do not learn",
        "from the third",
        Planted(
            made_of(seed=94, steps=400), profile(lambda part: [0.6 * min(1, 2 * part) + 0.02, 0.4 * min(1, 2 * part) + 0.02, *[0.02] * 5])
        ),
    )
    add(
        "later slots do not learn",
        "all but the first",
        Planted(made_of(seed=95, steps=300), profile(lambda part: [0.7 * min(1, 2 * part) + 0.02, *[0.03] * 6])),
    )
    add(
        "acceptance stuck",
        "labels shifted",
        Planted(made_of(seed=96, steps=300), profile(lambda part: [0.01, *[0.7 * min(1, 2 * part)] * 6])),
    )
    add(
        "acceptance stuck",
        "first slot blind",
        Planted(made_of(seed=97, steps=500), profile(lambda part: [0.02, 0.5 * part + 0.05, *[0.4 * part + 0.05] * 5])),
    )
    leak = made_of(seed=98, steps=300, evals=(0, 100, 200, 300))
    add("decoding accepts nothing", "leak", Planted(leak, profile(lambda part: [min(0.98, 0.2 + 2 * part)] * 7), events=taus(leak, 1.02)))
    leak = made_of(seed=99, steps=400, evals=(0, 200, 400))
    add(
        "decoding accepts nothing",
        "half a leak",
        Planted(leak, profile(lambda part: [min(0.7, 0.1 + 2 * part)] * 7), events=taus(leak, 1.0)),
    )

    for seed, (best, rise) in enumerate(((200, 2.0), (400, 1.0))):
        recipe = made_of(seed=100 + seed, steps=1000, decay_steps=200, evals=tuple(range(0, 1001, 100)))
        add("held-out drifts", f"best at step {best}", Planted(recipe, events=drifting_evals(recipe, best, rise)))
    add(
        "resume jump",
        "loss",
        Planted(
            made_of(seed=104, steps=400),
            each_loss(lambda record, batch, rng: 1.0 * np.exp(-max(0, record["step"] - 201) / 60) if record["step"] > 200 else 0.0),
            events=resumed(200),
        ),
    )
    add("resume jump", "other losses the second time", Planted(made_of(seed=105, steps=300), events=resumed(150, "other")))
    add(
        "resume jump",
        "rate starts again",
        Planted(
            made_of(seed=106, steps=300),
            each_step(lambda record, rng: {"lr": record["lr"] if record["step"] <= 150 else 1e-3 * min(1.0, (record["step"] - 150) / 50)}),
            events=resumed(150),
        ),
    )

    add(
        "not finite",
        "loss",
        Planted(
            made_of(seed=108),
            lambda made, rng: (
                [batch.update(loss=None) for record in made[200:] for batch in record["batches"]]
                and [record.update(grad_norm=float("nan")) for record in made[200:]]
            ),
            status="running",
        ),
    )
    add(
        "not finite",
        "gradient, the run ended",
        Planted(
            made_of(seed=109, total_steps=600),
            status="failed",
            error="FloatingPointError: the gradient's norm is nan at loss 3.1; the step's first sample ids are [4, 9]",
        ),
    )
    for seed, limit in enumerate((0.01, 0.05)):
        recipe = made_of(seed=110 + seed, grad_clip=limit)
        add("always clipped", f"limit {limit}", Planted(recipe))
    for seed, prefetch in enumerate((8, 0)):
        add("starved", "the target" if prefetch else "reading", Planted(made_of(seed=112 + seed), waits(0.9, prefetch)))
    add("slower", "after a third", Planted(made_of(seed=114, steps=450), waits(0.8, after=200)))
    add("not finished", "killed", Planted(made_of(seed=116, steps=250, total_steps=2000, warmup=50), after=killed))
    add(
        "not finished",
        "failed",
        Planted(made_of(seed=117, steps=180, total_steps=2000, warmup=50), status="failed", error="WorkerError: CUDA out of memory"),
    )
    add(
        "epoch border",
        "up, order starts again",
        Planted(
            made_of(seed=118, steps=300, epochs=2, levels=(0.0,) * 4, decay_steps=300),
            each_loss(lambda record, batch, rng: 0.8 * np.exp(-(record["step"] - 151) / 40) if record["step"] > 150 else 0.0),
        ),
        alarm=True,
    )
    return cases


def cases(half: int = 0) -> list[Case]:
    """Every synthetic log of one half."""
    return [*healthy_cases(half), *note_cases(half), *fault_cases(half)]
