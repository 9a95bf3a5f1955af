"""Hosts that bring nothing more until something else comes to pass, as their ledgers show it. Pure.

A member that has not enqueued a collective may still compute and come, so it is owed its time. A host that is held
will not come before what holds it ends. Not here: what that is worth in seconds (``watchdog.py``).
"""

from __future__ import annotations

from collections.abc import Iterable

from harness.ledger_snapshot import Snapshot
from harness.lost_records import waits_behind_compute
from harness.waits import EVENT_WAIT_LABEL, REPLAY_LABEL, Wait, by_host, record_at


def host_is_held(rank: int, snapshot: Snapshot, found: Iterable[Wait]) -> bool:
    """The rank's host is inside a collective that it carries out itself, or waits for a result behind a stream that
    stands in one. ``found``: the waits at this moment."""
    inside = [wait for wait in found if rank in wait.waiting]
    if any(carries(snapshot, wait) for wait in inside):
        return True
    compute = snapshot.streams.get("compute")
    oldest = compute.oldest if compute is not None else None
    if oldest is None or not inside or not waits_behind_compute(snapshot):
        return False
    return oldest.label.startswith((EVENT_WAIT_LABEL, REPLAY_LABEL))


def carries(snapshot: Snapshot, wait: Wait) -> bool:
    """The rank's host carries out the collective itself."""
    state = snapshot.groups.get(wait.group)
    record = record_at(state, wait.sequence) if state is not None else None
    return record is not None and by_host(record)
