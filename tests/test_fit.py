"""Fitting the cost model: known coefficients come back from synthetic batches, in noise and with slow batches among them."""

import numpy as np
import pytest

from dflash_nb.planner.cost import CostError, CostModel
from dflash_nb.planner.fit import Measured, fit_cost, fit_terms, held_out, largest_terms, relative_errors, shape_folds

TRUE = CostModel(
    fetch=(1e-4, 2e-5, 1e-8),
    target=(0.02, 1e-5, 3e-9, 4e-5, 2e-4),
    transfer=(1e-4, 1e-7),
    drafter=(0.01, 1e-3, 2e-6, 3e-5, 2e-8),
    source="true",
)


def batches(count: int, noise: float = 0.0, slow: float = 0.0, seed: int = 0) -> Measured:
    """Batches of many shapes with drafted slots of their own, timed by ``TRUE`` with relative noise; a share is three times as slow."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 33, count)
    padded = np.minimum(rng.integers(16, 2000, count), 16384 // rows)
    tokens = (rows * padded * rng.uniform(0.7, 1.0, count)).astype(int)
    slots = rows * rng.choice([64, 128, 256], count)
    pairs = slots * tokens / rows
    true = {
        "fetch": TRUE.fetch_seconds(rows, tokens),
        "target": TRUE.target_seconds(rows, padded),
        "transfer": TRUE.transfer_seconds(tokens),
        "drafter": TRUE.drafter_seconds(rows, tokens, slots, pairs),
    }
    factor = np.exp(noise * rng.standard_normal((4, count))) * np.where(rng.random((4, count)) < slow, 3.0, 1.0)
    return Measured(rows, tokens, padded, rows * padded, slots, pairs, {name: true[name] * factor[i] for i, name in enumerate(true)})


def test_exact_batches_give_the_exact_coefficients():
    found = fit_cost(batches(200))
    for stage in ("fetch", "target", "transfer", "drafter"):
        assert getattr(found, stage) == pytest.approx(getattr(TRUE, stage), rel=1e-4)
        assert found.errors[stage]["median"] < 1e-6
    assert sum(errors["share"] for errors in found.errors.values()) == pytest.approx(1)


@pytest.mark.parametrize("seed", range(3))
def test_noise_and_slow_batches_move_the_prediction_little(seed):
    measured, fresh = batches(300, noise=0.05, slow=0.06, seed=seed), batches(300, seed=seed + 100)
    found = fit_cost(measured)
    for stage in ("fetch", "target", "transfer", "drafter"):
        error = relative_errors(fresh.terms(stage) @ np.array(getattr(found, stage)), fresh.seconds[stage])
        assert error["median"] < 0.03 and abs(error["total"]) < 0.04, stage
        assert len(found.points[stage]) == 150 and found.errors[stage]["median"] > error["median"]


def test_ordinary_least_squares_would_be_misled_by_the_same_batches():
    """What robustness is worth: the plain fit of the same batches is three times as far off."""
    measured, fresh = batches(300, noise=0.05, slow=0.06), batches(300, seed=100)
    terms, seconds = measured.terms("target"), measured.seconds["target"]
    plain = fresh.terms("target") @ np.linalg.lstsq(terms, seconds, rcond=None)[0]
    robust = fresh.terms("target") @ fit_terms(terms, seconds)
    errors = [np.median(np.abs(each / fresh.seconds["target"] - 1)) for each in (plain, robust)]
    assert errors[0] > 3 * errors[1]


def test_terms_that_cannot_be_told_apart_still_predict():
    """With as many slots for every row, rows and slots are one term; no coefficient is negative or wild."""
    measured = batches(200)
    same = Measured(measured.rows, measured.tokens, measured.padded_length, measured.padded_tokens, measured.rows * 64,
                    64 * measured.tokens, measured.seconds)  # fmt: skip
    seconds = TRUE.drafter_seconds(same.rows, same.tokens, same.slots, same.pairs)
    found = fit_terms(same.terms("drafter"), seconds)
    assert (found >= 0).all()
    assert same.terms("drafter") @ found == pytest.approx(seconds, rel=1e-4)


def test_errors_are_those_of_shapes_that_were_held_out():
    """A term that only tells shapes apart by accident fits those it has seen and fails on the others."""
    rng = np.random.default_rng(0)
    rows = np.repeat(np.arange(1, 41), 5)
    padded = np.full(200, 100)
    measured = Measured(rows, rows, padded, rows * 100, rows, rows, {"target": rng.permutation(np.repeat(rng.uniform(1, 10, 40), 5))})
    fold = shape_folds(measured)
    for shape in range(1, 41):
        assert len(set(fold[rows == shape])) == 1
    memory, seconds = (rows[:, None] == np.arange(1, 41)).astype(float), np.repeat(rng.uniform(1, 10, 40), 5)
    assert relative_errors(memory @ fit_terms(memory, seconds), seconds)["median"] < 1e-6
    assert relative_errors(held_out(memory, seconds, fold), seconds)["median"] == pytest.approx(1.0)


def test_a_shape_counts_once_however_often_and_noisily_it_was_measured():
    """Twenty shapes predicted exactly and one at half: noise of single batches is no error, nor is the odd shape's number of batches."""
    rng = np.random.default_rng(0)
    shape = np.concatenate([np.repeat(np.arange(20), 9), np.full(500, 20)])
    seconds = np.exp(0.2 * rng.standard_normal(len(shape)))
    for each in range(21):
        seconds[shape == each] /= np.median(seconds[shape == each])
    predicted = np.where(shape == 20, 0.5, 1.0)
    assert relative_errors(predicted, seconds, shape)["median"] == pytest.approx(0, abs=1e-12)
    assert relative_errors(predicted, seconds, shape)["p90"] == pytest.approx(0, abs=1e-12)
    assert relative_errors(predicted, seconds)["median"] > 0.4


def test_rows_of_recurrent_layers_cost_whole_chunks():
    """32 rows of 27 tokens take what 32 rows of 64 take: without the term a fit misses some batches by a fifth."""
    rows, padded = (each.ravel() for each in np.meshgrid([1, 2, 4, 8, 16, 32], [20, 27, 40, 64, 100, 128, 160, 250, 400, 1000]))
    nothing = np.zeros(len(rows))
    seconds = {"target": 0.01 + 1e-5 * rows * padded + 2e-3 * rows * np.ceil(padded / 64)}
    measured = Measured(rows, rows * padded, padded, rows * padded, nothing, nothing, seconds)
    terms, fold = measured.terms("target"), shape_folds(measured)
    assert relative_errors(held_out(terms, seconds["target"], fold), seconds["target"])["p90"] < 1e-6
    assert relative_errors(held_out(terms[:, :4], seconds["target"], fold), seconds["target"])["p90"] > 0.2


def test_what_cannot_be_fitted_is_refused():
    with pytest.raises(CostError, match="19 measured batches are too few"):
        fit_cost(batches(19))
    measured = batches(50)
    measured.seconds["target"][:] = np.nan
    with pytest.raises(CostError, match="no seconds of the target stage"):
        fit_cost(measured)
    measured = batches(50)
    one_shape = measured.some(np.zeros(50, int))
    with pytest.raises(CostError, match="same shape"):
        fit_cost(one_shape)


def test_the_largest_terms_are_named():
    rows = largest_terms(TRUE, batches(100))
    drafter = [row for row in rows if row["stage"] == "drafter"]
    assert sum(row["share"] for row in drafter) == pytest.approx(1)
    assert drafter[0]["share"] == max(row["share"] for row in drafter) and drafter[0]["term"] in ("slot", "slot x context")
