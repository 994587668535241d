"""Predicted bytes: exact where they can be counted, and the reference run's own numbers.

``benchmarks/memory.py`` compares predicted and measured peaks of whole runs.
"""

import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_targets import LAYERS, make_batch, save_target
from transformers import AutoConfig

from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.objective import Objective
from dflash_nb.model.target import FrozenTarget
from dflash_nb.model.target_info import TargetInfo, read_target_info
from dflash_nb.pipeline.memory import (
    Shape,
    drafter_parameters,
    feature_bytes,
    kept_for_backward,
    predict,
    resident_bytes,
    target_size,
    too_large,
)
from dflash_nb.pipeline.step import LossSettings, batch_loss

REFERENCE = TargetInfo(
    name="Qwen3.6-27B",
    path=Path("nowhere"),
    model_type="qwen3_5_text",
    hidden_size=5120,
    intermediate_size=17408,
    num_layers=64,
    num_heads=24,
    num_kv_heads=4,
    head_dim=256,
    vocab_size=248320,
    valid_vocab=248077,
    max_positions=262144,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    tied_head=False,
    layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 16,
    mask_token_id=248070,
    bos_token_id=None,
    eos_token_ids=(),
    pad_token_id=None,
    tokenizer_fingerprint=None,
)


@pytest.fixture(scope="module")
def reference():
    config = AutoConfig.for_model(
        "qwen3_5_text",
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        vocab_size=248320,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=48,
    )
    shape = Shape.planned(rows=16, padded_length=4096, tokens=65536, anchors=512, block_size=16)
    launch = {"targets": ("cuda:0",), "drafter_device": "cuda:1", "target_number": 2, "drafter_number": 2, "queue_bytes": 8 << 30}
    return REFERENCE, target_size(config), DrafterConfig.for_target(REFERENCE), shape, launch


def part(plan, name):
    [component] = [each for each in (*plan.components, *plan.avoided) if each.name == name]
    return component


def test_the_reference_runs_numbers(reference):
    *what, launch = reference
    plan = predict(*what, **launch)
    assert part(plan, "target weights").bytes == pytest.approx(54e9, rel=0.01)
    assert part(plan, "logits of every position").bytes == pytest.approx(30 * 2**30, rel=0.02)
    assert "only ever meets drafted slots" in part(plan, "logits of every position").note
    assert feature_bytes(what[2], 2) == 51_200 and feature_bytes(what[2], 2, with_last_hidden=True) == 61_440
    assert part(plan, "drafter and optimiser").bytes == pytest.approx(27.7e9, rel=0.002)
    assert part(predict(*what, **launch, optimizer="muon"), "drafter and optimiser").bytes == pytest.approx(0.75 * 27.7e9, rel=0.002)
    assert plan.total("cuda:0") < 96e9 < plan.total("cuda:0") + part(plan, "logits of every position").bytes
    text = plan.text()
    assert "never made" in text and text.count("total") == 2 and "51,200 B a token" in text


def test_batches_that_would_not_fit_are_named(reference):
    info, size, drafter, _, launch = reference
    shapes = Shape.planned(np.array([64, 11, 6]), np.array([768, 4096, 8191]), np.array([40_000, 44_000, 48_000]), 64, 16)
    bad = too_large({"cuda:0": 96e9, "cuda:1": 96e9}, shapes, info, size, drafter, **launch)
    assert bad["cuda:0"].tolist() == [] and bad["cuda:1"].tolist() == [0], "64 short rows draft ten times the slots of 6 long ones"
    for i in range(3):
        assert predict(info, size, drafter, shapes.one(i), **launch).total("cuda:1") == pytest.approx(
            predict(info, size, drafter, shapes, **launch).total("cuda:1")[i]
        )


@pytest.mark.parametrize("family", ["hybrid", "qwen3", "llama", "wrapper"])
def test_weights_are_counted_exactly(tmp_path, family):
    folder = save_target(tmp_path, family)
    info = read_target_info(folder)
    target = FrozenTarget.load(info, (1, 3))
    assert target_size(info).parameters == sum(p.numel() for p in target.model.parameters())
    for config in (DrafterConfig.for_target(info, num_layers=3), DrafterConfig.for_target(info, num_layers=1, num_heads=8, head_dim=32)):
        assert drafter_parameters(config) == sum(p.numel() for p in DFlashDrafter(config).parameters())


def kept_bytes(drafter, batch, features, head, settings) -> int:
    """Bytes of distinct storages that autograd really keeps, weights and features left out."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (*drafter.parameters(), features.features_ND, head.weight_VH)}
    kept = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        batch_loss(batch, features, drafter, head, settings)
    return sum(kept.values())


@pytest.mark.parametrize(
    ("lengths", "layers", "anchors"), [([200] * 6, 2, 16), ([400, 380, 150], 1, 32), ([64] * 20, 3, 8), ([500, 30], 2, 4)]
)
def test_what_is_kept_for_backward_is_what_autograd_keeps(tmp_path, lengths, layers, anchors):
    info = read_target_info(save_target(tmp_path, "llama", hidden_size=64, intermediate_size=192))
    config = DrafterConfig.for_target(info, num_layers=layers, block_size=8, target_layer_ids=(1, 3, LAYERS - 2))
    target, drafter = FrozenTarget.load(info, config.target_layer_ids), DFlashDrafter(config)
    batch = make_batch(lengths)
    settings = LossSettings(Objective(), anchors, 8, 0, torch.device("cpu"), False)
    features = target.features(batch)
    loss = batch_loss(batch, features, drafter, target.head(), settings)
    shape = Shape(len(lengths), max(lengths), sum(lengths), loss.blocks * 8)
    assert kept_for_backward(config, shape, 4) == pytest.approx(kept_bytes(drafter, batch, features, target.head(), settings), rel=0.1)


def test_every_device_gets_its_own_total(reference):
    *what, launch = reference
    spread = predict(*what, **{**launch, "targets": ("cuda:0", "cuda:1"), "drafter_device": "cuda:2"})
    assert spread.devices == ("cuda:0", "cuda:1", "cuda:2") and spread.total("cuda:0") == spread.total("cuda:1")
    shared = predict(*what, **{**launch, "targets": ("cuda:0",), "drafter_device": "cuda:0"})
    assert "target embedding and head" not in {each.name for each in shared.components}
    cpu = predict(*what, targets=("cpu", "cpu"), base_bytes=4e8)
    assert part(cpu, "target weights").bytes == what[1].parameters * 4, "workers on a CPU share the weights"
    assert part(cpu, "process").bytes == 4e8


def test_slots_are_bounded_by_the_tokens_there_are():
    assert Shape.planned(4, 100, 40, anchors=32, block_size=8).slots == 40 * 8
    assert Shape.planned(4, 100, 400, anchors=32, block_size=8).slots == 4 * 32 * 8


def test_what_the_process_holds_is_counted_in_pages_of_this_machine(monkeypatch):
    """64 KiB a page on some ARM machines."""
    held = resident_bytes()
    assert 50e6 < held < 1e12
    page = resource.getpagesize()
    monkeypatch.setattr(resource, "getpagesize", lambda: 4 * page)
    assert resident_bytes() > 3 * held
