"""Findings on real short runs of the embedded sample: a few of those that ``benchmarks/diagnosis.py`` makes, 20 s of one core."""

import pytest
from labelled_runs import sample_cases

from dflash_nb.analysis.diagnose import diagnose

FEW = ("random", "killed and resumed", "frozen drafter", "a weight is NaN")


@pytest.mark.parametrize("case", [case for case in sample_cases(1) if any(name in case.name for name in FEW)], ids=lambda case: case.name)
def test_real_runs(case, tmp_path):
    found = diagnose(case.write(tmp_path / "run"))
    assert found.alarm != case.healthy, found.report()
    if case.kind != "healthy":
        assert found.main.kind == case.kind
