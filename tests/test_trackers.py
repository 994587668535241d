"""A tracker costs one warning and never a step. Sources: wandb 12581 and rsl_rl 232 (settings that a version no longer accepts)."""

import importlib.util
import sys
import threading
import time
import types

import pytest
from runs import Recipe, evaluation, records

from dflash_nb.pipeline import trackers
from dflash_nb.pipeline.trackers import Tracker

RECORDS = records(Recipe(steps=5))


class Fake(types.ModuleType):
    """A tracker in memory that fails where it is told to."""

    def __init__(self, fails_in="", hangs_in=""):
        super().__init__("fake")
        self.logged, self.calls, self.run = [], [], None
        self.fails_in, self.hangs_in, self.go = fails_in, hangs_in, threading.Event()

    def _called(self, name):
        self.calls.append(name)
        if self.fails_in == name:
            raise RuntimeError(f"{name} failed\nwith a long text")
        if self.hangs_in == name:
            self.go.wait(20)

    def init(self, **options):
        self._called("init")
        self.options = options
        return self

    def log(self, values, step):
        self._called("log")
        self.logged.append((step, values))

    def finish(self):
        self._called("finish")

    def teardown(self):
        self._called("teardown")


def use(monkeypatch, fake, name="trackio"):
    monkeypatch.setitem(sys.modules, name, fake)
    return fake


def report(name, folder):
    """What a run does; returns the warnings and the longest call in seconds."""
    warnings, longest = [], 0.0
    tracker = Tracker(name, folder, {"seed": 1}, warnings.append)
    for record in RECORDS:
        started = time.perf_counter()
        tracker.step(record)
        longest = max(longest, time.perf_counter() - started)
    tracker.evaluation(5, evaluation(Recipe(), 5))
    tracker.close()
    tracker.close()
    return warnings, longest


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_every_step_and_evaluation_arrives(monkeypatch, tmp_path, name):
    fake = use(monkeypatch, Fake(), name)
    warnings, _ = report(name, tmp_path)
    assert warnings == [] and fake.calls[0] == "init" and "finish" in fake.calls
    assert [step for step, _ in fake.logged] == [1, 2, 3, 4, 5, 5]
    values = fake.logged[0][1]
    assert values["loss"] == RECORDS[0]["loss"] and values["slot_accuracy/7"] == RECORDS[0]["slot_accuracy"][6]
    assert values["tokens_per_second"] == pytest.approx(RECORDS[0]["tokens"] / RECORDS[0]["seconds"]["step"])
    assert set(fake.logged[-1][1]) == {"heldout/loss", "heldout/acceptance"}, "tau was not measured"
    assert all(type(value) is float for _, values in fake.logged for value in values.values())


def test_none_is_nothing(tmp_path):
    before = threading.active_count()
    assert report("none", tmp_path) == ([], pytest.approx(0, abs=1)) and threading.active_count() == before


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_missing(monkeypatch, tmp_path, name):
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "tensorboard.summary", None)
    [warning], _ = report(name, tmp_path)
    assert "not installed" in warning and "[trackers]" in warning


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_failing_anywhere_is_one_warning_of_one_line(monkeypatch, tmp_path, where):
    use(monkeypatch, Fake(fails_in=where))
    [warning], _ = report("trackio", tmp_path)
    assert "RuntimeError" in warning and f"{where} failed" in warning and "\n" not in warning


def test_hanging_holds_up_no_step(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    fake = use(monkeypatch, Fake(hangs_in="log"))
    warnings, longest = report("trackio", tmp_path)
    fake.go.set()
    assert longest < 1 and len(warnings) == 1 and "left behind" in warnings[0]


def test_too_slow_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "QUEUE_LENGTH", 2)
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    fake = use(monkeypatch, Fake(hangs_in="init"))
    warnings, _ = report("trackio", tmp_path)
    fake.go.set()
    assert len(warnings) == 1 and "keep up" in warnings[0]


def test_wandb_that_is_too_new_for_a_setting_is_asked_without(monkeypatch, tmp_path):
    fake = use(monkeypatch, Fake(), "wandb")
    accept = fake.init

    def strict(settings=None, **options):
        if settings:
            raise ValueError("Extra inputs are not permitted")
        return accept(**options)

    fake.init = strict
    assert report("wandb", tmp_path)[0] == [] and len(fake.logged) == 6


@pytest.mark.parametrize("environment", [{"WANDB_MODE": "disabled"}, {"WANDB_API_KEY": "x" * 40}, {}])
def test_wandb_goes_offline_without_credentials(monkeypatch, tmp_path, environment):
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", str(tmp_path))
    fake = use(monkeypatch, Fake(), "wandb")
    report("wandb", tmp_path)
    assert fake.options["mode"] == environment.get("WANDB_MODE", "online" if environment else "offline")


def test_a_run_of_the_users_own_is_left_alone(monkeypatch, tmp_path):
    fake = use(monkeypatch, Fake(), "wandb")
    fake.run = object()
    report("wandb", tmp_path)
    assert "finish" in fake.calls and "teardown" not in fake.calls


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="wandb is not installed")
@pytest.mark.parametrize("settings", [trackers.WANDB_SETTINGS, {"_stats_sample_rate_seconds": 1}, {"start_method": "thread"}])
def test_real_wandb_offline(monkeypatch, tmp_path, capfd, settings):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(trackers, "WANDB_SETTINGS", settings)
    warnings, _ = report("wandb", tmp_path)
    assert warnings == []
    [log] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert log.stat().st_size > 1000
    if settings is trackers.WANDB_SETTINGS:
        assert capfd.readouterr().out == ""


@pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="tensorboard is not installed")
def test_real_tensorboard(tmp_path):
    assert report("tensorboard", tmp_path)[0] == []
    [log] = tmp_path.glob("tensorboard/events.*")
    data = log.read_bytes()
    assert b"slot_accuracy/7" in data and b"heldout/loss" in data
