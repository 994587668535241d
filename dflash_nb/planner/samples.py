"""Which samples take part in a plan, how long each of them runs, and which are left out for what reason."""

from dataclasses import dataclass

import numpy as np

from dflash_nb.planner.options import PlanError, PlanOptions

SHOWN = 8


@dataclass(frozen=True)
class Samples:
    """ids int64[n] of the samples that take part (None: all of them) and their lengths int32[n] as they run; the ids left out, by
    reason; the ids that run cut to the longest allowed length."""

    ids: np.ndarray | None
    lengths: np.ndarray
    excluded: dict[str, np.ndarray]
    truncated: np.ndarray


def select_samples(lengths: np.ndarray, n_supervised: np.ndarray | None, options: PlanOptions) -> Samples:
    """Check every length, then apply ``too_long`` and leave out samples without a supervised token."""
    lengths = whole_numbers("lengths", lengths)
    bad = np.flatnonzero(lengths < 1)
    if len(bad):
        raise PlanError(f"lengths must be at least 1 token; {_rows(bad, lengths)}. Remove these samples or mend their lengths")
    longest = options.longest
    too_long = np.flatnonzero(lengths > longest)
    if len(too_long) and options.too_long == "error":
        raise PlanError(
            f"samples longer than {longest} tokens (token_budget {options.token_budget}, pad_multiple {options.pad_multiple}, "
            f"max_length {options.max_length}): {_rows(too_long, lengths)}. Raise the limit, or set too_long to drop or truncate"
        )
    keep = np.ones(len(lengths), dtype=bool)
    excluded: dict[str, np.ndarray] = {}
    if len(too_long) and options.too_long == "drop":
        excluded["too_long"] = too_long
        keep[too_long] = False
    if n_supervised is not None:
        n_supervised = whole_numbers("n_supervised", n_supervised)
        if len(n_supervised) != len(lengths):
            raise PlanError(f"n_supervised has {len(n_supervised)} entries for {len(lengths)} lengths; there must be one each")
        unsupervised = np.flatnonzero((n_supervised < 1) & keep)
        if len(unsupervised):
            excluded["unsupervised"] = unsupervised
            keep[unsupervised] = False
    ids = None if keep.all() else np.flatnonzero(keep)
    left = len(lengths) if ids is None else len(ids)
    if not left:
        reasons = ", ".join(f"{len(rows)} {reason}" for reason, rows in excluded.items()) or "there are no lengths"
        raise PlanError(f"no sample is left to plan: {reasons}. Raise the limits, or give other lengths")
    truncated = too_long[keep[too_long]]
    run = (lengths if ids is None else lengths[ids]).astype(np.int32)
    run[truncated if ids is None else np.searchsorted(ids, truncated)] = longest
    return Samples(ids, run, excluded, truncated)


def whole_numbers(name: str, values: np.ndarray) -> np.ndarray:
    """``values`` as an array of one whole number a sample, int[n]. Raises PlanError for anything else."""
    values = np.asarray(values)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        raise PlanError(f"{name} must be one whole number a sample, not an array of {values.dtype} with shape {values.shape}")
    return values


def _rows(rows: np.ndarray, lengths: np.ndarray) -> str:
    shown = ", ".join(f"row {row} has {lengths[row]}" for row in rows[:SHOWN].tolist())
    return shown if len(rows) <= SHOWN else f"{shown} and {len(rows) - SHOWN} more rows"
