"""What an error shows in a notebook: its sentence, which says what to do, and no traceback of ours above it.

IPython calls ``_render_traceback_`` of an exception that has it, so this holds in JupyterLab and in what papermill writes. A traceback is
still there for a program that catches the exception.
"""

import errno
import logging
import os

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PlainError(Exception):
    """Base of the errors that a user can mend; a second base says which builtin error each is."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class NotFoundError(PlainError, FileNotFoundError):
    """Nothing is there under the name that a user gave."""


class DiskError(PlainError, OSError):
    """A file cannot be written because the disk, or what may be used of it, is full. The text names the file and says what to do."""


def full_disk(error: Exception) -> str:
    """Why a write failed if the disk is full, empty for any other error: safetensors has no error number, only its text."""
    number = getattr(error, "errno", None)
    if number in FULL:
        return os.strerror(number)
    return next((os.strerror(number) for number in FULL if f"os error {number}" in str(error) or os.strerror(number) in str(error)), "")


def quiet_end() -> None:
    """Keep a kernel from reporting an error at the end of a good run.

    papermill and nbclient end a kernel with an interrupt, and may send it while the kernel still answers their last question. ipykernel
    then logs ``ERROR | KeyboardInterrupt caught in kernel.``, though no cell ran; an interrupted cell says so itself, in its output.
    """
    logging.getLogger("IPKernelApp").addFilter(_not_an_idle_interrupt)


def _not_an_idle_interrupt(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("KeyboardInterrupt caught in kernel")
