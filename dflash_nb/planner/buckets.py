"""Cut the length axis into buckets: find the best cuts, evaluate given ones, or read what a user asked for.

Best means the lowest expected cost of an epoch over all splits on the grid, packed greedily as the planner does. On the
reference lengths six buckets keep 85.9 % of the computed tokens real (the reference run's six: 85.5 %), and ``auto``, which takes
109, 99.0 %.
"""

import difflib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.errors import NotFoundError
from dflash_nb.home import did_you_mean, exists, user_path
from dflash_nb.planner.bucket_plan import BucketPlan, BucketRow
from dflash_nb.planner.cuts import RULE, Cuts, auto_cuts, best_cuts
from dflash_nb.planner.edges import REFERENCE_BOUNDARIES, bucket_of, check_reach, full_boundaries, increasing
from dflash_nb.planner.epoch_cost import epoch_costs
from dflash_nb.planner.limits import BatchCost, BucketError, Limits, padded_tokens, whole

__all__ = [
    "REFERENCE_BOUNDARIES",
    "BucketError",
    "BucketPlan",
    "BucketRow",
    "bucket_of",
    "evaluate_buckets",
    "expected_seconds",
    "optimize_buckets",
    "read_spec",
    "resolve_buckets",
]

MODELS = ("packing", "reference")
OBJECTIVES = ("padding", "time")
ALLOWED = "auto, auto:6 (the best six), reference, edges such as 512,1024, or the path of a buckets.json"


def evaluate_buckets(
    histogram: LengthHistogram,
    boundaries: Sequence[int],
    token_budget: int = 49152,
    max_batch: int = 64,
    pad_multiple: int = 1,
    model: str = "packing",
) -> BucketPlan:
    """What given cuts are expected to cost.

    boundaries: increasing edges in tokens, the inner ones or all; edges that leave a bucket empty are left out.
    model: ``packing`` follows the planner; ``reference`` gives every batch floor(token_budget / mean length) rows.

    Raises:
        BucketError: edges that do not increase, a limit or model that does not exist, or a sample longer than the budget.
    """
    _check_histogram(histogram)
    limits = Limits(token_budget, max_batch, pad_multiple)
    limits.check_fit(histogram.lengths, histogram.counts)
    _one_of("model", model, MODELS)
    return _describe(histogram, full_boundaries(boundaries, histogram), limits, model)


def optimize_buckets(
    histogram: LengthHistogram,
    count: int | str = "auto",
    token_budget: int = 49152,
    max_batch: int = 64,
    pad_multiple: int = 1,
    objective: str = "padding",
    cost: Any = None,
    grid: int | None = None,
    model: str = "packing",
) -> BucketPlan:
    """The cuts with the lowest expected cost of all splits on the grid.

    count: how many buckets, or ``auto``: the rule is ``cuts.RULE``. There are fewer where the grid or the lengths allow no more.
    objective: ``padding``, the padded tokens; or ``time``, the seconds of the slowest stage of ``cost``, a ``CostModel``, with what new
        shapes cost; where these cost something, fewer buckets than ``count`` may be fastest and are taken.
    grid: a cut lies one above a multiple of this many tokens, 1 being every length. None: 32 tokens, less for lengths up to 1,024 and
        more above 16,384, so that short and very long data are cut as finely as their lengths ask for.

    Raises:
        BucketError: a parameter that does not exist or is out of range, or a sample longer than the budget.
    """
    _check_histogram(histogram)
    limits = Limits(token_budget, max_batch, pad_multiple)
    limits.check_fit(histogram.lengths, histogram.counts)
    _one_of("model", model, MODELS)
    _one_of("objective", objective, OBJECTIVES)
    if objective == "time" and not hasattr(cost, "batch_seconds"):
        raise BucketError("objective 'time' needs cost: a model of seconds by stage, for example CostModel()")
    grid = None if grid is None else whole("grid", grid)
    most = None if isinstance(count, str) and count == "auto" else whole("count, unless it is auto,", count)

    def cheapest(batch_cost: BatchCost, shape_cost: float = 0.0) -> tuple[Cuts, dict[str, Any]]:
        if most is not None:
            found = best_cuts(histogram, most, limits, batch_cost, grid, model, shape_cost)
            return (min(found, key=lambda cuts: cuts.cost) if shape_cost else found[-1]), {}
        chosen, weighed = auto_cuts(histogram, limits, batch_cost, grid, model, shape_cost)
        return chosen, {"rule": RULE, "weighed": weighed}

    chosen, why = cheapest(padded_tokens) if objective == "padding" else _fastest(cheapest, histogram, limits, cost, model)
    return _describe(histogram, chosen.boundaries, limits, model, objective, why)


def expected_seconds(histogram: LengthHistogram, plan: BucketPlan, cost: Any) -> dict[str, float]:
    """Seconds that an epoch in the plan's buckets is expected to keep each stage of ``cost`` busy; the largest is the epoch's time."""
    limits = Limits(plan.token_budget, plan.max_batch, plan.pad_multiple)
    return _stage_seconds(histogram, plan.boundaries, limits, cost, plan.model)


def _stage_seconds(histogram: LengthHistogram, boundaries: tuple[int, ...], limits: Limits, cost: Any, model: str) -> dict[str, float]:
    splits = np.searchsorted(histogram.lengths, boundaries)
    seconds = {}
    for stage in cost.stages:
        batch_cost = partial(cost.batch_seconds, stage=stage)
        shape_cost = cost.shape_seconds(stage)
        costs = epoch_costs(histogram.lengths, histogram.counts, splits, limits, batch_cost, model, shape_cost)
        seconds[stage] = sum(float(cost_L[-1]) for cost_L, _ in costs)
    return seconds


def _fastest(
    cheapest: Callable[[BatchCost, float], tuple[Cuts, dict[str, Any]]],
    histogram: LengthHistogram,
    limits: Limits,
    cost: Any,
    model: str,
) -> tuple[Cuts, dict[str, Any]]:
    """The cuts whose slowest stage takes least.

    Cuts that are the cheapest for a stage and have it as their slowest are the optimum, since no others take less of that stage. Where
    there are none, two stages take turns to be the slowest, and the better of the cuts for either is taken.
    """
    found, stage = {}, cost.stages[0]
    while stage not in found:
        chosen, why = cheapest(partial(cost.batch_seconds, stage=stage), cost.shape_seconds(stage))
        seconds = _stage_seconds(histogram, chosen.boundaries, limits, cost, model)
        found[stage] = max(seconds.values()), chosen, why | {"seconds": seconds}
        stage = max(seconds, key=seconds.__getitem__)
    return min(found.values(), key=lambda entry: entry[0])[1:]


def resolve_buckets(spec: Any, histogram: LengthHistogram, objective: str = "padding", cost: Any = None, **limits: Any) -> BucketPlan:
    """The plan that a user asked for, whichever way the value came through a notebook's parameters.

    spec: ``auto``; ``auto:6``; ``reference``; edges as text (``512,1024``, ``[512, 1024]``), list or one number; or the path of
        a ``buckets.json``, whose cuts are evaluated on these lengths. Edges may leave out 0 and the last one.
    limits: token_budget, max_batch, pad_multiple; for ``auto`` also objective and cost, as in ``optimize_buckets``.

    Raises:
        BucketError: anything else; the message names buckets and lists what is allowed.
        FileNotFoundError: the file does not exist.
    """
    asked = read_spec(spec)
    if asked.count is not None:
        return optimize_buckets(histogram, asked.count, objective=objective, cost=cost, **limits)
    if asked.typed:
        check_reach(asked.edges, histogram.max)
    return evaluate_buckets(histogram, asked.edges, **limits)


@dataclass(frozen=True)
class Asked:
    """What ``buckets`` asks for: the best cuts and their ``count``, or (None) ``edges``; ``typed`` ones come from no file and no name."""

    count: int | str | None = None
    edges: tuple[int, ...] = ()
    typed: bool = False
    path: Path | None = None


def read_spec(spec: Any) -> Asked:
    """What can be told of ``buckets`` without any lengths. Raises as ``resolve_buckets``."""
    if isinstance(spec, np.ndarray):
        spec = spec.tolist()
    if isinstance(spec, os.PathLike):
        return Asked(edges=_saved(Path(spec)), path=Path(spec))
    if not isinstance(spec, str):
        return Asked(edges=_edges(spec if isinstance(spec, list | tuple) else [spec], spec), typed=True)
    text = spec.strip()
    if text == "auto":
        return Asked("auto")
    if text == "reference":
        return Asked(edges=REFERENCE_BOUNDARIES)
    name, colon, number = text.partition(":")
    if colon and name.strip() == "auto":
        if not re.fullmatch(r"\s*0?[1-9][0-9]{0,8}\s*", number):
            raise BucketError(f"buckets: {spec[:60]!r} needs a whole number of at least 1 after the colon, for example auto:6")
        return Asked(int(number))
    if text.endswith(".json") or os.sep in text:
        return Asked(edges=_saved(user_path(text)), path=user_path(text))
    return Asked(edges=_edges(re.split(r"\s*,\s*|\s+", text.strip("[]() ")), spec), typed=True)


def _saved(path: Path) -> tuple[int, ...]:
    if not exists(path):
        raise NotFoundError(
            f"buckets: {path} does not exist. Name the buckets.json that notebook 01 wrote, or another of {ALLOWED}.{did_you_mean(path)}"
        )
    if path.is_dir():
        raise BucketError(f"buckets: {path} is a folder. Name the buckets.json in it")
    return BucketPlan.load(path).boundaries


def _edges(values: Sequence[Any], spec: Any) -> tuple[int, ...]:
    """Increasing whole numbers from numbers or texts; 1024.0 and 1e3 count as whole. 0 alone would cut nothing."""
    try:
        strange = any(isinstance(value, bool) or not str(value).isascii() for value in values)
        numbers = [] if strange else [float(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        numbers = []
    if not any(numbers) or not all(number.is_integer() for number in numbers):
        near = difflib.get_close_matches(str(spec), ["auto", "reference"], 1, 0.4)
        shown = repr(spec) if len(repr(spec)) <= 200 else f"{repr(spec)[:100]}..."
        raise BucketError(f"buckets: {shown} is not one of {ALLOWED}.{f' Did you mean {near[0]}?' if near else ''}")
    return tuple(increasing([int(number) for number in numbers]))


def _describe(
    histogram: LengthHistogram,
    boundaries: tuple[int, ...],
    limits: Limits,
    model: str,
    objective: str = "padding",
    why: dict[str, Any] | None = None,
) -> BucketPlan:
    splits = np.searchsorted(histogram.lengths, boundaries)
    rows = []
    for lo, hi, first, last in zip(boundaries, boundaries[1:], splits, splits[1:], strict=False):
        ((padded_L, rows_L),) = epoch_costs(histogram.lengths, histogram.counts, np.array([first, last]), limits, model=model)
        lengths, counts = histogram.lengths[first:last], histogram.counts[first:last]
        samples, tokens, padded, batch_size = int(counts.sum()), int(lengths @ counts), float(padded_L[0]), float(rows_L[0])
        rows.append(
            BucketRow(lo, hi, samples, tokens, tokens / samples, batch_size, padded / samples, tokens / padded, samples / batch_size)
        )
    return BucketPlan(boundaries, tuple(rows), limits.token_budget, limits.max_batch, limits.pad_multiple, objective, model, why or {})


def _check_histogram(histogram: Any) -> None:
    if not isinstance(histogram, LengthHistogram):
        kind = type(histogram).__name__
        raise BucketError(f"histogram must be a LengthHistogram, such as LengthHistogram.from_lengths(lengths), not of type {kind}")


def _one_of(name: str, value: Any, allowed: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise BucketError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")
