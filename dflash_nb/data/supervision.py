"""How much of each sample is trained on, and where the samples come from: three columns, no tokens.

Uses the ``n_supervised`` and ``source`` columns that prepared datasets carry; without ``n_supervised`` the loss masks are counted,
at about 1 GB of masks a second. Lengths alone (a histogram, a column) say nothing here, and ``None`` says so.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.data.lengths import as_int64, read_lengths
from dflash_nb.data.source import common_schema, find_source, read_batches


@dataclass(frozen=True, eq=False)
class Supervision:
    """Of each sample: ``lengths`` int64[n] in tokens, ``n_supervised`` int64[n] in tokens, ``sources`` str[n] or None."""

    lengths: np.ndarray
    n_supervised: np.ndarray
    sources: np.ndarray | None


def read_supervision(source: str | os.PathLike[str]) -> Supervision | None:
    """Supervised tokens and source of every training sample, or None where the source holds lengths only.

    Raises:
        DatasetError: the columns are there but cannot be used.
        FileNotFoundError: nothing is there.
    """
    if str(source) == "reference":
        return None
    files = find_source(source).files
    names = common_schema(files, ["n_supervised", "source", "loss_mask"]).names
    if "n_supervised" in names and "seq_len" in names:
        lengths = read_lengths(source)
        n_supervised = np.concatenate([as_int64(part) for part in _column(files, "n_supervised")])
    elif "loss_mask" in names and "input_ids" in names:
        dataset = TokenDataset.open(source)
        lengths, n_supervised = dataset.lengths, dataset.n_supervised
    else:
        return None
    sources = None
    if "source" in names:
        sources = np.concatenate([part.to_numpy(zero_copy_only=False) for part in _column(files, "source")])
    return Supervision(lengths, n_supervised, sources)


def _column(files: Sequence[Path], name: str) -> list[pa.Array]:
    return [batch.column(0) for path in files for batch in read_batches(path, [name])]
