"""A trial's evidence of accelerators, read back: recorders' dumps, HCCL's status and the codes in its logs, by
seat.

Here: which files of a trial's directory hold what, and whose a line of a shared log is. Damage is told, never
raised. Not here: what a recorder or a code means (`offline/`, `error_codes.py`) and whom it blames
(`diagnosis_library.py`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.diagnosis_model import LibraryEvidence, LoggedCode, StatusWord
from harness.error_codes import find_codes
from harness.offline.flight_recorder import FlightDump
from harness.offline.recognise import recognise
from harness.seats import Seat, seat_of

_MOST_BYTES = 64 << 20
_NAMED_PID = re.compile(r"\bPID:?\s*(\d{1,9})\b|\bpid=\s*(\d{1,9})\b|(?<=[A-Z]\()(\d{1,9})(?=,)")
"""``[PID: 13075]``, ``(Worker_TP1 pid=961)``, and CANN's ``HCCL(2111665,python)``."""
_MOST_CODES = 64


def read_library_evidence(
    trial: Path, pids: Mapping[int, Seat], raised: Mapping[Seat, str]
) -> LibraryEvidence:
    """``pids``: seats of the trial by pid. ``raised``: what processes raised, which holds codes too."""
    flights: dict[int, FlightDump] = {}
    unreadable: set[int] = set()
    logged: dict[int, FlightDump] = {}
    for path, content in _files(trial, "flight"):
        rank = seat_of(path.stem)
        found = recognise(_name(trial, path), content)
        if isinstance(rank, int):
            if found.flight is not None:
                flights[rank] = found.flight
            else:
                unreadable.add(rank)
    codes: list[LoggedCode] = []
    for path, content in (*_files(trial, "logs"), *_files(trial, "plog")):
        name = _name(trial, path)
        owner = seat_of(path.stem if path.parent.name == "logs" else path.parent.name)
        codes += _codes(content.decode(errors="replace"), name, owner, pids)
        logged |= {
            rank: dump for rank, dump in recognise(name, content).logged.items() if rank not in flights
        }
    for path, content in _files(trial, "sample-*/device"):
        if path.stem == "kernel-log":
            codes += _codes(content.decode(errors="replace"), _name(trial, path), None, pids)
    for seat, text in raised.items():
        codes += [LoggedCode(seat, found, "history.json") for found in find_codes(text)]
    return LibraryEvidence(
        flights=logged | flights,
        unreadable=frozenset(unreadable),
        codes=tuple(_once(codes))[:_MOST_CODES],
        status=tuple(_status(trial)),
    )


def _files(trial: Path, folder: str) -> Iterator[tuple[Path, bytes]]:
    for path in sorted((trial / "evidence").glob(f"{folder}/**/*")):
        try:
            if path.is_file() and path.stat().st_size <= _MOST_BYTES:
                yield path, path.read_bytes()
        except OSError:
            continue  # the manifest says what was taken; what is gone since then tells nothing


def _name(trial: Path, path: Path) -> str:
    return str(path.relative_to(trial))


def _codes(text: str, name: str, owner: Seat | None, pids: Mapping[int, Seat]) -> Iterator[LoggedCode]:
    """By the process that a line names, where it is one of the trial's; else the owner's of the file."""
    lines: dict[Seat | None, list[str]] = {}
    for line in text.splitlines():
        named = (int(next(filter(None, found))) for found in _NAMED_PID.findall(line))
        seat = next((pids[pid] for pid in named if pid in pids), owner)
        lines.setdefault(seat, []).append(line)
    for seat, own in lines.items():
        for found in find_codes("\n".join(own)):
            yield LoggedCode(seat, found, name)


def _once(codes: Iterable[LoggedCode]) -> Iterator[LoggedCode]:
    """A code that is in several files of one process is told once, from the first."""
    seen: set[tuple[Seat | None, str]] = set()
    for one in codes:
        if (one.seat, one.found.code) not in seen:
            seen.add((one.seat, one.found.code))
            yield one


def _status(trial: Path) -> Iterator[StatusWord]:
    """torch_npu's ``last_comm_op``: the newest operation of each group of a process."""
    for path, content in _files(trial, "hccl-status"):
        rank = seat_of(path.parent.name)
        try:
            document: Any = json.loads(content)
        except ValueError:
            continue
        rows = document.get("last_comm_op") if isinstance(document, dict) else None
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, dict) and isinstance(rank, int):
                yield StatusWord(
                    rank,
                    str(row.get("op_type", "?")),
                    str(row.get("seq", "?")),
                    str(row.get("pg_id", "?")),
                    str(row.get("status", "?")),
                    _name(trial, path),
                )
