"""Notebook 00: what is my length distribution, where are the tokens, and what would padding cost at random?

Every function takes a :class:`~dflash_nb.data.lengths.LengthHistogram` (or arrays made from it), so a plot of a billion samples
costs what its number of distinct lengths costs.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from dflash_nb.data.lengths import LengthHistogram
from dflash_nb.data.supervision import Supervision

from .style import ACCENT, FAINT, INK, WARN, Plot, count, finish, length_axis, new_figure, percent, strategy_color

BINS_PER_OCTAVE = 4


def _octave_bins(low: int, high: int) -> np.ndarray:
    """Bin edges, four an octave, that cover [low, high]."""
    first = np.floor(np.log2(max(low, 1)) * BINS_PER_OCTAVE)
    last = np.floor(np.log2(max(high, 1)) * BINS_PER_OCTAVE) + 1
    return 2.0 ** (np.arange(first, last + 1) / BINS_PER_OCTAVE)


def _shares(histogram: LengthHistogram, bins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Share of samples and share of tokens in each bin."""
    samples, _ = np.histogram(histogram.lengths, bins, weights=histogram.counts.astype(float))
    tokens, _ = np.histogram(histogram.lengths, bins, weights=histogram.counts.astype(float) * histogram.lengths)
    return samples / histogram.n_samples, tokens / histogram.n_tokens


def histogram(lengths: LengthHistogram, limit: int | None = None, name: str = "") -> Plot:
    """Share of samples and, below it on the same axis, share of tokens by length; marks p50, p90, p99, the longest and ``limit``.

    ``limit``: a truncation limit in tokens; the finding then says how many samples and tokens lie beyond it.
    """
    bins = _octave_bins(lengths.min, lengths.max)
    samples, tokens = _shares(lengths, bins)
    figure, axes = new_figure(2, 1, height=5.0, sharex=True)
    for axis, shares, what in ((axes[0, 0], samples, "samples"), (axes[1, 0], tokens, "tokens")):
        axis.bar(bins[:-1], 100 * shares, width=np.diff(bins), align="edge", color=ACCENT, edgecolor="white", linewidth=0.5)
        axis.set_ylabel(f"share of {what} (%)")
        axis.set_ylim(0, max(100 * shares.max() * 1.2, 1))
    marks = {f"p{q}": int(lengths.quantile(q / 100)) for q in (50, 90, 99)} | {"max": lengths.max}
    heights = (0.99, 0.90, 0.81, 0.72)
    for (label, value), y in zip(marks.items(), heights, strict=True):
        for axis in axes[:, 0]:
            axis.axvline(value, color=INK, linewidth=0.8, linestyle=":")
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axes[0, 0].text(
            value, y, f"{label} {value:,} ", fontsize=8, transform=axes[0, 0].get_xaxis_transform(), va="top", ha="right", bbox=box
        )
    finding = (
        f"Half of the samples are shorter than {marks['p50']:,} tokens; the longest 1 % start at {marks['p99']:,} "
        f"and the longest has {lengths.max:,}"
    )
    if limit is not None:
        for axis in axes[:, 0]:
            axis.axvline(limit, color=WARN, linewidth=1.2)
        beyond_samples = 1 - lengths.share(0, limit + 1)
        beyond_tokens = 1 - lengths.tokens_between(0, limit + 1) / lengths.n_tokens
        finding += f"; {percent(beyond_samples)} of samples with {percent(beyond_tokens)} of tokens lie beyond the limit of {limit:,}"
    axes[1, 0].set_xlabel("length (tokens)")
    length_axis(axes[1, 0], bins[0], bins[-1])
    note = f"{name + ': ' if name else ''}{count(lengths.n_samples)} samples, {count(lengths.n_tokens)} tokens, mean {lengths.mean:,.0f}"
    return finish(figure, finding, note)


def summary(lengths: LengthHistogram) -> list[dict]:
    """Samples and tokens an octave of length (ranges of powers of two), as rows for a table."""
    edges = 2 ** np.arange(int(np.log2(lengths.min)), int(np.log2(lengths.max)) + 2)
    return [
        {
            "length": f"{low:,} - {high - 1:,}",
            "samples": round(lengths.share(low, high) * lengths.n_samples),
            "samples %": 100 * lengths.share(low, high),
            "tokens %": 100 * lengths.tokens_between(low, high) / lengths.n_tokens,
        }
        for low, high in pairwise(edges)
    ]


def cumulative(lengths: LengthHistogram, name: str = "") -> Plot:
    """Cumulative share of samples and of tokens by length, with the share of samples that holds half of all tokens marked."""
    samples = np.cumsum(lengths.counts) / lengths.n_samples
    tokens = np.cumsum(lengths.counts * lengths.lengths) / lengths.n_tokens
    middle = int(np.searchsorted(tokens, 0.5))
    half_at = int(lengths.lengths[min(middle, len(tokens) - 1)])
    longest_share = 1 - lengths.share(0, half_at)
    figure, axes = new_figure()
    axis = axes[0, 0]
    x = np.concatenate([[lengths.lengths[0]], lengths.lengths])
    axis.step(x, 100 * np.concatenate([[0], samples]), where="post", color=ACCENT, linewidth=1.8)
    axis.step(x, 100 * np.concatenate([[0], tokens]), where="post", color=WARN, linewidth=1.8, linestyle="--")
    low, high = max(1, lengths.min / 1.2), lengths.max * 1.2
    for shares, color, label, side in ((samples, ACCENT, "samples", -1), (tokens, WARN, "tokens", 1)):
        at = lengths.lengths[min(int(np.searchsorted(shares, 0.7)), len(shares) - 1)]
        align = "right" if side < 0 else "left"
        axis.text(at * (1 + 0.12 * side), 70, label, color=color, fontsize=9, ha=align)
    axis.plot([half_at, half_at], [0, 50], color=INK, linewidth=0.8, linestyle=":")
    axis.plot([low, half_at], [50, 50], color=INK, linewidth=0.8, linestyle=":")
    axis.set(xlabel="length (tokens)", ylabel="share at or below this length (%)", ylim=(0, 101))
    length_axis(axis, low, high)
    finding = f"Half of all tokens are in the longest {percent(longest_share)} of samples, those of {half_at:,} tokens and more"
    return finish(figure, finding, f"{name + ': ' if name else ''}{count(lengths.n_samples)} samples, {count(lengths.n_tokens)} tokens")


def supervised(supervision: Supervision | None, name: str = "") -> Plot:
    """Supervised tokens a sample against its length: binned median with the 10-90 % band."""
    if supervision is None:
        return _lengths_only(name)
    figure, axes = new_figure()
    axis = axes[0, 0]
    lengths, n_supervised = supervision.lengths, supervision.n_supervised
    bins = _octave_bins(int(lengths.min()), int(lengths.max()))
    which = np.digitize(lengths, bins) - 1
    rows = []
    for index in np.unique(which):
        values = n_supervised[which == index]
        rows.append((np.sqrt(bins[index] * bins[index + 1]), *np.quantile(values, [0.1, 0.5, 0.9])))
    x, low, middle, high = np.array(rows).T
    axis.fill_between(x, low, high, color=ACCENT, alpha=0.25, linewidth=0)
    axis.plot(x, middle, color=ACCENT, marker="o", markersize=4)
    axis.plot(x, x, color=FAINT, linestyle=":", linewidth=1)
    axis.text(x[-1], x[-1], "every token ", color=FAINT, fontsize=8, ha="right", va="bottom")
    axis.set(xlabel="length (tokens)", ylabel="supervised tokens a sample")
    length_axis(axis, bins[0], bins[-1])
    length_axis(axis, max(1, min(low[low > 0], default=1)), max(2, x[-1] * 1.3), which="y")
    share = n_supervised.sum() / lengths.sum()
    tail = n_supervised[lengths >= np.quantile(lengths, 0.9)].sum() / max(1, n_supervised.sum())
    none = int((n_supervised == 0).sum())
    finding = (
        f"{percent(share)} of tokens are supervised; the longest tenth of samples holds {percent(tail)} of them"
        f"{f', and {none:,} samples have none' if none else ''}"
    )
    return finish(figure, finding, f"{name + ': ' if name else ''}band: 10-90 % of samples, n = {len(lengths):,}")


def sources(supervision: Supervision | None, name: str = "", most: int = 12) -> Plot:
    """One row a source: median length with its 10-90 % bar, for the ``most`` sources with the most tokens."""
    if supervision is None:
        return _lengths_only(name)
    lengths = supervision.lengths
    labels, which = np.array(["all samples"]), np.zeros(len(lengths), dtype=int)
    if supervision.sources is not None:
        labels, which = np.unique(supervision.sources.astype(str), return_inverse=True)
    tokens = np.bincount(which, weights=lengths)
    largest = np.argsort(-tokens)[:most]
    figure, axes = new_figure(height=1.5 + 0.28 * len(largest))
    axis = axes[0, 0]
    for y, index in enumerate(largest):
        low, middle, high = np.quantile(lengths[which == index], [0.1, 0.5, 0.9])
        axis.plot([low, high], [y, y], color=ACCENT, linewidth=3, alpha=0.35, solid_capstyle="butt")
        axis.plot(middle, y, "o", color=ACCENT, markersize=4)
    axis.set_yticks(range(len(largest)), [f"{labels[i]}  {percent(tokens[i] / tokens.sum())}" for i in largest])
    axis.invert_yaxis()
    axis.set_xlabel("length (tokens): median and 10-90 %")
    length_axis(axis, max(1, lengths.min()), lengths.max() * 1.1)
    finding = f"{labels[largest[0]]} holds the most tokens, {percent(tokens[largest[0]] / tokens.sum())}, of {len(labels):,} sources"
    if supervision.sources is None:
        finding = f"The {len(lengths):,} samples name no source: add a column 'source' to see them apart"
    return finish(figure, finding, f"{name + ': ' if name else ''}share of tokens beside the name; n = {len(lengths):,}")


def _lengths_only(name: str) -> Plot:
    figure, axes = new_figure(height=1.2)
    axes[0, 0].set_axis_off()
    return finish(figure, f"{name or 'This source'} holds lengths only: 0 loss masks and 0 sources to draw")


def random_waste(rows: Sequence[dict], batch_size: int, name: str = "") -> Plot:
    """Padding of batches drawn at random against their size: why plan by length at all.

    ``rows``: from :func:`dflash_nb.planner.simulate.random_batch_waste`, each with ``batch_size`` and ``waste`` (share of padded
    tokens). ``batch_size``: the size to point at.
    """
    sizes = np.array([row["batch_size"] for row in rows])
    waste = np.array([row["waste"] for row in rows])
    at = float(np.interp(batch_size, sizes, waste))
    figure, axes = new_figure()
    axis = axes[0, 0]
    axis.plot(sizes, 100 * waste, color=strategy_color("random"), marker="o", markersize=3)
    axis.plot(batch_size, 100 * at, "o", color=WARN, markersize=9, fillstyle="none", markeredgewidth=1.8)
    side = -1 if batch_size > sizes.max() / 2 else 1
    axis.annotate(
        f"{batch_size} rows: {percent(at)}", (batch_size, 100 * at), (8 * side, -16), textcoords="offset points", fontsize=9,
        ha="left" if side > 0 else "right",
    )  # fmt: skip
    axis.set(xlabel="rows in a batch", ylabel="padding (% of padded tokens)", ylim=(0, 100), xlim=(0, sizes.max() + 1))
    finding = f"Batches of {batch_size} random rows waste {percent(at)} of their tokens on padding"
    return finish(figure, finding, f"{name + ': ' if name else ''}expected over random batches")
