"""Draft and verify: lossless, rolled back rightly, counted rightly, and without side effects."""

import collections
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from tiny_targets import MASK_TOKEN, save_target
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from dflash_nb.model.decode import REPEAT_LIMIT, TargetSession, _Choice, evaluating, generate, measure_tau, plain_generate
from dflash_nb.model.drafter import DFlashDrafter, DrafterConfig
from dflash_nb.model.target import FrozenTarget

FAMILIES = ["hybrid", "qwen3", "llama", "gemma2", "granite"]
LAYER_IDS = (1, 3, 6)
BLOCK = 8


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    wide = dict.fromkeys(("qwen3", "llama"), 0.3)  # random attention models repeat themselves unless their weights are wide
    folders = {family: save_target(root / family, family, initializer_range=wide.get(family, 0.1)) for family in FAMILIES}
    return {family: FrozenTarget.load(folder, LAYER_IDS) for family, folder in folders.items()}


def new_drafter(target, **shape):
    torch.manual_seed(3)
    shape = {"num_layers": 2, "block_size": BLOCK, "target_layer_ids": LAYER_IDS, **shape}
    drafter = DFlashDrafter(DrafterConfig.for_target(target.info, **shape))
    for parameter in drafter.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return drafter


class Oracle(DFlashDrafter):
    """A drafter that knows the text and is right with probability ``hit`` in every slot; it runs the real cache all the same."""

    def know(self, text, head, hit, seed=0):
        self.text, self.hit, self.weight_VH = text, hit, head.weight_VH / head.weight_VH.norm(dim=-1, keepdim=True)
        self.noise = torch.Generator().manual_seed(seed)
        self.seen = []
        return self

    def extend(self, cache, features_TF, start):
        self.seen.append(features_TF)
        super().extend(cache, features_TF, start)

    def draft(self, cache, block_embeds_BE, anchor_position):
        assert cache.length == anchor_position, "the context ends right before the anchor"
        hidden_BE = super().draft(cache, block_embeds_BE, anchor_position)
        for k in range(1, len(hidden_BE)):
            if anchor_position + k < len(self.text) and torch.rand((), generator=self.noise) < self.hit:
                hidden_BE[k] = 10 * self.weight_VH[self.text[anchor_position + k]]
        return hidden_BE


def oracle(target, text, hit, seed=0):
    config = new_drafter(target).config
    return Oracle(config).know(text, target.head(), hit, seed)


def assert_same_state(got, expected):
    """Equal up to the rounding of differently chunked passes; another state would differ by the size of the state."""
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < 2e-3 * expected.abs().max()


def prompt_of(seed, length=20):
    return torch.randint(2, MASK_TOKEN, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_that_of_transformers(targets, family):
    target, prompt = targets[family], prompt_of(1)
    theirs = target.model.generate(torch.tensor([prompt]), max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert plain_generate(target, prompt, 60, stop_ids=[]) == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("hit", [0.0, 0.7, 1.0])
def test_greedy_output_is_plain_decoding_whatever_is_drafted(targets, family, hit):
    target, prompt = targets[family], prompt_of(2)
    plain = plain_generate(target, prompt, 50, stop_ids=[])
    drafter = oracle(target, prompt + plain, hit)
    done = generate(target, drafter, prompt, 50, stop_ids=[])
    assert done.tokens == plain
    assert sum(done.accepted_per_pass) == len(plain) - 1
    if hit == 1.0:
        assert done.accepted_per_pass[:-1] == [BLOCK] * (len(done.accepted_per_pass) - 1), "B - 1 drafted tokens and the bonus"
    features_TD, _ = TargetSession(target).read((prompt + plain)[: sum(map(len, drafter.seen))])
    assert_same_state(torch.cat(drafter.seen), features_TD)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_plain_decoding_with_a_real_drafter(targets, family):
    target = targets[family]
    drafter = new_drafter(target)
    for seed in range(2):
        prompt = prompt_of(seed, 5 + 60 * seed)
        assert generate(target, drafter, prompt, 30, stop_ids=[]).tokens == plain_generate(target, prompt, 30, stop_ids=[])


def test_greedy_output_of_the_shipped_target_is_plain_decoding():
    target = FrozenTarget.load("sample", LAYER_IDS)
    for seed, text in enumerate(("def mean(values):\n", "    def __init__(self, name, value=None):\n")):
        prompt = target.tokenizer(text)["input_ids"]
        plain = plain_generate(target, prompt, 60)
        assert generate(target, oracle(target, prompt + plain, 0.7, seed), prompt, 60).tokens == plain


def test_a_recurrent_state_that_is_not_rolled_back_would_be_seen(targets, monkeypatch):
    """What cutting keys and values alone does to a hybrid: the text differs."""
    target, prompt = targets["hybrid"], prompt_of(2)
    plain = plain_generate(target, prompt, 60, stop_ids=[])

    class CutOnly(TargetSession):
        def __init__(self, target):
            super().__init__(target)
            self.can_cut = True

        def keep(self, count):
            for layer in self.cache.layers:
                if type(layer) is DynamicLayer and count < len(self._tried):
                    layer.crop(count - len(self._tried))

    monkeypatch.setattr("dflash_nb.model.decode.TargetSession", CutOnly)
    assert generate(target, oracle(target, prompt + plain, 0.5), prompt, 60, stop_ids=[]).tokens != plain


@pytest.mark.parametrize("family", ["hybrid", "gemma2", "llama"])
def test_a_session_forgets_what_is_not_kept(targets, family):
    target, text = targets[family], prompt_of(4, 90)
    expected_TD, expected_TH = TargetSession(target).read(text)
    session = TargetSession(target)
    session.read(text[:10])
    at = 10
    for count in (1, 3, 8, 0, 8, 8, 8, 8, 5, 2, 8, 1):
        session.try_block(prompt_of(at, 8))
        session.keep(0)
        features_TD, hidden_TH = session.try_block(text[at : at + 8])
        assert_same_state(features_TD, expected_TD[at : at + 8])
        assert_same_state(hidden_TH, expected_TH[at : at + 8])
        session.keep(count)
        at += count
        assert len(session.pending) <= REPEAT_LIMIT + 8
    features_TD, _ = session.read(text[at : at + 4])
    assert_same_state(features_TD, expected_TD[at : at + 4])
    assert isinstance(session.cache, Cache) and session.cache.get_seq_length() == at + 4


@pytest.mark.parametrize("limit", [1, 2, 3, 8, 9, 10, 17])
def test_the_limit_is_met_exactly(targets, limit):
    target, prompt = targets["hybrid"], prompt_of(5)
    plain = plain_generate(target, prompt, limit, stop_ids=[])
    for hit in (0.0, 1.0):
        done = generate(target, oracle(target, prompt + plain + [2] * 20, hit), prompt, limit, stop_ids=[])
        assert done.tokens == plain and len(done.tokens) == limit
        assert sum(done.accepted_per_pass) == limit - 1
        assert math.isnan(done.tau) == (limit == 1)


@pytest.mark.parametrize("family", ["hybrid", "llama"])
def test_a_stop_token_ends_the_text_wherever_it_falls_in_a_block(targets, family):
    target, prompt = targets[family], prompt_of(6)
    plain = plain_generate(target, prompt, 20, stop_ids=[])
    for stop in list(dict.fromkeys(plain))[:9]:
        cut = plain[: plain.index(stop) + 1]
        assert plain_generate(target, prompt, 20, stop_ids=[stop]) == cut
        for hit in (0.0, 1.0):
            done = generate(target, oracle(target, prompt + plain, hit), prompt, 20, stop_ids=[stop])
            assert done.tokens == cut and sum(done.accepted_per_pass) == len(cut) - 1


def test_the_targets_own_end_token_is_the_default(targets, tmp_path):
    prompt = prompt_of(6)
    end = plain_generate(targets["qwen3"], prompt, 10, stop_ids=[])[4]
    target = FrozenTarget.load(save_target(tmp_path / "stop", "qwen3", eos_token_id=end, initializer_range=0.3), LAYER_IDS)
    done = generate(target, new_drafter(target), prompt, 40)
    assert done.tokens[-1] == end and len(done.tokens) <= 5


def test_a_mask_token_that_the_target_emits_stays_in_the_text(tmp_path, targets):
    """AutoModel 3268: padding trimmed by value."""
    prompt = prompt_of(7)
    plain = plain_generate(targets["llama"], prompt, 40, stop_ids=[])
    drafter = new_drafter(targets["llama"], mask_token_id=plain[10])
    assert generate(targets["llama"], drafter, prompt, 40, stop_ids=[]).tokens == plain and plain[10] in plain


def test_no_token_of_the_padded_vocabulary_is_ever_chosen(targets):
    target = targets["qwen3"]
    narrow = FrozenTarget(target.model, dataclasses.replace(target.info, valid_vocab=40), LAYER_IDS)
    drafter = new_drafter(target)
    for temperature in (0.0, 1.0):
        done = generate(narrow, drafter, prompt_of(8), 60, temperature=temperature, stop_ids=[])
        assert max(done.tokens) < 40
    assert max(plain_generate(target, prompt_of(8), 60, stop_ids=[])) >= 40


def chi2_of(tokens, chances_V):
    expected_V = torch.tensor(chances_V) * len(tokens)
    return float(((torch.bincount(torch.tensor(tokens), minlength=len(chances_V)) - expected_V) ** 2 / expected_V).sum())


def test_rejection_sampling_leaves_the_targets_distribution_in_every_slot():
    """8000 blocks of two drafted tokens over 5 tokens, drawn from far other chances than the target's."""
    target_TV = torch.tensor([[0.5, 0.2, 0.1, 0.1, 0.1], [0.05, 0.05, 0.2, 0.3, 0.4], [0.3, 0.1, 0.2, 0.2, 0.2]])
    draft_TV = torch.tensor([[0.1, 0.1, 0.2, 0.2, 0.4], [0.4, 0.1, 0.1, 0.1, 0.3]])
    head = SimpleNamespace(logits=torch.log, valid_vocab=5)
    choose = _Choice(head, temperature=1.0, seed=0)
    slots = ([], [], [])
    for _ in range(8000):
        for slot, token in zip(slots, choose.verify(target_TV, choose.draft(draft_TV, head)), strict=False):
            slot.append(token)
    accepted = 1 - 0.5 * (target_TV[:2] - draft_TV).abs().sum(-1)
    assert len(slots[1]) / 8000 == pytest.approx(float(accepted[0]), abs=0.03)
    assert len(slots[2]) / len(slots[1]) == pytest.approx(float(accepted[1]), abs=0.03)
    for slot, chances_V in zip(slots, target_TV.tolist(), strict=True):
        assert chi2_of(slot, chances_V) < 18.5, "0.1 % of right samplers would be above"


def test_sampled_text_has_the_targets_distribution(tmp_path):
    """Chi-square of 3-token texts against their exact chances, with a drafter that is wrong in its own way."""
    target = FrozenTarget.load(save_target(tmp_path / "small", "llama", num_hidden_layers=3, initializer_range=0.2), (1,))
    target = FrozenTarget(target.model, dataclasses.replace(target.info, valid_vocab=5), (1,))
    prompt, runs, temperature = [3, 1, 4, 1], 250, 1.5
    head = target.head()
    chances = {}

    def spread(prefix, chance):
        if len(prefix) == 3:
            chances[tuple(prefix)] = chance
            return
        _, hidden_TH = TargetSession(target).read(prompt + prefix)
        next_V = torch.softmax(head.logits(hidden_TH[-1])[:5] / temperature, -1).tolist()
        for token in range(5):
            spread([*prefix, token], chance * next_V[token])

    spread([], 1.0)
    drafter = new_drafter(target, num_layers=1, block_size=3, target_layer_ids=(1,))
    counts = collections.Counter()
    accepted = 0
    for seed in range(runs):
        done = generate(target, drafter, prompt, 3, temperature=temperature, seed=seed, stop_ids=[])
        counts[tuple(done.tokens)] += 1
        accepted += done.accepted_per_pass[0] == 2
    assert 0.02 * runs < accepted < 0.98 * runs, "both acceptance and rejection must have happened"
    common = [text for text, chance in chances.items() if chance * runs >= 5]
    rest = runs - sum(counts[text] for text in common)
    expected_rest = runs * (1 - sum(chances[text] for text in common))
    chi2 = sum((counts[t] - runs * chances[t]) ** 2 / (runs * chances[t]) for t in common)
    chi2 += (rest - expected_rest) ** 2 / expected_rest
    degrees = len(common)
    assert chi2 < degrees + 4 * math.sqrt(2 * degrees), (chi2, degrees)


def test_sampling_is_seeded_and_touches_no_global_state(targets):
    target, prompt = targets["llama"], prompt_of(9)
    drafter = new_drafter(target).train()
    drafter.layers[0].eval()
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = measure_tau(target, drafter, [prompt, prompt_of(10)], 30, temperature=1.0, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert drafter.training and not drafter.layers[0].training and drafter.layers[1].training
    assert first.per_prompt == measure_tau(target, drafter, [prompt, prompt_of(10)], 30, temperature=1.0, seed=7).per_prompt
    texts = {tuple(generate(target, drafter, prompt, 30, temperature=1.0, seed=s).tokens) for s in range(4)}
    assert len(texts) == 4
    assert all(p.grad is None for p in drafter.parameters())


def test_a_failure_while_evaluating_restores_the_training_mode():
    layer = torch.nn.Dropout().train()
    with pytest.raises(RuntimeError), evaluating(layer):
        assert not layer.training
        raise RuntimeError
    assert layer.training


def test_tau_counts_all_tokens_of_passes_over_all_passes(targets):
    target = targets["qwen3"]
    prompts = [prompt_of(s, 10) for s in range(3)]
    plain = [plain_generate(target, p, 33, stop_ids=[]) for p in prompts]
    result = measure_tau(target, oracle(target, [], 0.0), prompts, 33, stop_ids=[])
    assert result.tokens == 3 * 32 and result.passes >= result.tokens / BLOCK
    assert result.tau == pytest.approx(result.tokens / result.passes) and len(result.per_prompt) == 3
    perfect = measure_tau(target, oracle(target, prompts[0] + plain[0], 1.0), prompts[:1], 33, stop_ids=[])
    assert (perfect.tau, perfect.passes) == (8.0, 4)
    assert math.isnan(measure_tau(target, oracle(target, [], 0.0), prompts, 1).tau)


def test_bad_requests(targets):
    target = targets["qwen3"]
    drafter = new_drafter(target)
    with pytest.raises(ValueError, match="a prompt of 0 tokens"):
        generate(target, drafter, [], 5)
    with pytest.raises(ValueError, match="1 to 511"):
        plain_generate(target, [2] * 512, 5)
    with pytest.raises(ValueError, match="max_new_tokens is 0"):
        generate(target, drafter, [2], 0)
    with pytest.raises(ValueError, match="temperature is -1"):
        generate(target, drafter, [2], 5, temperature=-1)
    assert len(generate(target, drafter, [2] * 509, 50, stop_ids=[]).tokens) == 3, "text ends at the target's last position"


@pytest.mark.parametrize("value", [math.nan, 0.0])
def test_no_tau_comes_from_logits_that_judge_nothing(tmp_path, value):
    """The best of logits that are NaN, or all equal, is always the same token: every draft would be accepted."""
    target = FrozenTarget.load(save_target(tmp_path / "target", "llama"), LAYER_IDS)
    drafter = new_drafter(target)
    target.decoder.norm.weight.fill_(value)
    for decode in (lambda: measure_tau(target, drafter, [prompt_of(1)], 9), lambda: plain_generate(target, prompt_of(1), 9, 1.0)):
        with pytest.raises(FloatingPointError, match="logits are not finite or all equal"):
            decode()
