"""How good the drafter is on held-out data: loss and slot accuracy on texts, tau by really decoding.

One function serves the untrained drafter, the evaluations during training and the last one. It changes neither training mode nor any
random stream: anchors come from a hash, decoding is greedy. Which rows and prompts are used depends on the dataset and the seed alone.

A tau over few prompts is rough, so it comes with an interval: a bootstrap over prompts of tokens / passes (2,000 draws, 95 %, 5 ms for 16
prompts). And a target that repeats itself is easy to draft for: the share of its text that it had written before comes with it.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.model.decode import Generation, evaluating, measure_tau
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import FrozenTarget, TargetHead
from dflash_nb.pipeline.step import LossSettings, accuracy, batch_loss
from dflash_nb.progress import announced

LONGEST_PROMPT = 512
DRAWS = 2000
PHRASE = 4  # tokens


def evaluate(
    target: FrozenTarget,
    drafter: DFlashDrafter,
    head: TargetHead,
    heldout: TokenDataset,
    settings: LossSettings,
    rows: int,
    prompts: int,
    new_tokens: int,
    boundaries: tuple[int, ...],
    token_budget: int,
) -> dict[str, Any]:
    """The fields of an ``eval`` event: loss, acceptance, slot_accuracy, tau and its own, by_bucket, seconds. None: nothing to measure.

    ``acceptance`` is 1 + the mean true prefix of a block against the text, teacher-forced; ``tau`` is tokens a target pass, the bonus
    included, over greedy decoding of ``tau_prompts`` prompts (``prompts``, or as many as there are) in ``tau_passes`` passes; ``tau_low``
    and ``tau_high`` are its interval, ``tau_repeated`` the share of repeated text.
    """
    started = time.perf_counter()
    order = heldout_order(heldout, settings.seed)
    result = _on_texts(target, drafter, head, heldout, order[:rows], settings, boundaries, token_budget)
    tau, measured = None, {}
    if texts := heldout.prompts(order, prompts, min(LONGEST_PROMPT, target.info.max_positions - new_tokens)):
        tau = measure_tau(target, drafter, texts, new_tokens, head=head)
    if tau and tau.passes:
        low, high = tau_interval(tau.texts) if len(texts) > 1 else (None, None)
        measured = {"tau_low": low, "tau_high": high, "tau_repeated": repeated(tau.texts)}
    return {
        **result,
        "tau": tau.tau if tau and tau.passes else None,
        "tau_passes": tau.passes if tau else 0,
        "tau_prompts": len(texts),
        **measured,
        "seconds": time.perf_counter() - started,
    }


def tau_interval(texts: Sequence[Generation]) -> tuple[float, float]:
    """Where tau over other draws of prompts lies with 95 %: a bootstrap over prompts."""
    tokens, passes = (np.array([count(text.accepted_per_pass) for text in texts]) for count in (sum, len))
    drawn = np.random.default_rng(0).integers(0, len(texts), (DRAWS, len(texts)))
    low, high = np.quantile(tokens[drawn].sum(1) / np.maximum(passes[drawn].sum(1), 1), (0.025, 0.975))
    return float(low), float(high)


def repeated(texts: Sequence[Generation]) -> float:
    """Share of the decoded tokens that end a phrase of four tokens which stood in the same text before; 0 for texts too short to tell."""
    again = total = 0
    for text in texts:
        phrases = [tuple(text.tokens[i : i + PHRASE]) for i in range(len(text.tokens) - PHRASE + 1)]
        again, total = again + len(phrases) - len(set(phrases)), total + len(phrases)
    return again / total if total else 0.0


def heldout_order(heldout: TokenDataset, seed: int) -> np.ndarray:
    """The rows with something supervised, in the order in which evaluations take them."""
    return np.random.default_rng([seed, 0]).permutation(np.flatnonzero(heldout.n_supervised > 0))


def _on_texts(
    target: FrozenTarget,
    drafter: DFlashDrafter,
    head: TargetHead,
    heldout: TokenDataset,
    rows: np.ndarray,
    settings: LossSettings,
    boundaries: tuple[int, ...],
    token_budget: int,
) -> dict[str, Any]:
    """Loss, acceptance and slot accuracy over ``rows``, and the first two by bucket."""
    longest = min(token_budget, target.info.max_positions)
    buckets = np.searchsorted(boundaries, np.minimum(heldout.lengths[rows], boundaries[-1] - 1), side="right") - 1
    groups = [
        (int(bucket), some)
        for bucket in np.unique(buckets)
        for some in _within_budget(rows[buckets == bucket], heldout.lengths, longest, token_budget)
    ]
    sums = {}
    with evaluating(drafter), torch.no_grad():
        for bucket, some in announced(groups, "held-out batches"):
            padded = min(int(heldout.lengths[some].max()), longest)
            batch = heldout.collate(some, padded, pad_id=target.info.pad_token_id or 0, max_length=longest, bucket=bucket)
            loss = batch_loss(batch, target.features(batch).to(settings.device), drafter, head, settings)
            sums.setdefault(bucket, []).append(loss)
    losses = [loss for group in sums.values() for loss in group]
    slots_K, correct_K = sum(loss.slots_K for loss in losses), sum(loss.correct_K for loss in losses)
    by_bucket = {str(bucket): _means(group) for bucket, group in sums.items()}
    return {**_means(losses), "slot_accuracy": accuracy(correct_K, slots_K) if losses else [], "by_bucket": by_bucket}


def _means(losses: list) -> dict[str, float | None]:
    weight, blocks = sum(loss.weight_sum for loss in losses), sum(loss.blocks for loss in losses)
    return {
        "loss": sum(loss.loss_sum.item() for loss in losses) / weight if weight else None,
        "acceptance": 1 + sum(loss.accepted for loss in losses) / blocks if blocks else None,
    }


def _within_budget(rows: np.ndarray, lengths: np.ndarray, longest: int, token_budget: int) -> list[np.ndarray]:
    """``rows`` from short to long in groups whose padded tokens fit the budget."""
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    groups, first = [], 0
    for last in range(1, len(rows) + 1):
        if last == len(rows) or (last + 1 - first) * min(int(lengths[rows[last]]), longest) > token_budget:
            groups.append(rows[first:last])
            first = last
    return groups
