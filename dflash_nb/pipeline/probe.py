"""Runs the largest batch of each bucket through target and drafter before training, so that a shape that does not fit is known at once.

Out of memory otherwise comes late, at the first long batch. Costs one forward and backward for each bucket; nothing is updated.
"""

import resource
import sys
import time
from pathlib import Path

import torch

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import TargetHead
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.step import LossSettings, batch_loss
from dflash_nb.pipeline.window import Pool
from dflash_nb.planner.simulate import probe_order

STATM = Path("/proc/self/statm")


def probe(job: Job, pool: Pool, drafter: DFlashDrafter, head: TargetHead, settings: LossSettings) -> None:
    """Print a line for each bucket's largest batch of the first epoch, the one with most memory first.

    Raises what target or drafter raise, naming the batch.
    """
    plan = job.plan(0)
    for index in probe_order(plan):
        planned = plan.batch(int(index))
        bucket, batch = planned.bucket, job.collate((0, planned))
        started = time.perf_counter()
        shape = f"{batch.rows} x {batch.padded_length} tokens"
        try:
            features = pool.submit(batch).result()
            batch_loss(batch, features, drafter, head, settings).loss_sum.backward()
        except Exception as error:
            error.add_note(f"while probing the largest batch of bucket {bucket}: {shape}; lower token_budget, anchors or max_length")
            raise
        seconds, memory = time.perf_counter() - started, memory_bytes(settings.device)
        print(f"probe: bucket {bucket}, {shape}, fits: {seconds:.1f} s, {memory / 2**30:.1f} GiB", flush=True)
    for parameter in drafter.parameters():
        parameter.grad.zero_()


def memory_bytes(device: torch.device) -> int:
    """The most that PyTorch has held on a GPU since the last call; on a CPU what the process holds now (or its peak, outside Linux)."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return most
    if STATM.is_file():
        return int(STATM.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
