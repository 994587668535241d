"""One look for every figure: sizes, colours that survive grey printing, length ticks, and how a notebook shows the result.

A plot function returns a :class:`Plot`: the figure rendered once to PNG bytes together with its *finding*, the sentence that
answers the question. ``show`` displays it with the finding as alternative text and prints it under the picture, since the usual
HTML export drops alternative text. A rendered Plot costs about 40 kB in the saved notebook; a live figure would be shown twice.
No text is read as math: names of runs, data sets and strategies are other people's, and a ``$`` in one is a ``$``.
"""

import io
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

LINE = 100  # characters
WIDTH_IN, HEIGHT_IN, DPI = 7.0, 4.0, 110
OKABE_ITO = ("#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7")  # told apart by everybody
INK, FAINT, ACCENT, WARN = "#222222", "#9a9a9a", OKABE_ITO[5], OKABE_ITO[6]
STRATEGY_COLORS = {  # vermilion is left to warnings and padding, yellow is too pale on white
    "bucketed": OKABE_ITO[5],
    "pooled": OKABE_ITO[2],
    "random": OKABE_ITO[1],
    "sorted": OKABE_ITO[7],
    "packed": OKABE_ITO[3],
}
OTHER_STRATEGY = "#7a7a7a"
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")


@dataclass(frozen=True)
class Plot:
    """A finished figure: ``png`` bytes, the ``finding`` it shows, and the figure itself for whoever wants to save it otherwise."""

    png: bytes
    finding: str
    figure: Figure

    def save(self, path) -> None:
        """Write the figure as PNG, SVG or PDF, by the ending of ``path``."""
        self.figure.savefig(path, dpi=DPI)


def new_figure(
    rows: int = 1, columns: int = 1, height: float = HEIGHT_IN, width: float = WIDTH_IN, **subplots
) -> tuple[Figure, np.ndarray]:
    """A figure outside pyplot's registry (so nothing is shown twice or leaks) and its axes as a ``[rows, columns]`` array."""
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.xaxis.label.set_size(9)
        axis.yaxis.label.set_size(9)
        axis.grid(True, axis="y", color="#e8e8e8", linewidth=0.6)
        axis.set_axisbelow(True)
    return figure, axes


def finish(figure: Figure, finding: str, note: str = "") -> Plot:
    """Put the finding on top, ``note`` (n, seed, source) in the corner, and render. Any text of the figure is drawn as it stands."""
    finding = " ".join(finding.split())
    width = int(figure.get_figwidth() * 11.4)
    figure.suptitle("\n".join(textwrap.wrap(finding, width)), fontsize=10, x=0.01, ha="left", fontweight="bold", color=INK)
    if note:
        figure.supxlabel("\n".join(textwrap.wrap(note, int(width * 1.4))), fontsize=7, x=0.99, ha="right", color="#666666")
    for text in figure.findobj(Text):
        text.set_parse_math(False)
    png = io.BytesIO()
    with mpl.rc_context({"text.parse_math": False}):  # for ticks that are made while drawing
        figure.savefig(png, format="png", dpi=DPI)
    return Plot(png.getvalue(), finding, figure)


def show(plot: Plot) -> None:
    """Display ``plot`` in a notebook with its finding as alternative text, and print the finding as its caption."""
    from IPython.display import Image, display

    display(Image(data=plot.png, format="png", alt=plot.finding), metadata={"image/png": {"alt": plot.finding}})
    say(plot.finding)


def say(text: str) -> None:
    """Print ``text`` in lines that fit a notebook's cell, where longer ones are broken within a word."""
    print("\n".join(textwrap.wrap(text, LINE)))


def table(rows: Sequence[dict], columns: Sequence[str] | None = None, most: int = 12, digits: int = 3) -> pd.DataFrame:
    """The rows behind a plot as a frame: at most ``most`` of them (first and last halves, a row of dots between)."""
    frame = pd.DataFrame(list(rows), columns=list(columns) if columns else None)
    for name in frame.select_dtypes("float"):
        frame[name] = frame[name].map(lambda value: "" if pd.isna(value) else f"{value:,.{digits}f}")
    for name in frame.select_dtypes("integer"):
        frame[name] = frame[name].map("{:,}".format)
    if len(frame) > most:
        head, tail = frame.iloc[: most // 2], frame.iloc[-(most - most // 2 - 1) :]
        dots = pd.DataFrame([["…"] * frame.shape[1]], columns=frame.columns, index=["…"])
        frame = pd.concat([head, dots, tail])
    return frame


def length_axis(axis: Axes, low: float, high: float, which: str = "x") -> None:
    """A base-2 logarithmic axis in tokens with ticks at powers of two (128, 256, …), never at 10 to a fraction."""
    low, high = max(1.0, float(low)), max(2.0, float(high))
    if high <= low:
        low, high = low / 2, high * 2
    ticks = 2.0 ** np.arange(np.floor(np.log2(low)), np.ceil(np.log2(high)) + 1)
    ticks = ticks[:: max(1, int(np.ceil(len(ticks) / 12)))]
    (axis.set_xscale if which == "x" else axis.set_yscale)("log", base=2)
    target = axis.xaxis if which == "x" else axis.yaxis
    target.set_major_locator(FixedLocator(ticks))
    target.set_minor_locator(NullLocator())
    target.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    (axis.set_xlim if which == "x" else axis.set_ylim)(low, high)


def plain_log(axis: Axis, wide: bool = False) -> None:
    """Few ticks with plain numbers, also where a logarithmic axis spans less than a decade; ``wide``: it spans more than one."""
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=6))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def bucket_colors(count: int) -> list[tuple[float, float, float, float]]:
    """One colour a bucket, short to long, the same in every notebook: ``cividis`` without its palest end."""
    return [mpl.colormaps["cividis"](x) for x in np.linspace(0.0, 0.88, max(1, count))]


def strategy_color(name: str) -> str:
    """The colour of a strategy, the same in every picture; variants such as ``bucketed six`` have that of their first word, others grey."""
    return STRATEGY_COLORS.get(name.partition(" ")[0], OTHER_STRATEGY)


def bucket_marker(index: int) -> str:
    """One marker a bucket, so that buckets stay apart in grey."""
    return MARKERS[index % len(MARKERS)]


def percent(value: float, digits: int = 1) -> str:
    """A share as text: 0.1234 -> ``12.3 %``."""
    return f"{100 * value:.{digits}f} %"


def count(value: float) -> str:
    """A count as people say it: 902087 -> ``902,087``; 1.866e9 -> ``1.87 billion``."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if abs(value) >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,.0f}"
