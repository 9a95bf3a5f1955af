"""One trial as the agent of one node watches it: sample after sample into the watchdog, evidence onto the disk.

*Suspect* takes sample 0 (ledgers and plain stacks), *confirmed* takes sample 1 (native stacks too) and
writes the manifest, synced. A suspicion that falls leaves its samples behind as evidence of slowness. Whether
ranks hang is the watchdog's judgement, what a sample holds is the capture's, and where the samples of several
suspicions lie is in ``trial_evidence.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Literal

from harness.agent_files import AgentState, AgentTrial, Times, WatchedRank
from harness.capture import CaptureReport
from harness.children import processor_times
from harness.ledger_layout import LedgerError
from harness.ledger_reader import LedgerReader
from harness.ledger_snapshot import Snapshot
from harness.pace import Pace
from harness.process_control import read_thread
from harness.processes import read_process
from harness.seats import Seat, seats_words
from harness.standing import Work
from harness.stillness import moved_between
from harness.trial_evidence import TrialEvidence
from harness.watchdog import Confirmed, Healthy, RankView, Sample, Suspect, Watchdog

_AT_WORK = 0.2
"""Of a processor, from which on a rank's own processes count as working for it; idle pools take about none."""
_TREES_EVERY_S = 0.5
"""The process table of a busy node takes some 10 ms to read."""
_STARVED_WORTH_TELLING_S = 1.0
_STATES: dict[str, Literal["running", "sleeping", "stopped", "dead"]] = {
    "R": "running", "S": "sleeping", "D": "sleeping", "T": "stopped", "Z": "dead", "dead": "dead",
}  # fmt: skip


class TrialWatch:
    """``busy``: see ``TrialEvidence``."""

    def __init__(self, trial: AgentTrial, *, capture_s: float, busy: Callable[[int], None]) -> None:
        self.trial = trial
        self.state: AgentState = "watching"
        self.reason: str | None = None
        self.ranks: tuple[Seat, ...] = ()
        self.proof: tuple[str, ...] = ()
        self.slow: list[Seat] = []
        self.evidence: Path | None = None
        self._notes: list[str] = []
        self._ledger_error: str | None = None
        self._started_ns = time.monotonic_ns() if trial.started_ns is None else trial.started_ns
        self._evidence = TrialEvidence(trial, since_ns=self._started_ns, capture_s=capture_s, busy=busy)
        self._watchdog = Watchdog(trial.watchdog, trial.world)
        self._files = {rank.rank: _LedgerFile(rank.ledger) for rank in trial.ranks if rank.ledger is not None}
        self._since_ns = 0
        self._last_progress_ns = 0
        self._confirmed_ns = 0
        self._captured_ns = 0
        self._pace = Pace(trial.watchdog.sample_period_s)
        self._trees_read_s = 0.0

    @property
    def notes(self) -> list[str]:
        notes = list(self._notes)
        suspended_s, starved_s = self._watchdog.suspended_s, self._watchdog.starved_s
        if suspended_s:
            notes.append(f"the machine was suspended for {suspended_s:.1f} s")
        if starved_s >= _STARVED_WORTH_TELLING_S:
            notes.append(f"the watchdog itself was starved for {starved_s:.1f} s{self._pace.words}")
        return notes

    @property
    def error(self) -> str | None:
        """The last thing that went wrong with a ledger or a disk."""
        return self._evidence.error or self._ledger_error

    @property
    def samples(self) -> int:
        return len(self._evidence.reports)

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
        late_s = self._pace.begin()
        trees_s = self._processor_times()
        views = tuple(self._view(rank, rank.rank in done, trees_s) for rank in self.trial.ranks)
        standing = self._watchdog.observe(Sample(time.monotonic_ns(), views, late_s, self._pace.suspended_s))
        if isinstance(standing, Healthy):
            if standing.note:
                self._fell(standing.slow, standing.note)
            self._last_progress_ns = max(self._last_progress_ns, standing.last_progress_ns)
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
        if not self._evidence.reports:
            self._take(native=False)
        # Two samples apart, or they could not show that nothing moves. Nobody sets the event.
        Event().wait(self.trial.watchdog.confirm_after_s)
        self._confirmed_ns = time.monotonic_ns()
        self._take(native=True)
        self._finish(reason, "asked")

    def close(self) -> None:
        """The trial is over. A suspicion that stood until now fell, if the driver has every rank's answer."""
        if self.state == "suspect":
            verb = "was" if len(self.ranks) == 1 else "were"
            self._fell(self.ranks, f"the trial ended while {seats_words(self.ranks)} {verb} suspected")
        for file in self._files.values():
            file.close()

    # Looking ---------------------------------------------------------------------------------------------

    def _view(self, rank: WatchedRank, done: bool, trees_s: Mapping[Seat, float]) -> RankView:
        entry = read_process(rank.process.pid, rank.process.start_time_ticks, rank.rank)
        snapshot = self._snapshot(rank.rank)
        work = self._work(rank, snapshot, trees_s.get(rank.rank)) if entry.alive else None
        return RankView(rank.rank, snapshot, _STATES.get(entry.state, "missing"), done, work)

    def _processor_times(self) -> dict[Seat, float]:
        """Of whole trees, which takes a look at the process table: only where it matters, and now and then."""
        now_s = time.monotonic()
        if not self._watchdog.wants_processor_times or now_s - self._trees_read_s < _TREES_EVERY_S:
            return {}
        self._trees_read_s = now_s
        return processor_times({rank.rank: rank.process for rank in self.trial.ranks})

    def _work(self, rank: WatchedRank, snapshot: Snapshot | None, tree_cpu_s: float | None) -> Work | None:
        """A host thread that the ledger does not name is the first one of its process."""
        pid = rank.process.pid
        thread = snapshot.header.thread if snapshot is not None and snapshot.header.pid == pid else 0
        host = read_thread(pid, thread or pid)
        if host is None:
            return None
        return Work(host.state == "S", host.cpu_s, tree_cpu_s)

    def _snapshot(self, rank: Seat) -> Snapshot | None:
        if rank not in self._files:
            return None
        try:
            return self._files[rank].snapshot()
        except LedgerError as error:
            self._ledger_error = str(error)
            return None

    # The three standings ---------------------------------------------------------------------------------

    def _take(self, *, native: bool) -> None:
        self._evidence.take(native=native)
        self._pace.worked(self._evidence.reports[-1].duration_s)

    def _suspect(self, standing: Suspect) -> None:
        if self.state == "suspect" and standing.since_ns == self._since_ns:
            self.proof = standing.proof
            return
        if self.state == "suspect":
            self._fell(self.ranks, f"{seats_words(self.ranks)} went on after a suspicion ({self.reason})")
        self._begin(standing.reason, standing.ranks, standing.proof)
        self._since_ns, self._last_progress_ns = standing.since_ns, standing.last_progress_ns
        self._take(native=False)

    def _confirm(self, standing: Confirmed) -> None:
        self.reason, self.ranks, self.proof = standing.reason, standing.ranks, standing.proof
        self._last_progress_ns = standing.last_progress_ns
        if self.samples > 1:
            # The last confirmation fell: its sample is what the next one is compared with.
            self._evidence.drop_oldest()
        self._take(native=True)
        first, last = self._evidence.reports[0], self._evidence.reports[-1]
        moved = moved_between(first.snapshots, last.snapshots)
        upheld = self._watchdog.confirm(first.stacks, last.stacks, moved, _children_at_work(first, last))
        if isinstance(upheld, Confirmed):
            self._confirmed_ns = standing.confirmed_ns
            self._finish(standing.reason, standing.road)
        else:
            self._note(upheld.proof[-1] if isinstance(upheld, Suspect) else "the suspicion fell")

    def _fell(self, slow: Iterable[Seat], note: str) -> None:
        """The suspicion at hand; its last progress is still the one that it began with."""
        went_on_ns = time.monotonic_ns()
        self.slow.extend(rank for rank in slow if rank not in self.slow)
        self._note(note)
        self.state = "watching"
        last = self._evidence.reports[-1] if self.samples > 1 else None
        times = self.times.model_copy(
            update={
                "confirmed_s": None if last is None else self._since_start_s(last.taken_ns),
                "captured_s": None
                if last is None
                else self._since_start_s(last.taken_ns + int(last.duration_s * 1e9)),
                "went_on_s": self._since_start_s(went_on_ns),
            }
        )
        self._write_manifest("slow", "dissolved", times)
        self._evidence.fell((went_on_ns - self._last_progress_ns) / 1e9)

    def _begin(self, reason: str, ranks: tuple[Seat, ...], proof: tuple[str, ...]) -> None:
        """A new suspicion."""
        self.state, self.reason, self.ranks, self.proof = "suspect", reason, ranks, proof
        self._confirmed_ns = self._captured_ns = 0
        self._evidence.begin()

    def _finish(self, reason: str, road: str) -> None:
        self.reason = reason
        self._captured_ns = time.monotonic_ns()
        stored = self._write_manifest(reason, road, self.times)
        self.state, self.evidence = "captured", self.trial.evidence if stored else None

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)

    def _write_manifest(self, reason: str, road: str, times: Times) -> bool:
        return self._evidence.write_manifest(
            {
                "reason": reason,
                "road": road,
                "suspicion": self.reason,
                "ranks": list(self.ranks),
                "proof": list(self.proof),
                "notes": self.notes,
                "starved_s": round(self._watchdog.starved_s, 3),
                "slow": list(self.slow),
                "times": times.model_dump(),
                "samples": [
                    {"index": index, "taken_s": self._since_start_s(report.taken_ns)}
                    for index, report in enumerate(self._evidence.reports)
                ],
            }
        )

    def _since_start_s(self, at_ns: int) -> float | None:
        return None if at_ns == 0 else (at_ns - self._started_ns) / 1e9


def _children_at_work(first: CaptureReport, last: CaptureReport) -> set[Seat]:
    """Seats whose descendants together had a good part of a processor between the samples."""
    between_s = (last.taken_ns - first.taken_ns) / 1e9
    before_s, after_s = first.children_cpu_s, last.children_cpu_s
    return {
        seat
        for seat in before_s.keys() & after_s.keys()
        if after_s[seat] - before_s[seat] > _AT_WORK * between_s
    }


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
