"""The sliding window of futures that joins the target workers to the drafter.

Batches are handed to a pool of workers in plan order and their features are taken in plan order, so the order of training does not
depend on the number, speed or place of the workers. The window holds everything between a worker's input and the drafter: what is
being computed and what waits (q_hs). It is bounded in items and in bytes. The bytes of a batch are known before it is computed
(real tokens x bytes a token), so the bound holds for running work too; one batch is always allowed. The batch that the drafter is
working on is no longer in the window.

All logic runs in the caller's thread, inside ``next()``: room appears only when the caller takes something, so that is when work is
handed out. A batch that failed is run again, first on workers that have not failed it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from dflash_nb.errors import PlainError
from dflash_nb.pipeline.prefetch import Prefetcher

POLL_SECONDS = 0.02
WAITING_BATCHES = 16  # places for finished batches, beside one for each worker


class WorkerFailure(Exception):
    """One worker could not do one batch. The original error is the cause."""

    def __init__(self, worker: str, message: str):
        super().__init__(f"{worker}: {message}")
        self.worker = worker


class WorkerLost(Exception):
    """What a worker's callable raises when the worker itself is gone: its batch has failed, and the worker must be opened again."""


class WorkerError(PlainError, RuntimeError):
    """A batch failed on every worker that may try it, or no worker is left. The original error is the cause."""

    def __init__(self, message: str, sample_ids: tuple[int, ...] = ()):
        super().__init__(message)
        self.sample_ids = sample_ids


class Pool(Protocol):
    """What a run asks of a pool of target workers, whether threads here or processes elsewhere. ``stop`` tells it to end what runs;
    ``news`` are sentences about workers, taken from the left."""

    stop: threading.Event
    news: deque[str]

    @property
    def workers(self) -> tuple[str, ...]:
        """Names of the workers that are alive."""

    def submit(self, batch: Any, avoid: frozenset[str] = frozenset()) -> Future:
        """A future of the batch's features, failing with ``WorkerFailure``. Workers in ``avoid`` take it only if there are no others.

        A batch with a non-empty ``avoid`` has failed before and is served ahead of the others.
        """

    def report(self) -> list[str]:
        """A line for each worker: what it has done so far."""

    def close(self) -> None:
        """Cancel what is queued, end what runs, and return when no worker is left."""


@dataclass(frozen=True)
class Ready:
    """A batch with its features, as the drafter takes it. Seconds are wall time; ``wait_seconds`` is the drafter's idle time for it.
    ``failures`` are those of the runs before."""

    batch: Any
    features: Any
    fetch_seconds: float
    wait_seconds: float
    failures: tuple[WorkerFailure, ...] = ()


@dataclass
class _Entry:
    batch: Any
    fetch_seconds: float
    reserved: int
    future: Future
    failures: list[WorkerFailure] = field(default_factory=list)


class Window:
    """Iterates over ``Ready`` batches in plan order.

    ``size_of(batch)`` is the bytes of its features. ``retries`` is how many times a failed batch is run again. ``on_retry`` is called
    in the caller's thread with the batch, the failure and the number of the coming attempt (2 = first retry).
    """

    def __init__(
        self,
        source: Prefetcher,
        pool: Pool,
        size_of: Callable[[Any], int],
        max_items: int = 8,
        max_bytes: int = 2 << 30,
        retries: int = 2,
        on_retry: Callable[[Any, WorkerFailure, int], None] | None = None,
    ):
        if max_items < 1:
            raise ValueError(f"max_items is {max_items}; the window needs room for at least 1 batch")
        self._source = source
        self._pool = pool
        self._size_of = size_of
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._retries = retries
        self._on_retry = on_retry
        self._entries: deque[_Entry] = deque()
        self._held: Any = None
        self._reserved = 0
        self._closed = False

    @property
    def depth(self) -> int:
        """Batches whose features wait for the drafter (q_hs)."""
        return sum(_succeeded(entry.future) for entry in self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes of the features that wait."""
        return sum(entry.reserved for entry in self._entries if _succeeded(entry.future))

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the features that wait or are being computed; never above ``max_bytes`` unless a single batch is."""
        return self._reserved

    def in_flight(self) -> list[dict[str, int]]:
        """The batches handed out and not yet taken, in plan order."""
        return [{"epoch": int(entry.batch.epoch), "index": int(entry.batch.index)} for entry in self._entries]

    def __iter__(self) -> "Window":
        return self

    def __next__(self) -> Ready:
        started = time.perf_counter()
        while True:
            if self._closed:
                raise RuntimeError("the window was closed while its features were waited for")
            self._fill()
            if self._entries:
                self._rerun_failed()
                if self._entries[0].future.done():
                    break
                wait([entry.future for entry in self._entries if not entry.future.done()], POLL_SECONDS, FIRST_COMPLETED)
            elif self._source.exhausted:
                raise StopIteration
        entry = self._entries.popleft()
        self._reserved -= entry.reserved
        features = entry.future.result()
        self._fill()
        return Ready(entry.batch, features, entry.fetch_seconds, time.perf_counter() - started, tuple(entry.failures))

    def again(self, ready: Ready, failure: WorkerFailure) -> Ready:
        """A batch that was taken, computed once more because its features are lost; its tries before count."""
        future: Future = Future()
        future.set_exception(failure)
        size = self._size_of(ready.batch)
        self._entries.appendleft(_Entry(ready.batch, ready.fetch_seconds, size, future, list(ready.failures)))
        self._reserved += size
        return next(self)

    def close(self) -> None:
        """Drop what waits and cancel what is queued. A caller that waits in another thread gets an error."""
        self._closed = True
        self._source.close()
        for entry in self._entries:
            entry.future.cancel()
        self._entries.clear()
        self._held = None
        self._reserved = 0

    def _fill(self) -> None:
        while True:
            if self._held is None:
                self._held = self._source.take(0.0 if self._entries else POLL_SECONDS)
                if self._held is None:
                    return
            fetched = self._held
            size = self._size_of(fetched.batch)
            if self._entries and (len(self._entries) >= self._max_items or self._reserved + size > self._max_bytes):
                return
            future = self._submit(fetched.batch)
            self._held = None
            self._entries.append(_Entry(fetched.batch, fetched.seconds, size, future))
            self._reserved += size

    def _rerun_failed(self) -> None:
        for entry in self._entries:
            if not entry.future.done() or (failure := entry.future.exception()) is None:
                continue
            if not isinstance(failure, WorkerFailure):
                raise failure
            entry.failures.append(failure)
            if len(entry.failures) > self._retries:
                raise _gave_up(entry) from failure.__cause__
            if self._on_retry is not None:
                self._on_retry(entry.batch, failure, len(entry.failures) + 1)
            entry.future = self._submit(entry.batch, frozenset(failed.worker for failed in entry.failures))

    def _submit(self, batch: Any, avoid: frozenset[str] = frozenset()) -> Future:
        if not self._pool.workers:
            raise WorkerError(f"no target worker is left for {_named(batch)}; read the retry events for what ended them", _ids(batch))
        return self._pool.submit(batch, avoid)


def _succeeded(future: Future) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None


def _ids(batch: Any) -> tuple[int, ...]:
    return tuple(int(sample_id) for sample_id in batch.sample_ids_B)


def _named(batch: Any) -> str:
    ids = _ids(batch)
    shown = ", ".join(map(str, ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
    return f"batch {batch.index} of epoch {batch.epoch} ({len(ids)} x {batch.padded_length} tokens, sample ids {shown})"


def _gave_up(entry: _Entry) -> WorkerError:
    tries = "; ".join(str(failure) for failure in entry.failures)
    sentence = f"{_named(entry.batch)} failed {len(entry.failures)} times and is not tried again; look at these samples. {tries}"
    return WorkerError(sentence, _ids(entry.batch))
