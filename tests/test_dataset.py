"""Rows by index, collation, and what a dataset must agree about."""

import pickle
import threading

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.data.lengths import LengthError
from dflash_nb.data.source import DatasetError

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 60, 150)
IDS = [RNG.integers(0, 1000, n).tolist() for n in LENGTHS]
MASKS = [(RNG.random(n) < 0.5).astype(int).tolist() for n in LENGTHS]
LIST_INT32, LIST_UINT8 = pa.list_(pa.int32()), pa.list_(pa.uint8())
FORMATS = ("arrow file", "arrow stream", "parquet", "feather")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))


def rows(ids=IDS, masks=MASKS, ids_type=LIST_INT32, mask_type=LIST_UINT8, **columns):
    return pa.table({"input_ids": pa.array(ids, ids_type), "loss_mask": pa.array(masks, pa.list_(pa.int64())).cast(mask_type), **columns})


def write(path, table, kind="arrow file", chunk=37):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=chunk)
    elif kind == "feather":
        feather.write_feather(table, path, compression="lz4", chunksize=chunk)
    else:
        with (pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=chunk)
    return path


def assert_rows(dataset, ids=IDS, masks=MASKS):
    assert len(dataset) == len(ids)
    for i in range(len(ids)):
        row_ids, row_mask = dataset.row(i)
        assert (row_ids.dtype, row_mask.dtype) == (np.int32, np.bool_)
        assert (row_ids.tolist(), row_mask.tolist()) == (ids[i], [bool(m) for m in masks[i]])


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("mask_type", [pa.list_(pa.bool_()), pa.list_(pa.uint8()), pa.list_(pa.int64()), pa.large_list(pa.int8())])
@pytest.mark.parametrize("ids_type", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16())])
def test_rows_of_every_format_and_type(tmp_path, kind, mask_type, ids_type):
    dataset = TokenDataset.open(write(tmp_path / "rows.data", rows(ids_type=ids_type, mask_type=mask_type), kind))
    assert_rows(dataset)
    assert dataset.lengths.dtype == np.int64
    assert dataset.lengths.tolist() == LENGTHS.tolist()
    assert dataset.n_supervised.tolist() == [sum(m) for m in MASKS]


def test_several_files_empty_batches_and_sliced_tables(tmp_path):
    table = rows(mask_type=pa.list_(pa.bool_()))
    write(tmp_path / "d" / "0.arrow", table.slice(0, 50).slice(3, 47))
    write(tmp_path / "d" / "1.arrow", table.slice(0, 0))
    write(tmp_path / "d" / "2.arrow", table.slice(50, 100), chunk=1)
    assert_rows(TokenDataset.open(tmp_path / "d"), IDS[3:], MASKS[3:])


def test_fixed_size_lists(tmp_path):
    kind = pa.list_(pa.int32(), 4)
    ids, masks = [[1, 2, 3, 4], [5, 6, 7, 8]], [[0, 1, 1, 0], [1, 1, 1, 1]]
    table = pa.table({"input_ids": pa.array(ids, kind), "loss_mask": pa.array(masks, kind)})
    assert_rows(TokenDataset.open(write(tmp_path / "fixed.arrow", table)), ids, masks)


def test_plain_arrow_is_mapped_and_the_rest_is_written_once(tmp_path, capsys):
    before = pa.total_allocated_bytes()
    plain = TokenDataset.open(write(tmp_path / "rows.arrow", rows()))
    assert pa.total_allocated_bytes() == before
    assert not (tmp_path / "cache").exists()
    for kind in ("parquet", "feather"):
        path = write(tmp_path / f"rows.{kind}", rows(), kind)
        TokenDataset.open(path)
        assert "writing it once as plain Arrow" in capsys.readouterr().out
        again = TokenDataset.open(path)
        assert capsys.readouterr().out == ""
        assert again.fingerprint()["content_sha256"] == plain.fingerprint()["content_sha256"]
        write(path, rows(IDS[:100], MASKS[:100]), kind)
        assert len(TokenDataset.open(path)) == 100


@settings(max_examples=60, deadline=None)
@given(
    picks=st.lists(st.integers(0, 149), min_size=1, max_size=20),
    extra=st.integers(0, 9),
    pad_id=st.integers(0, 999),
    max_length=st.one_of(st.none(), st.integers(1, 70)),
)
def test_collate_pads_right_and_cuts_right(tmp_path_factory, picks, extra, pad_id, max_length):
    path = tmp_path_factory.getbasetemp() / "collate.arrow"
    if not path.exists():
        write(path, rows(mask_type=pa.list_(pa.bool_())))
    lengths = [min(len(IDS[i]), max_length or 1000) for i in picks]
    width = max(lengths) + extra
    batch = TokenDataset.open(path).collate(np.array(picks), width, pad_id=pad_id, max_length=max_length, epoch=2, index=5, bucket=1)
    assert (batch.epoch, batch.index, batch.bucket, batch.padded_length) == (2, 5, 1, width)
    assert (batch.input_ids_BT.dtype, batch.loss_mask_BT.dtype, batch.sample_ids_B.dtype) == (np.int32, np.bool_, np.int64)
    for b, (i, n) in enumerate(zip(picks, lengths, strict=True)):
        assert batch.input_ids_BT[b].tolist() == IDS[i][:n] + [pad_id] * (width - n)
        assert batch.loss_mask_BT[b].tolist() == [bool(m) for m in MASKS[i][:n]] + [False] * (width - n)
    assert batch.lengths_B.tolist() == lengths
    assert (batch.rows, batch.real_tokens, batch.padded_tokens) == (len(picks), sum(lengths), len(picks) * width)
    assert batch.nbytes == 5 * len(picks) * width + 16 * len(picks)


def test_collate_refuses_what_does_not_fit(tmp_path):
    dataset = TokenDataset.open(write(tmp_path / "rows.arrow", rows()))
    longest = int(LENGTHS.argmax())
    with pytest.raises(DatasetError, match=rf"row {longest} has {LENGTHS.max()} tokens, more than the padded length 10"):
        dataset.collate([longest], 10)
    for bad in ([150], [-1]):
        with pytest.raises(IndexError, match="there are 150 rows"):
            dataset.collate(bad, 100)
        with pytest.raises(IndexError, match="there are 150 rows"):
            dataset.row(bad[0])


def test_withheld_rows_are_the_last_ones_and_in_one_split_only(tmp_path):
    path = write(tmp_path / "rows.parquet", rows(), "parquet")
    assert_rows(TokenDataset.open(path, withhold=40), IDS[:110], MASKS[:110])
    heldout = TokenDataset.open(path, "heldout", withhold=40)
    assert_rows(heldout, IDS[110:], MASKS[110:])
    assert heldout.n_supervised.tolist() == [sum(m) for m in MASKS[110:]]
    assert heldout.collate([0, 39], 60).lengths_B.tolist() == [LENGTHS[110], LENGTHS[149]]
    with pytest.raises(DatasetError, match="no held-out split of its own"):
        TokenDataset.open(path, "heldout")
    with pytest.raises(DatasetError, match="150 rows cannot be withheld of 150"):
        TokenDataset.open(path, withhold=150)
    with pytest.raises(DatasetError, match="choose 'train' or 'heldout'"):
        TokenDataset.open(path, "test")


def test_prepared_dataset_has_its_own_heldout_rows(tmp_path):
    write(tmp_path / "d" / "train" / "data-00000.arrow", rows(IDS[:100], MASKS[:100]))
    write(tmp_path / "d" / "heldout" / "data-00000.arrow", rows(IDS[100:], MASKS[100:]))
    (tmp_path / "d" / "dataset.json").write_text('{"format": 1, "tokenizer": {"name": "t", "fingerprint": "f", "vocab_size": 1000}}')
    train = TokenDataset.open(tmp_path / "d", withhold=10)
    assert_rows(train, IDS[:100], MASKS[:100])
    assert train.tokenizer == {"name": "t", "fingerprint": "f", "vocab_size": 1000}
    assert_rows(TokenDataset.open(tmp_path / "d", "heldout", withhold=10), IDS[100:], MASKS[100:])


def test_missing_columns_say_how_to_prepare(tmp_path):
    for kept, missing in (("input_ids", "loss_mask"), ("loss_mask", "input_ids")):
        path = write(tmp_path / f"{kept}.arrow", rows().select([kept]))
        with pytest.raises(DatasetError, match=rf"no column '{missing}' .*python -m dflash_nb.data.prepare"):
            TokenDataset.open(path)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (rows().set_column(1, "loss_mask", pa.array([[0.5]] * 150)), "'loss_mask' has type list<"),
        (rows().set_column(0, "input_ids", pa.array(["a"] * 150)), "'input_ids' has type string"),
        (rows().append_column("seq_len", pa.array(LENGTHS.astype(float))), "'seq_len' has type double"),
        (rows([[1]] * 40 + [None], [[1]] * 41), "row 40 of column 'input_ids' is null"),
        (rows([[1]] * 40 + [[1, None]], [[1]] * 40 + [[1, 1]]), "row 40 of column 'input_ids' holds a null"),
        (rows([[1], [1, 2]], [[1], [1, None]]), "row 1 of column 'loss_mask' holds a null"),
        (rows([[1], [1, 2]], [[1], [1]]), "1 rows disagree; row 1 has 2 input_ids, but loss_mask says 1"),
        (rows([[1], [1, 2]], [[1], [1, 1]], seq_len=[1, 3]), "row 1 has 2 input_ids, but seq_len says 3. Write seq_len again or drop"),
        (rows([[1], [1, 2]], [[1], [1, 1]], seq_len=[1, None]), "row 1 has 2 input_ids, but seq_len says null"),
    ],
)
def test_disagreeing_and_mistyped_columns(tmp_path, table, message):
    with pytest.raises(DatasetError, match=message):
        TokenDataset.open(write(tmp_path / "bad.arrow", table))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("row", [None, [1, None]])
def test_a_null_is_reported_in_the_users_own_file(tmp_path, kind, row):
    path = write(tmp_path / "mine.data", rows([[1]] * 40 + [row] + [[1]] * 40, [[1]] * 40 + [[1] * len(row or [1])] + [[1]] * 40), kind)
    with pytest.raises(DatasetError, match=rf"^{path}: row 40 of column 'input_ids' (is|holds a) null"):
        TokenDataset.open(path)


@pytest.mark.parametrize("kind", FORMATS)
def test_empty_rows_and_empty_files(tmp_path, kind):
    with pytest.raises(LengthError, match=r"1 of 2 rows .*row 1 \(0\)"):
        TokenDataset.open(write(tmp_path / "zero.data", rows([[1], []], [[1], []]), kind))
    with pytest.raises(DatasetError, match="holds no samples"):
        TokenDataset.open(write(tmp_path / "none.data", rows([], []), kind))


def test_supervised_tokens_come_from_the_column_or_the_masks(tmp_path):
    counts = [sum(m) for m in MASKS]
    with_column = TokenDataset.open(write(tmp_path / "a.arrow", rows(n_supervised=pa.array(counts, pa.uint8()))))
    assert (with_column.n_supervised.tolist(), with_column.n_supervised.dtype) == (counts, np.int64)
    too_many = TokenDataset.open(write(tmp_path / "b.arrow", rows([[1, 2]], [[1, 1]], n_supervised=[3])))
    with pytest.raises(DatasetError, match="n_supervised of row 0 is 3, but its loss_mask has 2 supervised tokens; 1 rows disagree"):
        _ = too_many.n_supervised


@pytest.mark.parametrize("value", [-100, -1, 2, 7])
@pytest.mark.parametrize("with_columns", [False, True])
def test_a_mask_holds_0_and_1_whatever_other_columns_say(tmp_path, value, with_columns):
    masks = [list(mask) for mask in MASKS]
    masks[140][-1] = value
    counts = {"n_supervised": [sum(map(bool, mask)) for mask in masks], "seq_len": LENGTHS} if with_columns else {}
    dataset = TokenDataset.open(write(tmp_path / "a.arrow", rows(masks=masks, mask_type=pa.list_(pa.int64()), **counts)))
    with pytest.raises(DatasetError, match=f"loss_mask of row 140 holds {value}; it must be 1 for supervised tokens and 0 elsewhere"):
        _ = dataset.n_supervised


@pytest.mark.parametrize("said", [0, 1000, -1, None])
def test_a_count_column_that_the_masks_contradict(tmp_path, said):
    counts = [sum(mask) for mask in MASKS]
    row = next(i for i in range(120, 150) if counts[i])
    counts[row] = said
    dataset = TokenDataset.open(write(tmp_path / "a.arrow", rows(n_supervised=pa.array(counts, pa.int32()))), "heldout", withhold=100)
    with pytest.raises(DatasetError, match=rf"n_supervised of row {row - 50} is {'null' if said is None else said}, but its loss_mask has"):
        _ = dataset.n_supervised


def test_vocabulary_is_checked_in_every_row(tmp_path):
    ids = [list(row) for row in IDS]
    dataset = TokenDataset.open(write(tmp_path / "a.arrow", rows()))
    dataset.check_vocabulary(1000)
    top = max(max(row) for row in IDS)
    first = next(i for i, row in enumerate(IDS) if top in row)
    with pytest.raises(DatasetError, match=rf"row {first} holds token id {top}, outside the target's vocabulary of {top}"):
        dataset.check_vocabulary(top)
    ids[140][-1], ids[20][0] = 5000, 7000
    with pytest.raises(DatasetError, match="row 140 holds token id 5000, the drafter's mask token"):
        TokenDataset.open(write(tmp_path / "b.arrow", rows(ids)), withhold=5).check_vocabulary(8000, mask_token_id=5000)
    ids[20][0] = -1
    with pytest.raises(DatasetError, match="row 20 holds token id -1"):
        TokenDataset.open(write(tmp_path / "c.arrow", rows(ids))).check_vocabulary(8000)
    ids[20][0] = 2**40
    with pytest.raises(DatasetError, match=f"row 20 holds token id {2**40}"):
        TokenDataset.open(write(tmp_path / "d.arrow", rows(ids, ids_type=pa.list_(pa.int64())))).check_vocabulary(8000)


def test_fingerprint_is_stable_and_sees_changes(tmp_path):
    path = write(tmp_path / "a.arrow", rows())
    original = TokenDataset.open(path).fingerprint()
    assert TokenDataset.open(path).fingerprint() == original
    assert (original["rows"], original["tokens"], original["bytes"]) == (150, LENGTHS.sum(), path.stat().st_size)
    flipped = [[1 - m for m in mask] for mask in MASKS]
    assert TokenDataset.open(write(path, rows(masks=flipped))).fingerprint()["content_sha256"] != original["content_sha256"]
    assert TokenDataset.open(write(path, rows(IDS[::-1], MASKS[::-1]))).fingerprint()["lengths_sha256"] != original["lengths_sha256"]


@pytest.mark.parametrize("kind", FORMATS)
def test_pickled_by_path(tmp_path, kind):
    dataset = TokenDataset.open(write(tmp_path / "rows.data", rows(), kind), "heldout", withhold=40)
    frozen = pickle.dumps(dataset)
    assert len(frozen) < 1000
    assert_rows(pickle.loads(frozen), IDS[110:], MASKS[110:])


def test_threads_read_the_same_rows(tmp_path):
    dataset = TokenDataset.open(write(tmp_path / "rows.arrow", rows(mask_type=pa.list_(pa.bool_()))))
    failures = []

    def read(seed):
        for i in np.random.default_rng(seed).integers(0, 150, 400):
            ids, mask = dataset.row(int(i))
            if ids.tolist() != IDS[i] or mask.tolist() != [bool(m) for m in MASKS[i]]:
                failures.append(i)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
