"""What a batch may hold, measured in one place for the model of the cuts."""

import operator
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dflash_nb.errors import PlainError

BatchCost = Callable[[np.ndarray, np.ndarray], np.ndarray]
EXACT_ROWS = 128
LARGEST = 2**31 - 1


class BucketError(PlainError, ValueError):
    """Cuts, limits or lengths that cannot be used. The message names the value and says what to do."""


@dataclass(frozen=True)
class Limits:
    """rows x padded length <= token_budget, rows <= max_batch, padded lengths are multiples of pad_multiple."""

    token_budget: int = 49152
    max_batch: int = 64
    pad_multiple: int = 1

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_batch", "pad_multiple"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        if self.pad_multiple > self.token_budget:
            raise BucketError(f"pad_multiple {self.pad_multiple} is above token_budget {self.token_budget}: no sample would fit")

    def padded(self, lengths: np.ndarray) -> np.ndarray:
        """Lengths rounded up to ``pad_multiple``."""
        return -(-lengths // self.pad_multiple) * self.pad_multiple

    def rows(self, padded: np.ndarray) -> np.ndarray:
        """How many rows of a padded length a batch can hold."""
        return np.minimum(self.max_batch, self.token_budget // padded)

    def longest(self, rows: np.ndarray | int) -> np.ndarray:
        """The longest padded length of which a batch can hold ``rows``."""
        return self.token_budget // rows // self.pad_multiple * self.pad_multiple

    def row_counts(self, shortest: int) -> np.ndarray:
        """The row counts that a model tells apart, up to those of the shortest row: each up to 128, from there steps of one in 128."""
        most = int(self.rows(shortest))
        counts = list(range(1, min(most, EXACT_ROWS) + 1))
        while counts[-1] < most:
            counts.append(min(most, counts[-1] + counts[-1] // EXACT_ROWS))
        return np.array(counts, np.int64)

    def check_fit(self, lengths: np.ndarray, counts: np.ndarray) -> None:
        """Refuse lengths of which not even one row fits."""
        too_long = self.padded(lengths) > self.token_budget
        if too_long.any():
            raise BucketError(
                f"{int(counts[too_long].sum()):,} of {int(counts.sum()):,} samples do not fit token_budget {self.token_budget} when padded "
                f"to a multiple of {self.pad_multiple}; the longest has {int(lengths[-1])} tokens. Raise token_budget, or leave out or "
                f"truncate samples above {int(self.longest(1))} tokens."
            )


def padded_tokens(rows: np.ndarray, padded: np.ndarray) -> np.ndarray:
    """Cost of a batch in padded tokens."""
    return np.asarray(rows, float) * padded


def whole(name: str, value: object) -> int:
    """A whole number of at least 1 that products of two of them cannot overflow."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool | np.bool_):
        raise BucketError(f"{name} must be a whole number of at least 1, not {value!r}")
    if number > LARGEST:
        raise BucketError(f"{name} must be at most {LARGEST:,}, not {value!r}")
    return number
