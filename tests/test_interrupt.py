"""Signals stop a run between steps.

Run alone: python -m pytest tests/test_interrupt.py
"""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dflash_nb.pipeline.interrupt import interruptible


@pytest.fixture(autouse=True)
def interrupts_arrive():
    """A test run started in the background inherits an ignored SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_both_signals_become_a_keyboard_interrupt(number):
    with pytest.raises(KeyboardInterrupt, match=f"stopped by {number.name}"), interruptible():
        send(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_held_signal_waits_for_the_end_of_the_step(number):
    done = []
    with pytest.raises(KeyboardInterrupt), interruptible() as hold:
        with hold:
            done.append("first half")
            send(number)
            done.append("second half")
        done.append("never")
    assert done == ["first half", "second half"]


def test_the_old_handlers_come_back():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(KeyboardInterrupt), interruptible():
        send(signal.SIGTERM)
    with interruptible():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_second_terminate_lets_the_ending_finish_and_a_second_interrupt_does_not():
    with interruptible():
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        send(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


def test_an_error_in_a_held_block_is_not_hidden():
    with pytest.raises(ValueError, match="step"), interruptible() as hold, hold:
        send(signal.SIGTERM)
        raise ValueError("step")


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruptible():
            send(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_installs_nothing():
    seen = []

    def run():
        with interruptible() as hold, hold:
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [before]


CHILD = """
import sys, time
from dflash_nb.pipeline.interrupt import interruptible
try:
    with interruptible():
        print("ready", flush=True)
        time.sleep(60)
except KeyboardInterrupt as error:
    open(sys.argv[1], "w").write(str(error))
"""


def test_the_end_of_the_parent_is_an_interrupt(tmp_path):
    """papermill dies of SIGTERM without a word to its kernel."""
    said = tmp_path / "said"
    between = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    parent = subprocess.Popen([sys.executable, "-c", between, CHILD, str(said)], stdout=subprocess.PIPE)
    parent.stdout.readline()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while not said.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert said.read_text() == "stopped by SIGTERM"
    parent.stdout.close()


def test_no_thread_is_left():
    before = threading.active_count()
    with interruptible():
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
