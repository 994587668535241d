"""Tables of what a run achieved: every range has its own numbers, and the plan's stand beside the log's."""

import numpy as np
import pytest
from runs import Recipe, padded_tokens, real_tokens, records, write_run
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.analysis.achieved import by_length, length_ranges, planned_against_achieved
from dflash_nb.pipeline.runlog import RunLog, read_run
from dflash_nb.pipeline.train import train


def test_time_by_length_is_each_buckets_own(tmp_path):
    recipe = Recipe(steps=30, accumulation=4)
    rows = by_length(read_run(write_run(tmp_path / "run", recipe)))
    assert [row["lengths"] for row in rows] == ["0 - 127", "128 - 255", "256 - 511", "512 - 1,024"]
    assert sum(row["batches"] for row in rows) == 120
    for bucket, row in enumerate(rows):
        own = recipe.step_seconds[bucket] + recipe.wait_seconds + 0.01 / 4
        assert row["ms a batch"] == pytest.approx(1000 * own)
        assert row["padding %"] == pytest.approx(100 * (1 - real_tokens(recipe)[bucket] / padded_tokens(recipe)[bucket]))


def test_many_buckets_are_joined_and_none_is_lost(tmp_path):
    n = 90
    edges = tuple(range(0, 20 * n + 1, 20))
    recipe = Recipe(steps=400, edges=edges, levels=(0.0,) * n, shares=(1.0,) * n, batch_rows=(8,) * n, step_seconds=(0.1,) * n)
    run = read_run(write_run(tmp_path / "run", recipe))
    labels, group = length_ranges(run)
    assert len(labels) == 8 and np.bincount(group).min() > 25 and len(group) == 400
    for i, label in enumerate(labels):
        low, high = (int(part.replace(",", "")) for part in label.split(" - "))
        assert (run.batches["padded_length"][group == i] >= low).all() and (run.batches["padded_length"][group == i] <= high).all()


def test_mixed_batches_are_ranged_by_their_padded_length(tmp_path):
    made = records(Recipe(steps=20))
    for record in made:
        record["batches"][0]["bucket"] = -1
    with RunLog.create(tmp_path, {}) as log:
        for record in made:
            log.step(record)
    labels, _ = length_ranges(read_run(tmp_path))
    assert labels == ["64 - 127", "128 - 255", "256 - 511", "1,024 - 2,047"]


def test_planned_and_achieved_stand_side_by_side(tmp_path):
    run = read_run(write_run(tmp_path / "run", Recipe(steps=40), upto=17, status=None))
    rows = {row["measure"]: row for row in planned_against_achieved(run)}
    assert (rows["optimiser steps"]["planned"], rows["optimiser steps"]["achieved"]) == ("40", "17")
    assert rows["real tokens/s"]["planned"] == "unknown"


def test_a_run_that_keeps_its_plan_has_the_planned_numbers(tmp_path):
    """Padding, order and mates by the same functions on both sides; the speed that is planned is the first steps' own."""
    dataset, target = write_dataset(tmp_path / "data", train=90), save_target(tmp_path / "target", "llama")
    summary = train(tiny_config(dataset, target, tmp_path / "runs", token_budget=128, max_batch=4, epochs=1))
    run = read_run(summary.run_dir)
    rows = {row["measure"]: row for row in planned_against_achieved(run)}
    assert not any("unknown" in row.values() for row in rows.values())
    for name in (
        "optimiser steps",
        "batches",
        "padding, % of padded tokens",
        "fill, % of the budget",
        "longest run of one bucket, batches",
    ):
        assert rows[name]["planned"] == rows[name]["achieved"], name
    assert rows["neighbours alike (lag-1 of mean length)"]["planned"] == rows["neighbours alike (lag-1 of mean length)"]["achieved"]
    steps = run.steps
    assert run.plan["tokens_per_second"] == pytest.approx(steps["tokens"][5:25].sum() / steps["seconds_step"][5:25].sum(), rel=1e-6)
    assert run.plan["speed_source"] == "measured on steps 6 to 25"


def test_mates_are_counted_between_epochs(tmp_path):
    dataset, target = write_dataset(tmp_path / "data"), save_target(tmp_path / "target", "llama")
    for strategy, same in (("sorted", True), ("random", False)):
        run = read_run(train(tiny_config(dataset, target, tmp_path / "runs", strategy=strategy)).run_dir)
        [row] = [row for row in planned_against_achieved(run) if row["measure"].startswith("mates")]
        assert abs(float(row["planned"]) - float(row["achieved"])) < 2
        assert (float(row["achieved"]) > 99) == same
