"""Notebook 04 and its plots: findings are computed, odd logs draw, bad input ends in a sentence."""

import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import nbformat
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from labelled_logs import SCENE, WANDB, Exported, Planted, as_csv, killed, poison, rising, spikes_in
from matplotlib import pyplot
from runs import Recipe, write_run

from dflash_nb.analysis.compare import compare, compare_with
from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.analysis.plots import diagnosis as plots
from dflash_nb.analysis.plots import style
from dflash_nb.pipeline.parameters import ParameterError
from dflash_nb.pipeline.run import RunError
from dflash_nb.pipeline.runlog import RunLog

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "04_loss_diagnosis.ipynb"


def check(plot: style.Plot) -> style.Plot:
    assert plot.png[:4] == b"\x89PNG" and len(plot.finding) >= 40 and any(c.isdigit() for c in plot.finding)
    assert "nan" not in plot.finding and "inf" not in plot.finding
    assert pyplot.get_fignums() == []
    return plot


def empty(folder: Path) -> Path:
    folder.mkdir()
    RunLog.create(folder, {"seed": 1}).close()
    return folder


def bare_csv(folder: Path) -> Path:
    folder.mkdir()
    (folder / "log.csv").write_text("step,loss\n" + "\n".join(f"{i},{5 - i / 30:.3f}" for i in range(50)))
    return folder / "log.csv"


def without_losses(made, rng):
    for record in made:
        for batch in record["batches"]:
            batch["loss"] = None


ODD = {
    "no step": empty,
    "one step": lambda folder: write_run(folder, Recipe(steps=1)),
    "losses of a csv": bare_csv,
    "csv": Exported(Planted(Recipe(steps=100), after=as_csv(WANDB))),
    "no finite loss": Planted(Recipe(steps=70), without_losses),
    "one bucket": lambda folder: write_run(
        folder, Recipe(steps=60, edges=(0, 513), levels=(0.0,), shares=(1.0,), batch_rows=(8,), step_seconds=(0.2,))
    ),
    "many buckets, steep start": lambda folder: write_run(
        folder,
        Recipe(
            steps=300,
            edges=tuple(range(0, 1201, 100)),
            levels=tuple(np.linspace(1, -1, 12)),
            shares=(1.0,) * 12,
            batch_rows=(8,) * 12,
            step_seconds=(0.1,) * 12,
            first_loss=65.0,
            decay_steps=5.0,
        ),
    ),
    "killed, steps of four batches": Planted(Recipe(steps=40, accumulation=4), after=killed),
}


def executed(**parameters) -> dict:
    """The notebook's cells run one after another in one namespace, as papermill would with these parameters; every plot is checked."""
    namespace: dict = {"__plots": []}

    def show(plot):
        namespace["__plots"].append(check(plot))

    with mock.patch.object(style, "show", show):
        for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
            if cell.cell_type == "code":
                exec(cell.source, namespace)
                if "parameters" in cell.metadata.get("tags", []):
                    namespace.update(parameters)
    return namespace


@pytest.mark.parametrize("write", ODD.values(), ids=ODD)
def test_the_notebook_reads_whatever_is_there(write, tmp_path, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        namespace = executed(run_dir=str(write(tmp_path / "run")))
    assert len(namespace["__plots"]) == 9
    printed = " ".join(capsys.readouterr().out.split())
    assert " ".join(namespace["result"].text().split()) in printed
    assert all(" ".join(finding.text.split()) in printed for finding in namespace["result"].findings)


def test_findings_are_the_data(tmp_path):
    found = diagnose(Planted(Recipe(steps=400, seed=83), spikes_in(2, 5, 1.2))(tmp_path / "run"))
    assert "LOOK" in plots.curve(found).finding and "5 spikes" in plots.curve(found).finding
    assert "Lengths 256 - 511 spike: 5 of 5" in plots.attribution(found).finding
    worst = found.of("spikes").data["spikes"].step_S[np.argmax(found.log.parts.z_M[found.of("spikes").data["spikes"].batch_S])]
    assert f"step {worst:,}" in plots.zoom(found).finding
    assert "% of the step-to-step movement is bucket mix" in plots.adjusted(found).finding
    assert "Lengths 0 - 127 lie 1." in plots.by_length(found).finding
    quiet = diagnose(write_run(tmp_path / "quiet", Recipe(seed=1)))
    assert "nothing to attribute" in plots.attribution(quiet).finding and "No spike" in plots.zoom(quiet).finding
    assert "Slot 1 went from" in plots.slots(quiet).finding


def test_comparison_names_both_and_draws_on_one_axis(tmp_path):
    """The reference run's scene: a run in order of length has its curve taken apart with the levels of the bucketed one."""
    bucketed = diagnose(write_run(tmp_path / "bucketed", SCENE)).log
    ordered = diagnose(write_run(tmp_path / "sorted", replace(SCENE, order="sorted", seed=1, config={"strategy": "sorted"}))).log
    compared = compare([bucketed, ordered])
    one, other = compared.rows
    assert abs(one["at equal steps"] - other["at equal steps"]) < 0.03
    assert np.median(bucketed.run.steps["loss"][-30:]) - np.median(ordered.run.steps["loss"][-30:]) > 0.3
    plot = check(plots.comparison(compared))
    assert "sorted is smooth by composition" in plot.finding and "bucketed" in plot.finding
    axes = plot.figure.axes
    assert len(axes) == 2 and all(len(axis.lines) == 2 for axis in axes) and axes[0].get_ylim() == axes[1].get_ylim()
    assert "their mix cannot be taken off" in compare([ordered, ordered]).finding


LONG_NAMES = (
    "2026-11-29-sample-bucketed-auto-muon-lr-0.005-seed-0-baseline",
    "2026-11-29-sample-bucketed-auto-muon-lr-0.010-seed-1-run-two",
)


@pytest.mark.parametrize(
    "names", [("base", "other"), (*LONG_NAMES, "short"), ("x" * 150, "y" * 60)], ids=["short", "sixty characters", "longer than a line"]
)
def test_names_of_runs_lie_beside_the_curves_whatever_their_length(tmp_path, names):
    logs = [diagnose(write_run(tmp_path / name, Recipe(steps=60, seed=i, last_loss=3 + i))).log for i, name in enumerate(names)]
    figure = check(plots.comparison(compare(logs))).figure
    figure.draw_without_rendering()
    [legend] = figure.legends
    assert legend.get_title().get_text() == "adjusted to the common mix of lengths"
    assert ["".join(text.get_text().split()) for text in legend.get_texts()] == list(names)
    for handle, curve in zip(legend.get_lines(), figure.axes[0].lines, strict=True):
        assert (handle.get_color(), handle.get_linestyle()) == (curve.get_color(), curve.get_linestyle())
    place, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= place.x0 and place.x1 <= whole.x1 and whole.y0 <= place.y0
    [title] = figure.texts
    for other in (*figure.axes, title):
        assert not place.overlaps(other.get_tightbbox()), other
    assert all(axis.get_window_extent().height > 150 for axis in figure.axes)


def test_no_two_runs_look_alike(tmp_path):
    """24 curves have 24 looks, and a run of one step is a point, not a line without length."""
    log, short = (diagnose(write_run(tmp_path / name, Recipe(steps=n))).log for name, n in (("long", 40), ("short", 1)))
    for axis in check(plots.comparison(compare([*[log] * 23, short]))).figure.axes:
        assert len({(curve.get_color(), curve.get_linestyle()) for curve in axis.lines}) == 24
        assert [curve.get_marker() for curve in axis.lines] == ["None"] * 23 + ["o"]


def test_the_notebook_on_a_poisoned_and_a_diverged_run(tmp_path, capsys):
    poisoned = Planted(Recipe(seed=80, steps=450), poison(17, 1.5, 60))(tmp_path / "poisoned")
    diverged = Planted(Recipe(seed=60), rising(150, 2.0, 60))(tmp_path / "diverged")
    executed(run_dir=str(poisoned), compare=[str(diverged)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "LOOK: " in printed and "sample 17 is in all" in printed and "poisoned" in printed and "diverged" in printed
    executed(run_dir=str(diverged))
    assert "STOP: the loss has left its best" in " ".join(capsys.readouterr().out.split())


def test_bad_parameters_are_a_sentence(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        executed(run_dir=str(tmp_path / "nowhere"))
    with pytest.raises(ParameterError, match=r"unknown parameter 'run'.*did you mean 'run_dir'"):
        executed(run="x")
    (tmp_path / "log.csv").write_text("step,accuracy\n1,2\n")
    with pytest.raises(RunError, match="no column that looks like a loss"):
        executed(run_dir=str(tmp_path / "log.csv"))
    log = diagnose(write_run(tmp_path / "run", Recipe(steps=40))).log
    with pytest.raises(RunError, match="does not exist"):
        compare_with(log, [str(tmp_path / "other")])


def test_a_notebook_shows_the_sentence_alone(tmp_path, capsys):
    shell = InteractiveShell()
    shell.run_cell(f"from dflash_nb.analysis.diagnose import diagnose; diagnose({str(tmp_path)!r})")
    shown = capsys.readouterr().out
    assert shown.startswith("RunError: ") and "neither config.json nor steps.jsonl" in shown and "Traceback" not in shown
