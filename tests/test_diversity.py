"""Mixing numbers against slow definitions of the same, on planned and on logged batches."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from dflash_nb.planner import diversity
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.diversity import (
    AchievedBatches,
    chance_run,
    lag1,
    longest_run,
    mixing_report,
    possible_mates,
    repeated_mates,
    window_w1,
    within_batch_spread,
)


def batches(*groups, tokens=None, buckets=None):
    sizes = [len(group) for group in groups]
    ids = np.array([sample for group in groups for sample in group], dtype=np.int64)
    return AchievedBatches(ids, np.cumsum([0, *sizes]), np.array(tokens or sizes), np.array(buckets or [-1] * len(groups)))


def pairs(plan):
    return {
        frozenset(pair)
        for low, high in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)
        for pair in combinations(plan.sample_ids[low:high].tolist(), 2)
    }


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 60), st.integers(0, 10**6), st.integers(1, 12))
def test_repeated_mates_counts_every_pair(n, seed, max_batch):
    lengths = np.random.default_rng(seed).integers(1, 100, n)
    first, second = (plan_epoch(lengths, "pooled", token_budget=500, max_batch=max_batch, pool_size=7, epoch=epoch) for epoch in (0, 1))
    met = pairs(first)
    expected = len(met & pairs(second)) / len(met) if met else 0.0
    assert repeated_mates(first, second) == pytest.approx(expected)


def test_repeated_mates_of_known_batches():
    first = batches([0, 1, 2], [3, 4, 5])
    assert repeated_mates(first, first) == 1.0 and repeated_mates(first, first).noise == 0.0
    assert repeated_mates(first, batches([5, 1, 2], [3, 4, 0])) == pytest.approx(2 / 6)
    assert repeated_mates(first, batches([0, 1])) == pytest.approx(1 / 6)
    assert repeated_mates(batches([0], [1]), first) == 0.0


def test_possible_mates_finds_the_size_of_the_circle():
    lengths = np.full(20_000, 1000)
    lengths[10_000:] = 3000
    both = [plan_epoch(lengths, "bucketed", (0, 2000, 4000), epoch=epoch) for epoch in (0, 1)]
    found = possible_mates(*both)
    assert abs(found - 10_000) < 4 * found.noise and found.noise < 1000
    static = possible_mates(*(plan_epoch(lengths, "sorted", epoch=epoch) for epoch in (0, 1)))
    rows = plan_epoch(lengths, "sorted").rows
    assert static == pytest.approx((rows * (rows - 1) ** 2).sum() / (rows * (rows - 1)).sum())
    assert np.isinf(possible_mates(batches([0, 1]), batches([0, 2], [1, 3])))
    assert possible_mates(batches([0]), batches([0])) == 0.0


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 50), st.integers(0, 10**6), st.integers(1, 9))
def test_w1_is_scipys_distance_between_token_weighted_lengths(n, seed, window):
    lengths = np.random.default_rng(seed).integers(1, 40, n)
    plan = plan_epoch(lengths, "random", token_budget=100, max_batch=5)
    steps = max(1, len(plan) // window)
    expected = []
    for step in range(steps):
        seen = lengths[plan.sample_ids[plan.offsets[step * window] : plan.offsets[min((step + 1) * window, len(plan))]]]
        expected.append(wasserstein_distance(seen, lengths, seen, lengths) / lengths.mean())
    assert window_w1(plan, lengths, window) == pytest.approx(np.mean(expected), abs=1e-12)


def test_w1_of_steps_that_see_the_mix_is_zero():
    lengths = np.array([10, 90] * 8)
    exact = batches(*([2 * i, 2 * i + 1] for i in range(8)))
    apart = batches(*([i, i + 2] for i in (0, 1, 4, 5, 8, 9, 12, 13)))
    assert window_w1(exact, lengths, 1) == 0.0
    assert window_w1(apart, lengths, 1) == pytest.approx((80 * 0.9 + 80 * 0.1) / 2 / 50)
    assert window_w1(apart, lengths, 2) == pytest.approx(0.0, abs=1e-12)


def test_lag1_of_a_sawtooth_and_of_chance():
    saw = batches(*([i] for i in range(100)), tokens=[100, 900] * 50)
    assert lag1(saw) == pytest.approx(-0.99)
    rng = np.random.default_rng(0)
    chance = lag1(batches(*([i] for i in range(10_000)), tokens=rng.integers(1, 9000, 10_000).tolist()))
    assert abs(chance) < 4 * chance.noise and chance.noise == 0.01
    assert lag1(batches([0, 1])) == 0.0


def test_runs_are_of_buckets_or_else_of_eighths_by_length():
    assert longest_run(batches(*([i] for i in range(6)), buckets=[0, 1, 1, 1, 0, 0])) == 3
    assert longest_run(batches(*([i] for i in range(6)), buckets=[0, -1, -1, -1, 1, 1])) == 2
    rising = batches(*([i] for i in range(80)), tokens=list(range(1, 81)))
    assert longest_run(rising) == 10
    assert longest_run(rising) > chance_run(rising) + 4 * longest_run(rising).noise


def test_spread_of_equal_and_of_random_batches():
    lengths = np.array([10, 10, 50, 50])
    assert within_batch_spread(batches([0, 1], [2, 3]), lengths) == 0.0
    assert within_batch_spread(batches([0, 2], [1, 3]), lengths) == 1.0
    assert within_batch_spread(batches([0, 1]), np.array([7, 7])) == 0.0


def test_noise_is_the_spread_over_seeds():
    lengths = np.random.default_rng(0).integers(65, 8192, 20_000)
    again, w1 = [], []
    for seed in range(12):
        first, second = (plan_epoch(lengths, "pooled", seed=seed, epoch=epoch) for epoch in (0, 1))
        again.append(repeated_mates(first, second))
        w1.append(window_w1(first, lengths))
    for numbers in (again, w1):
        assert 0.4 < np.std(numbers, ddof=1) / np.mean([number.noise for number in numbers]) < 2.0


def test_planned_and_achieved_numbers_are_the_same():
    lengths = np.random.default_rng(0).integers(65, 8192, 3000)
    plans = [plan_epoch(lengths, "bucketed", (0, 1000, 3000, 8192), epoch=epoch) for epoch in (0, 1)]
    ran = [plans[0].batch(index) for index in range(len(plans[0]))]
    logged = batches(*(b.sample_ids for b in ran), tokens=[b.real_tokens for b in ran], buckets=[b.bucket for b in ran])
    planned, achieved = mixing_report(plans[0], lengths, plans[1]), mixing_report(logged, lengths, plans[1])
    assert planned == achieved
    assert set(planned) == {"repeated_mates", "possible_mates", "w1", "lag1", "longest_run", "chance_run", "spread"}
    assert all(isinstance(value, diversity.Estimate) and value.noise >= 0 for value in planned.values())
    assert "repeated_mates" not in mixing_report(plans[0], lengths)
    assert repr(diversity.Estimate(0.123456, 0.0234)) == "0.1235 ± 0.023"
