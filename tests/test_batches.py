"""Plans of one epoch: cover, budget, purity, and the faults that batch samplers have had.

The number in a test's name is the public issue that it comes from.
"""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import REFERENCE_BOUNDARIES, optimize_buckets
from dflash_nb.planner.options import STRATEGIES, PlanError

EDGES = ((0, 40, 130, 300, 401), (0, 401), tuple(range(402)))


@st.composite
def cases(draw):
    raw = np.frombuffer(draw(st.binary(min_size=2, max_size=100)), dtype=np.uint8)
    lengths = (raw[: len(raw) // 2 * 2].view(np.uint16) % 400 + 1).astype(draw(st.sampled_from([np.int16, np.int32, np.int64, np.uint64])))
    seed = draw(st.integers(0, 2**40))
    options = {
        "boundaries": EDGES[seed % 3],
        "token_budget": draw(st.integers(420, 3000)),
        "max_batch": draw(st.integers(1, 70)),
        "pad_multiple": (1, 1, 7, 16)[seed // 3 % 4],
        "order": ("balanced", "uniform")[seed // 12 % 2],
        "window": 1 + seed // 24 % 9,
        "pool_size": draw(st.integers(1, 70)),
        "seed": seed,
        "epoch": seed // 216 % 100,
    }
    return lengths, options


@settings(max_examples=1800, deadline=None)
@given(cases())
def test_every_sample_once_within_every_budget_and_again_the_same_in_every_strategy(case):
    lengths, options = case
    for strategy in STRATEGIES:
        plan = plan_epoch(lengths, strategy, **options)
        assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))
        assert plan.offsets[0] == 0 and plan.offsets[-1] == len(lengths)
        assert (plan.rows >= 1).all() and (plan.rows <= options["max_batch"]).all()
        wide = lengths.astype(np.int64)[plan.sample_ids]
        real, longest = np.add.reduceat(wide, plan.offsets[:-1]), np.maximum.reduceat(wide, plan.offsets[:-1])
        needed = real if strategy == "packed" else longest
        assert np.array_equal(plan.real_tokens, real)
        assert np.array_equal(plan.padded_lengths, -(-needed // options["pad_multiple"]) * options["pad_multiple"])
        assert (plan.padded_tokens <= options["token_budget"]).all()
        assert plan_epoch(lengths.astype(np.int64), strategy, **options).sha256() == plan.sha256()


@settings(max_examples=500, deadline=None)
@given(cases(), st.sampled_from(STRATEGIES), st.integers(1, 400), st.sampled_from(["drop", "truncate"]), st.integers(0, 2**32))
def test_left_out_and_cut_samples_are_exactly_those_that_must_be(case, strategy, max_length, too_long, mask_seed):
    lengths, options = case
    n_supervised = np.random.default_rng(mask_seed).integers(0, 3, len(lengths))
    long, silent = lengths > max_length, n_supervised == 0
    runs = ~silent & ~(long if too_long == "drop" else np.zeros_like(long))
    if not runs.any():
        with pytest.raises(PlanError, match="no sample is left"):
            plan_epoch(lengths, strategy, n_supervised=n_supervised, max_length=max_length, too_long=too_long, **options)
        return
    plan = plan_epoch(lengths, strategy, n_supervised=n_supervised, max_length=max_length, too_long=too_long, **options)
    assert np.array_equal(np.sort(plan.sample_ids), np.flatnonzero(runs))
    left_out = np.concatenate([np.empty(0, dtype=np.int64), *plan.excluded.values()])
    assert np.array_equal(np.sort(left_out), np.flatnonzero(~runs))
    assert np.array_equal(plan.truncated, np.flatnonzero(long & runs))
    assert plan.real_tokens.sum() == np.minimum(lengths.astype(np.int64), max_length)[runs].sum()
    assert (plan.padded_tokens <= options["token_budget"]).all()


@pytest.fixture(scope="module")
def reference():
    return read_histogram("reference").expand(0)


@pytest.fixture(scope="module")
def auto_cuts():
    return optimize_buckets(read_histogram("reference"), "auto").boundaries


def test_a_plan_is_the_same_in_another_process_and_after_other_plans():
    lengths = np.random.default_rng(3).integers(65, 8192, 4000)
    code = (
        "import numpy as np; from dflash_nb.planner.batches import plan_epoch\n"
        "lengths = np.random.default_rng(3).integers(65, 8192, 4000)\n"
        "print(plan_epoch(lengths, 'pooled', seed=5, epoch=2).sha256())"
    )
    elsewhere = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    for strategy in ("random", "packed"):
        plan_epoch(lengths, strategy, seed=5, epoch=2)
    np.random.default_rng(0).random(100)
    assert plan_epoch(lengths, "pooled", seed=5, epoch=2).sha256() == elsewhere


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_seed_and_epoch_are_hashed_together_not_added(strategy):
    lengths = np.random.default_rng(1).integers(65, 8192, 400)
    plans = {
        plan_epoch(lengths, strategy, REFERENCE_BOUNDARIES, seed=seed, epoch=epoch).sha256() for seed in range(10) for epoch in range(10)
    }
    assert len(plans) == 100
    with pytest.raises(PlanError, match=r"seed 'a', epoch 0\.5"):
        plan_epoch(lengths, strategy, REFERENCE_BOUNDARIES, seed="a", epoch=0.5)
    with pytest.raises(PlanError, match="seed -1"):
        plan_epoch(lengths, strategy, REFERENCE_BOUNDARIES, seed=-1)


def test_the_order_does_not_change_what_goes_together():
    lengths = np.random.default_rng(1).integers(65, 8192, 3000)
    balanced, uniform = (plan_epoch(lengths, "pooled", order=order) for order in ("balanced", "uniform"))
    assert {tuple(b.sample_ids) for b in map(balanced.batch, range(len(balanced)))} == {
        tuple(b.sample_ids) for b in map(uniform.batch, range(len(uniform)))
    }
    assert balanced.sha256() != uniform.sha256()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_sample_is_lost_or_repeated_on_overflow_torchtext(strategy):
    plan = plan_epoch(np.arange(1, 201), strategy, (0, 50, 201), token_budget=1000)
    assert np.array_equal(np.sort(plan.sample_ids), np.arange(200))
    assert (plan.padded_tokens <= 1000).all()


def test_composition_changes_between_epochs_fairseq_1258_lhotse_562():
    lengths = np.random.default_rng(0).integers(65, 8192, 10_000)
    cuts = optimize_buckets(LengthHistogram.from_lengths(lengths), 6).boundaries
    for strategy in ("random", "bucketed", "pooled", "packed"):
        first, second = (plan_epoch(lengths, strategy, cuts, epoch=epoch) for epoch in (0, 1))
        groups = [{frozenset(plan.batch(i).sample_ids.tolist()) for i in range(len(plan))} for plan in (first, second)]
        assert len(groups[0] & groups[1]) <= 0.05 * len(first), strategy


def test_tails_are_merged_and_nothing_is_dropped_lhotse_610():
    plan = plan_epoch(np.array([700] * 65 + [8000]), "bucketed", (0, 770, 8001))
    assert sorted(plan.rows.tolist()) == [2, 64]
    assert np.array_equal(np.sort(plan.sample_ids), np.arange(66))
    assert plan.bucket_ids[plan.rows == 2] == -1 and plan.bucket_ids[plan.rows == 64] == 0


def test_a_tail_is_not_repaired_with_other_samples_mlcommons_460():
    lengths = np.array([100] * 10 + [1000] * 10 + [6000] * 11)
    plan = plan_epoch(lengths, "bucketed", (0, 500, 2000, 6001), token_budget=20_000)
    assert sorted(plan.sample_ids.tolist()) == list(range(31))


@pytest.mark.parametrize("lengths", [[1000] * 600, [100] * 5000 + [8000] * 10])
def test_ties_and_few_lengths_vits_194(lengths):
    lengths = np.array(lengths)
    cuts = optimize_buckets(LengthHistogram.from_lengths(lengths), 6).boundaries
    plan = plan_epoch(lengths, "bucketed", cuts)
    assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))
    assert plan.efficiency > 0.99


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_length_equal_to_the_budget_fairseq2_554(strategy):
    plan = plan_epoch(np.full(20, 8191), strategy, (0, 8192), token_budget=8191)
    assert len(plan) == 20 and plan.fill == plan.efficiency == 1.0
    assert len(plan_epoch(np.full(20, 100), strategy, (0, 8192), max_batch=1)) == 20
    assert len(plan_epoch(np.array([49152, 49152, 5]), strategy, (0, 49153))) == 3


def test_batch_counts_differ_by_epoch_axolotl_3152():
    lengths = np.random.default_rng(2).integers(65, 8192, 200_000)
    counts = [len(plan_epoch(lengths, "random", seed=1, epoch=epoch)) for epoch in range(5)]
    assert len(set(counts)) > 1, "a schedule must count every epoch's plan, as prepare_job does"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_efficiency_and_fill_recomputed_from_what_is_emitted_axolotl_3849(strategy):
    lengths = np.random.default_rng(2).integers(65, 8192, 2000)
    plan = plan_epoch(lengths, strategy, REFERENCE_BOUNDARIES, pad_multiple=8)
    batches = [plan.batch(i) for i in range(len(plan))]
    real = sum(int(lengths[b.sample_ids].sum()) for b in batches)
    rows = [1 if strategy == "packed" else len(b.sample_ids) for b in batches]
    computed = sum(n * b.padded_length for n, b in zip(rows, batches, strict=True))
    assert abs(plan.efficiency - real / computed) < 1e-12
    assert abs(plan.fill - real / (len(batches) * 49152)) < 1e-12
    with pytest.raises(IndexError, match=f"plan with {len(plan)} batches"):
        plan.batch(len(plan))


def test_edges_belong_to_the_bucket_above_tensorflow_47541():
    edges = (*REFERENCE_BOUNDARIES[:-1], 8193)
    plan = plan_epoch(np.array([769, 770, 771, 8192]), "bucketed", edges, max_batch=1)
    assert dict(zip(plan.sample_ids.tolist(), plan.bucket_ids.tolist(), strict=True)) == {0: 0, 1: 1, 2: 1, 3: 5}
    with pytest.raises(PlanError, match="8192 tokens; the last boundary must be above it"):
        plan_epoch(np.array([769, 8192]), "bucketed", REFERENCE_BOUNDARIES)


def test_buckets_are_reported_for_strategies_without_cuts():
    plan = plan_epoch(np.array([10, 20, 900, 1000] * 50), "sorted", (0, 500, 1001), token_budget=1000)
    assert set(plan.bucket_ids.tolist()) <= {-1, 0, 1} and (plan.bucket_ids >= 0).sum() >= len(plan) - 1
    assert (plan_epoch(np.array([10, 900]), "random").bucket_ids == -1).all()


def test_a_slot_budget_bounds_short_rows():
    plan = plan_epoch(np.full(300, 100), "random", slots_per_row=512, slot_budget=16_384)
    assert plan.rows.max() == 32


def test_a_plan_is_flat_arrays(reference, auto_cuts):
    plan = plan_epoch(reference, boundaries=auto_cuts)
    arrays = (plan.sample_ids, plan.offsets, plan.padded_lengths, plan.real_tokens, plan.bucket_ids)
    assert [values.dtype for values in arrays] == [np.dtype(np.int64)] * 4 + [np.dtype(np.int32)]
    assert sum(values.nbytes for values in arrays) < 10 * len(reference)


def test_the_default_plan_of_the_reference_lengths(reference, auto_cuts):
    plan = plan_epoch(reference, boundaries=auto_cuts)
    assert plan.efficiency >= 0.984 and plan.fill >= 0.943
    pooled = plan_epoch(reference, "pooled")
    assert pooled.efficiency >= 0.986 and pooled.fill >= 0.946
    six = plan_epoch(reference, "bucketed", REFERENCE_BOUNDARIES)
    assert abs(six.efficiency - 0.855) < 0.001 and abs(len(six) - 45_964) < 30
    assert abs(plan_epoch(reference, "sorted").fill - 0.956) < 0.001
    assert plan_epoch(reference, "packed").fill >= 0.99


def test_the_end_of_an_epoch_is_like_the_rest_lhotse_364(reference, auto_cuts):
    for order in ("balanced", "uniform"):
        plan = plan_epoch(reference, boundaries=auto_cuts, order=order)
        means = plan.real_tokens / plan.rows
        last = means[-len(means) // 20 :]
        assert abs(last.mean() - means.mean()) <= 3 * means.std() / len(last) ** 0.5
