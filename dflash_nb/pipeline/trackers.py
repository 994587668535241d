"""Reporting a run to wandb, trackio or tensorboard as well; a tracker may fail in any way and the run goes on.

The run folder holds everything, so a tracker is a copy for convenience. It lives in a thread of its own behind a bounded queue:
importing it (2 s for wandb), logging in and its network cost the run nothing, and the first thing that goes wrong becomes one warning
and ends the reporting. wandb goes offline where no credentials are found; it would ask for them and wait.
"""

import importlib
import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROJECT = "dflash"
WANDB_SETTINGS = {"console": "off", "silent": True, "init_timeout": 30}
QUEUE_LENGTH = 10_000
CLOSE_SECONDS = 30.0

Log = Callable[[dict[str, float], int], Any]
Finish = Callable[[], Any]


class Tracker:
    """One run's copy to one tracker. ``warn`` gets a sentence, at most once, on the thread that calls the methods."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self._name, self._warn = name, warn
        self._problem: str | None = None
        self._warned = False
        self._queue: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(QUEUE_LENGTH)
        self._thread = None
        if name != "none":
            self._thread = threading.Thread(target=self._report, args=(folder, dict(config)), name=f"tracker-{name}", daemon=True)
            self._thread.start()

    def step(self, record: Mapping[str, Any]) -> None:
        """Report a line of ``steps.jsonl``."""
        seconds = record["seconds"]
        values = {name: record[name] for name in ("loss", "lr", "grad_norm", "acceptance", "epoch", "q_prefetch", "q_hs", "q_hs_bytes")}
        values["tokens_per_second"] = record["tokens"] / seconds["step"] if seconds.get("step") else None
        values["padding_efficiency"] = record["tokens"] / record["padded_tokens"] if record["padded_tokens"] else None
        values |= {f"seconds/{stage}": value for stage, value in seconds.items()}
        values |= {f"slot_accuracy/{slot}": value for slot, value in enumerate(record["slot_accuracy"], 1)}
        self._put(values, record["step"])

    def evaluation(self, step: int, result: Mapping[str, Any]) -> None:
        """Report an ``eval`` event."""
        self._put({f"heldout/{name}": result.get(name) for name in ("loss", "acceptance", "tau")}, step)

    def close(self) -> None:
        """Let it finish what it has, for at most half a minute."""
        if self._thread is None:
            return
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self._problem = self._problem or "could not keep up"
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._problem = self._problem or f"did not finish within {CLOSE_SECONDS:.0f} s and was left behind"
        self._thread = None
        self._say()

    def _put(self, values: dict[str, Any], step: int) -> None:
        if self._thread is not None and self._problem is None:
            try:
                self._queue.put_nowait(({name: float(value) for name, value in values.items() if value is not None}, step))
            except queue.Full:
                self._problem = "could not keep up"
        self._say()

    def _say(self) -> None:
        if self._problem and not self._warned:
            self._warned = True
            self._warn(f"tracker {self._name}: {self._problem}. The run goes on without it; its own log in the run folder is complete")

    def _report(self, folder: Path, config: dict[str, Any]) -> None:
        finish = None
        try:
            log, finish = BACKENDS[self._name](folder, config)
            while self._problem is None and (item := self._queue.get()) is not None:
                log(*item)
        except ModuleNotFoundError as error:
            self._problem = f"{error.name} is not installed (pip install 'dflash-nb[trackers]')"
        except BaseException as error:
            self._problem = _in_a_line(error)
        try:
            if finish is not None:
                finish()
        except BaseException as error:
            self._problem = self._problem or _in_a_line(error)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"


def _wandb(folder: Path, config: dict[str, Any]) -> tuple[Log, Finish]:
    wandb = importlib.import_module("wandb")
    alone = getattr(wandb, "run", None) is None
    netrc = Path.home() / ".netrc"
    known = "WANDB_API_KEY" in os.environ or (netrc.is_file() and "wandb" in netrc.read_text(errors="replace"))
    options = {
        "project": os.environ.get("WANDB_PROJECT", PROJECT),
        "name": folder.name,
        "dir": str(folder),
        "config": config,
        "mode": os.environ.get("WANDB_MODE") or ("online" if known else "offline"),
    }
    try:
        run = wandb.init(**options, settings=dict(WANDB_SETTINGS))
    except (TypeError, ValueError):
        run = wandb.init(**options)  # a version that no longer knows one of the settings

    def finish() -> None:
        run.finish()
        if alone:
            wandb.teardown()

    return lambda values, step: run.log(values, step=step), finish


def _trackio(folder: Path, config: dict[str, Any]) -> tuple[Log, Finish]:
    trackio = importlib.import_module("trackio")
    trackio.init(project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=folder.name, config=config)
    return lambda values, step: trackio.log(values, step=step), trackio.finish


def _tensorboard(folder: Path, config: dict[str, Any]) -> tuple[Log, Finish]:
    writer = importlib.import_module("tensorboard.summary").Writer(str(folder / "tensorboard"))

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


BACKENDS: dict[str, Callable[[Path, dict[str, Any]], tuple[Log, Finish]]] = {
    "wandb": _wandb,
    "trackio": _trackio,
    "tensorboard": _tensorboard,
}
