"""What a capture holds, arranged for reading: ranks by streams, groups, the merged stack tree.

Pure views over a StoredTrial; no verdict and no markup. Ages are taken within one snapshot, of one node's
clock, and never across ranks. A piece that is missing is absent here and named among the missing evidence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from harness.seats import in_order
from harness.store import StoredTrial
from reports import fields
from reports.diagnosis import read_missing
from reports.fields import Document
from reports.hang_text import hang_groups
from reports.model import Missing, Result, TrialResult
from reports.stacks_view import Section, sections

STREAM_ORDER = ("compute", "copy", "comm", "update")


@dataclass(frozen=True, slots=True)
class StreamRow:
    """One stream of one rank. ``label`` is None where everything enqueued has completed."""

    stream: str
    enqueued: int
    completed: int
    label: str | None
    sequence: int | None
    site: str
    step: int | None
    since_s: float | None
    suspect: bool

    @property
    def pending(self) -> int:
        return max(self.enqueued - self.completed, 0)


@dataclass(frozen=True, slots=True)
class GroupRow:
    group: str
    ranks: tuple[int, ...]
    enqueued: int
    started: int
    completed: int
    operation: str


@dataclass(frozen=True, slots=True)
class ExternalRow:
    """An external event of a graph; ``overtaken`` records were made before the last one was consumed."""

    name: str
    records: int
    waits: int
    overtaken: int
    first_overtaken: int


@dataclass(frozen=True, slots=True)
class RankRows:
    """One rank, or another process of the engine by name, in the last sample that has its ledger. ``process`` is
    the state of its process. No streams: it has none, or never used one."""

    rank: int | str
    node: str
    process: str
    culprit: bool
    phase: str
    step: int | None
    since_s: float | None
    streams: tuple[StreamRow, ...]
    groups: tuple[GroupRow, ...]
    external: tuple[ExternalRow, ...]


@dataclass(frozen=True, slots=True)
class ChildRow:
    """A process that a rank started, in the last sample that has it."""

    of: str
    pid: int
    state: str
    command: str
    stacks: bool


@dataclass(frozen=True, slots=True)
class HangView:
    """Everything a report shows of one trial that was not healthy."""

    trial: TrialResult
    reason: str
    samples: int
    ranks: tuple[RankRows, ...]
    stacks: tuple[Section, ...]
    children: tuple[ChildRow, ...]
    missing: tuple[Missing, ...]

    @property
    def others(self) -> bool:
        """Some of the rows are of processes that are no ranks."""
        return any(isinstance(row.rank, str) for row in self.ranks)

    @property
    def lost_records(self) -> int:
        return sum(event.overtaken for rank in self.ranks for event in rank.external)


@dataclass(frozen=True, slots=True)
class HangGroup:
    """Trials that stopped in the same way: the first in full, the others by name."""

    signature: str
    first: HangView
    others: tuple[TrialResult, ...]


def hang_view(stored: StoredTrial, trial: TrialResult) -> HangView:
    manifest: Document = stored.manifest or {}
    missing = list(trial.diagnosis.missing_evidence if trial.diagnosis else ())
    missing += [item for item in read_missing(manifest, "missing") if item not in missing]
    if trial.diagnosis is None and trial.outcome != "corrupt":
        missing.insert(0, Missing("diagnosis.json", "not in the trial's directory"))
    return HangView(
        trial=trial,
        reason=fields.text(manifest, "reason"),
        samples=len(stored.samples),
        ranks=rank_rows(stored, trial),
        stacks=sections(stored.merged or {}, blamed_seats(trial)),
        children=child_rows(stored),
        missing=tuple(missing),
    )


def group_hangs(stored: Mapping[str, StoredTrial], result: Result) -> tuple[HangGroup, ...]:
    """The groups of ``hang_groups``, with all that the capture of each group's first trial holds."""
    return tuple(
        HangGroup(
            signature=first.diagnosis.signature if first.diagnosis else "",
            first=hang_view(stored[first.id], first),
            others=tuple(others),
        )
        for first, others in hang_groups(result)
    )


# --- ledgers -----------------------------------------------------------------------------------------------


def rank_rows(stored: StoredTrial, trial: TrialResult) -> tuple[RankRows, ...]:
    """Every rank, and then every other process, that any sample saw, from the last sample that has its ledger."""
    snapshots: dict[int | str, Document] = {}
    processes: dict[int | str, str] = {}
    for sample in stored.samples:
        snapshots |= sample.ledgers
        for row in fields.rows(sample.processes or {}, "ranks"):
            rank = fields.optional_integer(row, "rank")
            seat = fields.optional_text(row, "name") if rank is None else rank
            if seat is not None:
                end = fields.optional_text(row, "exit")
                processes[seat] = fields.text(row, "state", "unknown") + (f", {end}" if end else "")
    diagnosis = trial.diagnosis
    guilty = blamed_seats(trial)
    stream = diagnosis.stream if diagnosis else None
    return tuple(
        _rank(
            rank,
            snapshots.get(rank, {}),
            processes.get(rank, "unknown"),
            rank in guilty,
            stream if rank in guilty else None,
        )
        for rank in in_order(snapshots.keys() | processes.keys())
    )


def blamed_seats(trial: TrialResult) -> frozenset[int | str]:
    """Ranks, and names of processes that are no ranks."""
    culprits = trial.diagnosis.culprits if trial.diagnosis else ()
    return frozenset(culprit.role if culprit.rank is None else culprit.rank for culprit in culprits)


def child_rows(stored: StoredTrial) -> tuple[ChildRow, ...]:
    """Of the last sample that has any."""
    for sample in reversed(stored.samples):
        rows = fields.rows(sample.processes or {}, "children")
        if rows:
            return tuple(
                ChildRow(
                    of=re.sub(r"^rank(?=\d)", "rank ", fields.text(row, "of", "?")),
                    pid=fields.integer(row, "pid"),
                    state=fields.text(row, "state", "?"),
                    command=fields.text(row, "command", "?"),
                    stacks=f"{fields.text(row, 'of')}.{fields.integer(row, 'pid')}" in sample.children,
                )
                for row in rows
            )
    return ()


def _rank(rank: int | str, snapshot: Document, process: str, culprit: bool, suspect: str | None) -> RankRows:
    taken_ns = fields.number(snapshot, "taken_ns")
    host = fields.table(snapshot, "host")
    streams = fields.table(snapshot, "streams")
    order = [name for name in STREAM_ORDER if name in streams]
    order += sorted(name for name in streams if name not in STREAM_ORDER)
    groups = fields.table(snapshot, "groups")
    rows = tuple(_stream(name, fields.table(streams, name), taken_ns, name == suspect) for name in order)
    return RankRows(
        rank=rank,
        node=fields.text(fields.table(snapshot, "header"), "node", "unknown"),
        process=process,
        culprit=culprit,
        phase=fields.text(host, "phase", "unknown"),
        step=fields.optional_integer(host, "step"),
        since_s=_age_s(taken_ns, fields.number(host, "since_ns")),
        streams=rows if any(row.enqueued for row in rows) else (),
        groups=tuple(_group(name, fields.table(groups, name)) for name in sorted(groups)),
        external=tuple(
            _external(row)
            for row in fields.rows(snapshot, "external")
            if fields.integer(row, "records") or fields.integer(row, "waits")
        ),
    )


def _age_s(taken_ns: float | None, since_ns: float | None) -> float | None:
    if taken_ns is None or not since_ns:  # 0 is a slot that was never written
        return None
    return max(taken_ns - since_ns, 0.0) / 1e9


def _stream(name: str, state: Document, taken_ns: float | None, suspect: bool) -> StreamRow:
    oldest = fields.table(state, "oldest")
    return StreamRow(
        stream=name,
        enqueued=fields.integer(state, "enqueued"),
        completed=fields.integer(state, "completed"),
        label=fields.text(oldest, "label", "?") if oldest else None,
        sequence=fields.optional_integer(oldest, "sequence"),
        site=fields.text(oldest, "site"),
        step=fields.optional_integer(oldest, "step"),
        since_s=_age_s(taken_ns, fields.number(state, "oldest_since_ns")) if oldest else None,
        suspect=suspect,
    )


def _group(name: str, state: Document) -> GroupRow:
    completed = fields.integer(state, "completed")
    recent = fields.rows(state, "recent")
    unfinished = [row for row in recent if row.get("completed_ns") is None]
    shown = unfinished[:1] or list(recent[-1:])
    return GroupRow(
        group=name,
        ranks=fields.integers(state, "ranks"),
        enqueued=fields.integer(state, "enqueued"),
        started=fields.integer(state, "started"),
        completed=completed,
        operation=_collective(shown[0]) if shown else "",
    )


def _collective(row: Document) -> str:
    shape = "x".join(str(size) for size in fields.integers(row, "shape"))
    described = " ".join(filter(None, (fields.text(row, "operation", "?"), shape, fields.text(row, "dtype"))))
    end = "" if row.get("completed_ns") is None else " (done)"
    return f"#{fields.integer(row, 'sequence')} {described}{end}"


def _external(row: Document) -> ExternalRow:
    return ExternalRow(
        name=fields.text(row, "name", "?"),
        records=fields.integer(row, "records"),
        waits=fields.integer(row, "waits"),
        overtaken=fields.integer(row, "overtaken"),
        first_overtaken=fields.integer(row, "first_overtaken"),
    )
