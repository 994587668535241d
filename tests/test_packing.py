"""Greedy packing against the plain loop that it replaces, and the orders that broke other packers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.planner import packing
from dflash_nb.planner.packing import pack_padded


def plain_greedy(padded, token_budget, most_rows, group_ends):
    offsets, longest = [0], 0
    for index, length in enumerate(padded.tolist()):
        rows = index - offsets[-1] + 1
        longest = max(longest, length)
        if rows > 1 and (index in group_ends or rows > most_rows or rows * longest > token_budget):
            offsets.append(index)
            longest = length
    return [*offsets, len(padded)]


@st.composite
def packings(draw):
    padded = np.frombuffer(draw(st.binary(min_size=1, max_size=120)), dtype=np.uint8).astype(np.int32) * draw(st.sampled_from([1, 7])) + 1
    group_ends = np.unique([*draw(st.lists(st.integers(1, len(padded)), max_size=4)), len(padded)])
    return padded, int(padded.max()) + draw(st.integers(0, 4000)), draw(st.sampled_from([1, 2, 5, 64, 300, 70000])), group_ends


@settings(max_examples=3000, deadline=None)
@given(packings(), st.sampled_from([3, 50, 1 << 16]))
def test_equals_the_plain_loop_whatever_the_block(case, block):
    padded, token_budget, most_rows, group_ends = case
    whole, packing.BLOCK = packing.BLOCK, block
    try:
        offsets = pack_padded(padded, token_budget, most_rows, group_ends)
    finally:
        packing.BLOCK = whole
    assert offsets.tolist() == plain_greedy(padded, token_budget, most_rows, set(group_ends.tolist()))


@pytest.mark.parametrize("most_rows", [64, 5000])
def test_equals_the_plain_loop_across_blocks(most_rows):
    rng = np.random.default_rng(0)
    padded = np.concatenate([rng.integers(1, 60, 70_000), np.sort(rng.integers(1, 9000, 70_000))]).astype(np.int32)
    ends = np.array([31, 65_536, 100_000, 140_000])
    assert pack_padded(padded, 49152, most_rows, ends).tolist() == plain_greedy(padded, 49152, most_rows, set(ends.tolist()))


def test_budget_is_on_the_padded_size_not_on_the_sum():
    padded = np.array([100, 10, 10, 10, 100], dtype=np.int32)
    offsets = pack_padded(padded, 150, 64)
    rows = np.diff(offsets)
    assert offsets.tolist() == [0, 1, 4, 5]
    assert (rows * np.maximum.reduceat(padded, offsets[:-1]) <= 150).all()


def test_a_late_long_sample_opens_a_new_batch():
    assert pack_padded(np.array([3000] * 16 + [3296], dtype=np.int32), 49152, 64).tolist() == [0, 16, 17]


def test_64_rows_of_769_are_one_too_many():
    assert pack_padded(np.array([769] * 64, dtype=np.int32), 49152, 64).tolist() == [0, 63, 64]
    assert pack_padded(np.array([768] * 64, dtype=np.int32), 49152, 64).tolist() == [0, 64]
