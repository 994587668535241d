"""Calibrating on the sample: real batches of many shapes in a few seconds, and a model that says where it belongs."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dflash_nb.pipeline.calibrate import calibrate, chosen_shapes, main
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.planner.cost import CostError

SMALL = TrainConfig(token_budget=512, max_batch=8, too_long="drop", device="cpu", anchors=4, draft_layers=1)


def test_shapes_come_from_the_job():
    shapes = chosen_shapes(prepare_job(SMALL))
    rows, length = shapes.T
    assert len(shapes) >= 8 and (rows * length <= 512).all() and rows.max() == 8 and length.max() > 4 * length.min()


def test_a_short_calibration_gives_a_measured_model():
    threads = torch.get_num_threads()
    cost, measured = calibrate(SMALL, seconds=0.5)
    assert torch.get_num_threads() == threads
    assert len(measured) >= 20 and len(np.unique(measured.padded_length)) >= 4
    assert cost.source.startswith("measured on ") and "calibration" in cost.source
    assert cost.belongs_to["target"].startswith("sample (")
    assert cost.target_seconds(8, 64) > 0 and cost.batch_seconds(8, 64, "drafter") > 0 and cost.step > 0
    assert set(cost.errors) == {"fetch", "target", "transfer", "drafter"}


def test_the_command_ends_with_a_sentence_before_it_measures(tmp_path):
    good = ["--out", str(tmp_path / "cost.json")]
    for arguments, say in (
        ([*good, "--seconds", "nan"], "error: seconds is nan"),
        ([*good, "--seconds", "inf"], "error: seconds is inf"),
        ([*good, "--dataset", str(tmp_path / "none")], "error: .*none"),
        ([*good, "--anchors", "0"], "error: anchors: 0 was given"),
        (["--out", str(tmp_path)], "error: --out: .* is a folder"),
        (["--out", str(tmp_path / "no" / "cost.json")], "error: --out: .* is in no folder"),
    ):
        with pytest.raises(SystemExit, match=say):
            main(arguments)
    assert list(tmp_path.iterdir()) == []


def test_batches_of_one_shape_are_refused_before_loading(monkeypatch):
    monkeypatch.setattr("dflash_nb.pipeline.calibrate._lengths", lambda job: np.full(len(job.dataset), 100))
    monkeypatch.setattr("dflash_nb.pipeline.calibrate.load_models", lambda *_: pytest.fail("loaded"))
    with pytest.raises(CostError, match="sample with max_batch 1 has batches of one shape only"):
        calibrate(replace(SMALL, max_batch=1), seconds=0.5)
