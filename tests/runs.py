"""Synthetic run folders with known parts, written through the real ``RunLog``: for the tests of the reader, the plots and the diagnosis.

Loss of a batch = trend + level of its bucket + noise + what was planted. Everything that is put in can be read back from ``Recipe``.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.runlog import RunLog
from dflash_nb.pipeline.schedule import learning_rate

START = 1_750_000_000.0


@dataclass(frozen=True)
class Recipe:
    """A run's known parts. Buckets have edges ``edges``; their loss levels are ``levels``, their share of batches ``shares``."""

    steps: int = 300
    total_steps: int = 0  # planned, 0 for steps
    edges: tuple[int, ...] = (0, 128, 256, 512, 1025)
    levels: tuple[float, ...] = (0.6, 0.2, -0.2, -0.6)
    shares: tuple[float, ...] = (0.25, 0.25, 0.25, 0.25)
    batch_rows: tuple[int, ...] = (32, 24, 16, 8)
    accumulation: int = 1
    first_loss: float = 7.0
    last_loss: float = 3.5
    decay_steps: float = 120.0
    noise: float = 0.08
    block_size: int = 8
    peak_lr: float = 1e-3
    warmup: float = 0.04
    grad_norm: float = 0.6
    grad_clip: float = 1.0
    spikes: dict[int, float] = field(default_factory=dict)  # step -> height
    order: str = "shuffled"  # or "sorted": one bucket after the other
    step_seconds: tuple[float, ...] = (0.20, 0.22, 0.25, 0.30)  # drafter seconds of a batch of each bucket
    wait_seconds: float = 0.02
    fetch_seconds: float = 0.002
    q_prefetch: int = 8
    q_hs: int = 2
    evals: tuple[int, ...] = ()
    eval_gap: float = 0.1  # held-out loss minus trend
    epochs: int = 1
    seed: int = 0
    config: dict = field(default_factory=dict)

    def trend(self, step):
        """Mean loss without buckets and noise at a 1-based step."""
        return self.last_loss + (self.first_loss - self.last_loss) * np.exp(-(np.asarray(step) - 1) / self.decay_steps)

    def train_config(self) -> TrainConfig:
        given = {
            "block_size": self.block_size,
            "learning_rate": self.peak_lr,
            "warmup": self.warmup,
            "accumulation": self.accumulation,
            "grad_clip": self.grad_clip,
            "seed": self.seed,
            "epochs": self.epochs,
        }
        return TrainConfig(**{**given, **self.config})


def write_run(folder: Path, recipe: Recipe | None = None, status: str | None = "finished", upto: int | None = None) -> Path:
    """Write the run that ``recipe`` describes, its first ``upto`` steps if given, and close it with ``status`` (None: no summary)."""
    recipe = recipe or Recipe()
    folder.mkdir(parents=True, exist_ok=True)
    with RunLog.create(folder, recipe.train_config(), {"devices": ["cpu"], "data": {"rows": 1000}}) as log:
        total = recipe.total_steps or recipe.steps
        log.write("buckets", {"boundaries": list(recipe.edges)})
        batches, tokens, padded = total * recipe.accumulation, np.mean(real_tokens(recipe)), np.mean(padded_tokens(recipe))
        epoch = {"batches": batches, "steps": total, "tokens": int(batches * tokens), "padded_tokens": int(batches * padded)}
        log.write("plan", {"epochs": [{"epoch": e, **epoch} for e in range(recipe.epochs)], "total_steps": total})
        if 0 in recipe.evals:
            log.event("eval", **evaluation(recipe, 0))
        for record in records(recipe)[:upto]:
            log.step(record)
            if record["step"] in recipe.evals:
                log.event("eval", **evaluation(recipe, record["step"]))
        if status:
            log.event("checkpoint", path=f"checkpoints/step-{recipe.steps}")
            log.finish(status, steps=recipe.steps)
    return folder


def padded_tokens(recipe: Recipe) -> np.ndarray:
    """Padded tokens of a batch of each bucket."""
    return np.array(recipe.batch_rows) * (np.array(recipe.edges[1:]) - 1)


def real_tokens(recipe: Recipe) -> np.ndarray:
    """Real tokens of a batch of each bucket: rows lie in the middle of their bucket."""
    middle = (np.array(recipe.edges[1:]) + np.array(recipe.edges[:-1])) // 2
    return np.array(recipe.batch_rows) * middle


def records(recipe: Recipe) -> list[dict]:
    """The step records, in order."""
    rng = np.random.default_rng(recipe.seed)
    count = recipe.steps * recipe.accumulation
    buckets = rng.choice(len(recipe.shares), count, p=np.array(recipe.shares) / sum(recipe.shares))
    if recipe.order == "sorted":
        buckets = np.sort(buckets)
    noise = rng.normal(0, recipe.noise, count)
    total, made, elapsed = recipe.total_steps or recipe.steps, [], 0.0
    warmup = int(recipe.warmup * total) if recipe.warmup < 1 else int(recipe.warmup)
    for step in range(1, recipe.steps + 1):
        batches, weight, loss_sum = [], 0.0, 0.0
        for at in range((step - 1) * recipe.accumulation, step * recipe.accumulation):
            batch = _batch(recipe, rng, at, int(buckets[at]), float(recipe.trend(step)) + noise[at] + recipe.spikes.get(step, 0.0))
            batches.append(batch)
            weight += batch["weight"]
            loss_sum += batch["weight"] * batch["loss"]
        seconds = {name: sum(batch["seconds"][name] for batch in batches) for name in ("fetch", "target", "transfer", "wait", "drafter")}
        seconds["optimizer"] = 0.01
        seconds["step"] = seconds["wait"] + seconds["transfer"] + seconds["drafter"] + seconds["optimizer"]
        elapsed += seconds["step"]
        norm = float(recipe.grad_norm * np.exp(rng.normal(0, 0.2)) * (4 if step in recipe.spikes else 1))
        accuracy = [0.6 * 0.8**slot * min(1.0, step / (2 * recipe.decay_steps)) for slot in range(recipe.block_size - 1)]
        made.append(
            {
                "step": step,
                "epoch": (step - 1) * recipe.epochs // recipe.steps,
                "time": START + elapsed,
                "elapsed": elapsed,
                "loss": loss_sum / weight,
                "weight": weight,
                "lr": learning_rate(step, total, recipe.peak_lr, warmup, decay="cosine", min_ratio=0.1),
                "grad_norm": norm,
                "clipped": norm > recipe.grad_clip,
                "slots": sum(batch["slots"] for batch in batches),
                "blocks": sum(batch["slots"] for batch in batches) // (recipe.block_size - 1),
                "supervised": sum(batch["supervised"] for batch in batches),
                "tokens": sum(batch["tokens"] for batch in batches),
                "padded_tokens": sum(batch["padded_tokens"] for batch in batches),
                "slot_accuracy": accuracy,
                "acceptance": 1 + float(np.cumprod(accuracy).sum()),
                "seconds": seconds,
                "q_prefetch": recipe.q_prefetch,
                "q_hs": recipe.q_hs,
                "q_hs_bytes": recipe.q_hs * 1_000_000,
                "memory_bytes": 500_000_000,
                "batches": batches,
            }
        )
    return made


def _batch(recipe: Recipe, rng: np.random.Generator, index: int, bucket: int, loss: float) -> dict:
    rows, tokens = recipe.batch_rows[bucket], int(real_tokens(recipe)[bucket])
    slots = rows * 16 * (recipe.block_size - 1)
    return {
        "index": index,
        "bucket": bucket,
        "rows": rows,
        "tokens": tokens,
        "padded_tokens": int(padded_tokens(recipe)[bucket]),
        "padded_length": recipe.edges[bucket + 1] - 1,
        "loss": loss + recipe.levels[bucket],
        "weight": slots * 0.5,
        "sample_ids": rng.integers(0, 1000, rows).tolist(),
        "supervised": tokens // 2,
        "slots": slots,
        "seconds": {
            "fetch": recipe.fetch_seconds,
            "target": 0.1,
            "transfer": 0.001,
            "wait": recipe.wait_seconds,
            "drafter": recipe.step_seconds[bucket],
        },
    }


def evaluation(recipe: Recipe, step: int) -> dict:
    """The eval event at ``step``."""
    loss = float(recipe.trend(max(1, step))) + recipe.eval_gap
    accuracy = [0.5 * 0.8**slot * min(1.0, step / (2 * recipe.decay_steps)) for slot in range(recipe.block_size - 1)]
    return {
        "step": step,
        "loss": loss,
        "acceptance": 1 + float(np.cumprod(accuracy).sum()),
        "slot_accuracy": accuracy,
        "tau": None,
        "by_bucket": {},
    }
