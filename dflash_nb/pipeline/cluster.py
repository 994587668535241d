"""The Ray cluster of a run: joined where one is named, else started on this machine and ended with the run.

Starting takes 6 s and nine processes on two idle cores. On a busy machine it may fail: a node ends itself when its own agents are late, and
Ray gives up after 30 s, leaving the rest of the processes. They are ended here, and the start is tried again, three times in all.

Ray starts its workers with niceness 15, as guests of a machine. Here they are the run: beside two busy processes on two cores, a worker at
15 took 105 s to get ready and one at 0 took 4 s. A cluster that was there has the niceness that it was started with.
"""

import logging
import os
import re
import socket
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import internal_api

from dflash_nb.pipeline.environment import usable_cores

START_TRIES = 3
ANSWER_SECONDS = 10  # Ray itself asks an address where nobody answers for minutes
AGENT_SECONDS = 28  # a node waits so long for its agents instead of 15 s; Ray waits 30 s for the node


def connect(address: str, workers: int, options: dict[str, Any], store_bytes: int) -> Callable[[], None]:
    """Join the cluster at ``address``, or without one start a cluster of this machine. Returns what leaves it again.

    A cluster that was there before stays. ``options`` are Ray's for one actor. Raises ValueError when the cluster cannot be had or has no
    room for ``workers`` actors or ``store_bytes``.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    resources = {name: options[name] for name in ("num_cpus", "num_gpus") if options.get(name)}
    joined = ray.is_initialized()
    place = _place(address)
    if joined and place and place != _place(ray.get_runtime_context().gcs_address):
        raise ValueError(
            f"this process has joined the Ray cluster at {ray.get_runtime_context().gcs_address} already, ray_address names {address!r}: "
            "leave ray_address out, or call ray.shutdown() first"
        )
    if not joined and address:
        try:
            if place:
                socket.create_connection(place, ANSWER_SECONDS).close()
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:
            problem = one_line(error)
            raise ValueError(
                f"the Ray cluster at {address!r} cannot be joined: {problem} Start Ray there and name its address, or use engine local."
            ) from error
    elif not joined:
        check_memory(store_bytes)
        cpus, gpus = (int(resources.get(name, 0) * workers) for name in ("num_cpus", "num_gpus"))
        start(max(usable_cores(), cpus), gpus, store_bytes)
    leave = (lambda: None) if joined else ray.shutdown
    try:
        check_room(ray.nodes(), workers, resources, store_bytes)
    except BaseException:
        leave()
        raise
    return leave


def _place(address: str) -> tuple[str, int] | None:
    """Host and port of an address; None for ``auto`` and for none. Raises ValueError for what cannot be joined."""
    if address in ("", "auto"):
        return None
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(
            f"ray_address must be auto or host:port, such as 10.0.0.1:6379, not {address!r}; leave it out for a cluster of this machine"
        )
    try:
        return socket.gethostbyname(host), int(port)
    except OSError as error:
        raise ValueError(
            f"ray_address {address!r}: the host {host!r} is not known here ({error}); correct it, or give its number"
        ) from error


def check_memory(store_bytes: int) -> None:
    """Refuse a cluster of this machine whose object store would not fit into its memory."""
    if store_bytes > (free := psutil.virtual_memory().available):
        raise ValueError(
            f"the object store of a Ray cluster on this machine needs {store_bytes / 2**20:,.0f} MiB, of its memory {free / 2**20:,.0f} "
            "are free: lower q_hs_mb"
        )


def start(cpus: int, gpus: int, store_bytes: int) -> None:
    """Start a cluster on this machine and join it. Raises ValueError, and leaves no process, when it does not come up in time."""
    os.environ.setdefault("RAY_agent_register_timeout_ms", str(1000 * AGENT_SECONDS))
    os.environ.setdefault("RAY_worker_niceness", "0")
    problem = ""
    for _ in range(START_TRIES):
        before = processes()
        try:
            ray.init(
                "local",
                num_cpus=cpus,
                num_gpus=gpus,
                object_store_memory=store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except BaseException as error:
            ray.shutdown()
            end(before)
            if not isinstance(error, Exception):
                raise
            problem = one_line(error)
    raise ValueError(
        f"no Ray cluster could be started on this machine in {START_TRIES} tries: {problem} Try again when the machine is less busy, "
        "start Ray yourself and name its address, or use engine local."
    )


def processes() -> set[psutil.Process]:
    """Ray's processes that descend from this one."""
    home, found = str(Path(ray.__file__).parent), set()
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:  # it has ended since
            continue
        if any(home in part or part.startswith("ray::") for part in command):
            found.add(process)
    return found


def end(before: Collection[psutil.Process]) -> None:
    """Kill those of Ray's processes that have been started since ``before``."""
    started = processes() - set(before)
    for process in started:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(started, timeout=10)


def check_room(nodes: list[dict[str, Any]], workers: int, resources: dict[str, float], store_bytes: int) -> None:
    """Refuse a cluster that has no room for ``workers`` actors, or a node whose object store is smaller than ``store_bytes``."""
    alive = [node for node in nodes if node["Alive"]]
    names = {name: {"num_cpus": "CPU", "num_gpus": "GPU"}[name] for name, count in resources.items() if count}
    room = sum(min(int(node["Resources"].get(ours, 0) // resources[name]) for name, ours in names.items()) for node in alive)
    if room < workers:
        each = " and ".join(f"{resources[name]:g} {ours}" for name, ours in names.items())
        raise ValueError(
            f"the Ray cluster has room for {room} actors ({each} each, {len(alive)} nodes), topology needs {workers}: "
            "use a smaller topology or add nodes"
        )
    for node in alive:
        if 0 < (store := node["Resources"].get("object_store_memory", 0)) < store_bytes:
            raise ValueError(
                f"the object store of Ray node {node['NodeManagerAddress']} holds {store / 2**20:,.0f} MiB, {store_bytes / 2**20:,.0f} are "
                f"needed: lower q_hs_mb, or start the node with --object-store-memory {store_bytes}"
            )


def bytes_on_disk() -> int:
    """Bytes that the object stores of this process's cluster have written to disk so far, spilled or allocated there; 0 when no node
    answers. The machine may hold other clusters."""
    try:
        address = ray.get_runtime_context().gcs_address
        stats = internal_api.get_memory_info_reply(internal_api.get_state_from_address(address)).store_stats
    except Exception:  # a node may die while it is asked, and no answer is worth a run
        return 0
    return stats.spilled_bytes_total + stats.object_store_bytes_fallback


def one_line(error: BaseException) -> str:
    """Ray's errors are pages: the line that names an original error, else the first two lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    return named[-1] if named else " ".join(lines[:2])
