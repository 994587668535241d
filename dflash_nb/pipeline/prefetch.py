"""Collates the planned batches ahead of the target workers, in one thread, into a bounded queue (q_prefetch).

One thread is enough: collating a batch of 25 samples of 2,000 tokens takes about 1 ms from a memory-mapped file, and a target needs
hundreds of milliseconds for it. What waits is bounded in batches and in bytes; one batch may always wait, however large it is.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fetched:
    """A collated batch and the seconds that collating it took."""

    batch: Any
    seconds: float


class Prefetcher:
    """Iterates ``planned`` in a thread of its own and keeps up to ``max_items`` results of ``collate`` ready, in order.

    An error in ``planned`` or ``collate`` is raised by ``take``, with its traceback, after everything before it was taken.
    """

    def __init__(
        self, planned: Iterator[Any], collate: Callable[[Any], Any], max_items: int = 16, max_bytes: int = 1 << 28, name: str = "prefetch"
    ):
        self._planned = planned
        self._collate = collate
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._ready: deque[Fetched] = deque()
        self._bytes = 0
        self._ended = False
        self._closed = False
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def depth(self) -> int:
        """Batches that wait."""
        return len(self._ready)

    @property
    def nbytes(self) -> int:
        """Bytes of the batches that wait."""
        return self._bytes

    @property
    def exhausted(self) -> bool:
        """True when nothing waits and nothing will come; an error that ended the plan must still be taken."""
        with self._changed:
            return not self._ready and self._ended and self._error is None

    def take(self, timeout: float = 0.0) -> Fetched | None:
        """The next batch in order, or None if there is none within ``timeout`` seconds or at all."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended, timeout)
            if self._ready:
                fetched = self._ready.popleft()
                self._bytes -= fetched.batch.nbytes
                self._changed.notify_all()
                return fetched
            if self._error is not None:
                error, self._error = self._error, None
                raise error
            return None

    def close(self) -> None:
        """End the thread and drop what waits."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._bytes = 0
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            started = time.perf_counter()
            for planned in self._planned:
                batch = self._collate(planned)
                if not self._put(Fetched(batch, time.perf_counter() - started)):
                    return
                started = time.perf_counter()
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, fetched: Fetched) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(fetched.batch.nbytes))
            if self._closed:
                return False
            self._ready.append(fetched)
            self._bytes += fetched.batch.nbytes
            self._changed.notify_all()
            return True

    def _has_room(self, nbytes: int) -> bool:
        return not self._ready or (len(self._ready) < self._max_items and self._bytes + nbytes <= self._max_bytes)
