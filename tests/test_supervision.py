"""Supervised tokens and sources of a dataset, from whichever columns it has."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_nb.data.supervision import read_supervision


def write(path, **columns):
    table = {"input_ids": [[1, 2, 3], [4, 5]], "loss_mask": [[0, 1, 1], [0, 0]]} | columns
    pq.write_table(pa.table({name: values for name, values in table.items() if values is not None}), path)
    return path


def test_masks_are_counted_when_there_is_no_column(tmp_path):
    found = read_supervision(write(tmp_path / "a.parquet"))
    np.testing.assert_array_equal(found.n_supervised, [2, 0])
    np.testing.assert_array_equal(found.lengths, [3, 2])
    assert found.sources is None


def test_columns_are_taken_as_they_are(tmp_path):
    found = read_supervision(write(tmp_path / "a.parquet", seq_len=[3, 2], n_supervised=[2, 0], source=["x", "y"]))
    np.testing.assert_array_equal(found.n_supervised, [2, 0])
    assert list(found.sources) == ["x", "y"]


def test_source_beside_counted_masks(tmp_path):
    assert list(read_supervision(write(tmp_path / "a.parquet", source=["x", "y"])).sources) == ["x", "y"]


@pytest.mark.parametrize("columns", [{"loss_mask": None}, {"loss_mask": None, "seq_len": [3, 2]}])
def test_lengths_alone_say_nothing(tmp_path, columns):
    assert read_supervision(write(tmp_path / "a.parquet", **columns)) is None
    assert read_supervision("reference") is None
