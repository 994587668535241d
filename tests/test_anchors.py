import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_nb.model.anchors import draw_anchors, place_anchors

BLOCK = 8


def drawn(mask, lengths, ids=None, most=10_000, block=BLOCK, seed=0, epoch=0):
    return draw_anchors(np.asarray(mask, bool), lengths, np.arange(len(lengths)) if ids is None else ids, most, block, seed, epoch)


def pairs(anchors):
    return list(zip(anchors.row_A.tolist(), anchors.position_A.tolist(), strict=True))


@st.composite
def ragged_masks(draw):
    lengths = draw(st.lists(st.integers(1, 30), min_size=1, max_size=6))
    return [draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in lengths]


@given(ragged_masks(), st.integers(2, 9))
@settings(max_examples=150, deadline=None)
def test_candidates_and_slots_equal_the_rule_read_token_by_token(masks, block):
    expected = {}
    for row, mask in enumerate(masks):
        for anchor, supervised in enumerate(mask):
            if supervised and anchor + 1 < len(mask) and mask[anchor + 1]:
                slots = 0
                while slots + 1 < block and anchor + slots + 1 < len(mask) and mask[anchor + slots + 1]:
                    slots += 1
                expected[row, anchor] = slots
    anchors = drawn(np.concatenate(masks), [len(mask) for mask in masks], block=block)
    assert dict(zip(pairs(anchors), anchors.slots_A.tolist(), strict=True)) == expected
    assert pairs(anchors) == sorted(expected)


def test_every_anchor_and_label_of_1000_draws_is_supervised_and_in_its_row():
    rng = np.random.default_rng(0)
    lengths = np.array([5, 90, 1, 33])
    mask = rng.random(lengths.sum()) < 0.7
    row_of = np.repeat(np.arange(4), lengths)
    for epoch in range(1000):
        anchors = drawn(mask, lengths, most=6, epoch=epoch)
        token, row = anchors.token_A.numpy(), anchors.row_A.numpy()
        for k in range(BLOCK):
            labelled = anchors.slots_A.numpy() >= k
            assert mask[token[labelled] + k].all() and (row_of[token[labelled] + k] == row[labelled]).all()
        assert len(set(pairs(anchors))) == len(anchors)
        assert np.bincount(row, minlength=4).max() <= 6


def test_a_row_gets_the_same_anchors_in_any_batch():
    rng = np.random.default_rng(1)
    lengths, ids = [40, 200, 75], [11, 4, 900]
    masks = [rng.random(n) < 0.8 for n in lengths]
    together = drawn(np.concatenate(masks), lengths, ids, most=9)
    backwards = drawn(np.concatenate(masks[::-1]), lengths[::-1], ids[::-1], most=9)
    for row in range(3):
        alone = drawn(masks[row], [lengths[row]], [ids[row]], most=9).position_A.tolist()
        assert len(alone) == 9
        assert together.position_A[together.row_A == row].tolist() == alone
        assert backwards.position_A[backwards.row_A == 2 - row].tolist() == alone


def test_seed_epoch_and_sample_each_change_the_draw_and_are_not_added():
    mask = np.ones(500, bool)
    draws = {
        (seed, epoch, sample): tuple(drawn(mask, [500], [sample], most=20, seed=seed, epoch=epoch).position_A.tolist())
        for seed in range(4)
        for epoch in range(4)
        for sample in range(4)
    }
    assert len(set(draws.values())) == len(draws)
    assert drawn(mask, [500], most=20, seed=-3).position_A.tolist() != drawn(mask, [500], most=20, seed=3).position_A.tolist()


def test_every_valid_position_is_drawn_equally_often():
    mask = np.zeros(60, bool)
    mask[10:50] = True
    counts = np.zeros(60)
    draws = 4000
    for epoch in range(draws):
        counts[drawn(mask, [60], most=5, epoch=epoch).position_A.numpy()] += 1
    assert counts[:10].sum() == counts[49:].sum() == 0
    expected = draws * 5 / 39
    chi_square = ((counts[10:49] - expected) ** 2 / expected).sum()
    assert chi_square < 38 + 5 * np.sqrt(2 * 38)


@pytest.mark.parametrize(("supervised", "expected"), [([], []), ([7], []), ([7, 8], [1]), ([7, 9], []), ([17, 18, 19], [2, 1])])
def test_barely_supervised_rows(supervised, expected):
    mask = np.zeros(20, bool)
    mask[supervised] = True
    anchors = drawn(mask, [20])
    assert anchors.slots_A.tolist() == expected


def test_blocks_may_start_in_the_last_tokens_of_the_longest_row():
    anchors = drawn(np.ones(20, bool), [20])
    assert anchors.position_A.tolist() == list(range(19))
    assert anchors.slots_A.tolist() == [7] * 12 + [7, 6, 5, 4, 3, 2, 1]


def test_short_conversations_are_not_starved_by_long_neighbours():
    """speculators 1071: a limit a packed row instead of a sample."""
    lengths = [3000, 187]
    anchors = drawn(np.ones(sum(lengths), bool), lengths, most=100)
    assert np.bincount(anchors.row_A.numpy()).tolist() == [100, 100]


def test_placed_anchors_are_ordered_and_may_have_no_label():
    anchors = place_anchors([1, 0, 1], [4, 2, 0], np.array([1, 1, 1, 1, 0, 1, 1, 1, 1]), [4, 5], BLOCK)
    assert pairs(anchors) == [(0, 2), (1, 0), (1, 4)]
    assert anchors.slots_A.tolist() == [1, 0, 0]
    assert anchors.token_A.tolist() == [2, 4, 8]


def test_tensors_are_accepted_and_may_move():
    anchors = draw_anchors(torch.ones(9, dtype=torch.bool), torch.tensor([4, 5]), torch.tensor([0, 1]), 3, 4, 0, 0).to("cpu")
    assert anchors.row_A.dtype == torch.int64 and len(anchors) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": [1] * 8}, "sum to 9"),
        ({"lengths": [9, 0]}, "at least 1"),
        ({"ids": [1]}, "1 sample ids for 2 rows"),
        ({"most": 0}, "max_anchors is 0"),
        ({"block": 1}, "block_size is 1"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments = {"mask": [1] * 9, "lengths": [4, 5]} | change
    with pytest.raises(ValueError, match=message):
        drawn(**arguments)


@pytest.mark.parametrize(("row", "position"), [(0, 4), (2, 0), (0, -1), (-1, 0)])
def test_a_position_outside_its_row_is_refused(row, position):
    with pytest.raises(ValueError, match=f"anchor {position} of row {row} is outside"):
        place_anchors([row], [position], np.ones(9), [4, 5], BLOCK)
