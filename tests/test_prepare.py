"""From JSON lines to a dataset folder: tokens, masks, splits, counts, and nothing half written."""

import json
import subprocess
import sys

import numpy as np
import pytest
import tiny_tokenizers as tiny
from transformers import AutoTokenizer

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.data.lengths import read_lengths
from dflash_nb.data.prepare import main, prepare_chats
from dflash_nb.data.source import DatasetError, read_batches, read_schema

QUESTIONS = [{"question": f"What is {i} + 1?", "answer": f"It is {i + 1}."} for i in range(40)]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizers")
    tiny.byte_tokenizer(tiny.CHATML, model_max_length=400).save_pretrained(folder / "chatml")
    tiny.byte_tokenizer(tiny.CHATML, padding_side="left", truncation_side="left", pad_token="<|pad|>").save_pretrained(folder / "left")
    tiny.byte_tokenizer(tiny.NEEDS_QUESTION).save_pretrained(folder / "thinking")
    tiny.byte_tokenizer(tiny.LLAMA3, eos="<|eot_id|>", adds_bos=True).save_pretrained(folder / "llama3")
    tiny.byte_tokenizer(None, eos="</s>", adds_bos=True).save_pretrained(folder / "base")
    return folder


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def describe(folder):
    return json.loads((folder / "dataset.json").read_text())


@pytest.fixture
def questions(tmp_path):
    return write(tmp_path / "questions.jsonl", QUESTIONS)


@pytest.mark.parametrize(
    ("name", "end"), [("chatml", "<|im_end|>"), ("left", "<|im_end|>"), ("thinking", "<|im_end|>"), ("llama3", "<|eot_id|>")]
)
def test_decoded_supervised_text_is_answer_and_end_token(tmp_path, tokenizers, questions, name, end):
    folder = prepare_chats(questions, tmp_path / "out", str(tokenizers / name), heldout=5)
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / name)
    for split, expected in (("train", QUESTIONS[:35]), ("heldout", QUESTIONS[35:])):
        dataset = TokenDataset.open(folder, split)
        assert len(dataset) == len(expected)
        for i, record in enumerate(expected):
            ids, mask = dataset.row(i)
            messages = [{"role": "user", "content": record["question"]}, {"role": "assistant", "content": record["answer"]}]
            assert ids.tolist() == tokenizer.apply_chat_template(messages, return_dict=False)
            assert tokenizer.decode(ids[mask]) == record["answer"] + end
        assert dataset.n_supervised.tolist() == [int(dataset.row(i)[1].sum()) for i in range(len(dataset))]


def test_the_folder_is_what_the_other_rooms_read(tmp_path, tokenizers, questions):
    folder = prepare_chats(questions, tmp_path / "out", str(tokenizers / "chatml"), heldout=5)
    assert sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()) == [
        "dataset.json",
        "heldout/data-00000.arrow",
        "train/data-00000.arrow",
    ]
    schema = read_schema(folder / "train" / "data-00000.arrow")
    assert {field.name: str(field.type) for field in schema} == {
        "input_ids": "list<item: int32>",
        "loss_mask": "list<item: uint8>",
        "seq_len": "int32",
        "n_supervised": "int32",
    }
    dataset = TokenDataset.open(folder)
    assert (read_lengths(folder) == dataset.lengths).all()
    described = describe(folder)
    assert described["format"] == 1
    assert described["rows"] == {"train": 35, "heldout": 5}
    assert described["tokens"]["train"] == dataset.lengths.sum()
    assert described["supervised_tokens"]["train"] == dataset.n_supervised.sum()
    assert described["max_length"] == 400
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / "chatml")
    assert dataset.tokenizer["vocab_size"] == len(tokenizer)
    assert dataset.tokenizer["special_ids"] == {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "pad": None}
    dataset.check_vocabulary(len(tokenizer))


def test_chunks_join_without_a_seam(tmp_path, tokenizers, monkeypatch):
    records = write(tmp_path / "many.jsonl", QUESTIONS * 3)
    whole = prepare_chats(records, tmp_path / "whole", str(tokenizers / "chatml"), heldout=0.1)
    monkeypatch.setattr("dflash_nb.data.prepare.CHUNK_RECORDS", 7)
    pieces = prepare_chats(records, tmp_path / "pieces", str(tokenizers / "chatml"), heldout=12)
    for split in ("train", "heldout"):
        a, b = TokenDataset.open(whole, split), TokenDataset.open(pieces, split)
        assert a.fingerprint()["content_sha256"] == b.fingerprint()["content_sha256"]
        assert a.lengths.tolist() == b.lengths.tolist()
    assert describe(whole)["rows"] == {"train": 108, "heldout": 12}


def test_text_and_pairs_of_a_base_model(tmp_path, tokenizers):
    records = write(tmp_path / "base.jsonl", [{"text": "All of it."}, {"prompt": "def f():", "completion": " pass"}])
    folder = prepare_chats(records, tmp_path / "out", str(tokenizers / "base"), heldout=0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / "base")
    dataset = TokenDataset.open(folder)
    (ids, mask), (pair_ids, pair_mask) = dataset.row(0), dataset.row(1)
    assert tokenizer.decode(ids) == "<s>All of it.</s>"
    assert tokenizer.decode(ids[mask]) == "All of it.</s>"
    assert tokenizer.decode(pair_ids) == "<s>def f(): pass</s>"
    assert tokenizer.decode(pair_ids[pair_mask]) == " pass</s>"
    assert not (folder / "heldout").exists()


def test_characters_of_several_bytes_keep_their_mask(tmp_path, tokenizers):
    records = write(tmp_path / "wide.jsonl", [{"question": "漢字は？", "answer": "はい、漢字です \U0001f600"}])
    folder = prepare_chats(records, tmp_path / "out", str(tokenizers / "chatml"), heldout=0)
    ids, mask = TokenDataset.open(folder).row(0)
    assert AutoTokenizer.from_pretrained(tokenizers / "chatml").decode(ids[mask]) == "はい、漢字です \U0001f600<|im_end|>"


@pytest.mark.parametrize("policy", ["drop", "truncate", "error"])
def test_too_long_records(tmp_path, tokenizers, policy):
    records = [*QUESTIONS[:10], {"question": "x" * 100, "answer": "y" * 500}, *QUESTIONS[10:20]]
    path, options = write(tmp_path / "long.jsonl", records), {"heldout": 10, "max_length": 300, "too_long": policy}
    if policy == "error":
        with pytest.raises(DatasetError, match=r"long\.jsonl, line 11: 6\d\d tokens, more than 300"):
            prepare_chats(path, tmp_path / "out", str(tokenizers / "chatml"), **options)
        return
    folder = prepare_chats(path, tmp_path / "out", str(tokenizers / "chatml"), **options)
    assert describe(folder)["too_long"] == {"policy": policy, "rows": 1}
    assert describe(folder)["rows"] == {"train": 10 if policy == "drop" else 11, "heldout": 10}
    train = TokenDataset.open(folder)
    assert train.lengths.max() == (300 if policy == "truncate" else train.lengths[:10].max())
    if policy == "truncate":
        ids, mask = train.row(10)
        assert AutoTokenizer.from_pretrained(tokenizers / "chatml").decode(ids[mask]) == "y" * int(mask.sum())


def test_heldout_records_are_the_same_whatever_is_dropped(tmp_path, tokenizers):
    records = write(tmp_path / "r.jsonl", [*QUESTIONS[:38], {"question": "x", "answer": "y" * 500}, QUESTIONS[39]])
    folder = prepare_chats(records, tmp_path / "out", str(tokenizers / "chatml"), heldout=3, max_length=300)
    tokenizer = AutoTokenizer.from_pretrained(tokenizers / "chatml")
    heldout = TokenDataset.open(folder, "heldout")
    assert [tokenizer.decode(ids[mask]) for ids, mask in map(heldout.row, range(2))] == ["It is 38.<|im_end|>", "It is 40.<|im_end|>"]
    assert describe(folder)["rows"] == {"train": 37, "heldout": 2}


def test_rows_without_supervision_are_warned_of_and_refused_if_there_are_no_others(tmp_path, tokenizers, capsys):
    silent = {"messages": [{"role": "user", "content": "Hello?"}]}
    for share, warns in ((2, False), (3, True)):
        path = write(tmp_path / "some.jsonl", [silent] * share + QUESTIONS[: 40 - share])
        folder = prepare_chats(path, tmp_path / f"out{share}", str(tokenizers / "chatml"), heldout=2)
        expected = [f"{share} of 40 rows ({share / 40:.1%}) have no supervised token and teach nothing"] if warns else []
        assert describe(folder)["warnings"] == expected
        assert describe(folder)["unsupervised_rows"] == {"train": share, "heldout": 0}
        assert ("Warning: 3 of 40" in capsys.readouterr().out) == warns
    with pytest.raises(DatasetError, match="no row of train has a supervised token"):
        prepare_chats(write(tmp_path / "none.jsonl", [silent] * 5), tmp_path / "none", str(tokenizers / "chatml"), heldout=0)
    assert not (tmp_path / "none").exists()


def test_bad_records_are_named_or_dropped(tmp_path, tokenizers):
    partial = {"messages": [{"role": "assistant", "content": "No question."}]}
    path = write(tmp_path / "bad.jsonl", [*QUESTIONS[:5], partial, *QUESTIONS[5:10]])
    with pytest.raises(DatasetError, match=r"bad\.jsonl, line 6: the chat template refuses it: No user query found\..*--bad-records drop"):
        prepare_chats(path, tmp_path / "out", str(tokenizers / "thinking"), heldout=0)
    assert list(tmp_path.iterdir()) == [path]
    folder = prepare_chats(path, tmp_path / "out", str(tokenizers / "thinking"), heldout=0, bad_records="drop")
    assert (describe(folder)["bad_records"], describe(folder)["rows"]["train"]) == (1, 10)


@pytest.mark.parametrize("place", [0, 3, 10])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "Cut', "no valid JSON"),
        ("[1]", "it holds a JSON list"),
        (r'{"question": "Half \ud83d?", "answer": "Yes."}', r"\\ud83d is half of a character"),
        ('{"messages": [{"role": "wizard", "content": "Hi."}]}', "message 1 has the role 'wizard'"),
    ],
)
def test_every_kind_of_bad_line_is_named_or_dropped_wherever_it_stands(tmp_path, tokenizers, place, line, message):
    lines = [json.dumps(record) for record in QUESTIONS[:10]]
    lines.insert(place, line)
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(DatasetError, match=rf"bad\.jsonl, line {place + 1}: {message}.*--bad-records drop"):
        prepare_chats(path, tmp_path / "out", str(tokenizers / "chatml"), heldout=0)
    folder = prepare_chats(path, tmp_path / "out", str(tokenizers / "chatml"), heldout=0, bad_records="drop")
    assert (describe(folder)["bad_records"], describe(folder)["rows"]["train"]) == (1, 10)


def test_a_source_field_becomes_a_column(tmp_path, tokenizers):
    records = [{**record, "source": ("maths", "code")[i % 2]} for i, record in enumerate(QUESTIONS[:9])] + [QUESTIONS[9]]
    folder = prepare_chats(write(tmp_path / "mixed.jsonl", records), tmp_path / "out", str(tokenizers / "chatml"), heldout=2)
    train = [row for batch in read_batches(folder / "train" / "data-00000.arrow", ["source"]) for row in batch["source"].to_pylist()]
    heldout = [row for batch in read_batches(folder / "heldout" / "data-00000.arrow", ["source"]) for row in batch["source"].to_pylist()]
    assert train + heldout == [*(("maths", "code") * 5)[:9], "unknown"]


def test_a_record_without_tokens_is_a_bad_one(tmp_path, tokenizers):
    path = write(tmp_path / "empty.jsonl", [{"prompt": "", "completion": ""}, {"prompt": "a", "completion": "b"}])
    bare = tiny.byte_tokenizer(None, eos=None)
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(DatasetError, match=r"empty\.jsonl, line 1: it holds no token"):
        prepare_chats(path, tmp_path / "out", str(tmp_path / "bare"), heldout=0)
    folder = prepare_chats(path, tmp_path / "out", str(tmp_path / "bare"), heldout=0, bad_records="drop")
    assert (describe(folder)["rows"]["train"], describe(folder)["bad_records"]) == (1, 1)


def test_an_existing_folder_is_kept_unless_told(tmp_path, tokenizers, questions):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    for overwrite, message in ((False, "exists. Name another folder, or replace"), (True, "is no prepared dataset")):
        with pytest.raises(FileExistsError, match=message):
            prepare_chats(questions, tmp_path / "mine", str(tokenizers / "chatml"), heldout=5, overwrite=overwrite)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    out = prepare_chats(questions, tmp_path / "out", str(tokenizers / "chatml"), heldout=5)
    with pytest.raises(FileExistsError):
        prepare_chats(questions, out, str(tokenizers / "chatml"), heldout=5)
    prepare_chats(questions, out, str(tokenizers / "chatml"), heldout=7, overwrite=True)
    assert describe(out)["rows"]["heldout"] == 7


def test_a_folder_below_a_file_cannot_be_made(tmp_path, questions):
    with pytest.raises(FileExistsError, match=r"questions\.jsonl is a file, so .* cannot be made below it"):
        prepare_chats(questions, questions / "a" / "b", "sample", heldout=5)


def test_a_failed_run_leaves_the_old_dataset_and_no_litter(tmp_path, tokenizers, questions):
    out = prepare_chats(questions, tmp_path / "out", str(tokenizers / "chatml"), heldout=5)
    questions.write_text(questions.read_text() + "{broken\n")
    with pytest.raises(DatasetError, match="line 41: no valid JSON"):
        prepare_chats(questions, out, str(tokenizers / "chatml"), heldout=5, overwrite=True)
    assert describe(out)["rows"] == {"train": 35, "heldout": 5}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "questions.jsonl"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heldout": 40}, DatasetError, "40 records cannot be held out of 40"),
        ({"heldout": -1}, ValueError, "heldout is -1"),
        ({"heldout": 1.5}, ValueError, "heldout is 1.5"),
        ({"heldout": True}, ValueError, "heldout is True"),
        ({"heldout": float("inf")}, ValueError, "heldout is inf"),
        ({"heldout": float("nan")}, ValueError, "heldout is nan"),
        ({"heldout": 5, "too_long": "cut"}, ValueError, "too_long is 'cut'; choose one of drop, truncate, error"),
        ({"heldout": 5, "max_length": 0}, ValueError, "max_length is 0"),
        ({"heldout": 5, "max_length": 10}, DatasetError, "no row is left for train; 40 records were too long"),
        ({"heldout": 5, "tokenizer": "no/such-tokenizer"}, FileNotFoundError, "hf download no/such-tokenizer"),
    ],
)
def test_options_that_cannot_be(tmp_path, tokenizers, questions, options, error, message):
    with pytest.raises(error, match=message):
        prepare_chats(questions, tmp_path / "out", **{"tokenizer": str(tokenizers / "chatml"), **options})
    assert not (tmp_path / "out").exists()


def test_smollm2_before_it_is_made_says_how(tmp_path, questions, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match="make smollm2"):
        prepare_chats(questions, tmp_path / "out", "smollm2", heldout=5)


def test_an_empty_file(tmp_path, tokenizers):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DatasetError, match=r"empty\.jsonl holds no records"):
        prepare_chats(tmp_path / "empty.jsonl", tmp_path / "out", str(tokenizers / "chatml"))


def test_command_line(tmp_path, tokenizers, questions, capsys):
    main([str(questions), str(tmp_path / "out"), "--tokenizer", str(tokenizers / "chatml"), "--heldout", "0.1"])
    out = capsys.readouterr().out
    assert "40 records of" in out
    assert "train: 36 rows" in out and "heldout: 4 rows" in out
    command = [sys.executable, "-m", "dflash_nb.data.prepare", "absent.jsonl", "new", "--tokenizer", "sample"]
    for given, said in (("abc", "'abc' was given; give a number of records"), ("nan", "heldout is nan"), ("inf", "heldout is inf")):
        with pytest.raises(SystemExit) as refused:
            main([str(questions), str(tmp_path / "new"), "--tokenizer", "sample", "--heldout", given])
        assert said in f"{refused.value} {capsys.readouterr().err}"
    failed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert failed.returncode == 1
    assert failed.stderr.strip() == f"error: {tmp_path / 'absent.jsonl'} does not exist. Name a .jsonl file or a folder of them."


def test_batches_of_prepared_rows_are_right_padded_even_for_a_left_padding_tokenizer(tmp_path, tokenizers, questions):
    folder = prepare_chats(questions, tmp_path / "out", str(tokenizers / "left"), heldout=5)
    dataset = TokenDataset.open(folder)
    batch = dataset.collate(np.arange(10), int(dataset.lengths.max()) + 3, pad_id=0)
    for b, n in enumerate(batch.lengths_B):
        assert batch.input_ids_BT[b, :n].tolist() == dataset.row(b)[0].tolist()
        assert not batch.loss_mask_BT[b, n:].any()


PEAKS = """
import sys, tracemalloc
from dflash_nb.data import prepare
prepare.CHUNK_RECORDS = 25
for count in (50, 50, 500):  # the first run also pays for what transformers loads and keeps
    tracemalloc.start()
    prepare.prepare_chats(f"{count}.jsonl", "out", sys.argv[1], heldout=1, overwrite=True)
    print("peak", tracemalloc.get_traced_memory()[1])
    tracemalloc.stop()
"""


def test_memory_does_not_grow_with_the_file(tmp_path, tokenizers):
    """In a process of its own: garbage waits longer in one that holds much, as that of other tests may."""
    for count in (50, 500):
        write(tmp_path / f"{count}.jsonl", [{"question": "q" * 50, "answer": "a" * 250}] * count)
    command = [sys.executable, "-c", PEAKS, str(tokenizers / "chatml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    peaks = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("peak")]
    assert peaks[2] < 1.3 * peaks[1]
