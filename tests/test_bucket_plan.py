"""pytest tests/test_bucket_plan.py"""

import json
from dataclasses import replace

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.bucket_plan import BucketPlan
from dflash_nb.planner.buckets import evaluate_buckets, optimize_buckets
from dflash_nb.planner.diversity import repeated_mates
from dflash_nb.planner.limits import BucketError


def test_a_plan_comes_back_from_its_file(tmp_path):
    plan = optimize_buckets(LengthHistogram.from_lengths(np.arange(1, 2000)))
    assert plan.why["rule"] and plan.save(tmp_path / "new" / "buckets.json").is_file()
    assert BucketPlan.load(tmp_path / "new" / "buckets.json") == plan
    saved = json.loads((tmp_path / "new" / "buckets.json").read_text())
    assert saved["totals"]["efficiency"] == plan.efficiency
    assert BucketPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"format": 2}', '{"format": 1}', "not json", '{"format": 1, "rows": [{}], "boundaries": [0, 5]}', "\0"]
)
def test_another_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(BucketError, match=r"other\.json"):
        BucketPlan.load(tmp_path / "other.json")


def test_totals_are_those_of_the_rows():
    plan = evaluate_buckets(read_histogram("reference"), (0, 770, 1216, 1728, 2432, 3296, 8192))
    table = plan.table()
    assert sum(row["samples"] for row in table) == 902_087 and plan.tokens == sum(row["tokens"] for row in table) == 1_865_899_240
    assert plan.efficiency == pytest.approx(plan.tokens / sum(row["samples"] * row["expected_padded"] for row in table))
    assert plan.fill == pytest.approx(plan.tokens / (plan.batches * 49152))
    for row in table:
        assert row["mean"] == pytest.approx(row["tokens"] / row["samples"])
        assert row["efficiency"] == pytest.approx(row["mean"] / row["expected_padded"])
        assert row["batches"] == pytest.approx(row["samples"] / row["batch_size"])


def test_mates_again_is_what_two_epochs_give():
    histogram = read_histogram("reference")
    plan = optimize_buckets(histogram, 24)
    lengths = histogram.expand(0)
    first, second = (plan_epoch(lengths, boundaries=plan.boundaries, epoch=epoch) for epoch in (0, 1))
    assert plan.mates_again == pytest.approx(float(repeated_mates(first, second)), rel=0.05)


def test_mates_of_a_single_batch_always_meet_again_and_a_lone_sample_has_none():
    def again(lengths):
        return evaluate_buckets(LengthHistogram.from_lengths(np.array(lengths)), []).mates_again

    assert again([5, 6, 7]) == 1.0
    assert again([5]) == 0.0
    assert again([40_000, 40_001]) == 0.0


def test_a_plan_says_what_it_was_made_for_and_what_is_unlike(tmp_path):
    plan = replace(
        optimize_buckets(LengthHistogram.from_lengths(np.arange(1, 2000)), 3), made_for={"dataset": "sample", "column": "seq_len"}
    )
    loaded = BucketPlan.load(plan.save(tmp_path / "buckets.json"))
    assert loaded == plan and json.loads((tmp_path / "buckets.json").read_text())["made_for"]["dataset"] == "sample"
    assert loaded.unlike(dataset="sample", token_budget=49152) == []
    assert loaded.unlike(dataset="mine", token_budget=8192) == ["dataset sample, not mine", "token_budget 49152, not 8192"]
    older = {name: value for name, value in plan.to_json().items() if name != "made_for"}
    assert BucketPlan.from_json(older).unlike(dataset="mine") == ["dataset unknown, not mine"]


@pytest.mark.parametrize(
    ("change", "say"),
    [
        ({"boundaries": []}, "boundaries must begin with 0"),
        ({"boundaries": [0]}, "boundaries must begin with 0"),
        ({"boundaries": [5, 2000]}, "boundaries must begin with 0"),
        ({"boundaries": [0, 10.5, 2000]}, "edges must be whole numbers"),
        ({"boundaries": [0, 100, 50]}, "edges must increase"),
        ({"boundaries": [0, 1e300]}, "edges must be at most"),
        *(({name: value}, f"{name} must be") for name in ("token_budget", "max_batch", "pad_multiple") for value in (0, -1, 2**31)),
        ({"pad_multiple": 50_000}, "pad_multiple 50000 is above token_budget"),
    ],
)
def test_cuts_and_limits_that_none_can_be_are_refused_with_the_file(tmp_path, change, say):
    plan = optimize_buckets(LengthHistogram.from_lengths(np.arange(1, 2000)), 3)
    file = plan.save(tmp_path / "buckets.json")
    file.write_text(json.dumps(plan.to_json() | {"boundaries": [float(edge) for edge in plan.boundaries]}))
    assert BucketPlan.load(file) == plan
    file.write_text(json.dumps(plan.to_json() | change))
    with pytest.raises(BucketError, match=rf"^{file}: .*{say}"):
        BucketPlan.load(file)


def test_a_folder_is_no_plan(tmp_path):
    with pytest.raises(BucketError, match=f"^{tmp_path}: .*Make it again"):
        BucketPlan.load(tmp_path)
