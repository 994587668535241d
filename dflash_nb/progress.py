"""A plain line every few seconds while something long goes on: what, how much of it, and the time left.

Decided: no bar, which becomes hundreds of lines in a saved notebook, and nothing at all for what is done within the first seconds. The
same text in a terminal, in JupyterLab, under papermill and in CI; 0.2 microseconds an item.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

SECONDS_BETWEEN_LINES = 5.0

T = TypeVar("T")

# When the last line was printed, or the work began; shared by the parts of one work.
_silent_since: ContextVar[list[float] | None] = ContextVar("silent_since", default=None)


@contextmanager
def one_work() -> Iterator[None]:
    """Loops inside count their silence together: many parts of three seconds each do not stay without a line."""
    token = _silent_since.set([time.monotonic()])
    try:
        yield
    finally:
        _silent_since.reset(token)


def announced(items: Collection[T], what: str, every: float = SECONDS_BETWEEN_LINES) -> Iterator[T]:
    """``items`` one by one. When one is done and ``every`` seconds have passed since the last line, a line such as
    ``planning epochs: 3 of 6, ETA 0:42``; the time left is that of the items left at the pace so far.
    """

    def line(done: int, seconds: float) -> str:
        return f"{what}: {done:,} of {len(items):,}, ETA {clock(seconds * (len(items) / done - 1))}"

    return ticking(items, line, every)


def ticking(items: Iterable[T], line: Callable[[int, float], str], every: float = SECONDS_BETWEEN_LINES) -> Iterator[T]:
    """``items`` one by one; now and then what ``line`` says of the number of items done and the seconds since the start."""
    started = time.monotonic()
    since = _silent_since.get() or [started]
    for done, item in enumerate(items):
        if done and (now := time.monotonic()) - since[0] >= every:
            since[0] = now
            print(line(done, now - started), flush=True)
        yield item


def clock(seconds: float) -> str:
    """Seconds as ``1:05`` or ``27:02:11``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
