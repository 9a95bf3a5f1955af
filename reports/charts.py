"""Plots as SVG text for a page without scripts or network. Figures come in, markup goes out.

Each chart carries the sentence that says how to read it. Colours are those of the page: text and axes take
the page's own colour, so one drawing serves a light and a dark page. Nothing is drawn of no samples.
"""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from reports.statistics import Ratio
from reports.words import clean, microseconds

PALETTE = ("#3b82c4", "#d9822b", "#3a9d6e", "#b455a0", "#8a7a2a", "#c0504d", "#5b6abf", "#6b7280")
TEXT = "#010203"  # replaced by the page's colour
_MAX_POINTS = 200
STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.linewidth": 0.6,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "grid.color": TEXT,
    "grid.alpha": 0.15,
    "grid.linewidth": 0.5,
    "text.parse_math": False,  # a toggle's value may hold a dollar sign
}


@dataclass(frozen=True, slots=True)
class Chart:
    """``svg`` is markup of our own making (names in it are escaped); ``reading`` a sentence of plain text."""

    title: str
    svg: str
    reading: str


def distribution(path: str, arms: Mapping[str, Sequence[float]]) -> Chart | None:
    """Cumulative distributions of one hot path's latencies (microseconds), a curve an arm, on a log axis.

    At most as many arms as there are colours are drawn; the sentence names how many were left out.
    """
    drawn = {name: np.sort(np.asarray(samples)) for name, samples in arms.items() if len(samples)}
    left_out = max(len(drawn) - len(PALETTE), 0)
    if not drawn:
        return None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": clean(path)}):
        figure = Figure(figsize=(7.4, 2.7), layout="constrained")
        axes = figure.subplots()
        for (name, samples), colour in zip(drawn.items(), PALETTE, strict=False):
            shares = np.arange(1, len(samples) + 1) / len(samples)
            keep = np.unique(np.linspace(0, len(samples) - 1, _MAX_POINTS).astype(int))
            shown = np.maximum(samples[keep], 1e-3)
            axes.step(shown, shares[keep], where="post", color=colour, linewidth=1.4, label=clean(name))
        for level in (0.5, 0.95, 0.99):
            axes.axhline(level, color=TEXT, alpha=0.25, linewidth=0.6, linestyle=":")
        axes.set_xscale("log")
        _latency_axis(axes)
        axes.set_ylim(0.0, 1.02)
        axes.set_yticks((0.0, 0.5, 0.95), ("0", "50 %", "95 %"))
        _finish(figure, axes, len(drawn))
        svg = svg_of(figure, f"Latency distribution of {path}", path)
    reading = (
        "Each curve is one arm: at the height of 95 %, read below it the latency that 95 % of the samples "
        "stayed under. Further left is faster; curves that lie on each other do not differ."
    )
    if left_out:
        reading += f" {left_out} more arms are in the table only."
    return Chart(path, svg, reading)


def ratios(rows: Sequence[tuple[str, Ratio]], against: str, threshold: float) -> Chart | None:
    """Ratios of medians with their intervals, one line a row; those without an interval are hollow points."""
    drawn = [(name, ratio) for name, ratio in rows if ratio.ratio is not None]
    if not drawn:
        return None
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "ratios"}):
        figure = Figure(figsize=(7.4, 0.8 + 0.32 * len(drawn)), layout="constrained")
        axes = figure.subplots()
        axes.axvspan(1.0 / (1.0 + threshold), 1.0 + threshold, color=TEXT, alpha=0.08, linewidth=0)
        axes.axvline(1.0, color=TEXT, alpha=0.5, linewidth=0.8)
        for height, (_, ratio) in enumerate(reversed(drawn)):
            fill = "none"
            if ratio.low is not None and ratio.high is not None:
                axes.plot((ratio.low, ratio.high), (height, height), color=PALETTE[0], linewidth=1.6)
                fill = PALETTE[0]
            point = (ratio.ratio or 0.0,)
            axes.plot(point, (height,), "o", color=PALETTE[0], markersize=5, markerfacecolor=fill)
        axes.set_yticks(range(len(drawn)), [clean(name) for name, _ in reversed(drawn)])
        axes.set_ylim(-0.6, len(drawn) - 0.4)
        axes.set_xlabel(clean(f"median latency, as a multiple of {against}"))
        _finish(figure, axes, 1)
        svg = svg_of(figure, f"Ratios of medians against {against}", "ratios")
    reading = (
        f"A point left of the line at 1 is faster than {against}. A difference counts when its bar stays "
        "clear of that line and its point lies outside the grey band; a bar inside the band means no "
        "difference worth a change. "
        "A hollow point has too few trials for a bar."
    )
    return Chart("ratios", svg, reading)


def _latency_axis(axes: Any) -> None:
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: microseconds(value)))
    low, high = axes.get_xlim()
    narrow = high / low < 12  # within one decade only the minor ticks say anything
    minor = FuncFormatter(lambda value, _: microseconds(value)) if narrow else NullFormatter()
    axes.xaxis.set_minor_formatter(minor)
    axes.set_xlabel("latency")


def _finish(figure: Any, axes: Any, curves: int) -> None:
    axes.grid(True)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if curves > 1 or axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside upper left", frameon=False, ncols=3, handlelength=1.4, fontsize=8.5)


def svg_of(figure: Any, title: str, salt: str) -> str:
    """The bare <svg> element: no document type, no metadata, no address; ids unique on the page."""
    buffer = io.StringIO()
    metadata = {"Date": None, "Creator": None, "Type": None, "Format": None}
    figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = text.replace(TEXT, "currentColor")
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    prefix = f"c{hashlib.sha256(clean(salt).encode()).hexdigest()[:8]}-"
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = text.replace("url(#", f"url(#{prefix}").replace('href="#', f'href="#{prefix}')
    label = title.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
