"""Calibrating on the sample: real batches of many shapes in a few seconds, and a model that says where it belongs."""

import numpy as np
import torch

from dflash_nb.pipeline.calibrate import calibrate, chosen_shapes
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import prepare_job

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
