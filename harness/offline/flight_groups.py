"""The ranks of one process group, by their flight recorders: who is inside, who is behind, who differs. Pure.

Numbers are matched, shapes counted as elements. A blame is ``harness.diagnosis_flight``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.diagnosis_model import MismatchKind
from harness.offline.flight_recorder import FlightDump, FlightEntry, FlightGroup
from harness.waits import Side, Wait

_SIZED = (
    "all_reduce", "allreduce", "broadcast", "reduce", "all_gather", "_all_gather_base", "allgather",
    "reduce_scatter", "_reduce_scatter_base",
)  # fmt: skip
"""Operations to which every rank brings the same number of elements."""
_SOURCED = ("broadcast", "scatter")
"""Operations that their source may finish before the others come."""
_PATTERN = 3


@dataclass(frozen=True, slots=True)
class Party:
    """The ranks of one group, and what each knows of it."""

    name: str
    words: str
    members: tuple[int, ...]
    states: Mapping[int, FlightGroup]

    def entry(self, rank: int, sequence: int) -> FlightEntry | None:
        state = self.states.get(rank)
        return None if state is None else state.at(sequence)

    def side(self, rank: int, entry: FlightEntry) -> tuple[str, int | None, str]:
        """What counts as the same thing: shapes do not, the number of elements does."""
        sized = all(part in _SIZED for part in entry.operation.split("+"))
        return entry.operation, entry.elements if sized else None, entry.dtype


@dataclass(frozen=True, slots=True)
class Call:
    """A point-to-point call that is not done: ``rank`` waits in it, ``peer`` has no counterpart of that number."""

    party: Party
    rank: int
    peer: int
    entry: FlightEntry
    known: bool


# Groups ------------------------------------------------------------------------------------------------------


def parties_of(dumps: Mapping[int, FlightDump], world: int) -> tuple[Party, ...]:
    """Groups of one name that share no member are different ones: each attention group is one of its own."""
    everyone = {rank for dump in dumps.values() for rank in dump.world} | set(dumps) | set(range(world))
    names = dict.fromkeys(name for dump in dumps.values() for name in dump.groups)
    made: list[Party] = []
    for name in sorted(names):
        apart: list[tuple[set[int], dict[int, FlightGroup]]] = []
        for rank, dump in sorted(dumps.items()):
            state = dump.groups.get(name)
            if state is None:
                continue
            members, states = {rank, *state.members}, {rank: state}
            rest = []
            for party in apart:
                known = state.members and any(other.members for other in party[1].values())
                if party[0] & members or not known:
                    members, states = members | party[0], {**party[1], **states}
                else:
                    rest.append(party)
            apart = [*rest, (members, states)]
        for members, states in apart:
            default = any(state.words == "default_pg" or state.name == "0" for state in states.values())
            described = max((state.words for state in states.values()), key=lambda words: words != name)
            made.append(
                Party(name, described, tuple(sorted(members | everyone if default else members)), states)
            )
    return tuple(made)


def wait_of(party: Party, dumps: Mapping[int, FlightDump]) -> Wait | None:
    """The first collective of the group that some rank entered and has not finished."""
    open_ = {rank: first for rank, state in party.states.items() if (first := state.unfinished()) is not None}
    if not open_:
        return None
    sequence = min(open_.values())
    inside = [rank for rank, first in open_.items() if first == sequence]
    entries = {rank: party.entry(rank, sequence) for rank in inside}
    started = {rank for rank, entry in entries.items() if entry is not None and entry.started}
    late = {
        rank
        for rank, entry in entries.items()
        if entry is not None and entry.started is False and started - {rank}
    }
    known = [member for member in party.members if member in dumps]
    missing = tuple(rank for rank in known if _entered(party, rank, dumps) < sequence)
    sides = sides_of(party, sequence)
    operation = sides[0].operation if sides else "a collective"
    # Where the source goes on alone, being ahead of the others is no sign.
    if operation in _SOURCED and not missing and len(inside) < len(party.states):
        return None
    return Wait(
        group=party.name,
        sequence=sequence,
        operation=operation,
        members=party.members,
        waiting=tuple(sorted(set(inside) - late)),
        missing=missing,
        late=tuple(sorted(late)),
        unknown=tuple(member for member in party.members if member not in dumps),
        sides=sides,
    )


def _entered(party: Party, rank: int, dumps: Mapping[int, FlightDump]) -> int:
    """The highest number that the rank entered. Of a group in which it recorded nothing only the counter is there,
    under the number that the rank gave the group; mostly that of its peers."""
    state = party.states.get(rank)
    if state is not None:
        return state.enqueued
    numbers = [
        number for other in party.states for number, name in dumps[other].ids.items() if name == party.name
    ]
    unnamed = dumps[rank].groups.get(numbers[0]) if numbers and numbers[0] not in dumps[rank].ids else None
    return unnamed.enqueued if unnamed is not None else 0


def calls_of(parties: Sequence[Party], dumps: Mapping[int, FlightDump]) -> tuple[Call, ...]:
    """Point-to-point calls that are not done and have no counterpart. Ends are ranks of the group."""
    found = []
    for party in parties:
        configured = next((state.members for state in party.states.values() if state.members), ())
        members = configured or (party.members if party.words == "default_pg" else ())
        for rank, state in sorted(party.states.items()):
            for entry in state.p2p:
                if entry.completed or entry.peers is None:
                    continue
                if members and max(entry.peers) >= len(members):
                    continue
                ends = tuple(members[end] if members else end for end in entry.peers)
                peer = ends[1] if entry.operation == "send" else ends[0]
                wanted = "recv" if entry.operation == "send" else "send"
                theirs = party.states[peer].p2p if peer in party.states else ()
                if any(
                    other.operation == wanted
                    and other.peers == entry.peers
                    and other.sequence == entry.sequence
                    for other in theirs
                ):
                    continue
                found.append(Call(party, rank, peer, entry, peer in dumps))
    return tuple(sorted(found, key=lambda call: (call.entry.created_ns, call.rank)))


# Differences -------------------------------------------------------------------------------------------------


def sides_of(party: Party, sequence: int) -> tuple[Side, ...]:
    """What the ranks brought, largest party first."""
    parties: dict[tuple[str, int | None, str], list[int]] = {}
    brought: dict[int, FlightEntry] = {}
    for rank in sorted(party.states):
        entry = party.entry(rank, sequence)
        if entry is not None:
            brought[rank] = entry
            parties.setdefault(party.side(rank, entry), []).append(rank)
    sides = []
    for ranks in parties.values():
        entry = brought[ranks[0]]
        shape = entry.shapes[0] if len(entry.shapes) == 1 else tuple(n for one in entry.shapes for n in one)
        sides.append(Side(tuple(ranks), entry.operation, shape, entry.dtype))
    return tuple(sorted(sides, key=lambda side: (-len(side.ranks), side.ranks)))


def first_difference(party: Party, until: int) -> int | None:
    """The first number, up to ``until``, at which the rings that still hold it differ."""
    numbers = sorted(
        {
            entry.sequence
            for state in party.states.values()
            for entry in state.entries
            if entry.sequence <= until
        }
    )
    for number in numbers:
        sides = sides_of(party, number)
        if len(sides) > 1 and not (number < until and kind_of(sides) == "size"):
            # Uneven sizes that went through are lawful where the library pads them.
            return number
    return None


def kind_of(sides: Sequence[Side]) -> MismatchKind:
    """The first of operation, dtype and size in which they differ."""
    if len({side.operation for side in sides}) > 1:
        return "operation"
    return "dtype" if len({side.dtype for side in sides}) > 1 else "size"


def shown(sides: Sequence[Side]) -> tuple[dict[str, object], ...]:
    return tuple(
        {"ranks": list(s.ranks), "operation": s.operation, "shape": list(s.shape), "dtype": s.dtype}
        for s in sides
    )


def left_out(party: Party, sequence: int) -> tuple[int, ...]:
    """Ranks whose calls from ``sequence`` on are those that others made from the next number on."""
    tails = {rank: _tail(party, rank, sequence) for rank in party.states}
    behind = {
        rank
        for rank, own in tails.items()
        for other, theirs in tails.items()
        if rank != other and _shifted(own, theirs) and not _shifted(theirs, own)
    }
    return tuple(sorted(behind)) if len(behind) < len(tails) else ()


def _shifted(own: Sequence[object], theirs: Sequence[object]) -> bool:
    if not own or len(theirs) < 2 or own[0] == theirs[0]:
        return False
    return all(one == other for one, other in zip(own, theirs[1:], strict=False))


def _tail(party: Party, rank: int, sequence: int) -> list[object]:
    entries = [entry for entry in party.states[rank].entries if entry.sequence >= sequence]
    return [party.side(rank, entry) for entry in entries]


def off_pattern(party: Party, sequence: int) -> tuple[int, ...]:
    """Ranks that brought something else than their own past announces, while at least one kept to it."""
    odd = []
    for rank in sorted(party.states):
        entry = party.entry(rank, sequence)
        if entry is None:
            continue
        expected = _expected(party, rank, sequence)
        if expected is None:
            return ()
        if (entry.operation, entry.dtype) != expected:
            odd.append(rank)
    return tuple(odd) if len(odd) < len(party.states) else ()


def jumped_ahead(party: Party, rank: int, sequence: int) -> bool:
    """It brought what in earlier rounds came one later."""
    entry = party.entry(rank, sequence)
    following = _expected(party, rank, sequence, skip=1)
    if entry is None or following is None or following == _expected(party, rank, sequence):
        return False
    return following == (entry.operation, entry.dtype)


def _expected(party: Party, rank: int, sequence: int, skip: int = 0) -> tuple[str, str] | None:
    """What earlier rounds of this rank say comes at ``sequence`` (``skip`` 1: one later). None: no pattern. Sizes
    vary with the batch, so they are out."""
    past = [(e.operation, e.dtype) for e in party.states[rank].entries if e.sequence < sequence]
    if len(past) < _PATTERN:
        return None
    for at in range(len(past) - 1 - skip, 1, -1):
        if past[at - 2 : at] == past[-2:]:
            return past[at + skip] if at + skip < len(past) else None
    return None


def minority(sides: Sequence[Side]) -> tuple[int, ...]:
    """The smaller parties' ranks; all ranks where the largest two are equally large."""
    smaller = sides if len(sides[0].ranks) == len(sides[1].ranks) else sides[1:]
    return tuple(sorted(rank for side in smaller for rank in side.ranks))
