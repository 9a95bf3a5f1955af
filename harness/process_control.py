"""Processes of this machine by pid *and* start time: who is alive, whose children are they, end them.

A pid alone may be reused; with the start time (field 22 of ``/proc/PID/stat``, clock ticks since boot) it
names one process for ever. Signals go through a pidfd, so none reaches a stranger. What a process looks
like as evidence is `harness.processes`; nothing here knows Ray, ranks or agents. Standard library only;
Linux only.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_GONE_STATES = ("Z", "X", "x")


@dataclass(frozen=True, slots=True, order=True)
class ProcessId:
    """One process, for ever."""

    pid: int
    start_time_ticks: int


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """What ``/proc/PID/stat`` said at one moment. ``state`` is the kernel's letter (R, S, D, T, Z, ...)."""

    pid: int
    state: str
    parent: int
    session: int
    start_time_ticks: int
    rss_pages: int
    exit_code: int
    """As ``waitpid`` gives it, of a zombie; 0 also where the kernel does not tell."""
    cpu_ticks: int = 0
    """Processor time that it has had, in ``SC_CLK_TCK``."""
    ended_children_cpu_ticks: int = 0
    """The same of its children that have ended and were collected, and of theirs."""

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start_time_ticks)

    @property
    def cpu_s(self) -> float:
        return self.cpu_ticks / os.sysconf("SC_CLK_TCK")

    @property
    def gone(self) -> bool:
        """A zombie has ended; only its parent has not asked yet."""
        return self.state in _GONE_STATES


def read_stat(pid: int) -> ProcessStat | None:
    """None when there is no such process."""
    return _read_stat(pid, _PROC / str(pid) / "stat")


def read_thread(pid: int, thread: int) -> ProcessStat | None:
    """The same of one thread: its own state and processor time. None when the process has no such thread."""
    return _read_stat(thread, _PROC / str(pid) / "task" / str(thread) / "stat")


def _read_stat(pid: int, path: Path) -> ProcessStat | None:
    try:
        text = path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command name, field 2, may hold blanks and brackets; everything after the last bracket is regular.
    fields = text[text.rindex(b")") + 2 :].split()
    return ProcessStat(
        pid=pid,
        state=fields[0].decode(),
        parent=int(fields[1]),
        session=int(fields[3]),
        start_time_ticks=int(fields[19]),
        rss_pages=int(fields[21]),
        exit_code=int(fields[49]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        ended_children_cpu_ticks=int(fields[13]) + int(fields[14]),
    )


def start_time_ticks(pid: int) -> int | None:
    """Field 22 of ``/proc/PID/stat``, None when there is no such process."""
    stat = read_stat(pid)
    return None if stat is None else stat.start_time_ticks


def identify(pid: int) -> ProcessId | None:
    stat = read_stat(pid)
    return None if stat is None else stat.id


def myself() -> ProcessId:
    own = identify(os.getpid())
    if own is None:
        raise RuntimeError(
            f"/proc does not show this process ({os.getpid()}); mount /proc of this pid namespace"
        )
    return own


def find(process: ProcessId) -> ProcessStat | None:
    """None when the process is gone or its pid is another's now. A zombie is still found."""
    stat = read_stat(process.pid)
    return stat if stat is not None and stat.start_time_ticks == process.start_time_ticks else None


def alive(process: ProcessId) -> bool:
    """It is there and has not ended; a hung or a stopped one is alive."""
    stat = find(process)
    return stat is not None and not stat.gone


def everything() -> list[ProcessStat]:
    """All processes that ``/proc`` shows."""
    stats = (read_stat(int(entry.name)) for entry in _PROC.iterdir() if entry.name.isdecimal())
    return [stat for stat in stats if stat is not None]


def children_of(*pids: int) -> list[ProcessId]:
    """All living descendants of ``pids``, without themselves. Those that init adopted are not found."""
    by_parent: dict[int, list[ProcessStat]] = {}
    for stat in everything():
        by_parent.setdefault(stat.parent, []).append(stat)
    found: dict[int, ProcessStat] = {}
    waiting = list(pids)
    while waiting:
        for stat in by_parent.get(waiting.pop(), ()):
            if stat.pid not in found:
                found[stat.pid] = stat
                waiting.append(stat.pid)
    return [stat.id for stat in found.values() if not stat.gone and stat.pid not in pids]


def marked_with(name: str, value: str) -> list[ProcessId]:
    """Living processes that were started with ``name=value`` in their environment, as far as we may look.

    An environment is inherited by children, however they were orphaned, so a mark finds what a walk over
    parents loses. A program that overwrites its title may destroy it (setproctitle does, unless SPT_NOENV is
    set).
    """
    mark = f"{name}={value}".encode()
    found = []
    for stat in everything():
        try:
            environment = (_PROC / str(stat.pid) / "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's: not ours
            continue
        if mark in environment.split(b"\0") and not stat.gone:
            found.append(stat.id)
    return sorted(found)


def send(process: ProcessId, number: signal.Signals) -> bool:
    """Whether the process was there to get the signal. Raises PermissionError for another user's process."""
    descriptor = _open(process)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Waits until all have ended; returns those that have not within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    watched: dict[int, ProcessId] = {}
    try:
        for process in set(processes):
            descriptor = _open(process)
            if descriptor is not None:
                watched[descriptor] = process
                poller.register(descriptor, select.POLLIN)
        while watched:
            remaining_s = deadline - time.monotonic()
            for descriptor, _ in poller.poll(max(0, round(remaining_s * 1000))):
                poller.unregister(descriptor)
                os.close(descriptor)
                del watched[descriptor]
            if remaining_s <= 0:
                break
        return sorted(watched.values())
    finally:
        for descriptor in watched:
            os.close(descriptor)


def end(
    processes: Iterable[ProcessId], deadline_s: float, *, grace_s: float | None = None
) -> list[ProcessId]:
    """SIGTERM, then SIGKILL for what is not gone after ``grace_s``; returns what lives after ``deadline_s``.

    ``grace_s`` is half of the deadline when not given; 0 kills at once. A stopped process is continued, or it
    could not follow a SIGTERM; SIGKILL ends it stopped or not. Processes of others are left and returned.
    """
    targets = sorted(set(processes))
    started = time.monotonic()
    grace_s = deadline_s / 2 if grace_s is None else min(grace_s, deadline_s)
    if grace_s > 0:
        for process in targets:
            _send_if_allowed(process, signal.SIGTERM)
            _send_if_allowed(process, signal.SIGCONT)
        targets = wait_gone(targets, grace_s)
    for process in targets:
        _send_if_allowed(process, signal.SIGKILL)
    return wait_gone(targets, max(0.0, started + deadline_s - time.monotonic()))


def _send_if_allowed(process: ProcessId, number: signal.Signals) -> None:
    # What may not be signalled is not lost: it is still alive at the deadline and is reported.
    with suppress(PermissionError):
        send(process, number)


def _open(process: ProcessId) -> int | None:
    """A pidfd of exactly this process, None when it is gone. A zombie counts as gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    if not alive(process):
        os.close(descriptor)
        return None
    return descriptor
