"""Checkpoints that are either whole or absent.

A checkpoint is a folder ``step-N``: ``weights.safetensors``, ``optimizer.pt`` (moments by parameter name, random states),
``state.json`` (step, plan position, schedule, what was in flight) and ``manifest.json`` (bytes and SHA-256 of the others). It is
written aside, synced to disk, renamed, and read back only if it agrees with its manifest; if the newest does not, the one before it
is used. Learning rate, plan and anchors are functions of (seed, epoch, step, sample), so the random states only matter to code that
draws from PyTorch's generators. Hashing runs at 2 GB/s on one core: 10 s for the 20 GB of a 1.7 B drafter.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from dflash_nb.errors import DiskError, PlainError
from dflash_nb.home import write_aside
from dflash_nb.pipeline.optimizer import DrafterOptimizer, moment_names
from dflash_nb.stored import fault, parsed

RESUME = "continue with -p resume"
WEIGHTS, OPTIMIZER, STATE, MANIFEST = "weights.safetensors", "optimizer.pt", "state.json", "manifest.json"
SHAPE = {name: {"bytes": int, "sha256": str} for name in (WEIGHTS, OPTIMIZER, STATE)}  # of the manifest
OPTIMIZER_SHAPE = {"moments": dict, "random": {"cpu": torch.Tensor, "cuda": list}}


class CheckpointError(PlainError, RuntimeError):
    """A checkpoint cannot be used. The text names the folder and what is wrong with it."""


def write_checkpoint(
    folder: Path, step: int, module: torch.nn.Module, optimizer: DrafterOptimizer, state: dict[str, Any], keep: int = 2
) -> Path:
    """Write ``folder/step-N`` and remove all but the newest ``keep``. ``state`` is plain JSON. Returns the checkpoint's path.

    Raises CheckpointError, and leaves the older ones, where it cannot be written.
    """
    path = folder / f"step-{step}"
    try:
        _remove_leftovers(folder)
        with write_aside(path, RESUME) as aside:
            aside.mkdir()
            save_file({name: value.detach().contiguous() for name, value in module.state_dict().items()}, aside / WEIGHTS)
            torch.save({"moments": _moments(module, optimizer), "random": _random_states()}, aside / OPTIMIZER)
            (aside / STATE).write_text(json.dumps({**state, "step": step}, indent=1))
            manifest = {
                name: {"bytes": (aside / name).stat().st_size, "sha256": _sha256(aside / name)} for name in (WEIGHTS, OPTIMIZER, STATE)
            }
            (aside / MANIFEST).write_text(json.dumps(manifest, indent=1))
            for name in (WEIGHTS, OPTIMIZER, STATE, MANIFEST):
                _sync(aside / name)
            _sync(aside)
        _sync(folder)
    except DiskError as error:
        raise CheckpointError(str(error)) from error
    except (OSError, RuntimeError, SafetensorError) as error:  # torch does not say why it could not write
        raise CheckpointError(
            f"{path} cannot be written: {type(error).__name__}: {error}. Make room there, or set runs_dir to another disk, then {RESUME}"
        ) from error
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoint folders in ``folder``, oldest first, verified or not."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := re.fullmatch(r"step-(\d+)", path.name))]
    return [path for _, path in sorted(found)]


def newest_checkpoint(
    folder: Path, on_broken: Callable[[CheckpointError], None], logged: int | None = None
) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that agrees with its manifest, and its state; None if there is none at all.

    ``logged`` is the last step that the run's log reaches: a later checkpoint counts as broken, for its losses are gone.

    Every broken one passed over is given to ``on_broken``. If there are only broken ones: CheckpointError.
    """
    broken = []
    for path in reversed(checkpoints(folder)):
        try:
            state = verify(path)
            if logged is not None and state["step"] > logged:
                raise CheckpointError(f"{path.name}: steps {logged + 1:,} to {state['step']:,} are missing in steps.jsonl; put it back")
            return path, state
        except CheckpointError as error:
            on_broken(error)
            broken.append(str(error))
    if broken:
        raise CheckpointError(f"no usable checkpoint in {folder}: {'; '.join(broken)}. Remove the folder to start from step 0")
    return None


def verify(path: Path) -> dict[str, Any]:
    """The state of a checkpoint whose files have the manifest's sizes and hashes and can be loaded. Raises CheckpointError."""
    try:
        manifest = parsed((path / MANIFEST).read_text())
        if problem := fault(manifest, SHAPE):
            raise CheckpointError(f"{path.name}: {MANIFEST} cannot be trusted, it {problem}; copy the checkpoint again")
        for name in SHAPE:
            expected = manifest[name]
            if (size := (path / name).stat().st_size) != expected["bytes"]:
                raise CheckpointError(f"{path.name}: {name} has {size} bytes, {expected['bytes']} were written")
            if _sha256(path / name) != expected["sha256"]:
                raise CheckpointError(f"{path.name}: {name} has other content than was written")
        state = parsed((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name}: {type(error).__name__}: {error}") from error
    if problem := fault(state, {"step": int}):
        raise CheckpointError(f"{path.name}: {STATE} cannot be used, it {problem}; copy the checkpoint again")
    _weight_shapes(path)
    _optimizer_content(path, mmap=True)
    return state


def check_moments(path: Path, kind: str) -> None:
    """Refuse a verified checkpoint that does not hold the moments of every weight as the optimiser ``kind`` keeps them."""
    moments = _optimizer_content(path, mmap=True)["moments"]
    wrong = [name for name, shape in _weight_shapes(path).items() if moments.get(name, {}).keys() != moment_names(kind, len(shape))]
    if wrong:
        raise CheckpointError(
            f"{path.name}: {OPTIMIZER} does not hold what optimizer {kind} keeps of {', '.join(wrong[:3])}"
            f"{f' and {len(wrong) - 3} more' if len(wrong) > 3 else ''}. Continue with the optimizer of the run, or remove {path}"
        )


def _weight_shapes(path: Path) -> dict[str, list[int]]:
    try:
        with safe_open(path / WEIGHTS, framework="pt") as file:
            return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118  # it is no dict
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name}: {WEIGHTS} cannot be loaded: {error}. Copy the checkpoint again") from error


def _optimizer_content(path: Path, mmap: bool) -> dict[str, Any]:
    """``mmap``: look only, without reading the tensors."""
    try:
        content = torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # what torch raises for a file that is none of its own differs by its first bytes
        reason = str(error).strip().splitlines() or [""]
        raise CheckpointError(
            f"{path.name}: {OPTIMIZER} cannot be loaded: {type(error).__name__}: {reason[0]}. Copy the checkpoint again"
        ) from error
    problem = fault(content, OPTIMIZER_SHAPE) or next(
        (found for name, each in content["moments"].items() if (found := _no_moments(each, f"moments.{name}"))), ""
    )
    if not problem and content["random"]["cpu"].shape != torch.get_rng_state().shape:
        problem = "holds another generator's state as random.cpu"
    if problem:
        raise CheckpointError(f"{path.name}: {OPTIMIZER} cannot be used, it {problem}. Copy the checkpoint again")
    return content


def _no_moments(content: Any, at: str) -> str:
    return fault(content, dict, at) or next(
        (found for key, value in content.items() if (found := fault(value, torch.Tensor, f"{at}.{key}"))), ""
    )


def restore(path: Path, module: torch.nn.Module, optimizer: DrafterOptimizer) -> None:
    """Put a verified checkpoint's weights, moments and random states back, on the devices where the parameters are."""
    weights = load_file(path / WEIGHTS)
    ours = module.state_dict()
    if problems := sorted(weights.keys() ^ ours.keys()) or [name for name in ours if ours[name].shape != weights[name].shape]:
        raise CheckpointError(
            f"{path.name}: the drafter differs from the checkpoint's in {', '.join(problems[:5])}. "
            "Continue with the settings of the run's config.json, or start a new run"
        )
    module.load_state_dict(weights)
    saved = _optimizer_content(path, mmap=False)
    names = {parameter: name for name, parameter in module.named_parameters()}
    for part in optimizer.parts:
        states = [saved["moments"].get(names[parameter], {}) for group in part.param_groups for parameter in group["params"]]
        part.load_state_dict({**part.state_dict(), "state": {index: state for index, state in enumerate(states) if state}})
    torch.set_rng_state(saved["random"]["cpu"])
    torch.cuda.set_rng_state_all(saved["random"]["cuda"][: torch.cuda.device_count()])


def _moments(module: torch.nn.Module, optimizer: DrafterOptimizer) -> dict[str, dict[str, torch.Tensor]]:
    state = optimizer.state
    return {name: state[parameter] for name, parameter in sorted(module.named_parameters()) if parameter in state}


def _random_states() -> dict[str, Any]:
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
