"""Workers on this machine: where they go, what they hold, and that the pool of threads ends and holds on to nothing.

Run alone: python -m pytest tests/test_local.py
"""

import gc
import threading
import time
import traceback
import weakref
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import save_target
from tiny_targets import make_batch

from dflash_nb.model.target import read_target_info
from dflash_nb.pipeline import local as module
from dflash_nb.pipeline.local import (
    RETIRE_AFTER,
    LocalPool,
    Placement,
    PlacementError,
    bytes_per_token,
    intra_op_threads,
    load_targets,
    place,
    place_drafter,
    target_pool,
)
from dflash_nb.pipeline.window import WorkerFailure, WorkerLost

CPU = torch.device("cpu")


def batch(index=0):
    return SimpleNamespace(index=index, epoch=0)


def test_no_thread_outlives_close():
    before = threading.active_count()
    pool = LocalPool({f"target-{k}": lambda b: b.index for k in range(4)})
    futures = [pool.submit(batch(i)) for i in range(20)]
    assert [future.result(5) for future in futures] == list(range(20))
    pool.close()
    assert threading.active_count() == before


def test_close_cancels_what_is_queued_and_stops_what_runs():
    stop = threading.Event()

    def slow(b):
        if stop.wait(30):
            raise InterruptedError("asked to stop")

    pool = LocalPool({"a": slow}, stop)
    running, queued = pool.submit(batch()), pool.submit(batch())
    while not running.running():
        time.sleep(0.001)
    started = time.perf_counter()
    pool.close()
    assert time.perf_counter() - started < 5
    assert queued.cancelled()
    assert isinstance(running.exception(), WorkerFailure)
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(batch())


def test_a_worker_that_does_not_end_is_named():
    release = threading.Event()
    pool = LocalPool({"target-0": lambda b: release.wait(10)})
    future = pool.submit(batch())
    while not future.running():
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="target-0 is still computing"):
        pool.close(timeout=0.05)
    release.set()
    pool.close()


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), KeyboardInterrupt(), torch.OutOfMemoryError("CUDA out of memory")])
def test_whatever_a_worker_raises_arrives_with_its_traceback_and_the_worker_lives_on(error):
    def work(b):
        if b.index == 0:
            raise error
        return b.index

    pool = LocalPool({"a": work})
    failure = pool.submit(batch(0)).exception(5)
    assert isinstance(failure, WorkerFailure)
    assert failure.worker == "a"
    assert failure.__cause__ is error
    assert traceback.extract_tb(error.__traceback__)[-1].name == "work"
    assert pool.submit(batch(1)).result(5) == 1
    pool.close()


def test_a_worker_that_keeps_failing_is_retired_while_others_are_left():
    def dead(b):
        raise RuntimeError("device lost")

    pool = LocalPool({"dead": dead, "alive": lambda b: time.sleep(0.01)})
    futures = [pool.submit(batch(i)) for i in range(40)]
    failures = [future.exception(5) for future in futures]
    assert sum(failure is not None for failure in failures) == RETIRE_AFTER
    assert pool.workers == ("alive",)
    pool.close()


def test_the_last_worker_is_never_retired():
    def dead(b):
        raise RuntimeError("no")

    pool = LocalPool({"only": dead})
    for i in range(2 * RETIRE_AFTER):
        assert pool.submit(batch(i)).exception(5) is not None
    assert pool.workers == ("only",)
    pool.close()


def test_a_repeated_batch_goes_first():
    gate, order = threading.Event(), []

    def work(b):
        gate.wait(5)
        order.append(b.index)

    pool = LocalPool({"a": work})
    futures = [pool.submit(batch(0)), pool.submit(batch(1)), pool.submit(batch(2))]
    while not futures[0].running():
        time.sleep(0.001)
    futures.append(pool.submit(batch(9), avoid=frozenset({"a"})))
    gate.set()
    for future in futures:
        future.result(5)
    assert order == [0, 9, 1, 2]
    pool.close()


def test_neither_features_nor_the_tensors_of_a_failed_call_are_kept():
    made = []

    def work(b):
        features = torch.zeros(1000)
        made.append(weakref.ref(features))
        if b.index == 1:
            raise RuntimeError("late failure")
        return features

    pool = LocalPool({"a": work})
    result = pool.submit(batch(0)).result(5)
    failed = pool.submit(batch(1))
    assert failed.exception(5) is not None
    gc.disable()
    try:
        assert made[1]() is None, "the failed call's frames still hold its tensor"
        del result
        deadline = time.perf_counter() + 5
        while made[0]() is not None and time.perf_counter() < deadline:
            time.sleep(0.001)
        assert made[0]() is None, "the idle worker still holds what it computed"
    finally:
        gc.enable()
    pool.close()


def test_a_lost_worker_is_opened_again_and_its_batch_fails_at_once():
    opened, gate = [], threading.Event()

    def open_one(name):
        if opened:
            gate.wait(5)
        opened.append(name)

    def work(b):
        if b.index == 1:
            raise WorkerLost("the process is gone")
        return b.index

    pool = LocalPool({"a": work}, open=open_one)
    pool.wait_until_open()
    failure = pool.submit(batch(1)).exception(5)
    assert isinstance(failure.__cause__, WorkerLost)
    waiting = pool.submit(batch(2), avoid=frozenset({"a"}))
    assert not waiting.done()
    gate.set()
    assert waiting.result(5) == 2
    assert opened == ["a", "a"]
    assert list(pool.news) == ["a is lost: the process is gone"]
    pool.close()


def test_when_the_last_worker_cannot_be_opened_what_waits_fails_and_what_comes_too():
    gate = threading.Event()

    def open_none(name):
        gate.wait(5)
        raise OSError(f"no room for {name}")

    pool = LocalPool({"a": len, "b": len}, open=open_none)
    waiting = pool.submit(batch())
    gate.set()
    with pytest.raises(OSError, match="no room"):
        pool.wait_until_open()
    for future in (waiting, pool.submit(batch())):
        assert isinstance(future.exception(5).__cause__, OSError)
    assert pool.workers == ()
    assert sorted(pool.news) == ["a has left: no room for a", "b has left: no room for b"]
    pool.close()


def test_the_report_counts_what_each_worker_did():
    pool = LocalPool({"a": lambda b: b.index})
    for index in range(3):
        pool.submit(batch(index)).result(5)
    (line,) = pool.report()
    assert line.startswith("a: 3 batches, busy ")
    pool.close()


def test_a_pool_without_workers_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        LocalPool({})


def test_threads_started_later_use_the_process_wide_thread_count():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pool = LocalPool({"a": lambda b: torch.get_num_threads()})
        assert pool.submit(batch()).result(5) == 1
        pool.close()
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return read_target_info(save_target(tmp_path_factory.mktemp("target"), "hybrid"))


@pytest.mark.parametrize("with_last_hidden", [False, True])
def test_the_bytes_of_features_are_known_before_they_are_computed(info, with_last_hidden):
    (target,) = load_targets(info, (1, 5), place("cpu", 1), "auto", with_last_hidden)
    batch = make_batch([37, 70, 5])
    assert target.features(batch).nbytes == batch.real_tokens * bytes_per_token(target)


def test_workers_on_a_cpu_share_one_set_of_weights(info):
    targets = load_targets(info, (1, 5), place("cpu", 3), "auto")
    assert len(targets) == 3
    assert len({id(target) for target in targets}) == 1


def test_a_target_stops_between_its_layers_when_the_pool_closes(info):
    targets = load_targets(info, (1, 5), place("cpu", 1), "auto")
    pool = target_pool(targets, CPU)
    assert pool.workers == ("target-0",)
    assert pool.submit(make_batch([9])).result(30).features_ND.shape == (9, 2 * info.hidden_size)
    entered, release = threading.Event(), threading.Event()

    def wait(*_):
        entered.set()
        release.wait(30)

    targets[0].decoder.layers[0].register_forward_pre_hook(wait)
    future = pool.submit(make_batch([9]))
    entered.wait(30)
    pool.stop.set()
    release.set()
    failure = future.exception(30)
    assert isinstance(failure.__cause__, InterruptedError)
    pool.close()


def gpus(monkeypatch, count):
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("count", "device", "targets", "expected"),
    [
        (0, "auto", 3, ["cpu", "cpu", "cpu", "cpu"]),
        (1, "auto", 1, ["cuda:0", "cuda:0"]),
        (2, "auto", 1, ["cuda:0", "cuda:1"]),
        (8, "cuda", 7, [f"cuda:{index}" for index in range(8)]),
        (8, "cuda", 6, [*(f"cuda:{index}" for index in range(6)), "cuda:6"]),
        (8, "cuda:3", 1, ["cuda:3", "cuda:3"]),
        (8, "cpu", 1, ["cpu", "cpu"]),
    ],
)
def test_each_target_and_the_drafter_have_a_device(monkeypatch, count, device, targets, expected):
    gpus(monkeypatch, count)
    placement = place(device, targets)
    assert placement == Placement(tuple(torch.device(name) for name in expected[:-1]), torch.device(expected[-1]))


@pytest.mark.parametrize(
    ("count", "device", "topology", "message"),
    [
        (4, "auto", (7, 1), "topology 7-1 needs 8 GPUs, 4 are visible; use topology 3-1"),
        (8, "auto", (6, 2), "train one drafter; use 6-1"),
        (1, "auto", (2, 1), "would load the target 2 times"),
        (2, "cuda:2", (1, 1), "2 GPUs are visible"),
        (0, "cuda", (1, 1), "0 GPUs are visible"),
        (0, "tpu", (1, 1), "use auto, cpu, cuda"),
    ],
)
def test_a_topology_without_room_is_refused(monkeypatch, count, device, topology, message):
    gpus(monkeypatch, count)
    with pytest.raises(PlacementError, match=message):
        place(device, *topology)


def test_where_the_targets_are_elsewhere_the_drafter_has_the_last_gpu(monkeypatch):
    gpus(monkeypatch, 8)
    assert [str(place_drafter(device)) for device in ("auto", "cuda", "cuda:3", "cpu")] == ["cuda:7", "cuda:7", "cuda:3", "cpu"]
    gpus(monkeypatch, 0)
    assert str(place_drafter("auto")) == "cpu"


def test_threads_are_divided_among_workers_and_drafter(monkeypatch):
    monkeypatch.setattr(module, "usable_cores", lambda: 16)
    assert [intra_op_threads(0, targets) for targets in (1, 3, 7, 40)] == [8, 4, 2, 1]
    assert intra_op_threads(6, 2) == 2
