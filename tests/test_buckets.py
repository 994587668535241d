"""pytest tests/test_buckets.py"""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import (
    REFERENCE_BOUNDARIES,
    BucketError,
    bucket_of,
    evaluate_buckets,
    expected_seconds,
    optimize_buckets,
    resolve_buckets,
)
from dflash_nb.planner.cost import CostModel, distinct_shapes
from dflash_nb.planner.diversity import repeated_mates


@pytest.fixture(scope="module")
def reference():
    return read_histogram("reference")


def of(*lengths):
    return LengthHistogram.from_lengths(np.array(lengths))


def test_the_reference_table(reference):
    plan = evaluate_buckets(reference, REFERENCE_BOUNDARIES, model="reference")
    assert [row.batch_size for row in plan.rows] == [64, 49, 33, 23, 17, 11]
    assert [100 * row.efficiency for row in plan.rows] == pytest.approx([73, 82, 86, 86, 87, 86], abs=1)
    assert 100 * plan.efficiency == pytest.approx(85.1, abs=0.1)
    assert plan.boundaries == REFERENCE_BOUNDARIES and plan.model == "reference"


def test_auto_on_the_reference_lengths_as_planned_and_as_packed(reference):
    plan = optimize_buckets(reference)
    lengths = reference.expand(0)
    first, second = (plan_epoch(lengths, boundaries=plan.boundaries, epoch=epoch) for epoch in (0, 1))
    for efficiency, fill, again in (
        (plan.efficiency, plan.fill, plan.mates_again),
        (first.efficiency, first.fill, float(repeated_mates(first, second))),
    ):
        assert efficiency >= 0.985 and fill >= 0.944 and again <= 0.0035
    assert min(entry["sum"] for entry in plan.why["weighed"]) == next(
        entry["sum"] for entry in plan.why["weighed"] if entry["count"] == len(plan.rows)
    )


def test_auto_mixes_better_than_as_many_cheapest_cuts(reference):
    plan = optimize_buckets(reference)
    cheapest = optimize_buckets(reference, len(plan.rows))
    assert plan.mates_again < 0.8 * cheapest.mates_again and plan.efficiency > cheapest.efficiency - 0.0015


def test_six_best_beat_the_reference_six(reference):
    best = optimize_buckets(reference, 6)
    assert len(best.rows) == 6 and best.why == {}
    assert best.efficiency > evaluate_buckets(reference, REFERENCE_BOUNDARIES).efficiency + 0.003
    assert best.efficiency == evaluate_buckets(reference, best.boundaries).efficiency


def test_both_models_optimise(reference):
    packing, by_mean = (optimize_buckets(reference, 6, grid=64, model=model) for model in ("packing", "reference"))
    assert by_mean.efficiency >= evaluate_buckets(reference, packing.boundaries, model="reference").efficiency


def test_time_is_an_objective_of_its_own(reference):
    cost = CostModel(target=(0.5, 1e-5, 2e-8, 0, 0), transfer=(0, 0))
    by_time = optimize_buckets(reference, 4, objective="time", cost=cost)
    by_padding = optimize_buckets(reference, 4)
    assert by_time.objective == "time" and by_time.boundaries != by_padding.boundaries
    lengths = reference.expand(0)
    plans = [plan_epoch(lengths, boundaries=cuts.boundaries) for cuts in (by_time, by_padding)]
    seconds = [cost.plan_seconds(plan, lengths) for plan in plans]
    assert seconds[0]["pipeline"] < seconds[1]["pipeline"] and plans[0].efficiency < plans[1].efficiency
    for stage, expected in by_time.why["seconds"].items():
        assert seconds[0][stage] == pytest.approx(expected, rel=1e-3)


def test_no_split_has_a_faster_slowest_stage():
    """Brute force over every split into three buckets; both the target and the drafter are the slowest stage in some of the cases."""
    rng = np.random.default_rng(5)
    slowest = []
    for _ in range(60):
        lengths = np.sort(rng.choice(np.arange(1, 301), rng.integers(3, 10), replace=False))
        histogram = LengthHistogram.from_counts(lengths, rng.integers(1, 400, len(lengths)))
        drafter = (rng.uniform(0.01, 0.06), 0, 0, 1e-5, 1e-7)
        cost = CostModel(target=(0.01, 1e-4, 1e-6, 0, 0), drafter=drafter, slots_per_row=64, target_workers=2)
        plan = optimize_buckets(histogram, 3, 1000, 20, objective="time", cost=cost, grid=1)
        splits = [(0, *(lengths[list(inner)] + 1), lengths[-1] + 1) for inner in combinations(range(len(lengths) - 1), 2)]
        plans = [evaluate_buckets(histogram, split, 1000, 20) for split in splits]
        fastest = min(max(expected_seconds(histogram, other, cost).values()) for other in plans)
        assert max(plan.why["seconds"].values()) == pytest.approx(fastest, rel=1e-9)
        slowest.append(max(plan.why["seconds"], key=plan.why["seconds"].get))
    assert {"target", "drafter"} == set(slowest)


@pytest.mark.parametrize("pad_multiple", [1, 32])
def test_what_new_shapes_cost_is_part_of_the_fastest_cuts(pad_multiple):
    """Brute force over every split into up to four buckets; in some cases other cuts than without that cost."""
    rng, moved = np.random.default_rng(1), 0
    for _ in range(25):
        lengths = np.sort(rng.choice(np.arange(1, 301), rng.integers(4, 9), replace=False))
        histogram = LengthHistogram.from_counts(lengths, rng.integers(1, 400, len(lengths)))
        cost = CostModel(target=(0.01, 1e-4, 1e-6, 0, 0), drafter=(0, 0, 0, 0, 0), target_workers=1, shape=rng.choice([0.003, 0.1, 2.0]))
        limits = (1000, 20, pad_multiple)
        plan = optimize_buckets(histogram, 4, *limits, objective="time", cost=cost, grid=1)
        padded_ends = np.flatnonzero(np.diff(-(-lengths // pad_multiple)) > 0)  # a cut inside one padded length gains nothing
        splits = [
            (0, *(lengths[list(inner)] + 1), lengths[-1] + 1) for cuts in range(4) for inner in combinations(padded_ends.tolist(), cuts)
        ]
        plans = [evaluate_buckets(histogram, split, *limits) for split in splits]
        fastest = min(max(expected_seconds(histogram, other, cost).values()) for other in plans)
        assert max(plan.why["seconds"].values()) == pytest.approx(fastest, rel=1e-9)
        free = optimize_buckets(histogram, 4, *limits, objective="time", cost=replace(cost, shape=0.0), grid=1)
        moved += free.boundaries != plan.boundaries
    assert moved


def test_expected_shapes_are_those_of_real_plans():
    rng = np.random.default_rng(0)
    lengths = np.minimum(4000, rng.lognormal(6, 0.8, 20_000).astype(int) + 30)
    histogram = LengthHistogram.from_lengths(lengths)
    found = []
    for pad_multiple in (1, 64, 256):
        cuts = optimize_buckets(histogram, 8, 16384, 32, pad_multiple)
        free, paid = (CostModel(shape=shape) for shape in (0.0, 1.0))
        expected = expected_seconds(histogram, cuts, paid)["target"] - expected_seconds(histogram, cuts, free)["target"]
        plan = plan_epoch(lengths, boundaries=cuts.boundaries, token_budget=16384, max_batch=32, pad_multiple=pad_multiple)
        found.append(expected / distinct_shapes(plan))
    assert np.abs(np.array(found) - 1).max() < 0.2, found


def test_ties_give_fewer_buckets():
    assert optimize_buckets(LengthHistogram.from_lengths(np.full(600, 1000)), 6).boundaries == (0, 1001)
    two = optimize_buckets(LengthHistogram.from_lengths(np.repeat([100, 8000], [5000, 10])), 6)
    assert two.boundaries == (0, 101, 8001) and two.efficiency > 0.99
    assert len(optimize_buckets(of(10, 20, 30), 50, grid=1).rows) == 3


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.integers(3000, 50_000),
    st.integers(1, 70),
    st.sampled_from([1, 8, 64]),
    st.one_of(st.just("auto"), st.integers(1, 12)),
)
def test_every_plan_is_whole(lengths, token_budget, max_batch, pad_multiple, count):
    histogram = LengthHistogram.from_lengths(np.array(lengths))
    limits = {"token_budget": token_budget + 64, "max_batch": max_batch, "pad_multiple": pad_multiple}
    plan = optimize_buckets(histogram, count, **limits)
    assert np.bincount(bucket_of(histogram.lengths, plan.boundaries)).min() >= 1
    assert sum(row.samples for row in plan.rows) == len(lengths) and plan.tokens == sum(lengths)
    for row in plan.rows:
        assert 0 < row.efficiency <= 1 + 1e-9 and 1 <= row.batch_size <= max_batch + 1e-9 and row.batches > 0
        assert np.isfinite([row.expected_padded, row.batches]).all()
    assert plan.batches >= 1 and 0 <= plan.mates_again <= 1 and 0 < plan.fill <= 1 + 1e-9


def test_extreme_counts_and_lengths():
    trillion = LengthHistogram.from_counts(np.array([100, 5000]), np.array([10**10, 10**9]))
    plan = optimize_buckets(trillion)
    assert plan.tokens == 6 * 10**12 and plan.efficiency == pytest.approx(1) and len(plan.rows) == 2
    assert optimize_buckets(of(1, 10**6), token_budget=10**6).tokens == 10**6 + 1
    assert optimize_buckets(of(49152)).efficiency == 1.0
    assert optimize_buckets(of(*[8191] * 9), token_budget=8191).rows[0].batch_size == 1


def test_a_sample_longer_than_the_budget_is_named():
    for call in (lambda: optimize_buckets(of(100, 49153)), lambda: evaluate_buckets(of(100, 49153), [200])):
        with pytest.raises(BucketError, match=r"1 of 2 samples do not fit token_budget 49152.*longest has 49153 tokens"):
            call()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "count"),
        ({"count": "six"}, "count"),
        ({"count": 2.5}, "count"),
        ({"count": True}, "count"),
        ({"grid": 0}, "grid"),
        ({"objective": "speed"}, "objective must be one of padding, time"),
        ({"objective": "time"}, "needs cost"),
        ({"model": "uniform"}, "model must be one of packing, reference"),
        ({"max_batch": 0}, "max_batch"),
        ({"max_batch": 2**40}, "max_batch must be at most 2,147,483,647"),
        ({"token_budget": 2**70}, "token_budget must be at most"),
    ],
)
def test_a_wrong_parameter_is_named(wrong, message):
    with pytest.raises(BucketError, match=message):
        optimize_buckets(of(10, 20), **wrong)


def test_empty_ranges_are_left_out():
    plan = evaluate_buckets(of(100, 100, 5000), [50, 90, 101, 3000, 4000])
    assert plan.boundaries == (0, 101, 5001) and [row.samples for row in plan.rows] == [2, 1]


@pytest.mark.parametrize(
    "spec", ["512,1024", "[512,1024]", "[512, 1024]", " 512 , 1024 ", [512, 1024], (512, 1024), [0, 512, 1024, 8192], "512 1024"]
)
def test_edges_in_every_form_are_the_same_plan(reference, spec):
    assert resolve_buckets(spec, reference) == evaluate_buckets(reference, [512, 1024])


@pytest.mark.parametrize("spec", [512, "512", [512], 512.0, np.int64(512), np.array([512])])
def test_one_number_is_one_edge(reference, spec):
    assert resolve_buckets(spec, reference).boundaries == (0, 512, 8192)


def test_names_and_files(reference, tmp_path, monkeypatch):
    limits = {"token_budget": 16384, "max_batch": 32}
    assert resolve_buckets("auto", reference, **limits) == optimize_buckets(reference, "auto", **limits)
    assert resolve_buckets("auto:6", reference) == optimize_buckets(reference, 6)
    assert resolve_buckets("reference", reference) == evaluate_buckets(reference, REFERENCE_BOUNDARIES)
    plan = optimize_buckets(reference, 4, **limits)
    path = plan.save(tmp_path / "buckets.json")
    assert resolve_buckets(str(path), reference, **limits).boundaries == plan.boundaries
    assert resolve_buckets(path, reference).token_budget == 49152
    monkeypatch.chdir(tmp_path)
    assert resolve_buckets("buckets.json", reference).boundaries == plan.boundaries
    with pytest.raises(FileNotFoundError, match=r"buckets: .*missing\.json does not exist"):
        resolve_buckets("missing.json", reference)


def test_otto_is_not_auto(reference):
    with pytest.raises(BucketError, match=r"'otto' is not one of auto, auto:6 .*reference.*512,1024.*buckets\.json\. Did you mean auto\?"):
        resolve_buckets("otto", reference)


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "auto:",
        "auto:0",
        "auto:x",
        "auto:2.5",
        [],
        None,
        True,
        [True],
        [512, "x"],
        {},
        512.5,
        "nan",
        "1e999",
        object(),
        "64,,128",
        "64,",
        ",64",
        "１２",
        "auto:１",
        "0",
        [0],
        0,
        [[1, 2], [3]],
        [2**70],
        2**70,
        f"64,{2**31 + 1}",
        "/",
    ],
)
def test_anything_else_is_refused(reference, spec):
    with pytest.raises(BucketError, match="buckets: "):
        resolve_buckets(spec, reference)


@pytest.mark.parametrize("spec", ["1024,512", [512, 512], -5])
def test_edges_that_do_not_increase_are_refused(reference, spec):
    with pytest.raises(BucketError, match="buckets: edges must increase"):
        resolve_buckets(spec, reference)
