"""Targets whose files are damaged, incomplete or empty are refused by name before a step is trained on them.

Run alone: python -m pytest tests/test_loading.py
"""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import save_target
from transformers.utils import logging as transformers_logging

from dflash_nb.model.loading import logits_are_constant
from dflash_nb.model.target import FrozenTarget, TargetError

LAYER_IDS = (1, 3)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("targets") / "sound", "llama")


def with_weights(folder, change):
    """``folder`` after ``change`` of its dictionary of tensors."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def with_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def fill(value):
    return lambda tensors: [tensor.fill_(value) for tensor in tensors.values()]


def spoil(name, value):
    return lambda tensors: tensors[name].view(-1)[5:6].fill_(value)


def cut(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])


DAMAGES = {
    "lacks a matrix": (lambda f: with_weights(f, lambda t: t.pop("model.layers.2.mlp.up_proj.weight")), "lack model.layers.2.mlp.up_proj"),
    "lacks its embedding": (lambda f: with_weights(f, lambda t: t.pop("model.embed_tokens.weight")), r"lack .*model.embed_tokens.weight"),
    "lacks a layer": (lambda f: with_config(f, num_hidden_layers=9), r"lack model.layers.8.* and 6 more"),
    "another vocabulary": (lambda f: with_config(f, vocab_size=120), r"embed_tokens.weight \[97, 48\], not \[120, 48\]"),
    "another width": (lambda f: with_config(f, hidden_size=64), r"\[.*48\], not \[.*64\]"),
    "other heads": (lambda f: with_config(f, num_attention_heads=8), r"q_proj.weight \[64, 48\], not \[128, 48\]"),
    "heads that do not divide": (lambda f: with_config(f, num_attention_heads=5), "not a multiple of the number of attention heads"),
    "no heads": (lambda f: with_config(f, num_attention_heads=0), "num_attention_heads"),
    "less than no heads": (lambda f: with_config(f, num_key_value_heads=-4), "negative dimension"),
    "a vocabulary in words": (lambda f: with_config(f, vocab_size="many"), "vocab_size"),
    "cut": (cut, "SafetensorError: .*(not fully covered|IncompleteBuffer)"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "SafetensorError"),
    "a Git LFS pointer": (lambda f: (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"), "SafetensorError"),
    "a Git LFS pointer without word on tying": (
        lambda f: (with_config(f, tie_word_embeddings=None), (f / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")),
        "SafetensorError",
    ),
    "NaN in a layer that is not captured": (
        lambda f: with_weights(f, spoil("model.layers.6.mlp.down_proj.weight", torch.nan)),
        "logits of real tokens are not finite; model.layers.6.mlp.down_proj.weight hold",
    ),
    "infinite": (lambda f: with_weights(f, spoil("model.layers.0.mlp.down_proj.weight", torch.inf)), "layer 1 of real tokens are not fin"),
    "all NaN": (lambda f: with_weights(f, fill(torch.nan)), r"not finite; model.embed_tokens.weight, .* more hold"),
    "all zero": (lambda f: with_weights(f, fill(0.0)), "every token gets the same logit 0"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_target_is_refused_with_its_folder_and_what_to_do(sound, tmp_path, damage, capfd):
    """Random weights in place of missing ones, and tau 7 from weights that are NaN or zero, looked like a run that goes well."""
    change, message = DAMAGES[damage]
    folder = shutil.copytree(sound, tmp_path / "target")
    change(folder)
    with pytest.raises(TargetError, match=message) as refused:
        FrozenTarget.load(folder, LAYER_IDS)
    text = str(refused.value)
    assert str(folder) in text and ("Copy" in text or "Name the folder" in text)
    assert len(text) < 700 and "\n" not in text
    assert capfd.readouterr() == ("", "")


def test_tensors_that_no_layer_uses_are_mentioned_and_kept_out(sound, tmp_path, capsys):
    """Heads for multi-token prediction and vision towers lie in many published files."""
    folder = shutil.copytree(sound, tmp_path / "target")
    with_weights(folder, lambda tensors: tensors.update({f"mtp.{i}.weight": torch.ones(2) for i in range(5)}))
    target = FrozenTarget.load(folder, LAYER_IDS)
    assert "holds mtp.0.weight, mtp.1.weight, mtp.2.weight and 2 more, which its config.json does not use" in capsys.readouterr().out
    ids = torch.arange(5)
    run = [each.capture(ids, True, input_ids=ids[None])[1] for each in (target, FrozenTarget.load(sound, LAYER_IDS))]
    assert torch.equal(*run)


def test_the_sample_lacks_nothing_and_says_nothing(capfd):
    FrozenTarget.load("sample", (1, 3, 5))
    assert capfd.readouterr() == ("", "")


def test_what_transformers_says_afterwards_is_as_before(sound):
    before = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    FrozenTarget.load(sound, LAYER_IDS)
    assert (transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("rows", "constant"), [([[1.0, 1.0]], True), ([[0, 0], [2, 2.0]], True), ([[0, 0], [1, 2.0]], False), ([[3.0]], False)]
)
def test_constant_logits(rows, constant):
    assert logits_are_constant(torch.tensor(rows)) == constant
