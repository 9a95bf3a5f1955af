"""One process as the kernel's table shows it, recognised even when its number was given to another.

What a process looks like as evidence; reading ``/proc`` and signalling are ``process_control.py``.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.process_control import ProcessId, find, identify, read_stat, send
from harness.seats import Seat, seat_stem

_STATES = {"R": "R", "D": "D", "T": "T", "t": "T", "Z": "Z", "X": "dead", "x": "dead"}


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    """``rank`` is the seat. ``exit`` is None when unknown.

    ``state``: R running, S sleeping, D in an uninterruptible wait, T stopped or traced, Z zombie, ``dead``
    (gone, or its number belongs to another process now), ``missing`` (no number was known).
    """

    rank: Seat | None
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
            "rank": self.rank if isinstance(self.rank, int) else None,
            "name": None if self.rank is None else seat_stem(self.rank),
            "pid": self.pid,
            "state": self.state,
            "start_time_ticks": self.start_time_ticks,
            "rss_bytes": self.rss_bytes,
            "exit": self.exit,
        }


def read_process(pid: int, start_time_ticks: int, rank: Seat | None = None) -> ProcessEntry:
    """The process that had ``pid`` and started at ``start_time_ticks`` (0: whatever has that number now)."""
    if pid <= 0:
        return ProcessEntry(rank, pid, "missing", start_time_ticks, 0, None)
    stat = read_stat(pid)
    if stat is None or start_time_ticks not in (0, stat.start_time_ticks):
        return ProcessEntry(rank, pid, "dead", start_time_ticks, 0, None)
    state = _STATES.get(stat.state, "S")
    rss_bytes = stat.rss_pages * os.sysconf("SC_PAGE_SIZE")
    exit_words = _exit(stat.exit_code) if state == "Z" else None
    return ProcessEntry(rank, pid, state, stat.start_time_ticks, rss_bytes, exit_words)


def _exit(code: int) -> str | None:
    """The words for field 52. Zero is unknown: the kernel also says it to those who may not look."""
    if code == 0:
        return None
    if code & 0x7F:
        return f"signal {signal.Signals(code & 0x7F).name}"
    return f"status {code >> 8}"


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """The process has a handler of its own for the signal, so that sending it does not end it."""
    return _in_mask(Path(f"/proc/{pid}/status"), ("SigCgt:",), number)


def stop_is_pending(process: ProcessId) -> bool:
    """A SIGSTOP was sent to the process or to one of its threads, and none has taken it yet."""
    if find(process) is None:
        return False
    folder = Path(f"/proc/{process.pid}")
    fields = ("SigPnd:", "ShdPnd:")
    try:
        threads = list((folder / "task").iterdir())
    except OSError:  # gone meanwhile
        return False
    return any(_in_mask(thread / "status", fields, signal.SIGSTOP) for thread in threads)


def _in_mask(status: Path, fields: tuple[str, ...], number: signal.Signals) -> bool:
    """One of the masks in a ``status`` of ``/proc`` holds the signal. False for a process that is gone."""
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith(fields)]
    return any(mask >> (number - 1) & 1 for mask in masks)


def holds_open(pid: int, path: Path) -> bool:
    """The process has the file open; taken for granted where its files are not ours to see."""
    try:
        wanted = path.stat()
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # closed meanwhile
                found = entry.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
    except PermissionError:
        return True
    except OSError:
        return False
    return False


def send_signal(pid: int, start_time_ticks: int, number: signal.Signals) -> str | None:
    """Sends a signal to exactly that process. Returns None, or why it was not sent."""
    process = ProcessId(pid, start_time_ticks) if start_time_ticks else identify(pid)
    try:
        sent = process is not None and send(process, number)
    except OSError as error:
        return f"cannot send {number.name} to process {pid} ({error.strerror})"
    return None if sent else f"process {pid} is gone"
