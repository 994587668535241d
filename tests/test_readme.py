"""Every command of the README does what it says.

They run in the order of the page, in a folder of its own, with papermill's own command line reading the arguments; only the kernel is
left out, so that ten notebooks cost one import of torch (``test_notebooks.py`` has the kernels). Long ones get small numbers (TINY,
SMALLER), and the doctor is asked once. ``make`` targets are read by ``make --dry-run``.
"""

import json
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import nbformat
import papermill.cli
import pytest

from dflash_nb.analysis import doctor
from dflash_nb.home import asset

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SECTIONS = [
    *("Buckets", "Your own data", "Your own target", "Read the plots", "Resume", "Export and serve"),
    *("More than one device", "More than one machine"),
    *("What is measured", "Limits"),
]

# What a notebook is given besides the command's own parameters.
TINY = {
    "00_length_distribution": {},
    "01_bucket_optimization": {"most_buckets": 4},
    "02_padding_simulation": {"seeds": [0], "strategies": ["sorted", "bucketed"]},
    "03_train": {"anchors": 4, "eval_prompts": 1, "eval_rows": 2, "eval_tokens": 4, "threads": 1},
    "04_loss_diagnosis": {},
}
FEWER = {"03_train": {"max_steps": 2}}  # whatever the command says
# Smaller numbers, and what is not here: parts of a command and what stands for them.
SMALLER = {
    "--heldout 500": "--heldout 6",
    "--rows 2000 --new-tokens 96": "--rows 4 --new-tokens 4",
    "smollm2": "path/to/target",
    "-p target_layers 1,8,14,21,27 -p epochs 3": "-p target_layers 1,3,5",
    "-p eval_prompts 32 -p eval_rows 48 -p eval_every 175": "-p eval_every 2",
}
# Not run, and why.
EXCEPTIONS = {
    "source .venv/bin/activate": "changes a shell; the test's own Python is that of the environment",
    "pip install": "changes the environment and needs a package registry",
    "ray get-auth-token": "writes to the home folder",
    "ray start": "starts a cluster that outlives the command",
    "ray stop": "ends every cluster of this machine",
    "-p engine ray": "needs that cluster; test_ray.py trains on one of its own",
    "python benchmarks/": "minutes each; their options are checked here, `make benchmarks` runs them",
}


def commands() -> list[str]:
    """The commands of the page in order: lines of fenced blocks, and code spans that begin with a program's name."""
    found = []
    for block, span in re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", README, re.M | re.S):
        for line in (block.replace("\\\n", " ") or span).splitlines():
            command = " ".join(line.split("  #")[0].split())
            if re.match(r"(make|python|papermill|source|pip|jupyter|hf|ray) ", command) and command not in found:
                found.append(command)
    return found


def excepted(command: str) -> bool:
    return any(part in command for part in EXCEPTIONS)


def test_the_page_has_its_sections_pictures_and_the_two_commands():
    assert re.findall(r"^## (.+)$", README, re.M) == SECTIONS
    assert {"make run", "make test"} <= set(commands())
    pictures = re.findall(r"!\[([^\]]{20,})\]\(([^)]+)\)", README)
    assert len(pictures) == 2 and all((ROOT / path).stat().st_size > 10_000 for _, path in pictures)


def test_files_and_notebooks_that_the_page_names_exist():
    for path in re.findall(r"`((?:notebooks|docs|benchmarks|dflash_nb|tests)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
    for module in re.findall(r"\bdflash_nb(?:\.\w+)+", README):
        import_module(module)


def test_files_and_names_of_the_contributing_page_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    known = "".join(f"/{line}\n" for line in tracked.splitlines()) or "".join(f"/{p.relative_to(ROOT)}\n" for p in ROOT.rglob("*.*"))
    for path in re.findall(r"`([\w/]+\.(?:py|toml|md|ipynb))`", page):
        assert f"/{path}\n" in known, path
    source = "".join(path.read_text() for path in (ROOT / "dflash_nb").rglob("*.py"))
    for name in re.findall(r"`([A-Z_]{4,})`", page):
        assert f"{name} = " in source or f"{name}: " in source, name


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("make ")])
def test_make_knows_its_targets(command):
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith("python benchmarks/")])
def test_benchmarks_have_the_options_that_the_page_gives(command):
    _, path, *options = shlex.split(command)
    source = (ROOT / path).read_text()
    assert all(f'"{option}"' in source for option in options if option.startswith("--"))


def test_every_exception_is_needed():
    assert all(any(part in command for command in commands()) for part in EXCEPTIONS)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A user's folder: the notebooks, a target, chats of two kinds, lengths and a file of parameters."""
    folder = tmp_path_factory.mktemp("newcomer")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("DFLASH_HOME", str(folder))
        patch.setenv("DFLASH_CACHE", str(ROOT / ".cache"))
        patch.setattr(papermill.cli, "execute_notebook", execute)
        patch.setattr(doctor, "examine", once(doctor.examine))
        (folder / "notebooks").symlink_to(ROOT / "notebooks")
        (folder / "path" / "to").mkdir(parents=True)
        (folder / "path" / "to" / "target").symlink_to(asset("sample_target"))
        sums = [(f"What is {a} and {a + 3}?", f"It is {2 * a + 3}. " * (1 + a % 5)) for a in range(60)]
        chat = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in sums]
        (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chat)))
        (folder / "gsm8k_train.jsonl").write_text("\n".join(json.dumps({"question": q, "answer": a}) for q, a in sums))
        (folder / "run.yaml").write_text("buckets: [256, 512]\nmax_steps: 2\n")
        write_lengths(folder / "lengths.parquet")
        yield folder


def write_lengths(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"n_tokens": [50 + 7 * i % 900 for i in range(500)]}), path)


def once(examine):
    """``examine`` that looks at the first run and says the same of all later ones."""
    said = []

    def first(config):
        said.extend([] if said else [examine(config)])
        return said[0]

    return first


def execute(input_path, output_path, parameters, **_):
    """What papermill does with a notebook, in this process: the parameters cell, what was given, then every other cell."""
    name = Path(input_path).stem
    given = parameters if "resume" in parameters else TINY[name] | parameters | FEWER.get(name, {})
    cells = [cell for cell in nbformat.read(input_path, as_version=4).cells if cell.cell_type == "code"]
    namespace = {"__name__": "__main__", "In": [cell.source for cell in cells]}
    for cell in cells:
        exec(compile(cell.source, f"{name}[{cell.id}]", "exec"), namespace)
        if "parameters" in cell.metadata.get("tags", []):
            namespace.update(given)
            namespace["In"].append("\n".join(f"{key} = {value!r}" for key, value in given.items()))


def run(command: str, place: Path) -> None:
    """Run one command of the page in ``place``."""
    for part, smaller in SMALLER.items():
        command = command.replace(part, smaller)
    runs = sorted((place / "runs").glob("*/steps.jsonl"), key=lambda path: path.stat().st_mtime)
    program, *arguments = shlex.split(command.replace("<name>", runs[-1].parent.name if runs else "<name>"))
    if program == "python":
        assert arguments[0] == "-m"
        import_module(arguments[1]).main(arguments[2:])
    else:
        papermill.cli.papermill.main(arguments, standalone_mode=False)


@pytest.mark.slow
@pytest.mark.timeout(900)  # forty seconds of CPU, minutes on a machine with other work
def test_every_other_command_runs(place, capsys):
    others = [command for command in commands() if not excepted(command) and not command.startswith("make ")]
    assert len(others) >= 12
    for command in others:
        try:
            run(command, place)
        except SystemExit as ended:
            assert ended.code in (None, 0), f"{command}: {ended.code}"
        except Exception as error:
            raise AssertionError(f"the README says: {command}") from error
    said = capsys.readouterr().out
    assert "token_budget" in said and "tau" in said and "written: " in said, "help, a run's summary, buckets.json"
    for made in ("data/chats/dataset.json", "data/chats-own/dataset.json", "data/gsm8k/dataset.json", "runs/buckets.json"):
        assert (place / made).is_file(), made
