"""Training in a real kernel: interrupted as JupyterLab does it, and ended with papermill by SIGTERM. No worker outlives either."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.pipeline.lock import is_locked
from dflash_nb.pipeline.runlog import read_run

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "03_train.ipynb"
GONE_SECONDS = 10
LONG = {"epochs": 2000, "checkpoint_every": 0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {"dataset": write_dataset(root / "data"), "target": save_target(root / "target", "llama")}


def wait_for_steps(folder: Path, count: int, alive, seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not (folder / "steps.jsonl").exists() or (folder / "steps.jsonl").read_bytes().count(b"\n") < count:
        assert alive() and time.monotonic() < deadline, f"{folder} has no {count} steps"
        time.sleep(0.05)


def code(config) -> str:
    values = {name: getattr(config, name) for name in ("dataset", "target", "runs_dir", "run_name", "epochs", "checkpoint_every")}
    small = {"buckets": "32", "token_budget": 256, "max_batch": 8, "draft_layers": 1, "block_size": 4, "anchors": 6}
    small |= {"eval_rows": 2, "eval_prompts": 1, "eval_tokens": 4, "log_every": 60.0, "device": "cpu", "threads": 1, "topology": "2-1"}
    return (
        "from dflash_nb.pipeline.config import TrainConfig\nfrom dflash_nb.pipeline.train import train\n"
        f"summary = train(TrainConfig(**{values | small!r}))\n"
    )


@pytest.mark.slow
def test_a_kernel_interrupt_ends_the_workers_and_the_next_run_starts(made, tmp_path):
    runs = tmp_path / "runs"
    manager, client = start_new_kernel(kernel_name="python3", env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        config = tiny_config(made["dataset"], made["target"], runs, run_name="long", **LONG)
        message = client.execute(code(config))
        wait_for_steps(runs / "long", 5, manager.is_alive)
        started = time.monotonic()
        manager.interrupt_kernel()
        reply = client.get_shell_msg(timeout=60)
        while reply["parent_header"].get("msg_id") != message:
            reply = client.get_shell_msg(timeout=60)
        assert time.monotonic() - started < GONE_SECONDS
        assert reply["content"]["ename"] == "KeyboardInterrupt"
        run = read_run(runs / "long")
        assert run.status == "interrupted" and run.summary["checkpoint"].endswith(f"step-{len(run)}")
        left = "import threading\nassert not [t for t in threading.enumerate() if t.name.startswith(('target', 'prefetch', 'tracker'))]"
        again = tiny_config(made["dataset"], made["target"], runs, run_name="again", epochs=1)
        for text in (left, code(again)):
            reply = client.execute_interactive(text, timeout=200, output_hook=lambda _: None)
            while reply["content"]["status"] == "aborted":  # for a moment after an error a kernel drops what is in its queue
                time.sleep(0.2)
                reply = client.execute_interactive(text, timeout=200, output_hook=lambda _: None)
            assert reply["content"]["status"] == "ok", reply["content"]
        assert read_run(runs / "again").status == "finished"
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_papermill_ended_by_sigterm_leaves_no_kernel_and_a_run_that_can_be_continued(made, tmp_path):
    values = {"dataset": made["dataset"], "target": made["target"], "runs_dir": tmp_path / "runs", "run_name": "long", **LONG}
    values |= {"buckets": 32, "token_budget": 256, "max_batch": 8, "draft_layers": 1, "block_size": 4, "anchors": 6, "threads": 1}
    values |= {"eval_rows": 2, "eval_prompts": 1, "eval_tokens": 4}
    command = [sys.executable, "-m", "papermill", NOTEBOOK, tmp_path / "out.ipynb", "--no-progress-bar"]
    command += [text for name, value in values.items() for text in ("-p", name, str(value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folder = tmp_path / "runs" / "long"
    try:
        wait_for_steps(folder, 5, lambda: process.poll() is None, seconds=280)
        kernel = read_run(folder).environment["pid"]
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        deadline = time.monotonic() + GONE_SECONDS
        while (running(kernel) or is_locked(folder)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not running(kernel) and not is_locked(folder), "the next run can take the folder"
        run = read_run(folder)
        assert run.status in ("interrupted", "unfinished") and len(run) >= 5
    finally:
        process.kill()


def running(pid: int) -> bool:
    """Whether a process is there and not merely waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
