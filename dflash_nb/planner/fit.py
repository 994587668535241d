"""Coefficients of a cost model from measured batches: non-negative least squares of relative errors, robust against a busy machine.

What a batch took is a sum of non-negative terms (``cost.TERMS``). Errors grow with the batch, so each is weighed by the time that the
fit expects, and a batch that something else slowed down loses weight as its error passes twice the usual one (iteratively reweighted
least squares, Huber 1964). Noise only ever slows a batch, so such a fit lies below the mean; at the end it is scaled to what the batches
took in sum, the odd ones cut off (by 0.6 to 1.2 % in calibrations of the sample). Terms that the batches cannot tell apart share their
time in some way; what is predicted for such batches does not depend on how. Errors are always those of shapes that the fit has not seen.

Axes: M measured batches, P terms.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import nnls

from dflash_nb.planner.cost import TERMS, CostError, CostModel, chunks

STAGES = ("fetch", "target", "transfer", "drafter")
FEWEST_BATCHES = 20
ROUNDS = 12
USUAL = 2.0  # errors up to so many standard deviations count in full
MOST = 5.0  # and in the sum up to so many
MAD_TO_SIGMA = 1.4826
FOLDS = 5
MOST_POINTS = 150


@dataclass(frozen=True)
class Measured:
    """Batches that ran, in columns of M values: samples, real tokens, padded length, drafted slots and seconds by stage.

    pairs: the sum over slots of the tokens of their sample. step: seconds of an optimiser step beside its batches.
    shape: a number for batches that are alike, measured again and again; left out, batches of the same rows and padded length are.
    """

    rows: np.ndarray
    tokens: np.ndarray
    padded_length: np.ndarray
    padded_tokens: np.ndarray
    slots: np.ndarray
    pairs: np.ndarray
    seconds: Mapping[str, np.ndarray]
    step: float = 0.0
    shape: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def terms(self, stage: str) -> np.ndarray:
        """The terms of a stage, float64[M, P]."""
        one = np.ones(len(self))
        columns = {
            "fetch": (one, self.rows, self.tokens),
            "target": (
                one,
                self.padded_tokens,
                self.padded_tokens * self.padded_length,
                self.padded_length,
                chunks(self.rows, self.padded_length),
            ),
            "transfer": (one, self.tokens),
            "drafter": (one, self.rows, self.tokens, self.slots, self.pairs),
        }
        return np.stack(columns[stage], axis=1).astype(np.float64)

    def some(self, which: np.ndarray) -> "Measured":
        """The batches at these places."""
        columns = (self.rows, self.tokens, self.padded_length, self.padded_tokens, self.slots, self.pairs)
        seconds = {stage: values[which] for stage, values in self.seconds.items()}
        return Measured(*(column[which] for column in columns), seconds, self.step, self.shapes()[which])

    def shapes(self) -> np.ndarray:
        """Which shape each batch is of, int64[M] from 0."""
        if self.shape is not None:
            return np.unique(self.shape, return_inverse=True)[1]
        return np.unique(np.stack([self.rows, self.padded_length], axis=1), axis=0, return_inverse=True)[1].ravel()


def fit_cost(measured: Measured, **about: Any) -> CostModel:
    """A cost model of these batches. ``about``: its other fields (source, belongs_to, target_workers, slots_per_row, accumulation, ...).

    Its ``errors`` say for each stage, on shapes that were held out: ``median`` and ``p90`` over shapes of the relative error without sign,
    ``total`` (predicted over measured seconds of all, less 1) and ``share`` (of all measured seconds).
    Raises CostError for fewer than 20 batches or a stage that took no time.
    """
    if len(measured) < FEWEST_BATCHES:
        raise CostError(f"{len(measured)} measured batches are too few to fit a cost model: at least {FEWEST_BATCHES} are needed")
    found, errors, points = {}, {}, {}
    whole = sum(float(measured.seconds[stage].sum()) for stage in STAGES)
    fold_M = shape_folds(measured)
    for stage in STAGES:
        terms_MP, seconds_M = measured.terms(stage), np.asarray(measured.seconds[stage], dtype=np.float64)
        if not np.isfinite(seconds_M).all() or seconds_M.sum() <= 0:
            raise CostError(f"the measured batches hold no seconds of the {stage} stage; measure again with this version")
        found[stage] = tuple(fit_terms(terms_MP, seconds_M).tolist())
        predicted_M = held_out(terms_MP, seconds_M, fold_M)
        errors[stage] = relative_errors(predicted_M, seconds_M, measured.shapes()) | {"share": float(seconds_M.sum() / whole)}
        some = np.unique(np.linspace(0, len(measured) - 1, MOST_POINTS).astype(int))
        points[stage] = np.stack([predicted_M, seconds_M], axis=1)[some].tolist()
    return CostModel(**{"step": measured.step, "errors": errors, "points": points, **found, **about})


def fit_terms(terms_MP: np.ndarray, seconds_M: np.ndarray) -> np.ndarray:
    """Coefficients float64[P] of 0 or more that explain ``seconds_M`` by ``terms_MP`` with the least weighted relative error."""
    size_P = np.maximum(np.abs(terms_MP).max(axis=0), 1e-300)
    terms_MP, floor = terms_MP / size_P, 1e-3 * np.median(seconds_M) + 1e-12
    expected_M, weight_M = np.maximum(seconds_M, floor), np.ones(len(seconds_M))
    for _ in range(ROUNDS):
        scale_M = np.sqrt(weight_M) / expected_M
        found_P, _ = nnls(terms_MP * scale_M[:, None], seconds_M * scale_M)
        expected_M = np.maximum(terms_MP @ found_P, floor)
        error_M = seconds_M / expected_M - 1
        away_M = error_M - np.median(error_M)
        sigma = MAD_TO_SIGMA * np.median(np.abs(away_M)) + 1e-9
        weight_M = np.minimum(1.0, USUAL * sigma / np.maximum(np.abs(away_M), 1e-12))
    slower_M = np.clip(error_M, np.median(error_M) - MOST * sigma, np.median(error_M) + MOST * sigma)
    return found_P / size_P * (1 + np.average(slower_M, weights=expected_M))


def shape_folds(measured: Measured) -> np.ndarray:
    """A fold 0 .. 4 for each batch, int64[M]; all batches of one shape are in the same one."""
    shape_M = measured.shapes()
    return np.random.default_rng(0).permutation(shape_M.max() + 1)[shape_M] % FOLDS


def held_out(terms_MP: np.ndarray, seconds_M: np.ndarray, fold_M: np.ndarray) -> np.ndarray:
    """Seconds of each fold predicted from the others, float64[M]. Raises CostError if there is but one."""
    if len(np.unique(fold_M)) < 2:
        raise CostError(f"all {len(seconds_M)} measured batches have the same shape; measure other shapes as well to tell the terms apart")
    predicted_M = np.empty(len(seconds_M))
    for fold in np.unique(fold_M):
        out = fold_M == fold
        predicted_M[out] = terms_MP[out] @ fit_terms(terms_MP[~out], seconds_M[~out])
    return predicted_M


def relative_errors(predicted_M: np.ndarray, seconds_M: np.ndarray, shape_M: np.ndarray | None = None) -> dict[str, float]:
    """``median`` and ``p90`` over shapes of the relative error without sign, and ``total``, that of the sums with its sign.

    A shape's batches count once, by their median: one batch alone is off by the machine's noise too. Without ``shape_M`` all differ.
    """
    ratio_M = predicted_M / np.maximum(seconds_M, 1e-12)
    if shape_M is not None:
        ratio_M = np.array([np.median(ratio_M[shape_M == shape]) for shape in np.unique(shape_M)])
    error = np.abs(ratio_M - 1)
    return {
        "median": float(np.median(error)),
        "p90": float(np.quantile(error, 0.9)),
        "total": float(predicted_M.sum() / seconds_M.sum() - 1),
    }


def largest_terms(cost: CostModel, measured: Measured) -> list[dict[str, Any]]:
    """Which terms the time goes into: a row a stage and term with its share of the stage's predicted seconds, the largest first."""
    rows = []
    for stage in STAGES:
        parts_P = measured.terms(stage).sum(axis=0) * np.array(getattr(cost, stage))
        rows += [
            {"stage": stage, "term": term, "coefficient": value, "share": float(part / max(parts_P.sum(), 1e-300))}
            for term, value, part in zip(TERMS[stage], getattr(cost, stage), parts_P, strict=True)
            if part > 0
        ]
    return sorted(rows, key=lambda row: (STAGES.index(row["stage"]), -row["share"]))
