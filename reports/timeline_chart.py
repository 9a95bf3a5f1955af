"""The last steps before a stall as a picture: a bar an operation, a line a stream. Layout only.

Few ranks are drawn (the culprits, then those from the lowest number): of thousands, the trace file has all. Not
here: what happened when (``timeline.py``), style and markup (``charts.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.seats import Seat, seat_words
from reports.charts import PALETTE, STYLE, TEXT, Chart, svg_of
from reports.timeline import Lane, Span, Timeline
from reports.words import clean

MAX_SEATS = 4
LAST_STEPS = 5
_AFTER = 0.35
"""How much of the picture's width is after the stall, at most, as a share of what is before it."""
_LEAST_S = 1e-3
_KINDS = ("step", "copy", "collective", "graph", "wait", "other")
_BAR = 0.72


def chart(line: Timeline, blamed: Collection[Seat]) -> Chart | None:
    """None where nothing is known of the steps before the stall, or when that was."""
    stall_s = line.stall_s
    seats = _chosen(line.seats, blamed)
    lanes = [lane for lane in line.lanes if lane.seat in seats and lane.kind != "group"]
    begin_s = None if stall_s is None else _begin_s(lanes, stall_s)
    if stall_s is None or begin_s is None:
        return None
    before_s = max(stall_s - begin_s, _LEAST_S)
    end_s = min(line.end_s, stall_s + _AFTER * before_s)
    lanes = [lane for lane in lanes if any(_shown(span, begin_s, end_s) for span in lane.spans)]
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": "timeline"}):
        figure = Figure(figsize=(7.4, 0.9 + 0.24 * len(lanes)), layout="constrained")
        axes = figure.subplots()
        kinds = set()
        for height, lane in enumerate(reversed(lanes)):
            for span in lane.spans:
                if _shown(span, begin_s, end_s):
                    kinds.add(_draw(axes, span, height, begin_s, end_s, stall_s))
        axes.axvline(0.0, color=PALETTE[5], linewidth=1.2)
        for height in range(1, len(lanes)):
            if lanes[-height].seat != lanes[-height - 1].seat:
                axes.axhline(height - 0.5, color=TEXT, alpha=0.3, linewidth=0.6)
        axes.set_yticks(range(len(lanes)), [_name(lane, blamed) for lane in reversed(lanes)])
        axes.set_ylim(-0.6, len(lanes) - 0.4)
        axes.set_xlim((begin_s - stall_s) * 1e3, (end_s - stall_s) * 1e3)
        axes.set_xlabel("milliseconds from the last progress")
        axes.grid(True, axis="x")
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        handles = [Patch(color=_colour(kind), label=kind) for kind in _KINDS if kind in kinds]
        figure.legend(handles=handles, loc="outside upper left", frameon=False, ncols=6, fontsize=8.5)
        svg = svg_of(figure, "The last steps before the stall", "timeline " + " ".join(map(str, seats)))
    reading = (
        f"The last {LAST_STEPS} steps of {', '.join(map(seat_words, seats))} (blamed: *), a line a stream. The "
        "upright line is the last progress as the watchdog saw it, which looks ten times a second. A hatched bar "
        "was never finished: what began to wait first, from the left, is where to look. What is queued behind is "
        "not drawn. "
    )
    if len(seats) < len(line.seats):
        reading += f"{len(line.seats) - len(seats)} more are in the trace file only. "
    if len(line.nodes) > 1:
        reading += "The clocks of several nodes agree only roughly. "
    return Chart("timeline", svg, reading.strip())


def _chosen(seats: Sequence[Seat], blamed: Collection[Seat]) -> tuple[Seat, ...]:
    """The blamed ones first, then ranks from the lowest."""
    first = [seat for seat in seats if seat in blamed][:MAX_SEATS]
    rest = [seat for seat in seats if seat not in blamed and isinstance(seat, int)]
    chosen = {*first, *rest[: max(0, MAX_SEATS - len(first))]}
    return tuple(seat for seat in seats if seat in chosen)


def _begin_s(lanes: Sequence[Lane], stall_s: float) -> float | None:
    """Where the last steps begin, on the rank that is furthest behind; without steps, what is recorded."""
    steps = [
        [span.begin_s for span in lane.spans if span.begin_s is not None and span.begin_s <= stall_s]
        for lane in lanes
        if lane.kind == "host"
    ]
    begins = [found[-LAST_STEPS:][0] for found in steps if found]
    if not begins:
        begins = [span.begin_s for lane in lanes for span in lane.spans if span.begin_s is not None]
    return min(begins, default=None)


def _shown(span: Span, begin_s: float, end_s: float) -> bool:
    return span.begin_s is not None and span.begin_s < end_s and (span.end_s is None or span.end_s > begin_s)


def _draw(axes: Any, span: Span, height: int, begin_s: float, end_s: float, stall_s: float) -> str:
    """One bar; returns its kind."""
    kind, open_ended = _kind(span.name), span.end_s is None
    left_s = max(span.begin_s or 0.0, begin_s)
    right_s = end_s if span.end_s is None else min(span.end_s, end_s)
    axes.broken_barh(
        [((left_s - stall_s) * 1e3, (right_s - left_s) * 1e3)],
        (height - _BAR / 2, _BAR),
        facecolor=_colour(kind),
        alpha=0.45 if open_ended else 0.9,
        hatch="////" if open_ended else None,
        edgecolor=TEXT if open_ended else "none",
        linewidth=0.5 if open_ended else 0.0,
    )
    return kind


def _kind(name: str) -> str:
    if name.startswith("step "):
        return "step"
    if name.startswith("graph"):
        return "graph"
    if "wait" in name:
        return "wait"
    if "copy" in name:
        return "copy"
    if name.startswith(("all_", "reduce_", "broadcast", "barrier", "register", "send", "recv")):
        return "collective"
    return "other"


def _colour(kind: str) -> str:
    return dict(
        zip(_KINDS, (PALETTE[7], PALETTE[2], PALETTE[1], PALETTE[0], PALETTE[3], PALETTE[4]), strict=True)
    )[kind]


def _name(lane: Lane, blamed: Collection[Seat]) -> str:
    mark = " *" if lane.seat in blamed else ""
    return clean(f"{seat_words(lane.seat)}{mark} {'host' if lane.kind == 'host' else lane.name}")
