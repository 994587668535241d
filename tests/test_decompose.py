"""Trend, level and residual are what was put in, whatever spikes, order and length of the log."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_logs import MANY_EDGES, Planted, poison
from runs import Recipe, write_run

from dflash_nb.analysis.csvlog import read_csv
from dflash_nb.analysis.decompose import decompose, length_groups
from dflash_nb.analysis.running import median_interval, running_median, slope
from dflash_nb.pipeline.runlog import read_run

LONG = Recipe(steps=1500, decay_steps=300, noise=0.05, seed=5)


def parts_of(tmp_path, recipe, name="run"):
    return decompose(read_run(write_run(tmp_path / name, recipe)))


def test_parts_add_up_and_are_what_was_put_in(tmp_path):
    parts = parts_of(tmp_path, LONG)
    np.testing.assert_allclose(parts.trend_M + parts.level_M + parts.residual_M, parts.loss_M)
    share = np.array([np.mean(parts.group_M == g) for g in range(4)])
    weight = share * np.array(LONG.batch_rows)
    centre = float(np.array(LONG.levels) @ weight / weight.sum())
    for g, level in enumerate(LONG.levels):
        found = parts.level_of(g)
        assert found.low - 0.02 <= level - centre <= found.high + 0.02
        assert found.value == pytest.approx(level - centre, abs=0.02)
    truth = LONG.trend(np.arange(1, 1501)) + centre
    assert np.abs(parts.trend_N - truth)[20:].max() < 0.1
    assert np.median(parts.scale_M) == pytest.approx(0.05, rel=0.15)
    assert np.median(parts.noise_N) == pytest.approx(0.05, rel=0.15)


def test_share_of_movement_is_the_one_that_was_put_in(tmp_path):
    """Changes of independent levels have twice the variance of the levels; so have those of the noise."""
    for noise in (0.1, 0.4):
        recipe = replace(LONG, noise=noise, decay_steps=100)
        parts = parts_of(tmp_path, recipe, f"noise-{noise}")
        mixed = np.var(np.array(recipe.levels)[parts.group_M])
        truth = mixed / (mixed + noise**2)
        assert parts.movement.low - 0.02 < truth < parts.movement.high + 0.02
        assert parts.movement.high - parts.movement.low < 0.2


def test_without_levels_nothing_is_explained(tmp_path):
    movement = parts_of(tmp_path, replace(LONG, levels=(0.0,) * 4)).movement
    assert movement.low < 0.02 and movement.high < 0.06


def test_steps_of_several_batches_average_their_levels(tmp_path):
    recipe = replace(LONG, steps=300, accumulation=4)
    parts = parts_of(tmp_path, recipe)
    assert len(parts.loss_M) == 1200 and len(parts.mix_N) == 300
    assert parts.movement.value > 0.8
    assert np.median(parts.noise_N) < 0.7 * np.median(parts.scale_M)


def test_a_spike_bends_nothing(tmp_path):
    spiked = replace(LONG, spikes=dict.fromkeys(range(100, 1500, 100), 5.0))
    plain, bent = parts_of(tmp_path, LONG), parts_of(tmp_path, spiked, "spiked")
    assert np.abs(plain.trend_M - bent.trend_M).max() < 0.04
    assert np.abs(plain.level_M - bent.level_M).max() < 0.04
    assert (bent.residual_M[99:1499:100] > 4.8).all()


def test_sorted_order_leaves_all_to_the_trend(tmp_path):
    parts = parts_of(tmp_path, replace(LONG, order="sorted"))
    assert np.abs(parts.level_M).mean() < 0.1 and parts.movement.high < 0.2


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 12, 30])
def test_short_logs(tmp_path, steps):
    parts = parts_of(tmp_path, Recipe(steps=steps))
    assert len(parts.trend_N) == steps and np.isfinite(parts.trend_N).all() and np.isfinite(parts.z_M).all()
    assert parts.movement is None or steps >= 30


def test_a_batch_without_loss_is_left_out(tmp_path):
    def empty(made, rng):
        for record in made[50:55]:
            record["batches"][0]["loss"], record["batches"][0]["weight"] = None, 0.0

    parts = decompose(read_run(Planted(Recipe(), empty)(tmp_path / "run")))
    assert np.isnan(parts.residual_M).sum() == 5 and np.isnan(parts.adjusted_N).sum() == 5
    assert np.isfinite(parts.trend_N).all()


def test_groups_are_the_buckets_rare_ones_joined_to_a_neighbour(tmp_path):
    names, group = length_groups(read_run(write_run(tmp_path / "a", Recipe(seed=2))))
    assert names == ["0 - 127", "128 - 255", "256 - 511", "512 - 1,024"] and set(group) == {0, 1, 2, 3}
    rare = Recipe(steps=200, shares=(0.5, 0.01, 0.3, 0.19), seed=2)
    names, _ = length_groups(read_run(write_run(tmp_path / "b", rare)))
    assert names == ["0 - 127", "128 - 511", "512 - 1,024"]
    many = Recipe(
        steps=2000, edges=tuple(range(0, 2001, 100)), levels=(0.0,) * 20, shares=(1.0,) * 20, batch_rows=(8,) * 20, step_seconds=(0.1,) * 20
    )
    names, group = length_groups(read_run(write_run(tmp_path / "c", many)))
    assert len(names) == 12 and np.bincount(group).min() > 80
    assert MANY_EDGES[0] == 0


def test_mixed_batches_belong_to_the_bucket_of_their_mean_length(tmp_path):
    def mixed(made, rng):
        for record in made[::2]:
            record["batches"][0]["bucket"] = -1

    plain, some = Planted(Recipe(seed=3))(tmp_path / "a"), Planted(Recipe(seed=3), mixed)(tmp_path / "b")
    np.testing.assert_array_equal(length_groups(read_run(plain))[1], length_groups(read_run(some))[1])


def test_without_buckets_lengths_are_cut_into_half_octaves(tmp_path):
    lengths = np.tile([100, 200, 400], 60)
    rows = [f"{i + 1},{2 + (i % 3) * 0.5},{length}" for i, length in enumerate(lengths)]
    (tmp_path / "log.csv").write_text("step,loss,length\n" + "\n".join(rows))
    parts = decompose(read_csv(tmp_path / "log.csv"))
    assert parts.groups == ("91 - 127", "181 - 255", "362 - 511")
    assert [round(parts.level_of(g).value, 2) for g in range(3)] == [-0.5, 0.0, 0.5]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 400), st.integers(1, 40), st.integers(0, 10_000))
def test_running_median_is_the_median_of_its_window(n, half, seed):
    values = np.random.default_rng(seed).normal(size=n)
    found = running_median(values, half)
    assert found[0] == values[0]
    for i in (n // 2, n - 1):
        if i >= half:
            assert found[i] == np.median(values[i - half : i + half + 1])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.1, 3), min_size=5, max_size=60), st.integers(1, 20))
def test_running_median_follows_a_falling_curve_without_lag(falls, half):
    curve = 100 - np.cumsum(falls)
    found = running_median(curve, half)
    inside = slice(0, max(0, len(curve) - half))
    widths = np.minimum(np.arange(len(curve)), half)[inside]
    assert (np.abs(found - curve)[inside] <= 3 * widths * 0.31).all()


def test_median_interval_holds_the_median_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = [low <= 0 <= high for _, low, high in (median_interval(rng.standard_t(3, 41)) for _ in range(1000))]
    assert 0.94 < np.mean(inside) <= 0.99
    assert median_interval(np.array([np.nan, 2.0])) == (2.0, 2.0, 2.0)


def test_slope_and_its_error():
    rng = np.random.default_rng(1)
    x = np.arange(400)
    z = []
    for _ in range(300):
        noise = np.convolve(rng.normal(0, 1, 409), np.ones(10) / 10, "valid")
        found, error = slope(x, 0.01 * x + noise)
        z.append((found - 0.01) / error)
    assert 0.7 < np.std(z) < 1.5
    assert slope(x[:8], x[:8]) is None
    spiked = -0.01 * x + rng.normal(0, 0.1, 400)
    spiked[390] = 50
    assert slope(x, spiked)[0] == pytest.approx(-0.01, abs=0.001)


def test_poison_in_many_batches_stays_in_the_residual(tmp_path):
    parts = decompose(read_run(Planted(Recipe(seed=9, steps=400), poison(7, 2.0, 20))(tmp_path / "run")))
    planted = np.arange(10, 400, 20)
    assert (parts.residual_M[planted] > 1.0).all() and np.abs(np.delete(parts.residual_M, planted)).max() < 0.6
