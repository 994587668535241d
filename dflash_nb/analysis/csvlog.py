"""Logs of other programs: a tracker's CSV export becomes a :class:`~dflash_nb.pipeline.run.Run` with the columns that it has.

Columns are guessed by name, run names and separators left out (``run-1 - train/loss``, ``trainer/global_step``), or mapped with
``columns`` as ``ours:theirs`` pairs. What is not there stays NaN, and the checks that need it say so. A loss that two columns could be
is never guessed. 500,000 rows of six columns take 0.13 s of one core.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv

from dflash_nb.pipeline.run import BATCH_FIELDS, STAGES, STEP_FIELDS, Run, RunError, read_run

NAMES = {
    "step": ("step", "global_step", "trainer_global_step", "train_global_step", "iteration", "iter", "update", "updates", "num_updates"),
    "loss": ("loss", "train_loss", "training_loss", "loss_train", "train_loss_step", "loss_step", "nll", "value"),
    "eval_loss": ("eval_loss", "val_loss", "valid_loss", "validation_loss", "heldout_loss", "test_loss", "loss_val", "loss_eval"),
    "lr": ("lr", "learning_rate", "train_lr", "train_learning_rate", "lr_adamw", "lr_adam"),
    "grad_norm": ("grad_norm", "gradient_norm", "train_grad_norm", "gnorm", "total_norm", "grad_norm_total"),
    "epoch": ("epoch", "train_epoch", "trainer_epoch", "current_epoch"),
    "bucket": ("bucket", "bucket_id", "train_bucket"),
    "length": ("padded_length", "length", "seq_len", "seq_length", "sequence_length", "max_len", "max_length", "train_padded_length"),
    "tokens": ("tokens", "num_tokens", "n_tokens", "train_tokens", "num_input_tokens_seen", "tokens_seen", "total_tokens"),
    "padded_tokens": ("padded_tokens", "train_padded_tokens"),
    "acceptance": ("acceptance", "train_acceptance", "accept_length", "acceptance_length", "tau"),
    "seconds": ("seconds_step", "step_seconds", "step_time", "seconds", "time_per_step", "iteration_time", "train_seconds"),
    "time": ("time", "timestamp", "wall_time", "created_at"),
}
LARGEST_STEP = 2**53  # float64 counts so far
BLANK = ["", "None", "none", "null", "NA", "N/A"]


def read_log(source: str | Path, columns: str = "") -> Run:
    """Read a run folder, or a CSV file with ``columns`` as ``ours:theirs`` pairs. Raises RunError saying what is wrong."""
    source = Path(source)
    return read_csv(source, columns) if source.is_file() else read_run(source)


def read_csv(path: Path, columns: str = "") -> Run:
    """The run that a CSV export describes: a row a step, or rows of a training and an evaluation loss by turns."""
    table, bad = _table(path)
    chosen = choose_columns(list(dict.fromkeys(table.column_names)), columns)
    if "loss" not in chosen:
        raise RunError(
            f"{path} has no column that looks like a loss; it has {', '.join(table.column_names)}. Name it: -p columns loss:NAME"
        )
    if twice := [name for name in chosen.values() if table.column_names.count(name) > 1]:
        raise RunError(f"{path} has {', '.join(map(repr, twice))} as the name of several columns. Rename or remove all but one of each")
    known = {ours: _numbers(path, table, theirs) for ours, theirs in chosen.items()}
    valid = known["loss"][0]
    rows = np.flatnonzero(valid)
    step = known["step"][1] if "step" in known else np.cumsum(valid).astype(np.float64)
    off = np.isfinite(step) & ((step < 0) | (step > LARGEST_STEP))
    if off.any():
        row = int(off.argmax())
        raise RunError(
            f"{path}: column {chosen['step']!r} holds {step[row]:g} in row {row + 1}, which is no step. "
            "Name another column with -p columns step:NAME, or correct the row"
        )
    rows = rows[np.isfinite(step[rows])]
    rows = rows[np.argsort(step[rows], kind="stable")]
    rows = rows[np.append(np.diff(step[rows]) > 0, True)] if len(rows) else rows
    columns_of = {name: values[rows] for name, (_, values) in known.items()}
    run = Run(path, config={}, summary={"status": "exported"}, bad_lines=bad)
    run.steps = _steps(columns_of, step[rows].astype(np.int64))
    run.batches = _batches(columns_of, run.steps)
    if "eval_loss" in known:
        there, held = known["eval_loss"]
        run.events = [{"kind": "eval", "step": int(step[i]), "loss": float(held[i])} for i in np.flatnonzero(there & np.isfinite(step))]
    return run


def choose_columns(names: list[str], mapping: str = "") -> dict[str, str]:
    """Which column of a CSV is what, by ``mapping`` first and then by name. Raises RunError for what cannot be, or is not clear."""
    chosen = {}
    for pair in filter(None, (part.strip() for part in mapping.split(","))):
        ours, colon, theirs = (part.strip() for part in pair.partition(":"))
        if not colon or ours not in NAMES:
            raise RunError(f"columns: {pair!r} was given, needed: NAME:COLUMN with NAME one of {', '.join(NAMES)}")
        if theirs not in names:
            raise RunError(f"columns: there is no column {theirs!r}; the file has {', '.join(names)}: name one of these")
        chosen[ours] = theirs
    plain = {name: _plain(name) for name in names if not name.endswith(("__MIN", "__MAX")) and name not in chosen.values()}
    for ours, words in NAMES.items():
        if ours in chosen:
            continue
        for word in words:
            fits = [name for name, text in plain.items() if text == word]
            if len(fits) > 1 and ours == "loss":
                raise RunError(f"{len(fits)} columns could be the loss: {', '.join(fits)}. Name one: -p columns 'loss:{fits[0]}'")
            if fits:
                chosen[ours] = fits[0]
                break
    return chosen


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.rsplit(" - ", 1)[-1].lower()).strip("_")


def _table(path: Path) -> tuple[pa.Table, int]:
    with path.open("rb") as file:
        start = file.readline(1 << 20)
    try:
        header = start.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RunError(f"{path} is no text in UTF-8 (it begins with {start[:8]!r}). Save it as CSV in UTF-8") from None
    if not header.strip():
        raise RunError(f"{path} is empty; export the run again")
    bad = []
    try:
        table = pyarrow.csv.read_csv(
            path,
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=max(",;\t", key=header.count), invalid_row_handler=lambda row: bad.append(row.number) or "skip"
            ),
            convert_options=pyarrow.csv.ConvertOptions(null_values=BLANK, strings_can_be_null=True),
        )
    except pa.ArrowInvalid as problem:
        raise RunError(f"{path} cannot be read as CSV: {problem}. Export the run again") from None
    return table, len(bad)


def _numbers(path: Path, table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the column holds something, and its values as float64 (NaN where it holds nothing)."""
    column = table[name].combine_chunks()
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_temporal(column.type):
        column = column.cast(pa.timestamp("us")).cast(pa.int64())
    if pa.types.is_binary(column.type):
        raise RunError(
            f"{path}: column {name!r} holds text that is not UTF-8. Save the file in UTF-8, or name another column with -p columns"
        )
    if pa.types.is_string(column.type):
        values = np.full(len(column), np.nan)
        for i in np.flatnonzero(valid):
            try:
                values[i] = float(column[i].as_py())
            except ValueError:
                raise RunError(
                    f"{path}: column {name!r} holds {column[i].as_py()!r} in row {i + 1}, which is not a number. "
                    "Name another column with -p columns, or correct the row"
                ) from None
        return valid, values
    return valid, column.cast(pa.float64()).fill_null(np.nan).to_numpy(zero_copy_only=False).copy()


def _steps(given: Mapping[str, np.ndarray], step: np.ndarray) -> dict[str, np.ndarray]:
    count = len(step)
    nothing = np.full(count, np.nan)
    steps = {name: nothing for name in STEP_FIELDS if name not in ("batches", "seconds", "slot_accuracy")}
    steps |= {f"seconds_{stage}": nothing for stage in STAGES}
    steps |= {name: given[name] for name in ("lr", "grad_norm", "acceptance", "padded_tokens", "time") if name in given}
    if "seconds" in given:
        steps["seconds_step"] = given["seconds"]
    loss = given["loss"]
    steps |= {
        "step": step,
        "loss": np.where(np.isfinite(loss), loss, np.nan),
        "finite": np.isfinite(loss),
        "epoch": np.floor(given["epoch"]) if "epoch" in given else nothing,
        "tokens": _each(given["tokens"]) if "tokens" in given else nothing,
        "slot_accuracy": np.full((count, 0), np.nan, np.float32),
    }
    return steps


def _each(tokens: np.ndarray) -> np.ndarray:
    """Tokens of each step; a count that only ever rises is the sum so far."""
    rising = len(tokens) > 3 and bool((np.diff(tokens) > 0).all())
    return np.diff(tokens, prepend=tokens[0] - np.median(np.diff(tokens))) if rising else tokens


def _batches(given: Mapping[str, np.ndarray], steps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """One batch a step: what a CSV can say."""
    count = len(steps["step"])
    nothing, none = np.full(count, np.nan), np.zeros(count, np.int64)
    batches = {name: nothing for name in BATCH_FIELDS if name not in ("sample_ids", "seconds")}
    batches |= {f"seconds_{stage}": nothing for stage in STAGES}
    batches |= {"at": np.arange(count), "ids_from": none, "ids_to": none, "index": np.arange(count)}
    return batches | {
        "loss": steps["loss"],
        "weight": np.ones(count),
        "bucket": np.nan_to_num(given["bucket"], nan=-1).astype(np.int64) if "bucket" in given else np.full(count, -1),
        "padded_length": given.get("length", nothing),
        "tokens": steps["tokens"],
        "padded_tokens": steps["padded_tokens"],
    }
