import gc
import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_drafter import oracle_of
from tiny_drafter import VOCAB, TinyHead, lively_drafter, random_features, tiny_config

from dflash_nb.model import scores
from dflash_nb.model.anchors import draw_anchors, place_anchors
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.objective import BlockLoss, Objective, block_loss

LENGTHS = [40, 7, 60]


def all_anchors(features, config, most=20):
    return draw_anchors(features.loss_mask_N, features.lengths_B, features.sample_ids_B, most, config.block_size, seed=0, epoch=0)


def gradients(drafter) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}


def loss_and_gradients(drafter, head, features, anchors, objective) -> tuple[BlockLoss, dict[str, torch.Tensor]]:
    drafter.zero_grad()
    result = block_loss(drafter, head, features, anchors, objective)
    result.loss_sum.backward()
    return result, gradients(drafter)


def plain_loss(drafter, head, features, anchors, objective):
    """Block by block and slot by slot, with all logits, from the definitions."""
    ids = torch.full((len(anchors), anchors.block_size), drafter.config.mask_token_id)
    ids[:, 0] = features.input_ids_N[anchors.token_A]
    hidden = drafter.draft_blocks(features.features_ND, features.lengths_B, anchors, head.embed(ids))
    loss, weight_sum, accepted = 0.0, 0.0, 0
    slots, correct, nll_sum = (np.zeros(anchors.block_size - 1) for _ in range(3))
    for a in range(len(anchors)):
        weight, leading = 1.0, True
        smoothed = []
        terms = []
        for k in range(1, int(anchors.slots_A[a]) + 1):
            token = int(anchors.token_A[a]) + k
            logits, label = head.logits(hidden[a, k]), int(features.input_ids_N[token])
            log_prob = logits.log_softmax(-1)
            nll = -log_prob[label]
            if objective.kind == "kl":
                teacher = head.logits(features.last_hidden_NH[token - 1]).log_softmax(-1)
                terms.append((teacher.exp() * (teacher - log_prob)).sum())
            else:
                terms.append(nll)
            smoothed.append((1 - objective.alpha) * float((-nll.detach()).exp()) + objective.alpha)
            hit = int(logits[: head.valid_vocab].argmax()) == label
            leading &= hit
            accepted += leading
            slots[k - 1] += 1
            correct[k - 1] += hit
            nll_sum[k - 1] += float(nll.detach())
        for k, term in enumerate(terms):
            if objective.kind == "dpace":
                weight = sum(np.prod(smoothed[: j + 1]) for j in range(k, len(terms)))
            else:
                weight = float(np.exp(-k / objective.gamma))
            loss, weight_sum = loss + weight * term, weight_sum + weight
    return loss, weight_sum, accepted, slots, correct, nll_sum


@pytest.mark.parametrize("softcap", [None, 7.0])
@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_loss_gradient_and_metrics_equal_the_plain_version(kind, softcap, monkeypatch):
    monkeypatch.setitem(scores.TILE_BYTES, "cpu", 1)  # tiles of 1,024 tokens: three of them
    config = tiny_config(vocab_size=2500)
    drafter, head = lively_drafter(config), TinyHead(2500, scale=0.7, softcap=softcap, valid=2400)
    mask = np.random.default_rng(0).random(sum(LENGTHS)) < 0.9
    features = random_features(LENGTHS, config, mask)
    anchors = all_anchors(features, config)
    objective = Objective(kind, gamma=4.0, alpha=0.4, chunk=37)
    result, ours = loss_and_gradients(drafter, head, features, anchors, objective)

    drafter.zero_grad()
    loss, weight_sum, accepted, slots, correct, nll = plain_loss(drafter, head, features, anchors, objective)
    loss.backward()
    assert result.loss_sum.item() == pytest.approx(loss.item(), rel=1e-5)
    assert result.weight_sum == pytest.approx(weight_sum, rel=1e-5)
    assert (result.accepted, result.blocks) == (accepted, len(anchors))
    assert result.slots_K.tolist() == slots.tolist() and result.correct_K.tolist() == correct.tolist()
    assert result.nll_K == pytest.approx(nll, rel=1e-5)
    for name, gradient in gradients(drafter).items():
        assert (ours[name] - gradient).norm() < 1e-5 * gradient.norm(), name

    with torch.no_grad():
        evaluated = block_loss(drafter, head, features, anchors, objective)
    assert evaluated.loss_sum.item() == pytest.approx(loss.item(), rel=1e-5) and evaluated.accepted == accepted


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
def test_splitting_a_batch_in_any_way_gives_the_same_gradient(kind):
    config = tiny_config()
    drafter, head = lively_drafter(config), TinyHead()
    features = random_features(LENGTHS, config)
    anchors = all_anchors(features, config)
    whole, expected = loss_and_gradients(drafter, head, features, anchors, Objective(kind))

    drafter.zero_grad()
    weight_sum, start = 0.0, 0
    for row, length in enumerate(LENGTHS):
        tokens = slice(start, start + length)
        alone = replace(
            features,
            sample_ids_B=features.sample_ids_B[row : row + 1],
            lengths_B=features.lengths_B[row : row + 1],
            features_ND=features.features_ND[tokens],
            input_ids_N=features.input_ids_N[tokens],
            loss_mask_N=features.loss_mask_N[tokens],
            last_hidden_NH=features.last_hidden_NH[tokens],
        )
        part = block_loss(drafter, head, alone, all_anchors(alone, config), Objective(kind, chunk=11))
        part.loss_sum.backward()
        weight_sum, start = weight_sum + part.weight_sum, start + length
    assert weight_sum == pytest.approx(whole.weight_sum, rel=1e-5)
    for name, gradient in gradients(drafter).items():
        assert (gradient - expected[name]).norm() < 1e-5 * expected[name].norm(), name


class Oracle:
    """A drafter whose slot k is `hidden_of(token index of anchor + k)`: shows which token a slot is compared with."""

    def __init__(self, config, hidden_of):
        self.config, self.hidden_of = config, hidden_of

    def draft_blocks(self, features, lengths, anchors, embeds):
        token = anchors.token_A[:, None] + torch.arange(anchors.block_size)
        return self.hidden_of(token.clamp(max=len(features) - 1)).requires_grad_()


def test_slot_k_is_compared_with_the_token_at_anchor_plus_k():
    """SpecForge 471, 473: shifted labels train well and accept nothing."""
    config, head = tiny_config(), TinyHead(hidden=VOCAB)
    head.weight_VH = torch.eye(VOCAB)
    features = random_features(LENGTHS, config)
    anchors = all_anchors(features, config)
    for shift, expected in ((0, 1.0), (1, 0.0), (-1, 0.0)):
        index = (torch.arange(sum(LENGTHS)) + shift) % sum(LENGTHS)
        drafter = Oracle(config, lambda token, index=index: 30 * torch.eye(VOCAB)[features.input_ids_N[index[token]]])
        result = block_loss(drafter, head, features, anchors, Objective())
        assert result.correct_K.sum() / result.slots_K.sum() == pytest.approx(expected, abs=0.05)
    assert result.slots_K[0] == len(anchors) and result.slots_K[-1] < len(anchors)


def test_the_teacher_of_slot_k_is_the_hidden_state_before_its_token():
    config, head = tiny_config(), TinyHead()
    features = random_features(LENGTHS, config)
    anchors = all_anchors(features, config)
    for shift, is_zero in ((-1, True), (0, False), (-2, False)):
        drafter = Oracle(config, lambda token, shift=shift: features.last_hidden_NH[(token + shift).clamp(min=0)])
        result = block_loss(drafter, head, features, anchors, Objective("kl"))
        assert (abs(result.loss_sum.item()) < 1e-3) is is_zero
        assert result.nll_K.sum() > 10


def test_the_teacher_meets_the_head_once_for_each_needed_position(monkeypatch):
    config, head = tiny_config(), TinyHead()
    features = random_features([300], config)
    anchors = all_anchors(features, config, most=250)
    needed = {int(token) + k for token, slots in zip(anchors.token_A, anchors.slots_A, strict=True) for k in range(int(slots))}
    met = []
    monkeypatch.setattr(scores, "linear", lambda x, weight, plain=scores.linear: met.append(x.shape) or plain(x, weight))
    with torch.no_grad():
        block_loss(lively_drafter(config), head, features, anchors, Objective("kl", chunk=50))
    slots = int(anchors.slots_A.sum())
    assert slots > 5 * len(needed)
    assert sum(rows for rows, width in met if width == config.hidden_size) == slots + len(needed)


def test_only_one_tile_of_logits_is_held_whatever_the_vocabulary_the_anchors_and_the_length(monkeypatch):
    """SpecForge 524: full-vocabulary logits exhaust memory."""
    sizes = []
    monkeypatch.setattr(scores, "linear", lambda x, weight, plain=scores.linear: sizes.append(4 * len(x) * len(weight)) or plain(x, weight))
    config = tiny_config(vocab_size=200_000, hidden_size=16, target_layer_ids=(1,))
    drafter, head = DFlashDrafter(config), TinyHead(200_000, 16)
    for length, most in ((64, 8), (512, 8), (512, 60)):
        features = random_features([length], config)
        block_loss(drafter, head, features, all_anchors(features, config, most), Objective()).loss_sum.backward()
        assert 0 < max(sizes) <= scores.TILE_BYTES["cpu"]


def test_acceptance_is_the_true_prefix_and_not_a_product_of_averages():
    """verl-SpeCo 62, TorchSpec: errors that come together make the product of slot accuracies too small."""
    config, head = tiny_config(block_size=5), TinyHead(hidden=VOCAB)
    head.weight_VH = torch.eye(VOCAB)
    features = random_features([400], config)
    anchors = place_anchors(np.zeros(80, int), np.arange(80) * 5, features.loss_mask_N, [400], 5)
    rng = np.random.default_rng(0)
    right_AK = (rng.random((80, 1)) < 0.5) & (rng.random((80, 4)) < 0.9)
    ids = features.input_ids_N.clone()
    for a, k in zip(*np.nonzero(~right_AK), strict=True):
        ids[5 * a + k + 1] = (ids[5 * a + k + 1] + 1) % VOCAB
    drafter = Oracle(config, lambda token: 30 * torch.eye(VOCAB)[ids[token]])
    expected = sum(next((k for k in range(4) if not right[k]), 4) for right in right_AK)
    for gamma in (1e-6, 1.0, 7.0, float("inf")):
        result = block_loss(drafter, head, features, anchors, Objective(gamma=gamma))
        assert result.accepted == expected
        assert result.correct_K.tolist() == right_AK.sum(0).tolist()
        assert np.isfinite(result.loss_sum.item())
    product = np.cumprod(right_AK.mean(0)).sum()
    assert expected / 80 > 1.3 * product


def test_the_best_token_is_never_a_padding_row_of_the_head():
    config = tiny_config()
    head = TinyHead(valid=VOCAB - 20)
    features = random_features(LENGTHS, config)
    features = replace(features, input_ids_N=features.input_ids_N % (VOCAB - 20))
    drafter = Oracle(config, lambda token: head.weight_VH[features.input_ids_N[token]])
    head.weight_VH[VOCAB - 20 :] = 50.0 * head.weight_VH[:20]
    result = block_loss(drafter, head, features, all_anchors(features, config), Objective())
    assert result.correct_K.tolist() == result.slots_K.tolist()


@pytest.mark.parametrize("supervised", [[], [5], [5, 7], [18], [19]])
def test_a_batch_without_labels_gives_zero_gradients_for_every_parameter(supervised):
    """AutoModel 2468: a rank that skips its backward pass hangs the others."""
    config = tiny_config()
    mask = np.zeros(20, bool)
    mask[supervised] = True
    drafter, features = lively_drafter(config), random_features([20], config, mask)
    result, gradient = loss_and_gradients(drafter, TinyHead(), features, all_anchors(features, config), Objective())
    assert (result.loss_sum.item(), result.weight_sum, result.blocks, result.accepted) == (0.0, 0.0, 0, 0.0)
    assert result.slots_K.tolist() == [0] * 7
    assert all(torch.count_nonzero(g) == 0 for g in gradient.values())


@pytest.mark.parametrize("kind", ["ce", "dpace", "kl"])
@pytest.mark.parametrize("supervised", [[5, 6], [17, 18, 19], [0, 1]])
def test_two_supervised_tokens_are_enough_for_a_finite_loss(supervised, kind):
    """AutoModel 3268: few anchors gave NaN, or the only one was dropped."""
    config = tiny_config()
    mask = np.zeros(20, bool)
    mask[supervised] = True
    drafter, features = lively_drafter(config), random_features([20], config, mask)
    result, gradient = loss_and_gradients(drafter, TinyHead(), features, all_anchors(features, config), Objective(kind))
    assert result.blocks == len(supervised) - 1
    assert result.slots_K.sum() == sum(range(len(supervised)))
    assert np.isfinite(result.loss_sum.item()) and result.loss_sum.item() > 0
    assert all(g.isfinite().all() for g in gradient.values())


def test_a_block_without_labels_contributes_nothing():
    config = tiny_config()
    drafter, features = lively_drafter(config), random_features([20], config, [1] * 10 + [0] * 10)
    labelled = place_anchors([0], [4], features.loss_mask_N, [20], 8)
    both = place_anchors([0, 0], [4, 12], features.loss_mask_N, [20], 8)
    one, expected = loss_and_gradients(drafter, TinyHead(), features, labelled, Objective())
    two, gradient = loss_and_gradients(drafter, TinyHead(), features, both, Objective())
    assert (two.blocks, two.weight_sum) == (one.blocks, one.weight_sum) == (1, one.weight_sum)
    for name, value in gradient.items():
        assert value.isfinite().all() and (value - expected[name]).norm() <= 1e-5 * expected[name].norm()


def test_the_head_is_frozen_and_numbers_are_plain():
    config, head = tiny_config(), TinyHead()
    drafter, features = lively_drafter(config), random_features(LENGTHS, config)
    result, _ = loss_and_gradients(drafter, head, features, all_anchors(features, config), Objective())
    assert head.weight_VH.grad is None and not head.weight_VH.requires_grad
    assert {type(value) for value in (result.weight_sum, result.accepted)} == {float} and type(result.blocks) is int
    assert all(type(value) is np.ndarray for value in (result.slots_K, result.correct_K, result.nll_K))


def test_nothing_of_a_step_stays_alive():
    """SpecForge 390: losses logged with their graph. No cycle either, so memory is free before the collector runs."""
    config, head = tiny_config(), TinyHead()
    drafter, features = lively_drafter(config), random_features(LENGTHS, config)
    gc.disable()
    try:
        result = block_loss(drafter, head, features, all_anchors(features, config), Objective())
        graph = weakref.ref(result.loss_sum)
        log = replace(result, loss_sum=result.loss_sum.item())
        del result
        assert graph() is None and log.weight_sum > 0
    finally:
        gc.enable()


def test_one_short_sample_is_learnt_by_heart_and_drafted_whole_by_the_published_implementation():
    """SpecForge 473: trained well, drafted nothing."""
    torch.manual_seed(0)
    config, head = tiny_config(layer_types=("sliding_attention", "full_attention"), sliding_window=24), TinyHead()
    drafter, features = DFlashDrafter(config), random_features([64], config)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for step in range(160):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - step / 160)
        anchors = all_anchors(features, config, most=62)
        result = block_loss(drafter, head, features, anchors, Objective())
        optimizer.zero_grad()
        (result.loss_sum / result.weight_sum).backward()
        optimizer.step()
    assert result.accepted == result.slots_K.sum()

    oracle = oracle_of(drafter)
    for anchor in (1, 10, 30, 56):
        block = torch.full((1, 8), config.mask_token_id)
        block[0, 0] = features.input_ids_N[anchor]
        with torch.no_grad():
            hidden = oracle(
                position_ids=torch.arange(anchor + 8)[None],
                noise_embedding=head.embed(block),
                target_hidden=features.features_ND[None, :anchor],
            )
        drafted = head.logits(hidden[0, 1:]).argmax(-1)
        assert drafted.tolist() == features.input_ids_N[anchor + 1 : anchor + 8].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mse"}, "'mse' is not known"),
        ({"gamma": 0.0}, "gamma is 0.0"),
        ({"alpha": 0.0}, "alpha is 0.0"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
def test_impossible_objectives_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        Objective(**changes)


def test_kl_without_final_hidden_states_says_what_to_load():
    config = tiny_config()
    features = replace(random_features(LENGTHS, config), last_hidden_NH=None)
    with pytest.raises(ValueError, match="with_last_hidden=True"):
        block_loss(lively_drafter(config), TinyHead(), features, all_anchors(features, config), Objective("kl"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_a_step_needs_well_under_60_percent_of_the_plain_versions_memory(tmp_path):
    benchmark = Path(__file__).parents[1] / "benchmarks" / "training_step.py"
    command = [sys.executable, str(benchmark), "--cases", "small", "--steps", "1", "--out", str(tmp_path / "steps.json")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    row = json.loads((tmp_path / "steps.json").read_text())["rows"][0]
    assert row["ours"]["memory_gib"] < 0.6 * row["dense"]["memory_gib"]
    assert row["ours"]["losses"] == pytest.approx(row["dense"]["losses"], rel=1e-4)
