"""Documents behind each other in one row that never see each other: attention document by document, positions that begin anew.

Attention runs once for each document instead of once under a block-diagonal mask, so a row of N tokens in documents of length L costs
N x L scores and not N x N, and no mask of N x N is made. What a layer computes for a token alone (projections, MLP) is one product over the
row. Recurrent layers begin a document anew only in the kernels of flash-linear-attention and causal-conv1d, which transformers
hands the documents' borders to; without them the state would run on into the next document, and such a target is not packed. Sliding
windows are not implemented here. Whatever the config promises, ``check_packing`` asks the loaded model itself.
"""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dflash_nb.model.target_info import TargetError, TargetInfo

BY_DOCUMENT = "sdpa_by_document"
PACKABLE_LAYERS = frozenset({"full_attention", "attention"})
RECURRENT_LAYERS = frozenset({"linear_attention"})
KERNELS = {"fla": "flash-linear-attention", "causal_conv1d": "causal-conv1d"}  # module and package
CLOSE = {torch.float32: 1e-4, torch.float64: 1e-8}
CLOSE_16_BIT = 3e-2
PROBE_LENGTHS = (13, 21)


class PackingError(TargetError):
    """This target cannot run packed rows here; padded ones it can."""


def attend_by_document(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: object
) -> tuple[Tensor, None]:
    """Causal attention inside each of ``document_lengths`` of a single row; without that option what ``sdpa`` does.

    query, key, value: [rows, heads, tokens, head size]. Returns [rows, tokens, heads, head size].
    """
    lengths = options.pop("document_lengths", None)
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    if (window := options.get("sliding_window")) and max(lengths) > window:  # whatever the config said
        raise PackingError(f"a document of {max(lengths)} tokens is longer than the window of {window} tokens that a layer sees")
    documents = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    mixed = [sdpa_attention_forward(module, *document, None, **options)[0] for document in documents]
    return torch.cat(mixed, dim=1), None


AttentionInterface.register(BY_DOCUMENT, attend_by_document)
AttentionMaskInterface.register(BY_DOCUMENT, sdpa_mask)


def require_packable(info: TargetInfo, device: torch.device | str = "cpu") -> None:
    """Raises PackingError, from the target's config and what is installed, if it cannot run packed rows on a device of this kind."""
    allowed, missing = PACKABLE_LAYERS | RECURRENT_LAYERS, missing_kernels(torch.device(device))
    if missing:
        allowed = PACKABLE_LAYERS
    other = sorted(set(info.layer_types) - allowed)
    if other:
        count = sum(kind not in allowed for kind in info.layer_types)
        why = f" (recurrent layers can begin anew {missing})" if RECURRENT_LAYERS & set(other) else ""
        raise PackingError(
            f"strategy packed needs a target that keeps documents apart; {count} of the {info.num_layers} layers of {info.name} "
            f"are {' and '.join(other)}, where a document would see the ones before it{why}"
        )


def missing_kernels(device: torch.device) -> str:
    """What recurrent layers lack to begin each document anew on ``device``, as the end of a sentence; empty if nothing."""
    if device.type != "cuda":
        return "only in kernels for GPUs"
    absent = [package for module, package in KERNELS.items() if find_spec(module) is None]
    return f"only with {' and '.join(absent)} installed" if absent else ""


def packed_inputs(input_ids_N: Tensor, lengths_B: Tensor, recurrent: bool = False) -> dict[str, object]:
    """What the decoder is called with to run documents of these lengths as one row, [1, N]; borders too if layers are ``recurrent``."""
    lengths = lengths_B.tolist()
    borders = {}
    if recurrent:
        ends_B, of_N = lengths_B.cumsum(0), torch.arange(len(lengths)).repeat_interleave(lengths_B)
        borders = {"cu_seq_lens_q": torch.nn.functional.pad(ends_B, (1, 0)), "seq_idx": of_N[None]}
        borders = {name: places.to(input_ids_N.device, torch.int32) for name, places in borders.items()}
    positions_N = torch.cat([torch.arange(length) for length in lengths]).to(input_ids_N.device)
    return {
        "input_ids": input_ids_N[None],
        "position_ids": positions_N[None],
        # A mask with four axes is taken as it is; attention by document does not look at it.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids_N.device),
        "document_lengths": lengths,
        "use_cache": False,
        **borders,
    }


def check_packing(capture: Callable[..., tuple[Tensor, Tensor | None]], info: TargetInfo, device: torch.device) -> None:
    """Run two documents packed and each alone, and compare the second one's captured layers. Raises PackingError where they differ or
    packed ones are refused.

    capture: ``FrozenTarget.capture`` of the loaded target.
    """
    ids_N = torch.randint(info.valid_vocab, (sum(PROBE_LENGTHS),), generator=torch.Generator().manual_seed(0)).to(device)
    every_N = torch.arange(len(ids_N), device=device)
    try:
        packed, _ = capture(every_N, False, **packed_inputs(ids_N, torch.tensor(PROBE_LENGTHS), info.is_hybrid))
    except (ValueError, TypeError) as refusal:  # a model that does not know documents, or that lacks the kernels for them
        raise PackingError(f"{info.name} does not take packed rows ({refusal})") from refusal
    second = ids_N[PROBE_LENGTHS[0] :]
    alone, _ = capture(every_N[: len(second)], False, input_ids=second[None], use_cache=False)
    away = float(((packed[PROBE_LENGTHS[0] :] - alone).float().norm(dim=-1) / alone.float().norm(dim=-1).clamp_min(1e-6)).max())
    if not away < CLOSE.get(packed.dtype, CLOSE_16_BIT):
        raise PackingError(
            f"{info.name}: the second of two packed documents differs by {away:.2g} from itself alone, so its layers do not keep "
            "documents apart"
        )
