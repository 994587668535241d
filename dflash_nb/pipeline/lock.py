"""Who is writing a run folder: a file lock that the operating system gives back however the writer dies.

A pid or a time stamp in a file would outlive a ``kill -9``. The lock is advisory and held on ``<folder>/.lock``; where the platform
has none (Windows) nothing is locked, and a run counts as not running.
"""

import os
import time
from pathlib import Path

try:
    import fcntl
except ImportError:
    fcntl = None

NAME = ".lock"
PATIENCE_S = 2.0


def lock(folder: Path) -> int:
    """Take the folder's lock until the returned descriptor is closed or the process ends. Raises BlockingIOError when it is taken.

    A reader holds it for microseconds to look, so a taken lock is tried again for two seconds.
    """
    descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + PATIENCE_S
    while fcntl:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise
            time.sleep(0.05)
    return descriptor


def is_locked(folder: Path) -> bool:
    """Whether a living process writes to the folder."""
    if not fcntl or not (folder / NAME).is_file():
        return False
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False
