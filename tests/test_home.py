"""Files are written whole or not at all, and a full disk is one sentence that names the file and says what to do.

The disk is full for real: a process that may write files of some kilobytes only (RLIMIT_FSIZE), and ``/dev/full``.

Run alone: python -m pytest tests/test_home.py
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dflash_nb.errors import DiskError, PlainError, full_disk
from dflash_nb.home import did_you_mean, room_for, write_aside

TESTS = Path(__file__).parent
LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
place = Path(sys.argv[1])
{before}
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    {write}
except OSError as error:
    print(type(error).__name__, error)
except RuntimeError as error:
    print(type(error).__name__, error)
"""
RUN = (
    "from runs import Recipe, records\nfrom dflash_nb.pipeline.runlog import RunLog\n"
    "log = RunLog.create(place, {'seed': 1})\nlog.step(records(Recipe(steps=1))[0])"
)
PLAN = (
    "import numpy as np\nfrom dflash_nb.data.lengths import LengthHistogram\nfrom dflash_nb.planner.buckets import optimize_buckets\n"
    "plan = optimize_buckets(LengthHistogram.from_lengths(np.arange(1, 4000)), 60)"
)
EXPORT = (
    "from tiny_targets import save_target\nfrom dflash_nb.model.drafter import DFlashDrafter, DrafterConfig\n"
    "from dflash_nb.model.export import export_drafter\nfrom dflash_nb.model.target_info import read_target_info\n"
    "info = read_target_info(str(save_target(place / 'target', 'llama')))\n"
    "drafter = DFlashDrafter(DrafterConfig.for_target(info, num_layers=1, block_size=4, target_layer_ids=(1, 3)))"
)
ROWS = (
    "import numpy as np\nfrom dflash_nb.data.writer import DatasetWriter\nfrom dflash_nb.home import write_aside\n"
    "row = np.ones(9000, np.int32)"
)
TRAIN = (
    "from tiny_runs import save_target, tiny_config, write_dataset\nfrom dflash_nb.pipeline.train import train\n"
    "made = write_dataset(place / 'data'), save_target(place / 'target', 'llama')"
)


@pytest.mark.parametrize(
    ("limit", "before", "write", "file", "then"),
    [
        (4000, RUN, "for line in records(Recipe(steps=20)): log.step(line)", "steps.jsonl", "continue with -p resume"),
        (4000, RUN, "for _ in range(99): log.event('warning', text='a' * 99)", "events.jsonl", "continue with -p resume"),
        (4000, RUN, "log.finish('finished', text='a' * 9999)", "summary.json", "continue with -p resume"),
        (4000, PLAN, "plan.save(place / 'buckets.json')", "buckets.json", "run it again"),
        (9000, EXPORT, "export_drafter(drafter, info, place / 'export')", "export", "export again (a run does so with -p resume)"),
        (
            9000,
            ROWS,
            "\n    with write_aside(place / 'chats') as aside, DatasetWriter(aside) as file: file.write('train', [(row, row)])",
            "chats",
            "run it again",
        ),
        (
            20_000,
            TRAIN,
            "train(tiny_config(*made, place / 'runs', checkpoint_every=0, run_name='r'))",
            "steps.jsonl",
            "continue with -p resume",
        ),
    ],
    ids=["steps", "events", "summary", "buckets", "export", "dataset", "a whole run"],
)
def test_a_full_disk_is_a_sentence(tmp_path, limit, before, write, file, then):
    code = LIMITED.format(tests=str(TESTS), before=before, limit=limit, write=write)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=200)
    said = done.stdout.strip().splitlines()[-1]
    assert f"{file} cannot be written: File too large. Make room there, then {then}" in said, done.stderr[-2000:]
    assert said.startswith(f"DiskError {tmp_path}")
    assert not list(tmp_path.rglob("*.aside"))


TWICE = """
for _ in range(2):
    try:
        {attempt}
    except OSError as error:
        print(type(error).__name__, error)
"""


def said_with(limit, before, attempt, place):
    """What a process says that tries twice with files of at most ``limit`` bytes."""
    twice = TWICE.format(attempt=attempt).replace("\n", "\n    ")
    code = LIMITED.format(tests=str(TESTS), before=before, limit=limit, write=twice)
    done = subprocess.run([sys.executable, "-c", code, str(place)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if "Error" in line]


@pytest.mark.parametrize(("limit", "file"), [(20, "config"), (50, "environment"), (300, "environment")])
def test_a_disk_that_is_full_at_the_start_leaves_nothing_and_no_lock(tmp_path, limit, file):
    run = "from dflash_nb.pipeline.runlog import RunLog, new_run_folder\nconfig = {'seed': 1, 'epochs': 2}"
    said = said_with(limit, run, "RunLog.create(new_run_folder(place, 'r'), config)", tmp_path)
    sentence = f"DiskError {tmp_path / 'r' / file}.json cannot be written: File too large. Make room there, then run it again"
    assert said == [sentence] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("limit", [50, 1400])
def test_a_run_for_whose_start_there_is_no_room_leaves_nothing(tmp_path, limit):
    said = said_with(limit, TRAIN, "train(tiny_config(*made, place / 'runs', run_name='r'))", tmp_path)
    assert len(said) == 2 and said[0] == said[1] and said[0].endswith("Make room there, then run it again")
    assert not (tmp_path / "runs" / "r").exists()


def test_a_resume_for_which_there_is_no_room_keeps_the_summary_and_no_lock(tmp_path):
    before = (
        "from runs import Recipe, write_run\nfrom dflash_nb.pipeline.runlog import RunLog\n"
        "write_run(place / 'r', Recipe(steps=3), status='interrupted')\nsize = (place / 'r' / 'events.jsonl').stat().st_size"
    )
    said = said_with("size + 20", before, "RunLog.open_for_resume(place / 'r', 3)", tmp_path)
    assert len(said) == 2 and all("events.jsonl cannot be written" in line for line in said)
    assert (tmp_path / "r" / "summary.json").is_file()


def test_a_device_that_is_full():
    full = Path("/dev/full")
    sentence = r"/dev/full cannot be written: No space left on device\. Make room there, then go on"
    with pytest.raises(DiskError, match=sentence), room_for(full, "go on"), full.open("w") as file:
        file.write("a")


def test_other_errors_are_left_alone(tmp_path):
    with pytest.raises(ZeroDivisionError), write_aside(tmp_path / "a") as aside:
        aside.write_text(str(1 / 0))
    with pytest.raises(FileNotFoundError), write_aside(tmp_path / "a") as aside:
        (tmp_path / "missing" / "b").read_text()
    assert not full_disk(ValueError("too large a number")) and full_disk(RuntimeError("IoError: (os error 28)"))
    assert not list(tmp_path.iterdir())


def test_a_file_and_a_folder_are_replaced_whole(tmp_path):
    for text in ("old", "new"):
        with write_aside(tmp_path / "file") as aside:
            aside.write_text(text)
        with write_aside(tmp_path / "folder") as aside:
            aside.mkdir()
            (aside / text).write_text(text)
    assert (tmp_path / "file").read_text() == "new" and [each.name for each in (tmp_path / "folder").iterdir()] == ["new"]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Things with names to mistype, in the current folder and among the project's runs."""
    here = tmp_path / "here"
    for folder in ("data/chats-own", "targets/qwen", "runs/2026-03-01-sample", ".hidden"):
        (here / folder).mkdir(parents=True)
    for file in ("cuts.json", "chats.jsonl", "cost.json", "strategies.json", "export.csv"):
        (here / file).write_text("{}")
    (tmp_path / "home" / "runs" / "best-run").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path / "home"))
    return here


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("dta/chats-onw", "data/chats-own"),  # two parts
        ("data/Chats_Own", "data/chats-own"),
        ("DATA/chats-own", "data/chats-own"),
        ("chats.json", "chats.jsonl"),  # another suffix
        ("cut.json", "cuts.json"),
        ("absent.json", ""),  # the suffix alone makes nothing alike
        ("hidden", ""),
        (".hiden", ".hidden"),
        ("cuts.json/more", ""),
        ("n" * 300, ""),
        ("data", ""),  # it is there
    ],
)
def test_the_nearest_name_is_found_part_by_part(places, typed, near):
    assert did_you_mean(typed) == (f" Did you mean {places / near}?" if near else "")


def test_known_names_come_first_and_another_folder_last(places):
    beside = places / "runs"
    assert did_you_mean("smaple", ("sample",)) == " Did you mean sample?"
    assert did_you_mean("data/smaple", ("sample",)) == ""
    assert did_you_mean("2026-03-01-sample", beside=beside) == did_you_mean("2026-3-01-sampel", beside=beside)
    assert did_you_mean("2026-03-01-sample", beside=beside) == f" Did you mean {beside / '2026-03-01-sample'}?"


def by_parameter():
    """Every way in which a path comes in: what is called, what was typed, and what lies there with nearly that name."""
    from dflash_nb.analysis.diagnose import diagnose
    from dflash_nb.analysis.experiment import read_experiment
    from dflash_nb.data.lengths import read_lengths
    from dflash_nb.data.prepare import prepare_chats
    from dflash_nb.data.source import find_source
    from dflash_nb.data.tokenization import load_tokenizer
    from dflash_nb.model.export import load_drafter
    from dflash_nb.model.readers import check_readers
    from dflash_nb.model.target_info import read_target_info
    from dflash_nb.pipeline.config import BucketsConfig, PaddingConfig, TrainConfig
    from dflash_nb.pipeline.measured import find_cost, run_speeds
    from dflash_nb.pipeline.run import read_run
    from dflash_nb.pipeline.tau import tau_of_run
    from dflash_nb.planner.buckets import read_spec
    from dflash_nb.planner.cost import CostModel

    run = "runs/2026-03-01-sampel"
    return {
        "dataset": (lambda: TrainConfig(dataset="./data/chat-own").describe(), "data/chats-own"),
        "dataset, two words": (lambda: find_source("data/chat-own"), "data/chats-own"),
        "dataset, lengths": (lambda: read_lengths("./data/chat-own"), "data/chats-own"),
        "dataset, a name": (lambda: BucketsConfig(dataset="refrence").describe(), "reference"),
        "target": (lambda: TrainConfig(dataset="./data/chats-own", target="./targets/qwem").describe(), "targets/qwen"),
        "target, two words": (lambda: read_target_info("targets/qwem"), "targets/qwen"),
        "target, a name": (lambda: read_target_info("smolm2"), "smollm2"),
        "buckets": (lambda: TrainConfig(buckets="./cut.json"), "cuts.json"),
        "buckets, read": (lambda: read_spec("cut.json"), "cuts.json"),
        "resume": (lambda: TrainConfig(resume=run).resumed(), "runs/2026-03-01-sample"),
        "resume, a name": (lambda: TrainConfig(resume="best-run").resumed(), "home/runs/best-run"),
        "watch": (lambda: read_run(TrainConfig(watch="bets-run").watch), "home/runs/best-run"),
        "run_dir": (lambda: diagnose(run), "runs/2026-03-01-sample"),
        "run_dir, a file": (lambda: diagnose("exprt.csv"), "export.csv"),
        "runs": (lambda: run_speeds([run], CostModel()), "runs/2026-03-01-sample"),
        "cost": (lambda: find_cost(PaddingConfig(cost="costs.json").cost), "cost.json"),
        "cost, read": (lambda: CostModel.load(Path("costs.json")), "cost.json"),
        "experiment": (lambda: read_experiment("strategie.json"), "strategies.json"),
        "experiment, a name": (lambda: read_experiment("smolm2"), "smollm2"),
        "records": (lambda: prepare_chats("chat.jsonl", "out", tokenizer="sample"), "chats.jsonl"),
        "tokenizer": (lambda: load_tokenizer("targets/qwem"), "targets/qwen"),
        "drafter": (lambda: load_drafter("runs/2026-03-01-sampel"), "runs/2026-03-01-sample"),
        "readers": (lambda: check_readers("runs/2026-03-01-sampel"), "runs/2026-03-01-sample"),
        "tau": (lambda: tau_of_run(Path(run), 1, 2), "runs/2026-03-01-sample"),
    }


@pytest.mark.parametrize("parameter", list(by_parameter()))
def test_a_path_that_is_not_there_is_answered_with_the_nearest_that_is(places, parameter):
    call, near = by_parameter()[parameter]
    with pytest.raises((PlainError, FileNotFoundError), match=rf" Did you mean (/\S+/)?{re.escape(near)}\?"):
        call()


def by_call():
    """Every call that takes a path as text."""
    from dflash_nb.analysis.experiment import read_experiment
    from dflash_nb.data.lengths import read_lengths
    from dflash_nb.data.prepare import prepare_chats
    from dflash_nb.data.source import dataset_path, find_source
    from dflash_nb.data.tokenization import load_tokenizer
    from dflash_nb.model.export import load_drafter
    from dflash_nb.model.target_info import read_target_info
    from dflash_nb.pipeline.config import TrainConfig
    from dflash_nb.pipeline.measured import find_cost, run_speeds, writable
    from dflash_nb.pipeline.run import read_run
    from dflash_nb.pipeline.runlog import new_run_folder
    from dflash_nb.planner.bucket_plan import BucketPlan
    from dflash_nb.planner.buckets import read_spec
    from dflash_nb.planner.cost import CostModel

    return {
        "dataset": lambda text: TrainConfig(dataset=text).describe(),
        "target": lambda text: TrainConfig(target=text).describe(),
        "buckets": lambda text: TrainConfig(buckets=text),
        "resume": lambda text: TrainConfig(resume=text).resumed(),
        "watch": lambda text: read_run(TrainConfig(watch=text).watch),
        "runs_dir": lambda text: new_run_folder(TrainConfig(runs_dir=text).runs_folder, "name"),
        "dataset_path": dataset_path,
        "find_source": find_source,
        "read_lengths": read_lengths,
        "prepare_chats": lambda text: prepare_chats(text, "out", tokenizer="sample"),
        "load_tokenizer": load_tokenizer,
        "load_drafter": load_drafter,
        "read_target_info": read_target_info,
        "find_cost": find_cost,
        "run_speeds": lambda text: run_speeds([text], CostModel()),
        "writable": lambda text: writable(Path(text, text)),
        "read_run": read_run,
        "BucketPlan.load": BucketPlan.load,
        "read_spec": read_spec,
        "read_experiment": read_experiment,
    }


@pytest.mark.parametrize("call", list(by_call()))
@pytest.mark.parametrize("text", ["n" * 300, "folder/" + "n" * 300 + ".json", "~nobody_here/x", "~nobody_here"])
def test_a_path_that_the_system_refuses_is_answered_in_a_sentence(places, call, text):
    """Names longer than a file system takes, and the homes of users that there are not."""
    with pytest.raises((PlainError, FileNotFoundError), match=re.escape(text[:40])):
        by_call()[call](text)


def test_many_edges_are_taken_in_either_form():
    from dflash_nb.pipeline.config import TrainConfig

    edges = list(range(2, 900, 2))
    assert TrainConfig(buckets=edges).buckets == TrainConfig(buckets=",".join(map(str, edges))).buckets == ",".join(map(str, edges))
