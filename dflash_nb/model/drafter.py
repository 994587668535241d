"""The DFlash drafter: a few Qwen3-style layers that draft a whole block of tokens from the target's hidden states.

The captured target layers are concatenated, projected once (`fc`, `hidden_norm`) and read by every layer through its own k_proj
and v_proj; they pass no other norm, MLP or residual. Queries come from the block alone. Embedding and head are the target's and
stay outside, so parameter names and shapes are exactly those of the published checkpoints.

Training (`draft_blocks`) and drafting (`draft` on a cache) run the same layers and the same attention. In float32, on weights
ten times larger than fresh ones, they differ by at most 4e-6, and from the published implementation by 5e-6.

Shapes: N real tokens (rows after one another), T tokens of one row, F = captured layers * hidden, A blocks, B slots, E hidden size,
H query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dflash_nb.model.anchors import Anchors
from dflash_nb.model.attention import BlockLayout, LayerMask, block_attention
from dflash_nb.model.layers import GatedMlp, RMSNorm
from dflash_nb.model.linear import Linear
from dflash_nb.model.target_info import TargetInfo, check_layer_ids, default_layer_ids

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of a drafter. `rope_theta` and `vocab_size` are the target's; `head_dim` is the drafter's own and is rotated in full.

    target_layer_ids  0-based ids of decoder layers whose *output* is captured, in this order
    layer_types       "full_attention" or "sliding_attention", one a layer
    sliding_window    tokens that a sliding layer sees, the slot itself counted
    is_causal         True or False for all layers; None: sliding layers are causal inside the block, full layers are not
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    vocab_size: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int
    mask_token_id: int
    max_positions: int
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None

    def __post_init__(self):
        object.__setattr__(self, "target_layer_ids", tuple(self.target_layer_ids))
        object.__setattr__(self, "layer_types", tuple(self.layer_types) or (FULL,) * self.num_layers)
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; it counts the anchor, so it must be at least 2")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}, and head_dim {self.head_dim} even"
            )
        if len(self.layer_types) != self.num_layers or set(self.layer_types) - {FULL, SLIDING}:
            raise ValueError(f"layer_types must name {self.num_layers} layers, each {FULL} or {SLIDING}; got {self.layer_types}")
        if SLIDING in self.layer_types and not (self.sliding_window and self.sliding_window > 0):
            raise ValueError(f"sliding layers need sliding_window of at least 1; got {self.sliding_window}")
        check_layer_ids(self.target_layer_ids, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} has no embedding in a vocabulary of {self.vocab_size}; choose an unused id"
            )

    @classmethod
    def for_target(
        cls,
        info: TargetInfo,
        num_layers: int = 5,
        block_size: int = 16,
        target_layer_ids: tuple[int, ...] | None = None,
        mask_token_id: int | None = None,
        sliding_window: int | None = None,
        **shape,
    ) -> DrafterConfig:
        """Drafter for a target : its hidden size, MLP width, theta, norm and vocabulary; heads of at most 128.

        sliding_window makes every layer sliding. `shape` overrides any field (num_heads=, layer_types=, is_causal=, ...).
        """
        kv_heads, heads, head_dim = info.num_kv_heads, info.num_heads, info.head_dim
        if head_dim > 128:
            # The published drafters of wide-headed targets keep the key/value width in heads of 128, with four query heads each.
            kv_heads = max(1, kv_heads * head_dim // 128)
            heads, head_dim = 4 * kv_heads, 128
        values = {
            "hidden_size": info.hidden_size,
            "intermediate_size": info.intermediate_size,
            "num_layers": num_layers,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "rope_theta": info.rope_theta,
            "rms_norm_eps": info.rms_norm_eps,
            "vocab_size": info.vocab_size,
            "block_size": block_size,
            "target_layer_ids": target_layer_ids or default_layer_ids(info.num_layers, num_layers),
            "num_target_layers": info.num_layers,
            "mask_token_id": info.require_mask_token() if mask_token_id is None else mask_token_id,
            "max_positions": info.max_positions,
            "layer_types": (FULL if sliding_window is None else SLIDING,) * num_layers,
            "sliding_window": sliding_window,
        }
        return cls(**values | shape)

    def layer_mask(self, layer: int) -> LayerMask:
        sliding = self.layer_types[layer] == SLIDING
        return LayerMask(sliding if self.is_causal is None else self.is_causal, self.sliding_window if sliding else None)


@dataclass
class ContextCache:
    """Rotated keys and plain values of the context tokens 0..length-1 of one sequence, a [T, G, D] pair a layer."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    length: int = 0

    def crop(self, length: int) -> None:
        """Forget all context tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a context of {self.length} tokens to {length}")
        self.length = length


class DFlashDrafter(nn.Module):
    """Parameters are named as in the published `model.safetensors`; there are no buffers.

    Matrices start at a standard deviation of 0.02. After 240 steps of AdamW on the sample the held-out loss is 5.45; it is 5.57 from
    0.04, 5.61 from 1/sqrt(inputs), and 5.58 where the projections that add to the residual start smaller with depth.
    """

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def project_context(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Captured hidden states to the context that every layer reads, [N, E]."""
        if not torch.is_autocast_enabled(features_NF.device.type):
            features_NF = features_NF.to(self.fc.weight.dtype)
        return self.hidden_norm(self.fc(features_NF))

    def draft_blocks(self, features_NF: torch.Tensor, lengths_B, anchors: Anchors, block_embeds_ABE: torch.Tensor) -> torch.Tensor:
        """Final-normed hidden states [A, B, E] of all blocks, each seeing its own row before its anchor and itself.

        features_NF are real tokens only, rows after one another; lengths_B their row lengths.
        """
        lengths = torch.as_tensor(lengths_B, device=features_NF.device)
        position_N = torch.arange(features_NF.shape[0], device=features_NF.device)
        position_N = position_N - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=features_NF.shape[0])
        rotary_N = _rotary(position_N, self.config)
        context_NE = self.project_context(features_NF)
        layout = BlockLayout(anchors.start_A, anchors.position_A, block_embeds_ABE.shape[1])
        contexts = (layer.self_attn.key_value(context_NE, rotary_N) for layer in self.layers)
        return self._run(block_embeds_ABE, contexts, layout)

    def new_cache(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> ContextCache:
        empty = (0, self.config.num_kv_heads, self.config.head_dim)
        keys, values = ([torch.empty(empty, device=device, dtype=dtype) for _ in self.layers] for _ in range(2))
        return ContextCache(keys, values)

    @torch.no_grad()
    def extend(self, cache: ContextCache, features_TF: torch.Tensor, start: int) -> None:
        """Add the context tokens at positions start.. to the cache; start must be the cache's length."""
        if start != cache.length:
            raise ValueError(f"context must grow without gaps: the cache holds {cache.length} tokens, the new ones start at {start}")
        end = start + features_TF.shape[0]
        rotary_T = _rotary(torch.arange(start, end, device=features_TF.device), self.config)
        context_TE = self.project_context(features_TF)
        for layer, attention in enumerate(block.self_attn for block in self.layers):
            for store, new in zip((cache.keys, cache.values), attention.key_value(context_TE, rotary_T), strict=True):
                if store[layer].shape[0] < end:
                    grown = store[layer].new_empty(max(end, 2 * start), *store[layer].shape[1:])
                    grown[:start] = store[layer][:start]
                    store[layer] = grown
                store[layer][start:end] = new
        cache.length = end

    @torch.no_grad()
    def draft(self, cache: ContextCache, block_embeds_BE: torch.Tensor, anchor_position: int) -> torch.Tensor:
        """Final-normed hidden states [B, E] of one block at positions anchor_position.., seeing the cached context before it."""
        if anchor_position > cache.length:
            raise ValueError(f"a block at position {anchor_position} needs all context before it; the cache holds {cache.length} tokens")
        device = block_embeds_BE.device
        layout = BlockLayout(
            torch.zeros(1, dtype=torch.long, device=device), torch.tensor([anchor_position], device=device), len(block_embeds_BE)
        )
        contexts = ((key[:anchor_position], value[:anchor_position]) for key, value in zip(cache.keys, cache.values, strict=True))
        return self._run(block_embeds_BE[None], contexts, layout)[0]

    def _run(self, hidden_ABE: torch.Tensor, contexts, layout: BlockLayout) -> torch.Tensor:
        slots = torch.arange(layout.block_size, device=hidden_ABE.device)
        rotary_AB = _rotary(layout.position_A[:, None] + slots, self.config)
        if not torch.is_autocast_enabled(hidden_ABE.device.type):
            hidden_ABE = hidden_ABE.to(self.fc.weight.dtype)
        for layer, context in zip(self.layers, contexts, strict=True):
            hidden_ABE = layer(hidden_ABE, context, rotary_AB, layout)
        return self.norm(hidden_ABE)


class _Attention(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.head_dim, self.mask = config.head_dim, config.layer_mask(layer)
        self.q_proj = Linear(config.hidden_size, config.num_heads * config.head_dim)
        self.k_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.v_proj = Linear(config.hidden_size, config.num_kv_heads * config.head_dim)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def key_value(self, hidden, rotary) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., E] to rotated keys and values [..., G, D]: the same weights for context and block."""
        key = self.k_proj(hidden).unflatten(-1, (-1, self.head_dim))
        value = self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        return _rotate(self.k_norm(key), rotary), value

    def forward(self, hidden_ABE, context, rotary_AB, layout: BlockLayout) -> torch.Tensor:
        query = self.q_proj(hidden_ABE).unflatten(-1, (-1, self.head_dim))
        query = _rotate(self.q_norm(query), rotary_AB)
        mixed = block_attention(query, *context, *self.key_value(hidden_ABE, rotary_AB), layout, self.mask)
        return self.o_proj(mixed.flatten(-2))


class _Layer(nn.Module):
    def __init__(self, config: DrafterConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMlp(config.hidden_size, config.intermediate_size)

    def forward(self, hidden_ABE, context, rotary_AB, layout: BlockLayout):
        hidden_ABE = hidden_ABE + self.self_attn(self.input_layernorm(hidden_ABE), context, rotary_AB, layout)
        return hidden_ABE + self.mlp(self.post_attention_layernorm(hidden_ABE))


def _rotary(position: torch.Tensor, config: DrafterConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [..., 1, D/2] of absolute positions, float32: bfloat16 angles are wrong by whole turns past position 256."""
    exponent = torch.arange(0, config.head_dim, 2, device=position.device, dtype=torch.float32) / config.head_dim
    angle = position[..., None, None].float() * config.rope_theta**-exponent
    return angle.cos(), angle.sin()


def _rotate(heads: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Neox-style rotation of [..., heads, D]: feature i pairs with i + D/2."""
    cos, sin = rotary
    left, right = heads.float().chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(heads.dtype)
