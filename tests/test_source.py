"""Which files a source is, and what is said when it is none."""

import json
import sys
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from dflash_nb.data.source import DatasetError, dataset_path, file_kind, find_source, read_batches, read_schema

TABLE = pa.table({"input_ids": [[1, 2, 3], [4]], "loss_mask": [[0, 1, 1], [1]], "seq_len": pa.array([3, 1], pa.int32())})


def write(path, table=TABLE, kind="arrow file"):
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        with (pa.ipc.new_file if kind == "arrow file" else pa.ipc.new_stream)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=1)
    return path


def save_like_datasets(folder, tables):
    """What ``datasets.Dataset.save_to_disk`` leaves: streams, their order in state.json, a description."""
    names = [f"data-{i:05}-of-{len(tables):05}.arrow" for i in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        write(folder / name, table, "arrow stream")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names], "_split": "train"}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["arrow file", "arrow stream", "parquet"])
def test_files_are_told_apart_by_their_bytes_not_their_suffix(tmp_path, kind):
    path = write(tmp_path / "misleading.bin", kind=kind)
    assert file_kind(path) == kind
    assert read_schema(path).names == TABLE.schema.names
    rows = [row for batch in read_batches(path, ["seq_len"]) for row in batch.to_pylist()]
    assert rows == [{"seq_len": 3}, {"seq_len": 1}]


def test_columns_are_mapped_not_copied(tmp_path):
    path = write(tmp_path / "rows.arrow")
    before = pa.total_allocated_bytes()
    batches = list(read_batches(path, ["input_ids", "loss_mask"]))
    assert len(batches) == 2
    assert pa.total_allocated_bytes() == before


def test_compressed_arrow_is_read_too(tmp_path):
    feather.write_feather(TABLE, tmp_path / "rows.feather", compression="lz4")
    assert [batch.to_pydict() for batch in read_batches(tmp_path / "rows.feather", ["seq_len"])] == [{"seq_len": [3, 1]}]


def test_folder_is_read_by_name_and_strangers_are_left_out(tmp_path):
    for name in ("b.arrow", "a.arrow"):
        write(tmp_path / name)
    for name in ("README.md", "_SUCCESS", ".hidden.arrow", "cache-123.arrow", "state.txt"):
        (tmp_path / name).write_text("stray")
    assert [p.name for p in find_source(tmp_path).files] == ["a.arrow", "b.arrow"]


def test_saved_dataset_keeps_the_order_of_its_shard_list(tmp_path):
    save_like_datasets(tmp_path, [TABLE, TABLE])
    state = json.loads((tmp_path / "state.json").read_text())
    state["_data_files"].reverse()
    (tmp_path / "state.json").write_text(json.dumps(state))
    write(tmp_path / "cache-0.arrow")
    assert [p.name for p in find_source(tmp_path).files] == ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    (tmp_path / "data-00000-of-00002.arrow").unlink()
    with pytest.raises(DatasetError, match=r"state.json names data-00000-of-00002.arrow, which is missing"):
        find_source(tmp_path)


def test_saved_dataset_dict_has_train_and_a_heldout_split(tmp_path):
    for split in ("train", "test", "validation"):
        save_like_datasets(tmp_path / split, [TABLE])
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test", "validation"]}))
    found = find_source(tmp_path)
    assert found.has_heldout
    assert found.files[0].parent.name == "train"
    assert find_source(tmp_path, "heldout").files[0].parent.name == "validation"
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["all"]}))
    with pytest.raises(DatasetError, match="has the splits all; none of them is train"):
        find_source(tmp_path)


def test_prepared_dataset(tmp_path):
    write(tmp_path / "train" / "data-00000.arrow")
    (tmp_path / "dataset.json").write_text(json.dumps({"format": 1, "tokenizer": {"name": "t"}}))
    found = find_source(tmp_path)
    assert (found.has_heldout, found.description["tokenizer"]["name"]) == (False, "t")
    with pytest.raises(DatasetError, match=r"no heldout split\. Prepare it again with --heldout"):
        find_source(tmp_path, "heldout")
    (tmp_path / "dataset.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(DatasetError, match="format 2; this version reads format 1"):
        find_source(tmp_path)


@pytest.mark.parametrize("name", ["dataset.json", "dataset_dict.json", "state.json"])
def test_a_broken_description_is_named(tmp_path, name):
    (tmp_path / name).write_text('{"format": 1')
    with pytest.raises(DatasetError, match=rf"{name} is no valid JSON"):
        find_source(tmp_path)


def test_bad_folders_are_named(tmp_path):
    with pytest.raises(DatasetError, match=r"holds no .arrow or .parquet file"):
        find_source(tmp_path)
    write(tmp_path / "data" / "train.parquet", kind="parquet")
    with pytest.raises(DatasetError, match="its subfolders data do: name one of them"):
        find_source(tmp_path)
    (tmp_path / "chats.jsonl").touch()
    with pytest.raises(DatasetError, match=r"its \.jsonl files must be tokenised first: python -m dflash_nb\.data\.prepare"):
        find_source(tmp_path)
    write(tmp_path / "a.arrow")
    write(tmp_path / "a.parquet", kind="parquet")
    with pytest.raises(DatasetError, match="Arrow and Parquet files side by side"):
        find_source(tmp_path)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "empty.arrow").touch()
    with pytest.raises(DatasetError, match=r"empty.arrow is empty \(0 bytes\)"):
        file_kind(tmp_path / "empty.arrow")
    (tmp_path / "chats.jsonl").write_text('{"messages": []}')
    with pytest.raises(DatasetError, match=r"chats\.jsonl holds text, not tokens\. Tokenise it first"):
        file_kind(tmp_path / "chats.jsonl")
    (tmp_path / "noise.arrow").write_bytes(b"12345678" * 10)
    with pytest.raises(DatasetError, match="neither Arrow nor Parquet"):
        file_kind(tmp_path / "noise.arrow")


@pytest.mark.parametrize("kind", ["arrow file", "parquet"])
def test_a_file_cut_short_is_named_never_read_in_part(tmp_path, kind):
    path = write(tmp_path / "cut.data", kind=kind)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DatasetError, match=r"cut.data is damaged or cut short"):
        list(read_batches(path, ["seq_len"]))


def test_a_stream_cut_inside_a_batch_is_named(tmp_path):
    path = write(tmp_path / "cut.arrow", kind="arrow stream")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DatasetError, match=r"cut.arrow is damaged or cut short"):
        list(read_batches(path, ["seq_len"]))


@pytest.mark.parametrize("rows", [5000, 1500, 500, 0])
def test_a_stream_needs_its_end_mark(tmp_path, rows):
    """Cut between two batches, or still being written, a stream is a valid shorter one but for the mark."""
    path, table = tmp_path / "rows.arrow", pa.table({"seq_len": range(5000)})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table.slice(0, rows), max_chunksize=500)
    assert sum(batch.num_rows for batch in read_batches(path, ["seq_len"])) == rows
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(DatasetError, match=rf"rows\.arrow is cut short: {rows:,} rows were read and no end mark"):
        list(read_batches(path, ["seq_len"]))
    path.write_bytes(whole + whole)
    with pytest.raises(DatasetError, match=rf"rows\.arrow: {len(whole):,} bytes follow the end of its {rows:,} rows"):
        list(read_batches(path, ["seq_len"]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("dataset.json", "[1]", "holds a JSON list, not an object"),
        ("dataset.json", '{"format": 1, "tokenizer": "gpt2"}', "tokenizer is 'gpt2', not an object"),
        ("dataset_dict.json", '{"splits": "train"}', "splits is 'train', not a list"),
        ("dataset_dict.json", '{"splits": [1]}', r"splits is \[1\], not a list of names"),
        ("dataset_dict.json", "null", "holds a JSON NoneType"),
        ("state.json", '{"_data_files": ["a.arrow"]}', "_data_files does not name the data files"),
        ("state.json", '{"_data_files": [{}]}', "_data_files does not name the data files"),
    ],
)
def test_a_description_of_another_form_is_named(tmp_path, name, content, message):
    write(tmp_path / "train" / "a.arrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(DatasetError, match=rf"{name}.*{message}"):
        find_source(tmp_path)


def test_a_folder_or_a_broken_link_among_the_shards_is_named(tmp_path):
    for i, make in enumerate((lambda path: path.mkdir(), lambda path: path.symlink_to("absent"))):
        folder = tmp_path / str(i)
        write(folder / "a.arrow")
        make(folder / "b.arrow")
        with pytest.raises(DatasetError, match=r"b\.arrow is a folder or a broken link"):
            find_source(folder)


def test_no_name_is_not_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path / "a.arrow").parent)
    with pytest.raises(DatasetError, match="no name was given"):
        find_source("")
    assert len(find_source(".").files) == 1


def test_missing_path_lists_what_exists(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "cache" / "mine" / "train" / "data-00000.arrow")
    (tmp_path / "cache" / "mine" / "dataset.json").write_text('{"format": 1}')
    with pytest.raises(FileNotFoundError, match=r"absent does not exist. Known here: sample, .*mine"):
        dataset_path("absent")
    with pytest.raises(DatasetError, match="without tokens"):
        dataset_path("reference")


def test_paths_count_from_the_current_folder(tmp_path, monkeypatch):
    write(tmp_path / "here.arrow")
    monkeypatch.chdir(tmp_path)
    assert find_source("here.arrow").files == (tmp_path / "here.arrow",)
    assert find_source("./here.arrow").files == (tmp_path / "here.arrow",)


def test_hub_name_without_datasets_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(FileNotFoundError, match=r"owner/name does not exist; .* needs: pip install datasets"):
        find_source("owner/name")


def test_hub_name_is_read_from_the_files_that_datasets_cached(tmp_path, monkeypatch):
    path = write(tmp_path / "name-train.arrow", kind="arrow stream")
    splits = {"train": SimpleNamespace(cache_files=[{"filename": str(path)}])}

    def load_dataset(name):
        if name == "owner/name":
            return splits
        raise ConnectionError("no route to host\ndetails")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert find_source("owner/name").files == (path,)
    with pytest.raises(DatasetError, match="has the splits train; none of them is heldout"):
        find_source("owner/name", "heldout")
    with pytest.raises(FileNotFoundError, match=r"'owner/other' is no file or folder here, .*: no route to host"):
        find_source("owner/other")
