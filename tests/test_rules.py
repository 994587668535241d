"""pytest tests/test_rules.py"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.edges import bucket_of
from dflash_nb.planner.limits import BucketError
from dflash_nb.planner.rules import RULES, elbow, equal_token_cuts, geometric_cuts, pow2_cuts, quantile_cuts


@given(st.lists(st.integers(1, 400), min_size=1, max_size=40), st.integers(1, 20), st.sampled_from(sorted(RULES)))
def test_every_rule_cuts_into_at_most_so_many_buckets_none_empty(lengths, count, rule):
    lengths = np.array(lengths)
    boundaries = RULES[rule](LengthHistogram.from_lengths(lengths), count)
    assert all(np.diff(boundaries) > 0) and 1 <= len(boundaries) - 1 <= count
    assert np.bincount(bucket_of(lengths, boundaries), minlength=len(boundaries) - 1).min() >= 1


def test_quantiles_share_the_samples_and_equal_tokens_the_tokens():
    histogram = read_histogram("reference")
    cuts = quantile_cuts(histogram, 5)
    assert [histogram.share(lo, hi) for lo, hi in pairwise(cuts)] == pytest.approx([0.2] * 5, abs=1e-3)
    cuts = equal_token_cuts(histogram, 5)
    tokens = [histogram.tokens_between(lo, hi) / histogram.n_tokens for lo, hi in pairwise(cuts)]
    assert tokens == pytest.approx([0.2] * 5, abs=1e-3)


def test_geometric_cuts_are_the_reference_runs_first_guess():
    """It listed 147, 329, 735, 1642, 3667, within a percent."""
    assert geometric_cuts(read_histogram("reference"), 6)[1:-1] == pytest.approx([147, 329, 735, 1642, 3667], rel=0.015)


def test_powers_of_two_from_the_top():
    histogram = read_histogram("reference")
    assert pow2_cuts(histogram, 4) == (0, 1024, 2048, 4096, 8192)
    assert pow2_cuts(histogram, 50) == (0, 128, 256, 512, 1024, 2048, 4096, 8192)


def test_ties_do_not_collapse_quantiles():
    tied = LengthHistogram.from_counts(np.array([100, 8000]), np.array([5000, 10]))
    assert quantile_cuts(tied, 6) == (0, 101, 8001)
    for rule in RULES.values():
        assert rule(LengthHistogram.from_lengths(np.full(600, 1000)), 6) == (0, 1001)


def test_no_rule_beats_the_best_cuts():
    histogram = read_histogram("reference")
    rows = elbow(histogram, counts=(2, 6, 12), grid=64)
    best = {row["count"]: row["efficiency"] for row in rows if row["rule"] == "best"}
    assert sorted(best) == [2, 6, 12] and best[2] < best[6] < best[12]
    assert best[6] == optimize_buckets(histogram, 6, grid=64).efficiency
    assert {row["rule"] for row in rows} == {"best", *RULES}
    for row in rows:
        if row["rule"] != "best" and row["count"] in best:
            assert row["efficiency"] < best[row["count"]] + 1e-4


def test_a_rule_that_runs_out_of_cuts_is_listed_once():
    rows = elbow(LengthHistogram.from_lengths(np.repeat([100, 700], 50)), counts=(1, 2, 3, 4))
    assert [row["count"] for row in rows if row["rule"] == "best"] == [1, 2]
    assert [row["count"] for row in rows if row["rule"] == "quantile"] == [1, 2]
    assert [row["count"] for row in rows if row["rule"] == "equal-token"] == [1]


def test_counts_are_whole():
    with pytest.raises(BucketError, match="count"):
        elbow(read_histogram("reference"), counts=(0, 4))
