"""What one more cut, another multiple, budget or topology would bring: a real plan for each, timed by the cost model.

Each row changes one thing and cuts again as the plan was cut. For 902,087 lengths the table takes 4.4 s of CPU.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.bucket_plan import BucketPlan
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.cost import CostModel, distinct_shapes
from dflash_nb.planner.limits import BucketError
from dflash_nb.planner.options import PlanError
from dflash_nb.planner.timeline import plan_timeline

OTHER_MULTIPLE = 64


def what_changes_bring(
    lengths: np.ndarray, plan: BucketPlan, cost: CostModel, order: str = "balanced", window: int = 8, seed: int = 0
) -> list[dict[str, Any]]:
    """A row for the plan as it is and for each change: ``change``, buckets, efficiency, batches, shapes, seconds of an epoch, real
    tokens_per_second, and ``speed``, times that of the plan as it is.

    lengths: int[samples]. A change that the lengths do not allow (a budget below the longest sample) is left out.
    """
    histogram, rows = LengthHistogram.from_lengths(lengths), []
    for change, cuts, model in _changed(histogram, plan, cost):
        limits = {name: getattr(cuts, name) for name in ("token_budget", "max_batch", "pad_multiple")}
        try:
            epoch = plan_epoch(lengths, "bucketed", cuts.boundaries, seed=seed, order=order, window=window, **limits)
        except PlanError:
            if change == "none":
                raise
            continue
        seconds = plan_timeline(model, epoch, lengths).seconds
        rows.append(
            {
                "change": change,
                "buckets": len(cuts.rows),
                "efficiency": epoch.efficiency,
                "batches": len(epoch),
                "shapes": distinct_shapes(epoch),
                "seconds": seconds,
                "tokens_per_second": int(epoch.real_tokens.sum()) / seconds,
            }
        )
    return [row | {"speed": rows[0]["seconds"] / row["seconds"]} for row in rows]


def _changed(histogram: LengthHistogram, plan: BucketPlan, cost: CostModel) -> Iterator[tuple[str, BucketPlan, CostModel]]:
    """Each change by name, with its cuts and its model."""
    count, workers = len(plan.rows), cost.target_workers
    yield "none", plan, cost
    recipes = {
        "one more cut": {"count": count + 1},
        "one cut fewer": {"count": max(1, count - 1)},
        "half as many buckets": {"count": max(1, count // 2)},
        "cuts by time": {"count": count, "objective": "time", "cost": cost},
        f"pad_multiple {OTHER_MULTIPLE}": {"count": count, "pad_multiple": OTHER_MULTIPLE},
        "half the token budget": {"count": count, "token_budget": plan.token_budget // 2},
        "twice the token budget": {"count": count, "token_budget": 2 * plan.token_budget},
        "twice the rows": {"count": count, "max_batch": 2 * plan.max_batch},
    }
    limits = {name: getattr(plan, name) for name in ("token_budget", "max_batch", "pad_multiple")}
    for change, recipe in recipes.items():
        try:
            yield change, optimize_buckets(histogram, **{**limits, **recipe}), cost
        except BucketError:
            continue
    for n in (workers - 1, workers + 1):
        if n:
            yield f"topology {n}-1", plan, replace(cost, target_workers=n)
