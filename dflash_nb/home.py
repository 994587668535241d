"""Where things live: the project root, its cache and runs, the files shipped in the package, and a user's own paths.

Built-in defaults are taken from the project root and a user's paths from the folder the user stands in, so that a notebook
gives the same result from the repository root, from ``notebooks/`` and from anywhere else.
"""

import difflib
import errno
import itertools
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_nb.errors import DiskError, NotFoundError, full_disk

PACKAGE = Path(__file__).resolve().parent
MOST_ENTRIES = 10_000  # of a folder that are compared with a missing name: 0.15 s


def project_root() -> Path:
    """``DFLASH_HOME`` if set, else the checkout that holds this package, else ``~/.local/share/dflash_nb``."""
    if home := os.environ.get("DFLASH_HOME"):
        return user_path(home).resolve()
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return checkout
    return Path.home() / ".local" / "share" / "dflash_nb"


def cache_dir() -> Path:
    """``DFLASH_CACHE`` if set, else ``.cache`` in the project root. Everything in it can be made again."""
    if cache := os.environ.get("DFLASH_CACHE"):
        return user_path(cache).resolve()
    return project_root() / ".cache"


def runs_dir() -> Path:
    """Where a run folder goes when the user names no other place."""
    return project_root() / "runs"


def asset(name: str) -> Path:
    """A file or folder shipped inside the package."""
    return PACKAGE / "assets" / name


def user_path(text: str | os.PathLike[str]) -> Path:
    """A path that a user typed: ``~`` is expanded, a relative path counts from the current folder.

    Raises NotFoundError for a ``~name`` of which no home folder is known.
    """
    path = Path(text)
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise NotFoundError(f"{path}: no home folder is known for {path.parts[0]}. Write the path out") from None


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether something lies at ``path``. Nothing lies where a name is longer than the file system takes (255 bytes as a rule)."""
    try:
        return Path(path).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False


def did_you_mean(missing: str | os.PathLike[str], names: Iterable[str] = (), beside: Path | None = None) -> str:
    """The question, with a space before it, whether what has nearly the name of a ``missing`` path was meant; empty where nothing has.

    Compared are ``names`` (such as ``sample``), then what lies where the path stops to exist, part by part, so that ``dta/chat`` finds
    ``data/chats``; then what lies in the folder ``beside``. Suffixes count only between names that are alike without them.
    """
    try:
        path = user_path(missing)
    except NotFoundError:
        return ""
    known = _nearest(str(missing), names) if Path(missing).name == str(missing) else None
    found = known or _nearest_path(path) or (_nearest_path(beside / path.name) if beside is not None else None)
    return f" Did you mean {found}?" if found and found != path else ""


def _nearest_path(path: Path) -> Path | None:
    """``path`` itself if it is there, else with each part that is not replaced by the nearest that is."""
    place = Path(path.anchor)
    try:
        for part in path.parts[1:]:
            if not exists(place / part):
                hidden = part.startswith(".")
                entries = (entry.name for entry in place.iterdir() if hidden or not entry.name.startswith("."))
                near = _nearest(part, itertools.islice(entries, MOST_ENTRIES))
                if near is None:
                    return None
                part = near
            place /= part
    except OSError:  # a folder that may not be looked into, or a file in the middle of the path: there is nothing to suggest
        return None
    return place


def _nearest(name: str, entries: Iterable[str]) -> str | None:
    by_stem: dict[str, list[str]] = {}
    for entry in entries:
        by_stem.setdefault(Path(entry).stem.lower(), []).append(entry)
    stems = difflib.get_close_matches(Path(name).stem.lower(), by_stem, n=1)
    return max(by_stem[stems[0]], key=lambda entry: difflib.SequenceMatcher(None, name, entry).ratio()) if stems else None


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
