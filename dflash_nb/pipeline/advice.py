"""Which stage limits a run, and what a change would bring: words and numbers from the seconds that the log holds for every batch.

The batches of the log are replayed through the pipeline's own rules (``planner.timeline``). Only N changes, the seconds of each batch
stay as they were measured. On simulated devices, eight runs with another number of workers came within 8 % of the prediction (median
2 %), on a machine that did other work. That holds where every worker has a device of its own; where target and drafter share one (a
CPU, a single GPU), more workers share it too and nothing is promised.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dflash_nb.pipeline.run import Run
from dflash_nb.pipeline.window import WAITING_BATCHES
from dflash_nb.planner.timeline import Pipeline, timeline

START_UP_STEPS = 5
FEWEST_STEPS = 10
MOST_BATCHES = 2000
MOST_WORKERS = 12
WORTH = 1.03  # a worker that brings less than 3 % does not pay
WORDS = {
    "fetch": "reading and collating",
    "target": "the target",
    "transfer": "moving hidden states",
    "drafter": "the drafter",
    "optimizer": "the optimiser",
}


@dataclass(frozen=True)
class Stages:
    """Seconds of m batches in each stage, in plan order, and their real tokens, float64[m]. ``drafter_M`` is forward, loss and backward,
    ``optimizer_M`` the batch's share of everything else in a step that is not waiting."""

    tokens_M: np.ndarray
    fetch_M: np.ndarray
    target_M: np.ndarray
    transfer_M: np.ndarray
    drafter_M: np.ndarray
    optimizer_M: np.ndarray

    def busy(self, workers: int, drafters: int = 1) -> dict[str, float]:
        """Seconds that each side needs for all batches if it never waits."""
        return {
            "fetch": float(self.fetch_M.sum()),
            "target": float((self.target_M + self.transfer_M).sum()) / workers,
            "drafter": float((self.drafter_M + self.optimizer_M).sum()) / drafters,
        }


@dataclass(frozen=True)
class Choice:
    """A number of target workers: real tokens a second, and the shares of the time that targets and drafter are busy. Tokens a joule
    count every device at full watts; None without watts."""

    workers: int
    tokens_per_second: float
    target_busy: float
    drafter_busy: float
    tokens_per_joule: float | None


@dataclass(frozen=True)
class Advice:
    """limits: the stage, a key of ``WORDS``. busy: share of the time by side. enough: the fewest workers after which one more brings under
    3 %. shared: target and drafter work on one device. sentences: what to do, with the predicted effect.
    """

    limits: str
    busy: dict[str, float]
    workers: int
    tokens_per_second: float
    choices: tuple[Choice, ...]
    enough: int
    without_reading: float
    shared: bool
    sentences: tuple[str, ...]
    drafters: int = 1

    def text(self) -> str:
        """The sentences, one a line."""
        return "\n".join(self.sentences)

    def table(self) -> list[dict[str, Any]]:
        """A row for each number of workers."""
        rows = []
        for each in self.choices:
            row = {
                "topology": f"{each.workers}-{self.drafters}",
                "real tokens/s": round(each.tokens_per_second),
                "targets busy %": round(100 * min(each.target_busy, 1.0)),
                "drafter busy %": round(100 * min(each.drafter_busy, 1.0)),
            }
            if each.tokens_per_joule is not None:
                row["tokens/J"] = each.tokens_per_joule
            row["note"] = ", ".join(
                text
                for said, text in ((each.workers == self.workers, "this run"), (each.workers == self.enough and not self.shared, "enough"))
                if said
            )
            rows.append(row)
        return rows


def advise(run: Run, watts: float = 0.0) -> Advice | None:
    """What the run's own log says about its speed; None before it has ten steps, or where it holds no seconds or no tokens of batches.

    ``watts``: of one device at work, 0 leaves energy out.
    """
    if len(run) < FEWEST_STEPS:
        return None
    workers, drafters = _workers(run)
    stages, seconds = stages_of(run)
    if not (seconds and stages.tokens_M.sum() and any(stages.busy(workers).values())):
        return None
    places = max(1, int(min(window_room(run))))
    return advise_stages(stages, seconds, workers, places - workers, run.config.get("prefetch", 8), watts, on_one_device(run), drafters)


def on_one_device(run: Run) -> bool:
    """Whether target and drafter work on one device. Ray's actors have devices of their own, except on the CPUs of a machine of which Ray
    makes a cluster for the run; whether the nodes of a cluster that was there are machines is not known."""
    devices = run.environment.get("devices")
    targets, drafter = (devices.get("targets") or [], devices.get("drafter")) if isinstance(devices, dict) else ([], None)
    if run.config.get("engine") == "ray":
        return drafter == "cpu" and not run.config.get("ray_address")
    return not targets or drafter in targets


def _workers(run: Run) -> tuple[int, int]:
    """Target workers and drafters of the run's latest part."""
    targets, _, drafters = str(run.config.get("topology", "1-1")).partition("-")
    return int(targets), int(drafters or 1)


def window_room(run: Run) -> tuple[int, float]:
    """The two limits of the window, both in batches: its places, and how many of the run's usual batches fit ``q_hs_mb``.

    The smaller one binds. The second is infinite where no batch ever waited or the log holds no limit.
    """
    workers, _ = _workers(run)
    waiting = (run.steps["q_hs"] > 0) & np.isfinite(run.steps["q_hs_bytes"])
    if not waiting.any() or not run.config.get("q_hs_mb"):
        return workers + WAITING_BATCHES, np.inf
    batch_bytes = float(np.median(run.steps["q_hs_bytes"][waiting] / run.steps["q_hs"][waiting]))
    return workers + WAITING_BATCHES, (run.config["q_hs_mb"] << 20) / max(batch_bytes, 1.0)


def stages_of(run: Run) -> tuple[Stages, float]:
    """The stages of a run's latest batches, start-up left out, and the seconds that their steps really took.

    A batch that does not say its tokens counts as the mean of the others. Without any batch, tokens or seconds these are 0.
    """
    steps, batches = run.steps, run.batches
    first = START_UP_STEPS if len(run) >= 2 * START_UP_STEPS else 0
    rows = np.flatnonzero(batches["at"] >= first)[-MOST_BATCHES:]
    at = batches["at"][rows]
    used = np.arange(at[0], at[-1] + 1) if len(at) else at
    share_M = 1.0 / np.bincount(at)[at]
    tokens = batches["tokens"][rows].astype(np.float64)
    counted = np.isfinite(tokens)

    def of(stage: str) -> np.ndarray:
        own = batches[f"seconds_{stage}"][rows]
        return np.nan_to_num(np.where(np.isfinite(own), own, steps[f"seconds_{stage}"][at] * share_M))

    rest_N = np.maximum(steps["seconds_step"] - steps["seconds_wait"] - steps["seconds_drafter"], 0.0)
    stages = Stages(
        tokens_M=np.where(counted, tokens, tokens[counted].mean() if counted.any() else 0.0),
        fetch_M=of("fetch"),
        target_M=of("target"),
        transfer_M=of("transfer"),
        drafter_M=of("drafter"),
        optimizer_M=np.nan_to_num(rest_N[at] * share_M),
    )
    return stages, float(np.nansum(steps["seconds_step"][used]))


def advise_stages(
    stages: Stages, seconds: float, workers: int, waiting: int, prefetch: int, watts: float = 0.0, shared: bool = False, drafters: int = 1
) -> Advice:
    """The advice for batches that took ``seconds`` with ``workers`` and ``drafters``; ``waiting`` places for finished batches, ``prefetch``
    for collated."""
    tokens = float(stages.tokens_M.sum())
    rate = tokens / seconds
    scale = rate / replay(stages, workers, waiting, prefetch, drafters)
    busy = {side: spent / seconds for side, spent in stages.busy(workers, drafters).items()}
    limits = _limiting(stages, busy)
    most = max(MOST_WORKERS, workers + 2)
    rates = {n: scale * replay(stages, n, waiting, prefetch, drafters) for n in range(1, most + 1)}
    rates[workers] = rate
    enough = next((n for n in range(1, most) if rates[n + 1] < WORTH * rates[n]), most)
    shown = [workers] if shared else range(1, min(most, max(enough, workers) + 1) + 1)
    choices = tuple(
        Choice(
            n,
            rates[n],
            stages.busy(n)["target"] * rates[n] / tokens,
            stages.busy(n, drafters)["drafter"] * rates[n] / tokens,
            rates[n] / ((1 if shared else n + drafters) * watts) if watts else None,
        )
        for n in shown
    )
    without_reading = scale * replay(replace(stages, fetch_M=np.zeros_like(stages.fetch_M)), workers, waiting, prefetch, drafters)
    more_drafters = scale * replay(stages, workers, waiting, prefetch, drafters + 1)
    sentences = [_which(limits, busy, workers, drafters)]
    sentences += _on_one_device(limits) if shared else _what_to_do(limits, workers, drafters, rates, enough, without_reading, more_drafters)
    if watts:
        best = max(choices, key=lambda each: each.tokens_per_joule)
        now = next(each for each in choices if each.workers == workers)
        sentences.append(
            f"At {watts:,.0f} W a device this run trains on {now.tokens_per_joule:.2f} real tokens a joule; "
            + (
                f"{best.workers}-{drafters} would on {best.tokens_per_joule:.2f}."
                if best is not now
                else "no other topology would on more."
            )
        )
    return Advice(limits, busy, workers, rate, choices, enough, without_reading, shared, tuple(sentences), drafters)


def replay(stages: Stages, workers: int, waiting: int, prefetch: int, drafters: int = 1) -> float:
    """Real tokens a second of these batches with ``workers`` target workers, counted from where the pipeline has filled. Several drafters
    are taken to wait for each other after a batch each; a step of more batches lets them wait less."""
    m = len(stages.tokens_M)
    pipeline = Pipeline(workers, prefetch, max(waiting, 1 - workers), drafters=drafters)
    drafter_M = stages.drafter_M + stages.optimizer_M
    found = timeline(stages.fetch_M, stages.target_M + stages.transfer_M, drafter_M, pipeline, accumulation=drafters)
    first = min(2 * workers, m // 3)
    return float(stages.tokens_M[first:].sum()) / max(found.seconds - (found.done_M[first - 1] if first else 0.0), 1e-9)


def _limiting(stages: Stages, busy: dict[str, float]) -> str:
    side = max(busy, key=busy.get)
    if side == "target" and stages.transfer_M.sum() > stages.target_M.sum():
        return "transfer"
    if side == "drafter" and stages.optimizer_M.sum() > stages.drafter_M.sum():
        return "optimizer"
    return side


def _which(limits: str, busy: dict[str, float], workers: int, drafters: int) -> str:
    who = {
        "fetch": "reading",
        "target": "the target worker" if workers == 1 else f"the {workers} target workers",
        "drafter": "the drafter" if drafters == 1 else f"the {drafters} drafters",
    }
    shares = ", ".join(f"{who[side]} {min(share, 1.0):.0%}" for side, share in sorted(busy.items(), key=lambda item: -item[1]))
    return f"{WORDS[limits].capitalize()} limits the speed. Busy: {shares} of the time."


def _on_one_device(limits: str) -> list[str]:
    less = (
        "for the target: less padding (notebook 02)"
        if limits in ("target", "transfer")
        else "for the drafter: fewer anchors or draft layers"
    )
    return [
        "Target and drafter share one device, so their times add up and another target worker brings nothing here.",
        f"What helps is a device more, or less work {less}.",
    ]


def _what_to_do(
    limits: str, workers: int, drafters: int, rates: dict[int, float], enough: int, without_reading: float, more_drafters: float
) -> list[str]:
    gain = rates[workers + 1] / rates[workers]
    brings = f"bring {rates[workers + 1]:,.0f} real tokens/s, {gain:.2f} times this run's" if gain >= WORTH else "bring nothing"
    one_more = f"One more target worker ({workers + 1}-{drafters}) would {brings}."
    if limits in ("target", "transfer") and gain >= WORTH:
        return [
            one_more,
            f"Target workers pay up to {enough}-{drafters}, {rates[enough]:,.0f} real tokens/s; after that another stage limits.",
        ]
    if limits == "fetch":
        return [f"{one_more} Faster storage would bring up to {without_reading:,.0f}, where the next stage limits."]
    advice = [f"{one_more} A cheaper drafter helps: fewer anchors, fewer draft layers."]
    if more_drafters >= WORTH * rates[workers]:
        advice.append(
            f"One more drafter ({workers}-{drafters + 1}, engine ray, accumulation a multiple of {drafters + 1}) would bring "
            f"{more_drafters:,.0f} real tokens/s, {more_drafters / rates[workers]:.2f} times this run's."
        )
    if enough < workers:
        same, fewer = rates[enough] / rates[workers], workers - enough
        workers_fewer = f"{fewer} target worker{'s' * (fewer > 1)} fewer"
        advice.append(f"{enough}-{drafters} would reach {same:.0%} of this rate with {workers_fewer}.")
    return advice
