"""Plan, train and diagnose DFlash drafters (block-diffusion speculative decoding).

What the notebooks call, for a script of one's own:

    import dflash_nb as df

    lengths = df.read_lengths("data/chats")
    cuts = df.optimize_buckets(df.LengthHistogram.from_lengths(lengths), token_budget=8192, max_batch=32)
    plan = df.plan_epoch(lengths, boundaries=cuts.boundaries, token_budget=8192, max_batch=32, seed=0, epoch=0)
    print(len(plan), plan.efficiency, plan.batch(0))

    summary = df.train(df.TrainConfig(dataset="data/chats", target="path/to/target"))
    print(df.diagnose(summary.run_dir).report())

A name is imported when it is first used: ``import dflash_nb`` takes a millisecond, planning and diagnosis never import torch. Everything
else in the package can change between versions; these names stay.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dflash_nb.analysis.diagnose import diagnose
    from dflash_nb.analysis.doctor import examine
    from dflash_nb.data.lengths import LengthHistogram, read_histogram, read_lengths
    from dflash_nb.model.export import load_drafter
    from dflash_nb.pipeline.config import TrainConfig
    from dflash_nb.pipeline.runlog import read_run
    from dflash_nb.pipeline.train import train
    from dflash_nb.planner.batches import BatchPlan, plan_epoch
    from dflash_nb.planner.bucket_plan import BucketPlan
    from dflash_nb.planner.buckets import evaluate_buckets, optimize_buckets

__version__ = "0.1.0"

__all__ = [
    "BatchPlan",
    "BucketPlan",
    "LengthHistogram",
    "TrainConfig",
    "diagnose",
    "evaluate_buckets",
    "examine",
    "load_drafter",
    "optimize_buckets",
    "plan_epoch",
    "read_histogram",
    "read_lengths",
    "read_run",
    "train",
]

_HOMES = {
    "analysis.diagnose": ("diagnose",),
    "analysis.doctor": ("examine",),
    "data.lengths": ("LengthHistogram", "read_histogram", "read_lengths"),
    "model.export": ("load_drafter",),
    "pipeline.config": ("TrainConfig",),
    "pipeline.runlog": ("read_run",),
    "pipeline.train": ("train",),
    "planner.batches": ("BatchPlan", "plan_epoch"),
    "planner.bucket_plan": ("BucketPlan",),
    "planner.buckets": ("evaluate_buckets", "optimize_buckets"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"dflash_nb.{module}"), name)
    raise AttributeError(f"module 'dflash_nb' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
