"""The facts of a target read from its JSON files: no weights, no torch, 5 ms for the sample and 0.3 s for a 150 k tokenizer.

A configuration can therefore be checked before anything is loaded. Values are taken from ``config.json`` (a wrapper's
``text_config`` first), ``generation_config.json``, ``tokenizer.json``, ``tokenizer_config.json`` and ``dflash.json``, a file of
ours beside a target that names its mask token: ``{"mask_token_id": 17}``.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from dflash_nb.data.vocabulary import vocabulary_fingerprint
from dflash_nb.errors import PlainError
from dflash_nb.home import asset, cache_dir, did_you_mean, exists, user_path
from dflash_nb.stored import parsed

GROWING_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


class TargetError(PlainError, ValueError):
    """A target that cannot be used as asked; the message says what to do."""


@dataclass(frozen=True)
class TargetInfo:
    """What a drafter, an export and a checker need to know of a target.

    ``vocab_size`` is the rows of its embedding, often padded; ``valid_vocab`` counts the ids its tokenizer can make. ``embed_scale``
    multiplies its token embeddings, ``logit_scale`` its logits before the soft cap ``c * tanh(logits / c)``.
    """

    name: str
    path: Path
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    valid_vocab: int
    max_positions: int
    rope_theta: float
    rms_norm_eps: float
    tied_head: bool
    layer_types: tuple[str, ...]
    mask_token_id: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    tokenizer_fingerprint: str | None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def is_hybrid(self) -> bool:
        """Whether some layers carry a recurrent state, which padding on the left or packing would corrupt."""
        return any(kind not in GROWING_LAYERS for kind in self.layer_types)

    def require_mask_token(self) -> int:
        """The mask token's id, or an error that asks for one."""
        if self.mask_token_id is None:
            raise TargetError(
                f"{self.name}: nothing names a mask token (dflash.json, config.json's dflash_config, the tokenizer's mask_token). "
                f"Set mask_token to an id below {self.vocab_size} that never occurs in the data, such as a reserved token."
            )
        return self.mask_token_id


def resolve_target(name: str | Path) -> Path:
    """The folder of a target: ``sample``, ``smollm2``, a folder, or a Hugging Face name that is already in the local cache."""
    if str(name) == "sample":
        return _with_config(asset("sample_target"), "the package was installed without its assets; install it again")
    if str(name) == "smollm2":
        return _with_config(cache_dir() / "smollm2", "make it with `make smollm2`")
    folder = user_path(name)
    if exists(folder):
        return _with_config(folder, "name a folder saved by save_pretrained")
    if str(name).count("/") == 1 and not str(name).startswith((".", "~", "/")):
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            return Path(snapshot_download(str(name), local_files_only=True))
        except (LocalEntryNotFoundError, HfHubHTTPError, ValueError):
            raise TargetError(
                f"target {str(name)!r} is neither a folder here ({folder}) nor in the local Hugging Face cache. "
                f"Download it first (`hf download {name}`), or use 'sample' or 'smollm2'.{did_you_mean(name)}"
            ) from None
    raise TargetError(
        f"target {str(name)!r}: there is no folder {folder}. Known names are 'sample' and 'smollm2'; use one, or a folder."
        f"{did_you_mean(name, ('sample', 'smollm2'))}"
    )


def read_target_info(name: str | Path, mask_token_id: int | None = None) -> TargetInfo:
    """Read a target's facts. ``mask_token_id`` overrides what its files say.

    Raises TargetError for a folder that is no causal language model, or a mask token that cannot serve as one.
    """
    path = resolve_target(name)
    whole = _read_json(path / "config.json")
    text = {**whole, **whole["text_config"]} if isinstance(whole.get("text_config"), dict) else whole
    generation = _read_json(path / "generation_config.json", missing_ok=True)
    tokenizer = _read_tokenizer(path)

    def need(*keys: str) -> int:
        for key in keys:
            if isinstance(text.get(key), int) and text[key] > 0:
                return text[key]
        given = f", only {text[keys[0]]!r}" if keys[0] in text else ""
        raise TargetError(
            f"{path / 'config.json'} has no {keys[0]}{given}: it does not describe a causal language model. Name the folder of one."
        )

    hidden_size = need("hidden_size", "n_embd", "d_model")
    num_layers = need("num_hidden_layers", "n_layer", "num_layers")
    num_heads = need("num_attention_heads", "n_head")
    vocab_size = need("vocab_size")
    eos = generation.get("eos_token_id", text.get("eos_token_id"))
    eos_token_ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    pad = generation.get("pad_token_id", text.get("pad_token_id"))
    info = TargetInfo(
        name=str(name),
        path=path,
        model_type=str(text.get("model_type")),
        hidden_size=hidden_size,
        intermediate_size=_first_int(text, ("intermediate_size", "ffn_dim", "n_inner"), 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_first_int(text, ("num_key_value_heads",), num_heads),
        head_dim=_first_int(text, ("head_dim",), hidden_size // num_heads),
        vocab_size=vocab_size,
        valid_vocab=min(vocab_size, tokenizer.size or vocab_size),
        max_positions=_first_int(text, ("max_position_embeddings", "n_positions"), 2048),
        rope_theta=_rope_theta(text),
        rms_norm_eps=float(text.get("rms_norm_eps") or 1e-6),
        tied_head=_tied_head(path, text),
        layer_types=_layer_types(text, num_layers),
        mask_token_id=_mask_token(mask_token_id, path, text, tokenizer),
        bos_token_id=text.get("bos_token_id"),
        eos_token_ids=eos_token_ids,
        pad_token_id=pad if type(pad) is int and 0 <= pad < vocab_size else None,
        tokenizer_fingerprint=tokenizer.fingerprint,
        embed_scale=_embed_scale(text, hidden_size),
        logit_scale=_logit_scale(text),
        logit_softcap=text.get("final_logit_softcapping"),
    )
    if info.mask_token_id is not None:
        _check_mask_token(info)
    return info


def default_layer_ids(num_layers: int, n: int) -> tuple[int, ...]:
    """The published spread of ``n`` captured layers: the middle one, or evenly from layer 1 to layer ``num_layers - 3``.

    64 layers and 5 give 1, 16, 31, 46, 61. Shallow targets make the rule repeat itself (6 and 5 give 1, 2, 2, 2, 3), which would feed
    one layer several times: that is an error that asks for explicit ids.
    """
    if n < 1:
        raise TargetError(f"number of captured layers is {n}; it must be at least 1.")
    if n == 1:
        ids = [num_layers // 2]
    else:
        ids = [round(1 + i * (num_layers - 4) / (n - 1)) for i in range(n)]
    try:
        return check_layer_ids(ids, num_layers)
    except TargetError:
        raise TargetError(
            f"the usual choice of {n} of {num_layers} layers would be {_listed(ids)}, which is not {n} different layers in order. "
            f"Set target_layers yourself, for example {_spread(num_layers, n)}."
        ) from None


def check_layer_ids(ids: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """``ids`` as a tuple if they are different layers of the target in increasing order.

    Id i means the output of decoder layer i, counted from 0: ``hidden_states[i + 1]`` of transformers. Servers capture in layer order
    whatever order the ids have, so an unsorted list would be served with its features exchanged.
    """
    ids = list(ids)
    if not ids:
        raise TargetError("target_layers is empty; name at least one layer.")
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise TargetError(f"target_layers {_listed(ids)} must be integers.")
    if bad := [i for i in ids if not 0 <= i < num_layers]:
        raise TargetError(f"target_layers {_listed(ids)}: {_listed(bad)} out of range; choose from layers 0 to {num_layers - 1}.")
    if any(a >= b for a, b in itertools.pairwise(ids)):
        raise TargetError(f"target_layers {_listed(ids)} must increase and name each layer once.")
    return tuple(ids)


def _spread(num_layers: int, n: int) -> list[int] | str:
    if n > num_layers:
        return f"at most {num_layers} of them"
    return [(2 * i + 1) * num_layers // (2 * n) for i in range(n)]


def _listed(ids: list[int]) -> str:
    """At most eight of ``ids``: a mistyped number of layers makes thousands."""
    return str(ids) if len(ids) <= 8 else f"{str(ids[:7])[:-1]}, ... {len(ids):,} in all]"


def _with_config(folder: Path, advice: str) -> Path:
    if not (folder / "config.json").is_file():
        raise TargetError(f"no target in {folder}: it holds no config.json; {advice}.")
    return folder


def _read_json(path: Path, missing_ok: bool = False) -> dict:
    if missing_ok and not path.is_file():
        return {}
    try:
        content = parsed(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise TargetError(f"{path} holds a {type(content).__name__}, not an object. Copy it again from where it was published.")
    return content


def _first_int(text: dict, keys: tuple[str, ...], default: int) -> int:
    return next((text[key] for key in keys if isinstance(text.get(key), int)), default)


def _rope_theta(text: dict) -> float:
    """transformers 5 writes only ``rope_parameters``, older files only ``rope_theta``; Gemma nests one entry a layer type."""
    rope = text.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope
    return float(rope.get("rope_theta") or text.get("rope_theta") or 10_000.0)


def _layer_types(text: dict, num_layers: int) -> tuple[str, ...]:
    if text.get("layer_types"):
        return tuple(text["layer_types"])
    if "linear_num_value_heads" in text:
        every = text.get("full_attention_interval") or 4
        return tuple("full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers))
    if any(key.startswith(("mamba_", "ssm_")) or key == "conv_L_cache" for key in text):
        return ("recurrent",) * num_layers
    # Mistral, Phi-3, Starcoder2 and older files of others name a window and no layers. It holds for some layer at least.
    if text.get("sliding_window") and text.get("use_sliding_window", True):
        return ("sliding_attention",) * num_layers
    return ("chunked_attention" if text.get("attention_chunk_size") else "full_attention",) * num_layers


def _embed_scale(text: dict, hidden_size: int) -> float:
    if str(text.get("model_type")).startswith("gemma"):
        return math.sqrt(hidden_size)
    return float(text.get("embedding_multiplier") or 1.0)


def _logit_scale(text: dict) -> float:
    """Granite divides by ``logits_scaling``, Cohere multiplies by ``logit_scale``, Falcon-H1 by ``lm_head_multiplier``."""
    return float(text.get("logit_scale") or text.get("lm_head_multiplier") or 1.0) / float(text.get("logits_scaling") or 1.0)


def _tied_head(path: Path, text: dict) -> bool:
    """As the config says; where it is silent, a checkpoint without an output matrix is tied."""
    if text.get("tie_word_embeddings") is not None:
        return bool(text["tie_word_embeddings"])
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = _read_json(index).get("weight_map", {})
    elif (path / "model.safetensors").is_file():
        try:
            with safe_open(path / "model.safetensors", framework="np") as file:
                names = file.keys()
        except SafetensorError as error:
            raise TargetError(f"{path / 'model.safetensors'} is damaged, SafetensorError: {error}. Copy it again") from None
    else:
        return False
    return not any(name.endswith("lm_head.weight") for name in names)


@dataclass(frozen=True)
class _Tokenizer:
    size: int | None = None
    fingerprint: str | None = None
    mask_token_id: int | None = None


def _read_tokenizer(path: Path) -> _Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        return _Tokenizer()
    return _parse_tokenizer(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _parse_tokenizer(file: Path, changed_ns: int) -> _Tokenizer:
    content = _read_json(file)
    vocab = (content.get("model") or {}).get("vocab") or {}
    ids = dict(vocab) if isinstance(vocab, dict) else {entry[0]: i for i, entry in enumerate(vocab)}
    ids |= {token["content"]: token["id"] for token in content.get("added_tokens") or []}
    mask = _read_json(file.with_name("tokenizer_config.json"), missing_ok=True).get("mask_token")
    mask = mask.get("content") if isinstance(mask, dict) else mask
    return _Tokenizer(
        size=max(ids.values()) + 1 if ids else None,
        fingerprint=vocabulary_fingerprint(ids),
        mask_token_id=ids.get(mask) if mask else None,
    )


def _mask_token(explicit: int | None, path: Path, text: dict, tokenizer: _Tokenizer) -> int | None:
    if explicit is not None:
        return explicit
    for source in (_read_json(path / "dflash.json", missing_ok=True), text.get("dflash_config") or {}):
        if source.get("mask_token_id") is not None:
            return source["mask_token_id"]
    return tokenizer.mask_token_id


def _check_mask_token(info: TargetInfo) -> None:
    mask = info.mask_token_id
    advice = "Set mask_token to an id that never occurs in the data."
    if isinstance(mask, bool) or not isinstance(mask, int):
        raise TargetError(f"{info.name}: mask_token_id is {mask!r}, not an integer. {advice}")
    if not 0 <= mask < info.vocab_size:
        raise TargetError(f"{info.name}: mask_token_id {mask} is outside the embedding of {info.vocab_size} rows. {advice}")
    roles = {"padding": (info.pad_token_id,), "end-of-text": info.eos_token_ids, "begin-of-text": (info.bos_token_id,)}
    for role, ids in roles.items():
        if mask in ids:
            raise TargetError(f"{info.name}: mask_token_id {mask} is also the {role} token. {advice}")
