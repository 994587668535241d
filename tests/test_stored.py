"""Every JSON file that the package writes, with each of its keys gone, null or of another kind: whoever reads it says so in a sentence.

The files are real: a run with its evaluations, checkpoints and export, a cost model, cuts, a prepared dataset, measured strategies. Each
change is read by everything that reads the file. Either it does without the key, or it raises an error of ours that names file and key.

Run alone: python -m pytest tests/test_stored.py
"""

import copy
import json
import math
import shutil
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.analysis.achieved import by_length, planned_against_achieved
from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.analysis.experiment import learning_rows, read_experiment, speed_rows
from dflash_nb.analysis.plots import padding, training
from dflash_nb.data.lengths import read_lengths
from dflash_nb.data.prepare import prepare_chats
from dflash_nb.data.source import find_source
from dflash_nb.errors import PlainError
from dflash_nb.home import asset
from dflash_nb.model.export import load_drafter
from dflash_nb.model.readers import compatibility_report
from dflash_nb.model.target_info import read_target_info
from dflash_nb.pipeline import checkpoint
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.job import prepare_job
from dflash_nb.pipeline.measured import find_cost, fit_run, run_speed
from dflash_nb.pipeline.run import read_run
from dflash_nb.pipeline.summary import summarize
from dflash_nb.pipeline.train import train
from dflash_nb.planner.bucket_plan import BucketPlan
from dflash_nb.planner.cost import CostModel
from dflash_nb.stored import fault


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with one of each file."""
    root = tmp_path_factory.mktemp("made")
    dataset, target = write_dataset(root / "data"), save_target(root / "target", "llama")
    config = tiny_config(
        dataset, target, root / "runs", run_name="run", checkpoint_every=10, eval_prompts=1, eval_tokens=3, max_steps=28, epochs=4
    )
    train(config)
    chats = [json.dumps({"question": f"What is {i}?", "answer": f"It is {i}."}) for i in range(12)]
    (root / "chats.jsonl").write_text("\n".join(chats))
    prepare_chats(root / "chats.jsonl", root / "chats", tokenizer="sample", heldout=4)
    fit_run(read_run(root / "runs" / "run")).save(root / "cost.json")
    shutil.copy(asset("strategies_sample.json"), root / "strategies.json")
    (shutil.copytree(target, root / "masked") / "dflash.json").write_text('{"mask_token": "<mask>", "mask_token_id": 3}')
    return root


def places(content, at=()):
    """The path of every key, of the first item of a list only."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield (*at, key)
            yield from places(value, (*at, key))
    elif isinstance(content, list) and content:
        yield from places(content[0], (*at, 0))


def within(content, at):
    """The names on the way to the key ``at``, and those below it: what a sentence may name."""
    below = content
    for key in at:
        below = below[key]
    return {str(key) for key in (*at, *(key for way in places(below) for key in way)) if isinstance(key, str)}


def other_kinds(value):
    """Values that ``value`` could not have been."""
    if isinstance(value, bool) or value is None:
        return [[1]]
    if isinstance(value, int | float):
        return ["many", math.nan]
    return [[1]] if isinstance(value, dict) else [{"a": 1}] if isinstance(value, list) else [3]


def changes(content):
    """(what was done, the key's path, the content with that done), for each key."""
    for place in places(content):
        *way, key = place
        around = content
        for step in way:
            around = around[step]
        for what, value in [("without", None), ("null", None), *(("other", other) for other in other_kinds(around[key]))]:
            changed = copy.deepcopy(content)
            inside = changed
            for step in way:
                inside = inside[step]
            if what == "without":
                del inside[key]
            else:
                inside[key] = value
            yield f"{what} {value!r}", place, changed


def examine_run(folder):
    """Everything that looks at a run without changing it."""
    run = read_run(folder)
    run.status_text()
    diagnose(run).report()
    planned_against_achieved(run), by_length(run)
    summarize(run, 28, True, None, None).text()
    return run


def refusals(calls):
    """What the calls raised. Anything but an error of ours goes up."""
    found = []
    for call in calls:
        try:
            call()
        except PlainError as error:
            found.append(error)
    return found


def of_run(folder):
    return [
        lambda: examine_run(folder),
        lambda: fit_run(read_run(folder)),
        lambda: run_speed(read_run(folder), CostModel()),
        lambda: TrainConfig(resume=str(folder)).resumed(),
    ]


def of_checkpoint(folder):
    """A checkpoint whose manifest agrees with its state: the file was written so by another version."""
    manifest = folder / "manifest.json"
    state = json.loads(manifest.read_text())
    if isinstance(state.get("state.json"), dict) and (folder / "state.json").is_file():
        content = folder / "state.json"
        state["state.json"] = {"bytes": content.stat().st_size, "sha256": checkpoint._sha256(content)}
        manifest.write_text(json.dumps(state))
    return [lambda: checkpoint.newest_checkpoint(folder.parent, lambda error: None, logged=28)]


# file: the folder that is copied, and what reads it
FILES = {
    "runs/run/config.json": ("runs/run", of_run),
    "runs/run/environment.json": ("runs/run", of_run),
    "runs/run/plan.json": ("runs/run", of_run),
    "runs/run/summary.json": ("runs/run", of_run),
    "runs/run/buckets.json": ("runs/run", lambda folder: [*of_run(folder), lambda: TrainConfig(buckets=str(folder / "buckets.json"))]),
    "runs/run/export/config.json": (
        "runs/run/export",
        lambda folder: [lambda: load_drafter(folder), lambda: compatibility_report(folder)],
    ),
    "runs/run/checkpoints/step-28/manifest.json": ("runs/run/checkpoints/step-28", of_checkpoint),
    "runs/run/checkpoints/step-28/state.json": ("runs/run/checkpoints/step-28", of_checkpoint),
    "cost.json": ("cost.json", lambda file: [lambda: padding.model_error(find_cost(file)), lambda: find_cost(file).require()]),
    "chats/dataset.json": (
        "chats",
        lambda folder: [lambda: read_lengths(folder), lambda: prepare_job(TrainConfig(dataset=str(folder), target="sample"))],
    ),
    "strategies.json": (
        "strategies.json",
        lambda file: [lambda: (speed_rows(read_experiment(file)), learning_rows(read_experiment(file)))],
    ),
    "masked/dflash.json": ("masked", lambda folder: [lambda: read_target_info(folder)]),
}
NAMELESS = {"format"}  # said as "of this version"


@pytest.mark.parametrize("name", FILES)
def test_a_key_that_is_missing_or_of_another_kind_is_done_without_or_named(made, tmp_path, name, capsys):
    place, readers = FILES[name]
    copied = tmp_path / Path(place).name
    (shutil.copytree if (made / place).is_dir() else shutil.copy)(made / place, copied)
    file = copied / Path(name).name if copied.is_dir() else copied
    kept = {path: path.read_bytes() for path in ([file] if not copied.is_dir() else copied.glob("*.json"))}
    content, refused, wrong = json.loads(file.read_text()), 0, []
    assert not refusals(readers(copied)), "as it was written it is read"
    for what, keys, changed in changes(content):
        for path, before in kept.items():
            path.write_bytes(before)
        file.write_text(json.dumps(changed))
        try:
            errors = refusals(readers(copied))
        except Exception as error:
            wrong.append(f"{what} {keys}: {type(error).__name__}: {error}")
            continue
        refused += bool(errors)
        names = within(content, keys)
        wrong += [
            f"{what} {keys}: {error}"
            for error in errors
            if not (
                ((file.name in str(error) or copied.name in str(error)) and any(key in str(error) for key in names)) or names & NAMELESS
            )
        ]
    assert not wrong, "\n".join(wrong)
    assert refused


@pytest.mark.parametrize("kind", ["eval", "dropped", "checkpoint", "finish", "start"])
def test_an_event_that_lacks_something_is_done_without_or_counted(made, tmp_path, kind):
    folder = shutil.copytree(made / "runs" / "run", tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    lines.append({"time": 1.0, "step": 28, "kind": "dropped", "first": 20, "last": 28, "losses": [3.0] * 9})
    at = max(i for i, line in enumerate(lines) if line["kind"] == kind)
    for _, place, changed in changes(lines[at]):
        text = "".join(json.dumps(line) + "\n" for line in [*lines[:at], changed, *lines[at + 1 :]])
        (folder / "events.jsonl").write_text(text)
        examine_run(folder)
        if kind == "eval" and place[0].startswith(("tau", "acceptance")):
            training.acceptance(read_run(folder))
            plt.close("all")


@pytest.mark.parametrize("what", ["plan", "plan.seed", "plan.plan_sha256", "plan.fingerprint", "schedule", "data"])
@pytest.mark.parametrize("how", ["lacks", "holds None as", r"holds \[1\] as"])
def test_a_checkpoint_without_what_a_resume_needs_is_named_and_the_run_stays(made, tmp_path, what, how):
    folder = shutil.copytree(made / "runs" / "run", tmp_path / "run")
    saved = folder / "checkpoints" / "step-28"
    state = json.loads((saved / "state.json").read_text())
    inside, key = (state["plan"], what.partition(".")[2]) if "." in what else (state, what)
    if how == "lacks":
        del inside[key]
    else:
        inside[key] = None if "None" in how else [1]
    (saved / "state.json").write_text(json.dumps(state))
    of_checkpoint(saved)
    before = (folder / "events.jsonl").read_bytes()
    with pytest.raises(checkpoint.CheckpointError, match=rf"step-28/state\.json {how} ?{what}\. Remove .*step-28"):
        train(TrainConfig(resume=str(folder)))
    assert (folder / "events.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("line", "say"),
    [
        ('{"step":28,"loss":"low"}', "holds 'low' as loss"),
        ('{"step":28,"elapsed":[1]}', r"holds \[1\] as elapsed"),
        ('{"step":28,"loss"', "is no JSON .*"),
    ],
)
def test_a_damaged_step_is_named_before_the_run_is_continued(made, tmp_path, line, say):
    folder = shutil.copytree(made / "runs" / "run", tmp_path / "run")
    lines = (folder / "steps.jsonl").read_text().splitlines()
    (folder / "steps.jsonl").write_text("\n".join([*lines[:27], line]) + "\n")
    with pytest.raises(PlainError, match=rf"steps\.jsonl: the line .*{say}; repair or remove it"):
        train(TrainConfig(resume=str(folder)))


def test_what_a_run_can_write_anew_does_not_end_it_when_it_is_continued(made, tmp_path):
    folder = shutil.copytree(made / "runs" / "run", tmp_path / "run")
    damaged = {"environment": {"versions": [1]}, "plan": {"epochs": 3}, "buckets": {"boundaries": "many"}, "summary": {"status": 3}}
    for name, content in damaged.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    assert train(TrainConfig(resume=str(folder))).finished
    assert examine_run(folder).status == "finished"


KINDS = {"whole": int, "number": int | float, "perhaps": int | None, "text": str, "flag": bool}
GOOD = {"whole": 3, "number": 0.5, "perhaps": None, "text": "a", "flag": True, "rows": [{"lo": 1}], "either": None}
SHAPE = {**KINDS, "rows": [{"lo": int}], "either": ({"name": str}, list, type(None))}


@pytest.mark.parametrize(
    ("change", "say"),
    [
        ({}, ""),
        ({"more": 1}, ""),
        ({"number": 3, "perhaps": 4, "either": []}, ""),
        ({"whole": 3.0}, "holds 3.0 as whole"),
        ({"whole": True}, "holds True as whole"),
        ({"number": math.nan}, "holds nan as number"),
        ({"number": math.inf}, "holds inf as number"),
        ({"whole": 10**400}, "holds 100000000000000000...0000000000000000000 as whole"),
        ({"flag": 1}, "holds 1 as flag"),
        ({"rows": [{"lo": 1}, {}]}, "lacks rows[1].lo"),
        ({"rows": [{"lo": 1}, {"lo": None}]}, "holds None as rows[1].lo"),
        ({"rows": [3]}, "holds 3 as rows[0]"),
        ({"rows": {}}, "holds {} as rows"),
        ({"either": {"name": 3}}, "holds 3 as either.name"),
        ({"either": 3}, "holds 3 as either"),
    ],
)
def test_the_words_for_a_fault(change, say):
    assert fault(GOOD | change, SHAPE) == say


@pytest.mark.parametrize("key", [key for key in SHAPE if key not in ("perhaps", "either")])
def test_a_missing_key_is_named_and_one_that_may_be_null_may_be_missing(key):
    assert fault({name: value for name, value in GOOD.items() if name != key}, SHAPE) == f"lacks {key}"
    assert fault({name: value for name, value in GOOD.items() if name not in ("perhaps", "either")}, SHAPE) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SHAPE, "lo", "name"]), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(JSON)
def test_any_content_is_judged(content):
    assert isinstance(fault(content, SHAPE), str)


DEEP = '{"a": ' + "[" * 100_000
DEEP_FILES = {
    "config.json of a run": ("config.json", lambda folder: TrainConfig(resume=str(folder)).resumed()),
    "config.json, looked at": ("config.json", read_run),
    "config.json of a drafter": ("config.json", load_drafter),
    "config.json of a target": ("config.json", lambda folder: read_target_info(folder)),
    "buckets.json": ("buckets.json", lambda folder: BucketPlan.load(folder / "buckets.json")),
    "dataset.json": ("dataset.json", find_source),
    "dataset_dict.json": ("dataset_dict.json", find_source),
    "state.json": ("state.json", find_source),
    "cost.json": ("cost.json", lambda folder: find_cost(folder)),
    "strategies.json": ("strategies.json", lambda folder: read_experiment(folder / "strategies.json")),
}


@pytest.mark.parametrize("what", DEEP_FILES)
def test_json_nested_without_end_is_named(tmp_path, what):
    name, read = DEEP_FILES[what]
    (tmp_path / name).write_text(DEEP)
    with pytest.raises(PlainError, match=name):
        read(tmp_path)
