"""Which process of a foreign engine is what: all processes of a server, and who sits where.

A server's processes are found by the mark in their environment and by descent, so that what was orphaned, and
what dropped its environment, are both found. Who sits where is told by the probe's status files where there are
any, else by process titles.

Not here: starting and ending (``engine_process.py``), what titles mean (the dialects).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import process_control
from harness.process_control import ProcessId, ProcessStat
from harness.seats import Seat
from serving.targets.dialect import Seating

MARK = "HANGRIG_ENGINE"
"""Environment variable that all processes of one server carry, with a value of its own."""
PROBE_STATUS = "*.probe.json"
_TRACKER = "multiprocessing.resource_tracker"


@dataclass(frozen=True, slots=True)
class TreeProcess:
    """``title``: its command line, or what it calls itself now."""

    id: ProcessId
    parent: int
    state: str
    title: str

    @property
    def is_tracker(self) -> bool:
        """Python's own helper that removes shared memory of processes that died; it ends by itself after them."""
        return _TRACKER in self.title


@dataclass(frozen=True, slots=True)
class Seated:
    """One process whose place is known. ``status``: what its probe says of itself; empty without a probe."""

    seat: Seat
    role: str
    id: ProcessId
    status: Mapping[str, Any] = field(default_factory=dict)


def find(mark: str, adopter: int | None = None) -> list[TreeProcess]:
    """The living processes of the server marked ``mark``, in order of their start.

    ``adopter``: the process that started the server and adopts its orphans; its descendants in sessions other
    than its own belong to the server too.
    """
    found = set(process_control.marked_with(MARK, mark))
    if adopter is not None:
        own = process_control.read_stat(adopter)
        children = (process_control.find(child) for child in process_control.children_of(adopter))
        found.update(stat.id for stat in children if stat and own and stat.session != own.session)
    found.update(process_control.children_of(*(process.pid for process in found)))
    stats = (process_control.find(process) for process in found if process.pid != os.getpid())
    known = [_known(stat) for stat in stats if stat is not None and not stat.gone]
    return sorted(known, key=lambda process: (process.id.start_time_ticks, process.id.pid))


def seats(
    processes: Iterable[TreeProcess],
    server: ProcessId,
    statuses: Iterable[Mapping[str, Any]],
    seating: Callable[[str], Seating | None],
) -> list[Seated]:
    """Who sits where. The probe's word goes before a title; of two with one seat the older process has it."""
    processes = list(processes)
    living = {process.id for process in processes}
    told: dict[ProcessId, Mapping[str, Any]] = {}
    for status in statuses:
        identity = ProcessId(int(status.get("pid", 0)), int(status.get("start_time_ticks", 0)))
        if identity in living and status.get("seat") is not None:
            told[identity] = status
    found: dict[Seat, Seated] = {}
    for process in sorted(processes, key=lambda process: process.id not in told):
        seated = _seated(process, server, told.get(process.id), seating)
        if seated is not None:
            found.setdefault(seated.seat, seated)
    return list(found.values())


def _seated(
    process: TreeProcess,
    server: ProcessId,
    status: Mapping[str, Any] | None,
    seating: Callable[[str], Seating | None],
) -> Seated | None:
    if status is not None:
        seat: Seat = status["seat"]
        role = status.get("role") or ("rank" if isinstance(seat, int) else seat)
        return Seated(seat, str(role), process.id, status)
    if process.id == server:
        return Seated("server", "server", process.id)
    named = seating(process.title)
    return None if named is None else Seated(named.seat, named.role, process.id)


def read_statuses(folder: Path) -> list[dict[str, Any]]:
    """The probe's status files in ``folder``. One that cannot be read is left out: it is replaced as a whole, so
    only its writer's death or a full disk can have damaged it."""
    found = []
    for path in sorted(folder.glob(PROBE_STATUS)):
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


def title(pid: int) -> str:
    """The command line as the kernel shows it, blanks between the words; empty for one that is gone."""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return " ".join(raw.replace(b"\0", b" ").decode(errors="replace").split())


def _known(stat: ProcessStat) -> TreeProcess:
    return TreeProcess(stat.id, stat.parent, stat.state, title(stat.pid))
