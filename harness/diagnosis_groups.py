"""A collective that went to another group than the one it belongs to. Pure.

The ranks that came to it are not to be told from those that never did by who waits: the missing ones had no reason
to come. What tells is the past: the same operation, of the same shape, was carried out before by just
these ranks in a narrower group of theirs, and by nobody in the wide one; or the peers of these ranks wait for them
in the group where they did it before.
"""

from __future__ import annotations

from collections.abc import Mapping

from harness.diagnosis_case import Case
from harness.diagnosis_collectives import collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact, Mismatch
from harness.ledger_snapshot import CollectiveRecord, GroupState, Snapshot
from harness.waits import Wait, describe, record_at

_TIMES_BEFORE = 2
"""Completed in groups of the narrower one's name, all of them together, and at least once by each of the ranks."""


def wrong_group(case: Case) -> Cause | None:
    """Ranks wait in a group whose other members have nothing to do there."""
    for wait in still_waits(case):
        if not wait.missing or wait.unknown or wait.mismatched:
            continue
        snapshots = case.snapshots()
        brought = _brought(snapshots, wait)
        if brought is None:
            continue
        narrow = _missed_in(case, snapshots, wait, brought)
        if narrow is None and not _ever_done(snapshots, wait, brought):
            narrow = _narrower(snapshots, wait, brought)
        if narrow is None:
            continue
        complete = case.others_known(())
        name, times = narrow
        what = describe(brought.operation, brought.shape, brought.dtype)
        facts = [
            Fact(
                f"rank {rank} carried out {what} {times[rank]} times in group {name}, whose members are "
                f"{list(snapshots[rank].groups[name].ranks)}; now it is in group {wait.group}, whose members are "
                f"{list(wait.members)}, where no rank ever did",
                case.views[rank].ledger_path,
            )
            for rank in wait.waiting
        ]
        facts += wait_facts(case, wait)
        sides = (
            {"ranks": list(wait.waiting), "group": wait.group, "operation": brought.operation},
            {"ranks": list(wait.waiting), "group": name, "operation": brought.operation, "usual": True},
        )
        return Cause(
            kind="hang",
            mechanism="collective-skipped",
            ranks=wait.waiting if complete else (),
            facts=(*facts, *(case.views[rank].host_fact() for rank in wait.waiting)),
            confidence="supported" if complete else "suspected",
            stream="host",
            collective=collective(wait, Mismatch("group", sides)),
            family=f"{wait.operation} instead of {name}",
            group=wait.group,
        )
    return None


def _brought(snapshots: Mapping[int, Snapshot], wait: Wait) -> CollectiveRecord | None:
    return record_at(snapshots[wait.waiting[0]].groups[wait.group], wait.sequence)


def _ever_done(snapshots: Mapping[int, Snapshot], wait: Wait, brought: CollectiveRecord) -> bool:
    """Some rank completed such a collective in the wide group, or its ring no longer shows that none did."""
    states = [snapshots[rank].groups.get(wait.group) for rank in wait.members if rank in snapshots]
    return any(state is not None and (_done(state, brought) > 0 or _lost(state)) for state in states)


def _lost(state: GroupState) -> bool:
    return bool(state.recent) and state.completed > 0 and min(record.sequence for record in state.recent) > 1


def _narrower(
    snapshots: Mapping[int, Snapshot], wait: Wait, brought: CollectiveRecord
) -> tuple[str, Mapping[int, int]] | None:
    """A group of nobody but the waiting ranks, fewer than the wide one's, in which each of them did this before;
    and how often."""
    for name in sorted(snapshots[wait.waiting[0]].groups):
        states = {rank: snapshots[rank].groups.get(name) for rank in wait.waiting}
        known = {rank: state for rank, state in states.items() if state is not None}
        if name == wait.group or len(known) < len(states):
            continue
        members = {state.ranks for state in known.values()}
        times = {rank: _done(state, brought) for rank, state in known.items()}
        own = members == {wait.waiting} and len(wait.waiting) < len(wait.members)
        if own and min(times.values()) > 0 and _times(snapshots, name, brought) >= _TIMES_BEFORE:
            return name, times
    return None


def _missed_in(
    case: Case, snapshots: Mapping[int, Snapshot], wait: Wait, brought: CollectiveRecord
) -> tuple[str, Mapping[int, int]] | None:
    """A group whose other members wait for just these ranks, in the very operation that they brought here, and in
    which each of them did it before, as none did here; and how often."""
    if any(_done(state, brought) for rank in wait.members if (state := _state(snapshots, rank, wait.group))):
        return None
    for other in still_waits(case):
        if other.group == wait.group or other.mismatched or set(other.missing) != set(wait.waiting):
            continue
        due = _brought(snapshots, other)
        times = {
            rank: _done(s, brought) if (s := _state(snapshots, rank, other.group)) else 0
            for rank in wait.waiting
        }
        if due is not None and _alike(due, brought) and min(times.values()) >= _TIMES_BEFORE:
            return other.group, times
    return None


def _state(snapshots: Mapping[int, Snapshot], rank: int, name: str) -> GroupState | None:
    return snapshots[rank].groups.get(name) if rank in snapshots else None


def _alike(one: CollectiveRecord, other: CollectiveRecord) -> bool:
    return (one.operation, one.shape, one.dtype) == (other.operation, other.shape, other.dtype)


def _times(snapshots: Mapping[int, Snapshot], name: str, brought: CollectiveRecord) -> int:
    """Over all groups of that name, each counted once."""
    found = {state.ranks: state for snapshot in snapshots.values() if (state := snapshot.groups.get(name))}
    return sum(_done(state, brought) for state in found.values())


def _done(state: GroupState, brought: CollectiveRecord) -> int:
    return sum(_alike(record, brought) and record.completed_ns is not None for record in state.recent)
