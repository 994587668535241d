"""Measured strategies: the shipped results are whole and drawn as they are; files that are none are refused by name."""

import json

import pytest

from dflash_nb.analysis.experiment import SHIPPED, ExperimentError, learning_rows, read_experiment, speed_rows
from dflash_nb.analysis.plots import padding
from dflash_nb.analysis.plots.style import percent


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_results_are_whole_and_drawn(name):
    experiment = read_experiment(name)
    rows = speed_rows(experiment)
    assert {"sorted", "random", "bucketed six", "bucketed auto", "bucketed auto time", "pooled"} <= {row["strategy"] for row in rows}
    assert [row["measured_ratio"] for row in rows] == sorted((row["measured_ratio"] for row in rows), reverse=True)
    plot = padding.trained(experiment, name)
    [axis] = plot.figure.axes
    bars = {label.get_text(): bar.get_width() for label, bar in zip(axis.get_yticklabels(), axis.patches, strict=True)}
    assert bars == pytest.approx({row["strategy"]: row["measured_ratio"] for row in rows})
    [auto] = [row["measured_ratio"] for row in rows if row["strategy"] == "bucketed auto"]
    assert f"auto buckets have {auto:.2f} times the speed of sorted batches" in plot.finding
    diamonds = [line.get_xdata()[0] for line in axis.lines if line.get_marker() == "D"]
    apart = max(abs(diamond / bar - 1) for diamond, bar in zip(diamonds, bars.values(), strict=True))
    assert plot.finding.endswith(f"predictions are off by {percent(apart)} at most"), "diamonds against their bars"


def test_learning_is_shown_where_it_was_measured():
    assert {row["strategy"] for row in learning_rows(read_experiment("sample"))} == {"sorted", "random", "bucketed auto"}
    assert learning_rows({"speed": []}) == [] and speed_rows(read_experiment("")) == learning_rows(None) == []


def test_what_is_no_experiment_is_refused_by_name(tmp_path):
    with pytest.raises(ExperimentError, match=r"none\.json is not there; choose sample, smollm2 or make one"):
        read_experiment(tmp_path / "none.json")
    good = read_experiment("sample")
    first, rest = good["speed"][0], good["speed"][1:]
    for broken, what in (
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[]", "holds no object"),
        ({"learning": good["learning"]}, "holds no measured speeds; make it with benchmarks/strategies.py --part speed"),
        (good | {"speed": []}, "holds no measured speeds"),
        (good | {"speed": [None]}, "holds no measured speeds"),
        (good | {"speed": [{"strategy": "sorted"}]}, "lacks padding in row 1"),
        (good | {"speed": [first | {"padding": None}, *rest]}, "holds None as padding in row 1"),
        (good | {"speed": [first | {"predicted_ratio": float("nan")}, *rest]}, "holds nan as predicted_ratio"),
        (good | {"speed": [first | {"measured_ratio": 10**400}, *rest]}, "holds 10000.* as measured_ratio"),
        (good | {"speed": [first | {"measured_ratio": 0}, *rest]}, "holds 0 as measured_ratio"),
        (good | {"speed": [first | {"strategy": 3}, *rest]}, "holds 3 as strategy"),
        (good | {"speed": [first]}, "has 0 rows of the strategy 'bucketed auto'"),
        (good | {"speed": [*good["speed"], *rest]}, "has 2 rows of the strategy 'bucketed auto'"),
        (good | {"options": {"target": "sample"}}, r"lacks options\.rounds"),
        (good | {"cost": good["cost"] | {"belongs_to": "here"}}, r"lacks cost\.belongs_to\.hardware"),
        (good | {"cost": good["cost"] | {"source": "assumed"}}, "lacks a measured cost model"),
        (good | {"cost": good["cost"] | {"source": 3}}, "lacks a measured cost model"),
        (good | {"learning": [3]}, "holds a learning that is no list of rows"),
    ):
        (tmp_path / "s.json").write_text(broken if isinstance(broken, str) else json.dumps(broken))
        with pytest.raises(ExperimentError, match=rf"s\.json {what}"):
            read_experiment(tmp_path / "s.json")
    for path in (tmp_path, tmp_path / ("n" * 300)):
        with pytest.raises(ExperimentError, match=r"cannot be read: .* give the path of a strategies\.json"):
            read_experiment(path)


def test_the_picture_has_room_for_the_fastest():
    good = read_experiment("sample")
    fast = [row | {"measured_ratio": 3.0, "ratio_error": None} if row["strategy"] == "pooled" else row for row in good["speed"]]
    [axis] = padding.trained(good | {"speed": fast}, "mine").figure.axes
    assert axis.get_xlim()[1] > 3.5
