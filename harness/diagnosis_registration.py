"""Registrations of memory: collectives of all members that none of them announces (HANGS.md, F). Pure.

Whoever registers waits for all others, without a timeout. The stall is a circle in which one link is a
registration: the others stand where they need a rank that registers. Who is odd follows from what the registration
is for: a rank whose collective fits into what it has registered before had no need to, and is odd unless such ranks
are more; where the collective does not fit, those are odd that did not register for it.

Not here: a member that does not come because it computes, is blocked or has ended (``diagnosis_roots.py``), and a
registration that was only slow (``diagnosis_slow.py``).
"""

from __future__ import annotations

import math
import re

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact, Operation, StreamName, stream_name
from harness.knots import Registration, registration
from harness.ledger_snapshot import CollectiveRecord, GroupState
from harness.waits import GRAPH_PREFIX, Wait, record_at

_BITS = re.compile(r"(\d+)$")
_EVENT = "event."
_SHOWN = 8


def registration_stall(case: Case) -> Cause | None:
    """None where a member may still come, or does not for a reason of its own."""
    found = still_waits(case)
    knot = registration(found)
    if knot is None or not all(case.views[one.rank].still for one in knot.held):
        return None
    wait = knot.wait
    absent = tuple(one.rank for one in knot.held)
    needs = {rank: need for rank in wait.waiting if (need := _need(case.views[rank], wait)) is not None}
    due = bool(needs) and all(need.nbytes > need.room for need in needs.values())
    odd = absent if due or len(wait.waiting) > len(absent) else wait.waiting
    decided = case.only_left((*wait.waiting, *absent))
    facts = [_need_fact(case.views[rank], need) for rank, need in needs.items()]
    facts += wait_facts(case, wait)
    facts += [_held_fact(case, knot, position) for position in range(len(knot.held[:_SHOWN]))]
    for rank in (*wait.waiting[:_SHOWN], *absent[:_SHOWN]):
        facts += case.views[rank].doing()
    stream, operation = _where(case.views[odd[0]])
    certain = all(one.certain for one in knot.held)
    return Cause(
        kind="hang",
        mechanism="registration-stall",
        ranks=tuple(sorted(odd)) if decided else (),
        facts=tuple(facts),
        confidence=("proven" if certain else "supported") if decided else "suspected",
        stream=stream,
        operation=operation,
        collective=collective(wait),
        family=wait.operation,
        group=wait.group,
    )


class _Need:
    """A collective of ``nbytes`` within which a rank registers, and the bytes that it has registered for one."""

    def __init__(self, group: str, record: CollectiveRecord, nbytes: int, room: int) -> None:
        self.words = f"{record.operation} {record.sequence} of group {group}"
        self.nbytes = nbytes
        self.room = room


def _need(view: View, wait: Wait) -> _Need | None:
    """The collective in which the rank stands that brought it to register; None where none is seen, or nothing was
    registered before: then it was the first."""
    if view.snapshot is None:
        return None
    before = _registered_bytes(view.snapshot.groups.get(wait.group), wait.sequence)
    if before is None:
        return None
    for name, state in sorted(view.snapshot.groups.items()):
        if name == wait.group or state.started <= state.completed:
            continue
        record = record_at(state, state.completed + 1)
        nbytes = _nbytes(record) if record is not None else None
        if record is not None and nbytes is not None:
            return _Need(name, record, nbytes, before)
    return None


def _registered_bytes(state: GroupState | None, sequence: int) -> int | None:
    """Room for one collective in the newest segment before registration ``sequence``: segments have two halves."""
    done = [record for record in state.recent if record.sequence < sequence] if state is not None else []
    newest = max(done, key=lambda record: record.sequence, default=None)
    return None if newest is None or not newest.shape else math.prod(newest.shape) // 2


def _nbytes(record: CollectiveRecord) -> int | None:
    bits = _BITS.search(record.dtype)
    if bits is None or record.operation.startswith(GRAPH_PREFIX):
        return None
    return math.prod(record.shape) * int(bits.group(1)) // 8


def _need_fact(view: View, need: _Need) -> Fact:
    fits = "fit into" if need.nbytes <= need.room else "are more than"
    return Fact(
        f"rank {view.rank} registers within {need.words}, of {need.nbytes} bytes, which {fits} the {need.room} "
        "that it has registered before",
        view.ledger_path,
    )


def _held_fact(case: Case, knot: Registration, position: int) -> Fact:
    held = knot.held[position]
    behind = held.behind
    inside = held.needed in behind.waiting
    how = "which registers in the course of it" if inside else "which has not entered it"
    return Fact(
        f"rank {held.rank} waits in {behind.operation} {behind.sequence} of group {behind.group} for rank "
        f"{held.needed}, {how}",
        case.views[held.rank].ledger_path,
    )


def _where(view: View) -> tuple[StreamName | None, Operation | None]:
    """The stream in which the rank stands, behind no event; else its host."""
    for name in view.unfinished():
        oldest = view.oldest(name)
        if oldest is not None and not oldest.label.startswith(_EVENT):
            return stream_name(name), view.operation(name)
    return "host", None
