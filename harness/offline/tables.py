"""Process tables as people save them: ``ps``, ``top -b``, ``/proc/PID/status`` and ``stat``. Pure.

Only what says something about a process is taken: its number, its state, its title. A table need not be whole, so a
process that is not in it is not known to be gone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from harness.offline.well_formed import rank_well_formed

_STATE_COLUMNS = ("S", "STAT", "STATE")
_TITLE_COLUMNS = ("COMMAND", "CMD", "ARGS", "COMM")
_STATES = frozenset("RSDTtZXxIWKP")
_DATE = (
    (re.compile(r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)$"), 5),
    (re.compile(r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)$"), 2),
)
"""Words of a date that begins so; ``ps -o lstart`` and ``-o start`` print both under STARTED."""
_AUX = re.compile(
    r"^\S+\s+(\d+)\s+\d+\.\d+\s+\d+\.\d+\s+\d+\s+\d+\s+\S+\s+([RSDTtZXI]\S*)\s+\S+\s+\d+:\d+\s+(.*)$"
)
_EF = re.compile(r"^\S+\s+(\d+)\s+\d+\s+\d+\s+\S+\s+\S+\s+\d+:\d\d:\d\d\s+(.*)$")
"""Rows of ``ps aux`` and ``ps -ef`` whose header a grep has taken away."""
_TREE = re.compile(r"^(?:[|`\\_+-]+\s+)+")
_STATUS_STATE = re.compile(r"^State:\s*([A-Za-z])", re.MULTILINE)
_STATUS_PID = re.compile(r"^Pid:\s*(\d+)", re.MULTILINE)
_STATUS_NAME = re.compile(r"^Name:\s*(.+)$", re.MULTILINE)
_STAT = re.compile(r"^(\d+) \((.*)\) ([RSDTtZXxIWKP]) -?\d+ -?\d+ -?\d+ ", re.MULTILINE)
_REFUSED_STOP = re.compile(
    r"unexpected waitpid result PtraceEvent\(Pid\((\d+)\), SIG(?:STOP|TSTP|TTIN|TTOU), 128\)"
)
"""py-spy 0.4 of a process that a signal has stopped (a group-stop): tests/captures has one."""
_DEFUNCT = "<defunct>"


@dataclass(frozen=True, slots=True)
class TableRow:
    """``state``: the kernel's letter, or ``dead`` or ``missing``; empty where the table has none. ``exit``: how it
    ended, where that is said."""

    pid: int
    state: str
    title: str
    rank: int | None = None
    name: str = ""
    exit: str | None = None


def read_table(text: str) -> tuple[TableRow, ...]:
    """The rows of any of these texts; empty for something else."""
    return _status(text) or _stat(text) or _ps(text)


def stopped_by_refusal(text: str) -> int | None:
    """The process that py-spy could not read because it is stopped, by py-spy's own error."""
    found = _REFUSED_STOP.search(text)
    return None if found is None else int(found[1])


def read_process_document(document: Mapping[str, Any]) -> tuple[TableRow, ...]:
    """Our ``processes.json``, or a list of objects with ``pid`` and ``state`` or ``stat``."""
    rows = document.get("ranks", document.get("processes"))
    found = []
    for row in rows if isinstance(rows, list) else []:
        if not isinstance(row, dict):
            continue
        pid, rank = row.get("pid"), row.get("rank")
        state = row.get("state", row.get("stat", row.get("status")))
        named = rank_well_formed(rank) or row.get("name") is not None
        if not (_is_whole(pid) or named):
            continue
        found.append(
            TableRow(
                pid=pid if _is_whole(pid) else 0,
                state=_word(str(state)) if state is not None else "",
                title=str(row.get("title") or row.get("cmdline") or row.get("command") or ""),
                rank=rank if rank_well_formed(rank) else None,
                name=str(row.get("name") or ""),
                exit=None if row.get("exit") is None else str(row["exit"]),
            )
        )
    return tuple(found)


def is_process_document(document: object) -> bool:
    if not isinstance(document, dict):
        return False
    rows = document.get("ranks", document.get("processes"))
    return isinstance(rows, list) and any(
        isinstance(row, dict) and "pid" in row and ({"state", "stat", "status"} & row.keys()) for row in rows
    )


def _word(state: str) -> str:
    """A letter, or our words ``dead`` and ``missing``; psutil's words too."""
    word = state.strip()
    known = {
        "stopped": "T",
        "tracing-stop": "T",
        "zombie": "Z",
        "running": "R",
        "sleeping": "S",
        "disk-sleep": "D",
    }
    if word.lower() in ("dead", "missing"):
        return word.lower()
    if word.lower() in known:
        return known[word.lower()]
    return word[0] if word and word[0] in _STATES else ""


def _status(text: str) -> tuple[TableRow, ...]:
    """One or several ``/proc/PID/status`` after one another."""
    found = []
    for block in re.split(r"(?m)^(?=Name:\s)", text):
        state, pid, name = _STATUS_STATE.search(block), _STATUS_PID.search(block), _STATUS_NAME.search(block)
        if state is not None and pid is not None:
            found.append(TableRow(int(pid[1]), state[1], name[1].strip() if name is not None else ""))
    return tuple(found)


def _stat(text: str) -> tuple[TableRow, ...]:
    return tuple(TableRow(int(pid), state, comm) for pid, comm, state in _STAT.findall(text))


def _ps(text: str) -> tuple[TableRow, ...]:
    columns: list[str] = []
    found: list[TableRow] = []
    for line in text.splitlines():
        words = line.split()
        if "PID" in words and any(name in words for name in (*_TITLE_COLUMNS, *_STATE_COLUMNS)):
            columns = words
            continue
        row = _row(columns, words) if columns else _headless(line)
        if row is not None:
            found.append(row)
    return tuple(found)


def _row(columns: list[str], words: list[str]) -> TableRow | None:
    """None for a line that does not fit under the header."""
    cells: dict[str, str] = {}
    at = 0
    for name in columns:
        if at >= len(words):
            break
        if name in _TITLE_COLUMNS:
            cells["title"] = " ".join(words[at:])
            break
        taken = 1
        if name == "STARTED":
            taken = next((count for begins, count in _DATE if begins.match(words[at])), 1)
        cells.setdefault(name, " ".join(words[at : at + taken]))
        at += taken
    if not cells.get("PID", "").isdecimal():
        return None
    state = next((cells[name][0] for name in _STATE_COLUMNS if cells.get(name, "")[:1] in _STATES), "")
    return _made(int(cells["PID"]), state, cells.get("title", ""))


def _headless(line: str) -> TableRow | None:
    if found := _AUX.match(line):
        return _made(int(found[1]), found[2][0], found[3])
    if found := _EF.match(line):
        return _made(int(found[1]), "", found[2])
    return None


def _made(pid: int, state: str, title: str) -> TableRow:
    title = _TREE.sub("", title.strip())
    return TableRow(pid, state or ("Z" if _DEFUNCT in title else ""), title)


def parse_rows_of_json(items: list[Any]) -> tuple[TableRow, ...]:
    """A bare list of objects with ``pid`` and a state."""
    return read_process_document({"processes": items})


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
