"""The processes that ranks started themselves, as far as they are no seats of the engine: who they are, how many.

A rank may wait for a process of its own (a worker of a pool, a compiler, a shell), and then its own stack only says
that it waits. Here they are found and bounded in number; their stacks are ``dumps.py``'s.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.process_control import ProcessId, ProcessStat, everything
from harness.seats import Seat, seat_stem, seat_words

MOST_OF_ONE = 8
"""Children whose stacks are taken, for each rank."""
MOST = 64
"""For all ranks of a node together."""
_COMMAND_CHARACTERS = 200
_MAPS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ChildProcess:
    """``of``: the seat it descends from, ``parent`` the process that started it. ``wait``: the kernel's name of
    what it sleeps in, where that may be seen."""

    of: Seat
    process: ProcessId
    parent: int
    state: str
    command: str
    python: bool
    wait: str

    @property
    def words(self) -> str:
        return f"child {self.process.pid} of {seat_words(self.of)}"

    @property
    def stem(self) -> str:
        """For file names."""
        return f"{seat_stem(self.of)}.{self.process.pid}"

    def to_json(self) -> dict[str, Any]:
        return {
            "of": seat_stem(self.of),
            "pid": self.process.pid,
            "start_time_ticks": self.process.start_time_ticks,
            "parent": self.parent,
            "state": self.state,
            "command": self.command,
            "python": self.python,
            "wait": self.wait,
        }


@dataclass(frozen=True, slots=True)
class Children:
    """``left_out``: how many more there are, by seat. ``cpu_s``: processor time that all descendants of a seat have
    had, also those left out and those that have ended."""

    found: tuple[ChildProcess, ...]
    left_out: Mapping[Seat, int]
    cpu_s: Mapping[Seat, float]


def children_of_seats(seats: Mapping[Seat, ProcessId]) -> Children:
    """Living descendants of the seats that are no seats themselves, each under its nearest seat: those nearest to
    it first, then the oldest. One look at the process table for all of them."""
    found: list[ChildProcess] = []
    left_out: dict[Seat, int] = {}
    cpu_s: dict[Seat, float] = {}
    for seat, (own, descendants) in _trees(seats).items():
        ticks = own.ended_children_cpu_ticks + _ticks(descendants)
        cpu_s[seat] = ticks / os.sysconf("SC_CLK_TCK")
        kept = descendants[: min(MOST_OF_ONE, MOST - len(found))]
        if len(kept) < len(descendants):
            left_out[seat] = len(descendants) - len(kept)
        found += [_child(seat, stat) for stat in kept]
    return Children(tuple(found), left_out, cpu_s)


def processor_times(seats: Mapping[Seat, ProcessId]) -> dict[Seat, float]:
    """Seconds of processor time that each seat's process has had with all its descendants, ended ones too."""
    ticks = {
        seat: own.cpu_ticks + own.ended_children_cpu_ticks + _ticks(descendants)
        for seat, (own, descendants) in _trees(seats).items()
    }
    return {seat: count / os.sysconf("SC_CLK_TCK") for seat, count in ticks.items()}


def _trees(seats: Mapping[Seat, ProcessId]) -> dict[Seat, tuple[ProcessStat, list[ProcessStat]]]:
    """Of each seat that lives, itself and its living descendants."""
    by_parent: dict[int, list[ProcessStat]] = {}
    alive: dict[int, ProcessStat] = {}
    for stat in everything():
        alive[stat.pid] = stat
        by_parent.setdefault(stat.parent, []).append(stat)
    taken = {process.pid for process in seats.values()}
    return {
        seat: (alive[process.pid], _descendants(process.pid, by_parent, taken))
        for seat, process in seats.items()
        if process.pid in alive and alive[process.pid].id == process
    }


def _ticks(processes: list[ProcessStat]) -> int:
    return sum(stat.cpu_ticks + stat.ended_children_cpu_ticks for stat in processes)


def _descendants(pid: int, by_parent: Mapping[int, list[ProcessStat]], taken: set[int]) -> list[ProcessStat]:
    """Nearest first. Below another seat they are that seat's."""
    found: list[ProcessStat] = []
    level, seen = [pid], {pid}
    while level:
        below = [
            stat for parent in level for stat in by_parent.get(parent, ()) if stat.pid not in taken | seen
        ]
        below.sort(key=lambda stat: (stat.start_time_ticks, stat.pid))
        found += [stat for stat in below if not stat.gone]
        level = [stat.pid for stat in below]
        seen.update(level)
    return found


def _child(seat: Seat, stat: ProcessStat) -> ChildProcess:
    folder = Path(f"/proc/{stat.pid}")
    command = _read(folder / "cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    return ChildProcess(
        of=seat,
        process=stat.id,
        parent=stat.parent,
        state=stat.state,
        command=command[:_COMMAND_CHARACTERS],
        python=_runs_python(folder),
        wait=_read(folder / "wchan").decode("utf-8", "replace").strip("0\n"),
    )


def _runs_python(folder: Path) -> bool:
    """By its program, or by the library of one that embeds the interpreter."""
    try:
        program = (folder / "exe").readlink().name
    except OSError:
        return True  # not ours to see: the dump says why it is refused
    return "python" in program or b"libpython" in _read(folder / "maps")


def _read(path: Path) -> bytes:
    """At most a MiB; nothing where the kernel does not show it, or the process is gone."""
    try:
        with path.open("rb") as file:
            return file.read(_MAPS_BYTES)
    except OSError:
        return b""
