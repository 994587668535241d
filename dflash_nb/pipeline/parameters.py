"""From a notebook's parameters cell to a checked, frozen dataclass; one mechanism for all five notebooks.

papermill warns about a parameter it does not know and runs on with the defaults, turns ``-p x true`` into the text ``'true'``
(truthy, like ``'false'``), and hands ``1e2`` over as a float. So nothing from the cell is trusted: names are compared with the
dataclass fields, values with the field's kind, range and choices, and every problem found is named in one error.
Checking fifty fields costs under a millisecond; it happens before anything is loaded.
"""

import ast
import difflib
import math
import numbers
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Self, TypeVar, get_args, get_origin

from dflash_nb.errors import NotFoundError, PlainError, quiet_end
from dflash_nb.home import exists, user_path

PLAIN = (str, int, float, bool, list, tuple, dict, type(None))
# What other trainers call them.
ALIASES = {
    "lr": "learning_rate", "bs": "max_batch", "batch_size": "max_batch", "max_tokens": "token_budget", "wd": "weight_decay",
    "gradient_accumulation_steps": "accumulation", "grad_accum": "accumulation", "max_grad_norm": "grad_clip", "clip": "grad_clip",
    "num_epochs": "epochs", "num_train_epochs": "epochs", "warmup_steps": "warmup", "warmup_ratio": "warmup", "scheduler": "decay",
    "lr_scheduler_type": "decay", "model": "target", "data": "dataset", "num_layers": "draft_layers", "output_dir": "runs_dir",
    "resume_from_checkpoint": "resume", "report_to": "tracker", "seq_len": "max_length", "max_seq_length": "max_length",
}  # fmt: skip
NEAREST, FEW = 3, 15  # names to suggest; names that may all be listed
MOST_SHOWN = 200  # characters of a value
LARGEST = 2**31 - 1  # of a whole number that has no other limit
INJECTED = "# Parameters\n"  # how papermill's cell begins
INTERACTIVE_NAMES = frozenset({"In", "Out", "exit", "quit"})


class ParameterError(PlainError, ValueError):
    """One or more parameters cannot be used. The text names each one, the value given and what is allowed."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    listed: bool = False,
    path: str = "",
    names: tuple[str, ...] = (),
    form: tuple[Callable[[str], object], str] | None = None,
) -> Any:
    """A dataclass field with its help sentence and what it may hold.

    ``listed``: a text field that also takes a list and stores it as comma-separated text.
    ``path``: ``"always"`` makes the text an absolute path, ``"existing"`` only when something exists there; ``names`` and the
    empty text stay as they are. ``form``: whether a text can be one, and the words for what it must be.
    """
    limits = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {"help": help, "choices": choices, "limits": limits, "listed": listed, "path": path, "names": names, "form": form}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Parameters:
    """Base of a notebook's configuration: every field is checked on construction, whether it comes from a notebook or from code.

    ``given``: names that papermill's ``-p`` set, also to what they are anyway.
    """

    given: ClassVar[frozenset[str]] = frozenset()

    def __post_init__(self) -> None:
        problems = []
        for each in fields(self):
            try:
                object.__setattr__(self, each.name, checked(each, getattr(self, each.name)))
            except ParameterError as problem:
                problems.append(str(problem))
        if problems := problems or list(self.contradictions()):
            raise ParameterError("\n".join(problems))

    def contradictions(self) -> Iterable[str]:
        """Sentences about fields that are fine alone and not together."""
        return ()

    @classmethod
    def from_notebook(cls, namespace: Mapping[str, Any]) -> Self:
        """The configuration that a notebook's ``globals()`` hold: the parameters cell plus what papermill injected."""
        quiet_end()
        return check_parameters(cls, namespace)


P = TypeVar("P", bound=Parameters)


def check_parameters(cls: type[P], namespace: Mapping[str, Any]) -> P:
    """Make ``cls`` from the plain values in ``namespace``; fields that it does not hold keep their defaults.

    Raises ParameterError naming every unknown name (with the nearest valid one) or every unusable value.
    """
    valid = [each.name for each in fields(cls)]
    unknown = [name for name in given_names(namespace) if name not in valid]
    if unknown:
        lines = [f"unknown parameter {name!r} (given {namespace[name]!r}){_nearest(name, valid, NEAREST)}" for name in unknown]
        rest = f"known: {', '.join(valid)}" if len(valid) <= FEW else "papermill --help-notebook lists them all"
        raise ParameterError("\n".join([*lines, f"Correct or leave out what is unknown; {rest}"]))
    found = cls(**{name: namespace[name] for name in valid if name in namespace})
    object.__setattr__(found, "given", injected_names(namespace))
    return found


def given_names(namespace: Mapping[str, Any]) -> list[str]:
    """Public names in ``namespace`` that hold plain values.

    In an interactive session only names set by cells of literal assignments count (the parameters cell and the injected one),
    so that the configuration cell can be run again after later cells have left results behind.
    """
    names = [
        name for name, value in namespace.items() if not name.startswith("_") and name not in INTERACTIVE_NAMES and isinstance(value, PLAIN)
    ]
    if isinstance(cells := namespace.get("In"), list):
        literal = set().union(*(_literal_names(cell) for cell in cells))
        names = [name for name in names if name in literal]
    return names


def injected_names(namespace: Mapping[str, Any]) -> frozenset[str]:
    """Names that papermill's own cell set; none outside a notebook that papermill runs."""
    cells = namespace.get("In")
    injected = [cell for cell in cells if cell.startswith(INJECTED)] if isinstance(cells, list) else []
    return frozenset().union(*map(_literal_names, injected))


def _literal_names(cell: str) -> set[str]:
    """Names assigned by a cell that holds nothing but assignments of literals; empty for any other cell."""
    names = set()
    try:
        for statement in ast.parse(cell).body:
            targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
            if not isinstance(statement, ast.Assign | ast.AnnAssign) or not all(isinstance(t, ast.Name) for t in targets):
                return set()
            ast.literal_eval(statement.value)
            names.update(target.id for target in targets)
    except (SyntaxError, ValueError, TypeError):
        return set()
    return names


def _nearest(name: str, valid: list[str], most: int = 1) -> str:
    """The question whether one of the ``most`` nearest names was meant; those much further off than the first are left out."""
    plain, named = name.lower().replace("-", "_"), {each.lower(): each for each in valid}
    near = [ALIASES[plain]] if ALIASES.get(plain) in valid else difflib.get_close_matches(plain, named, n=most, cutoff=0.5)
    close = [difflib.SequenceMatcher(None, plain, each).ratio() for each in near]
    words = [repr(named[each]) for each, ratio in zip(near, close, strict=True) if ratio > close[0] - 0.2]
    return f": did you mean {' or '.join(words)}?" if words else ""


def checked(each: Field, value: Any) -> Any:
    """``value`` in the kind of ``each``, inside its range and choices. Raises ParameterError."""
    if get_origin(each.type) is tuple:
        kind = get_args(each.type)[0]
        return tuple(_inside(each, _convert(each, kind, item), value) for item in _items(value))
    return _inside(each, _convert(each, each.type, value), value)


def _items(value: Any) -> list[Any]:
    """The items of a list however it was typed: a list, ``"a,b"``, ``"[a, b]"`` or a single value."""
    if isinstance(value, str):
        return [item.strip().strip("'\"") for item in value.strip().strip("[]()").split(",") if item.strip()]
    return list(value) if isinstance(value, list | tuple) else [value]


def _convert(each: Field, kind: type, value: Any) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise _refused(each, value, f"use True or False, for example -p {each.name} True")
    if value is None or isinstance(value, bool):
        raise _refused(each, value, "leave the parameter out to get its default")
    if kind is str:
        return _text(each, value)
    if isinstance(value, str) and get_origin(each.type) is tuple:
        value = _number(value)
    if not isinstance(value, numbers.Real) or not _finite(value):
        raise _refused(each, value)
    if kind is int and value != int(value):
        raise _refused(each, value)
    if kind is int and value > LARGEST and each.metadata["limits"]["at_most"] is each.metadata["limits"]["below"] is None:
        raise _refused(each, value, f"give at most {LARGEST:,}")
    return kind(value)


def _finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _text(each: Field, value: Any) -> str:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if each.metadata["listed"] and (isinstance(value, list | tuple) or str(value).strip().startswith("[")):
        if any(isinstance(item, list | tuple | dict) for item in _items(value)):
            raise _refused(each, value, "give one list without others in it")
        return ",".join(str(item) for item in _items(value))
    if not isinstance(value, str | numbers.Real):
        raise _refused(each, value)
    text = str(value).strip()
    always, wanted = each.metadata["path"] == "always", each.metadata["path"]
    if text and text not in each.metadata["names"] and wanted and (always or text[0] in "./~" or exists(text)):
        try:
            return str(user_path(text))
        except NotFoundError as problem:
            raise ParameterError(f"{each.name}: {problem}") from None
    return text


def _inside(each: Field, value: Any, given: Any) -> Any:
    limits, form = each.metadata["limits"], each.metadata["form"]
    if form and not form[0](value):
        raise _refused(each, value)
    outside = (
        (each.metadata["choices"] and value not in each.metadata["choices"])
        or (limits["at_least"] is not None and value < limits["at_least"])
        or (limits["above"] is not None and value <= limits["above"])
        or (limits["at_most"] is not None and value > limits["at_most"])
        or (limits["below"] is not None and value >= limits["below"])
    )
    if outside:
        near = _nearest(str(value), list(each.metadata["choices"]))
        raise _refused(each, given, near.lstrip(": "))
    return value


def allowed(each: Field) -> str:
    """What a field may hold, in words: ``a whole number, at least 1``."""
    listed = get_origin(each.type) is tuple
    kind = get_args(each.type)[0] if listed else each.type
    if each.metadata["form"]:
        words = [each.metadata["form"][1]]
    elif each.metadata["choices"]:
        words = ["one of " + ", ".join(each.metadata["choices"])]
    else:
        words = [{str: "text", int: "a whole number", float: "a number", bool: "True or False"}[kind]]
    words += [
        f"{name.replace('_', ' ')} {limit if isinstance(limit, int) else format(limit, 'g')}"
        for name, limit in each.metadata["limits"].items()
        if limit is not None
    ]
    return ("a list, each item " if listed else "") + ", ".join(words)


def _refused(each: Field, given: Any, advice: str = "") -> ParameterError:
    kind = "text " if isinstance(given, str) and given else ""
    try:
        shown = reprlib.repr(given) if isinstance(given, int) else repr(given)
    except ValueError:  # Python does not spell out a whole number of thousands of digits
        shown = "a number of thousands of digits"
    shown = shown if len(shown) <= MOST_SHOWN else f"{shown[: MOST_SHOWN // 2]}... ({len(shown):,} characters)"
    return ParameterError(f"{each.name}: {kind}{shown} was given, needed: {allowed(each)}{'; ' + advice if advice else ''}")
