"""Draft-and-verify decoding, lossless, and the acceptance it reaches.

Each target pass checks a whole drafted block and keeps its accepted prefix plus one token of the target's own, the bonus; *tau* is
tokens per such pass, the bonus included. Greedy output equals plain greedy decoding token for token; sampled output follows the
target's distribution by rejection sampling (Leviathan et al. 2023, arXiv 2211.17192).

A rejected token must also leave the target's cache. Keys and values of attention layers are cut. A recurrent state cannot be cut, and
the cache's own `crop` leaves it as it is (transformers 5.24; dflash 0.1.0 relies on it there and loses the greedy text). So such a
target runs each pass on a copy of its cache, from a state that lags behind by the accepted tokens of the last passes, which are run
again together with the block. On an 8-layer hybrid of width 192 (one core) a pass over 8 tokens takes 7.0 ms and over 24 tokens 8.6 ms,
so this costs a fifth, where a second pass over the accepted tokens would double the time.

Shapes: T tokens of a pass, D captured features, H hidden size, V vocabulary rows, B block size.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.loading import logits_are_constant
from dflash_nb.model.target import FrozenTarget, TargetHead
from dflash_nb.progress import announced

REPEAT_LIMIT = 32  # accepted tokens that a recurrent cache may lag behind; with a block of 16 they stay within one chunk of 64


@dataclass(frozen=True)
class Generation:
    """New tokens after the prompt. The first comes from reading the prompt; each verification pass then adds ``accepted_per_pass[i]``,
    fewer than it could where a stop token or the limit ends the text."""

    tokens: list[int]
    accepted_per_pass: list[int]

    @property
    def tau(self) -> float:
        """Tokens per verification pass, the bonus included; NaN if there was no pass."""
        return sum(self.accepted_per_pass) / len(self.accepted_per_pass) if self.accepted_per_pass else float("nan")


@dataclass(frozen=True)
class TauResult:
    """Acceptance over several prompts: all tokens of verification passes over all passes; ``texts`` is what was decoded."""

    tau: float
    passes: int
    tokens: int
    per_prompt: tuple[float, ...]
    seconds: float
    texts: tuple[Generation, ...] = field(default=(), repr=False)


class TargetSession:
    """A target reading one text, with a cache from which rejected tokens can be taken back."""

    def __init__(self, target: FrozenTarget) -> None:
        self.target = target
        self.cache = DynamicCache(config=target.model.config)
        self.can_cut = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        self.pending: list[int] = []  # accepted, but not yet in the cache

    def read(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append ``tokens`` for good. Returns their features [T, D] and final hidden states [T, H]."""
        self._settle()
        return self._pass(self.cache, tokens)

    def try_block(self, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """As ``read``, but ``keep`` must follow, to say how many of the tokens stay."""
        self._tried = list(tokens)
        if self.can_cut:
            return self._pass(self.cache, tokens)
        if len(self.pending) > REPEAT_LIMIT:
            self._settle()
        features_TD, hidden_TH = self._pass(copy.deepcopy(self.cache), self.pending + self._tried)
        return features_TD[len(self.pending) :], hidden_TH[len(self.pending) :]

    def keep(self, count: int) -> None:
        """Keep the first ``count`` tokens of the block just tried."""
        if not self.can_cut:
            self.pending += self._tried[:count]
        elif rejected := len(self._tried) - count:
            self.cache.crop(-rejected)

    def _settle(self) -> None:
        if self.pending:
            self._pass(self.cache, self.pending)
            self.pending = []

    def _pass(self, cache: DynamicCache, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        target = self.target
        ids_1T = torch.tensor([list(tokens)], device=target.device)
        every_T = torch.arange(len(tokens), device=target.device)
        return target.capture(every_T, with_last_hidden=True, input_ids=ids_1T, use_cache=True, **{target.cache_argument: cache})


def generate(
    target: FrozenTarget,
    drafter: DFlashDrafter,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    head: TargetHead | None = None,
) -> Generation:
    """Decode with ``drafter`` proposing blocks and ``target`` verifying them.

    ``temperature`` 0 is greedy, else tokens are drawn with a generator of their own seeded by ``seed``. ``stop_ids`` defaults to the
    target's end tokens; a stop token ends the text and is part of it. Text also ends at the target's last position. ``head`` is the
    target's head on the drafter's device, if the caller has it there already. Raises ValueError for a prompt that is empty or too long.
    """
    limit, stop_ids = _limits(target, prompt_ids, max_new_tokens, stop_ids)
    device = next(drafter.parameters()).device
    dtype = next(drafter.parameters()).dtype
    head = target.head(device) if head is None else head
    choose = _Choice(target.head(), temperature, seed)
    block_size = drafter.config.block_size
    mask_ids = [drafter.config.mask_token_id] * (block_size - 1)
    session = TargetSession(target)
    with evaluating(drafter), torch.inference_mode():
        context = drafter.new_cache(device, dtype)
        features_TD, hidden_TH = session.read(prompt_ids)
        tokens = [choose.next(hidden_TH[-1])]
        accepted_per_pass: list[int] = []
        while len(tokens) < limit and tokens[-1] not in stop_ids:
            anchor = len(prompt_ids) + len(tokens) - 1
            drafter.extend(context, features_TD.to(device, dtype), context.length)
            block_embeds_BH = head.embed(torch.tensor([tokens[-1], *mask_ids], device=device)).to(dtype)
            drafted = drafter.draft(context, block_embeds_BH, anchor)[1 : limit - len(tokens)]
            proposal = choose.draft(drafted.to(head.dtype), head)
            features_TD, hidden_TH = session.try_block([tokens[-1], *proposal.ids])
            new = choose.verify(hidden_TH, proposal)
            stop = next((i for i, token in enumerate(new) if token in stop_ids), len(new) - 1)
            new = new[: stop + 1]
            session.keep(len(new))
            features_TD = features_TD[: len(new)]
            tokens += new
            accepted_per_pass.append(len(new))
    return Generation(tokens, accepted_per_pass)


def plain_generate(
    target: FrozenTarget,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
) -> list[int]:
    """Decode one token a pass, with the arguments of ``generate``. Returns the new tokens."""
    limit, stop_ids = _limits(target, prompt_ids, max_new_tokens, stop_ids)
    choose = _Choice(target.head(), temperature, seed)
    session = TargetSession(target)
    with torch.inference_mode():
        tokens = [choose.next(session.read(prompt_ids)[1][-1])]
        while len(tokens) < limit and tokens[-1] not in stop_ids:
            tokens.append(choose.next(session.read(tokens[-1:])[1][-1]))
    return tokens


def measure_tau(
    target: FrozenTarget,
    drafter: DFlashDrafter,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    stop_ids: Sequence[int] | None = None,
    head: TargetHead | None = None,
) -> TauResult:
    """Acceptance over ``prompts`` by decoding each of them. Neither training mode nor any global random state changes."""
    started = time.perf_counter()
    done = [
        generate(target, drafter, prompt, max_new_tokens, temperature, seed + i, stop_ids, head)
        for i, prompt in enumerate(announced(prompts, "decoding prompts"))
    ]
    passes = sum(len(one.accepted_per_pass) for one in done)
    tokens = sum(sum(one.accepted_per_pass) for one in done)
    return TauResult(
        tau=tokens / passes if passes else float("nan"),
        passes=passes,
        tokens=tokens,
        per_prompt=tuple(one.tau for one in done),
        seconds=time.perf_counter() - started,
        texts=tuple(done),
    )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; after it every submodule is in the mode it had."""
    modes = [(child, child.training) for child in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for child, training in modes:
            child.training = training


@dataclass(frozen=True)
class _Proposal:
    ids: list[int]
    probabilities_TV: Tensor | None  # what the ids were drawn from; None when greedy


class _Choice:
    """How a token is chosen: the best one, or drawn at a temperature. Ids from the vocabulary's padding are never chosen."""

    def __init__(self, head: TargetHead, temperature: float, seed: int) -> None:
        if temperature < 0:
            raise ValueError(f"temperature is {temperature}; it must be 0 (greedy) or positive.")
        self.head = head
        self.temperature = temperature
        self.generator = torch.Generator().manual_seed(seed)

    def judged(self, hidden_TH: Tensor) -> Tensor:
        """The target's logits [T, V]. The best of such as are not finite, or all equal, is a token like any other and would be accepted."""
        logits_TV = self.head.logits(hidden_TH)[..., : self.head.valid_vocab]
        if not logits_TV.isfinite().all() or logits_are_constant(logits_TV):
            raise FloatingPointError(
                f"target {self.head.info.name}: its logits are not finite or all equal, so no acceptance can be measured. "
                "Set dtype to float32, or copy its files again"
            )
        return logits_TV

    def probabilities(self, logits_TV: Tensor) -> Tensor:
        return torch.softmax(logits_TV.float().cpu() / self.temperature, dim=-1)

    def draw(self, probabilities_TV: Tensor) -> Tensor:
        return torch.multinomial(probabilities_TV, 1, generator=self.generator).squeeze(-1)

    def next(self, hidden_H: Tensor) -> int:
        logits_V = self.judged(hidden_H)
        return int(logits_V.argmax() if self.temperature == 0 else self.draw(self.probabilities(logits_V)))

    def draft(self, drafted_TH: Tensor, head: TargetHead) -> _Proposal:
        if self.temperature == 0 or len(drafted_TH) == 0:
            return _Proposal(head.argmax(drafted_TH).tolist(), None)
        probabilities_TV = self.probabilities(head.logits(drafted_TH)[..., : head.valid_vocab])
        return _Proposal(self.draw(probabilities_TV).tolist(), probabilities_TV)

    def verify(self, hidden_TH: Tensor, proposal: _Proposal) -> list[int]:
        """The accepted prefix of the proposal and the target's own next token; row i of ``hidden_TH`` judges proposed token i."""
        ids, logits_TV = proposal.ids, self.judged(hidden_TH)
        if self.temperature == 0:
            best = logits_TV.argmax(-1).tolist()
            count = next((i for i, token in enumerate(ids) if token != best[i]), len(ids))
            return [*ids[:count], best[count]]
        target_TV = self.probabilities(logits_TV)
        chance_T = torch.rand(len(ids), generator=self.generator)
        for i, token in enumerate(ids):
            if chance_T[i] * proposal.probabilities_TV[i, token] >= target_TV[i, token]:
                left_V = (target_TV[i] - proposal.probabilities_TV[i]).clamp_min(0)
                return [*ids[:i], int(self.draw(left_V if left_V.sum() > 0 else target_TV[i]))]
        return [*ids, int(self.draw(target_TV[-1]))]


def _limits(
    target: FrozenTarget, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int] | None
) -> tuple[int, frozenset[int]]:
    room = target.info.max_positions - len(prompt_ids)
    if not len(prompt_ids) or room < 1:
        raise ValueError(f"a prompt of {len(prompt_ids)} tokens; it must have 1 to {target.info.max_positions - 1}.")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    return min(max_new_tokens, room), frozenset(target.info.eos_token_ids if stop_ids is None else stop_ids)
