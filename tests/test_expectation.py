"""pytest tests/test_expectation.py"""

import numpy as np
import pytest

from dflash_nb.data.lengths import LengthHistogram, read_histogram
from dflash_nb.planner.expectation import batch_means
from dflash_nb.planner.limits import Limits, padded_tokens
from dflash_nb.planner.packing import pack_padded


def seconds(rows, padded):
    """A batch time that is neither proportional to tokens nor additive over rows."""
    return 3.0 + 0.01 * rows * padded + 1e-5 * rows * padded**2


def chain_means(lengths, counts, limits, batch_cost):
    """Mean cost and rows of a batch by the Markov chain of greedy packing: its state is the rows and the longest sample so far."""
    padded, share = limits.padded(lengths), counts / counts.sum()
    opener = share.copy()
    for _ in range(10_000):
        state, closed = {(1, place): weight for place, weight in enumerate(opener)}, []
        after = np.zeros(len(lengths))
        while state:
            grown = {}
            for (rows, top), weight in state.items():
                for drawn, chance in enumerate(share):
                    longest = max(top, drawn)
                    if (rows + 1) * padded[longest] <= limits.token_budget and rows < limits.max_batch:
                        grown[rows + 1, longest] = grown.get((rows + 1, longest), 0.0) + weight * chance
                    else:
                        closed.append((rows, padded[top], weight * chance))
                        after[drawn] += weight * chance
            state = grown
        if abs(after - opener).max() < 1e-13:
            rows, top, weight = np.array(closed, float).T
            return weight @ batch_cost(rows, top), weight @ rows
        opener = after
    raise AssertionError("the chain did not settle")


def alone(lengths, counts, limits, batch_cost=padded_tokens, model="packing"):
    ((cost_L, rows_L),) = batch_means(lengths, counts, np.array([0, len(lengths)]), limits, batch_cost, model)
    return cost_L[0], rows_L[0]


def random_histogram(rng, most=6, longest=40):
    lengths = np.sort(rng.choice(np.arange(1, longest + 1), rng.integers(1, most + 1), replace=False))
    return lengths, rng.integers(1, 30, len(lengths))


@pytest.mark.parametrize("batch_cost", [padded_tokens, seconds])
def test_the_mean_batch_is_that_of_the_greedy_chain(batch_cost):
    rng = np.random.default_rng(1)
    for _ in range(40):
        lengths, counts = random_histogram(rng)
        multiple = int(rng.choice([1, 1, 3, 8]))
        limits = Limits(int(rng.integers(40 + multiple, 130)), int(rng.integers(1, 9)), multiple)
        assert alone(lengths, counts, limits, batch_cost) == pytest.approx(chain_means(lengths, counts, limits, batch_cost), rel=1e-9)


@pytest.mark.parametrize("model", ["packing", "reference"])
@pytest.mark.parametrize("batch_cost", [padded_tokens, seconds])
def test_the_sweep_gives_every_pair_what_the_bucket_alone_gives(model, batch_cost):
    rng = np.random.default_rng(2)
    lengths = np.sort(rng.choice(np.arange(10, 900), 60, replace=False))
    counts = rng.integers(1, 1000, 60)
    splits = np.array([0, 3, 4, 20, 21, 40, 60])
    for limits in (Limits(4000, 50), Limits(4000, 50, 64)):
        swept = list(batch_means(lengths, counts, splits, limits, batch_cost, model))
        for upper in range(1, len(splits)):
            for lower in range(upper):
                part = slice(splits[lower], splits[upper])
                cost_L, rows_L = swept[upper - 1]
                assert (cost_L[lower], rows_L[lower]) == pytest.approx(
                    alone(lengths[part], counts[part], limits, batch_cost, model), rel=1e-11
                )


def test_the_reference_model_is_the_expected_maximum_of_so_many_draws():
    rng = np.random.default_rng(3)
    for _ in range(30):
        lengths, counts = random_histogram(rng, most=12, longest=60)
        limits = Limits(200, int(rng.integers(1, 20)), int(rng.choice([1, 7])))
        rows = min(limits.max_batch, int(200 // (lengths @ counts / counts.sum())))
        longest = limits.padded(lengths) @ np.diff((np.cumsum(counts) / counts.sum()) ** rows, prepend=0)
        assert alone(lengths, counts, limits, model="reference") == pytest.approx((rows * longest, rows))


def test_one_bucket_of_the_reference_lengths_counts_the_sample_that_did_not_fit():
    histogram = read_histogram("reference")
    offsets = pack_padded(histogram.expand(0), 49152, 64)
    cost, rows = alone(histogram.lengths, histogram.counts, Limits())
    assert rows == pytest.approx(histogram.n_samples / (len(offsets) - 1), rel=1e-3)
    assert histogram.mean * rows / cost == pytest.approx(0.4892, abs=2e-4)


def test_a_trillion_tokens_are_the_same_distribution():
    histogram = read_histogram("reference")
    few = alone(histogram.lengths, histogram.counts, Limits())
    many = alone(histogram.lengths, histogram.counts * 1_000_000, Limits())
    assert many == pytest.approx(few, rel=1e-9) and (histogram.counts * 1_000_000) @ histogram.lengths > 10**12


def test_one_sample_beside_a_trillion():
    cost, rows = alone(np.array([10, 8000]), np.array([1, 10**12]), Limits())
    assert rows == pytest.approx(6) and cost == pytest.approx(48_000)
    cost, rows = alone(np.array([10, 8000]), np.array([10**12, 1]), Limits())
    assert rows == pytest.approx(64) and cost == pytest.approx(640)


def test_thousands_of_rows_stay_within_half_a_percent():
    rng = np.random.default_rng(5)
    histogram = LengthHistogram.from_lengths(rng.integers(5, 60, 400_000))
    offsets = pack_padded(histogram.expand(0), 100_000, 1 << 20)
    rows = np.diff(offsets)
    padded = np.maximum.reduceat(histogram.expand(0), offsets[:-1])
    cost, mean_rows = alone(histogram.lengths, histogram.counts, Limits(100_000, 1 << 20))
    assert mean_rows == pytest.approx(rows[:-1].mean(), rel=5e-3)
    assert cost / mean_rows == pytest.approx((rows * padded).sum() / rows.sum(), rel=1e-3)
