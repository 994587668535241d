"""Writing a run folder: the only thing that outlives a run, and all that diagnosis needs.

A line a step, one ``write`` a line, so a killed process leaves whole lines (at worst one half at the end, which readers skip and
a resume removes). Numbers carry nine significant digits (times and other large ones three decimals), enough to tell two float32
losses apart; one that is not finite becomes null with ``"finite": false`` beside it, since JSON has no NaN. A step with one batch of
20 samples costs 90 µs.
"""

import json
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from dflash_nb import home
from dflash_nb.pipeline import lock
from dflash_nb.pipeline.environment import describe_environment
from dflash_nb.pipeline.run import BATCH_FIELDS, OPTIONAL_BATCH_FIELDS, OPTIONAL_STEP_FIELDS, STAGES, STEP_FIELDS, WHOLE, RunError, damage
from dflash_nb.pipeline.run import Run as Run
from dflash_nb.pipeline.run import read_run as read_run
from dflash_nb.stored import PERHAPS, fault, parsed

FILLED_IN = frozenset({"time", "elapsed", "finite"})
EVENT_KINDS = frozenset({"start", "checkpoint", "resume", "dropped", "eval", "retry", "warning", "interrupt", "finish", "epoch", "worker"})
WRITTEN = ("config", "environment", "buckets", "plan", "summary")
STATUSES = frozenset({"finished", "interrupted", "failed"})


def new_run_folder(runs: Path, name: str = "", dataset: str = "", strategy: str = "") -> Path:
    """Make ``runs/name`` for this process alone; without a name, date, dataset and strategy, with -2, -3 where that is taken.

    A named folder may be there already as long as no run is in it (papermill puts its output notebook there first); what a run left that
    was killed before its first step is cleared away.
    Raises RunError for a folder that holds a run.
    """
    if name:
        folder = runs / name
        if _never_began(folder):
            _clear(folder)
        _made(folder, exist_ok=True)
        if (folder / "config.json").exists() or (folder / "steps.jsonl").exists():
            raise RunError(f"run_name: {folder} already holds a run; continue it with -p resume {folder}, or choose another name")
        return folder
    stem = re.sub(r"[^\w.-]+", "-", f"{time.strftime('%Y-%m-%d-%H%M%S')}-{Path(dataset).stem}-{strategy}").strip("-")
    for count in range(1, 1000):
        folder = runs / (stem if count == 1 else f"{stem}-{count}")
        try:
            _made(folder)
            return folder
        except FileExistsError:
            continue
    raise RunError(f"{runs / stem} and 998 numbered ones exist; name this run with run_name")


def _made(folder: Path, exist_ok: bool = False) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=exist_ok)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it cannot be written to")
    except OSError as error:
        if isinstance(error, FileExistsError) and folder.is_dir():
            raise
        raise RunError(
            f"the run folder {folder} cannot be made: {error.strerror or error}; set runs_dir to a folder where you may write"
        ) from None


def readable(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path`` of a run folder; None where there is none, only a half of it, or one that nobody could have written."""
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) and not damage(path.stem, content) else None


class RunLog:
    """The open log of one run. Made by ``create`` or ``open_for_resume``, which take the folder's lock; ``close`` gives it back."""

    def __init__(self, folder: Path, descriptor: int, elapsed: float = 0.0, step: int = 0, new: bool = False) -> None:
        self.folder = folder
        self._new = new
        self._lock = descriptor
        self._steps = _append(folder / "steps.jsonl")
        self._events = _append(folder / "events.jsonl")
        self._started = time.perf_counter() - elapsed
        self._step = step

    @classmethod
    def create(cls, folder: Path, config: Any, environment: Mapping[str, Any] | None = None) -> Self:
        """Start the log of a new run in an existing folder and write ``config.json`` and ``environment.json``.

        ``environment`` is added to what is read here (devices and the data's fingerprint are the caller's). Raises RunError when
        the folder holds a run.
        """
        descriptor = _locked(folder)
        with ExitStack() as on_error:
            on_error.callback(os.close, descriptor)
            if (folder / "config.json").exists():
                raise RunError(f"{folder} already holds a run; continue it with -p resume {folder}, or choose another folder")
            on_error.callback(_clear, folder)
            content = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config)
            with home.write_aside(folder / "config.json", "run it again") as aside:
                aside.write_text(json.dumps(content, indent=2), encoding="utf-8")
            log = cls(folder, descriptor, new=True)
            on_error.pop_all()
            on_error.push(log)
            log.write("environment", {**describe_environment(), **(environment or {})})
            log.event("start")
            on_error.pop_all()
        return log

    @classmethod
    def open_for_resume(cls, folder: Path, step: int, settings: dict[str, Any] | None = None) -> Self:
        """Continue a run's log after ``step``, the step of the checkpoint that is loaded (0: from the beginning), with the ``settings``
        that are others than in its ``config.json``.

        Later lines are cut off and kept as a ``dropped`` event, a half-written line goes, the old summary goes, and ``resume`` is
        noted with what changed in the environment. Raises RunError when another process holds the run.
        """
        descriptor = _locked(folder)
        with ExitStack() as on_error:
            on_error.callback(os.close, descriptor)
            _cut_half_line(folder / "events.jsonl")
            _cut_half_line(folder / "steps.jsonl")
            offset, dropped, last = _find_step(folder / "steps.jsonl", step)
            log = cls(folder, descriptor, elapsed=last.get("elapsed") or 0.0, step=step)
            on_error.pop_all()
            on_error.push(log)
            if dropped:
                steps, losses = [line["step"] for line in dropped], [line.get("loss") for line in dropped]
                log.event("dropped", first=steps[0], last=steps[-1], losses=losses)
                os.fsync(log._events)
                os.ftruncate(log._steps, offset)
            if last.get("step", 0) < step:
                log.event("warning", text=f"the log ends at step {last.get('step', 0)}, before the checkpoint at step {step}")
            status = (readable(folder / "summary.json") or {}).get("status") or "unfinished"
            before, now = (readable(folder / "environment.json") or {}).get("versions") or {}, describe_environment()["versions"]
            changed = {name: [before.get(name), now.get(name)] for name in sorted({*before, *now}) if before.get(name) != now.get(name)}
            log.event("resume", after=status, dropped=len(dropped), versions_changed=changed, settings=settings or {})
            (folder / "summary.json").unlink(missing_ok=True)  # last, so that it outlives a resume for which there is no room
            on_error.pop_all()
        return log

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``<name>.json`` (environment, plan, buckets) whole or not at all."""
        with home.write_aside(self.folder / f"{name}.json", self._then) as aside:
            aside.write_text(json.dumps(_plain(content), indent=2) + "\n", encoding="utf-8")

    def step(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append one step with the keys of ``STEP_FIELDS``; ``finite`` is found here, ``time`` and ``elapsed`` stamped unless given.

        Returns the line.

        Raises ValueError for missing or unknown keys and TypeError for a value that is no plain number (a tensor would keep its graph).
        """
        _check_keys(record, STEP_FIELDS, OPTIONAL_STEP_FIELDS | FILLED_IN, "step")
        for batch in record["batches"]:
            _check_keys(batch, BATCH_FIELDS, OPTIONAL_BATCH_FIELDS, "batch")
        watched = [record["loss"], record["grad_norm"], *(batch["loss"] for batch in record["batches"])]
        finite = all(value is None or math.isfinite(value) for value in watched)
        full = {"time": time.time(), "elapsed": time.perf_counter() - self._started, **record, "finite": finite}
        line = _typed(full, STEP_FIELDS)
        line["batches"] = [_typed(batch, BATCH_FIELDS) for batch in record["batches"]]
        with home.room_for(self.folder / "steps.jsonl", self._then):
            _write_line(self._steps, line)
        self._step = line["step"]
        return line

    def event(self, kind: str, step: int | None = None, **details: Any) -> None:
        """Append one event; ``step`` is the last written step unless given."""
        if kind not in EVENT_KINDS:
            raise ValueError(f"unknown kind of event {kind!r}; known: {', '.join(sorted(EVENT_KINDS))}")
        line = _plain({"time": time.time(), "step": self._step if step is None else step, "kind": kind, **details})
        with home.room_for(self.folder / "events.jsonl", self._then):
            _write_line(self._events, line)
        if kind == "checkpoint":
            os.fsync(self._steps)
            os.fsync(self._events)

    def finish(self, status: str, **summary: Any) -> None:
        """Say how the run ended: ``summary.json`` with ``status`` finished, interrupted or failed, and the event."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is none of {', '.join(sorted(STATUSES))}")
        self.event("interrupt" if status == "interrupted" else "finish", status=status)
        self.write("summary", {"status": status, "step": self._step, **summary})

    @property
    def _began(self) -> bool:
        return not self._new or self._step > 0

    @property
    def _then(self) -> str:
        """What to do once a full disk has room."""
        return f"continue with -p resume {self.folder}" if self._began else "run it again"

    def discard(self) -> None:
        """Remove what was written of a run that never began, so that its name is free; other files in the folder stay."""
        self.close()
        _clear(self.folder)

    def close(self) -> None:
        """Give the folder back. Can be called twice."""
        if self._lock >= 0:
            for descriptor in (self._steps, self._events, self._lock):
                os.close(descriptor)
            self._lock = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """An error or an interrupt before the first step of a new run leaves nothing: there is nothing to continue."""
        if kind is not None and not self._began and self._lock >= 0:
            self.discard()
            print(f"no step was made, so nothing is left in {self.folder}", flush=True)
        self.close()


def _never_began(folder: Path) -> bool:
    """Whether the run in ``folder`` was killed before its first step: no process holds it, and there is no step and no checkpoint."""
    steps = folder / "steps.jsonl"
    if not home.exists(folder / "config.json") or (folder / "checkpoints").exists():
        return False
    return (not steps.exists() or steps.stat().st_size == 0) and not lock.is_locked(folder)


def _clear(folder: Path) -> None:
    for name in (*(f"{name}.json" for name in WRITTEN), "steps.jsonl", "events.jsonl", lock.NAME):
        (folder / name).unlink(missing_ok=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _locked(folder: Path) -> int:
    try:
        return lock.lock(folder)
    except BlockingIOError:
        raise RunError(f"{folder} is being written by another process; wait for it or stop it first") from None


def _append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def _write_line(descriptor: int, content: Mapping[str, Any]) -> None:
    """One line in one write. On a full disk the file is cut back to whole lines before the error goes up."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    before = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, data[written:])
    except OSError:
        os.ftruncate(descriptor, before)
        raise


def _check_keys(record: Mapping[str, Any], known: Mapping[str, Any], optional: frozenset[str], what: str) -> None:
    missing = [name for name in known if name not in record and name not in optional]
    unknown = [name for name in record if name not in known]
    if missing or unknown:
        raise ValueError(
            f"a {what} record lacks {', '.join(missing) or 'nothing'} and must not hold {', '.join(unknown) or 'anything else'}"
        )
    if set(record.get("seconds", ())) - set(STAGES):
        raise ValueError(f"seconds holds {', '.join(record['seconds'])}; known: {', '.join(STAGES)}")


def _typed(record: Mapping[str, Any], fields: Mapping[str, pa.DataType]) -> dict[str, Any]:
    """The record in the order and kinds of ``fields``: a count stays a whole number, whatever number type it comes in."""
    line = {}
    for name, kind in fields.items():
        if name in record and name != "batches":
            value = record[name]
            line[name] = int(value) if kind == WHOLE and value is not None else _plain(value)
    return line


def _plain(value: Any) -> Any:
    """``value`` as JSON can hold it: numpy scalars and arrays unpacked, floats rounded, what is not finite as None."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return float(f"{value:.9g}") if abs(value) < 1e6 else round(value, 3)
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a log takes plain numbers and text, not {type(value).__name__}")


def _cut_half_line(path: Path) -> None:
    if path.is_file() and (size := path.stat().st_size):
        with path.open("r+b") as file:
            back = 0
            while back < size:
                back = min(size, back + 65536)
                file.seek(size - back)
                if (end := file.read(back).rfind(b"\n")) >= 0:
                    file.truncate(size - back + end + 1)
                    return
            file.truncate(0)


def _find_step(path: Path, step: int) -> tuple[int, list[dict[str, Any]], dict[str, Any]]:
    """Where the lines after ``step`` begin, those lines, and the last line that stays."""
    offset = 0
    dropped: list[dict[str, Any]] = []
    last: dict[str, Any] = {}
    if path.is_file():
        with path.open("rb") as file:
            for raw in file:
                number = re.match(rb'\{"step":(\d+)', raw)
                if number is None:
                    raise RunError(f"{path}: the line at byte {offset} is no step; repair or remove it before the run is continued")
                if dropped or int(number[1]) > step:
                    dropped.append(_step_line(path, raw))
                else:
                    offset, final = offset + len(raw), raw
            if offset:
                last = _step_line(path, final)
    return offset, dropped, last


def _step_line(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        line = parsed(raw)
    except ValueError as error:
        problem = f"is no JSON ({error})"
    else:
        problem = fault(line, {"step": int, "loss": PERHAPS, "elapsed": PERHAPS})
    if problem:
        raise RunError(f"{path}: the line {raw[:40]!r}... {problem}; repair or remove it before the run is continued")
    return line
