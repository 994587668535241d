"""The doctor finds every one of some 80 planted faults, by the right check, and leaves sound configurations alone.

Run alone: python -m pytest tests/test_doctor.py
"""

import copy
import json
import shutil
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_runs import tiny_config, write_dataset
from tiny_targets import MASK_TOKEN, make_batch, save_target

from dflash_nb.analysis import doctor
from dflash_nb.analysis.doctor import Check, DoctorError, Examination, Level, data, drafting, environment, examine, features, learning
from dflash_nb.data.dataset import TokenDataset
from dflash_nb.model.anchors import draw_anchors, place_anchors
from dflash_nb.model.drafter import FULL, SLIDING, DFlashDrafter, DrafterConfig
from dflash_nb.model.export import export_drafter
from dflash_nb.model.initialise import scale_to_head
from dflash_nb.model.objective import block_loss
from dflash_nb.model.target import FrozenTarget
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.pipeline.memory import predict_job

IDS = (1, 3, 7)  # the last layer among them
BLOCK = 6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    return {family: save_target(root / family, family) for family in ("hybrid", "qwen3", "llama", "gemma2", "granite")}


@pytest.fixture(scope="module")
def targets(folders):
    return {family: FrozenTarget.load(folder, IDS) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def target(targets):
    return targets["qwen3"]


@pytest.fixture(scope="module")
def batch():
    return make_batch([30, 21, 12], 36)


@pytest.fixture(scope="module")
def dataset_path(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def dataset(dataset_path):
    return TokenDataset.open(dataset_path)


def make_drafter(target, **shape) -> DFlashDrafter:
    torch.manual_seed(3)
    values = {"num_layers": 2, "block_size": BLOCK, "target_layer_ids": IDS} | shape
    drafter = DFlashDrafter(DrafterConfig.for_target(target.info, **values))
    with torch.no_grad():  # a tied head answers a masked slot with the mask token itself; a fifth of the scale keeps that even
        drafter.norm.weight.fill_(0.2 * scale_to_head(drafter, target.head()))
    return drafter


@pytest.fixture
def drafter(target):
    return make_drafter(target)


@pytest.fixture(scope="module")
def probe(target):
    return drafting.make_probe(make_drafter(target).config, target.head())


@pytest.fixture(scope="module")
def learned(target, batch):
    return target.features(batch)


class Instead:
    """An object of which some attributes are replaced: a fault in one place, everything else as it was."""

    def __init__(self, whole, **replaced):
        self.__dict__.update(replaced, _whole=whole)

    def __getattr__(self, name):
        return getattr(self._whole, name)

    def __len__(self):
        return len(self._whole)


def assert_stop(check: Check, *words: str) -> None:
    assert check.level == Level.STOP, check.line()
    assert any(character.isdigit() for character in check.evidence), check.line()
    assert check.advice
    for word in words:
        assert word in check.evidence, check.line()


def assert_look(check: Check, *words: str) -> None:
    assert check.level == Level.LOOK, check.line()
    assert check.advice
    for word in words:
        assert word in check.evidence, check.line()


# Sound configurations


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("hybrid", {"block_size": 4}),
        ("hybrid", {"block_size": 16, "sliding_window": 8}),
        ("qwen3", {"block_size": 8}),
        ("qwen3", {"block_size": 6, "layer_types": (SLIDING, FULL), "sliding_window": 5}),
        ("llama", {"block_size": 2}),
        ("llama", {"block_size": 7, "sliding_window": 40}),
        ("llama", {"block_size": 16, "num_layers": 1}),
        ("gemma2", {"block_size": 8}),
        ("granite", {"block_size": 5, "num_layers": 3}),
        ("granite", {"block_size": 4, "sliding_window": 2}),
    ],
)
def test_sound_configurations_raise_no_alarm(targets, batch, family, shape):
    target = targets[family]
    learned = target.features(batch)
    checks = doctor.examine_target(target, batch)
    checks += doctor.examine_drafter(make_drafter(target, **shape), target.head(), target.info, learned)
    assert [check.line() for check in checks if check.level > Level.OK] == []
    assert all(any(character.isdigit() for character in check.evidence) for check in checks)


def test_a_whole_examination_finds_a_sound_run_sound(dataset_path, folders, tmp_path):
    before = torch.random.get_rng_state()
    found = examine(tiny_config(dataset_path, folders["qwen3"], tmp_path / "runs"))
    assert found.verdict == "OK", found.text()
    assert len(found.text().splitlines()) == len(found.checks) + 1 == len(found.table()) + 1
    assert len({check.name for check in found.checks}) == len(found.checks) > 25
    found.require()
    assert not (tmp_path / "runs").exists() and not list(tmp_path.iterdir())
    assert torch.equal(before, torch.random.get_rng_state())


# Whole examinations of faulty runs


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"target_layers": "1,1,5"}, "layer ids"),
        ({"target_layers": "1,8"}, "layer ids"),
        ({"mask_token": "1"}, "mask token"),
        ({"mask_token": "2"}, "mask token"),
        ({"token_budget": 40}, "lengths"),
        ({"topology": "3-2"}, "device"),
    ],
)
def test_a_faulty_configuration_is_stopped_by_name(dataset_path, folders, tmp_path, changes, name):
    found = examine(tiny_config(dataset_path, folders["qwen3"], tmp_path / "runs", **changes))
    assert found.verdict == "STOP"
    assert [check.name for check in found.checks if check.level == Level.STOP] == [name], found.text()
    assert found.of("capture") is None and "mend" in found.left_out
    with pytest.raises(DoctorError, match=f"{name}: "):
        found.require()


def test_packing_is_examined_where_the_target_can_and_padding_announced_where_it_cannot(dataset_path, folders, tmp_path):
    hybrid = examine(tiny_config(dataset_path, folders["hybrid"], tmp_path / "runs", strategy="packed"))
    assert hybrid.of("packing").level == Level.LOOK and "so batches are padded" in hybrid.of("packing").evidence
    assert hybrid.verdict != "STOP", hybrid.text()
    full = examine(tiny_config(dataset_path, folders["qwen3"], tmp_path / "runs", strategy="packed"))
    assert full.of("packing").level == Level.OK and full.of("padding").level == Level.OK
    assert full.verdict != "STOP", full.text()


def test_missing_inputs_are_named(dataset_path, folders, tmp_path):
    nowhere = tiny_config(tmp_path / "none", folders["qwen3"], tmp_path / "runs")
    assert examine(nowhere).of("dataset").level == Level.STOP
    assert examine(replace(nowhere, dataset=str(dataset_path), target=str(tmp_path))).of("target").level == Level.STOP


@pytest.mark.parametrize(("part", "stop"), [("scale_to_head", "models"), ("_few_rows", "models"), ("_examine_inputs", "inputs")])
def test_an_examination_that_fails_itself_is_a_stop_and_no_error(dataset_path, folders, tmp_path, monkeypatch, part, stop):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(doctor, part, fail)
    found = examine(tiny_config(dataset_path, folders["llama"], tmp_path / "runs"))
    assert found.verdict == "STOP" and found.of(stop).evidence == "RuntimeError: out of memory"


def test_broken_weights_are_named(dataset_path, folders, tmp_path):
    broken = Path(shutil.copytree(folders["llama"], tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    found = examine(tiny_config(dataset_path, broken, tmp_path / "runs"))
    assert found.of("target weights").level == Level.STOP


def test_require_lists_every_stop():
    checks = [
        Check("one", Level.STOP, "1 fault", "mend 1"),
        Check("two", Level.LOOK, "2", "look"),
        Check("three", Level.STOP, "3", "mend 3"),
    ]
    with pytest.raises(DoctorError) as raised:
        Examination(tuple(checks)).require()
    assert "one: 1 fault -> mend 1" in str(raised.value) and "three: 3 -> mend 3" in str(raised.value)
    assert "two" not in str(raised.value)
    Examination((checks[1],)).require()
    assert Examination((checks[1],)).verdict == "LOOK" and Examination(()).verdict == "OK"


# Environment


def test_a_cpu_needs_no_compiler_or_kernels():
    found = [
        environment.compiler(False, None),
        environment.headers(False, None),
        environment.triton(False, None),
        environment.fla(False, 6, None),
        environment.allocator(False, {}),
        environment.tracker("none"),
    ]
    assert {check.level for check in found} == {Level.OK}


def test_compiler_faults(tmp_path):
    assert_stop(environment.compiler(True, None), "0 C compilers")
    assert_stop(environment.compiler(True, "false"), "cannot compile")
    assert_stop(environment.compiler(True, str(tmp_path / "gcc")), "cannot compile")
    assert_stop(environment.headers(True, "false", tmp_path), "Python.h")
    (tmp_path / "Python.h").write_text("#error no\n")
    assert_stop(environment.headers(True, "false", tmp_path), "does not compile")


@pytest.mark.skipif(environment.find_compiler() is None, reason="no C compiler here")
def test_a_real_compiler_compiles(tmp_path):
    assert environment.compiler(True, environment.find_compiler()).level == Level.OK
    (tmp_path / "Python.h").write_text("typedef int PyObject;\n")
    assert environment.headers(True, environment.find_compiler(), tmp_path).level == Level.OK


def test_gpu_packages_and_allocator():
    assert_look(environment.triton(True, None), "0 versions")
    assert_look(environment.fla(True, 6, None), "6 recurrent layers")
    assert environment.fla(True, 0, None).level == environment.fla(True, 6, "0.6").level == Level.OK
    assert_look(environment.allocator(True, {}), "not set")
    assert_look(environment.allocator(True, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}))
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert environment.allocator(True, {name: "max_split_size_mb:64, expandable_segments:True"}).level == Level.OK


def test_tracker_faults():
    def missing(name):
        raise ModuleNotFoundError(name, name=name)

    def broken(name):
        raise AttributeError("np.float_ was removed")

    def strict(**settings):
        raise ValueError("unexpected setting init_timeout")

    names = {"init": print, "teardown": print, "__version__": "0.29"}
    assert_look(environment.tracker("wandb", missing), "not installed")
    assert_look(environment.tracker("trackio", broken), "fails on import")
    assert_look(environment.tracker("trackio", lambda name: types.SimpleNamespace(init=print)), "has no log, finish")
    assert_look(environment.tracker("wandb", lambda name: types.SimpleNamespace(**names, Settings=strict)), "refuses")
    assert environment.tracker("wandb", lambda name: types.SimpleNamespace(**names, Settings=dict)).level == Level.OK
    assert environment.tracker("tensorboard", lambda name: types.SimpleNamespace(Writer=print)).level == Level.OK


def test_disk_faults(tmp_path, drafter):
    needed = environment.run_bytes(drafter, keep_checkpoints=2)
    assert needed == 40 * sum(parameter.numel() for parameter in drafter.parameters())
    assert environment.disk(tmp_path / "runs", needed, free=2 * needed).level == Level.OK
    assert_look(environment.disk(tmp_path / "runs", needed, free=1.2 * needed))
    assert_stop(environment.disk(tmp_path / "runs", needed, free=0.5 * needed))
    (tmp_path / "file").write_text("")
    assert_stop(environment.disk(tmp_path / "file" / "runs", needed), "not a folder")


def test_memory_faults(dataset_path, folders, tmp_path):
    plan = predict_job(prepare_job(tiny_config(dataset_path, folders["qwen3"], tmp_path / "runs")))
    needed = plan.total("cpu")
    assert environment.memory(plan, {"cpu": 2 * needed}).level == environment.memory(plan, {}).level == Level.OK
    assert_look(environment.memory(plan, {"cpu": 1.05 * needed}), "95%")
    assert_stop(environment.memory(plan, {"cpu": 0.9 * needed}), "cpu needs")
    assert environment.free_memory(["cpu"]).get("cpu", 1) > 0


# Data


def test_vocabulary_and_mask_token_faults(dataset, target):
    info = target.info
    assert data.vocabulary([dataset], info).level == data.mask_token([dataset], info, MASK_TOKEN).level == Level.OK
    assert_stop(data.vocabulary([dataset], replace(info, vocab_size=50, valid_vocab=50)), "outside the target's vocabulary")
    assert_look(data.vocabulary([dataset], replace(info, valid_vocab=50)), "padding rows")
    assert_stop(data.mask_token([dataset], info, int(dataset.row(0)[0][0])), "row 0")
    assert_stop(data.mask_token([dataset], info, 1), "end token")
    assert_stop(data.mask_token([dataset], info, 0), "pad token")
    assert_stop(data.mask_token([dataset], info, 97), "no row")
    assert_stop(data.mask_token([dataset], info, None))


def test_tokenizer_of_another_target(dataset, target):
    info = replace(target.info, tokenizer_fingerprint="0123456789abcdef")
    made = Instead(dataset, tokenizer={"name": "other", "fingerprint": "fedcba9876543210"})
    assert_stop(data.tokenizer(made, info), "other")
    assert data.tokenizer(Instead(dataset, tokenizer={"fingerprint": "0123456789abcdef"}), info).level == Level.OK


def test_supervision_faults(dataset, tmp_path):
    assert data.supervision(dataset).level == Level.OK
    assert_stop(data.supervision(TokenDataset.open(write_dataset(tmp_path / "none", supervised=False))), "60 of 60 rows give no block")
    counts = np.where(np.arange(len(dataset)) < 4, 1, dataset.n_supervised)
    assert_look(data.supervision(Instead(dataset, n_supervised=counts)), "4 of 60 rows")
    table = pa.table({"input_ids": [[1, 2], [3, 4]], "loss_mask": [[0, 1], [0, 1]], "n_supervised": [1, 2]})
    pq.write_table(table, tmp_path / "wrong.parquet")
    assert_stop(data.supervision(TokenDataset.open(tmp_path / "wrong.parquet")), "n_supervised of row 1 is 2")


def test_length_faults():
    lengths = np.array([10, 50, 90])
    assert data.lengths(lengths, 100, 100, "error").level == Level.OK
    assert_stop(data.lengths(lengths, 64, 100, "error"), "1 rows go beyond the positions")
    assert_stop(data.lengths(lengths, 100, 60, "error"), "1 rows are over the limit")
    assert_stop(data.lengths(lengths, 100, 5, "drop"), "all 3 rows")
    assert_look(data.lengths(lengths, 64, 60, "drop"), "1 rows")
    assert_look(data.lengths(lengths, 64, 60, "truncate"), "1 rows")


@pytest.mark.parametrize("ids", [(1, 1, 5), (-1, 3), (3, 8), (5, 3)])
def test_layer_id_faults(target, ids):
    assert_stop(data.layers(target.info, ids, 2))


def test_too_few_layers_for_the_usual_choice(target):
    assert_stop(data.layers(replace(target.info, num_layers=6), None, 5))
    assert data.layers(target.info, None, 3).level == Level.OK


def test_batch_faults(dataset):
    batch = dataset.collate(np.array([0, 1, 2]), 64)
    assert data.batch_rows(dataset, batch).level == Level.OK
    left = [np.roll(ids, 64 - length) for ids, length in zip(batch.input_ids_BT, batch.lengths_B, strict=True)]
    assert_stop(data.batch_rows(dataset, replace(batch, input_ids_BT=np.stack(left))), "not where they belong")
    supervised = batch.loss_mask_BT.copy()
    supervised[0, -1] = True
    assert_stop(data.batch_rows(dataset, replace(batch, loss_mask_BT=supervised)), "1 padding positions")


# Target


def with_features(target, change):
    """The target, its features changed by ``change(parts)`` on the captured layers."""

    def faulty(batch):
        made = target.features(batch)
        parts = list(made.features_ND.chunk(len(target.layer_ids), -1))
        return replace(made, features_ND=torch.cat(change(parts), -1))

    return Instead(target, features=faulty)


def test_wrong_layer_captured(target, batch):
    shifted = FrozenTarget(target.model, target.info, (2, 4, 7))
    assert_stop(features.capture(Instead(shifted, layer_ids=IDS), batch), "layer 1 differs", "nearest to layer 2")


def test_last_layer_captured_after_the_norm(target, batch):
    norm = target.decoder.norm
    assert_stop(features.capture(with_features(target, lambda parts: [*parts[:2], norm(parts[2])]), batch), "after the final norm")


def test_layers_exchanged_or_repeated(target, batch):
    assert_stop(features.capture(with_features(target, lambda parts: [parts[1], parts[0], parts[2]]), batch), "nearest to layer 3")
    assert_stop(features.capture(with_features(target, lambda parts: [parts[0], parts[0], parts[2]]), batch), "nearest to layer 1")


@pytest.mark.parametrize("shift", [-1, 1])
def test_features_shifted_against_tokens(target, batch, shift):
    assert_stop(features.feature_rows(with_features(target, lambda parts: [part.roll(shift, 0) for part in parts]), batch), "row")


def test_ids_shifted_against_features(target, batch):
    def faulty(batch):
        made = target.features(batch)
        return replace(made, input_ids_N=made.input_ids_N.roll(-1))

    assert_stop(features.feature_rows(Instead(target, features=faulty), batch), "ids beside the features")


def test_padding_taken_for_tokens(target, batch):
    def faulty(batch):
        """Takes as many tokens as are real from the front of the padded batch."""
        count = batch.real_tokens
        made = target.features(replace(batch, lengths_B=np.full(batch.rows, batch.padded_length)))
        return replace(
            made, features_ND=made.features_ND[:count], input_ids_N=made.input_ids_N[:count], loss_mask_N=made.loss_mask_N[:count]
        )

    assert_stop(features.padding(Instead(target, features=faulty), batch))


@pytest.mark.parametrize("family", ["hybrid", "llama"])
def test_padding_on_the_left_reaches_features(targets, batch, family):
    target = targets[family]

    def faulty(batch):
        """The model sees the padding first; a mask is not given."""
        pads = (batch.padded_length - batch.lengths_B).tolist()
        rolled = np.stack([np.roll(ids, pad) for ids, pad in zip(batch.input_ids_BT, pads, strict=True)])
        where = np.concatenate([b * batch.padded_length + np.arange(pad, batch.padded_length) for b, pad in enumerate(pads)])
        captured, _ = target.capture(torch.from_numpy(where), False, input_ids=torch.from_numpy(rolled).long(), use_cache=False)
        return replace(target.features(batch), features_ND=captured)

    assert_stop(features.padding(Instead(target, features=faulty), batch), "in a padded batch")


def test_packing_is_proven_and_a_leak_is_a_stop(targets, batch):
    assert_stop(features.packing(Instead(targets["qwen3"], packed=True), batch), "attention reads the row before")
    unused = features.packing(targets["hybrid"], batch)
    assert unused.level == Level.OK and "not used" in unused.evidence
    packed = FrozenTarget.load(targets["qwen3"].info, targets["qwen3"].layer_ids, packed=True)
    assert features.packing(packed, batch).level == Level.OK
    assert_look(features.packing(targets["hybrid"], batch, "no kernels; so batches are padded"), "no kernels")

    def refuses(*arguments, **inputs):
        raise ValueError("cu_seqlens needs its kernels")

    assert_stop(features.packing(Instead(targets["qwen3"], capture=refuses, packed=True), batch), "refused", "cu_seqlens")


def test_features_that_are_dead_or_not_finite(target, batch):
    assert_stop(features.alive(with_features(target, lambda parts: [parts[0] * torch.inf, *parts[1:]]), batch), "not finite")
    assert_look(features.alive(with_features(target, lambda parts: [parts[0], torch.ones_like(parts[1]), parts[2]]), batch), "layer 3")


def other_head(target, **changes):
    head = copy.copy(target.head())
    head.__dict__.update(changes)
    return Instead(target, head=lambda device=None: head)


def test_head_faults(target, targets, batch):
    random = torch.randn(target.head().weight_VH.shape)
    assert_stop(features.head(other_head(target, weight_VH=random), batch), "logits differ")
    assert_stop(features.head(other_head(targets["llama"], weight_VH=random), batch), "tied", "97 of 97 rows")
    assert_stop(features.head(other_head(target, weight_VH=random[:90]), batch), "(90, 48)")
    assert_stop(features.head(other_head(target, weight_VH=random.requires_grad_()), batch), "would be trained")
    assert_stop(features.head(other_head(targets["granite"], embed_scale=1.0), batch), "embeddings differ")
    assert_stop(features.head(other_head(targets["granite"], logit_scale=1.0), batch), "logits differ")
    assert_stop(features.head(other_head(targets["gemma2"], logit_softcap=None), batch), "logits differ")


# Drafter


def with_blocks(drafter, draft_blocks):
    """The drafter with another training forward, given the true one as first argument."""
    whole = drafter.draft_blocks
    drafter.draft_blocks = lambda *arguments: draft_blocks(whole, *arguments)
    return drafter


def test_features_after_the_anchor_leak(drafter, probe):
    def leaking(whole, features_NF, lengths_B, anchors, embeds):
        mean = features_NF.mean() * 1e-6
        return whole(features_NF, lengths_B, anchors, embeds) + mean

    assert_stop(drafting.future(with_blocks(drafter, leaking), probe), "from their anchor on")


@pytest.mark.parametrize(("shift", "words"), [(1, "from their anchor on"), (-1, "just before their anchor")])
def test_context_ends_a_token_late_or_early(drafter, probe, shift, words):
    def shifted(whole, features_NF, lengths_B, anchors, embeds):
        return whole(features_NF, lengths_B, replace(anchors, position_A=(anchors.position_A + shift).clamp(min=0)), embeds)

    assert_stop(drafting.future(with_blocks(drafter, shifted), probe), words)


def test_a_causal_noise_mask(drafter, probe):
    assert drafting.noise(drafter, probe).level == Level.OK
    drafter.layers[1].self_attn.mask = replace(drafter.layers[1].self_attn.mask, causal=True)
    assert_stop(drafting.noise(drafter, probe), "in layer 1", "as if it were causal")


def test_a_sliding_layer_that_is_not_causal(target):
    drafter = make_drafter(target, sliding_window=8)
    probe = drafting.make_probe(drafter.config, target.head())
    drafter.layers[0].self_attn.mask = replace(drafter.layers[0].self_attn.mask, causal=False)
    assert_stop(drafting.noise(drafter, probe), "layer 0, which is causal")


@pytest.mark.parametrize(("wrong", "words"), [(None, "past the window"), (9, "past the window"), (7, "does not see the oldest")])
def test_a_window_of_another_size(target, wrong, words):
    drafter = make_drafter(target, layer_types=(FULL, SLIDING), sliding_window=8)
    probe = drafting.make_probe(drafter.config, target.head())
    assert drafting.window(drafter, probe).level == Level.OK
    drafter.layers[1].self_attn.mask = replace(drafter.layers[1].self_attn.mask, window=wrong)
    assert_stop(drafting.window(drafter, probe), words, "layer 1")


def test_a_full_layer_with_a_window(drafter, probe):
    drafter.layers[0].self_attn.mask = replace(drafter.layers[0].self_attn.mask, window=8)
    assert_stop(drafting.window(drafter, probe), "do not see the first token in full layer 0")


def test_another_block_or_row_is_visible(drafter, target, probe):
    def neighbours(whole, features_NF, lengths_B, anchors, embeds):
        return whole(features_NF, lengths_B, anchors, embeds + 1e-3 * embeds.roll(1, 0))

    assert_stop(drafting.others(with_blocks(drafter, neighbours), probe), "tokens of other blocks")

    def one_row(whole, features_NF, lengths_B, anchors, embeds):
        joined = place_anchors([0] * len(anchors), anchors.token_A.numpy(), np.ones(len(features_NF)), [len(features_NF)], BLOCK)
        return whole(features_NF, lengths_B, joined, embeds)

    assert_stop(drafting.others(with_blocks(make_drafter(target), one_row), probe), "another row")


def test_training_and_drafting_differ(drafter, target, probe):
    whole = drafter.draft
    drafter.draft = lambda cache, embeds, position: whole(cache, embeds, max(0, position - 1))
    assert_stop(drafting.parity(drafter, probe), "between training and drafting")
    other = make_drafter(target)
    extend = other.extend
    other.extend = lambda cache, features_TF, start: extend(cache, features_TF * torch.linspace(1, 1.1, features_TF.shape[1]), start)
    assert_stop(drafting.parity(other, probe), "between training and drafting")


def test_rope_faults(target, probe, monkeypatch):
    assert_stop(drafting.rope(make_drafter(target, rope_theta=1e4), target.info, probe), "10000", "1e+06")
    from dflash_nb.model import drafter as module

    whole = module._rotate

    def partial(heads, rotary):
        turned, kept = heads.chunk(2, -1)
        return torch.cat([whole(turned, tuple(part[..., : part.shape[-1] // 2] for part in rotary)), kept], -1)

    monkeypatch.setattr(module, "_rotate", partial)
    assert_stop(drafting.rope(make_drafter(target), target.info, probe), "of 16 features")
    monkeypatch.setattr(module, "_rotate", whole)
    angles = module._rotary
    monkeypatch.setattr(module, "_rotary", lambda position, config: angles(position + 1, config))
    assert_stop(drafting.rope(make_drafter(target), target.info, probe), "rotated otherwise")


# Labels, loss, export


def test_labels_shifted_by_one():
    def early(drafter, head, features, *rest):
        return block_loss(drafter, head, replace(features, input_ids_N=features.input_ids_N.roll(-1)), *rest)

    assert_stop(learning.labels(BLOCK, loss=early), "not token anchor + k")

    def late(drafter, head, features, *rest):
        return block_loss(drafter, head, replace(features, input_ids_N=features.input_ids_N.roll(1)), *rest)

    assert_stop(learning.labels(BLOCK, loss=late), "not token anchor + k")
    assert learning.labels(BLOCK).level == Level.OK


def test_text_shown_in_the_block():
    def showing(drafter, head, features, anchors, objective):
        place = (anchors.token_A[:, None] + torch.arange(anchors.block_size)).clamp(max=len(features.input_ids_N) - 1)
        return block_loss(drafter, Instead(head, embed=lambda ids: head.embed(features.input_ids_N[place])), features, anchors, objective)

    assert_stop(learning.labels(BLOCK, loss=showing), "something else than the mask token")


def test_an_anchor_token_from_its_neighbour():
    def neighbour(drafter, head, features, anchors, objective):
        other = Instead(head, embed=lambda ids: head.embed(ids + (ids < len(features.input_ids_N) - 1).long()))
        return block_loss(drafter, other, features, anchors, objective)

    assert_stop(learning.labels(BLOCK, loss=neighbour), "slot 0")


def test_a_teacher_one_position_early():
    def early(drafter, head, features, *rest):
        return block_loss(drafter, head, replace(features, last_hidden_NH=features.last_hidden_NH.roll(1, 0)), *rest)

    assert_stop(learning.labels(BLOCK, loss=early), "distribution")


def test_anchors_in_prompts_and_labels_past_the_row():
    def everywhere(mask_N, *rest):
        return draw_anchors(np.ones_like(mask_N), *rest)

    def too_long(*arguments):
        drawn = draw_anchors(*arguments)
        return replace(drawn, slots_A=torch.full_like(drawn.slots_A, BLOCK - 1))

    def across_rows(mask_N, lengths_B, sample_ids_B, *rest):
        return draw_anchors(mask_N, lengths_B.sum(keepdims=True), sample_ids_B[:1], *rest)

    assert_stop(learning.labels(BLOCK, draw=across_rows), "no supervised next token")
    assert_stop(learning.labels(BLOCK, draw=everywhere), "anchors stand in prompts")
    assert_stop(learning.labels(BLOCK, draw=too_long), "past the supervised text")


def test_first_loss_faults(drafter, target, learned):
    head = target.head()
    with torch.no_grad():
        drafter.norm.weight.mul_(300)
    assert_look(learning.first_loss(drafter, head, learned), "an even guess gives 4.57")
    unsupervised = replace(learned, loss_mask_N=torch.zeros_like(learned.loss_mask_N))
    assert_stop(learning.first_loss(drafter, head, unsupervised), "0 labels")

    def knows(*arguments):
        found = block_loss(*arguments)
        return replace(found, nll_K=found.nll_K * 0.01)

    assert_stop(learning.first_loss(make_drafter(target), head, learned, loss=knows), "too good")
    with torch.no_grad():
        drafter.fc.weight.fill_(torch.nan)
    assert_stop(learning.first_loss(drafter, head, learned), "nan")


def test_gradient_faults(drafter, target, learned):
    head = target.head()
    assert learning.gradients(drafter, head, learned).level == Level.OK
    assert all(parameter.grad is None for parameter in drafter.parameters())
    drafter.layers[1].mlp.up_proj.weight.requires_grad_(False)
    assert_stop(learning.gradients(drafter, head, learned), "1 of 25", "layers.1.mlp.up_proj.weight")


def rewritten(change):
    """An exporter that changes config.json or the tensors after writing."""

    def write(drafter, info, folder):
        path = export_drafter(drafter, info, folder)
        config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
        change(config, tensors)
        (path / "config.json").write_text(json.dumps(config))
        save_file(tensors, path / "model.safetensors")
        return path

    return write


def wrong_theta(config, tensors):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1e4


def lost_theta(config, tensors):
    del config["rope_theta"], config["rope_parameters"]


def wrong_block(config, tensors):
    config["block_size"] = config["dflash_config"]["block_size"] = BLOCK - 1


def prefixed(config, tensors):
    tensors["model.fc.weight"] = tensors.pop("fc.weight")


def extra_head(config, tensors):
    tensors["lm_head.weight"] = torch.zeros(97, 48)


def stale_weight(config, tensors):
    tensors["layers.1.mlp.up_proj.weight"] = tensors["layers.1.mlp.up_proj.weight"] + 1e-3


def other_layers(config, tensors):
    config["dflash_config"]["target_layer_ids"] = [0, 2, 6]


def base_model_type(config, tensors):
    config["architectures"] = ["Qwen3ForCausalLM"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (wrong_theta, "rope_theta"),
        (lost_theta, "rope_theta"),
        (wrong_block, "block_size"),
        (prefixed, "fc.weight"),
        (extra_head, "lm_head.weight"),
        (stale_weight, "layers.1.mlp.up_proj.weight"),
        (other_layers, "target_layer_ids"),
        (base_model_type, "Qwen3ForCausalLM"),
    ],
)
def test_export_faults(drafter, target, probe, fault, words):
    check = learning.export(drafter, target.info, probe, rewritten(fault))
    assert check.level == Level.STOP and words in check.evidence, check.line()


def test_an_export_that_some_servers_refuse(target):
    causal = make_drafter(target, is_causal=True)
    probe = drafting.make_probe(causal.config, target.head())
    assert drafting.noise(causal, probe).level == Level.OK
    assert_look(learning.export(causal, target.info, probe, export_drafter), "SGLang")
