"""What an error shows in a notebook: its sentence, which says what to do, and no traceback of ours above it.

IPython calls ``_render_traceback_`` of an exception that has it, so this holds in JupyterLab and in what papermill writes. A traceback is
still there for a program that catches the exception.
"""


class PlainError(Exception):
    """Base of the errors that a user can mend; a second base says which builtin error each is."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class NotFoundError(PlainError, FileNotFoundError):
    """Nothing is there under the name that a user gave."""
