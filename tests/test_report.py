"""The rendered report: pages that need no network, with captions and alternative texts, and a whole report from a finished run."""

import json
import re

import nbformat
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from nbformat import v4
from tiny_runs import save_target, tiny_config, write_dataset

from dflash_nb.analysis.page import Page, captioned, index_page, page_of, render
from dflash_nb.analysis.plots import style
from dflash_nb.analysis.report import SECONDS, main, seconds_left
from dflash_nb.pipeline.train import train

LOADS = re.compile(r"<script|<link|<iframe|@import|url\(|\b(?:src|srcset)=\"(?!data:)")


def offline(page: str) -> bool:
    """Nothing in ``page`` is fetched: no script, style sheet or picture from elsewhere, and no link out."""
    return not LOADS.search(page) and not re.search(r"href=\"(?:https?:)?//", page)


def save(folder, *cells):
    path = folder / "04_loss_diagnosis.ipynb"
    nbformat.write(v4.new_notebook(cells=list(cells)), path)
    return path


def shown(alt: str, printed: str):
    cell = v4.new_code_cell("show(plot)")
    picture = v4.new_output("display_data", {"image/png": "iVBORw0KGgo=", "text/plain": "<Image>"}, metadata={"image/png": {"alt": alt}})
    cell.outputs = [picture, v4.new_output("stream", name="stdout", text=printed)]
    return cell


LONG = "12 buckets waste 3.8 % & the best rule <quantile> wastes 4.4 %, " * 2 + "and no more"


def test_a_caption_replaces_the_printed_finding_and_nothing_else():
    cell = captioned(v4.new_notebook(cells=[shown("3 batches spike at 7 steps", "3 batches spike at 7 steps\nother text\n")])).cells[0]
    assert [output.get("text") for output in cell.outputs] == [None, None, "other text\n"]
    assert cell.outputs[1].data["text/html"] == '<p class="caption">3 batches spike at 7 steps</p>'
    lines = v4.new_code_cell("train()")
    lines.outputs = [v4.new_output("stream", name="stdout", text=f"step {i}\n") for i in range(3)]
    assert [output.text for output in captioned(v4.new_notebook(cells=[lines])).cells[0].outputs] == ["step 0\nstep 1\nstep 2\n"]
    alone = captioned(v4.new_notebook(cells=[shown("3 batches spike at 7 steps", "3 batches spike at 7 steps\n")])).cells[0]
    assert len(alone.outputs) == 2


def test_a_page_is_whole_readable_offline_and_on_a_phone(tmp_path, capsys):
    style.show(style.Plot(b"", LONG, None))
    printed = capsys.readouterr().out.split("\n", 1)[1]  # after the picture's stand-in
    assert printed.count("\n") == 2, "wrapped, as in a notebook"
    path = save(tmp_path, v4.new_markdown_cell("# Is it healthy?\n\ntext $x$ `code`"), shown(LONG, printed))
    pages = [Page("00_length_distribution.html", "How long?"), page_of(path)]
    page = render(path, pages)
    assert offline(page) and 'name="viewport"' in page and page.startswith("<!doctype html>") and '<html lang="en">' in page
    assert "<title>Is it healthy?</title>" in page and "show(plot)" not in page
    assert 'alt="12 buckets waste 3.8 % &amp; the best rule &lt;quantile' in page
    assert page.count('class="caption"') == 1 and page.count("and no more") == 2, "the alternative text and one caption"
    assert 'href="index.html"' in page and 'href="00_length_distribution.html"' in page
    assert 'href="04_loss_diagnosis.html" aria-current=page' in page


def test_the_index_escapes_and_links():
    page = index_page([Page("a.html", "A < B?", "3 & 4")], "Lengths: <mine>.")
    assert offline(page) and '<a href="a.html">A &lt; B?</a><p>3 &amp; 4</p>' in page and "Lengths: &lt;mine&gt;." in page


def test_time_left_is_scaled_by_the_pace_so_far():
    usual = list(SECONDS.values())
    assert seconds_left(2, 2 * sum(usual[:2])) == pytest.approx(2 * sum(usual[2:]))
    assert seconds_left(len(usual), 50.0) == 0


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    place = tmp_path_factory.mktemp("report")
    config = tiny_config(write_dataset(place / "data"), save_target(place / "target", "hybrid"), place / "runs", run_name="done", epochs=1)
    train(config)
    lengths = np.random.default_rng(0).integers(20, 400, 800)
    pq.write_table(pa.table({"seq_len": lengths}), place / "lengths.parquet")
    main(["--out", str(place / "out"), "--dataset", str(place / "lengths.parquet"), "--run", str(place / "runs" / "done")])
    return place


def test_five_notebooks_become_five_pages_and_an_index(report, tmp_path):
    out = report / "out"
    assert sorted(path.name for path in out.glob("*.html")) == sorted([*(f"{name}.html" for name in SECONDS), "index.html"])
    for path in out.glob("*.html"):
        page = path.read_text()
        assert offline(page) and 'name="viewport"' in page
        pictures = re.findall(r"<img\b[^>]*>", page)
        assert pictures or path.name == "index.html"
        alts = [re.search(r'alt="([^"]*)"', picture) for picture in pictures]
        assert all(alt and len(alt.group(1)) >= 40 for alt in alts), f"{path.name}: every picture says what it shows"
        assert page.count('class="caption"') == len(pictures)
    index = (out / "index.html").read_text()
    assert all(f"{name}.html" in index for name in SECONDS)


def test_executed_notebooks_stay_under_two_megabytes_and_touch_nothing_else(report):
    assert all((report / "out" / f"{name}.ipynb").stat().st_size < 2_000_000 for name in SECONDS)
    assert json.loads((report / "out" / "buckets.json").read_text())["boundaries"][0] == 0
    assert not list((report / "runs").glob("buckets.json"))
