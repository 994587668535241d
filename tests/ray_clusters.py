"""Real Ray clusters of one or two nodes on this machine, without what a test does not need.

Ray gives each node two agent processes for its dashboard and for runtime environments. Neither is used here; each takes seconds of CPU
to start, and a node whose agents are late dies (ray 65983). A shell stands in for them and reports their ports; the tests of a
cluster that a run makes for itself, in test_ray.py, have the real ones. Every process of Ray's reads a grammar of addresses for jsonschema,
1.4 s of CPU that nothing here needs: they do not find its package. A start that fails is tried again, as a run does it.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
import ray.cluster_utils
from ray._private import services

from dflash_nb.pipeline.cluster import START_TRIES, end, one_line, processes
from dflash_nb.pipeline.console import Console

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_niceness": "0",  # as in a cluster that a run makes for itself
    "RAY_health_check_period_ms": "1500",
    "RAY_max_direct_call_object_size": "1000",  # the tests' features are small: they go through the object store all the same
}
os.environ.update(ENVIRONMENT)
WITHOUT = tempfile.TemporaryDirectory()
(Path(WITHOUT.name) / "rfc3987_syntax.py").write_text("raise ImportError")
PATH = os.pathsep.join([WITHOUT.name, str(Path(__file__).parent), str(Path(__file__).parent.parent)])

STAND_IN = """
for argument; do case $argument in --node-id=*) node=${argument#*=};; --session-dir=*) folder=${argument#*=};; esac; done
report() { printf %s "$2" > "$folder/$$" && mv "$folder/$$" "$folder/$1_$node"; }
report metrics_agent_port -1; report metrics_export_port -1; report dashboard_agent_listen_port -1; report runtime_env_agent_port 1
exec tail --pid=$PPID -f /dev/null
"""
STORE = 128 << 20
_command = services._build_python_executable_command_memory_profileable


def _without_agents(component: str, *arguments: object, **options: object) -> list[str]:
    return ["sh", "-c", STAND_IN, component] if component.endswith("agent") else _command(component, *arguments, **options)


services._build_python_executable_command_memory_profileable = _without_agents


@contextmanager
def cluster(cpus: int = 4, store: int = STORE) -> Iterator[ray.cluster_utils.Cluster]:
    """A cluster of one node that this process has joined."""
    with other_cluster(cpus, store) as made:
        try:
            ray.init(made.address, log_to_driver=False, logging_level="ERROR")
            yield made
        finally:
            ray.shutdown()


@contextmanager
def other_cluster(cpus: int = 1, store: int = STORE) -> Iterator[ray.cluster_utils.Cluster]:
    """A cluster of one node that this process has not joined."""
    head = {"num_cpus": cpus, "object_store_memory": store, "include_dashboard": False, "include_log_monitor": False}
    made = started(lambda: ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head))
    try:
        yield made
    finally:
        made.shutdown()


@contextmanager
def second_node(made: ray.cluster_utils.Cluster, cpus: int = 2) -> Iterator[object]:
    """One more node of the cluster, which is taken away again unless the test has done so."""
    node = started(lambda: made.add_node(num_cpus=cpus, object_store_memory=STORE))
    try:
        yield node
    finally:
        if node in made.worker_nodes:
            made.remove_node(node)


def started(start: Callable[[], object]) -> object:
    """What ``start`` returns, tried as often as a run tries it."""
    for _ in range(START_TRIES):
        before = processes()
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", PATH, os.pathsep)
                return start()
        except Exception as error:
            problem = error
            end(before)
    pytest.fail(f"this machine cannot start a Ray node in {START_TRIES} tries: {one_line(problem)}")


def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for ``condition``; fail when it does not come in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{condition.__name__} took more than {seconds:.0f} s"
        time.sleep(0.1)


def actors(name: str) -> list[psutil.Process]:
    """The processes of the actors of a class."""
    return [p for p in psutil.process_iter(["cmdline"]) if (p.info["cmdline"] or [""])[0].startswith(f"ray::{name}")]


def at_steps(monkeypatch: pytest.MonkeyPatch, actions: dict[int, Callable[[], None]]) -> None:
    """Call ``actions[step]`` when that step has been logged."""
    counted = Console.step

    def counting(self, record):
        counted(self, record)
        if action := actions.get(record["step"]):
            action()

    monkeypatch.setattr(Console, "step", counting)
