"""The drafter as servers read it: ``model.safetensors`` and ``config.json``, in the published layout and without any code.

Parameter names are the published ones already, so exporting is one write, aside and then renamed. The target's embedding and head
are not part of it. ``block_size`` stands at the top level and in ``dflash_config``, since older readers know one place and newer ones
the other, and likewise ``rope_theta`` and ``rope_parameters``. A reader that misses one falls back to its own default (16, or a theta
of 1e6) without an error.
"""

import json
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from dflash_nb.errors import PlainError
from dflash_nb.home import did_you_mean, exists, write_aside
from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.target_info import TargetInfo, default_layer_ids
from dflash_nb.stored import PERHAPS, fault, parsed

ARCHITECTURE = "DFlashDraftModel"
UNSUPPORTED = ("attention_bias", "attention_sink_bias", "use_swa", "sample_from_anchor", "selector_rank", "projector_type")


# Of a config.json: what readers look into. A drafter must state most of it, other models need not.
SETTINGS = {
    **dict.fromkeys(("block_size", "mask_token_id", "num_target_layers", "num_hidden_layers", "hidden_size", "vocab_size"), int | None),
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"), int | None),
    **dict.fromkeys(("rope_theta", "rms_norm_eps"), PERHAPS),
    "target_layer_ids": ([int], NoneType),
    "layer_types": ([str], NoneType),
    "rope_parameters": ({"rope_type": str | None, "rope_theta": PERHAPS}, NoneType),
    "rope_scaling": dict | None,
}


class ExportError(PlainError, ValueError):
    """A folder that is no usable drafter checkpoint; the message names the file and what is wrong with it."""


def export_drafter(drafter: DFlashDrafter, info: TargetInfo, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write a serving checkpoint of ``drafter`` for the target ``info`` and return its folder.

    Weights keep their dtype unless ``dtype`` is given. An earlier export in ``folder`` is replaced; anything else there is an error.
    """
    folder = Path(folder)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not _is_drafter(folder)):
        raise ExportError(f"{folder} exists and is not a drafter's checkpoint; name a new folder.")
    config = drafter.config
    if (config.hidden_size, config.vocab_size, config.num_target_layers) != (info.hidden_size, info.vocab_size, info.num_layers):
        raise ExportError(
            f"the drafter was made for a target of hidden size {config.hidden_size}, vocabulary {config.vocab_size} and "
            f"{config.num_target_layers} layers, but {info.name} has {info.hidden_size}, {info.vocab_size} and {info.num_layers}. "
            "Name the target that it was trained for."
        )
    tensors = {name: tensor.detach().to("cpu", dtype or tensor.dtype).contiguous() for name, tensor in drafter.state_dict().items()}
    with write_aside(folder, "export again (a run does so with -p resume)") as aside:
        aside.mkdir()
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        text = json.dumps(checkpoint_config(config, info, next(iter(tensors.values())).dtype), indent=2)
        (aside / "config.json").write_text(text + "\n", encoding="utf-8")
        # safetensors lets nobody else read its file; a server may be somebody else.
        (aside / "model.safetensors").chmod((aside / "config.json").stat().st_mode)
    return folder


def load_drafter(folder: str | Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> DFlashDrafter:
    """Read an exported or published drafter. Weights keep their dtype unless ``dtype`` is given.

    Raises ExportError for what this drafter cannot represent (another architecture, biases, scaled rotary positions, an own
    vocabulary) and for weights that are missing, unknown or of another shape.
    """
    folder = Path(folder)
    config = drafter_config(read_checkpoint_config(folder), str(folder / "config.json"))
    file = folder / "model.safetensors"
    try:
        tensors = load_file(file, device=str(device))
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{file} cannot be read: {error}") from error
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    expected = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if expected != found:
        raise ExportError(f"{file} does not fit its config.json: {_difference(expected, found)}.")
    drafter.load_state_dict(tensors, assign=True)
    return drafter.to(dtype=dtype)


def checkpoint_config(config: DrafterConfig, info: TargetInfo, dtype: torch.dtype) -> dict:
    """``config.json`` of a drafter: a Qwen3 configuration with ``dflash_config`` beside it."""
    dflash = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    if info.embed_scale != 1.0:
        dflash["input_embedding_scale"] = info.embed_scale
    if info.logit_scale != 1.0:
        dflash["output_multiplier"] = info.logit_scale
    if info.logit_softcap:
        dflash["final_logit_softcapping"] = info.logit_softcap
    dtype_name = str(dtype).removeprefix("torch.")
    slides = "sliding_attention" in config.layer_types
    written = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": dflash,
        "num_target_layers": config.num_target_layers,
        "num_hidden_layers": config.num_layers,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window if slides else None,
        "use_sliding_window": slides,
        "max_window_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": info.eos_token_ids[0] if info.eos_token_ids else None,
        "pad_token_id": info.pad_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": dtype_name,
        "torch_dtype": dtype_name,
    }
    if config.is_causal is not None:
        written["is_causal"] = config.is_causal
    return written


def drafter_config(written: dict, source: str) -> DrafterConfig:
    """The DrafterConfig that a ``config.json`` describes; values in ``dflash_config`` count before those at the top level."""
    dflash = written.get("dflash_config") or {}

    def get(key: str) -> Any:
        value = dflash.get(key, written.get(key))
        if value is None:
            raise ExportError(f"{source} has no {key}, which every drafter must state. Take its whole published config.json.")
        return value

    if written.get("architectures") != [ARCHITECTURE]:
        raise ExportError(
            f"{source} describes {written.get('architectures')} in architectures, not a {ARCHITECTURE}. Name a drafter's folder."
        )
    rope = written.get("rope_parameters") or written.get("rope_scaling") or {}
    if (kind := rope.get("rope_type") or rope.get("type") or "default") != "default":
        raise ExportError(f"{source} asks for {kind!r} rotary positions (rope_type); only plain ones are supported.")
    for key in UNSUPPORTED:
        if dflash.get(key, written.get(key)):
            raise ExportError(f"{source} sets {key}, which this drafter does not have; use a checkpoint without it.")
    if (reduced := written.get("draft_vocab_size")) not in (None, written.get("vocab_size")):
        raise ExportError(f"{source} has a vocabulary of its own of {reduced} tokens; only the target's whole vocabulary is supported.")
    num_layers, num_target_layers = get("num_hidden_layers"), get("num_target_layers")
    ids = dflash.get("target_layer_ids", written.get("target_layer_ids"))
    try:
        return DrafterConfig(
            hidden_size=get("hidden_size"),
            intermediate_size=get("intermediate_size"),
            num_layers=num_layers,
            num_heads=get("num_attention_heads"),
            num_kv_heads=get("num_key_value_heads"),
            head_dim=get("head_dim"),
            rope_theta=float(rope.get("rope_theta") or get("rope_theta")),
            rms_norm_eps=get("rms_norm_eps"),
            vocab_size=get("vocab_size"),
            block_size=get("block_size"),
            target_layer_ids=tuple(ids) if ids else default_layer_ids(num_target_layers, num_layers),
            num_target_layers=num_target_layers,
            mask_token_id=get("mask_token_id"),
            max_positions=get("max_position_embeddings"),
            layer_types=tuple(written.get("layer_types") or ()),
            sliding_window=written.get("sliding_window"),
            is_causal=written.get("is_causal", dflash.get("causal")),
        )
    except ExportError:
        raise
    except (TypeError, ValueError) as error:
        raise ExportError(f"{source} holds a value that does not fit: {error}") from error


def read_checkpoint_config(folder: Path) -> dict:
    """``config.json`` as written, or an ExportError."""
    file = folder / "config.json"
    try:
        written = parsed(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        near = "" if exists(folder) else did_you_mean(folder)
        raise ExportError(f"{file} cannot be read: {error}.{near or ' Name the folder of an exported drafter.'}") from error
    if not isinstance(written, dict):
        raise ExportError(f"{file} holds a {type(written).__name__}, not an object. Copy it again from where it was published.")
    if problem := fault(written, {**SETTINGS, "dflash_config": (SETTINGS, NoneType)}):
        raise ExportError(f"{file} {problem}. Copy it again from where it was published.")
    return written


def _is_drafter(folder: Path) -> bool:
    try:
        return read_checkpoint_config(folder).get("architectures") == [ARCHITECTURE]
    except ExportError:
        return False


def _difference(expected: dict[str, tuple], found: dict[str, tuple]) -> str:
    missing, unknown = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    other = [f"{name} is {found[name]} and should be {shape}" for name, shape in expected.items() if name in found and found[name] != shape]
    parts = [f"missing {', '.join(missing[:3])}" if missing else "", f"unknown {', '.join(unknown[:3])}" if unknown else "", *other[:3]]
    return "; ".join(part for part in parts if part)
