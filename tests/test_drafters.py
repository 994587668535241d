"""Several drafters in real processes make the steps of one.

Run alone: python -m pytest tests/test_drafters.py
"""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny_runs import save_target, tiny_config, write_dataset

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'dflash-nb[ray]'")
import ray_clusters
from ray_clusters import actors, at_steps

from dflash_nb.pipeline.checkpoint import OPTIMIZER
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.drafters import Drafters
from dflash_nb.pipeline.job import Job, prepare_job
from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.train import train

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {"dataset": write_dataset(root / "data"), "target": save_target(root / "target", "hybrid")}


@pytest.fixture
def some_without_anchors(monkeypatch):
    """Every third batch has nothing to learn, so that a drafter often has no anchor in a step."""
    collate = Job.collate

    def emptied(self, planned):
        batch = collate(self, planned)
        return batch if batch.index % 3 else replace(batch, loss_mask_BT=np.zeros_like(batch.loss_mask_BT))

    monkeypatch.setattr(Job, "collate", emptied)


def lines(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def first_moments(folder):
    moments = torch.load(folder / "checkpoints" / "step-1" / OPTIMIZER, weights_only=True)["moments"]
    return {name: state["exp_avg"] for name, state in moments.items()}


def settings(made, runs, **changes):
    values = {"accumulation": 2, "optimizer": "adamw", "checkpoint_every": 1, "keep_checkpoints": 99, "q_hs_mb": 8}
    return tiny_config(made["dataset"], made["target"], runs, **{**values, **changes})


@pytest.mark.slow
def test_two_drafters_make_the_steps_of_one_and_one_goes_on_where_two_stopped(made, cluster, tmp_path, monkeypatch, some_without_anchors):
    one = train(settings(made, tmp_path / "one"))
    with monkeypatch.context() as patch:
        at_steps(patch, {8: lambda: signal.raise_signal(signal.SIGINT)})
        with pytest.raises(KeyboardInterrupt):
            train(settings(made, tmp_path / "two", engine="ray", ray_address=cluster.address, topology="1-2"))
    assert not dist.is_initialized()
    (folder,) = (tmp_path / "two").iterdir()
    assert len(lines(folder)) == 8
    ours, theirs = first_moments(folder), first_moments(one.run_dir)
    for name, moment in theirs.items():  # of a first step: the gradient times 1 - beta1
        assert torch.allclose(ours[name], moment, atol=1e-5 * moment.abs().max().item(), rtol=1e-5)
    assert any(batch["weight"] == 0 for line in lines(folder) for batch in line["batches"])
    assert any("drafter-1 is up on node" in event["text"] for event in read_run(folder).events_of("worker"))

    with pytest.raises(ValueError, match="1-3: the 3 drafters share the batches of a step, but accumulation 2 is not a multiple of 3"):
        train(TrainConfig(resume=str(folder), topology="1-3"))
    summary = train(TrainConfig(resume=str(folder), topology="2-1"))
    assert summary.finished
    for ours, theirs in zip(lines(folder), lines(one.run_dir), strict=True):
        assert sorted(batch["index"] for batch in ours["batches"]) == sorted(batch["index"] for batch in theirs["batches"])
        assert ours["weight"] == pytest.approx(theirs["weight"])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-2)
        assert (ours["loss"] or 0.0) == pytest.approx(theirs["loss"] or 0.0, rel=1e-3)


@pytest.mark.slow
def test_a_lost_drafter_ends_the_run_with_a_checkpoint_and_a_sentence(made, cluster, tmp_path, monkeypatch):
    at_steps(monkeypatch, {3: lambda: [process.kill() for process in actors("Follower")]})
    with pytest.raises(RuntimeError, match="a drafter is lost"):
        train(settings(made, tmp_path, engine="ray", ray_address=cluster.address, topology="1-2"))
    (folder,) = tmp_path.iterdir()
    run = read_run(folder)
    assert run.status == "failed"
    assert "a drafter is lost" in run.summary["error"]
    assert run.summary["checkpoint"].endswith("step-3")
    assert not dist.is_initialized()


@ray.remote(num_cpus=4)
class Blocker:
    """Has all of a node's CPUs, so that the next actor starts on another one."""

    def is_there(self):
        return True


@pytest.mark.slow
def test_features_that_are_lost_on_the_way_are_computed_again(made, cluster, tmp_path, monkeypatch):
    """Their node dies before the other drafter, on another node, has fetched them; every sample counts once all the same."""
    calm = train(settings(made, tmp_path / "calm", max_steps=5))
    changes = {"engine": "ray", "ray_address": cluster.address, "topology": "1-2", "max_steps": 5, "retries": 4}
    open_drafters, hand_out, lost = Drafters.__init__, Drafters._hand_out, []
    blocker = Blocker.remote()
    assert ray.get(blocker.is_there.remote(), timeout=60)

    def open_on_the_first_node(self, *arguments):
        ray.kill(blocker)
        open_drafters(self, *arguments)

    def hand_out_what_is_gone(self, rank, ready):
        if ready.batch.index in (batch["index"] for batch in calm_lines[2]["batches"]) and not lost:
            ray.wait([ready.features.reference], fetch_local=False)
            cluster.remove_node(node, allow_graceful=False)
            lost.append(ready.batch.index)
        return hand_out(self, rank, ready)

    calm_lines = lines(calm.run_dir)
    monkeypatch.setattr(Drafters, "__init__", open_on_the_first_node)
    monkeypatch.setattr(Drafters, "_hand_out", hand_out_what_is_gone)
    with ray_clusters.second_node(cluster, cpus=1) as node:
        summary = train(settings(made, tmp_path / "lost", **changes))
    retries = read_run(summary.run_dir).events_of("retry")
    assert any(event["batch"] == lost[0] and event["error"].startswith("drafter-1: the features were lost") for event in retries)
    for ours, theirs in zip(lines(summary.run_dir), calm_lines, strict=True):
        assert sorted(batch["sample_ids"] for batch in ours["batches"]) == sorted(batch["sample_ids"] for batch in theirs["batches"])
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


def test_drafters_share_each_step_in_batches_of_like_size(made, tmp_path):
    alone = prepare_job(settings(made, tmp_path, accumulation=4, max_batch=4))
    shared = prepare_job(settings(made, tmp_path, accumulation=4, max_batch=4, engine="ray", topology="1-2"))
    assert shared.schedule == alone.schedule
    assert shared.fingerprint == alone.fingerprint
    ours, theirs = ([(epoch, batch.index) for epoch, batch in job.planned_from(0)] for job in (shared, alone))
    start = 0
    for epoch, batches in enumerate(plan["batches"] for plan in alone.plans):
        for first in range(start, start + batches, 4):
            step = slice(first, min(first + 4, start + batches))
            assert sorted(ours[step]) == theirs[step]
            assert [shared.drafter_of(*each) for each in ours[step]] == [0, 1, 0, 1][: len(ours[step])]
        start += batches
        sizes = shared.plan(epoch).padded_tokens.tolist()

        def apart(order, sizes=sizes):
            return sum(abs(sizes[a] - sizes[b]) for (_, a), (_, b) in zip(order[::2], order[1::2], strict=False))

    assert apart(ours) < apart(theirs)


def test_drafters_that_cannot_share_a_step_are_refused(made, tmp_path):
    with pytest.raises(ValueError, match="1-3: the 3 drafters share the batches of a step, but accumulation 4 is not"):
        prepare_job(settings(made, tmp_path, accumulation=4, engine="ray", topology="1-3"))
    few = {"max_batch": 60, "token_budget": 600, "buckets": "auto:1"}
    with pytest.raises(ValueError, match=r"1-9: an epoch has \d batches, too few for 9 drafters; use at most \d, more data, or smaller"):
        prepare_job(settings(made, tmp_path, accumulation=9, engine="ray", topology="1-9", **few))
    with pytest.raises(ValueError, match="probe: the largest batches are tried with one drafter"):
        prepare_job(settings(made, tmp_path, engine="ray", topology="1-2", probe=True))
