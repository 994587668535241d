"""Which shapes to measure: within the limits, of lengths that there are, and better than as many at random."""

import numpy as np

from dflash_nb.planner.fit import fit_terms
from dflash_nb.planner.shapes import candidate_shapes, telling_shapes

LENGTHS = np.minimum(4000, np.random.default_rng(0).lognormal(5, 1, 3000).astype(int) + 8)


def target_terms(shapes):
    rows, length = shapes.T.astype(float)
    return np.stack([np.ones_like(rows), rows * length, rows * length**2, length], axis=1)


def test_candidates_keep_the_limits_and_span_the_data():
    shapes = candidate_shapes(LENGTHS, 8192, 32)
    rows, length = shapes.T
    assert (rows * length <= 8192).all() and rows.max() == 32 and rows.min() == 1
    assert np.isin(length, LENGTHS).all() and length.max() == LENGTHS.max()
    assert candidate_shapes(np.array([5000, 9000]), 8192, 32).tolist() == [[1, 5000]]


def test_chosen_shapes_beat_random_ones():
    """The median error of the fitted coefficients' predictions over all candidates, for as many measurements of 5 % noise."""
    shapes, rng = candidate_shapes(LENGTHS, 8192, 32), np.random.default_rng(1)
    terms = target_terms(shapes)
    true = terms @ np.array([0.02, 1e-5, 1e-8, 5e-5])
    chosen = telling_shapes(terms, 8)
    assert len(set(chosen.tolist())) == 8

    def error(places):
        found = fit_terms(terms[places], true[places] * np.exp(0.05 * rng.standard_normal(len(places))))
        return np.sqrt(np.mean((terms @ found / true - 1) ** 2))

    by_choice = [error(chosen) for _ in range(60)]
    by_chance = [error(rng.choice(len(shapes), 8, replace=False)) for _ in range(60)]
    assert np.mean(by_choice) < 0.8 * np.mean(by_chance)
