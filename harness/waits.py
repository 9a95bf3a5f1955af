"""Who waits for whom in collectives, read from the ranks' ledgers at one moment. Pure.

The watchdog uses it for proofs, the diagnosis for causes. Nothing here judges how long a wait may last and
nothing compares times: snapshots of different ranks are not simultaneous, so whoever draws a conclusion has
to see the ranks stand still first.

A graph replay advances a group by all the collectives it captured, with one record (operation ``graph
<name>``) and no start of its own: on hardware nobody sees inside a replay. Such a rank counts as waiting when
its compute stream stands in the replay.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.ledger_snapshot import CollectiveRecord, GroupState, Snapshot
from harness.seats import MANY, seats_words

GRAPH_PREFIX = "graph"
REPLAY_LABEL = "graph.replay"
EVENT_WAIT_LABEL = "event.wait"
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Side:
    """What some ranks brought to one collective."""

    ranks: tuple[int, ...]
    operation: str
    shape: tuple[int, ...]
    dtype: str

    def words(self) -> str:
        few = len(self.ranks) < MANY
        who = ", ".join(f"rank {rank}" for rank in self.ranks) if few else seats_words(self.ranks)
        return f"{who}: {describe(self.operation, self.shape, self.dtype)}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Collective ``sequence`` of ``group`` that ``waiting`` ranks entered and that did not complete.

    ``missing`` never enqueued it; ``late`` enqueued it and did not enter (something before it is unfinished). Who
    is through with it, as a root may be before the others, is in neither. ``unknown`` members have no readable
    ledger. ``sides`` has more than one entry on a mismatch.
    """

    group: str
    sequence: int
    operation: str
    members: tuple[int, ...]
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    late: tuple[int, ...]
    unknown: tuple[int, ...]
    sides: tuple[Side, ...]

    @property
    def mismatched(self) -> bool:
        return len(self.sides) > 1

    def mismatch_kind(self) -> Literal["operation", "root", "dtype", "size"]:
        """The first of operation, root, dtype and size in which the sides differ. Two graphs that differ in a
        number are one of two sizes; two broadcasts that do have two roots."""
        operations = {side.operation for side in self.sides}
        alike = len({_NUMBERS.sub("", operation) for operation in operations}) == 1
        if len(operations) > 1:
            if alike and all(operation.startswith(GRAPH_PREFIX) for operation in operations):
                return "size"
            return "root" if alike and all("from" in operation for operation in operations) else "operation"
        return "dtype" if len({side.dtype for side in self.sides}) > 1 else "size"


def describe(operation: str, shape: Iterable[int], dtype: str) -> str:
    """For people: ``all_reduce (4, 64) float32``."""
    return " ".join(part for part in (operation, str(tuple(shape)), dtype) if part)


def by_host(record: CollectiveRecord) -> bool:
    """The thread that enqueued it also entered it, in one go: a host that is inside does nothing else."""
    return record.started_ns == record.enqueued_ns


def record_at(state: GroupState, sequence: int) -> CollectiveRecord | None:
    """The record that covers ``sequence``: a graph's record covers all that the replay advanced by.

    None when the ring no longer (or not yet) holds it.
    """
    best: CollectiveRecord | None = None
    for record in state.recent:
        if record.sequence >= sequence and (best is None or record.sequence < best.sequence):
            best = record
    if best is None:
        return None
    span = best.shape[0] if best.operation.startswith(GRAPH_PREFIX) and best.shape else 1
    return best if best.sequence - span < sequence else None


def entered(snapshot: Snapshot, state: GroupState) -> bool:
    """The rank is inside the first collective of the group that it has not completed."""
    sequence = state.completed + 1
    if state.enqueued < sequence:
        return False
    if state.started >= sequence:
        return True
    record = record_at(state, sequence)
    if record is not None and record.operation.startswith(GRAPH_PREFIX):
        compute = snapshot.streams.get("compute")
        oldest = compute.oldest if compute is not None else None
        return oldest is not None and oldest.label.startswith(REPLAY_LABEL)
    # A device that reports no starts at all leaves only "enqueued, not completed" to go by.
    return state.started == 0 and state.completed > 0


def waits(snapshots: Mapping[int, Snapshot]) -> tuple[Wait, ...]:
    """One Wait for each group in which some rank waits, by group name, then by its first rank."""
    names = sorted({name for snapshot in snapshots.values() for name in snapshot.groups})
    found = (_wait(name, states, snapshots) for name in names for states in _parties(name, snapshots))
    return tuple(wait for wait in found if wait is not None)


def _parties(name: str, snapshots: Mapping[int, Snapshot]) -> list[dict[int, GroupState]]:
    """The ranks that share a group of that name, with their states: each attention group is one of its own."""
    states = {
        rank: snapshot.groups[name] for rank, snapshot in sorted(snapshots.items()) if name in snapshot.groups
    }
    heads: dict[int, int] = {}

    def head(rank: int) -> int:
        """The smallest rank that is known to share a group with ``rank``."""
        at = heads.setdefault(rank, rank)
        while heads[at] != at:
            heads[at] = heads[heads[at]]
            at = heads[at]
        return at

    def join(ranks: Iterable[int]) -> None:
        known = [head(rank) for rank in ranks]
        for other in known:
            first, second = head(known[0]), head(other)
            heads[max(first, second)] = min(first, second)

    for members in lists_of_members(states.values()):
        join(members)
    parties: dict[int, dict[int, GroupState]] = {}
    for rank, state in states.items():
        if state.ranks and head(rank) != head(state.ranks[0]):
            join((rank, state.ranks[0]))
    for rank, state in states.items():
        parties.setdefault(head(rank), {})[rank] = state
    return [parties[first] for first in sorted(parties)]


def lists_of_members(states: Iterable[GroupState]) -> set[tuple[int, ...]]:
    """The different ones: thousands of ranks list the same thousands of members."""
    by_identity = {id(state.ranks): state.ranks for state in states}
    return set(by_identity.values())


def _wait(name: str, states: dict[int, GroupState], snapshots: Mapping[int, Snapshot]) -> Wait | None:
    inside = {rank: state for rank, state in states.items() if entered(snapshots[rank], state)}
    if not inside:
        return None
    sequence = max(state.completed + 1 for state in inside.values())
    members = tuple(sorted(set(states).union(*lists_of_members(states.values()))))
    waiting = tuple(sorted(rank for rank, state in inside.items() if state.enqueued >= sequence))
    if not waiting:
        return None
    there = frozenset(waiting)
    known = [member for member in members if member in snapshots]
    enqueued = {m: states[m].enqueued if m in states else 0 for m in known}
    through = {rank for rank, state in states.items() if state.completed >= sequence}
    sides = _sides(sequence, {rank: states[rank] for rank in waiting})
    return Wait(
        group=name,
        sequence=sequence,
        operation=sides[0].operation if sides else "",
        members=members,
        waiting=waiting,
        missing=tuple(m for m in known if enqueued[m] < sequence),
        late=tuple(m for m in known if enqueued[m] >= sequence and m not in there and m not in through),
        unknown=tuple(member for member in members if member not in snapshots),
        sides=sides,
    )


def _sides(sequence: int, states: Mapping[int, GroupState]) -> tuple[Side, ...]:
    """What the waiting ranks brought, largest party first. One side when sizes may differ lawfully."""
    parties: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
    for rank, state in sorted(states.items()):
        record = record_at(state, sequence)
        if record is not None:
            parties.setdefault((record.operation, record.shape, record.dtype), []).append(rank)
    sides = [Side(tuple(ranks), *key) for key, ranks in parties.items()]
    sides.sort(key=lambda side: (-len(side.ranks), side.ranks))
    only_sizes_differ = len({(side.operation, side.dtype) for side in sides}) == 1
    if only_sizes_differ and uneven_before(states.values(), sides[0].operation):
        return (sides[0],)
    return tuple(sides)


def uneven_before(states: Iterable[GroupState], operation: str) -> bool:
    """An earlier collective of this operation completed although the ranks' shapes differed."""
    shapes: dict[int, set[tuple[int, ...]]] = {}
    for state in states:
        for record in state.recent:
            if record.operation == operation and record.completed_ns is not None:
                shapes.setdefault(record.sequence, set()).add(record.shape)
    return any(len(found) > 1 for found in shapes.values())


def lacking(found: Iterable[Wait]) -> dict[int, Wait]:
    """By rank, a collective that others cannot leave before this rank enters it: the first of ``found``."""
    targets: dict[int, Wait] = {}
    for wait in found:
        for rank in (*wait.missing, *wait.late):
            targets.setdefault(rank, wait)
    return targets


@dataclass(frozen=True, slots=True)
class Link:
    """``rank`` cannot leave ``wait`` before ``following`` enters it."""

    rank: int
    following: int
    wait: Wait


def cycle_in(found: Iterable[Wait]) -> tuple[Link, ...]:
    """A shortest circle of ranks that wait for each other, from the smallest rank that is in any; else empty.

    Whoever waits in a collective waits for all that are missing or late there. Those pairs are never spelt out:
    of a group of thousands they would be millions.
    """
    known = tuple(found)
    waits_of: dict[int, list[Wait]] = {}
    for wait in known:
        for rank in wait.waiting:
            waits_of.setdefault(rank, []).append(wait)
    for start in sorted(_near_circles(known)):
        links = _circle(start, waits_of)
        if links:
            return links
    return ()


def _near_circles(found: tuple[Wait, ...]) -> set[int]:
    """The ranks of all circles, and those between two circles."""
    # Waits are nodes too, with negative numbers: rank -> wait -> ranks that it lacks.
    after: dict[int, list[int]] = {}
    for number, wait in enumerate(found, start=1):
        after[-number] = [*wait.missing, *wait.late]
        for rank in wait.waiting:
            after.setdefault(rank, []).append(-number)
    for _ in ("those that wait for nobody", "those that nobody waits for"):
        after = _turned(_without_ends(after))
    return {node for node in after if node >= 0}


def _turned(after: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Every arrow the other way."""
    before: dict[int, list[int]] = {node: [] for node in after}
    for node, targets in after.items():
        for target in targets:
            before[target].append(node)
    return before


def _without_ends(after: Mapping[int, list[int]]) -> dict[int, list[int]]:
    """Without the nodes from which no arrow goes on for ever."""
    before: dict[int, list[int]] = {}
    for node, targets in after.items():
        for target in targets:
            before.setdefault(target, []).append(node)
    onward = {node: len(after.get(node, ())) for node in {*after, *before}}
    ends = [node for node, count in onward.items() if count == 0]
    ended = set(ends)
    while ends:
        for node in before.get(ends.pop(), ()):
            onward[node] -= 1
            if onward[node] == 0:
                ended.add(node)
                ends.append(node)
    return {
        node: [target for target in targets if target not in ended]
        for node, targets in after.items()
        if node not in ended
    }


def _circle(start: int, waits_of: Mapping[int, list[Wait]]) -> tuple[Link, ...]:
    """A shortest circle through ``start``; of several, the one of smaller ranks."""
    came_by: dict[int, Link] = {}
    gone_through: set[int] = set()
    queue = deque([start])
    while queue:
        rank = queue.popleft()
        reached: dict[int, Wait] = {}
        for wait in waits_of.get(rank, ()):
            if id(wait) not in gone_through:
                gone_through.add(id(wait))
                for other in (*wait.missing, *wait.late):
                    reached.setdefault(other, wait)
        for following in sorted(reached):
            if following not in came_by:
                came_by[following] = Link(rank, following, reached[following])
                queue.append(following)
        if start in came_by:
            break
    if start not in came_by:
        return ()
    links = [came_by[start]]
    while links[-1].rank != start:
        links.append(came_by[links[-1].rank])
    return tuple(reversed(links))
