"""How a run ended, in numbers that its log holds.

First and last loss are medians over 5 % of the steps at each end, between 1 and 20 steps: one step's loss depends on its bucket. Real
tokens/s and padding efficiency are sums over all steps, evaluation and checkpoints not counted.
"""

import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from dflash_nb.pipeline.advice import FEWEST_STEPS, advise
from dflash_nb.pipeline.run import Run

REPETITIVE = 0.25  # share of repeated phrases of four tokens from which tau is doubted
WRAP = {"break_long_words": False, "break_on_hyphens": False}


@dataclass(frozen=True)
class RunSummary:
    """What ``train`` returns and ``summary.json`` holds. A number is None where nothing was measured."""

    run_dir: Path
    finished: bool
    steps: int
    total_steps: int
    first_loss: float | None = None
    last_loss: float | None = None
    loss_steps: int = 0
    tau_untrained: float | None = None
    tau_trained: float | None = None
    tau_interval: tuple[float, float] | None = None
    tau_prompts: int | None = None
    tau_repeated: float | None = None
    agreement: str | None = None
    efficiency: float | None = None
    tokens_per_second: float | None = None
    advice: str | None = None
    checkpoint: Path | None = None
    export: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``finished`` is left to the status."""
        values = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}
        del values["finished"]
        return values

    def text(self) -> str:
        """The summary as a few aligned lines."""
        over = "first and last step" if self.loss_steps == 1 else f"median of {self.loss_steps} steps at each end"
        event = {"tau": self.tau_trained, "tau_prompts": self.tau_prompts, "tau_repeated": self.tau_repeated}
        event["tau_low"], event["tau_high"] = self.tau_interval or (None, None)
        rows = [
            ("run", f"{self.run_dir}" + ("" if self.finished else f"  (not finished, continue with -p resume {self.run_dir})")),
            ("steps", f"{self.steps:,} of {self.total_steps:,}"),
            ("padding efficiency", _number(self.efficiency, "{:.1%}")),
            ("real tokens/s", _number(self.tokens_per_second, "{:,.0f}")),
            ("loss", f"{_number(self.first_loss, '{:.3f}')} -> {_number(self.last_loss, '{:.3f}')}  ({over})"),
            ("tau", f"{_number(self.tau_untrained, '{:.2f}')} untrained -> trained {tau_words(event)}{repetition(self.tau_repeated)}"),
            ("cheap estimate", self.agreement or "not compared with decoding"),
            ("speed", self.advice or f"{'too few steps' if self.steps < FEWEST_STEPS else 'too little in the log'} to say what limits it"),
            ("checkpoint", str(self.checkpoint or "none")),
            ("export", str(self.export or "none")),
        ]
        lines = {name: f"{name:<19} {value}" for name, value in rows}
        for name in ("tau", "cheap estimate", "speed"):  # sentences; a path or a command must stay in one piece
            lines[name] = textwrap.fill(lines[name], 140, subsequent_indent=20 * " ", **WRAP)
        return "\n".join(lines.values())


def summarize(run: Run, total_steps: int, finished: bool, checkpoint: Path | None, export: Path | None) -> RunSummary:
    """The summary of what a run folder's log holds."""
    steps, losses = run.steps, run.steps["loss"][np.isfinite(run.steps["loss"])]
    count = max(1, min(20, round(len(losses) * 0.05)))
    evals = run.events_of("eval")
    untrained = next((event for event in evals if event["step"] == 0), {})
    trained = next((event for event in reversed(evals) if event["step"] == len(run) > 0), {})
    interval = (trained.get("tau_low"), trained.get("tau_high"))
    tokens, padded, seconds = (float(steps[name].sum()) for name in ("tokens", "padded_tokens", "seconds_step"))
    return RunSummary(
        run_dir=run.folder,
        finished=finished,
        steps=len(run),
        total_steps=total_steps,
        first_loss=float(np.median(losses[:count])) if len(losses) else None,
        last_loss=float(np.median(losses[-count:])) if len(losses) else None,
        loss_steps=count,
        tau_untrained=untrained.get("tau"),
        tau_trained=trained.get("tau"),
        tau_interval=None if None in interval else interval,
        tau_prompts=trained.get("tau_prompts"),
        tau_repeated=trained.get("tau_repeated"),
        agreement=estimate_agreement(run) or None,
        efficiency=_ratio(tokens, padded),
        tokens_per_second=_ratio(tokens, seconds),
        advice=_advice(run),
        checkpoint=checkpoint,
        export=export,
    )


def _advice(run: Run) -> str | None:
    """What is to be said of the speed. It is the least of a summary: what goes wrong in it is said in its place."""
    try:
        advice = advise(run, run.config.get("watts", 0.0))
        return advice.text() if advice else None
    except Exception as problem:
        return f"cannot be judged, {type(problem).__name__}: {problem}"


def tau_words(event: Mapping[str, Any]) -> str:
    """The tau of an ``eval`` event and what it rests on: ``1.89 (1.62 to 2.20 with 95 %, 16 held-out prompts)``."""
    if event.get("tau") is None:
        return "not measured"
    rests = []
    if event.get("tau_low") is not None and event.get("tau_high") is not None:
        rests.append(f"{event['tau_low']:.2f} to {event['tau_high']:.2f} with 95 %")
    if count := event.get("tau_prompts"):  # runs of earlier versions did not count them
        rests.append(f"{count} held-out prompt{'s' if count != 1 else ''}")
    return f"{event['tau']:.2f}" + (f" ({', '.join(rests)})" if rests else "")


def repetition(share: float | None) -> str:
    """What to know of a tau whose decoded text holds this ``share`` of repeated phrases; empty where they are few or not known."""
    if share is None or share < REPETITIVE:
        return ""
    return f"; beware: the target repeats itself ({share:.0%} of its text), which is easy to draft"


def estimate_agreement(run: Run) -> str:
    """How far the cheap estimate, blocks on given held-out texts, agrees with decoding, as a sentence's part; "" where nothing can be said.

    Both are 1 + accepted draft tokens a pass. Decoding is counted on the target's own text, which is more alike and so usually easier;
    where texts and target agree the two do, and where both rise together the estimate can choose between checkpoints.
    """
    pairs = [(event.get("acceptance"), event.get("tau")) for event in run.events_of("eval")]
    pairs = [pair for pair in pairs if None not in pair]
    if not pairs or pairs[-1][1] <= 1:
        return ""
    estimate, tau = pairs[-1]
    text = f"blocks on given texts say {estimate:.2f}, {(estimate - 1) / (tau - 1):.0%} of the draft tokens that decoding accepts"
    steps = [(after[0] - before[0]) * (after[1] - before[1]) for before, after in pairwise(pairs)]
    if len(steps) > 1:
        text += f", and moved the same way between {sum(step > 0 for step in steps)} of {len(steps)} pairs of evaluations"
    return text


def _ratio(part: float, whole: float) -> float | None:
    """None where one of them is not known (NaN) or there is no whole."""
    return part / whole if whole > 0 and np.isfinite(part) else None


def _number(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)
