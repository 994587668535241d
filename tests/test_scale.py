"""Simulated clusters: where devices are, the simulation against closed-form limits, and against the reference run's own numbers."""

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import scale as benchmark

from dflash_nb.data.lengths import read_lengths
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import REFERENCE_BOUNDARIES
from dflash_nb.planner.cost import TERMS, CostModel
from dflash_nb.planner.scale import Cluster, Work, best_topology, limits, run_epoch

LENGTHS = np.random.default_rng(0).integers(900, 1025, 24_000)


def rates(target=5_000.0, drafter=30_000.0, **changed):
    """A cost model of a padded-token rate and a real-token rate only."""
    only = {stage: dict.fromkeys(terms, 0.0) for stage, terms in TERMS.items()}
    only["target"]["padded token"], only["drafter"]["token"] = 1 / target, 1 / drafter
    stages = {stage: tuple(only[stage].values()) for stage in ("fetch", "target", "transfer", "drafter")}
    return CostModel(**stages | changed)


@cache
def plan_of(window):
    return plan_epoch(LENGTHS, "bucketed", [0, 1025], window=window, token_budget=16_384)


def test_drafters_are_spread_or_together_and_workers_have_the_other_devices():
    spread = Cluster(16).network(14, 2)
    assert spread.drafter_hosts == (0, 1) and spread.worker_hosts == (0,) * 7 + (1,) * 7
    together = Cluster(16, together=True).network(14, 2)
    assert together.drafter_hosts == (0, 0) and together.worker_hosts == (0,) * 6 + (1,) * 8
    assert Cluster(16).network(6, 2).drafter_hosts == (0, 1)
    with pytest.raises(ValueError, match="topology 15-2 needs a worker, a drafter and at most 16 devices"):
        Cluster(16).network(15, 2)


def test_a_step_has_as_many_batches_of_each_drafter():
    assert [Cluster(8).step_batches(m) for m in (1, 2, 3, 8, 9)] == [8, 8, 9, 8, 9]
    assert Cluster(8, least_each=4).step_batches(9) == 36


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gpus", 0),
        ("gpus", 8.0),
        ("host_gpus", 0),
        ("least_step", -1),
        ("room_each", -1),
        ("between", 0.0),
        ("into", float("nan")),
        ("within", float("inf")),
        ("feature_bytes", -1.0),
        ("gradient_bytes", float("nan")),
    ],
)
def test_numbers_that_no_cluster_has_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be a "):
        Cluster(**{"gpus": 8, name: value})


def test_work_that_takes_no_time_limits_nothing():
    rows = benchmark.serial(CostModel(), plan_of(8), LENGTHS, planning=0.0)
    assert {row["what"]: row["limit, ktok/s"] for row in rows}["reading and handing out"] == "none"
    assert all(row["limit, ktok/s"] > 0 for row in benchmark.serial(rates(fetch=(0.1, 0.0, 0.0)), plan_of(8), LENGTHS, planning=0.1))


ROOM = Cluster(32, room_each=16, gradient_bytes=0.0)
CASES = {
    "target": (ROOM, 24, 8),
    "drafter": (ROOM, 30, 2),
    "sum": (replace(ROOM, gradient_bytes=40e9), 28, 4),
    "network": (replace(ROOM, between=0.5e9), 27, 5),
}


@pytest.mark.parametrize("side", CASES)
def test_with_room_an_epoch_takes_what_its_slowest_side_takes(side):
    cluster, workers, drafters = CASES[side]
    plan = plan_of(cluster.step_batches(drafters))
    promised = limits(Work.of(rates(), plan, LENGTHS), cluster, workers, drafters)
    found = run_epoch(rates(), plan, LENGTHS, cluster, workers, drafters)
    assert found.limit == side
    assert max(promised, key=promised.get) == ("drafter" if side == "sum" else side)
    assert max(promised.values()) * (0.97 if side == "network" else 0.9999) <= found.seconds <= 1.05 * max(promised.values())
    assert found.tokens_per_second * found.seconds == pytest.approx(LENGTHS.sum())
    assert found.gpu_hours == pytest.approx(32 * found.seconds / 3600)


def test_drafters_together_share_a_link():
    cluster = replace(ROOM, between=0.5e9)
    spread, together = (
        run_epoch(rates(), plan_of(10), LENGTHS, replace(cluster, together=together), 27, 5).seconds for together in (False, True)
    )
    assert together > 1.5 * spread


def test_little_room_costs_time_where_many_drafters_come_back_together():
    """What is collated waits for the first drafter, and with no place to wait nothing more is collated meanwhile."""
    cost = rates(5_000, 15_000, fetch=(0.05, 0.0, 0.0))
    narrow = replace(ROOM, room_each=0, waiting=0, prefetch=1)
    slow, fast = (run_epoch(cost, plan_of(8), LENGTHS, cluster, 24, 8) for cluster in (narrow, ROOM))
    assert slow.shares["fetch"] < 0.5
    assert slow.seconds > 1.15 * fast.seconds


def test_the_best_topology_is_the_best_of_all():
    cluster = replace(ROOM, gpus=12)
    every = [run_epoch(rates(), plan_of(cluster.step_batches(m)), LENGTHS, cluster, 12 - m, m).seconds for m in range(1, 12)]
    found = best_topology(rates(), plan_of, LENGTHS, cluster)
    assert found.seconds == min(every) and found.drafters == 1 + int(np.argmin(every))


@pytest.mark.parametrize(("strategy", "published"), [("sorted", 32_000), ("bucketed", 25_100), ("random", 12_000)])
def test_the_assumed_model_gives_the_reference_runs_rates(strategy, published):
    lengths = read_lengths("reference")
    plan = plan_epoch(lengths, strategy, (*REFERENCE_BOUNDARIES[:-1], 8193))
    assert run_epoch(CostModel(), plan, lengths, Cluster(8), 7, 1).tokens_per_second == pytest.approx(published, rel=0.02)


def test_by_the_reference_runs_two_rates_its_drafter_is_saturated_by_six_targets():
    lengths = read_lengths("reference")
    plan = plan_epoch(lengths, "sorted")
    six, seven = (run_epoch(rates(5_300, 31_000), plan, lengths, Cluster(8), n, 1) for n in (6, 7))
    assert seven.tokens_per_second == pytest.approx(six.tokens_per_second, rel=1e-3) == pytest.approx(31_000, rel=1e-3)
    assert six.limit == seven.limit == "drafter"


def test_one_device_is_no_cluster_for_two_sides():
    with pytest.raises(ValueError, match="gpus is 1: a topology needs a worker and a drafter, so at least 2 devices"):
        best_topology(rates(), plan_of, LENGTHS, Cluster(1))
