"""The frozen target against transformers' own forward: layers, padding, head, memory."""

import dataclasses
import logging
import threading

import numpy as np
import pytest
import torch
from tiny_targets import HIDDEN, LAYERS, MASK_TOKEN, VOCAB, make_batch, save_target
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PhiConfig, PreTrainedTokenizerFast

from dflash_nb.data.dataset import Batch
from dflash_nb.model.target import FrozenTarget, TargetError, TargetHead, read_target_info

FAMILIES = ["hybrid", "wrapper", "qwen3", "llama", "gemma2", "granite", "cohere"]
LENGTHS = [37, 70, 5]
LAYER_IDS = (1, 3, 6)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    return {family: save_target(root / family, family) for family in FAMILIES}


def reference(folder, batch):
    """hidden_states and logits of transformers at the real tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    real = torch.from_numpy(np.arange(batch.padded_length) < batch.lengths_B[:, None])
    with torch.inference_mode():
        output = model(torch.from_numpy(batch.input_ids_BT).long(), attention_mask=real.long(), output_hidden_states=True, use_cache=False)
    return [state[real] for state in output.hidden_states], output.logits[real]


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_layer_i_is_hidden_state_i_plus_1(folders, family):
    """vLLM 40727, TorchSpec 87: layer id conventions."""
    batch = make_batch(LENGTHS)
    states, logits = reference(folders[family], batch)
    target = FrozenTarget.load(folders[family], LAYER_IDS, with_last_hidden=True)
    features = target.features(batch)
    assert features.features_ND.shape == (sum(LENGTHS), 3 * HIDDEN)
    for k, i in enumerate(LAYER_IDS):
        torch.testing.assert_close(features.features_ND[:, k * HIDDEN : (k + 1) * HIDDEN], states[i + 1], rtol=0, atol=1e-4)
    head = target.head()
    torch.testing.assert_close(head.logits(features.last_hidden_NH), logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(head.embed(features.input_ids_N), states[0], rtol=0, atol=1e-4)
    assert features.input_ids_N.tolist() == [t for row, n in zip(batch.input_ids_BT, LENGTHS, strict=True) for t in row[:n].tolist()]
    assert features.loss_mask_N.sum() == batch.loss_mask_BT.sum()


@pytest.mark.parametrize("family", ["hybrid", "llama"])
def test_the_last_layer_is_captured_before_the_final_norm(folders, family):
    """speculators 705: the last layer captured, with and without the last hidden state."""
    batch = make_batch(LENGTHS)
    states, logits = reference(folders[family], batch)
    ids = (2, LAYERS - 1)
    for with_last_hidden in (False, True):
        target = FrozenTarget.load(folders[family], ids, with_last_hidden=with_last_hidden)
        features = target.features(batch)
        last_ND = features.features_ND[:, HIDDEN:]
        torch.testing.assert_close(features.features_ND[:, :HIDDEN], states[3], rtol=0, atol=1e-4)
        assert (last_ND - states[LAYERS]).abs().max() > 0.1, "transformers' last state is after the norm, ours before it"
        normed_ND = target.decoder.norm(last_ND)
        torch.testing.assert_close(normed_ND, states[LAYERS], rtol=0, atol=1e-4)
        torch.testing.assert_close(target.head().logits(normed_ND), logits, rtol=0, atol=1e-4)
        assert (features.last_hidden_NH is not None) == with_last_hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_never_reaches_a_real_token(folders, family):
    """transformers 46773, SpecForge 471: width, contents of the padding and the other rows make no difference."""
    target = FrozenTarget.load(folders[family], LAYER_IDS)
    tight = target.features(make_batch(LENGTHS)).features_ND
    for width, pad_id in ((71, 0), (128, 0), (128, MASK_TOKEN - 1)):
        wide = target.features(make_batch(LENGTHS, padded_length=width, pad_id=pad_id)).features_ND
        torch.testing.assert_close(wide, tight, rtol=0, atol=2e-4)
    n = LENGTHS[0]
    rows = make_batch(LENGTHS)
    alone = Batch(0, 0, 0, n, rows.sample_ids_B[:1], rows.lengths_B[:1], rows.input_ids_BT[:1, :n], rows.loss_mask_BT[:1, :n])
    torch.testing.assert_close(target.features(alone).features_ND, tight[:n], rtol=0, atol=2e-4)


def test_a_tokenizer_that_pads_left_changes_nothing(tmp_path):
    """maxtext 5295: left padding corrupts a recurrent state; batches are made here, not by the tokenizer."""
    folder = save_target(tmp_path / "left", "hybrid")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", pad_token="w0", eos_token="w1").save_pretrained(folder)
    target = FrozenTarget.load(folder, LAYER_IDS)
    assert target.tokenizer.padding_side == "left"
    batch = make_batch(LENGTHS)
    states, _ = reference(folder, batch)
    torch.testing.assert_close(target.features(batch).features_ND[:, :HIDDEN], states[2], rtol=0, atol=1e-4)


def test_head_never_runs_over_the_sequence_nor_layers_behind_the_last_captured(folders):
    target = FrozenTarget.load(folders["qwen3"], (1, 3))
    ran = []
    target.model.lm_head.register_forward_hook(lambda *_: ran.append("head"))
    for i, layer in enumerate(target.decoder.layers):
        layer.register_forward_hook(lambda *_, i=i: ran.append(i))
    target.features(make_batch(LENGTHS))
    assert ran == [0, 1, 2, 3]
    ran.clear()
    target.with_last_hidden = True
    target.features(make_batch(LENGTHS))
    assert ran == list(range(LAYERS))
    assert len(target.decoder.layers) == LAYERS


def test_features_serve_a_backward_pass_and_weights_take_no_gradient(folders):
    """sglang 39362, SpecForge 473: the tied head is the embedding and stays frozen."""
    target = FrozenTarget.load(folders["llama"], LAYER_IDS, with_last_hidden=True)
    head = target.head()
    assert head.weight_VH.data_ptr() == head.embedding_VH.data_ptr() and target.info.tied_head
    moved = head.to(dtype=torch.bfloat16)
    assert moved.weight_VH.data_ptr() == moved.embedding_VH.data_ptr() and moved.dtype == torch.bfloat16
    features = target.features(make_batch(LENGTHS))
    project = torch.nn.Linear(3 * HIDDEN, HIDDEN)
    loss = head.logits(project(features.features_ND)).logsumexp(-1).sum()
    loss.backward()
    assert project.weight.grad.abs().sum() > 0
    torch.testing.assert_close(head.logits(features.last_hidden_NH), features.last_hidden_NH @ head.embedding_VH.T)
    assert not any(p.requires_grad or p.grad is not None for p in target.model.parameters())
    assert not head.weight_VH.requires_grad and not target.model.training


def test_untied_head_is_the_second_matrix(folders):
    head = FrozenTarget.load(folders["qwen3"], LAYER_IDS).head()
    assert head.weight_VH.data_ptr() != head.embedding_VH.data_ptr()
    moved = head.to(dtype=torch.float64)
    assert moved.weight_VH.data_ptr() != moved.embedding_VH.data_ptr()


def test_argmax_stays_inside_the_tokenizer(folders):
    """vLLM 46435: an embedding padded past the tokenizer."""
    info = read_target_info(folders["qwen3"])
    weight_VH = torch.arange(VOCAB, dtype=torch.float32)[:, None].expand(VOCAB, HIDDEN)
    head = TargetHead(weight_VH, weight_VH, dataclasses.replace(info, valid_vocab=90))
    hidden = torch.ones(4, HIDDEN)
    assert head.logits(hidden).argmax(-1).tolist() == [VOCAB - 1] * 4
    assert head.argmax(hidden).tolist() == [89] * 4


def test_threads_share_a_target(folders):
    target = FrozenTarget.load(folders["hybrid"], LAYER_IDS)
    batches = [make_batch([20 + i, 31], seed=i) for i in range(6)]
    alone = [target.features(batch).features_ND for batch in batches]
    got = [None] * len(batches)

    def work(i):
        got[i] = target.features(batches[i]).features_ND

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, expected in zip(got, alone, strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_features_tell_their_bytes_and_times(folders):
    target = FrozenTarget.load(folders["qwen3"], LAYER_IDS, with_last_hidden=True)
    features = target.features(make_batch(LENGTHS))
    n = sum(LENGTHS)
    assert features.nbytes == n * (4 * HIDDEN * 4 + 8 + 1)
    assert set(features.seconds) == {"transfer", "target"} and all(s > 0 for s in features.seconds.values())
    assert features.to("cpu") is features
    assert (features.epoch, features.index, features.padded_length) == (0, 0, 70)
    assert features.lengths_B.tolist() == LENGTHS and features.lengths_B.dtype == torch.int64


def test_loading_and_running_print_nothing(folders, capfd, caplog):
    with caplog.at_level(logging.WARNING):
        FrozenTarget.load(folders["hybrid"], LAYER_IDS).features(make_batch([9]))
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


def test_dtype_auto_is_float32_on_a_cpu_whatever_the_checkpoint_says(tmp_path):
    folder = save_target(tmp_path / "half", "llama")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert FrozenTarget.load(folder, LAYER_IDS).dtype == torch.float32
    half = FrozenTarget.load(folder, LAYER_IDS, dtype="bfloat16")
    assert half.features(make_batch([9])).features_ND.dtype == torch.bfloat16


def test_what_cannot_be_a_target_is_refused(folders, tmp_path):
    with pytest.raises(TargetError, match="out of range"):
        FrozenTarget.load(folders["qwen3"], (1, LAYERS))
    empty = save_target(tmp_path / "empty", "qwen3")
    (empty / "model.safetensors").unlink()
    with pytest.raises(TargetError, match="cannot be loaded"):
        FrozenTarget.load(empty, LAYER_IDS)
    phi = PhiConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2)
    AutoModelForCausalLM.from_config(phi).save_pretrained(tmp_path / "phi")
    with pytest.raises(TargetError, match="output head has a bias"):
        FrozenTarget.load(tmp_path / "phi", (1, 2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_features_on_a_gpu_equal_those_on_the_cpu(folders):
    target = FrozenTarget.load(folders["qwen3"], LAYER_IDS, device="cuda", dtype="float32", with_last_hidden=True)
    cpu = FrozenTarget.load(folders["qwen3"], LAYER_IDS, with_last_hidden=True)
    batch = make_batch(LENGTHS)
    on_gpu = target.features(batch)
    back = on_gpu.to("cpu")
    torch.testing.assert_close(back.features_ND, cpu.features(batch).features_ND, rtol=0, atol=1e-2)
    assert on_gpu.features_ND.is_cuda and back.to("cuda").last_hidden_NH.is_cuda
