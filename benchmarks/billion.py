"""Measures the pieces of planning 10^9 samples in shards: what a shard costs, and what mixing shards lose against one plan of everything.

    python benchmarks/billion.py                             mixing on the reference lengths, a shard of 10^7: a minute
    python benchmarks/billion.py --sizes 1e7 1e8 --order     and one of 10^8, and one order of all batches: three minutes, 4 GB
    python benchmarks/billion.py --out billion.json

A shard has a length column of its own; its plan is a pure function of seed, shard and epoch. Cuts come from the sum of all shards'
histograms. Mixing: the same 902,087 lengths as one plan and as ten shards, dealt at random or cut from the data sorted by length, which
is the worst that a file layout can do; their batches drawn in four ways. W1 is that of 8 consecutive batches. Each shard's cost is
measured in a process of its own: CPU seconds, and the peak growth of its memory.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from table import show

from dflash_nb.data.lengths import LengthHistogram, read_histogram, read_lengths
from dflash_nb.planner.batches import BatchPlan, plan_epoch
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.diversity import AchievedBatches, possible_mates, repeated_mates, window_w1
from dflash_nb.planner.order import batch_order

SHARDS, WINDOW = 10, 8
TOTAL = 10**9
Order = list[tuple[int, int]]
"""The shard and the number in its plan of each batch that runs."""


def shard_seed(seed: int, shard: int) -> int:
    """Shards with plans of their own: ``plan_epoch`` hashes seed and epoch, so a shard needs another seed that is hashed as well."""
    return int(np.random.SeedSequence([seed, shard]).generate_state(1, np.uint64)[0] >> 1)


def merged(histograms: list[LengthHistogram]) -> LengthHistogram:
    return LengthHistogram.from_counts(np.concatenate([h.lengths for h in histograms]), np.concatenate([h.counts for h in histograms]))


def turns(sizes: list[int], rng: np.random.Generator) -> np.ndarray:
    """Who is next, int64[sum of sizes]: everyone as evenly spread as it goes, in a new order each round."""
    place = np.concatenate([(np.arange(n) + rng.random(n)) / n for n in sizes])
    return np.repeat(np.arange(len(sizes)), sizes)[np.argsort(place, kind="stable")]


def in_one_order(plans: list[BatchPlan], rng: np.random.Generator) -> Order:
    """The batches of all shards in one balanced order, as if they were of one plan."""
    means = np.concatenate([plan.real_tokens / plan.rows for plan in plans])
    first = np.cumsum([0, *map(len, plans)])
    place = batch_order(means, "balanced", WINDOW, rng)
    shard = np.searchsorted(first, place, side="right") - 1
    return list(zip(shard.tolist(), (place - first[shard]).tolist(), strict=True))


def batch_by_batch(plans: list[BatchPlan], rng: np.random.Generator) -> Order:
    """A batch from each shard in turn, each in its own order: what hosts do that each draw from a shard of their own."""
    shard = turns([len(plan) for plan in plans], rng)
    return _taken(shard, [list(range(len(plan))) for plan in plans], 1)


def window_by_window(plans: list[BatchPlan], rng: np.random.Generator) -> Order:
    """A whole window of consecutive batches from each shard in turn; what is left of each shard comes last."""
    whole = [len(plan) // WINDOW for plan in plans]
    rest = [(k, b) for k, plan in enumerate(plans) for b in range(whole[k] * WINDOW, len(plan))]
    return _taken(turns(whole, rng), [list(range(len(plan))) for plan in plans], WINDOW) + rest


def shard_by_shard(plans: list[BatchPlan], rng: np.random.Generator) -> Order:
    """One shard after another, in a new order each epoch."""
    return [(k, b) for k in rng.permutation(len(plans)).tolist() for b in range(len(plans[k]))]


def _taken(shard: np.ndarray, left: list[list[int]], at_once: int) -> Order:
    waiting = [iter(batches) for batches in left]
    return [(k, next(waiting[k])) for k in shard.tolist() for _ in range(at_once)]


DRAWS = (in_one_order, batch_by_batch, window_by_window, shard_by_shard)


def drawn(plans: list[BatchPlan], rows: list[np.ndarray], order: Order) -> AchievedBatches:
    """The batches of all shards as they run. rows: the row numbers in all the data of each shard's samples."""
    batches = [(rows[shard], plans[shard].batch(index)) for shard, index in order]
    ids = [own[batch.sample_ids] for own, batch in batches]
    return AchievedBatches(
        np.concatenate(ids),
        np.cumsum([0, *map(len, ids)]),
        np.array([batch.real_tokens for _, batch in batches], dtype=np.int64),
        np.array([batch.bucket for _, batch in batches], dtype=np.int32),
    )


def mixing_row(what: str, draw: str, lengths: np.ndarray, epochs: list[Any], plans: list[BatchPlan]) -> dict[str, Any]:
    computed = sum(int(plan.padded_tokens.sum()) for plan in plans)
    return {
        "data": what,
        "drawn": draw,
        "efficiency": round(int(lengths.sum()) / computed, 4),
        "batches": sum(map(len, plans)),
        "W1": round(float(window_w1(epochs[0], lengths, WINDOW)), 3),
        "met again": f"{float(repeated_mates(*epochs)):.3%}",
        "possible mates": round(float(possible_mates(*epochs))),
        "most over mean batches": round(max(map(len, plans)) / np.mean([len(plan) for plan in plans]) - 1, 4),
    }


def measure_mixing(seed: int = 0) -> list[dict[str, Any]]:
    """A row for the plan of everything, and for each layout of ten shards and way to draw from them."""
    lengths = read_lengths("reference")
    cuts = optimize_buckets(LengthHistogram.from_lengths(lengths)).boundaries
    found = []
    for order in ("balanced", "uniform"):
        whole = [plan_epoch(lengths, "bucketed", cuts, seed=seed, epoch=epoch, order=order) for epoch in (0, 1)]
        found.append(mixing_row("one plan", f"{order} order", lengths, whole, whole[:1]))
    layouts = {"10 random shards": np.arange(len(lengths)), "10 shards by length": np.argsort(lengths, kind="stable")}
    for name, rows in layouts.items():
        shards = np.array_split(rows, SHARDS)
        total = merged([LengthHistogram.from_lengths(lengths[shard]) for shard in shards])
        assert optimize_buckets(total).boundaries == cuts
        plans = [
            [plan_epoch(lengths[rows], "bucketed", cuts, seed=shard_seed(seed, k), epoch=epoch) for k, rows in enumerate(shards)]
            for epoch in (0, 1)
        ]
        for draw in DRAWS:
            epochs = [drawn(own, shards, draw(own, np.random.default_rng([seed, epoch]))) for epoch, own in enumerate(plans)]
            found.append(mixing_row(name, draw.__name__.replace("_", " "), lengths, epochs, plans[0]))
    return found


def memory(kind: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process in bytes."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(kind)) * 1024.0


def measured(call: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, CPU seconds and the peak growth in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    before, started = memory("VmRSS"), time.process_time()
    result = call()
    return result, time.process_time() - started, memory("VmHWM") - before


def measure_shard(size: int, path: Path) -> dict[str, Any]:
    """What one shard of ``size`` lengths costs, from its length column to its plan."""
    lengths, reading, reading_bytes = measured(lambda: read_lengths(path))
    histogram, counting, _ = measured(lambda: LengthHistogram.from_lengths(lengths))
    lengths = lengths.astype(np.int32)
    total, merging, _ = measured(lambda: merged([histogram] * SHARDS))
    cuts, cutting, _ = measured(lambda: optimize_buckets(total))
    plan, planning, planning_bytes = measured(lambda: plan_epoch(lengths, "bucketed", cuts.boundaries, seed=shard_seed(0, 7)))
    kept = sum(values.nbytes for values in (plan.sample_ids, plan.offsets, plan.padded_lengths, plan.bucket_ids, plan.real_tokens))
    return {
        "samples": size,
        "column, B a sample": round(path.stat().st_size / size, 2),
        "read, CPU s": round(reading, 2),
        "read, peak B a sample": round(reading_bytes / size, 1),
        "histogram, CPU s": round(counting, 2),
        "10 merged, CPU ms": round(1000 * merging, 2),
        "cuts, CPU s": round(cutting, 2),
        "plan, CPU s": round(planning, 2),
        "plan, peak B a sample": round(planning_bytes / size, 1),
        "plan, B a sample": round(kept / size, 2),
        "batches": len(plan),
        "efficiency": round(plan.efficiency, 4),
    }


def measure_order(shard: dict[str, Any]) -> dict[str, Any]:
    """One balanced order of all batches of 10^9 samples, as many as ``shard`` has for its own; of mean lengths as the reference run's."""
    batches = round(TOTAL / shard["samples"] * shard["batches"])
    rng = np.random.default_rng(0)
    means = rng.choice(read_histogram("reference").expand(0), batches).astype(np.float64)
    _, seconds, peak = measured(lambda: batch_order(means, "balanced", WINDOW, rng))
    return {"batches": batches, "order, CPU s": round(seconds, 1), "order, peak GB": round(peak / 1e9, 2)}


def shard_in_a_process(size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.parquet"
        own, rng = read_histogram("reference").expand(0).astype(np.int32), np.random.default_rng(0)
        with pq.ParquetWriter(path, pa.schema([("seq_len", pa.int32())])) as writer:
            for first in range(0, size, 1 << 22):
                count = min(1 << 22, size - first)
                writer.write_table(pa.table({"seq_len": own[rng.integers(0, len(own), count)]}))
        command = [sys.executable, __file__, "--shard", str(size), str(path)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def totals(shard: dict[str, Any]) -> list[str]:
    """What 10^9 samples cost by this shard, on one machine and on ten."""
    count = TOTAL / shard["samples"]
    once, epoch = (count * sum(shard[name] for name in names) for names in (("read, CPU s", "histogram, CPU s"), ("plan, CPU s",)))
    peak = shard["plan, peak B a sample"] * shard["samples"] / 1e9
    return [
        f"10^9 samples in {count:,.0f} shards of {shard['samples']:,}: {shard['column, B a sample'] * TOTAL / 1e9:.1f} GB on disk; "
        f"once {once:,.0f} CPU s to read and count them, {shard['cuts, CPU s']:.1f} for the cuts; {epoch:,.0f} CPU s an epoch to plan",
        f"one shard at a time: {peak:.1f} GB at the peak beside {4 * shard['samples'] / 1e9:.1f} GB of lengths; "
        f"all plans at once: {shard['plan, B a sample'] * TOTAL / 1e9:.1f} GB",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=lambda text: int(float(text)), nargs="*", default=[10**7], help="samples of the shards to measure")
    parser.add_argument("--no-mixing", action="store_true", help="leave out the comparison with one plan")
    parser.add_argument("--order", action="store_true", help="order all batches of 10^9 samples as well: 2 GB")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--shard", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shard:
        print(json.dumps(measure_shard(int(options.shard[0]), Path(options.shard[1]))))
        return
    results: dict[str, Any] = {}
    if not options.no_mixing:
        results["mixing"] = measure_mixing()
        show(results["mixing"])
    results["shards"] = [shard_in_a_process(size) for size in options.sizes]
    for shard in results["shards"]:
        print("\n".join([f"{name}: {value:,}" for name, value in shard.items()] + totals(shard)), end="\n\n")
    if options.order:
        results["order"] = measure_order(results["shards"][0])
        show([results["order"]])
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
