import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_drafter import TinyHead

from dflash_nb.model import scores
from dflash_nb.model.scores import score_labels, score_teacher


def reference(hidden, label, head, teacher=None):
    hidden = hidden.clone().requires_grad_()
    log_prob = head.logits(hidden).log_softmax(-1)
    nll = -log_prob.gather(1, label[:, None])[:, 0]
    loss = nll
    if teacher is not None:
        log_teacher = head.logits(teacher).log_softmax(-1)
        loss = (log_teacher.exp() * (log_teacher - log_prob)).sum(1)
    hit = head.logits(hidden)[:, : head.valid_vocab].argmax(1) == label
    return loss, nll, hit, torch.autograd.grad(loss.sum(), hidden)[0]


@given(
    rows=st.integers(1, 40),
    vocab=st.integers(2, 3000),
    chunk=st.integers(1, 50),
    softcap=st.none() | st.floats(1, 30),
    shared=st.integers(1, 9),
)
@settings(max_examples=40, deadline=None)
def test_any_tiling_equals_the_whole_softmax(rows, vocab, chunk, softcap, shared):
    generator = torch.Generator().manual_seed(rows * vocab)
    head = TinyHead(vocab, 12, scale=1.3, softcap=softcap, valid=max(1, vocab - 5))
    hidden = torch.randn(rows, 12, generator=generator)
    label = torch.randint(0, head.valid_vocab, (rows,), generator=generator)
    teachers, row_n = torch.randn(rows, 12, generator=generator), torch.arange(rows) // shared
    normal = scores.TILE_BYTES["cpu"]
    scores.TILE_BYTES["cpu"] = 1
    try:
        both = [
            (score_labels(hidden, label, head, chunk, True), reference(hidden, label, head)),
            (score_teacher(hidden, label, head, chunk, True, teachers, row_n), reference(hidden, label, head, teachers[row_n])),
        ]
    finally:
        scores.TILE_BYTES["cpu"] = normal
    for ours, expected in both:
        for value, wanted in zip((ours.loss_n, ours.nll_n, ours.grad_nE), (expected[0], expected[1], expected[3]), strict=True):
            assert torch.allclose(value, wanted.detach(), rtol=1e-4, atol=1e-4)
        assert torch.equal(ours.hit_n, expected[2])


def test_enormous_logits_neither_overflow_nor_lose_the_label(monkeypatch):
    monkeypatch.setitem(scores.TILE_BYTES, "cpu", 1)
    head = TinyHead(5000, 12)
    hidden = 1e4 * torch.randn(6, 12)
    label = head.logits(hidden).argmax(1)
    ours = score_labels(hidden, label, head, 512, True)
    assert ours.nll_n.tolist() == pytest.approx([0] * 6, abs=0.1) and ours.hit_n.all()
    assert ours.grad_nE.abs().max() < 1e-3
    wrong = score_labels(-hidden, label, head, 512, True)
    assert wrong.loss_n.isfinite().all() and wrong.loss_n.min() > 1e4 and wrong.grad_nE.isfinite().all()


def test_without_gradient_the_second_product_is_left_out(monkeypatch):
    calls = []
    monkeypatch.setattr(scores, "linear", lambda x, weight, plain=scores.linear: calls.append(1) or plain(x, weight))
    head, hidden, label = TinyHead(), torch.randn(9, 48), torch.zeros(9, dtype=torch.long)
    assert score_labels(hidden, label, head, 512, False).grad_nE is None
    assert len(calls) == 1
