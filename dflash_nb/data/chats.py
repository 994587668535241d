"""One record of a user's data as text, with the spans that the model itself would have written.

Supervised is what the assistant said, and the token that ends its turn. Stock chat templates do not mark it, so it is found by
rendering the chat a second time with other words in the assistant's mouth: what differs is what it said. Only whole chats are ever
rendered, since some templates refuse or rewrite partial ones, and an empty think block that a template adds stays unsupervised.
Costs two renderings a chat (0.1 ms), and one more a turn where a template rewrites earlier turns.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OTHER_NAMES = {
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "function_call"), "assistant"),
    **dict.fromkeys(("observation", "tool_response"), "tool"),
    "human": "user",
}
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields that some templates write in front of the content
PAIRS = (("question", "answer"), ("prompt", "completion"), ("prompt", "response"))


class ChatError(ValueError):
    """A record that cannot be rendered; the message says why, the caller adds where."""


@dataclass(frozen=True)
class Text:
    """Text of one sample; ``spans`` are the supervised ranges of its characters. ``is_chat``: the template brought the special tokens."""

    text: str
    spans: tuple[tuple[int, int], ...]
    is_chat: bool


def render_record(record: dict, render: Callable[..., str] | None, special_tokens: Sequence[str]) -> Text:
    """Turn a record into text.

    Args:
        record: ``messages`` or ``conversations`` (role and content, or from and value), one of ``PAIRS``, or ``text``.
        render: the tokenizer's chat template as a function of messages and tools; None if it has none. Pairs are then joined as they are.
        special_tokens: the tokenizer's special tokens, among them the one that ends a turn.

    Raises:
        ChatError: no known field, a malformed message, or a template that refuses the chat.
    """
    for name in ("messages", "conversations"):
        if record.get(name):
            return _render_chat(_turns(record[name], "user"), record.get("tools"), render, special_tokens)
    for prompt, answer in PAIRS:
        if prompt in record and answer in record:
            if render is None and isinstance(record[prompt], str) and isinstance(record[answer], str):
                text = record[prompt] + record[answer]
                return Text(text, ((len(record[prompt]), len(text)),), is_chat=False)
            turns = [*_turns(record[prompt], "user"), *_turns(record[answer], "assistant")]
            return _render_chat(turns, record.get("tools"), render, special_tokens)
    if isinstance(record.get("text"), str) and record["text"]:
        return Text(record["text"], ((0, len(record["text"])),), is_chat=False)
    expected = ", ".join(["messages", "conversations", *("+".join(pair) for pair in PAIRS), "text"])
    raise ChatError(f"found the fields {', '.join(record) or 'none'}; expected one of {expected}")


def _turns(value: object, role: str) -> list[dict]:
    """Messages with ``role`` and ``content``; a plain string is one message of ``role``."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ChatError(f"a chat must be a list of messages, not {type(value).__name__}")
    turns = []
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role", message.get("from")), str):
            raise ChatError(f"message {len(turns) + 1} has no role")
        given = message.get("role", message.get("from"))
        name = given.strip().lower()
        role = OTHER_NAMES.get(name, name)
        if role not in KNOWN_ROLES:
            known = ", ".join([*KNOWN_ROLES, *OTHER_NAMES])
            raise ChatError(f"message {len(turns) + 1} has the role {given!r}, needed: one of {known}")
        others = {key: value for key, value in message.items() if key not in ("role", "from", "content", "value")}
        content = _content(message.get("content", message.get("value")), len(turns) + 1, "tool_calls" in message)
        turns.append({"role": role, "content": content, **others})
    return turns


def _content(content: object, number: int, may_be_missing: bool) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
        return "".join(part["text"] for part in content)
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, str):
        raise ChatError(f"message {number} has no text content")
    return content


def _render_chat(turns: list[dict], tools: object, render: Callable[..., str] | None, special_tokens: Sequence[str]) -> Text:
    if render is None:
        raise ChatError("the tokenizer has no chat template; take one that has, or give the data as 'text'")

    def rendered(messages: list[dict]) -> str:
        try:
            return render(messages, tools)
        except Exception as error:
            raise ChatError(f"the chat template refuses it: {str(error) or type(error).__name__}") from error

    special = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or "(?!)")
    text = rendered(turns)
    said = [i for i, turn in enumerate(turns) if turn["role"] == "assistant"]
    words = _other_words(said, text)
    spans = _where_scaffold_agrees(text, rendered(_with_words(turns, words)), turns, words)
    if spans is None:
        spans = [_where_different(text, rendered(_with_words(turns, {i: words[i]})), turns[i], words[i], special) for i in said]
    spans = [_with_end(text, span, turns[i], special) for i, span in zip(said, spans, strict=True) if span]
    return Text(text, tuple(spans), is_chat=True)


def _other_words(said: list[int], text: str) -> dict[int, str]:
    """For each turn a word that no template changes and that the text does not hold."""
    fence = next(f"xq{n}" for n in itertools.count() if f"xq{n}" not in text)
    return {turn: f"{fence}turn{turn}{fence}" for turn in said}


def _with_words(turns: list[dict], words: dict[int, str]) -> list[dict]:
    """The chat with these words in place of what the assistant thought and said."""
    return [
        {**{name: value for name, value in turn.items() if name not in REASONING}, "content": words[i]} if i in words else turn
        for i, turn in enumerate(turns)
    ]


def _where_scaffold_agrees(text: str, changed: str, turns: list[dict], words: dict[int, str]) -> list[tuple[int, int]] | None:
    """Spans of what was said, if everything that stands around the other words in ``changed`` stands in ``text`` too; else None."""
    scaffold = re.split("|".join(words.values()) or "(?!)", changed)
    if len(scaffold) != len(words) + 1 or not text.startswith(scaffold[0]):
        return None
    spans, at = [], len(scaffold[0])
    for turn, after in zip(words, scaffold[1:], strict=True):
        content = turns[turn]["content"]
        said = next((c for c in (content, content.strip()) if text.startswith(c + after, at)), None)
        if said is None:
            return None
        spans.append((at, at + len(said)))
        at += len(said) + len(after)
    return spans if at == len(text) else None


def _where_different(text: str, changed: str, turn: dict, word: str, special: re.Pattern) -> tuple[int, int] | None:
    """The span of ``text`` that became ``word`` in ``changed``; None if the template leaves this turn out."""
    before, found, after = changed.partition(word)
    if not found:
        return None
    start = _common_prefix(text, before)
    end = len(text) - _common_prefix(text[start:][::-1], after[::-1])
    content = turn["content"].strip()
    verbatim = text[:end].endswith(content) and not any(turn.get(name) for name in REASONING)
    if word in after or (not verbatim and special.search(text, start, end)):
        raise ChatError("the chat template does not write an assistant's turn in one piece")
    return (end - len(content) if verbatim else start), end


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _with_end(text: str, span: tuple[int, int], turn: dict, special: re.Pattern) -> tuple[int, int]:
    """The span with the token that ends the turn; calls of tools stand between words and end, and are the assistant's too."""
    start, end = span
    found = special.search(text, end)
    if found and (turn.get("tool_calls") or not text[end : found.start()].strip()):
        return start, found.end()
    return span
