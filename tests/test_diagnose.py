"""The verdict on logs with known parts: right where something was planted, silent where nothing was, plain about what it cannot tell."""

import json
import shutil
import warnings
from dataclasses import replace

import numpy as np
import pytest
from labelled_logs import NOTES, SCENE, Planted, cases, killed, poison, release, short_last_batches, spikes_in, waits
from runs import Recipe, records, write_run

from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.analysis.findings import CHECKS
from dflash_nb.analysis.findings.finding import Log, Severity, listed, plural
from dflash_nb.analysis.findings.spikes import LONE, _limit, find_spikes, is_short, spike_rates, spike_table
from dflash_nb.analysis.phase import phase_of
from dflash_nb.analysis.plots.diagnosis import curve
from dflash_nb.analysis.running import scale_of
from dflash_nb.analysis.signs import TELLS, signs
from dflash_nb.pipeline.run import RunError
from dflash_nb.pipeline.runlog import RunLog, read_run


@pytest.fixture(autouse=True)
def quiet():
    """A warning from numpy is a division that nobody thought of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_labelled_logs(case, tmp_path):
    try:
        found = diagnose(case.write(tmp_path / "run"))
    finally:
        release()
    assert found.alarm != case.healthy
    if case.kind != "healthy":
        assert found.main.kind == case.kind
    assert found.text().startswith(f"{found.verdict}: ")
    for finding in found.findings:
        assert (finding.evidence and finding.advice and 0 < finding.confidence <= 1 and len(finding.steps) > 0) or finding.kind == "holes"
        assert "nan" not in finding.text and "nan" not in " ".join(finding.evidence).replace("norm is nan", "")
    assert f"→ {found.main.advice}"[:60] in found.report() if found.main else found.report()


def test_level_differences_are_no_spikes(tmp_path):
    """qlora 84, transformers 20810, lhotse 356 and 364: only offsets between buckets; then five outliers in one of them."""
    recipe = Recipe(seed=4, steps=400, levels=(1.5, 0.5, -0.5, -1.5))
    log = Log(read_run(Planted(recipe)(tmp_path / "offsets")))
    assert len(find_spikes(log)) == 0 and spike_table(log) == []
    assert not any(row["stands out"] for row in spike_rates(log, find_spikes(log)))

    found = diagnose(Planted(recipe, spikes_in(0, 5, 1.0))(tmp_path / "planted"))
    planted = [int(step) for step in found.of("spikes").steps]
    run = found.log.run
    truth = records(recipe)
    heights = run.steps["loss"] - np.array([record["loss"] for record in truth])
    assert planted == [int(step) for step in run.steps["step"][heights > 0.5]] and len(planted) == 5
    [row] = [row for row in found.of("spikes").data["rates"] if row["stands out"]]
    assert row["lengths"] == "0 - 127" and row["spikes"] == 5
    assert "lengths 0 - 127" in found.of("spikes").text and found.verdict == "LOOK"
    table = spike_table(found.log)
    assert sorted(row["step"] for row in table) == planted and all(row["lengths"] == "0 - 127" for row in table)
    assert [row["z"] for row in table] == sorted((row["z"] for row in table), reverse=True)


def test_no_bucket_is_named_where_all_spike_alike(tmp_path):
    recipe = Recipe(seed=4, steps=400, spikes={50: 2.0, 120: 2.0, 200: 2.0, 310: 2.0})
    found = diagnose(write_run(tmp_path / "run", recipe))
    assert [int(step) for step in found.of("spikes").steps] == [50, 120, 200, 310]
    assert "no range of lengths stands out (n = 4)" in found.of("spikes").evidence


def test_short_last_batches_are_labelled_and_raise_no_alarm(tmp_path):
    """sentence-transformers 3420."""
    found = diagnose(Planted(Recipe(seed=8, steps=400), short_last_batches)(tmp_path / "run"))
    assert found.verdict == "HEALTHY" and found.of("short batches").severity == Severity.NOTE
    assert np.flatnonzero(is_short(found.log)).tolist() == list(range(0, 400, 40))
    assert found.of("short batches").steps.tolist() == list(range(1, 401, 40))


def test_a_poisoned_sample_is_named(tmp_path):
    found = diagnose(Planted(Recipe(seed=80, steps=450), poison(17, 1.5, 60))(tmp_path / "run"))
    spikes = found.of("spikes")
    assert spikes.data["shared"][0]["sample"] == 17 and "sample 17 is in all" in spikes.text and "sample 17" in spikes.advice
    assert all("17" in row["samples"].split(", ") for row in spike_table(found.log))


def test_a_sample_in_many_batches_is_not_blamed_for_being_there(tmp_path):
    """Few samples, many epochs: every sample is in several spikes by chance."""

    def few_samples(made, rng):
        for record in made:
            record["batches"][0]["sample_ids"] = rng.choice(40, 24, replace=False).tolist()
        for row in (50, 90, 140, 200, 260, 310):
            made[row]["batches"][0]["loss"] += 2.0

    spikes = diagnose(Planted(Recipe(seed=5, steps=400), few_samples)(tmp_path / "run")).of("spikes")
    assert len(spikes.steps) == 6 and spikes.data["shared"] == []


def test_the_reference_scene_in_its_words(tmp_path):
    """Step 300 of a 3,598-step warm-up to 6e-4: the bucketed run is jumpy and healthy, the sorted one smooth by composition."""
    bucketed = Planted(SCENE, status="running")(tmp_path / "bucketed")
    ordered = Planted(replace(SCENE, order="sorted", seed=1), status="running", config={"strategy": "sorted"})(tmp_path / "sorted")
    one, two = diagnose(bucketed), diagnose(ordered)
    release()
    assert one.text().startswith("HEALTHY: still warming up, step 300 of 3,598, learning rate 5.0e-05, 8% of the peak 6.0e-04; ")
    assert "of the step-to-step movement is bucket mix" in one.text() and one.text().endswith("Let it run.")
    assert one.of("bucket mix").data["movement"].low > 0.9
    assert two.verdict == "HEALTHY" and two.main.kind == "static composition" and "smooth by composition" in two.text()
    assert "still warming up" in two.text()


def test_short_logs_say_what_they_cannot_tell(tmp_path):
    for steps in (1, 2, 5, 12, 29):
        found = diagnose(write_run(tmp_path / f"run-{steps}", Recipe(steps=steps)))
        assert found.verdict == "TOO EARLY" and "a verdict needs 30 steps. Start a longer run." in found.text()
        assert f"{steps} step" in found.text() and curve(found).finding.startswith("TOO EARLY: ")
        kinds = {each.check.kind for each in found.unjudged}
        assert {"spikes", "divergence", "plateau", "group does not learn"} <= kinds
        assert all(f"there are {steps}" in each.why or "holds no" in each.why for each in found.unjudged)
        assert f"there are {steps}" in found.report()


def test_an_empty_log(tmp_path):
    with RunLog.create(tmp_path, {"seed": 3}):
        found = diagnose(tmp_path)
        assert found.verdict == "LOOK" and "no step to judge, the run is running" in found.text()
    assert found.main is None and len(found.unjudged) == len(CHECKS) and found.report()
    assert [row["value"] for row in signs(found)] == ["no step yet"] * len(TELLS)


def test_a_log_without_any_loss_is_not_called_healthy(tmp_path):
    def without(made, rng):
        for record in made:
            for batch in record["batches"]:
                batch["loss"] = None

    found = diagnose(Planted(Recipe(steps=70), without)(tmp_path / "run"))
    assert found.verdict == "LOOK" and "none of the 70 steps has a loss" in found.text()


def test_a_log_of_unreadable_lines_says_so(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "steps.jsonl").write_bytes(b"\x00\xff\n" * 7)
    (tmp_path / "summary.json").write_text('{"status": "finished"}')
    assert "there is no step to judge: 7 lines of" in diagnose(tmp_path).text()


@pytest.mark.parametrize("name", ["config.json", "environment.json", "summary.json", "plan.json"])
@pytest.mark.parametrize("text", ["[1]", '"x"', "3"])
def test_a_description_that_is_no_object_is_named(tmp_path, name, text):
    (tmp_path / "steps.jsonl").touch()
    (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=rf"{name} holds a JSON (list|str|int), not an object"):
        read_run(tmp_path)


def test_events_without_a_usable_step_are_counted_not_believed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    lines = [{"kind": "eval", "step": 5}, *({"kind": "resume", "step": step} for step in (None, "3", [1], 4.5)), {"kind": 7, "step": 1}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = read_run(tmp_path)
    assert (run.events, run.bad_lines) == (lines[:1], 5)


def test_what_is_no_run(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        diagnose(tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"neither config\.json nor steps\.jsonl"):
        diagnose(tmp_path)


def test_a_killed_run_is_read_and_said_to_be_unfinished(tmp_path):
    """papermill 454, 474; pyhf 1840: kill -9 leaves whole lines and half of one."""
    folder = write_run(tmp_path / "run", Recipe(steps=50, total_steps=400))
    killed(folder)
    found = diagnose(folder)
    assert len(found.log) == 49 and found.verdict == "LOOK" and found.main.kind == "not finished"
    assert "stopped without a word at step 49 of 400" in found.text() and f"-p resume {folder}" in found.text()
    assert any("half-written" in text for text in found.main.evidence)


def test_the_steps_alone_are_enough(tmp_path):
    """papermill 597, 598: nothing but the run folder, and of it nothing but the log."""
    folder = write_run(tmp_path / "run", Recipe(seed=1, spikes={100: 3.0}, evals=(0, 100, 300)))
    for path in folder.iterdir():
        if path.name != "steps.jsonl":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = diagnose(folder)
    assert [int(step) for step in found.of("spikes").steps] == [100]
    assert {each.check.kind for each in found.unjudged} == {"held-out drifts", "off plan"}
    assert found.log.parts.groups == ("bucket 0", "bucket 1", "bucket 2", "bucket 3")


def test_a_growing_log_is_read_on(tmp_path):
    recipe = Recipe(seed=2, spikes={250: 3.0})
    with RunLog.create(tmp_path / "run" if (tmp_path / "run").mkdir() is None else tmp_path, recipe.train_config()) as log:
        made = records(recipe)
        for record in made[:200]:
            log.step(record)
        first = diagnose(tmp_path / "run")
        before = first.log.run
        assert len(first.log) == 200 and first.of("spikes") is None and first.log.run.status == "running"
        for record in made[200:]:
            log.step(record)
        second = first.refreshed()
    assert second.log.run is before and len(second.log) == 300
    whole = diagnose(tmp_path / "run")
    assert [finding.text for finding in second.findings if finding.kind != "not finished"] == [
        finding.text for finding in whole.findings if finding.kind != "not finished"
    ]
    assert [int(step) for step in second.of("spikes").steps] == [250]


def test_a_resumed_run_with_other_losses_is_caught_by_the_steps_made_twice(tmp_path):
    for name, shift, kind in (("same", 0.0, None), ("other", 0.04, "resume jump")):
        folder = write_run(tmp_path / name, Recipe(seed=6), status=None, upto=220)
        with RunLog.open_for_resume(folder, 200) as log:
            for record in records(Recipe(seed=6))[200:]:
                log.step({**record, "loss": record["loss"] + shift})
            log.finish("finished")
        lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        assert [line["last"] for line in lines if line["kind"] == "dropped"] == [220]
        found = diagnose(folder)
        assert (found.of("resume jump") is not None) == (kind is not None)


def test_false_alarms_are_rare_in_noise_of_any_shape():
    """Pure noise of a hundred to three thousand batches: normal, heavy-tailed, skewed. A kind raises one alarm in ten logs at most."""
    rng = np.random.default_rng(3)
    alarms = {}
    for name, draw in (
        ("normal", lambda n: rng.normal(size=n)),
        ("Student t, 4", lambda n: rng.standard_t(4, n)),
        ("Student t, 3", lambda n: rng.standard_t(3, n)),
        ("gamma", lambda n: rng.gamma(2.0, size=n) - 1.68),
        ("exponential", lambda n: rng.exponential(size=n) - np.log(2)),
    ):
        for n in (100, 400, 3000):
            logs = [noise / scale_of(noise) for noise in (draw(n) for _ in range(60))]
            beyond = [z[z > _limit(z)] / _limit(z) for z in logs]
            alarms[name, n] = np.mean([len(high) > 1 or (high > LONE).any() for high in beyond])
    assert max(alarms.values()) <= 0.08, alarms
    assert np.mean(list(alarms.values())) < 0.03, alarms


def test_spikes_are_found_from_small_ones_on(tmp_path):
    """One batch ten standard deviations of normal noise too high: found in most logs of 300 steps."""
    hits = 0
    for seed in range(10):
        run = read_run(write_run(tmp_path / str(seed), Recipe(seed=seed, noise=0.1, spikes={150: 1.0})))
        hits += [int(step) for step in find_spikes(Log(run)).step_S] == [150]
    assert hits >= 8


def test_phases_of_a_schedule(tmp_path):
    found = diagnose(write_run(tmp_path / "run", Recipe(steps=200, warmup=40)))
    assert phase_of(found.log.run).name == "decay" and phase_of(found.log.run).warmup_steps == 40
    warm = read_run(write_run(tmp_path / "warm", Recipe(steps=30, total_steps=1000, warmup=100)))
    warm.plan, warm.config = None, {}
    assert phase_of(warm).name == "warm-up", "a rate that has only risen is warm-up, plan or not"


def test_signs_carry_their_intervals(tmp_path):
    found = diagnose(Planted(Recipe(seed=80, steps=450), poison(17, 1.5, 60))(tmp_path / "run"))
    rows = {row["sign"]: row for row in signs(found)}
    assert set(rows) == set(TELLS)
    assert rows["spikes in 1,000 steps"][""] == "LOOK" and rows["finite losses"]["value"].startswith("100.00%")
    low, high = (float(bound) for bound in rows["spikes in 1,000 steps"]["interval"].split(" to "))
    assert low < float(rows["spikes in 1,000 steps"]["value"]) < high
    low, high = (float(bound) for bound in rows["trend of the last fifth"]["interval"].split(" to "))
    assert low < high < 2
    assert rows["steps until a spike is over"]["value"] == "1"


@pytest.mark.parametrize(
    ("norm", "mark", "severity"),
    [(0.7, "OK", None), (1.25, "note", Severity.NOTE), (3.0, "note", Severity.NOTE), (30.0, "LOOK", Severity.LOOK)],
)
def test_clipping_in_most_steps_is_said_and_alarms_only_far_above_the_limit(tmp_path, norm, mark, severity):
    """Norms scatter by 20 %: 0.7 is above the limit of 1 in few steps, 1.25 in about 87 %, the others in all."""
    found = diagnose(write_run(tmp_path / "run", Recipe(seed=1, steps=400, grad_norm=norm)))
    steps = found.log.run.steps
    share, late = steps["clipped"].mean(), steps["clipped"][-192:].mean()  # half of the 384 steps after a warm-up of 16
    row = {row["sign"]: row for row in signs(found)}["clipped"]
    assert (row["value"], row[""]) == (f"{share:.0%} of the steps, {late:.0%} of the last 192", mark)
    clipping = found.of("always clipped")
    assert (clipping.severity if clipping else None) == severity
    assert found.verdict == ("LOOK" if severity == Severity.LOOK else "HEALTHY")
    if clipping:
        twice = 2 * np.median(steps["grad_norm"][-192:])
        assert (
            f"{late:.0%} of the last 192 steps were clipped" in clipping.text and f"about {twice:.2g}, twice the median" in clipping.advice
        )


def test_a_steep_start_that_was_clipped_is_no_finding(tmp_path):
    def fades(made, rng):
        for record in made:
            record["grad_norm"] = 5.0 if record["step"] < 200 else 0.5
            record["clipped"] = record["grad_norm"] > 1.0

    found = diagnose(Planted(Recipe(seed=1, steps=300), fades)(tmp_path / "run"))
    row = {row["sign"]: row for row in signs(found)}["clipped"]
    assert row == {"sign": "clipped", "value": "66% of the steps, 30% of the last 144", "interval": "", "": "OK"}
    assert found.of("always clipped") is None


def tau(step, value, low=None, high=None):
    return {"step": step, "loss": None, "tau": value, "tau_low": low, "tau_high": high}


@pytest.mark.parametrize(
    ("events", "value", "interval", "mark"),
    [
        ((), "not known", "", ""),
        ((tau(0, 1.0),), "1.00 at step 0", "", ""),
        ((tau(0, 1.0), tau(300, 1.8, 1.62, 2.0)), "1.00 → 1.80 at step 300", "1.62 to 2.00", "OK"),
        ((tau(0, 1.0), tau(300, 1.3, 0.95, 1.7)), "1.00 → 1.30 at step 300", "0.95 to 1.70", ""),  # may be nothing: not called OK
        (({"step": 300, "loss": None, "tau": 1.8, "tau_low": 1.62},), "1.80 at step 300", "", "OK"),
        (({"step": 300, "loss": None, "tau": 1.8, "tau_high": 2.0},), "1.80 at step 300", "", "OK"),
        ((tau(0, 1.0), tau(150, 1.5), tau(300, 1.03, 1.01, 1.05)), "1.00 → 1.03 at step 300", "1.01 to 1.05", "STOP"),
    ],
)
def test_tau_has_a_sign(tmp_path, events, value, interval, mark):
    def evaluated(log, record):
        for event in events:
            if max(event["step"], 1) == record["step"]:
                log.event("eval", **event)

    found = diagnose(Planted(Recipe(seed=1, steps=300), events=evaluated)(tmp_path / "run"))
    assert (found.of("decoding accepts nothing") is not None) == (mark == "STOP")
    row = {row["sign"]: row for row in signs(found)}["tau, tokens a target pass"]
    assert (row["value"], row["interval"], row[""]) == (value, interval, mark)


@pytest.mark.parametrize(
    ("evals", "losses", "value", "mark"),
    [
        ((), (), "not known", ""),
        ((0, 600), (7.1, 3.6), "7.100 → 3.600 at step 600", ""),  # too few for the check
        ((0, 150, 300, 450, 600), (7.1, 4.6, 4.0, 3.8, 3.6), "7.100 → 3.600 at step 600", "OK"),
        ((0, 150, 300, 450, 600), (7.1, 4.6, 4.0, 4.3, 4.9), "7.100 → 4.900 at step 600", "LOOK"),
    ],
)
def test_held_out_loss_has_a_sign(tmp_path, evals, losses, value, mark):
    def evaluated(log, record):
        for step, loss in zip(evals, losses, strict=True):
            if max(step, 1) == record["step"]:
                log.event("eval", step=step, loss=loss)

    found = diagnose(Planted(Recipe(seed=1, steps=600), events=evaluated)(tmp_path / "run"))
    row = {row["sign"]: row for row in signs(found)}["held-out loss"]
    assert (row["value"], row[""]) == (value, mark)


def test_what_was_not_judged_is_not_called_ok(tmp_path):
    found = diagnose(write_run(tmp_path / "run", Recipe(seed=1, steps=50, total_steps=400)))
    marks = {row["sign"]: row[""] for row in signs(found)}
    assert marks["finite losses"] == marks["spikes in 1,000 steps"] == "OK"
    assert marks["clipped"] == marks["held-out loss"] == marks["tau, tokens a target pass"] == ""


def test_starvation_names_the_slow_side(tmp_path):
    for prefetch, side in ((8, "the target"), (0, "reading and collating")):
        found = diagnose(Planted(Recipe(seed=112), waits(0.9, prefetch))(tmp_path / str(prefetch))).of("starved")
        assert f"{side} limits the speed" in found.text and "q_prefetch" in found.evidence[1]


def test_words():
    assert listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert listed(list("abcdefgh"), 4) == "a, b, c and 5 more"
    assert plural(1, "batch") == "1 batch" and plural(1200, "batch") == "1,200 batches" and plural(3, "step") == "3 steps"
    assert {case.kind for case in cases()} >= {*NOTES} - {"short batches", "off plan", "holes"}
    assert len({check.kind for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(("evals", "made"), [((0,), 0), ((0, 300), 1), ((0, 150, 300), 2)])
def test_too_few_evaluations_leave_the_held_out_question_open(tmp_path, evals, made):
    found = diagnose(write_run(tmp_path / "run", Recipe(seed=1, steps=300, evals=evals)))
    [open_question] = [each for each in found.unjudged if each.check.kind == "held-out drifts"]
    assert open_question.why == f"needs 3 held-out evaluations after the start, there are {made}: set eval_every"
    assert open_question.why in " ".join(found.report().split())
