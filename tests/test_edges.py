"""pytest tests/test_edges.py"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.edges import REFERENCE_BOUNDARIES, bucket_of, check_reach, full_boundaries
from dflash_nb.planner.limits import BucketError


def test_an_edge_belongs_to_the_bucket_above():
    boundaries = full_boundaries(REFERENCE_BOUNDARIES, LengthHistogram.from_lengths(np.array([1, 769, 770, 1216, 1728, 2432, 3296, 8192])))
    assert boundaries == (*REFERENCE_BOUNDARIES[:-1], 8193)
    found = bucket_of(np.array([1, 769, 770, 771, 8191, 8192], np.uint16), boundaries)
    assert found.tolist() == [0, 0, 1, 1, 5, 5] and found.dtype == np.int32


def test_a_length_in_no_bucket_is_an_error_that_names_its_row():
    with pytest.raises(BucketError, match=r"row 2 has length 8192, outside the buckets \[0, 8192\), as 1 of 3 rows"):
        bucket_of(np.array([5, 8191, 8192]), REFERENCE_BOUNDARIES)
    with pytest.raises(BucketError, match="row 0 has length 5"):
        bucket_of(np.array([5]), (10, 20))
    assert bucket_of(np.array([], np.int64), (0, 5)).tolist() == []


@given(st.lists(st.integers(1, 500), min_size=1, max_size=30), st.sets(st.integers(0, 600), max_size=12))
def test_full_boundaries_hold_every_length_and_no_empty_bucket(lengths, edges):
    lengths = np.array(lengths)
    boundaries = full_boundaries(sorted(edges), LengthHistogram.from_lengths(lengths))
    assert boundaries[0] == 0 and boundaries[-1] > lengths.max()
    held = np.bincount(bucket_of(lengths, boundaries), minlength=len(boundaries) - 1)
    assert len(held) == len(boundaries) - 1 and held.min() >= 1
    asked = np.searchsorted(np.array(sorted(edges)), lengths, "right")
    kept = bucket_of(lengths, boundaries)
    together = {(a, k) for a, k in zip(asked.tolist(), kept.tolist(), strict=True)}
    assert len({a for a, _ in together}) >= len({k for _, k in together}) - 1


def test_inner_and_full_edges_mean_the_same():
    histogram = LengthHistogram.from_lengths(np.array([100, 600, 2000]))
    assert full_boundaries([512, 1024], histogram) == (0, 512, 1024, 2001)
    assert full_boundaries([0, 512, 1024, 2001], histogram) == (0, 512, 1024, 2001)
    assert full_boundaries((0, 512, 1024, 9000), histogram) == (0, 512, 1024, 9000)
    assert full_boundaries([], histogram) == (0, 2001)


@pytest.mark.parametrize("edges", [[512, 512], [1024, 512], [-5, 512]])
def test_edges_increase(edges):
    with pytest.raises(BucketError, match="increase"):
        full_boundaries(edges, LengthHistogram.from_lengths(np.array([100])))


def test_edges_are_whole_numbers():
    with pytest.raises(BucketError, match="whole numbers"):
        full_boundaries([512.5], LengthHistogram.from_lengths(np.array([100])))


def test_edges_beyond_the_longest_sample_are_refused_unless_one_is_the_last():
    check_reach([512, 9000], 2000)
    check_reach([0, 512], 2000)
    for edges in ([4096], [0, 4096], [512, 4096, 8192]):
        with pytest.raises(BucketError, match=r"buckets: no sample is as long as 4,096.*the longest has 2,000 tokens"):
            check_reach(edges, 2000)
