"""Who waits for whom, as nodes and arrows for a picture and for programs: ``evidence/waits.json``. Pure.

Nodes are hosts, streams with unfinished work, collectives that are not complete, and external events that an
unfinished replay waits for. An arrow goes from who waits to what it waits for:

===========  ==============================================================================================
host         its synchronisation's stream; a collective that it carries out itself
stream       the collective that its oldest operation is, or that a replay holds; where it waits for an event, the
             rank's compute stream, or its other busy ones if that is idle (who records it is in no ledger); a
             replay: its external event
collective   the host of a member that did not enqueue it; the busy streams of one that did and is not inside
event        the rank's ``update`` stream where that has work left, else its host, which would enqueue an update
===========  ==============================================================================================

A picture of one moment; nothing here proves anything. What follows from it is ``blocked.py`` and ``proofs.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from harness.blocked import busy_streams, holds
from harness.held import carries
from harness.knots import registers
from harness.ledger_snapshot import Snapshot
from harness.lost_records import graph_of, own_events, replay_under_way
from harness.waits import EVENT_WAIT_LABEL, Wait, waits

NodeKind: TypeAlias = Literal["host", "stream", "collective", "event"]
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Node:
    """``rank`` None: of a collective, which is everybody's. ``label``: what stands there, for people."""

    id: str
    kind: NodeKind
    rank: int | None
    name: str
    label: str


@dataclass(frozen=True, slots=True, order=True)
class Arrow:
    """``waits`` for ``on``, both node ids."""

    waits: str
    on: str
    why: str


@dataclass(frozen=True, slots=True)
class WaitGraph:
    nodes: tuple[Node, ...]
    arrows: tuple[Arrow, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "nodes": [asdict(node) for node in self.nodes],
            "arrows": [asdict(arrow) for arrow in self.arrows],
        }


def wait_graph(snapshots: Mapping[int, Snapshot]) -> WaitGraph:
    """Of the ranks' ledgers at one moment; only what waits or is waited for."""
    made = _Maker(snapshots)
    made.make()
    return WaitGraph(tuple(made.nodes.values()), tuple(sorted(made.arrows)))


class _Maker:
    def __init__(self, snapshots: Mapping[int, Snapshot]) -> None:
        self._snapshots = dict(sorted(snapshots.items()))
        self._found = waits(snapshots)
        self.nodes: dict[str, Node] = {}
        self.arrows: set[Arrow] = set()

    def make(self) -> None:
        for rank, snapshot in self._snapshots.items():
            awaited = snapshot.host_wait()
            if awaited is not None:
                self._arrow(self._host(rank), self._stream(rank, awaited.stream), "synchronises")
            for name in busy_streams(snapshot):
                self._what_a_stream_waits_for(rank, name)
        for wait in self._found:
            self._what_a_collective_waits_for(wait)

    def _what_a_stream_waits_for(self, rank: int, name: str) -> None:
        snapshot = self._snapshots[rank]
        oldest = snapshot.streams[name].oldest
        if oldest is None:
            return
        if oldest.label.startswith(EVENT_WAIT_LABEL):
            others = [other for other in busy_streams(snapshot) if other != name]
            for other in ["compute"] if "compute" in others else others:
                self._arrow(self._stream(rank, name), self._stream(rank, other), "waits for its event")
            return
        replay = replay_under_way(snapshot)
        if replay is not None and replay.sequence == oldest.sequence and name == "compute":
            self._what_a_replay_waits_for(rank, graph_of(replay))

    def _what_a_replay_waits_for(self, rank: int, graph: str) -> None:
        """The first of its events whose record was lost or did not come yet: the others come with it."""
        snapshot = self._snapshots[rank]
        events = own_events(snapshot, graph)
        short = next((one for one in events if one.records - one.overtaken <= one.waits), None)
        if short is None:
            return
        lost = f", {short.overtaken} lost" if short.overtaken else ""
        at = self._event(rank, short.name, f"{short.records} records{lost}, {short.waits} waits")
        self._arrow(self._stream(rank, "compute"), at, "waits for its record")
        busy = "update" in busy_streams(snapshot)
        on = self._stream(rank, "update") if busy else self._host(rank)
        self._arrow(at, on, "records it" if busy else "would enqueue the update")

    def _what_a_collective_waits_for(self, wait: Wait) -> None:
        at = self._collective(wait)
        for rank in wait.waiting:
            snapshot = self._snapshots.get(rank)
            if snapshot is None:
                continue
            if carries(snapshot, wait) and not registers(wait):
                self._arrow(self._host(rank), at, "is inside")
            for name in busy_streams(snapshot):
                oldest = snapshot.streams[name].oldest
                if oldest is not None and holds(oldest.label, wait):
                    self._arrow(self._stream(rank, name), at, "is inside")
        for rank in wait.missing:
            self._arrow(at, self._host(rank), "has not enqueued it")
        for rank in wait.late:
            snapshot = self._snapshots.get(rank)
            for name in [] if snapshot is None else busy_streams(snapshot):
                self._arrow(at, self._stream(rank, name), "enqueued it and is not inside")

    # Nodes, made when an arrow needs them ------------------------------------------------------------------

    def _host(self, rank: int) -> str:
        snapshot = self._snapshots.get(rank)
        label = "no ledger" if snapshot is None else f"{snapshot.host.phase}, step {snapshot.host.step}"
        return self._node(Node(f"host {rank}", "host", rank, "host", label))

    def _stream(self, rank: int, name: str) -> str:
        oldest = self._snapshots[rank].streams[name].oldest
        label = "idle" if oldest is None else f"{oldest.label} #{oldest.sequence}"
        return self._node(Node(f"stream {rank} {name}", "stream", rank, name, label))

    def _event(self, rank: int, name: str, label: str) -> str:
        return self._node(Node(f"event {rank} {name}", "event", rank, name, label))

    def _collective(self, wait: Wait) -> str:
        name = f"{wait.group} {wait.sequence}"
        return self._node(
            Node(
                f"collective {name} {min(wait.members, default=0)}",
                "collective",
                None,
                name,
                f"{wait.operation} #{wait.sequence} of {wait.group}",
            )
        )

    def _node(self, node: Node) -> str:
        self.nodes.setdefault(node.id, node)
        return node.id

    def _arrow(self, waits: str, on: str, why: str) -> None:
        self.arrows.add(Arrow(waits, on, why))
