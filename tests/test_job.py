"""What a run will do: the plan's true length, and every mistake found before a model is loaded or a file written.

Run alone: python -m pytest tests/test_job.py
"""

import json
import math

import numpy as np
import pytest
from tiny_runs import save_target, tiny_config, write_dataset
from tiny_targets import MASK_TOKEN

from dflash_nb.pipeline import models
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.pipeline.train import train


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {"dataset": write_dataset(root / "data"), "target": save_target(root / "target", "llama")}


def job_of(made, tmp_path, **changes):
    return prepare_job(tiny_config(made["dataset"], made["target"], tmp_path, **changes))


@pytest.mark.parametrize("changes", [{}, {"accumulation": 4}, {"max_steps": 9}, {"max_steps": 30, "accumulation": 3, "epochs": 5}])
def test_steps_and_positions_follow_the_true_epochs(made, tmp_path, changes):
    job = job_of(made, tmp_path, **changes)
    accumulation, most = job.config.accumulation, job.config.max_steps or math.inf
    windows = [math.ceil(len(job.plan(epoch)) / accumulation) for epoch in range(job.config.epochs)]
    assert job.total_steps == min(sum(windows), most)
    planned = [(epoch, batch.index) for epoch, batch in job.planned_from(0)]
    first = [index for epoch, index in planned if epoch == 0]
    assert first == list(range(min(len(job.plan(0)), job.total_steps * accumulation)))
    for step in range(job.total_steps + 1):
        rest = [(epoch, batch.index) for epoch, batch in job.planned_from(step)]
        assert rest == planned[len(planned) - len(rest) :]
        if rest and step < job.total_steps:
            assert job.position(step) == rest[0]
    assert list(job.planned_from(job.total_steps)) == []
    tokens = [sum(job.plan(epoch).batch(index).real_tokens for epoch, index in planned)]
    assert job.tokens_by_step.sum() == tokens[0]
    assert len(job.tokens_by_step) == job.total_steps


def test_a_collated_batch_is_the_planned_one(made, tmp_path):
    job = job_of(made, tmp_path)
    epoch, planned = next(iter(job.planned_from(3)))
    batch = job.collate((epoch, planned))
    assert (batch.epoch, batch.index, batch.bucket, batch.padded_length) == (0, 3, planned.bucket, planned.padded_length)
    assert batch.sample_ids_B.tolist() == planned.sample_ids.tolist()
    assert batch.real_tokens == planned.real_tokens


def test_truncation_reaches_the_batches(made, tmp_path):
    job = job_of(made, tmp_path, max_length=20, too_long="truncate", buckets="auto")
    batches = [job.collate(planned) for planned in job.planned_from(0)]
    assert max(batch.padded_length for batch in batches) == job.longest == 20
    assert job.plans[0]["truncated"] > 0


def test_cuts_count_on_the_rows_that_the_slot_budget_leaves(made, tmp_path):
    config = {"anchors": 2, "block_size": 4, "slot_budget": 3 * 2 * 4}
    job = job_of(made, tmp_path, **config)
    assert max(row.batch_size for row in job.buckets.rows) <= 3
    assert max(len(batch.sample_ids) for _, batch in job.planned_from(0)) <= 3


def with_unsupervised(made, tmp_path):
    return {"dataset": write_dataset(tmp_path / "unsupervised", supervised=False)}


def with_mask_token(made, tmp_path):
    return {"mask_token": "5"}


def with_other_tokenizer(made, tmp_path):
    dataset = write_dataset(tmp_path / "other")
    about = json.loads((dataset / "dataset.json").read_text())
    about["tokenizer"] = {"name": "another", "fingerprint": "0123", "vocab_size": 97}
    (dataset / "dataset.json").write_text(json.dumps(about))
    target = save_target(tmp_path / "target", "llama")
    (target / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    return {"dataset": dataset, "target": target}


def with_small_vocabulary(made, tmp_path):
    target = save_target(tmp_path / "small", "llama", vocab_size=50)
    (target / "dflash.json").write_text('{"mask_token_id": 49}')
    return {"target": target}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "nowhere"}, "nowhere"),
        ({"target": "nowhere"}, "nowhere"),
        (with_unsupervised, "no supervised token: every loss_mask is 0"),
        (with_mask_token, "mask token"),
        (with_other_tokenizer, "was tokenised with another, whose vocabulary is not that of target"),
        (with_small_vocabulary, r"outside the target's vocabulary of 50"),
        ({"draft_layers": 7}, "different layers in order"),
        ({"target_layers": "3,9"}, r"\[9\] out of range"),
        ({"max_length": 20}, "samples longer than 20 tokens"),
        ({"buckets": "auto", "max_length": 1, "too_long": "truncate"}, "none of the 60 rows of an epoch has two supervised tokens"),
        ({"buckets": "auto", "max_length": 3, "too_long": "truncate"}, r"max_length 3, too_long truncate\), so there is nothing to draft"),
        ({"max_length": 30, "too_long": "truncate"}, "buckets: no sample is as long as 32, the longest has 30 tokens"),
        ({"topology": "2-2"}, "train one drafter; use 2-1"),
        ({"device": "cuda:7"}, "GPUs are visible"),
        ({"device": "gpu"}, "use auto, cpu, cuda"),
        ({"slot_budget": 5}, "slot_budget"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_loaded_or_written(made, tmp_path, monkeypatch, changes, message):
    def refuse(*_, **__):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(models, "load_targets", refuse)
    runs = tmp_path / "runs"
    changes = changes(made, tmp_path) if callable(changes) else changes
    values = {"dataset": made["dataset"], "target": made["target"], **changes}
    config = tiny_config(str(values.pop("dataset")), str(values.pop("target")), runs, **values)
    with pytest.raises((ValueError, OSError), match=message):
        train(config)
    assert not runs.exists()


def test_a_run_folder_that_holds_a_run_is_refused(made, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "mine" / "steps.jsonl").write_text('{"step":1}\n')
    with pytest.raises(ValueError, match="already holds a run"):
        train(tiny_config(made["dataset"], made["target"], tmp_path, run_name="mine"))


def test_resuming_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not a run folder"):
        train(TrainConfig(resume=str(tmp_path)))


def test_the_mask_token_of_the_tiny_target_is_not_in_its_data(made, tmp_path):
    job = job_of(made, tmp_path)
    assert job.drafter.mask_token_id == MASK_TOKEN
    assert all((job.dataset.row(i)[0] != MASK_TOKEN).all() for i in range(len(job.dataset)))
    assert np.all(job.dataset.n_supervised > 0)
