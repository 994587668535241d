"""The package's small public face: what it offers, what it costs to import, and what a type checker sees of it."""

import inspect
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dflash_nb
from dflash_nb.errors import PlainError
from dflash_nb.planner.options import PlanOptions

PACKAGE = Path(dflash_nb.__file__).parent


def test_names_and_their_homes_agree():
    assert dflash_nb.__all__ == sorted(dflash_nb.__all__) == sorted(name for names in dflash_nb._HOMES.values() for name in names)
    assert set(dflash_nb.__all__) < set(dir(dflash_nb))
    assert (PACKAGE / "py.typed").is_file()
    with pytest.raises(AttributeError, match=r"'train_it'; it has .*TrainConfig"):
        dflash_nb.train_it  # noqa: B018


@pytest.mark.parametrize("name", dflash_nb.__all__)
def test_each_name_is_documented_and_typed(name):
    thing = getattr(dflash_nb, name)
    assert inspect.getdoc(thing) and thing.__module__.startswith("dflash_nb.")
    called = thing if inspect.isfunction(thing) else thing.__init__
    untyped = [p.name for p in inspect.signature(called).parameters.values() if p.name != "self" and p.annotation is p.empty]
    assert not untyped
    assert inspect.isclass(thing) or inspect.signature(thing).return_annotation is not inspect.Signature.empty
    assert f"import {name}" in (PACKAGE / "__init__.py").read_text() or f", {name}" in (PACKAGE / "__init__.py").read_text()


def test_import_is_light_and_planning_needs_no_torch():
    script = """
import sys
import dflash_nb as df
assert not {"numpy", "torch", "pyarrow"} & set(sys.modules), "import dflash_nb alone loads nothing"
lengths = df.read_lengths("reference")[:5000]
cuts = df.optimize_buckets(df.LengthHistogram.from_lengths(lengths), token_budget=49152, max_batch=64)
plan = df.plan_epoch(lengths, boundaries=cuts.boundaries, seed=0, epoch=0)
assert len(plan) > 10 and 0.5 < plan.efficiency <= 1 and len(plan.batch(0).sample_ids)
df.TrainConfig, df.diagnose, df.read_run
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


LENGTHS = np.random.default_rng(0).integers(1, 900, 300)
HISTOGRAM = dflash_nb.LengthHistogram.from_lengths(LENGTHS)
PLAN = dflash_nb.plan_epoch(LENGTHS, "random", token_budget=4000)
NONSENSE = [None, -1, 0, 1.5, math.nan, "x", [], [1.5], np.ones((2, 2)), {}, True, object()]
PATHS = ("read_lengths", "read_histogram", "read_run", "diagnose", "load_drafter")


def calls():
    """Each argument of the public functions, as what is called with a value for it."""
    yield from {
        "config of train": dflash_nb.train,
        "config of examine": dflash_nb.examine,
        "lengths of plan_epoch": dflash_nb.plan_epoch,
        "lengths of from_lengths": dflash_nb.LengthHistogram.from_lengths,
        "lengths of from_counts": lambda value: dflash_nb.LengthHistogram.from_counts(value, LENGTHS),
        "counts of from_counts": lambda value: dflash_nb.LengthHistogram.from_counts(LENGTHS, value),
        "max_length of clip": HISTOGRAM.clip,
        "histogram of optimize_buckets": dflash_nb.optimize_buckets,
        "histogram of evaluate_buckets": lambda value: dflash_nb.evaluate_buckets(value, [100]),
        "boundaries of evaluate_buckets": lambda value: dflash_nb.evaluate_buckets(HISTOGRAM, value),
        "cost of optimize_buckets": lambda value: dflash_nb.optimize_buckets(HISTOGRAM, 4, objective="time", cost=value),
        "saved of from_json": dflash_nb.BucketPlan.from_json,
        "world of ranks": PLAN.ranks,
        "seconds of ranks": lambda value: PLAN.ranks(2, value),
        "remainder of ranks": lambda value: PLAN.ranks(2, None, value),
        "rank of rank": PLAN.rank,
        "world of rank": lambda value: PLAN.rank(0, value),
    }.items()
    for name in ("token_budget", "max_batch", "pad_multiple", "count", "objective", "grid", "model"):
        yield f"{name} of optimize_buckets", lambda value, name=name: dflash_nb.optimize_buckets(HISTOGRAM, **{name: value})
    for name in inspect.signature(PlanOptions).parameters.keys() | {"seed", "epoch", "n_supervised"}:
        given = {"strategy": "random", "token_budget": 4000}
        yield f"{name} of plan_epoch", lambda value, name=name, given=given: dflash_nb.plan_epoch(LENGTHS, **given | {name: value})
    for name in inspect.signature(dflash_nb.TrainConfig).parameters:
        yield f"{name} of TrainConfig", lambda value, name=name: dflash_nb.TrainConfig(**{name: value})


@pytest.mark.parametrize(("argument", "call"), sorted(calls(), key=lambda each: each[0]))
def test_nonsense_is_refused_in_a_sentence(argument, call):
    refused = 0
    for value in NONSENSE:
        try:
            call(value)
        except PlainError as error:
            refused += 1
            assert len(str(error).split()) > 4
    assert refused >= 4


@pytest.mark.parametrize("name", PATHS)
def test_what_is_no_path_is_named_by_its_type(name):
    for value in (None, 3, [], {}):
        with pytest.raises(TypeError, match=r"expected str, bytes or os\.PathLike object, not "):
            getattr(dflash_nb, name)(value)
