"""Advice on simulated devices: real threads, queues and window, devices that sleep, and a log as training writes it.

Sleeping devices take what they say; a machine that is busy otherwise only wakes them late. So they sleep tens of milliseconds, and where a
second run is compared with what the first one's advice predicted, a pair of runs that was disturbed is made once more.
Run alone: python -m pytest tests/test_advice.py
"""

import re
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
from runs import Recipe, write_run

from dflash_nb.pipeline.advice import Stages, advise, advise_stages, on_one_device, replay
from dflash_nb.pipeline.config import TrainConfig
from dflash_nb.pipeline.local import LocalPool
from dflash_nb.pipeline.prefetch import Prefetcher
from dflash_nb.pipeline.run import Run
from dflash_nb.pipeline.runlog import RunLog, read_run
from dflash_nb.pipeline.window import WAITING_BATCHES, Window

BATCHES = 48
PREFETCH = 8


@dataclass(frozen=True)
class Devices:
    """Milliseconds of a batch in each stage; a batch takes between a half and one and a half of them."""

    fetch: float = 5.0
    target: float = 45.0
    transfer: float = 5.0
    drafter: float = 24.0
    optimizer: float = 5.0
    workers: int = 1
    names: str = "simulated"

    def share(self, index: int) -> float:
        return 0.5 + (index * 0.618) % 1.0

    def sleep(self, stage: str, index: int) -> float:
        started = time.perf_counter()
        time.sleep(getattr(self, stage) * self.share(index) / 1000)
        return time.perf_counter() - started


def simulated(folder, devices: Devices):
    """A run of these devices, read back from its log."""

    def collate(index):
        devices.sleep("fetch", index)
        return SimpleNamespace(epoch=0, index=index, sample_ids_B=np.array([index]), real_tokens=int(1000 * devices.share(index)), nbytes=8)

    def compute(batch):
        return {stage: devices.sleep(stage, batch.index) for stage in ("target", "transfer")}

    config = TrainConfig(topology=f"{devices.workers}-1", prefetch=PREFETCH)
    names = [f"{devices.names}:{k}" for k in range(devices.workers + 1)]
    pool = LocalPool({f"target-{k}": compute for k in range(devices.workers)})
    window = Window(
        Prefetcher(iter(range(BATCHES)), collate, max_items=PREFETCH),
        pool,
        size_of=lambda batch: batch.real_tokens,
        max_items=devices.workers + WAITING_BATCHES,
    )
    folder.mkdir()
    with RunLog.create(folder, config, {"devices": {"targets": names[1:], "drafter": names[0]}}) as log:
        for step in range(1, BATCHES + 1):
            started = time.perf_counter()
            ready = next(window)
            spent = {"drafter": devices.sleep("drafter", ready.batch.index), "optimizer": devices.sleep("optimizer", ready.batch.index)}
            seconds = {"fetch": ready.fetch_seconds, **ready.features, "wait": ready.wait_seconds, **spent}
            log.step(line(step, ready.batch, seconds | {"step": time.perf_counter() - started}, window))
    window.close()
    pool.close()
    return read_run(folder)


def line(step, batch, seconds, window):
    none = dict.fromkeys(("loss", "weight", "lr", "grad_norm", "acceptance"))
    tokens = {"tokens": batch.real_tokens, "padded_tokens": batch.real_tokens}
    own = {name: value for name, value in seconds.items() if name not in ("optimizer", "step")}
    entry = {"index": batch.index, "bucket": 0, "rows": 1, "padded_length": batch.real_tokens, "loss": None, "weight": None}
    return {
        **none,
        **tokens,
        **dict.fromkeys(("slots", "blocks", "supervised"), 0),
        **{"step": step, "epoch": 0, "clipped": False, "slot_accuracy": [], "seconds": seconds},
        **{"q_prefetch": 0, "q_hs": window.depth, "q_hs_bytes": window.nbytes},
        "batches": [{**entry, **tokens, "sample_ids": [batch.index], "seconds": own}],
    }


def test_the_slow_stage_is_named(tmp_path):
    """Ten slowdowns; nine right names would do."""
    usual = Devices(target=9, drafter=5, workers=2)
    slow = [
        ("fetch", replace(usual, fetch=14)),
        ("fetch", replace(usual, fetch=24)),
        ("target", replace(usual, target=28)),
        ("target", replace(usual, target=50)),
        ("transfer", replace(usual, transfer=26)),
        ("transfer", replace(usual, transfer=45)),
        ("drafter", replace(usual, drafter=12)),
        ("drafter", replace(usual, drafter=24)),
        ("optimizer", replace(usual, optimizer=10)),
        ("optimizer", replace(usual, optimizer=20)),
    ]
    named = [advise(simulated(tmp_path / str(i), devices)).limits for i, (_, devices) in enumerate(slow)]
    assert sum(said == stage for said, (stage, _) in zip(named, slow, strict=True)) >= 9, named


def predicted_and_measured(folder, devices, changed, predicted):
    """Real tokens a second of the changed devices: by the advice on the unchanged ones, and as they ran."""
    for attempt in ("first", "again"):
        advice = advise(simulated(folder / f"{attempt} before", devices))
        measured = advise(simulated(folder / f"{attempt} after", changed)).tokens_per_second
        if abs(predicted(advice) / measured - 1) < 0.1:
            break
    return advice, predicted(advice), measured


@pytest.mark.parametrize(
    ("devices", "to"),
    [(Devices(), 2), (Devices(target=90), 3), (Devices(target=55, workers=3), 2), (Devices(target=130, workers=2), 4)],
)
def test_other_workers_bring_what_was_predicted(tmp_path, devices, to):
    _, predicted, measured = predicted_and_measured(
        tmp_path,
        devices,
        replace(devices, workers=to),
        lambda advice: next(each.tokens_per_second for each in advice.choices if each.workers == to),
    )
    assert measured == pytest.approx(predicted, rel=0.1)


def test_faster_reading_brings_what_was_predicted(tmp_path):
    devices = Devices(fetch=80, target=40)
    advice, predicted, measured = predicted_and_measured(
        tmp_path, devices, replace(devices, fetch=0), lambda advice: advice.without_reading
    )
    assert advice.limits == "fetch" and f"{predicted:,.0f}" in advice.text()
    assert measured == pytest.approx(predicted, rel=0.1)


def stages(fetch=0.0, target=0.0, drafter=0.0, batches=400):
    ones = np.ones(batches)
    return Stages(1000 * ones, fetch * ones, target * ones, 0 * ones, drafter * ones, 0 * ones)


def test_the_reference_runs_seventh_target_brings_nothing():
    """A target does 5,300 padded tokens a second, the drafter 31,000 real ones: 6-1 is as fast as 7-1 and a device cheaper."""
    its = stages(target=1000 / 5300, drafter=1000 / 31000)
    advice = advise_stages(its, 400 / 31, workers=7, waiting=16, prefetch=50, watts=300)
    assert advice.limits == "drafter" and advice.enough == 6
    rates = {each.workers: each for each in advice.choices}
    assert rates[6].tokens_per_second == pytest.approx(31_000, rel=0.01)
    assert rates[5].tokens_per_second == pytest.approx(26_500, rel=0.01)
    assert rates[6].tokens_per_joule == pytest.approx(31_000 / 2100, rel=0.01) and rates[7].tokens_per_joule < rates[6].tokens_per_joule
    text = advice.text()
    assert "The drafter limits" in text and "6-1 would reach 100% of this rate with 1 target worker fewer" in text
    assert "At 300 W a device" in text and "6-1 would on 14.76" in text
    assert {row["topology"]: row["note"] for row in advice.table()} == {
        **{f"{n}-1": "" for n in (1, 2, 3, 4, 5, 8)},
        "6-1": "enough",
        "7-1": "this run",
    }


def test_several_drafters_share_the_work_and_one_more_is_offered_where_it_pays():
    its = stages(target=0.05, drafter=0.4)
    advice = advise_stages(its, 400 / 5, workers=1, waiting=16, prefetch=8, drafters=2, watts=100)
    assert advice.limits == "drafter" and advice.busy["drafter"] == pytest.approx(1.0) and advice.table()[0]["topology"] == "1-2"
    assert "the 2 drafters 100%" in advice.text()
    assert "One more target worker (2-2) would bring nothing." in advice.text()
    assert re.search(r"One more drafter \(1-3, engine ray, accumulation a multiple of 3\) would bring 7,\d{3} real tokens/s", advice.text())
    assert advice.choices[0].tokens_per_joule == pytest.approx(5000 / 300)
    assert replay(its, 1, 16, 8, drafters=2) == pytest.approx(5000, rel=0.02)
    full = advise_stages(its, 400 / 20, workers=1, waiting=16, prefetch=8, drafters=8)
    assert full.limits == "target" and "One more drafter" not in full.text()


def test_a_replay_is_the_slowest_stage_alone():
    assert replay(stages(fetch=1, target=2, drafter=0.5), 1, 16, 8) == pytest.approx(500)
    assert replay(stages(fetch=1, target=2, drafter=0.5), 4, 16, 8) == pytest.approx(1000)
    assert replay(stages(fetch=0.1, target=2, drafter=0.5), 8, 16, 8) == pytest.approx(2000, rel=0.01)


def test_few_places_hold_workers_back():
    """A batch for each worker and none to spare: long and short ones wait for one another."""
    uneven = stages(target=1.0, drafter=0.25)
    uneven = replace(uneven, target_M=np.where(np.arange(400) % 8 == 0, 8.0, 0.5))
    assert replay(uneven, 4, 0, 8) < 0.8 * replay(uneven, 4, 16, 8)


def test_on_one_device_no_worker_is_promised(tmp_path):
    recipe = Recipe(steps=30, wait_seconds=0.5)
    advice = advise(read_run(write_run(tmp_path / "run", recipe)), watts=100)
    assert advice.shared and "brings nothing here" in advice.text() and len(advice.table()) == 1
    assert advice.choices[0].tokens_per_joule == pytest.approx(advice.tokens_per_second / 100), "one device, one bill"


@pytest.mark.parametrize(
    ("config", "targets", "drafter", "shared"),
    [
        ({}, ["cpu", "cpu"], "cpu", True),
        ({}, ["cuda:0"], "cuda:1", False),
        ({}, ["cuda:0"], "cuda:0", True),
        ({"engine": "ray"}, ["cpu", "cpu"], "cpu", True),
        ({"engine": "ray", "ray_address": "auto"}, ["cpu", "cpu"], "cpu", False),
        ({"engine": "ray"}, ["cuda:0", "cuda:0"], "cuda:0", False),
    ],
)
def test_who_shares_a_device_is_known_from_the_run(tmp_path, config, targets, drafter, shared):
    assert on_one_device(Run(tmp_path, config=config, environment={"devices": {"targets": targets, "drafter": drafter}})) is shared


def test_too_short_a_run_gets_none(tmp_path):
    assert advise(read_run(write_run(tmp_path / "run", Recipe(steps=9)))) is None
    assert advise(read_run(write_run(tmp_path / "longer", Recipe(steps=10)))) is not None
