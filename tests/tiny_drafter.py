"""A drafter of a few thousand weights, a random head, and random features for ragged rows."""

import torch
import torch.nn.functional as F

from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.target import Features

HIDDEN, VOCAB = 48, 300


def tiny_config(**changes) -> DrafterConfig:
    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 80,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "block_size": 8,
        "target_layer_ids": (1, 4, 7),
        "num_target_layers": 10,
        "mask_token_id": VOCAB - 1,
        "max_positions": 4096,
    }
    return DrafterConfig(**values | changes)


def lively_drafter(config: DrafterConfig, seed: int = 0) -> DFlashDrafter:
    """Weights large enough that attention is peaked and every norm matters."""
    drafter = DFlashDrafter(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() == 2 else 1 + 0.2 * noise)
    return drafter


class TinyHead:
    """Stands in for TargetHead where a test needs a head of its own."""

    def __init__(
        self, vocab: int = VOCAB, hidden: int = HIDDEN, scale: float = 1.0, softcap: float | None = None, valid: int | None = None
    ):
        self.weight_VH = torch.randn(vocab, hidden, generator=torch.Generator().manual_seed(5))
        self.logit_scale, self.logit_softcap = scale, softcap
        self.valid_vocab = vocab if valid is None else valid

    def embed(self, ids):
        return F.embedding(ids, self.weight_VH)

    def logits(self, hidden):
        logits = hidden @ self.weight_VH.T * self.logit_scale
        return logits if self.logit_softcap is None else self.logit_softcap * torch.tanh(logits / self.logit_softcap)


def random_features(lengths, config: DrafterConfig, mask=None, seed: int = 1) -> Features:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    return Features(
        epoch=0,
        index=0,
        bucket=0,
        padded_length=max(lengths),
        sample_ids_B=torch.arange(len(lengths)),
        lengths_B=torch.tensor(lengths),
        features_ND=torch.randn(tokens, len(config.target_layer_ids) * config.hidden_size, generator=generator),
        input_ids_N=torch.randint(0, config.vocab_size - 1, (tokens,), generator=generator),
        loss_mask_N=torch.ones(tokens, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool(),
        last_hidden_NH=torch.randn(tokens, config.hidden_size, generator=generator),
    )
