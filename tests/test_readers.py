"""What the readers' own sources ask of a checkpoint: an export passes, and each planted fault is named."""

import dataclasses
import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import HIDDEN, LAYERS, VOCAB, save_target

from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.export import ExportError, export_drafter
from dflash_nb.model.readers import LOOK, READERS, STOP, check_readers, compatibility_report, main, serving_commands
from dflash_nb.model.target_info import read_target_info


@pytest.fixture
def info(tmp_path):
    return read_target_info(save_target(tmp_path / "target", "llama"))


def export(info, folder, **shape):
    shape = {"num_layers": 2, "block_size": 8, "target_layer_ids": (1, 3, 5), **shape}
    return export_drafter(DFlashDrafter(DrafterConfig.for_target(info, **shape)), info, folder)


def rewrite(folder, edit):
    written = json.loads((folder / "config.json").read_text())
    edit(written)
    (folder / "config.json").write_text(json.dumps(written))


def test_a_plain_export_has_no_findings_and_a_command_for_each_reader(info, tmp_path):
    folder = export(info, tmp_path / "export")
    assert check_readers(folder) == check_readers(folder, info) == []
    report = compatibility_report(folder, info)
    assert report.count(" OK ") == 4
    assert '"num_speculative_tokens": 7' in report, "vLLM: B - 1"
    assert "--speculative-num-draft-tokens 8" in report and "mamba" not in report, "SGLang: B"
    assert "aux_hidden_state_layer_ids=[2, 4, 6]" in report and "speculative_tokens 7" in report, "speculators: ids + 1, B - 1"
    assert str(info.path) in report and str(folder) in report


def test_commands_without_a_target(info, tmp_path):
    commands = serving_commands(export(info, tmp_path / "export", block_size=16))
    assert set(commands) == set(READERS)
    assert "vllm serve TARGET" in commands["vLLM"] and '"num_speculative_tokens": 15' in commands["vLLM"]
    assert "--speculative-num-draft-tokens 16" in commands["SGLang"] and "mamba" not in commands["SGLang"]


def findings_of(folder, target=None):
    return {(finding.reader, finding.level) for finding in check_readers(folder, target)}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"sliding_window": 7}, set()),
        ({"sliding_window": 7, "layer_types": ("full_attention", "sliding_attention")}, {("vLLM", LOOK)}),
        ({"sliding_window": 7, "is_causal": False}, {("SGLang", STOP), ("speculators", STOP)}),
        ({"sliding_window": 7, "is_causal": True}, {("speculators", STOP)}),
        ({"target_layer_ids": (1, LAYERS - 1)}, {("speculators", LOOK)}),
    ],
)
def test_shapes_that_some_readers_serve_otherwise(info, tmp_path, shape, expected):
    assert findings_of(export(info, tmp_path / "export", **shape)) == expected


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda c: c.update(model_type="qwen3_5_text"), {("vLLM", STOP)}),
        (lambda c: c.update(hidden_act="gelu"), {("SGLang", STOP)}),
        (lambda c: c.update(block_size=7), {("SGLang", LOOK)}),
        (lambda c: c["rope_parameters"].update(partial_rotary_factor=0.25), {("vLLM", STOP)}),
        (lambda c: c.pop("rope_parameters"), {("dflash", LOOK)}),
        (lambda c: c.update(architectures=["Qwen3Model"]), {(reader, STOP) for reader in READERS}),
        (lambda c: c.update(layer_types=["full_attention"]), {(reader, STOP) for reader in READERS}),
        (lambda c: c.update(layer_types=None), {(reader, STOP) for reader in READERS}),
        (lambda c: c["dflash_config"].pop("mask_token_id"), {(reader, STOP) for reader in READERS}),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 3]), {(reader, STOP) for reader in READERS}),
        (lambda c: c["dflash_config"].update(target_layer_ids=[1, 3, LAYERS]), {(reader, STOP) for reader in READERS}),
    ],
)
def test_a_fault_in_the_config_is_named_for_the_readers_it_hurts(info, tmp_path, edit, expected):
    folder = export(info, tmp_path / "export")
    rewrite(folder, edit)
    assert findings_of(folder) == expected
    report = compatibility_report(folder)
    assert report.count(" STOP ") == sum(level == STOP for _, level in expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("norm.weight"), "lacks norm.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(VOCAB, HIDDEN)}), "has lm_head.weight"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(VOCAB, HIDDEN)}), "has embed_tokens.weight"),
        (lambda t: t.update({"d2t": torch.zeros(4)}), "has d2t"),
        (lambda t: t.update({f"model.{k}": t.pop(k) for k in list(t)}), "lacks fc.weight"),
    ],
)
def test_a_fault_in_the_weights_stops_every_reader(info, tmp_path, change, says):
    """vllm-ascend 9795: a head of its own would replace the target's."""
    folder = export(info, tmp_path / "export")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    found = check_readers(folder)
    assert {f.reader for f in found} == set(READERS) and all(f.level == STOP for f in found)
    assert any(says in f.text for f in found)
    assert "vllm serve" not in compatibility_report(folder)


def test_a_drafter_for_another_target_is_stopped(info, tmp_path):
    folder = export(info, tmp_path / "export")
    for change in ({"vocab_size": VOCAB + 3}, {"rope_theta": 1e4 + 1}, {"num_layers": LAYERS + 1}, {"hidden_size": 2 * HIDDEN}):
        assert findings_of(folder, dataclasses.replace(info, **change)) == {(reader, STOP) for reader in READERS}


def test_scaled_embeddings_and_wrapped_targets_are_pointed_at(tmp_path):
    gemma = read_target_info(save_target(tmp_path / "gemma", "gemma2"))
    assert findings_of(export(gemma, tmp_path / "a"), gemma) == {("vLLM", LOOK)}
    wrapper = read_target_info(save_target(tmp_path / "wrapper", "wrapper"))
    assert findings_of(export(wrapper, tmp_path / "b"), wrapper) == {("dflash", LOOK), ("speculators", LOOK)}


def test_hybrid_targets_have_their_own_serving_option(tmp_path):
    hybrid = read_target_info(save_target(tmp_path / "hybrid", "hybrid"))
    folder = export(hybrid, tmp_path / "export")
    assert findings_of(folder) == set() and findings_of(folder, hybrid) == {("dflash", LOOK)}
    assert serving_commands(folder, hybrid)["SGLang"].endswith("--mamba-scheduler-strategy extra_buffer")


def test_no_checkpoint_no_report(tmp_path, info):
    with pytest.raises(ExportError, match="cannot be read"):
        compatibility_report(tmp_path)
    folder = export(info, tmp_path / "export")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"model\.safetensors cannot be read"):
        compatibility_report(folder)


def test_the_report_is_a_command_whose_status_says_whether_any_reader_refuses(info, tmp_path, capsys):
    folder = export(info, tmp_path / "export")
    for arguments in ([str(folder)], [str(folder), "--target", str(info.path)]):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0 and set(READERS) <= set(re.findall(r"\w+", capsys.readouterr().out))
    rewrite(folder, lambda written: written.update(hidden_act="gelu"))
    with pytest.raises(SystemExit) as ended:
        main([str(folder)])
    assert ended.value.code == 1 and STOP in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"error: .*nowhere"):
        main([str(folder / "nowhere")])
