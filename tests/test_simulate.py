"""The table of strategies, the worst batches, and the check of cover, on the real planner."""

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import REFERENCE_BOUNDARIES
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.diversity import mixing_report, repeated_mates
from dflash_nb.planner.simulate import coverage_check, probe_order, random_batch_waste, simulate, worst_batches
from dflash_nb.planner.timeline import plan_timeline

LENGTHS = np.random.default_rng(0).integers(65, 8192, 4000)


def test_a_row_is_what_the_planner_does():
    table = simulate(LENGTHS, ["random", "bucketed"], seeds=(0, 3), epochs=(0, 1, 2), boundaries=REFERENCE_BOUNDARIES, token_budget=20_000)
    assert [(row["strategy"], row["seed"], row["epoch"]) for row in table] == [
        (strategy, seed, epoch) for strategy in ("random", "bucketed") for seed in (0, 3) for epoch in (0, 1)
    ]
    plans = [plan_epoch(LENGTHS, "bucketed", REFERENCE_BOUNDARIES, token_budget=20_000, seed=3, epoch=epoch) for epoch in (1, 2)]
    row = table[-1]
    assert row["efficiency"] == plans[0].efficiency and row["fill"] == plans[0].fill and row["batches"] == len(plans[0])
    assert row["repeated_mates"] == repeated_mates(*plans) and row["repeated_mates_noise"] == repeated_mates(*plans).noise
    assert row["seconds"] == plan_timeline(CostModel(), plans[0], LENGTHS).seconds
    assert row["tokens_per_second"] == LENGTHS.sum() / row["seconds"] and row["cost"] == "assumed"
    assert row["excluded"] == {} and row["samples"] == 4000


def test_named_variants_of_one_strategy():
    table = simulate(
        LENGTHS, {"small pools": {"strategy": "pooled", "pool_size": 64}, "large pools": {"strategy": "pooled", "pool_size": 2000}}
    )
    assert [row["strategy"] for row in table] == ["small pools", "large pools"]
    assert table[0]["efficiency"] < table[1]["efficiency"] and table[0]["repeated_mates"] < table[1]["repeated_mates"]


def test_one_epoch_has_nothing_to_compare_with():
    with pytest.raises(ValueError, match="at least two epochs"):
        simulate(LENGTHS, ["random"], epochs=(0,))


def test_worst_batches_by_tokens_memory_and_slots():
    plan = plan_epoch(LENGTHS, "bucketed", REFERENCE_BOUNDARIES)
    cost = CostModel(memory=(0, 1, 0), slots_per_row=100)
    worst = worst_batches(plan, LENGTHS, k=2, cost=cost)
    assert [row["by"] for row in worst] == ["tokens", "tokens", "memory", "memory", "slots", "slots"]
    assert worst[0]["tokens"] == plan.padded_tokens.max() == worst[2]["memory_bytes"]
    assert worst[4]["slots"] == 100 * plan.rows.max() and worst[4]["rows"] == plan.rows.max()
    assert worst[0]["padded_length"] == LENGTHS[worst[0]["sample_ids"]].max()
    assert worst[0]["shortest"] == LENGTHS[worst[0]["sample_ids"]].min()


def test_of_batches_with_as_many_slots_the_longest_is_the_worst():
    """Full batches of short rows draft as many slots as full ones of long rows, and by the assumed model need as much memory."""
    lengths = np.repeat([20, 24, 28, 200], 64)
    plan = plan_epoch(lengths, "bucketed", boundaries=(0, 21, 25, 29, 201), token_budget=8192, max_batch=32, slots_per_row=512)
    worst = worst_batches(plan, lengths, k=1)
    assert {row["by"]: (row["rows"], row["padded_length"]) for row in worst} == dict.fromkeys(("tokens", "memory", "slots"), (32, 200))
    assert plan.padded_lengths[probe_order(plan)].tolist() == [200, 28, 24, 20]


def test_the_worst_batch_of_every_bucket_is_probed_largest_first_icefall():
    plan = plan_epoch(LENGTHS, "bucketed", REFERENCE_BOUNDARIES)
    memory = CostModel().memory_bytes(plan.rows, plan.padded_lengths)
    probes = probe_order(plan)
    assert np.array_equal(np.sort(plan.bucket_ids[probes]), np.unique(plan.bucket_ids))
    assert (np.diff(memory[probes]) <= 0).all()
    for probe in probes:
        assert memory[probe] == memory[plan.bucket_ids == plan.bucket_ids[probe]].max()


def test_waste_of_random_batches_is_the_expected_longest():
    lengths = np.random.default_rng(1).integers(1, 1000, 5000)
    table = random_batch_waste(LengthHistogram.from_lengths(lengths), [1, 2, 16])
    assert table[0] == {"batch_size": 1, "waste": pytest.approx(0.0, abs=1e-12)}
    drawn = np.random.default_rng(2).choice(lengths, (40_000, 16)).max(axis=1).mean()
    assert table[2]["waste"] == pytest.approx(1 - lengths.mean() / drawn, abs=0.002)
    assert [row["waste"] for row in random_batch_waste(LengthHistogram.from_lengths(np.array([7, 7])))] == pytest.approx([0.0] * 64)


def test_the_cover_line_counts_from_the_arrays():
    plan = plan_epoch(np.array([100] * 10 + [9000]), "random", max_length=500, too_long="drop", n_supervised=np.array([0] + [1] * 10))
    line = coverage_check(plan, np.array([100] * 10 + [9000]))
    assert line.startswith("OK: 9 of 11 samples once, 0 more than once, 0 lost, 1 left out as too_long, 1 left out as unsupervised;")
    broken = plan_epoch(np.full(10, 100), "random")
    broken.sample_ids[0] = broken.sample_ids[1]
    assert coverage_check(broken, np.full(10, 100)).startswith("WRONG: 8 of 10 samples once, 1 more than once, 1 lost;")


def test_numbers_that_ask_for_nothing_are_named():
    plan = plan_epoch(LENGTHS, "random", token_budget=20_000)
    for call, say in (
        (lambda: simulate(LENGTHS, "random"), r"strategies must be a list or a dict, not 'random'"),
        (lambda: worst_batches(plan, LENGTHS, k=0), "k must be a whole number of at least 1, not 0"),
        (lambda: random_batch_waste(LengthHistogram.from_lengths(LENGTHS), [0]), "batch_sizes must be a whole number of at least 1, not 0"),
        (lambda: mixing_report(plan, LENGTHS, window=0), "window must be a whole number of at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=say):
            call()


@pytest.mark.parametrize("strategy", ["random", "packed"])
def test_the_cover_line_is_of_the_lengths_that_were_planned(strategy):
    rng = np.random.default_rng(3)
    lengths, others = rng.integers(1, 900, 300), rng.integers(1, 900, 300)
    plan = plan_epoch(lengths, strategy, max_length=700, too_long="truncate")
    assert coverage_check(plan, lengths).startswith("OK: 300 of 300")
    for wrong, say in (
        (others, "real tokens"),
        (lengths[:5], "there are 5 lengths"),
        (lengths + 0.5, "whole number"),
        (None, "whole number"),
    ):
        with pytest.raises(ValueError, match=say):
            coverage_check(plan, wrong)
