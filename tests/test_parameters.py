"""Parameters as papermill really hands them over. Sources: nteract/papermill 818 (unknown names), 363 and 396 (lists)."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import nbformat
import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell
from papermill.cli import _resolve_type

from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.parameters import ALIASES, ParameterError, Parameters, check_parameters, option


@dataclass(frozen=True)
class Config(Parameters):
    buckets: str = option("auto", "cuts", listed=True, path="existing", names=("auto",))
    epochs: int = option(1, "passes", at_least=1)
    rate: float = option(1e-3, "peak", above=0, below=1)
    probe: bool = option(False, "probe first")
    decay: str = option("cosine", "shape", choices=("cosine", "linear"))
    run: str = option("", "folder", path="always")
    seeds: tuple[int, ...] = option((0, 1), "seeds", at_least=0)
    kinds: tuple[str, ...] = option(("a",), "kinds", choices=("a", "b"))

    def contradictions(self):
        if self.probe and self.epochs > 100:
            yield "probe: makes no sense with more than 100 epochs"


def typed(name: str, text: str) -> Config:
    """What ``papermill -p name text`` ends up as."""
    return Config.from_notebook({name: _resolve_type(text)})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("buckets", "auto", "auto"),
        ("buckets", "512", "512"),
        ("buckets", "256,512,1024", "256,512,1024"),
        ("buckets", "[256, 512,1024]", "256,512,1024"),
        ("epochs", "3", 3),
        ("epochs", "1e2", 100),
        ("epochs", "1_000", 1000),
        ("rate", "1e-3", 0.001),
        ("probe", "True", True),
        ("probe", "False", False),
        ("decay", "linear", "linear"),
        ("seeds", "3", (3,)),
        ("seeds", "3,4, 5", (3, 4, 5)),
        ("seeds", "[3, 4]", (3, 4)),
        ("kinds", "b", ("b",)),
        ("kinds", "['a', 'b']", ("a", "b")),
        ("run", "007", str(Path.cwd() / "7")),
    ],
)
def test_value_typed_on_the_command_line(name, text, value):
    got = getattr(typed(name, text), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "say"),
    [
        ("epochs", "2.5", "a whole number, at least 1"),
        ("epochs", "0", "at least 1"),
        ("epochs", "many", "'many'"),
        ("epochs", "True", "True"),
        ("epochs", "None", "leave the parameter out"),
        ("epochs", "inf", "inf"),
        ("rate", "nan", "nan"),
        ("rate", "0", "above 0"),
        ("rate", "1", "below 1"),
        ("rate", "true", "'true'"),
        ("probe", "true", "True or False"),
        ("probe", "false", "True or False"),
        ("probe", "1", "True or False"),
        ("decay", "cosin", "did you mean 'cosine'"),
        ("run", "False", "False"),
        ("run", "None", "None"),
        ("seeds", "1,x", "'x'"),
        ("seeds", "1.5", "1.5"),
        ("kinds", "a,c", "one of a, b"),
    ],
)
def test_value_refused(name, text, say):
    with pytest.raises(ParameterError) as error:
        typed(name, text)
    assert str(error.value).startswith(f"{name}: ") and say in str(error.value)


@pytest.mark.parametrize("name", ["epochs", "rate", "seeds"])
def test_a_number_beyond_any_is_refused_in_one_sentence(name):
    with pytest.raises(ParameterError, match=rf"^{name}: .*1000000000.* was given") as error:
        Config.from_notebook({name: 10**400})
    assert len(str(error.value)) < 150


def test_lists_as_yaml_gives_them():
    config = Config.from_notebook({"buckets": [256, 512], "seeds": [7.0, 8], "kinds": ["b"]})
    assert (config.buckets, config.seeds, config.kinds) == ("256,512", (7, 8), ("b",))
    with pytest.raises(ParameterError, match=r"decay: \['linear'\]"):
        Config.from_notebook({"decay": ["linear"]})
    with pytest.raises(ParameterError, match="epochs"):
        Config.from_notebook({"epochs": {"a": 1}})


def test_unknown_names_are_all_named_with_the_nearest():
    with pytest.raises(ParameterError) as error:
        check_parameters(Config, {"bucket": "auto", "zzz": 3, "epochs": 2})
    text = str(error.value)
    assert (
        "'bucket' (given 'auto'): did you mean 'buckets'?" in text and "'zzz' (given 3)\n" in text and "known: " in text and "seeds" in text
    )


def test_of_many_names_only_the_nearest_are_printed():
    with pytest.raises(ParameterError) as error:
        TrainConfig.from_notebook({"eval_row": 4, "zzz": 1})
    text = str(error.value)
    assert "'eval_row' (given 4): did you mean 'eval_rows'" in text and "papermill --help-notebook lists them all" in text
    assert len(text) < 250 and "q_hs_mb" not in text


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("lr", "learning_rate"),
        ("LR", "learning_rate"),
        ("bs", "max_batch"),
        ("batch_size", "max_batch"),
        ("BLOCK_SIZE", "block_size"),
        ("BlockSize", "block_size"),
        ("num-train-epochs", "epochs"),
    ],
)
def test_a_name_in_other_case_or_of_another_trainer_is_recognised(given, meant):
    with pytest.raises(ParameterError, match=rf"unknown parameter '{given}' .*did you mean '{meant}'"):
        TrainConfig.from_notebook({given: 1})


def test_every_alias_is_of_a_parameter_and_none_itself():
    known = {each.name for each in fields(TrainConfig)}
    assert set(ALIASES.values()) <= known and not known & set(ALIASES)


def test_lists_in_lists_are_refused():
    with pytest.raises(ParameterError, match=r"buckets: \[\[1, 2\], \[3\]\] was given"):
        Config(buckets=[[1, 2], [3]])


def test_every_problem_is_in_one_error():
    with pytest.raises(ParameterError) as error:
        Config(epochs="x", rate=-1, probe="yes")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == ["epochs", "rate", "probe"]
    with pytest.raises(ParameterError, match="more than 100 epochs"):
        Config(probe=True, epochs=101)


def test_numbers_of_numpy_and_paths_are_taken_from_code():
    config = Config(epochs=np.int64(4), rate=np.float32(0.5), run=Path("x"))
    assert (config.epochs, config.rate, config.run) == (4, 0.5, str(Path("x").absolute())) and type(config.epochs) is int


def test_paths_count_from_where_the_user_stands(tmp_path, monkeypatch):
    (tmp_path / "cuts.json").write_text("{}")
    (tmp_path / "auto").write_text("a file named like a choice")
    monkeypatch.chdir(tmp_path)
    config = Config(buckets="cuts.json", run="../x")
    assert config.buckets == str(tmp_path / "cuts.json") and config.run == str(tmp_path / ".." / "x")
    assert Config(buckets="auto").buckets == "auto"
    assert Config(buckets="./missing.json").buckets == str(tmp_path / "missing.json")
    assert Config(buckets="~/missing.json").buckets == str(Path.home() / "missing.json")


def test_namespace_of_a_session_can_be_read_again():
    """In JupyterLab the configuration cell is run again after later cells have left plain results behind."""
    shell = InteractiveShell()
    namespace = shell.user_ns
    namespace["Config"] = Config
    read = "config = Config.from_notebook(globals())"
    for cell in ('epochs: int = 2  # help\ndecay = "linear"', "import math\nwidth = math.floor(3.2)", read):
        shell.run_cell(cell, store_history=True).raise_error()
    assert (namespace["config"].epochs, namespace["config"].decay) == (2, "linear")
    shell.run_cell("table = [len(c) for c in 'ab']; seconds = table[0] * 1.5", store_history=True).raise_error()
    shell.run_cell(read, store_history=True).raise_error()
    shell.run_cell('dekay: str = "linear"', store_history=True).raise_error()
    result = shell.run_cell(read, store_history=True)
    assert "did you mean 'decay'" in str(result.error_in_exec)


CELLS = {
    "parameters": 'buckets: str = "auto"  # cuts\nepochs: int = 1  # passes\nprobe: bool = False  # probe first',
    "imports": "import json\nfrom pathlib import Path\nfrom test_parameters import Config",
    "config": "config = Config.from_notebook(globals())\nprint(json.dumps([config.buckets, config.epochs, config.probe]))",
}


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    path = tmp_path_factory.mktemp("notebook") / "tiny.ipynb"
    cells = [nbformat.v4.new_code_cell(source, metadata={"tags": [name]}) for name, source in CELLS.items()]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def papermill(notebook, *arguments):
    out = notebook.with_name("out.ipynb")
    command = [sys.executable, "-m", "papermill", notebook, out, "--no-progress-bar", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=notebook.parent, env=environment)
    outputs = [output for cell in nbformat.read(out, 4).cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    return done, [json.loads(line) for line in printed.splitlines()]


def test_papermill_fails_on_a_misspelt_name(notebook):
    done, printed = papermill(notebook, "-p", "bucket", "auto")
    assert done.returncode != 0 and "did you mean 'buckets'" in done.stderr and not printed


def test_papermill_list_and_text_mean_the_same(notebook):
    done, printed = papermill(notebook, "-y", "buckets: [256, 512]", "-p", "epochs", "1e1", "-p", "probe", "True")
    assert done.returncode == 0 and printed == [["256,512", 10, True]], done.stderr
