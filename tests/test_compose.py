"""What goes together: shuffles that are fair, pools that alternate, tails that are merged only where that saves a batch."""

import numpy as np

from dflash_nb.planner import compose as composing
from dflash_nb.planner.compose import compose
from dflash_nb.planner.options import PlanOptions
from dflash_nb.planner.samples import select_samples


def composed(lengths, seed=0, **options):
    options = PlanOptions(**options)
    return compose(select_samples(np.asarray(lengths), None, options), options, np.random.default_rng(seed))


def test_shuffling_in_groups_makes_every_order_equally_likely(monkeypatch):
    monkeypatch.setattr(composing, "CHUNK", 2)
    rng = np.random.default_rng(0)
    seen = np.zeros((5, 5))
    orders = set()
    for _ in range(6000):
        order = composing._shuffle(5, rng)
        seen[np.arange(5), order] += 1
        orders.add(tuple(order))
    assert len(orders) == 120
    assert abs(seen - 1200).max() < 5 * 1200**0.5


def test_pools_are_sorted_up_and_down_by_turns(monkeypatch):
    for chunk in (1 << 17, 1, 25):
        monkeypatch.setattr(composing, "CHUNK", chunk)
        lengths = composed(np.arange(1, 46), strategy="pooled", pool_size=10).lengths
        for pool in range(5):
            part = lengths[10 * pool : 10 * pool + 10]
            assert np.array_equal(part, np.sort(part)[:: -1 if pool % 2 else 1])


def test_sorted_is_static():
    lengths = np.random.default_rng(0).integers(1, 500, 300)
    first, second = (composed(lengths, seed, strategy="sorted") for seed in (0, 1))
    assert np.array_equal(first.positions, second.positions) and np.array_equal(first.lengths, np.sort(lengths))


def test_tails_stay_apart_when_merging_saves_nothing():
    limits = {"strategy": "bucketed", "boundaries": (0, 500, 1000), "token_budget": 10_000, "max_batch": 10}
    assert np.diff(composed([100] * 12 + [900] * 11, **limits).offsets).tolist() == [10, 10, 3]
    assert np.diff(composed([100] * 19 + [900] * 19, **limits).offsets).tolist() == [10, 9, 10, 9]


def test_tails_of_many_buckets_take_as_few_batches_as_their_sorted_samples_allow():
    rng = np.random.default_rng(0)
    lengths = rng.integers(65, 8192, 3000)
    edges = tuple(range(0, 8193, 64))
    merged = composed(lengths, strategy="bucketed", boundaries=edges)
    rows = np.diff(merged.offsets)
    assert (rows * np.maximum.reduceat(merged.lengths, merged.offsets[:-1]) <= 49152).all()
    in_bucket = np.split(np.sort(lengths), np.searchsorted(np.sort(lengths), edges[1:-1]))
    unmerged = sum(len(composed(part, strategy="random").offsets) - 1 for part in in_bucket if len(part))
    assert len(rows) < unmerged - 50
