"""What every rank's streams did last, as spans on lanes: the common source of the trace file and of the picture.

A lane is the host's steps, a stream or a group of one rank. A span is an operation that began when it was enqueued
or when the one before it on its lane was done, whichever was later, and ended when its completion was seen; what an
unfinished one holds up has not begun. Times are seconds since the trial's start, of the node's own monotonic clock:
the agent wrote both down at each sample, so clocks of several nodes are brought together only as exactly as their
agents sampled at once. Pure view over a StoredTrial. Not here: layout (``trace.py``, ``timeline_chart.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from harness.seats import Seat, in_order, seat_words
from harness.store import StoredTrial
from reports import fields
from reports.evidence import STREAM_ORDER
from reports.fields import Document
from reports.injected import injected
from reports.model import TrialResult

LaneKind: TypeAlias = Literal["host", "stream", "group"]
MarkKind: TypeAlias = Literal["fault", "stall", "suspected", "confirmed"]


@dataclass(frozen=True, slots=True)
class Span:
    """``begin_s`` None: it waits behind an unfinished one. ``end_s`` None: unfinished at the last sample.
    ``enqueued_s``: when the host asked for it."""

    name: str
    begin_s: float | None
    end_s: float | None
    enqueued_s: float
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lane:
    seat: Seat
    kind: LaneKind
    name: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment. ``seat`` None: of the whole trial."""

    kind: MarkKind
    name: str
    at_s: float
    seat: Seat | None = None


@dataclass(frozen=True, slots=True)
class Timeline:
    """``end_s``: when the last sample was taken; open spans reach it. ``nodes``: whose clocks are in it."""

    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]
    end_s: float
    nodes: tuple[str, ...]

    @property
    def stall_s(self) -> float | None:
        return next((mark.at_s for mark in self.marks if mark.kind == "stall"), None)

    @property
    def seats(self) -> tuple[Seat, ...]:
        return tuple(in_order({lane.seat for lane in self.lanes}))


def timeline(stored: StoredTrial, trial: TrialResult) -> Timeline | None:
    """None where no sample has a ledger, or none says when it was taken."""
    taken = {
        fields.integer(row, "index"): fields.number(row, "taken_s")
        for row in fields.rows(stored.manifest or {}, "samples")
    }
    lanes: dict[tuple[Seat, LaneKind, str], dict[int, Span]] = {}
    ends: list[float] = []
    nodes: set[str] = set()
    for sample in stored.samples:
        taken_s = taken.get(sample.index)
        for seat, ledger in sample.ledgers.items():
            taken_ns = fields.number(ledger, "taken_ns")
            if taken_s is None or not taken_ns:
                continue
            clock = _Clock(taken_ns, taken_s)
            ends.append(taken_s)
            nodes.add(fields.text(fields.table(ledger, "header"), "node", "unknown"))
            for (kind, name), spans in _lanes(ledger, clock).items():
                # The same operation of a later sample is told by that one: it may have ended meanwhile.
                lanes.setdefault((seat, kind, name), {}).update(spans)
    if not lanes:
        return None
    return Timeline(
        lanes=tuple(Lane(*key, _in_turn(lanes[key])) for key in sorted(lanes, key=_lane_order)),
        marks=_marks(stored, trial),
        end_s=max(ends),
        nodes=tuple(sorted(nodes)),
    )


@dataclass(frozen=True, slots=True)
class _Clock:
    """A node's monotonic nanoseconds as seconds since the trial's start."""

    taken_ns: float
    taken_s: float

    def seconds(self, at_ns: float) -> float:
        return self.taken_s + (at_ns - self.taken_ns) / 1e9


def _in_turn(spans: Mapping[int, Span]) -> tuple[Span, ...]:
    return tuple(spans[number] for number in sorted(spans))


def _lane_order(lane: tuple[Seat, LaneKind, str]) -> tuple[Any, ...]:
    seat, kind, name = lane
    place = STREAM_ORDER.index(name) if name in STREAM_ORDER else len(STREAM_ORDER)
    ordered = (0, seat, "") if isinstance(seat, int) else (1, 0, seat)
    return (*ordered, ("host", "stream", "group").index(kind), place, name)


def _lanes(ledger: Document, clock: _Clock) -> dict[tuple[LaneKind, str], dict[int, Span]]:
    found: dict[tuple[LaneKind, str], dict[int, Span]] = {}
    begins: dict[int, float] = {}
    for name, stream in _tables(ledger, "streams"):
        rows = fields.rows(stream, "recent")
        spans = _spans(rows, clock, _operation)
        if spans:
            found["stream", name] = spans
        for row in rows:
            step, at_ns = fields.integer(row, "step", -1), fields.number(row, "enqueued_ns")
            if step >= 0 and at_ns:
                begins[step] = min(begins.get(step, at_ns), at_ns)
    for name, group in _tables(ledger, "groups"):
        spans = _spans(fields.rows(group, "recent"), clock, _collective)
        if spans:
            found["group", name] = spans
    steps = _steps(ledger, begins, clock)
    if steps:
        found["host", "steps"] = steps
    return found


def _tables(ledger: Document, key: str) -> Iterable[tuple[str, Document]]:
    tables = fields.table(ledger, key)
    return [(name, fields.table(tables, name)) for name in tables]


def _spans(rows: Iterable[Document], clock: _Clock, told: Any) -> dict[int, Span]:
    """By sequence number. A lane does one thing after the other."""
    found: dict[int, Span] = {}
    free_ns: float | None = 0.0
    for row in sorted(rows, key=lambda row: fields.integer(row, "sequence")):
        enqueued_ns, completed_ns = fields.number(row, "enqueued_ns"), fields.number(row, "completed_ns")
        if not enqueued_ns:
            continue
        begin_ns = fields.number(row, "started_ns") or enqueued_ns
        begin_s = None if free_ns is None else clock.seconds(max(begin_ns, free_ns))
        name, details = told(row)
        if completed_ns is None or begin_s is None:
            end_s, free_ns = None, None
        else:
            end_s, free_ns = max(begin_s, clock.seconds(completed_ns)), completed_ns
        number = fields.integer(row, "sequence")
        found[number] = Span(name, begin_s, end_s, clock.seconds(enqueued_ns), details)
    return found


def _operation(row: Document) -> tuple[str, Document]:
    return fields.text(row, "label", "?"), {
        "sequence": fields.integer(row, "sequence"),
        "site": fields.text(row, "site"),
        "step": fields.integer(row, "step"),
    }


def _collective(row: Document) -> tuple[str, Document]:
    return fields.text(row, "operation", "?"), {
        "sequence": fields.integer(row, "sequence"),
        "shape": list(fields.integers(row, "shape")),
        "dtype": fields.text(row, "dtype"),
    }


def _steps(ledger: Document, begins: Mapping[int, float], clock: _Clock) -> dict[int, Span]:
    """The host's steps: each begins with its first enqueue and ends where the next one begins; the one in which the
    host stands is open. What was decided in it is its details."""
    decisions = {fields.integer(row, "step", -1): row for row in fields.rows(ledger, "decisions")}
    order = sorted(begins)
    found = {}
    for step, following in zip(order, [*order[1:], None], strict=True):
        decision = decisions.get(step, {})
        mode = fields.text(decision, "mode")
        begin_s = clock.seconds(begins[step])
        end_s = None if following is None else clock.seconds(begins[following])
        details = {key: value for key, value in decision.items() if key not in ("step", "mode")}
        found[step] = Span(f"step {step} {mode}".strip(), begin_s, end_s, begin_s, details)
    return found


def _marks(stored: StoredTrial, trial: TrialResult) -> tuple[Mark, ...]:
    found = []
    diagnosis = trial.diagnosis
    if diagnosis is not None:
        moments: tuple[tuple[MarkKind, str, float | None], ...] = (
            ("stall", "last progress", diagnosis.last_progress_s),
            ("suspected", "suspected", diagnosis.suspected_s),
            ("confirmed", "confirmed", diagnosis.confirmed_s),
        )
        found += [Mark(kind, name, at_s) for kind, name, at_s in moments if at_s is not None]
    broken = injected(stored, trial)
    for row in () if broken is None else broken.rows:
        if row.at_s is not None:
            name = f"fault {row.fault} at {row.site} on {seat_words(row.rank)}"
            found.append(Mark("fault", name, row.at_s, row.rank))
    return tuple(sorted(found, key=lambda mark: mark.at_s))
