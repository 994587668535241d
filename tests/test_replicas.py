"""Several replicas make the steps of one drafter, whatever each has to learn from.

Run alone: python -m pytest tests/test_replicas.py
"""

import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny_runs import save_target
from tiny_targets import make_batch

from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.objective import Objective
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline.optimizer import make_optimizer, update
from dflash_nb.pipeline.replicas import Replica
from dflash_nb.pipeline.step import Accumulated, LossSettings, add
from dflash_nb.pipeline.window import Ready

# Rows of each replica's two batches in each step. No number: the batch is all prompt.
STEPS = (
    (([40, 7], [12]), ([9], [31, 5])),
    (([], [25]), ([60, 33, 8], [14])),
    (([], []), ([21], [6])),
    (([18], [50]), ([], [])),
    (([], []), ([], [])),
)
SETTINGS = LossSettings(Objective("ce", 4.0), anchors=6, block_size=4, seed=0, device=torch.device("cpu"), autocast=False)


def ready(target, lengths, seed):
    batch = make_batch(lengths or [11, 4], seed=seed)
    if not lengths:
        batch.loss_mask_BT[:] = False
    return Ready(batch, target.features(batch), 0.0, 0.0)


def train(folder, rank, mine):
    """Two replicas' part of every step: ``mine`` are the replicas whose batches are trained here. Gradients of each step, and weights."""
    torch.set_num_threads(1)
    target = FrozenTarget.load(folder, (1, 5))
    torch.manual_seed(rank)  # replica 1 begins with other weights: it must get those of replica 0
    drafter = DFlashDrafter(DrafterConfig.for_target(target.info, num_layers=1, block_size=4, target_layer_ids=(1, 5)))
    optimizer = make_optimizer(drafter, "adamw", 1e-3, (0.9, 0.95), 0.0)
    replica = Replica(drafter, rank, 2, dist.FileStore(f"{folder}/store", 2)) if len(mine) == 1 else None
    gradients = []
    for number, step in enumerate(STEPS):
        total = Accumulated()
        for who in mine:
            for place, lengths in enumerate(step[who]):
                add(ready(target, lengths, seed=4 * number + 2 * who + place), total, drafter, target.head(), SETTINGS)
        weight = torch.tensor([total.weight], dtype=torch.float64)
        if replica is not None:
            replica.sum_gradients()
            dist.all_reduce(weight)
        gradients.append({name: parameter.grad.clone() for name, parameter in drafter.named_parameters()})
        update(optimizer, weight.item(), 1e-3, max_norm=1.0)
    if replica is not None:
        replica.close()
    return {"gradients": gradients, "weights": drafter.state_dict()}


def train_and_keep(rank, folder):
    torch.save(train(folder, rank, (rank,)), f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_two_replicas_have_the_gradients_of_one_drafter_on_all_batches(tmp_path):
    folder = save_target(tmp_path / "target", "llama")
    started = time.monotonic()
    processes = mp.spawn(train_and_keep, (folder,), nprocs=2, join=False)
    alone = train(folder, 0, (0, 1))
    while not processes.join(timeout=1):
        assert time.monotonic() - started < 120, "a replica waits for the other"
    first, second = (torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for ours, theirs, one in zip(first["gradients"], second["gradients"], alone["gradients"], strict=True):
        for name, gradient in one.items():
            assert torch.equal(ours[name], theirs[name])
            assert torch.allclose(ours[name], gradient, atol=1e-5 * max(1.0, gradient.abs().max().item()), rtol=1e-5), name
    assert all(torch.equal(value, second["weights"][name]) for name, value in first["weights"].items())
    largest = [max(gradient.abs().max().item() for gradient in step.values()) for step in alone["gradients"]]
    assert np.array_equal(np.array(largest) > 0, [True, True, True, True, False])
