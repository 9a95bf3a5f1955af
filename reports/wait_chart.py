"""The wait-for graph of a hang as a picture: a column a rank, collectives below. Layout only.

Drawn are the blamed ranks and, up to a number, those with most arrows. Not here: who waits for whom
(``harness.wait_graph`` wrote it down), style and markup (``charts.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from harness.seats import Seat
from reports import fields
from reports.charts import PALETTE, STYLE, TEXT, Chart, svg_of
from reports.fields import Document
from reports.words import clean

MAX_RANKS = 4
_MAX_NODES = 28
_LABEL_CHARACTERS = 30
_COLUMN, _ROW = 2.6, 0.7
_COLOURS = {"host": PALETTE[7], "stream": PALETTE[0], "collective": PALETTE[1], "event": PALETTE[3]}
_ORDER = ("host", "compute", "copy", "comm", "update")


@dataclass(frozen=True, slots=True)
class _Node:
    id: str
    kind: str
    rank: int | None
    name: str
    label: str


@dataclass(frozen=True, slots=True)
class _Graph:
    nodes: dict[str, _Node]
    arrows: tuple[tuple[str, str], ...]


def chart(document: Document, blamed: Collection[Seat]) -> Chart | None:
    """None for a graph without an arrow. ``document``: waits.json, which may be damaged."""
    whole = _read(document)
    ranks = _chosen(whole, [seat for seat in blamed if isinstance(seat, int)])
    graph = _part(whole, ranks)
    if not graph.arrows:
        return None
    places = _places(graph, ranks)
    columns = max((x for x, _ in places.values()), default=0.0) / _COLUMN + 1
    rows = -min(y for _, y in places.values()) / _ROW + 1
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "waits"}):
        figure = Figure(figsize=(max(5.0, 2.3 * columns), 0.55 * rows + 0.2), layout="constrained")
        axes = figure.subplots()
        axes.set_axis_off()
        for waits, on in graph.arrows:
            _arrow(axes, places[waits], places[on])
        for node in graph.nodes.values():
            _box(axes, node, places[node.id], node.rank in blamed)
        axes.set_xlim(-_COLUMN / 2, (columns - 0.5) * _COLUMN)
        axes.set_ylim(-(rows - 0.4) * _ROW, 0.6 * _ROW)
        svg = svg_of(figure, "Who waits for whom", f"waits {sorted(ranks)}")
    left_out = len({node.rank for node in whole.nodes.values() if node.rank is not None}) - len(ranks)
    reading = (
        "An arrow goes from who waits to what it waits for. Follow the arrows: they end at what does not move by "
        "itself, or run in a circle that waits for itself. A column is a rank (blamed: bold frame), its host on "
        "top, its busy streams below, collectives at the bottom."
    )
    if left_out > 0:
        reading += f" {left_out} more ranks are in evidence/waits.json only."
    return Chart("waits", svg, reading)


def _read(document: Document) -> _Graph:
    nodes = {}
    for row in fields.rows(document, "nodes"):
        name = fields.text(row, "id")
        nodes[name] = _Node(
            name,
            fields.text(row, "kind", "host"),
            fields.optional_integer(row, "rank"),
            fields.text(row, "name", "?"),
            fields.text(row, "label"),
        )
    arrows = [(fields.text(row, "waits"), fields.text(row, "on")) for row in fields.rows(document, "arrows")]
    kept = dict.fromkeys(arrow for arrow in arrows if arrow[0] in nodes and arrow[1] in nodes)
    return _Graph(nodes, tuple(kept))


def _chosen(graph: _Graph, blamed: Sequence[int]) -> tuple[int, ...]:
    """The blamed ranks, then those with most arrows, then the lowest numbers."""
    present = {node.rank for node in graph.nodes.values() if node.rank is not None}
    arrows = dict.fromkeys(present, 0)
    for side in (node for arrow in graph.arrows for node in arrow):
        rank = graph.nodes[side].rank
        if rank is not None:
            arrows[rank] += 1
    order = sorted(present, key=lambda rank: (rank not in blamed, -arrows[rank], rank))
    return tuple(sorted(order[:MAX_RANKS]))


def _part(graph: _Graph, ranks: Collection[int]) -> _Graph:
    """Only those ranks, and collectives that one of them is tied to."""
    own = {name for name, node in graph.nodes.items() if node.rank in ranks}
    tied = {side for arrow in graph.arrows if not own.isdisjoint(arrow) for side in arrow}
    kept = [name for name, node in graph.nodes.items() if name in tied and (node.rank is None or name in own)]
    kept = kept[:_MAX_NODES]
    arrows = tuple(arrow for arrow in graph.arrows if arrow[0] in kept and arrow[1] in kept)
    drawn = {side for arrow in arrows for side in arrow}
    return _Graph({name: graph.nodes[name] for name in kept if name in drawn}, arrows)


def _places(graph: _Graph, ranks: Sequence[int]) -> dict[str, tuple[float, float]]:
    """x is to the right, y upwards from the host's row at 0."""
    found: dict[str, tuple[float, float]] = {}
    depth = 0
    for column, rank in enumerate(ranks):
        own = [node for node in graph.nodes.values() if node.rank == rank]
        own.sort(
            key=lambda node: (_ORDER.index(node.name) if node.name in _ORDER else len(_ORDER), node.name)
        )
        for row, node in enumerate(own):
            # Every second one to the side, so that an arrow past a neighbour is seen.
            aside = 0.0 if node.kind == "host" else (0.28 if row % 2 else -0.28)
            found[node.id] = (column * _COLUMN + aside, -row * _ROW)
        depth = max(depth, len(own))
    shared = [node for node in graph.nodes.values() if node.rank is None]
    middle = (len(ranks) - 1) * _COLUMN / 2
    for number, node in enumerate(shared):
        shift = (number - (len(shared) - 1) / 2) * _COLUMN
        found[node.id] = (middle + shift, -(depth + 0.3) * _ROW)
    left = min(x for x, _ in found.values()) if found else 0.0
    return {name: (x - min(left, 0.0), y) for name, (x, y) in found.items()}


def _box(axes: Any, node: _Node, at: tuple[float, float], blamed: bool) -> None:
    who = node.name if node.rank is None else f"rank {node.rank} {node.name}"
    text = f"{who}\n{_cut(node.label)}" if node.label else who
    frame = {
        "boxstyle": "round,pad=0.35",
        "facecolor": _COLOURS.get(node.kind, PALETTE[7]),
        "alpha": 0.92,
        "edgecolor": TEXT,
        "linewidth": 2.2 if blamed else 0.5,
    }
    axes.text(*at, clean(text), ha="center", va="center", fontsize=7.5, color="white", bbox=frame, zorder=3)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    style = {"arrowstyle": "-|>", "color": TEXT, "alpha": 0.7, "linewidth": 1.0, "shrinkA": 16, "shrinkB": 18}
    axes.annotate(
        "", xy=end, xytext=start, arrowprops={**style, "connectionstyle": "arc3,rad=0.12"}, zorder=2
    )


def _cut(text: str) -> str:
    return text if len(text) <= _LABEL_CHARACTERS else text[: _LABEL_CHARACTERS - 1] + "…"
