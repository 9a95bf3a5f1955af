"""Snapshots made by hand for the tests of watchdog and diagnosis: what a rank's ledger said, in few words.

A ``Rank`` is changed by the test and read by ``snapshot()``; nothing moves unless the test moves it. Times
are seconds on one clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from harness.ledger_snapshot import (
    CollectiveRecord,
    ExternalState,
    GroupState,
    Header,
    HostState,
    HostWait,
    OpRecord,
    Snapshot,
    StreamState,
)
from harness.stacks import Frame, ProcessStacks, ThreadStack

SITE = "serving/engine.py:200"


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


@dataclass
class Group:
    """Collectives in order as (operation, shape, dtype, how many); ``done`` counts sequences."""

    ranks: tuple[int, ...]
    records: list[tuple[str, tuple[int, ...], str, int]] = field(default_factory=list)
    done: int = 0
    started: int = 0
    host: bool = False
    """The host carries them out itself."""
    begun: tuple[float, ...] = ()
    """When each was enqueued, in seconds, where that matters."""

    def add(
        self, operation: str, shape: tuple[int, ...] = (4,), dtype: str = "float32", count: int = 1
    ) -> Group:
        self.records.append((operation, shape, dtype, count))
        return self

    def round(self, *operations: str) -> Group:
        """Adds collectives, entered and completed."""
        for operation in operations:
            self.add(operation)
        self.done = self.started = self.enqueued
        return self

    def enter(self, operation: str, shape: tuple[int, ...] = (4,), dtype: str = "float32") -> Group:
        """Adds one collective, entered and not completed."""
        self.add(operation, shape, dtype)
        self.started = self.enqueued
        return self

    @property
    def enqueued(self) -> int:
        return sum(count for *_, count in self.records)

    def state(self, name: str) -> GroupState:
        records = []
        sequence = 0
        for operation, shape, dtype, count in self.records:
            sequence += count
            begun_s = self.begun[len(records)] if self.begun else 1.0
            started = _ns(begun_s if self.host else begun_s + 0.5) if sequence <= self.started else None
            completed = _ns(1) if sequence <= self.done else None
            records.append(
                CollectiveRecord(sequence, operation, shape, dtype, _ns(begun_s), started, completed)
            )
        return GroupState(name, self.ranks, sequence, self.started, self.done, tuple(records[-32:]))


@dataclass
class Stream:
    """Operations in order as (label, step); the first ``done`` are finished.

    ``times``: (enqueued, completed) in seconds by sequence, for those to which it matters.
    """

    operations: list[tuple[str, int]] = field(default_factory=list)
    done: int = 0
    times: dict[int, tuple[float, float]] = field(default_factory=dict)

    def state(self, now_s: float, stamp_s: float) -> StreamState:
        records = tuple(
            OpRecord(
                number,
                label,
                SITE,
                step,
                _ns(self.times.get(number, (1, 1))[0]),
                _ns(self.times.get(number, (1, 1))[1]) if number <= self.done else None,
            )
            for number, (label, step) in enumerate(self.operations, start=1)
        )
        oldest = records[self.done] if self.done < len(records) else None
        return StreamState(len(records), self.done, oldest, _ns(now_s - 3), _ns(stamp_s), records[-64:])


@dataclass
class Rank:
    rank: int
    world: int = 2
    pid: int = 0
    phase: str = "wait-result"
    step: int = 10
    changes: int = 0
    streams: dict[str, Stream] = field(
        default_factory=lambda: {name: Stream() for name in ("compute", "copy", "comm", "update")}
    )
    external: list[ExternalState] = field(default_factory=list)
    groups: dict[str, Group] = field(default_factory=dict)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    stamp_age_s: float = 0.05
    host_wait: tuple[str, int] | None = None
    """Stream and operation for which the host was the last to wait."""
    frames: tuple[str, ...] = ("wait", "synchronize", "_finish", "step")

    def snapshot(self, now_s: float = 100.0) -> Snapshot:
        return Snapshot(
            header=Header(
                1, self.rank, self.world, self.pid or 1000 + self.rank, 77, "node-a", "boot-a", "sim"
            ),
            taken_ns=_ns(now_s),
            boottime_ns=_ns(now_s),
            host=HostState(
                self.phase,
                self.step,
                _ns(now_s - 3),
                _ns(now_s),
                self.changes,
                None if self.host_wait is None else HostWait(*self.host_wait, _ns(now_s - 3)),
            ),
            streams={
                name: stream.state(now_s, now_s - self.stamp_age_s) for name, stream in self.streams.items()
            },
            external=tuple(self.external),
            groups={name: group.state(name) for name, group in self.groups.items()},
            decisions=tuple(self.decisions[-64:]),
            decisions_total=len(self.decisions),
        )

    def stacks(self) -> ProcessStacks:
        def thread(name: str, names: tuple[str, ...]) -> ThreadStack:
            frames = tuple(Frame(one, f"serving/{name}.py", 10) for one in names)
            return ThreadStack(1, name, False, False, frames)

        return ProcessStacks(
            self.pid or 1000 + self.rank,
            self.rank,
            "py-spy",
            False,
            (
                thread("hangrig-host", self.frames),
                thread("hangrig-compute", ("wait", "block", "_main")),
                thread("hangrig-update", ("get", "_main")),
            ),
        )


def replaying(rank: Rank, *, fenced: bool, overtaken: int = 0, pending: bool = True) -> None:
    """Replays of steps 1 to 9, the last unfinished, and the host in step 10, a prefill, where it waits for the
    result of step 9."""
    replays = [("graph.replay decode.4", step) for step in range(1, 10)]
    rank.streams["compute"] = Stream([*replays, ("gemm", 10)], done=8 if pending else 10)
    copies = [(label, step) for step in range(1, 10) for label in ("event.wait", "next_token_copy")]
    rank.streams["copy"] = Stream(copies, done=16 if pending else 18)
    updates: list[tuple[str, int]] = []
    for step in range(1, 10):
        updates += [("event.wait", step)] * (fenced and step > 1) + [("graph.update decode.4", step)]
    rank.streams["update"] = Stream(updates, done=len(updates))
    lost(rank, overtaken, waits=8 if pending else 9)
    experts = rank.groups.setdefault("experts", Group(tuple(range(rank.world))))
    for _ in range(9):
        experts.add("graph decode.4", (4,), "", 4)
    experts.done = experts.enqueued - (4 if pending else 0)
    rank.phase, rank.step = "wait-result", 10


def lost(rank: Rank, overtaken: int, *, records: int = 9, waits: int = 8, first: int = 6) -> None:
    """Both layers of the graph have as many overtaken records, from record ``first`` on."""
    rank.external = [
        ExternalState(f"decode.4 attention.{layer}", records, waits, overtaken, first if overtaken else 0)
        for layer in range(2)
    ]
