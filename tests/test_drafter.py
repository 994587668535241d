from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dflash.model import DFlashDraftModel
from tiny_drafter import lively_drafter, random_features, tiny_config
from transformers import DynamicCache, Qwen3Config

from dflash_nb.model.anchors import draw_anchors, place_anchors
from dflash_nb.model.drafter import FULL, SLIDING, DFlashDrafter, DrafterConfig
from dflash_nb.model.target_info import TargetInfo

LENGTHS = [40, 7, 90]
CASES = {
    "full": {},
    "full, 5 layers on 3 captured": {"num_layers": 5, "layer_types": ()},
    "sliding, context longer than the window": {"layer_types": (SLIDING, SLIDING), "sliding_window": 12, "rope_theta": 1e7},
    "sliding, context shorter than the window": {"layer_types": (SLIDING, SLIDING), "sliding_window": 300},
    "window smaller than the block": {"layer_types": (SLIDING, FULL), "sliding_window": 5, "rope_theta": 1e4},
    "sliding, not causal": {"layer_types": (SLIDING, SLIDING), "sliding_window": 5, "is_causal": False},
    "full, causal": {"is_causal": True, "rope_theta": 1e5},
    "one head for all queries": {"num_kv_heads": 1, "head_dim": 32},
    "no grouping": {"num_kv_heads": 4, "target_layer_ids": (9,)},
}


def oracle_of(drafter: DFlashDrafter) -> DFlashDraftModel:
    c = drafter.config
    config = Qwen3Config(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        rope_theta=c.rope_theta,
        rms_norm_eps=c.rms_norm_eps,
        vocab_size=c.vocab_size,
        layer_types=list(c.layer_types),
        sliding_window=c.sliding_window,
        use_sliding_window=c.sliding_window is not None,
        max_position_embeddings=c.max_positions,
        attn_implementation="sdpa",
    )
    config.dflash_config = {"mask_token_id": c.mask_token_id, "target_layer_ids": list(c.target_layer_ids), "block_size": c.block_size}
    config.num_target_layers = c.num_target_layers
    if c.is_causal is not None:
        config.is_causal = c.is_causal
    oracle = DFlashDraftModel(config).eval()
    oracle.load_state_dict(drafter.state_dict())
    return oracle


def blocks_of(config, lengths=LENGTHS, most=3):
    features = random_features(lengths, config)
    anchors = draw_anchors(features.loss_mask_N, lengths, range(len(lengths)), most, config.block_size, seed=0, epoch=0)
    embeds = torch.randn(len(anchors), config.block_size, config.hidden_size, generator=torch.Generator().manual_seed(2))
    return features.features_ND, anchors, embeds


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_training_equals_the_published_implementation_and_drafting_on_a_cache(changes):
    drafter = lively_drafter(tiny_config(**changes))
    oracle = oracle_of(drafter)
    features, anchors, embeds = blocks_of(drafter.config)
    trained = drafter.draft_blocks(features, LENGTHS, anchors, embeds)
    for a in range(len(anchors)):
        start, anchor = int(anchors.start_A[a]), int(anchors.position_A[a])
        context = features[start : start + anchor]
        if anchor:
            with torch.no_grad():
                positions = torch.arange(anchor + drafter.config.block_size)[None]
                published = oracle(position_ids=positions, noise_embedding=embeds[a : a + 1], target_hidden=context[None])[0]
            assert (published - trained[a]).abs().max() < 1e-5
        cache = drafter.new_cache()
        for piece in (slice(0, anchor // 2), slice(anchor // 2, anchor)):
            drafter.extend(cache, context[piece], piece.start)
        assert (drafter.draft(cache, embeds[a], anchor) - trained[a]).abs().max() < 1e-5


def test_drafting_pass_after_pass_equals_the_published_cache():
    drafter = lively_drafter(tiny_config(layer_types=(SLIDING, FULL), sliding_window=9))
    oracle, ours, theirs = oracle_of(drafter), drafter.new_cache(), DynamicCache()
    features, _, _ = blocks_of(drafter.config)
    end = 0
    for accepted in (11, 3, 1, 8, 5):
        block = torch.randn(drafter.config.block_size, drafter.config.hidden_size)
        new = features[end : end + accepted]
        drafter.extend(ours, new, end)
        positions = torch.arange(end, end + accepted + len(block))[None]
        with torch.no_grad():
            published = oracle(position_ids=positions, noise_embedding=block[None], target_hidden=new[None], past_key_values=theirs)[0]
        end += accepted
        theirs.crop(end - theirs.get_seq_length())
        assert (drafter.draft(ours, block, end) - published).abs().max() < 1e-5


def test_a_cropped_cache_drafts_as_if_the_dropped_tokens_had_never_come():
    drafter = lively_drafter(tiny_config())
    features, _, embeds = blocks_of(drafter.config)
    cache, fresh = drafter.new_cache(), drafter.new_cache()
    drafter.extend(cache, features[:20], 0)
    expected = drafter.draft(cache, embeds[0], 20)
    drafter.extend(cache, torch.randn(13, features.shape[1]), 20)
    assert torch.equal(drafter.draft(cache, embeds[0], 20), expected)
    cache.crop(12)
    drafter.extend(cache, features[12:20], 12)
    assert cache.length == 20
    assert torch.allclose(drafter.draft(cache, embeds[0], 20), expected, atol=1e-6)
    with pytest.raises(ValueError, match="cannot crop a context of 20 tokens to 21"):
        cache.crop(21)
    with pytest.raises(ValueError, match="holds 20 tokens, the new ones start at 22"):
        drafter.extend(cache, features[:1], 22)
    with pytest.raises(ValueError, match="position 3 needs all context before it; the cache holds 0"):
        drafter.draft(fresh, embeds[0], 3)


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_nothing_at_or_after_the_anchor_reaches_its_block(changes):
    """SpecForge 470: visibility by block number lets the future in. Bitwise, so nothing is excused as rounding."""
    drafter = lively_drafter(tiny_config(**changes))
    features, anchors, embeds = blocks_of(drafter.config, [60, 25])
    before = drafter.draft_blocks(features, [60, 25], anchors, embeds)
    for cut in (0, 9, 31, 59):
        changed = features.clone()
        changed[cut:60] = torch.randn_like(changed[cut:60]) * 5
        after = drafter.draft_blocks(changed, [60, 25], anchors, embeds)
        safe = (anchors.row_A == 1) | (anchors.position_A <= cut)
        assert torch.equal(before[safe], after[safe])
        assert not torch.equal(before[~safe], after[~safe]) or safe.all()


def test_the_token_before_the_anchor_is_seen_and_those_before_the_window_are_not():
    drafter = lively_drafter(tiny_config(layer_types=(SLIDING, SLIDING), sliding_window=10))
    features, _, embeds = blocks_of(drafter.config, [50])
    anchors = place_anchors([0], [30], np.ones(50), [50], 8)
    before = drafter.draft_blocks(features, [50], anchors, embeds[:1])[0]

    def slots_that_change(token):
        changed = features.clone()
        changed[token] += 1
        after = drafter.draft_blocks(changed, [50], anchors, embeds[:1])[0]
        return [k for k in range(8) if not torch.equal(before[k], after[k])]

    assert slots_that_change(29) == list(range(8))
    assert slots_that_change(21)[0] == 0  # 30 - 21 < 10
    assert slots_that_change(20) == []
    assert slots_that_change(30) == []


def test_a_block_sees_no_other_block_and_no_other_row():
    drafter = lively_drafter(tiny_config())
    features, anchors, embeds = blocks_of(drafter.config)
    before = drafter.draft_blocks(features, LENGTHS, anchors, embeds)
    changed = embeds.clone()
    changed[5] += 1
    after = drafter.draft_blocks(features, LENGTHS, anchors, changed)
    others = torch.arange(len(anchors)) != 5
    assert torch.equal(before[others], after[others]) and not torch.equal(before[5], after[5])
    for row, (start, length) in enumerate(zip(np.cumsum(LENGTHS) - LENGTHS, LENGTHS, strict=True)):
        alone = replace(
            place_anchors([0] * int((anchors.row_A == row).sum()), anchors.position_A[anchors.row_A == row], np.ones(length), [length], 8)
        )
        own = drafter.draft_blocks(features[start : start + length], [length], alone, embeds[anchors.row_A == row])
        assert (own - before[anchors.row_A == row]).abs().max() < 1e-5


def test_the_last_slot_reaches_slot_1_of_a_full_layer_and_not_of_a_causal_one():
    """SpecForge 427."""
    for changes, reaches in [({}, True), ({"is_causal": True}, False), ({"layer_types": (SLIDING,) * 2, "sliding_window": 64}, False)]:
        drafter = lively_drafter(tiny_config(**changes))
        features, anchors, embeds = blocks_of(drafter.config)
        changed = embeds.clone()
        changed[:, -1] += 1
        before, after = (drafter.draft_blocks(features, LENGTHS, anchors, e)[:, 1] for e in (embeds, changed))
        assert torch.equal(before, after) is not reaches


def test_parameters_are_the_published_keys_and_nothing_else():
    drafter = DFlashDrafter(tiny_config(num_layers=2))
    layer = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm"]
    layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    assert set(drafter.state_dict()) == {name for name, _ in drafter.named_parameters()} == expected
    assert all(parameter.dtype == torch.float32 for parameter in drafter.parameters())


def target_info(**changes) -> TargetInfo:
    values = {
        "name": "Qwen3.6-27B",
        "path": Path(),
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_layers": 64,
        "num_heads": 24,
        "num_kv_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "valid_vocab": 248077,
        "max_positions": 262144,
        "rope_theta": 1e7,
        "rms_norm_eps": 1e-6,
        "tied_head": False,
        "layer_types": ("linear_attention",) * 64,
        "mask_token_id": 248070,
        "bos_token_id": None,
        "eos_token_ids": (248044,),
        "pad_token_id": 248044,
        "tokenizer_fingerprint": None,
    }
    return TargetInfo(**values | changes)


def test_the_drafter_of_the_reference_target_has_its_published_shape_and_size():
    config = DrafterConfig.for_target(target_info())
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.intermediate_size) == (32, 8, 128, 17408)
    assert (config.target_layer_ids, config.mask_token_id, config.rope_theta) == ((1, 16, 31, 46, 61), 248070, 1e7)
    assert config.layer_types == (FULL,) * 5
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    assert round(sum(parameter.numel() for parameter in drafter.parameters()) / 1e9, 3) == 1.730
    assert drafter.fc.weight.shape == (5120, 5 * 5120)


def test_a_small_target_lends_its_heads_and_any_field_can_be_set():
    info = target_info(hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64)
    config = DrafterConfig.for_target(info, num_layers=5, target_layer_ids=(2, 15, 27), sliding_window=512, block_size=8, mask_token_id=7)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert config.layer_types == (SLIDING,) * 5 and config.sliding_window == 512 and config.mask_token_id == 7
    assert DFlashDrafter(config).fc.weight.shape == (576, 3 * 576)
    assert DrafterConfig.for_target(info, num_layers=2, num_heads=12, is_causal=True).num_heads == 12


def test_causality_override_wins_over_the_layer_type():
    sliding = {"layer_types": (SLIDING, FULL), "sliding_window": 4}
    masks = {
        override: [tiny_config(**sliding, is_causal=override).layer_mask(i).causal for i in range(2)] for override in (None, True, False)
    }
    assert masks == {None: [True, False], True: [True, True], False: [False, False]}
    assert [tiny_config(**sliding).layer_mask(i).window for i in range(2)] == [4, None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_layer_ids": (1, 2, 2)}, "each layer once"),
        ({"target_layer_ids": (-1, 2)}, "out of range"),
        ({"target_layer_ids": (2, 10)}, "out of range"),
        ({"mask_token_id": 300}, "mask_token_id 300 has no embedding"),
        ({"block_size": 1}, "block_size is 1"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads 3"),
        ({"layer_types": (FULL,)}, "must name 2 layers"),
        ({"layer_types": (FULL, "linear_attention")}, "must name 2 layers"),
        ({"layer_types": (FULL, SLIDING)}, "sliding_window of at least 1"),
    ],
)
def test_impossible_shapes_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        tiny_config(**changes)


@pytest.mark.parametrize("layers", [(6, 5), (4, 2)])
def test_shallow_targets_ask_for_explicit_layers(layers):
    """ModelOpt 2149: the usual spread names a layer twice."""
    with pytest.raises(ValueError, match="target_layers"):
        DrafterConfig.for_target(target_info(num_layers=layers[0]), num_layers=layers[1])


def test_bfloat16_weights_and_autocast_stay_close_and_positions_stay_exact():
    """In bfloat16, positions 3000 and 3001 would have the same angle."""
    config = tiny_config(rope_theta=1e4)
    drafter = lively_drafter(config)
    features = torch.randn(3020, 3 * config.hidden_size)
    anchors = place_anchors([0, 0], [3000, 3001], np.ones(3020), [3020], 8)
    embeds = torch.randn(1, 8, config.hidden_size).expand(2, -1, -1)
    exact = drafter.draft_blocks(features, [3020], anchors, embeds)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = drafter.draft_blocks(features.bfloat16(), [3020], anchors, embeds.bfloat16())
    half = drafter.bfloat16().draft_blocks(features.bfloat16(), [3020], anchors, embeds.bfloat16())
    assert half.dtype == torch.bfloat16
    apart = (exact[0] - exact[1]).norm()
    for approximate in (mixed.float(), half.float()):
        assert (approximate - exact).norm() < 0.05 * exact.norm()
        assert 0.5 < (approximate[0] - approximate[1]).norm() / apart < 2


def test_a_fresh_drafter_has_a_context_of_unit_size_whatever_the_scale_of_the_features():
    drafter = DFlashDrafter(tiny_config())
    for scale in (0.1, 1.0, 300.0):
        context = drafter.project_context(scale * torch.randn(200, 3 * drafter.config.hidden_size))
        assert context.square().mean().sqrt().item() == pytest.approx(1, abs=0.02)


def test_a_block_without_labels_brings_no_nan_into_any_gradient():
    drafter = lively_drafter(tiny_config(layer_types=(SLIDING, FULL), sliding_window=3))
    features, _, embeds = blocks_of(drafter.config, [9])
    anchors = place_anchors([0, 0], [0, 8], np.ones(9), [9], 8)
    drafter.draft_blocks(features, [9], anchors, embeds[:2])[0].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in drafter.parameters())
