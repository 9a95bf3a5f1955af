"""What the kernel says a process's host thread does, without touching it: time used, wake-ups, its system call.

The host thread is the main thread, whose number is the process's. Reading ``/proc`` neither stops nor slows the
process. Standard library only; Linux only.
"""

from __future__ import annotations

import os
import platform
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from harness.process_control import ProcessId

# Numbers of the calls in which a thread waits (asm/unistd.h of each architecture).
_CALLS: dict[str, dict[int, str]] = {
    "x86_64": {
        0: "read", 1: "write", 7: "poll", 19: "read", 20: "writev", 23: "select", 24: "sched_yield",
        35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto", 45: "recvfrom", 46: "sendmsg", 47: "recvmsg",
        61: "wait4", 73: "flock", 74: "fsync", 202: "futex", 219: "restart_syscall", 230: "clock_nanosleep",
        232: "epoll_wait", 247: "waitid", 270: "select", 271: "poll", 281: "epoll_wait", 288: "accept",
        441: "epoll_wait", 449: "futex",
    },
    "aarch64": {
        22: "epoll_wait", 32: "flock", 63: "read", 64: "write", 65: "read", 66: "writev", 72: "select", 73: "poll",
        82: "fsync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 124: "sched_yield",
        128: "restart_syscall", 202: "accept", 203: "connect", 206: "sendto", 207: "recvfrom", 211: "sendmsg",
        212: "recvmsg", 242: "accept", 260: "wait4", 441: "epoll_wait", 449: "futex",
    },
}  # fmt: skip
_RESTARTED = "restart_syscall"
_PLACES = {"nanosleep": "clock_nanosleep", "futex": "futex", "epoll": "epoll_wait", "ep_poll": "epoll_wait",
           "poll": "poll", "select": "select"}  # fmt: skip
_NEAR_S = 0.1
"""Where only ticks of 10 ms are counted, less would be noise."""
_WAKES = re.compile(r"^voluntary_ctxt_switches:\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Activity:
    """One reading. ``runnable_s``: how long the host thread has run or waited for a processor so far, which does
    not depend on the machine's load; ``wakes``: how often it has blocked and been woken. ``call``: the system call
    that it is in, by name, ``running`` for none and ``call <number>`` for one that is not known here; None where
    the kernel does not tell us (it asks for the right to trace)."""

    taken_ns: int
    runnable_s: float
    wakes: int
    call: str | None


def read_activity(process: ProcessId) -> Activity | None:
    """None when the process is gone."""
    task = Path("/proc") / str(process.pid) / "task" / str(process.pid)
    taken_ns = time.monotonic_ns()
    try:
        stat = (task / "stat").read_bytes()
        status = (task / "status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = _WAKES.search(status)
    call = None
    with suppress(OSError):
        call = _call((task / "syscall").read_text())
        if call == _RESTARTED:
            # What it waits in went on after a tracer stopped it; only the kernel's function still says what it is.
            call = _place((task / "wchan").read_text())
    return Activity(
        taken_ns=taken_ns,
        runnable_s=_runnable_s(task, stat),
        wakes=int(found[1]) if found is not None else 0,
        call=call,
    )


def busy_share(before: Activity, after: Activity) -> float | None:
    """How much of the time between two readings the host thread wanted to run; None when they are too near."""
    passed_s = _passed_s(before, after)
    return None if passed_s < _NEAR_S else min(1.0, (after.runnable_s - before.runnable_s) / passed_s)


def wakes_per_s(before: Activity, after: Activity) -> float | None:
    """How often the host thread blocked and woke a second; None when the readings are too near to tell."""
    passed_s = _passed_s(before, after)
    return None if passed_s < _NEAR_S else (after.wakes - before.wakes) / passed_s


def _runnable_s(task: Path, stat: bytes) -> float:
    with suppress(OSError, ValueError, IndexError):
        # Running and waiting to run, in nanoseconds (Documentation/scheduler/sched-stats.rst).
        ran_ns, waited_ns = (task / "schedstat").read_text().split()[:2]
        return (int(ran_ns) + int(waited_ns)) / 1e9
    fields = stat[stat.rindex(b")") + 2 :].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _passed_s(before: Activity, after: Activity) -> float:
    return (after.taken_ns - before.taken_ns) / 1e9


def _call(text: str) -> str | None:
    word = text.split(maxsplit=1)[0] if text.strip() else ""
    if word == "running":
        return "running"
    if not word.lstrip("-").isdecimal():
        return None
    # -1: it is in the kernel, but for no call (an interrupt, a stop).
    number = int(word)
    return _CALLS.get(platform.machine(), {}).get(number, f"call {number}") if number >= 0 else None


def _place(function: str) -> str | None:
    return next((call for part, call in _PLACES.items() if part in function), None)
