"""Execute the five notebooks and render them to HTML with an index page: ``python -m dflash_nb.analysis.report`` (``make report``).

Decided: notebooks 00-02 describe the 902,087 reference lengths, 03 trains on the embedded sample, and 04 reads that very run, so a
report needs no other input. ``--run`` takes an existing run instead, which 03 then shows without training. Every notebook is executed
before a page is written, so that a report is never half old. The twelve files of a report take 4 MB.
"""

import argparse
import sys
import time
from pathlib import Path

from dflash_nb.analysis.page import index_page, page_of, render
from dflash_nb.home import project_root, runs_dir, user_path, write_aside
from dflash_nb.progress import clock

# Seconds measured on two idle cores: what the time left is estimated from, scaled by how fast this machine turns out to be.
SECONDS = {"00_length_distribution": 4, "01_bucket_optimization": 12, "02_padding_simulation": 40, "03_train": 100, "04_loss_diagnosis": 8}
QUIET = ["--IPKernelApp.log_level=40"]  # a kernel warns on every start that its sockets are not encrypted; they are local


def parameters_for(notebook: str, out: Path, dataset: str, run: Path, exists: bool, steps: int) -> dict:
    """What each notebook is given: the lengths to describe, or the run to make, to show or to read."""
    if notebook == "04_loss_diagnosis":
        return {"run_dir": str(run)}
    if notebook == "03_train":
        return {"watch": str(run)} if exists else {"run_name": run.name, "runs_dir": str(run.parent), "max_steps": steps}
    return {"dataset": dataset} | ({"save_to": str(out / "buckets.json")} if notebook == "01_bucket_optimization" else {})


def make_report(out: Path, dataset: str = "reference", run: Path | None = None, steps: int = 0) -> Path:
    """Execute and render into ``out``; returns the index page.

    ``run`` is an existing run folder, None to train one on the sample for ``steps`` optimiser steps (0: the whole default job). A
    notebook that fails stops the report with its error; the executed notebook stays in ``out`` and holds the same error.
    """
    import papermill

    out.mkdir(parents=True, exist_ok=True)
    exists = run is not None
    run = run or runs_dir() / time.strftime("%Y-%m-%d-%H%M%S-report")
    began, executed = time.monotonic(), []
    for position, (name, _) in enumerate(SECONDS.items(), start=1):
        print(f"[{position}/{len(SECONDS)}] {name} ...", flush=True)
        executed.append(out / f"{name}.ipynb")
        papermill.execute_notebook(
            project_root() / "notebooks" / f"{name}.ipynb",
            executed[-1],
            parameters=parameters_for(name, out, dataset, run, exists, steps),
            progress_bar=False,
            cwd=str(project_root()),
            stdout_file=sys.stdout if name == "03_train" else None,
            extra_arguments=QUIET,
        )
        spent = time.monotonic() - began
        print(f"[{position}/{len(SECONDS)}] {name}: {clock(spent)} in all, ETA {clock(seconds_left(position, spent))}", flush=True)
    pages = [page_of(path) for path in executed]
    for path, page in zip(executed, pages, strict=True):
        with write_aside(out / page.name) as aside:
            aside.write_text(render(path, pages), encoding="utf-8")
    about = f"Lengths: {dataset}. Run: {run.name}. Written {time.strftime('%Y-%m-%d %H:%M')}."
    with write_aside(out / "index.html") as aside:
        aside.write_text(index_page(pages, about), encoding="utf-8")
    return out / "index.html"


def seconds_left(done: int, spent: float) -> float:
    """Seconds until the notebooks after the first ``done`` are executed, at the pace of those: ``spent`` seconds so far."""
    usual = list(SECONDS.values())
    return spent * sum(usual[done:]) / sum(usual[:done])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_nb.analysis.report", description="Execute and render the notebooks.")
    parser.add_argument("--out", default="", help="folder for the pages (default: report/ in the project)")
    parser.add_argument("--dataset", default="reference", help="lengths that notebooks 00-02 describe")
    parser.add_argument("--run", default="", help="an existing run folder for notebooks 03 and 04, instead of training one")
    parser.add_argument("--steps", type=int, default=0, help="optimiser steps of the run that is made (default: the whole job)")
    options = parser.parse_args(arguments)
    out = user_path(options.out) if options.out else project_root() / "report"
    dataset = options.dataset if options.dataset in ("reference", "sample") else str(user_path(options.dataset))
    print(make_report(out, dataset, user_path(options.run) if options.run else None, options.steps))


if __name__ == "__main__":
    main()
