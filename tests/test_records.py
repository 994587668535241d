"""JSON lines as people save them, and the line that a message names."""

import os

import pytest

from dflash_nb.data.records import _parse, count_records, read_records, record_files
from dflash_nb.data.source import DatasetError


def contents(*files):
    return [record.content["n"] for record in read_records(list(files))]


@pytest.mark.parametrize(
    "data",
    [
        b'{"n": 1}\n{"n": 2}\n',
        b'{"n": 1}\n{"n": 2}',
        b'\xef\xbb\xbf{"n": 1}\r\n{"n": 2}\r\n',
        b'\n\n{"n": 1}\n   \n\r\n{"n": 2}\n\n',
    ],
)
def test_byte_order_mark_crlf_and_blank_lines(tmp_path, data):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    assert contents(path) == [1, 2]
    assert count_records([path]) == 2


def test_records_know_their_place_across_files(tmp_path):
    (tmp_path / "b.jsonl").write_text('\n{"n": 3}\n')
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    (tmp_path / "notes.txt").write_text("not data")
    files = record_files(tmp_path)
    assert [path.name for path in files] == ["a.jsonl", "b.jsonl"]
    records = list(read_records(files))
    assert [(r.index, r.line, r.content["n"]) for r in records] == [(0, 1, 1), (1, 2, 2), (2, 2, 3)]
    assert records[2].place == f"{tmp_path / 'b.jsonl'}, line 2"
    assert count_records(files) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"n": 1', "no valid JSON (Expecting"),
        (b'{"n": NaN, }', "no valid JSON ("),
        (b"[1, 2]", "it holds a JSON list"),
        (b'"text"', "it holds a JSON str"),
        (b'{"n": "\xff"}', "no valid JSON ("),
        (b'{"n": ' + b"[" * 100_000, "no valid JSON ("),
        (rb'{"n": "half \ud83d"}', r"\ud83d is half of a character"),
        (rb'{"half \uDE00": 1}', r"\ude00 is half of a character"),
    ],
)
def test_a_broken_line_is_a_record_with_its_fault(tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n\n' + line + b'\n{"n": 2}\n')
    first, broken, last = read_records([path])
    assert (broken.place, broken.index, broken.content) == (f"{path}, line 3", 1, {})
    assert broken.fault.startswith(message)
    assert (first.content, first.fault, last.content, last.fault) == ({"n": 1}, "", {"n": 2}, "")


def test_a_character_in_two_halves_is_one():
    assert _parse(rb'{"n": "\ud83d\ude00"}') == ({"n": "\U0001f600"}, "")


def test_missing_sources(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        record_files(tmp_path / "absent.jsonl")
    with pytest.raises(DatasetError, match="no name was given"):
        record_files("")
    with pytest.raises(DatasetError, match=r"holds no \.jsonl file"):
        record_files(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DatasetError, match="pipe is neither a file nor a folder"):
        record_files(tmp_path / "pipe")
    (tmp_path / "broken.jsonl").symlink_to("absent")
    with pytest.raises(DatasetError, match=r"broken\.jsonl is no file, or a broken link"):
        record_files(tmp_path)
