"""The package's small public face: what it offers, what it costs to import, and what a type checker sees of it."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_nb

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
