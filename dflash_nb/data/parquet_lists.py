"""List lengths of a Parquet column from its repetition levels, without decoding a value.

Parquet stores no list offsets: it stores one repetition level a value, 0 where a list begins, run-length coded in front of each data page.
Decoding 1 million rows of 512 tokens to count them costs 5 s of CPU time. Of their pages only the front, where the levels are, is read
and decompressed, a page on each of two threads: 0.7 s of CPU time. What the fast way does not cover (null or empty lists, deeper
nesting, rare codecs) is answered with None, for the caller to decode.
Format: https://parquet.apache.org/docs/file-format/data-pages/ and .../encodings/ (RLE/bit-packing hybrid).
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DATA_PAGE, DATA_PAGE_V2 = 0, 3
RLE = 3
CODECS = {"UNCOMPRESSED": None, "SNAPPY": "snappy", "ZSTD": "zstd", "GZIP": "gzip", "BROTLI": "brotli"}
HEADER_BYTES = 4096
FRONT_BYTES = 1 << 13


def parquet_list_lengths(path: Path, column: str) -> np.ndarray | None:
    """Lengths int64[rows] of a list column, or None where it holds null or empty lists or is stored in an uncommon way."""
    with pq.ParquetFile(path) as parquet:
        metadata = parquet.metadata
    leaves = [i for i in range(metadata.num_columns) if metadata.schema.column(i).path.split(".")[0] == column]
    if len(leaves) != 1 or metadata.schema.column(leaves[0]).max_repetition_level != 1:
        return None
    max_definition = metadata.schema.column(leaves[0]).max_definition_level
    parts = [np.zeros(0, np.int64)]
    with pa.memory_map(str(path)) as file, ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            try:
                lengths = _chunk_lengths(file, pool, group.column(leaves[0]), max_definition) if group.num_rows else parts[0]
            except (LookupError, ValueError, OSError):
                return None  # a layout or a damage that the caller's decoder knows better
            if lengths is None or len(lengths) != group.num_rows:
                return None
            parts.append(lengths)
    return np.concatenate(parts)


@dataclass(frozen=True)
class _Page:
    """A data page: where its bytes begin, its Thrift header, and how many values it holds."""

    at: int
    header: dict
    values: int


def _chunk_lengths(
    file: pa.MemoryMappedFile, pool: ThreadPoolExecutor, chunk: pq.ColumnChunkMetaData, max_definition: int
) -> np.ndarray | None:
    """Lengths of the lists of one column chunk: the distances between values with repetition level 0."""
    if chunk.compression not in CODECS:
        return None
    pages = list(_pages(file, chunk))
    starts = list(pool.map(partial(_list_starts, file, CODECS[chunk.compression], max_definition), pages))
    if any(page_starts is None for page_starts in starts):
        return None
    ends = np.cumsum([page.values for page in pages])
    return np.diff(np.concatenate([*(s + end - page.values for s, end, page in zip(starts, ends, pages, strict=True)), ends[-1:]]))


def _pages(file: pa.MemoryMappedFile, chunk: pq.ColumnChunkMetaData) -> Iterator[_Page]:
    """The data pages of a column chunk; only their headers are read."""
    at = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    remaining = chunk.num_values
    while remaining > 0:
        header, size = _thrift_struct(file.read_at(HEADER_BYTES, at), 0)
        at += size
        if header[1] in (DATA_PAGE, DATA_PAGE_V2):
            values = header[5 if header[1] == DATA_PAGE else 8][1]
            yield _Page(at, header, values)
            remaining -= values
        at += header[3]


def _list_starts(file: pa.MemoryMappedFile, codec: str | None, max_definition: int, page: _Page) -> np.ndarray | None:
    """Positions of the values that begin a list, from the levels in front of the page's values; None if one is no real value."""
    if page.header[1] == DATA_PAGE_V2:
        definition_bytes, repetition_bytes = (page.header[8][i] for i in (5, 6))
        levels = np.frombuffer(file.read_at(repetition_bytes + definition_bytes, page.at), np.uint8)
        repetition, definition = levels[:repetition_bytes], levels[repetition_bytes:]
    else:
        if (page.header[5][3], page.header[5][4]) != (RLE, RLE):
            return None
        repetition, definition = _levels_in_front(file.read_at(page.header[3], page.at), codec, page.header[2])
    return _zeros(repetition, page.values) if _all_equal(definition, max_definition, page.values) else None


def _levels_in_front(page: pa.Buffer, codec: str | None, page_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """The repetition and the definition levels of a page of ``page_bytes`` when decompressed, as coded."""
    wanted = FRONT_BYTES
    while True:
        data = np.frombuffer(_front(page, codec, min(wanted, page_bytes), page_bytes), np.uint8)
        repetition_end = _end_of_levels(data, 0)
        definition_end = _end_of_levels(data, repetition_end)
        if definition_end <= len(data) or wanted >= page_bytes:
            return data[4:repetition_end], data[repetition_end + 4 : definition_end]
        wanted *= 8


def _end_of_levels(data: np.ndarray, at: int) -> int:
    """Where the levels end whose size in bytes stands at ``at``; beyond the data where that is not there."""
    size = data[at : at + 4]
    return at + 4 + (int(size.view("<u4")[0]) if len(size) == 4 else 0)


def _front(page: pa.Buffer, codec: str | None, wanted: int, page_bytes: int) -> pa.Buffer | bytes:
    """The first bytes of a decompressed page, about as many as wanted."""
    if codec is None:
        return page
    if codec != "snappy":
        return pa.CompressedInputStream(pa.BufferReader(page), codec).read(wanted)
    if wanted == page_bytes:
        return pa.Codec(codec).decompress(page, page_bytes)
    return _snappy_front(np.frombuffer(page, np.uint8)[:wanted])


def _snappy_front(data: np.ndarray) -> pa.Buffer:
    """What the first bytes of a snappy stream decompress to, up to the last whole element, which is found as runs are in ``_runs``.

    An element is a literal, or a copy with 1, 2 or 4 bytes of offset; its first byte says which and how many bytes it gives.
    Format: https://github.com/google/snappy/blob/main/format_description.txt
    """
    elements = data[_varint(data, 0)[1] :]
    end = len(elements)
    padded = np.concatenate([elements, np.zeros(4, np.uint8)]).astype(np.int64)
    kind, given = padded[:end] & 3, padded[:end] >> 2
    number = sum(padded[k : end + k] << 8 * (k - 1) for k in range(1, 5))
    length_bytes = np.where(kind == 0, np.maximum(given - 59, 0), 0)
    given = 1 + np.where(length_bytes > 0, number & (1 << 8 * length_bytes) - 1, given)
    given = np.where(kind == 1, 4 + (given - 1 & 7), given)
    taken = np.where(kind == 0, 1 + length_bytes + given, np.array([0, 2, 3, 5])[kind])
    chain = _chain(np.arange(end) + taken)
    chain = chain[chain + taken[chain] <= end]
    if not len(chain):
        return pa.py_buffer(b"")
    size = int(given[chain].sum())
    preamble = bytes([*(size >> shift & 127 | 128 for shift in (0, 7, 14, 21)), size >> 28])
    whole = elements[: chain[-1] + taken[chain[-1]]].tobytes()
    return pa.Codec("snappy").decompress(preamble + whole, size)


def _chain(following: np.ndarray) -> np.ndarray:
    """The positions 0, following[0], following[following[0]], .. as far as there are any.

    The first n links and the jump over n links give the first 2n.
    """
    end = len(following)
    jump = np.append(np.minimum(following, end), end)
    chain = np.zeros(1, np.int64)
    while chain[-1] < end:
        chain, jump = np.concatenate([chain, jump[chain]]), jump[jump]
    return chain[chain < end]


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of a hybrid-coded level stream. A run holds ``count`` values from ``start`` on; its bytes begin at ``payload``."""

    literal: np.ndarray
    start: np.ndarray
    count: np.ndarray
    payload: np.ndarray


def _runs(data: np.ndarray, width: int) -> _Runs:
    """Split the stream into runs.

    A run begins where the one before it ends, so where a run would end is computed for every byte at once, and that chain is followed.
    """
    end = len(data)
    padded = np.concatenate([data, np.zeros(4, np.uint8)]).astype(np.int64)
    header, payload = padded[:end] & 127, np.arange(1, end + 1)
    more = padded[:end] > 127
    for k in range(1, 5):
        if not more.any():
            break
        following = padded[k : end + k]
        header |= np.where(more, (following & 127) << 7 * k, 0)
        payload += more
        more &= following > 127
    literal = (header & 1).astype(bool)
    chain = _chain(payload + np.where(literal, (header >> 1) * width, 1))
    literal, payload = literal[chain], payload[chain]
    count = (header[chain] >> 1) * np.where(literal, 8, 1)
    return _Runs(literal, np.cumsum(count) - count, count, payload)


def _literal_values(data: np.ndarray, runs: _Runs, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(position, value) of every value in the bit-packed runs: groups of 8 values in ``width`` bytes, lowest bit first."""
    groups = runs.count[runs.literal] >> 3
    nth = np.arange(groups.sum()) - np.repeat(np.cumsum(groups) - groups, groups)
    first_byte = np.repeat(runs.payload[runs.literal], groups) + nth * width
    packed = data[np.minimum(first_byte[:, None] + np.arange(width), len(data) - 1)]
    values = np.unpackbits(packed, axis=1, bitorder="little").reshape(-1, width) @ (1 << np.arange(width))
    positions = np.repeat(runs.start[runs.literal], groups) + nth * 8
    return (positions[:, None] + np.arange(8)).ravel(), values


def _zeros(data: np.ndarray, values: int) -> np.ndarray:
    """Positions of the zeros among the first ``values`` one-bit levels, increasing."""
    runs = _runs(data, 1)
    positions, levels = _literal_values(data, runs, 1)
    positions = positions[levels == 0]
    flat = ~runs.literal
    flat[flat] = data[runs.payload[flat]] == 0
    counts = runs.count[flat]
    repeated = np.repeat(runs.start[flat] - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
    zeros = np.sort(np.concatenate([positions, repeated]))
    return zeros[: np.searchsorted(zeros, values)]


def _all_equal(data: np.ndarray, level: int, values: int) -> bool:
    """Whether each of the first ``values`` levels is ``level``."""
    width = level.bit_length()
    runs = _runs(data, width)
    positions, levels = _literal_values(data, runs, width)
    return bool((levels[positions < values] == level).all() and (data[runs.payload[~runs.literal]] == level).all())


def _thrift_struct(data: bytes, at: int) -> tuple[dict, int]:
    """A struct in Thrift's compact protocol as {field id: value}, and the position after it."""
    fields, field = {}, 0
    while data[at]:
        delta, kind = data[at] >> 4, data[at] & 15
        at += 1
        if delta:
            field += delta
        else:
            field, at = _zigzag(data, at)
        fields[field], at = _thrift_value(data, at, kind)
    return fields, at + 1


def _thrift_value(data: bytes, at: int, kind: int):
    if kind in (1, 2):
        return kind == 1, at
    if kind in (4, 5, 6):
        return _zigzag(data, at)
    if kind == 8:
        size, at = _varint(data, at)
        return data[at : at + size], at + size
    if kind == 12:
        return _thrift_struct(data, at)
    raise ValueError(f"Thrift type {kind} does not occur in a Parquet page header.")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value, shift = 0, 0
    while data[at] > 127:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
