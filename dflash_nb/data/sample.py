"""The embedded corpus: functions and methods of the running Python's own standard library, so nothing is downloaded.

A sample's prompt is the signature and docstring (for a method, the ``class`` line stands above it); its supervised part is
the body and an end token. Whole modules are held out by a hash of their name, so that a function is never judged by its
neighbours and the split stays the same from one Python version to the next. Python 3.11 to 3.13 give 12,892 to 15,189 samples, 2.5
million tokens with the largest; reading takes 2 s of one core and tokenising as long again.
"""

import ast
import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from dflash_nb.data.vocabulary import vocabulary_fingerprint
from dflash_nb.home import asset, cache_dir

FORMAT = 1
MAX_LENGTH = 4096
HELDOUT_PERCENT = 4.0
SPLIT_SEED = 269  # of 400 tried: 3.5 to 4.3 % of the functions of Python 3.11 to 3.13, from 33 or more modules, none over 14 % of the split
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "_bundled", "__pycache__"})
PAD, END, MASK, START = "<|pad|>", "<|end|>", "<|mask|>", "<|start|>"
SPECIAL_TOKENS = (PAD, END, MASK, START)

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.uint8()),
        "seq_len": pa.int32(),
        "n_supervised": pa.int32(),
        "source": pa.string(),
    }
)


@dataclass(frozen=True)
class Function:
    """One function as text. ``prompt + body`` is valid Python: ``body`` starts with the newline that ends the prompt."""

    module: str
    prompt: str
    body: str


def sample_target_path() -> Path:
    """The folder of the small target and its tokeniser that ship with the package."""
    return asset("sample_target")


def is_heldout(module: str) -> bool:
    """Whether a module belongs to the held-out split: a fixed share of the values of a hash of its name."""
    digest = hashlib.sha256(f"{SPLIT_SEED}:{module}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELDOUT_PERCENT / 100 * 2**32


def stdlib_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """``(module name, path)`` of every source file below ``folder`` in a fixed order, tests and installed packages left out."""
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and name.isidentifier())
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(root, name)
                parts = path.relative_to(folder).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def functions_in(source: str, module: str) -> Iterator[Function]:
    """Functions and methods of one module, outermost only, with the indentation of a function or of a method of a class.

    Left out: functions without a body beside the docstring, and those written on the line of their signature.
    Raises SyntaxError when ``source`` is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    lines = source.split("\n")
    for node, owner in _outermost_functions(tree, None):
        header_end = _header_end(node, lines)
        body = node.body
        if ast.get_docstring(node, clean=False) is not None:
            header_end = body[0].end_lineno
            body = body[1:]
        if not body or body[0].lineno <= header_end:
            continue
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        text = _shift(lines[first - 1 : node.end_lineno], node.col_offset, 0 if owner is None else 4)
        cut = header_end - first + 1
        prompt, rest = "\n".join(text[:cut]), "\n" + "\n".join(text[cut:])
        if owner is not None:
            prompt = f"{_class_line(owner)}\n{prompt}"
        yield Function(module, prompt, rest)


def read_functions(folder: Path | None = None) -> list[Function]:
    """Every distinct function of the standard library, in order of module and line.

    Of functions that read the same, the first is kept, whatever their classes. Files that are not valid Python are skipped.
    Raises FileNotFoundError where the standard library is installed without its sources.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    kept: dict[str, Function] = {}
    for module, path in stdlib_files(folder):
        try:
            source = path.read_text(encoding="utf-8").expandtabs(8)
            found = list(functions_in(source, module))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for function in found:
            signature_and_docstring = function.prompt.split("\n", 1)[-1] if function.prompt.startswith("class ") else function.prompt
            kept.setdefault(signature_and_docstring + function.body, function)
    if not kept:
        raise FileNotFoundError(
            f"no Python sources below {folder}: the sample corpus needs a Python whose standard library has its .py files"
        )
    return list(kept.values())


def _outermost_functions(
    node: ast.AST, owner: ast.ClassDef | None
) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, ast.ClassDef | None]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, owner
        elif isinstance(child, ast.ClassDef):
            yield from _outermost_functions(child, child)
        elif isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from _outermost_functions(child, owner)


def _shift(lines: list[str], indent: int, wanted: int) -> list[str]:
    """Move lines from one indentation to another, without trailing blanks. A line of a string that starts further left stays put."""
    blank = " " * indent
    return [(" " * wanted + line[indent:] if line.startswith(blank) else line).rstrip() for line in lines]


def _class_line(owner: ast.ClassDef) -> str:
    parents = [ast.unparse(parent) for parent in [*owner.bases, *owner.keywords]]
    return f"class {owner.name}({', '.join(parents)}):" if parents else f"class {owner.name}:"


def _header_end(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: list[str]) -> int:
    """Line of the colon that ends the signature. Past the last argument and annotation only brackets and comments stand before it."""
    arguments = node.args
    parts = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *arguments.defaults]
    parts += [part for part in [arguments.vararg, arguments.kwarg, node.returns, *arguments.kw_defaults] if part is not None]
    parts += getattr(node, "type_params", [])
    line, column = max([(part.end_lineno, part.end_col_offset) for part in parts], default=(node.lineno, node.col_offset))
    rest = lines[line - 1].encode()[column:].decode()
    while ":" not in rest.split("#")[0]:
        line += 1
        rest = lines[line - 1]
    return line


def ensure_sample(quiet: bool = False) -> Path:
    """The prepared dataset folder of the sample corpus; builds it on the first call and after a change of Python or tokeniser.

    It is written aside and renamed when whole. Of two processes that build at once, the first to finish wins and both use its folder.
    """
    stdlib = sysconfig.get_paths()["stdlib"]
    tokenizer = hashlib.sha256((sample_target_path() / "tokenizer.json").read_bytes()).hexdigest()
    identity = {"format": FORMAT, "python": sys.version, "stdlib": stdlib, "tokenizer": tokenizer}
    fingerprint = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]
    path = cache_dir() / f"sample-{fingerprint}"
    if (path / "dataset.json").is_file():
        return path
    started = time.perf_counter()
    if not quiet:
        print(f"building the sample corpus from the standard library of Python {platform.python_version()}", flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".sample-", dir=path.parent) as aside:
        built = Path(aside, path.name)
        rows = write_sample(built, read_functions(), sample_target_path())
        try:
            built.rename(path)
        except OSError:
            if not (path / "dataset.json").is_file():
                raise
    if not quiet:
        seconds = time.perf_counter() - started
        print(
            f"sample corpus: {rows['train']:,} functions to train on, {rows['heldout']:,} held out, {seconds:.1f} s, in {path}", flush=True
        )
    return path


def write_sample(folder: Path, functions: list[Function], tokenizer_folder: Path) -> dict[str, int]:
    """Tokenise ``functions`` into a prepared dataset folder. Returns the rows of each split; longer than MAX_LENGTH is left out."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    end_id = tokenizer.token_to_id(END)
    rows, too_long = {}, 0
    for split, heldout in (("train", False), ("heldout", True)):
        chosen = [function for function in functions if is_heldout(function.module) == heldout]
        prompts = _encode(tokenizer, (function.prompt for function in chosen))
        bodies = _encode(tokenizer, (function.body for function in chosen))
        keep = [i for i in range(len(chosen)) if len(prompts[i]) + len(bodies[i]) + 1 <= MAX_LENGTH]
        too_long += len(chosen) - len(keep)
        rows[split] = len(keep)
        ids = [np.concatenate([prompts[i], bodies[i], np.array([end_id], np.int32)]) for i in keep]
        n_supervised = np.array([len(bodies[i]) + 1 for i in keep], np.int32)
        _write_split(folder / split / "data-00000.arrow", ids, n_supervised, [chosen[i].module for i in keep])
    about = {
        "format": FORMAT,
        "tokenizer": {
            "name": "sample",
            "fingerprint": vocabulary_fingerprint(tokenizer.get_vocab()),
            "vocab_size": tokenizer.get_vocab_size(),
        },
        "source": f"functions and methods of the standard library of Python {platform.python_version()}",
        "rows": rows,
        "max_length": MAX_LENGTH,
        "too_long": {"policy": "drop", "rows": too_long},
        "created_with": {"python": platform.python_version(), "pyarrow": pa.__version__},
    }
    (folder / "dataset.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    return rows


def _encode(tokenizer: Tokenizer, texts: Iterable[str]) -> list[np.ndarray]:
    return [np.array(encoding.ids, np.int32) for encoding in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def _write_split(path: Path, ids: list[np.ndarray], n_supervised: np.ndarray, modules: list[str]) -> None:
    lengths = np.array([len(row) for row in ids], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int32)]).astype(np.int32)
    position = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    mask = (position >= np.repeat(lengths - n_supervised, lengths)).astype(np.uint8)
    table = pa.table(
        [
            pa.ListArray.from_arrays(offsets, np.concatenate([*ids, np.zeros(0, np.int32)])),
            pa.ListArray.from_arrays(offsets, mask),
            lengths,
            n_supervised,
            modules,
        ],
        schema=SCHEMA,
    )
    path.parent.mkdir(parents=True)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
        writer.write_table(table, max_chunksize=1024)
