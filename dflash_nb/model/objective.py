"""The loss of drafted blocks, and how good they are, in one pass over the valid slots.

Slot k (1..B-1) of a block at anchor a predicts token a+k of its row; slot 0 is the known anchor. Slots without a label (see `anchors`)
are never multiplied with the head; `scores` meets the others without holding their logits.

Losses, with weights w over valid slots, as sums so that any split of a batch adds up to the same gradient:
  ce     w = exp(-(k-1) / gamma), cross-entropy with the text's token (7 suits B = 16, 4 suits B = 8)
  dpace  cross-entropy; with s_k = (1 - alpha) p_k(label) + alpha, w_k is the sum over j >= k of s_1 ... s_j (arXiv 2605.18810), detached
  kl     w as ce, KL(target || drafter) with the target's own distribution of token a+k, which its final hidden state at a+k-1 gives

Shapes: N real tokens, A blocks, K = B-1 drafted slots, n valid slots (rows), u target positions, V vocabulary, E hidden size.
"""

from dataclasses import dataclass

import numpy as np
import torch

from dflash_nb.model.anchors import Anchors
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.scores import score_labels, score_teacher
from dflash_nb.model.target import Features, TargetHead

KINDS = ("ce", "dpace", "kl")


@dataclass(frozen=True)
class Objective:
    """kind "ce", "dpace" or "kl"; gamma is the decay over slots; alpha smooths D-PACE; chunk is slots per pass over the vocabulary."""

    kind: str = "ce"
    gamma: float = 7.0
    alpha: float = 0.5
    chunk: int = 512

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"loss {self.kind!r} is not known; choose one of {', '.join(KINDS)}")
        if not self.gamma > 0:
            raise ValueError(f"gamma is {self.gamma}; the decay over slots must be positive (infinity weighs all slots alike)")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be in (0, 1]: at 0 the weights collapse onto the first slots")
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; it must be at least 1 slot")


@dataclass(frozen=True)
class BlockLoss:
    """Sums over a batch's valid slots; add batches up, then divide. Only `loss_sum` carries a graph.

    loss_sum    weighted loss; its gradient reaches the drafter       weight_sum  sum of the weights
    blocks      blocks with at least one valid slot                   accepted    sum over blocks of right slots before the first wrong one
    slots_K, correct_K, nll_K   by slot 1..B-1: valid slots, right ones, and negative log-likelihood of the text's token in nats
    """

    loss_sum: torch.Tensor
    weight_sum: float
    blocks: int
    accepted: float
    slots_K: np.ndarray
    correct_K: np.ndarray
    nll_K: np.ndarray


def block_loss(drafter: DFlashDrafter, head: TargetHead, features: Features, anchors: Anchors, objective: Objective) -> BlockLoss:
    """Draft all blocks and compare them with the text. Without grad mode only the metrics are computed.

    A batch without valid slots gives a zero loss whose gradient is zero for every parameter, so ranks stay in step.
    Raises ValueError if the objective is "kl" and the features carry no final hidden states.
    """
    if objective.kind == "kl" and features.last_hidden_NH is None:
        raise ValueError("the kl loss needs the target's final hidden states: load the target with with_last_hidden=True")
    slots = anchors.block_size - 1
    anchors = anchors.to(features.features_ND.device)
    valid_AK = torch.arange(slots, device=anchors.slots_A.device) < anchors.slots_A[:, None]
    block_n, slot_n = valid_AK.nonzero().unbind(1)
    if block_n.numel() == 0:
        zeros = np.zeros(slots, np.int64)
        return BlockLoss(sum(p.sum() for p in drafter.parameters()) * 0.0, 0.0, 0, 0.0, zeros, zeros, np.zeros(slots))
    position_n = anchors.token_A[block_n] + slot_n + 1

    ids_AB = features.input_ids_N.new_full((len(anchors), anchors.block_size), drafter.config.mask_token_id)
    ids_AB[:, 0] = features.input_ids_N[anchors.token_A]
    hidden_ABE = drafter.draft_blocks(features.features_ND, features.lengths_B, anchors, head.embed(ids_AB))
    hidden_nE = hidden_ABE.flatten(0, 1).index_select(0, block_n * anchors.block_size + slot_n + 1)
    label_n = features.input_ids_N[position_n]
    how = (head, objective.chunk, hidden_nE.requires_grad)
    if objective.kind == "kl":
        order_n = position_n.argsort(stable=True)
        block_n, slot_n, position_n, label_n, hidden_nE = (t[order_n] for t in (block_n, slot_n, position_n, label_n, hidden_nE))
        scores = score_teacher(hidden_nE, label_n, *how, features.last_hidden_NH, position_n - 1)
    else:
        scores = score_labels(hidden_nE, label_n, *how)

    nll_AK = torch.zeros(valid_AK.shape, device=valid_AK.device).index_put((block_n, slot_n), scores.nll_n)
    hit_AK = torch.zeros_like(valid_AK).index_put((block_n, slot_n), scores.hit_n)
    if objective.kind == "dpace":
        smoothed_AK = (1 - objective.alpha) * (-nll_AK).exp() + objective.alpha
        weight_AK = (smoothed_AK.cumprod(1) * valid_AK).flip(1).cumsum(1).flip(1)
    else:
        weight_AK = torch.exp(-torch.arange(slots, device=valid_AK.device) / objective.gamma) * valid_AK
    weight_n = weight_AK[block_n, slot_n]
    value = (weight_n * scores.loss_n).sum()
    loss_sum = value if scores.grad_nE is None else _KnownGradient.apply(hidden_nE, value, scores.grad_nE.mul_(weight_n[:, None]))

    per_slot = torch.stack([valid_AK.sum(0), hit_AK.sum(0), nll_AK.sum(0)]).double().cpu().numpy()
    totals = torch.stack([weight_n.sum(), valid_AK.any(1).sum(), hit_AK.cumprod(1).sum()]).tolist()
    return BlockLoss(
        loss_sum, totals[0], int(totals[1]), totals[2], per_slot[0].astype(np.int64), per_slot[1].astype(np.int64), per_slot[2]
    )


class _KnownGradient(torch.autograd.Function):
    """A value whose gradient with respect to `hidden` was computed together with it."""

    @staticmethod
    def forward(ctx, hidden, value, grad):
        ctx.save_for_backward(grad.to(hidden.dtype))
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None, None
