"""Progress lines: every item once, no line for what is short, the time left from the pace so far."""

import json
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_nb import progress
from dflash_nb.data.lengths import read_lengths
from dflash_nb.data.prepare import prepare_chats
from dflash_nb.model.loading import load_model
from dflash_nb.model.target_info import read_target_info
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.diversity import mixing_report
from dflash_nb.planner.simulate import simulate
from dflash_nb.progress import announced, clock, one_work, ticking


@pytest.fixture
def watch(monkeypatch):
    """A clock that moves only when told to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_with_time_not_with_items(watch, capsys):
    seen = []
    for item in announced(range(10), "planning epochs"):
        seen.append(item)
        watch[0] += 2.0
    assert seen == list(range(10))
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["planning epochs: 3 of 10, ETA 0:14", "planning epochs: 6 of 10, ETA 0:08", "planning epochs: 9 of 10, ETA 0:02"]


def test_what_is_short_says_nothing(watch, capsys):
    assert list(announced(["a", "b"], "planning")) == ["a", "b"] and list(announced([], "planning")) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (59.6, "1:00"), (97_331, "27:02:11")])
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_the_parts_of_one_work_are_not_silent_together(watch, capsys):
    def parts():
        for name in ("shuffling", "cutting"):
            for _ in announced(range(2), name):
                watch[0] += 2.0

    parts()
    assert capsys.readouterr().out == ""
    with one_work():
        parts()
    assert capsys.readouterr().out.splitlines() == ["cutting: 1 of 2, ETA 0:02"]


def test_a_line_of_its_own_for_what_has_no_length(watch, capsys):
    def line(done, seconds):
        return f"calibrating: {done} batches, ETA {clock(10 - seconds)}"

    for _ in ticking(iter("abc"), line):
        watch[0] += 4.0
    assert capsys.readouterr().out == "calibrating: 2 batches, ETA 0:02\n"


def works(folder):
    """What takes long with much data, as small as it goes: every one says something when each item takes longer than a line's time."""
    lengths = np.arange(1, 2000)
    bounds = {"boundaries": (0, 500, 2000), "token_budget": 4000}
    pq.write_table(pa.table({"seq_len": lengths}), folder / "a.parquet")
    pq.write_table(pa.table({"seq_len": lengths}), folder / "b.parquet")
    chats = "".join(json.dumps({"question": f"What is {i}?", "answer": f"It is {i}."}) + "\n" for i in range(700))
    (folder / "chats.jsonl").write_text(chats)
    return {
        "planning, ": lambda: [plan_epoch(lengths, "bucketed", **bounds), plan_epoch(lengths, "packed", token_budget=4000)],
        "comparing strategies and seeds: ": lambda: simulate(lengths, ["random"], [0, 1], **bounds),
        "reading lengths, files: ": lambda: read_lengths(folder),
        "preparing records: ": lambda: prepare_chats(folder / "chats.jsonl", folder / "out", tokenizer="sample", heldout=9),
        "measuring how batches mix, numbers: ": lambda: mixing_report(plan_epoch(lengths, "random", token_budget=4000), lengths),
        "measuring how batches mix, random orders: ": lambda: mixing_report(plan_epoch(lengths, "random", token_budget=4000), lengths),
        "loading target sample, 0.0 GiB, tensors: ": lambda: load_model(read_target_info("sample"), "float32"),
    }


WORKS = (
    "planning, ", "comparing strategies and seeds: ", "reading lengths, files: ", "preparing records: ",
    "measuring how batches mix, numbers: ", "measuring how batches mix, random orders: ", "loading target sample, 0.0 GiB, tensors: ",
)  # fmt: skip


def test_the_same_works_say_nothing_when_they_are_quick(tmp_path, watch, capsys):
    made = works(tmp_path)
    assert set(made) == set(WORKS)
    for work in made.values():
        work()
    assert not [line for line in capsys.readouterr().out.splitlines() if "ETA" in line]


@pytest.mark.parametrize("what", WORKS)
def test_long_work_says_how_far_it_is(tmp_path, monkeypatch, capsys, what):
    now = iter(range(0, 10**9, 7))
    work = works(tmp_path)[what]
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(now)))
    work()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(what)]
    assert lines and all(re.search(r"\d+ of \d+.*, ETA \d+:\d\d$", line) for line in lines)
