"""Plots of notebooks 00-02: every finding is computed, short and odd data still draw, nothing is shown twice."""

import re
from dataclasses import replace

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from runs import Recipe, write_run

from dflash_nb.analysis.compare import compare
from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.analysis.plots import buckets, diagnosis, lengths, padding, style, training
from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.data.supervision import Supervision
from dflash_nb.pipeline.run import read_run
from dflash_nb.planner.batches import plan_epoch
from dflash_nb.planner.buckets import evaluate_buckets, expected_seconds, optimize_buckets
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.options import STRATEGIES
from dflash_nb.planner.rules import elbow
from dflash_nb.planner.simulate import random_batch_waste, simulate, worst_batches

ODD = {
    "one row": [5],
    "three rows": [1, 2, 3],
    "all equal": [700] * 40,
    "two clusters": [64] * 30 + [4000] * 3,
    "long tail": [*range(1, 200), 8000],
}
odd = pytest.mark.parametrize("sample", ODD.values(), ids=ODD)
LIMITS = {"token_budget": 8192, "max_batch": 16}


def check(plot: style.Plot) -> style.Plot:
    assert plot.png[:4] == b"\x89PNG" and len(plot.finding) >= 40 and any(c.isdigit() for c in plot.finding)
    assert "nan" not in plot.finding and "inf" not in plot.finding.replace("information", "")
    assert pyplot.get_fignums() == []
    return plot


@odd
def test_lengths_draw(sample):
    histogram = LengthHistogram.from_lengths(np.array(sample))
    check(lengths.histogram(histogram, limit=100))
    check(lengths.cumulative(histogram))
    check(lengths.random_waste(random_batch_waste(histogram), batch_size=16))
    assert sum(row["samples"] for row in lengths.summary(histogram)) == len(sample)


@odd
def test_supervision_draws(sample):
    n = len(sample)
    check(lengths.supervised(Supervision(np.array(sample), np.arange(n) % 3, None)))
    check(lengths.sources(Supervision(np.array(sample), np.arange(n) % 3, np.array([f"module {i % 3}" for i in range(n)]))))
    check(lengths.sources(Supervision(np.array(sample), np.arange(n) % 3, None)))
    check(lengths.supervised(None, "reference"))


@odd
def test_buckets_draw(sample):
    histogram = LengthHistogram.from_lengths(np.array(sample))
    plan = optimize_buckets(histogram, **LIMITS)
    check(buckets.bands(histogram, plan))
    check(buckets.price(plan))
    cost = CostModel()
    seconds = expected_seconds(histogram, plan, cost)
    assert "assumed, not measured" in buckets.stage_times(cost, seconds, plan).finding
    measured = replace(cost, source="measured on a test", target=(9.0, 0, 0, 0, 0))
    said = buckets.stage_times(measured, expected_seconds(histogram, plan, measured), plan).finding
    assert "(measured on a test)" in said and "assumed" not in said and "the target sets the pace" in said
    points = {stage: [[1.0, 1.1], [2.0, 1.9]] for stage in ("target", "drafter")}
    fitted = replace(measured, points=points, errors={stage: {"median": 0.047} for stage in points})
    shown = buckets.stage_times(fitted, expected_seconds(histogram, plan, fitted), plan)
    check(shown)
    assert "off by 4.7 % in the median" in shown.finding


@odd
def test_padding_draws(sample):
    sample = np.array(sample)
    cuts = optimize_buckets(LengthHistogram.from_lengths(sample), **LIMITS).boundaries
    rows = simulate(sample, seeds=(0, 1), boundaries=cuts, window=2, **LIMITS)
    plans = {name: plan_epoch(sample, name, cuts, **LIMITS) for name in ("bucketed", "sorted", "packed")}
    for plot in (padding.strategies(rows), padding.front(rows), padding.mates(rows), padding.order(plans)):
        check(plot)
    check(padding.spread(plans, worst_batches(plans["bucketed"], sample)))
    check(padding.speeds(rows, CostModel()))


def test_titles_say_in_plain_words_what_is_seen():
    histogram = LengthHistogram.from_lengths(np.random.default_rng(0).lognormal(5, 0.8, 3000).astype(int) + 5)
    plan = optimize_buckets(histogram, **LIMITS)
    rows = simulate(histogram.expand(0), ("sorted", "bucketed", "random", "packed"), (0,), boundaries=plan.boundaries, **LIMITS)
    said = padding.strategies(rows).finding
    assert re.match(
        r"bucketed pads \d+\.\d % of its tokens and would take .* an epoch, random \d+\.\d % and .* \(cost model: assumed\)", said
    )
    said = padding.front(rows).finding
    assert re.match(r"bucketed pads \d+\.\d % at a mixing of 0\.\d\d of 1; random pads .*; sorted pads \d+\.\d % at 0\.00", said)
    drawn = buckets.elbow(elbow(histogram, (1, 2, 4, 8, 16, 32, 64, 128), **LIMITS), plan)
    k = len(plan.rows)
    assert re.fullmatch(rf"{k} buckets pad \d+\.\d\d % of the computed tokens; the best {k // 2} would pad \d+\.\d\d %", drawn.finding)
    least = 1 - optimize_buckets(histogram, k, **LIMITS).efficiency
    assert ("these also weigh mixing" in " ".join(drawn.figure.get_supxlabel().split())) == (1 - plan.efficiency > 1.001 * least)


def test_a_strategy_has_one_colour_in_every_picture():
    sample = np.arange(20, 400)
    cuts = optimize_buckets(LengthHistogram.from_lengths(sample), **LIMITS).boundaries
    mine = {name: to_rgb(style.strategy_color(name)) for name in STRATEGIES}
    assert len(set(mine.values())) == len(STRATEGIES) and set(mine.values()) < {to_rgb(color) for color in style.OKABE_ITO}
    assert to_rgb(style.WARN) not in mine.values() and style.strategy_color("bucketed six") == style.strategy_color("bucketed")
    assert style.strategy_color("my own") == style.OTHER_STRATEGY
    for names in (STRATEGIES, STRATEGIES[::-1], ("random", "packed")):  # whatever their order and number
        rows = simulate(sample, names, seeds=(0,), boundaries=cuts, **LIMITS)
        plans = {name: plan_epoch(sample, name, cuts, **LIMITS) for name in names}
        first, last = padding.mates(rows).figure.axes
        for axis in (first, last):
            labels = [label.get_text() for label in axis.get_xticklabels()]
            assert [to_rgb(bar.get_facecolor()) for bar in axis.patches] == [mine[name] for name in labels]
        for plot, bars in ((padding.strategies(rows), slice(None, None, 2)), (padding.speeds(rows, CostModel()), slice(None))):
            [axis] = plot.figure.axes
            labels = [label.get_text() for label in axis.get_yticklabels()]
            assert [to_rgb(bar.get_facecolor()) for bar in axis.patches[bars]] == [mine[name] for name in labels]
        assert [to_rgb(axis.lines[0].get_color()) for axis in padding.order(plans).figure.axes] == [mine[name] for name in names]
        boxes = padding.spread(plans, worst_batches(plans[names[0]], sample)).figure.axes[0].patches
        assert [to_rgb(box.get_facecolor()) for box in boxes] == [mine[name] for name in names]
        points = [bar.lines[0] for bar in padding.front(rows).figure.axes[0].containers]
        assert [to_rgb(point.get_color()) for point in points] == [mine[name] for name in names]
    [axis] = lengths.random_waste([{"batch_size": 1, "waste": 0.0}, {"batch_size": 2, "waste": 0.1}], 2).figure.axes
    assert to_rgb(axis.lines[0].get_color()) == mine["random"]


@pytest.mark.parametrize("name", ["x_{$", "$$", r"$\frac$", "a$b$c"])
def test_a_dollar_in_a_name_is_a_dollar(tmp_path, name):
    """Names of data, strategies and runs are drawn as they stand in every picture, and no picture needs math for its own ticks."""
    sample = np.arange(20, 400)
    histogram = LengthHistogram.from_lengths(sample)
    plan = optimize_buckets(histogram, **LIMITS)
    supervision = Supervision(sample, sample // 2, np.array([f"{name} {i % 3}" for i in range(len(sample))]))
    rows = simulate(sample, seeds=(0,), boundaries=plan.boundaries, **LIMITS)
    renamed = [row | {"strategy": f"{row['strategy']} {name}"} for row in rows]
    plans = {name: plan_epoch(sample, "bucketed", plan.boundaries, **LIMITS)}
    cost = CostModel()
    gaps = [{"samples": n, "gap": 0.01} for n in (1000, 100_000)]
    shifts = [{"shift": shift, "efficiency": 0.9} for shift in (-0.1, 0.1)]
    folder = write_run(tmp_path / name, Recipe(steps=60, evals=(0, 60), first_loss=70.0, decay_steps=5.0))
    read, judged = read_run(folder), diagnose(folder)
    named = (
        lengths.histogram(histogram, name=name),
        lengths.cumulative(histogram, name),
        lengths.supervised(supervision, name),
        lengths.sources(supervision, name),
        lengths.random_waste(random_batch_waste(histogram), 16, name),
        buckets.elbow(elbow(histogram, (1, 2, 4), **LIMITS), plan, name),
        buckets.bands(histogram, plan, name),
        buckets.price(plan, name),
        buckets.robustness(shifts, gaps, plan, name),
        buckets.stage_times(cost, expected_seconds(histogram, plan, cost), plan, name),
        padding.strategies(renamed, name),
        padding.speeds(renamed, cost, (), name),
        padding.front(renamed, name),
        padding.mates(renamed, name),
        padding.order(plans),
        padding.spread(plans, worst_batches(plans[name], sample), name),
        *(draw(read) for draw in (training.loss, training.acceptance, training.throughput, training.time_by_length, training.queues)),
        *(draw(judged) for draw in (diagnosis.curve, diagnosis.zoom, diagnosis.by_length, diagnosis.adjusted, diagnosis.attribution)),
        *(draw(judged) for draw in (diagnosis.residuals, diagnosis.slots, diagnosis.learning)),
        diagnosis.comparison(compare([judged.log, judged.log])),
    )
    for plot in named:
        texts = check(plot).figure.findobj(Text)
        assert not any(text.get_parse_math() for text in texts)
        assert any(name in "".join(text.get_text().split("\n")) for text in texts) and not any("math" in text.get_text() for text in texts)


def test_the_order_of_batches_is_said_with_its_direction():
    plan = plan_epoch(np.arange(20, 420), "random", token_budget=8192, max_batch=1)
    rising = np.arange(20, 420)
    sawtooth = np.stack([rising[:200], rising[:199:-1]], axis=1).ravel()
    for name, lengths_in_order, word in (("rising", rising, "long"), ("sawtooth", sawtooth, "short")):
        said = padding.order({name: replace(plan, padded_lengths=lengths_in_order, real_tokens=lengths_in_order)}).finding
        sign = r"\+" if word == "long" else "-"
        assert re.fullmatch(
            rf"After a long batch comes a {word} one most often under {name}: lag-1 {sign}\d\.\d\d, where chance alone gives ± 0\.05", said
        )


def test_speeds_say_assumed_or_measured_and_how_far_runs_are_off():
    row = {"seed": 0, "cost": "x", "real_tokens": 1, "fill": 1, "batches": 1, "lag1": 0, "longest_run": 1, "spread": 0, "efficiency": 1}
    rows = [row | {"strategy": "sorted", "seconds": 1.0, "tokens_per_second": 100.0, "repeated_mates": 0, "w1": 0}]
    assert "sorted would be the fastest with 100 real tokens/s (cost model: assumed)" in padding.speeds(rows, CostModel()).finding
    errors = {stage: {"total": total} for stage, total in (("target", -0.02), ("drafter", 0.01), ("fetch", 9.0))}
    measured = CostModel(source="measured on a test", errors=errors)
    run = {"run": "a", "strategy": "sorted", "tokens_per_second": 125.0, "noise": 1.0}
    said = padding.speeds(rows, measured, [run, run | {"strategy": "random"}]).finding
    assert "measured on a test, off by 2.0 %" in said and "the prediction for 1 measured run is off by 20.0 %" in said


def test_the_histogram_finding_is_the_data():
    text = lengths.histogram(read_histogram("reference"), limit=4096).finding
    assert "8,191" in text and "4,917" in text


def test_bands_name_the_worst_bucket_of_the_reference_cuts():
    histogram = read_histogram("reference")
    plan = evaluate_buckets(histogram, (0, 770, 1216, 1728, 2432, 3296, 8192), model="reference")
    assert "[0, 770)" in buckets.bands(histogram, plan).finding
    check(buckets.reference_gap(plan, 0.868))


def test_a_strategy_beaten_in_both_is_named_hollow():
    row = {"seed": 0, "cost": "assumed", "real_tokens": 1, "fill": 1, "batches": 1, "lag1": 0, "longest_run": 1, "spread": 0}
    row |= {"seconds": 1.0, "tokens_per_second": 1.0}
    good, bad = {"efficiency": 0.99, "repeated_mates": 0.01, "w1": 0.1}, {"efficiency": 0.5, "repeated_mates": 0.5, "w1": 0.2}
    rows = [{"strategy": "pooled"} | row | good, {"strategy": "random"} | row | bad]
    assert padding.front(rows).finding == "pooled pads 1.0 % at a mixing of 0.90 of 1; another beats random in both"
    rows[1] |= {"repeated_mates": 0.0, "w1": 0.0}
    assert "another beats" not in padding.front(rows).finding
    assert padding.front([rows[0] | {"strategy": "packed"}]).finding == "packed pads 1.0 % at a mixing of 0.90 of 1"


def test_show_displays_once_with_alternative_text():
    InteractiveShell.instance()
    plot = lengths.cumulative(LengthHistogram.from_lengths(np.array([5, 6])))
    with capture_output() as captured:
        style.show(plot)
    [output] = captured.outputs
    assert output.metadata["image/png"]["alt"] == plot.finding
    assert " ".join(captured.stdout.split()) == plot.finding


def test_length_ticks_are_powers_of_two():
    _, axes = style.new_figure()
    style.length_axis(axes[0, 0], 65, 8191)
    ticks = axes[0, 0].get_xticks()
    assert np.all(np.log2(ticks) % 1 == 0)


def test_a_long_table_keeps_both_ends():
    table = style.table([{"i": i} for i in range(100)])
    assert len(table) == 12 and table["i"].iloc[0] == "0" and table["i"].iloc[-1] == "99"
