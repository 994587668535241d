"""Stops a run between steps, never inside one.

Ctrl-C and a notebook's interrupt (SIGINT), and a scheduler's or papermill's end (SIGTERM), both become KeyboardInterrupt, so one path
writes the last checkpoint and ends the workers. Inside ``with hold:`` the signal waits: an interrupt in the middle of an optimiser
step would leave half of the weights updated.

papermill dies of SIGTERM at once and its kernel follows within a second (ipykernel looks for its parent that often and then exits hard).
So the parent is looked for ten times a second here: enough time for the checkpoint of a small drafter.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PARENT_SECONDS = 0.1


class Hold:
    """Keeps interrupts back while entered; raises the one that came when left without an error."""

    def __init__(self) -> None:
        self._holding = False
        self._received: str | None = None
        self._raised = False

    def __enter__(self) -> "Hold":
        self._holding = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._holding = False
        if self._received and kind is None:
            self._raise()

    def receive(self, number: int, frame: object) -> None:
        """The signal handler. A second SIGTERM is ignored: the run is ending already. A second SIGINT is raised again."""
        if self._raised and number == signal.SIGTERM:
            return
        self._received = signal.Signals(number).name
        if not self._holding:
            self._raise()

    def _raise(self) -> None:
        self._raised = True
        received, self._received = self._received, None
        raise KeyboardInterrupt(f"stopped by {received}")


@contextmanager
def interruptible() -> Iterator[Hold]:
    """Handle SIGINT and SIGTERM while inside and put the old handlers back after. Outside the main thread nothing is installed.

    A signal that the process was told to ignore (``nohup``, a background job) stays ignored; with SIGTERM ignored, so is the parent's end.
    """
    hold = Hold()
    if threading.current_thread() is not threading.main_thread():
        yield hold
        return
    previous = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) not in (signal.SIG_IGN, None):
            previous[number] = signal.signal(number, hold.receive)
    ended = threading.Event()
    watcher = threading.Thread(target=_watch_parent, args=(os.getppid(), ended), name="parent-watch", daemon=True)
    watcher.start()
    try:
        yield hold
    finally:
        ended.set()
        watcher.join()
        for number, handler in previous.items():
            signal.signal(number, handler)


def _watch_parent(parent: int, ended: threading.Event) -> None:
    """Interrupt the main thread as SIGTERM does when the process that started this one is gone."""
    while not ended.wait(PARENT_SECONDS):
        if os.getppid() != parent:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            return
