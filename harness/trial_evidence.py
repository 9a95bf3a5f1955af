"""The evidence directory of one trial while an agent watches it.

In front, directly below ``evidence/``, lie the samples of the suspicion at hand. One that fell makes room for
the next: its samples and manifest go to ``slow-<n>/``. When a trial is over and nothing hung, the longest of
those that fell after two samples lies in front again, because that is the one that is diagnosed.

What a sample holds is the capture's business, when to take one is decided in ``trial_watch.py``.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.agent_files import AgentTrial, WatchedRank
from harness.capture import CaptureRank, CaptureReport, CaptureRequest, capture
from harness.store import StoreError, write_json

MANIFEST = "manifest.json"
_SLOW_KEPT = 3


class TrialEvidence:
    """``error`` is the last thing that the disk refused. ``busy(until_ns)`` is called before each capture, so that
    nobody takes the agent for dead meanwhile. ``since_ns``: the trial's start on this node (CLOCK_MONOTONIC)."""

    def __init__(
        self, trial: AgentTrial, *, since_ns: int, capture_s: float, busy: Callable[[int], None]
    ) -> None:
        self.reports: list[CaptureReport] = []
        """Of the suspicion at hand."""
        self.error: str | None = None
        self._trial = trial
        self._folder = trial.evidence
        self._since_ns = since_ns
        self._capture_s = capture_s
        self._busy = busy
        self._set_aside = 0
        self._longest_s = 0.0
        self._longest: Path | None = None
        """Where the samples of the longest fallen suspicion lie; None: there is none with two samples."""

    def take(self, *, native: bool) -> None:
        """One more sample of all ranks."""
        self._busy(time.monotonic_ns() + int(self._capture_s * 1e9))
        self.reports.append(
            capture(
                CaptureRequest(
                    ranks=tuple(_capture_rank(rank) for rank in self._trial.ranks),
                    out=self._folder,
                    sample=len(self.reports),
                    native=native,
                    deadline_s=self._capture_s,
                    device=self._trial.device,
                    since_ns=self._since_ns,
                )
            )
        )

    def drop_oldest(self) -> None:
        """The second sample becomes the first, to be held against one that is still to come."""
        shutil.rmtree(self._folder / "sample-0", ignore_errors=True)
        try:
            (self._folder / "sample-1").rename(self._folder / "sample-0")
        except OSError as error:
            self.error = f"{self._folder}: cannot renumber a sample ({error.strerror})"
        del self.reports[0]

    def write_manifest(self, document: Mapping[str, Any]) -> bool:
        """With the samples at hand and what they lack. False, with the reason in ``error``, when the disk
        refuses."""
        missing = {(lack.what, lack.why): lack for report in self.reports for lack in report.missing}
        try:
            write_json(
                self._folder / MANIFEST,
                {**document, "missing": [lack.to_json() for lack in missing.values()]},
            )
        except StoreError as error:
            self.error = str(error)
            return False
        return True

    def begin(self) -> None:
        """A new suspicion; what an earlier one left in front is put aside."""
        self.reports = []
        if any(self._folder.glob("sample-*")):
            self._put_aside()

    def fell(self, length_s: float) -> None:
        """The suspicion at hand fell after ``length_s`` and its manifest is written."""
        if len(self.reports) > 1 and length_s > self._longest_s:
            self._longest_s, self._longest = length_s, self._folder
        elif self._longest is not None:
            aside = self._longest
            self._put_aside()
            self._move(aside, self._folder)
            self._longest = self._folder
        self.reports = []

    def _put_aside(self) -> None:
        self._set_aside += 1
        aside = self._folder / f"slow-{self._set_aside}"
        self._move(self._folder, aside)
        if self._longest == self._folder:
            self._longest = aside
        old = self._folder / f"slow-{self._set_aside - _SLOW_KEPT}"
        if old != self._longest:
            shutil.rmtree(old, ignore_errors=True)

    def _move(self, source: Path, target: Path) -> None:
        try:
            target.mkdir(exist_ok=True)
            for path in (*source.glob("sample-*"), source / MANIFEST):
                if path.exists():
                    path.rename(target / path.name)
            if source != self._folder:
                source.rmdir()
        except OSError as error:
            self.error = f"{target}: cannot keep the evidence of a slow rank ({error.strerror})"


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
