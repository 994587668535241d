"""Lists as views on a mapped file equal the lists that were written."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.data.mapped import MappedLists, map_file
from dflash_nb.data.source import DatasetError

TYPES = [pa.list_(pa.bool_()), pa.list_(pa.uint8()), pa.large_list(pa.bool_()), pa.large_list(pa.int64())]


def write(path, table, chunk=7):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return path


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(0, 1), max_size=20), min_size=1, max_size=30),
    kind=st.sampled_from(TYPES),
    skipped=st.integers(0, 3),
    limit=st.integers(0, 25),
)
def test_rows_and_ranges_of_rows(tmp_path_factory, rows, kind, skipped, limit):
    path = tmp_path_factory.getbasetemp() / "mapped.arrow"
    column = pa.array([[1, 0, 1]] * skipped + rows, pa.list_(pa.int64())).cast(kind)[skipped:]
    batches = map_file(write(path, pa.table({"lists": column, "n": pa.array(range(len(rows)), pa.int16())})), ["lists"], ["n"])
    assert np.concatenate([batch.numbers["n"] for batch in batches]).tolist() == list(range(len(rows)))
    lists = [batch.lists["lists"] for batch in batches]
    assert [len(part) for part in lists] == [len(rows[i : i + 7]) for i in range(0, len(rows), 7)]
    found = [part.row(i, limit).tolist() for part in lists for i in range(len(part))]
    assert found == [row[:limit] for row in rows]
    assert np.concatenate([part.lengths for part in lists]).tolist() == [len(row) for row in rows]
    for part, expected in zip(lists, (rows[i : i + 7] for i in range(0, len(rows), 7)), strict=True):
        values, begins = part.rows(len(part) // 2, len(part))
        wanted = expected[len(part) // 2 :]
        assert values.tolist() == [v for row in wanted for v in row]
        assert begins.tolist() == [sum(len(row) for row in wanted[:i]) for i in range(len(wanted))]


def test_bits_that_begin_inside_a_byte():
    bits = np.packbits([0, 0, 0, 1, 0, 1, 1, 1, 0, 1], bitorder="little")
    lists = MappedLists(np.array([0, 2, 7]), bits, bits=True, bit_offset=3)
    assert [lists.row(0).tolist(), lists.row(1).tolist()] == [[1, 0], [1, 1, 1, 0, 1]]


def test_views_copy_nothing(tmp_path):
    path = write(tmp_path / "big.arrow", pa.table({"lists": pa.array([[1] * 10_000] * 100, pa.list_(pa.int32()))}), chunk=10)
    before = pa.total_allocated_bytes()
    batches = map_file(path, ["lists"], [])
    assert pa.total_allocated_bytes() == before
    assert not any(batch.lists["lists"].values.flags.owndata or batch.lists["lists"].values.flags.writeable for batch in batches)


def test_the_row_of_a_null_counts_over_all_batches(tmp_path):
    rows = [[1]] * 20 + [None] + [[1]] * 5
    with pytest.raises(DatasetError, match=r"nulls\.arrow: row 20 of column 'lists' is null"):
        map_file(write(tmp_path / "nulls.arrow", pa.table({"lists": rows})), ["lists"], [])
