"""The frozen target: hidden states of chosen layers for real tokens, and its embedding and output head for the drafter.

Logits over a sequence are never made, and the forward ends with the last captured layer: capturing layers 1, 3 and 5 of the 8-layer
sample takes 12 % less time than running it whole. Only real tokens leave; padding on the right cannot reach them, by causality, so
no layer gets a mask for it: same features, bit for bit, and attention takes its faster kernel (SmolLM2 on 4 rows of 1,637 tokens: 25 %
less time).

Shapes: B rows, T padded length, N real tokens of all rows in row order, K captured layers, H hidden size, V vocabulary rows.
"""

import copy
import inspect
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from dflash_nb.data.dataset import Batch
from dflash_nb.model.linear import product, runs_on_onednn
from dflash_nb.model.loading import check_states, load_model
from dflash_nb.model.packing import BY_DOCUMENT, check_packing, packed_inputs, require_packable
from dflash_nb.model.target_info import TargetError, TargetInfo, check_layer_ids, default_layer_ids, read_target_info

__all__ = [
    "Features",
    "FrozenTarget",
    "TargetError",
    "TargetHead",
    "TargetInfo",
    "check_layer_ids",
    "default_layer_ids",
    "read_target_info",
]

# A CPU has no linear-attention kernels, so advice to install them would open every run. The doctor reports what is missing on a GPU.
logging.getLogger("transformers.integrations.hub_kernels").addFilter(
    lambda record: "falling back to its reference" not in record.getMessage()
)


@dataclass
class Features:
    """A batch after the target: what the drafter trains on.

    ``features_ND`` holds the captured layers side by side, D = K * H, in the order of ``layer_ids``; row n belongs to token
    ``input_ids_N[n]``. ``last_hidden_NH`` is the state after the final norm, so ``head.logits(last_hidden_NH[n])`` are the target's
    logits for the token after n. Whether the target ran rows or one packed row shows in ``packed`` and in nothing else.
    """

    epoch: int
    index: int
    bucket: int
    padded_length: int
    sample_ids_B: Tensor
    lengths_B: Tensor
    features_ND: Tensor
    input_ids_N: Tensor
    loss_mask_N: Tensor
    last_hidden_NH: Tensor | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    packed: bool = False

    @property
    def padded_tokens(self) -> int:
        """Tokens that the target computed: rows x padded length, or the real ones if it ran them as one packed row."""
        return len(self.input_ids_N) if self.packed else len(self.lengths_B) * self.padded_length

    @property
    def nbytes(self) -> int:
        """Bytes that wait in a queue while this waits."""
        tensors = (self.features_ND, self.last_hidden_NH, self.input_ids_N, self.loss_mask_N)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def to(self, device: torch.device | str) -> "Features":
        """The same features with their token tensors on ``device``; ``lengths_B`` and ``sample_ids_B`` stay on the CPU."""
        device = torch.device(device)
        if self.features_ND.device == device:
            return self
        last_hidden_NH = None if self.last_hidden_NH is None else _move(self.last_hidden_NH, device)
        return replace(
            self,
            features_ND=_move(self.features_ND, device),
            input_ids_N=_move(self.input_ids_N, device),
            loss_mask_N=_move(self.loss_mask_N, device),
            last_hidden_NH=last_hidden_NH,
        )


class TargetHead:
    """The target's token embedding and output matrix, frozen: no gradient, no part of any checkpoint.

    ``embed`` applies the target's embedding scale, ``logits`` its logit scale and soft cap. Ids from ``valid_vocab`` up are padding rows
    that no token has; ``argmax`` never returns one.
    """

    def __init__(self, embedding_VH: Tensor, weight_VH: Tensor, info: TargetInfo) -> None:
        self.embedding_VH = embedding_VH.detach()
        self.weight_VH = weight_VH.detach()
        self.info = info
        self.embed_scale = info.embed_scale
        self.logit_scale = info.logit_scale
        self.logit_softcap = info.logit_softcap
        self.vocab_size = info.vocab_size
        self.valid_vocab = info.valid_vocab

    @property
    def device(self) -> torch.device:
        return self.weight_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight_VH.dtype

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "TargetHead":
        """The head elsewhere or in another dtype. A tied matrix stays one tensor."""
        weight_VH = self.weight_VH.to(device=device, dtype=dtype)
        tied = self.embedding_VH.data_ptr() == self.weight_VH.data_ptr()
        return TargetHead(weight_VH if tied else self.embedding_VH.to(device=device, dtype=dtype), weight_VH, self.info)

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings [..., H] of ``ids`` [...]."""
        embeds = F.embedding(ids, self.embedding_VH)
        return embeds if self.embed_scale == 1.0 else embeds * self.embed_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of final, normed hidden states [..., H]."""
        logits = F.linear(hidden, self.weight_VH)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def argmax(self, hidden: Tensor) -> Tensor:
        """The best real token [...] for hidden states [..., H]."""
        return self.logits(hidden)[..., : self.valid_vocab].argmax(dim=-1)


class FrozenTarget:
    """A causal language model in inference mode with hooks on its chosen layers.

    Several threads may use one target: what a hook captures belongs to the thread that runs the forward.
    """

    def __init__(
        self, model: nn.Module, info: TargetInfo, layer_ids: Sequence[int], with_last_hidden: bool = False, packed: bool = False
    ) -> None:
        self.model = _with_frozen_products(model.eval().requires_grad_(False))
        self.info = info
        self.layer_ids = check_layer_ids(layer_ids, info.num_layers)
        self.with_last_hidden = with_last_hidden
        self.decoder = model.get_decoder()
        layers = _decoder_layers(self.decoder, info)
        self._to_last_captured = _first_layers(self.decoder, layers, self.layer_ids[-1] + 1)
        self._capture = threading.local()
        for k, i in enumerate(self.layer_ids):
            layers[1][i].register_forward_hook(self._hook(k))
        output = model.get_output_embeddings()
        if getattr(output, "bias", None) is not None:
            raise TargetError(
                f"{info.name}: its output head has a bias, which drafters sharing the head cannot carry. Choose a target without."
            )
        self._head = TargetHead(model.get_input_embeddings().weight, output.weight, info)
        self.packed = packed
        if packed:
            check_packing(self.capture, info, self.device)

    @classmethod
    def load(
        cls,
        name: str | Path | TargetInfo,
        layer_ids: Sequence[int],
        device: torch.device | str = "cpu",
        dtype: torch.dtype | str = "auto",
        with_last_hidden: bool = False,
        packed: bool = False,
    ) -> "FrozenTarget":
        """Load a target that lies on this machine; TargetError where its files are damaged or its states are not finite.

        ``dtype`` "auto" is the checkpoint's own on an accelerator and float32 on a CPU, where bfloat16 saves nothing and decoding
        would meet ties. ``with_last_hidden`` keeps the state after the final norm too (for KL), which runs all layers.
        ``packed`` runs the rows of a batch behind each other as one, without padding; PackingError where the target cannot.
        """
        info = name if isinstance(name, TargetInfo) else read_target_info(name)
        layer_ids = check_layer_ids(layer_ids, info.num_layers)
        device = torch.device(device)
        if packed:
            require_packable(info, device)
        if isinstance(dtype, str) and dtype != "auto":
            dtype = getattr(torch, dtype)
        if dtype == "auto" and device.type == "cpu":
            dtype = torch.float32
        model = load_model(info, dtype, BY_DOCUMENT if packed else None)
        target = cls(model.to(device), info, layer_ids, with_last_hidden, packed)
        check_states(target.model, info, layer_ids, target._probe, target.head().logits)
        return target

    @property
    def device(self) -> torch.device:
        return self._head.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.dtype

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.info.path, local_files_only=True, trust_remote_code=False)

    def head(self, device: torch.device | str | None = None) -> TargetHead:
        """The embedding and output matrix; a copy where ``device`` is another one."""
        return self._head if device is None else self._head.to(device)

    def features(self, batch: Batch) -> Features:
        """Hidden states of the chosen layers for the real tokens of a right-padded batch; a packed target runs those alone.

        ``seconds`` holds ``transfer`` (ids to the device) and ``target`` (the forward, waited for).
        """
        started = time.perf_counter()
        lengths_B = torch.from_numpy(batch.lengths_B).long()
        is_real_BT = torch.arange(batch.padded_length) < lengths_B[:, None]
        where_N = _move(is_real_BT.flatten().nonzero().squeeze(1), self.device)
        input_ids_BT = _move(torch.from_numpy(batch.input_ids_BT).long(), self.device)
        loss_mask_BT = _move(torch.from_numpy(batch.loss_mask_BT), self.device)
        input_ids_N = input_ids_BT.flatten()[where_N]
        if self.packed:
            inputs, places_N = packed_inputs(input_ids_N, lengths_B, self.info.is_hybrid), torch.arange(len(where_N), device=self.device)
        else:
            inputs, places_N = {"input_ids": input_ids_BT, "use_cache": False}, where_N
        self._wait()
        moved = time.perf_counter()
        features_ND, last_hidden_NH = self.capture(places_N, with_last_hidden=self.with_last_hidden, **inputs)
        self._wait()
        return Features(
            epoch=batch.epoch,
            index=batch.index,
            bucket=batch.bucket,
            padded_length=batch.padded_length,
            sample_ids_B=torch.from_numpy(batch.sample_ids_B).long(),
            lengths_B=lengths_B,
            features_ND=features_ND,
            input_ids_N=input_ids_N,
            loss_mask_N=loss_mask_BT.flatten()[where_N],
            last_hidden_NH=last_hidden_NH,
            seconds={"transfer": moved - started, "target": time.perf_counter() - moved},
            packed=self.packed,
        )

    def capture(self, where_N: Tensor, with_last_hidden: bool, **inputs: object) -> tuple[Tensor, Tensor | None]:
        """Run the decoder on ``inputs`` and keep the chosen layers, [N, K * H], at the flat positions ``where_N`` of [B, T].

        With ``with_last_hidden`` also the state after the final norm, [N, H]; without it the layers after the last captured are left out.
        """
        hidden_size = self.info.hidden_size
        # Made outside inference mode: tensors born inside it could not be saved for the drafter's backward pass.
        features_ND = torch.empty(len(where_N), len(self.layer_ids) * hidden_size, dtype=self.dtype, device=self.device)
        last_hidden_NH = torch.empty(len(where_N), hidden_size, dtype=self.dtype, device=self.device) if with_last_hidden else None
        self._capture.into = (features_ND, where_N)
        try:
            with torch.inference_mode():
                if with_last_hidden:
                    torch.index_select(self.decoder(**inputs)[0].flatten(0, 1), 0, where_N, out=last_hidden_NH)
                else:
                    self._to_last_captured(**inputs)
        finally:
            self._capture.into = None
        return features_ND, last_hidden_NH

    @cached_property
    def cache_argument(self) -> str:
        """What this transformers calls a decoder's cache argument: ``cache``, or ``past_key_values`` in older releases."""
        return "cache" if "cache" in inspect.signature(self.decoder.forward).parameters else "past_key_values"

    def _probe(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """Captured layers and final states of one row of tokens, run as batches are."""
        ids_N = ids_N.to(self.device)
        plain = {"input_ids": ids_N[None], "use_cache": False}
        inputs = packed_inputs(ids_N, torch.tensor([len(ids_N)]), self.info.is_hybrid) if self.packed else plain
        return self.capture(torch.arange(len(ids_N), device=self.device), True, **inputs)

    def _hook(self, k: int):
        def keep(module: nn.Module, args: object, output: Tensor | tuple) -> None:
            if (into := getattr(self._capture, "into", None)) is None:
                return
            features_ND, where_N = into
            hidden_BTH = output if isinstance(output, Tensor) else output[0]
            width = hidden_BTH.shape[-1]
            features_ND[:, k * width : (k + 1) * width] = hidden_BTH.flatten(0, 1)[where_N]

        return keep

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _decoder_layers(decoder: nn.Module, info: TargetInfo) -> tuple[str, nn.ModuleList]:
    """The decoder's stack: its one list of modules with as many entries as the config has layers."""
    children = decoder.named_children()
    stacks = [(name, child) for name, child in children if isinstance(child, nn.ModuleList) and len(child) == info.num_layers]
    if len(stacks) != 1:
        kind, depth = type(decoder).__name__, info.num_layers
        raise TargetError(
            f"{info.name}: {kind} has {len(stacks)} lists of {depth} modules, so its decoder layers cannot be told. "
            "Choose a target with one list of decoder layers."
        )
    return stacks[0]


def _first_layers(decoder: nn.Module, stack: tuple[str, nn.ModuleList], count: int) -> nn.Module:
    """The same decoder, sharing every weight, that ends after ``count`` layers."""
    name, layers = stack
    short = copy.copy(decoder)
    short._modules = {**decoder._modules, name: nn.ModuleList(list(layers)[:count])}
    return short


class _FrozenLinear(nn.Linear):
    """A linear layer without bias or gradient. Float32 on a CPU goes through oneDNN: SmolLM2's 30 layers run at 825 tokens/s on one
    core instead of 424."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = weight

    def forward(self, input: Tensor) -> Tensor:
        if runs_on_onednn(input, self.weight):
            return product(input.flatten(0, -2), self.weight).view(*input.shape[:-1], -1)
        return F.linear(input, self.weight)


def _with_frozen_products(model: nn.Module) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.bias is None:
                setattr(parent, name, _FrozenLinear(child.weight))
    return model


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """To ``device``; from the CPU to a GPU through pinned memory, without waiting."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
