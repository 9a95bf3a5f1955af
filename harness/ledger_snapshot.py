"""What a ledger said at one moment, as values that can be compared, stored and read again.

No file is touched here. Times are CLOCK_MONOTONIC nanoseconds of the rank's node and must never be compared
with those of another node. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.ledger_layout import LedgerError

SNAPSHOT_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operation of a stream. ``label`` "?" and ``step`` -1: its details were overwritten in the ring."""

    sequence: int
    label: str
    site: str
    step: int
    enqueued_ns: int
    completed_ns: int | None


@dataclass(frozen=True, slots=True)
class StreamState:
    """Counts of one stream, its oldest unfinished operation, and since when that has been the oldest.

    ``stamp_ns`` says when the completing side last looked: what is older than that is known, the rest is not.
    ``recent`` holds at most the last 64 operations by sequence.
    """

    enqueued: int
    completed: int
    oldest: OpRecord | None
    oldest_since_ns: int
    stamp_ns: int
    recent: tuple[OpRecord, ...]

    @property
    def busy(self) -> bool:
        """It has unfinished work, as far as anybody has looked."""
        return self.enqueued > self.completed


@dataclass(frozen=True, slots=True)
class ExternalState:
    """A flag event. ``overtaken`` counts records made while the flag was set; the first had that number."""

    name: str
    records: int
    waits: int
    overtaken: int
    first_overtaken: int


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    sequence: int
    operation: str
    shape: tuple[int, ...]
    dtype: str
    enqueued_ns: int
    started_ns: int | None
    completed_ns: int | None


@dataclass(frozen=True, slots=True)
class GroupState:
    """``started`` is the highest sequence entered; ``completed`` the highest below which all are done."""

    name: str
    ranks: tuple[int, ...]
    enqueued: int
    started: int
    completed: int
    recent: tuple[CollectiveRecord, ...]


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host's newest synchronisation: it waits for operation ``sequence`` of ``stream``, unless that is done."""

    stream: str
    sequence: int
    since_ns: int


@dataclass(frozen=True, slots=True)
class HostState:
    """``phase_changes`` counts calls that changed the phase or the step. ``wait``: the newest one that was
    recorded, which may be over (`Snapshot.host_wait` tells); None where the engine records none."""

    phase: str
    step: int
    since_ns: int
    heartbeat_ns: int
    phase_changes: int = 0
    wait: HostWait | None = None


@dataclass(frozen=True, slots=True)
class Header:
    """``start_time_ticks`` (field 22 of ``/proc/PID/stat``), ``pid`` and ``boot_id`` name one process; ``thread``
    is its host thread by number, 0 where the writer did not tell."""

    version: int
    rank: int
    world: int
    pid: int
    start_time_ticks: int
    node: str
    boot_id: str
    device: str
    thread: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``decisions`` are the newest (at most 64) of ``decisions_total``, oldest first."""

    header: Header
    taken_ns: int
    boottime_ns: int
    host: HostState
    streams: dict[str, StreamState]
    external: tuple[ExternalState, ...]
    groups: dict[str, GroupState]
    decisions: tuple[dict[str, Any], ...]
    decisions_total: int = 0
    decisions_lost: int = 0

    def host_wait(self) -> HostWait | None:
        """The synchronisation in which the host is: it began in this phase, and what it waits for is not done."""
        wait = self.host.wait
        stream = None if wait is None else self.streams.get(wait.stream)
        if wait is None or stream is None or wait.since_ns < self.host.since_ns:
            return None
        return wait if stream.completed < wait.sequence <= stream.enqueued else None

    def watermark(self) -> tuple[int, ...]:
        """All counters that only grow, without heartbeats and stamps: equal means that nothing moved."""
        marks = [self.host.phase_changes, self.host.step, self.decisions_total]
        for stream in self.streams.values():
            marks += [stream.enqueued, stream.completed]
        for event in self.external:
            marks += [event.records, event.waits]
        for group in self.groups.values():
            marks += [group.enqueued, group.started, group.completed]
        return tuple(marks)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; ``from_json`` gives an equal snapshot back."""
        return {"schema": SNAPSHOT_SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any] | str | bytes) -> Snapshot:
        """Reads what ``to_json`` gave, parsed or not. Ignores unknown fields; a missing one: LedgerError."""
        try:
            data = json.loads(document) if isinstance(document, str | bytes) else document
            if data["schema"] != SNAPSHOT_SCHEMA:
                raise LedgerError(
                    f"snapshot: expected schema {SNAPSHOT_SCHEMA}, found {data['schema']!r}; "
                    "read it with the version of hangrig that wrote it"
                )
            return cls(
                header=Header(**_only(Header, data["header"])),
                taken_ns=data["taken_ns"],
                boottime_ns=data["boottime_ns"],
                host=_host(data["host"]),
                streams={name: _stream(state) for name, state in data["streams"].items()},
                external=tuple(ExternalState(**_only(ExternalState, state)) for state in data["external"]),
                groups={name: _group(state) for name, state in data["groups"].items()},
                decisions=tuple(dict(record) for record in data["decisions"]),
                decisions_total=data.get("decisions_total", 0),
                decisions_lost=data.get("decisions_lost", 0),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise LedgerError(
                f"snapshot: not what Snapshot.to_json writes ({type(error).__name__}: {error}); "
                "take it from a ledger/rank<r>.json of an evidence directory"
            ) from error


def _only(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    return {name: data[name] for name in kind.__dataclass_fields__ if name in data}


def _host(data: Mapping[str, Any]) -> HostState:
    fields = _only(HostState, data)
    wait = fields.get("wait")
    fields["wait"] = None if wait is None else HostWait(**_only(HostWait, wait))
    return HostState(**fields)


def _operation(data: Mapping[str, Any]) -> OpRecord:
    # Field by field: of a capture of thousands of ranks there are a million.
    return OpRecord(
        data["sequence"], data["label"], data["site"], data["step"], data["enqueued_ns"], data["completed_ns"]
    )


def _collective(data: Mapping[str, Any]) -> CollectiveRecord:
    return CollectiveRecord(
        data["sequence"],
        data["operation"],
        tuple(data["shape"]),
        data["dtype"],
        data["enqueued_ns"],
        data["started_ns"],
        data["completed_ns"],
    )


def _stream(data: Mapping[str, Any]) -> StreamState:
    fields = _only(StreamState, data)
    fields["oldest"] = None if data["oldest"] is None else _operation(data["oldest"])
    fields["recent"] = tuple(_operation(record) for record in data["recent"])
    return StreamState(**fields)


def _group(data: Mapping[str, Any]) -> GroupState:
    fields = _only(GroupState, data)
    fields["ranks"] = tuple(data["ranks"])
    fields["recent"] = tuple(_collective(record) for record in data["recent"])
    return GroupState(**fields)
