"""Pack whole documents behind each other into rows of a token budget: no padding, no split, no cut.

Longest first, each into the emptiest row (Graham 1969, "Bounds on multiprocessing timing anomalies"), but a document for every row at
once and all pools side by side: 25 turns of a few sorts pack 902,087 documents in 0.04 s; packing them one by one takes others 2.5 to
23 s. The rows are .993 full on the reference lengths with pools of 2,048, and every row has its share of long and short
documents: eight of them are nearer to the data's mix (W1 .018) than eight random batches (.087).

Axes: P pools, D documents of a pool, R rows of a pool.
"""

import numpy as np

from dflash_nb.progress import announced

POOLS_AT_ONCE = 128
LOWER = np.int64(0xFFFFFFFF)
CLOSED = np.int64(1) << 61


def pack_documents(
    lengths: np.ndarray, visit: np.ndarray, row_tokens: int, most_documents: int, pool_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of at most ``row_tokens`` tokens (up to 2^28) and ``most_documents`` documents.

    lengths: int[samples], each at most ``row_tokens``. visit: int32[n] the samples in visiting order; every ``pool_size`` of them
    are packed together, into the fewest rows that could do.
    What fits in none of them is packed again together with the leftovers of the other pools.
    Returns the samples int32[n] row by row and the offsets int64[rows + 1].
    """
    documents, filled, sizes = np.empty_like(visit), 0, []
    while len(visit):
        pools = max(1, len(visit) // pool_size)
        depth = -(-len(visit) // pools)
        step = depth * POOLS_AT_ONCE
        leftovers = []
        for low in announced(range(0, len(visit), step), "planning, packing documents"):
            part = visit[low : low + step]
            placed, rows, left = _fill_pools(lengths[part], depth, row_tokens, most_documents)
            documents[filled : filled + len(placed)] = part[placed]
            filled += len(placed)
            sizes.append(rows)
            leftovers.append(part[left])
        visit = np.concatenate(leftovers)
    return documents, np.concatenate([[0], np.cumsum(np.concatenate(sizes))])


def _fill_pools(lengths: np.ndarray, depth: int, row_tokens: int, most_documents: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pack every ``depth`` of the lengths as a pool: positions row by row, documents of each row, positions that found no row."""
    pools = -(-len(lengths) // depth)
    keys = np.full(pools * depth, -1, dtype=np.int64)
    keys[: len(lengths)] = lengths.astype(np.int64) << 32 | np.arange(len(lengths))
    keys_PD = keys.reshape(pools, depth)
    keys_PD.sort(axis=1)
    keys_PD = keys_PD[:, ::-1]
    real_PD = keys_PD >= 0
    positions = keys_PD[real_PD].astype(np.int32)
    lengths_PD = np.maximum(keys_PD >> 32, 0)
    documents_P = real_PD.sum(axis=1)
    rows_P = np.maximum(-(-lengths_PD.sum(axis=1) // row_tokens), -(-documents_P // most_documents))
    row = _emptiest_first(lengths_PD, documents_P, rows_P, row_tokens, most_documents)[real_PD]
    placed = row >= 0
    sizes = np.bincount(row[placed])
    by_row = np.argsort(row[placed].astype(np.min_scalar_type(len(sizes))), kind="stable")
    return positions[placed][by_row], sizes[sizes > 0], positions[~placed]


def _emptiest_first(
    lengths_PD: np.ndarray, documents_P: np.ndarray, rows_P: np.ndarray, row_tokens: int, most_documents: int
) -> np.ndarray:
    """Put the documents of every pool, longest first, each into the emptiest row of its pool.

    lengths_PD: int64, falling along a pool. documents_P: how many of them are documents. rows_P: rows of each pool.
    A row is a number: its tokens in the upper 32 bits, its place in the pool in the lower. Sorted rows take the next documents one
    each, as far as no row that has just been filled is the emptiest again.
    Returns the row int32[pools, documents], counted over all pools, -1 where the emptiest row had no room.
    """
    (pools, depth), most_rows = lengths_PD.shape, int(rows_P.max())
    every_R, first_row_P = np.arange(most_rows), np.arange(pools) * most_rows
    held_PR = np.where(every_R < rows_P[:, None], every_R, CLOSED)
    documents = np.zeros(pools * most_rows, dtype=np.int32)
    tokens_PD = np.zeros((pools, depth + most_rows), dtype=np.int64)
    tokens_PD[:, :depth] = lengths_PD << 32
    row_PD = np.full(tokens_PD.shape, -1, dtype=np.int32)
    tokens, row_of = tokens_PD.reshape(-1), row_PD.reshape(-1)
    next_P, first_P, turn = np.zeros(pools, dtype=np.int64), np.arange(pools) * (depth + most_rows), 0
    while (next_P < documents_P).any():
        held_PR.sort(axis=1)
        at_PR = (first_P + next_P)[:, None] + every_R
        after_PR = held_PR + tokens[at_PR]
        tried_P = np.minimum((held_PR <= after_PR[:, :1]).sum(axis=1), documents_P - next_P)
        fits_PR = (every_R < tried_P[:, None]) & (after_PR >> 32 <= row_tokens)
        row = (first_row_P[:, None] + (held_PR & LOWER))[fits_PR]
        row_of[at_PR[fits_PR]] = row
        documents[row] += 1
        np.copyto(held_PR, after_PR, where=fits_PR)
        next_P += tried_P
        turn += 1
        if turn >= most_documents:
            held_PR[fits_PR] = np.where(documents[row] == most_documents, CLOSED, after_PR[fits_PR])
    return row_PD[:, :depth]
