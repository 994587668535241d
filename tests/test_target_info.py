"""Facts of a target from its JSON files, and the choice of captured layers."""

import json
import subprocess
import sys

import pytest
from dflash.model import build_target_layer_ids
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.model.target_info import (
    TargetError,
    check_layer_ids,
    default_layer_ids,
    read_target_info,
)

QWEN36 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 48,
        "full_attention_interval": 4,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 248044,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]},
    },
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def write(folder, config, **files):
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_a_wrapped_hybrid_is_read_from_its_text_config(tmp_path):
    info = read_target_info(write(tmp_path, QWEN36, generation_config={"eos_token_id": [248046, 248044]}))
    assert (info.hidden_size, info.num_layers, info.vocab_size, info.head_dim) == (5120, 64, 248320, 256)
    assert info.rope_theta == 1e7 and info.max_positions == 262144
    assert info.is_hybrid and info.layer_types.count("full_attention") == 16 and info.layer_types[3] == "full_attention"
    assert info.eos_token_ids == (248046, 248044) and not info.tied_head


def test_a_llama_with_old_rope_key_and_tied_head(tmp_path):
    info = read_target_info(write(tmp_path, LLAMA))
    assert info.rope_theta == 1e5 and info.rms_norm_eps == 1e-5
    assert info.tied_head and not info.is_hybrid and info.head_dim == 64
    assert info.embed_scale == info.logit_scale == 1.0 and info.logit_softcap is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gemma3_text", "hidden_size": 64}, (8.0, 1.0, None)),
        ({"model_type": "gemma2", "hidden_size": 64, "final_logit_softcapping": 30.0}, (8.0, 1.0, 30.0)),
        ({"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 8.0}, (12.0, 0.125, None)),
        ({"model_type": "cohere", "logit_scale": 0.0625}, (1.0, 0.0625, None)),
    ],
)
def test_scales_and_soft_cap(tmp_path, changes, expected):
    info = read_target_info(write(tmp_path, LLAMA | changes))
    assert (info.embed_scale, info.logit_scale, info.logit_softcap) == expected


@pytest.mark.parametrize("sign", [{"mamba_d_state": 16}, {"conv_L_cache": 3}, {"layer_types": ["conv", "full_attention"] * 15}])
def test_other_families_with_a_state_are_hybrid_too(tmp_path, sign):
    assert read_target_info(write(tmp_path, LLAMA | sign)).is_hybrid


def test_gemma3_nests_its_rope_by_layer_type(tmp_path):
    rope = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    assert read_target_info(write(tmp_path, LLAMA | {"rope_parameters": rope})).rope_theta == 1e6


def test_tied_is_told_by_the_checkpoint_where_the_config_is_silent(tmp_path):
    silent = {key: value for key, value in LLAMA.items() if key != "tie_word_embeddings"}
    index = {"weight_map": {"model.embed_tokens.weight": "a"}}
    write(tmp_path, silent, **{"model.safetensors.index": index})
    assert read_target_info(tmp_path).tied_head
    index["weight_map"]["lm_head.weight"] = "a"
    write(tmp_path, silent, **{"model.safetensors.index": index})
    assert not read_target_info(tmp_path).tied_head


def tokenizer(size, mask=None):
    vocab = {f"t{i}": i for i in range(size - 1)}
    return {
        "tokenizer": {"model": {"vocab": vocab}, "added_tokens": [{"content": "<mask>", "id": size - 1}]},
        "tokenizer_config": {"mask_token": mask},
    }


def test_valid_vocab_counts_the_tokenizer_not_the_padding(tmp_path):
    info = read_target_info(write(tmp_path, LLAMA, **tokenizer(49000)))
    assert (info.valid_vocab, info.vocab_size) == (49000, 49152)
    other = tmp_path / "other"
    other.mkdir()
    assert read_target_info(write(other, LLAMA, **tokenizer(49001))).tokenizer_fingerprint != info.tokenizer_fingerprint


def test_mask_token_comes_from_the_first_of_four_places(tmp_path):
    def read(**more):
        return read_target_info(tmp_path, **more).mask_token_id

    write(tmp_path, LLAMA, **tokenizer(49000))
    assert read() is None
    write(tmp_path, LLAMA, **tokenizer(49000, mask="<mask>"))
    assert read() == 48999
    write(tmp_path, LLAMA, **tokenizer(49000, mask={"content": "<mask>"}))
    assert read() == 48999
    write(tmp_path, LLAMA | {"dflash_config": {"mask_token_id": 11}})
    assert read() == 11
    write(tmp_path, LLAMA | {"dflash_config": {"mask_token_id": 11}}, dflash={"mask_token_id": 12})
    assert read() == 12
    assert read(mask_token_id=13) == 13


def test_a_missing_mask_token_is_asked_for_when_it_is_needed(tmp_path):
    info = read_target_info(write(tmp_path, LLAMA))
    with pytest.raises(TargetError, match="Set mask_token to an id below 49152"):
        info.require_mask_token()


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (49152, "outside the embedding of 49152 rows"),
        (-1, "outside"),
        (2, "also the padding token"),
        (1, "also the begin-of-text"),
        (True, "not an integer"),
    ],
)
def test_a_mask_token_that_cannot_serve_is_refused(tmp_path, mask, says):
    write(tmp_path, LLAMA)
    with pytest.raises(TargetError, match=says):
        read_target_info(tmp_path, mask_token_id=mask)
    with pytest.raises(TargetError, match="end-of-text"):
        read_target_info(write(tmp_path, LLAMA | {"pad_token_id": None}), mask_token_id=2)


@pytest.mark.parametrize(("given", "taken"), [(0, 0), (49151, 49151), (-1, None), (49152, None), (True, None), (1.5, None), (None, None)])
def test_a_padding_id_that_no_row_of_the_embedding_has_counts_as_none(tmp_path, given, taken):
    assert read_target_info(write(tmp_path, LLAMA | {"pad_token_id": given})).pad_token_id == taken


@pytest.mark.parametrize(
    ("layers", "n", "ids"),
    [
        (64, 5, (1, 16, 31, 46, 61)),
        (36, 5, (1, 9, 17, 25, 33)),
        (32, 5, (1, 8, 15, 22, 29)),
        (40, 5, (1, 10, 19, 28, 37)),
        (28, 5, (1, 7, 13, 19, 25)),
        (24, 5, (1, 6, 11, 16, 21)),
        (12, 3, (1, 5, 9)),
        (8, 3, (1, 3, 5)),
        (8, 1, (4,)),
    ],
)
def test_the_published_choice_of_layers(layers, n, ids):
    assert default_layer_ids(layers, n) == ids


@pytest.mark.parametrize(("layers", "n"), [(6, 5), (4, 5), (4, 2), (3, 2), (2, 3), (8, 9)])
def test_a_shallow_target_never_gets_a_layer_twice(layers, n):
    with pytest.raises(TargetError, match="Set target_layers yourself"):
        default_layer_ids(layers, n)


def test_a_mistyped_number_of_layers_does_not_print_them_all():
    for refused in (lambda: default_layer_ids(8, 10_000), lambda: check_layer_ids(range(10_000), 8)):
        with pytest.raises(TargetError, match=r"\.\.\. 10,000 in all|\.\.\. 9,992 in all") as error:
            refused()
        assert len(str(error.value)) < 300


@settings(deadline=None)
@given(layers=st.integers(1, 100), n=st.integers(1, 12))
def test_default_layers_are_the_published_formula_or_an_error(layers, n):
    published = build_target_layer_ids(layers, n)
    usable = sorted(set(published)) == published and published[0] >= 0 and published[-1] < layers
    if usable:
        assert list(default_layer_ids(layers, n)) == published
    else:
        with pytest.raises(TargetError):
            default_layer_ids(layers, n)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, 1], "each layer once"),
        ([3, 1], "increase"),
        ([-1, 2], "out of range"),
        ([1, 8], "out of range"),
        ([], "empty"),
        ([1.0], "integers"),
        ([True], "integers"),
    ],
)
def test_bad_layer_ids_are_named(ids, says):
    with pytest.raises(TargetError, match=says):
        check_layer_ids(ids, 8)


def test_the_last_layer_may_be_captured():
    assert check_layer_ids([0, 7], 8) == (0, 7)


@pytest.mark.parametrize(
    ("name", "says"), [("no_such_folder", "Known names are 'sample' and 'smollm2'"), ("org/model", "neither a folder here")]
)
def test_an_unknown_target_says_where_it_was_looked_for(tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(TargetError, match=says):
        read_target_info(name)


def test_folders_that_are_no_language_model(tmp_path, monkeypatch):
    with pytest.raises(TargetError, match=r"holds no config\.json"):
        read_target_info(tmp_path)
    with pytest.raises(TargetError, match="has no hidden_size"):
        read_target_info(write(tmp_path, {"model_type": "x"}))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TargetError, match="cannot be read as JSON"):
        read_target_info(tmp_path)
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TargetError, match="make smollm2"):
        read_target_info("smollm2")


def test_it_starts_without_torch():
    code = "import sys, dflash_nb.model.target_info; assert not {'torch', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
