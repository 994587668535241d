"""The prefetch thread: order, bounds, errors, and an end.

Run alone: python -m pytest tests/test_prefetch.py
"""

import threading
import time
from types import SimpleNamespace

import pytest

from dflash_nb.pipeline.prefetch import Prefetcher


def numbered(index, nbytes=8):
    return SimpleNamespace(index=index, nbytes=nbytes)


def test_it_is_bounded_in_items_and_bytes():
    collated = []

    def collate(number):
        collated.append(number)
        return numbered(number, nbytes=10)

    prefetcher = Prefetcher(iter(range(100)), collate, max_items=50, max_bytes=35)
    time.sleep(0.1)
    assert prefetcher.depth == 3
    assert prefetcher.nbytes == 30
    assert len(collated) == 4  # the fourth is collated and waits for room
    assert [prefetcher.take(1.0).batch.index for _ in range(20)] == list(range(20))
    prefetcher.close()
    assert prefetcher.depth == prefetcher.nbytes == 0


def test_one_large_batch_passes():
    prefetcher = Prefetcher(iter(range(3)), lambda number: numbered(number, nbytes=10**9), max_bytes=1)
    assert [prefetcher.take(1.0).batch.index for _ in range(3)] == [0, 1, 2]
    assert prefetcher.take(1.0) is None
    assert prefetcher.exhausted
    prefetcher.close()


def test_an_error_comes_after_what_was_collated_before_it():
    def collate(number):
        if number == 2:
            raise OSError("row 2 cannot be read")
        return numbered(number)

    prefetcher = Prefetcher(iter(range(5)), collate)
    assert [prefetcher.take(1.0).batch.index for _ in range(2)] == [0, 1]
    assert not prefetcher.exhausted
    with pytest.raises(OSError, match="row 2") as caught:
        prefetcher.take(1.0)
    assert caught.traceback[-1].name == "collate"
    prefetcher.close()


def test_close_ends_a_thread_that_waits_for_room():
    before = threading.active_count()
    prefetcher = Prefetcher(iter(range(100)), numbered, max_items=2)
    while prefetcher.depth < 2:
        time.sleep(0.001)
    prefetcher.close()
    assert threading.active_count() == before


def test_the_seconds_of_each_batch_include_planning_it():
    def planned():
        for number in range(2):
            time.sleep(0.02)
            yield number

    prefetcher = Prefetcher(planned(), numbered)
    assert all(prefetcher.take(1.0).seconds >= 0.02 for _ in range(2))
    prefetcher.close()
