"""The learning rate of a step, as a pure function of the step, so that resuming has nothing to restore.

Steps count from 1. Warm-up is linear and reaches the peak at its last step: the reference run's 3,598 steps to 6e-4 give 5.0e-5 at
step 300. After it the decay runs from the peak towards ``peak * min_ratio`` without reaching it, so no step has a rate of 0.
"""

import math

DECAYS = ("cosine", "linear", "wsd", "constant")


def learning_rate(
    step: int, total_steps: int, peak: float, warmup_steps: int = 0, decay: str = "cosine", min_ratio: float = 0.0, decay_share: float = 0.2
) -> float:
    """Learning rate of ``step`` (1 .. ``total_steps``).

    ``wsd`` (warm-up, stable, decay) stays at the peak and falls by a cosine over the last ``decay_share`` of all steps.
    """
    if not 1 <= step <= total_steps:
        raise ValueError(f"step {step} is outside the plan of {total_steps} steps")
    if step <= warmup_steps:
        return peak * step / warmup_steps
    if decay == "constant":
        return peak
    first = warmup_steps
    if decay == "wsd":
        first = max(warmup_steps, total_steps - round(decay_share * total_steps))
        if step <= first:
            return peak
    progress = (step - first) / (total_steps - first + 1)
    if decay == "linear":
        shape = 1.0 - progress
    elif decay in ("cosine", "wsd"):
        shape = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        raise ValueError(f"decay is {decay!r}; it must be one of {', '.join(DECAYS)}")
    return peak * (min_ratio + (1.0 - min_ratio) * shape)


def warmup_length(warmup: int | float, total_steps: int) -> int:
    """Steps of warm-up: a whole number from 1 on is steps, a number below 1 a share of all steps. Never more than half the run."""
    steps = round(warmup * total_steps) if warmup < 1 else int(warmup)
    return min(steps, total_steps // 2)


def optimizer_steps(batches_by_epoch: list[int], accumulation: int = 1, max_steps: int = 0) -> list[int]:
    """Optimiser steps of each epoch: every window of ``accumulation`` batches is one, the last window of an epoch may be short.

    ``max_steps`` > 0 ends the run there; later epochs then have no steps.
    """
    steps, left = [], max_steps if max_steps > 0 else math.inf
    for batches in batches_by_epoch:
        steps.append(int(min(left, -(-batches // accumulation))))
        left -= steps[-1]
    return steps
