"""The printed line and the summary.

Run alone: python -m pytest tests/test_summary.py
"""

import re

import numpy as np
import pytest
from runs import Recipe, write_run

from dflash_nb.pipeline import console as console_module
from dflash_nb.pipeline.console import Console
from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.summary import estimate_agreement, summarize, tau_words


def record(step, tokens=1000, seconds=0.5, loss=3.0):
    return {
        "step": step,
        "epoch": 0,
        "loss": loss,
        "lr": 1e-3,
        "tokens": tokens,
        "seconds": {"step": seconds},
        "q_prefetch": 8,
        "q_hs": 2,
        "q_hs_bytes": 3 << 20,
    }


def test_a_line_says_where_the_run_stands(capsys):
    Console(np.array([1000, 1000, 4000]), every=0.0).step(record(1))
    assert capsys.readouterr().out == (
        "step 1/3  epoch 0  loss 3.000  lr 1.0e-03  2,000 tokens/s  ETA 0:02  q_prefetch 8  q_hs 2 (3 MiB)\n"
    )


def test_the_time_left_follows_the_tokens_of_the_plan():
    console = Console(np.array([100, 100, 100, 9700]), every=1e9)
    for step in (1, 2, 3):
        console.step(record(step, tokens=100, seconds=1.0))
    assert "ETA 1:37" in console.line(record(3), 100.0)
    assert "ETA 0:00" in console.line(record(4), 100.0)


def test_500_steps_print_few_plain_lines(capsys, monkeypatch):
    now = iter(np.arange(0, 1000, 0.4).tolist())
    monkeypatch.setattr(console_module.time, "perf_counter", lambda: next(now))
    console = Console(np.full(500, 100), every=5.0)
    for step in range(1, 501):
        console.step(record(step))
    out = capsys.readouterr().out
    assert out.count("\n") <= 60
    assert "\r" not in out
    assert "step 1/500" in out and "step 500/500" in out


def test_a_step_without_a_loss_has_a_line_too():
    assert "loss none" in Console(np.ones(3), every=1.0).line(record(1, loss=None), 1.0)


def test_a_summary_is_what_the_log_says(tmp_path):
    run = read_run(write_run(tmp_path / "run", Recipe(steps=300)))
    summary = summarize(run, 300, True, tmp_path / "checkpoint", tmp_path / "export")
    losses = run.steps["loss"]
    assert summary.loss_steps == 15
    assert summary.first_loss == pytest.approx(np.median(losses[:15]))
    assert summary.last_loss == pytest.approx(np.median(losses[-15:]))
    assert summary.efficiency == pytest.approx(run.steps["tokens"].sum() / run.steps["padded_tokens"].sum())
    assert summary.tokens_per_second == pytest.approx(run.steps["tokens"].sum() / run.steps["seconds_step"].sum())
    text = summary.text()
    assert "300 of 300" in text and "median of 15 steps at each end" in text and str(tmp_path / "export") in text
    assert set(summary.to_json()) >= {"first_loss", "tau_trained", "checkpoint"}


def test_a_run_without_a_step_can_be_summed_up(tmp_path):
    run = read_run(write_run(tmp_path / "run", Recipe(evals={}), status=None, upto=0))
    summary = summarize(run, 300, False, None, None)
    assert (summary.steps, summary.first_loss, summary.tau_trained, summary.tokens_per_second) == (0, None, None, None)
    assert "not measured" in summary.text() and "-p resume" in summary.text()


@pytest.mark.parametrize(
    ("evals", "says"),
    [
        ([], ""),
        ([(1.0, 1.0)], ""),
        ([(1.3, None)], ""),
        ([(1.0, 1.0), (1.3, 1.6)], "blocks on given texts say 1.30, 50% of the draft tokens that decoding accepts"),
        ([(1.0, 1.0), (1.2, 1.6), (1.3, 1.5), (1.4, 1.8)], "50% of .*, and moved the same way between 2 of 3 pairs of evaluations"),
    ],
)
def test_how_well_the_cheap_estimate_agrees_with_decoding(tmp_path, evals, says):
    run = read_run(write_run(tmp_path / "run", Recipe(steps=8)))
    run.events = [{"kind": "eval", "step": step, "acceptance": given, "tau": tau} for step, (given, tau) in enumerate(evals)]
    assert re.search(says, estimate_agreement(run)) if says else estimate_agreement(run) == ""


def test_tau_comes_with_its_prompts_its_interval_and_a_warning(tmp_path):
    run = read_run(write_run(tmp_path / "run", Recipe(steps=8)))
    event = {"kind": "eval", "step": 8, "acceptance": 1.3, "tau": 1.894, "tau_low": 1.62, "tau_high": 2.2, "tau_prompts": 16}
    run.events = [{"kind": "eval", "step": 0, "acceptance": 1.0, "tau": 1.0}, {**event, "tau_repeated": 0.61}]
    text = " ".join(summarize(run, 8, True, None, None).text().split())
    assert "1.00 untrained -> trained 1.89 (1.62 to 2.20 with 95 %, 16 held-out prompts); beware: the target repeats itself (61% of" in text
    run.events[1]["tau_repeated"] = 0.02
    assert "beware" not in summarize(run, 8, True, None, None).text()
    assert tau_words({"tau": 1.5, "tau_low": None, "tau_prompts": 1}) == "1.50 (1 held-out prompt)"
    assert tau_words({"tau": 1.5}) == "1.50" and tau_words({"tau": None}) == "not measured"


def test_a_short_run_compares_its_first_and_its_last_step(tmp_path):
    text = summarize(read_run(write_run(tmp_path / "run", Recipe(steps=14))), 14, True, None, None).text()
    assert "(first and last step)" in text and "median of" not in text
