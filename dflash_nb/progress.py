"""A plain line every few seconds while something long goes on: what, how much of it, and the time left.

Decided: no bar, which becomes hundreds of lines in a saved notebook, and nothing at all for what is done within the first seconds. The
same text in a terminal, in JupyterLab, under papermill and in CI; 0.2 microseconds an item.
"""

import time
from collections.abc import Collection, Iterator
from typing import TypeVar

SECONDS_BETWEEN_LINES = 5.0

T = TypeVar("T")


def announced(items: Collection[T], what: str, every: float = SECONDS_BETWEEN_LINES) -> Iterator[T]:
    """``items`` one by one. When one is done and ``every`` seconds have passed since the last line, a line such as
    ``planning epochs: 3 of 6, ETA 0:42``; the time left is that of the items left at the pace so far.
    """
    started = said = time.monotonic()
    for done, item in enumerate(items):
        if done and (now := time.monotonic()) - said >= every:
            said = now
            print(f"{what}: {done:,} of {len(items):,}, ETA {clock((now - started) * (len(items) / done - 1))}", flush=True)
        yield item


def clock(seconds: float) -> str:
    """Seconds as ``1:05`` or ``27:02:11``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
