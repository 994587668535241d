"""The five notebooks: thin and clean as committed, and executed by papermill as people run them.

Where a check comes from: nteract/papermill 251, 856, 864, 807, 818; jupyter/nbconvert 1993; nbstripout 85.
"""

import ast
import json
import re
from pathlib import Path

import nbformat
import pytest
from papermill.inspection import inspect_notebook

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.ipynb"))
NAMES = ["00_length_distribution", "01_bucket_optimization", "02_padding_simulation", "03_train", "04_loss_diagnosis"]
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def parameters_cell(path):
    [cell] = [c for c in code_cells(path) if "parameters" in c.metadata.get("tags", [])]
    return cell


def test_there_are_five():
    assert [p.stem for p in NOTEBOOKS] == NAMES


@each
def test_source_is_clean(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["kernelspec"] == {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    assert notebook["metadata"]["language_info"]["name"] == "python"
    assert "papermill" not in notebook["metadata"] and "widgets" not in notebook["metadata"]
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
        assert "injected-parameters" not in cell["metadata"].get("tags", [])


@each
def test_cells_are_windows_on_the_package(path):
    for cell in code_cells(path):
        tree = ast.parse(cell.source)
        banned = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.For, ast.While, ast.Try, ast.Await)
        found = [node for node in ast.walk(tree) if isinstance(node, banned)]
        assert not found, f"a notebook only calls: {ast.unparse(found[0])[:80]}"
        is_parameters = "parameters" in cell.metadata.get("tags", [])
        assert is_parameters or len(cell.source.splitlines()) <= 15
        assert not re.search(r"sys\.path|os\.chdir|%autoreload|!pip|asyncio|threading|multiprocessing|plt\.|ipywidgets", cell.source)


@each
def test_prose_holds_no_measured_number(path):
    """Numbers that code did not print go stale. Names (Qwen3.6, step-5), shares of a rule and code spans are not results."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type != "markdown":
            continue
        text = re.sub(r"```.*?```|`[^`]*`", "", cell.source, flags=re.S)
        assert not re.search(r"\d+(\.\d+)?\s*(%|Ktok/s|tokens/s|ms\b|GB\b|MB\b)", text), text


@each
def test_parameters_are_literals_that_papermill_sees(path):
    tree = ast.parse(parameters_cell(path).source)
    names = []
    for node in tree.body:
        assert isinstance(node, ast.AnnAssign), "annotate every parameter"
        assert node.annotation.id in {"str", "int", "float", "bool", "list"}
        ast.literal_eval(node.value)
        names.append(node.target.id)
    seen = inspect_notebook(str(path))
    assert list(seen) == names
    assert all(entry["help"] for entry in seen.values()), "every parameter has a help text on its line"


@each
def test_ends_where_it_says_it_may_be_run_from(path):
    first = nbformat.read(path, as_version=4).cells[0].source
    assert first.startswith("# ") and "?" in first.splitlines()[0]
    assert f"papermill notebooks/{path.name}" in first
