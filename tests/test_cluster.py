"""Joining and starting Ray clusters: what is refused, and what a start that fails leaves. Real ones are started in test_ray.py.

Run alone: python -m pytest tests/test_cluster.py
"""

import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

ray = pytest.importorskip("ray", reason="the package ray is not installed: pip install 'dflash-nb[ray]'")

from dflash_nb.pipeline.cluster import START_TRIES, check_room, connect, processes, start


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


def test_a_cluster_that_is_not_there_is_one_sentence(monkeypatch):
    def nothing(*_, **__):
        raise ConnectionError("Could not find any running Ray instance.\nMore lines.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nothing)
    with pytest.raises(ValueError, match=r"the Ray cluster at 'auto' cannot be joined: Could not find any running Ray instance\."):
        connect("auto", 1, {"num_cpus": 1}, 1 << 20)


@pytest.fixture
def not_asked(monkeypatch):
    """Ray itself is not asked to join or to start anything."""
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", None)


def test_an_address_where_nobody_listens_is_said_at_once(not_asked):
    """Ray itself would ask there for minutes."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"the Ray cluster at '{address}' cannot be joined: .*refused"):
            connect(address, 1, {"num_cpus": 1}, 1 << 20)


@pytest.mark.parametrize("address", ["local", "ray://127.0.0.1:10001", "127.0.0.1", "127.0.0.1:99999", ":6379", "127.0.0.1:port", "a/b:1"])
def test_what_is_no_address_is_refused(address, not_asked):
    with pytest.raises(ValueError, match=rf"ray_address must be auto or host:port, such as .*, not '{address}'"):
        connect(address, 1, {"num_cpus": 1}, 1 << 20)


def test_an_unknown_host_and_another_cluster_than_the_one_that_was_joined_are_refused(not_asked, monkeypatch):
    with pytest.raises(ValueError, match=r"ray_address 'no.host.invalid:6379': the host 'no.host.invalid' is not known here"):
        connect("no.host.invalid:6379", 1, {"num_cpus": 1}, 1 << 20)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:6379"))
    with pytest.raises(ValueError, match=r"has joined the Ray cluster at 127.0.0.1:6379 already, ray_address names '127.0.0.1:6380'"):
        connect("127.0.0.1:6380", 1, {"num_cpus": 1}, 1 << 20)


def test_a_store_larger_than_the_memory_is_refused_before_anything_is_started(not_asked):
    with pytest.raises(ValueError, match=r"on this machine needs 1,073,741,824 MiB, of its memory [\d,]+ are free: lower q_hs_mb"):
        connect("", 1, {"num_cpus": 1}, 1 << 50)


class Starting:
    """Stands for ``ray.init``: leaves a process of Ray's behind each time, and fails the first ``failures`` times."""

    def __init__(self, failures):
        self.failures, self.tries, self.left = failures, 0, []

    def __call__(self, *_, **__):
        self.tries += 1
        program = "import time; time.sleep(600)"
        self.left.append(subprocess.Popen([sys.executable, "-c", program, f"{ray.__path__[0]}/core/raylet"]))
        if self.tries <= self.failures:
            raise Exception("The current node timed out during startup.\nMore lines.")

    def end(self):
        for process in self.left:
            process.kill()
            process.wait()


@pytest.fixture
def starting(monkeypatch):
    def make(failures):
        made.append(Starting(failures))
        monkeypatch.setattr(ray, "init", made[0])
        return made[0]

    made = []
    yield make
    made[0].end()


def test_a_start_that_fails_is_tried_again_and_what_it_left_is_ended(starting):
    others = processes()
    attempt = starting(failures=1)
    start(2, 0, 80 << 20)
    assert attempt.tries == 2
    assert {process.pid for process in processes() - others} == {attempt.left[1].pid}


def test_a_machine_that_cannot_start_a_cluster_says_so_and_keeps_no_process(starting):
    others = processes()
    attempt = starting(failures=99)
    with pytest.raises(ValueError, match=rf"in {START_TRIES} tries: The current node timed out during startup\. .* or use engine local"):
        start(2, 0, 80 << 20)
    assert attempt.tries == START_TRIES
    assert processes() == others


def test_an_interrupt_while_a_cluster_starts_leaves_no_process(starting, monkeypatch):
    others = processes()
    attempt = starting(failures=0)

    def interrupted(*_, **__):
        attempt()
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(2, 0, 80 << 20)
    assert (attempt.tries, processes()) == (1, others)
