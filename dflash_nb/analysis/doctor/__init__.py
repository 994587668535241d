"""Is this environment, dataset, target and drafter fit to train? ``examine(config)`` answers before the first step.

Most faults of such trainers show after days: labels off by one, a layer off by one, a mask that leaks, a rope base lost in the export.
Each is asked for by an experiment on the loaded models themselves, on a few rows of the real data: 32 checks, 5 s of CPU for the sample.
A check is one line: OK, LOOK or STOP, evidence with a number, and what to do. ``examine(config).require()`` ends the run at a STOP.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_nb.analysis.doctor import cluster, data, drafting, environment, features, learning
from dflash_nb.analysis.doctor.check import Check, DoctorError, Examination, Level, explained
from dflash_nb.data.dataset import Batch, TokenDataset, dataset_path
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.export import export_drafter
from dflash_nb.model.initialise import scale_to_head
from dflash_nb.model.packing import PackingError
from dflash_nb.model.target import Features, FrozenTarget, TargetHead
from dflash_nb.model.target_info import GROWING_LAYERS, TargetInfo, read_target_info
from dflash_nb.pipeline.config import TrainConfig, checked_config
from dflash_nb.pipeline.job import Job, padded_instead, placement_of, prepare_job
from dflash_nb.pipeline.local import Placement, bytes_per_token, load_targets
from dflash_nb.pipeline.memory import predict_job

__all__ = ["Check", "DoctorError", "Examination", "Level", "examine"]

PROBE_ROWS, PROBE_LENGTH = 3, 64
LOSS_ROWS, LOSS_LENGTH = 4, 1024


def examine(config: TrainConfig) -> Examination:
    """Examine everything that ``train(config)`` would use. A problem becomes a check, never an error; only a temporary folder is written.

    The models are loaded only if nothing before them is a STOP. With ``watch`` nothing is trained, so there is nothing to examine.
    """
    started = time.perf_counter()
    if checked_config(config).watch:
        return Examination((), left_out="a run is looked at, not trained")
    checks: list[Check] = []
    config = _attempt(checks, "resume", config.resumed)
    job = None if config is None else _attempt(checks, "inputs", _examine_inputs, config, checks)
    left_out = ""
    if job is None:
        left_out = "target and drafter were not loaded; mend the STOPs first"
    else:
        _attempt(checks, "models", _examine_models, job, checks)
    return Examination(tuple(checks), time.perf_counter() - started, left_out)


def _examine_inputs(config: TrainConfig, checks: list[Check]) -> Job | None:
    """Machine, data and target's files. Returns the job if there was no STOP."""
    placement = _attempt(checks, "device", placement_of, config)
    info = _attempt(checks, "target", read_target_info, config.target)
    splits = _attempt(checks, "dataset", _open_splits, config)
    on_gpu = placement is not None and any(device.type == "cuda" for device in (*placement.targets, placement.drafter))
    command = environment.find_compiler()
    recurrent = sum(kind not in GROWING_LAYERS for kind in info.layer_types) if info else 0
    checks += [
        environment.compiler(on_gpu, command),
        environment.headers(on_gpu, command),
        environment.triton(on_gpu, environment.package_version("triton")),
        environment.fla(on_gpu, recurrent, environment.package_version("flash-linear-attention", "fla")),
        environment.allocator(on_gpu, os.environ),
        environment.tracker(config.tracker),
    ]
    if info:
        checks.append(data.layers(info, config.layer_ids, config.draft_layers))
    if info and splits:
        train = splits[0]
        mask = info.mask_token_id if config.mask_token_id is None else config.mask_token_id
        checks += [
            data.tokenizer(train, info),
            data.vocabulary(splits, info),
            data.mask_token(splits, info, mask),
            data.supervision(train),
            data.cuts(config.cuts_note),
            data.lengths(train.lengths, info.max_positions, config.max_length or config.token_budget, config.too_long),
        ]
    if _stopped(checks):
        return None
    return _attempt(checks, "plan", prepare_job, config)


def _examine_models(job: Job, checks: list[Check]) -> None:
    """Load one target and a fresh drafter, as training does, and experiment on them."""
    memory = _attempt(checks, "memory", predict_job, job)
    if memory is not None:
        checks.append(environment.memory(memory, environment.free_memory(memory.devices)))
    first, device = job.placement.targets[0], job.placement.drafter
    loaded = _attempt(checks, "target weights", _load_target, job, Placement((first,), device))
    if loaded is None:
        return
    target, refused = loaded
    if job.config.engine == "ray":
        checks.append(cluster.cluster(job, bytes_per_token(target)))
    head = target.head(device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(job.config.seed)
        drafter = DFlashDrafter(job.drafter).to(device)
    scale_to_head(drafter, head)
    batch = _few_rows(job, PROBE_ROWS, PROBE_LENGTH)
    checks.append(environment.disk(job.config.runs_folder, environment.run_bytes(drafter, job.config.keep_checkpoints)))
    checks.append(data.batch_rows(job.dataset, batch))
    checks += examine_target(target, batch, refused)
    learned = target.features(_few_rows(job, LOSS_ROWS, LOSS_LENGTH)).to(device)
    checks += examine_drafter(drafter, head, job.info, learned, environment.existing(job.config.runs_folder))
    del loaded, target, head, drafter, learned
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _load_target(job: Job, alone: Placement) -> tuple[FrozenTarget, str]:
    """One target as training would load it, and why its rows are padded though the run asked for packed ones."""
    load = partial(load_targets, job.info, job.drafter.target_layer_ids, alone, job.config.dtype, False)
    if job.config.strategy != "packed":
        return load(False)[0], " ".join(job.notes)
    try:
        return load(True)[0], ""
    except PackingError as refusal:
        return load(False)[0], padded_instead(job.config, refusal)[1][0]


def examine_target(target: FrozenTarget, batch: Batch, refused: str = "") -> list[Check]:
    """The experiments on a loaded target, with a few rows of data; ``refused`` says why rows will not be packed though asked for."""
    return [
        features.capture(target, batch),
        features.feature_rows(target, batch),
        features.padding(target, batch),
        features.packing(target, batch, refused),
        features.alive(target, batch),
        features.head(target, batch),
    ]


def examine_drafter(
    drafter: DFlashDrafter, head: TargetHead, info: TargetInfo, learned: Features, place: Path | None = None
) -> list[Check]:
    """The experiments on an untrained drafter, with the head and features of its target."""
    probe = drafting.make_probe(drafter.config, head)
    return [
        learning.labels(drafter.config.block_size),
        drafting.future(drafter, probe),
        drafting.window(drafter, probe),
        drafting.noise(drafter, probe),
        drafting.others(drafter, probe),
        drafting.parity(drafter, probe),
        drafting.rope(drafter, info, probe),
        learning.first_loss(drafter, head, learned),
        learning.gradients(drafter, head, learned),
        learning.export(drafter, info, probe, export_drafter, place),
    ]


def _attempt(checks: list[Check], name: str, action: Callable[..., Any], *arguments: Any) -> Any:
    """What ``action`` returns; if it raises, None, and a STOP of this name among the checks."""
    try:
        return action(*arguments)
    except Exception as error:
        checks.append(explained(name, error))
        return None


def _stopped(checks: list[Check]) -> bool:
    return any(check.level == Level.STOP for check in checks)


def _open_splits(config: TrainConfig) -> list[TokenDataset]:
    path = dataset_path(config.dataset)
    return [TokenDataset.open(path, split, withhold=config.heldout_rows) for split in ("train", "heldout")]


def _few_rows(job: Job, rows: int, longest: int) -> Batch:
    """A padded batch of supervised rows from the shorter half, the longest first, cut at ``longest`` tokens."""
    dataset = job.dataset
    usable = np.flatnonzero(dataset.n_supervised >= 2)
    usable = usable[np.argsort(dataset.lengths[usable], kind="stable")]
    places = np.linspace(len(usable) // 2, 0, min(rows, len(usable))).astype(int)
    ids = usable[places]
    width = min(int(dataset.lengths[ids].max()), longest) + 8
    return dataset.collate(ids, width, pad_id=job.info.pad_token_id or 0, max_length=longest)
