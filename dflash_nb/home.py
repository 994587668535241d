"""Where things live: the project root, its cache and runs, the files shipped in the package, and a user's own paths.

Built-in defaults are taken from the project root and a user's paths from the folder the user stands in, so that a notebook
gives the same result from the repository root, from ``notebooks/`` and from anywhere else.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_nb.errors import DiskError, full_disk

PACKAGE = Path(__file__).resolve().parent


def project_root() -> Path:
    """``DFLASH_HOME`` if set, else the checkout that holds this package, else ``~/.local/share/dflash_nb``."""
    if home := os.environ.get("DFLASH_HOME"):
        return Path(home).expanduser().resolve()
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout
    return Path.home() / ".local" / "share" / "dflash_nb"


def cache_dir() -> Path:
    """``DFLASH_CACHE`` if set, else ``.cache`` in the project root. Everything in it can be made again."""
    if cache := os.environ.get("DFLASH_CACHE"):
        return Path(cache).expanduser().resolve()
    return project_root() / ".cache"


def runs_dir() -> Path:
    """Where a run folder goes when the user names no other place."""
    return project_root() / "runs"


def asset(name: str) -> Path:
    """A file or folder shipped inside the package."""
    return PACKAGE / "assets" / name


def user_path(text: str | os.PathLike[str]) -> Path:
    """A path that a user typed: ``~`` is expanded, a relative path counts from the current folder."""
    return Path(text).expanduser().absolute()


@contextmanager
def write_aside(path: Path, then: str = "run it again") -> Iterator[Path]:
    """Yield a sibling of ``path`` to write to (a file or a folder) and rename it over ``path`` when the block succeeds.

    A reader sees the old content or the whole new one, never a half. An existing *folder* at ``path`` is replaced. On a full disk
    DiskError is raised; ``then`` is what to do once there is room.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.aside")
    try:
        with room_for(path, then):
            yield aside
        if aside.is_dir() and path.is_dir():
            replaced = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.replaced")
            path.replace(replaced)
            aside.replace(path)
            shutil.rmtree(replaced)
        else:
            aside.replace(path)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


@contextmanager
def room_for(path: Path, then: str) -> Iterator[None]:
    """Turn whatever a full disk raises inside into DiskError, which names ``path`` and says to make room and ``then`` what."""
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        if reason := full_disk(error):
            raise DiskError(f"{path} cannot be written: {reason}. Make room there, then {then}") from error
        raise
