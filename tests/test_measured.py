"""A run's log in the planner's terms: a log written from a known cost model gives that model back."""

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.measured import (
    COST_FILE,
    find_cost,
    fit_run,
    identity,
    main,
    measured_batches,
    run_speed,
    run_speeds,
    slots_per_token,
)
from dflash_nb.pipeline.run import read_run
from dflash_nb.pipeline.runlog import RunLog
from dflash_nb.planner.cost import CostError, CostModel

TRUE = CostModel(fetch=(1e-4, 1e-5, 0), target=(0.01, 1e-5, 1e-9, 0, 1e-4), transfer=(1e-4, 1e-8), drafter=(0.02, 1e-3, 0, 3e-5, 1e-8))
ENVIRONMENT = {"target": {"name": "sample", "num_layers": 8, "hidden_size": 128}, "devices": {"targets": ["cpu"], "drafter": "cpu"}}


def write_run(folder, steps=60, accumulation=2, **options):
    """A run of the log's own format whose batches take what ``TRUE`` says and whose optimiser takes 0.5 s."""
    config = TrainConfig(accumulation=accumulation, **options)
    rng = np.random.default_rng(0)
    folder.mkdir()
    with RunLog.create(folder, config, ENVIRONMENT) as log:
        for step in range(1, steps + 1):
            batches = []
            for index in range(accumulation):
                rows = int(rng.integers(1, 17))
                padded = int(rng.integers(20, 8192 // rows))
                tokens = rows * padded
                slots, blocks = rows * 32 * 7, rows * 32
                seconds = {
                    "fetch": float(TRUE.fetch_seconds(rows, tokens)),
                    "target": float(TRUE.target_seconds(rows, padded)),
                    "transfer": float(TRUE.transfer_seconds(tokens)),
                    "wait": 0.1,
                    "drafter": float(TRUE.drafter_seconds(rows, tokens, blocks * 8, blocks * 8 * padded)),
                }
                shape = {"rows": rows, "tokens": tokens, "padded_tokens": tokens, "padded_length": padded}
                batches.append({"index": index, "bucket": 0, **shape, "loss": 5.0, "weight": 1.0, "sample_ids": list(range(rows)),
                                "supervised": tokens, "slots": slots, "seconds": seconds})  # fmt: skip
            spent = {name: sum(batch["seconds"][name] for batch in batches) for name in batches[0]["seconds"]}
            spent |= {"optimizer": 0.4, "step": spent["wait"] + spent["drafter"] + 0.5}
            sums = {name: sum(batch[name] for batch in batches) for name in ("tokens", "padded_tokens", "supervised", "slots")}
            log.step({"step": step, "epoch": 0, "loss": 5.0, "weight": 2.0, "lr": 1e-3, "grad_norm": 1.0, "clipped": False,
                      "blocks": sums["slots"] // 7, **sums, "slot_accuracy": [0.0] * 7, "acceptance": 1.0, "seconds": spent,
                      "q_prefetch": 8, "q_hs": 1, "q_hs_bytes": 1, "memory_bytes": 1, "batches": batches})  # fmt: skip
    return read_run(folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "known")


def test_a_log_gives_its_cost_model_back(run):
    cost = fit_run(run)
    measured = measured_batches(run)
    assert len(measured) == 2 * 55  # five steps warm up
    for stage in ("fetch", "target", "transfer", "drafter"):
        predicted = measured.terms(stage) @ np.array(getattr(cost, stage))
        assert predicted == pytest.approx(measured.seconds[stage], rel=1e-3)
    assert cost.step == pytest.approx(0.5, rel=1e-6) and cost.accumulation == 2
    assert cost.slots_per_row == 256 and cost.slots_per_token == 0
    assert cost.source.startswith("measured on ") and "run known" in cost.source
    assert cost.belongs_to["target"] == "sample (8 layers of 128)" and "block size 8" in cost.belongs_to["drafter"]


@pytest.mark.parametrize(
    ("names", "dtype", "said"),
    [
        ([], "auto", "2 CPU cores with all threads, in float32"),
        ([], "bfloat16", "2 CPU cores with all threads, in bfloat16"),
        (["NVIDIA H200"] * 2, "auto", "NVIDIA H200, in the target's own number format"),
        (["NVIDIA H200"], "float32", "NVIDIA H200, in float32"),
    ],
)
def test_the_hardware_names_the_number_format_that_auto_stands_for(names, dtype, said):
    config = asdict(TrainConfig(dtype=dtype))
    environment = {"cpu_cores": 2, "devices": {"names": names}}
    assert identity(config, environment, {"name": "t", "num_layers": 1, "hidden_size": 2})["hardware"] == said


def test_short_samples_set_the_slots_of_a_token(run):
    measured = measured_batches(run)
    length = measured.tokens / measured.rows
    few = measured.rows * np.minimum(256, 3.0 * length)
    found = slots_per_token(type(measured)(measured.rows, measured.tokens, measured.padded_length, measured.padded_tokens, few, few,
                                           measured.seconds), 256)  # fmt: skip
    assert found == pytest.approx(3.0, rel=1e-6)


def test_the_command_writes_what_a_notebook_finds(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["measured", str(run.folder)])
    main()
    assert "held-out shapes" in capsys.readouterr().out
    written = run.folder / COST_FILE
    assert json.loads(written.read_text())["belongs_to"]["target"].startswith("sample")
    assert find_cost(run.folder) == find_cost(written) == CostModel.load(written)
    assert find_cost("") == CostModel()


def test_a_runs_speed_stands_beside_models_of_its_own_target_only(run):
    speed = run_speed(run)
    assert speed["strategy"] == "bucketed" and speed["run"] == "known" and 0 < speed["noise"] < speed["tokens_per_second"]
    steps = run.steps
    assert speed["tokens_per_second"] == pytest.approx(steps["tokens"][5:].sum() / steps["seconds_step"][5:].sum())
    assert run_speeds([run.folder], fit_run(run)) == [speed]
    other = replace(CostModel(), source="measured elsewhere", belongs_to={"target": "smollm2 (30 layers of 576)"})
    with pytest.raises(CostError, match="target 'smollm2"):
        run_speeds([run.folder], other)


def test_what_has_no_cost_is_refused(tmp_path):
    with pytest.raises(CostError, match="neither a cost"):
        find_cost(tmp_path / "nothing")
    packed = write_run(tmp_path / "packed", steps=6, strategy="packed")
    with pytest.raises(CostError, match="packed rows"):
        measured_batches(packed)
    with pytest.raises(CostError, match="train more"):
        measured_batches(write_run(tmp_path / "short", steps=5))


@pytest.mark.parametrize("missing", ["config.json", "environment.json"])
def test_a_run_folder_without_what_it_belongs_to_is_refused_with_the_files_name(tmp_path, missing):
    run = write_run(tmp_path / "run", steps=30)
    (run.folder / missing).unlink()
    with pytest.raises(CostError, match=rf"run has no {missing}"):
        find_cost(run.folder)
    with pytest.raises(CostError, match=rf"run has no {missing}"):
        run_speeds([run.folder], CostModel())


def test_the_number_of_steps_comes_first(tmp_path):
    run = write_run(tmp_path / "run", steps=6)
    with pytest.raises(CostError, match="has 6 steps; a speed needs at least 25"):
        run_speed(run, replace(CostModel(), source="measured elsewhere"))


def test_the_command_ends_with_a_sentence(run, tmp_path, capsys):
    for arguments, say in (
        ([str(tmp_path / "none")], "error: .*none does not exist"),
        ([str(run.folder), "--out", str(tmp_path)], "error: --out: .* is a folder"),
        ([str(run.folder), "--out", str(tmp_path / "no" / "cost.json")], "error: --out: .* is in no folder"),
    ):
        with pytest.raises(SystemExit, match=say):
            main(arguments)
    assert capsys.readouterr().out == ""
