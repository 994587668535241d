"""The prepared GPU check: it skips in one sentence where there is no GPU, and all of its code runs on a CPU."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_skips_with_one_sentence(gpu_check, capsys):
    assert gpu_check.main([]) == 0
    [said] = capsys.readouterr().out.splitlines()
    assert said.startswith("gpu-check skipped") and said.count(". ") == 0


@pytest.mark.slow
def test_all_of_it_runs_on_a_cpu(gpu_check, capsys, tmp_path):
    gpu_check.main(["--device", "cpu", "--small", "--json", str(tmp_path / "out.json")])
    results = {each["check"]: each for each in json.loads((tmp_path / "out.json").read_text())["results"]}
    assert list(results) == ["capture parity", "step time", "peak memory", "queue balance"]
    assert results["capture parity"]["ok"] and results["step time"]["ok"]
    assert all(each["value"] >= 0 and each["text"] in capsys_text for capsys_text in [capsys.readouterr().out] for each in results.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_agrees_on_a_gpu(gpu_check):
    assert gpu_check.main([]) == 0


def test_a_difference_is_a_status(gpu_check, monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "check", lambda device, small: [gpu_check.peak_memory(2e9, 1e9)])
    assert gpu_check.main(["--device", "cpu"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
