"""Tables of what a run achieved: every range has its own numbers, and the plan's stand beside the log's."""

import numpy as np
import pytest
from runs import Recipe, padded_tokens, real_tokens, records, write_run

from dflash_nb.analysis.achieved import by_length, length_ranges, planned_against_achieved
from dflash_nb.pipeline.runlog import RunLog, read_run


def test_time_by_length_is_each_buckets_own(tmp_path):
    recipe = Recipe(steps=30, accumulation=4)
    rows = by_length(read_run(write_run(tmp_path / "run", recipe)))
    assert [row["lengths"] for row in rows] == ["0 - 127", "128 - 255", "256 - 511", "512 - 1,024"]
    assert sum(row["batches"] for row in rows) == 120
    for bucket, row in enumerate(rows):
        own = recipe.step_seconds[bucket] + recipe.wait_seconds + 0.001 + 0.01 / 4
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
