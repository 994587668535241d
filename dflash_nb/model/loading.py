"""A target's weights as transformers reads them, refused where a drafter would learn from something other than the published model.

transformers fills tensors that a checkpoint lacks with random numbers and says so in a table on stderr; a drafter would be trained against
them. Here that is an error, and so are shapes that do not fit the config. Tensors that the model does not use are only mentioned: vision
towers and heads for multi-token prediction are normal. After loading, 8 tokens are run through all layers: weights that are not finite,
or all zero, give the same best token everywhere, which decoding would count as perfect acceptance. 7 ms for the sample. Loading that takes
long says how far it is, in the lines of ``progress``.

Shapes: N probe tokens, D captured features, H hidden size, V vocabulary rows.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from dflash_nb.model.packing import PackingError
from dflash_nb.model.target_info import TargetError, TargetInfo
from dflash_nb.progress import announced

PROBE_TOKENS = 8
WEIGHTS_BAR = "Loading weights"  # what transformers writes on its bar over the tensors of a checkpoint
NAMED = 3  # tensors that a sentence names before it counts the rest
COPY_AGAIN = "Copy its files again from where the model is published"


def load_model(info: TargetInfo, dtype: torch.dtype | str, attention: str | None = None) -> nn.Module:
    """The causal language model in ``info.path``, every weight of which comes from its files; on the CPU.

    Raises TargetError, with the folder, for files that are damaged, lack tensors or do not fit the config, and PackingError for whatever
    keeps it from loading with ``attention``. Prints a line for tensors that are not used.
    """
    where = f"target {info.name} in {info.path}"
    size = sum(file.stat().st_size for file in info.path.glob("*.safetensors"))
    with silent(f"loading target {info.name}, {size / 2**30:.1f} GiB, tensors"):
        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                info.path,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation=attention,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
            )
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # what damaged files raise differs by library and by release
            if attention:  # most likely the class does not know it; if the files are damaged, loading without it says so
                raise PackingError(f"{where} cannot be loaded with attention document by document ({_short(error)})") from error
            raise TargetError(
                f"{where} cannot be loaded as a causal language model: {type(error).__name__}: {_short(error)}. "
                f"{COPY_AGAIN}, or install the version of transformers that its config.json names"
            ) from error
    if missing := sorted(found["missing_keys"]):
        raise TargetError(f"{where}: its files lack {_named(missing)}, which would be random numbers. {COPY_AGAIN}")
    if mismatched := sorted(found["mismatched_keys"]):
        texts = [f"{name} {list(there)}, not {list(wanted)}" for name, there, wanted in mismatched]
        raise TargetError(f"{where}: {_named(texts)} as its config.json says. {COPY_AGAIN}, config.json included")
    if found["error_msgs"]:
        raise TargetError(f"{where}: {_named(found['error_msgs'])}. {COPY_AGAIN}")
    if unexpected := sorted(found["unexpected_keys"]):
        print(f"note: {where} holds {_named(unexpected)}, which its config.json does not use", flush=True)
    return model


@contextmanager
def silent(what: str = "loading weights, tensors") -> Iterator[None]:
    """Loading draws a bar on stderr, which a saved notebook keeps for ever, and tables of what is said here in a sentence.

    In the place of the bar come plain lines that begin with ``what``, where it takes long.
    """

    def in_place_of_a_bar(bar: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return announced(*args, what) if options.get("desc") == WEIGHTS_BAR else bar(*args, **options)

    before = transformers_logging.set_tqdm_hook(in_place_of_a_bar)
    bars, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def check_states(
    model: nn.Module,
    info: TargetInfo,
    layer_ids: Sequence[int],
    run: Callable[[Tensor], tuple[Tensor, Tensor]],
    logits: Callable[[Tensor], Tensor],
) -> None:
    """Run a few tokens and raise TargetError if a captured layer or the logits are not finite, or all logits are equal.

    ``run`` takes ids [N] to captured features [N, D] and final states [N, H]; ``logits`` takes those to [N, V].
    """
    ids_N = torch.randint(info.valid_vocab, (PROBE_TOKENS,), generator=torch.Generator().manual_seed(0))
    features_ND, hidden_NH = run(ids_N)
    logits_NV = logits(hidden_NH)
    parts = {f"layer {i}": part for i, part in zip(layer_ids, features_ND.chunk(len(layer_ids), -1), strict=True)} | {"logits": logits_NV}
    dtype = str(features_ND.dtype).removeprefix("torch.")
    for name, states in parts.items():
        if not states.isfinite().all():
            bad = [each for each, weight in model.named_parameters() if not weight.isfinite().all()]
            reason = f"{_named(bad)} hold values that are not finite" if bad else f"its weights are finite, so {dtype} is too narrow"
            advice = COPY_AGAIN if bad else "Set dtype to float32"
            raise TargetError(f"target {info.name} in {info.path}: {name} of real tokens are not finite; {reason}. {advice}")
    if logits_are_constant(logits_NV):
        raise TargetError(
            f"target {info.name} in {info.path}: every token gets the same logit {float(logits_NV[0, 0]):g}, "
            f"so there is nothing to learn from it; its weights are empty. {COPY_AGAIN}"
        )


def logits_are_constant(logits_TV: Tensor) -> bool:
    """Whether no row prefers any token."""
    low_T, high_T = logits_TV.aminmax(dim=-1)
    return logits_TV.shape[-1] > 1 and bool((low_T == high_T).all())


def _named(names: Iterable[str]) -> str:
    names = list(names)
    rest = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + rest


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:200] + "..."
