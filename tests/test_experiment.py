"""Measured strategies: the shipped results are whole and drawn as they are; files that are none are refused by name."""

import json

import pytest

from dflash_nb.analysis.experiment import SHIPPED, ExperimentError, learning_rows, read_experiment, speed_rows
from dflash_nb.analysis.plots import padding


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
    assert f"auto buckets reach {auto:.2f} of sorted" in plot.finding


def test_learning_is_shown_where_it_was_measured():
    assert {row["strategy"] for row in learning_rows(read_experiment("sample"))} == {"sorted", "random", "bucketed auto"}
    assert learning_rows({"speed": []}) == [] and speed_rows(read_experiment("")) == learning_rows(None) == []


def test_what_is_no_experiment_is_refused_by_name(tmp_path):
    with pytest.raises(ExperimentError, match=r"none\.json is not there; choose sample, smollm2 or make one"):
        read_experiment(tmp_path / "none.json")
    good = read_experiment("sample")
    for broken, what in (
        ("{", "no measured speeds"),
        ("[]", "no measured speeds"),
        (json.dumps(good | {"speed": [{"strategy": "sorted"}]}), "lacks padding"),
        (json.dumps(good | {"cost": {"source": "assumed"}}), "lacks a measured cost model"),
    ):
        (tmp_path / "s.json").write_text(broken)
        with pytest.raises(ExperimentError, match=rf"s\.json .*{what}"):
            read_experiment(tmp_path / "s.json")
