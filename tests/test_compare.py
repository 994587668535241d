"""Runs side by side: like is compared with like, at equal steps and equal tokens, and what differs is named."""

from dataclasses import replace

import numpy as np
from labelled_logs import SCENE, WANDB, Exported, Planted, as_csv
from runs import Recipe, write_run

from dflash_nb.analysis.compare import compare, compare_with, differing_settings
from dflash_nb.analysis.findings.finding import Log
from dflash_nb.pipeline.runlog import RunLog, read_run

BASE = Recipe(steps=600, noise=0.05, decay_steps=150)


def log_of(tmp_path, name, recipe):
    return Log(read_run(write_run(tmp_path / name, recipe)))


def test_the_same_run_with_other_mixes_of_lengths_is_not_apart(tmp_path):
    """Raw losses differ by 0.5 because one run has more long batches; adjusted, they are one."""
    one = log_of(tmp_path, "short", replace(BASE, shares=(0.7, 0.1, 0.1, 0.1)))
    two = log_of(tmp_path, "long", replace(BASE, shares=(0.1, 0.1, 0.1, 0.7), seed=1))
    raw = [np.median(log.run.steps["loss"][-200:]) for log in (one, two)]
    assert abs(raw[0] - raw[1]) > 0.5
    found = compare([one, two])
    adjusted = [row["at equal steps"] for row in found.rows]
    assert abs(adjusted[0] - adjusted[1]) < 0.06
    assert all(row["jumps, mix off"] < 0.5 * row["jumps as logged"] for row in found.rows)


def test_a_better_run_is_named_with_its_lead(tmp_path):
    found = compare([log_of(tmp_path, "base", BASE), log_of(tmp_path, "better", replace(BASE, last_loss=3.2, seed=1))])
    assert "better is 0." in found.finding and "lower than base" in found.finding
    lead = found.rows[0]["at equal tokens"] - found.rows[1]["at equal tokens"]
    assert 0.2 < lead < 0.4


def test_runs_are_compared_where_both_have_been(tmp_path):
    long, short = log_of(tmp_path, "long", BASE), log_of(tmp_path, "short", replace(BASE, steps=200, seed=1))
    found = compare([long, short])
    assert "at step 200" in found.finding and found.rows[0]["steps"] == 600
    truth = float(BASE.trend(200))
    level = found.rows[0]["at equal steps"] - truth
    assert abs(found.rows[1]["at equal steps"] - found.rows[0]["at equal steps"]) < 0.08 and abs(level) < 0.5


def test_equal_tokens_are_not_equal_steps(tmp_path):
    small = replace(BASE, batch_rows=tuple(rows // 2 for rows in BASE.batch_rows), seed=1)
    found = compare([log_of(tmp_path, "whole", BASE), log_of(tmp_path, "half", small)])
    assert found.tokens_word == "supervised tokens seen"
    whole, half = found.lines
    assert np.isclose(whole.tokens[-1], 2 * half.tokens[-1], rtol=0.1)
    assert found.rows[0]["at equal tokens"] > found.rows[0]["at equal steps"] + 0.01


def test_settings_that_differ_are_listed_and_harmless_ones_are_not(tmp_path):
    one = log_of(tmp_path, "one", replace(BASE, steps=60, config={"threads": 1, "strategy": "random"}))
    two = log_of(tmp_path, "two", replace(BASE, steps=60, peak_lr=2e-3, config={"threads": 2}))
    rows = {row["setting"]: (row["one"], row["two"]) for row in differing_settings([one, two], ["one", "two"])}
    assert rows == {"learning_rate": ("0.001", "0.002"), "strategy": ("random", "bucketed")}
    assert compare([one, two]).differs == differing_settings([one, two], ["one", "two"])


def test_runs_of_different_kinds_are_called_so(tmp_path):
    one = log_of(tmp_path, "one", BASE)
    two = log_of(tmp_path, "two", replace(BASE, seed=1, block_size=16, config={"objective": "kl"}))
    found = compare([one, two])
    assert found.finding == (
        "These 2 losses are not one quantity, block_size and objective differ: no gap is given, compare the shapes only"
    )
    assert [set(row) & {"at equal steps", "at equal tokens", "error"} for row in found.rows] == [set(), set()]
    assert [row["run"] for row in found.rows] == ["one", "two"] and len(found.lines) == 2


def test_a_run_beside_an_export_of_another(tmp_path):
    export = Exported(Planted(replace(BASE, seed=2), after=as_csv(WANDB)))(tmp_path / "other")
    found = compare_with(log_of(tmp_path, "mine", BASE), [str(export)])
    assert [line.name for line in found.lines] == ["mine", "export.csv"]
    assert found.tokens_word == "steps (a log counts no tokens)" and "mine" in found.finding
    assert found.finding.endswith("whether block_size, dataset, gamma, objective and target agree is not in every log")
    assert "at equal steps" in found.rows[0]


def test_alone_twice_and_with_an_empty_one(tmp_path):
    log = log_of(tmp_path, "mine", replace(BASE, steps=50))
    assert "stands alone" in compare([log]).finding and len(compare([log]).rows) == 1
    twice = compare([log, Log(log.run)])
    assert [line.name for line in twice.lines] == ["mine (1)", "mine (2)"] and "not apart" in twice.finding
    (tmp_path / "empty").mkdir()
    RunLog.create(tmp_path / "empty", {}).close()
    with_empty = compare_with(log, [str(tmp_path / "empty")])
    assert len(with_empty.lines) == 1 and "without a loss: empty" in with_empty.note
    assert compare([Log(read_run(tmp_path / "empty"))]).lines == ()


def test_the_reference_scene(tmp_path):
    bucketed = Log(read_run(Planted(SCENE)(tmp_path / "bucketed")))
    ordered = Log(read_run(Planted(replace(SCENE, order="sorted", seed=1), config={"strategy": "sorted"})(tmp_path / "sorted")))
    found = compare([bucketed, ordered])
    assert found.finding.endswith("sorted is smooth by composition")
    jumps = {row["run"]: (row["jumps as logged"], row["jumps, mix off"]) for row in found.rows}
    assert jumps["bucketed"][0] > 5 * jumps["sorted"][0]
    assert jumps["bucketed"][1] < 1.5 * jumps["sorted"][1]


def test_one_step_has_no_noise_to_compare_with(tmp_path):
    """Its spread around itself is zero, which is no error of zero."""
    one, many = log_of(tmp_path, "one", replace(BASE, steps=1)), log_of(tmp_path, "many", replace(BASE, steps=60, last_loss=2.0))
    found = compare([one, many])
    errors = {row["run"]: row["error"] for row in found.rows}
    assert np.isnan(errors["one"]) and errors["many"] > 0
    assert "(too few steps to know the noise: 1 step of one)" in found.finding and "noise 0" not in found.finding
    assert "noise: 1 step of one (1) and 1 step of one (2)" in compare([one, Log(one.run)]).finding


def test_a_run_may_be_called_as_a_column_or_as_another_one(tmp_path):
    """Whatever the folders are called, every run has a name of its own, and the guard over objectives holds."""
    kinds = {"objective": "ce"}, {"objective": "kl"}
    for i, names in enumerate((("setting", "other"), ("setting", "setting"), ("a", "a", "a (1)"), ("setting (1)", "setting", "setting"))):
        logs = [log_of(tmp_path / str(i) / str(j), name, replace(BASE, steps=60, config=kinds[j > 0])) for j, name in enumerate(names)]
        found = compare(logs)
        made = [line.name for line in found.lines]
        assert len({*made, "setting"}) == len(names) + 1 and all(name.startswith(given) for name, given in zip(made, names, strict=True))
        assert "not one quantity, objective differs" in found.finding
        [row] = found.differs
        assert row == {"setting": "objective", **{name: kinds[j > 0]["objective"] for j, name in enumerate(made)}}
