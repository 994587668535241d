"""Execute the five notebooks and render them to HTML with an index page: ``python -m dflash_nb.analysis.report`` (``make report``).

Decided: notebooks 00-02 describe the 902,087 reference lengths, 03 trains on the embedded sample, and 04 reads that very run, so a
report needs no other input. It takes about five minutes on two cores, nearly all of it training; ``--run`` takes an existing run
instead and leaves 03 out. Rendered with nbconvert's ``classic`` template, the one that keeps a picture's alternative text.
"""

import argparse
import html
import time
from pathlib import Path

from dflash_nb.home import project_root, runs_dir, user_path, write_aside

NOTEBOOKS = ("00_length_distribution", "01_bucket_optimization", "02_padding_simulation", "03_train", "04_loss_diagnosis")


def parameters_for(notebook: str, dataset: str, run_dir: Path) -> dict:
    """What each notebook is given: the lengths to describe, or the run to make or read."""
    if notebook == "03_train":
        return {"run_name": run_dir.name, "runs_dir": str(run_dir.parent)}
    if notebook == "04_loss_diagnosis":
        return {"run_dir": str(run_dir)}
    return {"dataset": dataset}


def render(executed: Path) -> str:
    """An executed notebook as one HTML page with its pictures inside; the code is left out, the text and results stay."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(template_name="classic", exclude_input=True)
    page, _ = exporter.from_filename(str(executed))
    return page


def first_heading(executed: Path) -> str:
    """The question a notebook answers: its first heading."""
    import nbformat

    cells = nbformat.read(executed, as_version=4).cells
    text = next((cell.source for cell in cells if cell.cell_type == "markdown"), executed.stem)
    return text.splitlines()[0].lstrip("# ").strip()


def index_page(pages: list[tuple[str, str]]) -> str:
    """The page that links the others; ``pages`` holds (file name, question)."""
    items = "\n".join(f'<li><a href="{html.escape(name)}">{html.escape(question)}</a></li>' for name, question in pages)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>dflash_nb report</title><style>body{font:17px/1.5 sans-serif;max-width:40rem;margin:2rem auto;padding:0 1rem}</style>"
        f"<h1>dflash_nb report</h1><ol start=0>{items}</ol></html>"
    )


def make_report(out: Path, dataset: str = "reference", run_dir: Path | None = None) -> Path:
    """Execute and render into ``out``; returns the index page. A notebook that fails stops the report with its error."""
    import papermill

    out.mkdir(parents=True, exist_ok=True)
    chosen = [name for name in NOTEBOOKS if run_dir is None or name != "03_train"]
    run_dir = run_dir or runs_dir() / time.strftime("%Y-%m-%d-%H%M%S-report")
    pages = []
    for position, name in enumerate(chosen, start=1):
        started = time.monotonic()
        print(f"[{position}/{len(chosen)}] {name} ...", flush=True)
        executed = out / f"{name}.ipynb"
        papermill.execute_notebook(
            project_root() / "notebooks" / f"{name}.ipynb",
            executed,
            parameters=parameters_for(name, dataset, run_dir),
            progress_bar=False,
            cwd=str(project_root()),
        )
        with write_aside(out / f"{name}.html") as aside:
            aside.write_text(render(executed))
        pages.append((f"{name}.html", first_heading(executed)))
        print(f"[{position}/{len(chosen)}] {name}: {time.monotonic() - started:.0f} s, {executed.stat().st_size / 1e6:.1f} MB", flush=True)
    with write_aside(out / "index.html") as aside:
        aside.write_text(index_page(pages))
    return out / "index.html"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m dflash_nb.analysis.report", description="Execute and render the notebooks.")
    parser.add_argument("--out", default="", help="folder for the pages (default: report/ in the project)")
    parser.add_argument("--dataset", default="reference", help="lengths that notebooks 00-02 describe")
    parser.add_argument("--run", default="", help="an existing run folder for notebook 04; 03 is then not executed")
    options = parser.parse_args(arguments)
    out = user_path(options.out) if options.out else project_root() / "report"
    print(make_report(out, options.dataset, user_path(options.run) if options.run else None))


if __name__ == "__main__":
    main()
