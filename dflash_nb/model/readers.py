"""Whether the four known readers of a drafter checkpoint would read it right, and how each is told to serve it.

    python -m dflash_nb.model.readers runs/<name>/export --target path/to/target

Rules as found in the readers' sources in November 2026: ``dflash`` 0.1.0 (`model.py`), vLLM (`qwen3_dflash.py`, `eagle3_utils.py`),
SGLang (`models/dflash.py`, `speculative/dflash_utils.py`) and speculators (`convert/dflash/converter.py`); dflash 0.1.0 and the converter
of speculators 0.9.0 were also run on exports. Most mistakes a reader does not report: it serves the drafter with a wrong theta, window
or block size, and acceptance falls.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dflash_nb.model.export import ARCHITECTURE, ExportError, drafter_config, read_checkpoint_config
from dflash_nb.model.target_info import TargetInfo, read_target_info

READERS = ("dflash", "vLLM", "SGLang", "speculators")
OK, LOOK, STOP = "OK", "LOOK", "STOP"


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``level``: LOOK (works, but not as one may expect) or STOP (refused, or served wrong)."""

    reader: str
    level: str
    text: str


def check_readers(folder: str | Path, target: TargetInfo | None = None) -> list[Finding]:
    """What each reader makes of the checkpoint in ``folder``; with ``target`` also whether it fits that target.

    Raises ExportError if there is no readable checkpoint.
    """
    folder = Path(folder)
    written = read_checkpoint_config(folder)
    file = folder / "model.safetensors"
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{file} cannot be read: {error}") from error
    problems = [*_problems_of_all(written, shapes), *_problems_with_target(written, target)]
    findings = [Finding(reader, STOP, text) for text in problems for reader in READERS]
    for reader, check in zip(READERS, (_dflash, _vllm, _sglang, _speculators), strict=True):
        findings += [Finding(reader, level, text) for level, text in check(written, target)]
    return sorted(findings, key=lambda finding: READERS.index(finding.reader))


def compatibility_report(folder: str | Path, target: TargetInfo | None = None) -> str:
    """``check_readers`` as text, followed by the command that serves the drafter in each reader that can."""
    findings = check_readers(folder, target)
    stopped = {finding.reader for finding in findings if finding.level == STOP}
    lines = []
    for reader in READERS:
        mine = [finding for finding in findings if finding.reader == reader]
        lines += [f"{reader:<12}{finding.level:<5}{finding.text}" for finding in mine]
        if not mine:
            lines.append(f"{reader:<12}{OK:<5}reads this checkpoint as it was trained")
    commands = {} if len(stopped) == len(READERS) else serving_commands(folder, target)
    lines += ["", *(f"{reader}: {command}" for reader, command in commands.items() if reader not in stopped)]
    return "\n".join(lines)


def serving_commands(folder: str | Path, target: TargetInfo | None = None) -> dict[str, str]:
    """How to serve the drafter, by reader. Of a block of B slots the first is known: vLLM and speculators count B - 1, SGLang counts B."""
    folder = Path(folder).absolute()
    written = read_checkpoint_config(folder)
    block_size = drafter_config(written, str(folder / "config.json")).block_size
    name = "TARGET" if target is None else str(target.path)
    hybrid = " --mamba-scheduler-strategy extra_buffer" if target is not None and target.is_hybrid else ""
    speculative = f'{{"method": "dflash", "model": "{folder}", "num_speculative_tokens": {block_size - 1}}}'
    return {
        "dflash": f"DFlashDraftModel.from_pretrained({str(folder)!r}).spec_generate(target, ...)",
        "vLLM": f"vllm serve {name} --speculative-config '{speculative}'",
        "SGLang": (
            f"python -m sglang.launch_server --model-path {name} --speculative-algorithm DFLASH "
            f"--speculative-draft-model-path {folder} --speculative-num-draft-tokens {block_size}{hybrid}"
        ),
        "speculators": (
            f"DFlashConverter().convert({str(folder)!r}, OUT, base_model={name!r}, aux_hidden_state_layer_ids={_after_layers(written)})"
            f"  # speculative_tokens {block_size - 1}"
        ),
    }


def _setting(written: dict, key: str) -> object:
    return (written.get("dflash_config") or {}).get(key, written.get(key))


def _after_layers(written: dict) -> list[int]:
    """Layer ids as vLLM and speculators count them: the state after n layers, so the output of layer i is i + 1."""
    return [i + 1 for i in _setting(written, "target_layer_ids") or []]


def _problems_of_all(written: dict, shapes: dict[str, tuple]) -> Iterator[str]:
    """What no reader can get over."""
    if written.get("architectures") != [ARCHITECTURE]:
        yield f"architectures is {written.get('architectures')}, not [{ARCHITECTURE!r}]"
        return
    try:
        config = drafter_config(written, "config.json")
    except ExportError as error:
        yield str(error)
        return
    layer = {
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{part}" for part in ("gate_proj", "up_proj", "down_proj")),
    }
    names = {f"layers.{i}.{part}.weight" for i in range(config.num_layers) for part in layer}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    if missing := sorted(names - shapes.keys()):
        yield f"model.safetensors lacks {', '.join(missing[:3])} ({len(missing)} in all)"
    if unknown := sorted(shapes.keys() - names):
        yield f"model.safetensors has {', '.join(unknown[:3])}, which replaces or breaks what the target shares ({len(unknown)} in all)"
    width = (config.hidden_size, len(config.target_layer_ids) * config.hidden_size)
    if shapes.get("fc.weight", width) != width:
        yield f"fc.weight is {shapes['fc.weight']}, but {len(config.target_layer_ids)} captured layers need {width}"
    if len(written.get("layer_types") or ()) != config.num_layers:
        yield f"layer_types has {len(written.get('layer_types') or ())} entries for {config.num_layers} layers"


def _problems_with_target(written: dict, target: TargetInfo | None) -> Iterator[str]:
    if target is None:
        return
    for key, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size), ("num_target_layers", target.num_layers)):
        if written.get(key) != wanted:
            yield f"{key} is {written.get(key)}, the target {target.name} has {wanted}"
    theta = (written.get("rope_parameters") or {}).get("rope_theta", written.get("rope_theta"))
    if theta != target.rope_theta:
        yield f"rope_theta is {theta}, the target {target.name} has {target.rope_theta}"


def _dflash(written: dict, target: TargetInfo | None) -> Iterator[tuple[str, str]]:
    if _setting(written, "block_size") is None:
        yield LOOK, "no block_size: it assumes 16"
    if not (written.get("rope_parameters") or {}).get("rope_theta"):
        yield LOOK, "no rope_parameters.rope_theta: releases of transformers from 5 on fall back to 10000"
    if target is not None and target.is_hybrid:
        yield LOOK, "drafts right, but its own decoding leaves rejected tokens in a recurrent state: do not measure acceptance with it"


def _vllm(written: dict, target: TargetInfo | None) -> Iterator[tuple[str, str]]:
    if written.get("model_type") != "qwen3":
        yield STOP, f"model_type {written.get('model_type')!r} is refused for drafts; it must be 'qwen3'"
    if not (written.get("rope_parameters") or {}).get("rope_theta", written.get("rope_theta")):
        yield LOOK, "no rope_theta: it assumes 1000000"
    if "partial_rotary_factor" in (written.get("rope_parameters") or {}):
        yield STOP, "partial_rotary_factor would be applied; a drafter rotates its whole head"
    if len(set(written.get("layer_types") or ())) > 1:
        yield LOOK, "sliding and full layers together need VLLM_USE_V2_MODEL_RUNNER=1"
    for key, effect in (("input_embedding_scale", "the target's embedding scale"), ("output_multiplier", "the target's logit scale")):
        if key in (written.get("dflash_config") or {}):
            yield LOOK, f"it does not read {key}: {effect} must come from the target's own layers"


def _sglang(written: dict, target: TargetInfo | None) -> Iterator[tuple[str, str]]:
    if written.get("hidden_act") != "silu":
        yield STOP, f"hidden_act {written.get('hidden_act')!r} is refused; it must be 'silu'"
    causal = written.get("is_causal", (written.get("dflash_config") or {}).get("causal"))
    kinds = set(written.get("layer_types") or ())
    if (causal is True and "full_attention" in kinds) or (causal is False and "sliding_attention" in kinds):
        yield STOP, "it does not read is_causal: sliding layers are always causal inside the block, full ones never"
    if (written.get("num_target_layers") or 0) < 4 and not _setting(written, "target_layer_ids"):
        yield STOP, "targets of fewer than 4 layers need explicit target_layer_ids"
    nested, top = (written.get("dflash_config") or {}).get("block_size"), written.get("block_size")
    if nested != top:
        yield LOOK, f"block_size is {nested} in dflash_config and {top} at the top level: it takes the first, other readers the second"


def _speculators(written: dict, target: TargetInfo | None) -> Iterator[tuple[str, str]]:
    if written.get("is_causal") is not None:
        yield STOP, "its converter does not carry is_causal over: sliding layers become causal, full ones not"
    if written.get("num_target_layers") in _after_layers(written):
        yield LOOK, "its converter drops the target's last layer unless aux_hidden_state_layer_ids is given, as in the command below"
    if target is not None and "text_config" in read_checkpoint_config(target.path):
        yield LOOK, "the target's config nests its text model: give aux_hidden_state_layer_ids, as in the command below"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; the exit status is 1 where a reader would refuse the checkpoint or serve it wrong."""
    parser = argparse.ArgumentParser(prog="python -m dflash_nb.model.readers", description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="folder of a drafter checkpoint, such as a run's export")
    parser.add_argument("--target", help="the target that it drafts for: sample, smollm2 or a model folder")
    given = parser.parse_args(arguments)
    try:
        target = read_target_info(given.target) if given.target else None
        print(compatibility_report(given.folder, target), flush=True)
        refused = any(finding.level == STOP for finding in check_readers(given.folder, target))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    sys.exit(int(refused))


if __name__ == "__main__":
    main()
