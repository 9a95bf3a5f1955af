"""PyTorch's flight recorder as values: which collectives a rank entered and finished, by process group. Pure.

Read are the JSON dumps of torch 2.4 and later (``_dump_nccl_trace_json``, ``_dump_fr_trace_json``; torch_npu's
``_dump_hccl_trace_json`` has the same form) and the pickles that torch writes itself, of the same fields. A dump
does not say whose it is. Its ring is bounded, so entries may begin late; gloo leaves every entry ``scheduled`` and
says only ``retired`` when it is done (tried with torch 2.13), and records no point-to-point calls.

Lenient: an entry that makes no sense is left out and counted. What the dumps of all ranks show together is
``harness.diagnosis_flight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from harness.offline.well_formed import rank_well_formed
from harness.stack_sites import LIBRARY

_PEERS = re.compile(r"(send|recv)\s+(\d{1,9})\s*(->|<-)\s*(\d{1,9})")
_UNNAMED = frozenset({"", "undefined"})
_COALESCED = "coalesced"


@dataclass(frozen=True, slots=True)
class FlightEntry:
    """One call of a group. ``sequence`` counts the group's collectives, or of a point-to-point call those of its
    kind. ``peers``: source and destination, of a point-to-point call, as ranks of the group. ``started`` None: the
    backend does not tell. Times are nanoseconds of the node's wall clock, 0 where unknown; ``site`` is the line
    that called it, where the dump has frames."""

    sequence: int
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    completed: bool
    started: bool | None
    created_ns: int
    site: str
    peers: tuple[int, int] | None = None
    lasted_s: float = 0.0
    """For how long it had lasted, where torch's watchdog says so."""

    @property
    def elements(self) -> int:
        """Of all inputs: what the ranks' libraries compare, whatever the shape."""
        total = 0
        for shape in self.shapes:
            product = 1
            for size in shape:
                product *= size
            total += product
        return total


@dataclass(frozen=True, slots=True)
class FlightGroup:
    """One process group as one rank knows it. ``members`` are global ranks, empty where the dump does not say;
    ``entries`` hold one entry a sequence number, oldest first. ``enqueued`` and ``completed`` are the highest
    numbers known."""

    name: str
    description: str
    members: tuple[int, ...]
    entries: tuple[FlightEntry, ...]
    p2p: tuple[FlightEntry, ...]
    enqueued: int
    completed: int
    by_number: Mapping[int, FlightEntry] = field(default_factory=dict, repr=False)

    @property
    def words(self) -> str:
        return self.name if self.description in _UNNAMED else self.description

    def at(self, sequence: int) -> FlightEntry | None:
        return self.by_number.get(sequence)

    def unfinished(self) -> int | None:
        """The first collective that was entered and is not done; None: every one is."""
        open_ = [entry.sequence for entry in self.entries if not entry.completed]
        if open_:
            return min(open_)
        seen = max((entry.sequence for entry in self.entries), default=0)
        # The ring holds nothing of the group, or was cleared: only the counters speak.
        return self.completed + 1 if self.enqueued > max(seen, self.completed) else None


@dataclass(frozen=True, slots=True)
class FlightDump:
    """One rank's recorder at one moment. ``newest_ns``: of any time in it. ``dropped``: entries not understood."""

    version: str
    path: str
    groups: Mapping[str, FlightGroup]
    ids: Mapping[str, str]
    """Group names by the number that the rank gave them."""
    world: tuple[int, ...]
    newest_ns: int
    dropped: int
    said: tuple[str, ...] = ()
    """That some collective timed out, where a log does not say which."""
    by_log: bool = False
    """Not a recorder: what torch's watchdog wrote into a log."""


def is_flight_recorder(document: object) -> bool:
    """It has a recorder's keys, and is not one of ours."""
    if not isinstance(document, dict):
        return False
    entries = document.get("entries")
    if isinstance(entries, list) and any(
        isinstance(entry, dict) and "profiling_name" in entry and "collective_seq_id" in entry
        for entry in entries[:8]
    ):
        return True
    return isinstance(document.get("pg_status"), dict) and "pg_config" in document


def parse_flight_recorder(document: Mapping[str, Any], path: str) -> FlightDump:
    """Raises ValueError for something else than a dump."""
    if not is_flight_recorder(document):
        raise ValueError(
            f"{path}: no dump of a flight recorder: no entries with profiling_name, no pg_status"
        )
    rows = document.get("entries")
    found: dict[str, list[tuple[dict[str, Any], FlightEntry]]] = {}
    described: dict[str, str] = {}
    ids: dict[str, str] = {}
    newest_ns, dropped = 0, 0
    for row in rows if isinstance(rows, list) else []:
        entry = _entry(row) if isinstance(row, dict) else None
        if entry is None:
            dropped += 1
            continue
        name, description = _group_of(row)
        described.setdefault(name, description)
        ids.setdefault(str(row.get("pg_id", "")), name)
        found.setdefault(name, []).append((row, entry))
        times = ("time_created_ns", "time_discovered_started_ns", "time_discovered_completed_ns")
        newest_ns = max(newest_ns, *(_whole(row.get(key)) for key in times))
    configured = _configured(document.get("pg_config"))
    status = _status(document.get("pg_status"))
    names = [*found, *(ids.get(number, number) for number in status if ids.get(number, number) not in found)]
    groups = {}
    for name in dict.fromkeys(names):
        counted = next(
            (counts for number, counts in status.items() if ids.get(number, number) == name), (0, 0)
        )
        members, description = _members(name, described.get(name, ""), configured)
        groups[name] = _group(name, description, members, found.get(name, []), counted)
    world = max((members for members, _ in configured.values()), key=len, default=())
    return FlightDump(str(document.get("version", "")), path, groups, ids, world, newest_ns, dropped)


def _entry(row: Mapping[str, Any]) -> FlightEntry | None:
    name = row.get("profiling_name")
    if not isinstance(name, str):
        return None
    operation = name.partition(":")[2] or name
    peers = _PEERS.search(operation)
    p2p = bool(row.get("is_p2p")) or peers is not None
    sequence = _whole(row.get("p2p_seq_id" if p2p else "collective_seq_id"), -1)
    if sequence < 0:
        return None
    state = row.get("state")
    backend = name.partition(":")[0]
    ends = None
    if peers is not None:
        first, second = int(peers[2]), int(peers[4])
        if not (rank_well_formed(first) and rank_well_formed(second)):
            return None
        ends = (first, second) if peers[3] == "->" else (second, first)
        operation = peers[1]
    tells = backend != "gloo"
    return FlightEntry(
        sequence=sequence,
        operation=operation,
        shapes=_shapes(row.get("input_sizes")),
        dtype=_dtype(row.get("input_dtypes")),
        completed=state == "completed" or row.get("retired") is True
        or _whole(row.get("time_discovered_completed_ns")) > 0,
        started=(state in ("started", "completed") or _whole(row.get("time_discovered_started_ns")) > 0)
        if tells else None,
        created_ns=_whole(row.get("time_created_ns")),
        site=_site(row.get("frames")),
        peers=ends,
    )  # fmt: skip


def _group(
    name: str,
    description: str,
    members: tuple[int, ...],
    rows: Iterable[tuple[Mapping[str, Any], FlightEntry]],
    counted: tuple[int, int],
) -> FlightGroup:
    collectives: dict[int, list[FlightEntry]] = {}
    p2p: list[FlightEntry] = []
    batches: dict[int, bool] = {}
    for row, entry in rows:
        if bool(row.get("is_p2p")) or entry.peers is not None:
            p2p.append(entry)
            if entry.operation == _COALESCED:
                batches[entry.sequence] = entry.completed
        else:
            collectives.setdefault(entry.sequence, []).append(entry)
    enqueued, completed = counted
    entries = tuple(_one(same, completed) for _, same in sorted(collectives.items()))
    done = [entry.sequence for entry in entries if entry.completed]
    return FlightGroup(
        name=name,
        description=description,
        members=members,
        entries=entries,
        by_number={entry.sequence: entry for entry in entries},
        # The calls of a batch have no events of their own: they are done when the batch is.
        p2p=tuple(
            entry if entry.completed or not batches.get(entry.sequence, False) else _done(entry)
            for entry in p2p
            if entry.operation != _COALESCED
        ),
        enqueued=max([enqueued, *(entry.sequence for entry in entries)]),
        completed=max([completed, *done]),
    )


def _one(same: list[FlightEntry], completed: int) -> FlightEntry:
    """Of one sequence number; a batch of collectives has an entry for each and one for itself, which is timed."""
    timed = next((entry for entry in same if entry.operation == _COALESCED), same[0])
    parts = [entry for entry in same if entry.operation != _COALESCED] or same
    entry = FlightEntry(
        sequence=timed.sequence,
        operation="+".join(dict.fromkeys(part.operation for part in parts)),
        shapes=tuple(shape for part in parts for shape in part.shapes),
        dtype=parts[0].dtype,
        completed=timed.completed,
        started=timed.started,
        created_ns=parts[0].created_ns,
        site=parts[0].site,
    )
    return _done(entry) if not entry.completed and entry.sequence <= completed else entry


def _done(entry: FlightEntry) -> FlightEntry:
    return FlightEntry(
        entry.sequence, entry.operation, entry.shapes, entry.dtype, True, entry.started, entry.created_ns,
        entry.site, entry.peers,
    )  # fmt: skip


def _group_of(row: Mapping[str, Any]) -> tuple[str, str]:
    said = row.get("process_group")
    if isinstance(said, list | tuple) and said:
        return str(said[0]), str(said[1]) if len(said) > 1 else ""
    return str(said if isinstance(said, str) else row.get("pg_id", "")), ""


def _configured(said: object) -> dict[str, tuple[tuple[int, ...], str]]:
    """Members and description by name, of groups whose members are known."""
    if not isinstance(said, dict):
        return {}
    found = {}
    for key, one in said.items():
        if isinstance(one, dict) and (members := _ranks(one.get("ranks"))):
            found[str(one.get("name") or key)] = (members, str(one.get("desc", "")))
    return found


def _members(
    name: str, description: str, configured: Mapping[str, tuple[tuple[int, ...], str]]
) -> tuple[tuple[int, ...], str]:
    """gloo's recorder files every group under an empty name; only the default one can be meant by it."""
    if name in configured:
        members, said = configured[name]
        return members, description if description not in _UNNAMED else said
    if "" in configured and (name == "0" or description == "default_pg"):
        return configured[""][0], description
    return (), description


def _status(said: object) -> dict[str, tuple[int, int]]:
    if not isinstance(said, dict):
        return {}
    return {
        str(number): (
            max(0, _whole(one.get("last_enqueued_collective"))),
            max(0, _whole(one.get("last_completed_collective"))),
        )
        for number, one in said.items()
        if isinstance(one, dict)
    }


def _ranks(said: object) -> tuple[int, ...]:
    """``[0, 1]`` as text (torch) or as a list."""
    if isinstance(said, str):
        numbers = [int(number) for number in re.findall(r"\d{1,7}", said[:4_000_000])]
    elif isinstance(said, list | tuple):
        numbers = [_whole(one, -1) for one in said]
    else:
        return ()
    return tuple(sorted({number for number in numbers if rank_well_formed(number)}))


def _shapes(said: object) -> tuple[tuple[int, ...], ...]:
    if not isinstance(said, list):
        return ()
    return tuple(tuple(_whole(size) for size in shape) for shape in said if isinstance(shape, list))


def _dtype(said: object) -> str:
    if isinstance(said, list):
        said = said[0] if said else ""
    return said.lower() if isinstance(said, str) else ""


def _site(said: object) -> str:
    """The caller's line: the innermost frame outside of Python's library and torch."""
    frames = [one for one in said if isinstance(one, dict)] if isinstance(said, list) else []
    for one in frames:
        file = str(one.get("filename", ""))
        if file and not LIBRARY.search(file):
            return f"{'/'.join(file.split('/')[-3:])}:{_whole(one.get('line'))}"
    return ""


def _whole(value: object, default: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return default
    try:
        return int(value)
    except (ValueError, OverflowError):
        return default
