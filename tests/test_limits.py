"""pytest tests/test_limits.py"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_nb.planner.limits import BucketError, Limits


@given(st.integers(300, 60_000), st.integers(1, 200), st.integers(1, 300))
def test_rows_and_the_longest_length_of_so_many_rows_agree(budget, most, multiple):
    limits = Limits(budget, most, multiple)
    for rows in range(1, min(most, 70) + 1):
        longest = int(limits.longest(rows))
        assert longest % multiple == 0 and rows * longest <= budget < rows * (longest + multiple)
        if longest:
            assert limits.rows(limits.padded(np.int64(longest))) >= rows


def test_the_edge_of_the_reference_bucket_breaks_the_budget_and_one_below_a_multiple_does_not():
    limits = Limits()
    assert limits.rows(768) == 64 and limits.rows(769) == 63 and limits.rows(49152) == 1
    assert Limits(max_batch=1).rows(49152) == 1 and Limits(8191).rows(8191) == 1


def test_every_row_count_up_to_128_and_few_above():
    counts = Limits(10**6, 10**6).row_counts(1)
    assert counts[:128].tolist() == list(range(1, 129)) and counts[-1] == 10**6
    assert (np.diff(counts) <= np.maximum(1, counts[:-1] // 128)).all() and len(counts) < 1500
    assert Limits(49152, 64).row_counts(4000).tolist() == list(range(1, 13))


@pytest.mark.parametrize("name", ["token_budget", "max_batch", "pad_multiple"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", None, True])
def test_limits_are_whole_numbers(name, value):
    with pytest.raises(BucketError, match=name):
        Limits(**{name: value})


def test_a_multiple_above_the_budget_is_refused():
    with pytest.raises(BucketError, match="pad_multiple 512 is above token_budget 500"):
        Limits(500, 4, 512)


def test_a_sample_that_does_not_fit_is_named():
    with pytest.raises(BucketError, match=r"10 of 13 samples do not fit token_budget 96 .* longest has 97 tokens.*above 64 tokens"):
        Limits(96, 4, 64).check_fit(np.array([5, 65, 97]), np.array([3, 4, 6]))
    Limits(96, 4, 64).check_fit(np.array([5, 64]), np.array([3, 4]))
