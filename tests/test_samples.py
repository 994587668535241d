"""What takes part in a plan, and how bad lengths are named."""

import numpy as np
import pytest

from dflash_nb.planner.options import PlanError, PlanOptions
from dflash_nb.planner.samples import select_samples


def select(lengths, n_supervised=None, **options):
    return select_samples(lengths, n_supervised, PlanOptions(strategy="random", **options))


def test_zero_and_negative_lengths_are_named_by_row():
    with pytest.raises(PlanError, match="row 0 has 0, row 2 has -1"):
        select(np.array([0, 65, -1]))
    with pytest.raises(PlanError, match="and 992 more rows"):
        select(np.zeros(1000, dtype=np.int32))


def test_lengths_that_became_floats_by_a_null_are_refused():
    with pytest.raises(PlanError, match="float64"):
        select(np.array([65.0, np.nan]))


def test_a_too_long_sample_is_an_error_that_names_it_or_counted():
    lengths = np.array([100] * 10 + [49153])
    with pytest.raises(PlanError, match=r"row 10 has 49153.*drop or truncate"):
        select(lengths)
    dropped = select(lengths, too_long="drop")
    assert dropped.excluded["too_long"].tolist() == [10] and dropped.ids.tolist() == list(range(10))
    cut = select(lengths, too_long="truncate")
    assert cut.truncated.tolist() == [10] and cut.lengths.tolist() == [100] * 10 + [49152] and not cut.excluded
    assert select(np.array([49152])).lengths.tolist() == [49152]


def test_the_limit_counts_the_padding():
    with pytest.raises(PlanError, match="row 0 has 49150"):
        select(np.array([49150]), pad_multiple=100)
    assert select(np.array([49100]), pad_multiple=100).lengths.tolist() == [49100]
    assert select(np.array([700, 500]), max_length=600, too_long="truncate").lengths.tolist() == [600, 500]


def test_samples_without_a_supervised_token_are_counted_apart():
    chosen = select(np.array([10, 20, 60_000, 30]), np.array([1, 0, 0, 5]), too_long="drop")
    assert {reason: ids.tolist() for reason, ids in chosen.excluded.items()} == {"too_long": [2], "unsupervised": [1]}
    assert chosen.ids.tolist() == [0, 3]
    with pytest.raises(PlanError, match="3 entries for 2 lengths"):
        select(np.array([1, 2]), np.array([1, 1, 1]))


def test_a_truncated_sample_keeps_its_row_when_others_are_left_out():
    chosen = select(np.array([10, 900, 20, 800]), np.array([0, 1, 1, 1]), too_long="truncate", max_length=500)
    assert chosen.ids.tolist() == [1, 2, 3] and chosen.lengths.tolist() == [500, 20, 500] and chosen.truncated.tolist() == [1, 3]


def test_nothing_left_says_why():
    with pytest.raises(PlanError, match="no sample is left to plan: 2 too_long, 1 unsupervised"):
        select(np.array([900, 800, 5]), np.array([1, 1, 0]), too_long="drop", max_length=100)
    with pytest.raises(PlanError, match="there are no lengths"):
        select(np.array([], dtype=np.int64))


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_width(dtype):
    lengths = np.array([1, 300, np.iinfo(dtype).max], dtype=dtype)
    assert select(lengths, too_long="truncate", token_budget=1000).lengths.tolist() == [1, 300, 1000]
