"""Target workers as actors of a Ray cluster, behind the same pool as threads.

Ray places the actors, moves the hidden states through its object store and notices what died. Here is what a worker does and what
follows when it is lost: its batch goes back to the window and runs elsewhere, and a new actor is asked for, which starts as soon as some
node has room (a node that joins later is used that way). One batch at a time is with an actor, so a slow node takes fewer batches.

The object store is not a second queue: the window reserves the bytes of every batch before it is handed out, and a cluster whose store
cannot hold them is refused at the start. A batch is copied out of the store as it arrives. Ray would write what does not fit to disk
without a word, so the bytes that it wrote are looked up every ten seconds and reported.

Between GPUs, where the package nixl is installed, a batch stays on the GPU that computed it until the drafter takes it from there, past
both hosts' memory: Ray's tensor transport. NIXL and not NCCL, because its receiver may be the notebook's process and its senders may come
and go. The tests take the same way on CPUs, through files and, where it is installed, NIXL (1.5.2 was tried); it has not run on a GPU.
"""

import importlib.util
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from dflash_nb.data.dataset import Batch
from dflash_nb.model.target import Features, FrozenTarget
from dflash_nb.model.target_info import TargetInfo
from dflash_nb.pipeline.cluster import bytes_on_disk, connect, one_line
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.local import LocalPool
from dflash_nb.pipeline.window import WorkerLost

LOOK_SECONDS = 0.2
PLACE_SECONDS = 120.0  # a worker process starts in seconds; more means that no node has room for it
DISK_SECONDS = 10.0
SHARE_OF_STORE = 0.8  # Ray starts to write to disk when its store is fuller
SMALLEST_STORE = 80 << 20
GPU_TRANSPORT = "nixl"
LOST = (ray.exceptions.ObjectLostError, ray.exceptions.RayActorError, ray.exceptions.RaySystemError)
"""What a call raises when it did not begin because an argument cannot be fetched any more."""


@dataclass(frozen=True)
class Place:
    """Where an actor runs, and whether it can send its results from device to device."""

    node: str
    pid: int
    device: str
    sends: bool = False


@dataclass(frozen=True)
class Elsewhere:
    """Features that another drafter fetches from where they are."""

    reference: Any
    way_seconds: float


class Worker:
    """The actor: what ``make()`` returned, called with one batch at a time."""

    def place(self, transport: str) -> Place:
        device = f"cuda:{ray.get_gpu_ids()[0]}" if ray.get_gpu_ids() else "cpu"
        return Place(node_name(), os.getpid(), device, bool(transport) and can_receive(transport))

    def open(self, make: Callable[[], Callable[[Any], Any]]) -> None:
        self.work = make()

    def run(self, batch: Any) -> float:
        """Compute what ``take`` hands over; returns the seconds that it took."""
        self.result, started = None, time.perf_counter()
        self.result = self.work(batch)
        return time.perf_counter() - started

    def take(self, as_it_is: bool) -> Any:
        """The result of the ``run`` before, features packed for the object store unless they go ``as_it_is``."""
        result, self.result = self.result, None
        return pack(result) if isinstance(result, Features) and not as_it_is else result


def open_target(
    info: TargetInfo, layer_ids: tuple[int, ...], dtype: str, with_last_hidden: bool, packed: bool, threads: int
) -> Callable[[Batch], dict]:
    """Load a target on the device that Ray gave to this process; returns the function from a batch to features."""
    torch.set_num_threads(threads)
    target = FrozenTarget.load(info, layer_ids, "cuda" if ray.get_gpu_ids() else "cpu", dtype, with_last_hidden, packed)
    return target.features


def pack(features: Features) -> dict[str, Any]:
    """Features whose tensors are numpy arrays, which Ray moves without pickling; bfloat16 as int16, which numpy lacks."""
    packed: dict[str, Any] = {"dtype": str(features.features_ND.dtype).removeprefix("torch.")}
    for name, value in vars(features).items():
        if isinstance(value, torch.Tensor):
            tensor = value.cpu()
            value = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        packed[name] = value
    return packed


def received(sent: Features | dict[str, Any]) -> Features:
    """Features as they arrive: on their device through the tensor transport, else packed."""
    return sent if isinstance(sent, Features) else unpack(sent)


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
    calling took. ``options`` are Ray's for one actor. ``transport`` names the tensor transport for results of workers that have it, empty
    for the object store. Returns when the first worker is up; what kept the last one from starting is raised when none is.
    """

    def __init__(
        self,
        make: Callable[[], Callable[[Any], Any]],
        workers: int,
        receive: Callable[[Any, Any, float], Any],
        options: dict[str, Any],
        leave: Callable[[], None] = lambda: None,
        transport: str = "",
    ):
        self.places: dict[str, Place] = {}
        self.stop, self.news, self.transport = threading.Event(), deque[str](), transport
        self._make, self._receive, self._leave = make, receive, leave
        self._actor = ray.remote(**options)(Worker)
        asked = {name.removeprefix("num_").upper(): count for name, count in options.items() if name.startswith("num_") and count}
        self._resources = ", ".join(f"{count:g} {name}" for name, count in asked.items())
        self._actors: dict[str, Any] = {}
        self._on_disk, self._looked = bytes_on_disk(), time.monotonic()
        self._names = [f"target-{k}" for k in range(workers)]
        # Its threads begin at once: everything that they use is there already.
        self._pool = LocalPool({name: partial(self._run, name) for name in self._names}, self.stop, self._open, self.news)
        self.submit = self._pool.submit
        try:
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
            asked, reference = time.monotonic(), actor.place.remote(self.transport)
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
        actor, direct = self._actors[name], self.places[name].sends
        try:
            busy = actor.run.remote(batch)
            result = actor.take.options(**({"tensor_transport": self.transport} if direct else {})).remote(direct)
        except ray.exceptions.RayError as error:  # a tensor transport asks the actor first
            raise WorkerLost(f"{type(error).__name__}: {one_line(error)}") from error
        while not self._done(result):
            pass
        way_seconds = time.perf_counter() - started - get(busy)
        self._look_at_disk()
        return self._receive(batch, result, way_seconds)

    def _done(self, reference: Any) -> bool:
        """Whether the result is somewhere, after waiting a little for it; InterruptedError when the pool is closing."""
        if self.stop.is_set():
            raise InterruptedError("the run is ending")
        return bool(ray.wait([reference], timeout=LOOK_SECONDS, fetch_local=False)[0])

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
        raise WorkerLost(f"{type(error).__name__}: {one_line(error)}") from error


def target_features(reference: Any, way_seconds: float, device: torch.device) -> Features:
    """The features behind ``reference`` on the drafter's device; the way is part of the transfer."""
    started = time.perf_counter()
    features = received(get(reference)).to(device)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    features.seconds["transfer"] += way_seconds + time.perf_counter() - started
    return features


def actor_options(device: torch.device, threads: int, transport: str = "") -> dict[str, Any]:
    """Ray's options of an actor on a device of this kind: it is not restarted by Ray, and no call is repeated by Ray."""
    resources = {"num_cpus": 1, "num_gpus": 1} if device.type == "cuda" else {"num_cpus": threads}
    return {"max_restarts": 0, "max_task_retries": 0, "enable_tensor_transport": bool(transport), **resources}


def node_name() -> str:
    """Address and number of the node that this process runs on; a machine may hold several."""
    return f"{ray.util.get_node_ip_address()}/{ray.get_runtime_context().get_node_id()[:6]}"


def tensor_transport(device: torch.device) -> str:
    """How features get to a drafter on ``device``, whose kind is also the target workers': empty for the object store."""
    return GPU_TRANSPORT if device.type == "cuda" and can_receive(GPU_TRANSPORT) else ""


def can_receive(transport: str) -> bool:
    """Whether this process has the package of a tensor transport; the object store, named by nothing, is always there."""
    return not transport or importlib.util.find_spec(transport) is not None


def target_pool(job: Job, threads: int, largest_bytes: int) -> RayPool:
    """Join or start the cluster of ``job`` and open its target workers. ``largest_bytes`` is what the largest batch's features take."""
    config, device = job.config, job.placement.drafter
    transport = tensor_transport(device)
    leave = join(job, threads, largest_bytes)
    kl, packed = config.objective == "kl", config.strategy == "packed"
    make = partial(open_target, job.info, job.drafter.target_layer_ids, config.dtype, kl, packed, threads)

    def receive(batch: Batch, reference: Any, way_seconds: float) -> Features | Elsewhere:
        if job.drafter_of(batch.epoch, batch.index):
            return Elsewhere(reference, way_seconds)
        return target_features(reference, way_seconds, device)

    return RayPool(make, config.workers[0], receive, actor_options(device, threads, transport), leave, transport)


def join(job: Job, threads: int, largest_bytes: int) -> Callable[[], None]:
    """Join or start the cluster of ``job``; returns what leaves it. Raises ValueError where it has no room for its actors or features."""
    config = job.config
    actors = sum(config.workers) - 1
    return connect(config.ray_address, actors, actor_options(job.placement.drafter, threads), store_of(job, largest_bytes))


def store_of(job: Job, largest_bytes: int) -> int:
    """Bytes that each object store of the cluster of ``job`` must hold."""
    return needed_store(job.config.q_hs_mb << 20, largest_bytes, job.config.workers[1])


def needed_store(waiting_bytes: int, largest_bytes: int, drafters: int = 1) -> int:
    """Bytes of an object store that holds the window, the batch that leaves it and two for each other drafter, without coming near the
    share that Ray spills at."""
    leaving = (2 * drafters - 1) * largest_bytes
    return max(SMALLEST_STORE, int((max(waiting_bytes, largest_bytes) + leaving) / SHARE_OF_STORE) + (16 << 20))
