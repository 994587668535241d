"""Lengths of any source, and the histogram of them."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_nb.data.lengths import LengthError, LengthHistogram, read_histogram, read_lengths
from dflash_nb.data.source import DatasetError

ROWS = [[5, 6, 7], [8], [9, 10]]
FORMATS = ("arrow file", "arrow stream", "parquet", "feather")


def write(path, table, kind="arrow file"):
    if kind == "parquet":
        pq.write_table(table, path)
    elif kind == "feather":
        feather.write_feather(table, path)
    else:
        with (pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("width", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_any_integer_width_becomes_int64(tmp_path, kind, width):
    column = pa.array([1, 127, 3], pa.type_for_alias(width))
    lengths = read_lengths(write(tmp_path / "lengths.data", pa.table({"text": ["a", "b", "c"], "seq_len": column}), kind))
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [1, 127, 3]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("list_type", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())])
def test_without_the_column_lengths_come_from_offsets(tmp_path, kind, list_type):
    table = pa.table({"input_ids": pa.array(ROWS, list_type)})
    assert read_lengths(write(tmp_path / "rows.data", table, kind)).tolist() == [3, 1, 2]


@pytest.mark.parametrize("kind", FORMATS)
def test_fixed_size_and_sliced_and_chunked_columns(tmp_path, kind):
    fixed = pa.table({"input_ids": pa.array([[1, 2]] * 3, pa.list_(pa.int32(), 2))})
    assert read_lengths(write(tmp_path / "fixed.data", fixed, kind)).tolist() == [2, 2, 2]
    sliced = pa.table({"input_ids": pa.array(ROWS * 3), "seq_len": pa.array([3, 1, 2] * 3, pa.int16())}).slice(2, 5)
    assert read_lengths(write(tmp_path / "sliced.data", sliced, kind)).tolist() == [2, 3, 1, 2, 3]
    assert read_lengths(write(tmp_path / "bare.data", sliced.drop_columns("seq_len"), kind)).tolist() == [2, 3, 1, 2, 3]


def test_shards_of_a_folder_follow_each_other(tmp_path):
    write(tmp_path / "2.arrow", pa.table({"seq_len": [30]}))
    write(tmp_path / "1.arrow", pa.table({"seq_len": [10, 20]}))
    assert read_lengths(tmp_path).tolist() == [10, 20, 30]


def test_shards_must_agree(tmp_path):
    write(tmp_path / "1.arrow", pa.table({"seq_len": pa.array([1], pa.int32())}))
    write(tmp_path / "2.arrow", pa.table({"seq_len": pa.array([1], pa.int64())}))
    with pytest.raises(DatasetError, match=r"'seq_len': type int64 in .*2.arrow, but type int32 in .*1.arrow"):
        read_lengths(tmp_path)
    write(tmp_path / "2.arrow", pa.table({"input_ids": [[1]]}))
    with pytest.raises(DatasetError, match=r"no such column in .*2.arrow"):
        read_lengths(tmp_path)


@pytest.mark.parametrize("kind", FORMATS)
def test_null_zero_and_negative_rows_are_named_and_nothing_turns_into_float(tmp_path, kind):
    path = write(tmp_path / "bad.data", pa.table({"seq_len": pa.array([0, 65, None, -1], pa.int32())}), kind)
    with pytest.raises(LengthError, match=r"3 of 4 rows have no usable length in 'seq_len': row 0 \(0\), row 2 \(null\), row 3 \(-1\)\."):
        read_lengths(path)


def test_many_bad_rows_are_counted_and_the_first_ones_shown(tmp_path):
    path = write(tmp_path / "bad.arrow", pa.table({"seq_len": [1] * 1000 + [0] * 1000}))
    with pytest.raises(LengthError, match=r"1,000 of 2,000 rows .*row 1000 \(0\), .*row 1004 \(0\), \.\.\."):
        read_lengths(path)


def test_a_column_that_was_never_filled(tmp_path):
    path = write(tmp_path / "zero.arrow", pa.table({"seq_len": [0] * 100}))
    with pytest.raises(LengthError, match="all 100 lengths in 'seq_len' are 0: the column was never filled"):
        read_lengths(path)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rows", [[[1], None, [2, 3]], [[1], [], [2, 3]]])
def test_null_and_empty_lists_are_named(tmp_path, kind, rows):
    path = write(tmp_path / "holes.data", pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), kind)
    with pytest.raises(LengthError, match=rf"1 of 3 rows .*'input_ids': row 1 \({'null' if rows[1] is None else 0}\)"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        (pa.array(["3", "4"]), "string"),
        (pa.array([3.0, float("nan")]), "double"),
        (pa.array([3.0, None], pa.float32()), "float"),
        (pa.array([[3], [4]]), "list<"),
        (pa.array([True, False]), "bool"),
        (pa.array([None, None]), "null"),
    ],
)
def test_wrong_column_types_are_named(tmp_path, column, kind):
    path = write(tmp_path / "typed.arrow", pa.table({"seq_len": column}))
    with pytest.raises(LengthError, match=f"'seq_len' has type {kind}"):
        read_lengths(path)


@pytest.mark.parametrize("column", [pa.array([[[1]]]), pa.array([[0.5]]), pa.array(["text"]), pa.array([["a"]])])
def test_input_ids_must_be_lists_of_integers(tmp_path, column):
    path = write(tmp_path / "typed.arrow", pa.table({"input_ids": column}))
    with pytest.raises(DatasetError, match=r"'input_ids' has type .*; it must be a list of integers"):
        read_lengths(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_an_empty_dataset(tmp_path, kind):
    path = write(tmp_path / "empty.data", pa.table({"seq_len": pa.array([], pa.int32())}), kind)
    with pytest.raises(LengthError, match="holds no samples"):
        read_lengths(path)


def test_another_column_can_be_named_and_a_missing_one_lists_the_others(tmp_path):
    path = write(tmp_path / "named.arrow", pa.table({"n_tokens": [4, 5], "id": [1, 2]}))
    assert read_lengths(path, column="n_tokens").tolist() == [4, 5]
    with pytest.raises(LengthError, match=r"no column 'seq_len'\. It has: n_tokens, id"):
        read_lengths(path)
    with pytest.raises(LengthError, match="no column 'tokens'"):
        read_lengths(path, column="tokens")


@pytest.mark.parametrize("length", [2**31, 2**62, 2**63, 2**64 - 1])
def test_a_length_that_no_sample_has_is_named_before_it_overflows(tmp_path, length):
    path = write(tmp_path / "huge.arrow", pa.table({"seq_len": pa.array([5, 2**31 - 1, length, None], pa.uint64())}))
    with pytest.raises(LengthError, match=rf"huge\.arrow: 2 of 4 rows .*'seq_len': row 2 \({min(length, 2**63 - 1)}\), row 3 \(null\)"):
        read_lengths(path)
    for make in (lambda values: LengthHistogram.from_lengths(values), lambda values: LengthHistogram.from_counts(values, values // values)):
        with pytest.raises(LengthError, match=rf"row 0 \({length}\)"):
            make(np.array([length] * 4, np.uint64))


@pytest.mark.parametrize("kind", FORMATS)
def test_a_null_token_is_named(tmp_path, kind):
    path = write(tmp_path / "holes.data", pa.table({"input_ids": pa.array([[1], [2], [1, 2, None], [3]], pa.list_(pa.int32()))}), kind)
    with pytest.raises(DatasetError, match=r"holes\.data: row 2 of column 'input_ids' holds a null"):
        read_lengths(path)


def test_a_missing_path():
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read_lengths("no_such_dataset.arrow")


def test_reference_distribution():
    histogram = read_histogram("reference")
    assert (histogram.n_samples, histogram.min, histogram.max) == (902_087, 65, 8191)
    assert abs(histogram.n_tokens / 1.8659e9 - 1) < 1e-4
    assert (histogram.quantile(0.95), histogram.quantile(0.99)) == (4374, 4917)
    lengths = read_lengths("reference")
    assert (np.bincount(lengths)[histogram.lengths] == histogram.counts).all()
    assert not (np.diff(lengths) >= 0).all()


def test_lengths_start_without_torch_transformers_and_pandas(tmp_path):
    path = write(tmp_path / "lengths.arrow", pa.table({"seq_len": [1, 2, 3]}))
    code = (
        "import sys; from dflash_nb.data.lengths import read_histogram\n"
        f"assert read_histogram({str(path)!r}).n_tokens == 6\n"
        "print([name for name in ('torch', 'transformers', 'pandas') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("columns", "compression"), [(["input_ids", "seq_len"], "snappy"), (["input_ids"], "snappy"), (["input_ids"], "lz4")]
)
def test_lengths_of_a_wide_parquet_file_take_little_memory(tmp_path, columns, compression):
    """100 MB of tokens in one row group, with and without a length column, by levels (snappy) and by decoding (lz4)."""
    rows, tokens = 49_152, np.random.default_rng(0).integers(0, 50_000, 512 * 49_152, np.int32)
    lists = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * 512, tokens)
    table = pa.table({"input_ids": lists, "seq_len": pa.array([512] * rows, pa.int32())}).select(columns)
    pq.write_table(table, tmp_path / "wide.parquet", compression=compression)
    code = (
        "from dflash_nb.data.lengths import read_lengths\n"
        "peak = lambda: int(open('/proc/self/status').read().split('VmHWM:')[1].split()[0]) / 1024\n"
        f"before = peak(); n = read_lengths({str(tmp_path / 'wide.parquet')!r}).sum(); print(n, peak() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    counted, growth_mb = done.stdout.split()
    assert int(counted) == 512 * rows
    assert float(growth_mb) < 130  # decoded at once the column alone takes 100, and its pages another 50


samples = st.lists(st.integers(1, 300), min_size=1, max_size=80)


@given(samples, st.sampled_from([np.int16, np.int32, np.int64, np.uint16, np.uint64]))
def test_histogram_agrees_with_the_samples(values, dtype):
    histogram = LengthHistogram.from_lengths(np.array(values, dtype))
    assert (np.diff(histogram.lengths) > 0).all() and (histogram.counts > 0).all()
    assert (histogram.lengths.dtype, histogram.counts.dtype) == (np.int64, np.int64)
    assert (histogram.n_samples, histogram.n_tokens) == (len(values), sum(values))
    assert (histogram.min, histogram.max) == (min(values), max(values))
    assert histogram.mean == sum(values) / len(values)
    assert sorted(histogram.expand(seed=3).tolist()) == sorted(values)


@given(samples, st.floats(0, 1))
def test_quantile_is_the_inverse_of_the_cumulative_share(values, q):
    expected = np.quantile(values, q, method="inverted_cdf")
    assert LengthHistogram.from_lengths(np.array(values)).quantile(q) == expected


@given(samples, st.integers(0, 310), st.integers(0, 310))
def test_shares_and_tokens_of_a_range_are_half_open(values, lo, hi):
    histogram = LengthHistogram.from_lengths(np.array(values))
    inside = [v for v in values if lo <= v < hi]
    assert histogram.share(lo, hi) == len(inside) / len(values)
    assert histogram.tokens_between(lo, hi) == sum(inside)


@given(samples, st.integers(1, 310))
def test_clip_truncates(values, limit):
    clipped = LengthHistogram.from_lengths(np.array(values)).clip(limit)
    assert sorted(clipped.expand().tolist()) == sorted(min(v, limit) for v in values)


def test_from_counts_adds_up_and_leaves_out_nothing_else():
    histogram = LengthHistogram.from_counts([5, 3, 5, 9], np.array([1, 2, 10, 0], np.int8))
    assert (histogram.lengths.tolist(), histogram.counts.tolist()) == ([3, 5], [2, 11])


def test_a_trillion_tokens_do_not_overflow():
    histogram = LengthHistogram.from_counts(np.array([1_000, 8_000], np.int16), np.array([10**9, 10**12], np.int64))
    assert histogram.n_tokens == 10**12 + 8 * 10**15
    assert histogram.tokens_between(0, 8_000) == 10**12
    assert histogram.quantile(0.5) == 8_000
    assert LengthHistogram.from_lengths(np.array([2_000_000_000, 2_000_000_000, 1], np.int32)).n_tokens == 4_000_000_001


def test_expand_depends_on_the_seed_only():
    histogram = LengthHistogram.from_counts([1, 2, 3], [50, 50, 50])
    assert (histogram.expand(1) == histogram.expand(1)).all()
    assert (histogram.expand(1) != histogram.expand(2)).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LengthHistogram.from_lengths([]), "holds no samples"),
        (lambda: LengthHistogram.from_lengths([1.0, 2.0]), "integer array, not float64"),
        (lambda: LengthHistogram.from_lengths([[1, 2]]), "one-dimensional"),
        (lambda: LengthHistogram.from_lengths([3, 0]), r"row 1 \(0\)"),
        (lambda: LengthHistogram.from_counts([1, 2], [1]), "one integer >= 0"),
        (lambda: LengthHistogram.from_counts([1, 2], [1, -1]), "one integer >= 0"),
        (lambda: LengthHistogram.from_counts([1, 2], [0.5, 1]), "one integer >= 0"),
        (lambda: LengthHistogram.from_counts([1, 2], [0, 0]), "holds no samples"),
    ],
)
def test_impossible_histograms_are_refused(make, message):
    with pytest.raises(LengthError, match=message):
        make()
