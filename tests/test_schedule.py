"""The learning rate of a step and the number of steps.

Run alone: python -m pytest tests/test_schedule.py
"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_nb.pipeline.schedule import DECAYS, learning_rate, optimizer_steps, warmup_length


def test_the_reference_runs_warm_up():
    assert learning_rate(300, 181_500, peak=6e-4, warmup_steps=3598) == pytest.approx(5.0e-5, rel=0.01)
    assert learning_rate(3598, 181_500, peak=6e-4, warmup_steps=3598) == 6e-4


@pytest.mark.parametrize("decay", DECAYS)
@given(total=st.integers(1, 400), warmup=st.integers(0, 100), ratio=st.floats(0, 1))
def test_it_rises_to_the_peak_then_never_rises_and_is_never_zero(decay, total, warmup, ratio):
    warmup = min(warmup, total)
    rates = [learning_rate(step, total, 1.0, warmup, decay, ratio) for step in range(1, total + 1)]
    assert all(0 < rate <= 1.0 and rate >= ratio for rate in rates[warmup:])
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(rates[warmup:]))
    if warmup:
        assert rates[warmup - 1] == 1.0


def test_cosine_and_linear_pass_half_way_at_half_time():
    for decay in ("cosine", "linear"):
        assert learning_rate(60, 109, 1.0, 10, decay, min_ratio=0.2) == pytest.approx(0.2 + 0.8 * 0.5)


def test_wsd_stays_at_the_peak_until_its_tail():
    rates = [learning_rate(step, 100, 1.0, 10, "wsd", decay_share=0.2) for step in range(1, 101)]
    assert rates[9:80] == [1.0] * 71
    assert rates[80] < 1.0
    assert rates[90] == pytest.approx(0.46, abs=0.05)


def test_a_step_outside_the_plan_and_an_unknown_decay_are_refused():
    for step in (0, 11):
        with pytest.raises(ValueError, match=f"step {step} is outside"):
            learning_rate(step, 10, 1.0)
    with pytest.raises(ValueError, match="one of cosine, linear, wsd, constant"):
        learning_rate(1, 10, 1.0, decay="cosin")


def test_warm_up_is_a_share_or_a_number_and_never_more_than_half():
    assert warmup_length(0.04, 1000) == 40
    assert warmup_length(100, 1000) == 100
    assert warmup_length(100, 50) == 25
    assert warmup_length(0, 1000) == 0
    assert warmup_length(0.5, 1) == 0


def test_steps_are_summed_over_true_epochs():
    assert optimizer_steps([10, 11, 9], accumulation=4) == [3, 3, 3]
    assert optimizer_steps([10, 11, 9]) == [10, 11, 9]
    assert optimizer_steps([10, 11, 9], max_steps=15) == [10, 5, 0]
    assert optimizer_steps([10, 11, 9], accumulation=5, max_steps=99) == [2, 3, 2]
