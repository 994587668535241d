"""Target workers on real Ray clusters: the same losses as threads, through anything that dies, and nothing left behind.

Run alone: make ray-test
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch
from tiny_runs import save_target, tiny_config, write_dataset
from tiny_targets import make_batch

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'dflash-nb[ray]'")
import ray_clusters

from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline import ray as on_ray
from dflash_nb.pipeline.console import Console
from dflash_nb.pipeline.ray import RayPool, check_room, needed_store, pack, unpack
from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.train import train
from dflash_nb.pipeline.window import WorkerFailure, WorkerLost

STEPS = 26
pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {"dataset": write_dataset(root / "data"), "target": save_target(root / "target", "hybrid")}


@pytest.fixture(scope="module")
def cluster():
    with ray_clusters.cluster() as made:
        yield made


def curve(folder):
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], [batch["sample_ids"] for batch in line["batches"]]) for line in lines]


def worker_events(folder):
    return [event["text"] for event in read_run(folder).events_of("worker")]


def at_steps(monkeypatch, actions):
    """Call ``actions[step]`` when that step has been logged."""
    counted = Console.step

    def counting(self, record):
        counted(self, record)
        if action := actions.get(record["step"]):
            action()

    monkeypatch.setattr(Console, "step", counting)


def actor_processes():
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] and p.info["cmdline"][0].startswith("ray::Worker")]


@pytest.mark.slow
def test_a_run_on_two_nodes_through_a_killed_actor_and_a_lost_and_a_new_node_has_the_curve_of_threads(made, cluster, tmp_path, monkeypatch):
    local = [train(tiny_config(made["dataset"], made["target"], tmp_path / name, topology=name)) for name in ("1-1", "3-1")]
    gone = cluster.add_node(num_cpus=2, object_store_memory=ray_clusters.STORE)
    cluster.wait_for_nodes()
    pools = []
    opened = RayPool.__init__
    monkeypatch.setattr(RayPool, "__init__", lambda self, *args: (pools.append(self), opened(self, *args))[1])

    def kill_one():
        while len(pools[0].places) < 3:
            time.sleep(0.1)
        name = sorted(pools[0].places)[0]
        os.kill(pools[0].places[name].pid, signal.SIGKILL)

    actions = {
        4: kill_one,
        10: lambda: cluster.remove_node(gone, allow_graceful=False),
        14: lambda: cluster.add_node(num_cpus=2, object_store_memory=ray_clusters.STORE),
    }
    at_steps(monkeypatch, actions)
    settings = {"engine": "ray", "ray_address": cluster.address, "topology": "3-1", "q_hs_mb": 8, "retries": 5}
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path / "ray", **settings))
    assert summary.finished
    assert curve(summary.run_dir) == curve(local[0].run_dir) == curve(local[1].run_dir)
    told = " ".join(worker_events(summary.run_dir))
    assert "is lost" in told
    assert all(f"target-{k} is up on node" in told for k in range(3))
    assert read_run(summary.run_dir).events_of("retry")
    assert ray.is_initialized(), "a cluster that was there before stays"
    deadline = time.monotonic() + 30
    while (left := actor_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.fixture(scope="module")
def pool(cluster):
    """Two workers that do what a batch says."""

    def make():
        import os
        import time

        import numpy

        def work(batch):
            if batch.do == "raise":
                raise ValueError(f"row {batch.index} is broken")
            if batch.do == "die":
                os._exit(1)
            if batch.do == "wait":
                time.sleep(batch.seconds)
            return numpy.ones(batch.nbytes, numpy.uint8)

        return work

    made = RayPool(make, 2, lambda _, result, seconds: (len(ray.get(result)), seconds), {"num_cpus": 1})
    while len(made.places) < 2:
        time.sleep(0.1)
    yield made
    made.close()


def order(index=0, do="", seconds=0.0, nbytes=10):
    return SimpleNamespace(index=index, epoch=0, do=do, seconds=seconds, nbytes=nbytes)


@pytest.mark.slow
def test_what_a_worker_raises_arrives_with_its_remote_traceback(pool):
    failure = pool.submit(order(7, "raise")).exception(60)
    assert isinstance(failure, WorkerFailure)
    assert isinstance(failure.__cause__, ValueError)
    assert "row 7 is broken" in str(failure)
    assert "in work" in failure.__cause__.__notes__[0]
    assert len(pool.places) == 2


@pytest.mark.slow
def test_a_slow_worker_takes_fewer_batches_and_delays_only_its_own(pool):
    slow = pool.submit(order(0, "wait", seconds=3.0))
    others = [pool.submit(order(i)) for i in range(1, 9)]
    assert [future.result(60)[0] for future in others] == [10] * 8
    assert not slow.done()
    assert slow.result(60)[0] == 10


@pytest.mark.slow
def test_a_lost_worker_fails_its_batch_and_is_replaced(pool):
    pids = {place.pid for place in pool.places.values()}
    failure = pool.submit(order(3, "die")).exception(60)
    assert isinstance(failure.__cause__, WorkerLost)
    assert pool.submit(order(4), avoid=frozenset({failure.worker})).result(60)[0] == 10
    deadline = time.monotonic() + 120
    while len(pool.places) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len({place.pid for place in pool.places.values()} - pids) == 1
    assert sum("is lost" in text for text in pool.news) == 1


@pytest.mark.slow
def test_a_full_object_store_is_told_and_stops_nothing(pool, monkeypatch):
    monkeypatch.setattr(on_ray, "DISK_SECONDS", 0.0)
    size = ray_clusters.STORE // 4
    taken = [ray.put(np.ones(size - (1 << 20), np.uint8)) for _ in range(4)]
    assert [pool.submit(order(i, nbytes=size)).result(120)[0] for i in range(3)] == [size] * 3
    deadline = time.monotonic() + 60  # a node that was taken away is asked too, until Ray has noticed
    while not any("object store is full: it wrote" in text for text in pool.news) and time.monotonic() < deadline:
        assert pool.submit(order()).result(60)[0] == 10
        time.sleep(0.2)
    assert any("object store is full: it wrote" in text for text in pool.news)
    del taken


@pytest.mark.slow
def test_without_an_address_a_cluster_is_made_and_ended(made, tmp_path):
    """In a process of its own, which is then killed in the middle of a second run: nothing of either cluster is left."""
    script = f"""
import ray_clusters
from tiny_runs import tiny_config
from pathlib import Path
import ray
from dflash_nb.pipeline.train import train
settings = dict(engine="ray", topology="1-1", q_hs_mb=8)
made = Path({str(made["dataset"])!r}), Path({str(made["target"])!r})
train(tiny_config(*made, Path({str(tmp_path)!r}) / "first", max_steps=3, **settings))
assert not ray.is_initialized()
train(tiny_config(*made, Path({str(tmp_path)!r}) / "second", epochs=500, **settings))
"""
    root = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root.parent}"}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while process.poll() is None and time.monotonic() < deadline:
        if any(len(path.read_text().splitlines()) > 3 for path in (tmp_path / "second").glob("*/steps.jsonl")):
            break
        time.sleep(0.2)
    assert process.poll() is None, process.communicate()
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in " ".join(each.cmdline()) for each in family)
    process.kill()
    _, errors = process.communicate()
    assert errors == ""
    _, alive = psutil.wait_procs(family, timeout=60)
    assert [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
    (first,) = (tmp_path / "first").iterdir()
    assert read_run(first).status == "finished"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_are_the_same_after_the_way(made, dtype):
    target = FrozenTarget.load(made["target"], (1, 5), "cpu", dtype, with_last_hidden=True)
    features = target.features(make_batch([9, 4]))
    again = unpack(pack(features))
    for name, value in vars(features).items():
        assert torch.equal(getattr(again, name), value) if isinstance(value, torch.Tensor) else getattr(again, name) == value
    assert again.features_ND.dtype == getattr(torch, dtype)
    assert again.features_ND.data_ptr() != features.features_ND.data_ptr()


def node(cpus=4.0, gpus=0.0, store=1 << 30, alive=True):
    return {"Alive": alive, "NodeManagerAddress": "10.0.0.1", "Resources": {"CPU": cpus, "GPU": gpus, "object_store_memory": store}}


def test_a_cluster_without_room_is_refused():
    check_room([node(), node()], 4, {"num_cpus": 2}, 1 << 20)
    with pytest.raises(ValueError, match=r"room for 2 actors \(2 CPU each, 1 nodes\), topology needs 4: use a smaller"):
        check_room([node(), node(alive=False)], 4, {"num_cpus": 2}, 1 << 20)
    with pytest.raises(ValueError, match="room for 0 actors"):
        check_room([node()], 1, {"num_cpus": 1, "num_gpus": 1}, 1 << 20)
    with pytest.raises(ValueError, match=r"node 10.0.0.1 holds 1,024 MiB, 2,048 are needed: .* --object-store-memory 2147483648"):
        check_room([node()], 1, {"num_cpus": 1}, 2 << 30)


def test_the_store_holds_the_window_and_the_batch_that_leaves_it():
    assert needed_store(1 << 30, 1 << 28) * on_ray.SHARE_OF_STORE > (1 << 30) + (1 << 28)
    assert needed_store(1 << 20, 1 << 30) * on_ray.SHARE_OF_STORE > 2 << 30


def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch):
    def nothing(*_, **__):
        raise ConnectionError("Could not find any running Ray instance.\nMore lines.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nothing)
    with pytest.raises(ValueError, match=r"the Ray cluster at 'auto' cannot be joined: Could not find any running Ray instance\."):
        on_ray.connect("auto", 1, {"num_cpus": 1}, 1 << 20)
    with pytest.raises(ValueError, match="no Ray cluster could be started on this machine: "):
        on_ray.connect("", 1, {"num_cpus": 1}, 1 << 20)
