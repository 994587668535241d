"""The options of a plan: each wrong one is named, with what would be right."""

import numpy as np
import pytest

from dflash_nb.planner.options import PlanError, PlanOptions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"strategy": "bucket"}, "strategy must be one of sorted, random, bucketed, pooled, packed, not 'bucket'"),
        ({"strategy": "bucketed"}, "needs boundaries"),
        ({"order": "sorted"}, "order must be one of"),
        ({"too_long": "cut"}, "too_long must be one of"),
        ({"token_budget": 0}, "token_budget must be at least 1"),
        ({"token_budget": 2**31}, "token_budget must be at most"),
        ({"max_batch": 64.5}, "max_batch must be a whole number"),
        ({"window": 0}, "window must be at least 1"),
        ({"max_length": 0}, "max_length must be at least 1"),
        ({"pad_multiple": 50_000}, "no sample would fit"),
        ({"slot_budget": 100}, "needs slots_per_row"),
        ({"slot_budget": 100, "slots_per_row": 101}, "raise it or use fewer anchors"),
        ({"boundaries": (0, 10, 10)}, "must increase from 0"),
        ({"boundaries": (5, 10)}, "must increase from 0"),
        ({"boundaries": (0, 10.5)}, "whole numbers"),
    ],
)
def test_a_wrong_option_is_named(wrong, message):
    with pytest.raises(PlanError, match=message):
        PlanOptions(**{"strategy": "random"} | wrong)


def test_numpy_values_become_plain_ones():
    options = PlanOptions(boundaries=np.array([0, 5, 9]), token_budget=np.int64(100))
    assert options.to_json()["boundaries"] == [0, 5, 9] and type(options.token_budget) is int


def test_a_slot_budget_bounds_the_rows():
    assert PlanOptions(strategy="random", slots_per_row=512, slot_budget=10_000).most_rows == 19
    assert PlanOptions(strategy="random", slots_per_row=512).most_rows == 64
