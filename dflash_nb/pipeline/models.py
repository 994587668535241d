"""What a job's config and facts become when it starts: targets, their head, the drafter with its first weights, its optimiser, the loss.

One place for training and for calibration, so that a measured batch is a trained one. The caller sets seed and threads before.
"""

from dataclasses import dataclass
from typing import Any

import torch

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.initialise import scale_to_head
from dflash_nb.model.objective import Objective
from dflash_nb.model.target import FrozenTarget, TargetHead
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.local import load_targets
from dflash_nb.pipeline.optimizer import DrafterOptimizer, make_optimizer
from dflash_nb.pipeline.step import LossSettings


@dataclass
class Models:
    """``targets`` one a worker; ``head`` on the drafter's device."""

    targets: list[FrozenTarget]
    head: TargetHead
    drafter: DFlashDrafter
    optimizer: DrafterOptimizer
    settings: LossSettings


def load_models(job: Job, packed: bool) -> Models:
    """Load the targets and make a new drafter for them. Raises TargetError for weights that cannot be used."""
    config, device = job.config, job.placement.drafter
    targets = load_targets(
        job.info, job.drafter.target_layer_ids, job.placement, config.dtype, with_last_hidden=config.objective == "kl", packed=packed
    )
    head = targets[0].head(device)
    settings = LossSettings(
        objective=Objective(config.objective, gamma=config.slot_gamma),
        anchors=config.anchors,
        block_size=config.block_size,
        seed=config.seed,
        device=device,
        autocast=targets[0].dtype == torch.bfloat16,
    )
    drafter = DFlashDrafter(job.drafter).to(device).train()
    scale_to_head(drafter, head)
    return Models(targets, head, drafter, make_optimizer(drafter, *optimizer_arguments(config)), settings)


def optimizer_arguments(config: TrainConfig) -> tuple[Any, ...]:
    """The arguments of ``make_optimizer`` after the module."""
    return config.optimizer, config.learning_rate, (config.beta1, config.beta2), config.weight_decay
