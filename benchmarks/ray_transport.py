"""Measures how fast a batch's hidden states get from a target worker to the drafter through Ray's object store on CPUs, and what a batch
costs the process that hands it out.

    python benchmarks/ray_transport.py                     two clusters in one, 1 MiB to 256 MiB, a minute
    python benchmarks/ray_transport.py --repeats 15 --out ray_transport.json

The way is the engine's own: a worker actor packs its features, Ray puts them into the store of its node, the pool fetches them and copies
them out. Once with the worker on the drafter's node, once on another node of ``ray.cluster_utils``, which is on this machine: its bytes
cross no wire, but two stores and two Ray daemons. Beside it a plain copy of the same array, in turn in one run; medians, and the ratio of
medians. Seconds are wall time, from handing the batch out to features that the drafter owns.
Handing out: CPU seconds of this process for an empty batch, and for each second that a worker computes.
"""

import argparse
import json
import os
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import ray_clusters
from table import show

from dflash_nb.model.target import Features
from dflash_nb.pipeline.ray import RayPool, pack, target_features

MIB = 1 << 20
WIDTH = 5 * 5120  # five layers of the reference run's target
EMPTY_BATCHES = 100
LONG_SECONDS = 3.0


def features(size: int) -> Features:
    """Features of about ``size`` bytes in bfloat16; at least one token."""
    tokens = max(1, size // (2 * WIDTH))
    ids, states = torch.zeros(tokens, dtype=torch.int64), torch.ones(tokens, WIDTH, dtype=torch.bfloat16)
    return Features(0, 0, 0, tokens, torch.zeros(1), torch.tensor([tokens]), states, ids, ids, seconds={"transfer": 0.0})


def worker():
    """What a target worker calls: it has computed these features before."""
    made: dict[int, Features] = {}

    def work(batch: tuple[int, float]) -> Any:
        size, seconds = batch
        time.sleep(seconds)
        if size not in made:
            made[size] = features(size)
        return pack(made[size])

    return work


def open_pool() -> RayPool:
    return RayPool(worker, 1, lambda batch, sent, seconds: target_features(sent, seconds, torch.device("cpu")), {"num_cpus": 1})


def send(pool: RayPool, size: int, seconds: float = 0.0) -> Features:
    return pool.submit((size, seconds)).result()


def seconds_of(call) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure_ways(pools: dict[str, RayPool], sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    """A row a size: gigabytes a second of a plain copy and of each pool's way."""
    rows = []
    for size in sizes:
        plain = pack(features(size))["features_ND"]
        ways = {"plain copy": plain.copy} | {name: partial(send, pool, size) for name, pool in pools.items()}
        for way in ways.values():
            way()
        taken = {name: [] for name in ways}
        for _ in range(repeats):
            for name, way in ways.items():
                taken[name].append(seconds_of(way))
        median = {name: float(np.median(values)) for name, values in taken.items()}
        row = {"MiB": size // MIB, "repeats": repeats} | {f"{name} GB/s": round(plain.nbytes / s / 1e9, 3) for name, s in median.items()}
        row |= {f"{name} / plain copy": round(median["plain copy"] / median[name], 3) for name in pools}
        rows.append(row | {f"{name} ms": round(1000 * s, 2) for name, s in median.items()})
        print(json.dumps(row), flush=True)
    return rows


def measure_handing_out(pool: RayPool, rounds: int = 5) -> list[dict[str, Any]]:
    """CPU milliseconds of this process, medians of rounds; Ray's own threads, which work without any batch too, are told apart."""

    def spent(call, times: int = 1) -> tuple[float, float]:
        """CPU and wall seconds of one call."""
        started, began = time.process_time(), time.perf_counter()
        for _ in range(times):
            call()
        return (time.process_time() - started) / times, (time.perf_counter() - began) / times

    idle, a_second, a_batch = [], [], []
    for _ in range(rounds):
        cpu, wall = spent(partial(time.sleep, LONG_SECONDS))
        idle.append(cpu / wall)
        cpu, wall = spent(partial(send, pool, 0, LONG_SECONDS))
        a_second.append(cpu / wall - idle[-1])
        cpu, wall = spent(partial(send, pool, 0), EMPTY_BATCHES)
        a_batch.append(cpu - idle[-1] * wall)
    found = {"an empty batch": a_batch, "a second of a worker": a_second, "a second without a batch": idle}
    return [{"what": what, "CPU ms": round(1000 * float(np.median(values)), 3)} for what, values in found.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="times that each size goes each way")
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 4, 16, 64, 256], help="MiB")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    options = parser.parse_args()
    sizes = [size * MIB for size in options.sizes]
    store = 4 * max(sizes) + 128 * MIB
    pools: dict[str, RayPool] = {}
    with ray_clusters.cluster(cpus=1, store=store) as cluster:
        try:
            pools["one node"] = open_pool()
            cluster.add_node(num_cpus=1, object_store_memory=store)
            cluster.wait_for_nodes()
            pools["two nodes"] = open_pool()  # the first node's only core is taken
            handing_out = measure_handing_out(pools["two nodes"])
            ways = measure_ways(pools, sizes, options.repeats)
        finally:
            for pool in pools.values():
                pool.close()
    show(ways)
    show(handing_out)
    if options.out:
        about = {"python": platform.python_version(), "machine": platform.platform(), "cores": os.cpu_count()}
        options.out.write_text(json.dumps({"about": about, "ways": ways, "handing_out": handing_out}, indent=1) + "\n")


if __name__ == "__main__":
    main()
