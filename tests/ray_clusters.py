"""Real Ray clusters of one or two nodes on this machine, without what a test does not need.

Ray gives each node two agent processes for its dashboard and for runtime environments. Neither is used here; each takes seconds of CPU
to start, and a node whose agents take more than 15 s dies (ray 65983). A shell stands in for them and reports their ports.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
import ray.cluster_utils
from ray._private import services

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", RAY_memory_monitor_refresh_ms="0")

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
    made = ray.cluster_utils.Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": cpus, "object_store_memory": store, "include_dashboard": False, "include_log_monitor": False},
    )
    try:
        ray.init(made.address, log_to_driver=False, logging_level="ERROR")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()
