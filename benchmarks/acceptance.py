"""What makes a drafter accepted: the same number of steps over batches of the same budget, one thing changed at a time.

    python benchmarks/acceptance.py                                    the sample, 240 steps a variant: about 12 minutes on two cores
    python benchmarks/acceptance.py --target smollm2 --dataset data/gsm8k --own data/gsm8k-own --steps 100 --base block_size=6 anchors=16 \
        token_budget=2560 max_batch=8 target_layers=1,8,14,21,27 --only start,adamw,given

``own`` is a dataset whose answers are the target's own (`python -m dflash_nb.model.answers`); for the sample 4,000 are made first. Tau is
measured over held-out prompts with its interval over prompts. A variant's start weights, plan and anchors follow from seed 0.
"""

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from unittest import mock

import torch

from dflash_nb.home import cache_dir
from dflash_nb.model.answers import write_answers
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline import models
from dflash_nb.pipeline import train as trainer
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.runlog import read_run
from dflash_nb.pipeline.tau import tau_of_run


@dataclass(frozen=True)
class Variant:
    name: str
    what: str
    changes: dict
    own: bool = True
    start: bool = False


VARIANTS = (
    Variant("start", "own answers, Muon, cross-entropy", {}),
    Variant("given", "the dataset's answers", {}, own=False),
    Variant("adamw", "AdamW at its best rate tried", {"optimizer": "adamw"}),
    Variant("given-adamw", "the dataset's answers and AdamW", {"optimizer": "adamw"}, own=False),
    Variant("kl", "KL to the target's distribution", {"objective": "kl"}),
    Variant("dpace", "D-PACE weights", {"objective": "dpace"}),
    Variant("layers", "twice the captured layers", {}),
    Variant("deep", "four draft layers", {"draft_layers": 4}),
    Variant("anchors", "half the anchors", {}),
    Variant("initialise", "MLPs start as those of the target's last layers", {}, start=True),
)
ADAMW_RATE = {"sample": 6e-3, "smollm2": 1e-3}


def changes_of(variant: Variant, base: TrainConfig) -> dict:
    changes = dict(variant.changes)
    if changes.get("optimizer") == "adamw":
        changes["learning_rate"] = ADAMW_RATE.get(base.target, 1e-3)
    if variant.name == "layers" or "draft_layers" in changes:
        changes["target_layers"] = "1,3,5,7" if base.target == "sample" else "1,4,8,11,14,18,21,24,27,29"
    if variant.name == "anchors":
        changes["anchors"] = max(1, base.anchors // 2)
    return changes


def starting_from(target_name: str) -> Callable:
    """``scale_to_head`` that first copies the MLPs of the target's last layers. Qwen3.5 stores its norms' weights minus one."""
    real = models.scale_to_head

    def start(drafter, head):
        target = FrozenTarget.load(target_name, (0,))
        layers = list(target.decoder.layers)[-len(drafter.layers) :]
        offset = 1.0 if "qwen3_5" in target.info.model_type else 0.0
        with torch.no_grad():
            for ours, theirs in zip(drafter.layers, layers, strict=True):
                for name in ("gate_proj", "up_proj", "down_proj"):
                    getattr(ours.mlp, name).weight.copy_(getattr(theirs.mlp, name).weight)
                ours.post_attention_layernorm.weight.copy_(theirs.post_attention_layernorm.weight + offset)
        return real(drafter, head)

    return mock.patch.object(models, "scale_to_head", start)


def measure(variant: Variant, base: TrainConfig, own: str, runs: Path, prompts: int) -> dict:
    values = {field.name: getattr(base, field.name) for field in fields(base)} | changes_of(variant, base)
    values |= {"runs_dir": str(runs), "run_name": variant.name, "dataset": own if variant.own else base.dataset}
    with contextlib.redirect_stdout(io.StringIO()), starting_from(base.target) if variant.start else contextlib.nullcontext():
        summary = trainer.train(TrainConfig(**values))
        tau = tau_of_run(summary.run_dir, prompts, base.eval_tokens)
    run = read_run(summary.run_dir)
    return {
        "variant": variant.name,
        "what": variant.what,
        "tau": tau.tau,
        "low": tau.low,
        "high": tau.high,
        "given_text": run.events_of("eval")[-1]["acceptance"],
        "last_loss": summary.last_loss,
        "seconds": float(run.steps["seconds_step"].sum()),
    }


def setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    kinds = {field.name: type(field.default) for field in fields(TrainConfig)}
    if name not in kinds:
        raise argparse.ArgumentTypeError(f"{name} is no parameter of notebook 03")
    return name, kinds[name](value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--target", default="sample")
    parser.add_argument("--dataset", default="sample")
    parser.add_argument("--own", default="", help="dataset with the target's own answers; for the sample made when empty")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--only", default="", help="names of variants, separated by commas")
    parser.add_argument("--base", type=setting, nargs="*", default=[], help="parameters of all variants, such as anchors=16")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    own = options.own
    if not own:
        if options.target != "sample":
            parser.error("--own is needed for any target but the sample")
        own = str(cache_dir() / "sample-own")
        if not Path(own).exists():
            write_answers("sample", own, "sample", rows=4000, new_tokens=96)
    if options.prompts < 2:
        parser.error("--prompts must be at least 2: the interval is over prompts")
    values = {"target": options.target, "dataset": options.dataset, "max_steps": options.steps, "epochs": 4, "eval_prompts": 1}
    base = TrainConfig(**{**values, **dict(options.base)})
    chosen = [variant for variant in VARIANTS if not options.only or variant.name in options.only.split(",")]
    rows = []
    print(f"{options.target}, {options.steps} steps a variant, tau over {options.prompts} held-out prompts (95 % interval)", flush=True)
    print("| variant | tau | interval | accepted on given text | last loss | s |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as runs:
        for variant in chosen:
            row = measure(variant, base, own, Path(runs), options.prompts)
            rows.append(row)
            print(
                f"| {row['what']} | {row['tau']:.2f} | {row['low']:.2f} to {row['high']:.2f} | {row['given_text']:.2f} | "
                f"{row['last_loss']:.2f} | {row['seconds']:.0f} |",
                flush=True,
            )
    if options.out:
        options.out.write_text(json.dumps({**vars(options), "out": str(options.out), "base": dict(options.base), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
