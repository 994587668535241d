"""Chats or text made into a dataset: tokens with a loss mask, ready to be memory-mapped.

    python -m dflash_nb.data.prepare chats.jsonl prepared --tokenizer smollm2 --heldout 500

Records are tokenised 512 at a time, so memory does not grow with the file. The held-out split is the last records of the *source*,
counted before anything is dropped: the same questions are held out whatever the tokenizer and the length limit, at the price that the
split may hold a few rows less than asked for.
"""

import argparse
import json
import math
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

from dflash_nb.data.chats import ChatError, render_record
from dflash_nb.data.records import Record, count_records, read_records, record_files
from dflash_nb.data.source import DatasetError
from dflash_nb.data.tokenization import chat_renderer, describe_tokenizer, load_tokenizer, longest_input, special_tokens, tokenize
from dflash_nb.data.writer import DatasetWriter, free_folder
from dflash_nb.home import user_path, write_aside
from dflash_nb.progress import SECONDS_BETWEEN_LINES, clock

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHUNK_RECORDS = 512
WARN_UNSUPERVISED_SHARE = 0.05


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
    folder, files = free_folder(out, overwrite), record_files(source)
    n_records = count_records(files)
    first_heldout = n_records - _heldout_records(heldout, n_records, files[0])
    loaded = load_tokenizer(tokenizer)
    limit = max_length or longest_input(loaded)
    print(f"{n_records:,} records of {user_path(source)}, tokenizer {tokenizer}, longest sample {limit or 'not limited'}", flush=True)
    if not loaded.chat_template:
        print("The tokenizer has no chat template: prompt and answer are joined as they are.", flush=True)

    counts = Counter()
    with write_aside(folder) as aside:
        with DatasetWriter(aside, with_source=_names_sources(read_records(files))) as writer:
            for samples in _tokenized(read_records(files), n_records, loaded, bad_records, counts):
                fitting = list(_fit(samples, limit, too_long, counts))
                for split, heldout_part in (("train", False), ("heldout", True)):
                    chosen = [sample for sample in fitting if (sample.record.index >= first_heldout) == heldout_part]
                    sources = [str(sample.record.content.get("source", "unknown")) for sample in chosen]
                    writer.write(split, [(sample.ids, sample.mask) for sample in chosen], sources)
        description = {
            "format": 1,
            "tokenizer": describe_tokenizer(tokenizer, loaded),
            "source": str(user_path(source)),
            **writer.description,
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


def _names_sources(records: Iterable[Record]) -> bool:
    """Whether the first usable record says where it comes from; the others then do too, or count as unknown."""
    first = next((record.content for record in records if not record.fault), {})
    return isinstance(first.get("source"), str)


def _tokenized(
    records: Iterable[Record], n_records: int, tokenizer: "PreTrainedTokenizerFast", bad_records: str, counts: Counter
) -> Iterator[list[Sample]]:
    """Samples of a chunk of records at a time; prints a line now and then."""
    render, special = chat_renderer(tokenizer), special_tokens(tokenizer)

    def refuse(record: Record, reason: object) -> None:
        counts["bad"] += 1
        if bad_records == "error":
            raise DatasetError(f"{record.place}: {reason}. Correct it, or leave such records out with --bad-records drop.")

    started = said = time.monotonic()
    records = iter(records)
    while chunk := list(islice(records, CHUNK_RECORDS)):
        rendered, samples = [], []
        for record in chunk:
            try:
                if record.fault:
                    raise ChatError(record.fault)
                rendered.append((record, render_record(record.content, render, special)))
            except ChatError as error:
                refuse(record, error)
        for (record, _), (ids, mask) in zip(rendered, tokenize(tokenizer, [text for _, text in rendered]), strict=True):
            if len(ids):
                samples.append(Sample(record, ids, mask))
            else:
                refuse(record, "it holds no token")
        yield samples
        counts["tokens"] += sum(len(sample.ids) for sample in samples)
        done, now = chunk[-1].index + 1, time.monotonic()
        if now - said > SECONDS_BETWEEN_LINES:
            said, rate = now, counts["tokens"] / (now - started)
            print(
                f"preparing records: {done:,} of {n_records:,}, {rate:,.0f} tokens/s, "
                f"ETA {clock((now - started) * (n_records / done - 1))}",
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
        yield sample


def _heldout_records(heldout: int | float, n_records: int, path: Path) -> int:
    if n_records == 0:
        raise DatasetError(f"{path} holds no records. Name a file with one JSON object a line.")
    if isinstance(heldout, bool) or not 0 <= heldout < math.inf or (heldout >= 1 and heldout != int(heldout)):
        raise ValueError(f"heldout is {heldout!r}; give a number of records, or a share below 1.")
    count = int(heldout) if heldout >= 1 or heldout == 0 else max(1, round(heldout * n_records))
    if count >= n_records:
        raise DatasetError(
            f"{count} records cannot be held out of {n_records}; at least one must remain to train on. "
            f"Ask for fewer, for example --heldout {max(1, n_records // 20)}."
        )
    return count


def _check(splits: dict[str, Counter], counts: Counter, source: Path, wants_heldout: bool) -> list[str]:
    """Warnings about what was written; refuses a dataset that cannot be trained on."""
    for split in ("train", "heldout") if wants_heldout else ("train",):
        if not splits[split]["rows"]:
            raise DatasetError(
                f"{source}: no row is left for {split}; {counts['too long']:,} records were too long, {counts['bad']:,} unusable. "
                "Raise max_length, or correct the records."
            )
        if not splits[split]["supervised"]:
            raise DatasetError(
                f"{source}: no row of {split} has a supervised token. Give chats with an assistant's turn, or raise max_length."
            )
    rows, unsupervised = (sum(count[name] for count in splits.values()) for name in ("rows", "unsupervised"))
    if unsupervised > WARN_UNSUPERVISED_SHARE * rows:
        return [f"{unsupervised:,} of {rows:,} rows ({unsupervised / rows:.1%}) have no supervised token and teach nothing"]
    return []


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
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} was given; give a number of records, or a share below 1") from None
    return int(value) if value.is_integer() else value


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
