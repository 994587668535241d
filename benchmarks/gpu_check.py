"""Checks on one GPU what cannot be checked without one, in at most five minutes: ``make gpu-check``.

    python benchmarks/gpu_check.py [--device cuda] [--json build/gpu_check.json]

Four questions, a line each: does the target in bf16 capture what transformers returns on the same device; how long does a training step
take; does the peak memory agree with the prediction; which side limits, and do the queues' waits explain the speed. Without a GPU it says
so in one sentence and ends with status 0. ``--device cpu --small`` runs the same code on a CPU: 11 s of CPU time.
"""

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from dflash_nb.data.dataset import Batch, TokenDataset, dataset_path
from dflash_nb.model.drafter import DrafterConfig
from dflash_nb.model.target import FrozenTarget
from dflash_nb.model.target_info import read_target_info
from dflash_nb.pipeline.advice import advise, replay, stages_of
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.pipeline.memory import predict_job
from dflash_nb.pipeline.runlog import Run, read_run
from dflash_nb.pipeline.train import train
from dflash_nb.pipeline.window import WAITING_BATCHES

CAPTURE_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the layer's largest value; bf16 keeps 8 bits
MEMORY_TOLERANCE = 0.15
BALANCE_TOLERANCE = 0.1
SECONDS = 300


def few_rows(target: FrozenTarget, dataset: TokenDataset, rows: int) -> Batch:
    """The longest of the first rows together with short ones, so that padding is part of the check."""
    ids = np.argsort(dataset.lengths[:500], kind="stable")[np.linspace(0, min(499, len(dataset) - 1), rows).astype(int)]
    return dataset.collate(ids, int(dataset.lengths[ids].max()), pad_id=target.info.pad_token_id or 0)


def capture_parity(target: FrozenTarget, batch: Batch) -> dict:
    """Largest difference between captured layers and ``hidden_states[i + 1]``, as a share of the layer's largest value."""
    features_ND = target.features(batch).features_ND.float()
    ids_BT = torch.from_numpy(batch.input_ids_BT).long().to(target.device)
    lengths_B = torch.from_numpy(batch.lengths_B).to(target.device)
    real_BT = torch.arange(batch.padded_length, device=target.device) < lengths_B[:, None]
    with torch.inference_mode():
        states = target.decoder(input_ids=ids_BT, attention_mask=real_BT.long(), output_hidden_states=True, use_cache=False).hidden_states
    width, worst = target.info.hidden_size, 0.0
    for k, layer in enumerate(target.layer_ids):
        expected_ND = states[layer + 1][real_BT].float()
        ours_ND = features_ND[:, k * width : (k + 1) * width]
        worst = max(worst, float((ours_ND - expected_ND).abs().max() / expected_ND.abs().max()))
    return {
        "check": "capture parity",
        "ok": worst <= CAPTURE_TOLERANCE[target.dtype],
        "text": f"{target.dtype}, layers {', '.join(map(str, target.layer_ids))}: largest difference {worst:.1e}",
        "value": worst,
    }


def step_time(run: Run) -> dict:
    """Milliseconds of a step after the first fifth, real tokens a second; it fails on a loss that is not finite."""
    late = slice(len(run) // 5, None)
    milliseconds, tokens = 1000 * run.steps["seconds_step"][late], run.steps["tokens"][late]
    rate = float(1000 * tokens.sum() / milliseconds.sum())
    return {
        "check": "step time",
        "ok": bool(np.isfinite(run.steps["loss"]).all()),
        "text": f"median {np.median(milliseconds):,.1f} ms, slowest {milliseconds.max():,.1f} ms, {rate:,.0f} real tokens/s",
        "value": rate,
    }


def peak_memory(predicted: float, measured: float) -> dict:
    """Predicted against measured bytes on the device."""
    return {
        "check": "peak memory",
        "ok": bool(abs(predicted / measured - 1) <= MEMORY_TOLERANCE),
        "text": f"predicted {predicted / 1e9:.2f} GB, measured {measured / 1e9:.2f} GB, ratio {predicted / measured:.2f}",
        "value": predicted / measured,
    }


def queue_balance(run: Run) -> dict:
    """The limiting stage, and whether the log explains the speed: a replay of the batches against the rate that was measured."""
    advice = advise(run)
    stages, _ = stages_of(run)
    explained = replay(stages, advice.workers, WAITING_BATCHES, run.config["prefetch"]) / advice.tokens_per_second
    return {
        "check": "queue balance",
        "ok": bool(abs(explained - 1) <= BALANCE_TOLERANCE),
        "text": f"{advice.sentences[0]} Replayed / measured rate {explained:.2f}; median q_hs {np.median(run.steps['q_hs']):.0f}",
        "value": float(explained),
    }


def check(device: str, small: bool) -> list[dict]:
    """All four checks with the embedded sample. The drafter is trained for a few steps in a folder that is removed."""
    shape = {"token_budget": 1024, "max_batch": 8, "max_steps": 12, "eval_rows": 2, "eval_prompts": 1, "eval_tokens": 4}
    if not small:
        shape = {"token_budget": 32768, "max_batch": 64, "anchors": 128, "block_size": 16, "max_steps": 60}
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(**shape, device=device, dtype="auto" if device == "cpu" else "bfloat16", too_long="drop", runs_dir=folder)
        info = read_target_info(config.target)
        dataset = TokenDataset.open(dataset_path(config.dataset))
        drafter = DrafterConfig.for_target(info, num_layers=config.draft_layers, block_size=config.block_size)
        target = FrozenTarget.load(info, drafter.target_layer_ids, torch.device(device), config.dtype)
        results = [capture_parity(target, few_rows(target, dataset, 8))]
        del target
        job = prepare_job(config)
        where = job.placement.drafter
        if where.type == "cuda":
            torch.cuda.empty_cache()
        predicted = float(predict_job(job).total(str(where)))
        run = read_run(train(config).run_dir)
        return [*results, step_time(run), peak_memory(predicted, held_bytes(where)), queue_balance(run)]


def held_bytes(device: torch.device) -> float:
    """On a GPU what PyTorch has reserved, which it keeps after the run, with the CUDA context; on a CPU the process's peak."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return float(total - free)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def main(arguments: list[str] | None = None) -> int:
    """Print a line a check. Returns 0 when all agree or there is no GPU, 1 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, one such as cuda:1, or cpu")
    parser.add_argument("--small", action="store_true", help="tiny batches and few steps")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu-check skipped: PyTorch sees no GPU here; run it on a machine with one and a CUDA build of PyTorch.")
        return 0
    started = time.monotonic()
    results = check(given.device, given.small)
    name = torch.cuda.get_device_name(given.device) if given.device.startswith("cuda") else "CPU"
    for each in results:
        print(f"{'ok' if each['ok'] else 'DIFFERS':<8} {each['check']:<15} {each['text']}", flush=True)
    took = time.monotonic() - started
    print(f"{name}, PyTorch {torch.__version__}, {took:.0f} s of at most {SECONDS}")
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"device": name, "seconds": took, "results": results}, indent=1) + "\n")
    return 0 if all(each["ok"] for each in results) and took <= SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
