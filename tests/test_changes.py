"""The table of changes: each is a plan of its own, and the model's limits show in it."""

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.changes import what_changes_bring
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.options import LARGEST_BUDGET, PlanError

LENGTHS = np.minimum(4000, np.random.default_rng(0).lognormal(6, 0.8, 6000).astype(int) + 20)


def table(cost, **limits):
    plan = optimize_buckets(LengthHistogram.from_lengths(LENGTHS), 6, 8192, 32, **limits)
    rows = {row["change"]: row for row in what_changes_bring(LENGTHS, plan, cost)}
    assert rows["none"]["speed"] == 1 and len(rows["none"]) == 8
    return rows


def test_more_cuts_pad_less_and_another_worker_helps_a_slow_target():
    rows = table(CostModel(drafter=(0, 0, 0, 1e-7, 0), target_workers=2))
    assert rows["one more cut"]["buckets"] == 7 and rows["one more cut"]["efficiency"] > rows["none"]["efficiency"]
    assert rows["half as many buckets"]["efficiency"] < rows["none"]["efficiency"]
    assert rows["topology 3-1"]["speed"] == pytest.approx(1.5, rel=0.03) and rows["topology 1-1"]["speed"] < 0.6
    assert rows["pad_multiple 64"]["shapes"] < 0.5 * rows["none"]["shapes"]


def test_a_slow_drafter_gains_nothing_from_workers_and_a_constant_makes_large_batches_fast():
    rows = table(CostModel(target=(0, 1e-6, 0, 0, 0), drafter=(1.0, 0, 0, 0, 0), target_workers=1))
    assert rows["topology 2-1"]["speed"] == pytest.approx(1, rel=0.01)
    assert rows["twice the token budget"]["speed"] > 1.2 > 0.8 > rows["half the token budget"]["speed"]


def test_impossible_changes_are_left_out():
    lengths = np.array([5000] * 50 + [100] * 50)
    plan = optimize_buckets(LengthHistogram.from_lengths(lengths), 2, 8192, 32)
    changes = [row["change"] for row in what_changes_bring(lengths, plan, CostModel(target_workers=1))]
    assert "half the token budget" not in changes and "topology 0-1" not in changes and "topology 2-1" in changes


def test_a_budget_above_the_planners_largest_is_left_out():
    plan = optimize_buckets(LengthHistogram.from_lengths(LENGTHS[:50]), 2, LARGEST_BUDGET, 32)
    changes = [row["change"] for row in what_changes_bring(LENGTHS[:50], plan, CostModel())]
    assert "twice the token budget" not in changes and {"none", "half the token budget"} <= set(changes)
    with pytest.raises(PlanError, match="token_budget must be at most"):
        what_changes_bring(LENGTHS[:50], optimize_buckets(LengthHistogram.from_lengths(LENGTHS[:50]), 2, 2 * LARGEST_BUDGET), CostModel())
