"""Without the package ray everything else works, and engine ray says what to install.

Run alone: python -m pytest tests/test_ray_extra.py
"""

import sys

import pytest
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.pipeline.job import prepare_job
from dflash_nb.pipeline.parameters import ParameterError


def test_without_ray_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    dataset, target = write_dataset(tmp_path / "data"), save_target(tmp_path / "target", "hybrid")
    monkeypatch.delitem(sys.modules, "dflash_nb.pipeline.ray", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"^engine ray needs the package ray: pip install 'dflash-nb\[ray\]', or use engine local$"):
        prepare_job(tiny_config(dataset, target, tmp_path, engine="ray"))
    assert prepare_job(tiny_config(dataset, target, tmp_path)).total_steps == 26


def test_an_address_without_the_engine_is_a_contradiction(tmp_path):
    with pytest.raises(ParameterError, match="ray_address 'auto' was given, but engine is 'local'"):
        tiny_config(tmp_path, tmp_path, tmp_path, ray_address="auto")
