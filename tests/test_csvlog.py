"""CSV exports of trackers: columns found by name or by mapping, gaps said, broken files explained."""

import numpy as np
import pytest

from dflash_nb.analysis.csvlog import choose_columns, read_csv, read_log
from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.analysis.signs import signs
from dflash_nb.pipeline.run import RunError


def export(path, header, rows, end="\n"):
    path.write_text("\n".join([header, *rows]) + end, encoding="utf-8")
    return path


def losses(n, seed=0):
    rng = np.random.default_rng(seed)
    return 3 * np.exp(-np.arange(n) / 60) + 2 + rng.normal(0, 0.05, n)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("_step,_runtime,_timestamp,train/loss,train/lr", {"step": "_step", "time": "_timestamp", "loss": "train/loss", "lr": "train/lr"}),
        ('Step,"run-1 - train/loss","run-1 - train/loss__MIN","run-1 - train/loss__MAX"', {"step": "Step", "loss": "run-1 - train/loss"}),
        ("Wall time,Step,Value", {"time": "Wall time", "step": "Step", "loss": "Value"}),
        (
            "epoch,global_step,train_loss_step,val_loss,lr-AdamW",
            {"epoch": "epoch", "step": "global_step", "loss": "train_loss_step", "eval_loss": "val_loss", "lr": "lr-AdamW"},
        ),
        (
            "step,loss,grad_norm,learning_rate,epoch,eval_loss,num_input_tokens_seen",
            {
                "step": "step",
                "loss": "loss",
                "grad_norm": "grad_norm",
                "lr": "learning_rate",
                "epoch": "epoch",
                "eval_loss": "eval_loss",
                "tokens": "num_input_tokens_seen",
            },
        ),
        (
            "trainer/global_step,train_loss,seq_len,bucket",
            {"step": "trainer/global_step", "loss": "train_loss", "length": "seq_len", "bucket": "bucket"},
        ),
    ],
)
def test_columns_are_guessed(header, expected):
    assert choose_columns([name.strip('"') for name in header.split(",")]) == expected


def test_columns_can_be_named():
    names = ["a", "b", "loss", "my step"]
    assert choose_columns(names, "loss:a, step:my step, lr:b") == {"loss": "a", "step": "my step", "lr": "b"}
    with pytest.raises(RunError, match="no column 'c'; the file has a, b, loss, my step"):
        choose_columns(names, "loss:c")
    with pytest.raises(RunError, match="NAME one of step, loss, eval_loss"):
        choose_columns(names, "weather:a")
    with pytest.raises(RunError, match="needed: NAME:COLUMN"):
        choose_columns(names, "a")


def test_a_loss_that_two_columns_could_be_is_not_guessed(tmp_path):
    path = export(tmp_path / "two.csv", "Step,run-1 - loss,run-2 - loss", ["1,2,3", "2,2,3"])
    with pytest.raises(RunError, match=r"2 columns could be the loss: run-1 - loss, run-2 - loss.*-p columns"):
        read_csv(path)
    assert read_csv(path, "loss:run-2 - loss").steps["loss"].tolist() == [3.0, 3.0]


def test_without_a_loss_the_columns_are_listed(tmp_path):
    with pytest.raises(RunError, match=r"no column that looks like a loss; it has Step, accuracy"):
        read_csv(export(tmp_path / "a.csv", "Step,accuracy", ["1,2"]))
    (tmp_path / "empty.csv").touch()
    with pytest.raises(RunError, match="empty"):
        read_csv(tmp_path / "empty.csv")


def test_what_is_missing_is_said(tmp_path):
    found = diagnose(export(tmp_path / "log.csv", "step,loss", [f"{i + 1},{x:.4f}" for i, x in enumerate(losses(200))]))
    assert found.verdict == "HEALTHY" and found.log.run.status == "exported"
    unjudged = {each.check.kind: each.why for each in found.unjudged}
    assert unjudged["plateau"] == unjudged["warm-up"] == "the log holds no learning rate"
    assert "lengths" in unjudged["group does not learn"] and "held-out" in unjudged["held-out drifts"]
    assert "spikes" not in unjudged and "divergence" not in unjudged


def test_faults_are_found_with_few_columns(tmp_path):
    high = losses(300)
    high[[99, 199]] += 2.0
    found = diagnose(export(tmp_path / "spikes.csv", "iteration;nll", [f"{i + 1};{x:.4f}" for i, x in enumerate(high)]))
    assert [int(step) for step in found.of("spikes").steps] == [100, 200]
    away = losses(300) + 4 * np.clip((np.arange(300) - 200) / 50, 0, 1)
    found = diagnose(export(tmp_path / "away.csv", "step\tloss", [f"{i + 1}\t{x:.4f}" for i, x in enumerate(away)]))
    assert found.verdict == "STOP" and found.main.kind == "divergence"


def test_rows_of_evaluation_between_rows_of_training(tmp_path):
    rows = []
    for i, x in enumerate(losses(100)):
        rows.append(f"{i},{x:.4f},")
        if i % 25 == 24:
            rows.append(f"{i},,{x + 0.1:.4f}")
    run = read_csv(export(tmp_path / "log.csv", "step,train_loss,val_loss", rows))
    assert len(run) == 100 and run.steps["step"].tolist() == list(range(100)) and run.steps["finite"].all()
    assert [event["step"] for event in run.events_of("eval")] == [24, 49, 74, 99]


def test_numbers_that_are_none(tmp_path):
    run = read_csv(export(tmp_path / "log.csv", "step,loss,lr", ["1,2.0,0.1", "2,nan,0.1", "3,inf,", "4,None,0.1", "5,2.5,0.1"]))
    assert run.steps["step"].tolist() == [1, 2, 3, 5] and run.steps["finite"].tolist() == [True, False, False, True]
    assert np.isnan(run.steps["lr"]).tolist() == [False, False, True, False]
    with pytest.raises(RunError, match="column 'loss' holds 'two' in row 2"):
        read_csv(export(tmp_path / "words.csv", "step,loss", ["1,2.0", "2,two"]))
    found = diagnose(export(tmp_path / "nan.csv", "step,loss", [f"{i},{'NaN' if i > 40 else 2}" for i in range(60)]))
    assert found.verdict == "STOP" and found.main.kind == "not finite" and "first at step 41" in found.text()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("step,loss\n1,2.0\n".encode("utf-16"), "is no text in UTF-8"),
        ("step,loss,größe\n1,2.0,3\n".encode("latin-1"), "is no text in UTF-8"),
        ("step,loss\n1,größe\n".encode("latin-1"), "column 'loss' holds text that is not UTF-8"),
        (b"loss,step,loss\n1,2,3\n", "'loss' as the name of several columns"),
        (b"step,loss\n1,2.0\n1e30,1.9\n", r"column 'step' holds 1e\+30 in row 2, which is no step"),
        (b"step,loss\n-5,2.0\n", "column 'step' holds -5 in row 1, which is no step"),
        (None, "log.csv does not exist; name a run folder or a CSV export"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, data, message):
    if data is not None:
        (tmp_path / "log.csv").write_bytes(data)
    with pytest.raises(RunError, match=message):
        read_log(tmp_path / "log.csv")


def test_columns_that_nothing_asks_for_may_be_anything(tmp_path):
    (tmp_path / "log.csv").write_bytes("note,step,loss,note\ngröße,1,2.0,\n".encode("latin-1"))
    assert read_csv(tmp_path / "log.csv").steps["loss"].tolist() == [2.0]


def test_half_a_last_line_and_steps_out_of_order(tmp_path):
    run = read_csv(export(tmp_path / "log.csv", "step,loss,lr", ["2,2.0,0.1", "1,3.0,0.1", "2,2.1,0.1", "3,1.9,0.1", "4,1."], end=""))
    assert run.steps["step"].tolist() == [1, 2, 3] and run.steps["loss"].tolist() == [3.0, 2.1, 1.9] and run.bad_lines == 1


def test_tokens_seen_become_tokens_of_a_step(tmp_path):
    run = read_csv(export(tmp_path / "sum.csv", "step,loss,tokens_seen", [f"{i},2.0,{1000 * (i + 1)}" for i in range(10)]))
    assert run.steps["tokens"].tolist() == [1000.0] * 10
    run = read_csv(export(tmp_path / "each.csv", "step,loss,tokens", [f"{i},2.0,{1000 - i % 3}" for i in range(10)]))
    assert run.steps["tokens"].tolist() == [1000.0 - i % 3 for i in range(10)]


def test_a_log_without_steps_counts_its_rows(tmp_path):
    run = read_csv(export(tmp_path / "log.csv", "loss", ["3.0", "2.0", "1.0"]))
    assert run.steps["step"].tolist() == [1, 2, 3]


def test_buckets_of_an_export_are_groups(tmp_path):
    rng = np.random.default_rng(0)
    bucket = rng.integers(0, 3, 300)
    rows = [f"{i + 1},{x + b - 1:.4f},{b}" for i, (x, b) in enumerate(zip(losses(300), bucket, strict=True))]
    found = diagnose(export(tmp_path / "log.csv", "step,loss,bucket", rows))
    assert found.log.parts.groups == ("bucket 0", "bucket 1", "bucket 2") and found.main.kind == "bucket mix"
    assert found.log.parts.movement.value > 0.9


def test_read_log_takes_both(tmp_path):
    assert len(read_log(export(tmp_path / "log.csv", "loss", ["3.0"]))) == 1
    with pytest.raises(RunError, match="does not exist"):
        read_log(tmp_path / "nothing.csv")


def test_clipping_that_an_export_does_not_hold_is_not_known(tmp_path):
    """No column says whether a step was clipped, whatever the gradient norm is."""
    rows = [f"{i + 1},{x:.4f},50.0" for i, x in enumerate(losses(300))]
    found = diagnose(export(tmp_path / "log.csv", "step,loss,grad_norm", rows))
    [row] = [row for row in signs(found) if row["sign"] == "clipped"]
    assert (row["value"], row[""]) == ("not known", "")
    assert {each.check.kind: each.why for each in found.unjudged}["always clipped"] == "the log holds no word on clipping"


@pytest.mark.parametrize("every", [1, 10])
def test_spikes_and_recoveries_are_counted_in_steps_not_in_rows(tmp_path, every):
    """Four spikes of two rows in 400 rows, one of them at the very end."""
    high = losses(400)
    for row in (100, 200, 300, 398):
        high[row : row + 2] += 3.0
    found = diagnose(export(tmp_path / "log.csv", "step,loss", [f"{every * (i + 1)},{x:.4f}" for i, x in enumerate(high)]))
    rows = {row["sign"]: row for row in signs(found)}
    spikes, recovery = rows["spikes in 1,000 steps"], rows["steps until a spike is over"]
    assert float(spikes["value"]) == pytest.approx(8 / 0.4 / every, abs=0.05)
    low, high = (float(bound) for bound in spikes["interval"].split(" to "))
    assert low < float(spikes["value"]) < high
    assert int(recovery["value"]) in (every, 3 * every // 2) and recovery["interval"] == f"longest {2 * every}"
