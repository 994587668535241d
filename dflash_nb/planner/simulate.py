"""What each strategy costs and how well it mixes, by running the real planner over strategies x seeds x epochs.

Nothing is modelled except time: efficiency, fill, batches and mixing are counted on plans that a run with the same options
would train on. Five strategies, one seed and two epochs of 902,087 samples take 2.5 s.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.batches import BatchPlan, plan_epoch
from dflash_nb.planner.cost import CostModel, distinct_shapes
from dflash_nb.planner.diversity import mixing_report
from dflash_nb.planner.limits import whole
from dflash_nb.planner.options import STRATEGIES, PlanError
from dflash_nb.planner.samples import whole_numbers
from dflash_nb.planner.timeline import Pipeline, plan_timeline
from dflash_nb.progress import announced


def simulate(
    lengths: np.ndarray,
    strategies: Iterable[str] | dict[str, dict[str, Any]] = STRATEGIES,
    seeds: Sequence[int] = (0,),
    epochs: Sequence[int] = (0, 1),
    *,
    boundaries: Sequence[int] | None = None,
    cost: CostModel | None = None,
    pipeline: Pipeline | None = None,
    n_supervised: np.ndarray | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """One row for each strategy, seed and epoch but the last, which is only what the one before is compared with.

    strategies: names of strategies; or a name of your own to the options of its plans, for example
        ``{"six": {"strategy": "bucketed", "boundaries": REFERENCE_BOUNDARIES}}``. boundaries, options: of all plans.
    cost: seconds and speed by this model, ``CostModel()`` if not given; ``cost`` in the row says what it was measured on.
    pipeline: workers and windows, those of ``plan_timeline`` if not given.
    A row holds efficiency, fill, batches, samples, excluded, real_tokens, padded_tokens, padded_shapes (distinct rows x padded length),
    the numbers of ``mixing_report`` and for each its noise as ``<name>_noise``, seconds of an epoch and tokens_per_second.
    """
    if len(epochs) < 2:
        raise ValueError(f"simulate compares each epoch with the next: give at least two epochs, not {list(epochs)}")
    if isinstance(strategies, str):
        raise ValueError(f"strategies must be a list or a dict, not {strategies!r}; give [{strategies!r}]")
    cost = cost or CostModel()
    named = strategies if isinstance(strategies, dict) else {name: {"strategy": name} for name in strategies}
    table = []
    for name, seed in announced([(name, seed) for name in named for seed in seeds], "comparing strategies and seeds"):
        chosen = {"boundaries": boundaries} | options | named[name]
        plan = plan_epoch(lengths, seed=seed, epoch=epochs[0], n_supervised=n_supervised, **chosen)
        for next_epoch in epochs[1:]:
            next_plan = plan_epoch(lengths, seed=seed, epoch=next_epoch, n_supervised=n_supervised, **chosen)
            table.append({"strategy": name} | _row(plan, lengths, next_plan, cost, pipeline))
            plan = next_plan
    return table


def _row(plan: BatchPlan, lengths: np.ndarray, next_plan: BatchPlan, cost: CostModel, pipeline: Pipeline | None) -> dict[str, Any]:
    seconds = plan_timeline(cost, plan, lengths, pipeline).seconds
    real_tokens = int(plan.real_tokens.sum())
    mixing = mixing_report(plan, lengths, next_plan, plan.options.window)
    return {
        "seed": plan.seed,
        "epoch": plan.epoch,
        "efficiency": plan.efficiency,
        "fill": plan.fill,
        "batches": len(plan),
        "samples": len(plan.sample_ids),
        "excluded": {reason: len(ids) for reason, ids in plan.excluded.items()},
        "real_tokens": real_tokens,
        "padded_tokens": int(plan.padded_tokens.sum()),
        "padded_shapes": distinct_shapes(plan),
        **{name: float(value) for name, value in mixing.items()},
        **{f"{name}_noise": value.noise for name, value in mixing.items()},
        "seconds": seconds,
        "tokens_per_second": real_tokens / seconds,
        "cost": cost.source,
    }


def plans_of(strategies: Iterable[str], lengths: np.ndarray, **options: Any) -> dict[str, BatchPlan]:
    """The plan of one epoch for each strategy, all with the same options: what to look at batch by batch."""
    return {strategy: plan_epoch(lengths, strategy, **options) for strategy in strategies}


def worst_batches(plan: BatchPlan, lengths: np.ndarray, k: int = 3, cost: CostModel | None = None) -> list[dict[str, Any]]:
    """The ``k`` largest batches by computed tokens, by memory and by drafted slots: what to try before a long run.

    Memory is modelled (``CostModel.memory_bytes``, assumed unless measured); slots count the plan's ``slots_per_row`` for each row,
    or the cost model's where the plan has none. Of batches that are equally large, the one with most computed tokens comes first.
    """
    whole("k", k)
    cost = (cost or CostModel()).for_plan(plan)
    return [
        {"by": by} | _shape(plan, int(index), lengths, cost)
        for by, size in _sizes(plan, cost).items()
        for index in _largest_first(plan, size)[:k]
    ]


def probe_order(plan: BatchPlan, cost: CostModel | None = None) -> np.ndarray:
    """The batch of each bucket that needs most memory, the largest first: run these first and an overflow shows in the first minute."""
    largest_first = _largest_first(plan, _sizes(plan, (cost or CostModel()).for_plan(plan))["memory"])
    _, first = np.unique(plan.bucket_ids[largest_first], return_index=True)
    return largest_first[np.sort(first)]


def _largest_first(plan: BatchPlan, size: np.ndarray) -> np.ndarray:
    """Batches by falling ``size``, equal ones by falling computed tokens: full batches of short rows all draft as many slots."""
    return np.lexsort((-plan.padded_tokens, -size))


def _sizes(plan: BatchPlan, cost: CostModel) -> dict[str, np.ndarray]:
    memory = cost.memory_bytes(plan.rows, plan.padded_tokens / plan.rows)
    return {"tokens": plan.padded_tokens, "memory": memory, "slots": plan.rows * cost.slots_per_row}


def _shape(plan: BatchPlan, index: int, lengths: np.ndarray, cost: CostModel) -> dict[str, Any]:
    batch = plan.batch(index)
    rows, sizes = len(batch.sample_ids), {name: size[index] for name, size in _sizes(plan, cost).items()}
    return {
        "index": index,
        "bucket": batch.bucket,
        "rows": rows,
        "padded_length": batch.padded_length,
        "shortest": int(np.asarray(lengths)[batch.sample_ids].min()),
        "tokens": int(sizes["tokens"]),
        "memory_bytes": float(sizes["memory"]),
        "slots": int(sizes["slots"]),
        "sample_ids": batch.sample_ids.tolist(),
    }


def random_batch_waste(histogram: LengthHistogram, batch_sizes: Iterable[int] = range(1, 65)) -> list[dict[str, float]]:
    """Share of padding in random batches of each fixed size: 1 - mean length / expected longest of so many draws, exactly.

    The expected longest of n draws is the sum over lengths x of x (F(x)^n - F(x-)^n), F the share of samples up to x.
    """
    share = np.cumsum(histogram.counts) / histogram.n_samples
    table = []
    for size in batch_sizes:
        whole("batch_sizes", size)
        longest = float(np.diff(share**size, prepend=0.0) @ histogram.lengths)
        table.append({"batch_size": int(size), "waste": 1 - histogram.mean / longest})
    return table


def coverage_check(plan: BatchPlan, lengths: np.ndarray) -> str:
    """One line that counts again, from the plan's arrays alone, what runs how often, what does not and why, and the smallest batches.

    Raises PlanError where all is well and yet the plan was made for other lengths.
    """
    lengths = whole_numbers("lengths", lengths)
    if (most := int(plan.sample_ids.max())) >= len(lengths):
        raise PlanError(f"the plan runs sample {most}, but there are {len(lengths):,} lengths; give those that it was made for")
    times = np.bincount(plan.sample_ids, minlength=len(lengths))
    left_out = {reason: len(ids) for reason, ids in plan.excluded.items()}
    once, twice, never = int((times == 1).sum()), int((times > 1).sum()), int((times == 0).sum())
    unexplained = never - sum(left_out.values())
    over = int((plan.padded_tokens > plan.options.token_budget).sum())
    verdict = "OK" if not (twice or unexplained or over) else "WRONG"
    if verdict == "OK":
        _check_tokens(plan, lengths)
    reasons = "".join(f", {count:,} left out as {reason}" for reason, count in left_out.items())
    cut = f", {len(plan.truncated):,} cut" if len(plan.truncated) else ""
    smallest = ", ".join(str(rows) for rows in np.sort(plan.rows)[:5])
    return (
        f"{verdict}: {once:,} of {len(lengths):,} samples once, {twice:,} more than once, {unexplained:,} lost{reasons}{cut}; "
        f"{len(plan):,} batches, {over:,} over the budget of {plan.options.token_budget:,}; smallest batches: {smallest} samples"
    )


def _check_tokens(plan: BatchPlan, lengths: np.ndarray) -> None:
    tokens = np.add.reduceat(np.minimum(lengths, plan.options.longest)[plan.sample_ids], plan.offsets[:-1], dtype=np.int64)
    if (other := np.flatnonzero(tokens != plan.real_tokens)).size:
        raise PlanError(
            f"by these lengths batch {other[0]} has {tokens[other[0]]:,} real tokens, by the plan {plan.real_tokens[other[0]]:,}: it was "
            "made for other lengths; give those"
        )
