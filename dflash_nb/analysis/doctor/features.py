"""Does the target give the drafter what it should: the right layers, row t from token t, untouched by padding, and the right head.

Every check runs the loaded target twice, once as training does and once in the plainest way, on a few rows of the real data.
Differences are relative to a token's own length, so that the few tokens with enormous activations cannot hide the others. Right
padding changes SmolLM2's features by 1e-6 and neighbouring layers differ by 0.1 or more; the limits lie between, at 1e-3 for float32.

Shapes: T tokens of one row, N real tokens of a batch, K captured layers, H hidden size, V vocabulary rows.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dflash_nb.analysis.doctor.check import Finding, check, look, ok, stop
from dflash_nb.data.dataset import Batch
from dflash_nb.model.packing import packed_inputs
from dflash_nb.model.target import FrozenTarget

TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
TOLERANCE_16_BIT = 3e-2
PROBE_TOKENS = 40


def one_row(batch: Batch, b: int, tokens: int | None = None) -> Batch:
    """Row ``b`` alone and without padding, cut to ``tokens``."""
    length = min(int(batch.lengths_B[b]), tokens or int(batch.lengths_B[b]))
    ids_1T, mask_1T = batch.input_ids_BT[b : b + 1, :length], batch.loss_mask_BT[b : b + 1, :length]
    return Batch(batch.epoch, batch.index, batch.bucket, length, batch.sample_ids_B[b : b + 1], np.array([length]), ids_1T, mask_1T)


def difference(found: Tensor, wanted: Tensor) -> Tensor:
    """Distance of each row of [T, H] from what it should be, relative to the latter's length."""
    found, wanted = found.float(), wanted.float()
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-6)


def _limit(target: FrozenTarget) -> float:
    return TOLERANCE.get(target.dtype, TOLERANCE_16_BIT)


def _ids(target: FrozenTarget, row: Batch) -> Tensor:
    return torch.from_numpy(row.input_ids_BT).long().to(target.device)


@check("capture")
@torch.no_grad()
def capture(target: FrozenTarget, batch: Batch) -> Finding:
    """Is part k of the features the output of layer ``layer_ids[k]``, ``hidden_states[id + 1]`` of an ordinary forward?

    The last entry of ``hidden_states`` is after the final norm, so a captured last layer is compared through that norm.
    """
    row = one_row(batch, 0, PROBE_TOKENS)
    states = [state[0] for state in target.model(_ids(target, row), output_hidden_states=True, use_cache=False).hidden_states]
    parts = target.features(row).features_ND.chunk(len(target.layer_ids), -1)
    last = target.info.num_layers - 1
    norm = _final_norm(target)
    advice = "the hooks sit on the wrong layers; check target_layers and the transformers version"
    worst = 0.0
    for i, part in zip(target.layer_ids, parts, strict=True):
        if part.shape != states[0].shape:
            return stop(f"layer {i} gave {tuple(part.shape)}, an ordinary forward {tuple(states[0].shape)}", advice)
        if i < last:
            away = float(difference(part, states[i + 1]).max())
        elif norm is None:
            continue
        elif float(difference(part, states[-1]).max()) < _limit(target):
            return stop(f"layer {i}, the last of {last + 1}, is captured after the final norm", advice)
        else:
            away = float(difference(norm(part.to(target.dtype)), states[-1]).max())
        if away > _limit(target):
            distances = [float(difference(part, state).median()) for state in states[1:-1]]
            nearest = int(np.argmin(distances))
            return stop(f"layer {i} differs by {away:.2g} from an ordinary forward; it is nearest to layer {nearest}", advice)
        worst = max(worst, away)
    return ok(f"{len(parts)} layers differ by at most {worst:.1g} from an ordinary forward over {len(parts[0])} tokens")


def _final_norm(target: FrozenTarget) -> torch.nn.Module | None:
    norms = [child for child in target.decoder.children() if "norm" in type(child).__name__.lower()]
    return norms[0] if len(norms) == 1 else None


@check("feature rows")
def feature_rows(target: FrozenTarget, batch: Batch) -> Finding:
    """Does features row t belong to token t? Another token there must change row t and no row before it."""
    row = one_row(batch, 0, PROBE_TOKENS)
    length = row.padded_length
    t = length // 2
    other = row.input_ids_BT.copy()
    other[0, t] = next(i for i in (row.input_ids_BT[0, 0], row.input_ids_BT[0, -1], *range(2)) if i != other[0, t])
    before, after = target.features(row), target.features(replace(row, input_ids_BT=other))
    moved = difference(after.features_ND, before.features_ND) > _limit(target)
    first = int(moved.int().argmax()) if moved.any() else length
    if first != t:
        place = f"row {first}" if first < length else "no row"
        return stop(
            f"another token {t} of {length} changes {place} first", "features and tokens are shifted against each other; do not train"
        )
    wanted = torch.from_numpy(row.input_ids_BT[0]).long()
    if wrong := int((before.input_ids_N.cpu() != wanted).sum()):
        return stop(f"{wrong} of {length} ids beside the features are not the row's", "ids and features must be kept by the same selection")
    return ok(f"another token {t} of {length} changes row {t} first, and {length} ids agree")


@check("padding")
def padding(target: FrozenTarget, batch: Batch) -> Finding:
    """Does a row have the same features, ids and mask in a padded batch, whatever stands in the padding, as alone?"""
    filled = batch.input_ids_BT.copy()
    for b, length in enumerate(batch.lengths_B.tolist()):
        filled[b, length:] = filled[b, 0]
    together = target.features(replace(batch, input_ids_BT=filled))
    alone = [target.features(one_row(batch, b)) for b in range(batch.rows)]
    advice = "real tokens must be told from padding by the row lengths, and padding must stand right"
    for name in ("input_ids_N", "loss_mask_N"):
        if not torch.equal(getattr(together, name), torch.cat([getattr(one, name) for one in alone])):
            return stop(f"{name} of {batch.rows} rows together are not those of the rows alone", advice)
    away = difference(together.features_ND, torch.cat([one.features_ND for one in alone]))
    if float(away.max()) > _limit(target):
        bad = int((away > _limit(target)).sum())
        return stop(f"{bad} of {len(away)} tokens change by up to {float(away.max()):.2g} in a padded batch", advice)
    pads = batch.padded_tokens - batch.real_tokens
    return ok(f"{len(away)} tokens beside {pads} pads differ by at most {float(away.max()):.1g} from their rows alone")


@check("packing")
def packing(target: FrozenTarget, batch: Batch, refused: str = "") -> Finding:
    """Has a row the same features when it stands behind another one in a packed row? A STOP only if the run packs.

    refused: why the run pads its rows though packed ones were asked for.
    """
    if refused:
        return look(refused, "nothing, if padded batches will do; strategy bucketed asks for them")
    first, second = one_row(batch, 0, PROBE_TOKENS), one_row(batch, batch.rows - 1, PROBE_TOKENS)
    ids_1T = torch.cat([_ids(target, first), _ids(target, second)], 1)
    positions = torch.cat([torch.arange(row.padded_length, device=target.device) for row in (first, second)])[None]
    every_T = torch.arange(ids_1T.shape[1], device=target.device)
    inputs = {"input_ids": ids_1T, "position_ids": positions, "use_cache": False}
    if target.packed:
        inputs = packed_inputs(ids_1T[0], torch.tensor([first.padded_length, second.padded_length]), target.info.is_hybrid)
    try:
        together, _ = target.capture(every_T, False, **inputs)
    except Exception as error:  # a refusal is an answer
        evidence = f"2 packed rows are refused ({type(error).__name__}: {error})"
    else:
        away = float(difference(together[first.padded_length :], target.features(second).features_ND).max())
        if away < _limit(target):
            return ok(f"the second of 2 packed rows differs by at most {away:.1g} from itself alone")
        kind = "recurrent layers carry their state over" if target.info.is_hybrid else "attention reads the row before"
        evidence = f"the second of 2 packed rows changes by {away:.2g}, {kind}"
    return stop(evidence, "set strategy to bucketed") if target.packed else ok(f"not used; {evidence}")


@check("head")
@torch.no_grad()
def head(target: FrozenTarget, batch: Batch) -> Finding:
    """Do the frozen head and embedding that the drafter uses give the model's own logits and first layer's input?"""
    row = one_row(batch, 0, PROBE_TOKENS)
    ids_1T, used, info = _ids(target, row), target.head(), target.info
    whole = target.model(ids_1T, output_hidden_states=True, use_cache=False)
    every_T = torch.arange(ids_1T.shape[1], device=target.device)
    _, hidden_TH = target.capture(every_T, with_last_hidden=True, input_ids=ids_1T, use_cache=False)
    advice = "the head must be the target's own, loaded and tied as its config says; a random head cannot be learned against"
    for name, matrix in (("embedding", used.embedding_VH), ("head", used.weight_VH)):
        if matrix.shape != (info.vocab_size, info.hidden_size):
            return stop(f"the {name} is {tuple(matrix.shape)}, the target has {(info.vocab_size, info.hidden_size)}", advice)
        if matrix.requires_grad:
            return stop(f"the {name} of {matrix.numel():,} weights would be trained", "freeze it; servers use the target's own")
    if info.tied_head and not torch.equal(used.weight_VH, used.embedding_VH):
        return stop(f"the head is tied to the embedding, but {_rows(used.weight_VH, used.embedding_VH)} rows differ", advice)
    away = float(difference(used.logits(hidden_TH), whole.logits[0]).max())
    if away > _limit(target):
        return stop(f"logits differ by {away:.2g} from the model's", advice)
    moved = float(difference(used.embed(ids_1T[0]), whole.hidden_states[0][0]).max())
    if moved > _limit(target):
        return stop(f"embeddings differ by {moved:.2g} from what enters the target's first layer", f"embed_scale is {used.embed_scale:g}")
    tied = "tied" if info.tied_head else "untied"
    return ok(f"{tied}, logits over {len(every_T)} tokens differ by at most {away:.1g}, embeddings by {moved:.1g}")


def _rows(left: Tensor, right: Tensor) -> str:
    return f"{int((left != right).any(1).sum()):,} of {len(left):,}"


@check("dead features")
def alive(target: FrozenTarget, batch: Batch) -> Finding:
    """Are features finite, and do they differ from token to token?"""
    features_ND = target.features(batch).features_ND.float()
    if bad := int((~torch.isfinite(features_ND)).sum()):
        return stop(f"{bad:,} of {features_ND.numel():,} feature values are not finite", "use dtype bfloat16 or float32 for the target")
    spread = [float(part.std(0).mean()) for part in features_ND.chunk(len(target.layer_ids), -1)]
    if min(spread) == 0:
        return look(f"layer {target.layer_ids[int(np.argmin(spread))]} gives the same features for all tokens", "choose another layer")
    return ok(f"{features_ND.numel():,} finite values, spread {min(spread):.2g} to {max(spread):.2g} by layer")
