"""One process as the kernel's table shows it, recognised even when its number was given to another.

Linux's ``/proc`` only. Signals go through a descriptor of the process, never to a bare number.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STATES = {"R": "R", "D": "D", "T": "T", "t": "T", "Z": "Z", "X": "dead", "x": "dead"}


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """``exit`` is None when unknown.

    ``state``: R running, S sleeping, D in an uninterruptible wait, T stopped or traced, Z zombie, ``dead``
    (gone, or its number belongs to another process now), ``missing`` (no number was known).
    """

    rank: int | None
    pid: int
    state: str
    start_time_ticks: int
    rss_bytes: int
    exit: str | None

    @property
    def alive(self) -> bool:
        return self.state in ("R", "S", "D", "T")

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "pid": self.pid,
            "state": self.state,
            "start_time_ticks": self.start_time_ticks,
            "rss_bytes": self.rss_bytes,
            "exit": self.exit,
        }


def read_process(pid: int, start_time_ticks: int, rank: int | None = None) -> ProcessEntry:
    """The process that had ``pid`` and started at ``start_time_ticks`` (0: whatever has that number now)."""
    if pid <= 0:
        return ProcessEntry(rank, pid, "missing", start_time_ticks, 0, None)
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return ProcessEntry(rank, pid, "dead", start_time_ticks, 0, None)
    # proc(5): field 2, the command in brackets, may hold anything; fields[0] is field 3.
    fields = stat[stat.rindex(b")") + 2 :].split()
    started = int(fields[19])
    if start_time_ticks not in (0, started):
        return ProcessEntry(rank, pid, "dead", start_time_ticks, 0, None)
    state = _STATES.get(fields[0].decode(), "S")
    rss_bytes = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return ProcessEntry(
        rank, pid, state, started, rss_bytes, _exit(int(fields[49])) if state == "Z" else None
    )


def _exit(code: int) -> str | None:
    """The words for field 52. Zero is unknown: the kernel also says it to those who may not look."""
    if code == 0:
        return None
    if code & 0x7F:
        return f"signal {signal.Signals(code & 0x7F).name}"
    return f"status {code >> 8}"


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """The process has a handler of its own for the signal, so that sending it does not end it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


def send_signal(pid: int, start_time_ticks: int, number: signal.Signals) -> str | None:
    """Sends a signal to exactly that process. Returns None, or why it was not sent."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError as error:
        return f"cannot reach process {pid} ({error.strerror})"
    try:
        # The descriptor holds the process; what it had as start time is checked after that.
        if not read_process(pid, start_time_ticks).alive:
            return f"process {pid} is gone"
        signal.pidfd_send_signal(descriptor, number)
    except OSError as error:
        return f"cannot send {number.name} to process {pid} ({error.strerror})"
    finally:
        os.close(descriptor)
    return None
