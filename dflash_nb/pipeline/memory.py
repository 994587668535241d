"""Bytes before launch: what target, queue and drafter need on each device, from shapes alone, and which batches would not fit.

Weights are counted exactly (the target's class is built without storage); activations by formulas that follow the code: what the
backward pass keeps, and the largest temporary on top of it. On a CPU, where target and drafter work at the same time, the largest
moments of both are added. Predicted / measured peaks of ``benchmarks/memory.py``, largest batches included: 0.87 to 1.10 over the eight
runs that the slack was fitted on, 0.89 to 1.03 over six others.

Shapes: N real tokens, P padded tokens, M drafted slots (blocks x block size), T longest row, E hidden, I MLP width, Q and G width of all
query and of all key/value heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dflash_nb.model.attention import GROUP
from dflash_nb.model.drafter import DrafterConfig
from dflash_nb.model.target_info import TargetInfo
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.probe import memory_bytes
from dflash_nb.pipeline.window import WAITING_BATCHES

LOSS_TILES = {"cpu": 2 * 16 * 2**20, "cuda": 2 * 256 * 2**20}  # logits of one tile of the vocabulary, and their softmax
LIBRARIES = {"cpu": 120e6, "cuda": 0.8e9}  # code loaded late, thread pools and workspaces; the CUDA context
SLACK = {"cpu": 0.25, "cuda": 0.1}  # what the allocator keeps on top of activations: fitted on CPUs, assumed on GPUs
CHANGING = frozenset({"target forward", "features in work", "kept for the backward pass", "largest temporary"})
MOMENTS = {"adamw": 2, "muon": 1}  # float32 numbers of each parameter that an optimiser keeps, beside weight and gradient


@dataclass(frozen=True)
class Shape:
    """One batch, or arrays of many: rows, padded length, real tokens, and drafted slots with the anchors."""

    rows: Any
    padded_length: Any
    tokens: Any
    slots: Any

    @classmethod
    def planned(cls, rows: Any, padded_length: Any, tokens: Any, anchors: int, block_size: int) -> "Shape":
        """A planned batch, every row with all its anchors."""
        return cls(rows, padded_length, tokens, np.minimum(np.multiply(rows, anchors), tokens) * block_size)

    def one(self, i: int) -> "Shape":
        """Batch ``i`` of arrays."""
        return Shape(int(self.rows[i]), int(self.padded_length[i]), int(self.tokens[i]), int(self.slots[i]))

    @property
    def padded_tokens(self) -> Any:
        return np.multiply(self.rows, self.padded_length)


@dataclass(frozen=True)
class TargetSize:
    """What a target's files do not say in so many words: its parameters, and numbers a token that a recurrent layer works with."""

    parameters: int
    recurrent_numbers: int = 0


@dataclass(frozen=True)
class Component:
    """Bytes of one thing on one device, and why it has that size."""

    device: str
    name: str
    bytes: Any
    note: str


@dataclass(frozen=True)
class MemoryPlan:
    """The components of a launch. ``avoided`` is what a plainer program would hold and this one never makes."""

    components: tuple[Component, ...]
    avoided: tuple[Component, ...]

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.device for each in self.components))

    def total(self, device: str) -> Any:
        """Bytes on one device at the largest moment; an array when predicted for many batches at once."""
        return sum(each.bytes for each in self.components if each.device == device)

    def table(self) -> list[dict[str, Any]]:
        """A row a component and a total a device, then what is never made."""
        rows = []
        for device in self.devices:
            rows += [_row(each, each.name) for each in self.components if each.device == device]
            rows.append({"device": device, "what": "total", "GB": self.total(device) / 1e9, "why": ""})
        return rows + [_row(each, f"never made: {each.name}") for each in self.avoided]

    def text(self) -> str:
        """The table as aligned lines."""
        return "\n".join(f"{row['device']:<8} {row['what']:<38} {row['GB']:>9.3f} GB  {row['why']}".rstrip() for row in self.table())


def _row(each: Component, name: str) -> dict[str, Any]:
    return {"device": each.device, "what": name, "GB": each.bytes / 1e9, "why": each.note}


def target_size(source: TargetInfo | Any) -> TargetSize:
    """Count a target's parameters by building its class on the meta device; ``source`` is its facts or a transformers config.

    0.1 s for SmolLM2, 2 s for 64 layers. No weight is read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from dflash_nb.model.loading import silent

    config = AutoConfig.from_pretrained(source.path, local_files_only=True) if isinstance(source, TargetInfo) else source
    with silent(), torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    heads = getattr(text, "linear_num_value_heads", 0) or 0
    recurrent = heads * (7 * getattr(text, "linear_key_head_dim", 0) + 7 * getattr(text, "linear_value_head_dim", 0) + 170) if heads else 0
    return TargetSize(sum(parameter.numel() for parameter in model.parameters()), recurrent)


def drafter_parameters(config: DrafterConfig) -> int:
    """Parameters of a drafter; embedding and head are the target's and not among them."""
    width, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * width * query + 2 * width * key_value + 3 * width * inner + 2 * width + 2 * config.head_dim
    return len(config.target_layer_ids) * width * width + 2 * width + config.num_layers * layer


def feature_bytes(config: DrafterConfig, number: int, with_last_hidden: bool = False) -> int:
    """Bytes of one token's captured hidden states: 51,200 for five layers of 5,120 in bf16."""
    return (len(config.target_layer_ids) + with_last_hidden) * config.hidden_size * number


def target_moment(info: TargetInfo, size: TargetSize, shape: Shape, device: str, number: int) -> Any:
    """Largest temporary of the target's forward without its features: the widest of MLP, attention (no mask is made, no scores are held)
    and recurrent layer.
    """
    width, query, key_value = info.hidden_size, info.num_heads * info.head_dim, info.num_kv_heads * info.head_dim
    attention = 3 * width + 3 * query + 4 * key_value
    recurrent = 3 * width + size.recurrent_numbers if _kind(device) == "cpu" else 0  # accelerators have a kernel that holds less
    return shape.padded_tokens * max(4 * width + 3 * info.intermediate_size, recurrent, attention) * number


def kept_for_backward(config: DrafterConfig, shape: Shape, number: int) -> Any:
    """What autograd keeps of the drafter's forward until the backward pass has used it."""
    width, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    a_slot = config.num_layers * (4 * width + 4 * query + 3 * key_value + 2 * inner) + 2 * width + config.head_dim
    a_token = config.num_layers * 3 * key_value + 2 * width + config.head_dim
    return (shape.slots * a_slot + shape.tokens * a_token) * number


def drafter_moment(config: DrafterConfig, shape: Shape, vocab: int, device: str, number: int) -> Any:
    """Largest temporary on top of what is kept: scoring slots against the vocabulary, or the backward of an MLP or of an attention."""
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    scoring = LOSS_TILES[device] + 2.5 * shape.slots * config.hidden_size * 4
    mlp = shape.slots * (3 * config.intermediate_size + config.hidden_size // 2) * number
    scores = 2 * config.num_heads * np.minimum(GROUP * config.block_size, shape.slots) * shape.padded_length
    attention = (scores + 2 * shape.tokens * key_value + 2 * shape.slots * query) * 4
    return np.maximum(scoring, np.maximum(mlp, attention))


def predict(
    info: TargetInfo,
    size: TargetSize,
    drafter: DrafterConfig,
    shape: Shape,
    targets: Sequence[str] = ("cpu",),
    drafter_device: str = "cpu",
    target_number: int = 4,
    drafter_number: int = 4,
    queue_bytes: int = 256 << 20,
    queue_tokens: float | None = None,
    with_last_hidden: bool = False,
    optimizer: str = "adamw",
    base_bytes: float | None = None,
) -> MemoryPlan:
    """Memory of a launch at the moment when ``shape``, the largest batch, is worked on.

    Args:
        targets, drafter_device: device names such as ``cpu`` or ``cuda:0``, one a target worker; workers on the CPU share weights.
        target_number, drafter_number: bytes of a number in the target, and in the drafter's activations (2 under autocast).
        queue_bytes: bound on the hidden states that wait (``q_hs_mb`` in bytes).
        queue_tokens: most tokens that can wait in the window's places; without it, as many as fill ``queue_bytes``.
        optimizer: a key of ``MOMENTS``; Muon's few vectors, which keep two moments, are not told apart.
        base_bytes: what the process holds on the CPU before anything is loaded; what it holds now unless given.
    """
    if base_bytes is None:
        base_bytes = resident_bytes()
    parameters, trained = size.parameters, drafter_parameters(drafter)
    features = feature_bytes(drafter, target_number, with_last_hidden)
    trained_bytes = 4 * (2 + MOMENTS[optimizer])
    head = info.vocab_size * info.hidden_size * target_number * (1 if info.tied_head else 2)
    parts: list[Component] = []
    for device, workers in {device: list(targets).count(device) for device in targets}.items():
        moment = target_moment(info, size, shape, device, target_number) + shape.tokens * features
        parts += [
            Component(
                device, "target weights", parameters * target_number, f"{parameters / 1e9:.3f} billion parameters x {target_number} B"
            ),
            Component(
                device,
                "target forward",
                workers * moment,
                f"{workers} batch of {_told(shape.padded_tokens)} padded tokens, features included",
            ),
        ]
    kept, moment = (
        kept_for_backward(drafter, shape, drafter_number),
        drafter_moment(drafter, shape, info.vocab_size, _kind(drafter_device), drafter_number),
    )
    waiting = queue_bytes if queue_tokens is None else min(queue_bytes, queue_tokens * features)
    if drafter_device not in targets:
        parts.append(Component(drafter_device, "target embedding and head", head, "a frozen copy beside the drafter"))
    parts += [
        Component(
            drafter_device, "drafter and optimiser", trained * trained_bytes, f"{trained / 1e9:.3f} billion parameters x {trained_bytes} B"
        ),
        Component(drafter_device, "q_hs", waiting, f"bound {queue_bytes / 1e6:,.0f} MB; {features:,} B a token"),
        Component(drafter_device, "features in work", shape.tokens * features, f"{_told(shape.tokens)} real tokens"),
        Component(
            drafter_device,
            "kept for the backward pass",
            kept,
            f"{_told(shape.slots)} slots, {_told(shape.tokens)} tokens, {drafter.num_layers} layers",
        ),
        Component(drafter_device, "largest temporary", moment, "scoring the slots, or the backward of one layer"),
    ]
    for device in dict.fromkeys([*targets, drafter_device]):
        kind = _kind(device)
        if kind == "cpu":
            parts.append(Component(device, "process", base_bytes, "Python and the imported packages"))
        changing = sum(each.bytes for each in parts if each.device == device and each.name in CHANGING)
        parts += [
            Component(device, "libraries", LIBRARIES[kind], "thread pools, workspaces" if kind == "cpu" else "CUDA context"),
            Component(device, "allocator slack", SLACK[kind] * changing, f"{SLACK[kind]:.0%} of what changes with every batch"),
        ]
    logits = shape.padded_tokens * info.vocab_size * target_number
    why = f"{_told(shape.padded_tokens)} tokens x {info.vocab_size:,}: the output matrix only ever meets drafted slots, a tile at a time"
    return MemoryPlan(tuple(parts), (Component(targets[0], "logits of every position", logits, why),))


def too_large(capacity: dict[str, float], shapes: Shape, *what: Any, **launch: Any) -> dict[str, np.ndarray]:
    """By device, the indices of the batches in ``shapes`` (arrays) that would not fit into ``capacity`` bytes.

    ``what`` are the target's facts and size and the drafter's configuration, ``launch`` the other arguments of ``predict``.
    """
    plan = predict(*what, shapes, **launch)
    return {device: np.flatnonzero(plan.total(device) > most) for device, most in capacity.items()}


def predict_job(job: Job, size: TargetSize | None = None) -> MemoryPlan:
    """The memory of a checked run at its largest batch of the first epoch, with what the process holds now on the CPU."""
    what = (job.info, size or target_size(job.info), job.drafter)
    config, plan = job.config, job.plan(0)
    targets, drafter_device = [str(device) for device in job.placement.targets], str(job.placement.drafter)
    low = config.dtype == "bfloat16" or (config.dtype == "auto" and not targets[0].startswith("cpu"))
    places = min(len(targets) + WAITING_BATCHES, max(0, job.total_steps * config.accumulation - 1))
    launch = {
        "targets": targets,
        "drafter_device": drafter_device,
        "target_number": 2 if low else 4,
        "drafter_number": 2 if low else 4,
        "queue_bytes": config.q_hs_mb << 20,
        "queue_tokens": places * float(np.mean(plan.real_tokens)),
        "with_last_hidden": config.objective == "kl",
        "optimizer": config.optimizer,
        "base_bytes": resident_bytes(),
    }
    length = -(-plan.padded_tokens // plan.rows)  # a packed row computes its real tokens, as rows of their mean length would
    shapes = Shape.planned(plan.rows, length, plan.real_tokens, config.anchors, config.block_size)
    worst = int(np.argmax(predict(*what, shapes, **launch).total(drafter_device)))
    return predict(*what, shapes.one(worst), **launch)


def resident_bytes() -> float:
    """What this process holds now, or its peak, outside Linux."""
    return float(memory_bytes(torch.device("cpu")))


def _told(value: Any) -> str:
    return f"{int(value):,}" if np.ndim(value) == 0 else "each batch's"


def _kind(device: str) -> str:
    return device.partition(":")[0]
