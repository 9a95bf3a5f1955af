"""Whether a process stayed where it was between two dumps of its stacks, and whether anybody looked. Pure.

Only the host thread counts: on hardware the streams have no stacks, and a monitor thread polls for ever. What
a place is (polling moves line numbers, not places) is `harness.stacks`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from harness.ledger_snapshot import Snapshot
from harness.nemesis_frames import without_machinery
from harness.seats import Seat
from harness.stacks import ProcessStacks, ThreadStack, same_place, wait_frames

_WAITS_FOR_A_PROCESS = re.compile(
    r"(?:^|/)(?:subprocess|multiprocessing/\w+|concurrent/futures/\w+|asyncio/subprocess|_inductor/(?:\w+/)*\w+)[.]py$"
)
"""Files of Python, and of torch's compiler, through which a thread waits for a process that it started."""
_NEAR_FRAMES = 12

STALE_STAMP_S = 1.0
"""A stream whose completing side has not looked for so long is in an unknown state."""


def host_thread(stacks: ProcessStacks) -> ThreadStack | None:
    """The rank's host thread as a real engine would show it, None when the dump does not hold it."""
    thread = stacks.thread("host")
    return None if thread is None else replace(thread, frames=without_machinery(thread.frames))


def left_place(before: ProcessStacks, after: ProcessStacks) -> bool:
    """The host thread is seen in both dumps, in different places."""
    first, second = host_thread(before), host_thread(after)
    return first is not None and second is not None and not same_place(first, second)


def host_waits(stacks: ProcessStacks) -> bool:
    """The host thread is seen in a wait, also in one that spins."""
    host = host_thread(stacks)
    return host is not None and bool(wait_frames(host))


def waits_for_process(stacks: ProcessStacks) -> bool:
    """The host thread waits, and does so through something that starts processes and waits for them."""
    host = host_thread(stacks)
    if host is None or not wait_frames(host):
        return False
    return any(_WAITS_FOR_A_PROCESS.search(frame.filename) for frame in host.frames[:_NEAR_FRAMES])


def moved_between(before: Mapping[Seat, Snapshot], after: Mapping[Seat, Snapshot]) -> frozenset[Seat]:
    """Those whose ledgers show progress; of one that is not in both nothing is claimed."""
    both = before.keys() & after.keys()
    return frozenset(seat for seat in both if before[seat].watermark() != after[seat].watermark())


def streams_unknown(snapshot: Snapshot) -> bool:
    """No completing side has looked for a while: the monitor cannot run, so the host is the suspect."""
    newest_ns = max((stream.stamp_ns for stream in snapshot.streams.values()), default=snapshot.taken_ns)
    return snapshot.taken_ns - newest_ns > STALE_STAMP_S * 1e9
