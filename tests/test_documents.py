"""Packed rows: whole documents, once each, within the row's tokens and documents, and nearly full."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.data.lengths import read_histogram
from dflash_nb.planner import documents
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.documents import pack_documents


@settings(max_examples=1500, deadline=None)
@given(
    st.binary(min_size=1, max_size=90),
    st.sampled_from([1, 2, 40]),
    st.integers(0, 3000),
    st.sampled_from([1, 3, 64, 10**6]),
    st.integers(1, 100),
    st.sampled_from([1, 128]),
)
def test_every_document_once_within_row_and_count(raw, scale, spare, most_documents, pool_size, pools_at_once):
    lengths = np.frombuffer(raw, dtype=np.uint8).astype(np.int32) * scale + 1
    row_tokens = int(lengths.max()) + spare
    visit = np.random.default_rng(len(raw)).permutation(len(lengths)).astype(np.int32)
    usual, documents.POOLS_AT_ONCE = documents.POOLS_AT_ONCE, pools_at_once
    try:
        packed, offsets = pack_documents(lengths, visit, row_tokens, most_documents, pool_size)
    finally:
        documents.POOLS_AT_ONCE = usual
    assert np.array_equal(np.sort(packed), np.arange(len(lengths)))
    assert offsets[-1] == len(lengths) and (np.diff(offsets) >= 1).all() and (np.diff(offsets) <= most_documents).all()
    assert (np.add.reduceat(lengths[packed], offsets[:-1]) <= row_tokens).all()


def test_documents_of_two_pools_do_not_share_a_row_when_their_own_has_room():
    lengths = np.full(20, 10, dtype=np.int32)
    packed, offsets = pack_documents(lengths, np.arange(20, dtype=np.int32), 50, 64, 10)
    assert [sorted(set(packed[low:high] // 10)) for low, high in pairwise(offsets)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize("budget", [49151, 49152, 49153])
def test_rows_are_full_at_odd_budgets(budget):
    lengths = read_histogram("reference").expand(0)[:100_000]
    plan = plan_epoch(lengths, "packed", token_budget=budget)
    assert plan.efficiency == 1.0
    assert abs(plan.fill - plan_epoch(lengths, "packed").fill) < 0.001
    assert plan.fill > 0.985
    assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))


def test_a_few_long_documents_among_many_short_ones():
    lengths = np.array([40_000] * 50 + [90] * 5000, dtype=np.int32)
    packed, offsets = pack_documents(lengths, np.arange(len(lengths), dtype=np.int32), 49152, 10**6, 2048)
    assert len(offsets) - 1 <= 55
    assert (np.add.reduceat(lengths[packed], offsets[:-1]) <= 49152).all()


def test_the_largest_budget_does_not_overflow():
    lengths = np.array([2**28, 2**27, 2**27, 2**27, 1], dtype=np.int32)
    packed, offsets = pack_documents(lengths, np.arange(5, dtype=np.int32), 2**28, 64, 3)
    assert sorted(packed.tolist()) == list(range(5))
    assert (np.add.reduceat(lengths[packed].astype(np.int64), offsets[:-1]) <= 2**28).all() and len(offsets) - 1 <= 4
