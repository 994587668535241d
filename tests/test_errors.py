"""Every sentence that ends somebody's work says what is wrong, where, and what to do.

The sentences are read from the source: every call of an error class in the package, and what ``contradictions`` yields. *Where*
is a value put into the sentence (a path, a row, a parameter's value) or a parameter's name. *What to do* is one of the turns
below: something to do, or what is valid instead. A sentence that cannot have both stands in EXCEPTIONS with the reason; an entry
that no sentence needs any more fails.
"""

import ast
import logging
import re
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell

from dflash_nb.analysis.doctor import DoctorError
from dflash_nb.data.lengths import LengthError
from dflash_nb.data.source import DatasetError
from dflash_nb.errors import DiskError, NotFoundError, quiet_end
from dflash_nb.model.target_info import TargetError
from dflash_nb.pipeline.checkpoint import CheckpointError
from dflash_nb.pipeline.local import PlacementError
from dflash_nb.pipeline.parameters import ParameterError
from dflash_nb.pipeline.run import RunError
from dflash_nb.pipeline.window import WorkerError
from dflash_nb.planner.cost import CostError
from dflash_nb.planner.limits import BucketError
from dflash_nb.planner.options import PlanError

PACKAGE = Path(__file__).parent.parent / "dflash_nb"
NOT_FOR_USERS = {"IndexError", "TypeError", "InterruptedError", "KeyboardInterrupt", "StopIteration", "WorkerFailure"}

DO = (
    "add|call|cast|choose|continue|copy|correct|download|drop|export|fetch|fill|fit|give|install|"
    "keep|leave|look|lower|make|measure|name|plan|prepare|put|raise|read|remove|repair|replace|"
    "restore|resume|run|save|set|start|take|tokenise|train|truncate|try|use|wait|withhold|write"
)
VALID = r"must|needed|needs?\b|one of|at least|expected|known:|only .* supported|allowed|is none of|did you mean"
TO_DO = re.compile(rf"\b({DO})\b|{VALID}", re.IGNORECASE)

EXCEPTIONS: dict[str, str] = {
    # Carried by another sentence, which names the place and says what to do.
    "message {} has no": "prepare.py puts the record's place before it and --bad-records after it",
    "the chat template does not write": "as above",
    "the chat template refuses it": "as above",
    "bytes, {} were written": "newest_checkpoint falls back to an older one, or says how to start from step 0",
    "has other content than was written": "as above",
    "{}: {}: {}": "as above: a checkpoint's file that cannot be read",
    "the gradient's norm is {}": "step.py adds the loss, the samples and how to resume",
    "not a bucket plan": "BucketPlan.load puts the file before it and what to do after it",
    "{}: {}": "CostModel.load: the file and the sentence of from_json",
    "cannot be loaded with attention document by document": "padded_instead says what is done, or what to do with a run that packed",
    "tokens is longer than the window of": "the self-test names the target, WorkerError the batch and what to do",
    "token id {}, {}": "both reasons put in end with what to do",
    # Joined from sentences that are in the list themselves.
    "{}": "ParameterError of several parameters",
    # For the one who writes code against a room, never for one who runs a notebook or a command.
    "Thrift type {}": "a Parquet file that no known writer makes; the caller falls back to pyarrow",
    "anchor {} of row {} is outside": "a wrong call of collate_anchors",
    "cannot crop a context": "a wrong call of the decoder's cache",
    "a pool needs at least one worker": "a wrong construction; workers are checked in topology",
    "the pool is closed": "a call after close()",
    "the window was closed": "a call after close()",
    "is still computing {} s after": "a worker that hangs in foreign code; the run has ended",
}


def text_of(node: ast.expr, named: dict[str, str]) -> str:
    """The sentence that ``node`` builds, each value in it as ``{}``; one of the module's ``named`` texts follows its own."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, named) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.IfExp):
        return "{}" + text_of(node.value, named)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return "{}" + named.get(node.value.id, "")
    if isinstance(node, ast.BinOp):
        return text_of(node.left, named) + text_of(node.right, named)
    if isinstance(node, ast.IfExp):
        return text_of(node.body, named) + text_of(node.orelse, named)
    return "{}"


def error_classes() -> set[str]:
    """The package's own error classes, and the built-in ones that a user may meet."""
    own = {
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and any(re.search(r"Error$|Exception$", ast.unparse(base)) for base in node.bases)
    }
    return (own | {"ValueError", "RuntimeError", "FileNotFoundError", "FileExistsError", "FloatingPointError"}) - NOT_FOR_USERS


def sentences() -> list[tuple[str, str]]:
    """(place in the source, sentence) of each."""
    classes, found = error_classes(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
        named = {
            node.targets[0].id: text_of(node.value, {})
            for node in assigned
            if isinstance(node.value, ast.Constant | ast.JoinedStr | ast.IfExp)
        }
        said = [
            (node, node.args[0])
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes and node.args
        ]
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.name == "contradictions":
                said += [(node, node.value) for node in ast.walk(function) if isinstance(node, ast.Yield) and node.value]
        found += [(f"{path.relative_to(PACKAGE.parent)}:{node.lineno}", text_of(sentence, named)) for node, sentence in said]
    return found


def lacks(sentence: str) -> list[str]:
    """What ``sentence`` does not say: ``what``, ``where``, ``what to do``."""
    words = re.findall(r"[A-Za-z]{2,}", sentence.replace("{}", " "))
    missing = [] if len(words) >= 3 else ["what"]
    missing += [] if re.search(r"\{\}|\w_\w|'\w+'|^\w+: ", sentence) else ["where"]
    return missing + ([] if TO_DO.search(sentence) else ["what to do"])


def excused(sentence: str) -> str:
    """The entry of EXCEPTIONS that ``sentence`` falls under; one of values only counts when it is the whole sentence."""
    return next((part for part in EXCEPTIONS if (part in sentence if re.search("[a-z]", part) else part == sentence)), "")


@pytest.mark.parametrize(
    ("sentence", "missing"),
    [
        ("{}: column {} has type {}; it must be integers. Cast or drop it.", []),
        ("{} is empty", ["what", "what to do"]),
        ("the pool is closed", ["where", "what to do"]),
        ("{} asks for {} rotary positions; only plain ones are supported.", []),
    ],
)
def test_the_rule_itself(sentence, missing):
    assert lacks(sentence) == missing


@pytest.mark.parametrize(
    "error",
    [
        *(BucketError, CheckpointError, CostError, DatasetError, DiskError, DoctorError, LengthError),
        *(NotFoundError, ParameterError, PlacementError, PlanError, RunError, TargetError, WorkerError),
    ],
)
def test_a_notebook_shows_the_sentence_alone(error, capsys):
    shell = InteractiveShell.instance()
    shell.user_ns["error"] = error("data: row 3 is empty. Drop it.")
    shell.run_cell("raise error")
    assert capsys.readouterr().out.strip() == f"{error.__name__}: data: row 3 is empty. Drop it."


def test_a_kernel_that_papermill_ends_reports_no_error(caplog):
    """The interrupt that ends a kernel may meet it while it answers; tests/test_kernel.py interrupts a cell for real."""
    quiet_end()
    quiet_end()
    logger = logging.getLogger("IPKernelApp")
    logger.error("KeyboardInterrupt caught in kernel.")
    logger.error("Exception in message handler:")
    assert [record.getMessage() for record in caplog.records] == ["Exception in message handler:"]
    assert len(logger.filters) == 1


def test_sentences_are_found():
    found = sentences()
    assert len(found) > 200 and any("cut short" in sentence for _, sentence in found)
    assert {"LengthError", "ParameterError", "RunError", "TargetError"} <= error_classes()


def test_every_sentence_says_what_is_wrong_where_and_what_to_do():
    faults = [
        f"{place}: {sentence!r} does not say {' nor '.join(missing)}"
        for place, sentence in sentences()
        if (missing := lacks(sentence)) and not excused(sentence)
    ]
    assert not faults, "\n".join(faults)


def test_every_exception_is_needed():
    wanting = [sentence for _, sentence in sentences() if lacks(sentence)]
    assert not [part for part in EXCEPTIONS if not any(excused(sentence) == part for sentence in wanting)]
