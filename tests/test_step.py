"""One optimiser step: its numbers do not depend on padding or on how the batches are cut.

Run alone: python -m pytest tests/test_step.py
"""

import numpy as np
import pytest
import torch
from tiny_runs import save_target
from tiny_targets import make_batch

from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.objective import Objective
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline.optimizer import make_optimizer
from dflash_nb.pipeline.step import LossSettings, accumulate, accuracy, finish_step, supervised
from dflash_nb.pipeline.window import Ready


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return FrozenTarget.load(save_target(tmp_path_factory.mktemp("target"), "llama"), (1, 5))


def settings(**changes):
    values = {"objective": Objective("ce", 4.0), "anchors": 8, "block_size": 4, "seed": 0, "device": torch.device("cpu"), "autocast": False}
    return LossSettings(**{**values, **changes})


def new_drafter(target):
    torch.manual_seed(0)
    drafter = DFlashDrafter(DrafterConfig.for_target(target.info, num_layers=1, block_size=4, target_layer_ids=(1, 5)))
    return drafter, make_optimizer(drafter, "muon", 1e-3, (0.9, 0.95), 0.0)


def ready(target, *batches):
    return iter([Ready(batch, target.features(batch), 0.1, 0.2) for batch in batches])


def test_padding_changes_neither_loss_nor_counts(target):
    records = []
    for width in (None, 90):
        drafter, optimizer = new_drafter(target)
        batch = make_batch([37, 70, 5], width)
        records.append(finish_step(accumulate(ready(target, batch), 1, drafter, target.head(), settings()), optimizer, 1e-3, 1.0))
    one, other = records
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    for name in ("slots", "blocks", "supervised", "tokens", "weight"):
        assert one[name] == other[name]
    assert (one["padded_tokens"], other["padded_tokens"]) == (3 * 70, 3 * 90)


def test_seconds_and_tokens_are_sums_over_the_batches(target):
    drafter, optimizer = new_drafter(target)
    batches = [make_batch([20, 31]), make_batch([12], seed=1)]
    total = accumulate(ready(target, *batches), 2, drafter, target.head(), settings())
    record = finish_step(total, optimizer, 1e-3, 1.0)
    assert record["seconds"]["fetch"] == pytest.approx(0.2)
    assert record["seconds"]["wait"] == pytest.approx(0.4)
    assert record["tokens"] == 63
    assert record["supervised"] == sum(int(batch.loss_mask_BT.sum()) for batch in batches)
    assert [batch["slots"] for batch in record["batches"]] == [
        record["slots"] - record["batches"][1]["slots"],
        record["batches"][1]["slots"],
    ]
    assert record["loss"] == pytest.approx(sum(batch["loss"] * batch["weight"] for batch in record["batches"]) / record["weight"])
    assert type(record["loss"]) is float and type(record["slot_accuracy"][0]) is float


def test_bf16_products_leave_weights_and_moments_in_fp32(target):
    drafter, optimizer = new_drafter(target)
    total = accumulate(ready(target, make_batch([40])), 1, drafter, target.head(), settings(autocast=True))
    finish_step(total, optimizer, 1e-3, 1.0)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.float32}
    assert {value.dtype for state in optimizer.state.values() for value in state.values()} == {torch.float32}


def test_a_loss_that_is_not_finite_names_the_samples_and_changes_nothing(target):
    drafter, optimizer = new_drafter(target)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    batch = make_batch([20, 31])
    features = target.features(batch)
    features.features_ND[5] = float("nan")
    total = accumulate(iter([Ready(batch, features, 0, 0)]), 1, drafter, target.head(), settings())
    with pytest.raises(FloatingPointError, match=r"sample ids are \[0, 1\] of 2.*lower learning_rate"):
        finish_step(total, optimizer, 1e-3, 1.0)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_a_batch_without_anchors_has_no_loss(target):
    drafter, optimizer = new_drafter(target)
    batch = make_batch([9, 12])
    batch.loss_mask_BT[:] = False
    record = finish_step(accumulate(ready(target, batch), 1, drafter, target.head(), settings()), optimizer, 1e-3, 1.0)
    assert (record["loss"], record["acceptance"], record["slots"], record["grad_norm"]) == (None, None, 0, 0.0)
    assert record["slot_accuracy"] == [None] * 3


def test_the_loss_mask_of_real_tokens():
    batch = make_batch([4, 2], 6)
    assert supervised(batch).tolist() == [False, False, True, True, False, True]


def test_accuracy_of_a_slot_without_labels_is_none():
    assert accuracy(np.array([1, 0]), np.array([2, 0])) == [0.5, None]
