"""Target workers as threads on this machine's devices.

On GPUs each worker has a device and a copy of the target; the drafter has the last device, or shares the only one. On the CPU all
workers share one set of frozen weights. PyTorch's intra-op thread count is one number for the whole process (a thread that sets it
changes what threads started later get), so workers and drafter use the same fixed count: cores / (workers + 1) unless the user says
otherwise. Fixing it is also what makes the loss bit for bit the same for any number of workers.
"""

import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from dflash_nb.pipeline.window import WorkerFailure

JOIN_SECONDS = 8.0
RETIRE_AFTER = 3


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
    """

    def __init__(self, works: Mapping[str, Callable[[Any], Any]], stop: threading.Event | None = None):
        if not works:
            raise ValueError("a pool needs at least one worker")
        self.stop = stop or threading.Event()
        self._tasks: deque[_Task] = deque()
        self._changed = threading.Condition()
        self._alive = dict.fromkeys(works, 0)
        self._threads = [threading.Thread(target=self._serve, args=item, name=item[0], daemon=True) for item in works.items()]
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
            if avoid:
                self._tasks.appendleft(task)
            else:
                self._tasks.append(task)
            self._changed.notify_all()
        return task.future

    def close(self, timeout: float = JOIN_SECONDS) -> None:
        """Cancel what is queued, ask what runs to stop, and wait for the threads. A thread that does not end in time is an error."""
        self.stop.set()
        with self._changed:
            tasks, self._tasks = self._tasks, deque()
            self._changed.notify_all()
        for task in tasks:
            task.future.cancel()
        for thread in self._threads:
            thread.join(timeout)
        if stuck := [thread.name for thread in self._threads if thread.is_alive()]:
            raise RuntimeError(f"worker {', '.join(stuck)} is still computing {timeout:g} s after it was asked to stop")

    def _serve(self, name: str, work: Callable[[Any], Any]) -> None:
        while (task := self._take(name)) is not None:
            if task.future.set_running_or_notify_cancel():
                self._run(name, work, task)
            del task

    def _run(self, name: str, work: Callable[[Any], Any], task: _Task) -> None:
        try:
            features = work(task.batch)
        except BaseException as error:
            self._count(name, failed=True)
            task.future.set_exception(_failure(name, error))
        else:
            self._count(name, failed=False)
            task.future.set_result(features)

    def _count(self, name: str, failed: bool) -> None:
        with self._changed:
            self._alive[name] = self._alive[name] + 1 if failed else 0
            if self._alive[name] >= RETIRE_AFTER and len(self._alive) > 1:
                del self._alive[name]
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
    # The outermost frame is the pool's own and holds the future: kept, it would tie the failure into a reference cycle.
    error.__traceback__ = error.__traceback__.tb_next
    traceback.clear_frames(error.__traceback__)
    if isinstance(error, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
    failure = WorkerFailure(name, f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
