"""The processes of a running engine by seat: server, ranks, controller, detokenizer, engine core.

They are found as the descendants of given pids and known by their titles and the server's flags
(``process_titles.py``), in other programs by torchrun's environment. `arrange` is pure: rows of the process table
in, seats out. Not here: what a process does (``stack_places.py``), and processes that lost their parents.

Standard library only; Linux only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.process_control import ProcessId, everything, read_stat
from harness.process_titles import (
    EngineName,
    Titled,
    expected_ranks,
    global_ranks,
    is_helper,
    read_flags,
    role_of_zombie,
    seat_of_title,
    served_by,
)
from harness.seats import Seat, in_order, seat_stem

__all__ = [
    "EngineName",
    "Member",
    "Row",
    "Titled",
    "Tree",
    "arrange",
    "read_tree",
    "rows_under",
    "seat_of_title",
]

VARIABLES = ("RANK", "CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""What is read of an environment. A program that overwrites its title may have destroyed it."""

_SEAT_ORDER = ("server", "controller", "coordinator", "engine_core", "detokenizer", "rank")
_DEVICE_NODE = re.compile(r"^/dev/(nvidia|davinci)(\d+)$")
_DEVICE_TYPES = {"nvidia": "cuda", "davinci": "npu"}
_VISIBLE = (("CUDA_VISIBLE_DEVICES", "cuda"), ("ASCEND_RT_VISIBLE_DEVICES", "npu"))
_NAME_CHARACTERS = 24


@dataclass(frozen=True, slots=True)
class Row:
    """One process as ``/proc`` shows it. ``state``: the kernel's letter. ``device_nodes``: ``/dev/nvidia<N>`` and
    ``/dev/davinci<N>`` that it holds open. What may not be read is empty."""

    process: ProcessId
    parent: int
    state: str
    command: tuple[str, ...]
    comm: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    device_nodes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The command line in one line, or the kernel's name of a process without one (a zombie)."""
        return " ".join(self.command) or self.comm


@dataclass(frozen=True, slots=True)
class Member:
    """``role``: rank, server, controller, detokenizer, engine_core, coordinator, other or helper. ``device``:
    ``cuda:3``, ``npu:0``, ``cpu``; None where it cannot be told."""

    seat: Seat
    role: str
    rank: int | None
    process: ProcessId
    parent: int
    title: str
    device: str | None


@dataclass(frozen=True, slots=True)
class Tree:
    """``members`` in seat order; ``helpers`` (trackers, compilers, shells, processes without a title yet) take no
    part. ``expected_ranks``: by the server's flags, where all of them are on this node; None: cannot be told."""

    engine: EngineName
    members: tuple[Member, ...]
    helpers: tuple[Member, ...]
    expected_ranks: tuple[int, ...] | None
    notes: tuple[str, ...]

    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that the server was asked for and that no process is; none before the first has its title."""
        present = {member.rank for member in self.members if member.rank is not None}
        return tuple(rank for rank in self.expected_ranks or () if rank not in present) if present else ()


def read_tree(*pids: int, without: Collection[int] = ()) -> Tree:
    """The engine under ``pids``. Raises ProcessLookupError, with the pid, where there is no such process."""
    return arrange(rows_under(*pids, without=without))


def rows_under(*pids: int, without: Collection[int] = ()) -> list[Row]:
    """``pids`` and all their descendants, zombies too, but those in ``without`` and what is below them. Raises
    ProcessLookupError."""
    stats = {stat.pid: stat for stat in everything()}
    for pid in pids:
        if pid not in stats:
            raise ProcessLookupError(f"no process {pid}")
    found: dict[int, ProcessId] = {}
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found and pid not in without:
            found[pid] = stats[pid].id
            waiting += [child.pid for child in stats.values() if child.parent == pid]
    return [row for row in map(_row, sorted(found.values())) if row is not None]


def arrange(rows: Sequence[Row]) -> Tree:
    """Seats and roles of the processes of one tree. With two servers in it the second's seats have other names."""
    ordered = sorted(rows, key=lambda row: (row.process.start_time_ticks, row.process.pid))
    titled = {row.process: named for row in ordered if (named := seat_of_title(row.title)) is not None}
    engine = _engine(ordered, titled)
    server = next((row for row in ordered if engine != "other" and served_by(row.title) == engine), None)
    flags = read_flags(engine, server.command) if server is not None else {}
    ranks = _ranks(engine, ordered, titled, flags)
    roles = {row.process: _role(row, titled.get(row.process), engine, ranks) for row in ordered}
    notes: list[str] = []
    members: dict[Seat, Member] = {}
    for row in sorted(ordered, key=lambda row: _seat_order(roles[row.process])):
        role, rank = roles[row.process], ranks.get(row.process)
        if role == "helper":
            continue
        named = titled.get(row.process)
        wanted: Seat = rank if rank is not None else _name(row, role, named)
        seat = _free(wanted, row, members)
        if isinstance(wanted, int) and seat != wanted:
            notes.append(f"two processes are rank {wanted}; the second is {seat}. Give one server at a time")
        device = None if rank is None else _device(row, sorted(ranks.values()).index(rank), flags)
        members[seat] = Member(seat, role, rank, row.process, row.parent, row.title, device)
    if engine != "other" and server is None and "server" not in roles.values():
        notes.append(f"no server among these processes: give the pid of the {engine} server to see all of it")
    if flags.get("nodes", "1") != "1":
        notes.append(f"the server spans {flags['nodes']} nodes, of which only this one is seen")
    helpers = [row for row in ordered if roles[row.process] == "helper"]
    expected = expected_ranks(engine, flags)
    for row, seat in _zombies(helpers, members, expected):
        role, rank = ("rank", seat) if isinstance(seat, int) else (seat, None)
        members[seat] = Member(seat, role, rank, row.process, row.parent, row.title, None)
        helpers.remove(row)
    return Tree(
        engine=engine,
        members=tuple(members[seat] for seat in in_order(members)),
        helpers=tuple(
            Member(_own_name(row), "helper", None, row.process, row.parent, row.title, None)
            for row in helpers
        ),
        expected_ranks=expected,
        notes=tuple(dict.fromkeys(notes)),
    )


# Reading /proc --------------------------------------------------------------------------------------------


def _row(process: ProcessId) -> Row | None:
    """None when it has gone meanwhile."""
    stat = read_stat(process.pid)
    if stat is None or stat.start_time_ticks != process.start_time_ticks:
        return None
    folder = Path("/proc") / str(process.pid)
    command, comm, environment = b"", "", b""
    with suppress(OSError):
        command = (folder / "cmdline").read_bytes()
    with suppress(OSError):
        comm = (folder / "comm").read_text(errors="replace").strip()
    with suppress(OSError):
        environment = (folder / "environ").read_bytes()
    words = command.rstrip(b"\0 ").split(b"\0") if command else []
    pairs = (entry.decode(errors="replace").partition("=") for entry in environment.split(b"\0"))
    return Row(
        process=process,
        parent=stat.parent,
        state=stat.state,
        command=tuple(word.decode(errors="replace") for word in words),
        comm=comm,
        environment={name: value for name, _, value in pairs if name in VARIABLES},
        device_nodes=_device_nodes(folder / "fd"),
    )


def _device_nodes(folder: Path) -> tuple[str, ...]:
    found = set()
    with suppress(OSError):
        for entry in folder.iterdir():
            with suppress(OSError):
                found.add(str(entry.readlink()))
    return tuple(sorted(target for target in found if _DEVICE_NODE.match(target)))


# Who is who -----------------------------------------------------------------------------------------------


def _engine(rows: Sequence[Row], titled: Mapping[ProcessId, Titled]) -> EngineName:
    named = next(iter(titled.values()), None)
    if named is not None:
        return named.engine
    return next((engine for row in rows if (engine := served_by(row.title)) is not None), "other")


def _ranks(
    engine: EngineName,
    rows: Sequence[Row],
    titled: Mapping[ProcessId, Titled],
    flags: Mapping[str, str],
) -> dict[ProcessId, int]:
    """Global ranks by process."""
    if engine == "other":
        given = {
            row.process: row.environment.get("RANK", "") for row in rows if not is_helper(row.title, engine)
        }
        # A launcher may carry its own job's rank, which its children inherit until they get theirs.
        shared = len(given) > 1 and len(set(given.values())) == 1
        return {process: int(text) for process, text in given.items() if text.isdecimal() and not shared}
    workers = [process for process, named in titled.items() if named.role == "rank"]
    if engine == "vllm" and not workers:
        # Without worker processes the engine core runs the model itself.
        workers = [process for process, named in titled.items() if named.role == "engine_core"]
    numbers = global_ranks(engine, [titled[process].places for process in workers], flags)
    return dict(zip(workers, numbers, strict=True))


def _role(row: Row, named: Titled | None, engine: EngineName, ranks: Mapping[ProcessId, int]) -> str:
    if row.process in ranks:
        return "rank"
    if named is not None:
        return named.role
    if engine == "other":
        return "helper" if is_helper(row.title, engine) else "other"
    return "server" if served_by(row.title) == engine else "helper"


def _seat_order(role: str) -> int:
    return _SEAT_ORDER.index(role) if role in _SEAT_ORDER else len(_SEAT_ORDER)


def _name(row: Row, role: str, named: Titled | None) -> str:
    if named is not None:
        return named.name
    return role if role == "server" else _own_name(row)


def _own_name(row: Row) -> str:
    """``python-4711``: of a process that neither engine knows."""
    program = Path(row.command[0]).name if row.command else row.comm
    word = re.sub(r"[^A-Za-z0-9_.]+", "_", program)[:_NAME_CHARACTERS].strip("_.")
    return f"{word or 'process'}-{row.process.pid}"


def _free(seat: Seat, row: Row, taken: Mapping[Seat, Member]) -> Seat:
    """The seat, or one that tells two processes of one place apart."""
    if seat not in taken:
        return seat
    if isinstance(seat, int):
        return f"{seat_stem(seat)}-{row.process.pid}"
    return next(name for number in range(1, len(taken) + 2) if (name := f"{seat}-{number}") not in taken)


def _zombies(
    rows: Sequence[Row], members: Mapping[Seat, Member], expected: Sequence[int] | None
) -> list[tuple[Row, Seat]]:
    """Processes that ended before anybody looked, where only one place is free that they can have had."""
    ended = [
        (row, role) for row in rows if row.state == "Z" and (role := role_of_zombie(row.comm)) is not None
    ]
    ranks = [row for row, role in ended if role == "rank"]
    free = [rank for rank in expected or () if rank not in members]
    found: list[tuple[Row, Seat]] = [(ranks[0], free[0])] if len(ranks) == len(free) == 1 else []
    for row, role in ended:
        alone = sum(other == role for _, other in ended) == 1
        if role != "rank" and alone and role not in members:
            found.append((row, role))
    return found


def _device(row: Row, local: int, flags: Mapping[str, str]) -> str | None:
    """The device node that the process alone holds open, or its place among the visible ones."""
    nodes = [match for node in row.device_nodes if (match := _DEVICE_NODE.match(node))]
    if len(nodes) == 1:
        return f"{_DEVICE_TYPES[nodes[0][1]]}:{nodes[0][2]}"
    if flags.get("device") == "cpu":
        return "cpu"
    for variable, kind in _VISIBLE:
        visible = [one.strip() for one in row.environment.get(variable, "").split(",") if one.strip()]
        if len(visible) == 1 or local < len(visible):
            return f"{kind}:{visible[0] if len(visible) == 1 else visible[local]}"
    return f"{_DEVICE_TYPES[nodes[0][1]]}:{local}" if nodes else None
