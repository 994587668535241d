"""The window: plan order, bounds in items and bytes, retries, and waits that somebody can end.

Run alone: python -m pytest tests/test_window.py
"""

import random
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from dflash_nb.pipeline.local import LocalPool
from dflash_nb.pipeline.prefetch import Prefetcher
from dflash_nb.pipeline.window import Window, WorkerError, WorkerFailure


@dataclass(frozen=True)
class Numbered:
    index: int
    tokens: int = 10
    epoch: int = 0
    padded_length: int = 10
    nbytes: int = 8

    @property
    def sample_ids_B(self):
        return np.array([100 + self.index, 200 + self.index])


class Traced:
    """A worker that sleeps at random, and notes what it computed."""

    def __init__(self, seed=0, slow=0.004):
        self.random = random.Random(seed)
        self.slow = slow
        self.done = []

    def __call__(self, batch):
        time.sleep(self.random.random() * self.slow)
        self.done.append(batch.index)
        return batch.index * 11


def prefetched(batches):
    return Prefetcher(iter(batches), lambda batch: batch, max_items=4)


def consume(works, batches, **options):
    """All of ``batches`` through a window over ``works``; closes everything."""
    pool = LocalPool(works)
    window = Window(prefetched(batches), pool, size_of=lambda batch: batch.tokens, **options)
    try:
        return list(window)
    finally:
        window.close()
        pool.close()


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_features_come_in_plan_order_whatever_the_workers_do(workers):
    works = {f"target-{k}": Traced(seed=k, slow=0.001 * 4**k % 0.01) for k in range(workers)}
    ready = consume(works, [Numbered(i) for i in range(60)])
    assert [item.batch.index for item in ready] == list(range(60))
    assert [item.features for item in ready] == [11 * i for i in range(60)]
    assert sorted(i for work in works.values() for i in work.done) == list(range(60))


def test_what_is_computed_and_what_waits_stays_within_items_and_bytes():
    most, lock = {"items": 0, "bytes": 0}, threading.Lock()
    held = {"items": 0, "bytes": 0}

    def work(batch):
        with lock:
            held["items"] += 1
            held["bytes"] += batch.tokens
            most.update({key: max(most[key], held[key]) for key in held})
        return batch.tokens

    batches = [Numbered(i, tokens=10 + 7 * (i % 5)) for i in range(80)]
    pool = LocalPool({"a": work, "b": work, "c": work})
    window = Window(prefetched(batches), pool, size_of=lambda batch: batch.tokens, max_items=5, max_bytes=100)
    for ready in window:
        time.sleep(0.001)
        assert window.reserved_bytes <= 100
        assert window.nbytes <= window.reserved_bytes
        with lock:
            held["items"] -= 1
            held["bytes"] -= ready.features
    assert window.reserved_bytes == window.nbytes == window.depth == 0
    window.close()
    pool.close()
    # The batch that the caller is working on has left the window, but is still counted by this test.
    assert most["items"] <= 5 + 1
    assert most["bytes"] <= 100 + 38


def test_a_batch_larger_than_the_bound_passes_alone():
    ready = consume({"a": Traced()}, [Numbered(0), Numbered(1, tokens=1000), Numbered(2)], max_bytes=50)
    assert [item.batch.index for item in ready] == [0, 1, 2]


def test_a_failed_batch_is_run_again_on_another_worker_and_reported():
    events = []

    def broken(batch):
        time.sleep(0.001)
        raise MemoryError("no room")

    works = {"bad": broken, "good": Traced(slow=0.01)}
    ready = consume(works, [Numbered(i) for i in range(20)], on_retry=lambda *event: events.append(event))
    assert [item.features for item in ready] == [11 * i for i in range(20)]
    assert events
    assert all(failure.worker == "bad" and "MemoryError: no room" in str(failure) and attempt == 2 for _, failure, attempt in events)


def test_the_only_worker_may_try_again():
    failed = set()

    def sometimes(batch):
        if batch.index % 3 == 0 and batch.index not in failed:
            failed.add(batch.index)
            raise RuntimeError("CUDA out of memory")
        return batch.index

    ready = consume({"a": sometimes}, [Numbered(i) for i in range(10)], retries=1)
    assert [item.features for item in ready] == list(range(10))
    assert failed == {0, 3, 6, 9}


def test_a_batch_that_fails_everywhere_stops_the_run_with_its_sample_ids():
    def work(batch):
        if batch.index == 5:
            raise ValueError("sample is broken")
        return batch.index

    with pytest.raises(WorkerError, match=r"batch 5 of epoch 0 \(2 x 10 tokens, sample ids 105, 205\) failed 3 times") as caught:
        consume({"a": work, "b": work}, [Numbered(i) for i in range(10)], retries=2)
    assert caught.value.sample_ids == (105, 205)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "test_window.py" in str(caught.traceback[0].path)
    deepest = caught.value.__cause__.__traceback__
    while deepest.tb_next:
        deepest = deepest.tb_next
    assert deepest.tb_frame.f_code.co_name == "work"


def test_each_retry_goes_to_a_worker_that_has_not_failed_the_batch():
    tried = []

    def work(name):
        def run(batch):
            tried.append(name)
            raise RuntimeError("never")

        return run

    with pytest.raises(WorkerError):
        consume({name: work(name) for name in "abc"}, [Numbered(0)], retries=2)
    assert sorted(tried) == ["a", "b", "c"]


def test_an_error_while_collating_reaches_the_caller():
    def collate(number):
        if number == 3:
            raise OSError("row 3 cannot be read")
        return Numbered(number)

    pool = LocalPool({"a": Traced()})
    window = Window(Prefetcher(iter(range(5)), collate), pool, size_of=lambda batch: 1)
    with pytest.raises(OSError, match="row 3"):
        list(window)
    window.close()
    pool.close()


def test_a_wait_ends_when_another_thread_closes_the_window():
    release = threading.Event()
    pool = LocalPool({"a": lambda batch: release.wait(10)})
    window = Window(prefetched([Numbered(0)]), pool, size_of=lambda batch: 1)
    closer = threading.Timer(0.1, window.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(window)
    closer.join()
    release.set()
    pool.close()


def test_what_is_in_flight_is_known():
    pool = LocalPool({"a": Traced()})
    window = Window(prefetched([Numbered(i) for i in range(9)]), pool, size_of=lambda batch: 1, max_items=3)
    next(window)
    flying = window.in_flight()
    assert flying[0] == {"epoch": 0, "index": 1}
    assert len(flying) <= 3
    window.close()
    pool.close()
    assert window.in_flight() == []


def test_a_window_without_room_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Window(None, None, size_of=len, max_items=0)


def test_no_worker_left():
    class Empty:
        workers = ()

    source = prefetched([Numbered(4)])
    window = Window(source, Empty(), size_of=lambda batch: 1)
    with pytest.raises(WorkerError, match="no target worker is left") as caught:
        next(window)
    assert caught.value.sample_ids == (104, 204)
    window.close()


def test_a_failure_names_its_worker():
    assert str(WorkerFailure("target-1", "OSError: gone")) == "target-1: OSError: gone"
