"""Hidden states against a whole vocabulary, tile by tile: loss, gradient and best token without ever holding their logits.

The head is frozen, so training needs three things of a row's logits: their log-sum-exp, the token embedding expected under
their softmax (which is the gradient), and the best token. Every tile of the vocabulary yields the three, and tiles merge by log-sum-exp, as
keys do in blockwise attention. Loss, gradient and metrics together cost two products with the head, as many as forward and backward
of the plain version; nothing is recomputed. One tile of logits is held: 8 MiB on a CPU, 256 MiB on an accelerator.

The softmax runs over all rows of the head, as in serving engines; the best token is sought among the tokenizer's ids only.

Shapes: n rows, u distinct teacher rows, V vocabulary, T tokens of a tile, E hidden size.
"""

import itertools
from dataclasses import dataclass

import torch

from dflash_nb.model.linear import linear
from dflash_nb.model.target import TargetHead

TILE_BYTES = {"cpu": 8 << 20}
TILE_BYTES_ELSEWHERE = 256 << 20


@dataclass(frozen=True)
class Scores:
    """Of each row, without graph: loss, the label's negative log-likelihood, whether the best token is the label, gradient of the loss.

    Without gradient the last is None, and half the work is saved.
    """

    loss_n: torch.Tensor
    nll_n: torch.Tensor
    hit_n: torch.Tensor
    grad_nE: torch.Tensor | None


@torch.no_grad()
def score_labels(hidden_nE: torch.Tensor, label_n: torch.Tensor, head: TargetHead, chunk: int, with_grad: bool) -> Scores:
    """Cross-entropy of rows with their labels, `chunk` rows at a time."""
    parts = [_score(hidden_nE[i : i + chunk], label_n[i : i + chunk], head, with_grad) for i in range(0, len(label_n), chunk)]
    return _join(parts)


@torch.no_grad()
def score_teacher(
    hidden_nE: torch.Tensor,
    label_n: torch.Tensor,
    head: TargetHead,
    chunk: int,
    with_grad: bool,
    teacher_NE: torch.Tensor,
    row_n: torch.Tensor,
) -> Scores:
    """KL(teacher || row) of rows whose teacher is `teacher_NE[row_n]`, `row_n` in increasing order.

    Rows that share a teacher stay in one chunk, so each teacher's logits are computed once. A chunk exceeds `chunk` by fewer rows
    than share a teacher.
    """
    distinct_u, of_n, count_u = row_n.unique_consecutive(return_inverse=True, return_counts=True)
    first_u = count_u.cumsum(0) - count_u
    opens_u = torch.diff(first_u // chunk, prepend=first_u.new_tensor([-1])) > 0
    edges = [*first_u[opens_u].tolist(), len(label_n)]
    parts = []
    for start, end in itertools.pairwise(edges):
        of_m = of_n[start:end] - of_n[start]
        teacher_uE = teacher_NE[distinct_u[of_n[start] : of_n[end - 1] + 1]]
        parts.append(_score(hidden_nE[start:end], label_n[start:end], head, with_grad, teacher_uE, of_m))
    return _join(parts)


def _join(parts: list[Scores]) -> Scores:
    grad_nE = None if parts[0].grad_nE is None else torch.cat([part.grad_nE for part in parts])
    return Scores(*(torch.cat([getattr(part, name) for part in parts]) for name in ("loss_n", "nll_n", "hit_n")), grad_nE)


def _score(hidden_nE, label_n, head: TargetHead, with_grad: bool, teacher_uE=None, of_n=None) -> Scores:
    weight_VE, cap, scale = head.weight_VH, head.logit_softcap, head.logit_scale
    vocabulary = weight_VE.shape[0]
    scaled_nE = hidden_nE.to(weight_VE.dtype) * scale
    rows = 1 << (len(label_n) - 1).bit_length()  # powers of two give few tile shapes, for each of which oneDNN keeps memory
    tile = max(1024, TILE_BYTES.get(hidden_nE.device.type, TILE_BYTES_ELSEWHERE) // (4 * rows))

    drafted, taught, label = _Softmax(), _Softmax(), _Label(label_n, head.valid_vocab)
    for start in range(0, vocabulary, tile):
        tile_TE = weight_VE[start : start + tile]
        logits_nT, slope_nT = _logits(scaled_nE, tile_TE, cap)
        label.see(logits_nT, start)
        prob_nT, lse_n = _softmax(logits_nT)
        if teacher_uE is not None:
            teacher_uT, _ = _logits(teacher_uE.to(weight_VE.dtype) * scale, tile_TE, cap)
            teacher_prob_uT, teacher_lse_u = _softmax(teacher_uT)
            teacher_prob_nT = teacher_prob_uT[of_n]
            gap_n = (teacher_prob_uT * teacher_uT).sum(1)[of_n] - (teacher_prob_nT * logits_nT).sum(1)
            means = [gap_n]
            if with_grad and slope_nT is None:
                means.append(_expected(teacher_prob_uT, None, tile_TE)[of_n])
            elif with_grad:
                means.append(_expected(teacher_prob_nT, slope_nT, tile_TE))
            taught.merge(teacher_lse_u[of_n], means)
        drafted.merge(lse_n, [_expected(prob_nT, slope_nT, tile_TE)] if with_grad else [])

    nll_n = drafted.lse_n - label.logit_n
    if teacher_uE is not None:
        loss_n = taught.means[0] - taught.lse_n + drafted.lse_n
    else:
        loss_n = nll_n
    if not with_grad:
        return Scores(loss_n, nll_n, label.is_best_n, None)
    if teacher_uE is not None:
        pull_nE = taught.means[1]
    else:
        pull_nE = weight_VE[label_n].float()
        if cap:
            pull_nE *= (1 - (label.logit_n / cap).square())[:, None]
    return Scores(loss_n, nll_n, label.is_best_n, (drafted.means[0] - pull_nE).mul_(scale))


class _Label:
    """Of each row's label: its logit, and whether it is the best of the tokenizer's ids (of equals the lowest id is, as for argmax)."""

    def __init__(self, label_n: torch.Tensor, valid_vocab: int):
        self.label_n, self.valid_vocab = label_n, valid_vocab
        self.top_n = torch.full(label_n.shape, -torch.inf, device=label_n.device)
        self.logit_n = self.top_n.clone()
        self.is_best_n = torch.zeros_like(label_n, dtype=torch.bool)

    def see(self, logits_nT: torch.Tensor, start: int) -> None:
        """Take the next tile. An argmax costs five times a maximum, so only rows whose label is a maximum get one."""
        at_n = (self.label_n - start).clamp(0, logits_nT.shape[1] - 1)
        here_n, logit_n = self.label_n == at_n + start, logits_nT.gather(1, at_n[:, None])[:, 0]
        self.logit_n = torch.where(here_n, logit_n, self.logit_n)
        if start >= self.valid_vocab:
            return
        logits_nT = logits_nT[:, : self.valid_vocab - start]
        top_n = logits_nT.amax(1)
        ties_n = here_n & (logit_n == top_n)
        is_best_n = torch.zeros_like(ties_n)
        is_best_n[ties_n] = logits_nT[ties_n].argmax(1) == at_n[ties_n]
        better_n = top_n > self.top_n
        self.is_best_n = torch.where(better_n, is_best_n, self.is_best_n)
        self.top_n = torch.where(better_n, top_n, self.top_n)


class _Softmax:
    """Softmax of each row over the tiles so far: its log-sum-exp, and means of per-token quantities under it."""

    def __init__(self):
        self.lse_n, self.means = None, None

    def merge(self, lse_n: torch.Tensor, means: list[torch.Tensor]) -> None:
        if self.lse_n is None:
            self.lse_n, self.means = lse_n, means
            return
        total_n = torch.logaddexp(self.lse_n, lse_n)
        share_n = (lse_n - total_n).exp()
        self.means = [old.lerp_(new, share_n.view(-1, *[1] * (new.dim() - 1))) for old, new in zip(self.means, means, strict=True)]
        self.lse_n = total_n


def _logits(scaled_nE, tile_TE, cap: float | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Float32 logits [n, T], soft-capped, and the derivative of the cap; None where there is no cap."""
    logits = linear(scaled_nE, tile_TE).float()
    if not cap:
        return logits, None
    bent = torch.tanh(logits / cap)
    return bent * cap, 1 - bent.square()


def _softmax(logits_nT) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and log-sum-exp; the largest probability, at least 1 / T, gives the latter."""
    prob_nT = torch.softmax(logits_nT, -1)
    return prob_nT, logits_nT.amax(1) - prob_nT.amax(1).log()


def _expected(prob_nT, slope_nT, tile_TE) -> torch.Tensor:
    """Embedding expected under `prob`, each token weighted by the slope of its soft cap, float32 [n, E]."""
    if slope_nT is not None:
        prob_nT = prob_nT * slope_nT
    return linear(prob_nT.to(tile_TE.dtype), tile_TE.t()).float()
