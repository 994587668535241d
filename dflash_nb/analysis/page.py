"""An executed notebook as one HTML page that needs nothing else: pictures inside, a caption under each, no script, no link to a network.

Decided: nbconvert's ``basic`` template gives the body (it keeps a picture's alternative text, which ``lab`` drops) and the page around
it is ours. The ready-made ``classic`` page brings 270 kB of styles and loads four scripts from elsewhere; this one adds 2 kB.
Code is left out, text and results stay.
"""

import html
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from dflash_nb.analysis.plots.style import LINE

STYLE = """
:root { color-scheme: light }
body { font: 16px/1.55 system-ui, sans-serif; color: #222; background: #fff; max-width: 56rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.7rem; line-height: 1.2 } h2 { font-size: 1.25rem; margin-top: 2.2rem }
nav { display: flex; flex-wrap: wrap; gap: .4rem 1.2rem; font-size: .9rem; border-bottom: 1px solid #ddd; padding-bottom: .5rem }
nav [aria-current] { font-weight: 600; color: inherit; text-decoration: none }
a { color: #0b5cad }
img { max-width: 100%; height: auto; display: block; margin: .6rem 0 0 }
.caption { color: #555; font-size: .92rem; margin: .2rem 0 1rem }
pre, code { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace }
pre { background: #f5f5f3; padding: .6rem .8rem; border-radius: 4px; white-space: pre-wrap; overflow-wrap: anywhere }
table { display: block; overflow-x: auto; border-collapse: collapse; border: 0; font-size: .85rem; margin: .6rem 0 1rem }
th, td { padding: .25rem .6rem; border: 0; border-bottom: 1px solid #e4e4e4; text-align: right; white-space: nowrap }
th { border-bottom-color: #999 }
ol { padding-left: 1.6rem } li { margin: .7rem 0 } li p { margin: .1rem 0; color: #555 }
"""


@dataclass(frozen=True)
class Page:
    """What a page links to and is linked by: its file's ``name``, the ``question`` it asks and the first ``answer`` it gives."""

    name: str
    question: str
    answer: str = ""


def page_of(executed: Path) -> Page:
    """The page that ``executed`` becomes: its first heading, and the alternative text of its first picture."""
    cells = nbformat.read(executed, as_version=4).cells
    text = next((cell.source for cell in cells if cell.cell_type == "markdown"), executed.stem)
    outputs = (output for cell in cells for output in cell.get("outputs", []))
    return Page(f"{executed.stem}.html", text.splitlines()[0].lstrip("# ").strip(), next(filter(None, map(alternative, outputs)), ""))


def alternative(output: NotebookNode) -> str:
    """The alternative text of a picture; empty for any other output."""
    return output.get("metadata", {}).get("image/png", {}).get("alt", "")


def captioned(notebook: NotebookNode) -> NotebookNode:
    """``notebook`` with its printed lines joined to one block a cell, and the sentence that ``plots.style.show`` prints under a picture
    turned from fixed-width lines into a caption. Changes the notebook in place and returns it.
    """
    for cell in notebook.cells:
        outputs: list[NotebookNode] = []
        for output in cell.get("outputs", []):
            if outputs and output.output_type == outputs[-1].output_type == "stream" and output.name == outputs[-1].name:
                outputs[-1].text += output.text
            else:
                outputs.append(output)
        if "outputs" in cell:
            cell.outputs = list(_with_captions(outputs))
    return notebook


def _with_captions(outputs: list[NotebookNode]) -> Iterator[NotebookNode]:
    printed = ""
    for output in outputs:
        if printed and output.output_type == "stream" and output.text.startswith(printed):
            output.text = output.text.removeprefix(printed).lstrip("\n")
        if output.output_type != "stream" or output.text.strip():
            yield output
        alt = alternative(output)
        printed = "\n".join(textwrap.wrap(alt, LINE))
        if alt:
            caption = f'<p class="caption">{html.escape(alt)}</p>'
            yield nbformat.v4.new_output("display_data", {"text/html": caption, "text/plain": alt})


def render(executed: Path, pages: list[Page]) -> str:
    """The HTML of one executed notebook; ``pages`` are all pages of the report, for the links on top."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        template_name="basic", exclude_input=True, exclude_input_prompt=True, exclude_output_prompt=True, exclude_anchor_links=True
    )
    body, _ = exporter.from_notebook_node(captioned(nbformat.read(executed, as_version=4)))
    return document(page_of(executed).question, body, pages, f"{executed.stem}.html")


def index_page(pages: list[Page], about: str) -> str:
    """The page that links the others, each with its question and first answer; ``about`` says what was described."""
    items = "\n".join(
        f'<li><a href="{html.escape(page.name)}">{html.escape(page.question)}</a><p>{html.escape(page.answer)}</p></li>' for page in pages
    )
    body = f"<h1>dflash_nb report</h1>\n<p>{html.escape(about)}</p>\n<ol start=0>{items}</ol>"
    return document("dflash_nb report", body, pages, "index.html")


def document(title: str, body: str, pages: list[Page], current: str) -> str:
    """``body`` inside a whole HTML document with the report's style and links to all ``pages``."""
    links = [("index.html", "Report"), *((page.name, page.name.removesuffix(".html").replace("_", " ")) for page in pages)]
    items = " ".join(
        f'<a href="{html.escape(name)}"{" aria-current=page" * (name == current)}>{html.escape(text)}</a>' for name, text in links
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style></head>\n<body>\n<nav>{items}</nav>\n<main>{body}</main>\n</body>\n</html>\n"
    )
