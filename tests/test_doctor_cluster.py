"""The doctor's question to a Ray cluster.

Run alone: python -m pytest tests/test_doctor_cluster.py
"""

import shutil

import pytest
from tiny_runs import save_target, tiny_config, write_dataset

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'dflash-nb[ray]'")

from dflash_nb.analysis.doctor import Level, examine
from dflash_nb.analysis.doctor.cluster import ask, judge

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return write_dataset(root / "data"), save_target(root / "target", "qwen3")


def test_a_cluster_that_fits_is_ok_and_stays_and_one_without_room_is_a_stop(made, cluster, tmp_path):
    on_ray = {"engine": "ray", "ray_address": cluster.address, "q_hs_mb": 8}
    found = examine(tiny_config(*made, tmp_path, topology="2-2", accumulation=2, **on_ray)).of("ray cluster")
    assert found.level == Level.OK
    assert "1 nodes with room for 3 actors, object stores of 128 MiB or more, all with this process's" in found.evidence
    assert ray.is_initialized()
    found = examine(tiny_config(*made, tmp_path, topology="9-1", **on_ray)).of("ray cluster")
    assert found.level == Level.STOP
    assert "room for 4 actors (1 CPU each, 1 nodes), topology needs 9" in found.evidence


def test_every_node_is_asked_for_its_versions_and_the_targets_files(made, cluster, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(made[1], folder)
    (answer,) = ask(ray.nodes()[:1], str(folder)).values()
    assert answer["target"] == "there" and answer["niceness"] == "0" and "torch" in answer
    shutil.rmtree(folder)
    (answer,) = ask(ray.nodes()[:1], str(folder)).values()
    assert answer["target"] == "not there"


def test_a_cluster_of_this_machine_is_not_started_for_the_question(made, tmp_path, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", None)
    found = examine(tiny_config(*made, tmp_path, engine="ray")).of("ray cluster")
    assert (found.level, found.evidence[:40]) == (Level.OK, "one of this machine will be started: 1 a")
    assert examine(tiny_config(*made, tmp_path)).of("ray cluster") is None


def test_what_the_nodes_say_is_judged():
    here = {"python": "3.12.1", "torch": "2.13.0"}
    same = {**here, "target": "there", "niceness": "0"}
    level, evidence, _ = judge({"a": same, "b": same}, here, "3 actors")
    assert level == Level.OK and "goes before" not in evidence
    level, evidence, _ = judge({"a": {**same, "niceness": "15"}, "b": same}, here, "3 actors")
    assert level == Level.OK and "other work on node a goes before its workers" in evidence
    level, evidence, advice = judge({"a": same, "b": "ModuleNotFoundError: No module named 'dflash_nb'"}, here, "")
    assert (level, evidence) == (Level.STOP, "node b: ModuleNotFoundError: No module named 'dflash_nb'")
    assert "install this package on every node" in advice
    level, evidence, _ = judge({"a": {**same, "target": "not there"}, "b": same}, here, "")
    assert (level, evidence) == (Level.STOP, "the target's folder is not on node a")
    level, evidence, _ = judge({"a": {**same, "torch": "2.12.0"}, "b": same}, here, "")
    assert (level, evidence) == (Level.LOOK, "node a has torch 2.12.0, this process 2.13.0")
