"""Chats or text made into a dataset: tokens with a loss mask, ready to be memory-mapped.

    python -m dflash_nb.data.prepare chats.jsonl prepared --tokenizer smollm2 --heldout 500

Records are tokenised 512 at a time, so memory does not grow with the file. The held-out split is the last records of the *source*,
counted before anything is dropped: the same questions are held out whatever the tokenizer and the length limit, at the price that the
split may hold a few rows less than asked for.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from dflash_nb.data.chats import ChatError, Text, render_record
from dflash_nb.data.records import Record, count_records, read_records, record_files
from dflash_nb.data.source import DatasetError
from dflash_nb.data.vocabulary import vocabulary_fingerprint
from dflash_nb.home import asset, cache_dir, user_path, write_aside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK_RECORDS = 512
SECONDS_BETWEEN_LINES = 5.0
WARN_UNSUPERVISED_SHARE = 0.05
NO_LIMIT = 10**9  # transformers writes 1e30 where a tokenizer names no longest input
SCHEMA = pa.schema(
    {"input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.uint8()), "seq_len": pa.int32(), "n_supervised": pa.int32()}
)


@dataclass(frozen=True, eq=False)
class Sample:
    """Token ids int32[t] and loss mask uint8[t] made of one record."""

    record: Record
    ids: np.ndarray
    mask: np.ndarray


def prepare_chats(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    tokenizer: str,
    heldout: int | float = 500,
    max_length: int | None = None,
    too_long: str = "drop",
    bad_records: str = "error",
    overwrite: bool = False,
) -> Path:
    """Tokenise JSON lines into a dataset folder, which appears whole or not at all.

    Args:
        source: a ``.jsonl`` file or a folder of them; what a line may hold: ``chats.render_record``.
        out: the folder to make.
        tokenizer: ``sample``, ``smollm2``, a folder, or a Hugging Face name in the local cache. Its chat template renders chats and pairs.
        heldout: the last so many records, or the last share of them if below 1, become the held-out split; 0 for none.
        max_length: longest sample in tokens; by default what the tokenizer names as its model's longest input.
        too_long: what happens to longer ones: ``drop``, ``truncate`` or ``error``.
        bad_records: what happens to those that cannot be rendered: ``error`` or ``drop``.
        overwrite: replace a dataset that stands at ``out``.

    Raises:
        DatasetError: a broken line, an unusable record, nothing to train on; the message names file and line.
        FileNotFoundError, FileExistsError: no source or tokenizer, or ``out`` is there already.
        ValueError: an option that is not one of those above.
    """
    for name, value, allowed in (("too_long", too_long, ("drop", "truncate", "error")), ("bad_records", bad_records, ("error", "drop"))):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r}; choose one of {', '.join(allowed)}.")
    if max_length is not None and max_length < 1:
        raise ValueError(f"max_length is {max_length}; it must be at least 1 token.")
    folder, files = _free_folder(out, overwrite), record_files(source)
    n_records = count_records(files)
    first_heldout = n_records - _heldout_records(heldout, n_records, files[0])
    loaded = load_tokenizer(tokenizer)
    limit = max_length if max_length is not None else loaded.model_max_length if loaded.model_max_length < NO_LIMIT else None
    print(f"{n_records:,} records of {user_path(source)}, tokenizer {tokenizer}, longest sample {limit or 'not limited'}", flush=True)
    if not loaded.chat_template:
        print("The tokenizer has no chat template: prompt and answer are joined as they are.", flush=True)

    counts = Counter()
    with write_aside(folder) as aside:
        with _Writer(aside) as writer:
            for samples in _tokenized(read_records(files), n_records, loaded, bad_records, counts):
                fitting = list(_fit(samples, limit, too_long, counts))
                writer.write("train", [sample for sample in fitting if sample.record.index < first_heldout])
                writer.write("heldout", [sample for sample in fitting if sample.record.index >= first_heldout])
        description = {
            "format": 1,
            "tokenizer": _describe_tokenizer(tokenizer, loaded),
            "source": str(user_path(source)),
            "rows": {split: count["rows"] for split, count in writer.counts.items()},
            "tokens": {split: count["tokens"] for split, count in writer.counts.items()},
            "supervised_tokens": {split: count["supervised"] for split, count in writer.counts.items()},
            "unsupervised_rows": {split: count["unsupervised"] for split, count in writer.counts.items()},
            "records": n_records,
            "max_length": limit,
            "too_long": {"policy": too_long, "rows": counts["too long"]},
            "bad_records": counts["bad"],
            "warnings": _check(writer.counts, counts, user_path(source), first_heldout < n_records),
            "created_with": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("pyarrow", "transformers", "tokenizers")},
            },
        }
        (aside / "dataset.json").write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
    print(_summary(description), f"Written to {folder}", sep="\n", flush=True)
    return folder


def load_tokenizer(name: str) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of ``sample``, ``smollm2``, a folder, or a Hugging Face name in the local cache.

    Raises:
        FileNotFoundError: it is not there.
        DatasetError: it is a slow tokenizer, which cannot say where in the text a token stands.
    """
    from transformers import AutoTokenizer

    folder = {"sample": asset("sample_target"), "smollm2": cache_dir() / "smollm2"}.get(name, user_path(name))
    if name == "smollm2" and not folder.is_dir():
        raise FileNotFoundError(f"tokenizer 'smollm2': {folder} does not exist. Fetch it once with: make smollm2")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if folder.is_dir() else name, local_files_only=True)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"tokenizer {name!r}: neither {folder} nor the local Hugging Face cache holds one. "
            f"Name a folder with tokenizer.json, or download it first: hf download {name}"
        ) from error
    if not tokenizer.is_fast:
        raise DatasetError(f"tokenizer {name!r} has no tokenizer.json; a fast tokenizer is needed to find the supervised tokens.")
    return tokenizer


def tokenize(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[Text]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids int32 and loss mask uint8 of each text; a token is supervised if it begins in a supervised span.

    A chat's template has written its special tokens; other text gets the tokenizer's begin token, if it uses one, and its end token.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    begin = [i for i in backend.encode("", add_special_tokens=True).ids if i == tokenizer.bos_token_id]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    for text, encoding in zip(texts, backend.encode_batch([text.text for text in texts], add_special_tokens=False), strict=True):
        ids = np.array(encoding.ids, np.int32)
        begins = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]
        edges = np.array(text.spans, np.int64).ravel()
        mask = (np.searchsorted(edges, begins, side="right") % 2).astype(np.uint8)
        if not text.is_chat:
            ids = np.concatenate([begin, ids, end]).astype(np.int32)
            mask = np.concatenate([np.zeros(len(begin)), mask, np.ones(len(end))]).astype(np.uint8)
        yield ids, mask


def _tokenized(
    records: Iterable[Record], n_records: int, tokenizer: "PreTrainedTokenizerFast", bad_records: str, counts: Counter
) -> Iterator[list[Sample]]:
    """Samples of a chunk of records at a time; prints a line now and then."""
    special = {*tokenizer.all_special_tokens, *(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)}

    def render(messages: list[dict], tools: list | None) -> str:
        return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)

    started = said = time.monotonic()
    records = iter(records)
    while chunk := list(islice(records, CHUNK_RECORDS)):
        rendered = []
        for record in chunk:
            try:
                rendered.append((record, render_record(record.content, render if tokenizer.chat_template else None, sorted(special))))
            except ChatError as error:
                counts["bad"] += 1
                if bad_records == "error":
                    raise DatasetError(f"{record.place}: {error}. Correct it, or leave such records out with --bad-records drop.") from None
        encoded = tokenize(tokenizer, [text for _, text in rendered])
        samples = [Sample(record, ids, mask) for (record, _), (ids, mask) in zip(rendered, encoded, strict=True)]
        yield samples
        counts["tokens"] += sum(len(sample.ids) for sample in samples)
        done, now = chunk[-1].index + 1, time.monotonic()
        if now - said > SECONDS_BETWEEN_LINES:
            said, rate = now, counts["tokens"] / (now - started)
            print(
                f"{done:,} of {n_records:,} records, {rate:,.0f} tokens/s, {(now - started) * (n_records / done - 1):,.0f} s to go",
                flush=True,
            )


def _fit(samples: list[Sample], limit: int | None, too_long: str, counts: Counter) -> Iterator[Sample]:
    for sample in samples:
        if limit is not None and len(sample.ids) > limit:
            counts["too long"] += 1
            if too_long == "error":
                raise DatasetError(f"{sample.record.place}: {len(sample.ids)} tokens, more than {limit}. Drop or truncate such records.")
            if too_long == "drop":
                continue
            sample = replace(sample, ids=sample.ids[:limit], mask=sample.mask[:limit])
        if len(sample.ids):
            yield sample


class _Writer:
    """Splits of a dataset folder as Arrow files, and counts of what went into each."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.files: dict[str, pa.ipc.RecordBatchFileWriter] = {}
        self.counts = {"train": Counter(), "heldout": Counter()}

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.files.values():
            file.close()

    def write(self, split: str, samples: list[Sample]) -> None:
        if not samples:
            return
        if split not in self.files:
            (self.folder / split).mkdir(parents=True)
            self.files[split] = pa.ipc.new_file(self.folder / split / "data-00000.arrow", SCHEMA)
        lengths = np.array([len(sample.ids) for sample in samples], np.int32)
        supervised = np.array([sample.mask.sum() for sample in samples], np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = pa.ListArray.from_arrays(offsets, np.concatenate([sample.ids for sample in samples]))
        masks = pa.ListArray.from_arrays(offsets, np.concatenate([sample.mask for sample in samples]))
        self.files[split].write_batch(pa.record_batch([ids, masks, lengths, supervised], schema=SCHEMA))
        self.counts[split].update(
            rows=len(samples), tokens=int(lengths.sum()), supervised=int(supervised.sum()), unsupervised=int((supervised == 0).sum())
        )


def _free_folder(out: str | os.PathLike[str], overwrite: bool) -> Path:
    folder = user_path(out)
    if folder.exists():
        if not overwrite:
            raise FileExistsError(f"{folder} exists. Name another folder, or replace it with --overwrite.")
        if not (folder / "dataset.json").is_file():
            raise FileExistsError(f"{folder} exists and is no prepared dataset; it is not overwritten. Name another folder.")
    return folder


def _heldout_records(heldout: int | float, n_records: int, path: Path) -> int:
    if n_records == 0:
        raise DatasetError(f"{path} holds no records.")
    if isinstance(heldout, bool) or heldout < 0 or (heldout >= 1 and heldout != int(heldout)):
        raise ValueError(f"heldout is {heldout!r}; give a number of records, or a share below 1.")
    count = int(heldout) if heldout >= 1 or heldout == 0 else max(1, round(heldout * n_records))
    if count >= n_records:
        raise DatasetError(f"{count} records cannot be held out of {n_records}; at least one must remain to train on.")
    return count


def _check(splits: dict[str, Counter], counts: Counter, source: Path, wants_heldout: bool) -> list[str]:
    """Warnings about what was written; refuses a dataset that cannot be trained on."""
    for split in ("train", "heldout") if wants_heldout else ("train",):
        if not splits[split]["rows"]:
            raise DatasetError(
                f"{source}: no row is left for {split}; {counts['too long']:,} records were too long, {counts['bad']:,} unusable."
            )
        if not splits[split]["supervised"]:
            raise DatasetError(f"{source}: no row of {split} has a supervised token. Does each chat hold an assistant's turn?")
    rows, unsupervised = (sum(count[name] for count in splits.values()) for name in ("rows", "unsupervised"))
    if unsupervised > WARN_UNSUPERVISED_SHARE * rows:
        return [f"{unsupervised:,} of {rows:,} rows ({unsupervised / rows:.1%}) have no supervised token and teach nothing"]
    return []


def _describe_tokenizer(name: str, tokenizer: "PreTrainedTokenizerFast") -> dict:
    ids = tokenizer.get_vocab()
    special = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    return {"name": name, "fingerprint": vocabulary_fingerprint(ids), "vocab_size": max(ids.values()) + 1, "special_ids": special}


def _summary(description: dict) -> str:
    lines = []
    for split, rows in description["rows"].items():
        if rows:
            tokens, supervised = description["tokens"][split], description["supervised_tokens"][split]
            lines.append(f"{split}: {rows:,} rows, {tokens:,} tokens, {tokens / rows:.0f} a row, {supervised / tokens:.1%} supervised")
    if description["too_long"]["rows"]:
        done = {"drop": "dropped", "truncate": "truncated"}[description["too_long"]["policy"]]
        lines.append(f"{description['too_long']['rows']:,} records longer than {description['max_length']:,} tokens were {done}")
    if description["bad_records"]:
        lines.append(f"{description['bad_records']:,} records could not be rendered and were dropped")
    return "\n".join(lines + [f"Warning: {warning}" for warning in description["warnings"]])


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_nb.data.prepare", description="Make chats or text into a dataset to train on.")
    parser.add_argument(
        "source", help=".jsonl file or folder: messages, conversations, question and answer, prompt and completion, or text"
    )
    parser.add_argument("out", help="dataset folder to make")
    parser.add_argument(
        "--tokenizer", required=True, help="the target's: sample, smollm2, a folder, or a Hugging Face name in the local cache"
    )
    parser.add_argument("--heldout", type=_number, default=500, help="last records to hold out, or a share such as 0.02 (default: 500)")
    parser.add_argument("--max-length", type=int, help="longest sample in tokens (default: what the tokenizer names)")
    parser.add_argument(
        "--too-long", default="drop", choices=("drop", "truncate", "error"), help="what happens to longer ones (default: drop)"
    )
    parser.add_argument(
        "--bad-records", default="error", choices=("error", "drop"), help="records that cannot be rendered (default: error)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a dataset that stands at OUT")
    try:
        prepare_chats(**vars(parser.parse_args(arguments)))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
