"""Takes the evidence of one sample: ledgers, stacks, process table and log tails of a node's processes.

Runs in the agent, outside the ranks, under one deadline that all ranks share. Whatever cannot be had is
recorded with the reason; nothing here raises for a sick rank, a missing tool or a full disk. How stacks are
taken is ``dumps.py``'s, which processes are a rank's own ``children.py``'s. When to capture is the watchdog's
business, what it means the diagnosis's, and ``manifest.json`` the caller's. Layout below the evidence directory
(all files synced):

    sample-<i>/ledger/rank<r>.json  sample-<i>/stacks/rank<r>.json  sample-<i>/stacks/rank<r>.native.json
    sample-<i>/children/rank<r>.<pid>.json and .native.json
    sample-<i>/processes.json  logs/rank<r>.txt  decisions/rank<r>.jsonl

A process of the engine that is no rank has its name in the place of ``rank<r>``. What is taken of accelerators
besides is ``device_evidence.py``'s.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.children import MOST, MOST_OF_ONE, ChildProcess, children_of_seats
from harness.device_evidence import DeviceCapture, DeviceRequest
from harness.dumps import DumpTarget, StackDumps
from harness.file_tail import read_tail
from harness.ledger_layout import LedgerError
from harness.ledger_reader import LedgerReader
from harness.ledger_snapshot import Snapshot
from harness.process_control import ProcessId, read_thread
from harness.processes import ProcessEntry, read_process
from harness.rank_environment import Written
from harness.seats import Seat, seat_stem, seat_words
from harness.stacks import ProcessStacks
from harness.store import StoreError, write_bytes, write_json
from harness.tracing import allow_tracing_by, install_faulthandler

__all__ = [
    "CaptureRank",
    "CaptureReport",
    "CaptureRequest",
    "Missing",
    "allow_tracing_by",
    "capture",
    "find_py_spy",
    "install_faulthandler",
    "read_tail",
    "write_json",
]

PROCESSES_SCHEMA = 1
PY_SPY = "HANGRIG_PY_SPY"
"""Environment variable with the path of a py-spy, as one with a capability that only it has."""
LOG_TAIL_BYTES = 64 << 10
DECISIONS_TAIL_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class CaptureRank:
    """One process to look at; ``rank`` is its seat. ``start_time_ticks`` tells it from another of its number."""

    rank: Seat
    pid: int
    start_time_ticks: int
    ledger_path: Path | None = None
    faulthandler_path: Path | None = None
    log_path: Path | None = None
    decisions_path: Path | None = None
    """Set where the decisions are not in the trial's own directory: then their end is copied."""


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """``out`` is the trial's evidence directory, ``deadline_s`` the seconds that all ranks share.

    ``native`` also takes native stacks, and what there is of the devices. ``py_spy`` None: it is looked for.
    ``device``: where the ranks' libraries write, None on devices without such. ``since_ns``: the trial's start.
    """

    ranks: tuple[CaptureRank, ...]
    out: Path
    sample: int
    native: bool = False
    deadline_s: float = 10.0
    py_spy: Path | None = None
    device: Written | None = None
    since_ns: int = 0


@dataclass(frozen=True, slots=True)
class Missing:
    """A piece of evidence that could not be had, as ``manifest.json`` lists it."""

    what: str
    why: str
    impossible: bool = False
    """Nothing could have had it: of a process that is gone, or native stacks of one that is stopped."""

    def to_json(self) -> dict[str, str | bool]:
        return {"what": self.what, "why": self.why, "impossible": self.impossible}


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What was taken, by seat; it is on disk too. ``taken_ns`` is CLOCK_MONOTONIC at the start.

    ``children``: living descendants of the seats; ``child_stacks`` by pid, of those that run Python;
    ``children_cpu_s``: processor time that all descendants of a seat have had, by seat.
    """

    sample: int
    taken_ns: int
    duration_s: float
    processes: tuple[ProcessEntry, ...]
    snapshots: dict[Seat, Snapshot]
    stacks: dict[Seat, ProcessStacks]
    native: dict[Seat, ProcessStacks]
    missing: tuple[Missing, ...]
    children: tuple[ChildProcess, ...] = ()
    child_stacks: dict[int, ProcessStacks] = field(default_factory=dict)
    children_cpu_s: Mapping[Seat, float] = field(default_factory=dict)


def find_py_spy() -> Path | None:
    """The one that ``HANGRIG_PY_SPY`` names, else the py-spy of this environment, else the one on PATH."""
    named = os.environ.get(PY_SPY)
    if named:
        return Path(named)  # also when it is not there: running it says so, and the evidence lists it
    beside = Path(sys.executable).parent
    found = shutil.which("py-spy", path=f"{beside}{os.pathsep}{os.environ.get('PATH', '')}")
    return None if found is None else Path(found)


def capture(request: CaptureRequest) -> CaptureReport:
    """Takes one sample of all ranks and writes it. Returns within ``deadline_s`` and little more."""
    return _Capture(request).run()


@dataclass(slots=True)
class _Capture:
    request: CaptureRequest
    started_s: float = field(default_factory=time.monotonic)
    entries: dict[Seat, ProcessEntry] = field(default_factory=dict)
    children: tuple[ChildProcess, ...] = ()
    children_cpu_s: Mapping[Seat, float] = field(default_factory=dict)
    snapshots: dict[Seat, Snapshot] = field(default_factory=dict)
    stacks: dict[Seat, ProcessStacks] = field(default_factory=dict)
    native: dict[Seat, ProcessStacks] = field(default_factory=dict)
    child_stacks: dict[int, ProcessStacks] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    def run(self) -> CaptureReport:
        request = self.request
        taken_ns = time.monotonic_ns()
        self.entries = {
            rank.rank: read_process(rank.pid, rank.start_time_ticks, rank.rank) for rank in request.ranks
        }
        device = self._of_device()
        if device is not None:
            device.begin()
        self._find_children()
        for rank in request.ranks:
            self._ledger(rank)
        self._write_json(
            "processes.json",
            {
                "schema": PROCESSES_SCHEMA,
                "ranks": [entry.to_json() | self._work(seat) for seat, entry in self.entries.items()],
                "children": [child.to_json() for child in self.children],
            },
        )
        self._take_stacks()
        for rank in request.ranks:
            self._tail(rank.log_path, f"logs/{seat_stem(rank.rank)}.txt", LOG_TAIL_BYTES)
            self._tail(rank.decisions_path, f"decisions/{seat_stem(rank.rank)}.jsonl", DECISIONS_TAIL_BYTES)
        if device is not None:
            device.end()
        return CaptureReport(
            sample=request.sample,
            taken_ns=taken_ns,
            duration_s=time.monotonic() - self.started_s,
            processes=tuple(self.entries.values()),
            snapshots=self.snapshots,
            stacks=self.stacks,
            native=self.native,
            missing=tuple(self.missing),
            children=self.children,
            child_stacks=self.child_stacks,
            children_cpu_s=self.children_cpu_s,
        )

    def _lack(self, what: str, why: str, impossible: bool = False) -> None:
        self.missing.append(Missing(what, why, impossible))

    def _of_device(self) -> DeviceCapture | None:
        request = self.request
        if request.device is None or not request.native:
            return None
        pids = {seat: entry.pid for seat, entry in self.entries.items()}
        return DeviceCapture(
            DeviceRequest(
                request.device,
                pids,
                request.out,
                request.sample,
                request.since_ns,
                self.started_s + request.deadline_s,
            ),
            self._lack,
        )

    # --- ledgers and logs

    def _ledger(self, rank: CaptureRank) -> None:
        if rank.ledger_path is None:
            return
        try:
            reader = LedgerReader.open(rank.ledger_path)
            try:
                snapshot = reader.snapshot()
            finally:
                reader.close()
        except LedgerError as error:
            self._lack(f"ledger of {seat_words(rank.rank)}", str(error))
            return
        self.snapshots[rank.rank] = snapshot
        self._write_json(f"ledger/{seat_stem(rank.rank)}.json", snapshot.to_json())

    def _tail(self, path: Path | None, name: str, limit_bytes: int) -> None:
        if path is None:
            return
        try:
            tail = read_tail(path, limit_bytes)
        except OSError as error:
            self._lack(name, f"{path}: {error.strerror}")
            return
        self._write(self.request.out / name, tail)

    # --- processes and stacks

    def _work(self, seat: Seat) -> dict[str, Any]:
        """The state of its host thread, and the seconds of processor time that this thread has had, and all
        descendants of the process together; null where they cannot be seen."""
        entry, snapshot = self.entries[seat], self.snapshots.get(seat)
        named = snapshot is not None and snapshot.header.pid == entry.pid
        thread = (snapshot.header.thread if snapshot is not None and named else 0) or entry.pid
        host = read_thread(entry.pid, thread) if entry.alive else None
        children_cpu_s = self.children_cpu_s.get(seat)
        return {
            "host_state": None if host is None else host.state,
            "host_cpu_s": None if host is None else host.cpu_s,
            "children_cpu_s": None if children_cpu_s is None else round(children_cpu_s, 2),
        }

    def _find_children(self) -> None:
        alive = {
            seat: ProcessId(entry.pid, entry.start_time_ticks)
            for seat, entry in self.entries.items()
            if entry.alive
        }
        children = children_of_seats(alive)
        self.children, self.children_cpu_s = children.found, children.cpu_s
        for seat, count in children.left_out.items():
            more = "1 more child" if count == 1 else f"{count} more children"
            self._lack(
                f"stacks of {more} of {seat_words(seat)}", f"{MOST_OF_ONE} a rank and {MOST} in all are taken"
            )

    def _take_stacks(self) -> None:
        faults = {rank.rank: rank.faulthandler_path for rank in self.request.ranks}
        ranks = {
            DumpTarget(
                seat_words(seat), seat, ProcessId(entry.pid, entry.start_time_ticks), faults[seat]
            ): seat
            for seat, entry in self.entries.items()
        }
        # A forked child has its rank's handler and file; one that runs another program is asked for nothing.
        children = {
            DumpTarget(child.words, child.words, child.process, faults[child.of]): child
            for child in self.children
            if child.python
        }
        dumps = StackDumps(
            (*ranks, *children),
            self.request.py_spy or find_py_spy(),
            self.request.deadline_s,
            self._lack,
            self.started_s,
        )
        dumps.take(native=self.request.native)
        for found, suffix in ((dumps.stacks, ".json"), (dumps.native, ".native.json")):
            for target, stacks in found.items():
                if target in ranks:
                    seat = ranks[target]
                    (self.native if stacks.native else self.stacks)[seat] = stacks
                    self._write_json(f"stacks/{seat_stem(seat)}{suffix}", stacks.to_json())
                else:
                    if not stacks.native:
                        self.child_stacks[stacks.pid] = stacks
                    self._write_json(f"children/{children[target].stem}{suffix}", stacks.to_json())

    # --- writing

    def _write_json(self, name: str, document: Mapping[str, Any]) -> None:
        path = self.request.out / f"sample-{self.request.sample}" / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, document)
        except (OSError, StoreError) as error:
            self._lack(f"{path.name} on disk", str(error))

    def _write(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
        except (OSError, StoreError) as error:
            self._lack(f"{path.name} on disk", str(error))
