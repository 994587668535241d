"""Checkpoints: whole or absent, verified, and exact for either optimiser.

Run alone: python -m pytest tests/test_checkpoint.py
"""

import json
import shutil

import pytest
import torch
from torch import nn

from dflash_nb.pipeline.checkpoint import (
    MANIFEST,
    OPTIMIZER,
    STATE,
    WEIGHTS,
    CheckpointError,
    checkpoints,
    newest_checkpoint,
    restore,
    verify,
    write_checkpoint,
)
from dflash_nb.pipeline.optimizer import KINDS, make_optimizer


def small(seed=0, kind="muon"):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2))
    return module, make_optimizer(module, kind, 1e-2, (0.9, 0.95), 0.0)


def advance(module, optimizer, steps):
    losses = []
    for _ in range(steps):
        x = torch.randn(3, 4)
        loss = module(x).square().sum()
        module.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def refuse(error):
    raise AssertionError(f"nothing should be broken: {error}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_run_continues_exactly_with_moments_and_random_numbers(tmp_path, kind):
    module, optimizer = small(kind=kind)
    advance(module, optimizer, 7)
    path = write_checkpoint(tmp_path, 7, module, optimizer, {"epoch": 1, "next_batch": 3})
    expected = advance(module, optimizer, 5)

    other, other_optimizer = small(99, kind)
    found, state = newest_checkpoint(tmp_path, refuse)
    assert found == path
    assert state == {"epoch": 1, "next_batch": 3, "step": 7}
    restore(found, other, other_optimizer)
    assert advance(other, other_optimizer, 5) == expected
    ours, theirs = (
        [optimizer.state[p] for p in module.parameters()] for module, optimizer in ((module, optimizer), (other, other_optimizer))
    )
    assert ours[-1]["step"].item() == theirs[-1]["step"].item() == 12
    assert all(torch.equal(mine[key], its[key]) for mine, its in zip(ours, theirs, strict=True) for key in mine)


def test_moments_are_stored_by_sorted_names_without_code(tmp_path):
    module, optimizer = small()
    advance(module, optimizer, 1)
    path = write_checkpoint(tmp_path, 1, module, optimizer, {})
    saved = torch.load(path / OPTIMIZER, weights_only=True)
    assert list(saved["moments"]) == ["0.weight", "1.bias", "1.weight"]
    assert all(moment.dtype == torch.float32 for moments in saved["moments"].values() for moment in moments.values())


def test_only_the_newest_are_kept_in_order_of_the_step(tmp_path):
    module, optimizer = small()
    for step in (9, 10, 11, 100):
        write_checkpoint(tmp_path, step, module, optimizer, {}, keep=2)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-11", "step-100"]


def truncate(path):
    (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:-7])


def flip(path):
    content = bytearray((path / OPTIMIZER).read_bytes())
    content[len(content) // 2] ^= 1
    (path / OPTIMIZER).write_bytes(content)


def garble(path):
    (path / STATE).write_text((path / STATE).read_text().replace("7", "8"))


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        flip,
        garble,
        lambda path: (path / MANIFEST).unlink(),
        lambda path: (path / MANIFEST).write_text("{"),
        lambda path: (path / MANIFEST).write_text("[]"),
        lambda path: (path / WEIGHTS).unlink(),
        lambda path: [file.unlink() for file in path.iterdir()],
    ],
)
def test_a_broken_newest_is_passed_over_with_its_name(tmp_path, damage):
    module, optimizer = small()
    write_checkpoint(tmp_path, 6, module, optimizer, {})
    damage(write_checkpoint(tmp_path, 7, module, optimizer, {"n": 7}))
    broken = []
    path, state = newest_checkpoint(tmp_path, broken.append)
    assert path.name == "step-6"
    assert state["step"] == 6
    assert len(broken) == 1
    assert str(broken[0]).startswith("step-7: ")


def test_nothing_there_is_not_an_error_and_only_broken_ones_are(tmp_path):
    assert newest_checkpoint(tmp_path, refuse) is None
    assert newest_checkpoint(tmp_path / "absent", refuse) is None
    module, optimizer = small()
    truncate(write_checkpoint(tmp_path, 7, module, optimizer, {}))
    with pytest.raises(CheckpointError, match=r"no usable checkpoint .* step-7: weights.safetensors has"):
        newest_checkpoint(tmp_path, lambda error: None)


def test_what_a_killed_writer_left_is_ignored_and_removed(tmp_path):
    module, optimizer = small()
    path = write_checkpoint(tmp_path, 1, module, optimizer, {})
    half = tmp_path / ".step-2.0a1b2c3d.aside"
    shutil.copytree(path, half)
    (half / MANIFEST).unlink()
    assert checkpoints(tmp_path) == [path]
    write_checkpoint(tmp_path, 3, module, optimizer, {})
    assert not half.exists()


def test_a_failed_write_leaves_no_checkpoint(tmp_path):
    module, optimizer = small()
    with pytest.raises(TypeError):
        write_checkpoint(tmp_path, 1, module, optimizer, {"not json": object()})
    assert list(tmp_path.iterdir()) == []


def test_the_same_step_may_be_written_again(tmp_path):
    module, optimizer = small()
    write_checkpoint(tmp_path, 1, module, optimizer, {"try": 1})
    assert verify(write_checkpoint(tmp_path, 1, module, optimizer, {"try": 2}))["try"] == 2


def test_another_drafter_is_refused(tmp_path):
    module, optimizer = small()
    path = write_checkpoint(tmp_path, 1, module, optimizer, {})
    other = nn.Sequential(nn.Linear(4, 9, bias=False), nn.Linear(9, 2))
    with pytest.raises(CheckpointError, match=r"differs from the checkpoint's in 0.weight, 1.weight"):
        restore(path, other, make_optimizer(other, "muon", 1e-2, (0.9, 0.95), 0.0))


def test_weights_are_plain_safetensors(tmp_path):
    module, optimizer = small()
    path = write_checkpoint(tmp_path, 1, module, optimizer, {})
    header = (path / WEIGHTS).read_bytes()
    names = json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])
    assert sorted(name for name in names if name != "__metadata__") == ["0.weight", "1.bias", "1.weight"]


@pytest.mark.parametrize("writer", ["save_file", "torch.save", "_sync"])
def test_a_full_disk_is_named_with_the_path_and_leaves_the_older_checkpoint(tmp_path, monkeypatch, writer):
    module, optimizer = small()
    older = write_checkpoint(tmp_path, 1, module, optimizer, {})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"dflash_nb.pipeline.checkpoint.{writer}", full)
    with pytest.raises(CheckpointError, match=r"step-2 cannot be written: .*No space left.* Make room"):
        write_checkpoint(tmp_path, 2, module, optimizer, {})
    assert newest_checkpoint(tmp_path, refuse)[0] == older and [path.name for path in tmp_path.iterdir()] == ["step-1"]
