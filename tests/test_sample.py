"""The embedded corpus and the target that ships with it."""

import ast
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash_nb.data import sample
from dflash_nb.data.dataset import TokenDataset
from dflash_nb.data.sample import END, MASK, PAD, START, functions_in, is_heldout, read_functions, sample_target_path
from dflash_nb.model.target_info import read_target_info

ASSET = sample_target_path()


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache of this module's own, so that the first build is really made."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("DFLASH_CACHE")
    os.environ["DFLASH_CACHE"] = str(folder)
    yield folder
    del os.environ["DFLASH_CACHE"]
    if before is not None:
        os.environ["DFLASH_CACHE"] = before


@pytest.fixture(scope="module")
def corpus(cache):
    return sample.ensure_sample(quiet=True)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ASSET / "tokenizer.json"))


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(ASSET, dtype=torch.float32).eval()


def columns(path):
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def one_function(source):
    (function,) = functions_in(textwrap.dedent(source).lstrip("\n"), "module")
    return function


def test_prompt_and_body_of_a_known_function():
    (function,) = [f for f in functions_in(Path(textwrap.__file__).read_text(), "textwrap") if f.prompt.startswith("def shorten(")]
    assert function.prompt.startswith('def shorten(text, width, **kwargs):\n    """Collapse')
    assert function.prompt.endswith('"""')
    assert function.body.startswith("\n    w = TextWrapper(width=width, max_lines=1, **kwargs)")
    assert function.body.endswith("' '.join(text.strip().split()))")


def test_a_method_stands_below_its_class_line():
    function = one_function(
        """
        if True:
          class Inner(Base, metaclass=Meta):
            x = 1

            @property
            def value(self) -> "dict[str: int]":  # not the end: of it
                # why
                return self.x
        """
    )
    assert function.prompt == (
        'class Inner(Base, metaclass=Meta):\n    @property\n    def value(self) -> "dict[str: int]":  # not the end: of it'
    )
    assert function.body == "\n        # why\n        return self.x"


@pytest.mark.parametrize(
    ("source", "last_prompt_line"),
    [
        ("def f(a, b={1: 2}, *c, d=lambda: 0, **e):\n    return a\n", "def f(a, b={1: 2}, *c, d=lambda: 0, **e):"),
        ("def f(\n    a,  # colon: here\n    b,\n):\n    return a\n", "):"),
        ("async def f():\n\n    '''Doc.\n\n    More.'''\n    return 1\n", "    More.'''"),
    ],
)
def test_the_prompt_ends_with_the_signature_or_docstring(source, last_prompt_line):
    function = one_function(source)
    assert function.prompt.split("\n")[-1] == last_prompt_line
    assert function.prompt + function.body == source.rstrip("\n")


def test_functions_without_a_body_of_their_own_are_left_out():
    assert not list(functions_in("def f(): return 1\n\n\ndef g():\n    '''Only words.'''\n", "module"))


def test_every_function_is_python_and_no_two_are_the_same():
    functions = read_functions()
    for function in functions:
        ast.parse(function.prompt + function.body)
    texts = {(f.prompt.split("\n", 1)[1] if f.prompt.startswith("class ") else f.prompt) + f.body for f in functions}
    assert len(texts) == len(functions)


def test_a_python_without_sources_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"needs a Python whose standard library has its \.py files"):
        read_functions(tmp_path)


def test_files_that_are_not_python_or_not_utf8_are_skipped(tmp_path):
    (tmp_path / "bad.py").write_text("def f(:\n")
    (tmp_path / "latin.py").write_bytes(b"def f():\n    return '\xe9'\n")
    (tmp_path / "good.py").write_text("def f():\n\treturn 1\n")
    assert [(f.module, f.body) for f in read_functions(tmp_path)] == [("good", "\n        return 1")]


def test_corpus_is_large_and_skewed_with_a_tail(corpus):
    about = json.loads((corpus / "dataset.json").read_text())
    lengths = np.concatenate([columns(corpus / split / "data-00000.arrow")["seq_len"].to_numpy() for split in ("train", "heldout")])
    assert about["rows"]["train"] + about["rows"]["heldout"] == len(lengths) >= 10_000
    assert np.median(lengths) < 0.75 * lengths.mean()
    assert (lengths > 2048).sum() >= 10
    assert lengths.max() <= about["max_length"] == 4096
    assert 0.03 <= about["rows"]["heldout"] / len(lengths) <= 0.05
    assert about["too_long"]["rows"] < 10


def test_whole_modules_are_held_out(corpus):
    train, heldout = (set(columns(corpus / split / "data-00000.arrow")["source"].to_pylist()) for split in ("train", "heldout"))
    assert not train & heldout
    assert all(is_heldout(module) for module in heldout) and not any(is_heldout(module) for module in train)
    assert len(heldout) >= 20


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_rows_hold_prompt_body_and_one_end_token(corpus, tokenizer, split):
    table = columns(corpus / split / "data-00000.arrow")
    ids, mask = (table[name].combine_chunks().flatten().to_numpy() for name in ("input_ids", "loss_mask"))
    seq_len, n_supervised = (table[name].to_numpy().astype(np.int64) for name in ("seq_len", "n_supervised"))
    ends = np.cumsum(seq_len) - 1
    assert np.array_equal(np.flatnonzero(ids == tokenizer.token_to_id(END)), ends)
    assert not np.isin(ids, [tokenizer.token_to_id(token) for token in (MASK, PAD, START)]).any()
    assert ids.max() < tokenizer.get_vocab_size()
    assert np.array_equal(np.add.reduceat(mask.astype(np.int64), ends + 1 - seq_len), n_supervised)
    assert mask[ends].all() and not mask[ends + 1 - seq_len].any()
    assert np.count_nonzero(np.diff(mask.astype(np.int8))) == 2 * len(ends) - 1  # one switch on and one off in every row
    assert 0.5 < mask.mean() < 0.9


def test_rows_decode_to_the_functions_they_come_from(corpus, tokenizer):
    functions = {(f.prompt, f.body) for f in read_functions() if is_heldout(f.module)}
    dataset = TokenDataset.open(corpus, "heldout")
    for row in range(0, len(dataset), 7):
        ids, mask = dataset.row(row)
        assert (tokenizer.decode(ids[~mask]), tokenizer.decode(ids[mask], skip_special_tokens=True)) in functions


def test_dataset_and_target_name_the_same_vocabulary(corpus):
    info = read_target_info("sample")
    recorded = TokenDataset.open(corpus).tokenizer
    assert (recorded["fingerprint"], recorded["vocab_size"]) == (info.tokenizer_fingerprint, info.vocab_size)


def test_a_second_call_builds_nothing(corpus, monkeypatch):
    monkeypatch.setattr(sample, "read_functions", lambda: pytest.fail("read the standard library again"))
    assert sample.ensure_sample() == corpus


BUILD = "from dflash_nb.data.sample import ensure_sample; print(ensure_sample(quiet=True))"


def test_two_builds_at_once_end_in_one_folder(tmp_path):
    environment = os.environ | {"DFLASH_CACHE": str(tmp_path)}
    builds = [subprocess.Popen([sys.executable, "-c", BUILD], env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    printed = {build.communicate()[0].strip() for build in builds}
    assert [build.returncode for build in builds] == [0, 0]
    assert printed == {str(path) for path in tmp_path.iterdir()}


def test_an_interrupted_build_leaves_nothing(tmp_path):
    code = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {BUILD}"  # a background shell ignores it
    build = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"DFLASH_CACHE": str(tmp_path)}, stderr=subprocess.DEVNULL)
    while build.poll() is None and not any(tmp_path.iterdir()):
        time.sleep(0.01)
    assert list(tmp_path.iterdir()), "the build ended before it could be interrupted"
    build.send_signal(signal.SIGINT)
    assert build.wait() != 0
    assert not list(tmp_path.iterdir())


def test_the_shipped_target_is_small_and_of_the_reference_family(model):
    assert sum(path.stat().st_size for path in ASSET.iterdir()) <= 8_000_000
    assert sorted(path.name for path in ASSET.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    ]
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert model.config.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert model.config.vocab_size <= 4096


def test_special_tokens_are_known_to_transformers(model):
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    assert tokenizer.convert_tokens_to_ids([PAD, END, MASK, START]) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.mask_token_id) == (0, 1, 2)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (0, 1)
    assert len(tokenizer) == model.config.vocab_size
    assert read_target_info("sample").mask_token_id == 2


def test_any_text_survives_the_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    for text in ("def f(x):\n\n    return x  # \t é 漢字 🐍\r\n", "  leading and trailing  ", "\x00\n\n\n  \n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_marks_roles_and_turns():
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert whole == "<|start|>user\n2 + 2?<|end|>\n<|start|>assistant\n4<|end|>\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert whole.startswith(prompt) and prompt.endswith("assistant\n")


def test_training_json_tells_the_truth_about_the_loss(model, tokenizer):
    """The rows of the Python that trained it; on another version the held-out functions differ a little, so the tolerance is wide."""
    about = json.loads((ASSET / "training.json").read_text())
    assert about["command"].startswith("python -m dflash_nb.model.train_sample_target")
    assert about["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    nats = tokens = text_bytes = 0
    with torch.inference_mode():
        for function in [f for f in read_functions() if is_heldout(f.module)][::6]:
            prompt, body = (tokenizer.encode(text).ids for text in (function.prompt, function.body))
            ids = torch.tensor([[*prompt, *body, tokenizer.token_to_id(END)]])
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
            nats += float(torch.nn.functional.cross_entropy(logits, ids[0, len(prompt) :], reduction="sum"))
            tokens += len(body) + 1
            text_bytes += len(function.body.encode())
    assert nats / tokens == pytest.approx(about["heldout_loss_nats_per_token"], abs=0.2)
    assert nats / math.log(2) / text_bytes == pytest.approx(about["heldout_bits_per_byte"], abs=0.12)
    assert about["heldout_loss_nats_per_token"] < 0.45 * math.log(model.config.vocab_size)


def test_padding_on_the_right_does_not_reach_real_tokens(model, corpus):
    dataset = TokenDataset.open(corpus, "heldout")
    rows = [dataset.row(i)[0] for i in (3, 40, 77)]
    width = max(len(row) for row in rows) + 9
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.from_numpy(row)
        mask[i, : len(row)] = 1
    with torch.inference_mode():
        together = model(input_ids=ids, attention_mask=mask, use_cache=False, output_hidden_states=True).hidden_states
        for i, row in enumerate(rows):
            alone = model(input_ids=torch.from_numpy(row)[None].long(), use_cache=False, output_hidden_states=True).hidden_states
            for a, b in zip(together, alone, strict=True):
                torch.testing.assert_close(a[i, : len(row)], b[0], atol=2e-3 * float(b.abs().max()), rtol=0)


def test_greedy_continuation_closes_a_simple_function(model):
    """Trained for real: it ends a getter by itself, with the attribute named in the signature's class of words."""
    tokenizer = AutoTokenizer.from_pretrained(ASSET)
    prompt = tokenizer("class Shape:\n    def get_width(self):", return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert ids[-1] == tokenizer.eos_token_id
    assert "self" in tokenizer.decode(ids)
