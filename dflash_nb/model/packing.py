"""Documents behind each other in one row that never see each other: attention document by document, positions that begin anew.

Attention runs once for each document instead of once under a block-diagonal mask, so a row of N tokens in documents of length L costs
N x L scores and not N x N, and no mask of N x N is made. What a layer computes for a token alone (projections, MLP) is one product over the
row. Only targets whose every layer is full attention can be packed: a recurrent state would run on into the next document, and a
sliding window is not implemented here. ``check_packing`` asks the loaded model itself.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dflash_nb.model.target_info import TargetError, TargetInfo

BY_DOCUMENT = "sdpa_by_document"
PACKABLE_LAYERS = frozenset({"full_attention", "attention"})
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-8}
CLOSE_16_BIT = 3e-2
PROBE_LENGTHS = (13, 21)


def attend_by_document(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Causal attention inside each of ``document_lengths`` of a single row; without that option what ``sdpa`` does.

    query, key, value: [rows, heads, tokens, head size]. Returns [rows, tokens, heads, head size].
    """
    lengths = options.pop("document_lengths", None)
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    documents = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    mixed = [sdpa_attention_forward(module, *document, None, **options)[0] for document in documents]
    return torch.cat(mixed, dim=1), None


AttentionInterface.register(BY_DOCUMENT, attend_by_document)
AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)


def require_packable(info: TargetInfo) -> None:
    """Raises TargetError, from the target's config alone, if it cannot run packed rows."""
    other = sorted(set(info.layer_types) - PACKABLE_LAYERS)
    if other:
        count = sum(kind not in PACKABLE_LAYERS for kind in info.layer_types)
        raise TargetError(
            f"strategy packed needs a target with full attention in every layer; {count} of the {info.num_layers} layers of {info.name} "
            f"are {' and '.join(other)}, where a document would see the ones before it. Use strategy bucketed"
        )


def packed_inputs(input_ids_N: Tensor, lengths_B: Tensor) -> dict[str, object]:
    """What the decoder is called with to run documents of these lengths as one row, [1, N]."""
    lengths = lengths_B.tolist()
    positions_N = torch.cat([torch.arange(length) for length in lengths]).to(input_ids_N.device)
    return {
        "input_ids": input_ids_N[None],
        "position_ids": positions_N[None],
        # A mask with four axes is taken as it is; attention by document does not look at it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids_N.device),
        "document_lengths": lengths,
        "use_cache": False,
    }


def check_packing(capture: Callable[..., tuple[Tensor, Tensor | None]], info: TargetInfo, device: torch.device) -> None:
    """Run two documents packed and each alone, and compare the second one's captured layers. Raises TargetError if they differ.

    capture: ``FrozenTarget.capture`` of the loaded target.
    """
    ids_N = torch.randint(info.valid_vocab, (sum(PROBE_LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)
    every_N = torch.arange(len(ids_N), device=device)
    packed, _ = capture(every_N, False, **packed_inputs(ids_N, torch.tensor(PROBE_LENGTHS)))
    second = ids_N[PROBE_LENGTHS[0] :]
    alone, _ = capture(every_N[: len(second)], False, input_ids=second[None], use_cache=False)
    away = float(((packed[PROBE_LENGTHS[0] :] - alone).float().norm(dim=-1) / alone.float().norm(dim=-1).clamp_min(1e-6)).max())
    if not away < CLOSE.get(packed.dtype, CLOSE_16_BIT):
        raise TargetError(
            f"{info.name}: the second of two packed documents differs by {away:.2g} from itself alone, so its attention cannot be kept "
            "inside documents. Use strategy bucketed"
        )
