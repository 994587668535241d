"""A prepared dataset folder as it grows: one Arrow file a split, written a record batch at a time, and counts of what went in."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from dflash_nb.home import exists, user_path

SCHEMA = pa.schema(
    {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8()), "seq_len": pa.int32(), "n_supervised": pa.int32()}
)


class DatasetWriter:
    """Splits of a dataset folder as Arrow files, and counts of what went into each. A context manager: leaving it closes the files."""

    def __init__(self, folder: Path, with_source: bool = False):
        self.folder = folder
        self.schema = SCHEMA.append(pa.field("source", pa.string())) if with_source else SCHEMA
        self.files: dict[str, pa.ipc.RecordBatchFileWriter] = {}
        self.counts = {"train": Counter(), "heldout": Counter()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    def write(self, split: str, rows: Sequence[tuple[np.ndarray, np.ndarray]], sources: Sequence[str] = ()) -> None:
        """Append rows, each token ids int32[t] and loss mask uint8[t]; ``sources`` names where each came from, if the folder keeps that."""
        if not rows:
            return
        if split not in self.files:
            (self.folder / split).mkdir(parents=True)
            self.files[split] = pa.ipc.new_file(self.folder / split / "data-00000.arrow", self.schema)
        lengths = np.array([len(ids) for ids, _ in rows], np.int32)
        supervised = np.array([mask.sum() for _, mask in rows], np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        columns = {
            "input_ids": pa.ListArray.from_arrays(offsets, np.concatenate([ids for ids, _ in rows])),
            "loss_mask": pa.ListArray.from_arrays(offsets, np.concatenate([mask for _, mask in rows])),
            "seq_len": lengths,
            "n_supervised": supervised,
        }
        if "source" in self.schema.names:
            columns["source"] = list(sources)
        self.files[split].write_batch(pa.record_batch(columns, schema=self.schema))
        self.counts[split].update(
            rows=len(rows), tokens=int(lengths.sum()), supervised=int(supervised.sum()), unsupervised=int((supervised == 0).sum())
        )

    @property
    def description(self) -> dict[str, Any]:
        """What ``dataset.json`` says about the rows of each split."""
        names = {"rows": "rows", "tokens": "tokens", "supervised_tokens": "supervised", "unsupervised_rows": "unsupervised"}
        return {name: {split: count[key] for split, count in self.counts.items()} for name, key in names.items()}


def free_folder(out: str | os.PathLike[str], overwrite: bool) -> Path:
    """The path of a dataset folder that may be written. Raises FileExistsError where something else stands there."""
    folder = user_path(out)
    if blocked := [parent for parent in folder.parents if exists(parent) and not parent.is_dir()]:
        raise FileExistsError(f"{blocked[0]} is a file, so {folder} cannot be made below it. Name another folder.")
    if exists(folder):
        if not overwrite:
            raise FileExistsError(f"{folder} exists. Name another folder, or replace it with --overwrite.")
        if not (folder / "dataset.json").is_file():
            raise FileExistsError(f"{folder} exists and is no prepared dataset; it is not overwritten. Name another folder.")
    return folder
