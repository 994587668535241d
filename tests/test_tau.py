"""Tau of a finished run: the run's own number on its own prompts, an interval that holds it, and clear refusals.

Run alone: python -m pytest tests/test_tau.py
"""

import math
import shutil

import pytest
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.pipeline import tau
from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.tau import tau_of_run
from dflash_nb.pipeline.train import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    dataset, target = write_dataset(root / "data"), save_target(root / "target", "hybrid")
    return train(tiny_config(dataset, target, root / "runs", eval_prompts=3, eval_tokens=12)).run_dir


def test_on_the_run_s_own_prompts_it_is_the_run_s_own_tau(run, capsys):
    last = read_run(run).events_of("eval")[-1]
    measured = tau_of_run(run, prompts=3, new_tokens=12)
    assert (measured.tau, measured.passes) == (pytest.approx(last["tau"]), last["tau_passes"])
    assert measured.low <= measured.tau <= measured.high
    assert "3 prompts, at most 12 tokens each" in capsys.readouterr().out


def test_more_prompts_than_there_are_means_all(run):
    measured = tau_of_run(run, prompts=1000, new_tokens=6)
    assert measured.prompts == 12
    assert 1 <= measured.low <= measured.high <= 4


def test_from_the_command_line(run, capsys):
    tau.main([str(run), "--prompts", "2", "--new-tokens", "5"])
    assert "over 2 held-out prompts" in capsys.readouterr().out


def test_one_prompt_has_no_interval(run):
    measured = tau_of_run(run, prompts=1, new_tokens=6)
    assert (measured.low, measured.high) == (None, None) and measured.tau >= 1
    assert "over one held-out prompt, which gives no interval" in measured.text()


@pytest.mark.parametrize("temperature", [math.nan, math.inf, -1.0, 1e-300])
def test_a_temperature_that_cannot_be_drawn_at_is_refused(run, temperature):
    with pytest.raises(ValueError, match=rf"temperature is {temperature}; it must be 0 \(greedy\), or a number of at least 0.001"):
        tau_of_run(run, 1, 12, temperature)


def test_the_lowest_temperature_can_be_drawn_at(run):
    assert tau_of_run(run, 2, 6, tau.LOWEST_TEMPERATURE).tau >= 1


def test_more_new_tokens_than_positions_are_refused(run):
    with pytest.raises(ValueError, match=r"new_tokens is 99999, target .* has \d+ positions for a prompt and them; give at most \d+$"):
        tau_of_run(run, 1, 99_999)


def test_what_cannot_be_measured_is_said(run, tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*is not a run folder"):
        tau.main([str(tmp_path)])
    with pytest.raises(ValueError, match="prompts is 0"):
        tau_of_run(run, 0, 12)
    bare = shutil.copytree(run, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        tau_of_run(bare, 1, 12)
