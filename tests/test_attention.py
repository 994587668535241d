import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask

from dflash_nb.model.attention import GROUP, BlockLayout, LayerMask, block_attention
from dflash_nb.model.flex import flex_block_attention

MASKS = [LayerMask(False, None), LayerMask(True, None), LayerMask(True, 12), LayerMask(True, 5), LayerMask(False, 5), LayerMask(True, 900)]


def layout_of(lengths, anchors_of_rows, slots):
    starts = np.cumsum(lengths) - lengths
    start = np.repeat(starts, [len(anchors) for anchors in anchors_of_rows])
    return BlockLayout(torch.from_numpy(start), torch.tensor(sum((sorted(a) for a in anchors_of_rows), [])), slots)  # noqa: RUF017


def dense_attention(query, context_key, context_value, block_key, block_value, layout, mask):
    """One boolean mask over all blocks and all tokens, from the definition of what a slot sees."""
    blocks, slots, heads, head_dim = query.shape
    context = context_key.shape[0]
    slot, token = torch.arange(slots), torch.arange(context)
    start, anchor = layout.start_A[:, None, None], layout.position_A[:, None, None]
    age = anchor + slot[:, None] - (token - start)
    of_context = (token >= start) & (token - start < anchor) & (age < (mask.window or 10**9))
    distance = slot[:, None] - slot
    of_block = ((distance >= 0) | (not mask.causal)) & (distance.abs() < (mask.window or 10**9))
    visible = torch.cat([of_context, torch.zeros(blocks, slots, blocks * slots, dtype=torch.bool)], -1)
    for a in range(blocks):
        visible[a, :, context + a * slots : context + (a + 1) * slots] = of_block
    repeat = heads // block_key.shape[2]
    key = torch.cat([context_key, block_key.flatten(0, 1)]).repeat_interleave(repeat, 1).transpose(0, 1)
    value = torch.cat([context_value, block_value.flatten(0, 1)]).repeat_interleave(repeat, 1).transpose(0, 1)
    scores = query.flatten(0, 1).transpose(0, 1) @ key.transpose(1, 2) * head_dim**-0.5
    weights = scores.masked_fill(~visible.flatten(0, 1), -torch.inf).softmax(-1)
    return (weights @ value).transpose(0, 1).view(query.shape)


def random_tensors(layout, tokens, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    blocks, slots = len(layout.position_A), layout.block_size
    shapes = [(blocks, slots, heads, head_dim), *[(tokens, kv_heads, head_dim)] * 2, *[(blocks, slots, kv_heads, head_dim)] * 2]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_output_and_gradients_equal_a_dense_mask(mask):
    layout = layout_of([30, 3, 70], [[0, 5, 29], [0, 1, 2], list(range(1, 70, 2))], slots=6)
    tensors = random_tensors(layout, 103)
    grouped, dense = block_attention(*tensors, layout, mask), dense_attention(*tensors, layout, mask)
    assert (grouped - dense).abs().max() < 1e-12
    weight = torch.randn_like(dense)
    for ours, reference in zip(*(torch.autograd.grad((out * weight).sum(), tensors) for out in (grouped, dense)), strict=True):
        assert (ours - reference).abs().max() < 1e-12


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 30)), min_size=1, max_size=3),
    st.integers(2, 5),
    st.booleans(),
    st.none() | st.integers(1, 45),
    st.randoms(use_true_random=False),
)
@settings(max_examples=30, deadline=None)
def test_any_ragged_batch_equals_a_dense_mask(rows, slots, causal, window, random):
    lengths = [length for length, _ in rows]
    anchors = [random.sample(range(length), min(count, length)) for length, count in rows]
    if not any(anchors):
        anchors[0] = [0]
    layout, mask = layout_of(lengths, anchors, slots), LayerMask(causal, window)
    tensors = [tensor.detach() for tensor in random_tensors(layout, sum(lengths))]
    assert (block_attention(*tensors, layout, mask) - dense_attention(*tensors, layout, mask)).abs().max() < 1e-12


def test_groups_stay_in_a_row_and_read_only_up_to_their_last_anchor():
    layout = layout_of([400, 50], [range(0, 400, 10), range(20)], slots=4)
    groups = layout.groups
    assert [group.first for group in groups] == [0, *(group.last for group in groups[:-1])] and groups[-1].last == 60
    for group in groups:
        assert group.last - group.first <= GROUP
        assert len(set(layout.start_A[group.first : group.last].tolist())) == 1
        assert group.anchors.tolist() == layout.position_A[group.first : group.last].tolist()


def test_scores_touched_are_near_half_of_those_of_a_dense_context_and_no_block_pays_for_another():
    blocks, slots, tokens = 256, 16, 2048
    layout = layout_of([tokens], [range(0, tokens, tokens // blocks)], slots)
    touched = sum((group.last - group.first) * slots * (int(group.anchors[-1]) + slots) for group in layout.groups)
    dense = blocks * slots * (tokens + blocks * slots)
    assert touched < 0.18 * dense


def test_what_is_kept_for_backward_grows_with_tokens_and_slots_not_with_their_product():
    def kept(scale):
        layout = layout_of([100 * scale], [range(0, 100 * scale, 4)], slots=4)
        bytes_of = {}

        def pack(tensor):
            bytes_of[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = block_attention(*random_tensors(layout, 100 * scale), layout, LayerMask(False, None))
        assert output.requires_grad
        return sum(bytes_of.values())

    assert kept(8) < 8.5 * kept(1)


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_computes_the_same_and_visits_the_right_tiles(mask):
    layout = layout_of([300, 40, 500], [range(3, 300, 40), range(0, 40, 3), range(250, 500, 9)], slots=16)
    tensors = [tensor.detach() for tensor in random_tensors(layout, 840, head_dim=16, dtype=torch.float32)]
    assert (block_attention(*tensors, layout, mask) - flex_block_attention(*tensors, layout, mask)).abs().max() < 2e-6
    tiles = layout.tile_masks[mask]
    assert tiles.seq_lengths == (64 * 16, 1024 + 64 * 16)
    reference = create_block_mask(tiles.mask_mod, 1, 1, *tiles.seq_lengths, device="cpu")
    assert ((tiles.to_dense() - reference.to_dense()) >= 0).all()
    assert tiles.to_dense().sum() <= 1.02 * reference.to_dense().sum()
    assert (tiles.full_kv_num_blocks == reference.full_kv_num_blocks).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_flex_attention_on_a_gpu_has_the_same_gradients(mask):
    layout = layout_of([300, 40, 500], [range(3, 300, 40), range(0, 40, 3), range(250, 500, 9)], slots=16)
    tensors = random_tensors(layout, 840, head_dim=64, dtype=torch.float32)
    moved = [tensor.detach().cuda().requires_grad_() for tensor in tensors]
    on_gpu = block_attention(*moved, BlockLayout(layout.start_A.cuda(), layout.position_A.cuda(), 16), mask)
    on_cpu = block_attention(*tensors, layout, mask)
    assert (on_gpu.cpu() - on_cpu).abs().max() < 5e-3
    for ours, reference in zip(
        *(torch.autograd.grad(out.square().sum(), leaves) for out, leaves in ((on_gpu, moved), (on_cpu, tensors))), strict=True
    ):
        assert (ours.cpu() - reference).norm() < 1e-2 * reference.norm()
