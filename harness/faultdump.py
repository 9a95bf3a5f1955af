"""Asks processes for their own Python stacks, with a signal, where no tool can read them from outside.

The process has called ``tracing.install_faulthandler``; here is the asking side. The dump needs the process's
cooperation only as far as a signal handler does: a held GIL does not hinder it, a stopped process does.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness.process_control import ProcessId
from harness.processes import handles_signal, holds_open, read_process, send_signal
from harness.seats import Seat
from harness.stacks import ProcessStacks
from harness.stacks_parse import StackParseError, parse_faulthandler

_POLL_S = 0.01
# A dump that has not grown for so long is complete: it is written in one go, inside the signal handler.
_QUIET_S = 0.1
_LIMIT_BYTES = 1 << 20
THREADS_SHOWN = 100
"""faulthandler shows the newest threads, so many at most; the main thread is the oldest (CPython, traceback.c)."""

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class DumpRequest:
    """``path`` is the file that the process appends its dumps to, None when it has none. ``seat``: as the stacks
    bear it."""

    seat: Seat
    process: ProcessId
    path: Path | None


@dataclass(slots=True)
class _Asked:
    request: DumpRequest
    path: Path
    before_bytes: int
    size_bytes: int
    since_s: float


def ask_for_dumps(
    requests: Mapping[Key, DumpRequest], *, deadline_s: float
) -> dict[Key, ProcessStacks | str]:
    """The stacks, or why there are none. ``deadline_s`` is a point of ``time.monotonic``. No two requests may name
    the same file."""
    answers: dict[Key, ProcessStacks | str] = {}
    waiting: dict[Key, _Asked] = {}
    for key, request in requests.items():
        # Whoever is asked spends time on the answer, and nobody would read it.
        asked = _ask(request) if time.monotonic() < deadline_s else "not asked, the deadline had passed"
        if isinstance(asked, str):
            answers[key] = asked
        else:
            waiting[key] = asked
    while waiting:
        late = time.monotonic() >= deadline_s
        for key, asked in tuple(waiting.items()):
            if late or _complete(asked):
                del waiting[key]
                answers[key] = _read(asked)
        if waiting:
            time.sleep(_POLL_S)
    return answers


def _ask(request: DumpRequest) -> _Asked | str:
    """Signals the process where that is safe, or says why not."""
    pid, ticks = request.process.pid, request.process.start_time_ticks
    entry = read_process(pid, ticks)
    if request.path is None:
        return "this process has no dump file"
    if entry.state == "T":
        return f"process {pid} is stopped and cannot answer a signal"
    if entry.alive and not handles_signal(pid, signal.SIGUSR2):
        return f"process {pid} has no handler for SIGUSR2, which would end it"
    if entry.alive and not holds_open(pid, request.path):
        return f"process {pid} does not write to {request.path.name}"
    size_bytes = _size_bytes(request.path)
    problem = send_signal(pid, ticks, signal.SIGUSR2)
    return problem or _Asked(request, request.path, size_bytes, size_bytes, time.monotonic())


def _complete(asked: _Asked) -> bool:
    size_bytes = _size_bytes(asked.path)
    if size_bytes != asked.size_bytes:
        asked.size_bytes = size_bytes
        asked.since_s = time.monotonic()
    return size_bytes > asked.before_bytes and time.monotonic() - asked.since_s >= _QUIET_S


def _read(asked: _Asked) -> ProcessStacks | str:
    pid = asked.request.process.pid
    if _size_bytes(asked.path) <= asked.before_bytes:
        return f"process {pid} did not answer SIGUSR2 in time"
    try:
        with asked.path.open("rb") as file:
            file.seek(asked.before_bytes)
            text = file.read(_LIMIT_BYTES).decode("utf-8", "replace")
        return parse_faulthandler(text, pid=pid, rank=asked.request.seat)
    except OSError as error:
        return f"{asked.path}: {error.strerror}"
    except StackParseError as error:
        return str(error)


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
