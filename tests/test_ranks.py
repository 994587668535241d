"""Ranks get as many batches as each other, different ones, and wait little."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.data.lengths import read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.options import PlanError
from dflash_nb.planner.ranks import share_batches


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=70), st.integers(1, 9), st.integers(1, 5))
def test_equal_counts_and_every_batch_once_but_the_reported_ones(seconds, world, window):
    seconds = np.array(seconds, dtype=np.float64)
    shared = share_batches(seconds, world, window)
    assert shared.batches.shape == (-(-len(seconds) // world), world)
    assert len(shared.repeated) < world and not len(shared.dropped)
    expected = np.sort(np.concatenate([np.arange(len(seconds)), shared.repeated]))
    assert np.array_equal(np.sort(shared.batches, axis=None), expected)


@settings(max_examples=500, deadline=None)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 5))
def test_dropped_batches_are_reported(n, world, window):
    if n < world:
        with pytest.raises(PlanError, match=f"{n} batches give none to some of {world} ranks"):
            share_batches(np.ones(n), world, window, "drop")
        return
    shared = share_batches(np.ones(n), world, window, "drop")
    assert len(shared.dropped) == n % world and not len(shared.repeated)
    assert np.array_equal(np.sort(np.concatenate([shared.batches.reshape(-1), shared.dropped])), np.arange(n))


@pytest.mark.parametrize("batches", [7, 3])
def test_few_batches_and_four_ranks_for_three_epochs_cosyvoice_297(batches):
    lengths = np.full(batches * 2, 5000)
    for epoch in range(3):
        plan = plan_epoch(lengths, "random", epoch=epoch, max_batch=2, world=4)
        assert len(plan) == batches
        by_rank = [plan.rank(rank) for rank in range(4)]
        assert {len(mine) for mine in by_rank} == {-(-batches // 4)}
        assert set(np.concatenate(by_rank)) == set(range(batches)) and len(plan.ranks().repeated) == 1


def test_one_rank_runs_the_plan_as_it_is():
    plan = plan_epoch(np.random.default_rng(0).integers(65, 8192, 3000), "pooled")
    assert np.array_equal(plan.rank(0), np.arange(len(plan)))


def test_an_optimiser_step_keeps_its_batches():
    plan = plan_epoch(np.random.default_rng(0).integers(65, 8192, 30_000), "pooled", world=4)
    steps = plan.ranks().batches[:40].reshape(5, -1)
    assert np.array_equal(np.sort(steps, axis=1), np.arange(160).reshape(5, -1))


def rank_wait(seconds, batches):
    """Modelled time of the slowest rank over the mean rank, averaged over steps."""
    return float((seconds[batches].max(axis=1) / seconds[batches].mean(axis=1)).mean())


@pytest.mark.parametrize("order", ["balanced", "uniform"])
def test_the_slowest_of_eight_ranks_waits_little_lhotse_857(order):
    lengths = read_histogram("reference").expand(0)
    cuts = optimize_buckets(read_histogram("reference"), "auto").boundaries
    cost = CostModel()
    for strategy in ("bucketed", "pooled", "random", "sorted", "packed"):
        plan = plan_epoch(lengths, strategy, cuts, order=order, world=8)
        seconds = cost.plan_batch_seconds(plan, lengths, "target")
        assert rank_wait(seconds, plan.ranks(seconds=seconds).batches) <= 1.08
        drafting = cost.plan_batch_seconds(plan, lengths, "drafter")
        assert rank_wait(drafting, plan.ranks(seconds=drafting).batches) <= 1.10


def test_an_unknown_remainder_is_refused():
    with pytest.raises(PlanError, match="repeat or drop"):
        share_batches(np.ones(3), 2, 1, "pad")
