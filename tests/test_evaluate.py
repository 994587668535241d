"""Evaluation: the same numbers however often it runs, and no trace left in the training.

Run alone: python -m pytest tests/test_evaluate.py
"""

import random

import numpy as np
import pytest
import torch
from tiny_runs import save_target, write_dataset

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.model.decode import Generation
from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.objective import Objective
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline.evaluate import evaluate, repeated, tau_interval
from dflash_nb.pipeline.step import LossSettings


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    target = FrozenTarget.load(save_target(root / "target", "hybrid"), (1, 5))
    torch.manual_seed(0)
    drafter = DFlashDrafter(DrafterConfig.for_target(target.info, num_layers=1, block_size=4, target_layer_ids=(1, 5)))
    return target, drafter, target.head(), TokenDataset.open(write_dataset(root / "data", heldout=30), "heldout")


def run(parts, **changes):
    settings = LossSettings(Objective("ce", 4.0), anchors=8, block_size=4, seed=0, device=torch.device("cpu"), autocast=False)
    values = {"rows": 30, "prompts": 2, "new_tokens": 8, "boundaries": (0, 20, 40, 61), "token_budget": 300}
    return evaluate(*parts, settings, **{**values, **changes})


def test_it_is_repeatable_and_leaves_mode_gradients_and_random_streams_alone(parts):
    drafter = parts[1].train()
    drafter.norm.eval()
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = run(parts), run(parts)
    assert {**first, "seconds": 0} == {**second, "seconds": 0}
    assert drafter.training and drafter.layers.training and not drafter.norm.training
    assert all(parameter.grad is None for parameter in drafter.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])  # noqa: NPY002


def test_loss_does_not_depend_on_the_batches(parts):
    small, large = run(parts, token_budget=61), run(parts, token_budget=5000)
    assert small["loss"] == pytest.approx(large["loss"], rel=1e-5)
    assert small["slot_accuracy"] == large["slot_accuracy"]
    assert small["by_bucket"].keys() == large["by_bucket"].keys() == {"0", "1", "2"}


def test_longer_rows_than_the_cuts_and_the_budget_are_scored_too(parts):
    result = run(parts, boundaries=(0, 20, 30), token_budget=25)
    assert result["by_bucket"].keys() == {"0", "1"}
    assert result["loss"] > 0


def test_an_untrained_drafter_is_accepted_by_chance_only(parts):
    assert 1.0 <= run(parts)["tau"] < 1.3
    assert run(parts)["tau_passes"] >= 2


def test_prompts_end_before_the_first_supervised_token(parts):
    heldout = parts[3]
    for row, prompt in enumerate(heldout.prompts(np.arange(5), 5, longest=100)):
        input_ids, loss_mask = heldout.row(row)
        assert prompt == input_ids[: len(prompt)].tolist()
        assert not loss_mask[: len(prompt)].any() and loss_mask[len(prompt)]


def test_prompts_that_are_too_long_are_passed_over(parts):
    assert all(len(prompt) <= 4 for prompt in parts[3].prompts(np.arange(30), 30, longest=4))


def test_without_a_usable_prompt_tau_is_not_measured(parts, monkeypatch):
    monkeypatch.setattr("dflash_nb.pipeline.evaluate.LONGEST_PROMPT", 0)
    result = run(parts)
    assert (result["tau"], result["tau_passes"]) == (None, 0)


def generations(*texts):
    return [Generation(list(tokens), list(passes)) for tokens, passes in texts]


def test_the_interval_of_tau_is_over_prompts(parts):
    result = run(parts, prompts=6, new_tokens=12)
    assert result["tau_prompts"] == 6 and 1 <= result["tau_low"] <= result["tau"] <= result["tau_high"]
    assert run(parts, prompts=1)["tau_low"] is None
    even = generations(*[(range(9), [3, 3, 3])] * 5)
    assert tau_interval(even) == (3.0, 3.0)
    low, high = tau_interval([*even, *generations((range(9), [1] * 9))])
    assert low < 9 * 6 / (3 * 5 + 9) < high


def test_text_that_comes_again_is_counted():
    assert repeated(generations((range(30), [1]))) == 0.0
    assert repeated(generations(([1, 2, 3] * 10, [1]))) == pytest.approx(24 / 27)
    assert repeated(generations(([1, 2], [1]))) == 0.0
