"""Sliders over the cuts: a move makes the plan that the optimiser gives, and where nobody watches the plan is shown as it is."""

import numpy as np
import pytest

from dflash_nb.analysis import explore as room
from dflash_nb.analysis.explore import explore, replanned, sliders, summary
from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.buckets import evaluate_buckets, optimize_buckets

HISTOGRAM = LengthHistogram.from_lengths(np.random.default_rng(0).integers(20, 900, 4000))
PLAN = optimize_buckets(HISTOGRAM, 4, token_budget=4096, max_batch=16)


def test_replanned_is_what_the_optimiser_gives():
    other = replanned(HISTOGRAM, PLAN, 8, 8192, 64)
    assert other == optimize_buckets(HISTOGRAM, 8, token_budget=8192, max_batch=16, pad_multiple=64)
    assert other.max_batch == PLAN.max_batch
    given = evaluate_buckets(HISTOGRAM, (100, 200), token_budget=4096, max_batch=16)
    assert replanned(HISTOGRAM, given, 3, 4096, 1) is given, "cuts that were given are shown as they are until a slider moves"


def test_sliders_start_at_the_plan_and_offer_only_what_fits():
    controls = sliders(HISTOGRAM, PLAN)
    assert [control.value for control in controls.values()] == [4, 4096, 1]
    assert list(controls["token_budget"].options) == [1024, 2048, 3072, 4096, 6144, 8192, 16384]
    tight = optimize_buckets(HISTOGRAM, 2, token_budget=900, max_batch=16)
    assert min(sliders(HISTOGRAM, tight)["token_budget"].options) == 900
    for budget in controls["token_budget"].options:
        for multiple in controls["pad_multiple"].options:
            assert replanned(HISTOGRAM, PLAN, 2, budget, multiple).token_budget == budget


def test_nobody_watching_gets_the_numbers_and_no_widget(capsys, monkeypatch):
    monkeypatch.setattr(room, "sliders", None)
    explore(HISTOGRAM, PLAN, "mine")
    said = capsys.readouterr().out
    assert "In JupyterLab" in said and "4,096" in said


@pytest.fixture
def screen(monkeypatch):
    """What a notebook would show: (object, metadata) of the first display and of every update."""
    import IPython.display

    shown = []

    class Handle:
        def update(self, value, metadata=None):
            shown.append((value, metadata))

    def display(*values, metadata=None, display_id=None):
        shown.extend((value, metadata) for value in values)
        return Handle() if display_id else None

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(room, "somebody_watches", lambda: True)
    return shown


def test_moving_a_slider_replaces_picture_and_table(screen):
    explore(HISTOGRAM, PLAN, "mine")
    count, budget, multiple = (value for value, _ in screen[:3])
    assert len(screen) == 5 and screen[3][0].data.startswith(b"\x89PNG") and screen[4][0].equals(summary(PLAN))
    count.value = 8
    expected = replanned(HISTOGRAM, PLAN, 8, 4096, 1)
    assert len(screen) == 7 and screen[6][0].equals(summary(expected))
    assert screen[5][1]["image/png"]["alt"].startswith("8 buckets keep")
    budget.value, multiple.value = 8192, 64
    assert screen[-1][0].iloc[0]["pad_multiple"] == "64" and screen[-1][0].iloc[0]["token_budget"] == "8,192"
