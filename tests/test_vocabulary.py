"""A dataset and a target must agree about a tokenizer's identity by whatever way each reads it."""

import json

import tiny_tokenizers as tiny

from dflash_nb.data.vocabulary import vocabulary_fingerprint
from dflash_nb.model.target_info import read_target_info


def test_same_tokens_same_fingerprint_in_any_order():
    assert vocabulary_fingerprint({"a": 0, "ü": 1}) == vocabulary_fingerprint({"ü": 1, "a": 0})
    assert len({vocabulary_fingerprint(ids) for ids in ({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": 0, "b": 1, "c": 2})}) == 3


def test_the_target_reads_the_same_fingerprint_from_its_files(tmp_path):
    config = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer = tiny.byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert read_target_info(tmp_path).tokenizer_fingerprint == vocabulary_fingerprint(tokenizer.get_vocab())
