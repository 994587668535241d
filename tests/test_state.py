"""Resume: the position is exact, and whatever changed is named."""

import json

import numpy as np
import pytest

from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.options import PlanError
from dflash_nb.planner.state import PlanChangedError, PlanState, check_fingerprint, plan_fingerprint

LENGTHS = np.random.default_rng(0).integers(65, 8192, 3000)
OPTIONS = {"strategy": "bucketed", "boundaries": (0, 2000, 8192)}


def test_a_run_in_two_parts_sees_what_one_run_sees():
    plan = plan_epoch(LENGTHS, seed=7, epoch=3, **OPTIONS)
    saved = json.dumps(PlanState.at(plan, 11, plan_fingerprint(LENGTHS, **OPTIONS)).to_json())
    state = PlanState.from_json(json.loads(saved))
    again = plan_epoch(LENGTHS, seed=state.seed, epoch=state.epoch, **OPTIONS)
    start = state.resume(again, plan_fingerprint(LENGTHS, **OPTIONS))
    assert start == 11 and len(saved) < 1500
    parts = [plan.batch(i).sample_ids for i in range(11)] + [again.batch(i).sample_ids for i in range(start, len(again))]
    assert np.array_equal(np.concatenate(parts), plan.sample_ids)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"token_budget": 65_536}, "token_budget: saved 49152, now 65536"),
        ({"boundaries": (0, 1000, 8192)}, r"boundaries: saved \[0, 2000, 8192\], now \[0, 1000, 8192\]"),
        ({"world": 4}, "world: saved 1, now 4"),
        ({"strategy": "pooled"}, "strategy"),
        ({"order": "uniform"}, "order"),
        ({"window": 4}, "window"),
        ({"max_batch": 32}, "max_batch"),
        ({"pad_multiple": 64}, "pad_multiple"),
        ({"max_length": 8191}, "max_length"),
        ({"too_long": "drop"}, "too_long"),
        ({"slots_per_row": 512, "slot_budget": 20_000}, "slot_budget: .*slots_per_row"),
        ({"pool_size": 100}, "pool_size"),
    ],
)
def test_a_changed_option_is_named(changed, named):
    with pytest.raises(PlanChangedError, match=named):
        check_fingerprint(plan_fingerprint(LENGTHS, **OPTIONS), plan_fingerprint(LENGTHS, **OPTIONS | changed))


def test_changed_data_is_named():
    other = LENGTHS.copy()
    other[5] += 1
    saved = plan_fingerprint(LENGTHS, **OPTIONS)
    with pytest.raises(PlanChangedError, match=r"changed: lengths_sha256: saved '\w+', now '\w+'\. Restore"):
        check_fingerprint(saved, plan_fingerprint(other, **OPTIONS))
    with pytest.raises(PlanChangedError, match="rows: saved 3000, now 2999"):
        check_fingerprint(saved, plan_fingerprint(LENGTHS[:-1], **OPTIONS))
    with pytest.raises(PlanChangedError, match="n_supervised_sha256: saved None"):
        check_fingerprint(saved, plan_fingerprint(LENGTHS, np.ones(3000, dtype=np.int64), **OPTIONS))


def test_defaults_spelt_out_and_other_integer_widths_are_the_same_plan():
    check_fingerprint(
        plan_fingerprint(LENGTHS, **OPTIONS),
        plan_fingerprint(LENGTHS.astype(np.uint16), **OPTIONS, token_budget=np.int32(49152), window=8),
    )


def test_another_epoch_or_other_batches_are_refused():
    fingerprint = plan_fingerprint(LENGTHS, **OPTIONS)
    state = PlanState.at(plan_epoch(LENGTHS, **OPTIONS), 3, fingerprint)
    with pytest.raises(PlanChangedError, match="saved in epoch 0 of seed 0, resumed in epoch 1 of seed 0"):
        state.resume(plan_epoch(LENGTHS, epoch=1, **OPTIONS), fingerprint)
    moved = PlanState.from_json(state.to_json() | {"plan_sha256": "0" * 64})
    with pytest.raises(PlanChangedError, match="NumPy"):
        moved.resume(plan_epoch(LENGTHS, **OPTIONS), fingerprint)


def test_the_position_lies_in_the_plan_or_at_its_end():
    plan = plan_epoch(LENGTHS, **OPTIONS)
    assert PlanState.at(plan, len(plan), {}).next_batch == len(plan)
    with pytest.raises(PlanError, match="outside a plan"):
        PlanState.at(plan, len(plan) + 1, {})
