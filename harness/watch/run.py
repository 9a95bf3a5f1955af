"""The watchdog on an engine that hangrig did not start: a tree of processes, no probe, no ledger.

One watch, top to bottom: find the processes, look at them once a second (cheap reads of ``/proc``, metrics,
health), take stacks when nothing else says that the engine moves, and when a stall is sure take two samples and
diagnose them. The engine is never signalled and only asked what any client may ask. Rules are ``rules.py``'s,
words ``text.py``'s.
"""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias

from harness.capture import CaptureReport, CaptureRequest, Missing, capture
from harness.diagnosis_model import Diagnosis, Times
from harness.process_control import ProcessId
from harness.process_tree import Member, Tree, read_tree
from harness.seats import Seat
from harness.stack_places import Doing
from harness.stacks import ProcessStacks
from harness.store import StoreError, write_json
from harness.watch.evidence import Evidence, capture_ranks, diagnose_watch, make_folder
from harness.watch.looks import Look, Opinion, SeatState, WatchSettings
from harness.watch.metrics import Traffic
from harness.watch.rules import Judge, judge_once
from harness.watch.sources import MEND, Deaths, Sources, access_problem, state_of

Verdict: TypeAlias = Literal["healthy", "not healthy", "cannot tell"]
EXITS: Mapping[Verdict, int] = {"healthy": 0, "not healthy": 1, "cannot tell": 3}

_PERIOD_S = 1.0
_ONCE_APART_S = 0.5
_CONFIRM_APART_S = 1.0
_STACKS_S = 5.0
_TREE_AGAIN_S = 5.0
_GENERATION_S = 4.0
_REFUSED = re.compile(r"permission denied|not permitted", re.IGNORECASE)


class WatchError(ValueError):
    """Bad usage: there is no such process, or we may not look into it. The message says what to do."""


@dataclass(frozen=True, slots=True)
class WatchRequest:
    """``timeout_s``: how long to wait for a stall; None: two samples now. ``metrics_url``: where to ask for metrics
    instead of where the server is found to listen."""

    pids: tuple[int, ...]
    timeout_s: float | None
    out: Path
    metrics_url: str | None = None
    settings: WatchSettings = field(default_factory=WatchSettings)


@dataclass(frozen=True, slots=True)
class SeatFinding:
    """What one process was last seen to do. ``stood_s``: for how long it was seen at one place."""

    member: Member
    state: SeatState
    doing: Doing | None
    stood_s: float


@dataclass(frozen=True, slots=True)
class WatchResult:
    verdict: Verdict
    opinion: Opinion
    diagnosis: Diagnosis | None
    tree: Tree
    node: str
    seats: tuple[SeatFinding, ...]
    folder: Path
    metrics_url: str | None
    traffic: Traffic | None
    watched_s: float
    missing: tuple[Missing, ...]

    @property
    def exit(self) -> int:
        return EXITS[self.verdict]


def watch(request: WatchRequest, tell: Callable[[str], None] = lambda text: None) -> WatchResult:
    """Watches until a stall is confirmed or the time is up, and stores what it found under ``request.out``.

    ``tell`` gets a line for people now and then. Raises WatchError and StoreError.
    """
    try:
        tree = read_tree(*request.pids)
    except ProcessLookupError as error:
        raise WatchError(
            f"{error}: give the pid of a running server (ps -ef | grep -e sglang -e vllm)"
        ) from None
    problem = access_problem(tree.members)
    if problem is not None:
        raise WatchError(problem)
    once = request.timeout_s is None
    sources = Sources.of(tree, request.metrics_url, ask_health=not once)
    folder = make_folder(request.out)
    running = _Watch(request, sources, Evidence(folder, sources), tell)
    try:
        return running.once() if once else running.until(request.timeout_s or 0.0)
    finally:
        running.close()


def capture_stall(pid: int, folder: Path, fact: str, without: Collection[int] = ()) -> WatchResult:
    """Two samples of the tree below ``pid`` into ``folder``, and what they say of a stall that somebody else has
    seen: ``fact``. Processes of ``without``, with what is below them, take no part. Raises WatchError and
    StoreError."""
    try:
        tree = read_tree(pid, without=without)
    except ProcessLookupError as error:
        raise WatchError(str(error)) from None
    problem = access_problem(tree.members)
    if problem is not None:
        raise WatchError(problem)
    sources = Sources.of(tree, None, ask_health=False)
    running = _Watch(
        WatchRequest((pid,), None, folder), sources, Evidence(folder, sources), lambda text: None
    )
    try:
        return running.stalled(fact)
    finally:
        running.close()


class _Watch:
    def __init__(
        self, request: WatchRequest, sources: Sources, evidence: Evidence, tell: Callable[[str], None]
    ) -> None:
        self._request = request
        self._sources = sources
        self._evidence = evidence
        self._tell = tell
        self._node = socket.gethostname()
        self._settings = replace(request.settings, engine=sources.tree.engine != "other")
        self._judge = Judge(self._settings)
        self._began_s = time.monotonic()
        self._deaths = Deaths([member.process for member in sources.tree.members])
        self._tree_read_s = self._began_s
        self._suspected_s: float | None = None
        self._look: Look | None = None
        self._missing: dict[str, Missing] = {}

    def close(self) -> None:
        self._deaths.close()
        self._sources.close()

    # Two samples now -------------------------------------------------------------------------------------

    def once(self) -> WatchResult:
        first = self._evidence.take()
        self._deaths.settle(_ONCE_APART_S)
        self._refresh(at_once=True)
        last = self._evidence.take()
        opinion = judge_once(first.look, last.look, self._settings)
        generates = opinion.standing == "unsure" and self._sources.tree.engine == "sglang"
        if generates and self._sources.generates_now(_GENERATION_S):
            opinion = Opinion("well", facts=("the server answered its health question: it generates",))
        self._judge.observe(first.look)
        self._judge.observe(last.look)
        return self._result(opinion)

    def stalled(self, fact: str) -> WatchResult:
        """Two samples, of a tree that stalls."""
        self._judge.observe(self._evidence.take().look)
        self._deaths.settle(_CONFIRM_APART_S)
        self._judge.observe(self._evidence.take(native=True).look)
        return self._result(Opinion("stalled", "told", (fact,)))

    # Until a stall or the end of the time ----------------------------------------------------------------

    def until(self, timeout_s: float) -> WatchResult:
        ends_s = self._began_s + timeout_s
        opinion = self._judge.observe(self._glance(stacks=False))
        self._tell(self._beginning(timeout_s))
        while True:
            if opinion.standing == "stalled":
                confirmed = self._confirm(opinion)
                if confirmed is not None:
                    return confirmed
                self._tell("the suspicion fell: it goes on")
            now_s = time.monotonic()
            if now_s >= ends_s:
                return self._end(opinion)
            self._deaths.wait(min(_PERIOD_S, ends_s - now_s))
            before = opinion
            self._refresh(at_once=False)
            opinion = self._judge.observe(self._glance(stacks=opinion.want_stacks))
            self._note(before, opinion)

    def _confirm(self, opinion: Opinion) -> WatchResult | None:
        """Two samples; None where the second shows that the engine goes on after all."""
        self._evidence.take()
        self._deaths.settle(_CONFIRM_APART_S)
        sample = self._evidence.take(native=opinion.reason not in ("dead", "missing"))
        after = self._judge.observe(sample.look)
        if after.standing != "stalled":
            self._evidence.forget()
            return None
        return self._result(after if after.reason == opinion.reason else opinion)

    def _end(self, opinion: Opinion) -> WatchResult:
        """The time is up: a last look at everybody, and what can be said."""
        if self._look is not None:
            opinion = self._judge.conclude(self._look, opinion)
        self._evidence.take()
        if opinion.standing != "well":
            self._deaths.settle(_CONFIRM_APART_S)
            self._evidence.take()
        self._judge.observe(self._evidence.samples[-1].look)
        return self._result(opinion)

    def _note(self, before: Opinion, after: Opinion) -> None:
        if after.standing == "suspect" and before.standing not in ("suspect", "stalled"):
            self._suspected_s = time.monotonic()
            self._tell(f"suspicious: {'; '.join(after.facts)}")
        elif after.standing in ("well", "unsure") and before.standing == "suspect":
            self._suspected_s = None
            self._tell("goes on")

    # Looking ---------------------------------------------------------------------------------------------

    def _glance(self, *, stacks: bool) -> Look:
        activities = self._sources.activities()
        taken: dict[Seat, ProcessStacks] = {}
        if stacks:
            # In memory where there is such a place: what is only looked at need not reach a disk.
            memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            with tempfile.TemporaryDirectory(prefix="hangrig-watch-", dir=memory) as scratch:
                report = capture(
                    CaptureRequest(capture_ranks(self._sources.tree), Path(scratch), 0, deadline_s=_STACKS_S)
                )
            taken = self._checked(report).stacks
        self._look = self._sources.look(taken, activities)
        return self._look

    def _refresh(self, *, at_once: bool) -> None:
        """Reads the tree again while ranks of it are still to come; those that died keep their seats."""
        now_s = time.monotonic()
        tree = self._sources.tree
        waiting = bool(tree.missing_ranks()) or not any(member.role == "rank" for member in tree.members)
        if self._deaths.died_s or not waiting or not (at_once or now_s - self._tree_read_s >= _TREE_AGAIN_S):
            return
        self._tree_read_s = now_s
        try:
            again = read_tree(*self._request.pids)
        except ProcessLookupError:
            return
        known = {member.process for member in tree.members}
        if again.members != tree.members and known <= {member.process for member in again.members}:
            # A process that starts takes its title late, and with it another seat.
            self._sources.tree = again
            self._judge = Judge(self._settings)
            self._deaths.close()
            self._deaths = Deaths([member.process for member in again.members])

    # What came of it -------------------------------------------------------------------------------------

    def _result(self, opinion: Opinion) -> WatchResult:
        verdict: Verdict = "not healthy" if opinion.standing == "stalled" else "cannot tell"
        if opinion.standing == "well":
            verdict = "healthy"
        now_s = time.monotonic()
        times = Times(
            last_progress_s=max(0.0, self._judge.progress_s - self._began_s),
            suspected_s=(self._suspected_s or now_s) - self._began_s,
            confirmed_s=now_s - self._began_s,
            captured_s=now_s - self._began_s,
        )
        diagnosis = None
        if verdict != "healthy":
            diagnosis = diagnose_watch(self._evidence, opinion, self._died_s(), times, self._node)
            write_json(self._evidence.folder / "diagnosis.json", diagnosis.to_json())
        self._evidence.write_manifest(opinion, times)
        last = self._evidence.samples[-1]
        self._checked(last.report)
        stacks = {seat.seat: seat for seat in self._evidence.seats({})}
        return WatchResult(
            verdict=verdict,
            opinion=opinion,
            diagnosis=diagnosis,
            tree=self._sources.tree,
            node=self._node,
            seats=tuple(
                SeatFinding(
                    member,
                    state_of(member.process),
                    stacks[member.seat].doing if stacks[member.seat].after is not None else None,
                    self._judge.stood_s(member.seat),
                )
                for member in self._sources.tree.members
            ),
            folder=self._evidence.folder,
            metrics_url=self._sources.metrics_url,
            traffic=last.look.traffic,
            watched_s=now_s - self._began_s,
            missing=tuple(self._missing.values()),
        )

    def _died_s(self) -> dict[Seat, float]:
        seats: dict[ProcessId, Seat] = {member.process: member.seat for member in self._sources.tree.members}
        return {
            seats[process]: max(0.0, died_s - self._began_s) if died_s else 0.0
            for process, died_s in self._deaths.died_s.items()
            if process in seats
        }

    def _beginning(self, timeout_s: float) -> str:
        tree = self._sources.tree
        number = len(tree.members)
        who = f"watching {number} process{'es' if number > 1 else ''} of {tree.engine} for {timeout_s:g} s"
        if self._look is None or self._look.traffic is None:
            return f"{who}; no metrics"
        return f"{who}; {self._look.traffic.words()} ({self._sources.metrics_url})"

    def _checked(self, report: CaptureReport) -> CaptureReport:
        """The report, with what it lacks noted. Raises WatchError where the kernel let nobody be read."""
        self._missing.update((lack.what, lack) for lack in report.missing)
        refused = next((lack.why for lack in report.missing if _REFUSED.search(lack.why)), None)
        if refused is not None and not report.stacks:
            raise WatchError(f"no stack may be read: {refused}. To mend it: {MEND}")
        return report


__all__ = ["EXITS", "SeatFinding", "StoreError", "WatchError", "WatchRequest", "WatchResult", "watch"]
