"""Notebook 03 as people run it: launch, watch, resume, and every mistake named before a model is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.train import train

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "03_train.ipynb"
SMALL = {
    "buckets": "32",
    "token_budget": 256,
    "max_batch": 8,
    "draft_layers": 1,
    "block_size": 4,
    "anchors": 6,
    "max_steps": 12,
    "eval_rows": 4,
    "eval_prompts": 2,
    "eval_tokens": 6,
    "threads": 1,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("place")
    write_dataset(root / "data")
    save_target(root / "target", "hybrid")
    return root


def papermill(place, name, *arguments):
    """Run the notebook from the user's folder, named by relative paths. Returns the process and the cells' outputs."""
    out = place / f"{name}.ipynb"
    command = [sys.executable, "-m", "papermill", NOTEBOOK, out.name, "--no-progress-bar", *map(str, arguments)]
    environment = {**os.environ, "DFLASH_HOME": str(place / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=place, env=environment)
    outputs = [output for cell in nbformat.read(out, 4).cells for output in cell.get("outputs", [])] if out.is_file() else []
    return done, outputs


def given(**values):
    return [text for name, value in values.items() for text in ("-p", name, value)]


def printed(outputs, name="stdout"):
    return "".join(output.text for output in outputs if output.get("name") == name)


@pytest.fixture(scope="module")
def launched(place):
    return papermill(place, "out", *given(dataset="data", target="target", runs_dir="runs", run_name="mine", **SMALL))


def test_launch_writes_a_run_and_shows_it(place, launched):
    done, outputs = launched
    assert done.returncode == 0, done.stderr
    run = read_run(place / "runs" / "mine")
    assert run.status == "finished" and len(run) == 12 and (run.folder / "export" / "model.safetensors").is_file()
    text = printed(outputs)
    assert f"dataset    {place / 'data'}" in text and "tau" in text and str(run.folder / "export") in text
    assert printed(outputs, "stderr") == "" and "\r" not in text
    images = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(images) == 5
    for image in images:
        alt = image.metadata["image/png"]["alt"]
        assert len(alt) >= 40 and any(c.isdigit() for c in alt) and alt.split()[0] in text
    assert not any("widget" in kind for output in outputs for kind in output.get("data", {}))
    assert (place / "out.ipynb").stat().st_size < 2_000_000


def test_watch_shows_a_run_without_touching_it(place, launched):
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (place / "runs" / "mine").iterdir())
    done, outputs = papermill(place, "watched", *given(watch="runs/mine"))
    assert done.returncode == 0 and "only looking" in printed(outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 5
    assert sorted((path.name, path.stat().st_mtime_ns) for path in (place / "runs" / "mine").iterdir()) == before


def test_resume_continues_with_the_runs_own_configuration(place, tmp_path):
    config = tiny_config(place / "data", place / "target", tmp_path / "runs", run_name="stopped", epochs=1, time_limit=1e-6)
    assert not train(config).finished
    folder = tmp_path / "runs" / "stopped"
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), "time_limit": 0.0}))
    done, outputs = papermill(place, "resumed", *given(resume=folder))
    assert done.returncode == 0, done.stderr
    run = read_run(folder)
    assert run.status == "finished" and [event["kind"] for event in run.events].count("resume") == 1
    assert f"run folder {folder}" in printed(outputs)


@pytest.mark.parametrize(("arguments", "say"), [({"bucket": "auto"}, "did you mean 'buckets'"), ({"run_name": "mine"}, "-p resume")])
def test_a_mistake_is_one_clear_error(place, launched, arguments, say):
    runs = sorted(path.name for path in (place / "runs").iterdir())
    done, outputs = papermill(place, "wrong", *given(**{"dataset": "data", "target": "target", "runs_dir": "runs", **SMALL, **arguments}))
    assert done.returncode != 0 and say in done.stderr
    assert "held out at step" not in printed(outputs)
    assert sorted(path.name for path in (place / "runs").iterdir()) == runs
