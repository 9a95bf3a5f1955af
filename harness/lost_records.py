"""A replay that waits for a record which was lost, as the ledgers show it (HANGS.md, D1). Pure.

A replayed graph waits once for each of its external events, and an update records each of them once. A record
made while the flag is still set changes nothing and is lost; replays then run one update behind, and the
replay after the newest update waits for ever. The ledger counts records, the waits that completed replays
imply, and *overtaken* records: those made before the replays completed by then had consumed the one before.

An overtaken record need not be lost: a replay under way may have consumed its flag already, and a completion
may be seen late. It is taken for lost while nothing speaks against it: as many records as there were waits were
not overtaken, the updates are not fenced, and no replay since the first overtaken record completed before the
update after its own was even queued (one that did had a record of its own). What this cannot exclude is an
overtaken record that was no loss, until the first replay without a next update has completed. Whoever draws a
conclusion has to see the ranks stand still first.

The watchdog takes it for a proof, the diagnosis for a cause. Words are theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.ledger_snapshot import ExternalState, OpRecord, Snapshot
from harness.waits import EVENT_WAIT_LABEL, REPLAY_LABEL

UPDATE_LABEL = "graph.update"
RESULT_PHASE = "wait"
"""How the names of phases begin in which the host waits for results."""
DRAIN_PHASE = "drain"
"""After the last step: no update comes any more."""
AGREE_PHASE = "agree"
"""The host waits until every other host has come to the agreement of the same step."""


@dataclass(frozen=True, slots=True)
class LostRecord:
    """``replay`` is short of a record of each of ``events``, first overtaken first.

    ``number``: which replay of its graph it is, from 1; 0 when graphs share events and nobody can tell.
    ``doubt``: what shows that not every overtaken record was lost; empty when nothing does.
    """

    replay: OpRecord
    graph: str
    number: int
    events: tuple[ExternalState, ...]
    doubt: str


def graph_of(record: OpRecord) -> str:
    """The graph that a replay or an update names; empty for another operation."""
    for label in (REPLAY_LABEL, UPDATE_LABEL):
        if record.label.startswith(label):
            return record.label.removeprefix(label).strip()
    return ""


def replay_under_way(snapshot: Snapshot) -> OpRecord | None:
    """The replay in which compute stands."""
    compute = snapshot.streams.get("compute")
    oldest = compute.oldest if compute is not None else None
    return oldest if oldest is not None and oldest.label.startswith(REPLAY_LABEL) else None


def own_events(snapshot: Snapshot, graph: str) -> tuple[ExternalState, ...]:
    """The events that carry the graph's name before theirs; empty when graphs share events."""
    return tuple(event for event in snapshot.external if graph and event.name.startswith(f"{graph} "))


def replay_number(snapshot: Snapshot, graph: str) -> int:
    """Which replay of ``graph`` the first unfinished one is, from 1; 0: not known."""
    return min((event.waits for event in own_events(snapshot, graph)), default=-1) + 1


def fenced_updates(snapshot: Snapshot) -> tuple[int, int]:
    """(updates that came right after a wait for an event, updates of which that can be told)."""
    update = snapshot.streams.get("update")
    recent = {} if update is None else {record.sequence: record for record in update.recent}
    before = [
        recent[sequence - 1]
        for sequence, record in recent.items()
        if record.label.startswith(UPDATE_LABEL) and sequence - 1 in recent
    ]
    return sum(record.label.startswith(EVENT_WAIT_LABEL) for record in before), len(before)


def lost_record(snapshot: Snapshot) -> LostRecord | None:
    """The replay in which the rank stands, if it can be short of a record; None when its updates are fenced."""
    replay = replay_under_way(snapshot)
    update = snapshot.streams.get("update")
    if replay is None or update is None or update.oldest is not None or update.busy:
        return None
    graph = graph_of(replay)
    fenced, judged = fenced_updates(snapshot)
    if judged and fenced == judged:
        return None
    short = [
        event
        for event in own_events(snapshot, graph) or snapshot.external
        if event.overtaken and event.records - event.overtaken <= event.waits
    ]
    if not short:
        return None
    doubts = {event: _doubt(snapshot, replay, event) for event in short}
    certain = [event for event in short if not doubts[event]]
    chosen = sorted(certain or short, key=lambda event: event.first_overtaken)
    return LostRecord(replay, graph, replay_number(snapshot, graph), tuple(chosen), doubts[chosen[0]])


def _doubt(snapshot: Snapshot, replay: OpRecord, event: ExternalState) -> str:
    """A replay from the first overtaken record on had a record of its own."""
    if event.records - event.overtaken < event.waits:
        return f"more replays completed ({event.waits}) than records were not overtaken"
    graph = graph_of(replay) if own_events(snapshot, graph_of(replay)) else None

    def newest_first(stream: str, label: str, last: int) -> list[OpRecord]:
        found = [
            record
            for record in snapshot.streams[stream].recent
            if record.label.startswith(label)
            and record.sequence <= last
            and graph in (None, graph_of(record))
        ]
        return sorted(found, key=lambda record: -record.sequence)

    replays = newest_first("compute", REPLAY_LABEL, replay.sequence)
    updates = newest_first("update", UPDATE_LABEL, snapshot.streams["update"].enqueued)
    queued_ns = {event.records - back: record.enqueued_ns for back, record in enumerate(updates)}
    for back, record in enumerate(replays):
        number = event.waits + 1 - back
        following_ns = queued_ns.get(number + 1)
        if number < event.first_overtaken or following_ns is None or record.completed_ns is None:
            continue
        if record.completed_ns < following_ns:
            return f"replay {number} completed before update {number + 1} was queued"
    return ""


def waits_behind_compute(snapshot: Snapshot) -> bool:
    """The host waits for what cannot come before the operation ends in which compute stands.

    That is a synchronisation of compute, a result whose copy belongs to the step of that operation or a later one,
    or the end of all work.
    """
    compute, copy = snapshot.streams.get("compute"), snapshot.streams.get("copy")
    if compute is None or compute.oldest is None:
        return False
    wait = snapshot.host_wait()
    if wait is not None and wait.stream == "compute":
        return True
    if snapshot.host.phase.startswith(DRAIN_PHASE):
        return True
    if not snapshot.host.phase.startswith(RESULT_PHASE) or copy is None or copy.oldest is None:
        return False
    return 0 <= compute.oldest.step <= copy.oldest.step


@dataclass(frozen=True, slots=True)
class Hosts:
    """What the hosts of a trial wait for, as far as it decides whether another update can come."""

    behind: frozenset[int]
    """Ranks whose host waits behind their own unfinished operation on compute."""
    all_wait: bool
    """Every host does that, or waits in the agreement."""
    replays_of: frozenset[int]
    """Steps of the replays behind which hosts wait."""

    @classmethod
    def of(cls, snapshots: Mapping[int, Snapshot]) -> Hosts:
        """``snapshots``: all ranks that have work left."""
        behind = frozenset(rank for rank, snapshot in snapshots.items() if waits_behind_compute(snapshot))
        return cls(
            behind,
            all(rank in behind or s.host.phase.startswith(AGREE_PHASE) for rank, s in snapshots.items()),
            frozenset(
                under_way.step
                for rank in behind
                if (under_way := replay_under_way(snapshots[rank])) is not None and under_way.step >= 0
            ),
        )

    def bring_no_update(self, rank: int, lost: LostRecord) -> bool:
        """No host can queue the update that ``lost`` of ``rank`` needs.

        Its own host waits for a result behind its unfinished replay, or in the agreement for one whose does: a
        replay holds collectives, so nobody leaves the replay of a step before everyone does.
        """
        return self.all_wait and (rank in self.behind or lost.replay.step in self.replays_of)
