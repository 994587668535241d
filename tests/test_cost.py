"""The cost model: terms, JSON, and the reference run's speeds that the assumed coefficients come from."""

from dataclasses import replace

import numpy as np
import pytest

from dflash_nb.data.lengths import read_histogram
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import REFERENCE_BOUNDARIES, optimize_buckets
from dflash_nb.planner.cost import CostError, CostModel, distinct_shapes
from dflash_nb.planner.timeline import Pipeline, plan_timeline


def test_terms_add_up_and_shapes_broadcast():
    cost = CostModel(fetch=(1, 1, 1), target=(1, 2, 3, 4, 5), transfer=(4, 5), drafter=(6, 7, 8, 9, 10), slots_per_row=10, target_workers=2)
    assert cost.fetch_seconds(2, 10) == 1 + 2 + 10
    assert cost.target_seconds(2, 5) == 1 + 2 * 10 + 3 * 10 * 5 + 4 * 5 + 5 * 2
    assert cost.target_seconds(2, 65) == 1 + 2 * 130 + 3 * 130 * 65 + 4 * 65 + 5 * 2 * 2
    assert cost.transfer_seconds(10) == 4 + 5 * 10
    assert cost.drafter_seconds(2, 10, 20, 100) == 6 + 7 * 2 + 8 * 10 + 9 * 20 + 10 * 100
    assert cost.batch_seconds(2, 5, "target") == (cost.target_seconds(2, 5) + cost.transfer_seconds(10)) / 2
    assert cost.batch_seconds(2, 5, "drafter") == cost.drafter_seconds(2, 10, 20, 100)
    assert replace(cost, step=3, accumulation=4).batch_seconds(2, 5, "drafter") == cost.drafter_seconds(2, 10, 20, 100) + 0.75
    assert cost.batch_seconds(np.array([[1], [2]]), np.array([3, 4, 5]), "target").shape == (2, 3)
    with pytest.raises(ValueError, match="target, transfer, drafter"):
        cost.batch_seconds(1, 1, "loss")


def test_int32_shapes_do_not_overflow():
    rows, padded = np.array([64], dtype=np.int32), np.array([131_072], dtype=np.int32)
    assert CostModel().target_seconds(rows, padded) == pytest.approx(CostModel().target_seconds(64.0, 131_072.0))


@pytest.mark.parametrize(("strategy", "speed"), [("sorted", 32_000), ("bucketed", 25_100), ("random", 12_000)])
def test_the_assumed_model_gives_the_reference_runs_speeds(strategy, speed):
    lengths = read_histogram("reference").expand(0)
    plan = plan_epoch(lengths, strategy, REFERENCE_BOUNDARIES)
    assert CostModel().source == "assumed"
    seconds = CostModel().plan_seconds(plan, lengths)
    assert seconds["pipeline"] == seconds["target"]
    assert lengths.sum() / seconds["pipeline"] == pytest.approx(speed, rel=0.01)


@pytest.mark.parametrize("slots_per_row", [512, 1024, 2048])
def test_an_epoch_takes_what_its_slowest_stage_takes(slots_per_row):
    """The sum of each batch's slowest stage is no estimate: here it is 3 to 22 % above what a bounded window of batches takes."""
    histogram = read_histogram("reference")
    lengths = histogram.expand(0)[:200_000]
    cost = CostModel(slots_per_row=slots_per_row)
    plan = plan_epoch(lengths, boundaries=optimize_buckets(histogram, 32).boundaries)
    promised = cost.plan_seconds(plan, lengths)["pipeline"]
    assert plan_timeline(cost, plan, lengths).seconds == pytest.approx(promised, rel=0.01)
    by_batch = np.maximum.reduce([cost.plan_batch_seconds(plan, lengths, stage) for stage in cost.stages]).sum()
    assert by_batch > 1.02 * promised


def test_a_packed_row_attends_inside_its_documents():
    lengths = np.array([100, 300, 500, 100])
    cost = CostModel(target=(0, 0, 1, 0, 0), target_workers=1, drafter=(0, 1, 0, 0, 0), transfer=(0, 0))
    plan = plan_epoch(lengths, "packed", token_budget=1000)
    assert cost.plan_batch_seconds(plan, lengths, "target") == pytest.approx([100**2 + 300**2 + 500**2 + 100**2])
    assert cost.plan_batch_seconds(plan, lengths, "drafter") == pytest.approx([4])
    assert cost.plan_seconds(plan, lengths)["pipeline"] == pytest.approx(360_000)


def test_the_plans_slots_come_before_the_models():
    lengths = np.full(4, 100)
    plan = plan_epoch(lengths, "random", slots_per_row=7)
    cost = CostModel(drafter=(0, 0, 0, 1, 0))
    assert cost.plan_batch_seconds(plan, lengths, "drafter") == pytest.approx([28])
    known = np.array([1, 2, 3, 4])
    assert cost.plan_batch_seconds(plan, lengths, "drafter", known) == pytest.approx([10])


def test_short_samples_draft_fewer_slots_and_the_drafter_sees_no_padding():
    lengths = np.array([10, 1000])
    cost = CostModel(drafter=(0, 0, 1, 1, 1), slots_per_row=256, slots_per_token=4.0)
    assert cost.slots(lengths).tolist() == [40, 256]
    plan = plan_epoch(lengths, "random", token_budget=2000)
    assert len(plan) == 1 and plan.padded_tokens[0] == 2000
    seconds = cost.plan_batch_seconds(plan, lengths, "drafter")
    assert seconds == pytest.approx([1010 + 296 + 40 * 10 + 256 * 1000])


def test_each_shape_is_paid_for_once_and_an_optimiser_step_once_a_window():
    lengths = np.array([100] * 8 + [200] * 4)
    plan = plan_epoch(lengths, boundaries=[0, 150, 201], token_budget=400, window=2)
    assert len(plan) == 4 and distinct_shapes(plan) == 2
    cost = CostModel(target=(0, 0, 0, 0, 0), transfer=(0, 0), drafter=(0, 0, 0, 0, 0), target_workers=1, shape=5.0, step=7.0)
    seconds = cost.plan_seconds(plan, lengths)
    assert seconds["target"] == 10 and seconds["drafter"] == 14
    assert plan_timeline(cost, plan, lengths, Pipeline(1)).seconds >= 14


def test_a_model_is_refused_for_what_it_was_not_measured_on():
    assert CostModel().require(target="anything") == CostModel()
    measured = CostModel(source="measured on x", belongs_to={"target": "sample", "drafter": "2 layers"})
    assert measured.require(target="sample") is measured
    with pytest.raises(CostError, match="target 'sample', not 'smollm2'; drafter '2 layers', not '5 layers'"):
        measured.require(target="smollm2", drafter="5 layers")


def test_it_is_a_cost_for_cuts_by_time():
    cuts = optimize_buckets(read_histogram("reference"), 6, objective="time", cost=CostModel())
    assert len(cuts.boundaries) == 7 and cuts.objective == "time"


def test_json_round_trip_and_refusals(tmp_path):
    cost = CostModel(target=(0.1, 0.2, 0.3, 0.0, 0), source="measured on a test", belongs_to={"target": "sample"})
    cost.save(tmp_path / "cost.json")
    assert CostModel.load(tmp_path / "cost.json") == cost
    (tmp_path / "other.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"other\.json: not a cost model"):
        CostModel.load(tmp_path / "other.json")
    for wrong in ({"target": (1, 2)}, {"drafter": (1, 2, 3, 4, -1)}, {"step": -1}, {"memory": (1, 2, float("nan"))}, {"target_workers": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            CostModel(**wrong)


@pytest.mark.parametrize("name", ["target_workers", "accumulation"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5, 0])
def test_workers_and_accumulation_are_whole_numbers(name, value):
    with pytest.raises(CostError, match=f"{name} must be a whole number of at least 1, not"):
        CostModel(**{name: value})


@pytest.mark.parametrize(
    ("text", "say"),
    [
        ("[]", "not a cost model"),
        ("null", "not a cost model"),
        ('{"format": 2}', "not a cost model"),
        ("{", "Expecting"),
        ("[" * 100_000, "recursion"),
        ('{"format": 2, "source": 3}', "source holds 3, which is of the wrong kind"),
        ('{"format": 2, "source": "x", "target": 3}', "target holds 3, which is of the wrong kind"),
        ('{"format": 2, "source": "x", "belongs_to": []}', "belongs_to holds"),
        ('{"format": 2, "source": "x", "errors": "none"}', "errors holds"),
        ('{"format": 2, "source": "x", "errors": {"target": 3}}', "errors: the numbers median and total of each stage are needed"),
        ('{"format": 2, "source": "x", "errors": {"target": {"median": 0.1, "total": NaN}}}', "errors: the numbers"),
        ('{"format": 2, "source": "x", "points": {"target": [[1, 2]]}}', "points: pairs of seconds of each stage are needed"),
        ('{"format": 2, "source": "x", "step": "1"}', "step holds"),
        ('{"format": 2, "source": "x", "accumulation": true}', "accumulation holds True"),
        ('{"format": 2, "source": "x", "transfer": [1, "a"]}', "could not convert"),
        ('{"format": 2, "source": "x", "transfer": [1, 1' + "0" * 400 + "]}", "int too large"),
        ('{"format": 2, "source": "x", "step": 1' + "0" * 400 + "}", "step"),
    ],
)
def test_a_broken_file_is_refused_with_its_path(tmp_path, text, say):
    (tmp_path / "cost.json").write_text(text)
    with pytest.raises(CostError, match=rf"cost\.json: .*{say}"):
        CostModel.load(tmp_path / "cost.json")


def test_a_folder_is_no_cost_model(tmp_path):
    for path in (tmp_path, tmp_path / ("n" * 300), tmp_path / "none.json"):
        with pytest.raises(CostError, match=r"cannot be read: .*; give the path of a cost\.json"):
            CostModel.load(path)
