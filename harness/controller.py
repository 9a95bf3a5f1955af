"""One trial from its plan to its stored history: the states it passes, and one step between them.

Each state carries its data; ``TrialRun.step`` looks once at the ranks and at the agents and returns the next
state. It never waits itself, so the caller keeps the clock, the live table and Ctrl-C.

Not here: launching ranks and what follows a trial (``run.py``), judging it (``judge.py``), capturing (agents).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from harness.target import OtherProcess, Progress, RankProcess, RankResult, Target, TrialSpec

_FAILED_GRACE_S = 2.0
"""After a rank raised, how long the agents may take to notice what it does to the others. Ranks run in step,
so none of them can finish now; then the agents are asked to capture."""


_SHARED_PATHS = ("step", "prefill_step")


class Watch(Protocol):
    """What a controller needs of the agents."""

    def begin(
        self, trial: TrialSpec, ranks: Sequence[RankProcess], others: Sequence[OtherProcess]
    ) -> None: ...

    def mark_done(self, rank: int) -> None: ...

    def capture_now(self, reason: str) -> None: ...

    def look(self) -> WatchView: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class WatchView:
    """The agents' view of the trial. ``problem``: why part of it is not watched any more."""

    captured: bool = False
    suspect: str | None = None
    problem: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Planned:
    """Nothing has happened yet."""


@dataclass(frozen=True, slots=True)
class Running:
    """The ranks work, the agents watch."""

    started_s: float
    progress: Progress = field(default_factory=Progress)
    suspect: str | None = None


@dataclass(frozen=True, slots=True)
class Failing:
    """A rank raised, or the client lost its server; nobody has captured yet, and the others may hang because of
    it."""

    started_s: float
    since_s: float
    progress: Progress


@dataclass(frozen=True, slots=True)
class Capturing:
    """A capture was asked for: the trial ran out of time, lost its ranks, or was interrupted."""

    started_s: float
    since_s: float
    progress: Progress
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """All that the driver knows of the trial. Ranks are clean only when ``finished``."""

    duration_s: float
    progress: Progress
    finished: bool
    captured: bool
    reason: str = ""
    notes: tuple[str, ...] = ()


NEVER_BEGAN = Ended(duration_s=0.0, progress=Progress(), finished=False, captured=False)

State: TypeAlias = Planned | Running | Failing | Capturing | Ended


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. ``trial_s``: longest a trial may take. ``capture_s``: longest a capture may take."""

    trial_s: float
    capture_s: float


class TrialRun:
    """Drives one trial on ranks that are up."""

    def __init__(
        self, spec: TrialSpec, target: Target, watch: Watch, limits: Limits, ranks: Sequence[RankProcess]
    ) -> None:
        self._spec = spec
        self._target = target
        self._watch = watch
        self._limits = limits
        self._ranks = ranks
        self._marked: set[int] = set()
        self._notes: tuple[str, ...] = ()

    def step(self, state: State) -> State:
        """The next state; the same one when nothing happened."""
        if isinstance(state, Planned):
            self._watch.begin(self._spec, self._ranks, self._target.others())
            self._target.drive(self._spec)
            return Running(time.monotonic())
        if isinstance(state, Ended):
            return state
        progress, view = self._target.progress(), self._watch.look()
        self._notes = view.notes
        self._mark(progress)
        if view.captured:
            asked = state.reason if isinstance(state, Capturing) else ""
            return self._end(state.started_s, progress, captured=True, reason=asked)
        if len(progress.done) == len(self._ranks):
            return self._end(state.started_s, progress, captured=False, reason="")
        if isinstance(state, Capturing):
            return self._capturing(state, progress, view)
        if view.problem is not None:
            return self._end(state.started_s, progress, captured=False, reason=view.problem)
        if time.monotonic() - state.started_s > self._limits.trial_s:
            return self.capture(state, f"the trial took longer than {self._limits.trial_s:g} s")
        if (progress.failed or progress.gave_up) and isinstance(state, Running):
            return Failing(state.started_s, time.monotonic(), progress)
        if isinstance(state, Failing):
            if time.monotonic() - state.since_s > _FAILED_GRACE_S:
                return self.capture(state, _why_no_end(progress))
            return Failing(state.started_s, state.since_s, progress)
        return Running(state.started_s, progress, view.suspect)

    def capture(self, state: State, reason: str) -> State:
        """Asks for a capture, whatever the watchdog thinks."""
        if isinstance(state, Planned | Ended | Capturing):
            return state
        self._watch.capture_now(reason)
        return Capturing(state.started_s, time.monotonic(), self._target.progress(), reason)

    def give_up(self, state: State, reason: str) -> Ended:
        """Ends the trial as it stands, for a driver that must go now."""
        if isinstance(state, Ended):
            return state
        started_s = time.monotonic() if isinstance(state, Planned) else state.started_s
        progress = Progress() if isinstance(state, Planned) else state.progress
        return self._end(started_s, progress, captured=False, reason=reason)

    def _capturing(self, state: Capturing, progress: Progress, view: WatchView) -> State:
        late = time.monotonic() - state.since_s > self._limits.capture_s
        if late or view.problem is not None:
            why = view.problem or f"no capture within {self._limits.capture_s:g} s"
            return self._end(state.started_s, progress, captured=False, reason=f"{state.reason}; {why}")
        return Capturing(state.started_s, state.since_s, progress, state.reason)

    def _mark(self, progress: Progress) -> None:
        for rank in (*progress.done, *progress.failed):
            # A dead rank has not answered: the agents are to find it dead, not done.
            if rank not in self._marked and rank not in progress.died:
                self._marked.add(rank)
                self._watch.mark_done(rank)

    def _end(self, started_s: float, progress: Progress, *, captured: bool, reason: str) -> Ended:
        self._watch.end()
        return Ended(
            duration_s=time.monotonic() - started_s,
            progress=progress,
            finished=len(progress.done) == len(self._ranks),
            captured=captured,
            reason=reason,
            notes=self._notes,
        )


def _why_no_end(progress: Progress) -> str:
    if progress.failed:
        ranks = ", ".join(str(rank) for rank in sorted(progress.failed))
        return f"rank {ranks} ended without a result, so no other can finish"
    return f"the workload cannot go on: {progress.gave_up}"


def history(
    ended: Ended, ranks: Sequence[RankProcess], others: Sequence[OtherProcess] = ()
) -> dict[str, Any]:
    """What is stored of a trial before anybody judges it (``history.json``)."""
    results: Sequence[RankResult] = list(ended.progress.done.values())
    return {
        "finished": ended.finished,
        "captured": ended.captured,
        "reason": ended.reason,
        "notes": list(ended.notes),
        "duration_s": ended.duration_s,
        "done": sorted(ended.progress.done),
        "failed": {str(rank): text for rank, text in sorted(ended.progress.failed.items())},
        "died": sorted(ended.progress.died),
        "gave_up": ended.progress.gave_up,
        "ranks": [
            {
                "rank": entry.rank,
                "role": entry.role,
                "node": entry.node,
                "pid": entry.pid,
                "device": entry.device,
            }
            for entry in ranks
        ],
        "others": [
            {"name": entry.name, "role": entry.role, "node": entry.node, "pid": entry.pid} for entry in others
        ],
        "steps": max((result.steps for result in results), default=0),
        "decode_steps": max((result.decode_steps for result in results), default=0),
        "retractions": sum(result.counters.get("retractions", 0) for result in results),
        "counters": _added(result.counters for result in results),
        "nbytes": _added(result.nbytes for result in results),
        "finish": {request: how for result in results for request, how in result.finish.items()},
        "leaks": [f"rank {result.rank}: {leak}" for result in results for leak in result.leaks],
    }


def _added(tables: Any) -> dict[str, int]:
    total: dict[str, int] = {}
    for table in tables:
        for name, value in table.items():
            total[name] = total.get(name, 0) + value
    return total


def latencies(results: Mapping[int, RankResult]) -> dict[str, list[float]]:
    """Microseconds by path, of all ranks; but steps of rank 0 alone, since all ranks share a step's time."""
    paths: dict[str, list[float]] = {}
    for rank, result in sorted(results.items()):
        for path, values in result.latency_us.items():
            if rank == min(results) or path not in _SHARED_PATHS:
                paths.setdefault(path, []).extend(values)
    return paths
