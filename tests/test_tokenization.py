"""Tokens of a text, which of them are supervised, and tokenizers that cannot serve."""

import json

import numpy as np
import pytest
import tiny_tokenizers as tiny

from dflash_nb.data.chats import Text
from dflash_nb.data.source import DatasetError
from dflash_nb.data.tokenization import describe_tokenizer, load_tokenizer, longest_input, tokenize


def only(tokenizer, text):
    ((ids, mask),) = tokenize(tokenizer, [text])
    assert (ids.dtype, mask.dtype) == (np.int32, np.uint8)
    return tokenizer.convert_ids_to_tokens(ids), mask.tolist()


def test_a_token_is_supervised_if_it_begins_in_a_span():
    tokenizer = tiny.byte_tokenizer()
    tokens, mask = only(tokenizer, Text("ab<|im_end|>cd", ((1, 12), (13, 14)), is_chat=True))
    assert tokens == ["a", "b", "<|im_end|>", "c", "d"]
    assert mask == [0, 1, 1, 0, 1]


def test_a_token_that_begins_before_its_span_is_not_supervised():
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_tokens(["\n\n"])
    assert only(tokenizer, Text("a\n\nb", ((2, 4),), is_chat=True)) == (["a", "\n\n", "b"], [0, 0, 1])


def test_plain_text_gets_begin_and_end_tokens_once():
    text = Text("ab", ((1, 2),), is_chat=False)
    assert only(tiny.byte_tokenizer(eos="</s>", adds_bos=True), text) == (["<s>", "a", "b", "</s>"], [0, 0, 1, 1])
    assert only(tiny.byte_tokenizer(eos="</s>"), text) == (["a", "b", "</s>"], [0, 1, 1])
    assert only(tiny.byte_tokenizer(eos=None), text) == (["a", "b"], [0, 1])


def test_saved_padding_and_truncation_are_switched_off(tmp_path):
    tokenizer = tiny.byte_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(length=50)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.save_pretrained(tmp_path)
    assert len(only(load_tokenizer(str(tmp_path)), Text("abcdefgh", (), is_chat=True))[0]) == 8


def test_longest_input():
    assert longest_input(tiny.byte_tokenizer()) is None
    assert longest_input(tiny.byte_tokenizer(model_max_length=512)) == 512


def test_description_counts_added_tokens():
    tokenizer = tiny.byte_tokenizer(pad_token="<|pad|>")
    described = describe_tokenizer("mine", tokenizer)
    assert described["vocab_size"] == len(tokenizer) == 256 + len(tiny.SPECIAL) + 4
    assert described["special_ids"] == {"bos": 1, "eos": 4, "pad": 0}


def test_a_slow_tokenizer_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    with pytest.raises(DatasetError, match="a fast tokenizer is needed"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"model": {"type": "Unheard"}}'])
def test_a_broken_tokenizer_is_not_taken_for_a_missing_one(tmp_path, text):
    tiny.byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DatasetError, match=rf"{tmp_path} cannot be loaded \("):
        load_tokenizer(str(tmp_path))


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Name a folder with tokenizer\.json"):
        load_tokenizer(str(tmp_path))
