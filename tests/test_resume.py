"""Run folders that something happened to: continued from what is still there, or refused. Nothing is left of a run that never began.

Run alone: python -m pytest tests/test_resume.py
"""

import hashlib
import json
import shutil

import pytest
import torch
from tiny_runs import save_target, tiny_config, write_dataset
from tiny_targets import MASK_TOKEN

from dflash_nb.pipeline.checkpoint import CheckpointError
from dflash_nb.pipeline.config import HARMLESS, PLACES, TrainConfig
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


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(run, match):
    """The run is refused with ``match``, and nothing in its folder is touched."""
    before = contents(run)
    with pytest.raises((ValueError, RuntimeError), match=match):
        train(TrainConfig(resume=str(run)))
    after = contents(run)
    assert {path: after[path] for path in before} == before and {path.name for path in after.keys() - before.keys()} <= {".lock"}


def change(file, **values):
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def agree(checkpoint):
    """Write the manifest again."""
    names = ("weights.safetensors", "optimizer.pt", "state.json")
    facts = {name: (checkpoint / name).read_bytes() for name in names}
    manifest = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in facts.items()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


OTHER = {
    "heldout_rows": 5, "strategy": "random", "order": "uniform", "token_budget": 300, "max_batch": 4, "pad_multiple": 2, "max_length": 100,
    "too_long": "drop", "slot_budget": 10_000, "draft_layers": 2, "block_size": 5, "target_layers": "1,2", "mask_token": str(MASK_TOKEN),
    "sliding_window": 8, "objective": "kl", "gamma": 3.0, "anchors": 5, "epochs": 3, "max_steps": 4, "accumulation": 2,
    "optimizer": "adamw", "learning_rate": 1e-3, "warmup": 0.5, "decay": "linear", "min_lr_ratio": 0.5, "weight_decay": 0.1, "beta1": 0.8,
    "beta2": 0.8, "grad_clip": 3.0, "seed": 1, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize("name", TrainConfig().kept)
def test_a_setting_changed_by_hand_is_refused_by_name(run, name):
    change(run / "config.json", **{name: OTHER[name]})
    refused(run, rf"config\.json has changed since the checkpoint was written, it holds {name} '?{OTHER[name]}'?, not")


def test_every_setting_is_kept_or_harmless_or_a_place():
    assert TrainConfig().kept.keys() == OTHER.keys() and not HARMLESS & PLACES


@pytest.mark.parametrize("how", ["weights", "config"])
def test_another_target_at_the_same_path_is_refused_by_name(run, made, tmp_path, how):
    target = shutil.copytree(made["target"], tmp_path / "target")
    change(run / "config.json", target=str(target))
    if how == "weights":
        weights = bytearray((target / "model.safetensors").read_bytes())
        weights[-10] ^= 1
        (target / "model.safetensors").write_bytes(weights)
    else:
        change(target / "config.json", rms_norm_eps=1e-3)
    refused(run, rf"target .* in {target} has changed since the checkpoint was written: (model\.safetensors|config\.json)\. Put the old")
    shutil.copytree(made["target"], target, dirs_exist_ok=True)
    assert train(TrainConfig(resume=str(run))).finished  # the same one at another path


def test_a_checkpoint_of_an_earlier_version_is_continued_with_a_warning(run):
    for saved in (run / "checkpoints").iterdir():
        state = json.loads((saved / "state.json").read_text())
        (saved / "state.json").write_text(json.dumps({name: state[name] for name in ("step", "plan", "schedule", "data", "in_flight")}))
        agree(saved)
    assert train(TrainConfig(resume=str(run))).finished
    assert any("does not tell whether its target and settings" in event["text"] for event in read_run(run).events_of("warning"))


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.pt"])
@pytest.mark.parametrize("content", [b"", b"garbage" * 10, b"\0" * 100])
def test_a_checkpoint_that_agrees_with_its_manifest_and_cannot_be_loaded_is_named(run, file, content):
    for saved in (run / "checkpoints").iterdir():
        (saved / file).write_bytes(content)
        agree(saved)
    refused(run, rf"step-5: {file} cannot be loaded")


RANDOM = {"cpu": torch.get_rng_state(), "cuda": []}


@pytest.mark.parametrize(
    ("content", "say"),
    [
        ({}, "lacks moments"),
        ([1], r"holds \[1\]"),
        ({"moments": {}}, "lacks random"),
        ({"moments": {}, "random": RANDOM}, "does not hold what optimizer muon keeps of"),
        ({"moments": {"a": 1}, "random": RANDOM}, "holds 1 as moments.a"),
        ({"moments": {"a": {"step": 1}}, "random": RANDOM}, "holds 1 as moments.a.step"),
        ({"moments": {}, "random": {"cpu": torch.zeros(3), "cuda": []}}, "random.cpu"),
    ],
)
def test_moments_that_are_none_are_named(run, content, say):
    for saved in (run / "checkpoints").iterdir():
        torch.save(content, saved / "optimizer.pt")
        agree(saved)
    refused(run, rf"step-5: optimizer\.pt .*{say}")


def test_moments_of_another_optimizer_are_refused_where_the_checkpoint_does_not_tell_its_settings(run):
    change(run / "config.json", optimizer="adamw")
    for saved in (run / "checkpoints").iterdir():
        change(saved / "state.json", settings=None)
        agree(saved)
    refused(run, r"step-5: optimizer\.pt does not hold what optimizer adamw keeps of .* and \d+ more")


def test_a_newest_checkpoint_that_cannot_be_loaded_gives_way_to_the_one_before(run, finished, capsys):
    (run / "checkpoints" / "step-5" / "optimizer.pt").write_bytes(b"")
    agree(run / "checkpoints" / "step-5")
    train(TrainConfig(resume=str(run)))
    assert "passed over a broken checkpoint: step-5: optimizer.pt cannot be loaded" in capsys.readouterr().out
    assert losses(run) == losses(finished)


@pytest.mark.parametrize("what", ["summary.advise", "train.summarize"])
def test_an_error_in_summing_up_does_not_take_the_end_from_a_finished_run(run, monkeypatch, what):
    def fails(*_):
        raise TypeError("unsupported operand")

    monkeypatch.setattr(f"dflash_nb.pipeline.{what}", fails)
    summary = train(TrainConfig(resume=str(run)))
    assert summary.finished and summary.steps == summary.total_steps == 5 and "TypeError" in f"{summary.text()}{read_run(run).events}"
    assert (read_run(run).status, read_run(run).summary["export"]) == ("finished", str(run / "export"))
    assert (summary.last_loss is None) == (what == "train.summarize")
