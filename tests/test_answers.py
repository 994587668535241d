"""The target's own answers: decoded together, each is what the target says alone; the folder is a dataset like any other."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from tiny_targets import save_target

from dflash_nb.data.dataset import TokenDataset
from dflash_nb.data.writer import DatasetWriter
from dflash_nb.model import answers
from dflash_nb.model.answers import answer_together, write_answers
from dflash_nb.model.decode import plain_generate
from dflash_nb.model.target import FrozenTarget

FAMILIES = ["hybrid", "qwen3", "llama", "gemma2", "granite"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("targets")
    wide = dict.fromkeys(("qwen3", "llama"), 0.3)
    return {family: save_target(root / family, family, initializer_range=wide.get(family, 0.1)) for family in FAMILIES}


def prompts_of(vocab, lengths, seed=0):
    numbers = np.random.default_rng(seed)
    return [numbers.integers(4, vocab - 8, length).tolist() for length in lengths]


@pytest.mark.parametrize("family", FAMILIES)
def test_together_each_prompt_gets_the_answer_it_gets_alone(folders, family):
    """Prompts of 3 to 40 tokens in one batch: shorter ones start to answer while longer ones are still read, and leave earlier."""
    target = FrozenTarget.load(folders[family], (0,))
    prompts = prompts_of(target.info.valid_vocab, [3, 4, 4, 11, 17, 40])
    alone = [plain_generate(target, prompt, 12, stop_ids=target.info.eos_token_ids) for prompt in prompts]
    assert answer_together(target, prompts, 12) == alone


def test_an_end_token_ends_an_answer_and_is_part_of_it(folders):
    target = FrozenTarget.load(folders["qwen3"], (0,))
    prompts = prompts_of(target.info.valid_vocab, [5, 5, 9], seed=1)
    free = answer_together(target, prompts, 10)
    target.info = type(target.info)(**{**vars(target.info), "eos_token_ids": (free[0][3],)})
    ended = answer_together(target, prompts, 10)
    assert ended[0] == free[0][: free[0].index(free[0][3]) + 1]
    assert all(answer == full[: len(answer)] for answer, full in zip(ended, free, strict=True))


def test_sampled_answers_follow_the_target_s_distribution(folders):
    target = FrozenTarget.load(folders["llama"], (0,))
    (prompt,) = prompts_of(target.info.valid_vocab, [6])
    drawn = answer_together(target, [prompt] * 4000, 1, 1.0, torch.Generator().manual_seed(0))
    seen = np.bincount([answer[0] for answer in drawn], minlength=target.info.valid_vocab) / 4000
    with torch.inference_mode():
        hidden = target.decoder(input_ids=torch.tensor([prompt]))[0][0, -1]
        expected = target.head().logits(hidden)[: target.info.valid_vocab].softmax(-1).numpy()
    top = expected.argsort()[-20:]
    assert np.abs(seen[top] - expected[top]).max() < 4 * np.sqrt(expected.max() / 4000)


@pytest.fixture
def dataset(tmp_path, folders):
    vocab = FrozenTarget.load(folders["hybrid"], (0,)).info.valid_vocab
    numbers = np.random.default_rng(0)

    def rows(count):
        for _ in range(count):
            prompt, answer = numbers.integers(1, 20), numbers.integers(2, 30)
            mask = np.repeat([0, 1], [prompt, answer]).astype(np.uint8)
            yield numbers.integers(4, vocab - 8, len(mask)).astype(np.int32), mask

    folder = tmp_path / "given"
    with DatasetWriter(folder) as writer:
        writer.write("train", list(rows(30)))
        writer.write("train", [(np.array([5, 6, 7], np.int32), np.ones(3, np.uint8))])  # no prompt
        writer.write("heldout", list(rows(7)))
    (folder / "dataset.json").write_text(json.dumps({"format": 1, **writer.description}))
    return folder


def test_the_folder_is_a_dataset_with_the_target_s_answers(dataset, folders, tmp_path, capsys):
    out = write_answers(dataset, tmp_path / "own", str(folders["hybrid"]), rows=12, new_tokens=9, batch=5)
    given, own = TokenDataset.open(dataset), TokenDataset.open(out)
    target = FrozenTarget.load(folders["hybrid"], (0,))
    prompts = {tuple(ids[: mask.argmax()]) for ids, mask in map(given.row, range(len(given)))}
    assert len(own) == 12
    for ids, mask in map(own.row, range(12)):
        prompt, answer = ids[: mask.argmax()].tolist(), ids[mask.argmax() :].tolist()
        assert tuple(prompt) in prompts
        assert mask[len(prompt) :].all()
        assert answer == plain_generate(target, prompt, 9)
    for i in range(7):
        assert all(map(np.array_equal, TokenDataset.open(dataset, "heldout").row(i), TokenDataset.open(out, "heldout").row(i)))
    about = json.loads((out / "dataset.json").read_text())
    assert about["rows"] == {"train": 12, "heldout": 7}
    assert about["answers"]["new_tokens"] == 9
    assert "12 answers" in capsys.readouterr().out
    again = write_answers(dataset, tmp_path / "again", str(folders["hybrid"]), rows=12, new_tokens=9, batch=12)
    assert sorted(map(bytes, (own.row(i)[0] for i in range(12)))) == sorted(
        map(bytes, (TokenDataset.open(again).row(i)[0] for i in range(12)))
    )


def test_nothing_is_half_written_and_nothing_overwritten(dataset, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(answers, "answer_together", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_answers(dataset, tmp_path / "own", str(folders["hybrid"]))
    assert [path.name for path in tmp_path.iterdir()] == ["given"]
    with pytest.raises(FileExistsError, match=r"given exists\. Name another folder, or replace it with --overwrite"):
        write_answers(dataset, dataset, str(folders["hybrid"]))


@pytest.mark.parametrize(
    ("change", "say"),
    [
        ({"new_tokens": 0}, "new_tokens is 0; it must be at least 1"),
        ({"rows": -1}, "rows is -1; it must be at least 0"),
        ({"temperature": -0.5}, "temperature is -0.5; it must be at least 0"),
        ({"new_tokens": 10**6}, "no row has 1 to .* tokens before its first supervised one"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(dataset, folders, tmp_path, change, say, monkeypatch):
    monkeypatch.setattr(FrozenTarget, "load", None)
    with pytest.raises(ValueError, match=say):
        write_answers(dataset, tmp_path / "own", str(folders["hybrid"]), **change)
    assert not (tmp_path / "own").exists()


def test_data_of_another_target_are_refused(dataset, folders, tmp_path):
    table = pa.ipc.open_file(dataset / "train" / "data-00000.arrow").read_all()
    wrong = tmp_path / "wrong" / "train"
    wrong.mkdir(parents=True)
    ids = pa.array([[*row[:-1], 10**6] for row in table["input_ids"].to_pylist()], pa.list_(pa.int32()))
    with pa.ipc.new_file(wrong / "data.arrow", table.schema) as writer:
        writer.write_table(table.set_column(0, "input_ids", ids).cast(table.schema))
    (wrong.parent / "dataset.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="token id 1000000, outside the target's vocabulary"):
        write_answers(wrong.parent, tmp_path / "own", str(folders["hybrid"]))


def test_from_the_command_line(dataset, folders, tmp_path, capsys):
    answers.main([str(dataset), str(tmp_path / "own"), "--target", str(folders["qwen3"]), "--rows", "4", "--new-tokens", "5"])
    assert len(TokenDataset.open(tmp_path / "own")) == 4
    with pytest.raises(SystemExit, match=r"error: .*own exists"):
        answers.main([str(dataset), str(tmp_path / "own"), "--target", str(folders["qwen3"])])
