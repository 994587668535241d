"""Every notebook's parameters cell is its configuration; and what may change when a run is resumed."""

import ast
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import get_origin

import nbformat
import pytest
from papermill.inspection import inspect_notebook
from runs import Recipe, write_run

from dflash_nb import home
from dflash_nb.data.lengths import read_histogram
from dflash_nb.pipeline.config import (
    HARMLESS,
    BucketsConfig,
    DiagnoseConfig,
    LengthsConfig,
    PaddingConfig,
    TrainConfig,
    saved_config,
)
from dflash_nb.pipeline.parameters import ParameterError
from dflash_nb.pipeline.runlog import RunError, RunLog, read_run
from dflash_nb.planner.buckets import optimize_buckets
from dflash_nb.planner.limits import BucketError

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
CONFIGS = {
    "00_length_distribution": LengthsConfig,
    "01_bucket_optimization": BucketsConfig,
    "02_padding_simulation": PaddingConfig,
    "03_train": TrainConfig,
    "04_loss_diagnosis": DiagnoseConfig,
}
PRESENT = [name for name in CONFIGS if (NOTEBOOKS / f"{name}.ipynb").is_file()]


@pytest.mark.parametrize("name", PRESENT)
def test_parameters_cell_is_the_configuration(name):
    """Names, order, kinds, defaults and help text agree (nteract/papermill 864 and 807: what inspection loses, users cannot see)."""
    path = NOTEBOOKS / f"{name}.ipynb"
    [cell] = [c for c in nbformat.read(path, 4).cells if "parameters" in c.metadata.get("tags", [])]
    written = {node.target.id: (node.annotation.id, ast.literal_eval(node.value)) for node in ast.parse(cell.source).body}
    fields = dataclasses.fields(CONFIGS[name])
    kinds = {each.name: "list" if get_origin(each.type) is tuple else each.type.__name__ for each in fields}
    defaults = {each.name: list(each.default) if isinstance(each.default, tuple) else each.default for each in fields}
    assert written == {each.name: (kinds[each.name], defaults[each.name]) for each in fields}
    assert list(written) == [each.name for each in fields]
    seen = inspect_notebook(str(path))
    assert {key: entry["help"] for key, entry in seen.items()} == {each.name: each.metadata["help"] for each in fields}


@pytest.mark.parametrize("cls", CONFIGS.values())
def test_every_field_has_one_plain_sentence_of_help(cls):
    for each in dataclasses.fields(cls):
        text = each.metadata["help"]
        assert re.fullmatch(r"[\w(][^=#\n]{8,110}", text) and not text.endswith("."), f"{each.name}: {text}"


@pytest.mark.parametrize("cls", CONFIGS.values())
def test_defaults_are_themselves_valid_and_survive_json(cls):
    config = cls()
    assert cls(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


@pytest.mark.parametrize(
    ("given", "say"),
    [
        ({"topology": "7"}, "7-1"),
        ({"topology": "0-1"}, "7-1"),
        ({"topology": "１-1"}, "7-1"),
        ({"mask_token": "７"}, "number of a token"),
        ({"target_layers": "1,９"}, "counted from 0"),
        ({"max_length": 9000, "token_budget": 8192}, "could not hold one sample"),
        ({"target_layers": "1,two"}, "counted from 0"),
        ({"target_layers": "-1"}, "counted from 0"),
        ({"mask_token": "<mask>"}, "number of a token"),
        ({"run_name": "a/b"}, "without a path"),
        ({"run_name": ".."}, "without a path"),
        ({"watch": "runs/a", "resume": "runs/a"}, "two calls"),
        ({"block_size": 1}, "at least 2"),
        ({"beta2": 1.0}, "below 1"),
        ({"buckets": 512.5, "strategy": "bucket"}, "did you mean 'bucketed'"),
        ({"buckets": "1024,512"}, "buckets: edges must increase"),
        ({"buckets": "-5,512"}, "buckets: edges must increase and be 0 or above"),
        ({"buckets": "auto:0"}, "buckets: 'auto:0' needs a whole number"),
        ({"buckets": "otto"}, "Did you mean auto?"),
        ({"buckets": "no/buckets.json"}, "no/buckets.json does not exist"),
    ],
)
def test_refused(given, say):
    with pytest.raises(ParameterError, match=re.escape(say)):
        TrainConfig(**given)


def test_read_values():
    config = TrainConfig(target_layers=[1, 9, 17], mask_token=7, topology="3-1")
    assert (config.layer_ids, config.mask_token_id, config.workers) == ((1, 9, 17), 7, (3, 1))
    assert TrainConfig().layer_ids is None and TrainConfig().mask_token_id is None
    assert [TrainConfig(block_size=b).slot_gamma for b in (8, 16, 2)] == [4.0, 7.0, 1.75] and TrainConfig(gamma=3).slot_gamma == 3.0


def test_same_configuration_from_anywhere(tmp_path, monkeypatch):
    """jsboige/CoursIA 14356: a wrong working folder must not silently give another run."""
    (tmp_path / "data").mkdir()
    texts = []
    for folder in (home.project_root(), home.project_root() / "tests", tmp_path):
        monkeypatch.chdir(folder)
        config = TrainConfig.from_notebook({"dataset": str(tmp_path / "data"), "seed": 3})
        texts.append((config, config.runs_folder, config.describe()))
    assert texts[0] == texts[1] == texts[2]
    monkeypatch.chdir(tmp_path)
    assert TrainConfig(dataset="data", runs_dir="out") == TrainConfig(dataset=str(tmp_path / "data"), runs_dir=str(tmp_path / "out"))


def test_description_names_what_will_be_used(tmp_path):
    text = TrainConfig(dataset=str(tmp_path), run_name="mine", runs_dir=str(tmp_path / "runs"), epochs=3).describe()
    assert f"dataset    {tmp_path}" in text and f"target     {home.asset('sample_target')}" in text
    assert f"run folder {tmp_path / 'runs' / 'mine'}" in text
    assert re.search(r"^changed (.*\n +)*.*epochs 3", text, re.M) and re.search(r"^defaults .*seed 0", text, re.M | re.S)
    assert "python 3." in text and re.search(r"^commit +([0-9a-f]{12}|not a git checkout)", text, re.M)
    assert max(map(len, text.splitlines())) <= 121
    assert "reference_lengths.parquet" in LengthsConfig(dataset="reference").describe()
    with pytest.raises(FileNotFoundError, match="nowhere"):
        TrainConfig(dataset="./nowhere").describe()


@pytest.fixture
def started(tmp_path):
    config = TrainConfig(dataset=str(tmp_path), epochs=3, learning_rate=2e-3, buckets="256,512", runs_dir=str(tmp_path), threads=1)
    folder = tmp_path / "run"
    folder.mkdir()
    RunLog.create(folder, config).close()
    return folder, config


def test_resume_takes_over_the_runs_own_configuration(started):
    folder, config = started
    resumed = TrainConfig.from_notebook({"resume": str(folder), "epochs": 1, "learning_rate": TrainConfig.learning_rate})
    assert resumed == dataclasses.replace(config, resume=str(folder))
    assert resumed.resumed() == resumed and saved_config(folder) == config
    assert str(folder) in resumed.describe()


def test_resume_lets_harmless_knobs_change_and_names_the_others(started):
    folder, _ = started
    resumed = TrainConfig.from_notebook({"resume": str(folder), "threads": 2, "log_every": 1, "topology": "2-1", "time_limit": 5})
    assert (resumed.threads, resumed.log_every, resumed.topology, resumed.epochs) == (2, 1.0, "2-1", 3)
    with pytest.raises(ParameterError) as error:
        TrainConfig.from_notebook({"resume": str(folder), "learning_rate": 5e-4, "buckets": [128], "threads": 2, "epochs": 3})
    text = str(error.value)
    assert "learning_rate 0.0005, not 0.002" in text and "buckets '128', not '256,512'" in text
    assert "threads" not in text and "epochs" not in text


def test_what_papermill_sets_counts_also_where_it_is_the_default(tmp_path):
    """A run of a cluster goes on without it, and a time limit can be lifted."""
    folder = tmp_path / "run"
    folder.mkdir()
    of_the_run = {"topology": "3-1", "time_limit": 0.5, "strategy": "random"}
    RunLog.create(folder, TrainConfig(dataset=str(tmp_path), **of_the_run)).close()
    defaults = {name: TrainConfig.__dataclass_fields__[name].default for name in of_the_run}
    cell = '# Data\ndataset: str = "sample"\ntopology: str = "1-1"\ntime_limit: float = 0\nresume: str = ""'

    def notebook(injected):
        lines = "".join(f"{name} = {value!r}\n" for name, value in injected.items())
        return {**defaults, "dataset": "sample", "resume": str(folder), **injected, "In": ["", cell, f"# Parameters\n{lines}"]}

    kept = TrainConfig.from_notebook(notebook({"resume": str(folder)}))
    assert (kept.topology, kept.time_limit, kept.strategy) == ("3-1", 0.5, "random")
    lifted = TrainConfig.from_notebook(notebook({"resume": str(folder), "topology": "1-1", "time_limit": 0.0}))
    for each in (lifted, lifted.resumed()):
        assert (each.topology, each.time_limit, each.strategy) == ("1-1", 0.0, "random")
    assert lifted.changes(folder) == {"time_limit": 0.0, "topology": "1-1"}
    with pytest.raises(ParameterError, match="strategy 'bucketed', not 'random'"):
        TrainConfig.from_notebook(notebook({"strategy": "bucketed"}))


def test_harmless_knobs_exist():
    assert {each.name for each in dataclasses.fields(TrainConfig)} >= HARMLESS


def test_resume_of_what_is_no_run(tmp_path):
    with pytest.raises(ParameterError, match=r"no config\.json"):
        TrainConfig.from_notebook({"resume": str(tmp_path)})
    with pytest.raises(ParameterError, match=r"/false"):
        TrainConfig.from_notebook({"resume": "false"})
    (tmp_path / "config.json").write_text('{"epochs": 2, "weather": "fine"}')
    with pytest.raises(ParameterError, match="weather"):
        TrainConfig.from_notebook({"resume": str(tmp_path)})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ParameterError, match="not readable"):
        TrainConfig.from_notebook({"resume": str(tmp_path)})


def test_newest_run_is_diagnosed_unless_one_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path))
    with pytest.raises(ParameterError, match="make run"):
        DiagnoseConfig().describe()
    for name, when in (("old", 1), ("new", 3), ("middle", 2)):
        (tmp_path / "runs" / name).mkdir(parents=True)
        path = tmp_path / "runs" / name / "steps.jsonl"
        path.touch()
        os.utime(path, (when, when))
    assert DiagnoseConfig().run.name == "new" and DiagnoseConfig(run_dir="x").run == Path("x").absolute()


@pytest.mark.parametrize("cls", [LengthsConfig, BucketsConfig, PaddingConfig, TrainConfig])
def test_an_empty_dataset_is_refused(cls):
    with pytest.raises(ParameterError, match="dataset: '' was given, needed"):
        cls.from_notebook({"dataset": ""})


@pytest.mark.parametrize("name", ["seeds", "strategies"])
def test_a_comparison_of_nothing_is_refused(name):
    for nothing in ([], "", "[]"):
        with pytest.raises(ParameterError, match=f"{name}: an empty list was given, needed: at least one"):
            PaddingConfig.from_notebook({name: nothing})


def test_cuts_are_not_written_over_a_folder(tmp_path):
    with pytest.raises(ParameterError, match=r"save_to: .* is a folder; give the path of a file, such as .*/buckets\.json"):
        BucketsConfig(save_to=str(tmp_path))


def test_edges_beyond_the_longest_sample_are_refused_with_what_will_be_used():
    longest = read_histogram("sample").max
    with pytest.raises(BucketError, match=rf"buckets: no sample is as long as 9,000, the longest has {longest:,} tokens"):
        TrainConfig(buckets="9000").describe()
    with pytest.raises(BucketError, match=r"no sample is as long as 2,000"):
        TrainConfig(buckets="2000", max_length=1000, too_long="truncate").describe()
    assert "buckets '512,9000'" in TrainConfig(buckets="512,9000").describe()


def test_cuts_of_another_dataset_or_budget_are_named(tmp_path):
    here = BucketsConfig(save_to=str(tmp_path / "buckets.json"))
    plan = optimize_buckets(read_histogram("sample"), 4, **here.limits)
    dataclasses.replace(plan, made_for=here.made_for).save(here.writes)
    fits = TrainConfig(buckets=str(here.writes))
    assert "beware" not in fits.describe() and "beware" not in PaddingConfig(buckets=str(here.writes)).describe()
    other = " ".join(TrainConfig(buckets=str(here.writes), dataset=str(tmp_path), token_budget=4096).describe().split())
    assert f"beware {here.writes} was made for dataset sample, not {tmp_path}; token_budget 8192, not 4096." in other
    assert "column seq_len, not n_tokens" in PaddingConfig(buckets=str(here.writes), column="n_tokens").describe()
    assert other.endswith("or go on if that is meant") or "or go on if that is meant versions" in other


def test_a_resumed_run_takes_its_own_copy_of_the_cuts(tmp_path):
    plan = optimize_buckets(read_histogram("sample"), 4)
    config = TrainConfig(buckets=str(plan.save(tmp_path / "buckets.json")), runs_dir=str(tmp_path))
    (tmp_path / "run").mkdir()
    with RunLog.create(tmp_path / "run", config) as log:
        log.write("buckets", plan.to_json())
    (tmp_path / "buckets.json").unlink()
    resumed = TrainConfig.from_notebook({"resume": str(tmp_path / "run")})
    assert resumed.buckets == str(tmp_path / "run" / "buckets.json") and "beware" not in resumed.describe()


def test_looking_at_a_run_shows_its_own_settings_and_no_defaults(started):
    folder, _ = started
    text = TrainConfig.from_notebook({"watch": str(folder), "anchors": 8}).describe()
    assert "its own" in text and "epochs 3" in text and "defaults" not in text and "q_hs_mb" not in text
    assert re.search(r"ignored +anchors 8: a run that is only looked at has its own settings", text)
    bare = folder.parent / "elsewhere"
    bare.mkdir()
    assert "its own" not in TrainConfig(watch=str(bare)).describe()


def test_a_checkout_that_git_does_not_speak_of_is_not_called_none(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_HOME", str(tmp_path))
    assert re.search(r"^commit +not a git checkout$", LengthsConfig(dataset="reference").describe(), re.M)
    (tmp_path / ".git").mkdir()  # git says that this is none of its own, as it does of a checkout of somebody else
    assert re.search(r"^commit +not a git checkout that git can read$", LengthsConfig(dataset="reference").describe(), re.M)


WHOLE = [each.name for each in dataclasses.fields(TrainConfig) if each.type is int]


def test_whole_numbers_written_as_floats_are_read_back_whole(tmp_path):
    folder = write_run(tmp_path / "run", Recipe(steps=3))
    path = folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {name: float(values[name]) for name in WHOLE}))
    assert {name: type(read_run(folder).config[name]) for name in WHOLE} == dict.fromkeys(WHOLE, int)
    assert saved_config(folder) == TrainConfig(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [("topology", value) for value in ("seven", "", "-1", "0-1", "1", "2-", "1-1-1", "9" * 5000 + "-1", "10000-1")]
    + [("target_layers", value) for value in ("x", "-1", "1,,2", "9" * 5000)]
    + [("mask_token", value) for value in ("x", "", "-1", "9" * 5000)]
    + [("buckets", value) for value in ("zzz", "5,1", "auto:0", "auto:" + "9" * 5000, "9" * 5000)]
    + [("run_name", "a/b"), ("dataset", ""), ("target", ""), ("q_hs_mb", 0.5), ("threads", 5000), ("seed", 2**63)]
    + [(name, value) for name in WHOLE for value in (10**30, 1e300, "9" * 5000)],
)
def test_what_a_new_configuration_refuses_is_damage_in_that_of_a_run(tmp_path, name, value):
    folder = write_run(tmp_path / "run", Recipe(steps=3))
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))
    for call in (lambda: TrainConfig(**{name: value}), lambda: read_run(folder), lambda: saved_config(folder)):
        with pytest.raises((ParameterError, RunError), match=rf"{name}:? ") as refused:
            call()
        assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("cls", CONFIGS.values())
def test_no_whole_number_is_without_an_upper_bound(cls):
    for each in dataclasses.fields(cls):
        if each.type in (int, tuple[int, ...]):
            largest = {"seed": 2**63 - 1, "seeds": 2**63 - 1, "threads": 4096}.get(each.name, 2**31 - 1)
            room = {"token_budget": 2**31 - 1} if each.name == "max_length" else {}
            assert cls(**(room if cls is TrainConfig else {}), **{each.name: largest})
            for more in (largest + 1, 10**30, "1" + "0" * 5000, 10**5000, [10**5000]):
                with pytest.raises(ParameterError, match=f"^{each.name}: "):
                    cls(**{each.name: more})
