"""A trial's timeline as a Chrome trace: the JSON that ui.perfetto.dev and chrome://tracing open.

One process a rank, one thread a lane; operations and collectives are complete events, the moment of the stall and
faults are instants, and what one collective did on several ranks is joined by arrows (flow events). The format is
the "Trace Event Format" of the Chromium project: times are microseconds, and every event has ``ph``, ``pid``,
``tid`` and ``ts``. Not here: what happened when (``timeline.py``).
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from harness.seats import Seat, seat_words
from reports.model import Result, TrialResult
from reports.timeline import Lane, Span, Timeline

FILE = "trace.json"
_OTHER_PIDS = 100_000
"""Processes without a rank come behind all ranks."""
_LANES = {"host": "host", "stream": "stream", "group": "group"}

Event = dict[str, Any]


def render(line: Timeline, trial: TrialResult, result: Result) -> bytes:
    """The file. Names are cut nowhere and come as they are: a viewer shows them as text."""
    pids = {seat: _pid(seat, number) for number, seat in enumerate(line.seats)}
    events: list[Event] = []
    for seat, pid in pids.items():
        events.append(_meta("process_name", pid, 0, name=seat_words(seat)))
        events.append(_meta("process_sort_index", pid, 0, sort_index=pid))
    tids = {}
    for number, lane in enumerate(line.lanes):
        tid = tids[lane.seat, lane.kind, lane.name] = number + 1
        pid = pids[lane.seat]
        events.append(_meta("thread_name", pid, tid, name=f"{_LANES[lane.kind]} {lane.name}"))
        events.append(_meta("thread_sort_index", pid, tid, sort_index=tid))
        events += [_event(span, lane, pid, tid, line.end_s) for span in lane.spans]
    events += _flows(line, pids, tids)
    for mark in line.marks:
        place = (
            {"pid": 0, "tid": 0, "s": "g"}
            if mark.seat is None
            else {"pid": pids.get(mark.seat, 0), "tid": 0, "s": "p"}
        )
        events.append({"ph": "i", "cat": mark.kind, "name": mark.name, "ts": _us(mark.at_s), **place})
    document = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "trial": trial.id,
            "scenario": trial.scenario,
            "arm": trial.name,
            "seed": trial.seed,
            "nodes": list(line.nodes),
            "simulation": result.simulation,
            "note": _note(line, result),
        },
    }  # fmt: skip
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def _note(line: Timeline, result: Result) -> str:
    said = [
        "Operations begin when enqueued or when the one before on the stream was done, whichever was later."
    ]
    if len(line.nodes) > 1:
        said.append("Several nodes: their clocks agree only as exactly as their samples were taken at once.")
    if result.simulation:
        said.append("Simulation: no evidence about hardware.")
    return " ".join(said)


def _pid(seat: Seat, number: int) -> int:
    return seat if isinstance(seat, int) else _OTHER_PIDS + number


def _us(at_s: float) -> float:
    return round(at_s * 1e6, 3)


def _meta(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _event(span: Span, lane: Lane, pid: int, tid: int, end_s: float) -> Event:
    args = {**span.details, "enqueued_us": _us(span.enqueued_s), "finished": span.end_s is not None}
    common = {"pid": pid, "tid": tid, "args": args}
    if span.begin_s is None:
        at = {"ph": "i", "s": "t", "cat": f"{lane.kind},queued", "ts": _us(span.enqueued_s)}
        return {**at, "name": f"{span.name} (queued)", **common}
    begin_us = _us(span.begin_s)
    if span.end_s is None:
        kind, name, end_us = f"{lane.kind},unfinished", f"{span.name} (unfinished)", _us(end_s)
    else:
        kind, name, end_us = lane.kind, span.name, _us(span.end_s)
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": begin_us,
        "dur": max(0.0, end_us - begin_us),
        **common,
    }


def _flows(line: Timeline, pids: dict[Seat, int], tids: dict[Any, int]) -> list[Event]:
    """From the first rank that began a collective to each of the others."""
    met: dict[tuple[str, int], list[tuple[Lane, float]]] = {}
    for lane in line.lanes:
        if lane.kind == "group":
            for span in lane.spans:
                if span.begin_s is not None:
                    met.setdefault((lane.name, int(span.details["sequence"])), []).append(
                        (lane, span.begin_s)
                    )
    events: list[Event] = []
    for (group, sequence), sides in sorted(met.items()):
        (first, began_s), *others = sorted(sides, key=lambda side: side[1])
        for lane, met_s in others:
            number = zlib.crc32(f"{group} {sequence} {lane.seat}".encode())
            common = {"cat": "collective", "name": f"{group} #{sequence}", "id": number}
            start, end = tids[first.seat, first.kind, first.name], tids[lane.seat, lane.kind, lane.name]
            events.append({"ph": "s", "pid": pids[first.seat], "tid": start, "ts": _us(began_s), **common})
            events.append(
                {"ph": "f", "bp": "e", "pid": pids[lane.seat], "tid": end, "ts": _us(met_s), **common}
            )
    return events
