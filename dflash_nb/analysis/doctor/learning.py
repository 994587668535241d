"""Are labels, loss, gradients and export what they should be?

Labels are judged with a stand-in for the drafter that knows the text: in slot k of the block at anchor a it answers token a + k. If
labels are right it makes no mistake, under cross-entropy and under KL; if they are off by one it makes nothing but mistakes. The first
loss of a fresh drafter is that of a guess: far above ln(vocabulary) the head's scale is wrong, far below it has seen the answer.

Shapes: N tokens, A blocks, B slots, V vocabulary rows.
"""

import math
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dflash_nb.analysis.doctor.check import Finding, check, look, ok, stop
from dflash_nb.analysis.doctor.drafting import Probe
from dflash_nb.model.anchors import Anchors, draw_anchors
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.export import load_drafter
from dflash_nb.model.objective import BlockLoss, Objective, block_loss
from dflash_nb.model.readers import LOOK, READERS, STOP, check_readers
from dflash_nb.model.target import Features, TargetHead
from dflash_nb.model.target_info import TargetInfo

SURE = 30.0  # logit of the right token against 0 for the others: a loss of V * e^-30
SURPRISE = 1.5  # nats that a first loss may be away from an even guess; scaled to the head it is 0.5
SERVED = "do not train: the drafter would learn other tokens than it is asked for"


class _Informed:
    """Stands in for a drafter: it answers with the text itself, and keeps what it was given as block embeddings."""

    def __init__(self, ids_N: Tensor, mask_token_id: int) -> None:
        self.ids_N = ids_N
        self.config = SimpleNamespace(mask_token_id=mask_token_id)
        self.given_ABV: Tensor | None = None

    def draft_blocks(self, features_ND: Tensor, lengths_B: Tensor, anchors: Anchors, block_embeds_ABV: Tensor) -> Tensor:
        self.given_ABV = block_embeds_ABV
        place_AB = (anchors.token_A[:, None] + torch.arange(anchors.block_size)).clamp(max=len(self.ids_N) - 1)
        return _certain(self.ids_N[place_AB], len(self.ids_N) + 1)


def _certain(ids: Tensor, vocabulary: int) -> Tensor:
    return SURE * torch.nn.functional.one_hot(ids, vocabulary).float()


def _one_hot_head(vocabulary: int) -> SimpleNamespace:
    eye_VV = torch.eye(vocabulary)
    return SimpleNamespace(
        weight_VH=eye_VV, logit_scale=1.0, logit_softcap=None, valid_vocab=vocabulary, embed=lambda ids: eye_VV[ids], dtype=torch.float32
    )


@check("labels")
@torch.no_grad()
def labels(
    block_size: int,
    draw: Callable[..., Anchors] = draw_anchors,
    loss: Callable[..., BlockLoss] = block_loss,
) -> Finding:
    """On ids 0, 1, 2, ...: are anchors supervised, is the label of slot k token anchor + k, and is the block filled with mask tokens?"""
    first, second = 3 * block_size + 20, block_size + 4
    mask_N = np.ones(first + second, bool)
    mask_N[:5] = mask_N[2 * block_size + 6] = mask_N[first + 3 : first + second - 3] = False
    tokens, lengths_B = len(mask_N), np.array([first, second])
    anchors = draw(mask_N, lengths_B, np.array([0, 1]), tokens, block_size, 0, 0)
    run_N = _supervised_ahead(mask_N, lengths_B)
    token_A = anchors.token_A.numpy()
    unsupervised = int((run_N[token_A] < 2).sum())
    if unsupervised or not len(anchors):
        return stop(
            f"{unsupervised} of {len(anchors)} anchors stand in prompts or have no supervised next token", "anchors must be supervised"
        )
    if wrong := int((anchors.slots_A.numpy() != np.minimum(run_N[token_A], block_size) - 1).sum()):
        return stop(f"{wrong} of {len(anchors)} blocks have labels past the supervised text or their row, or too few", SERVED)

    ids_N = torch.arange(tokens)
    features = Features(
        0, 0, 0, first, torch.arange(2), torch.from_numpy(lengths_B), torch.zeros(tokens, 1), ids_N, torch.from_numpy(mask_N),
        last_hidden_NH=_certain((ids_N + 1) % tokens, tokens + 1),
    )  # fmt: skip
    drafter, head = _Informed(ids_N, tokens), _one_hot_head(tokens + 1)
    found = loss(drafter, head, features, anchors, Objective("ce"))
    slots, right = int(found.slots_K.sum()), int(found.correct_K.sum())
    if right < slots:
        return stop(f"{slots - right} of {slots} labels are not token anchor + k", SERVED)
    given_AB = drafter.given_ABV.argmax(-1)
    if not torch.equal(given_AB[:, 0], ids_N[anchors.token_A]):
        return stop(f"slot 0 of {int((given_AB[:, 0] != ids_N[anchors.token_A]).sum())} blocks is not the anchor's token", SERVED)
    if shown := int((given_AB[:, 1:] != tokens).sum()):
        return stop(f"{shown} of {given_AB[:, 1:].numel()} slots show something else than the mask token", SERVED)
    taught = loss(drafter, head, features, anchors, Objective("kl"))
    mean = float(taught.loss_sum) / max(taught.weight_sum, 1e-9)
    if not abs(mean) < 0.1:
        return stop(f"the target's distribution for token anchor + k is taken from elsewhere (KL {mean:.2g} nats)", SERVED)
    return ok(f"{slots} of {slots} labels are token anchor + k, from {len(anchors)} supervised anchors; KL teacher within {abs(mean):.1g}")


def _supervised_ahead(mask_N: np.ndarray, lengths_B: np.ndarray) -> np.ndarray:
    """Supervised tokens of the same row from each token on, counted one by one."""
    run_N, end = np.zeros(len(mask_N), int), len(mask_N)
    for length in reversed(lengths_B.tolist()):
        for n in range(end - 1, end - length - 1, -1):
            run_N[n] = mask_N[n] and 1 + (run_N[n + 1] if n + 1 < end else 0)
        end -= length
    return run_N


@check("first loss")
def first_loss(drafter: DFlashDrafter, head: TargetHead, features: Features, loss: Callable[..., BlockLoss] = block_loss) -> Finding:
    """Is the loss of the untrained drafter that of an even guess, ln(vocabulary)?"""
    with torch.no_grad():
        found = loss(drafter, head, features, _some_anchors(drafter, features), Objective("ce"))
    slots = int(found.slots_K.sum())
    if slots == 0:
        return stop(
            f"0 labels in {len(features.lengths_B)} rows", "the rows have no two supervised tokens in a row; prepare the data again"
        )
    mean, even = float(found.nll_K.sum()) / slots, math.log(head.valid_vocab)
    evidence = f"{mean:.2f} nats over {slots} labels, an even guess gives {even:.2f}"
    if not math.isfinite(mean):
        return stop(evidence, "look for infinite weights or features; use float32 or bfloat16")
    if mean < even - SURPRISE:
        return stop(f"{evidence}: too good for a drafter that has learned nothing", "the answer reaches the drafter; do not train")
    if mean > even + SURPRISE + _answer_to_mask(head, drafter.config.mask_token_id):
        return look(evidence, "start with a smaller weight in the final norm; until then the first steps only learn the scale")
    return ok(evidence)


def _answer_to_mask(head: TargetHead, mask_token_id: int) -> float:
    """By how much a head of typical row 1 prefers one token for the mask token's embedding, which an untrained slot still is, in nats."""
    rows_VE = head.weight_VH[: head.valid_vocab].float()
    mask_E = head.embed(torch.tensor(mask_token_id, device=rows_VE.device)).float()
    logits_V = rows_VE @ F.rms_norm(mask_E, mask_E.shape) / rows_VE.norm(dim=1).median()
    return float(logits_V.max() - logits_V.mean())


@check("gradients")
def gradients(drafter: DFlashDrafter, head: TargetHead, features: Features, loss: Callable[..., BlockLoss] = block_loss) -> Finding:
    """Does the loss reach every weight of the drafter with a finite gradient, and none of the target's?"""
    before = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    drafter.zero_grad(set_to_none=True)
    try:
        loss(drafter, head, features, _some_anchors(drafter, features), Objective("ce")).loss_sum.backward()
        found = {name: parameter.grad for name, parameter in drafter.named_parameters()}
    finally:
        for name, parameter in drafter.named_parameters():
            parameter.grad = before[name]
    dead = [name for name, grad in found.items() if grad is None or not bool(grad.any())]
    broken = [name for name, grad in found.items() if grad is not None and not bool(torch.isfinite(grad).all())]
    if dead or broken:
        kind, names = ("no", dead) if dead else ("no finite", broken)
        return stop(
            f"{len(names)} of {len(found)} weights get {kind} gradient, {names[0]} first", "every weight must be used and trainable"
        )
    if held := [name for name in ("weight_VH", "embedding_VH") if getattr(head, name).grad is not None]:
        return stop(f"{len(held)} of 2 target matrices get a gradient", "freeze the target's head and embedding")
    return ok(f"{len(found)} of {len(found)} weights get a finite gradient, 0 of the target's")


def _some_anchors(drafter: DFlashDrafter, features: Features) -> Anchors:
    mask_N, lengths_B, samples_B = features.loss_mask_N.cpu(), features.lengths_B, features.sample_ids_B
    return draw_anchors(mask_N, lengths_B, samples_B, 8, drafter.config.block_size, 0, 0)


@check("export")
def export(drafter: DFlashDrafter, info: TargetInfo, probe: Probe, write: Callable[..., Path], place: Path | None = None) -> Finding:
    """Written by ``write``, read back: same configuration, same weights, same hidden states, and readable by the known servers?

    ``place`` is the folder in which a temporary one is made.
    """
    advice = "do not train before the export is right: it is all that is served"
    with tempfile.TemporaryDirectory(dir=place) as folder:
        written = write(drafter, info, Path(folder) / "export")
        findings = check_readers(written, info)
        loaded = load_drafter(written, device=probe.features_NF.device)
        size = sum(file.stat().st_size for file in written.iterdir())
    if changed := [each.name for each in fields(loaded.config) if getattr(loaded.config, each.name) != getattr(drafter.config, each.name)]:
        now = ", ".join(f"{name} {getattr(loaded.config, name)} instead of {getattr(drafter.config, name)}" for name in changed)
        return stop(f"{len(changed)} settings changed: {now}", advice)
    state, read = drafter.state_dict(), loaded.state_dict()
    if lost := [name for name, tensor in state.items() if not torch.equal(tensor, read[name])]:
        return stop(f"{len(lost)} of {len(state)} weights changed, {lost[0]} first", advice)
    if not torch.equal(probe.run(drafter), probe.run(loaded)):
        return stop("the reloaded drafter drafts otherwise, 0 weights changed", advice)
    refused = {reader: [each.text for each in findings if (each.reader, each.level) == (reader, STOP)] for reader in READERS}
    refused = {reader: texts for reader, texts in refused.items() if texts}
    if len(refused) == len(READERS):
        return stop(f"{len(refused)} of {len(READERS)} servers cannot read it: {next(iter(refused.values()))[0]}", advice)
    if refused:
        reasons = "; ".join(f"{reader}: {texts[0]}" for reader, texts in refused.items())
        return look(f"{len(refused)} of {len(READERS)} servers cannot serve it ({reasons})", "choose another server, or change the drafter")
    notes = sum(each.level == LOOK for each in findings)
    return ok(f"{len(state)} weights and {size / 1e6:.1f} MB read back equal; {len(READERS)} of {len(READERS)} servers ({notes} remarks)")
