"""Target workers as actors of a Ray cluster, behind the same pool as threads.

Ray places the actors, moves the hidden states through its object store and notices what died. Here is what a worker does and what
follows when it is lost: its batch goes back to the window and runs elsewhere, and a new actor is asked for, which starts as soon as some
node has room (a node that joins later is used that way). One batch at a time is with an actor, so a slow node takes fewer batches.

The object store is not a second queue: the window reserves the bytes of every batch before it is handed out, and a cluster whose store
cannot hold them is refused at the start. A batch is copied out of the store as it arrives. Ray would write what does not fit to disk
without a word, so the bytes that it wrote are looked up every ten seconds and reported.
"""

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from dflash_nb.data.dataset import Batch
from dflash_nb.model.target import Features, FrozenTarget
from dflash_nb.model.target_info import TargetInfo
from dflash_nb.pipeline.environment import usable_cores
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.local import LocalPool
from dflash_nb.pipeline.window import WorkerLost

try:
    import ray
    from ray._private import internal_api
except ModuleNotFoundError:
    raise ImportError("engine ray needs the package ray: pip install 'dflash-nb[ray]', or use engine local") from None

LOOK_SECONDS = 0.2
PLACE_SECONDS = 120.0  # a worker process starts in seconds; more means that no node has room for it
DISK_SECONDS = 10.0
SHARE_OF_STORE = 0.8  # Ray starts to write to disk when its store is fuller
SMALLEST_STORE = 80 << 20


@dataclass(frozen=True)
class Place:
    """Where an actor runs."""

    node: str
    pid: int
    device: str


@dataclass(frozen=True)
class Elsewhere:
    """Features that another drafter fetches from where they are."""

    reference: Any
    way_seconds: float


class Worker:
    """The actor: what ``make()`` returned, called with one batch at a time."""

    def place(self) -> Place:
        device = f"cuda:{ray.get_gpu_ids()[0]}" if ray.get_gpu_ids() else "cpu"
        return Place(ray.util.get_node_ip_address(), os.getpid(), device)

    def open(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self.work = make()

    @ray.method(num_returns=2)
    def run(self, batch: Any) -> tuple[Any, float]:
        """The result and the seconds that it took here."""
        started = time.perf_counter()
        result = self.work(batch)
        return result, time.perf_counter() - started


def open_target(
    info: TargetInfo, layer_ids: tuple[int, ...], dtype: str, with_last_hidden: bool, packed: bool, threads: int
) -> Callable[[Batch], dict]:
    """Load a target on the device that Ray gave to this process; returns the function from a batch to packed features."""
    torch.set_num_threads(threads)
    target = FrozenTarget.load(info, layer_ids, "cuda" if ray.get_gpu_ids() else "cpu", dtype, with_last_hidden, packed)
    return lambda batch: pack(target.features(batch))


def pack(features: Features) -> dict[str, Any]:
    """Features whose tensors are numpy arrays, which Ray moves without pickling; bfloat16 as int16, which numpy lacks."""
    packed: dict[str, Any] = {"dtype": str(features.features_ND.dtype).removeprefix("torch.")}
    for name, value in vars(features).items():
        if isinstance(value, torch.Tensor):
            tensor = value.cpu()
            value = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        packed[name] = value
    return packed


def unpack(packed: dict[str, Any]) -> Features:
    """The features again, in memory of this process: the store's place is free when ``packed`` is."""
    values = dict(packed)
    dtype = getattr(torch, values.pop("dtype"))
    for name, value in values.items():
        if isinstance(value, np.ndarray):
            tensor = torch.from_numpy(value.copy())
            values[name] = tensor.view(dtype) if tensor.dtype == torch.int16 else tensor
    return Features(**values)


class RayPool:
    """A pool of ``workers`` actors, each running ``make()``'s function; see ``window.Pool``.

    ``receive(batch, reference, seconds)`` makes what the future holds of the result's reference and of the seconds that waiting and
    calling took. ``resources`` are Ray's options of one actor. Returns when the first worker is up; what kept the last one from starting
    is raised when none is.
    """

    def __init__(
        self,
        make: Callable[[], Callable[[Any], Any]],
        workers: int,
        receive: Callable[[Any, Any, float], Any],
        resources: dict[str, float],
        leave: Callable[[], None] = lambda: None,
    ):
        self.places: dict[str, Place] = {}
        self._make, self._receive, self._leave = make, receive, leave
        self._actor = ray.remote(Worker).options(max_restarts=0, max_task_retries=0, **resources)
        self._resources = ", ".join(f"{count:g} {name.removeprefix('num_').upper()}" for name, count in resources.items() if count)
        self._actors: dict[str, Any] = {}
        self._on_disk, self._looked = 0, time.monotonic()
        self._names = [f"target-{k}" for k in range(workers)]
        self._pool = LocalPool({name: partial(self._run, name) for name in self._names}, open=self._open)
        self.stop, self.news, self.submit = self._pool.stop, self._pool.news, self._pool.submit
        try:
            self._on_disk = bytes_on_disk()
            self._pool.wait_until_open()
        except BaseException:
            self.close()
            raise

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers that are up or starting."""
        return self._pool.workers

    def report(self) -> list[str]:
        """A line for each worker that is up: where it is and what it has done so far."""
        lines = dict(zip(self._names, self._pool.report(), strict=True))
        return [f"node {place.node}, {lines[name]}" for name, place in sorted(self.places.items())]

    def close(self) -> None:
        """Cancel what is queued, end every actor, and leave the cluster."""
        self.stop.set()
        try:
            for actor in list(self._actors.values()):
                ray.kill(actor)
            self._pool.close()
        finally:
            self._leave()

    def _open(self, name: str) -> None:
        """Ask for an actor, wait for its place and for what it loads. Without any other worker the wait for a place has an end."""
        self.places.pop(name, None)
        actor = self._actors[name] = self._actor.remote()
        try:
            asked, reference = time.monotonic(), actor.place.remote()
            while not self._done(reference):
                if not self.places and time.monotonic() - asked > PLACE_SECONDS:
                    raise RuntimeError(
                        f"no node of the Ray cluster has had room for {name} ({self._resources}) in {PLACE_SECONDS:.0f} s; "
                        "add a node that has, or use fewer workers in topology"
                    )
            place = get(reference)
            reference = actor.open.remote(self._make)
            while not self._done(reference):
                pass
            get(reference)
        except BaseException:
            ray.kill(actor)
            raise
        self.places[name] = place
        self.news.append(f"{name} is up on node {place.node}, process {place.pid}, {place.device}")

    def _run(self, name: str, batch: Any) -> Any:
        started = time.perf_counter()
        result, busy = self._actors[name].run.remote(batch)
        while not self._done(busy):
            pass
        way_seconds = time.perf_counter() - started - get(busy)
        self._look_at_disk()
        return self._receive(batch, result, way_seconds)

    def _done(self, reference: Any) -> bool:
        """Whether the result is there, after waiting a little for it; InterruptedError when the pool is closing."""
        if self.stop.is_set():
            raise InterruptedError("the run is ending")
        return bool(ray.wait([reference], timeout=LOOK_SECONDS)[0])

    def _look_at_disk(self) -> None:
        if time.monotonic() - self._looked > DISK_SECONDS:
            self._looked = time.monotonic()
            if (now := bytes_on_disk()) > self._on_disk:
                self.news.append(
                    f"Ray's object store is full: it wrote {(now - self._on_disk) / 2**20:,.0f} MiB to disk, which is slow; lower q_hs_mb, "
                    "or see what else uses the cluster"
                )
                self._on_disk = now


def get(reference: Any) -> Any:
    """The result; what the remote call raised, with its remote traceback as a note; WorkerLost when there is no worker any more."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        cause.add_note(str(error))
        raise cause from None
    except ray.exceptions.RayError as error:
        raise WorkerLost(f"{type(error).__name__}: {_one_line(error)}") from error


def _one_line(error: BaseException) -> str:
    """Ray's errors are pages: the line that names an original error, else the first two lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"\w*(Error|Exception): ", line)]
    return named[-1] if named else " ".join(lines[:2])


def target_features(reference: Any, way_seconds: float, device: torch.device) -> Features:
    """The features behind ``reference`` on the drafter's device; the way is part of the transfer."""
    started = time.perf_counter()
    features = unpack(get(reference)).to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    features.seconds["transfer"] += way_seconds + time.perf_counter() - started
    return features


def actor_resources(device: torch.device, threads: int) -> dict[str, float]:
    """Ray's options of an actor on a device of this kind."""
    return {"num_cpus": 1, "num_gpus": 1} if device.type == "cuda" else {"num_cpus": threads}


def target_pool(job: Job, threads: int, largest_bytes: int) -> RayPool:
    """Join or start the cluster of ``job`` and open its target workers. ``largest_bytes`` is what the largest batch's features take."""
    config, device = job.config, job.placement.drafter
    workers, drafters = config.workers
    resources = actor_resources(device, threads)
    leave = connect(config.ray_address, workers + drafters - 1, resources, needed_store(config.q_hs_mb << 20, largest_bytes))
    kl, packed = config.objective == "kl", config.strategy == "packed"
    make = partial(open_target, job.info, job.drafter.target_layer_ids, config.dtype, kl, packed, threads)

    def receive(batch: Batch, reference: Any, way_seconds: float) -> Features | Elsewhere:
        if job.drafter_of(batch.epoch, batch.index):
            return Elsewhere(reference, way_seconds)
        return target_features(reference, way_seconds, device)

    return RayPool(make, workers, receive, resources, leave)


def needed_store(waiting_bytes: int, largest_bytes: int) -> int:
    """Bytes of an object store that holds the window and the batch that leaves it, without coming near the share that Ray spills at."""
    return max(SMALLEST_STORE, int((max(waiting_bytes, largest_bytes) + largest_bytes) / SHARE_OF_STORE) + (16 << 20))


def connect(address: str, workers: int, resources: dict[str, float], store_bytes: int) -> Callable[[], None]:
    """Join the cluster at ``address``, or without one start a cluster of this machine. Returns what leaves it again.

    A cluster that was there before stays. Raises ValueError when it has no room for the workers or the bytes.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    logging.getLogger("ray").setLevel(logging.ERROR)
    joined = ray.is_initialized()
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if joined:
            pass
        elif address:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            cpus, gpus = (resources.get(name, 0) * workers for name in ("num_cpus", "num_gpus"))
            ray.init("local", num_cpus=max(usable_cores(), int(cpus)), num_gpus=int(gpus), object_store_memory=store_bytes, **quiet)
    except Exception as error:
        where = f"the Ray cluster at {address!r} cannot be joined" if address else "no Ray cluster could be started on this machine"
        raise ValueError(f"{where}: {_one_line(error)} Start Ray there and name its address, or use engine local.") from error
    leave = (lambda: None) if joined else ray.shutdown
    try:
        check_room(ray.nodes(), workers, resources, store_bytes)
    except BaseException:
        leave()
        raise
    return leave


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
    """Bytes that the cluster's object stores have written to disk so far, spilled or allocated there; 0 when no node answers."""
    try:
        stats = internal_api.get_memory_info_reply(internal_api.get_state_from_address(None)).store_stats
    except Exception:  # a node may die while it is asked, and no answer is worth a run
        return 0
    return stats.spilled_bytes_total + stats.object_store_bytes_fallback
