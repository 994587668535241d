"""Stops a run between steps, never inside one.

Ctrl-C and a notebook's interrupt (SIGINT), and a scheduler's or papermill's end (SIGTERM), both become KeyboardInterrupt, so one path
writes the last checkpoint and ends the workers. Inside ``with hold:`` the signal waits: an interrupt in the middle of an optimiser
step would leave half of the weights updated.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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

    A signal that the process was told to ignore (``nohup``, a background job) stays ignored.
    """
    hold = Hold()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                previous[number] = signal.signal(number, hold.receive)
    try:
        yield hold
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
