"""Run folders that something happened to: continued from what is still there, or refused. Nothing is left of a run that never began.

Run alone: python -m pytest tests/test_resume.py
"""

import json
import shutil

import pytest
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.pipeline.checkpoint import CheckpointError
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.runlog import RunError, read_run
from dflash_nb.pipeline.train import train


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {"dataset": write_dataset(root / "data"), "target": save_target(root / "target", "llama"), "runs": root / "runs"}


@pytest.fixture(scope="module")
def finished(made):
    changes = {"max_steps": 5, "checkpoint_every": 3, "eval_prompts": 1, "eval_tokens": 3}
    return train(tiny_config(made["dataset"], made["target"], made["runs"], **changes)).run_dir


@pytest.fixture
def run(finished, tmp_path):
    """A copy of a run of 5 steps with checkpoints at 3 and 5."""
    return shutil.copytree(finished, tmp_path / "run")


def losses(folder):
    return read_run(folder).steps["loss"].tolist()


def keep_lines(run, keep):
    path = run / "steps.jsonl"
    path.write_text("".join(line for number, line in enumerate(path.read_text().splitlines(keepends=True), 1) if number in keep))


@pytest.mark.parametrize("keep", [{1, 2, 3, 4}, {1, 2, 3, 5}])
def test_a_checkpoint_that_the_log_does_not_reach_is_passed_over(run, finished, capsys, keep):
    keep_lines(run, keep)
    train(TrainConfig(resume=str(run)))
    assert "passed over a broken checkpoint: step-5: steps" in capsys.readouterr().out
    assert losses(run) == losses(finished)


@pytest.mark.parametrize("keep", [set(), {1, 2}])
def test_a_log_that_reaches_no_checkpoint_is_refused_with_the_missing_steps(run, keep):
    keep_lines(run, keep)
    with pytest.raises(CheckpointError, match=rf"step-3: steps {len(keep) + 1} to 3 are missing in steps.jsonl"):
        train(TrainConfig(resume=str(run)))
    (run / "steps.jsonl").unlink()
    with pytest.raises(CheckpointError, match="steps 1 to 3 are missing"):
        train(TrainConfig(resume=str(run)))


def test_without_checkpoints_a_finished_run_is_refused_and_another_starts_again_aloud(run, finished, capsys):
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RunError, match="has finished, but its checkpoints are gone"):
        train(TrainConfig(resume=str(run)))
    assert len(losses(run)) == 5
    (run / "summary.json").unlink()
    train(TrainConfig(resume=str(run)))
    assert "starts again from step 0 and its 5 steps are dropped" in capsys.readouterr().out
    assert losses(run) == losses(finished)


def test_half_written_json_does_not_end_a_resumed_run(run):
    for name in ("summary", "plan", "buckets", "environment"):
        path = run / f"{name}.json"
        path.write_text(path.read_text()[:40])
    assert train(TrainConfig(resume=str(run))).finished
    assert read_run(run).plan["total_steps"] == 5


@pytest.mark.parametrize("mine", [False, True])
def test_nothing_is_left_of_a_run_whose_target_could_not_be_loaded(made, tmp_path, mine):
    target = shutil.copytree(made["target"], tmp_path / "target")
    weights = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").write_bytes(weights[:-100])
    if mine:  # papermill's output
        (tmp_path / "runs" / "name").mkdir(parents=True)
        (tmp_path / "runs" / "name" / "03_train.ipynb").write_text("{}")
    config = tiny_config(made["dataset"], target, tmp_path / "runs", run_name="name", max_steps=1, eval_prompts=1, eval_tokens=3)
    with pytest.raises(ValueError, match="cannot be loaded"):
        train(config)
    assert [path.name for path in (tmp_path / "runs").rglob("*")] == (["name", "03_train.ipynb"] if mine else [])
    (target / "model.safetensors").write_bytes(weights)
    assert train(config).finished


@pytest.mark.parametrize("text", ["[1]", '{"dataset": "sam', "3"])
def test_a_configuration_that_is_none_is_named(run, text):
    (run / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json .*Copy the run folder again"):
        TrainConfig(resume=str(run)).resumed()
    with pytest.raises(ValueError, match="is not a run folder"):
        TrainConfig(resume=str(run / "config.json")).resumed()
    assert json.loads((run / "buckets.json").read_text())


@pytest.mark.parametrize("name", ["a" * 300, "nul\0", "two\nlines", "ü" * 150])
def test_a_name_that_no_folder_can_have_is_refused(name):
    with pytest.raises(ValueError, match=r"run_name: .* needed: a folder name"):
        TrainConfig(run_name=name)


@pytest.mark.parametrize("name", ["dataset", "target"])
def test_an_empty_place_is_not_the_current_folder(name):
    with pytest.raises(ValueError, match=f"{name}: '' was given"):
        TrainConfig(**{name: " "})


def test_a_runs_dir_that_is_a_file_is_named(made, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunError, match="runs/name cannot be made: Not a directory; set runs_dir"):
        train(tiny_config(made["dataset"], made["target"], tmp_path / "runs", run_name="name"))
    with pytest.raises(RunError, match="cannot be made: Not a directory"):
        train(tiny_config(made["dataset"], made["target"], tmp_path / "runs"))
