"""A real dataset, a real target and a configuration so small that a training run takes about a second."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from tiny_targets import MASK_TOKEN, save_target

from dflash_nb.pipeline.config import TrainConfig

__all__ = ["save_target", "tiny_config", "write_dataset"]

torch.set_num_threads(1)  # on tensors this small a second thread only waits


def write_dataset(folder: Path, train: int = 60, heldout: int = 12, seed: int = 0, supervised: bool = True) -> Path:
    """A prepared dataset of short rows that repeat a pattern, so that there is something to learn. A few rows are all prompt."""
    rng = np.random.default_rng(seed)
    for split, rows in (("train", train), ("heldout", heldout)):
        ids, masks = [], []
        for _ in range(rows):
            length = int(rng.integers(12, 60))
            prompt = int(rng.integers(3, 9))
            pattern = rng.integers(2, MASK_TOKEN, 3)
            ids.append(np.resize(pattern, length).astype(np.int32))
            masks.append((np.arange(length) >= prompt).astype(np.uint8) * supervised)
        table = pa.table(
            {
                "input_ids": pa.array(ids, pa.list_(pa.int32())),
                "loss_mask": pa.array(masks, pa.list_(pa.uint8())),
                "seq_len": pa.array([len(row) for row in ids], pa.int32()),
                "n_supervised": pa.array([int(mask.sum()) for mask in masks], pa.int32()),
            }
        )
        (folder / split).mkdir(parents=True)
        with pa.ipc.new_file(folder / split / "data-00000.arrow", table.schema) as writer:
            writer.write_table(table)
    about = {"format": 1, "source": "tiny", "rows": {"train": train, "heldout": heldout}}
    (folder / "dataset.json").write_text(json.dumps(about))
    return folder


def tiny_config(dataset: Path, target: Path, runs: Path, **changes: object) -> TrainConfig:
    """Two epochs of about 16 batches each; two evaluations of four rows and two prompts."""
    values = {
        "dataset": str(dataset),
        "target": str(target),
        "runs_dir": str(runs),
        "buckets": "32",
        "token_budget": 256,
        "max_batch": 8,
        "draft_layers": 1,
        "block_size": 4,
        "anchors": 6,
        "epochs": 2,
        "max_steps": 0,
        "learning_rate": 3e-3,
        "eval_rows": 4,
        "eval_prompts": 2,
        "eval_tokens": 6,
        "log_every": 60.0,
        "checkpoint_every": 5,
        "device": "cpu",
        "threads": 1,
    }
    return TrainConfig(**{**values, **changes})
