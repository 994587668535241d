"""Tau of a finished run: the run's own number on its own prompts, an interval that holds it, and clear refusals.

Run alone: python -m pytest tests/test_tau.py
"""

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


def test_what_cannot_be_measured_is_said(run, tmp_path):
    with pytest.raises(SystemExit, match=r"error: .*is not a run folder"):
        tau.main([str(tmp_path)])
    with pytest.raises(ValueError, match="prompts is 0"):
        tau_of_run(run, 0, 12)
    bare = shutil.copytree(run, tmp_path / "bare")
    shutil.rmtree(bare / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        tau_of_run(bare, 1, 12)
