"""Takes the evidence of one sample: ledgers, stacks, process table and log tails of a node's processes.

Runs in the agent, outside the ranks, under one deadline that all ranks share. Whatever cannot be had is
recorded with the reason; nothing here raises for a sick rank, a missing tool or a full disk. A rank is left
as it was found: running if it ran, stopped if it was stopped. When to capture is the watchdog's business,
what it means the diagnosis's, and ``manifest.json`` the caller's. Layout below the evidence directory (all
files synced):

    sample-<i>/ledger/rank<r>.json  sample-<i>/stacks/rank<r>.json  sample-<i>/stacks/rank<r>.native.json
    sample-<i>/processes.json  logs/rank<r>.txt  decisions/rank<r>.jsonl

A process of the engine that is no rank has its name in the place of ``rank<r>``.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.faultdump import DumpRequest, ask_for_dumps
from harness.ledger_layout import LedgerError
from harness.ledger_reader import LedgerReader
from harness.ledger_snapshot import Snapshot
from harness.processes import ProcessEntry, read_process, send_signal
from harness.seats import Seat, in_order, seat_stem, seat_words
from harness.stacks import ProcessStacks
from harness.stacks_parse import StackParseError, parse_pyspy_json
from harness.store import StoreError, write_bytes, write_json
from harness.tools import ToolResult, run_tools
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
    "write_json",
]

PROCESSES_SCHEMA = 1
PY_SPY = "HANGRIG_PY_SPY"
"""Environment variable with the path of a py-spy, as one with a capability that only it has."""
LOG_TAIL_BYTES = 64 << 10
DECISIONS_TAIL_BYTES = 8 << 20

# Shares of the deadline. Plain stacks come first and take 33 ms a process when all is well; what a hung
# dumper may burn must leave time for faulthandler, and native stacks (0.7 s) get the rest.
_PLAIN_SHARE = 0.5
_FALLBACK_SHARE = 0.75
# After its tracer died, a target stops when it is next scheduled; so long is waited for that.
_SETTLE_S = 0.3
_SETTLE_POLL_S = 0.01


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

    ``native`` also takes native stacks. ``py_spy`` None: it is looked for.
    """

    ranks: tuple[CaptureRank, ...]
    out: Path
    sample: int
    native: bool = False
    deadline_s: float = 10.0
    py_spy: Path | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """A piece of evidence that could not be had, as ``manifest.json`` lists it."""

    what: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"what": self.what, "why": self.why}


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """What was taken, by seat; it is on disk too. ``taken_ns`` is CLOCK_MONOTONIC at the start."""

    sample: int
    taken_ns: int
    duration_s: float
    processes: tuple[ProcessEntry, ...]
    snapshots: dict[Seat, Snapshot]
    stacks: dict[Seat, ProcessStacks]
    native: dict[Seat, ProcessStacks]
    missing: tuple[Missing, ...]


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
    snapshots: dict[Seat, Snapshot] = field(default_factory=dict)
    stacks: dict[Seat, ProcessStacks] = field(default_factory=dict)
    native: dict[Seat, ProcessStacks] = field(default_factory=dict)
    missing: list[Missing] = field(default_factory=list)

    def run(self) -> CaptureReport:
        request = self.request
        taken_ns = time.monotonic_ns()
        self.entries = {
            rank.rank: read_process(rank.pid, rank.start_time_ticks, rank.rank) for rank in request.ranks
        }
        self._write_json(
            "processes.json",
            {"schema": PROCESSES_SCHEMA, "ranks": [entry.to_json() for entry in self.entries.values()]},
        )
        for rank in request.ranks:
            self._ledger(rank)
        py_spy = request.py_spy or find_py_spy()
        failed = self._plain(py_spy)
        self._fallback(failed)
        if request.native:
            self._native(py_spy)
        for rank in request.ranks:
            self._tail(rank.log_path, f"logs/{seat_stem(rank.rank)}.txt", LOG_TAIL_BYTES)
            self._tail(rank.decisions_path, f"decisions/{seat_stem(rank.rank)}.jsonl", DECISIONS_TAIL_BYTES)
        return CaptureReport(
            sample=request.sample,
            taken_ns=taken_ns,
            duration_s=time.monotonic() - self.started_s,
            processes=tuple(self.entries.values()),
            snapshots=self.snapshots,
            stacks=self.stacks,
            native=self.native,
            missing=tuple(self.missing),
        )

    def _deadline_s(self, share: float) -> float:
        return self.started_s + share * self.request.deadline_s

    def _lack(self, what: str, why: str) -> None:
        self.missing.append(Missing(what, why))

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

    # --- stacks

    def _plain(self, py_spy: Path | None) -> dict[Seat, str]:
        """Plain dumps of all living ranks at once. Returns why it failed, by rank."""
        failed: dict[Seat, str] = {}
        for number, entry in self.entries.items():
            if not entry.alive:
                self._lack(f"stacks of {seat_words(number)}", _gone(entry))
            elif py_spy is None:
                failed[number] = "py-spy is not installed here; install it with: pip install py-spy"
        if py_spy is None:
            return failed
        deadline_s = self._deadline_s(_PLAIN_SHARE)
        living = {number: entry for number, entry in self.entries.items() if entry.alive}
        self._take(py_spy, living, failed, deadline_s)
        # A blocking dump also fails when the process was stopped since it was looked at.
        stopped = {number: living[number] for number in failed if self._cannot_be_suspended(number)}
        self._take(py_spy, stopped, failed, deadline_s)
        return failed

    def _take(
        self,
        py_spy: Path,
        entries: Mapping[Seat, ProcessEntry],
        failed: dict[Seat, str],
        deadline_s: float,
    ) -> None:
        commands: dict[Seat, list[str]] = {}
        for number, entry in entries.items():
            commands[number] = [str(py_spy), "dump", "--pid", str(entry.pid), "--json"]
            if self._cannot_be_suspended(number):
                commands[number].append("--nonblocking")
        for number, result in self._run(commands, deadline_s).items():
            problem = self._parse(number, result, native=False)
            if problem is None:
                failed.pop(number, None)
            else:
                failed[number] = f"py-spy: {problem}"

    def _cannot_be_suspended(self, number: Seat) -> bool:
        """Stopped, or in an uninterruptible wait of some length: a blocking dump fails or hangs."""
        now = self._look(number).state
        return now == "T" or (now == "D" and self.entries[number].state == "D")

    def _native(self, py_spy: Path | None) -> None:
        commands: dict[Seat, list[str]] = {}
        for number, entry in self.entries.items():
            what = f"native stacks of {seat_words(number)}"
            plain = self.stacks.get(number)
            now = self._look(number)
            if not entry.alive or not now.alive:
                self._lack(what, _gone(now))
            elif self._cannot_be_suspended(number):
                self._lack(
                    what, f"process {entry.pid} is in state {now.state}; py-spy would have to suspend it"
                )
            elif py_spy is None or plain is None or plain.source != "py-spy":
                self._lack(what, "py-spy could not dump this process at all")
            else:
                commands[number] = [str(py_spy), "dump", "--pid", str(entry.pid), "--json", "--native"]
        for number, result in self._run(commands, self._deadline_s(1.0)).items():
            problem = self._parse(number, result, native=True)
            if problem is not None:
                self._lack(f"native stacks of {seat_words(number)}", f"py-spy: {problem}")

    def _run(self, commands: Mapping[Seat, list[str]], deadline_s: float) -> dict[Seat, ToolResult]:
        """Runs py-spy on several ranks; continues those that a killed py-spy left stopped."""
        before = {number: self._look(number) for number in commands}
        results = run_tools(commands, deadline_s=deadline_s)
        ended_badly = [
            number
            for number, result in results.items()
            if result.killed or (result.returncode is not None and result.returncode < 0)
        ]
        self._continue(number for number in ended_badly if before[number].state != "T")
        return results

    def _continue(self, numbers: Iterable[Seat]) -> None:
        """Continues the ranks of which each ran before its tracer was killed, as soon as they stop."""
        waiting = set(numbers)
        settled_s = time.monotonic() + _SETTLE_S
        while waiting:
            for number in in_order(waiting):
                entry = self._look(number)
                if entry.state == "T":
                    problem = send_signal(entry.pid, entry.start_time_ticks, signal.SIGCONT)
                    if problem is not None:
                        self._lack(f"{seat_words(number)} running again after a killed py-spy", problem)
                    waiting.discard(number)
                elif not entry.alive:
                    waiting.discard(number)
            if time.monotonic() >= settled_s:
                return
            time.sleep(_SETTLE_POLL_S)

    def _parse(self, number: Seat, result: ToolResult, *, native: bool) -> str | None:
        """Keeps the stacks of a dump, or says why there are none."""
        if result.problem is not None:
            return result.problem
        pid = self.entries[number].pid
        try:
            stacks = parse_pyspy_json(
                result.stdout.decode("utf-8", "replace"), pid=pid, rank=number, native=native
            )
        except StackParseError as error:
            return str(error)
        self._keep(number, stacks)
        return None

    def _fallback(self, failed: Mapping[Seat, str]) -> None:
        """Asks the ranks themselves where py-spy could not say; ``failed`` says why it could not."""
        requests = []
        for rank in self.request.ranks:
            if rank.rank in failed:
                self._lack(f"py-spy stacks of {seat_words(rank.rank)}", failed[rank.rank])
                requests.append(
                    DumpRequest(rank.rank, rank.pid, rank.start_time_ticks, rank.faulthandler_path)
                )
        answers = ask_for_dumps(tuple(requests), deadline_s=self._deadline_s(_FALLBACK_SHARE))
        for number, answer in answers.items():
            if isinstance(answer, str):
                self._lack(f"stacks of {seat_words(number)}", f"faulthandler: {answer}")
            else:
                self._keep(number, answer)

    def _keep(self, number: Seat, stacks: ProcessStacks) -> None:
        (self.native if stacks.native else self.stacks)[number] = stacks
        suffix = ".native.json" if stacks.native else ".json"
        self._write_json(f"stacks/{seat_stem(number)}{suffix}", stacks.to_json())

    def _look(self, number: Seat) -> ProcessEntry:
        entry = self.entries[number]
        return read_process(entry.pid, entry.start_time_ticks, number)

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


def read_tail(path: Path, limit_bytes: int) -> bytes:
    """The last ``limit_bytes`` of a file, from a line's beginning when something was cut. Raises OSError."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - limit_bytes))
        tail = file.read(limit_bytes)
    if size_bytes > limit_bytes and b"\n" in tail:
        return tail[tail.index(b"\n") + 1 :]
    return tail


def _gone(entry: ProcessEntry) -> str:
    if entry.state == "Z":
        return f"process {entry.pid} has ended ({entry.exit or 'exit unknown'}) and nobody has collected it"
    if entry.state == "missing":
        return "no process is known for this rank"
    return f"process {entry.pid} is gone"
