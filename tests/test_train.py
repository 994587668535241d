"""Whole runs: exact with any number of workers and through any kill, and nothing left behind.

Run alone: python -m pytest tests/test_train.py
"""

import collections
import gc
import json
import math
import multiprocessing
import os
import random
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.export import load_drafter
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline.checkpoint import OPTIMIZER, STATE, WEIGHTS, checkpoints
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.console import Console
from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.schedule import learning_rate
from dflash_nb.pipeline.train import train
from dflash_nb.pipeline.window import WorkerError

STEPS = 26


@pytest.fixture(autouse=True)
def interrupts_arrive():
    """A test run started in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    return {"dataset": write_dataset(root / "data"), "target": save_target(root / "target", "hybrid")}


@pytest.fixture(scope="module")
def whole(made, tmp_path_factory):
    """The run that nothing disturbed."""
    runs = tmp_path_factory.mktemp("whole")
    return train(tiny_config(made["dataset"], made["target"], runs))


def lines(folder):
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def curve(folder):
    """What must be equal: number, loss, rate, norm and samples of every step."""
    return [
        (line["step"], line["loss"], line["lr"], line["grad_norm"], [batch["sample_ids"] for batch in line["batches"]])
        for line in lines(folder)
    ]


def assert_same_end(run_dir, whole):
    assert curve(run_dir) == curve(whole.run_dir)
    ours, theirs = (load_file(folder / "checkpoints" / f"step-{STEPS}" / WEIGHTS) for folder in (run_dir, whole.run_dir))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    ours, theirs = (
        torch.load(f / "checkpoints" / f"step-{STEPS}" / OPTIMIZER, weights_only=True)["moments"] for f in (run_dir, whole.run_dir)
    )
    assert all(torch.equal(ours[name][key], theirs[name][key]) for name in theirs for key in theirs[name])


def interrupt_after(monkeypatch, step, number=signal.SIGINT):
    """Send a signal to this process when ``step`` has been logged."""
    counted = Console.step

    def counting(self, record):
        counted(self, record)
        if record["step"] == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Console, "step", counting)


def test_a_run_leaves_what_it_says_and_nothing_else(made, whole):
    run = read_run(whole.run_dir)
    assert run.status == "finished"
    assert len(run) == whole.steps == whole.total_steps == STEPS
    assert whole.finished
    assert whole.last_loss < whole.first_loss
    assert whole.tau_untrained >= 1 and whole.tau_trained >= 1
    assert 0.5 < whole.efficiency <= 1
    assert whole.tokens_per_second > 0
    assert load_drafter(whole.export).config.block_size == 4
    assert [path.name for path in checkpoints(whole.run_dir / "checkpoints")] == ["step-25", f"step-{STEPS}"]
    assert all(text in whole.text() for text in (str(whole.run_dir), "padding efficiency", "tau", str(whole.export)))
    assert [event["step"] for event in run.events_of("eval")] == [0, STEPS]
    epochs = run.plan["epochs"]
    assert [epoch["steps"] for epoch in epochs] == [epoch["batches"] for epoch in epochs]
    assert run.plan["total_steps"] == STEPS


def test_every_sample_is_trained_once_an_epoch(made, whole):
    for epoch in (0, 1):
        seen = [i for line in lines(whole.run_dir) if line["epoch"] == epoch for batch in line["batches"] for i in batch["sample_ids"]]
        assert sorted(seen) == list(range(60))


def test_a_step_line_adds_up(whole):
    for line in lines(whole.run_dir):
        assert set(line["seconds"]) == {"fetch", "target", "transfer", "wait", "drafter", "optimizer", "step"}
        assert all(value >= 0 for value in line["seconds"].values())
        for name in ("tokens", "padded_tokens", "supervised", "slots"):
            assert line[name] == sum(batch[name] for batch in line["batches"])
        assert line["weight"] == pytest.approx(sum(batch["weight"] for batch in line["batches"]))
        assert line["padded_tokens"] == sum(batch["rows"] * batch["padded_length"] for batch in line["batches"])
        assert len(line["slot_accuracy"]) == 3
    run = read_run(whole.run_dir)
    assert run.steps["supervised"].sum() == 2 * sum(row[1] for row in supervised_rows(whole))


def supervised_rows(whole):
    from dflash_nb.data.dataset import TokenDataset

    return list(enumerate(TokenDataset.open(read_run(whole.run_dir).config["dataset"]).n_supervised))


def test_the_learning_rate_is_the_schedules(whole):
    rates = [learning_rate(step, STEPS, 3e-3, 1, "cosine", 0.1) for step in range(1, STEPS + 1)]
    assert [line["lr"] for line in lines(whole.run_dir)] == pytest.approx(rates, rel=1e-8)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_loss_curve_does_not_depend_on_the_workers(made, whole, tmp_path, monkeypatch, workers):
    """One, two or three workers with random delays: bit for bit the undelayed single worker's curve."""
    compute, delays = FrozenTarget.features, random.Random(workers)

    def late(self, batch):
        time.sleep(0.02 * delays.random())
        return compute(self, batch)

    monkeypatch.setattr(FrozenTarget, "features", late)
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path, topology=f"{workers}-1"))
    assert_same_end(summary.run_dir, whole)


def test_no_thread_is_left_and_global_state_is_as_it_was(made, tmp_path):
    torch.set_num_threads(2)
    torch.manual_seed(5)
    before = set(threading.enumerate()), torch.get_rng_state(), torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    for _ in range(2):
        train(tiny_config(made["dataset"], made["target"], tmp_path, max_steps=2))
    assert set(threading.enumerate()) <= before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.get_num_threads() == before[2]
    assert signal.getsignal(signal.SIGTERM) is before[3]
    assert multiprocessing.active_children() == []
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_a_checkpoint_and_the_resumed_run_ends_the_same(made, whole, tmp_path, monkeypatch, number):
    """SpecForge 587, 460, 390: stopped at step 7, the resumed run has the same rates, Adam steps, moments and losses."""
    with monkeypatch.context() as patch:
        interrupt_after(patch, 7, number)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(made["dataset"], made["target"], tmp_path))
    (folder,) = tmp_path.iterdir()
    run = read_run(folder)
    assert run.status == "interrupted"
    assert run.summary["step"] == 7
    assert run.summary["checkpoint"].endswith("step-7")
    state = json.loads((folder / "checkpoints" / "step-7" / STATE).read_text())
    assert state["plan"]["next_batch"] == 7
    assert state["in_flight"][0] == {"epoch": 0, "index": 7}
    assert threading.active_count() == 1 or all(not thread.name.startswith(("target", "prefetch")) for thread in threading.enumerate())
    summary = train(TrainConfig(resume=str(folder)))
    assert summary.run_dir == folder
    assert summary.finished
    assert summary.tau_untrained == whole.tau_untrained
    assert_same_end(folder, whole)


def test_a_run_stopped_by_its_time_limit_can_be_resumed(made, whole, tmp_path):
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path, time_limit=1e-9))
    assert (summary.finished, summary.steps, summary.export) == (False, 1, None)
    assert read_run(summary.run_dir).status == "interrupted"
    assert f"-p resume {summary.run_dir}" in summary.text()
    for _ in range(2):
        train(TrainConfig(resume=str(summary.run_dir)))
    assert curve(summary.run_dir)[:3] == curve(whole.run_dir)[:3]
    train(TrainConfig(resume=str(summary.run_dir), time_limit=5.0))
    assert_same_end(summary.run_dir, whole)


def test_a_broken_newest_checkpoint_is_passed_over(made, whole, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 12)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(made["dataset"], made["target"], tmp_path))
    (folder,) = tmp_path.iterdir()
    weights = folder / "checkpoints" / "step-12" / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1])
    train(TrainConfig(resume=str(folder)))
    assert "passed over a broken checkpoint: step-12" in capsys.readouterr().out
    run = read_run(folder)
    assert any("step-12" in event["text"] for event in run.events_of("warning"))
    assert_same_end(folder, whole)


def test_a_finished_run_can_be_asked_for_again(made, whole):
    before = curve(whole.run_dir)
    again = train(TrainConfig(resume=str(whole.run_dir)))
    assert (again.finished, again.steps, again.tau_trained) == (True, STEPS, whole.tau_trained)
    assert curve(whole.run_dir) == before


def test_other_data_is_refused_on_resume(made, tmp_path, monkeypatch):
    dataset = write_dataset(tmp_path / "data")
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3)
        with pytest.raises(KeyboardInterrupt):
            train(tiny_config(dataset, made["target"], tmp_path / "runs"))
    (folder,) = (tmp_path / "runs").iterdir()
    (dataset / "train" / "data-00000.arrow").unlink()
    other = write_dataset(tmp_path / "other", seed=1)
    (other / "train" / "data-00000.arrow").rename(dataset / "train" / "data-00000.arrow")
    with pytest.raises(ValueError, match=r"has changed since the checkpoint was written: .*lengths_sha256"):
        train(TrainConfig(resume=str(folder)))


def fails(monkeypatch, index, times=math.inf):
    """Let the target run out of memory on one batch of epoch 0."""
    compute, failures = FrozenTarget.features, collections.Counter()

    def failing(self, batch):
        if batch.index == index and batch.epoch == 0 and failures[index] < times:
            failures[index] += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(self, batch)

    monkeypatch.setattr(FrozenTarget, "features", failing)


def test_out_of_memory_on_one_batch_is_tried_again(made, whole, tmp_path, monkeypatch):
    fails(monkeypatch, index=9, times=2)
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path, topology="2-1"))
    assert_same_end(summary.run_dir, whole)
    retries = read_run(summary.run_dir).events_of("retry")
    assert [(event["batch"], event["attempt"]) for event in retries] == [(9, 2), (9, 3)]
    assert "OutOfMemoryError" in retries[0]["error"]


def test_a_batch_that_always_fails_stops_the_run_with_its_samples_and_the_next_run_starts(made, whole, tmp_path, monkeypatch):
    ids = lines(whole.run_dir)[7]["batches"][0]["sample_ids"]
    with monkeypatch.context() as patch:
        fails(patch, index=7)
        with pytest.raises(WorkerError) as caught:
            train(tiny_config(made["dataset"], made["target"], tmp_path))
    gc.collect()
    assert not any(type(thing) in (DFlashDrafter, FrozenTarget) for thing in gc.get_objects()), "the error keeps the models alive"
    assert list(caught.value.sample_ids) == ids
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    (folder,) = tmp_path.iterdir()
    run = read_run(folder)
    assert run.status == "failed"
    assert str(ids[0]) in run.summary["error"]
    assert run.summary["checkpoint"].endswith("step-7")
    train(TrainConfig(resume=str(folder)))
    assert_same_end(folder, whole)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_the_name_free(made, tmp_path, monkeypatch, error):
    def fail(*_, **__):
        raise error

    config = tiny_config(made["dataset"], made["target"], tmp_path, run_name="mine", max_steps=2)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr("dflash_nb.pipeline.train.load_models", fail)
        train(config)
    assert not (tmp_path / "mine").exists()
    assert train(config).finished


def test_windows_without_a_single_anchor_are_steps_like_any_other(made, tmp_path):
    """AutoModel 3268, 2468: rows with one supervised token give no anchor; no NaN, no skipped step."""
    import pyarrow as pa

    dataset = write_dataset(tmp_path / "data", train=24)
    path = dataset / "train" / "data-00000.arrow"
    table = pa.ipc.open_file(path).read_all()
    masks = [[0] * (len(mask) - 1) + [1] if row % 2 else mask for row, mask in enumerate(table["loss_mask"].to_pylist())]
    columns = {"input_ids": table["input_ids"], "loss_mask": pa.array(masks, pa.list_(pa.uint8()))}
    with pa.ipc.new_file(path, pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    summary = train(tiny_config(dataset, made["target"], tmp_path / "runs", max_batch=1, epochs=1))
    empty = [line for line in lines(summary.run_dir) if line["weight"] == 0]
    assert summary.steps == 24
    assert len(empty) == 12
    assert all(line["loss"] is None and line["grad_norm"] == 0 and line["acceptance"] is None and line["finite"] for line in empty)
    assert all(math.isfinite(line["loss"]) for line in lines(summary.run_dir) if line["weight"])
    moments = torch.load(summary.checkpoint / OPTIMIZER, weights_only=True)["moments"]
    assert {moment["step"].item() for moment in moments.values() if "step" in moment} == {24.0}, "Muon counts no steps"
    assert all(torch.isfinite(weight).all() for weight in load_file(summary.checkpoint / WEIGHTS).values())


def test_accumulation_ends_with_the_epoch(made, whole, tmp_path):
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path, accumulation=4))
    batches = [epoch["batches"] for epoch in read_run(summary.run_dir).plan["epochs"]]
    assert summary.steps == sum(math.ceil(count / 4) for count in batches)
    counts = [len(line["batches"]) for line in lines(summary.run_dir)]
    assert [sum(counts[: summary.steps // 2]), sum(counts)] == [batches[0], sum(batches)]


def test_memory_stays_flat(made, tmp_path):
    """SpecForge 390: 200 steps, no growth."""
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path, epochs=17, max_steps=210, checkpoint_every=0))
    held = read_run(summary.run_dir).steps["memory_bytes"]
    assert summary.steps == 210
    assert np.median(held[-30:]) - np.median(held[60:90]) < 6 << 20


def test_the_largest_batches_can_be_run_first(made, whole, tmp_path, capsys):
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path, probe=True))
    assert_same_end(summary.run_dir, whole)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("probe:")]
    assert sorted(line.split(",")[0] for line in printed) == ["probe: bucket 0", "probe: bucket 1"]


def test_evaluation_during_training_changes_nothing(made, whole, tmp_path):
    summary = train(tiny_config(made["dataset"], made["target"], tmp_path, eval_every=7))
    assert_same_end(summary.run_dir, whole)
    assert [event["step"] for event in read_run(summary.run_dir).events_of("eval")] == [0, 7, 14, 21, STEPS]


def test_a_full_queue_for_one_batch_only_is_said(made, whole, tmp_path, capsys):
    """The window's byte bound holds for the running work too, so a small one keeps workers idle; the curve is the same."""
    from dflash_nb.pipeline import train as module

    before = module.bytes_per_token
    try:
        module.bytes_per_token = lambda target: 1 << 20
        summary = train(tiny_config(made["dataset"], made["target"], tmp_path, q_hs_mb=1, topology="2-1"))
    finally:
        module.bytes_per_token = before
    assert "target workers cannot always work at once" in capsys.readouterr().out
    assert_same_end(summary.run_dir, whole)


def _run_in_process(folder, config):
    with (Path(folder) / "printed.txt").open("a") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
    torch.set_num_threads(1)
    train(config)


@pytest.fixture(scope="module")
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dflash_nb.pipeline.train"])
    return context


@pytest.mark.slow
def test_killed_at_twenty_moments_and_resumed_it_is_the_same_run(made, whole, tmp_path, processes):
    """SIGKILL, again and again: while loading, stepping, writing a line or a checkpoint, evaluating."""
    chance = random.Random(0)
    runs = tmp_path / "runs"
    small = {"eval_rows": 1, "eval_prompts": 1, "eval_tokens": 2}
    config = tiny_config(made["dataset"], made["target"], runs, checkpoint_every=1, run_name="killed", topology="2-1", **small)
    folder, kills = runs / "killed", 0
    while not (folder / "summary.json").exists():
        resume = (folder / "config.json").exists()
        process = processes.Process(target=_run_in_process, args=(tmp_path, TrainConfig(resume=str(folder)) if resume else config))
        process.start()
        if kills < 20:
            # By turns just after a line was written, and at any time of the start; a step further at most, or the 26 steps would not last.
            moment = time.monotonic() + (60 if kills % 2 else chance.random())
            wanted = logged(folder) + 1
            while logged(folder) < wanted and process.is_alive() and time.monotonic() < moment:
                time.sleep(0.001)
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), (tmp_path / "printed.txt").read_text()
    assert kills == 20
    assert_same_end(folder, whole)
    seen = collections.Counter(i for line in lines(folder) for batch in line["batches"] for i in batch["sample_ids"])
    assert seen == dict.fromkeys(range(60), 2)
    assert read_run(folder).status == "finished"


def logged(folder):
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_terminate_ends_a_process_in_time_with_its_work_saved(made, tmp_path, processes):
    config = tiny_config(made["dataset"], made["target"], tmp_path / "runs", epochs=2000, run_name="long", checkpoint_every=0)
    process = processes.Process(target=_run_in_process, args=(tmp_path, config))
    process.start()
    folder = tmp_path / "runs" / "long"
    while logged(folder) < 5:
        assert process.is_alive(), (tmp_path / "printed.txt").read_text()
        time.sleep(0.01)
    started = time.monotonic()
    process.terminate()
    process.join(30)
    assert time.monotonic() - started < 10
    assert process.exitcode != 0
    run = read_run(folder)
    assert run.status == "interrupted"
    assert [path.name for path in checkpoints(folder / "checkpoints")] == [f"step-{len(run)}"]
