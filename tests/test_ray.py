"""Target workers on real Ray clusters: the same losses as threads, through anything that dies, and nothing left behind.

Run alone: python -m pytest tests/test_ray.py
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
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
from ray.experimental import register_tensor_transport
from ray.experimental.rdt import tensor_transport_manager as transports
from ray_clusters import STORE, actors, at_steps, until

from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline import drafters
from dflash_nb.pipeline import ray as on_ray
from dflash_nb.pipeline.advice import advise
from dflash_nb.pipeline.local import LocalPool
from dflash_nb.pipeline.ray import RayPool, needed_store, pack, unpack
from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.train import train
from dflash_nb.pipeline.window import WorkerFailure, WorkerLost

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {"dataset": write_dataset(root / "data"), "target": save_target(root / "target", "hybrid")}


@pytest.fixture(scope="module")
def curve_of_threads(made, tmp_path_factory):
    """Losses, norms and samples of every step, with one worker on this machine."""
    return curve(train(tiny_config(made["dataset"], made["target"], tmp_path_factory.mktemp("1-1"))).run_dir)


def on_cluster(made, cluster, runs, **changes):
    settings = {"engine": "ray", "ray_address": cluster.address, "topology": "3-1", "q_hs_mb": 8, **changes}
    return tiny_config(made["dataset"], made["target"], runs, **settings)


def curve(folder):
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"], [batch["sample_ids"] for batch in line["batches"]]) for line in lines]


def worker_events(folder):
    return [event["text"] for event in read_run(folder).events_of("worker")]


def nodes_in(events):
    return {event.split("is up on node ")[1].split(",")[0] for event in events if "is up on node" in event}


def no_actor_is_left():
    return not actors("Worker")


@pytest.fixture
def pools(monkeypatch):
    """The pools that are made while the test runs."""
    made, opened = [], RayPool.__init__
    monkeypatch.setattr(RayPool, "__init__", lambda self, *arguments: (made.append(self), opened(self, *arguments))[1])
    return made


def all_up(pools, workers):
    """Waits until the workers of the last pool are up."""

    def are_up():
        return len(pools[-1].places) == workers

    return lambda: until(are_up)


def in_a_process(script):
    environment = {**os.environ, "PYTHONPATH": ray_clusters.PATH}
    environment.pop("RAY_worker_niceness")  # a run sees to it by itself
    return subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_steps(process, runs):
    """Return once the run of a process has logged a few steps."""

    def has_steps():
        assert process.poll() is None, process.communicate()
        return any(len(path.read_text().splitlines()) > 3 for path in runs.glob("*/steps.jsonl"))

    until(has_steps, 200)


@pytest.fixture(scope="module")
def ended_and_killed(made, only_clusters, tmp_path_factory):
    """The run folder of a run without an address, with Ray's own agents, and of a second one, whose driver was killed, the processes, with
    the niceness of each worker."""
    runs = tmp_path_factory.mktemp("runs")
    script = f"""
from tiny_runs import tiny_config
from pathlib import Path
import ray
from dflash_nb.pipeline.train import train
settings = dict(engine="ray", topology="1-1", q_hs_mb=8)
made = Path({str(made["dataset"])!r}), Path({str(made["target"])!r})
train(tiny_config(*made, Path({str(runs)!r}) / "first", max_steps=3, **settings))
assert not ray.is_initialized()
train(tiny_config(*made, Path({str(runs)!r}) / "second", epochs=500, **settings))
"""
    process = in_a_process(script)
    wait_for_steps(process, runs / "second")
    family = psutil.Process(process.pid).children(recursive=True)
    niceness = [each.nice() for each in actors("Worker") if each in family]
    process.kill()
    assert process.communicate()[1] == ""
    return next((runs / "first").iterdir()), family, niceness


def test_without_an_address_a_cluster_is_made_and_ended(ended_and_killed):
    folder, family, niceness = ended_and_killed
    assert read_run(folder).status == "finished"
    assert sum("raylet" in str(each) for each in family) == 1, "the first cluster had ended before the second began"
    assert niceness == [os.nice(0)], "nobody goes before the worker of a run"


def test_threads_one_node_and_two_nodes_have_one_curve(made, cluster, curve_of_threads, tmp_path, pools, monkeypatch):
    threads = train(tiny_config(made["dataset"], made["target"], tmp_path, topology="3-1"))
    assert curve(threads.run_dir) == curve_of_threads
    at_steps(monkeypatch, {1: all_up(pools, 3)})
    one = train(on_cluster(made, cluster, tmp_path, q_hs_mb=1))
    with ray_clusters.second_node(cluster):
        two = train(on_cluster(made, cluster, tmp_path, q_hs_mb=1))
    for run, nodes in ((one, 1), (two, 2)):
        assert curve(run.run_dir) == curve_of_threads
        events = worker_events(run.run_dir)
        assert len(nodes_in(events)) == nodes
        did = [re.fullmatch(r"node \S+, target-(\d): (\d+) batches, busy .*", event) for event in events]
        assert [line[1] for line in did if line] == ["0", "1", "2"], "a line for each worker, with its node"
        assert all(int(line[2]) for line in did if line), "each has worked"
        advice = advise(read_run(run.run_dir))
        assert advice.workers == 3 and not advice.shared


def test_a_run_through_a_killed_actor_a_lost_node_and_a_new_one_has_the_curve_of_threads(made, cluster, tmp_path, pools, monkeypatch):
    """Each thing happens once the one before has been noticed, in a run that is long enough: a loss shows at the next batch."""
    longer = {"epochs": 12, "checkpoint_every": 0}
    threads = train(tiny_config(made["dataset"], made["target"], tmp_path, **longer))
    asked, opened, happened = [], RayPool._open, []
    monkeypatch.setattr(RayPool, "_open", lambda self, name: (asked.append(name), opened(self, name))[1])

    def kill_one():
        """One of the two on the first node: the second node has the third."""
        nodes = [place.node for place in pools[0].places.values()]
        killed = next(place for place in pools[0].places.values() if nodes.count(place.node) == 2)
        os.kill(killed.pid, signal.SIGKILL)

    def next_thing():
        if len(happened) < len(things) and len(asked) >= 3 + len(happened):
            all_up(pools, 3)()
            happened.append(things[len(happened)]())

    with ray_clusters.second_node(cluster) as gone:
        things = [
            kill_one,
            lambda: cluster.remove_node(gone, allow_graceful=False),
            lambda: cluster.add_node(num_cpus=2, object_store_memory=STORE),
        ]
        at_steps(monkeypatch, dict.fromkeys(range(4, threads.total_steps + 1), next_thing))
        summary = train(on_cluster(made, cluster, tmp_path, q_hs_mb=1, retries=5, **longer))
        for node in list(cluster.worker_nodes):
            cluster.remove_node(node)
    assert len(happened) == 3, "the run ended before all of it was noticed"
    assert summary.finished
    assert curve(summary.run_dir) == curve(threads.run_dir)
    events = worker_events(summary.run_dir)
    assert len({event.split()[0] for event in events if "is lost" in event}) == 2, "by the kill, and with the node"
    assert len([event for event in events if "is up on node" in event]) >= 4, "three, and one in place of a lost one"
    assert read_run(summary.run_dir).events_of("retry")
    assert ray.is_initialized(), "a cluster that was there before stays"
    until(no_actor_is_left)


def test_a_broken_row_reaches_the_caller_with_its_batch(made, cluster, tmp_path, monkeypatch):
    """Token ids that the target does not have: its worker raises, on every try."""
    collate = on_ray.Job.collate

    def broken(self, planned):
        batch = collate(self, planned)
        if batch.index == 3:
            batch.input_ids_BT[0, 0] = 10**6
        return batch

    monkeypatch.setattr(on_ray.Job, "collate", broken)
    with pytest.raises(RuntimeError, match=r"batch 3 of epoch 0 \(.* sample ids .*\) failed 2 times .* target-\d: IndexError"):
        train(on_cluster(made, cluster, tmp_path, topology="1-1", retries=1))
    (folder,) = tmp_path.iterdir()
    assert read_run(folder).status == "failed"
    until(no_actor_is_left)


def test_a_killed_driver_leaves_the_cluster_that_was_there_and_nothing_else(made, cluster, tmp_path):
    until(no_actor_is_left)
    script = f"""
from tiny_runs import tiny_config
from pathlib import Path
from dflash_nb.pipeline.train import train
settings = dict(engine="ray", ray_address={cluster.address!r}, topology="1-1", q_hs_mb=8, epochs=500)
train(tiny_config(Path({str(made["dataset"])!r}), Path({str(made["target"])!r}), Path({str(tmp_path)!r}), **settings))
"""
    process = in_a_process(script)
    wait_for_steps(process, tmp_path)
    process.kill()
    process.communicate()
    until(no_actor_is_left)
    assert len([node for node in ray.nodes() if node["Alive"]]) == 1

    def everything_is_free():
        return ray.available_resources().get("CPU") == 4

    until(everything_is_free)


@pytest.fixture
def by_file(tmp_path):
    """A tensor transport as Ray has them, one-sided like NIXL, for tensors on CPUs: through files."""
    folder = tempfile.mkdtemp(dir=tmp_path)

    @dataclass
    class Where(transports.TensorTransportMetadata):
        path: str = ""

    class ByFile(transports.TensorTransportManager):
        def tensor_transport_backend(self):
            return "TEMPFILE"

        @staticmethod
        def is_one_sided():
            return True

        @staticmethod
        def can_abort_transport():
            return False

        def actor_has_tensor_transport(self, actor):
            return True

        def extract_tensor_transport_metadata(self, obj_id, rdt_object):
            torch.save(rdt_object, f"{folder}/{obj_id}")
            return Where([(each.shape, each.dtype) for each in rdt_object], "cpu", f"{folder}/{obj_id}")

        def get_communicator_metadata(self, src_actor, dst_actor, backend=None):
            return transports.CommunicatorMetadata()

        def recv_multiple_tensors(self, obj_id, tensor_transport_metadata, communicator_metadata, target_buffers=None):
            return torch.load(tensor_transport_metadata.path)

        def send_multiple_tensors(self, tensors, tensor_transport_metadata, communicator_metadata):
            raise AssertionError("a one-sided transport does not send")

        def garbage_collect(self, obj_id, tensor_transport_meta, tensors):
            Path(tensor_transport_meta.path).unlink()

        def abort_transport(self, obj_id, communicator_metadata):
            raise AssertionError("nothing is aborted")

    from ray.experimental.rdt import util

    register_tensor_transport("tempfile", ["cpu"], ByFile, torch.Tensor)
    yield Path(folder)
    util.transport_manager_info.pop("TEMPFILE")
    util.transport_managers.pop("TEMPFILE", None)


NIXL = pytest.param("nixl", marks=pytest.mark.skipif(not find_spec("nixl"), reason="the package nixl is not installed"))


@pytest.mark.parametrize("transport", ["tempfile", NIXL])
def test_tensors_go_by_rays_tensor_transport_to_every_drafter(made, cluster, tmp_path, by_file, transport, monkeypatch):
    files = []
    for room in (on_ray, drafters):
        monkeypatch.setattr(room, "tensor_transport", lambda device: transport)
    saved = on_ray.received

    def counted(sent):
        files.append(len(list(by_file.iterdir())))
        assert not isinstance(sent, dict)
        return saved(sent)

    monkeypatch.setattr(on_ray, "received", counted)
    two = train(on_cluster(made, cluster, tmp_path, topology="1-2", accumulation=2, max_steps=4))
    assert len(files) == 4 and (min(files) > 0) == (transport == "tempfile")
    one = train(tiny_config(made["dataset"], made["target"], tmp_path, accumulation=2, max_steps=4))
    for (_, loss, norm, _), (_, theirs, their_norm, _) in zip(curve(two.run_dir), curve(one.run_dir), strict=True):
        assert (loss, norm) == (pytest.approx(theirs, rel=1e-4), pytest.approx(their_norm, rel=1e-3))

    def files_are_gone():
        return not list(by_file.iterdir())

    until(files_are_gone)


@pytest.fixture(scope="module")
def pool(cluster):
    """Two workers that do what a batch says, and that ask for their actors before the pool's start has come to its end."""

    def make():
        def work(batch):
            if batch.do == "raise":
                raise ValueError(f"row {batch.index} is broken")
            if batch.do == "die":
                os._exit(1)
            if batch.do == "wait":
                time.sleep(batch.seconds)
            return np.ones(batch.nbytes, np.uint8)

        return work

    class SlowlyMade(LocalPool):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            time.sleep(0.5)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_ray, "LocalPool", SlowlyMade)
        made = RayPool(make, 2, lambda _, result, seconds: (len(on_ray.get(result)), seconds), {"num_cpus": 1})
    all_up([made], 2)()
    yield made
    made.close()


def order(index=0, do="", seconds=0.0, nbytes=10):
    return SimpleNamespace(index=index, epoch=0, do=do, seconds=seconds, nbytes=nbytes)


def test_what_a_worker_raises_arrives_with_its_remote_traceback(pool):
    failure = pool.submit(order(7, "raise")).exception(60)
    assert isinstance(failure, WorkerFailure)
    assert isinstance(failure.__cause__, ValueError)
    assert "row 7 is broken" in str(failure)
    assert "in work" in failure.__cause__.__notes__[0]
    assert len(pool.places) == 2


def test_a_slow_worker_takes_fewer_batches_and_delays_only_its_own(pool):
    slow = pool.submit(order(0, "wait", seconds=3.0))
    others = [pool.submit(order(i)) for i in range(1, 9)]
    assert [future.result(60)[0] for future in others] == [10] * 8
    assert not slow.done()
    assert slow.result(60)[0] == 10


def test_a_lost_worker_fails_its_batch_and_is_replaced(pool):
    pids = {place.pid for place in pool.places.values()}
    failure = pool.submit(order(3, "die")).exception(60)
    assert isinstance(failure.__cause__, WorkerLost)
    assert pool.submit(order(4), avoid=frozenset({failure.worker})).result(60)[0] == 10

    def both_are_up():
        return len(pool.places) == 2

    until(both_are_up, 120)
    assert len({place.pid for place in pool.places.values()} - pids) == 1
    assert sum("is lost" in text for text in pool.news) == 1


@pytest.fixture
def another_cluster():
    with ray_clusters.other_cluster() as other:
        yield other


def test_a_full_object_store_is_told_and_stops_nothing(another_cluster, pool, monkeypatch):
    """Also where Ray would not know which of the machine's clusters is meant."""
    monkeypatch.setattr(on_ray, "DISK_SECONDS", 0.0)
    size = STORE // 4
    # More than the store holds, so that Ray spills for certain: what it only allocates on disk is gone again when it is asked.
    taken = [ray.put(np.ones(size - (1 << 20), np.uint8)) for _ in range(6)]
    assert [pool.submit(order(i, nbytes=size)).result(120)[0] for i in range(3)] == [size] * 3

    def told():  # a node that was taken away is asked too, until Ray has noticed
        assert pool.submit(order()).result(60)[0] == 10
        return any("object store is full: it wrote" in text for text in pool.news)

    until(told)
    del taken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_are_the_same_after_the_way(made, dtype):
    target = FrozenTarget.load(made["target"], (1, 5), "cpu", dtype, with_last_hidden=True)
    features = target.features(make_batch([9, 4]))
    again = unpack(pack(features))
    for name, value in vars(features).items():
        assert torch.equal(getattr(again, name), value) if isinstance(value, torch.Tensor) else getattr(again, name) == value
    assert again.features_ND.dtype == getattr(torch, dtype)
    assert again.features_ND.data_ptr() != features.features_ND.data_ptr()


def test_the_store_holds_the_window_and_what_leaves_it():
    assert needed_store(1 << 30, 1 << 28) * on_ray.SHARE_OF_STORE > (1 << 30) + (1 << 28)
    assert needed_store(1 << 20, 1 << 30) * on_ray.SHARE_OF_STORE > 2 << 30
    assert needed_store(1 << 30, 1 << 28, drafters=3) * on_ray.SHARE_OF_STORE > (1 << 30) + 5 * (1 << 28)


def test_between_gpus_features_go_by_nixl_where_it_is_installed(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(on_ray, "can_receive", lambda transport: False)
    assert on_ray.tensor_transport(gpu) == ""
    monkeypatch.setattr(on_ray, "can_receive", lambda transport: True)
    assert (on_ray.tensor_transport(gpu), on_ray.tensor_transport(cpu)) == ("nixl", "")


def test_nothing_is_left_of_a_cluster_whose_driver_was_killed(ended_and_killed):
    """Ray's agents take leave of their cluster for a minute, which the tests in between have used."""
    _, alive = psutil.wait_procs(ended_and_killed[1], timeout=90)
    assert [each for each in alive if each.is_running() and each.status() != psutil.STATUS_ZOMBIE] == []
