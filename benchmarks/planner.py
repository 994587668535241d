"""Plan epochs of the reference lengths with every strategy of ours and with the samplers of others, in one run.

    python benchmarks/planner.py                      # 902,087 lengths, all strategies, peers that are installed
    python benchmarks/planner.py --size 20e6 --no-peers
    python benchmarks/planner.py --size 100e6 --no-peers --only bucketed
    python benchmarks/planner.py --tokens 1e6         # lengths of a Parquet file with so many rows of real tokens and no length column

Every row is a process of its own, so that its peak memory is its own: growth over what the lengths already took. CPU seconds
are the best of three for up to two million lengths, of one beyond. Peers are lhotse's DynamicBucketingSampler,
transformers' LengthGroupedSampler (fixed batch sizes), the multipack sampler of speculators and TRL's packing; those that are
not installed are left out. Prints a table and writes JSON.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dflash_nb.data.dataset import TokenDataset, dataset_path
from dflash_nb.data.lengths import LengthHistogram, read_histogram, read_lengths
from dflash_nb.planner.batches import BatchPlan, plan_epoch
from dflash_nb.planner.buckets import REFERENCE_BOUNDARIES, optimize_buckets
from dflash_nb.planner.diversity import AchievedBatches, repeated_mates, window_w1

BUDGET, MAX_BATCH = 49152, 64
MIXING_UP_TO = 2_000_000
Epoch = Callable[[int], Any]


@dataclass(frozen=True)
class Batches(AchievedBatches):
    """What a peer yields, with what each of its batches computes."""

    padded_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.real_tokens)


def ours(lengths: np.ndarray, strategy: str, cuts: Any = None) -> Epoch:
    if isinstance(cuts, int | str):
        cuts = optimize_buckets(LengthHistogram.from_lengths(lengths), cuts).boundaries

    def plan(epoch: int, order: str = "balanced") -> BatchPlan:
        return plan_epoch(lengths, strategy, cuts, epoch=epoch, order=order)

    return plan


def grouped(lengths: np.ndarray, groups: list[Any], packed: bool = False) -> Batches:
    ids = np.concatenate([np.asarray(group, dtype=np.int64) for group in groups])
    offsets = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
    real = np.add.reduceat(lengths[ids], offsets[:-1])
    padded = real if packed else np.maximum.reduceat(lengths[ids], offsets[:-1]) * np.diff(offsets)
    return Batches(ids, offsets, real, np.full(len(real), -1, dtype=np.int32), padded)


def lhotse(lengths: np.ndarray, buckets: int) -> Epoch:
    from lhotse.cut.text import TextExample
    from lhotse.dataset.sampling.base import TokenConstraint
    from lhotse.dataset.sampling.dynamic_bucketing import DynamicBucketingSampler

    token = np.zeros(1, dtype=np.int8)
    rows = [TextExample(text="", tokens=np.broadcast_to(token, n), custom={"row": row}) for row, n in enumerate(lengths.tolist())]
    sampler = DynamicBucketingSampler(
        rows, constraint=TokenConstraint(max_tokens=BUDGET, max_examples=MAX_BATCH), num_buckets=buckets, shuffle=True, seed=0
    )

    def epoch_batches(epoch: int) -> list[list[int]]:
        sampler.set_epoch(epoch)
        return [[row.custom["row"] for row in batch] for batch in sampler]

    return epoch_batches


def transformers(lengths: np.ndarray, batch_size: int) -> Epoch:
    import torch
    from transformers.trainer_pt_utils import LengthGroupedSampler

    rows = lengths.tolist()

    def epoch_batches(epoch: int) -> list[list[int]]:
        order = list(LengthGroupedSampler(batch_size, lengths=rows, generator=torch.Generator().manual_seed(epoch)))
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    return epoch_batches


def speculators(lengths: np.ndarray) -> Epoch:
    package = Path(importlib.util.find_spec("speculators").origin).parent
    spec = importlib.util.spec_from_file_location("multipack", package / "train" / "distributed_batch_sampler.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sampler = module.MultipackDistributedBatchSamplerV2(BUDGET, lengths, num_replicas=1, rank=0)

    def epoch_batches(epoch: int) -> list[np.ndarray]:
        sampler.set_epoch(epoch)
        return list(sampler)

    return epoch_batches


def trl(lengths: np.ndarray) -> Epoch:
    import datasets
    from trl.data_utils import pack_dataset

    datasets.disable_progress_bars()
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = pa.ListArray.from_arrays(offsets, pa.array(np.zeros(offsets[-1], dtype=bool)))
    rows = datasets.Dataset(pa.table({"input_ids": tokens}))

    def epoch_batches(epoch: int) -> list[np.ndarray]:
        """It reports the lengths in each row, not the samples: samples of one length are told apart by their turn. It packs once for
        all epochs; only the order of the rows is drawn here, as a trainer would."""
        packed = pack_dataset(rows, BUDGET, "bfd").with_format("arrow")["seq_lengths"][:].combine_chunks()
        found = np.empty(len(lengths), dtype=np.int64)
        found[np.argsort(packed.flatten().to_numpy(), kind="stable")] = np.argsort(lengths, kind="stable")
        groups = np.split(found, packed.offsets.to_numpy()[1:-1])
        return [groups[i] for i in np.random.default_rng(epoch).permutation(len(groups))]

    return epoch_batches


OURS = {
    "random": ("random",),
    "reference cuts": ("bucketed", (*REFERENCE_BOUNDARIES[:-1], 8193)),
    "best 6 cuts": ("bucketed", 6),
    "best 16 cuts": ("bucketed", 16),
    "best 32 cuts": ("bucketed", 32),
    "best 64 cuts": ("bucketed", 64),
    "best 96 cuts": ("bucketed", 96),
    "bucketed": ("bucketed", "auto"),
    "pooled": ("pooled",),
    "sorted": ("sorted",),
    "packed": ("packed",),
}
PEERS: dict[str, tuple[str, Callable[[np.ndarray], Epoch]]] = {
    "transformers, 6 rows": ("transformers", partial(transformers, batch_size=6)),
    "transformers, 23 rows": ("transformers", partial(transformers, batch_size=23)),
    "lhotse, 6 buckets": ("lhotse", partial(lhotse, buckets=6)),
    "lhotse, 30 buckets": ("lhotse", partial(lhotse, buckets=30)),
    "speculators multipack": ("speculators", speculators),
    "TRL bfd": ("trl", trl),
}
PACKED = ("speculators multipack", "TRL bfd")


def reference_lengths(size: int) -> np.ndarray:
    """``size`` lengths: the reference run's own, shuffled, or drawn from them with replacement."""
    own = read_histogram("reference").expand(0)
    if size == len(own):
        return own
    rng, lengths = np.random.default_rng(0), np.empty(size, dtype=np.int64)
    for start in range(0, size, 1 << 22):
        part = lengths[start : start + (1 << 22)]
        part[:] = own[rng.integers(0, len(own), len(part))]
    return lengths


def memory(kind: str) -> float:
    """``VmRSS`` or ``VmHWM`` of this process in MB."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in status if line.startswith(kind)) / 1024


def measured(run: Callable[[], Any], times: int) -> tuple[Any, float, float]:
    """The result, the fewest CPU seconds of ``times`` runs, and the peak growth in MB of the first."""
    Path("/proc/self/clear_refs").write_text("5")
    before, result, seconds = memory("VmRSS"), None, []
    growth = 0.0
    for turn in range(times):
        result = None
        start = time.process_time()
        result = run()
        seconds.append(time.process_time() - start)
        growth = growth if turn else memory("VmHWM") - before
    return result, min(seconds), growth


def run_case(name: str, size: int) -> dict[str, Any]:
    lengths = reference_lengths(size)
    if name in OURS:
        epoch = ours(lengths, *OURS[name])
        plan, seconds, peak = measured(partial(epoch, 0), 3 if size <= MIXING_UP_TO else 1)
    else:
        epoch = PEERS[name][1](lengths)
        yielded, seconds, peak = measured(partial(epoch, 0), 1)
        packed = name in PACKED
        plan = grouped(lengths, yielded, packed)
    real, computed = int(plan.real_tokens.sum()), int(plan.padded_tokens.sum())
    over = plan.padded_tokens[plan.padded_tokens > BUDGET]
    row = {
        "plan": name,
        "efficiency": real / computed,
        "fill": real / (len(plan) * BUDGET),
        "batches": len(plan),
        "samples": len(plan.sample_ids),
        "over_budget": len(over),
        "worst_over": float(over.max() / BUDGET) if len(over) else 1.0,
        "cpu_seconds": seconds,
        "peak_mb": peak,
    }
    if size > MIXING_UP_TO:
        return row
    other = epoch(1) if name in OURS else grouped(lengths, epoch(1), packed)
    row |= {"again": float(repeated_mates(plan, other)), "w1": float(window_w1(plan, lengths))}
    return row | {"w1_uniform": float(window_w1(epoch(0, "uniform"), lengths)) if name in OURS else row["w1"]}


def run_reading(size: int) -> dict[str, Any]:
    """Read a length column of ``size`` rows from Parquet, and choose the cuts for it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lengths.parquet"
        pq.write_table(pa.table({"seq_len": reference_lengths(size).astype(np.int32)}), path)
        lengths, read, read_mb = measured(lambda: read_lengths(path), 3)
    cuts, cut, cut_mb = measured(lambda: optimize_buckets(LengthHistogram.from_lengths(lengths), "auto"), 3)
    return {
        "read_seconds": read,
        "read_mb": read_mb,
        "cuts_seconds": cut,
        "cuts_mb": cut_mb,
        "cuts": len(cuts.boundaries) - 1,
        "rows": len(lengths),
    }


def run_offsets(rows: int) -> dict[str, Any]:
    """Lengths of a Parquet file with ``rows`` rows of the sample's tokens, over and over, and no length column."""
    source = TokenDataset.open(dataset_path("sample"))
    tokens = pa.array([source.row(i)[0] for i in range(min(len(source), 20_000))], pa.list_(pa.int32()))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.parquet"
        with pq.ParquetWriter(path, pa.schema({"input_ids": tokens.type})) as writer:
            for start in range(0, rows, len(tokens)):
                writer.write_table(pa.table({"input_ids": tokens[: rows - start]}))
        walls = []

        def read() -> np.ndarray:
            started = time.perf_counter()
            lengths = read_lengths(path)
            walls.append(time.perf_counter() - started)
            return lengths

        lengths, cpu, _ = measured(read, 5)
        assert len(lengths) == rows and lengths[0] == len(source.row(0)[0])
        return {"rows": rows, "tokens": int(lengths.sum()), "bytes": path.stat().st_size, "cpu_seconds": cpu, "wall_seconds": min(walls)}


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    ours_seconds = next((row["cpu_seconds"] for row in rows if row["plan"] == "bucketed"), None)
    yield (
        f"{'plan':22s} {'eff':>6s} {'fill':>6s} {'batches':>9s} {'over budget':>14s} {'again':>8s} {'W1 uni':>7s} {'W1 bal':>7s}"
        f" {'CPU s':>8s} {'/ ours':>7s} {'peak MB':>8s}"
    )
    for row in rows:
        over = f"{row['over_budget']:,}" + (f" up to {row['worst_over']:.1f}x" if row["over_budget"] else "")
        again = f"{row['again']:.3%}" if "again" in row else "-"
        w1 = [f"{row[name]:.3f}" if name in row else "-" for name in ("w1_uniform", "w1")]
        ratio = f"{row['cpu_seconds'] / ours_seconds:.1f}" if ours_seconds else "-"
        yield (
            f"{row['plan']:22s} {row['efficiency']:6.4f} {row['fill']:6.4f} {row['batches']:9,d} {over:>14s} {again:>8s}"
            f" {w1[0]:>7s} {w1[1]:>7s} {row['cpu_seconds']:8.3f} {ratio:>7s} {row['peak_mb']:8.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=lambda text: int(float(text)), default=902_087, help="number of lengths, for example 20e6")
    parser.add_argument("--only", nargs="*", default=[], metavar="PLAN", help="rows to run, by name")
    parser.add_argument("--no-peers", action="store_true", help="leave out the samplers of others")
    parser.add_argument("--tokens", type=lambda text: int(float(text)), help="only this: rows of a Parquet file without a length column")
    parser.add_argument("--json", type=Path, default=Path("planner.json"), help="where to write the numbers")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_reading(options.size) if options.case == "reading" else run_case(options.case, options.size)))
        return
    if options.tokens:
        found = run_offsets(options.tokens)
        print(f"{found['rows']:,} rows, {found['tokens']:,} tokens, {found['bytes']:,} bytes: ", end="")
        print(f"{found['cpu_seconds']:.2f} s CPU, {found['wall_seconds']:.2f} s wall, best of 5")
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        return
    peers = [] if options.no_peers else [name for name, (package, _) in PEERS.items() if importlib.util.find_spec(package)]
    names = [name for name in [*OURS, *peers] if not options.only or name in options.only]
    if not names:
        parser.error(f"--only knows {', '.join([*OURS, *peers])}")

    def child(case: str) -> dict[str, Any]:
        command = [sys.executable, __file__, "--case", case, "--size", str(options.size)]
        return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])

    reading = child("reading")
    print(f"{options.size:,} lengths: column read in {reading['read_seconds']:.3f} s CPU, {reading['read_mb']:.0f} MB; ", end="")
    print(f"{reading['cuts']} auto cuts in {reading['cuts_seconds']:.3f} s CPU")
    rows = [child(name) for name in names]
    print("\n".join(table(rows)))
    options.json.write_text(json.dumps({"size": options.size, "reading": reading, "plans": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
