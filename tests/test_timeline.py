"""The pipeline's time: hand-checked small cases, limits, and the same order of events as the real window gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.timeline import Network, Pipeline, plan_timeline, timeline

SECONDS = st.floats(0.01, 10)


def run(target, drafter, pipeline, fetch=0.0, **options):
    target, drafter = (np.asarray(values, float) for values in (target, drafter))
    return timeline(np.broadcast_to(fetch, target.shape), target, drafter, pipeline, **options)


def test_one_worker_and_one_drafter_by_hand():
    found = run([2, 2, 2], [3, 3, 3], Pipeline(1, waiting=1))
    assert found.handed_M.tolist() == [0, 0, 2]  # two places: the third is handed over when the drafter takes the first
    assert found.taken_M.tolist() == [2, 5, 8]
    assert found.done_M.tolist() == [5, 8, 11]
    assert found.seconds == 11 and found.busy == {"fetch": 0, "target": 6, "drafter": 9}
    assert found.shares["drafter"] == pytest.approx(9 / 11)


def test_a_full_window_makes_the_target_wait():
    """Without a place to spare the worker starts a batch when the drafter takes the one before."""
    found = run([1, 1, 1], [5, 5, 5], Pipeline(1, waiting=0))
    assert found.handed_M.tolist() == [0, 1, 6]
    assert found.done_M.tolist() == [6, 11, 16]


def test_work_is_handed_out_only_while_the_drafter_is_not_computing():
    """A batch that is collated while the drafter works is handed over when it is done (the window runs in its thread)."""
    found = run([1, 1], [5, 5], Pipeline(1), fetch=[0.0, 2.0])
    assert found.taken_M[0] == 1 and found.handed_M[1] == 6
    assert found.seconds == 6 + 1 + 5


def test_bytes_bound_what_is_in_flight_but_never_a_single_batch():
    free = run([1] * 6, [1] * 6, Pipeline(2), bytes_M=np.full(6, 10.0))
    bound = run([1] * 6, [1] * 6, Pipeline(2, most_bytes=5), bytes_M=np.full(6, 10.0))
    assert free.seconds == 7
    assert bound.handed_M.tolist() == [0.0, *bound.taken_M[:-1].tolist()]


def test_the_optimiser_runs_after_each_window_and_at_the_end():
    found = run([0.1] * 5, [1] * 5, Pipeline(1), step=10.0, accumulation=2)
    assert np.diff(found.done_M) == pytest.approx([11, 1, 11, 11])
    assert found.busy["drafter"] == 5 + 30


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=60), st.integers(1, 8), st.integers(0, 4))
def test_no_timeline_beats_its_slowest_side_or_is_slower_than_one_after_another(batches, workers, waiting):
    target, drafter = np.array(batches).T
    found = run(target, drafter, Pipeline(workers, waiting=waiting))
    assert found.seconds >= max(found.busy.values()) - 1e-9
    assert found.seconds <= target.sum() + drafter.sum() + 1e-9
    assert (np.diff(found.handed_M) >= 0).all() and (np.diff(found.taken_M) > 0).all()
    wider = run(target, drafter, Pipeline(workers, waiting=waiting + 50))
    assert wider.seconds <= found.seconds + 1e-9


@pytest.mark.parametrize("workers", [1, 3, 7])
@pytest.mark.parametrize("slow", [1.0, 4.0])
def test_with_many_places_it_is_the_stage_with_the_largest_sum(workers, slow):
    rng = np.random.default_rng(0)
    target, drafter = rng.uniform(0.5, 1.5, 4000) * workers, slow * rng.uniform(0.4, 0.6, 4000)
    found = run(target, drafter, Pipeline(workers, waiting=200))
    assert found.seconds == pytest.approx(max(target.sum() / workers, drafter.sum()), rel=0.01)
    assert run(target, drafter, Pipeline(workers, waiting=0)).seconds >= found.seconds


def test_a_plan_in_a_narrow_window_takes_longer_than_its_slowest_stage():
    rng = np.random.default_rng(0)
    lengths = np.minimum(8191, rng.lognormal(7.4, 0.8, 20_000).astype(int) + 65)
    cost = CostModel(slots_per_row=1024)
    plan = plan_epoch(lengths, boundaries=[0, 512, 1024, 2048, 4096, 8192])
    limit = cost.plan_seconds(plan, lengths)["pipeline"]
    assert plan_timeline(cost, plan, lengths).seconds == pytest.approx(limit, rel=0.03)
    narrow = plan_timeline(cost, plan, lengths, Pipeline(7, waiting=0)).seconds
    assert narrow > 1.03 * limit
    assert plan_timeline(cost, plan, lengths, Pipeline(14)).seconds < limit


def test_two_drafters_take_turns_and_wait_for_each_other_at_the_end_of_a_step():
    found = run([1] * 4, [3, 5, 3, 5], Pipeline(4, drafters=2), step=1.0, accumulation=2)
    assert found.taken_M.tolist() == [1, 1, 7, 7]
    assert found.done_M.tolist() == [4, 7, 10, 13]
    assert found.busy["drafter"] == 8 + 2
    later = run([1] * 4, [3, 5, 3, 5], Pipeline(4, drafters=2), accumulation=4)
    assert later.taken_M.tolist() == [1, 1, 4, 4]  # the first drafter comes back while the other still learns
    assert later.done_M.tolist() == [4, 6, 7, 11]


def test_nothing_is_handed_out_while_the_first_drafter_learns():
    found = run([1] * 4, [5, 9, 5, 9], Pipeline(2, waiting=0, drafters=2), accumulation=4)
    assert found.handed_M.tolist() == [0, 0, 1, 1]
    assert found.taken_M.tolist() == [1, 1, 6, 6]
    narrow = run([1] * 4, [5, 9, 5, 9], Pipeline(1, waiting=0, drafters=2), accumulation=4)
    assert narrow.handed_M.tolist() == [0, 1, 2, 7]


def network(workers, drafters, between=10.0, into=1e9, within=1e9, summed=0.0):
    return Network(workers, drafters, between, into, within, summed)


def test_features_queue_for_a_link_in_the_order_in_which_they_are_ready():
    options = {"bytes_M": np.full(3, 10.0), "accumulation": 1}
    found = run([3, 1, 1], [0.5] * 3, Pipeline(3), network=network((1, 1, 0), (0,)), **options)
    assert found.taken_M.tolist() == pytest.approx([4, 4.5, 5])  # the second went first and was there at 2; the third crosses nothing
    assert found.busy["network"] == pytest.approx(2)
    both = run([1, 1, 1], [0.5] * 3, Pipeline(3), network=network((1, 2, 1), (0,)), **options)
    assert both.taken_M.tolist() == pytest.approx([2, 3, 4])  # from two hosts, but into one
    slow = run([1, 1, 1], [0.5] * 3, Pipeline(3), network=network((0, 0, 0), (0,), into=5.0), **options)
    assert slow.taken_M.tolist() == pytest.approx([3, 5, 7])


def test_a_sum_takes_the_link_from_features_that_ask_later():
    split = network((0,), (0, 1), between=10.0, summed=40.0)
    assert split.sum_seconds == 4 and network((0,), (0, 0), within=20.0, summed=40.0).sum_seconds == 2
    found = run([1] * 4, [2] * 4, Pipeline(1, drafters=2), bytes_M=np.array([0, 0, 0, 10.0]), accumulation=2, network=split)
    assert found.done_M[1] == 2 + 2 + 4  # taken at 2, learned, summed
    assert found.taken_M[3] == 9  # computed at 4, when the sum began: its second on the link comes after the sum's four
    assert found.done_M[3] == 9 + 2 + 4
    assert found.busy["sum"] == 8


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS), min_size=1, max_size=50), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_several_drafters_on_several_hosts_never_beat_a_side(batches, workers, drafters, hosts):
    target, drafter, size = np.array(batches).T
    places = network(tuple(k % hosts for k in range(workers)), tuple(k % hosts for k in range(drafters)), between=3.0, summed=5.0)
    pipeline = Pipeline(workers, drafters=drafters)
    found = run(target, drafter, pipeline, bytes_M=size, step=0.1, accumulation=2 * drafters, network=places)
    assert found.seconds >= max(found.busy["target"], found.busy["drafter"] + found.busy["sum"]) - 1e-9
    assert (np.diff(found.handed_M) >= 0).all() and (np.diff(found.taken_M) >= 0).all() and (found.taken_M > found.handed_M).all()
    instant = Network(places.worker_hosts, places.drafter_hosts, 1e12, 1e12, 1e12)
    alone = run(target, drafter, pipeline, step=0.1, accumulation=2 * drafters)
    fast = run(target, drafter, pipeline, bytes_M=size, step=0.1, accumulation=2 * drafters, network=instant)
    assert fast.done_M == pytest.approx(alone.done_M, abs=1e-6)


def test_impossible_drafters_and_networks_are_refused():
    with pytest.raises(ValueError, match="accumulation 3 is no multiple of 2"):
        run([1], [1], Pipeline(1, drafters=2), accumulation=3)
    with pytest.raises(ValueError, match="a host for each of 2 workers and 1 drafters"):
        run([1], [1], Pipeline(2), network=network((0,), (0,)))


ONES = np.ones(4)
GOOD = {"fetch_M": ONES, "target_M": ONES, "drafter_M": ONES, "pipeline": Pipeline(2), "bytes_M": ONES}


@pytest.mark.parametrize("name", ["fetch_M", "target_M", "drafter_M", "bytes_M"])
@pytest.mark.parametrize(
    ("values", "say"),
    [
        ([], "{} must be an array of a number for each batch, one batch at least, not of shape .0,."),
        (3.0, r"{} must be an array .* not of shape \(\)"),
        (np.ones((4, 1)), r"{} must be an array .* not of shape \(4, 1\)"),
        ([1.0] * 3, "(?:{0} has 3 batches and target_M has 4|target_M has 3); give each array the same batches"),
        ([1.0] * 5, "(?:{0} has 5 batches and target_M has 4|target_M has 5); give each array the same batches"),
        ([1, 1, -1, 1], r"{} must hold finite numbers of 0 or more; batch 2 has -1\.0"),
        ([1, np.nan, 1, 1], "{} must hold finite numbers of 0 or more; batch 1 has nan"),
        ([1, 1, 1, np.inf], "{} must hold finite numbers of 0 or more; batch 3 has inf"),
    ],
)
def test_columns_that_are_no_batches_are_named(name, values, say):
    if name == "target_M" and np.size(values) in (3, 5):
        say = "(fetch|drafter|bytes)_M has 4 batches and target_M has [35]"
    with pytest.raises(ValueError, match=say.format(name)):
        timeline(**GOOD | {name: values})


@pytest.mark.parametrize(
    ("name", "value", "say"),
    [
        ("accumulation", 0, "accumulation must be a whole number of at least 1, not 0"),
        ("accumulation", 1.5, "accumulation must be a whole number"),
        ("accumulation", True, "accumulation must be a whole number"),
        ("step", -1.0, r"step must be a finite number of 0 or more, not -1\.0"),
        ("step", np.nan, "step must be a finite number"),
        ("step", np.inf, "step must be a finite number"),
        ("step", "1", "step must be a finite number"),
    ],
)
def test_numbers_that_no_step_has_are_named(name, value, say):
    with pytest.raises(ValueError, match=say):
        timeline(**GOOD | {name: value})


@pytest.mark.parametrize("name", ["workers", "prefetch", "drafters", "waiting", "most_bytes"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "1", None, True, np.nan])
def test_numbers_that_no_pipeline_has_are_named(name, value):
    if (name, value) in (("waiting", 0), ("most_bytes", 0), ("most_bytes", 1.5)):
        Pipeline(**{name: value})
        return
    with pytest.raises(ValueError, match=f"^{name} must be a (whole )?number of"):
        Pipeline(**{name: value})
    assert Pipeline(np.int64(3), waiting=-2).waiting == -2  # one place for three workers


@pytest.mark.parametrize("name", ["between", "into", "within", "summed"])
@pytest.mark.parametrize("value", [-1.0, np.nan, "1"])
def test_rates_that_no_network_has_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name}.* must be a number of 0 or more"):
        network((0,), (0,), **{name: value})
    if name != "summed":
        with pytest.raises(ValueError, match=f"{name} must be above 0 bytes a second"):
            network((0,), (0,), **{name: 0.0})
    with pytest.raises(ValueError, match="worker_hosts must name a host"):
        network((), (0,))


def test_a_plan_is_refused_with_the_lengths_of_other_data():
    lengths = np.arange(1, 100)
    plan, cost = plan_epoch(lengths, "random", token_budget=500), CostModel()
    with pytest.raises(ValueError, match=r"lengths has the shape \(50,\), but the plan runs sample 98"):
        plan_timeline(cost, plan, lengths[:50])
    with pytest.raises(ValueError, match=r"slots has the shape \(1,\), but the plan runs sample 98"):
        plan_timeline(cost, plan, lengths, slots=np.ones(1))
    with pytest.raises(ValueError, match="bytes_per_token must be a finite number of 0 or more, not nan"):
        plan_timeline(cost, plan, lengths, bytes_per_token=np.nan)
