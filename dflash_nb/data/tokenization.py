"""A tokenizer, and text made into tokens with a loss mask.

Only fast tokenizers are taken: they alone say which characters a token stands for. Padding and truncation that a tokenizer was saved
with are switched off, so it does not matter on which side it pads. 200,000 tokens a second on 2 busy cores, template included.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dflash_nb.data.chats import Text
from dflash_nb.data.source import DatasetError
from dflash_nb.data.vocabulary import vocabulary_fingerprint
from dflash_nb.home import asset, cache_dir, did_you_mean, exists, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(name: str) -> "PreTrainedTokenizerFast":
    """The fast tokenizer of ``sample``, ``smollm2``, a folder, or a Hugging Face name in the local cache.

    Raises:
        FileNotFoundError: it is not there.
        DatasetError: its files are broken, or it is a slow tokenizer, which cannot say where in the text a token stands.
    """
    from transformers import AutoTokenizer

    folder = {"sample": asset("sample_target"), "smollm2": cache_dir() / "smollm2"}.get(name, user_path(name))
    here = exists(folder) and folder.is_dir()
    if name == "smollm2" and not here:
        raise FileNotFoundError(f"tokenizer 'smollm2': {folder} does not exist. Fetch it once with: make smollm2")
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder if here else name, local_files_only=True)
    except Exception as error:  # tokenizers raises the bare class for a file that it cannot parse
        if here and any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise DatasetError(
                f"tokenizer {name!r}: {folder} cannot be loaded ({reason[0]}). Copy or download the folder again."
            ) from error
        raise FileNotFoundError(
            f"tokenizer {name!r}: neither {folder} nor the local Hugging Face cache holds one. "
            f"Name a folder with tokenizer.json, or download it first: hf download {name}.{did_you_mean(name, ('sample', 'smollm2'))}"
        ) from error
    if not tokenizer.is_fast:
        raise DatasetError(f"tokenizer {name!r} has no tokenizer.json; a fast tokenizer is needed to find the supervised tokens.")
    return tokenizer


def tokenize(tokenizer: "PreTrainedTokenizerFast", texts: Sequence[Text]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids int32 and loss mask uint8 of each text; a token is supervised if it begins in a supervised span.

    A chat's template has written its special tokens; other text gets the tokenizer's begin token, if it uses one, and its end token.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    begin = [i for i in backend.encode("", add_special_tokens=True).ids if i == tokenizer.bos_token_id]
    end = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
    for text, encoding in zip(texts, backend.encode_batch([text.text for text in texts], add_special_tokens=False), strict=True):
        ids = np.array(encoding.ids, np.int32)
        begins = np.array(encoding.offsets, np.int64).reshape(-1, 2)[:, 0]
        edges = np.array(text.spans, np.int64).ravel()
        mask = (np.searchsorted(edges, begins, side="right") % 2).astype(np.uint8)
        if not text.is_chat:
            ids = np.concatenate([begin, ids, end]).astype(np.int32)
            mask = np.concatenate([np.zeros(len(begin)), mask, np.ones(len(end))]).astype(np.uint8)
        yield ids, mask


def chat_renderer(tokenizer: "PreTrainedTokenizerFast") -> Callable[[list[dict], list | None], str] | None:
    """The tokenizer's chat template as a function of messages and tools; None if it has none."""
    if not tokenizer.chat_template:
        return None
    return lambda messages, tools: tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)


def special_tokens(tokenizer: "PreTrainedTokenizerFast") -> list[str]:
    """Every special token as text, among them the one that ends a turn."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return sorted({*tokenizer.all_special_tokens, *added})


def longest_input(tokenizer: "PreTrainedTokenizerFast") -> int | None:
    """The longest input in tokens that the tokenizer names for its model; transformers writes 1e30 where it names none."""
    return tokenizer.model_max_length if tokenizer.model_max_length < 10**9 else None


def describe_tokenizer(name: str, tokenizer: "PreTrainedTokenizerFast") -> dict:
    """What ``dataset.json`` says of the tokenizer that made the ids."""
    ids = tokenizer.get_vocab()
    special = {kind: getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    return {"name": name, "fingerprint": vocabulary_fingerprint(ids), "vocab_size": max(ids.values()) + 1, "special_ids": special}
