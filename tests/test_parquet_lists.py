"""Lists counted by repetition levels must equal what Arrow decodes, for every way that Arrow writes them."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.data import parquet_lists
from dflash_nb.data.lengths import read_lengths
from dflash_nb.data.parquet_lists import parquet_list_lengths

INT32 = pa.int32()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parquet")


def lists(lengths, value_type=INT32, vocabulary=500, seed=0, make=pa.list_):
    values = np.random.default_rng(seed).integers(0, vocabulary, sum(lengths))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64 if make is pa.large_list else np.int32)
    array = pa.LargeListArray if make is pa.large_list else pa.ListArray
    return array.from_arrays(offsets, pa.array(values).cast(value_type), type=make(value_type))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 700)), min_size=1, max_size=60),
    rows_a_group=st.integers(1, 40),
    page=st.sampled_from(["1.0", "2.0"]),
    page_bytes=st.sampled_from([64, 1000, 1 << 20]),
    compression=st.sampled_from(["none", "snappy", "zstd", "gzip", "lz4"]),
    dictionary=st.booleans(),
    element_nullable=st.booleans(),
    list_nullable=st.booleans(),
    value_type=st.sampled_from([pa.int32(), pa.int64(), pa.uint16()]),
    seed=st.integers(0, 5),
    front=st.sampled_from([9, 200, 1 << 13]),
)
def test_equals_decoding_for_every_layout(
    folder, lengths, rows_a_group, page, page_bytes, compression, dictionary, element_nullable, list_nullable, value_type, seed, front
):
    element = pa.field("element", value_type, nullable=element_nullable)
    column = lists(lengths, value_type, seed=seed).cast(pa.list_(element))
    schema = pa.schema([pa.field("other", pa.int8()), pa.field("input_ids", column.type, nullable=list_nullable)])
    table = pa.table([pa.array([1] * len(lengths), pa.int8()), column], schema=schema)
    path = folder / "lists.parquet"
    pq.write_table(
        table,
        path,
        row_group_size=rows_a_group,
        data_page_version=page,
        data_page_size=page_bytes,
        write_batch_size=16,
        compression=compression,
        use_dictionary=dictionary,
    )
    usual, parquet_lists.FRONT_BYTES = parquet_lists.FRONT_BYTES, front
    try:
        counted = parquet_list_lengths(path, "input_ids")
    finally:
        parquet_lists.FRONT_BYTES = usual
    if compression == "lz4":
        assert counted is None
    else:
        assert counted.dtype == np.int64
        assert counted.tolist() == lengths
    assert read_lengths(path).tolist() == lengths


@pytest.mark.parametrize(("repeats", "wanted", "least"), [(0, 70, 0), (1, 3000, 0), (40, 5, 0), (40, 3000, 3000), (1000, 3000, 3000)])
def test_the_front_of_a_snappy_stream_is_what_the_whole_begins_with(repeats, wanted, least):
    rng = np.random.default_rng(repeats)
    parts = [rng.integers(0, 256, size, dtype=np.uint8).tobytes() for size in (30, 61, 300, 70_000)]
    whole = b"".join(parts[:3] + [part * repeats for part in (parts[0], parts[2], b"ab")] + parts[3:])
    stream = np.frombuffer(pa.Codec("snappy").compress(whole), np.uint8)
    front = parquet_lists._snappy_front(stream[:wanted]).to_pybytes()
    assert whole.startswith(front) and len(front) >= least
    assert parquet_lists._snappy_front(stream).to_pybytes() == whole


def test_rows_that_span_pages_are_counted_once(tmp_path):
    lengths = [5, 300_000, 1, 200_000]
    path = tmp_path / "long.parquet"
    pq.write_table(pa.table({"input_ids": lists(lengths, vocabulary=100_000)}), path, data_page_size=10_000)
    assert parquet_list_lengths(path, "input_ids").tolist() == lengths


@pytest.mark.parametrize("rows", [[[1, 2], [], [3]], [[1, 2], None, [3]], [[1, None], [2]], [[]], [None]])
@pytest.mark.parametrize("page", ["1.0", "2.0"])
def test_null_and_empty_lists_are_left_to_the_decoder(tmp_path, rows, page):
    path = tmp_path / "holes.parquet"
    pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), path, data_page_version=page)
    assert parquet_list_lengths(path, "input_ids") is None


def test_deeper_nesting_and_plain_columns_are_refused(tmp_path):
    path = tmp_path / "nested.parquet"
    pairs = pa.array([[{"a": 1, "b": 2}]], pa.list_(pa.struct([("a", pa.int32()), ("b", pa.int32())])))
    pq.write_table(pa.table({"deep": pa.array([[[1]]]), "flat": [1], "pairs": pairs}), path)
    assert [parquet_list_lengths(path, name) for name in ("deep", "flat", "pairs", "absent")] == [None] * 4


@pytest.mark.parametrize("make", [pa.large_list, pa.list_])
def test_thousands_of_rows_in_one_row_group(tmp_path, make):
    lengths = np.random.default_rng(1).geometric(0.01, 20_000)
    column = lists(lengths, make=make, vocabulary=50_000)
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "many.parquet")
    assert (parquet_list_lengths(tmp_path / "many.parquet", "input_ids") == pc.list_value_length(column).to_numpy()).all()


def test_fixed_size_lists(tmp_path):
    column = pa.array([[1, 2, 3]] * 50, pa.list_(pa.int32(), 3))
    pq.write_table(pa.table({"input_ids": column}), tmp_path / "fixed.parquet")
    assert parquet_list_lengths(tmp_path / "fixed.parquet", "input_ids").tolist() == [3] * 50
