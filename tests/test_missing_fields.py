"""Logs that lack a number, in one line or in all: every answer of notebooks 03 and 04 comes without it, or says that it is not known."""

import json
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from runs import Recipe, records, write_run

from dflash_nb.analysis.achieved import by_length, planned_against_achieved
from dflash_nb.analysis.compare import compare
from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.analysis.findings.learning import falls_by_group
from dflash_nb.analysis.findings.spikes import spike_table
from dflash_nb.analysis.plots import diagnosis, training
from dflash_nb.analysis.plots.style import Plot, table
from dflash_nb.analysis.signs import signs
from dflash_nb.pipeline.advice import advise
from dflash_nb.pipeline.run import read_run
from dflash_nb.pipeline.summary import summarize

RECIPE = Recipe(steps=70, evals=(0, 35, 70), config={"token_budget": 32_768})
LINE = records(RECIPE)[0]
OF_STEP = [name for name in LINE if name != "step"]
OF_BATCH = list(LINE["batches"][0])
NOTHING = {"batches": [], "seconds": dict.fromkeys(LINE["seconds"], 0.0)}  # 0 for all others

OF_RUN = {
    "status": lambda run: run.status_text(),
    "by_length": lambda run: table(by_length(run)).to_string(),
    "planned_against_achieved": lambda run: table(planned_against_achieved(run)).to_string(),
    "advise": lambda run: (advice := advise(run, 300.0)) and advice.text() + table(advice.table()).to_string(),
    "summarize": lambda run: summarize(run, 70, True, None, None).text(),
    **{draw.__name__: draw for draw in (training.loss, training.acceptance, training.throughput, training.time_by_length, training.queues)},
}
OF_DIAGNOSIS = {
    "report": lambda found: found.report(),
    "signs": lambda found: table(signs(found)).to_string(),
    "falls": lambda found: table(falls_by_group(found.log)).to_string(),
    "spikes": lambda found: table(spike_table(found.log)).to_string(),
    "compare": lambda found: (compared := compare([found.log, found.log])).finding + table(compared.rows).to_string(),
    "comparison": lambda found: diagnosis.comparison(compare([found.log, found.log])),
    **{draw.__name__: draw for draw in (diagnosis.curve, diagnosis.zoom, diagnosis.by_length, diagnosis.adjusted, diagnosis.attribution)},
    **{draw.__name__: draw for draw in (diagnosis.residuals, diagnosis.slots, diagnosis.learning)},
}


def answered(folder: Path) -> dict[str, str]:
    """What each function says of the run in ``folder``: all the text of its answer."""
    found = diagnose(folder)
    answers = {name: ask(read_run(folder)) for name, ask in OF_RUN.items()} | {
        f"04 {name}": ask(found) for name, ask in OF_DIAGNOSIS.items()
    }
    return {
        name: " ".join(text.get_text() for text in answer.figure.findobj(Text)) if isinstance(answer, Plot) else answer or ""
        for name, answer in answers.items()
    }


FIELDS = [*OF_STEP, *(f"batch {name}" for name in OF_BATCH)]
SUMMED = ("tokens", "padded_tokens", "weight", "seconds")  # what others are divided by
ALSO_NOTHING = [*SUMMED, "batches", "blocks", *(f"batch {name}" for name in (*SUMMED, "rows", "padded_length", "sample_ids"))]


def damaged(folder: Path, field: str, how: str) -> Path:
    """A run whose lines lack ``field``, hold null there in one line, or nothing that counts."""
    folder = write_run(folder, RECIPE)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    of_batch, name = field.startswith("batch "), field.removeprefix("batch ")
    for i, line in enumerate(lines):
        for part in line["batches"] if of_batch else [line]:
            if how == "missing":
                del part[name]
            elif how == "nothing":
                part[name] = [] if name == "sample_ids" else NOTHING.get(name, 0)
            elif i == 5:
                part[name] = None
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.mark.parametrize(
    ("field", "how"),
    [*((field, how) for field in FIELDS for how in ("missing", "null in one line")), *((field, "nothing") for field in ALSO_NOTHING)],
)
def test_every_answer_comes_without_any_number(tmp_path, field, how):
    folder = damaged(tmp_path / "run", field, how)
    with mock.patch.object(Figure, "savefig", lambda *_, **__: None), warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = answered(folder)
    for asked, text in answers.items():
        assert not re.search(r"\b(nan|inf)\b", text, re.IGNORECASE), f"{asked}: {text}"


@pytest.mark.parametrize(
    ("field", "asked", "says"),
    [
        ("seconds", "throughput", "holds no step with both its seconds and its tokens"),
        ("seconds", "queues", "holds no seconds of a step"),
        ("seconds", "summarize", "too little in the log to say what limits it"),
        ("batches", "summarize", "too little in the log to say what limits it"),
        ("batches", "time_by_length", "holds no seconds of a batch"),
        ("batches", "planned_against_achieved", r"batches +70 +unknown"),
        ("tokens", "planned_against_achieved", r"real tokens/s +unknown +unknown"),
        ("tokens", "summarize", r"padding efficiency +not measured"),
        ("padded_tokens", "throughput", "real tokens/s over .* how many are padding is not in the log"),
        ("supervised", "loss", "an unknown number of supervised tokens"),
        ("q_hs", "queues", "which limit binds is not in the log"),
        ("q_prefetch", "queues", "not in this log"),
        ("clipped", "04 signs", r"clipped +not known"),
        ("batch weight", "04 comparison", "0 runs with a loss to compare"),
        ("batch loss", "04 comparison", "without losses and weights of batches: run and run"),
    ],
)
def test_what_is_missing_is_said(tmp_path, field, asked, says):
    with mock.patch.object(Figure, "savefig", lambda *_, **__: None):
        text = answered(damaged(tmp_path / "run", field, "missing"))[asked]
    assert re.search(says, " ".join(text.split())), text


def test_an_age_that_is_not_known_is_not_zero(tmp_path):
    folder = damaged(tmp_path / "run", "time", "missing")
    (folder / "summary.json").unlink()
    assert "it stopped at a time that is not in the log" in read_run(folder).status_text()


def test_one_batch_without_a_number_changes_little(tmp_path):
    """What is known of the other 69 batches stays: lengths, rates and advice are those of the whole log, nearly."""
    whole = read_run(write_run(tmp_path / "whole", RECIPE))
    for i, name in enumerate(("tokens", "bucket", "weight", "sample_ids", "seconds")):
        run = read_run(damaged(tmp_path / str(i), f"batch {name}", "null in one line"))
        assert advise(run).tokens_per_second == pytest.approx(advise(whole).tokens_per_second, rel=0.02)
        assert diagnose(run).log.parts.groups == diagnose(whole).log.parts.groups
        assert sum(row["batches"] for row in by_length(run)) == 70
