"""The parts of the strategies benchmark that decide what it says: the variance of the step loss, and the model's seconds of a stretch."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import strategies
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.model.anchors import draw_anchors
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.planner.cost import CostModel


def a_run(steps: int, effect: np.ndarray, noise: float, balanced: bool) -> SimpleNamespace:
    """Steps of four batches on a falling trend; balanced steps have a batch of each of the four buckets."""
    rng = np.random.default_rng(0)
    bucket = np.tile(np.arange(4), steps) if balanced else rng.integers(0, 4, 4 * steps)
    at = np.repeat(np.arange(steps), 4)
    loss = 6 - 0.01 * at + effect[bucket] + noise * rng.standard_normal(len(at))
    batches = {"at": at, "bucket": bucket, "weight": np.ones(len(at)), "loss": loss}

    class Fake(SimpleNamespace):
        def __len__(self):
            return steps

    return Fake(steps={"loss": loss.reshape(steps, 4).mean(axis=1)}, batches=batches)


def test_variance_is_split_into_buckets_and_rest():
    effect, noise = np.array([-1.0, -0.2, 0.2, 1.0]), 0.3
    uniform = strategies.loss_variance(a_run(2000, effect, noise, balanced=False))
    assert uniform["explained"] == pytest.approx(effect.var() / 4, rel=0.1)
    assert uniform["unexplained"] == pytest.approx(noise**2 / 4, rel=0.1)
    balanced = strategies.loss_variance(a_run(2000, effect, noise, balanced=True))
    assert balanced["explained"] < 1e-4 and balanced["variance"] == pytest.approx(noise**2 / 4, rel=0.1)


def test_a_stretchs_seconds_leave_out_the_steps_that_fill_the_window(tmp_path):
    job = prepare_job(tiny_config(write_dataset(tmp_path / "data"), save_target(tmp_path / "target", "llama"), tmp_path))
    stretch = strategies.Stretch(job)
    stretch.cost = CostModel(target=(1, 0, 0, 0, 0), transfer=(0, 0), drafter=(0.5, 0, 0, 0, 0), target_workers=1)
    batches = np.arange(6)
    assert stretch.seconds(batches) == pytest.approx(6.5)
    assert stretch.seconds(batches, skip=3) == pytest.approx(3.0)
    for row in range(20):
        mask = job.dataset.row(row)[1]
        drawn = draw_anchors(mask, [len(mask)], [row], job.config.anchors, job.config.block_size, 0, 0)
        assert stretch.slots[row] == len(drawn) * job.config.block_size
    assert stretch.epoch() == pytest.approx(stretch.plan.real_tokens.sum() / (len(stretch.plan) + 0.5))
