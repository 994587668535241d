"""Is mixing worth it? Real training with every strategy: speed as predicted and as measured, what is learned, how the loss varies.

    python benchmarks/strategies.py                                   the sample
    python benchmarks/strategies.py --target smollm2 --dataset data/chats --token-budget 2560 --max-batch 8 --anchors 24
    python benchmarks/strategies.py --part speed --rounds 4 --tokens 20000 --calibration 20 --out strategies.json

Speed: one process, the strategies by turns in short stretches of real training, in another order each round, so that a machine that
slows down slows all of them. The first steps of a stretch fill the window and are not counted. The cost model that predicts is measured
in stretches of its own between them, on other batches. *epoch* carries what was measured over to a whole epoch by the ratio of what the
model says for both, since a stretch holds few of the long batches. Speeds are ratios to sorted, with a standard error from the rounds.
Learning: a run a strategy and seed, all of the same real tokens; held-out loss and tau at the end, mean and standard error over seeds,
differences to random paired by seed.
Variance: the loss of the steps of two runs of the same seed with uniform and balanced order, detrended; the part that the buckets of a
step's batches explain, and the rest.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from table import show

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.model.target_info import read_target_info
from dflash_nb.pipeline.calibrate import Bench, Shapes, calibrate, fit_records
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import Job, prepare_job
from dflash_nb.pipeline.measured import identity, report
from dflash_nb.pipeline.run import Run, read_run
from dflash_nb.pipeline.train import train
from dflash_nb.pipeline.window import WAITING_BATCHES
from dflash_nb.planner.batches import PlannedBatch
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.timeline import Pipeline, timeline

FILLING_STEPS = 3
LEARNING = ("sorted", "random", "bucketed auto")


def strategies(config: TrainConfig, cost: CostModel) -> dict[str, Job]:
    """The jobs to compare, by name; packed is left out where the target cannot pack."""
    job = prepare_job(replace(config, strategy="bucketed", buckets="auto"))
    usable = np.minimum(job.dataset.lengths[job.dataset.n_supervised > 0], job.longest)
    histogram = LengthHistogram.from_lengths(usable.astype(np.int64))
    limits = {"token_budget": config.token_budget, "max_batch": config.max_batch, "pad_multiple": config.pad_multiple}
    cuts = {
        "bucketed six": optimize_buckets(histogram, 6, model="reference", **limits),
        "bucketed auto time": optimize_buckets(histogram, "auto", objective="time", cost=cost, **limits),
    }
    jobs = {"sorted": prepare_job(replace(config, strategy="sorted")), "random": prepare_job(replace(config, strategy="random"))}
    for name, plan in cuts.items():
        edges = ",".join(str(edge) for edge in plan.boundaries[1:-1])
        jobs[name] = prepare_job(replace(config, strategy="bucketed", buckets=edges))
    jobs |= {"bucketed auto": job, "pooled": prepare_job(replace(config, strategy="pooled"))}
    packed = prepare_job(replace(config, strategy="packed"))
    if packed.notes:
        print(f"packed is left out: {packed.notes[0]}", flush=True)
    else:
        jobs["packed"] = packed
    return jobs


class Stretch:
    """One strategy's place in its plan, and what its counted steps took. ``cost`` predicts, once it is set."""

    cost: CostModel

    def __init__(self, job: Job) -> None:
        self.job, self.plan = job, job.plan(0)
        self.slots = drafted_slots(job)
        self.next, self.rounds, self.batches = 0, [], []

    def planned(self) -> Iterator[tuple[int, PlannedBatch]]:
        for index in range(self.next, self.next + len(self.plan)):
            yield 0, self.plan.batch(index % len(self.plan))

    def run(self, bench: Bench, tokens: int) -> None:
        """Train until the counted steps, those after the first few, have ``tokens`` real tokens."""
        for target in bench.targets:
            target.packed = self.plan.strategy == "packed"
        records = bench.records(self.job, self.planned(), self.job.config.learning_rate / 10)
        batches, done, seconds = [], 0, 0.0
        for record in records:
            batches.append((self.next + len(batches)) % len(self.plan))
            if len(batches) > FILLING_STEPS:
                done, seconds = done + record["tokens"], seconds + record["seconds"]["step"]
            if done >= tokens:
                break
        records.close()
        self.next = (self.next + len(batches)) % len(self.plan)
        self.rounds.append((done, seconds))
        self.batches.append(np.array(batches))

    def seconds(self, batches: np.ndarray, skip: int = 0) -> float:
        """Seconds of these batches by the cost model, in a pipeline as wide as the trainer's; those of the first ``skip`` not counted."""
        model, lengths, config = self.cost.for_plan(self.plan), self.job.dataset.lengths, self.job.config
        stages = ("fetch", "target", "drafter")
        fetch, target, drafter = (model.plan_batch_seconds(self.plan, lengths, stage, self.slots)[batches] for stage in stages)
        pipeline = Pipeline(model.target_workers, config.prefetch, WAITING_BATCHES)
        found = timeline(fetch, model.target_workers * target, drafter, pipeline)
        return found.seconds - (float(found.done_M[skip - 1]) if skip else 0.0)

    def epoch(self) -> float:
        """Predicted real tokens a second of the whole plan."""
        return float(self.plan.real_tokens.sum()) / self.seconds(np.arange(len(self.plan)))

    def row(self, name: str, sorted_rounds: list[tuple[int, float]], sorted_epoch: dict[str, float]) -> dict[str, Any]:
        own = np.array([tokens / seconds for tokens, seconds in self.rounds])
        ratios = own / np.array([tokens / seconds for tokens, seconds in sorted_rounds])
        tokens = sum(done for done, _ in self.rounds)
        epoch, stretch = self.epoch(), tokens / sum(self.seconds(batches, FILLING_STEPS) for batches in self.batches)
        measured = tokens / sum(seconds for _, seconds in self.rounds)
        whole = measured * epoch / stretch
        return {
            "strategy": name,
            "padding": round(1 - self.plan.efficiency, 4),
            "steps": sum(len(batches) - FILLING_STEPS for batches in self.batches),
            "predicted_tokens_s": round(stretch),
            "measured_tokens_s": round(measured),
            "predicted_over_measured": round(stretch / measured, 4),
            "epoch_tokens_s": round(whole),
            "predicted_ratio": round(epoch / sorted_epoch["predicted"], 4) if sorted_epoch else 1.0,
            "measured_ratio": round(whole / sorted_epoch["measured"], 4) if sorted_epoch else 1.0,
            "ratio_error": round(float(ratios.std(ddof=1) / np.sqrt(len(ratios))), 4) if len(ratios) > 1 else None,
        }


def drafted_slots(job: Job) -> np.ndarray:
    """Drafted slots of each sample: blocks at all its positions with a supervised next token, at most ``anchors``."""
    return np.minimum(job.config.anchors, np.maximum(job.dataset.n_supervised - 1, 0)) * job.config.block_size


def measure_speed(jobs: dict[str, Job], rounds: int, tokens: int, calibration: float) -> tuple[CostModel, list[dict[str, Any]]]:
    """The cost model of ``calibration`` seconds and a row a strategy, from interleaved stretches of calibration and of training."""
    stretches = {name: Stretch(job) for name, job in jobs.items()}
    job = jobs["bucketed auto"]
    shapes, records, rng = Shapes(job), [], np.random.default_rng(0)
    with Bench(job, packed="packed" in jobs) as bench:
        for round_ in range(rounds):
            for name in rng.permutation([*stretches, ""]).tolist():
                if name:
                    stretches[name].run(bench, tokens)
                    continue
                for target in bench.targets:
                    target.packed = False
                planned = shapes.planned(time.monotonic() + calibration / rounds, FILLING_STEPS + 1)
                records += list(bench.records(job, planned))[FILLING_STEPS:]
            print(
                f"round {round_ + 1} of {rounds}: "
                + ", ".join(f"{n} {s.rounds[-1][0] / s.rounds[-1][1]:,.0f}" for n, s in stretches.items())
            )
    cost, measured = fit_records(job, records, f"{len(records)} batches between the stretches")
    print(report(cost, measured), flush=True)
    for stretch in stretches.values():
        stretch.cost = cost
    base = stretches["sorted"]
    first = base.row("sorted", base.rounds, {})
    epoch = {"predicted": base.epoch(), "measured": first["epoch_tokens_s"]}
    return cost, [stretch.row(name, base.rounds, epoch) for name, stretch in stretches.items()]


def measure_learning(jobs: dict[str, Job], seeds: int, tokens: int, folder: Path) -> list[dict[str, Any]]:
    """Held-out loss and tau of runs over the same real tokens; a row a strategy, differences to random with their standard error."""
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(seeds):
        for name in LEARNING:
            config = replace(jobs[name].config, seed=seed, runs_dir=str(folder), run_name=f"{name.replace(' ', '-')}-{seed}", max_steps=0)
            epochs = 1 + int(tokens / jobs[name].dataset.lengths.sum())
            config = replace(config, epochs=epochs, checkpoint_every=0)
            steps = int(np.searchsorted(np.cumsum(prepare_job(config).tokens_by_step), tokens)) + 1
            summary = train(replace(config, max_steps=steps))
            last = read_run(Path(summary.run_dir)).events_of("eval")[-1]
            found.setdefault(name, []).append({key: float(last[key]) for key in ("loss", "acceptance", "tau")} | {"steps": steps})
    rows = []
    for name, runs in found.items():
        row: dict[str, Any] = {"strategy": name, "seeds": seeds, "steps": runs[0]["steps"]}
        for key in ("loss", "acceptance", "tau"):
            own = np.array([run[key] for run in runs])
            away = own - np.array([run[key] for run in found["random"]])
            row |= {key: round(float(own.mean()), 4), f"{key}_se": _error(own), f"{key}_minus_random": round(float(away.mean()), 4)}
            row[f"{key}_minus_random_se"] = _error(away)
        rows.append(row)
    return rows


def measure_variance(job: Job, steps: int, accumulation: int, folder: Path) -> list[dict[str, Any]]:
    """The variance of the step loss in both orders, explained by buckets and not."""
    rows = []
    job_config = replace(job.config, accumulation=accumulation, max_steps=steps, runs_dir=str(folder), checkpoint_every=0)
    job_config = replace(job_config, epochs=1 + steps * accumulation // len(job.plan(0)), eval_rows=1, eval_prompts=1, eval_tokens=1)
    for order in ("uniform", "balanced"):
        run = read_run(Path(train(replace(job_config, order=order, run_name=f"order-{order}")).run_dir))
        rows.append({"order": order, "steps": steps, "accumulation": accumulation} | loss_variance(run))
    return rows


def loss_variance(run: Run, skip: float = 0.3) -> dict[str, float]:
    """Variance of the detrended step loss after the first ``skip`` of the steps, and its part explained by the buckets of the batches.

    A bucket's effect is the weighted mean of its batches' distances from the trend (a straight line over the steps).
    """
    first = int(skip * len(run))
    step, loss = np.arange(len(run))[first:], run.steps["loss"][first:]
    line = np.polyfit(step, loss, 1)
    own = run.batches["at"] >= first
    at, bucket, weight = run.batches["at"][own], run.batches["bucket"][own], run.batches["weight"][own]
    away = np.nan_to_num(run.batches["loss"][own]) - np.polyval(line, at)
    _, bucket = np.unique(bucket, return_inverse=True)
    effect = np.bincount(bucket, weight * away) / np.bincount(bucket, weight)
    expected = (np.bincount(at - first, weight * effect[bucket]) / np.bincount(at - first, weight))[: len(step)]
    rest = loss - np.polyval(line, step)
    return {
        "variance": round(float(rest.var()), 6),
        "explained": round(float(expected.var()), 6),
        "unexplained": round(float((rest - expected).var()), 6),
    }


def _error(values: np.ndarray) -> float | None:
    return round(float(values.std(ddof=1) / np.sqrt(len(values))), 4) if len(values) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("speed", "learning", "variance", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=12, help="stretches of each strategy")
    parser.add_argument("--tokens", type=int, default=60_000, help="real tokens that a stretch counts")
    parser.add_argument("--calibration", type=float, default=60.0, help="seconds of calibration, before and again between the stretches")
    parser.add_argument("--cost", type=Path, help="a cost.json instead of the calibration before")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of learning")
    parser.add_argument("--learn-tokens", type=int, default=1_000_000, help="real tokens of each run of learning")
    parser.add_argument("--steps", type=int, default=130, help="steps of each run of variance")
    parser.add_argument("--accumulation", type=int, default=4, help="batches of a step of variance")
    parser.add_argument("--eval-rows", type=int, default=200)
    parser.add_argument("--eval-prompts", type=int, default=48)
    for name in ("dataset", "target", "device", "topology"):
        parser.add_argument(f"--{name}", default=getattr(TrainConfig, name))
    for name in ("token_budget", "max_batch", "anchors", "draft_layers", "block_size", "threads", "q_hs_mb"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(TrainConfig, name))
    parser.add_argument("--learning-rate", type=float, default=TrainConfig.learning_rate)
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    names = ("dataset", "target", "device", "topology", "token_budget", "max_batch", "anchors", "draft_layers", "block_size", "threads")
    names += ("q_hs_mb", "learning_rate", "eval_rows", "eval_prompts")
    config = TrainConfig(**{name: getattr(options, name) for name in names})
    if options.cost:
        own = identity(asdict(config), {}, asdict(read_target_info(config.target)))
        cost = CostModel.load(options.cost).require(target=own["target"], drafter=own["drafter"])
    else:
        cost, measured = calibrate(config, options.calibration)
        print(report(cost, measured), flush=True)
    jobs = strategies(config, cost)
    results: dict[str, Any] = {"about": {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}}
    told = vars(options) | {"out": None, "cost": None, "dataset": Path(options.dataset).name}
    results |= {"options": told, "cost": cost.to_json()}
    with tempfile.TemporaryDirectory() as folder:
        parts = {
            "speed": lambda: measure_speed(jobs, options.rounds, options.tokens, options.calibration),
            "learning": lambda: measure_learning(jobs, options.seeds, options.learn_tokens, Path(folder)),
            "variance": lambda: measure_variance(jobs["bucketed auto"], options.steps, options.accumulation, Path(folder)),
        }
        for part, measure in parts.items():
            if options.part in (part, "all"):
                found = measure()
                if part == "speed":
                    cost, found = found
                    results["cost"] = cost.to_json()
                results[part] = found
                show(found)
                if options.out:
                    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
