"""Shards of a billion samples, in small: every batch of every shard runs once, and how well a way to draw them mixes."""

import sys
from pathlib import Path

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.diversity import window_w1

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from billion import DRAWS, WINDOW, batch_by_batch, drawn, in_one_order, merged, shard_seed, window_by_window

LENGTHS = np.random.default_rng(0).integers(65, 2000, 6_000)
EDGES = [0, 300, 600, 900, 1200, 1600, 2001]


def shards_of(rows, epoch=0):
    shards = np.array_split(rows, 5)
    options = {"boundaries": EDGES, "token_budget": 8192, "epoch": epoch}
    return [plan_epoch(LENGTHS[own], "bucketed", seed=shard_seed(0, k), **options) for k, own in enumerate(shards)], shards


@pytest.mark.parametrize("draw", DRAWS)
def test_every_batch_of_every_shard_runs_once(draw):
    plans, rows = shards_of(np.arange(len(LENGTHS)))
    order = draw(plans, np.random.default_rng(0))
    assert sorted(order) == [(k, b) for k, plan in enumerate(plans) for b in range(len(plan))]
    batches = drawn(plans, rows, order)
    assert sorted(batches.sample_ids.tolist()) == list(range(len(LENGTHS)))
    assert np.add.reduceat(LENGTHS[batches.sample_ids], batches.offsets[:-1]).tolist() == batches.real_tokens.tolist()


def test_windows_stay_whole_and_hosts_draw_from_all_shards():
    plans, _ = shards_of(np.arange(len(LENGTHS)))
    windows = window_by_window(plans, np.random.default_rng(0))
    whole = sum(len(plan) // WINDOW for plan in plans)
    for first in range(0, whole * WINDOW, WINDOW):
        assert windows[first : first + WINDOW] == [(windows[first][0], windows[first][1] + i) for i in range(WINDOW)]
    shards = np.array([shard for shard, _ in batch_by_batch(plans, np.random.default_rng(0))])
    assert all(len(set(shards[first : first + 15].tolist())) == 5 for first in range(0, len(shards) - 15, 15))


def test_one_order_mixes_shards_that_lie_by_length():
    plans, rows = shards_of(np.argsort(LENGTHS, kind="stable"))
    w1 = {draw: float(window_w1(drawn(plans, rows, draw(plans, np.random.default_rng(0))), LENGTHS, WINDOW)) for draw in DRAWS}
    assert w1[in_one_order] < 0.8 * w1[batch_by_batch] < 0.5 * w1[window_by_window]


def test_shards_add_up_to_the_data_and_have_seeds_of_their_own():
    parts = [LengthHistogram.from_lengths(own) for own in np.array_split(LENGTHS, 7)]
    whole = LengthHistogram.from_lengths(LENGTHS)
    assert merged(parts).lengths.tolist() == whole.lengths.tolist() and merged(parts).counts.tolist() == whole.counts.tolist()
    assert len({shard_seed(seed, shard) for seed in range(20) for shard in range(20)}) == 400
