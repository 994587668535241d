"""Edges of buckets, and the one rule by which a length meets them: a bucket is ``[lo, hi)``.

An edge belongs to the bucket above it. The last edge lies above the longest sample, so a length of 8192 needs a last edge of 8193.
"""

import operator
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.planner.limits import LARGEST, BucketError

REFERENCE_BOUNDARIES = (0, 770, 1216, 1728, 2432, 3296, 8192)


def bucket_of(lengths: np.ndarray, boundaries: Sequence[int]) -> np.ndarray:
    """The bucket of each length, int32[n].

    Raises:
        BucketError: a length is in no bucket; it names the row.
    """
    lengths = np.asarray(lengths)
    bucket = np.searchsorted(np.asarray(boundaries, np.int64), lengths, "right") - 1
    outside = (bucket < 0) | (bucket >= len(boundaries) - 1)
    if outside.any():
        row = int(np.argmax(outside))
        raise BucketError(
            f"row {row} has length {lengths.flat[row]}, outside the buckets [{boundaries[0]}, {boundaries[-1]}), as "
            f"{int(outside.sum()):,} of {lengths.size:,} rows are. Raise the last edge, or leave these rows out."
        )
    return bucket.astype(np.int32)


def increasing(edges: Sequence[int]) -> list[int]:
    """The edges, if they can be edges of any lengths. Raises BucketError unless they are whole numbers that increase from 0 or above."""
    try:
        edges = [operator.index(edge) for edge in edges]
    except TypeError:
        raise BucketError(f"buckets: edges must be whole numbers of tokens, not {edges!r}") from None
    if any(low >= high for low, high in pairwise(edges)) or min(edges, default=0) < 0:
        raise BucketError(f"buckets: edges must increase and be 0 or above, not {edges}")
    if max(edges, default=0) > LARGEST + 1:
        raise BucketError(f"buckets: edges must be at most {LARGEST + 1:,}, not {edges}")
    return edges


def check_reach(edges: Sequence[int], longest: int) -> None:
    """Refuse edges that cut nothing: all above the longest sample, or more than one there, which may be the last edge of all.

    Raises:
        BucketError: it names the edges and the longest sample.
    """
    beyond = [edge for edge in edges if edge > longest]
    if len(beyond) > 1 or beyond == [edge for edge in edges if edge > 0] != []:
        raise BucketError(
            f"buckets: no sample is as long as {', '.join(f'{edge:,}' for edge in beyond)}, the longest has {longest:,} tokens; leave out "
            "edges beyond it"
        )


def full_boundaries(edges: Sequence[int], histogram: LengthHistogram) -> tuple[int, ...]:
    """Edges from 0 to above the longest sample, without those that leave a bucket empty.

    edges: increasing, the inner ones or all of them. 0 is put in front. A last edge equal to the longest length is raised by one;
    if it is below, longest + 1 is added.

    Raises:
        BucketError: the edges are not whole numbers, or do not increase from 0 or above.
    """
    edges = increasing(edges)
    if not edges or edges[0] > 0:
        edges.insert(0, 0)
    if edges[-1] == histogram.max:
        edges[-1] += 1
    elif edges[-1] < histogram.max:
        edges.append(histogram.max + 1)
    _, first = np.unique(np.searchsorted(histogram.lengths, edges), return_index=True)
    return tuple(edges[place] for place in first)
