"""pytest tests/test_robustness.py"""

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.buckets import REFERENCE_BOUNDARIES, evaluate_buckets, optimize_buckets
from dflash_nb.planner.limits import BucketError
from dflash_nb.planner.robustness import holdout_gap, sensitivity


def test_moving_the_best_cuts_costs_and_not_moving_them_does_not():
    histogram = read_histogram("reference")
    plan = optimize_buckets(histogram, 6)
    rows = {row["shift"]: row for row in sensitivity(plan, histogram, [-0.1, 0.0, 0.1])}
    assert rows[0.0]["efficiency"] == pytest.approx(plan.efficiency) and rows[0.0]["worst_edge_loss"] == pytest.approx(0, abs=1e-12)
    for shift in (-0.1, 0.1):
        assert rows[shift]["efficiency"] < plan.efficiency and rows[shift]["worst_edge_loss"] > 0
        assert rows[shift]["worst_edge"] in plan.boundaries


def test_the_worst_edge_alone_is_the_plan_with_that_edge_moved():
    histogram = read_histogram("reference")
    plan = evaluate_buckets(histogram, REFERENCE_BOUNDARIES)
    (row,) = sensitivity(plan, histogram, -0.1)
    losses = {}
    for place in range(1, 6):
        edges = list(REFERENCE_BOUNDARIES)
        edges[place] = round(edges[place] * 0.9)
        losses[REFERENCE_BOUNDARIES[place]] = plan.efficiency - evaluate_buckets(histogram, edges).efficiency
    worst = max(losses, key=losses.get)
    assert row["worst_edge"] == worst and row["worst_edge_loss"] == pytest.approx(losses[worst])


def test_few_and_narrow_buckets_can_be_shifted():
    histogram = LengthHistogram.from_lengths(np.array([1, 2, 3, 3, 4]))
    (row,) = sensitivity(evaluate_buckets(histogram, []), histogram, 0.1)
    assert row["worst_edge"] is None and row["worst_edge_loss"] == 0.0
    for row in sensitivity(optimize_buckets(histogram, 4, grid=1), histogram, (-0.9, 0.9)):
        assert 0 < row["efficiency"] <= 1
    with pytest.raises(BucketError, match="shift"):
        sensitivity(evaluate_buckets(histogram, []), histogram, 1.0)


def test_cuts_from_more_lengths_lose_less():
    histogram = read_histogram("reference")
    rows = holdout_gap(histogram, 6, samples=(300, 30_000), repeats=3, grid=64)
    gaps = {size: np.median([row["gap"] for row in rows if row["samples"] == size]) for size in (300, 30_000)}
    assert gaps[300] > gaps[30_000] and gaps[30_000] < 0.002
    assert rows == holdout_gap(histogram, 6, samples=(300, 30_000), repeats=3, grid=64)
    assert rows != holdout_gap(histogram, 6, samples=(300, 30_000), repeats=3, grid=64, seed=1)
    assert min(row["gap"] for row in rows) > -1e-4 and {row["count"] for row in rows} == {6}


def test_a_sample_is_never_larger_than_the_data():
    rows = holdout_gap(LengthHistogram.from_lengths(np.arange(1, 101)), 3, samples=(50, 1000, 10_000), repeats=2)
    assert [row["samples"] for row in rows] == [50, 50, 100, 100]
