"""Random targets of a few thousand weights, one of each family that a drafter meets, saved as transformers saves them."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from dflash_nb.data.dataset import Batch

VOCAB, HIDDEN, LAYERS = 97, 48, 8
MASK_TOKEN = 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.1,  # five times the usual, so that layers matter and greedy choices are no ties
}
DELTA_NET = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def tiny_config(family: str, **changes: object) -> PreTrainedConfig:
    common = {**COMMON, **changes}
    match family:
        case "hybrid":
            return Qwen3_5TextConfig(**{"tie_word_embeddings": True, **DELTA_NET, **common})
        case "qwen3":
            return Qwen3Config(**{"rope_theta": 1e6, **common})
        case "llama":
            return LlamaConfig(**{"tie_word_embeddings": True, **common})
        case "gemma2":
            return Gemma2Config(**{"sliding_window": 16, "query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0, **common})
        case "granite":
            return GraniteConfig(**{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "tie_word_embeddings": False, **common})
        case "cohere":
            return CohereConfig(**{"logit_scale": 0.25, **common})
    raise AssertionError(family)


def save_target(folder: Path, family: str, seed: int = 1, **changes: object) -> Path:
    """A target of ``family`` in ``folder``; "wrapper" is the hybrid inside a ...ForConditionalGeneration."""
    torch.manual_seed(seed)
    if family == "wrapper":
        vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": HIDDEN}
        text = tiny_config("hybrid", tie_word_embeddings=False, **changes).to_dict()
        config = Qwen3_5Config(text_config=text, vision_config={**vision, "num_position_embeddings": 64})
        model = Qwen3_5ForConditionalGeneration(config)
    else:
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    model.save_pretrained(folder)
    (folder / "dflash.json").write_text(json.dumps({"mask_token_id": MASK_TOKEN}))
    return folder


def make_batch(lengths: list[int], padded_length: int | None = None, pad_id: int = 0, seed: int = 0) -> Batch:
    """Random rows; the second half of each is supervised. Real tokens depend on ``seed`` and ``lengths`` alone."""
    rng = np.random.default_rng(seed)
    width = padded_length or max(lengths)
    ids = np.full((len(lengths), width), pad_id, np.int32)
    mask = np.zeros((len(lengths), width), bool)
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.integers(2, MASK_TOKEN, length)
        mask[row, length // 2 : length] = True
    return Batch(0, 0, 0, width, np.arange(len(lengths)), np.array(lengths), ids, mask)
