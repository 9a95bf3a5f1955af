"""Who waits for whom in collectives, read from the ranks' ledgers at one moment. Pure.

The watchdog uses it for proofs, the diagnosis for causes. Nothing here judges how long a wait may last and
nothing compares times: snapshots of different ranks are not simultaneous, so whoever draws a conclusion has
to see the ranks stand still first.

A graph replay advances a group by all the collectives it captured, with one record (operation ``graph
<name>``) and no start of its own: on hardware nobody sees inside a replay. Such a rank counts as waiting when
its compute stream stands in the replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from harness.ledger_snapshot import CollectiveRecord, GroupState, Snapshot

GRAPH_PREFIX = "graph"
REPLAY_LABEL = "graph.replay"


@dataclass(frozen=True, slots=True)
class Side:
    """What some ranks brought to one collective."""

    ranks: tuple[int, ...]
    operation: str
    shape: tuple[int, ...]
    dtype: str

    def words(self) -> str:
        who = ", ".join(f"rank {rank}" for rank in self.ranks)
        return f"{who}: {describe(self.operation, self.shape, self.dtype)}"


@dataclass(frozen=True, slots=True)
class Wait:
    """Collective ``sequence`` of ``group`` that ``waiting`` ranks entered and that did not complete.

    ``missing`` never enqueued it; ``late`` enqueued it and did not enter (something before it is unfinished);
    ``unknown`` members have no readable ledger. ``sides`` has more than one entry on a mismatch.
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

    def mismatch_kind(self) -> Literal["operation", "dtype", "size"]:
        """The first of operation, dtype and size in which the sides differ."""
        if len({side.operation for side in self.sides}) > 1:
            return "operation"
        return "dtype" if len({side.dtype for side in self.sides}) > 1 else "size"


def describe(operation: str, shape: Iterable[int], dtype: str) -> str:
    """For people: ``all_reduce (4, 64) float32``."""
    return " ".join(part for part in (operation, str(tuple(shape)), dtype) if part)


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
    parties: list[tuple[set[int], dict[int, GroupState]]] = []
    for rank, snapshot in sorted(snapshots.items()):
        state = snapshot.groups.get(name)
        if state is None:
            continue
        members, states = {rank, *state.ranks}, {rank: state}
        apart = []
        for party in parties:
            if party[0] & members:
                members |= party[0]
                states = party[1] | states
            else:
                apart.append(party)
        parties = [*apart, (members, states)]
    return [states for _, states in sorted(parties, key=lambda party: min(party[0]))]


def _wait(name: str, states: dict[int, GroupState], snapshots: Mapping[int, Snapshot]) -> Wait | None:
    inside = {rank: state for rank, state in states.items() if entered(snapshots[rank], state)}
    if not inside:
        return None
    sequence = max(state.completed + 1 for state in inside.values())
    members = tuple(sorted({member for state in states.values() for member in state.ranks} | set(states)))
    waiting = tuple(sorted(rank for rank, state in inside.items() if state.enqueued >= sequence))
    if not waiting:
        return None
    known = [member for member in members if member in snapshots]
    enqueued = {m: states[m].enqueued if m in states else 0 for m in known}
    sides = _sides(sequence, {rank: states[rank] for rank in waiting})
    return Wait(
        group=name,
        sequence=sequence,
        operation=sides[0].operation if sides else "",
        members=members,
        waiting=waiting,
        missing=tuple(m for m in known if enqueued[m] < sequence),
        late=tuple(m for m in known if enqueued[m] >= sequence and m not in waiting),
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


def wait_edges(found: Iterable[Wait]) -> dict[int, dict[int, Wait]]:
    """``edges[a][b]``: rank a cannot go on before rank b enters that collective."""
    edges: dict[int, dict[int, Wait]] = {}
    for wait in found:
        for rank in wait.waiting:
            for other in (*wait.missing, *wait.late):
                edges.setdefault(rank, {}).setdefault(other, wait)
    return edges


def cycle_in(edges: Mapping[int, Mapping[int, Wait]]) -> tuple[int, ...]:
    """The ranks of one cycle, in order, smallest starting rank first; empty when there is none."""

    def search(start: int, rank: int, path: tuple[int, ...]) -> tuple[int, ...]:
        for following in sorted(edges.get(rank, {})):
            if following == start:
                return path
            if following not in path:
                found = search(start, following, (*path, following))
                if found:
                    return found
        return ()

    for start in sorted(edges):
        found = search(start, start, (start,))
        if found:
            return found
    return ()
