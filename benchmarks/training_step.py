"""One training step of the drafter (forward, loss, backward, AdamW): ours, a plain dense-mask version, and peers where installed.

    python benchmarks/training_step.py [--cases long,rows] [--steps 3] [--out training_step.json]

Each variant runs each case in a process of its own, float32, block 16, 5 captured layers, one warm-up step. `wall` and `cpu` are
seconds of the fastest step; `memory` is how far the process grew at its peak above its size with model, head and features
in place, so it holds activations, gradients, optimiser state and logits. Set OMP_NUM_THREADS to choose the cores. Waiting threads
sleep (OMP_WAIT_POLICY=passive): where anything else runs on the machine, spinning ones multiply the time of either version.
"""

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from dflash_nb.model.anchors import Anchors, draw_anchors
from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.objective import Objective, block_loss

PEERS = ("speculators", "specforge")


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    context: int
    anchors: int  # of each row
    layers: int = 2
    vocabulary: int = 49152
    hidden: int = 576


CASES = {
    "long": Case("context 2,048, 256 anchors", 1, 2048, 256),
    "rows": Case("8 rows of 256, 24 anchors each", 8, 256, 24),
    "longer": Case("context 4,096, 512 anchors", 1, 4096, 512),
    "deep": Case("the first with 5 layers", 1, 2048, 256, layers=5),
    "vocabulary": Case("the first with V 248,320, hidden 256", 1, 2048, 256, vocabulary=248320, hidden=256),
    "full": Case("the same with 512 anchors", 1, 2048, 512, vocabulary=248320, hidden=256),
}
SMALL = {"small": Case("small, for the tests", 2, 64, 32, layers=1, vocabulary=60000, hidden=64)}


def build(case: Case) -> tuple[DFlashDrafter, SimpleNamespace, SimpleNamespace, Anchors]:
    torch.manual_seed(0)
    config = DrafterConfig(
        hidden_size=case.hidden,
        intermediate_size=case.hidden * 8 // 3,
        num_layers=case.layers,
        num_heads=case.hidden // 64,
        num_kv_heads=max(1, case.hidden // 192),
        head_dim=64,
        rope_theta=1e5,
        rms_norm_eps=1e-5,
        vocab_size=case.vocabulary,
        block_size=16,
        target_layer_ids=(1, 8, 14, 20, 27),
        num_target_layers=30,
        mask_token_id=5,
        max_positions=8192,
    )
    weight_VH = torch.randn(case.vocabulary, case.hidden).mul_(0.05)
    head = SimpleNamespace(
        weight_VH=weight_VH, logit_scale=1.0, logit_softcap=None, valid_vocab=case.vocabulary, embed=lambda ids: F.embedding(ids, weight_VH)
    )
    tokens = case.rows * case.context
    features = SimpleNamespace(
        features_ND=torch.randn(tokens, 5 * case.hidden),
        lengths_B=torch.full((case.rows,), case.context),
        input_ids_N=torch.randint(0, case.vocabulary, (tokens,)),
        last_hidden_NH=None,
    )
    mask = np.ones(tokens, bool)
    anchors = draw_anchors(mask, features.lengths_B, np.arange(case.rows), case.anchors, 16, seed=0, epoch=0)
    return DFlashDrafter(config), head, features, anchors


def ours(drafter, head, features, anchors) -> torch.Tensor:
    result = block_loss(drafter, head, features, anchors, Objective())
    return result.loss_sum / result.weight_sum


def dense(drafter, head, features, anchors) -> torch.Tensor:
    """The straightforward version: rows padded to one batch, a boolean mask over all blocks of a row, logits of all slots at once."""
    config = drafter.config
    rows, context, block = len(features.lengths_B), int(features.lengths_B[0]), config.block_size
    anchor_RA = anchors.position_A.view(rows, -1)
    blocks = anchor_RA.shape[1]
    position_RQ = (anchor_RA[..., None] + torch.arange(block)).flatten(1)
    token_RQ = (torch.arange(rows)[:, None] * context + position_RQ).clamp(max=rows * context - 1)
    ids_RQ = torch.where(torch.arange(blocks * block) % block == 0, features.input_ids_N[token_RQ], config.mask_token_id)
    sees_context = torch.arange(context) < anchor_RA.repeat_interleave(block, 1)[..., None]
    of_block = torch.arange(blocks * block) // block
    sees_block = (of_block[:, None] == of_block).expand(rows, -1, -1)
    mask = torch.cat([sees_context, sees_block], -1)[:, None]
    position_RK = torch.cat([torch.arange(context).expand(rows, -1), position_RQ], 1)
    angle = position_RK[:, None, :, None] * config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos(), angle.sin()

    def rotate(x, cos, sin):
        left, right = x.chunk(2, -1)
        return x * cos + torch.cat([-right, left], -1) * sin

    def heads(x):
        return x.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)

    context_RSE = drafter.hidden_norm(F.linear(features.features_ND.view(rows, context, -1), drafter.fc.weight))
    hidden = head.embed(ids_RQ)
    queries = hidden.shape[1]
    for layer in drafter.layers:
        attention, mlp = layer.self_attn, layer.mlp
        normed = layer.input_layernorm(hidden)
        joined = torch.cat([context_RSE, normed], 1)
        query = rotate(attention.q_norm(heads(F.linear(normed, attention.q_proj.weight))), cos[:, :, -queries:], sin[:, :, -queries:])
        key = rotate(attention.k_norm(heads(F.linear(joined, attention.k_proj.weight))), cos, sin)
        value = heads(F.linear(joined, attention.v_proj.weight))
        mixed = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True).transpose(1, 2).flatten(2)
        hidden = hidden + F.linear(mixed, attention.o_proj.weight)
        normed = layer.post_attention_layernorm(hidden)
        gated = F.silu(F.linear(normed, mlp.gate_proj.weight)) * F.linear(normed, mlp.up_proj.weight)
        hidden = hidden + F.linear(gated, mlp.down_proj.weight)
    logits = F.linear(drafter.norm(hidden), head.weight_VH)
    slot = torch.arange(blocks * block) % block
    weight = torch.exp(-(slot - 1) / 7.0) * (slot > 0) * (position_RQ < context)
    losses = F.cross_entropy(logits.flatten(0, 1), features.input_ids_N[token_RQ].flatten(), reduction="none")
    return (losses * weight.flatten()).sum() / weight.sum()


def memory_kib(field: str) -> int:
    """VmRSS or VmHWM (the peak) of this process."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(field)).split()[1])


def measure(case: Case, variant: str, steps: int) -> dict:
    drafter, head, features, anchors = build(case)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-4)
    step = {"ours": ours, "dense": dense}[variant]
    Path("/proc/self/clear_refs").write_text("5")
    before, walls, cpus, losses = memory_kib("VmRSS"), [], [], []
    for _ in range(steps + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(drafter, head, features, anchors)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
        losses.append(loss.item())
    return {
        "wall_s": min(walls[1:]),
        "cpu_s": min(cpus[1:]),
        "memory_gib": (memory_kib("VmHWM") - before) / 2**20,
        "process_gib": memory_kib("VmHWM") / 2**20,
        "losses": losses,
    }


def run(key: str, variant: str, steps: int) -> dict | None:
    """The measurements of a process of its own; None if the system killed it for its memory."""
    command = [sys.executable, __file__, "--one", key, variant, "--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env={"OMP_WAIT_POLICY": "passive"} | os.environ)
    if done.returncode == -signal.SIGKILL:
        return None
    done.check_returncode()
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", default=",".join(CASES), help="which rows, of %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each")
    parser.add_argument("--out", default="training_step.json")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cases = CASES | SMALL
    if arguments.one:
        key, variant = arguments.one
        print(json.dumps(measure(cases[key], variant, arguments.steps)))
        return

    rows = []
    print(f"{'case':38} {'':6} {'wall s':>7} {'cpu s':>7} {'memory':>9}   dense / ours: wall, cpu; ours / dense: memory")
    for key in arguments.cases.split(","):
        case, results = cases[key], {"dense": None}
        logits_gib = case.rows * case.anchors * 16 * case.vocabulary * 4 / 2**30
        if 3.5 * logits_gib < free_gib():
            results["dense"] = run(key, "dense", arguments.steps)
        if results["dense"] is None:
            print(f"{case.name:38} dense  not measured: needs over {3 * logits_gib:.0f} GiB, {free_gib():.0f} are free")
        results["ours"] = run(key, "ours", arguments.steps)
        for variant, result in results.items():
            if result:
                line = f"{case.name:38} {variant:6} {result['wall_s']:7.2f} {result['cpu_s']:7.2f} {result['memory_gib']:5.2f} GiB"
                if variant == "ours" and (dense := results["dense"]):
                    line += f"   {dense['wall_s'] / result['wall_s']:.2f}, {dense['cpu_s'] / result['cpu_s']:.2f}"
                    line += f"; {result['memory_gib'] / dense['memory_gib']:.1%}"
                print(line, flush=True)
        rows.append({"case": asdict(case), **results})
    if missing := [name for name in PEERS if importlib.util.find_spec(name) is None]:
        print(f"not installed, so not timed: {', '.join(missing)}")
    environment = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "threads": os.environ.get("OMP_NUM_THREADS", str(torch.get_num_threads())),
    }
    Path(arguments.out).write_text(json.dumps({"environment": environment, "rows": rows}, indent=1))


def free_gib() -> float:
    memory = Path("/proc/meminfo").read_text()
    return int(next(line for line in memory.splitlines() if line.startswith("MemAvailable")).split()[1]) / 2**20


if __name__ == "__main__":
    main()
