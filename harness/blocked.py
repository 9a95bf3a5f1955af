"""Hosts, streams and collectives that can no longer move, because each of them waits for another one. Pure.

A host that synchronises enqueues nothing before what it waits for is done, and a collective that a member has not
enqueued is not done before that member's host comes. So the wait-for graph has three kinds of nodes:

===========  ==============================================================================================
host         waits for its synchronisation's stream, or in a collective that it carries out itself. One whose
             task is over brings nothing more. Any other may move
stream       its oldest unfinished operation is a collective (or a replay that holds some), or waits for an
             event: that comes, if at all, from another busy stream of the rank. Any other may end
collective   lacks a member that did not enqueue it, whose host does not move; or one that enqueued it and
             whose streams do not move
===========  ==============================================================================================

All are taken to stand at first, then those that may move are taken out until no more go. What is left waits for
each other. Nothing here compares times: whoever calls it names the ranks that were seen to stand still.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from harness.held import carries
from harness.knots import registers
from harness.ledger_snapshot import Snapshot
from harness.lost_records import waits_behind_compute
from harness.seats import seats_words
from harness.waits import EVENT_WAIT_LABEL, GRAPH_PREFIX, REPLAY_LABEL, Wait

_MOST_FACTS = 8
"""Hosts that are spelt out; of thousands the others are counted."""


@dataclass(frozen=True, slots=True)
class Blocked:
    """``hosts`` do not move any more, ``waits`` are the collectives that will not complete. ``facts``: why."""

    hosts: tuple[int, ...]
    waits: tuple[Wait, ...]
    facts: tuple[str, ...]


def blocked(
    snapshots: Mapping[int, Snapshot],
    found: Iterable[Wait],
    *,
    ended: Collection[int] = (),
    assumed: Collection[int] = (),
    frozen: Collection[int] = (),
) -> Blocked | None:
    """``snapshots``: of the ranks that stand still; all others may move. ``found``: the waits of all ranks.
    ``ended``: ranks whose task is over, which bring nothing more. ``assumed``: those whose hosts are taken to
    stand, to see who else stands then; of these ``frozen`` bring nothing to any collective either, whatever their
    ledgers say.

    None where no collective is left that lacks a member.
    """
    graph = _Graph(snapshots, tuple(found), frozenset(ended), frozenset(assumed), frozenset(frozen))
    graph.settle()
    return graph.result()


class _Graph:
    def __init__(
        self,
        snapshots: Mapping[int, Snapshot],
        found: tuple[Wait, ...],
        ended: frozenset[int],
        assumed: frozenset[int],
        frozen: frozenset[int],
    ) -> None:
        self._snapshots = snapshots
        self._found = found
        self._ended = ended
        self._assumed = assumed
        self._frozen = frozen
        self._hosts = set(snapshots) | ended | assumed
        self._streams = {
            (rank, name) for rank, snapshot in snapshots.items() for name in busy_streams(snapshot)
        }
        self._waits = set(range(len(found)))
        self._of: dict[int, list[int]] = {}
        """By rank, the collectives in which it waits."""
        for number, wait in enumerate(found):
            for rank in wait.waiting:
                self._of.setdefault(rank, []).append(number)

    def settle(self) -> None:
        while True:
            waits = {number for number in self._waits if self._lacks(self._found[number])}
            streams = {(rank, name) for rank, name in self._streams if self._stream_stands(rank, name)}
            hosts = {rank for rank in self._hosts if self._host_stands(rank)}
            before = (len(self._waits), len(self._streams), len(self._hosts))
            self._waits, self._streams, self._hosts = waits, streams, hosts
            if before == (len(waits), len(streams), len(hosts)):
                return

    def result(self) -> Blocked | None:
        waits = tuple(self._found[number] for number in sorted(self._waits))
        hosts = tuple(sorted(self._hosts - self._ended))
        return Blocked(hosts, waits, self._facts(hosts, waits)) if waits and hosts else None

    # Who stands --------------------------------------------------------------------------------------------

    def _lacks(self, wait: Wait) -> bool:
        """A member is not in it and does not come."""
        if self._frozen and not self._frozen.isdisjoint((*wait.waiting, *wait.missing, *wait.late)):
            return True
        by_thread = registers(wait)  # whoever finds the need enters it, nobody enqueues it
        missing = any(
            rank in self._hosts and (not by_thread or self._all_stand(rank)) for rank in wait.missing
        )
        return missing or any(
            busy_streams(self._snapshots[rank]) and self._all_stand(rank)
            for rank in wait.late
            if rank in self._snapshots
        )

    def _all_stand(self, rank: int, but: str = "") -> bool:
        """All streams of the rank that have work left."""
        snapshot = self._snapshots.get(rank)
        if snapshot is None:
            return rank in self._ended
        return all((rank, name) in self._streams for name in busy_streams(snapshot) if name != but)

    def _stream_stands(self, rank: int, name: str) -> bool:
        snapshot = self._snapshots[rank]
        oldest = snapshot.streams[name].oldest
        if oldest is None:
            return False
        if oldest.label.startswith(EVENT_WAIT_LABEL):
            others = [other for other in busy_streams(snapshot) if other != name]
            return bool(others) and self._all_stand(rank, but=name)
        return any(
            holds(oldest.label, self._found[number])
            for number in self._of.get(rank, ())
            if number in self._waits
        )

    def _host_stands(self, rank: int) -> bool:
        if rank in self._ended or rank in self._assumed:
            return True
        snapshot = self._snapshots[rank]
        if any(_carries(snapshot, self._found[n]) for n in self._of.get(rank, ()) if n in self._waits):
            return True
        wait = snapshot.host_wait()
        if wait is not None:
            return (rank, wait.stream) in self._streams
        # An engine that records no synchronisation: what its phase says.
        unrecorded = snapshot.host.wait is None and waits_behind_compute(snapshot)
        return unrecorded and (rank, "compute") in self._streams

    # Words -------------------------------------------------------------------------------------------------

    def _facts(self, hosts: tuple[int, ...], waits: tuple[Wait, ...]) -> tuple[str, ...]:
        facts = [_wait_words(wait) for wait in waits[:_MOST_FACTS]]
        facts += [self._host_words(rank) for rank in hosts[:_MOST_FACTS] if rank not in self._assumed]
        if len(hosts) > _MOST_FACTS:
            facts.append(f"and {len(hosts) - _MOST_FACTS} more hosts that wait likewise")
        return tuple(facts)

    def _host_words(self, rank: int) -> str:
        snapshot = self._snapshots[rank]
        wait = snapshot.host_wait()
        if wait is None:
            inside = (self._found[n] for n in self._of.get(rank, ()) if _carries(snapshot, self._found[n]))
            carried = next(inside, None)
            if carried is None:
                return f"rank {rank}: the host waits for a result that compute does not bring"
            return (
                f"rank {rank}: the host itself is in {carried.operation} {carried.sequence} of group "
                f"{carried.group} and enqueues nothing before it is through"
            )
        stream = snapshot.streams[wait.stream]
        awaited = next((record for record in stream.recent if record.sequence == wait.sequence), None)
        of = f"operation {wait.sequence} of {wait.stream}"
        what = of if awaited is None else f"{awaited.label} ({of})"
        behind = "" if stream.oldest is None else f", which stands in {stream.oldest.label}"
        return f"rank {rank}: the host waits for {what}{behind}, and enqueues nothing before that is done"


def _wait_words(wait: Wait) -> str:
    absent = (*wait.missing, *wait.late)
    return (
        f"{seats_words(wait.waiting)} in {wait.operation} {wait.sequence} of group {wait.group}, which lacks "
        f"{seats_words(absent)}"
    )


def busy_streams(snapshot: Snapshot) -> list[str]:
    """Those with unfinished work."""
    return [name for name, stream in snapshot.streams.items() if stream.busy]


def holds(label: str, wait: Wait) -> bool:
    """The operation of a stream, by its label, is what carries out the collective."""
    if label.startswith(REPLAY_LABEL):
        return wait.operation.startswith(GRAPH_PREFIX) or registers(wait)
    words = label.split()
    return len(words) > 1 and words[-1] == wait.group


def _carries(snapshot: Snapshot, wait: Wait) -> bool:
    """Its host is inside the collective, and carries it out itself."""
    return carries(snapshot, wait) and not registers(wait)
