"""Progress lines: every item once, no line for what is short, the time left from the pace so far."""

import pytest

from dflash_nb import progress
from dflash_nb.progress import announced, clock


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
