"""Does the drafter see what it may, and nothing else; does it draft in training as it will when served?

Answered by disturbing one input at a time and comparing outputs bit for bit, so a leak of any size shows. The probe is two rows with
anchors at known places: eight forwards of some 20 blocks, 0.3 s for the sample's drafter.

Shapes: N context tokens, F features a token, A blocks, B slots, E hidden size, G key/value heads, D head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dflash_nb.analysis.doctor.check import Finding, check, ok, stop
from dflash_nb.model.anchors import Anchors, place_anchors
from dflash_nb.model.drafter import FULL, SLIDING, DFlashDrafter, DrafterConfig
from dflash_nb.model.target import TargetHead
from dflash_nb.model.target_info import TargetInfo

PARITY = {"cpu": 1e-4, "cuda": 1e-2}
LONGEST_WINDOW = 4096
NO_LEAK = "do not train: what leaks in training is missing when the drafter is served"


@dataclass(frozen=True)
class Probe:
    """Inputs of ``draft_blocks``: two rows and blocks at even distances, more of them than one attention group takes."""

    features_NF: Tensor
    lengths_B: Tensor
    anchors: Anchors
    embeds_ABE: Tensor

    def run(self, drafter: DFlashDrafter, features_NF: Tensor | None = None, embeds_ABE: Tensor | None = None) -> Tensor:
        """Final hidden states [A, B, E], with other features or other embeddings if given."""
        features_NF = self.features_NF if features_NF is None else features_NF
        embeds_ABE = self.embeds_ABE if embeds_ABE is None else embeds_ABE
        with torch.no_grad():
            return drafter.draft_blocks(features_NF, self.lengths_B, self.anchors, embeds_ABE)


def make_probe(config: DrafterConfig, head: TargetHead, seed: int = 0) -> Probe:
    """Random features, random tokens in the slots, on the head's device; rows are longer than a sliding window of up to 4,096."""
    generator = torch.Generator().manual_seed(seed)
    window = config.sliding_window if config.sliding_window and config.sliding_window <= LONGEST_WINDOW else 0
    lengths = [window + 48, 24]
    row_A = [0] * 12 + [1] * 8
    position_A = [*(window + np.arange(1, 48, 4)).tolist(), *range(1, 24, 3)]
    anchors = place_anchors(row_A, position_A, np.ones(sum(lengths), bool), lengths, config.block_size)
    width = len(config.target_layer_ids) * config.hidden_size
    features_NF = torch.randn(sum(lengths), width, generator=generator).to(head.device)
    ids_AB = torch.randint(0, head.valid_vocab, (len(anchors), config.block_size), generator=generator)
    embeds_ABE = head.embed(ids_AB.to(head.device)).float()
    return Probe(features_NF, torch.tensor(lengths), anchors.to(head.device), embeds_ABE)


def _changed(left: Tensor, right: Tensor) -> Tensor:
    """Bool [A, B]: slots whose hidden state differs in any bit."""
    return (left != right).any(-1)


def _disturbed(features_NF: Tensor, tokens_N: Tensor) -> Tensor:
    return torch.where(tokens_N[:, None], 1 - 2 * features_NF, features_NF)


def _positions(probe: Probe) -> Tensor:
    lengths = probe.lengths_B.tolist()
    return torch.cat([torch.arange(length) for length in lengths]).to(probe.features_NF.device)


@check("future leak")
def future(drafter: DFlashDrafter, probe: Probe) -> Finding:
    """Features at positions t >= anchor must not matter (bit for bit); features just before the anchor must."""
    base = probe.run(drafter)
    position_N, position_A = _positions(probe), probe.anchors.position_A
    cuts = position_A[probe.anchors.row_A == 0][[2, 6, 10]].tolist()
    seen = 0
    for cut in cuts:
        changed_A = _changed(base, probe.run(drafter, _disturbed(probe.features_NF, position_N >= cut))).any(1)
        if leaks := int((changed_A & (position_A <= cut)).sum()):
            return stop(f"{leaks} of {int((position_A <= cut).sum())} blocks change with features from their anchor on", NO_LEAK)
        near_A = position_A > cut
        if (drafter.config.sliding_window or 2) > 1 and (blind := int((near_A & ~changed_A).sum())):
            return stop(
                f"{blind} of {int(near_A.sum())} blocks ignore the features just before their anchor",
                "the context must reach up to the anchor",
            )
        seen += int((position_A <= cut).sum())
    return ok(f"{seen} blocks bitwise unchanged by features from their anchor on, in {len(cuts)} probes")


def _attention(drafter: DFlashDrafter, probe: Probe, layer: int, change: Callable | None = None) -> Tensor:
    """Output [A, B, E] of one layer's attention, with its own inputs replaced by ``change(hidden, context, rotary, layout)``."""
    kept, attention = [], drafter.layers[layer].self_attn
    handles = [attention.register_forward_hook(lambda module, inputs, output: kept.append(output))]
    if change is not None:
        handles.append(attention.register_forward_pre_hook(lambda module, inputs: change(*inputs)))
    try:
        probe.run(drafter)
    finally:
        for handle in handles:
            handle.remove()
    return kept[0]


@check("window")
def window(drafter: DFlashDrafter, probe: Probe) -> Finding:
    """Does each sliding layer see exactly its window of context, and each full layer all of it?"""
    config, position_N = drafter.config, _positions(probe)
    advice = "check layer_types and sliding_window; a window counts the slot itself"
    middle = 6  # a block in the first row; the blocks after it stand further right

    def seen(layer: int, tokens_N: Tensor) -> Tensor:
        def disturb(hidden_ABE, context, rotary, layout):
            key_NGD, value_NGD = context
            return hidden_ABE, (key_NGD, torch.where(tokens_N[:, None, None], 1 - 2 * value_NGD, value_NGD)), rotary, layout

        return _changed(_attention(drafter, probe, layer), _attention(drafter, probe, layer, disturb)).any(1)

    probed = 0
    for layer, kind in enumerate(config.layer_types):
        if kind == FULL:
            if blind := int((~seen(layer, position_N == 0)).sum()):
                return stop(f"{blind} of {len(probe.anchors)} blocks do not see the first token in full layer {layer}", advice)
        elif 1 < config.sliding_window <= LONGEST_WINDOW:
            oldest = int(probe.anchors.position_A[middle]) - config.sliding_window + 1
            if leaks := int(seen(layer, position_N < oldest)[middle:12].sum()):
                return stop(f"{leaks} of 6 blocks see past the window of {config.sliding_window:,} in layer {layer}", advice)
            if not bool(seen(layer, position_N == oldest)[middle]):
                return stop(f"1 of 1 blocks does not see the oldest of {config.sliding_window:,} positions in layer {layer}", advice)
        else:
            continue
        probed += 1
    sliding = f", windows of {config.sliding_window:,}" if SLIDING in config.layer_types else ""
    return ok(f"{probed} of {config.num_layers} layers see the context they should{sliding}")


@check("noise mask")
def noise(drafter: DFlashDrafter, probe: Probe) -> Finding:
    """In a full layer every slot must see the last one, in a causal layer none; slot 1 must see the anchor's token."""
    config = drafter.config
    slot_B = torch.arange(config.block_size, device=probe.embeds_ABE.device)

    def seen(layer: int, slot: int) -> Tensor:
        def disturb(hidden_ABE, *rest):
            return torch.where((slot_B == slot)[:, None], 1 - 2 * hidden_ABE, hidden_ABE), *rest

        return _changed(_attention(drafter, probe, layer), _attention(drafter, probe, layer, disturb)).float().mean(0)

    for layer, kind in enumerate(config.layer_types):
        causal = kind == SLIDING if config.is_causal is None else config.is_causal
        reach = config.sliding_window if kind == SLIDING else config.block_size
        last = config.block_size - 1
        share_B = seen(layer, last)[:last]
        if causal and (leaks := int((share_B > 0).sum())):
            return stop(f"{leaks} of {last} earlier slots see the last one in layer {layer}, which is causal", NO_LEAK)
        if not causal and (blind := int((share_B[slot_B[:last] > last - reach] < 1).sum())):
            return stop(
                f"{blind} of {last} earlier slots do not see the last one in layer {layer}, as if it were causal",
                "full layers see their whole block; check is_causal and layer_types",
            )
        if reach > 1 and (share := float(seen(layer, 0)[1])) < 1:
            return stop(f"slot 1 of {1 - share:.0%} of the blocks ignores the anchor in layer {layer}", "slot 0 must be seen by slot 1")
    kinds = [kind == SLIDING if config.is_causal is None else config.is_causal for kind in config.layer_types]
    return ok(f"{sum(kinds)} layers causal inside the block and {len(kinds) - sum(kinds)} not, as configured")


@check("other blocks")
def others(drafter: DFlashDrafter, probe: Probe) -> Finding:
    """A block must not change with another block's tokens or another row's features."""
    base, blocks = probe.run(drafter), len(probe.anchors)
    odd_A = torch.arange(blocks, device=base.device) % 2 == 1
    embeds_ABE = torch.where(odd_A[:, None, None], 1 - 2 * probe.embeds_ABE, probe.embeds_ABE)
    if leaks := int(_changed(base, probe.run(drafter, embeds_ABE=embeds_ABE))[~odd_A].any(1).sum()):
        return stop(f"{leaks} of {int((~odd_A).sum())} blocks change with the tokens of other blocks", NO_LEAK)
    second_N = torch.arange(len(probe.features_NF), device=base.device) >= int(probe.lengths_B[0])
    row_A = probe.anchors.row_A
    for row, tokens_N in ((0, second_N), (1, ~second_N)):
        changed_A = _changed(base, probe.run(drafter, _disturbed(probe.features_NF, tokens_N))).any(1)
        if leaks := int(changed_A[row_A == row].sum()):
            return stop(f"{leaks} of {int((row_A == row).sum())} blocks change with features of another row", NO_LEAK)
    return ok(f"{blocks} blocks in 2 rows bitwise unchanged by other blocks and other rows")


@check("serving parity")
def parity(drafter: DFlashDrafter, probe: Probe) -> Finding:
    """Training (all blocks at once) and drafting (a growing cache, one block) must give the same hidden states."""
    trained = probe.run(drafter)
    device, starts = probe.features_NF.device, [0, int(probe.lengths_B[0])]
    worst, where = 0.0, 0
    for row, start in enumerate(starts):
        cache = drafter.new_cache(device, drafter.fc.weight.dtype)
        for a in torch.nonzero(probe.anchors.row_A == row).flatten().tolist():
            position = int(probe.anchors.position_A[a])
            drafter.extend(cache, probe.features_NF[start + cache.length : start + position], cache.length)
            away = float((drafter.draft(cache, probe.embeds_ABE[a], position) - trained[a]).abs().max() / trained[a].abs().max())
            if not away <= worst:
                worst, where = away, position
    evidence = f"{len(trained)} blocks differ by at most {worst:.1g} between training and drafting"
    if not worst <= PARITY[device.type]:
        return stop(f"{evidence}, at anchor {where}", "do not train: it would be served as another network than the one trained")
    return ok(evidence)


@check("rope")
def rope(drafter: DFlashDrafter, info: TargetInfo, probe: Probe) -> Finding:
    """Are keys rotated with the target's base, at their absolute positions, over the whole head (neox pairs)?"""
    config = drafter.config
    if config.rope_theta != info.rope_theta:
        return stop(
            f"the drafter's base is {config.rope_theta:g}, the target's {info.rope_theta:g}", "set rope_theta to the target's; servers do"
        )
    features_TF = probe.features_NF[: int(probe.lengths_B[0])]
    cache = drafter.new_cache(features_TF.device, drafter.fc.weight.dtype)
    drafter.extend(cache, features_TF, 0)
    attention = drafter.layers[0].self_attn
    with torch.no_grad():
        plain_TGD = attention.k_proj(drafter.project_context(features_TF)).unflatten(-1, (-1, config.head_dim))
        plain_TGD = attention.k_norm(plain_TGD).double().cpu()
    half = config.head_dim // 2
    angle_TD = torch.arange(len(plain_TGD), dtype=torch.float64)[:, None] * info.rope_theta ** (-torch.arange(half).double() / half)
    pairs = torch.complex(plain_TGD[..., :half], plain_TGD[..., half:])
    turned = pairs * torch.polar(torch.ones_like(angle_TD), angle_TD)[:, None]
    away_TD = (torch.cat([turned.real, turned.imag], -1) - cache.keys[0][: len(plain_TGD)].double().cpu()).abs().amax(1)
    away = float(away_TD.max() / plain_TGD.abs().max())
    if not away <= 1e-2:
        wrong = int((away_TD.amax(0) > 1e-2 * plain_TGD.abs().max()).sum())
        return stop(
            f"{wrong} of {config.head_dim} features of a head are rotated otherwise than base {info.rope_theta:g} says (by {away:.2g})",
            "rotate the whole head at absolute positions; no partial rotary factor, no sections",
        )
    return ok(f"base {info.rope_theta:g} over all {config.head_dim} features of a head, keys within {away:.1g}")
