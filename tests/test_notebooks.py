"""The five notebooks: thin and clean as committed, and executed by papermill as people run them.

Where a check comes from: nteract/papermill 251, 856, 864, 807, 818; jupyter/nbconvert 1993; nbstripout 85.
"""

import ast
import json
import re
import subprocess
import sys
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


# Executed as people execute them: small parameters, three places to start from, real results on disk.

TINY_RUN = {"max_steps": 4, "eval_prompts": 1, "eval_tokens": 8, "eval_rows": 4, "log_every": 0.5, "anchors": 4, "token_budget": 4096}
TINY_PLAN = {"seeds": [0], "strategies": ["bucketed", "sorted", "random"]}


def execute(name: str, folder: Path, start: Path, **parameters):
    """The executed notebook, run by papermill in a process that stands in ``start``, as from a shell."""
    out = folder / f"{name}.ipynb"
    command = [sys.executable, "-m", "papermill", str(ROOT / "notebooks" / f"{name}.ipynb"), str(out), "--no-progress-bar"]
    command += ["-y", json.dumps(parameters)]
    done = subprocess.run(command, cwd=start, capture_output=True, text=True, timeout=280)
    return done, nbformat.read(out, as_version=4) if done.returncode == 0 else None


def check_outputs(notebook, fewest_pictures: int) -> None:
    """Pictures with alternative text, nothing on stderr, no widget, no carriage return, small enough to keep."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= fewest_pictures
    for picture in pictures:
        alt = picture.metadata["image/png"]["alt"]
        assert len(alt) >= 40 and re.search(r"\d", alt), alt
    text = nbformat.writes(notebook)
    assert "widget-view+json" not in text and "TqdmWarning" not in text
    assert not any("\r" in output.text for output in outputs if output.output_type == "stream")
    assert len(text) < 2_000_000


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return {"root": ROOT, "notebooks": ROOT / "notebooks", "elsewhere": tmp_path_factory.mktemp("elsewhere")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, places):
    """Notebook 03 executed from ``notebooks/`` and from an unrelated folder."""
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for place in ("notebooks", "elsewhere"):
        done, notebook = execute("03_train", folder, places[place], runs_dir=str(folder), run_name=place, **TINY_RUN)
        assert done.returncode == 0, done.stderr[-3000:]
        made[place] = (folder / place, notebook)
    return made


@pytest.mark.parametrize(
    ("name", "place", "parameters", "pictures"),
    [
        ("00_length_distribution", "root", {}, 5),
        ("00_length_distribution", "elsewhere", {"dataset": "reference", "max_length": 4096}, 5),
        ("01_bucket_optimization", "notebooks", {"most_buckets": 16}, 6),
        ("02_padding_simulation", "elsewhere", TINY_PLAN, 6),
    ],
)
def test_planning_notebooks(tmp_path, places, name, place, parameters, pictures):
    if name.startswith("01"):
        parameters = parameters | {"save_to": str(tmp_path / "buckets.json")}
    done, notebook = execute(name, tmp_path, places[place], **parameters)
    assert done.returncode == 0, done.stderr[-3000:]
    check_outputs(notebook, pictures)
    assert not name.startswith("01") or json.loads((tmp_path / "buckets.json").read_text())["boundaries"][0] == 0


def test_training_is_the_same_from_anywhere(runs):
    plans = [json.loads((folder / "plan.json").read_text()) for folder, _ in runs.values()]
    assert plans[0] == plans[1]
    losses = [[json.loads(line)["loss"] for line in (folder / "steps.jsonl").read_text().splitlines()] for folder, _ in runs.values()]
    assert losses[0] == losses[1] and len(losses[0]) == TINY_RUN["max_steps"]
    for folder, notebook in runs.values():
        check_outputs(notebook, 5)
        assert (folder / "export" / "model.safetensors").is_file() and json.loads((folder / "summary.json").read_text())


def test_diagnosis_needs_the_run_folder_only(runs, tmp_path, places):
    folder, _ = runs["elsewhere"]
    done, notebook = execute("04_loss_diagnosis", tmp_path, places["elsewhere"], run_dir=str(folder))
    assert done.returncode == 0, done.stderr[-3000:]
    check_outputs(notebook, 3)


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"bucket": "auto"}, "buckets"),
        ({"buckets": "otto"}, "auto"),
        ({"probe": "false"}, "probe"),
        ({"dataset": "no/such/folder"}, "no/such/folder"),
    ],
)
def test_bad_parameters_stop_before_anything_is_loaded(tmp_path, places, parameters, said):
    done, _ = execute("03_train", tmp_path, places["elsewhere"], runs_dir=str(tmp_path / "runs"), **parameters)
    assert done.returncode != 0 and said in done.stderr
    assert not (tmp_path / "runs").exists(), "nothing was written"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "03_train"])
def test_planning_and_diagnosis_start_without_torch(name):
    [imports] = [cell.source for cell in code_cells(ROOT / "notebooks" / f"{name}.ipynb") if cell.source.startswith(("from", "import"))]
    check = "import sys; assert not {'torch', 'transformers'} & set(sys.modules), 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", f"{imports}\n{check}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
