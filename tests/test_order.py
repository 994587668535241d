"""The order of batches: nested windows are mixed as well as they can be, and no step of a window is known to be long."""

import numpy as np
import pytest

from dflash_nb.data.lengths import read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.diversity import lag1, window_w1
from dflash_nb.planner.order import batch_order


def place_in_time(n, window, seed, order="balanced"):
    """The rank by length, 0 to 1, of the batch at each time step."""
    return batch_order(np.arange(n, dtype=np.float64), order, window, np.random.default_rng(seed)) / n


@pytest.mark.parametrize("window", [1, 2, 3, 6, 7, 8, 12])
@pytest.mark.parametrize("n", [1, 2, 9, 64, 1000])
def test_a_permutation_for_every_size(n, window):
    for order in ("balanced", "uniform"):
        assert np.array_equal(np.sort(batch_order(np.ones(n), order, window, np.random.default_rng(0))), np.arange(n))


@pytest.mark.parametrize("window", [2, 4, 8, 16, 32])
def test_every_nested_window_has_one_batch_of_each_slice(window):
    slices = (place_in_time(4096, 8, 1).reshape(-1, window) * window).astype(int)
    assert (np.sort(slices, axis=1) == np.arange(window)).all()


@pytest.mark.parametrize("window", [3, 6, 7, 12])
def test_windows_that_are_no_power_of_two(window):
    slices = (place_in_time(window * 512, window, 1).reshape(-1, window) * window).astype(int)
    assert (np.sort(slices, axis=1) == np.arange(window)).all()


def test_the_choice_inside_a_slice_is_random():
    first, second = place_in_time(4096, 8, 1), place_in_time(4096, 8, 2)
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / 4096**0.5
    in_slice = (first.reshape(-1, 8) * 8) % 1
    rank = np.argsort(first.reshape(-1, 8), axis=1)
    by_slice = np.take_along_axis(in_slice, rank, axis=1)
    between = np.corrcoef(by_slice.T)[~np.eye(8, dtype=bool)]
    assert abs(between).max() < 4.5 / 512**0.5


def test_no_step_of_a_window_is_known_to_be_long():
    n, window = 40_000, 8
    places = place_in_time(n, window, 3)
    by_step = places.reshape(-1, window).mean(axis=0)
    assert abs(by_step - 0.5).max() < 4 * places.std() / (n / window) ** 0.5


def test_the_spectrum_has_no_line_at_the_window():
    n, window = 40_000, 8
    for seed in range(3):
        power = np.abs(np.fft.rfft(place_in_time(n, window, seed) - 0.5)) ** 2
        for harmonic in range(1, window // 2 + 1):
            line = harmonic * n // window
            around = np.r_[power[line - 200 : line], power[line + 1 : line + 201]]
            assert power[line] < 12 * around.mean()


def test_a_fixed_pattern_would_be_found_by_the_spectrum():
    n, window = 40_000, 8
    slices = np.random.default_rng(0).permuted(np.arange(n).reshape(window, -1), axis=1).T.reshape(-1) / n
    power = np.abs(np.fft.rfft(slices - 0.5)) ** 2
    assert power[n // window] > 1000 * np.r_[power[n // window - 200 : n // window], power[n // window + 1 : n // window + 200]].mean()


def test_runs_of_long_batches_at_one_step_of_the_window_are_those_of_chance():
    window = 8
    places = place_in_time(80_000, window, 5)
    for step in range(window):
        long = places[step::window] > 0.5
        runs, share, n = 1 + (long[1:] != long[:-1]).sum(), long.mean(), len(long)
        expected, variance = 2 * n * share * (1 - share), 4 * n * (share * (1 - share)) ** 2
        assert abs(runs - expected) < 4 * variance**0.5


@pytest.fixture(scope="module")
def plans():
    histogram = read_histogram("reference")
    lengths = histogram.expand(0)
    cuts = optimize_buckets(histogram, "auto").boundaries
    return lengths, {order: plan_epoch(lengths, boundaries=cuts, order=order) for order in ("balanced", "uniform")}


def test_the_default_mixes_a_window_of_eight_twice_as_well_as_chance(plans):
    lengths, by_order = plans
    balanced, uniform = (window_w1(by_order[order], lengths, 8) for order in ("balanced", "uniform"))
    assert balanced <= 0.100 and balanced <= 0.45 * uniform


@pytest.mark.parametrize("window", [2, 4, 8, 16, 32])
def test_the_default_mixes_nested_windows_as_well_as_slices_made_for_them(plans, window):
    lengths, by_order = plans
    plan = by_order["uniform"]
    means = plan.real_tokens / plan.rows
    rng = np.random.default_rng(0)
    steps = len(plan) // window
    ranked = np.argsort(means, kind="stable")[: steps * window].reshape(window, steps)
    order = rng.permuted(rng.permuted(ranked, axis=1).T, axis=1).reshape(-1)
    ids = np.concatenate([plan.batch(i).sample_ids for i in order])
    made_for_it = type("Ordered", (), {"sample_ids": ids, "offsets": np.concatenate([[0], np.cumsum(plan.rows[order])])})
    assert window_w1(by_order["balanced"], lengths, window) <= 1.02 * window_w1(made_for_it, lengths, window)


def test_neighbours_are_not_alike(plans):
    assert -0.5 < lag1(plans[1]["balanced"]) < -0.3  # it is reported, not hidden
    assert abs(lag1(plans[1]["uniform"])) <= 0.02
