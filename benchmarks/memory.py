"""Predicted against measured memory of whole training runs on the CPU, one process each.

    python benchmarks/memory.py [--json build/memory.json] [name ...]

Predicted: ``pipeline.memory`` on the checked run, before a model is loaded. Measured: the process's peak resident memory from there to
the end of training, evaluation and export included; the largest batch of each bucket is run first (``probe``), since a few steps need not
meet the batch that the prediction is for. The allocator's slack was fitted on the first eight runs and on none of the other six, which
differ in context, anchors, layers and vocabulary.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

MASK_TOKEN = 95
HYBRID = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64}


def shape(hidden, inner, layers, vocab, heads, kv_heads):
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "max_position_embeddings": 4096,
    }


# name: (model type, shape), (rows, median length, longest), what differs from the default configuration
RUNS = {
    "sample": (None, None, {"max_steps": 6}),
    "sample, wide": (None, None, {"max_steps": 3, "token_budget": 16384, "max_batch": 64, "anchors": 64, "draft_layers": 3}),
    "llama, 12 layers": (("llama", shape(384, 1024, 12, 32000, 6, 2)), (120, 150, 1000), {"max_steps": 4, "token_budget": 4096}),
    "llama, long rows": (("llama", shape(256, 768, 6, 8000, 4, 4)), (12, 2500, 4000), {"max_steps": 4, "anchors": 64, "block_size": 16}),
    "qwen3, wide": (("qwen3", shape(768, 2048, 8, 16000, 12, 4)), (60, 120, 500), {"max_steps": 3, "token_budget": 4096, "max_batch": 16}),
    "hybrid": (("qwen3_5_text", shape(256, 512, 8, 4096, 4, 2) | HYBRID), (100, 200, 1000), {"max_steps": 4, "draft_layers": 3}),
    "qwen3, kl": (("qwen3", shape(256, 768, 8, 16000, 4, 2)), (100, 200, 1000), {"max_steps": 3, "objective": "kl"}),
    "llama, many slots": (("llama", shape(256, 1024, 6, 4096, 4, 2)), (100, 100, 300), {"max_steps": 3, "max_batch": 48, "block_size": 16}),
}
FITTED = frozenset(RUNS)
RUNS |= {
    "llama, 100k vocabulary": (("llama", shape(256, 640, 5, 100_000, 4, 2)), (80, 250, 1200), {"max_steps": 3, "draft_layers": 1}),
    "qwen3, 24 layers": (("qwen3", shape(192, 512, 24, 24_000, 3, 1)), (100, 120, 800), {"max_steps": 3, "token_budget": 6144}),
    "qwen3, 96 anchors": (
        ("qwen3", shape(320, 960, 6, 12_000, 5, 5)),
        (40, 900, 3000),
        {"max_steps": 3, "anchors": 96, "draft_layers": 4, "target_layers": "0,2,3,5"},
    ),
    "hybrid, context 2,500": (("qwen3_5_text", shape(192, 640, 8, 9000, 3, 1) | HYBRID), (24, 1500, 2500), {"max_steps": 3, "anchors": 48}),
    "llama, rows of 60": (("llama", shape(448, 1536, 6, 20_000, 7, 7)), (400, 60, 200), {"max_steps": 3, "max_batch": 64, "anchors": 12}),
    "qwen3, accumulated": (
        ("qwen3", shape(384, 1536, 10, 30_000, 6, 2)),
        (120, 300, 1500),
        {"max_steps": 2, "accumulation": 4, "block_size": 12},
    ),
}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("names", nargs="*", help=", ".join(RUNS))
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    rows = []
    print(f"{'run':<24} {'predicted MB':>12} {'measured MB':>12} {'ratio':>7}  slack fitted on it")
    for name in given.names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--", name, folder]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
        predicted, measured = json.loads(done.stdout.splitlines()[-1])
        rows.append({"run": name, "predicted": predicted, "measured": measured, "ratio": predicted / measured, "fitted": name in FITTED})
        told = "yes" if name in FITTED else "no"
        print(f"{name:<24} {predicted / 1e6:>12,.0f} {measured / 1e6:>12,.0f} {predicted / measured:>7.3f}  {told}", flush=True)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


def measure(name: str, folder: Path) -> tuple[float, float]:
    """Predicted and measured bytes of one run, in this process."""
    model, data, changes = RUNS[name]
    source = {}
    if model:
        subprocess.run([sys.executable, __file__, "--model", name, folder / "target"], check=True)
        source = {"target": str(folder / "target"), "dataset": str(write_dataset(folder / "data", model[1]["vocab_size"], *data))}
    from dflash_nb.pipeline.config import TrainConfig
    from dflash_nb.pipeline.job import prepare_job
    from dflash_nb.pipeline.memory import predict_job
    from dflash_nb.pipeline.train import train

    small = {"probe": True, "eval_rows": 4, "eval_prompts": 1, "eval_tokens": 8, "device": "cpu", "log_every": 60}
    config = TrainConfig(**{**small, **source, "runs_dir": str(folder / "runs"), **changes})
    predicted = predict_job(prepare_job(config)).total("cpu")
    Path("/proc/self/clear_refs").write_text("5")  # peak := now
    train(config)
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return float(predicted), int(peak.split()[1]) * 1024.0


def write_model(name: str, folder: Path) -> None:
    """A random target; made in another process so that its memory is not ours."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, values = RUNS[name][0]
    ids = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **values, **ids)).save_pretrained(folder)
    (folder / "dflash.json").write_text(json.dumps({"mask_token_id": MASK_TOKEN}))


def write_dataset(folder: Path, vocab: int, rows: int, median: int, longest: int) -> Path:
    """Rows of tokens from the whole vocabulary (an embedding row that is never read is never loaded), lengths log-normal, two thirds of
    each row supervised."""
    rng = np.random.default_rng(0)
    for split, count in (("train", rows), ("heldout", 20)):
        lengths = np.clip(rng.lognormal(np.log(median), 0.7, count).astype(int), 16, longest)
        ids = [rng.integers(MASK_TOKEN + 1, vocab, length).astype(np.int32) for length in lengths]
        masks = [(np.arange(length) >= length // 3).astype(np.uint8) for length in lengths]
        table = pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32())), "loss_mask": pa.array(masks, pa.list_(pa.uint8()))})
        (folder / split).mkdir(parents=True)
        with pa.ipc.new_file(folder / split / "data-00000.arrow", table.schema) as writer:
            writer.write_table(table)
    (folder / "dataset.json").write_text(json.dumps({"format": 1, "source": "random", "rows": {"train": rows, "heldout": 20}}))
    return folder


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--", name, folder]:
            print(json.dumps(measure(name, Path(folder))))
        case ["--model", name, folder]:
            write_model(name, Path(folder))
        case _:
            main()
