"""Measures how often the diagnosis is right: labelled logs, real runs with a fault switched on, and a log of 500,000 steps.

    python benchmarks/diagnosis.py                      everything: 170 logs, 46 real runs of about 6 s of CPU each
    python benchmarks/diagnosis.py --logs               synthetic logs only, 16 s of CPU
    python benchmarks/diagnosis.py --out diagnosis.json

Synthetic logs come from ``tests/labelled_logs.py``, real runs from ``tests/labelled_runs.py``: the trainer on the embedded sample and on a
tiny target, healthy or with one fault. Thresholds were set on the first half; the second, with other seeds, noise, starts and another tiny
target, is the one that is reported. A log counts as right when the finding that the verdict rests on is the planted one, and the verdict
is HEALTHY exactly where nothing is wrong. The halves run in a process each.
"""

import argparse
import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from labelled_logs import Case, cases, release
from runs import Recipe, write_run

from dflash_nb.analysis.diagnose import diagnose
from dflash_nb.pipeline.run import read_run

LONG = 500_000


def judge(case: Case, folder: Path) -> dict:
    """What the diagnosis says about one case, and whether that is right."""
    started = time.process_time()
    source = case.write(folder)
    made = time.process_time() - started
    found = diagnose(source)
    release()
    quiet = not found.alarm
    said = "healthy" if found.main is None or (quiet and case.kind == "healthy") else found.main.kind
    return {
        "name": case.name,
        "kind": case.kind,
        "healthy": case.healthy,
        "said": said,
        "verdict": found.verdict,
        "right": said == case.kind and quiet == case.healthy,
        "text": found.text(),
        "steps": len(found.log),
        "seconds": {"make": round(made, 2), "diagnose": round(time.process_time() - started - made, 3)},
    }


def measure(half: int, real: bool) -> list[dict]:
    """Every case of one half."""
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        chosen = cases(half)
        if real:
            import torch
            from labelled_runs import make_world, sample_cases, world_cases

            torch.set_num_threads(1)
            chosen += [*sample_cases(half), *world_cases(make_world(Path(temporary) / "world", seed=half), half)]
        for number, case in enumerate(chosen):
            row = judge(case, Path(temporary) / f"{number:03d}")
            rows.append({"half": half, **row})
            print(f"{half} {'' if row['right'] else 'WRONG '}{case.name}: {row['text'][:110]}", file=sys.stderr, flush=True)
    return rows


def measure_long(steps: int) -> dict:
    """CPU seconds and memory to read and diagnose a log of ``steps`` steps, and to read on after 1,000 more."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "long"
        write_long(folder, steps)
        path = folder / "steps.jsonl"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        started = time.process_time()
        run = read_run(folder)
        read = time.process_time() - started
        found = diagnose(run)
        whole = time.process_time() - started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        line = path.read_bytes().splitlines(keepends=True)[-1]
        with path.open("ab") as file:
            file.writelines(line.replace(b'"step":%d,' % steps, b'"step":%d,' % (steps + i)) for i in range(1, 1001))
        started = time.process_time()
        added = run.refresh()
        return {
            "steps": steps,
            "megabytes": round(path.stat().st_size / 1e6),
            "read_seconds": round(read, 2),
            "read_and_diagnose_seconds": round(whole, 2),
            "gib_before": round(before, 3),
            "peak_gib": round(peak, 3),
            "refresh_1000_steps_seconds": round(time.process_time() - started, 3),
            "added": added,
            "verdict": found.verdict,
        }


def write_long(folder: Path, steps: int) -> None:
    """A run folder with ``steps`` lines: a synthetic run of 5,000 steps again and again, its losses on one long trend."""
    recipe = Recipe(steps=5000, decay_steps=1e9, first_loss=0.0, last_loss=0.0, config={"decay": "constant"})
    write_run(folder, recipe)
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    whole = Recipe(steps=steps, decay_steps=steps / 5)
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            line = lines[(step - 1) % len(lines)]
            trend = float(whole.trend(step))
            batches = [{**batch, "loss": round(batch["loss"] + trend, 6)} for batch in line["batches"]]
            again = {**line, "step": step, "loss": batches[0]["loss"], "lr": 1e-3, "batches": batches}
            file.write(json.dumps(again, separators=(",", ":")) + "\n")


def confusion(rows: list[dict]) -> str:
    """Markdown: a row a kind, how many, how many right, what was said instead; what is no alarm first."""
    kinds = sorted({(not row["healthy"], row["kind"] != "healthy", row["kind"]) for row in rows})
    lines = ["| planted | logs | of them real runs | right | said instead |", "|---|---|---|---|---|"]
    for ill, _, kind in kinds:
        mine = [row for row in rows if (row["kind"], row["healthy"]) == (kind, not ill)]
        instead = Counter(f"{row['said']} ({row['verdict']})" for row in mine if not row["right"])
        words = ", ".join(f"{count} x {said}" for said, count in instead.items())
        real = sum(row["name"].startswith("real") for row in mine)
        lines.append(f"| {kind} | {len(mine)} | {real} | {sum(row['right'] for row in mine)} | {words} |")
    return "\n".join(lines)


def summary(rows: list[dict]) -> dict:
    real = [row for row in rows if row["name"].startswith("real")]
    return {
        "logs": len(rows),
        "real": len(real),
        "kinds": len({row["kind"] for row in rows}),
        "healthy": sum(row["kind"] == "healthy" for row in rows),
        "right": sum(row["right"] for row in rows),
        "share": round(sum(row["right"] for row in rows) / max(1, len(rows)), 4),
        "false alarms": [row["name"] for row in rows if row["healthy"] and row["verdict"] in ("LOOK", "STOP")],
        "cpu seconds of real runs": round(sum(row["seconds"]["make"] for row in real)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", action="store_true", help="synthetic logs only")
    parser.add_argument("--steps", type=int, default=LONG, help="length of the long log, 0 for none")
    parser.add_argument("--out", type=Path, help="where to write everything as JSON")
    options = parser.parse_args()
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        halves = pool.starmap(measure, [(half, not options.logs) for half in (0, 1)])
    for name, rows in zip(("first half (thresholds were set on it)", "second half (reported)"), halves, strict=True):
        print(f"\n{name}: {json.dumps(summary(rows))}\n\n{confusion(rows)}")
    long = measure_long(options.steps) if options.steps else None
    print(f"\nlong log: {json.dumps(long)}")
    if options.out:
        result = {"tuned": summary(halves[0]), "reported": summary(halves[1]), "long": long, "rows": [*halves[0], *halves[1]]}
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
