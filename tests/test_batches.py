"""Plans of one epoch: cover, budget, purity, and the faults that batch samplers have had."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.options import ORDERS, STRATEGIES, PlanError

BOUNDARIES = (0, 40, 130, 300, 401)


@st.composite
def cases(draw):
    dtype = draw(st.sampled_from([np.int16, np.int32, np.int64, np.uint16, np.uint64]))
    lengths = np.array(draw(st.lists(st.integers(1, 400), min_size=1, max_size=60)), dtype=dtype)
    pad_multiple = draw(st.sampled_from([1, 1, 7, 16]))
    options = {
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "boundaries": draw(st.sampled_from([BOUNDARIES, (0, 401), tuple(range(0, 402))])),
        "token_budget": draw(st.integers(420, 3000)),
        "max_batch": draw(st.integers(1, 70)),
        "pad_multiple": pad_multiple,
        "order": draw(st.sampled_from(ORDERS)),
        "window": draw(st.integers(1, 9)),
        "pool_size": draw(st.integers(1, 70)),
        "seed": draw(st.integers(0, 2**40)),
        "epoch": draw(st.integers(0, 100)),
    }
    return lengths, options


@settings(max_examples=600, deadline=None)
@given(cases())
def test_every_sample_once_within_the_budget_and_again_the_same(case):
    lengths, options = case
    plan = plan_epoch(lengths, **options)
    assert np.array_equal(np.sort(plan.sample_ids), np.arange(len(lengths)))
    assert plan.offsets[0] == 0 and plan.offsets[-1] == len(lengths)
    assert (plan.rows >= 1).all() and (plan.rows <= options["max_batch"]).all()
    for index in range(len(plan)):
        batch = plan.batch(index)
        longest, real = int(lengths[batch.sample_ids].max()), int(lengths[batch.sample_ids].sum())
        assert batch.real_tokens == real
        needed = real if options["strategy"] == "packed" else longest
        assert needed <= batch.padded_length < needed + options["pad_multiple"]
        assert batch.padded_length % options["pad_multiple"] == 0
    assert (plan.padded_tokens <= options["token_budget"]).all()
    assert plan_epoch(lengths, **options).sha256() == plan.sha256()


def test_a_length_above_the_budget_is_named():
    with pytest.raises(PlanError, match="row 10 has 49153"):
        plan_epoch(np.array([100] * 10 + [49153]), "random")
