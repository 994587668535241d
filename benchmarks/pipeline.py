"""Measures the pipeline around the models: what fetching a sample costs, whether the window keeps the slowest stage busy, and what
measuring costs a run.

    python benchmarks/pipeline.py                     all parts, about 8 minutes and 1 GB of disk
    python benchmarks/pipeline.py --samples 1000000   a dataset of 10 GB
    python benchmarks/pipeline.py --part measuring --out pipeline.json

Fetch: samples of 2,000 tokens in random order from memory-mapped Arrow, each row read a first time and again.
Simulated devices: threads that sleep. Service times follow the reference run (a target does 5,300 padded tokens a second, the drafter
31,000 real ones), sped up; lengths are the reference run's. Rates are taken while the window is full.
Measuring: 40 steps on the embedded sample; CPU seconds of everything that only measures (log line, console, queues and memory, tracker)
as a share of all CPU seconds of the steps.
"""

import argparse
import json
import os
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from table import show

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.data.lengths import read_histogram
from dflash_nb.pipeline.local import LocalPool
from dflash_nb.pipeline.prefetch import Prefetcher
from dflash_nb.pipeline.window import Window
from dflash_nb.planner.batches import BatchPlan, plan_epoch

REFERENCE_BOUNDARIES = (0, 770, 1216, 1728, 2432, 3296, 8193)
TARGET_TOKENS_PER_SECOND = 5_300
DRAFTER_TOKENS_PER_SECOND = 31_000
FEATURE_BYTES = 51_200


def write_samples(path: Path, samples: int, tokens: int, rows_a_chunk: int = 1000) -> None:
    """An Arrow file of ``samples`` rows of random ids, ``tokens`` long."""
    rng = np.random.default_rng(0)
    schema = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8()))])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for first in range(0, samples, rows_a_chunk):
            rows = min(rows_a_chunk, samples - first)
            offsets = np.arange(rows + 1, dtype=np.int32) * tokens
            ids = pa.ListArray.from_arrays(offsets, rng.integers(0, 248_320, rows * tokens, dtype=np.int32))
            mask = pa.ListArray.from_arrays(offsets, (rng.random(rows * tokens, dtype=np.float32) < 0.6).astype(np.uint8))
            writer.write_batch(pa.record_batch([ids, mask], schema))


def measure_fetch(samples: int, tokens: int, rows: int = 24, batches: int = 100) -> list[dict]:
    """Milliseconds a sample of random batches through ``TokenDataset.collate``, and the seconds that opening the file from disk takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.arrow"
        write_samples(path, samples, tokens)
        _forget(path)
        started = time.perf_counter()
        dataset = TokenDataset.open(path)
        opened = time.perf_counter() - started
        plan = np.random.default_rng(1).permutation(samples)[: rows * batches].reshape(batches, rows)
        results = []
        for state in ("first", "again"):
            seconds = []
            for ids in plan:
                started = time.perf_counter()
                dataset.collate(ids, tokens)
                seconds.append((time.perf_counter() - started) / rows)
            results.append(
                {
                    "part": "fetch",
                    "pass": state,
                    "samples": samples,
                    "tokens": tokens,
                    "gigabytes": round(path.stat().st_size / 1e9, 2),
                    "open_s": round(opened, 3),
                    "ms_median": round(1000 * float(np.median(seconds)), 4),
                    "ms_p99": round(1000 * float(np.quantile(seconds, 0.99)), 4),
                }
            )
        return results


def _forget(path: Path) -> None:
    """Drop a file from the page cache before it is mapped (Linux; elsewhere the cold pass is a warm one)."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@dataclass(frozen=True)
class Shape:
    """A batch without tokens."""

    epoch: int
    index: int
    sample_ids_B: np.ndarray
    padded_length: int
    padded_tokens: int
    real_tokens: int
    nbytes: int = 0


def measure_topology(plan: BatchPlan, strategy: str, targets: int, batches: int, speed_up: float) -> dict:
    """The rate of a simulated pipeline against that of its slowest stage alone, by the times that the stages really slept."""
    busy = dict.fromkeys(range(targets), 0.0)

    def target(worker: int):
        def work(batch: Shape) -> None:
            started = time.perf_counter()
            time.sleep(batch.padded_tokens / TARGET_TOKENS_PER_SECOND / speed_up)
            busy[worker] += time.perf_counter() - started

        return work

    def shape(index: int) -> Shape:
        batch = plan.batch(index)
        return Shape(0, index, batch.sample_ids, batch.padded_length, int(plan.padded_tokens[index]), batch.real_tokens)

    pool = LocalPool({f"target-{k}": target(k) for k in range(targets)})
    source = Prefetcher(iter(range(batches)), shape, max_items=50)
    window = Window(source, pool, size_of=lambda batch: batch.real_tokens * FEATURE_BYTES, max_items=targets + 16, max_bytes=1 << 40)
    drafter_busy, tokens, depths, started, before = 0.0, 0, [], 0.0, {}
    edge = 2 * targets  # the window fills and runs empty there
    for count, ready in enumerate(window):
        if count == edge:
            started, before, drafter_busy, tokens = time.perf_counter(), dict(busy), 0.0, 0
        if count == batches - edge:
            took, target_busy = time.perf_counter() - started, sum(busy[k] - before[k] for k in busy) / targets
            break
        slept = time.perf_counter()
        time.sleep(ready.batch.real_tokens / DRAFTER_TOKENS_PER_SECOND / speed_up)
        drafter_busy += time.perf_counter() - slept
        tokens += ready.batch.real_tokens
        depths.append(window.depth)
    window.close()
    pool.close()
    return {
        "part": "simulated",
        "strategy": strategy,
        "topology": f"{targets}-1",
        "batches": batches,
        "limits": "drafter" if drafter_busy > target_busy else "target",
        "tokens_per_second": round(tokens / took / speed_up),
        "alone_tokens_per_second": round(tokens / max(drafter_busy, target_busy) / speed_up),
        "share": round(max(drafter_busy, target_busy) / took, 4),
        "q_hs_mean": round(float(np.mean(depths)), 1),
    }


def measure_topologies(batches: int, speed_up: float) -> list[dict]:
    """Every topology from 1-1 to 7-1 with sorted, bucketed and random plans of the reference lengths."""
    lengths = read_histogram("reference").expand(seed=0)[:60_000]
    results = []
    for strategy in ("sorted", "bucketed", "random"):
        plan = plan_epoch(lengths, strategy, REFERENCE_BOUNDARIES)
        results += [measure_topology(plan, strategy, targets, min(batches, len(plan)), speed_up) for targets in range(1, 8)]
    return results


def measure_measuring(steps: int = 40) -> list[dict]:
    """The share of a training step's CPU time that goes into measuring it, each function timed in place."""
    from dflash_nb.pipeline import step, train
    from dflash_nb.pipeline.config import TrainConfig
    from dflash_nb.pipeline.console import Console
    from dflash_nb.pipeline.runlog import RunLog
    from dflash_nb.pipeline.trackers import Tracker

    spent: dict[str, float] = {}

    def timed(owner: object, name: str, what: str, clock=time.thread_time) -> None:
        inner = getattr(owner, name)

        def outer(*arguments, **options):
            started = clock()
            try:
                return inner(*arguments, **options)
            finally:
                spent[what] = spent.get(what, 0.0) + clock() - started

        setattr(owner, name, outer)

    timed(RunLog, "step", "log line")
    timed(Console, "step", "console")
    timed(Tracker, "step", "tracker")
    timed(train._Run, "_queues", "queues and memory")
    timed(step, "accuracy", "slot accuracy")
    for name in ("accumulate", "finish_step"):
        timed(train, name, "steps", time.process_time)
    with tempfile.TemporaryDirectory() as folder:
        small = {"eval_rows": 1, "eval_prompts": 1, "eval_tokens": 1, "log_every": 1.0, "device": "cpu"}
        train.train(TrainConfig(runs_dir=folder, max_steps=steps, checkpoint_every=0, **small))
    whole = spent.pop("steps")
    rows = [*spent.items(), ("all measuring", sum(spent.values()))]
    return [
        {"part": "measuring", "what": what, "ms_a_step": round(1000 * seconds / steps, 3), "share_of_step": round(seconds / whole, 5)}
        for what, seconds in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000, help="rows of the generated dataset")
    parser.add_argument("--tokens", type=int, default=2_000, help="tokens of a row")
    parser.add_argument("--batches", type=int, default=100, help="batches of each simulated run")
    parser.add_argument("--speed-up", type=float, default=25.0, help="how much faster than the reference run the simulated devices are")
    parser.add_argument("--part", choices=("fetch", "simulated", "measuring", "all"), default="all")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    results: list[dict] = []
    if options.part in ("fetch", "all"):
        results += (fetch := measure_fetch(options.samples, options.tokens))
        show(fetch)
    if options.part in ("simulated", "all"):
        results += (simulated := measure_topologies(options.batches, options.speed_up))
        show(simulated)
    if options.part in ("measuring", "all"):
        results += (measuring := measure_measuring())
        show(measuring)
    if options.out:
        about = {"python": platform.python_version(), "machine": platform.platform(), "cores": os.cpu_count()}
        options.out.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
