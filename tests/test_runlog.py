"""The run folder: whole lines whatever happens, exact resume, and a reader that works while the run goes on."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from runs import Recipe, records, write_run

from dflash_nb.pipeline import run as run_module
from dflash_nb.pipeline.run import RunError
from dflash_nb.pipeline.runlog import RunLog, new_run_folder, read_run

RECIPE = Recipe(steps=40, accumulation=2, evals=(0, 10, 40), seed=3)


def test_what_is_written_is_read_back(tmp_path):
    run = read_run(write_run(tmp_path / "run", RECIPE))
    wanted = records(RECIPE)
    assert len(run) == 40 and run.status == "finished" and run.bad_lines == 0 and not run.half_line
    for name in ("step", "epoch", "slots", "blocks", "supervised", "tokens", "padded_tokens", "q_prefetch", "q_hs", "q_hs_bytes"):
        assert run.steps[name].dtype == np.int64 and run.steps[name].tolist() == [record[name] for record in wanted]
    for name in ("time", "elapsed", "loss", "weight", "lr", "grad_norm", "acceptance"):
        np.testing.assert_allclose(run.steps[name], [record[name] for record in wanted], rtol=1e-8)
    np.testing.assert_allclose(run.steps["seconds_wait"], [record["seconds"]["wait"] for record in wanted], rtol=1e-8)
    np.testing.assert_allclose(run.steps["slot_accuracy"], [record["slot_accuracy"] for record in wanted], rtol=1e-6)
    assert run.steps["finite"].all() and run.steps["clipped"].dtype == bool
    batches = [batch for record in wanted for batch in record["batches"]]
    assert run.batches["at"].tolist() == [i // 2 for i in range(80)]
    assert run.batches["bucket"].tolist() == [batch["bucket"] for batch in batches]
    assert run.batches["supervised"].sum() == run.steps["supervised"].sum()
    for i in (0, 33, 79):
        assert run.sample_ids(i).tolist() == batches[i]["sample_ids"]
    assert [event["step"] for event in run.events_of("eval")] == [0, 10, 40]
    assert run.config["learning_rate"] == RECIPE.peak_lr and run.environment["versions"]["python"] and run.plan["total_steps"] == 40


def test_lines_have_the_documented_keys_in_order_and_plain_json(tmp_path):
    write_run(tmp_path / "run", RECIPE)
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert all(list(line) == [name for name in run_module.STEP_FIELDS if name in line] for line in lines)
    assert all(isinstance(line["loss"], float) and len(repr(line["loss"])) < 14 for line in lines)


def record(step: int, **changes) -> dict:
    return {**records(Recipe(steps=1))[0], "step": step, **changes}


def test_two_losses_one_float32_apart_stay_apart(tmp_path):
    a = np.float32(2.3456789)
    with RunLog.create(tmp_path, {}) as log:
        log.step(record(1, loss=float(a)))
        log.step(record(2, loss=float(np.nextafter(a, np.float32(3)))))
    first, second = read_run(tmp_path).steps["loss"]
    assert first != second and np.float32(first) == a


def test_what_is_not_finite_is_null_and_flagged(tmp_path):
    with RunLog.create(tmp_path, {}) as log:
        log.step(record(1))
        log.step(record(2, loss=math.nan))
        log.step(record(3, grad_norm=math.inf))
        log.step(record(4, loss=None, acceptance=None, slot_accuracy=[0.5, None, None]))
    run = read_run(tmp_path)
    assert run.steps["finite"].tolist() == [True, False, False, True]
    assert np.isnan(run.steps["loss"]).tolist() == [False, True, False, True]
    assert np.isnan(run.steps["slot_accuracy"][3]).tolist() == [False, *[True] * 6]
    for line in (tmp_path / "steps.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_record_must_be_whole_and_plain(tmp_path):
    with RunLog.create(tmp_path, {}) as log:
        with pytest.raises(ValueError, match="lacks lr"):
            log.step({name: value for name, value in record(1).items() if name != "lr"})
        with pytest.raises(ValueError, match="not hold lose"):
            log.step(record(1, lose=1.0))
        with pytest.raises(ValueError, match="idle"):
            log.step(record(1, seconds={"idle": 1.0}))
        with pytest.raises(TypeError, match="not Tensor"):
            log.step(record(1, weight=type("Tensor", (), {})()))
        with pytest.raises(ValueError, match="kind of event"):
            log.event("evaluation")
    assert len(read_run(tmp_path)) == 0


def test_counts_stay_whole_numbers_in_whatever_type_they_come(tmp_path):
    with RunLog.create(tmp_path, {}) as log:
        log.step(record(1, slots=np.float32(5000), q_hs_bytes=3e6, weight=np.float64(2.5)))
    run = read_run(tmp_path)
    assert run.steps["slots"].tolist() == [5000] and run.steps["q_hs_bytes"].tolist() == [3_000_000] and run.bad_lines == 0


def test_time_is_stamped_and_elapsed_goes_on_after_a_resume(tmp_path):
    bare = {name: value for name, value in record(1).items() if name not in ("time", "elapsed")}
    with RunLog.create(tmp_path, {}) as log:
        before = time.time() - 0.001
        time.sleep(0.02)
        line = log.step(bare)
        assert before < line["time"] <= time.time() + 0.001 and line["elapsed"] >= 0.02
    with RunLog.open_for_resume(tmp_path, 1) as log:
        assert line["elapsed"] < log.step({**bare, "step": 2})["elapsed"] < line["elapsed"] + 5


def test_what_a_resume_changed_holds_until_the_next_one(tmp_path):
    with RunLog.create(tmp_path, {"topology": "1-1", "q_hs_mb": 256}) as log:
        log.step(record(1))
        watched = read_run(tmp_path)
    for settings in ({"topology": "3-1", "q_hs_mb": 7}, {}, {"topology": "2-1"}):
        RunLog.open_for_resume(tmp_path, 1, settings).close()
        watched.refresh()
        for run in (read_run(tmp_path), watched):
            assert run.config == {"topology": "1-1", "q_hs_mb": 256} | settings and run.bad_lines == 0
    with (tmp_path / "events.jsonl").open("a") as events:
        events.write('{"kind": "warning", "step": 1, "settings": "x"}\n')
    assert read_run(tmp_path).bad_lines == 1


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    with RunLog.create(tmp_path, {}) as log:
        log.step(record(1))
        real, calls = os.write, []

        def full(descriptor, data):
            calls.append(len(data))
            if len(calls) == 1:
                return real(descriptor, data[:100])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            log.step(record(2))
        monkeypatch.setattr(os, "write", real)
        log.step(record(3))
    run = read_run(tmp_path)
    assert run.steps["step"].tolist() == [1, 3] and run.bad_lines == 0


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from runs import Recipe, records
from dflash_nb.pipeline.runlog import RunLog
log = RunLog.create(Path(sys.argv[1]), {})
made = records(Recipe(steps=100))
for step in range(1, 1_000_000):
    log.step({**made[step % 100], "step": step})
    print(".", end="", flush=True)
"""


def test_kill_9_leaves_whole_lines_and_an_unfinished_run(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, Path(__file__).parent], stdout=subprocess.PIPE)
    seen = process.stdout.read(500)
    assert read_run(tmp_path).status == "running"
    with pytest.raises(RunError, match="another process"):
        RunLog.open_for_resume(tmp_path, 0)
    os.kill(process.pid, signal.SIGKILL)
    seen += process.communicate()[0]
    run = read_run(tmp_path)
    assert len(run) >= len(seen) and run.bad_lines == 0 and run.status == "unfinished"
    assert f"-p resume {tmp_path}" in run.status_text()
    RunLog.open_for_resume(tmp_path, 100).close()
    assert len(read_run(tmp_path)) == 100


def test_resume_drops_what_came_after_the_checkpoint_and_keeps_it_aside(tmp_path):
    write_run(tmp_path / "run", RECIPE, status=None, upto=25)
    with (tmp_path / "run" / "steps.jsonl").open("a") as file:
        file.write('{"step":26,"epoch":0,"lo')
    kept = read_run(tmp_path / "run").steps["loss"]
    with RunLog.open_for_resume(tmp_path / "run", 10) as log:
        for each in records(RECIPE)[10:]:
            log.step(each)
        log.finish("finished")
    run = read_run(tmp_path / "run")
    assert run.steps["step"].tolist() == list(range(1, 41)) and run.status == "finished" and run.bad_lines == 0
    [dropped] = run.events_of("dropped")
    assert (dropped["first"], dropped["last"]) == (11, 25) and dropped["losses"] == kept[10:].tolist()
    [resume] = run.events_of("resume")
    assert resume["step"] == 10 and resume["dropped"] == 15 and resume["after"] == "unfinished" and resume["versions_changed"] == {}
    assert (tmp_path / "run" / "steps.jsonl").read_bytes() == (write_run(tmp_path / "whole", RECIPE) / "steps.jsonl").read_bytes()


def test_events_that_a_resume_undid_are_left_out(tmp_path):
    write_run(tmp_path / "run", RECIPE)
    assert [event["step"] for event in read_run(tmp_path / "run").events_of("eval")] == [0, 10, 40]
    with RunLog.open_for_resume(tmp_path / "run", 10):
        run = read_run(tmp_path / "run")
        assert [event["step"] for event in run.events_of("eval")] == [0, 10] and not run.events_of("checkpoint", "finish")
        assert run.status == "running" and len(run) == 10


def test_resume_from_nothing_and_past_the_end(tmp_path):
    write_run(tmp_path / "a", RECIPE, status=None, upto=5)
    RunLog.open_for_resume(tmp_path / "a", 0).close()
    assert len(read_run(tmp_path / "a")) == 0
    write_run(tmp_path / "b", RECIPE, status=None, upto=5)
    RunLog.open_for_resume(tmp_path / "b", 8).close()
    assert "before the checkpoint at step 8" in read_run(tmp_path / "b").events_of("warning")[0]["text"]


def test_a_growing_log_is_read_on_from_where_reading_stopped(tmp_path):
    path, made = tmp_path / "run", records(RECIPE)
    path.mkdir()
    with RunLog.create(path, {}) as log:
        run = read_run(path)
        assert len(run) == 0 and run.status == "running" and "no step" in run.status_text()
        for start in range(0, 40, 8):
            for each in made[start : start + 8]:
                log.step(each)
            assert run.refresh() == 8 and run.refresh() == 0
    whole = read_run(path)
    for name in whole.steps:
        np.testing.assert_array_equal(run.steps[name], whole.steps[name])
    for name in whole.batches:
        np.testing.assert_array_equal(run.batches[name], whole.batches[name])
    np.testing.assert_array_equal(run.ids, whole.ids)


def test_refresh_notices_that_a_resume_cut_the_log(tmp_path):
    run = read_run(write_run(tmp_path / "run", RECIPE, status=None, upto=20))
    with RunLog.open_for_resume(tmp_path / "run", 5) as log:
        for each in records(Recipe(steps=40, accumulation=2, seed=4))[5:]:
            log.step(each)
        assert run.refresh() == 40 and run.steps["step"].tolist() == list(range(1, 41))
        np.testing.assert_array_equal(run.steps["loss"], read_run(tmp_path / "run").steps["loss"])


@pytest.mark.parametrize("block", [300, 2000, 1 << 20])
def test_blocks_of_any_size_give_the_same_columns(tmp_path, monkeypatch, block):
    path = write_run(tmp_path / "run", RECIPE)
    whole = read_run(path)
    monkeypatch.setattr(run_module, "BLOCK_BYTES", block)
    run = read_run(path)
    for name in whole.steps:
        np.testing.assert_array_equal(run.steps[name], whole.steps[name])
    np.testing.assert_array_equal(run.ids, whole.ids)


def test_half_a_line_waits_and_a_bad_line_is_counted(tmp_path):
    path = write_run(tmp_path / "run", RECIPE, status=None)
    lines = (path / "steps.jsonl").read_bytes().splitlines(keepends=True)
    damaged = [*lines[:3], b"\x00\x00garbage\n", b'{"epoch":1}\n', b"[1]\n", *lines[3:6], lines[6][:50]]
    (path / "steps.jsonl").write_bytes(b"".join(damaged))
    run = read_run(path)
    assert run.steps["step"].tolist() == [1, 2, 3, 4, 5, 6] and run.bad_lines == 3 and run.half_line
    with (path / "steps.jsonl").open("ab") as file:
        file.write(lines[6][50:])
    assert run.refresh() == 1 and not run.half_line


def test_older_and_newer_logs_are_read_with_what_they_have(tmp_path):
    (tmp_path / "steps.jsonl").write_text('{"step":1,"loss":2.5}\n{"step":2,"loss":2,"new":{"a":1},"slot_accuracy":[0.5]}\n')
    run = read_run(tmp_path)
    assert run.steps["loss"].tolist() == [2.5, 2.0] and np.isnan(run.steps["lr"]).all() and run.steps["slot_accuracy"].shape == (2, 1)
    assert run.steps["finite"].all() and np.isnan(run.steps["clipped"]).all()
    assert len(run.batches["loss"]) == 0 and run.config == {} and run.events == []


def test_what_is_no_run_folder_is_named(tmp_path):
    for path, say in ((tmp_path, "neither"), (tmp_path / "none", "does not exist")):
        with pytest.raises(RunError, match=say):
            read_run(path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match=r"config\.json is not readable"):
        read_run(tmp_path)


def test_names_are_taken_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_run_folder(tmp_path, dataset="/data/my chats", strategy="bucketed"), range(8)))
    assert len(set(made)) == 8 and all(path.is_dir() for path in made)
    assert made[0].name.split("-", 4)[4].startswith("my-chats-bucketed")


def test_a_named_folder_may_hold_a_notebook_but_no_run(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "03_train.ipynb").write_text("{}")
    folder = new_run_folder(tmp_path, "mine")
    with RunLog.create(folder, {}) as log:
        log.step(record(1))
    with pytest.raises(RunError, match="-p resume"):
        new_run_folder(tmp_path, "mine")
    with pytest.raises(RunError, match="-p resume"):
        RunLog.create(folder, {})


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_never_began_leaves_nothing(tmp_path, error, capsys):
    folder = new_run_folder(tmp_path, "mine")
    (folder / "out.ipynb").touch()
    with pytest.raises(error), RunLog.create(folder, {}) as log:
        log.write("plan", {})
        log.finish("failed")
        raise error
    assert [path.name for path in folder.iterdir()] == ["out.ipynb"] and "no step was made" in capsys.readouterr().out
    (folder / "out.ipynb").unlink()
    with pytest.raises(error), RunLog.create(new_run_folder(tmp_path, "mine"), {}):
        raise error
    assert not folder.exists()


def test_a_run_that_began_stays_when_it_fails(tmp_path):
    with pytest.raises(ValueError), RunLog.create(tmp_path, {}) as log:
        log.step(record(1))
        raise ValueError
    with pytest.raises(ValueError), RunLog.open_for_resume(tmp_path, 0):
        raise ValueError
    assert (tmp_path / "config.json").is_file()


def test_the_name_of_a_run_killed_before_its_first_step_is_free_again(tmp_path):
    folder = new_run_folder(tmp_path, "mine")
    with RunLog.create(folder, {}) as log:
        log.write("plan", {})
        with pytest.raises(RunError, match="already holds a run"):
            new_run_folder(tmp_path, "mine")
    (folder / "out.ipynb").touch()
    assert new_run_folder(tmp_path, "mine") == folder
    assert [path.name for path in folder.iterdir()] == ["out.ipynb"]
    (folder / "checkpoints").mkdir()
    (folder / "config.json").touch()
    with pytest.raises(RunError, match="already holds a run"):
        new_run_folder(tmp_path, "mine")
