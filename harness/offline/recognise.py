"""What a file is, by its content: whose stacks, recorder, ledger, decisions or process table. Pure.

A name decides nothing here. Files of a known kind that are damaged are told apart from files of no known kind: the
first are missing evidence, the second are none. Pickles are never loaded: that runs code that is in them; what
torch writes holds plain values alone, and those are read (``pickled.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from harness.ledger_layout import MAGIC, LedgerError
from harness.ledger_snapshot import Snapshot
from harness.offline.flight_recorder import FlightDump, is_flight_recorder, parse_flight_recorder
from harness.offline.pickled import plain_values
from harness.offline.seating import claim_of_name
from harness.offline.tables import (
    TableRow,
    is_process_document,
    parse_rows_of_json,
    read_process_document,
    read_table,
    stopped_by_refusal,
)
from harness.offline.torch_log import parse_torch_log
from harness.offline.well_formed import decision_well_formed, rank_well_formed, snapshot_well_formed
from harness.seats import Seat
from harness.stacks import ProcessStacks, host_first, read_thread
from harness.stacks_parse import StackParseError, parse_faulthandler, parse_pyspy_text, split_pyspy_text

FileKind: TypeAlias = Literal[
    "stacks", "flight recorder", "ledger", "decisions", "process table", "refused dump", "manifest", "engine",
    "own record", "pickle", "torch log", "damaged", "unknown",
]  # fmt: skip

CONVERT = (
    "which is not loaded, since loading one runs code that is in it. Convert it where you trust it: "
    "python -c \"import json, pickle, sys; json.dump(pickle.load(open(sys.argv[1], 'rb')), open(sys.argv[1] + "
    "'.json', 'w'))\" FILE; or dump JSON in the process: torch._C._distributed_c10d._dump_nccl_trace_json() "
    "(gloo: _dump_fr_trace_json(), NPU: torch_npu._C._distributed_c10d._dump_hccl_trace_json())"
)
LOOKED_FOR = (
    "py-spy dumps (`py-spy dump --json --pid PID > rank0.json`, or its text), flight recorders of torch (JSON, or "
    "as torch writes them), logs in which torch's watchdog wrote of a timeout, ledgers (*.ledger, or a trial's or "
    "an evidence directory), decision files (*.jsonl), faulthandler dumps, and process tables "
    "(`ps -eo pid,stat,args > ps.txt`)"
)
_DECISION_KEYS = frozenset(
    {"mode_agreed", "modes", "tokens", "mode", "collectives", "retracted", "batch", "padding"}
)
_OWN_KEYS = (
    frozenset({"kind", "mechanism", "culprits"}), frozenset({"verdict", "facts", "directory"}),
    frozenset({"scenario", "arm", "seed"}), frozenset({"schema", "seats"}), frozenset({"schema", "url", "health"}),
    frozenset({"schema", "requests"}), frozenset({"schema", "paths"}), frozenset({"schema", "roots"}),
    frozenset({"schema", "finished", "ranks"}),
)  # fmt: skip
_FAULTHANDLER = re.compile(
    r"^(?:Current thread|Thread) 0x[0-9a-fA-F]+.*\(most recent call first\):", re.MULTILINE
)
_LIKE_JSON = re.compile(r'\s*(?:\[\s*(?:[\[{"\]]|$)|\{\s*(?:["}]|$)|")')
_DUMP_ENDINGS = frozenset({"json", "jsonl", "ledger", "txt", "dump", "stack", "trace"})
_MOST_DOCUMENTS = 4096


class DumpsError(ValueError):
    """Bad usage: there is no such directory, or nothing in it that can be used. The message says what to do."""


@dataclass(frozen=True, slots=True)
class FoundStacks:
    """``title``: what the process was called, where the dump says. ``seat``: as a file of our own has it."""

    stacks: ProcessStacks
    title: str = ""
    seat: Seat | None = None


@dataclass(frozen=True, slots=True)
class Recognised:
    """One file. ``problem`` says what was wrong with it, also where a part of it could be used."""

    path: str
    kind: FileKind
    stacks: tuple[FoundStacks, ...] = ()
    flight: FlightDump | None = None
    logged: Mapping[int, FlightDump] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    decisions: tuple[Mapping[str, Any], ...] = ()
    table: tuple[TableRow, ...] = ()
    refused_pid: int | None = None
    rank: int | None = None
    document: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


def recognise(path: str, content: bytes) -> Recognised:
    """Never raises. A binary ledger is only named: `files` reads it."""
    if content.startswith(MAGIC):
        return Recognised(path, "ledger")
    if len(content) > 1 and content[0] == 0x80 and 2 <= content[1] <= 5:
        return _pickle(path, content)
    dump = path.rpartition(".")[2].lower() in _DUMP_ENDINGS
    if not content.strip():
        return Recognised(path, "damaged", problem="empty") if dump else Recognised(path, "unknown")
    if b"\0" in content[:4096]:
        return Recognised(path, "unknown")
    text = content.decode("utf-8-sig", errors="replace")
    if _LIKE_JSON.match(text):
        found = _json(path, text.strip())
        if found.kind != "damaged" or dump:
            return found
    return _text(path, text)


def _pickle(path: str, content: bytes) -> Recognised:
    """torch's own dump at a timeout."""
    try:
        document = plain_values(content)
    except ValueError as error:
        if str(error).startswith("it holds more"):
            return Recognised(path, "pickle", problem=f"a pickle of more than plain values, {CONVERT}")
        return Recognised(path, "damaged", problem=f"a pickle that is {error}")
    if is_flight_recorder(document):
        return _of_document(path, document)
    return Recognised(path, "unknown")


# Text ----------------------------------------------------------------------------------------------------


def _text(path: str, text: str) -> Recognised:
    logged = parse_torch_log(text, path, claim_of_name(path).rank) if "ProcessGroup" in text else {}
    found = _other_text(path, text)
    if not logged:
        return found
    kind: FileKind = "torch log" if found.kind == "unknown" else found.kind
    return replace(found, kind=kind, logged=logged)


def _other_text(path: str, text: str) -> Recognised:
    found = []
    for title, part in split_pyspy_text(text):
        try:
            stacks = parse_pyspy_text(part)
        except StackParseError:
            continue
        found.append(FoundStacks(_marked(stacks), title))
    if found:
        return Recognised(path, "stacks", tuple(found))
    if _FAULTHANDLER.search(text):
        try:
            return Recognised(path, "stacks", (FoundStacks(parse_faulthandler(text, pid=0, rank=None)),))
        except StackParseError:
            return Recognised(path, "damaged", problem="a dump of faulthandler without a frame")
    stopped = stopped_by_refusal(text)
    if stopped is not None:
        said = "py-spy could not read a process that is stopped; with --nonblocking it can"
        return Recognised(path, "refused dump", refused_pid=stopped, problem=said)
    rows = read_table(text)
    if rows:
        return Recognised(path, "process table", table=rows)
    if text.startswith("Process ") or "Error: Failed to" in text:
        lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
        return Recognised(path, "refused dump", problem=f"no stacks: {'; '.join(lines[:4])[:300]}")
    return Recognised(path, "unknown")


# JSON ----------------------------------------------------------------------------------------------------


def _json(path: str, text: str) -> Recognised:
    documents, error = _documents(text)
    if not documents:
        return Recognised(path, "damaged", problem=f"damaged or cut short: {error}")
    found = _of_documents(path, documents)
    if error and found.kind not in ("unknown", "damaged"):
        return replace(found, problem=found.problem or f"its end is damaged: {error}")
    if error and found.kind == "unknown":
        return Recognised(path, "damaged", problem=f"damaged or cut short: {error}")
    return found


def _documents(text: str) -> tuple[list[Any], str]:
    """All JSON documents of a text, one after another or one a line, and what was wrong with the rest."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    error = ""
    at = 0
    while at < len(text) and len(found) < _MOST_DOCUMENTS * 64:
        try:
            document, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as problem:
            error = error or str(problem) or type(problem).__name__
            # A line cut by a crash is a problem of that line alone.
            following = text.find("\n", at)
            if following < 0 or not found:
                break
            at = following
        else:
            found.append(document)
            at = end
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
    if len(found) == 1 and isinstance(found[0], str) and found[0].lstrip()[:1] in ("[", "{"):
        return _documents(found[0].strip())
    return found, error


def _of_documents(path: str, documents: list[Any]) -> Recognised:
    if len(documents) > 1:
        records = tuple(one for one in documents if _is_decision(one))
        if len(records) * 2 > len(documents):
            return Recognised(path, "decisions", decisions=records)
        lists = [one for one in documents if isinstance(one, list)]
        stacks = tuple(found for one in lists for found in _pyspy(one))
        if stacks:
            return Recognised(path, "stacks", stacks)
    return _of_document(path, documents[0])


def _of_document(path: str, document: Any) -> Recognised:
    if isinstance(document, list):
        stacks = _pyspy(document)
        if stacks:
            return Recognised(path, "stacks", stacks)
        rows = parse_rows_of_json(document)
        if any(row.state for row in rows):
            return Recognised(path, "process table", table=rows)
        return (
            Recognised(path, "damaged", problem="an empty list")
            if not document
            else Recognised(path, "unknown")
        )
    if not isinstance(document, dict):
        return Recognised(path, "unknown")
    if isinstance(document.get("threads"), list):
        return _own_stacks(path, document)
    if {"header", "streams", "groups"} <= document.keys():
        try:
            snapshot = Snapshot.from_json(document)
        except LedgerError as error:
            return Recognised(path, "damaged", problem=f"a ledger that cannot be read: {error}")
        if not snapshot_well_formed(snapshot):
            return Recognised(path, "damaged", problem="a ledger that cannot be read: fields of other types")
        return Recognised(path, "ledger", snapshot=snapshot, rank=snapshot.header.rank)
    if is_flight_recorder(document):
        rank = document.get("rank")
        known = rank if rank_well_formed(rank) else None
        return Recognised(path, "flight recorder", flight=parse_flight_recorder(document, path), rank=known)
    if is_process_document(document):
        return Recognised(path, "process table", table=read_process_document(document))
    if {"samples", "missing"} <= document.keys() or {"samples", "reason"} <= document.keys():
        return Recognised(path, "manifest", document=document)
    if _is_decision(document):
        return Recognised(path, "decisions", decisions=(document,))
    own = any(keys <= document.keys() for keys in _OWN_KEYS)
    return Recognised(path, "own record" if own else "unknown")


def _is_decision(document: Any) -> bool:
    return (
        isinstance(document, dict)
        and bool(_DECISION_KEYS & document.keys())
        and decision_well_formed(document)
    )


def _own_stacks(path: str, document: Mapping[str, Any]) -> Recognised:
    if document.get("schema") is not None:
        try:
            stacks = ProcessStacks.from_json(document)
        except ValueError as error:
            return Recognised(path, "damaged", problem=str(error))
        if not stacks.threads:
            return Recognised(path, "damaged", problem="stacks without a thread")
        seat = stacks.rank if isinstance(stacks.rank, str) or rank_well_formed(stacks.rank) else None
        return Recognised(path, "stacks", (FoundStacks(stacks, seat=seat),))
    found = _pyspy(document["threads"])
    return Recognised(path, "stacks", found) if found else Recognised(path, "unknown")


def _pyspy(rows: list[Any]) -> tuple[FoundStacks, ...]:
    """The processes of ``py-spy dump --json``, mostly one."""
    threads = [
        row
        for row in rows
        if isinstance(row, dict) and isinstance(row.get("frames"), list)
        and ({"thread_name", "thread_id", "os_thread_id"} & row.keys())
    ]  # fmt: skip
    by_pid: dict[int, list[dict[str, Any]]] = {}
    for row in threads:
        pid = row.get("pid")
        by_pid.setdefault(pid if isinstance(pid, int) and not isinstance(pid, bool) else 0, []).append(row)
    found = []
    for pid, own in by_pid.items():
        told: dict[str, Any] = next(
            (row["process_info"] for row in own if isinstance(row.get("process_info"), dict)), {}
        )
        stacks = ProcessStacks(pid, None, "py-spy", False, host_first(read_thread(row) for row in own))
        found.append(FoundStacks(_marked(stacks), str(told.get("command_line") or "")))
    return tuple(found)


def _marked(stacks: ProcessStacks) -> ProcessStacks:
    native = any(frame.native for thread in stacks.threads for frame in thread.frames)
    return ProcessStacks(stacks.pid, stacks.rank, stacks.source, native, stacks.threads)
