"""Packed rows: a document has the same features, anchors, labels, loss and gradients whether it is packed or alone."""

import json

import numpy as np
import pytest
import torch
from tiny_runs import tiny_config, write_dataset
from tiny_targets import MASK_TOKEN, VOCAB, make_batch, save_target
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

from dflash_nb.data.dataset import Batch
from dflash_nb.model import packing
from dflash_nb.model import target as loaded
from dflash_nb.model.anchors import draw_anchors
from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.objective import Objective, block_loss
from dflash_nb.model.packing import PackingError, check_packing, require_packable
from dflash_nb.model.target import FrozenTarget, read_target_info
from dflash_nb.pipeline import job
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.pipeline.memory import predict_job
from dflash_nb.pipeline.run import read_run
from dflash_nb.pipeline.train import train

LAYER_IDS = (1, 4, 7)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    return {family: save_target(root / family, family) for family in ("llama", "qwen3", "granite", "hybrid", "gemma2")}


def document(batch, row):
    """One row of a batch alone, without padding."""
    some, length = slice(row, row + 1), int(batch.lengths_B[row])
    ids, mask = batch.input_ids_BT[some, :length], batch.loss_mask_BT[some, :length]
    return Batch(0, 0, 0, length, batch.sample_ids_B[some], np.array([length]), ids, mask)


@pytest.mark.parametrize("family", ["llama", "qwen3", "granite"])
def test_documents_have_the_same_features_packed_and_padded(folders, family):
    batch = make_batch([17, 5, 30, 1, 12])
    padded = FrozenTarget.load(folders[family], LAYER_IDS, with_last_hidden=True).features(batch)
    packed = FrozenTarget.load(folders[family], LAYER_IDS, with_last_hidden=True, packed=True).features(batch)
    torch.testing.assert_close(packed.features_ND, padded.features_ND, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.last_hidden_NH, padded.last_hidden_NH, rtol=1e-5, atol=1e-5)
    assert torch.equal(packed.input_ids_N, padded.input_ids_N) and torch.equal(packed.loss_mask_N, padded.loss_mask_N)
    assert packed.padded_tokens == 65 and padded.padded_tokens == 5 * 30


def test_no_document_sees_another(folders):
    """Other tokens in every other document change nothing in a packed one, bit for bit."""
    target = FrozenTarget.load(folders["llama"], LAYER_IDS, packed=True)
    batch = make_batch([9, 14, 11])
    before = target.features(batch).features_ND[9:23].clone()
    for row in (0, 2):
        batch.input_ids_BT[row] = (batch.input_ids_BT[row] + 7) % (VOCAB - 2)
    after = target.features(batch).features_ND
    assert torch.equal(after[9:23], before) and not torch.equal(after[:9], before[:9])


def test_loss_and_gradients_of_a_document_are_the_same_packed_and_alone(folders):
    info = read_target_info(folders["llama"], MASK_TOKEN)
    torch.manual_seed(0)
    drafter = DFlashDrafter(DrafterConfig.for_target(info, num_layers=2, block_size=4, target_layer_ids=LAYER_IDS))
    batch = make_batch([17, 5, 30])
    packed = FrozenTarget.load(info, LAYER_IDS, packed=True)
    alone = FrozenTarget.load(info, LAYER_IDS)

    def loss(target, some):
        features = target.features(some)
        anchors = draw_anchors(features.loss_mask_N, features.lengths_B, features.sample_ids_B, 4, 4, 0, 0)
        return anchors, block_loss(drafter, target.head(), features, anchors, Objective(gamma=4.0))

    anchors, together = loss(packed, batch)
    together.loss_sum.backward()
    found = [parameter.grad.clone() for parameter in drafter.parameters()]
    drafter.zero_grad()
    total, weight, positions = 0.0, 0.0, []
    for row in range(batch.rows):
        drawn, single = loss(alone, document(batch, row))
        single.loss_sum.backward()
        total, weight = total + single.loss_sum.item(), weight + single.weight_sum
        positions += [(row, position, slots) for position, slots in zip(drawn.position_A.tolist(), drawn.slots_A.tolist(), strict=True)]
    assert positions == list(zip(anchors.row_A.tolist(), anchors.position_A.tolist(), anchors.slots_A.tolist(), strict=True))
    assert together.weight_sum == pytest.approx(weight, rel=1e-6) and together.loss_sum.item() == pytest.approx(total, rel=1e-5)
    for grad, parameter in zip(found, drafter.parameters(), strict=True):
        torch.testing.assert_close(grad, parameter.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "kind"), [("hybrid", "linear_attention"), ("gemma2", "sliding_attention")])
def test_targets_that_would_leak_are_refused_before_they_are_loaded(folders, family, kind):
    with pytest.raises(PackingError, match=rf"of the 8 layers of .* are {kind}"):
        require_packable(read_target_info(folders[family]))
    with pytest.raises(PackingError, match="strategy packed needs"):
        FrozenTarget.load(folders[family], LAYER_IDS, packed=True)


def by_document(function, axis):
    """What a kernel does that knows the documents: begin anew at every border. Transformers' own fallback ignores the borders."""

    def run(*tensors, seq_idx=None, cu_seqlens=None, **options):
        if seq_idx is None and cu_seqlens is None:
            return function(*tensors, **options)
        lengths = (torch.bincount(seq_idx[0]) if cu_seqlens is None else cu_seqlens.diff()).tolist()

        def part(value, document):
            runs_along = isinstance(value, torch.Tensor) and value.dim() > 2 and value.shape[axis] == sum(lengths)
            return value.split(lengths, axis)[document] if runs_along else value

        outputs = []
        for document in range(len(lengths)):
            named = {name: part(value, document) for name, value in options.items()}
            outputs.append(function(*(part(tensor, document) for tensor in tensors), **named))
        if isinstance(outputs[0], tuple):
            return torch.cat([output for output, _ in outputs], axis), None
        return torch.cat(outputs, axis)

    return run


def test_a_hybrid_target_packs_where_its_kernels_know_the_documents(folders, monkeypatch):
    """As on a GPU with its kernels: the functions that transformers would replace by them begin anew at the documents' borders."""
    monkeypatch.setattr(packing, "missing_kernels", lambda device: "")
    monkeypatch.setattr(modeling, "causal_conv1d_fn", by_document(modeling.causal_conv1d_fn, 2))
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", by_document(modeling.torch_chunk_gated_delta_rule, 1))
    batch = make_batch([17, 5, 70, 1, 12])
    packed = FrozenTarget.load(folders["hybrid"], LAYER_IDS, with_last_hidden=True, packed=True).features(batch)
    monkeypatch.undo()
    target = FrozenTarget.load(folders["hybrid"], LAYER_IDS, with_last_hidden=True)
    alone = [target.features(document(batch, row)) for row in range(batch.rows)]
    for name in ("features_ND", "last_hidden_NH"):
        own = torch.cat([getattr(each, name) for each in alone])
        assert ((getattr(packed, name) - own).norm(dim=1) < 1e-5 * own.norm(dim=1)).all()
    assert packed.padded_tokens == 105


@pytest.mark.parametrize(
    ("kind", "shape", "kinds"),
    [
        ("mistral", {"sliding_window": 64}, {"sliding_attention"}),
        ("starcoder2", {"sliding_window": 64}, {"sliding_attention"}),
        ("mistral", {"sliding_window": None}, {"full_attention"}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, {"full_attention"}),
    ],
)
def test_a_window_that_names_no_layers_is_a_window(tmp_path, kind, shape, kinds):
    """transformers saves no layer_types for some families; the window is there all the same and packing must not drop it."""
    save_of_kind(tmp_path, kind, **shape)
    written = json.loads((tmp_path / "config.json").read_text())
    written.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(written))
    info = read_target_info(tmp_path)
    assert set(info.layer_types) == kinds
    if kinds == {"sliding_attention"}:
        with pytest.raises(PackingError, match=r"4 of the 4 layers of .* are sliding_attention"):
            require_packable(info)
    else:
        batch = make_batch([90, 5])
        packed = FrozenTarget.load(info, (1, 3), packed=True).features(batch)
        torch.testing.assert_close(packed.features_ND, FrozenTarget.load(info, (1, 3)).features(batch).features_ND, rtol=1e-5, atol=1e-5)


def test_a_document_longer_than_a_window_is_refused_whatever_the_config_says():
    query = torch.zeros(1, 2, 20, 4)
    with pytest.raises(PackingError, match="12 tokens is longer than the window of 8"):
        packing.attend_by_document(torch.nn.Module(), query, query, query, None, document_lengths=[12, 8], sliding_window=8)


def test_a_target_without_such_attention_is_refused_with_its_reason(tmp_path):
    save_of_kind(tmp_path, "bloom", n_layer=4, n_head=4)
    with pytest.raises(PackingError, match="cannot be loaded with attention document by document"):
        FrozenTarget.load(read_target_info(tmp_path), (1, 3), packed=True)


def save_of_kind(folder, kind, **shape):
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small | ids | shape)).save_pretrained(folder)
    (folder / "dflash.json").write_text(json.dumps({"mask_token_id": MASK_TOKEN}))


def without_documents(function):
    """A kernel that is told the borders and does not care."""
    return lambda *tensors, seq_idx=None, cu_seqlens=None, **options: function(*tensors, **options)


def test_kernels_that_ignore_the_documents_are_found_out_when_the_target_starts(folders, monkeypatch):
    monkeypatch.setattr(packing, "missing_kernels", lambda device: "")
    monkeypatch.setattr(modeling, "causal_conv1d_fn", without_documents(modeling.causal_conv1d_fn))
    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", without_documents(modeling.torch_chunk_gated_delta_rule))
    with pytest.raises(PackingError, match="second of two packed documents differs by"):
        FrozenTarget.load(folders["hybrid"], LAYER_IDS, packed=True)


def test_missing_kernels_are_named(monkeypatch):
    assert packing.missing_kernels(torch.device("cpu")) == "only in kernels for GPUs"
    monkeypatch.setattr(packing, "find_spec", lambda module: None)
    assert packing.missing_kernels(torch.device("cuda")) == "only with flash-linear-attention and causal-conv1d installed"
    monkeypatch.setattr(packing, "find_spec", lambda module: object())
    assert packing.missing_kernels(torch.device("cuda")) == ""


@pytest.mark.parametrize("promised", [False, True])
def test_a_run_that_cannot_pack_pads_and_says_why(folders, tmp_path, monkeypatch, capsys, promised):
    """Both where the config shows it and where only the loaded target does."""
    if promised:
        monkeypatch.setattr(packing, "missing_kernels", lambda device: "")
    data = write_dataset(tmp_path / "data")
    config = tiny_config(data, folders["hybrid"], tmp_path / "runs", strategy="packed", max_steps=2)
    assert bool(prepare_job(config).notes) is not promised
    run = read_run(train(config).run_dir)
    assert run.config["strategy"] == "bucketed" and len(run) == 2
    assert [folder.name for folder in (tmp_path / "runs").iterdir()] == [run.folder.name]
    [warning] = [event["text"] for event in run.events_of("warning")]
    assert ("does not take packed rows" if promised else "are linear_attention") in warning
    assert warning.endswith("as with strategy bucketed")
    assert warning in capsys.readouterr().out


def test_the_self_test_notices_attention_across_documents(folders):
    """A target whose attention ignores the documents is found out when it starts."""
    target = FrozenTarget.load(folders["llama"], LAYER_IDS)

    def leaking(where_N, with_last_hidden, **inputs):
        inputs.pop("document_lengths", None)
        inputs.pop("attention_mask", None)
        inputs.pop("position_ids", None)
        return target.capture(where_N, with_last_hidden, **inputs)

    with pytest.raises(PackingError, match="second of two packed documents differs by"):
        check_packing(leaking, target.info, target.device)


@pytest.mark.parametrize("found_out", ["early", "late"])
def test_a_packed_run_is_not_continued_with_padded_rows(folders, tmp_path, monkeypatch, found_out):
    data = write_dataset(tmp_path / "data")
    started = train(tiny_config(data, folders["llama"], tmp_path / "runs", strategy="packed", checkpoint_every=1, time_limit=1e-9))

    def refuse(*_):
        raise PackingError("its layers are not of a kind that packs here")

    monkeypatch.setattr(*((job, "require_packable") if found_out == "early" else (loaded, "check_packing")), refuse)
    with pytest.raises(PackingError, match="packs here; this run packed its rows, so continue it where it was started, or start a new run"):
        train(TrainConfig(resume=str(started.run_dir)))
    assert json.loads((started.run_dir / "config.json").read_text())["strategy"] == "packed"
    monkeypatch.undo()
    assert train(TrainConfig(resume=str(started.run_dir), time_limit=1e-9)).steps > started.steps


def test_a_packed_run_trains_and_logs_no_padding(folders, tmp_path):
    data = write_dataset(tmp_path / "data")
    config = tiny_config(data, folders["llama"], tmp_path / "runs", strategy="packed", max_steps=3)
    padded = predict_job(prepare_job(tiny_config(data, folders["llama"], tmp_path / "runs")))
    assert predict_job(prepare_job(config)).total("cpu") < 1.5 * padded.total("cpu")
    summary = train(config)
    run = read_run(summary.run_dir)
    assert len(run) == 3 and np.array_equal(run.steps["tokens"], run.steps["padded_tokens"])
    assert json.loads((run.folder / "plan.json").read_text())["epochs"][0]["efficiency"] == 1
