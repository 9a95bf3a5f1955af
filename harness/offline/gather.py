"""Dumps put into samples, by seat. Pure.

The same process twice makes two samples: in two folders (``sample-0`` and ``sample-1``, ``before`` and ``after``,
any names), in two files of one folder, or twice in one text. Folders that only tell nodes or kinds of dumps apart
make no samples. Samples are in the order of the folders' names, numbers by value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from harness.ledger_snapshot import Snapshot
from harness.offline.flight_recorder import FlightDump
from harness.offline.recognise import DumpsError, Recognised
from harness.offline.seating import Claim, claim_of, rank_of_name, seats_of, stem_of
from harness.offline.tables import TableRow
from harness.process_titles import (
    EngineName,
    expected_ranks,
    read_flags,
    role_of_zombie,
    seat_of_title,
    served_by,
)
from harness.seats import Seat, in_order, seat_of
from harness.stacks import ProcessStacks

_FIRST = ("before", "pre", "first", "early", "earlier", "old", "start", "begin")
_LAST = ("after", "post", "second", "late", "later", "new", "end", "last")
_SAMPLE_NAME = re.compile(rf"(?:[a-z]{{0,8}}[-_ ]?)?[\d:.TZ_-]+|{'|'.join((*_FIRST, *_LAST))}", re.IGNORECASE)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sighting(Generic[T]):
    """One piece about one seat, before it is known which sample it is of."""

    seat: Seat
    kind: str
    path: str
    content: T


@dataclass(frozen=True, slots=True)
class At(Generic[T]):
    """A piece and the file that holds it."""

    content: T
    path: str


@dataclass(slots=True)
class Sample:
    """``name``: the folder's, empty where nothing tells samples apart."""

    name: str = ""
    stacks: dict[Seat, At[ProcessStacks]] = field(default_factory=dict)
    native: dict[Seat, At[ProcessStacks]] = field(default_factory=dict)
    ledgers: dict[Seat, At[Snapshot]] = field(default_factory=dict)
    flights: dict[Seat, At[FlightDump]] = field(default_factory=dict)
    states: dict[Seat, At[TableRow]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Process:
    """``device`` None: not known."""

    seat: Seat
    role: str
    pid: int
    title: str
    device: str | None = None
    node: str = ""


@dataclass(frozen=True, slots=True)
class Gathered:
    """``expected``: ranks that there should be, by the server's flags, by recorders or ledgers, or by holes between
    the numbers. ``refused``: seats whose dump failed because the process is stopped, with the file. ``reason`` and
    ``went_on``: why a capture of ours was made, and who went on after all; None: nobody is known to."""

    engine: EngineName
    processes: Mapping[Seat, Process]
    samples: tuple[Sample, ...]
    decisions: Mapping[int, At[tuple[Mapping[str, Any], ...]]]
    expected: tuple[int, ...]
    refused: Mapping[Seat, str]
    reason: str
    went_on: tuple[Seat, ...] | None
    times: Mapping[str, float]
    unreadable: frozenset[int]
    """Ranks of which there is a recorder that could not be read: no sign that they gave none."""
    problems: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...]

    @property
    def ranks(self) -> tuple[Seat, ...]:
        return tuple(seat for seat, process in self.processes.items() if process.role == "rank")


def gather(files: Sequence[Recognised]) -> Gathered:
    """Raises DumpsError where the directory holds dumps of several servers."""
    rows = [At(row, file.path) for file in files for row in file.table]
    titles = {row.content.pid: row.content.title for row in rows if row.content.pid and row.content.title}
    flags, engine = _server(titles.values())
    sightings: list[Sighting[Any]] = []
    claims: list[Claim] = []
    for file in files:
        alone = len({found.stacks.pid for found in file.stacks}) <= 1
        for found in file.stacks:
            title = found.title or titles.get(found.stacks.pid, "")
            claims.append(claim_of(file.path, found.stacks.pid, title, found.stacks, found.seat, alone))
            kind = "native" if found.stacks.native else "stacks"
            sightings.append(Sighting("", kind, file.path, found.stacks))
    # Rows name processes, too: a dump called pid-123.json may be of one.
    listed = [
        row for row in rows if seat_of_title(row.content.title) is not None or served_by(row.content.title)
    ]
    claims += [claim_of("", row.content.pid, row.content.title, None, None, False) for row in listed]
    seats = seats_of(claims, flags)
    dumped = [replace(one, seat=seat) for one, seat in zip(sightings, seats, strict=False)]
    problems: list[tuple[str, str]] = []
    dumped += _of_ranks(files, problems)
    by_pid = {claim.pid: seat for claim, seat in zip(claims, seats, strict=True) if claim.pid}
    processes = _processes(claims, seats, dumped, titles)
    states = _states(rows, by_pid, processes)
    refused = _refused(files, by_pid)
    for seat in (*refused, *(one.seat for one in states)):
        role = "rank" if isinstance(seat, int) else str(seat).partition("-")[0]
        processes.setdefault(seat, Process(seat, role, 0, ""))
    samples = _samples([*dumped, *states])
    _one_server(dumped)
    problems += [(file.path, file.problem) for file in files if file.problem]
    manifest = next((file.document for file in files if file.kind == "manifest"), {})
    if engine == "other":
        engine = next((claim.engine for claim in claims if claim.engine != "other"), "other")
    return Gathered(
        engine=engine,
        processes={seat: processes[seat] for seat in in_order(processes)},
        samples=samples,
        decisions=_decisions(files, problems),
        expected=_expected(processes, samples, expected_ranks(engine, flags) or ()),
        refused=refused,
        reason=str(manifest.get("reason") or ""),
        went_on=_went_on(manifest, processes),
        times=_times(manifest.get("times")),
        unreadable=_unreadable(files),
        problems=tuple(problems),
        ignored=tuple(file.path for file in files if file.kind == "unknown"),
    )


# Whose ------------------------------------------------------------------------------------------------------


def _server(titles: Iterable[str]) -> tuple[dict[str, str], EngineName]:
    for title in titles:
        engine = served_by(title)
        if engine is not None:
            return read_flags(engine, title.split()), engine
    return {}, "other"


def _of_ranks(files: Sequence[Recognised], problems: list[tuple[str, str]]) -> list[Sighting[Any]]:
    """Ledgers and recorders. A copied ledger counts where no snapshot of it is there."""
    found: list[Sighting[Any]] = []
    stored = {file.rank for file in files if file.snapshot is not None and file.path.endswith(".json")}
    logs: dict[int, FlightDump] = {}
    for file in files:
        for whose, dump in file.logged.items():
            logs[whose] = dump if whose not in logs else _fuller(logs[whose], dump)
        if file.snapshot is not None:
            mapped = not file.path.endswith(".json")
            stem = stem_of(file.path)
            # The client of an engine writes a ledger, too: its name tells it from rank 0.
            seat = seat_of(stem) if stem == "client" else file.snapshot.header.rank
            if not (mapped and file.rank in stored):
                found.append(Sighting(seat, "ledger", file.path, file.snapshot))
        if file.flight is None:
            continue
        rank = file.rank if file.rank is not None else rank_of_name(file.path)
        if rank is None:
            said = "a flight recorder does not say whose it is: give the file a name with its rank, as rank_3.json"
            problems.append((file.path, said))
            continue
        if file.flight.dropped:
            problems.append((file.path, f"{file.flight.dropped} entries could not be read"))
        found.append(Sighting(rank, "flight", file.path, file.flight))
    # A recorder says all that torch's watchdog writes, and more.
    recorded = {one.seat for one in found if one.kind == "flight"}
    found += [
        Sighting(whose, "flight", dump.path, dump) for whose, dump in logs.items() if whose not in recorded
    ]
    return found


def _fuller(one: FlightDump, other: FlightDump) -> FlightDump:
    """Of two logs of one rank: a launcher keeps a copy of what its workers write."""
    return max(one, other, key=lambda dump: sum(len(g.entries) + g.enqueued for g in dump.groups.values()))


def _unreadable(files: Sequence[Recognised]) -> frozenset[int]:
    """By the names of damaged files and of pickles that were not loaded."""
    lost = (rank_of_name(file.path) for file in files if file.kind in ("damaged", "pickle"))
    return frozenset(rank for rank in lost if rank is not None)


def _decisions(
    files: Sequence[Recognised], problems: list[tuple[str, str]]
) -> dict[int, At[tuple[Mapping[str, Any], ...]]]:
    found: dict[int, At[tuple[Mapping[str, Any], ...]]] = {}
    for file in files:
        if not file.decisions:
            continue
        rank = rank_of_name(file.path)
        if rank is None:
            problems.append((file.path, "decisions of which rank? Name the file rank<N>.jsonl"))
        elif rank not in found or len(file.decisions) > len(found[rank].content):
            found[rank] = At(file.decisions, file.path)
    return found


def _processes(
    claims: Sequence[Claim], seats: Sequence[Seat], dumped: Sequence[Sighting[Any]], titles: Mapping[int, str]
) -> dict[Seat, Process]:
    found: dict[Seat, Process] = {}
    for claim, seat in zip(claims, seats, strict=True):
        before = found.get(seat)
        role = claim.role or (before.role if before is not None else "rank")
        pid = claim.pid or (before.pid if before is not None else 0)
        found[seat] = Process(seat, role, pid, titles.get(pid, ""))
    for one in dumped:
        if isinstance(one.content, Snapshot):
            header = one.content.header
            role = "rank" if isinstance(one.seat, int) else str(one.seat)
            found[one.seat] = Process(one.seat, role, header.pid, "", header.device, header.node)
        elif one.seat not in found:
            found[one.seat] = Process(one.seat, "rank", 0, "")
    return found


def _states(
    rows: Sequence[At[TableRow]], by_pid: Mapping[int, Seat], processes: Mapping[Seat, Process]
) -> list[Sighting[Any]]:
    """Rows of tables that say in which state a process is, for processes that take part."""
    pids = {process.pid: seat for seat, process in processes.items() if process.pid} | dict(by_pid)
    found: list[Sighting[Any]] = []
    lost: list[At[TableRow]] = []
    for row in rows:
        one = row.content
        if not one.state:
            continue
        seat: Seat | None = one.rank if one.rank is not None else seat_of(one.name) if one.name else None
        if seat is None:
            seat = pids.get(one.pid)
        if seat is not None:
            found.append(Sighting(seat, "state", row.path, one))
        elif one.state in "ZX" and role_of_zombie(one.title.lstrip("[")) == "rank":
            lost.append(row)
    # A process that has ended keeps only the beginning of its title, without its number.
    numbers = [seat for seat in processes if isinstance(seat, int)]
    holes = sorted(set(range(max(numbers, default=-1) + 1)) - set(numbers))
    hole = holes[0] if len(holes) == 1 else max(numbers) + 1 if numbers and not holes else None
    if len(lost) == 1 and hole is not None:
        found.append(Sighting(hole, "state", lost[0].path, lost[0].content))
    return found


def _refused(files: Sequence[Recognised], by_pid: Mapping[int, Seat]) -> dict[Seat, str]:
    found: dict[Seat, str] = {}
    for file in files:
        if file.refused_pid is None:
            continue
        seat = by_pid.get(file.refused_pid)
        if seat is None:
            claim = claim_of(file.path, file.refused_pid, "", None, None, True)
            seat = seats_of([claim], {})[0]
        found[seat] = file.path
    return found


def _expected(
    processes: Mapping[Seat, Process], samples: Sequence[Sample], asked: Sequence[int]
) -> tuple[int, ...]:
    known = {seat for seat in processes if isinstance(seat, int)}
    world = max(known, default=-1) + 1
    for sample in samples:
        for flight in sample.flights.values():
            known |= set(flight.content.world)
            known |= {rank for group in flight.content.groups.values() for rank in group.members}
        world = max([world, *(ledger.content.header.world for ledger in sample.ledgers.values())])
    return tuple(sorted(known | set(asked) | set(range(world if world <= 1 << 16 else 0))))


def _went_on(manifest: Mapping[str, Any], processes: Mapping[Seat, Process]) -> tuple[Seat, ...] | None:
    """The watchdog's suspicion fell."""
    slow = manifest.get("slow")
    if manifest.get("road") != "dissolved" or not isinstance(slow, list):
        return None
    return tuple(seat for seat in processes if any(seat == one for one in slow))


def _times(said: object) -> dict[str, float]:
    if not isinstance(said, dict):
        return {}
    return {
        name: float(value)
        for name, value in said.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


# Which sample -----------------------------------------------------------------------------------------------


def _samples(sightings: Sequence[Sighting[Any]]) -> tuple[Sample, ...]:
    telling = _telling_folders(sightings)
    placed: dict[tuple[Any, ...], Sample] = {}
    names: dict[tuple[Any, ...], str] = {}
    counted: dict[tuple[Seat, str, tuple[str, ...]], int] = {}
    everywhere: list[Sighting[Any]] = []
    ordered = sorted(sightings, key=lambda one: _natural(one.path))
    several = bool(telling)
    for one in ordered:
        folders = tuple(part for part in _folders(one.path) if part in telling)
        if several and not folders and one.kind in ("state", "flight"):
            # Beside the samples: it is of all of them, or at least of no other.
            everywhere.append(one)
            continue
        count = counted.get((one.seat, one.kind, folders), 0)
        counted[(one.seat, one.kind, folders)] = count + 1
        key = (tuple(_natural(part) for part in folders), count)
        names[key] = "/".join(folders)
        _put(placed.setdefault(key, Sample("/".join(folders))), one)
    made = [placed[key] for key in sorted(placed)]
    for one in everywhere:
        for sample in made or [placed.setdefault((), Sample())]:
            _put(sample, one)
    return tuple(made or placed.values())


def _put(sample: Sample, one: Sighting[Any]) -> None:
    tables: dict[str, dict[Seat, At[Any]]] = {
        "stacks": sample.stacks,
        "native": sample.native,
        "ledger": sample.ledgers,
        "flight": sample.flights,
        "state": sample.states,
    }
    tables[one.kind].setdefault(one.seat, At(one.content, one.path))


def _telling_folders(sightings: Sequence[Sighting[Any]]) -> set[str]:
    """Names of folders by which two pieces of one kind about one seat differ."""
    by_seat: dict[tuple[Seat, str], set[tuple[str, ...]]] = {}
    for one in sightings:
        by_seat.setdefault((one.seat, one.kind), set()).add(_folders(one.path))
    telling: set[str] = set()
    for folders in by_seat.values():
        common = set.intersection(*(set(one) for one in folders))
        telling |= {part for one in folders for part in one} - common if len(folders) > 1 else set()
    return telling


def _folders(path: str) -> tuple[str, ...]:
    return tuple(path.split("/")[:-1])


def _natural(text: str) -> tuple[Any, ...]:
    """A sort key: ``before`` first, ``after`` last, numbers by value."""
    words = re.findall(r"[a-z]+", text.lower())
    rank = 0 if any(word in _FIRST for word in words) else 2 if any(word in _LAST for word in words) else 1
    parts = re.split(r"(\d+)", text)
    return rank, tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def _one_server(dumped: Sequence[Sighting[Any]]) -> None:
    """Folders that hold other processes in the same seats are other servers, unless their names say samples."""
    pids: dict[str, dict[Seat, int]] = {}
    for one in dumped:
        if isinstance(one.content, ProcessStacks) and one.content.pid:
            top = "/".join(_folders(one.path))
            pids.setdefault(top, {})[one.seat] = one.content.pid
    for first, seats in pids.items():
        for second, others in pids.items():
            shared = seats.keys() & others.keys()
            if first < second and shared and all(seats[seat] != others[seat] for seat in shared):
                if all(_SAMPLE_NAME.fullmatch(one.rpartition("/")[2]) for one in (first, second)):
                    continue
                raise DumpsError(
                    f"dumps of several servers: {first or '.'} and {second or '.'} have the same ranks and other "
                    "processes; give one of these directories, or, of nodes of one server, name the files by the "
                    "ranks that they have in all of it"
                )
