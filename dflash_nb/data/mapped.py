"""List columns of a file as numpy views on memory-mapped buffers.

A row then costs what copying its bytes costs. What cannot be mapped (Parquet, compressed Arrow) is rewritten once into the cache as
plain Arrow, a few thousand rows at a time: reading one row of a Parquet file means decoding its whole row group, and holding the file
decoded means holding all tokens. The price is disk space: 5 bytes a token of int32 ids and uint8 masks.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dflash_nb.data.lengths import as_int64, integers, list_offsets, refuse_null_token
from dflash_nb.data.source import DatasetError, file_kind, read_batches, read_schema
from dflash_nb.home import cache_dir, write_aside


@dataclass(frozen=True, eq=False)
class MappedLists:
    """A list column of one record batch. List i is ``values[offsets[i]:offsets[i + 1]]``; ``bits`` packs booleans eight to a byte."""

    offsets: np.ndarray
    values: np.ndarray
    bits: bool = False
    bit_offset: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def row(self, i: int, limit: int | None = None) -> np.ndarray:
        """The values of list ``i``, at most ``limit`` of them."""
        start, stop = int(self.offsets[i]), int(self.offsets[i + 1])
        return self._between(start, stop if limit is None else min(stop, start + limit))

    def rows(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """The values of lists first..last-1 in one array, and where in it each list begins."""
        begin = self.offsets[first:last]
        return self._between(int(begin[0]), int(self.offsets[last])), begin - begin[0]

    def _between(self, start: int, stop: int) -> np.ndarray:
        if not self.bits:
            return self.values[start:stop]
        start, stop = start + self.bit_offset, stop + self.bit_offset
        unpacked = np.unpackbits(self.values[start >> 3 : (stop + 7) >> 3], bitorder="little")
        return unpacked[start & 7 : (start & 7) + stop - start]


@dataclass(frozen=True, eq=False)
class MappedBatch:
    """One record batch: ``lists`` by column name, mapped; ``numbers`` by column name, int64[rows], copied."""

    lists: dict[str, MappedLists]
    numbers: dict[str, np.ndarray]


def map_file(path: Path, lists: Sequence[str], numbers: Sequence[str]) -> list[MappedBatch]:
    """The record batches of a file that have rows, with these list columns mapped and these integer columns read.

    Raises:
        DatasetError: a null in a list column; names the row of the file.
    """
    columns = [*lists, *numbers]
    plain = path if file_kind(path) != "parquet" else _plain_copy(path, columns)
    mapped = _map_plain(plain, path, lists, numbers)
    return _map_plain(_plain_copy(path, columns), path, lists, numbers) if mapped is None else mapped


def _map_plain(plain: Path, path: Path, lists: Sequence[str], numbers: Sequence[str]) -> list[MappedBatch] | None:
    """The record batches of ``plain``, None if one of them cannot be mapped; ``path`` is the user's file, which errors name."""
    batches, rows = [], 0
    for batch in read_batches(plain, [*lists, *numbers]):
        if not batch.num_rows:
            continue
        if not all(_is_mapped(batch[name]) for name in lists):
            return None
        mapped = {name: _map_lists(path, name, batch[name], rows) for name in lists}
        batches.append(MappedBatch(mapped, {name: as_int64(batch[name]) for name in numbers}))
        rows += batch.num_rows
    return batches


def _is_mapped(column: pa.Array) -> bool:
    """A mapped buffer is a slice of the file; a decompressed one owns its memory and has no parent."""
    return all(buffer.parent is not None for buffer in column.buffers() if buffer is not None and buffer.size)


def _map_lists(path: Path, name: str, column: pa.Array, first_row: int) -> MappedLists:
    values, offsets = column.values, list_offsets(column)
    if column.null_count:
        row = first_row + column.is_null().index(True).as_py()
        raise DatasetError(f"{path}: row {row} of column {name!r} is null. Drop or correct such rows.")
    refuse_null_token(path, name, column, first_row)
    if pa.types.is_boolean(values.type):
        return MappedLists(offsets, np.frombuffer(values.buffers()[1] or b"", np.uint8), True, values.offset)
    return MappedLists(offsets, integers(values))


def _plain_copy(path: Path, columns: Sequence[str]) -> Path:
    """These columns of the file as plain Arrow in the cache, written on first use and again when the file has changed."""
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {columns}".encode()).hexdigest()[:16]
    copy = cache_dir() / "arrow" / f"{path.stem}-{key}.arrow"
    if not copy.is_file():
        print(f"{path.name} cannot be memory-mapped: writing it once as plain Arrow to {copy}", flush=True)
        schema = read_schema(path)
        schema = pa.schema([schema.field(name) for name in columns])
        with write_aside(copy) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for batch in read_batches(path, columns):
                writer.write_batch(batch.select(columns))
    return copy
