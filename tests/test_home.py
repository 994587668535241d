"""Files are written whole or not at all, and a full disk is one sentence that names the file and says what to do.

The disk is full for real: a process that may write files of some kilobytes only (RLIMIT_FSIZE), and ``/dev/full``.

Run alone: python -m pytest tests/test_home.py
"""

import subprocess
import sys
from pathlib import Path

import pytest

from dflash_nb.errors import DiskError, full_disk
from dflash_nb.home import room_for, write_aside

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
