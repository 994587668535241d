"""Reading a run folder, finished or still growing, into numpy columns.

``steps.jsonl`` is parsed in blocks by ``pyarrow.json`` against a fixed schema, and each block is turned into flat arrays at once, so the
JSON text never lies in memory as a whole: 500,000 steps with 20 sample ids each (460 MB) take 4 s of one core and 0.45 GB at the
peak, of which 0.29 GB stay. A half-written last line waits for its end; a line that is no JSON is skipped and counted. ``refresh`` reads
only what was appended.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json

from dflash_nb.errors import PlainError
from dflash_nb.home import did_you_mean, exists, runs_dir
from dflash_nb.pipeline.config import damaged_setting, read_settings
from dflash_nb.pipeline.lock import is_locked
from dflash_nb.stored import PERHAPS, fault, parsed

BLOCK_BYTES = 4 << 20
STAGES = ("fetch", "target", "transfer", "wait", "drafter", "optimizer", "step")

WHOLE, _REAL = pa.int64(), pa.float64()
_SECONDS = pa.struct([(stage, _REAL) for stage in STAGES])
BATCH_FIELDS = {
    **dict.fromkeys(("index", "bucket", "rows", "tokens", "padded_tokens", "padded_length"), WHOLE),
    **dict.fromkeys(("loss", "weight"), _REAL),
    "sample_ids": pa.list_(WHOLE),
    "supervised": WHOLE,
    "slots": WHOLE,
    "seconds": _SECONDS,
}
STEP_FIELDS = {
    "step": WHOLE,
    "epoch": WHOLE,
    **dict.fromkeys(("time", "elapsed", "loss", "weight", "lr", "grad_norm"), _REAL),
    "clipped": pa.bool_(),
    "finite": pa.bool_(),
    **dict.fromkeys(("slots", "blocks", "supervised", "tokens", "padded_tokens"), WHOLE),
    "slot_accuracy": pa.list_(_REAL),
    "acceptance": _REAL,
    "seconds": _SECONDS,
    **dict.fromkeys(("q_prefetch", "q_hs", "q_hs_bytes", "memory_bytes"), WHOLE),
    "batches": pa.list_(pa.struct(list(BATCH_FIELDS.items()))),
}
OPTIONAL_STEP_FIELDS = frozenset({"memory_bytes"})
OPTIONAL_BATCH_FIELDS = frozenset({"supervised", "slots", "seconds"})
_MISSING = {"finite": True, "bucket": -1}  # what stands for a value that is not there; NaN for all others
_SCHEMA = pa.schema(list(STEP_FIELDS.items()))

# What the files of a run folder may hold where they are read. Any key may be missing: an older version did not write it, or nobody knew.
TEXT, COUNT, NUMBERS = str | None, int | None, ([PERHAPS], NoneType)
_EPOCH = {
    **dict.fromkeys(("batches", "steps", "tokens", "padded_tokens"), COUNT),
    "mixing": (dict.fromkeys(("lag1", "longest_run", "repeated_mates"), PERHAPS), NoneType),
}
SHAPES: dict[str, dict[str, Any]] = {
    "environment": {
        "devices": ({"targets": ([str], NoneType), "drafter": TEXT, "names": ([str], NoneType)}, list, NoneType),
        "target": ({"name": TEXT, "num_layers": COUNT, "hidden_size": COUNT}, NoneType),
        "versions": dict | None,
        "data": dict | None,
        "cpu_cores": COUNT,
    },
    "buckets": {"boundaries": NUMBERS},
    "plan": {
        "epochs": ([_EPOCH], NoneType),
        **dict.fromkeys(("total_steps", "warmup_steps", "tokens_per_second"), PERHAPS),
        "speed_source": TEXT,
    },
    "summary": {"status": TEXT, "error": TEXT},
}
_EVENT = {"kind": str, "step": int, "settings": dict | None}
_EVENTS: dict[str, dict[str, Any]] = {
    "dropped": {"first": int, "last": int, "losses": NUMBERS},
    "eval": {
        **dict.fromkeys(("loss", "acceptance", "tau", "tau_low", "tau_high", "tau_repeated", "seconds"), PERHAPS),
        **{"tau_prompts": COUNT, "slot_accuracy": NUMBERS},
    },
}


class RunError(PlainError, ValueError):
    """A run folder that cannot be read, made or continued; the text says which and what to do."""


@dataclass
class Run:
    """What a run folder holds. ``n`` steps, ``m`` batches, ``B - 1`` drafted slots.

    ``steps``: columns of n values, named as in ``steps.jsonl``; ``seconds_target`` and so on for the nested ones; ``slot_accuracy``
    is float32 ``[n, B - 1]``. ``batches``: columns of m values, ``at`` is the batch's row in ``steps``, and its sample ids are
    ``ids[ids_from:ids_to]``. A missing or null number is NaN, a missing ``bucket`` is -1 as where a batch spans several; ``clipped`` is
    float64 with NaN where a step does not say. ``events`` leaves out what a later resume undid. ``config``: as the run was started, with
    the settings that its last resume changed.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    buckets: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    steps: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    batches: dict[str, np.ndarray] = field(default_factory=dict, repr=False)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64), repr=False)
    events: list[dict[str, Any]] = field(default_factory=list, repr=False)
    bad_lines: int = 0
    live: bool = False  # a process holds the folder
    _started: dict[str, Any] = field(default_factory=dict, repr=False)
    _step_tail: "_Tail | None" = field(default=None, repr=False)
    _event_tail: "_Tail | None" = field(default=None, repr=False)
    _columns: "_Columns | None" = field(default=None, repr=False)

    def __len__(self) -> int:
        """Optimiser steps read."""
        return len(self.steps.get("step", ()))

    @property
    def status(self) -> str:
        """``finished``, ``interrupted`` or ``failed`` as its summary says; without one ``running`` or ``unfinished``."""
        if self.summary and self.summary.get("status"):
            return self.summary["status"]
        return "running" if self.live else "unfinished"

    @property
    def half_line(self) -> bool:
        """Whether the log ends within a line: the writer is in the middle of one, or was killed there."""
        return self._step_tail is not None and self._step_tail.rest > 0

    def sample_ids(self, batch: int) -> np.ndarray:
        """Dataset rows of one batch of ``batches``."""
        return self.ids[self.batches["ids_from"][batch] : self.batches["ids_to"][batch]]

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """The events of these kinds in order."""
        return [event for event in self.events if event["kind"] in kinds]

    def status_text(self) -> str:
        """The status as a sentence with the last step and its age."""
        if not len(self):
            return f"{self.folder.name}: {self.status}, no step was written yet"
        written = float(self.steps["time"][-1])
        ago = f"{_age(time.time() - written)} ago" if np.isfinite(written) else "at a time that is not in the log"
        text = f"{self.folder.name}: {self.status}, {len(self):,} steps, the last one is step {self.steps['step'][-1]:,}"
        if self.status == "running":
            return f"{text}, {ago}"
        if self.status == "unfinished":
            return f"{text}; it stopped {ago} without a summary, continue it with -p resume {self.folder}"
        return text

    def refresh(self) -> int:
        """Read what was added since. Returns the number of new steps; everything is read again after a resume cut the log back."""
        if self._step_tail is None or self._event_tail is None or self._columns is None:
            return 0
        self.live = is_locked(self.folder)
        for name in ("summary", "buckets", "plan"):
            setattr(self, name, _read_json(self.folder / f"{name}.json"))
        before = len(self)
        if self._step_tail.was_cut() or self._event_tail.was_cut():
            self._step_tail, self._event_tail, self._columns = _Tail(self._step_tail.path), _Tail(self._event_tail.path), _Columns()
            self.events, self.config, self.bad_lines, before = [], self._started, 0, 0
        for block, share in self._step_tail.blocks():
            table, bad = _parse(block)
            self.bad_lines += bad
            self._columns.extend(table, share)
        self.steps, self.batches, self.ids = self._columns.views()
        for block, _ in self._event_tail.blocks():
            self._add_events(block)
        return len(self) - before

    def _add_events(self, block: bytes) -> None:
        for line in block.splitlines():
            try:
                event = parsed(line)
            except ValueError:
                self.bad_lines += 1
                continue
            if fault(event, _EVENT) or fault(event, _EVENTS.get(event["kind"], {})) or damaged_setting(event.get("settings") or {}):
                self.bad_lines += 1
                continue
            kind, step = event["kind"], event["step"]
            if kind == "resume":
                stay = ("dropped", "warning", "retry", "worker", "interrupt")
                self.events = [e for e in self.events if e["step"] <= step or e["kind"] in stay]
                self.config = {**self._started, **read_settings(event.get("settings") or {})}
            self.events.append(event)


def read_run(folder: str | Path) -> Run:
    """Read a run folder, whatever state it is in. Raises RunError when ``folder`` is not one."""
    folder = Path(folder)
    if not exists(folder):
        raise RunError(f"{folder} does not exist; name a run folder or a CSV export.{did_you_mean(folder, beside=runs_dir())}")
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder; name a run folder, which holds config.json and steps.jsonl")
    if not (folder / "config.json").is_file() and not (folder / "steps.jsonl").is_file():
        raise RunError(f"{folder} is not a run folder: it holds neither config.json nor steps.jsonl")
    config = read_settings(_read_json(folder / "config.json") or {})
    run = Run(folder, config=config, environment=_read_json(folder / "environment.json") or {})
    run._started = run.config
    run._step_tail, run._event_tail, run._columns = _Tail(folder / "steps.jsonl"), _Tail(folder / "events.jsonl"), _Columns()
    run.refresh()
    return run


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, IsADirectoryError) as error:
        raise RunError(f"{path} is not readable as JSON: {error}. Copy the run folder again, or remove the file") from None
    if content is not None and not isinstance(content, dict):
        raise RunError(f"{path} holds a JSON {type(content).__name__}, not an object. Copy the run folder again, or remove the file")
    if content is not None and (problem := damage(path.stem, content)):
        raise RunError(f"{path} {problem}. Copy the run folder again, or remove the file")
    return content


def damage(name: str, content: dict[str, Any]) -> str:
    """What of the run folder's file ``name`` is of a kind that nobody could have written, as a predicate that names the key."""
    return damaged_setting(content) if name == "config" else fault(content, SHAPES[name])


class _Tail:
    """The whole lines of a growing file from where reading stopped. Remembers the last bytes read to notice that the file was cut."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset, self.last, self.rest = path, 0, b"", 0

    def was_cut(self) -> bool:
        if not self.offset:
            return False
        with self.path.open("rb") as file:
            file.seek(self.offset - len(self.last))
            return file.read(len(self.last)) != self.last

    def blocks(self) -> Iterator[tuple[bytes, float]]:
        """Blocks of whole lines, each with its share of the bytes that are there to read."""
        if not self.path.is_file():
            return
        there = self.path.stat().st_size - self.offset
        with self.path.open("rb") as file:
            file.seek(self.offset)
            waiting = b""
            while more := file.read(BLOCK_BYTES):
                whole, newline, half = more.rpartition(b"\n")
                if not newline:
                    waiting += half
                    continue
                block = waiting + whole + newline
                waiting = half
                self.offset += len(block)
                self.last = block[-256:]
                yield block, min(1.0, len(block) / there)
            self.rest = len(waiting)


def _parse(block: bytes) -> tuple[pa.Table, int]:
    """The block's lines as a table, and the number of lines that are no step."""
    try:
        return _parse_fast(block), 0
    except pa.ArrowInvalid:
        good, bad = [], 0
        for line in block.splitlines(keepends=True):
            try:
                good.append(_parse_fast(line))
            except pa.ArrowInvalid:
                bad += 1
        return pa.concat_tables([_SCHEMA.empty_table(), *good]), bad


def _parse_fast(block: bytes) -> pa.Table:
    table = pyarrow.json.read_json(
        pa.BufferReader(block),
        read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(block) + 1),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=_SCHEMA, unexpected_field_behavior="ignore"),
    )
    if table["step"].null_count:
        raise pa.ArrowInvalid("a line without a step")
    return table


class _Columns:
    """Flat columns that grow. The first block foretells the whole size, so that a long log is not held twice while it is read."""

    def __init__(self) -> None:
        self.steps, self.batches, self.ids = _Growing(), _Growing(), _Growing()
        self.extend(_SCHEMA.empty_table(), 1.0)

    def extend(self, table: pa.Table, share: float) -> None:
        chunk = table.combine_chunks()
        columns = {name: _one(chunk[name], STEP_FIELDS[name]) for name in STEP_FIELDS}
        batches, accuracy = columns.pop("batches"), columns.pop("slot_accuracy")
        counts, inner = _list_lengths(batches), batches.flatten()
        fields = {name: inner.field(i) for i, name in enumerate(BATCH_FIELDS)}
        sample_ids = fields.pop("sample_ids")
        sizes = _list_lengths(sample_ids)
        ends = self.ids.count + np.cumsum(sizes)
        at = self.steps.count + np.repeat(np.arange(len(counts)), counts)
        self.steps.extend({**_flat(columns), "slot_accuracy": _matrix(accuracy)}, share)
        self.batches.extend({**_flat(fields), "at": at, "ids_from": ends - sizes, "ids_to": ends}, share)
        self.ids.extend({"ids": _numbers(sample_ids.flatten())}, share)

    def views(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], np.ndarray]:
        return self.steps.views(), self.batches.views(), self.ids.views()["ids"]


class _Growing:
    """Columns of one length in arrays with room to spare."""

    def __init__(self) -> None:
        self.count = 0
        self.arrays: dict[str, np.ndarray] = {}

    def extend(self, part: Mapping[str, np.ndarray], share: float) -> None:
        added = len(next(iter(part.values())))
        room = int(1.25 * self.count + 1.02 * added / share)
        for name, values in part.items():
            self.arrays[name] = _appended(self.arrays.get(name, values[:0]), self.count, values, room)
        self.count += added

    def views(self) -> dict[str, np.ndarray]:
        return {name: array[: self.count] for name, array in self.arrays.items()}


def _appended(old: np.ndarray, count: int, values: np.ndarray, room: int) -> np.ndarray:
    """``old[:count]`` followed by ``values``: in place where there is space, else in a new array of at least ``room`` rows."""
    if old.shape[1:] != values.shape[1:]:
        width = max(old.shape[1], values.shape[1])
        old, values = (np.pad(a, ((0, 0), (0, width - a.shape[1])), constant_values=np.nan) for a in (old, values))
    kind = np.promote_types(old.dtype, values.dtype)
    if len(old) < count + len(values) or old.dtype != kind:
        new = np.empty((max(count + len(values), room), *values.shape[1:]), kind)
        new[:count] = old[:count]
        old = new
    old[count : count + len(values)] = values
    return old


def _one(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    return column.chunk(0) if column.num_chunks else pa.array([], kind)


def _flat(columns: Mapping[str, pa.Array]) -> dict[str, np.ndarray]:
    flat: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if pa.types.is_struct(column.type):
            flat |= {f"{name}_{stage}": part for stage, part in zip(STAGES, map(_numbers, column.flatten()), strict=True)}
        else:
            flat[name] = _numbers(column, _MISSING.get(name))
    return flat


def _numbers(column: pa.Array, missing: bool | int | None = None) -> np.ndarray:
    """A column as numpy with ``missing`` where a value is; without one the whole column becomes numbers with NaN there."""
    if column.null_count:
        if pa.types.is_boolean(column.type) and missing is None:
            column = column.cast(pa.int8())
        column = column.cast(_REAL).fill_null(np.nan) if missing is None else column.fill_null(missing)
    return column.to_numpy(zero_copy_only=False).copy()


def _list_lengths(column: pa.ListArray) -> np.ndarray:
    return column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)


def _matrix(column: pa.ListArray) -> np.ndarray:
    """Rows of a list column side by side; short rows and nulls are NaN."""
    counts = _list_lengths(column)
    matrix = np.full((len(counts), counts.max(initial=0)), np.nan, np.float32)
    matrix[np.arange(matrix.shape[1]) < counts[:, None]] = column.flatten().fill_null(np.nan).to_numpy(zero_copy_only=False)
    return matrix


def _age(seconds: float) -> str:
    for size, word in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {word}"
    return f"{max(0.0, seconds):.0f} s"
