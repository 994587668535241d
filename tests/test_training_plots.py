"""Plots of notebook 03: whatever a run holds draws, and what a finding says is what was put into the run."""

import re

import numpy as np
import pytest
from matplotlib import pyplot
from runs import Recipe, records, write_run

from dflash_nb.analysis.achieved import by_length, planned_against_achieved
from dflash_nb.analysis.plots import style, training
from dflash_nb.pipeline.runlog import RunLog, read_run

PLOTS = (training.loss, training.acceptance, training.throughput, training.time_by_length, training.queues)
RUNS = {
    "usual": (Recipe(steps=120, evals=(0, 60, 120)), {}),
    "one step": (Recipe(steps=1), {}),
    "two steps": (Recipe(steps=2), {}),
    "no step": (Recipe(steps=1), {"upto": 0, "status": None}),
    "killed": (Recipe(steps=40), {"upto": 17, "status": None}),
    "accumulated": (Recipe(steps=30, accumulation=4), {}),
    "one bucket": (Recipe(steps=30, edges=(0, 300), levels=(0,), shares=(1,), batch_rows=(8,), step_seconds=(0.2,)), {}),
    "many steps": (Recipe(steps=5000), {}),
    "first losses far above": (Recipe(steps=60, first_loss=70.0, decay_steps=5.0), {}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {name: read_run(write_run(folder / name.replace(" ", "-"), recipe, **how)) for name, (recipe, how) in RUNS.items()}


def check(plot: style.Plot) -> str:
    assert plot.png[:4] == b"\x89PNG" and len(plot.png) < 150_000
    assert len(plot.finding) >= 40 and re.search(r"\d", plot.finding) and "nan" not in plot.finding
    assert pyplot.get_fignums() == []
    return plot.finding


@pytest.mark.parametrize("name", RUNS)
def test_every_run_draws(runs, name):
    for plot in PLOTS:
        check(plot(runs[name]))
    style.table(planned_against_achieved(runs[name]))
    style.table(by_length(runs[name]))


def test_losses_at_the_ends(runs):
    run = runs["usual"]
    first, last = (float(np.median(part)) for part in (run.steps["loss"][:6], run.steps["loss"][-6:]))  # 5 % of 120
    finding = check(training.loss(run))
    assert f"{first:.2f} → {last:.2f} nats over 120 steps" in finding
    assert f"{Recipe().trend(120) + Recipe().eval_gap:.2f} on held-out samples" in finding
    assert "nats at the only step" in check(training.loss(runs["one step"]))


def test_steps_that_are_not_finite_are_said(tmp_path):
    made = records(Recipe(steps=12))
    with RunLog.create(tmp_path, {}) as log:
        for record in made:
            log.step({**record, "loss": float("nan")} if record["step"] > 9 else record)
    assert "3 steps were not finite" in check(training.loss(read_run(tmp_path)))


def test_a_run_without_any_loss_draws(tmp_path):
    with RunLog.create(tmp_path, {}) as log:
        for record in records(Recipe(steps=3)):
            log.step({**record, "loss": None, "acceptance": None})
    run = read_run(tmp_path)
    assert "None of the 3 optimiser steps" in check(training.loss(run))
    assert "not measured" in check(training.acceptance(run))
    for plot in PLOTS[2:]:
        check(plot(run))


def test_tau_is_told_when_it_was_measured(tmp_path):
    with RunLog.create(tmp_path, {}) as log:
        log.event("eval", step=0, loss=7.0, acceptance=1.0, tau=1.0)
        for record in records(Recipe(steps=10)):
            log.step(record)
        log.event("eval", step=10, loss=4.0, acceptance=1.4, tau=1.62)
    assert "tau, tokens a target pass: 1.00 at step 0, 1.62 at step 10" in check(training.acceptance(read_run(tmp_path)))


def test_rate_and_padding_are_sums_over_sums(runs):
    run = runs["usual"]
    rate = run.steps["tokens"].sum() / run.steps["seconds_step"].sum()
    padding = 100 * (1 - run.steps["tokens"].sum() / run.steps["padded_tokens"].sum())
    assert f"{rate:,.0f} real tokens/s" in check(training.throughput(run))
    assert f"{padding:.1f} % of the padded tokens" in check(training.throughput(run))


@pytest.mark.parametrize(
    ("recipe", "say"),
    [
        (Recipe(steps=30, wait_seconds=0.5), "The target limits"),
        (Recipe(steps=30, wait_seconds=0.5, q_prefetch=0, q_hs=0, fetch_seconds=0.6), "Reading data limits"),
        (Recipe(steps=30, wait_seconds=0.5, q_prefetch=0, q_hs=0), "The target limits"),  # a short plan, read to its end at once
        (Recipe(steps=30, wait_seconds=0.001), "The drafter limits"),
    ],
)
def test_the_limiting_side_is_named(tmp_path, recipe, say):
    run = read_run(write_run(tmp_path / "run", recipe))
    assert say in check(training.queues(run))
    share = run.steps["seconds_wait"].sum() / run.steps["seconds_step"].sum()
    assert f"{100 * share:.1f} % " in training.queues(run).finding


@pytest.mark.parametrize(
    ("config", "q_hs", "label", "capacity", "full", "say"),
    [
        ({}, 17, "q_hs (batches)", 17, 100, "its 17 places bind, it never held more than 16 of 256 MiB"),
        ({}, 16, "q_hs (batches)", 17, 100, "its 17 places bind"),  # the batch of the place just left is being computed
        ({}, 8, "q_hs (batches)", 17, 0, "its 17 places bind"),
        ({"topology": "3-1"}, 17, "q_hs (batches)", 19, 0, "its 19 places bind"),
        ({"q_hs_mb": 4}, 4, "q_hs (MiB)", 4, 100, "its 4 MiB bind, about 4.2 batches, before its 17 places do"),  # 3.8 MiB: no room for one
        ({"q_hs_mb": 4}, 3, "q_hs (MiB)", 4, 0, "its 4 MiB bind"),
        ({"q_hs_mb": 1}, 0, "q_hs (batches)", 17, 0, "its 17 places bind"),  # nothing ever waited: the size of a batch is unknown
    ],
)
def test_a_full_window_looks_full_whichever_limit_binds(tmp_path, config, q_hs, label, capacity, full, say):
    """A batch of these runs holds a million bytes."""
    run = read_run(write_run(tmp_path / "run", Recipe(steps=30, q_hs=q_hs, config=config)))
    plot = training.queues(run)
    axis = plot.figure.axes[1]
    assert axis.get_ylabel() == label and say in " ".join(plot.figure.get_supxlabel().split())
    [dashed] = [line for line in axis.lines if line.get_linestyle() == "--"]
    assert set(dashed.get_ydata()) == {capacity}
    texts = [text.get_text() for text in axis.texts]
    assert f"capacity {capacity}" in texts and any(text.endswith(f"full {full} % of the time") for text in texts)
    drawn = axis.lines[0].get_ydata()
    assert full == 0 or drawn.min() > 0.9 * capacity


def test_running_median_follows_levels_and_leaves_out_nan():
    values = np.concatenate([np.full(50, 2.0), np.full(50, 1.0)])
    values[[3, 70]] = np.nan, 9.0
    smooth = training.smoothed(values, 9)
    assert smooth[3] == 2.0 and smooth[70] == 1.0 and not np.isnan(smooth).any()
