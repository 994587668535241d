"""Memory-mapped rows by index, and their collation into a right-padded batch.

Every file is Arrow in memory-mapped form, so a row costs what copying its bytes costs. What cannot be mapped (Parquet, compressed
Arrow) is rewritten once into the cache as plain Arrow, a few thousand rows at a time: reading one row of a Parquet file means decoding
its whole row group, and holding the file decoded means holding all tokens. The price is disk space: 5 to 6 bytes a token.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from dflash_nb.data.lengths import as_int64, check_lengths, check_token_list, integers
from dflash_nb.data.source import PREPARE, DatasetError, Source, common_schema, file_kind, find_source, read_batches, read_schema
from dflash_nb.data.source import dataset_path as dataset_path
from dflash_nb.home import cache_dir, write_aside

SCAN_ROWS = 4096


@dataclass(frozen=True, eq=False)
class Batch:
    """One collated batch. B rows, T = padded_length; real tokens stand left, padding right.

    sample_ids_B, lengths_B: int64. input_ids_BT: int32, ``pad_id`` past a row's length. loss_mask_BT: bool, False past a row's length.
    """

    epoch: int
    index: int
    bucket: int
    padded_length: int
    sample_ids_B: np.ndarray
    lengths_B: np.ndarray
    input_ids_BT: np.ndarray
    loss_mask_BT: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.sample_ids_B)

    @property
    def real_tokens(self) -> int:
        return int(self.lengths_B.sum())

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.padded_length

    @property
    def nbytes(self) -> int:
        return self.sample_ids_B.nbytes + self.lengths_B.nbytes + self.input_ids_BT.nbytes + self.loss_mask_BT.nbytes


@dataclass(frozen=True, eq=False)
class _Lists:
    """A list column of one record batch as numpy views on the mapped file. ``bits`` holds booleans eight to a byte."""

    offsets: np.ndarray
    values: np.ndarray
    bits: bool
    bit_offset: int

    def slice(self, row: int, limit: int | None = None) -> np.ndarray:
        start, stop = int(self.offsets[row]), int(self.offsets[row + 1])
        if limit is not None:
            stop = min(stop, start + limit)
        return self.between(start, stop)

    def between(self, start: int, stop: int) -> np.ndarray:
        if not self.bits:
            return self.values[start:stop]
        first, last = start + self.bit_offset, stop + self.bit_offset
        unpacked = np.unpackbits(self.values[first >> 3 : (last + 7) >> 3], bitorder="little")
        return unpacked[first & 7 : (first & 7) + stop - start]


class TokenDataset:
    """Rows of token ids with their loss mask. Reads are thread-safe; pickled, it is opened again from its path.

    Attributes:
        lengths: int64[n], tokens of each row.
        path, split: what was opened.
        description: ``dataset.json`` of a prepared dataset, else None.
    """

    def __init__(self, source: Source, withhold: int = 0):
        self.path, self.split, self.description, self.withhold = source.path, source.split, source.description, withhold
        self.source_bytes = sum(path.stat().st_size for path in source.files)
        columns = _check_columns(source)
        chunks = [chunk for path in source.files for chunk in _map_chunks(path, columns)]
        if not chunks:
            raise DatasetError(f"{source.path} holds no samples.")
        self._ids, self._masks, seq_len, n_supervised = zip(*chunks, strict=True)
        self._first = np.cumsum([0, *(len(ids.offsets) - 1 for ids in self._ids)])
        lengths = check_lengths(np.concatenate([np.diff(ids.offsets) for ids in self._ids]), str(source.path), "input_ids")
        _refuse_difference(source, lengths, np.concatenate([np.diff(masks.offsets) for masks in self._masks]), "loss_mask")
        if "seq_len" in columns:
            _refuse_difference(source, lengths, np.concatenate(seq_len), "seq_len")
        rows = _split_rows(source, len(lengths), withhold)
        self.lengths = lengths[rows]
        self._start, self._stop = rows.start, rows.stop
        self._supervised_column = np.concatenate(n_supervised)[rows] if "n_supervised" in columns else None

    @classmethod
    def open(cls, source: str | os.PathLike[str], split: str = "train", withhold: int = 0) -> "TokenDataset":
        """Open a dataset.

        Args:
            source: ``sample``, a prepared dataset folder, an Arrow or Parquet file, a folder of either, or one saved by ``datasets``.
            split: ``train`` or ``heldout``.
            withhold: for a source without a held-out split of its own: so many last rows are its held-out split and not in ``train``.

        Raises:
            DatasetError: columns missing, of the wrong type, or in disagreement; the message names column and row.
            FileNotFoundError: nothing is there.
        """
        found = find_source(source)
        if found.has_heldout or not withhold:
            return cls(found if split == "train" else find_source(source, split))
        return cls(replace(found, split=split), withhold)

    def __reduce__(self):
        return TokenDataset.open, (str(self.path), self.split, self.withhold)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def tokenizer(self) -> dict | None:
        """Name, fingerprint and vocab_size of the tokenizer that made the ids, where the dataset says so."""
        return (self.description or {}).get("tokenizer")

    @cached_property
    def n_supervised(self) -> np.ndarray:
        """int64[n], supervised tokens of each row: the column of that name, else counted from the masks (1 GB/s)."""
        if self._supervised_column is not None:
            counts = self._supervised_column
            if len(bad := np.flatnonzero((counts < 0) | (counts > self.lengths))):
                raise DatasetError(f"{self.path}: n_supervised of row {bad[0]} is {counts[bad[0]]}, its length {self.lengths[bad[0]]}.")
            return counts
        counts = np.empty(len(self), np.int64)
        done = 0
        for masks, first, last in self._scan(self._masks):
            values = masks.between(int(masks.offsets[first]), int(masks.offsets[last]))
            if values.size and (values.max() > 1 or values.min() < 0):
                raise DatasetError(f"{self.path}: loss_mask holds {values.max()}; it must be 1 for supervised tokens and 0 elsewhere.")
            starts = masks.offsets[first:last] - masks.offsets[first]
            counts[done : done + last - first] = np.add.reduceat(values, starts, dtype=np.int64)
            done += last - first
        return counts

    def row(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids int32[t] and loss mask bool[t] of row ``i``."""
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {self.path}: there are {len(self)} rows.")
        chunk, row = self._place(np.asarray([i]))
        return self._ids[chunk[0]].slice(row[0]).astype(np.int32), self._masks[chunk[0]].slice(row[0]).astype(bool)

    def collate(
        self,
        sample_ids: np.ndarray,
        padded_length: int,
        pad_id: int = 0,
        max_length: int | None = None,
        epoch: int = 0,
        index: int = 0,
        bucket: int = 0,
    ) -> Batch:
        """Rows as one right-padded batch; rows longer than ``max_length`` are cut there.

        Raises:
            DatasetError: a row (after the cut) is longer than ``padded_length``.
            IndexError: no such row.
        """
        ids = np.asarray(sample_ids, np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            raise IndexError(f"rows {ids.min()}..{ids.max()} of {self.path}: there are {len(self)} rows.")
        lengths = self.lengths[ids] if max_length is None else np.minimum(self.lengths[ids], max_length)
        if len(over := np.flatnonzero(lengths > padded_length)):
            raise DatasetError(
                f"{self.path}: row {ids[over[0]]} has {lengths[over[0]]} tokens, more than the padded length {padded_length}."
            )
        tokens = np.full((len(ids), padded_length), pad_id, np.int32)
        mask = np.zeros((len(ids), padded_length), bool)
        for b, (chunk, row, length) in enumerate(zip(*(a.tolist() for a in (*self._place(ids), lengths)), strict=True)):
            tokens[b, :length] = self._ids[chunk].slice(row, length)
            mask[b, :length] = self._masks[chunk].slice(row, length)
        return Batch(epoch, index, bucket, padded_length, ids, lengths, tokens, mask)

    def fingerprint(self) -> dict:
        """What a resumed run must find unchanged: rows, tokens, bytes on disk, hashes of all lengths and of 64 rows, the tokenizer."""
        content = hashlib.sha256()
        for i in np.unique(np.linspace(0, len(self) - 1, 64).astype(int)):
            for values in self.row(i):
                content.update(values.tobytes())
        return {
            "rows": len(self),
            "tokens": int(self.lengths.sum()),
            "bytes": self.source_bytes,
            "lengths_sha256": hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest(),
            "content_sha256": content.hexdigest(),
            "tokenizer": self.tokenizer,
        }

    def check_vocabulary(self, vocab_size: int, mask_token_id: int | None = None) -> None:
        """Scan all ids (2 GB/s) and refuse one outside [0, vocab_size), or the drafter's mask token among the data.

        Raises:
            DatasetError: names the row and the id.
        """
        done = 0
        for ids, first, last in self._scan(self._ids):
            start, stop = int(ids.offsets[first]), int(ids.offsets[last])
            values = ids.between(start, stop)
            if values.size and (values.min() < 0 or values.max() >= vocab_size):
                where, reason = (
                    (values < 0) | (values >= vocab_size),
                    f"outside the target's vocabulary of {vocab_size}; was it tokenised for another model?",
                )
            elif mask_token_id is not None and (values == mask_token_id).any():
                where, reason = (
                    values == mask_token_id,
                    "the drafter's mask token, which must not occur in the data; choose another mask token.",
                )
            else:
                done += last - first
                continue
            place = int(np.flatnonzero(where)[0])
            row = done + int(np.searchsorted(ids.offsets[first:last] - start, place, side="right")) - 1
            raise DatasetError(f"{self.path}: row {row} holds token id {values[place]}, {reason}")

    def _place(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = ids + self._start
        chunk = np.searchsorted(self._first, rows, side="right") - 1
        return chunk, rows - self._first[chunk]

    def _scan(self, columns: tuple[_Lists, ...]) -> Iterator[tuple[_Lists, int, int]]:
        """Pieces of at most SCAN_ROWS rows of this split: (column, first row, last row) inside a record batch."""
        for lists, begin, end in zip(columns, self._first[:-1], self._first[1:], strict=True):
            low, high = max(begin, self._start) - begin, min(end, self._stop) - begin
            for first in range(low, high, SCAN_ROWS):
                yield lists, first, min(first + SCAN_ROWS, high)


def _check_columns(source: Source) -> tuple[str, ...]:
    """The columns to read, in the order input_ids, loss_mask, seq_len, n_supervised; missing or mistyped ones are refused."""
    schema = common_schema(source.files, ["input_ids", "loss_mask", "seq_len", "n_supervised"])
    for name in ("input_ids", "loss_mask"):
        if name not in schema.names:
            raise DatasetError(
                f"{source.files[0]} has no column {name!r} (it has {', '.join(schema.names)}). "
                f"Make both from chats or text: {PREPARE} SOURCE OUT --tokenizer NAME."
            )
    check_token_list(source.files[0], "input_ids", schema.field("input_ids").type)
    mask = schema.field("loss_mask").type
    if not (hasattr(mask, "value_type") and pa.types.is_boolean(mask.value_type)):
        check_token_list(source.files[0], "loss_mask", mask)
    numbers = [name for name in ("seq_len", "n_supervised") if name in schema.names]
    for name in numbers:
        if not pa.types.is_integer(schema.field(name).type):
            raise DatasetError(
                f"{source.files[0]}: column {name!r} has type {schema.field(name).type}; it must be integers. Cast or drop it."
            )
    return ("input_ids", "loss_mask", *numbers)


def _map_chunks(path: Path, columns: tuple[str, ...]) -> list[tuple]:
    """(ids, mask, seq_len, n_supervised) of every record batch that has rows, as views on memory-mapped buffers."""
    if file_kind(path) == "parquet":
        return _map_chunks(_plain_copy(path, columns), columns)
    chunks = []
    for batch in read_batches(path, columns):
        if batch.num_rows:
            named = dict(zip(batch.schema.names, batch.columns, strict=True))
            if not all(_is_mapped(named[name]) for name in ("input_ids", "loss_mask")):
                return _map_chunks(_plain_copy(path, columns), columns)
            numbers = [as_int64(named[n]) if n in named else None for n in ("seq_len", "n_supervised")]
            chunks.append((_lists(path, "input_ids", named["input_ids"]), _lists(path, "loss_mask", named["loss_mask"]), *numbers))
    return chunks


def _is_mapped(column: pa.Array) -> bool:
    """A mapped buffer is a slice of the file; a decompressed one owns its memory and has no parent."""
    return all(buffer.parent is not None for buffer in column.buffers() if buffer is not None and buffer.size)


def _lists(path: Path, name: str, column: pa.Array) -> _Lists:
    values = column.values
    if column.null_count or values.null_count:
        raise DatasetError(f"{path}: column {name!r} holds nulls. Drop those rows.")
    if pa.types.is_fixed_size_list(column.type):
        offsets = (np.arange(len(column) + 1) + column.offset) * column.type.list_size
    else:
        offsets = integers(column.offsets)
    if pa.types.is_boolean(values.type):
        return _Lists(offsets, np.frombuffer(values.buffers()[1] or b"", np.uint8), True, values.offset)
    return _Lists(offsets, integers(values), False, 0)


def _plain_copy(path: Path, columns: tuple[str, ...]) -> Path:
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


def _refuse_difference(source: Source, lengths: np.ndarray, others: np.ndarray, name: str) -> None:
    if len(bad := np.flatnonzero(lengths != others)):
        raise DatasetError(
            f"{source.path}: {len(bad):,} rows disagree; row {bad[0]} has {lengths[bad[0]]} input_ids, but {name} says {others[bad[0]]}. "
            f"Write {name} again{' or drop the column' if name == 'seq_len' else ''}."
        )


def _split_rows(source: Source, rows: int, withhold: int) -> slice:
    if not 0 <= withhold < rows:
        raise DatasetError(f"{source.path}: {withhold} rows cannot be withheld of {rows}; at least one must remain to train on.")
    cut = rows - withhold
    return slice(cut, rows) if source.split == "heldout" and withhold else slice(0, cut)
