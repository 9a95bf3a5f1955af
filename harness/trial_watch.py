"""One trial as the agent of one node watches it: sample after sample into the watchdog, evidence onto the disk.

*Suspect* takes sample 0 (ledgers and plain stacks), *confirmed* takes sample 1 (native stacks too) and
writes the manifest, synced. A suspicion that falls leaves its sample behind as evidence of slowness, under
``slow-<n>/`` once the next one comes. Whether ranks hang is the watchdog's judgement, what a sample holds
is the capture's.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Literal

from harness.agent_files import AgentState, AgentTrial, Times, WatchedRank
from harness.capture import CaptureRank, CaptureReport, CaptureRequest, capture
from harness.ledger_layout import LedgerError
from harness.ledger_reader import LedgerReader
from harness.ledger_snapshot import Snapshot
from harness.processes import read_process
from harness.seats import Seat
from harness.store import StoreError, write_json
from harness.watchdog import Confirmed, Healthy, RankView, Sample, Suspect, Watchdog

_SLOW_KEPT = 3
_STATES: dict[str, Literal["running", "sleeping", "stopped", "dead"]] = {
    "R": "running", "S": "sleeping", "D": "sleeping", "T": "stopped", "Z": "dead", "dead": "dead",
}  # fmt: skip


class TrialWatch:
    """``busy(until_ns)`` is called before each capture, so that nobody takes the agent for dead meanwhile."""

    def __init__(self, trial: AgentTrial, *, capture_s: float, busy: Callable[[int], None]) -> None:
        self.trial = trial
        self.state: AgentState = "watching"
        self.reason: str | None = None
        self.ranks: tuple[Seat, ...] = ()
        self.proof: tuple[str, ...] = ()
        self.slow: list[Seat] = []
        self.notes: list[str] = []
        self.error: str | None = None
        self.evidence: Path | None = None
        self._capture_s = capture_s
        self._busy = busy
        self._started_ns = time.monotonic_ns() if trial.started_ns is None else trial.started_ns
        self._watchdog = Watchdog(trial.watchdog, trial.world)
        self._files = {rank.rank: _LedgerFile(rank.ledger) for rank in trial.ranks if rank.ledger is not None}
        self._reports: list[CaptureReport] = []
        self._since_ns = 0
        self._last_progress_ns = 0
        self._confirmed_ns = 0
        self._captured_ns = 0
        self._set_aside = 0

    @property
    def samples(self) -> int:
        return len(self._reports)

    @property
    def times(self) -> Times:
        return Times(
            last_progress_s=self._since_start_s(self._last_progress_ns),
            suspected_s=self._since_start_s(self._since_ns),
            confirmed_s=self._since_start_s(self._confirmed_ns),
            captured_s=self._since_start_s(self._captured_ns),
        )

    def look(self, done: Collection[int]) -> None:
        """One sample of all ranks; captures when the watchdog says so. ``done``: ranks that have answered."""
        if self.state == "captured":
            return
        views = tuple(self._view(rank, rank.rank in done) for rank in self.trial.ranks)
        standing = self._watchdog.observe(Sample(time.monotonic_ns(), views))
        if isinstance(standing, Healthy):
            self._last_progress_ns = max(self._last_progress_ns, standing.last_progress_ns)
            if standing.note:
                self._dissolve(standing)
        elif isinstance(standing, Suspect):
            self._suspect(standing)
        else:
            self._confirm(standing)

    def capture_now(self, reason: str) -> None:
        """Two samples and the manifest, whatever the watchdog thinks. Nothing if that has been done
        already."""
        if self.state == "captured":
            return
        if self.state != "suspect":
            self._begin(reason, (), ())
            self._since_ns = time.monotonic_ns()
        if not self._reports:
            self._take(native=False)
        # Two samples apart, or they could not show that nothing moves. Nobody sets the event.
        Event().wait(self.trial.watchdog.confirm_after_s)
        self._confirmed_ns = time.monotonic_ns()
        self._take(native=True)
        self._finish(reason, "asked")

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    # Looking ---------------------------------------------------------------------------------------------

    def _view(self, rank: WatchedRank, done: bool) -> RankView:
        entry = read_process(rank.process.pid, rank.process.start_time_ticks, rank.rank)
        return RankView(rank.rank, self._snapshot(rank.rank), _STATES.get(entry.state, "missing"), done)

    def _snapshot(self, rank: Seat) -> Snapshot | None:
        if rank not in self._files:
            return None
        try:
            return self._files[rank].snapshot()
        except LedgerError as error:
            self.error = str(error)
            return None

    # The three standings ---------------------------------------------------------------------------------

    def _suspect(self, standing: Suspect) -> None:
        self._last_progress_ns = standing.last_progress_ns
        if self.state == "suspect" and standing.since_ns == self._since_ns:
            self.proof = standing.proof
            return
        self._begin(standing.reason, standing.ranks, standing.proof)
        self._since_ns = standing.since_ns
        self._take(native=False)

    def _confirm(self, standing: Confirmed) -> None:
        self.reason, self.ranks, self.proof = standing.reason, standing.ranks, standing.proof
        self._last_progress_ns = standing.last_progress_ns
        if len(self._reports) > 1:
            # The last confirmation fell: its sample is what the next one is compared with.
            self._drop_oldest()
        self._take(native=True)
        first, last = self._reports[0], self._reports[-1]
        upheld = self._watchdog.confirm(first.stacks, last.stacks)
        if isinstance(upheld, Confirmed):
            self._confirmed_ns = standing.confirmed_ns
            self._finish(standing.reason, standing.road)
        else:
            self._note(upheld.proof[-1] if isinstance(upheld, Suspect) else "the suspicion fell")

    def _dissolve(self, standing: Healthy) -> None:
        self.slow.extend(rank for rank in standing.slow if rank not in self.slow)
        self._note(standing.note)
        self.state = "watching"
        self._write_manifest("slow", "dissolved")

    def _begin(self, reason: str, ranks: tuple[Seat, ...], proof: tuple[str, ...]) -> None:
        """A new suspicion; what an earlier one left is put aside."""
        self.state, self.reason, self.ranks, self.proof = "suspect", reason, ranks, proof
        self._confirmed_ns = self._captured_ns = 0
        if self._reports:
            self._set_aside += 1
            self._move_to_slow()
            self._reports = []

    def _finish(self, reason: str, road: str) -> None:
        self.reason = reason
        self._captured_ns = time.monotonic_ns()
        stored = self._write_manifest(reason, road)
        self.state, self.evidence = "captured", self.trial.evidence if stored else None

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # Evidence --------------------------------------------------------------------------------------------

    def _take(self, *, native: bool) -> None:
        self._busy(time.monotonic_ns() + int(self._capture_s * 1e9))
        self._reports.append(
            capture(
                CaptureRequest(
                    ranks=tuple(_capture_rank(rank) for rank in self.trial.ranks),
                    out=self.trial.evidence,
                    sample=len(self._reports),
                    native=native,
                    deadline_s=self._capture_s,
                )
            )
        )

    def _write_manifest(self, reason: str, road: str) -> bool:
        """False, with the reason in ``error``, when the disk refuses."""
        missing = {(lack.what, lack.why): lack for report in self._reports for lack in report.missing}
        document = {
            "reason": reason,
            "road": road,
            "ranks": list(self.ranks),
            "proof": list(self.proof),
            "notes": list(self.notes),
            "slow": list(self.slow),
            "times": self.times.model_dump(),
            "samples": [
                {"index": index, "taken_s": self._since_start_s(report.taken_ns)}
                for index, report in enumerate(self._reports)
            ],
            "missing": [lack.to_json() for lack in missing.values()],
        }
        try:
            write_json(self.trial.evidence / "manifest.json", document)
        except StoreError as error:
            self.error = str(error)
            return False
        return True

    def _move_to_slow(self) -> None:
        evidence = self.trial.evidence
        aside = evidence / f"slow-{self._set_aside}"
        try:
            aside.mkdir(exist_ok=True)
            for path in (*evidence.glob("sample-*"), evidence / "manifest.json"):
                if path.exists():
                    path.rename(aside / path.name)
            shutil.rmtree(evidence / f"slow-{self._set_aside - _SLOW_KEPT}", ignore_errors=True)
        except OSError as error:
            self.error = f"{aside}: cannot keep the evidence of a slow rank ({error.strerror})"

    def _drop_oldest(self) -> None:
        evidence = self.trial.evidence
        shutil.rmtree(evidence / "sample-0", ignore_errors=True)
        try:
            (evidence / "sample-1").rename(evidence / "sample-0")
        except OSError as error:
            self.error = f"{evidence}: cannot renumber a sample ({error.strerror})"
        del self._reports[0]

    def _since_start_s(self, at_ns: int) -> float | None:
        return None if at_ns == 0 else (at_ns - self._started_ns) / 1e9


@dataclass(slots=True)
class _LedgerFile:
    """A rank's ledger, opened when it appears and again when it is replaced."""

    path: Path
    _reader: LedgerReader | None = field(default=None, init=False)
    _inode: int = field(default=0, init=False)

    def snapshot(self) -> Snapshot | None:
        """None before the rank has made it. Raises LedgerError for a damaged one."""
        try:
            inode = self.path.stat().st_ino
        except OSError:  # not made yet; a file that vanished later is still readable through its descriptor
            return None if self._reader is None else self._reader.snapshot()
        if self._reader is None or inode != self._inode:
            self.close()
            self._reader, self._inode = LedgerReader.open(self.path), inode
        return self._reader.snapshot()

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _capture_rank(rank: WatchedRank) -> CaptureRank:
    return CaptureRank(
        rank=rank.rank,
        pid=rank.process.pid,
        start_time_ticks=rank.process.start_time_ticks,
        ledger_path=rank.ledger,
        faulthandler_path=rank.faulthandler,
        log_path=rank.log,
        decisions_path=rank.decisions,
    )
