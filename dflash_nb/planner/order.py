"""The order in which an epoch's batches run.

``uniform`` is a plain shuffle. ``balanced`` gives every accumulation window one batch from each slice of the batches ranked by
mean length, chosen at random: a scrambled net in the sense of Owen (1995, "Randomly permuted (t,m,s)-nets and (t,s)-sequences").
The net is nested, so windows of 2, 4, 16, 32 are mixed as well as those of 8, and so is any longer stretch of the epoch.
The price: neighbours differ on purpose (lag-1 correlation of batch length about -.40), so a long batch after a short one is
likelier than chance; where in a window it comes is not predictable. Nearly all of that is the price of windows of two: slices
made for them alone have -.38. Slices made for windows of eight alone have -.12, but mix windows of two as .453 instead of .341
(chance: .482) and of four as .277 instead of .188.
"""

import numpy as np


def batch_order(mean_lengths: np.ndarray, order: str, window: int, rng: np.random.Generator) -> np.ndarray:
    """Batches int64[n] in the order in which they run; ``order`` is ``uniform`` or ``balanced``."""
    n = len(mean_lengths)
    if order == "uniform":
        return rng.permutation(n)
    by_length = np.argsort(mean_lengths, kind="stable")
    by_place = np.argsort(_scrambled_net(n, window, rng))
    running = np.empty(n, dtype=np.int64)
    running[by_place] = by_length
    return running


def _scrambled_net(n: int, window: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct places int64[n] on the length axis, one for each time step.

    The digits of a time step, lowest first, become the digits of its place, highest first: steps that differ in the lowest
    digit only, so neighbours in time, lie in different halves of the length axis. Each digit is permuted at random, apart for
    every stretch of time and every stretch of length in it: which step of a window gets the long batch, and which of its batches
    a slice gives to a window, is chance every time.
    """
    rest, covered, place = np.arange(n), 1, np.zeros(n, dtype=np.int64)
    radices = _prime_factors(window)
    while covered < n:
        radix = radices.pop(0) if radices else 2
        rest, digit = np.divmod(rest, radix)
        chosen = _permutations((int(rest[-1]) + 1) * covered, radix, rng)
        place = place * radix + chosen[rest * covered + place, digit]
        covered *= radix
    return place


def _permutations(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` random permutations of ``size``, int[count, size]; a pair by one coin, since sorting it costs ten times as much."""
    if size == 2:
        coins = rng.integers(0, 2, count, dtype=np.uint8)
        return np.stack([coins, 1 - coins], axis=1)
    return rng.random((count, size), dtype=np.float32).argsort(axis=1, kind="stable")


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
