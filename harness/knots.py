"""Stalls that the ledgers show although each rank stands where it may: two knots of one rank's own making. Pure.

*Side streams*: a communicator has unfinished collectives on two streams of a rank. Nothing orders them, so ranks
that all stand in the group may carry them in different orders for ever.

*Registration*: memory is registered by all members together. Who registers waits for those who do not, and they
stand in another collective that the registering ranks cannot come to, or carry on, before they are through.

The watchdog takes them for proofs, the diagnosis for causes. Words are theirs, and so is who is to blame.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.ledger_snapshot import OpRecord, Snapshot
from harness.waits import GRAPH_PREFIX, Wait

_EVENT = "event."
_REGISTERS = ("regist", "rendezvous")


def registers(wait: Wait) -> bool:
    """The collective maps memory of all members, by its name."""
    return any(part in wait.operation.lower() for part in _REGISTERS)


def side_streams(snapshot: Snapshot, group: str) -> tuple[str, ...]:
    """The streams that have unfinished collectives of the group, where they are more than one; else empty."""
    busy = {name: stream for name, stream in snapshot.streams.items() if stream.busy}
    if len(busy) < 2:
        return ()
    names = [
        name
        for name, stream in busy.items()
        if any(record.sequence > stream.completed and _carries(record, group) for record in stream.recent)
    ]
    return tuple(sorted(names)) if len(names) > 1 else ()


def _carries(record: OpRecord, group: str) -> bool:
    words = record.label.split()
    return len(words) > 1 and words[-1] == group and not record.label.startswith(_EVENT)


@dataclass(frozen=True, slots=True)
class Held:
    """``rank`` does not come to the registration: it stands in ``behind``, which needs ``needed``, a rank in the
    registration, who has not entered it or registers within it. Not ``certain`` in a replay: nobody sees inside."""

    rank: int
    behind: Wait
    needed: int
    certain: bool


@dataclass(frozen=True, slots=True)
class Registration:
    """``wait`` is the registration; ``held``: every member that is not in it, and why it cannot come."""

    wait: Wait
    held: tuple[Held, ...]


def registration(found: Iterable[Wait]) -> Registration | None:
    """A registration that lacks members, each of which waits for one that registers."""
    known = tuple(found)
    for wait in known:
        absent = (*wait.missing, *wait.late)
        if not registers(wait) or not absent or wait.unknown:
            continue
        held = [one for rank in absent if (one := _held(rank, wait, known)) is not None]
        if len(held) == len(absent):
            return Registration(wait, tuple(held))
    return None


def _held(rank: int, registration: Wait, found: tuple[Wait, ...]) -> Held | None:
    inside = registration.waiting
    for behind in found:
        if behind is registration or rank not in behind.waiting:
            continue
        for needed in inside:
            if needed in behind.missing or needed in behind.late:
                return Held(rank, behind, needed, certain=True)
        needed_too = next((one for one in inside if one in behind.waiting), None)
        if needed_too is not None:
            # It registers in the course of that collective, which is not over before.
            return Held(rank, behind, needed_too, certain=not behind.operation.startswith(GRAPH_PREFIX))
    return None


def standing_in(snapshots: Mapping[int, Snapshot], group: str) -> dict[int, tuple[str, ...]]:
    """``side_streams`` of each rank that has any."""
    found = {rank: side_streams(snapshot, group) for rank, snapshot in snapshots.items()}
    return {rank: streams for rank, streams in found.items() if streams}
