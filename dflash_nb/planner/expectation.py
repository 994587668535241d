"""The mean batch of a bucket whose samples are shuffled and packed greedily: its cost and its rows, for every pair of edges in one sweep.

The ``packing`` model follows the real stopping rule. A batch reaches k rows exactly when none of them is longer than c_k, the
longest padded length of which k fit the budget: P(k rows or more) = D(c_k) F(c_k)^(k-1), where F is the bucket's distribution
and D that of the sample that opens a batch. D is not F: a batch closed by a sample too long for it hands that sample to the
next batch. Without this, one bucket over the reference lengths is promised 49.4 % where packing gives 48.9 %; with it, 48.9 %.
The ``reference`` model is the reference run's: every batch has floor(budget / mean length) rows.

Nothing is sampled and no integral is approximated: the sums run over every length. All pairs of 240 edges over 5,378 lengths
take 0.25 s of CPU, and one row of the table is held at a time.

Axes: L lower splits, K row counts, Y lengths of one segment.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from dflash_nb.planner.limits import BatchCost, Limits, padded_tokens

NEGLIGIBLE = 1e-12
TINY = 1e-300
LOWER_AT_ONCE = 32


def batch_means(
    lengths: np.ndarray,
    counts: np.ndarray,
    splits: np.ndarray,
    limits: Limits,
    batch_cost: BatchCost = padded_tokens,
    model: str = "packing",
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each upper split in turn: the mean cost and the mean rows of a batch, for every lower split.

    lengths, counts: int64[Y], lengths strictly increasing, each within the budget when padded, counts >= 1.
    splits: int64[E], strictly increasing positions in ``lengths``. A bucket is lengths[splits[i] : splits[j]].
    batch_cost: cost of batches from their rows and padded lengths, arrays that broadcast.
    Yields (cost_L, rows_L), float64[j], for j = 1 .. E-1.
    """
    sweep = _Sweep(lengths, counts, splits, limits, batch_cost, model)
    points = np.unique(np.concatenate([splits, sweep.reach[(sweep.reach > splits[0]) & (sweep.reach < splits[-1])]]))
    upper = 1
    for begin, end in pairwise(points):
        sweep.advance(begin, end)
        if end == splits[upper]:
            yield sweep.reference(upper) if model == "reference" else sweep.packing(upper)
            upper += 1


class _Sweep:
    """One pass upwards over the lengths. For every lower split it holds what rows drawn from there up to here cost.

    row_counts: the batch sizes k. reach: for each, the position up to which lengths allow k rows. drawn: expected cost of k rows, their
    longest that of k draws. one_fewer: the same, their longest that of k - 1 draws. at_reach: both as they were at reach[k].
    """

    def __init__(
        self, lengths: np.ndarray, counts: np.ndarray, splits: np.ndarray, limits: Limits, batch_cost: BatchCost, model: str
    ) -> None:
        self.splits, self.limits, self.batch_cost, self.model = splits, limits, batch_cost, model
        self.padded = limits.padded(lengths)
        self.below = np.concatenate([[0], np.cumsum(counts)]).astype(float)
        self.tokens_below = np.concatenate([[0.0], np.cumsum(lengths * counts.astype(float))])
        self.row_counts = limits.row_counts(int((lengths if model == "reference" else self.padded)[splits[0]]))
        self.reach = np.searchsorted(self.padded, limits.longest(self.row_counts), "right")
        self.drawn_LK = np.zeros((len(splits) - 1, len(self.row_counts)))
        self.one_fewer_LK = np.zeros_like(self.drawn_LK)
        self.at_reach: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def advance(self, begin: int, end: int) -> None:
        """Take lengths[begin:end] in, between which no row count and no split ends."""
        active = len(self.row_counts) if self.model == "reference" else int((self.reach >= end).sum())
        rows_K = self.row_counts[:active]
        cost_KY = self.batch_cost(rows_K[:, None], self.padded[None, begin:end])
        step_KY = np.diff(cost_KY, axis=1)
        started = int(np.searchsorted(self.splits[:-1], begin, "right"))
        for first in range(0, started, LOWER_AT_ONCE):
            some = slice(first, min(first + LOWER_AT_ONCE, started))
            base_L = self.below[self.splits[some], None]
            share_LY = (self.below[None, begin:end] - base_L) / (self.below[end] - base_L)
            log_LY = np.log(np.maximum(share_LY, TINY))
            for state_LK, exponent_K in ((self.drawn_LK, rows_K), (self.one_fewer_LK, rows_K - 1)):
                power_LKY = np.exp(log_LY[:, None, :] * exponent_K[:, None])
                state = state_LK[some, :active]
                state[:] = cost_KY[:, -1] - power_LKY[:, :, 0] * (cost_KY[:, 0] - state)
                if end - begin > 1:
                    state -= np.einsum("lky,ky->lk", power_LKY[:, :, 1:], step_KY)
            self.one_fewer_LK[some, 0] = 0.0
        lower = int(np.searchsorted(self.splits, end))
        for k in np.flatnonzero(self.reach == end):
            self.at_reach[k] = (self.drawn_LK[:lower, : k + 1].copy(), self.one_fewer_LK[:lower, : k + 1].copy())

    def reference(self, upper: int) -> tuple[np.ndarray, np.ndarray]:
        """Cost and rows where every batch of a bucket has as many rows as its mean length allows."""
        end, lower = self.splits[upper], self.splits[:upper]
        samples_L = self.below[end] - self.below[lower]
        mean_L = (self.tokens_below[end] - self.tokens_below[lower]) / samples_L
        rows_L = self.limits.rows(mean_L)
        place_L = np.searchsorted(self.row_counts, rows_L, "right") - 1
        return self.drawn_LK[np.arange(upper), place_L], self.row_counts[place_L].astype(float)

    def packing(self, upper: int) -> tuple[np.ndarray, np.ndarray]:
        """Cost and rows where a batch ends as soon as one more row would break a limit.

        With c_k the length at reach[k] and G_k = D F^(k-1) the distribution of the longest of k rows, a mean batch has
            rows = sum over k of G_k(c_k),
            cost = sum over k of  integral up to c_k of cost(k, x) dG_k(x)  -  F(c_k) x integral up to c_k of cost(k-1, x) dG_k-1(x),
        what it costs with k rows less what the same batch cost with k - 1. The terms up to row_counts[sure], which every batch reaches,
        add up to its own. D is F with weight 1 and, for each k that batches fail to grow to, F beyond c_k with the weight of these
        failures: solved from the largest k down, since a batch that opens beyond c_k fails below k. The weights are not normalised.
        """
        end = self.splits[upper]
        base_L = self.below[self.splits[:upper]]
        samples_L = self.below[end] - base_L
        sure = int((self.reach >= end).sum()) - 1
        within_LK = np.maximum(self.below[self.reach[sure + 1 :]] - base_L[:, None], 0) / samples_L[:, None]
        reached = (within_LK ** (self.row_counts[sure + 1 :] - 1)).max(axis=0, initial=0.0) >= NEGLIGIBLE
        larger = int(np.argmin(np.append(reached, False)))
        within_LK = within_LK[:, :larger]
        gap_K = np.diff(self.row_counts[sure : sure + larger + 1])
        grow_LK = within_LK**gap_K

        # D(x) = (1 + beyond) F(x) - below, where below collects F(c_k) of the parts that begin beyond c_k
        beyond_L, below_L = np.zeros(upper), np.zeros(upper)
        batches_L, rows_L, cost_L = np.ones(upper), np.zeros(upper), np.zeros(upper)
        for column in reversed(range(larger)):
            k = sure + 1 + column
            drawn_LK, one_fewer_LK = self.at_reach[k]
            some = slice(len(drawn_LK))
            within_L = within_LK[some, column]
            power_LK = np.exp(np.log(np.maximum(within_L, TINY))[:, None] * self.row_counts[sure : k + 1])
            plain_L, shifted_L = 1 + beyond_L[some], below_L[some] / within_L
            part_LK = power_LK[:, -2:] * (plain_L[:, None] * drawn_LK[:, -2:] - shifted_L[:, None] * one_fewer_LK[:, -2:])
            cost_L[some] += part_LK[:, 1] - grow_LK[some, column] * part_LK[:, 0]
            opener_L = plain_L - shifted_L
            rows_L[some] += gap_K[column] * opener_L * power_LK[:, -1]

            failed_L = opener_L * power_LK[:, -2] * _geometric_sum(within_L, gap_K[column])
            # the integrals of smaller row counts take this part of D from c_k on, not from 0
            absent_LK = power_LK[:, :-1] * (drawn_LK[:, sure:k] - one_fewer_LK[:, sure:k])
            absent_LK[:, :-1] *= 1 - grow_LK[some, :column]
            cost_L[some] -= failed_L * absent_LK.sum(axis=1)
            beyond_L[some] += failed_L
            below_L[some] += failed_L * within_L
            batches_L[some] += failed_L * (1 - within_L)

        rows_L += self.row_counts[sure] * batches_L
        cost_L += (1 + beyond_L) * self.drawn_LK[:upper, sure] - below_L * self.one_fewer_LK[:upper, sure]
        return cost_L / batches_L, rows_L / batches_L


def _geometric_sum(base_L: np.ndarray, terms: int) -> np.ndarray:
    """1 + base + base^2 + ..., so many terms."""
    return np.ones_like(base_L) if terms == 1 else (base_L[:, None] ** np.arange(terms)).sum(axis=1)
