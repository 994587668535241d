"""pytest tests/test_cuts.py"""

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.cuts import MIXING_PRICE, auto_cuts, best_cuts, candidate_edges, choose, mixing_cuts, unavoidable_cost
from dflash_nb.planner.epoch_cost import epoch_costs
from dflash_nb.planner.limits import Limits, padded_tokens


def seconds(rows, padded):
    return 40.0 + rows + 0.01 * rows * padded + 1e-4 * rows * padded**2


def every_split(edges):
    """Boundaries of every way to choose inner edges, at most four of them."""
    inner = edges[1:-1]
    for count in range(min(4, len(inner)) + 1):
        for chosen in combinations(inner, count):
            yield (edges[0], *chosen, edges[-1])


def costs_of_pairs(histogram, edges, limits, batch_cost, model):
    """Cost and mixing of every bucket, each computed alone."""
    found = {}
    for lo, hi in combinations(edges, 2):
        splits = np.searchsorted(histogram.lengths, [lo, hi])
        ((cost_L, rows_L),) = epoch_costs(histogram.lengths, histogram.counts, splits, limits, batch_cost, model)
        samples = histogram.counts[splits[0] : splits[1]].sum()
        found[lo, hi] = np.array([cost_L[0], min(rows_L[0], samples) / histogram.n_samples])
    return found


def random_case(rng):
    lengths = np.sort(rng.choice(np.arange(1, 301), rng.integers(1, 15), replace=False))
    histogram = LengthHistogram.from_counts(lengths, rng.integers(1, int(rng.choice([4, 40, 4000])), len(lengths)))
    return histogram, Limits(int(rng.integers(320, 3000)), int(rng.integers(1, 40)), int(rng.choice([1, 1, 4, 20])))


@pytest.mark.parametrize("model", ["packing", "reference"])
@pytest.mark.parametrize("batch_cost", [padded_tokens, seconds])
def test_nothing_is_cheaper_than_the_best_cuts(batch_cost, model):
    """Brute force over every split into up to five buckets of 60 random histograms; 240 with both models and both objectives."""
    rng = np.random.default_rng(11)
    for _ in range(60):
        histogram, limits = random_case(rng)
        edges = candidate_edges(histogram, limits, 1).tolist()
        pairs = costs_of_pairs(histogram, edges, limits, batch_cost, model)
        cheapest = {}
        for boundaries in every_split(edges):
            cost = sum(pairs[pair][0] for pair in pairwise(boundaries))
            count = len(boundaries) - 1
            cheapest[count] = min(cost, cheapest.get(count, np.inf))
        found = best_cuts(histogram, 5, limits, batch_cost, 1, model)
        assert len(found) == min(5, len(edges) - 1)
        for cuts in found:
            assert cuts.cost == pytest.approx(cheapest[cuts.count], rel=1e-11)
            own = sum(pairs[pair] for pair in zip(cuts.boundaries, cuts.boundaries[1:], strict=False))
            assert (cuts.cost, 1 / cuts.batches_per_bucket) == pytest.approx(tuple(own), rel=1e-11)


@pytest.mark.parametrize("batch_cost", [padded_tokens, seconds])
def test_auto_is_the_lowest_sum_of_all_splits(batch_cost):
    rng = np.random.default_rng(12)
    for _ in range(40):
        histogram, limits = random_case(rng)
        while len(histogram.lengths) > 9:
            histogram, limits = random_case(rng)
        edges = candidate_edges(histogram, limits, 1).tolist()
        pairs = costs_of_pairs(histogram, edges, limits, batch_cost, "packing")
        least = unavoidable_cost(histogram, limits, batch_cost)
        lowest = np.inf
        for count in range(len(edges) - 1):
            for inner in combinations(edges[1:-1], count):
                boundaries = (edges[0], *inner, edges[-1])
                cost, repeats = sum(pairs[pair] for pair in pairwise(boundaries))
                lowest = min(lowest, cost / least - 1 + MIXING_PRICE * repeats**0.5)
        found = mixing_cuts(histogram, limits, batch_cost, 1)
        chosen, weighed = choose(found, histogram, limits, batch_cost)
        reached = chosen.cost / least - 1 + MIXING_PRICE / chosen.batches_per_bucket**0.5
        assert lowest - 1e-9 <= reached <= lowest + 0.01
        assert min(entry["sum"] for entry in weighed) == pytest.approx(reached)


def test_cheaper_cuts_mix_less_along_the_front():
    found = mixing_cuts(read_histogram("reference"), Limits())
    costs, batches = [cuts.cost for cuts in found], [cuts.batches_per_bucket for cuts in found]
    assert len(found) > 20 and found[0].count < 10
    assert all(np.diff(costs) < 0) and all(np.diff(batches) < 0)


def test_a_cut_lies_one_above_a_multiple_of_the_grid():
    histogram = LengthHistogram.from_lengths(np.arange(65, 8192))
    assert (candidate_edges(histogram, Limits(), 32)[1:-1] % 32 == 1).all()
    assert len(candidate_edges(histogram, Limits(), 1)) == 8128
    assert (candidate_edges(histogram, Limits(pad_multiple=48), 32)[1:-1] % 48 == 1).all()
    assert 769 in candidate_edges(histogram, Limits(), None)


def test_without_a_grid_the_step_follows_the_length():
    edges = candidate_edges(LengthHistogram.from_lengths(np.arange(1, 100_001)), Limits(200_000), None)
    steps, lengths = np.diff(edges)[1:-1], edges[1:-2]
    assert (steps <= np.maximum(1, np.maximum(lengths / 32, lengths / 128))).all()
    assert set(steps[(lengths > 1024) & (lengths <= 8192)]) == {32} and steps[lengths < 64].max() == 1
    assert len(edges) < 1500


def test_edges_that_split_alike_are_one():
    histogram = LengthHistogram.from_lengths(np.array([100] * 5 + [8000]))
    assert candidate_edges(histogram, Limits(), 1).tolist() == [0, 101, 8001]
    assert candidate_edges(histogram, Limits(), 10_000).tolist() == [0, 8001]


def shapes_of_a_padded_length(plan):
    """The most different row counts that one padded length has."""
    shapes = set(zip(plan.rows.tolist(), plan.padded_lengths.tolist(), strict=True))
    return max(Counter(padded for _, padded in shapes).values())


@pytest.mark.parametrize("multiple", [64, 128, 256])
def test_auto_gives_a_padded_length_two_shapes_at_most(multiple):
    histogram = read_histogram("reference")
    chosen, _ = auto_cuts(histogram, Limits(pad_multiple=multiple))
    for epoch in range(3):
        plan = plan_epoch(histogram.expand(0), boundaries=chosen.boundaries, pad_multiple=multiple, epoch=epoch)
        assert shapes_of_a_padded_length(plan) <= 2
    assert multiple > 64 or (plan.efficiency >= 0.9844 and plan.fill >= 0.945)


def test_buckets_of_one_size_are_left_where_the_grid_has_none():
    histogram = LengthHistogram.from_lengths(np.arange(65, 8192))
    assert mixing_cuts(histogram, Limits(pad_multiple=8), grid=2000, one_size=True) == []
    chosen, _ = auto_cuts(histogram, Limits(pad_multiple=8), grid=2000)
    assert chosen.boundaries[-1] == 8192 and np.isfinite(chosen.cost)


def test_a_multiple_of_64_leads_to_one_bucket_a_padded_length():
    """The rounding itself costs 1.5 points and no cut inside a padded length wins any back."""
    histogram = read_histogram("reference")
    best = min(best_cuts(histogram, 300, Limits(pad_multiple=64)), key=lambda cuts: cuts.cost)
    assert (np.array(best.boundaries[1:-1]) % 64 == 1).all()
    packed = plan_epoch(histogram.expand(0), boundaries=best.boundaries, pad_multiple=64)
    assert packed.efficiency >= 0.9849 and packed.fill >= 0.944
    assert shapes_of_a_padded_length(packed) <= 2
