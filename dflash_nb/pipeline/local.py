"""Target workers as threads on this machine's devices.

On GPUs each worker has a device and a copy of the target; the drafter has the last device, or shares the only one. On the CPU all
workers share one set of frozen weights. PyTorch's intra-op thread count is one number for the whole process (a thread that sets it
changes what threads started later get), so workers and drafter use the same fixed count: cores / (workers + 1) unless the user says
otherwise. Fixing it is also what makes the loss bit for bit the same for any number of workers.
"""

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from dflash_nb.errors import PlainError
from dflash_nb.model.target import Features, FrozenTarget
from dflash_nb.model.target_info import TargetInfo
from dflash_nb.pipeline.environment import usable_cores
from dflash_nb.pipeline.window import WorkerFailure, WorkerLost

JOIN_SECONDS = 8.0
RETIRE_AFTER = 3


class PlacementError(PlainError, ValueError):
    """Workers and drafters for which the devices or the configuration have no room; the message says what to do."""


@dataclass(frozen=True)
class Placement:
    """The device of each target worker, and the drafter's."""

    targets: tuple[torch.device, ...]
    drafter: torch.device


def device_names(placement: Placement) -> list[str]:
    """What the GPUs are called that this process sees, the targets' first; none on a CPU."""
    seen = torch.cuda.device_count()
    gpus = [device for device in (*placement.targets, placement.drafter) if device.type == "cuda"]
    return [torch.cuda.get_device_name(device) for device in gpus if (device.index or 0) < seen]


def place(device: str, targets: int, drafters: int = 1) -> Placement:
    """Devices for ``targets`` workers and a drafter: ``auto``, ``cpu``, ``cuda`` (all visible GPUs) or one device.

    Raises PlacementError with a topology that this machine has room for.
    """
    if drafters != 1:
        raise PlacementError(
            f"topology {targets}-{drafters}: threads on one machine train one drafter; use {targets}-1, or engine ray for more"
        )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        wanted = torch.device(device)
    except RuntimeError:
        raise PlacementError(f"device {device!r} is not one; use auto, cpu, cuda, or one device such as cuda:1") from None
    if wanted.type == "cpu":
        return Placement((wanted,) * targets, wanted)
    count = torch.cuda.device_count() if wanted.type == "cuda" else 0
    if (wanted.index or 0) >= count:
        raise PlacementError(f"device {device}: {count} GPUs are visible to PyTorch; use auto or cpu")
    if wanted.index is not None or count == 1:
        if targets > 1:
            raise PlacementError(f"topology {targets}-1 on one GPU would load the target {targets} times; use topology 1-1")
        alone = torch.device("cuda", wanted.index or 0)
        return Placement((alone,), alone)
    if targets + 1 > count:
        raise PlacementError(f"topology {targets}-1 needs {targets + 1} GPUs, {count} are visible; use topology {count - 1}-1")
    return Placement(tuple(torch.device("cuda", index) for index in range(targets)), torch.device("cuda", targets))


def place_drafter(device: str) -> torch.device:
    """The drafter's device where the target workers are elsewhere: the last visible GPU, unless ``device`` is another one."""
    drafter = place(device, 1).drafter
    named = drafter.type != "cuda" or torch.device("cuda" if device == "auto" else device).index is not None
    return drafter if named else torch.device("cuda", torch.cuda.device_count() - 1)


def intra_op_threads(threads: int, targets: int) -> int:
    """CPU threads of one PyTorch operation: ``threads`` (0: every core) divided among the target workers and the drafter."""
    return max(1, (threads or usable_cores()) // (targets + 1))


def load_targets(
    info: TargetInfo, layer_ids: tuple[int, ...], placement: Placement, dtype: str, with_last_hidden: bool = False, packed: bool = False
) -> list[FrozenTarget]:
    """A target for each worker, in the order of ``placement.targets``; workers on the same device share one set of weights.

    packed: run the rows of a batch behind each other, without padding.
    """
    loaded: dict[torch.device, FrozenTarget] = {}
    for device in placement.targets:
        if device not in loaded:
            loaded[device] = FrozenTarget.load(info, layer_ids, device, dtype, with_last_hidden, packed)
    return [loaded[device] for device in placement.targets]


def bytes_per_token(target: FrozenTarget) -> int:
    """Bytes of ``Features`` for each real token: the captured layers, the last hidden state if it is kept, id and loss mask."""
    states = len(target.layer_ids) + target.with_last_hidden
    return states * target.info.hidden_size * target.dtype.itemsize + 8 + 1


def target_pool(targets: list[FrozenTarget], drafter_device: torch.device) -> "LocalPool":
    """The pool that computes features with ``targets`` and leaves them on the drafter's device."""
    stop = threading.Event()

    def look_up(*_: Any) -> None:
        if stop.is_set():
            raise InterruptedError("the run is ending")

    for target in {id(target): target for target in targets}.values():
        for module in target.decoder.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(look_up)
    works = {
        f"target-{k}": _on_gpu(target, drafter_device) if target.device.type == "cuda" else target.features
        for k, target in enumerate(targets)
    }
    return LocalPool(works, stop)


def _on_gpu(target: FrozenTarget, drafter_device: torch.device) -> Callable[[Any], Features]:
    """Compute on a stream of its own and copy to the drafter's device on another, so that neither waits for the drafter's kernels."""
    compute, copy = torch.cuda.Stream(target.device), torch.cuda.Stream(drafter_device)

    def work(batch: Any) -> Features:
        with torch.cuda.stream(copy), torch.cuda.stream(compute):
            features = target.features(batch)
            started = time.perf_counter()
            moved = features.to(drafter_device)
            for stream in (compute, copy):
                stream.synchronize()
        moved.seconds["transfer"] += time.perf_counter() - started
        for tensor in (moved.features_ND, moved.input_ids_N, moved.loss_mask_N, moved.last_hidden_NH):
            if tensor is not None:
                tensor.record_stream(torch.cuda.default_stream(drafter_device))
        return moved

    return work


@dataclass(eq=False)
class _Task:
    future: Future
    batch: Any
    avoid: frozenset[str]


class LocalPool:
    """A pool of named callables ``batch -> features``, each served by a thread of its own, one queue for all.

    ``stop`` is set when the pool closes: a callable that can take long should look at it and raise. A worker that fails
    3 batches in a row is retired while others are left. The frames of a failed call are cleared, so that its tensors are free
    before the batch is tried again; file names and line numbers of the traceback stay.

    ``open(name)`` is called in the worker's thread before its first batch, and again when its callable raised ``WorkerLost``; until it
    returns the worker takes no batch, and when it raises the worker leaves. ``news`` collects sentences about workers.
    """

    def __init__(
        self,
        works: Mapping[str, Callable[[Any], Any]],
        stop: threading.Event | None = None,
        open: Callable[[str], None] = lambda name: None,
        news: deque[str] | None = None,
    ):
        if not works:
            raise ValueError("a pool needs at least one worker")
        self.stop = stop or threading.Event()
        self.news: deque[str] = deque() if news is None else news
        self._started = time.monotonic()
        self._done = dict.fromkeys(works, (0, 0.0))
        self._works = dict(works)
        self._open = open
        self._opening = set(works)
        self._left: WorkerFailure | None = None
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._alive = dict.fromkeys(works, 0)
        self._threads = [threading.Thread(target=self._serve, args=(name,), name=name, daemon=True) for name in works]
        for thread in self._threads:
            thread.start()

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers that are alive."""
        with self._changed:
            return tuple(self._alive)

    def submit(self, batch: Any, avoid: frozenset[str] = frozenset()) -> Future:
        """A future of the features of ``batch``; see ``window.Pool``."""
        task = _Task(Future(), batch, avoid)
        with self._changed:
            if self.stop.is_set():
                raise RuntimeError("the pool is closed")
            if not self._alive:
                task.future.set_exception(self._left)
            elif avoid:
                self._tasks.appendleft(task)
            else:
                self._tasks.append(task)
            self._changed.notify_all()
        return task.future

    def wait_until_open(self) -> None:
        """Return when a worker is open; raises what kept the last one from opening when all have left."""
        with self._changed:
            self._changed.wait_for(lambda: not self._alive or self._alive.keys() - self._opening)
            if not self._alive:
                raise self._left.__cause__

    def report(self) -> list[str]:
        """A line for each worker: what it has done so far."""
        seconds = time.monotonic() - self._started
        return [f"{name}: {batches:,} batches, busy {busy / seconds:.0%} of the time" for name, (batches, busy) in self._done.items()]

    def close(self, timeout: float = JOIN_SECONDS) -> None:
        """Cancel what is queued, ask what runs to stop, and wait for the threads. A thread that does not end in time is an error."""
        self.stop.set()
        with self._changed:
            tasks, self._tasks = self._tasks, deque()
            self._changed.notify_all()
        for task in tasks:
            task.future.cancel()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if stuck := [thread.name for thread in self._threads if thread.is_alive()]:
            raise RuntimeError(f"worker {', '.join(stuck)} is still computing {timeout:g} s after it was asked to stop")
        # A failure that somebody keeps holds these frames by its traceback, and through them the pool: not the models as well.
        self._works.clear()

    def _serve(self, name: str) -> None:
        is_open = self._try_to_open(name)
        while is_open and (task := self._take(name)) is not None:
            lost = task.future.set_running_or_notify_cancel() and not self._run(name, task)
            del task
            if lost:
                is_open = self._try_to_open(name)

    def _try_to_open(self, name: str) -> bool:
        try:
            self._open(name)
            return True
        except BaseException as error:
            self._leave(name, _failure(name, error))
            return False
        finally:
            with self._changed:
                self._opening.discard(name)
                self._changed.notify_all()

    def _leave(self, name: str, failure: WorkerFailure) -> None:
        """Without any worker left, what is queued fails: nobody would take it."""
        with self._changed:
            self._alive.pop(name, None)
            self._left = failure
            if not self.stop.is_set():
                self.news.append(f"{name} has left: {failure.__cause__}")
            abandoned = () if self._alive else tuple(self._tasks)
            if abandoned:
                self._tasks.clear()
        for task in abandoned:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(failure)

    def _run(self, name: str, task: _Task) -> bool:
        """Whether the worker is still there afterwards."""
        started = time.monotonic()
        try:
            features = self._works[name](task.batch)
        except BaseException as error:
            lost = isinstance(error, WorkerLost)
            if lost:
                self.news.append(f"{name} is lost: {error}")
            else:
                self._count(name, failed=True)
            task.future.set_exception(_failure(name, error))
            return not lost
        self._count(name, failed=False)
        batches, busy = self._done[name]
        self._done[name] = batches + 1, busy + time.monotonic() - started
        task.future.set_result(features)
        return True

    def _count(self, name: str, failed: bool) -> None:
        with self._changed:
            self._alive[name] = self._alive[name] + 1 if failed else 0
            if self._alive[name] >= RETIRE_AFTER and len(self._alive) > 1:
                del self._alive[name]
                self.news.append(f"{name} is retired after {RETIRE_AFTER} failures in a row")
                self._changed.notify_all()

    def _take(self, name: str) -> _Task | None:
        with self._changed:
            while not self.stop.is_set() and name in self._alive:
                for task in self._tasks:
                    if name not in task.avoid or task.avoid.issuperset(self._alive):
                        self._tasks.remove(task)
                        return task
                self._changed.wait()
            return None


def _failure(name: str, error: BaseException) -> WorkerFailure:
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    failure = WorkerFailure(name, f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
