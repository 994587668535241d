"""pytest tests/test_epoch_cost.py"""

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import evaluate_buckets
from dflash_nb.planner.cuts import best_cuts
from dflash_nb.planner.epoch_cost import epoch_costs
from dflash_nb.planner.limits import Limits

POINTS = 0.003


def seconds(rows, padded):
    return 0.5 + 1e-4 * rows * padded


def shapes(n):
    rng = np.random.default_rng(7)
    shape = {
        "like the sample": np.exp(rng.normal(4.6, 1.0, n)),
        "one length": np.full(n, 1000),
        "two clusters": np.where(rng.random(n) < 0.5, rng.normal(400, 60, n), rng.normal(4000, 500, n)),
        "heavy tail": 100 * (rng.pareto(1.2, n) + 1),
        "uniform": rng.integers(65, 8192, n),
        "exponential": 64 + rng.exponential(900, n),
    }
    return {name: np.clip(np.rint(lengths), 1, 8191).astype(np.int64) for name, lengths in shape.items()}


def realised(lengths, boundaries, seeds, **limits):
    return np.mean([plan_epoch(lengths, boundaries=boundaries, seed=seed, **limits).efficiency for seed in range(seeds)])


@pytest.mark.parametrize("pad_multiple", [1, 64])
def test_model_and_planner_agree_on_the_reference_lengths(pad_multiple):
    histogram = read_histogram("reference")
    lengths = histogram.expand(0)
    best = best_cuts(histogram, 128, Limits(pad_multiple=pad_multiple))
    for cuts in (best[1], best[5], best[31], best[-1]):
        plan = evaluate_buckets(histogram, cuts.boundaries, pad_multiple=pad_multiple)
        packed = plan_epoch(lengths, boundaries=cuts.boundaries, pad_multiple=pad_multiple)
        assert plan.efficiency == pytest.approx(packed.efficiency, abs=3e-4)
        assert plan.fill == pytest.approx(packed.fill, abs=5e-4)


@pytest.mark.parametrize("name", shapes(1))
def test_model_and_planner_agree_on_every_shape(name):
    lengths = shapes(40_000)[name]
    histogram = LengthHistogram.from_lengths(lengths)
    for limits in ({"token_budget": 49152}, {"token_budget": 16384, "pad_multiple": 64}):
        best = best_cuts(histogram, 128, Limits(**limits))
        for count in (2, 3, 8, 24, 64, 128):
            boundaries = best[min(count, len(best)) - 1].boundaries
            plan = evaluate_buckets(histogram, boundaries, **limits)
            assert plan.efficiency == pytest.approx(realised(lengths, boundaries, 5, **limits), abs=POINTS), (count, limits)


def test_a_tail_pads_as_much_as_a_whole_batch():
    """256 short batches in 96 buckets: without the tails' padding the promise is more than a point too high."""
    lengths = shapes(16_000)["like the sample"]
    histogram = LengthHistogram.from_lengths(lengths)
    boundaries = best_cuts(histogram, 96, Limits())[-1].boundaries
    plan = evaluate_buckets(histogram, boundaries)
    achieved = realised(lengths, boundaries, 5)
    assert plan.efficiency == pytest.approx(achieved, abs=POINTS)
    many = evaluate_buckets(LengthHistogram(histogram.lengths, histogram.counts * 1000), boundaries)
    assert many.efficiency > achieved + 0.008


def test_one_batch_is_known():
    histogram = LengthHistogram.from_lengths(np.array([10, 20, 20, 35]))
    ((cost_L, rows_L),) = epoch_costs(histogram.lengths, histogram.counts, np.array([0, 3]), Limits(1000, 8, 8))
    assert (cost_L[0], rows_L[0]) == (4 * 40, 4)
    ((cost_L, rows_L),) = epoch_costs(histogram.lengths, histogram.counts, np.array([0, 3]), Limits(1000, 8, 8), seconds)
    assert cost_L[0] == pytest.approx(seconds(4, 40)) and rows_L[0] == 4


def test_seconds_of_an_epoch_are_those_of_its_batches():
    histogram = read_histogram("reference")
    boundaries = (0, 770, 1216, 1728, 2432, 3296, 8192)
    splits = np.searchsorted(histogram.lengths, boundaries)
    rows = list(epoch_costs(histogram.lengths, histogram.counts, splits, Limits(), seconds))
    packed = plan_epoch(histogram.expand(0), boundaries=boundaries)
    assert sum(cost_L[-1] for cost_L, _ in rows) == pytest.approx(seconds(packed.rows, packed.padded_lengths).sum(), rel=1e-3)


def test_parts_of_the_data_cost_what_they_cost_in_the_whole():
    histogram = LengthHistogram.from_lengths(shapes(3000)["exponential"])
    splits = np.array([0, 100, 400, len(histogram.lengths)])
    whole = list(epoch_costs(histogram.lengths, histogram.counts, splits, Limits()))
    for upper in range(1, 4):
        ((cost_L, _),) = epoch_costs(histogram.lengths, histogram.counts, splits[upper - 1 : upper + 1], Limits())
        assert cost_L[0] == pytest.approx(whole[upper - 1][0][-1], rel=1e-12)
