"""The states of a trial, each transition with ranks and agents that say what the test wants."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from harness import controller
from harness.controller import (
    Capturing,
    Ended,
    Failing,
    Limits,
    Planned,
    Running,
    State,
    TrialRun,
    WatchView,
    history,
    latencies,
)
from harness.target import (
    EngineSpec,
    LaunchSpec,
    Needs,
    OtherProcess,
    Progress,
    RankPool,
    RankProcess,
    RankResult,
    TrialSpec,
)

RANKS = tuple(RankProcess(rank, "rank", "here", 100 + rank, 1, f"sim:{rank}") for rank in (0, 1))
SPEC = TrialSpec("t", 1, {}, {}, {}, {}, {}, {}, {}, {}, {}, {}, 60.0)
OTHERS = (OtherProcess("controller", "controller", "here", 99, 1),)
LIMITS = Limits(trial_s=1000.0, capture_s=1000.0)
NOW = Limits(trial_s=-1.0, capture_s=-1.0)
"""Everything is late at once."""


@dataclass
class Target:
    """Ranks that stand where ``at`` says."""

    at: Progress = field(default_factory=Progress)
    driven: list[str] = field(default_factory=list)

    def validate(self, spec: EngineSpec, workload: Mapping[str, Any], seeds: Sequence[int]) -> None: ...

    def fixed(self, spec: EngineSpec) -> Mapping[str, Any]:
        return {}

    def commands(self, spec: EngineSpec) -> Sequence[str]:
        return ()

    def needs(self, spec: EngineSpec) -> Needs:
        return Needs(spec.world)

    def launch(self, spec: LaunchSpec, pool: RankPool) -> Sequence[RankProcess]:
        return RANKS

    def drive(self, trial: TrialSpec) -> None:
        self.driven.append(trial.id)

    def progress(self) -> Progress:
        return self.at

    def processes(self) -> Sequence[RankProcess]:
        return RANKS

    def others(self) -> Sequence[OtherProcess]:
        return OTHERS

    def testimony(self, deadline_s: float) -> Mapping[str, Any]:
        return {}

    def linger(self, deadline_s: float) -> bool:
        return True

    def stop(self, deadline_s: float) -> None: ...


@dataclass
class Watch:
    """Agents that see what ``view`` says, and keep what they are told."""

    view: WatchView = field(default_factory=WatchView)
    told: list[Any] = field(default_factory=list)

    def begin(self, trial: TrialSpec, ranks: Sequence[RankProcess], others: Sequence[OtherProcess]) -> None:
        self.told.append(("begin", [rank.rank for rank in ranks], [other.name for other in others]))

    def mark_done(self, rank: int) -> None:
        self.told.append(("done", rank))

    def capture_now(self, reason: str) -> None:
        self.told.append(("capture", reason))

    def look(self) -> WatchView:
        return self.view

    def end(self) -> None:
        self.told.append("end")


@dataclass
class Bench:
    target: Target = field(default_factory=Target)
    watch: Watch = field(default_factory=Watch)

    def step(
        self,
        state: State,
        *,
        at: Progress | None = None,
        view: WatchView | None = None,
        limits: Limits = LIMITS,
    ) -> State:
        self.target.at = at or self.target.at
        self.watch.view = view or WatchView()
        return self.trial(limits).step(state)

    def trial(self, limits: Limits = LIMITS) -> TrialRun:
        return TrialRun(SPEC, self.target, self.watch, limits, RANKS)


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controller, "_FAILED_GRACE_S", -1.0)


def result(rank: int, **changes: Any) -> RankResult:
    given: dict[str, Any] = {
        "rank": rank, "steps": 10 + rank, "decode_steps": 8, "duration_s": 1.0, "tokens": {f"r{rank}": [1]},
        "finish": {f"r{rank}": "length"}, "counters": {"retractions": 2}, "latency_us": {},
        "nbytes": {"step": 4}, "leaks": [],
    }  # fmt: skip
    return RankResult(**(given | changes))


BOTH = Progress(done={0: result(0), 1: result(1)})
ONE_RAISED = Progress(failed={1: "ValueError: no"})
ALL_RAISED = Progress(done={0: result(0)}, failed={1: "ValueError: no"})
DIED = Progress(failed={1: "ActorDiedError: gone"}, died={1})
CAPTURED = WatchView(captured=True, notes=("rank 1 was slow once",))


def test_a_planned_trial_is_watched_before_it_is_driven(bench: Bench) -> None:
    state = bench.step(Planned())
    assert isinstance(state, Running)
    assert bench.watch.told == [("begin", [0, 1], ["controller"])] and bench.target.driven == ["t"]


def test_a_running_trial_shows_the_suspicion_and_goes_on(bench: Bench) -> None:
    state = bench.step(Running(0.0), view=WatchView(suspect="stalled (ranks 0)"), limits=Limits(1e12, 1e12))
    assert isinstance(state, Running) and state.suspect == "stalled (ranks 0)"
    assert bench.watch.told == []


def test_all_results_end_it_finished(bench: Bench) -> None:
    state = bench.step(running(), at=BOTH)
    assert isinstance(state, Ended)
    assert (state.finished, state.captured, state.reason) == (True, False, "")
    assert bench.watch.told == [("done", 0), ("done", 1), "end"]


def test_one_result_is_marked_once_and_ends_nothing(bench: Bench) -> None:
    trial = bench.trial()
    bench.target.at = Progress(done={0: result(0)})
    state = trial.step(trial.step(running()))
    assert isinstance(state, Running) and bench.watch.told == [("done", 0)]


def test_a_capture_ends_it_with_what_the_agents_noted(bench: Bench) -> None:
    state = bench.step(running(), view=CAPTURED)
    assert isinstance(state, Ended)
    assert (state.finished, state.captured, state.notes) == (False, True, ("rank 1 was slow once",))
    assert bench.watch.told == ["end"]


def test_an_agent_that_is_lost_ends_it_with_the_reason(bench: Bench) -> None:
    state = bench.step(running(), view=WatchView(problem="here: the agent is gone"))
    assert isinstance(state, Ended)
    assert (state.finished, state.captured, state.reason) == (False, False, "here: the agent is gone")


def test_the_evidence_that_came_counts_although_an_agent_was_lost(bench: Bench) -> None:
    state = bench.step(running(), view=WatchView(captured=True, problem="there: the agent is gone"))
    assert isinstance(state, Ended) and state.captured and state.reason == ""


def test_a_trial_that_takes_too_long_is_captured(bench: Bench) -> None:
    state = bench.step(running(), limits=NOW)
    assert isinstance(state, Capturing) and "took longer than" in state.reason
    assert bench.watch.told == [("capture", state.reason)]


def test_a_rank_that_raised_is_marked_and_the_others_are_waited_for(bench: Bench) -> None:
    state = bench.step(running(), at=ONE_RAISED)
    assert isinstance(state, Failing) and bench.watch.told == [("done", 1)]
    again = bench.step(state)
    assert isinstance(again, Failing) and again.since_s == state.since_s


def test_a_rank_that_died_has_not_answered(bench: Bench) -> None:
    """Marked as done, it would look healthy to the agents."""
    state = bench.step(running(), at=DIED)
    assert isinstance(state, Failing) and bench.watch.told == []


@pytest.mark.usefixtures("no_grace")
@pytest.mark.parametrize("progress", [ALL_RAISED, ONE_RAISED], ids=["the others ended", "the others wait"])
def test_a_capture_is_asked_for_when_nobody_noticed_that_a_rank_raised(
    bench: Bench, progress: Progress
) -> None:
    state = bench.step(failing(), at=progress)
    assert isinstance(state, Capturing)
    reason = "rank 1 ended without a result, so no other can finish"
    assert bench.watch.told[-1] == ("capture", reason)


def test_the_agents_have_a_moment_to_see_it_themselves(bench: Bench) -> None:
    state = bench.step(running(), at=ALL_RAISED)
    assert isinstance(bench.step(state), Failing)


def test_a_capture_that_comes_ends_the_waiting_for_it(bench: Bench) -> None:
    asked = bench.trial().capture(running(), "interrupted")
    assert isinstance(asked, Capturing)
    assert isinstance(bench.step(asked), Capturing)
    state = bench.step(asked, view=CAPTURED)
    assert isinstance(state, Ended) and state.captured and state.reason == "interrupted"


@pytest.mark.parametrize(
    ("view", "limits", "said"),
    [
        (WatchView(), NOW, "interrupted; no capture within -1 s"),
        (WatchView(problem="here: gone"), LIMITS, "interrupted; here: gone"),
    ],
)
def test_a_capture_that_does_not_come_is_told(
    bench: Bench, view: WatchView, limits: Limits, said: str
) -> None:
    state = bench.step(Capturing(0.0, 0.0, Progress(), "interrupted"), view=view, limits=limits)
    assert isinstance(state, Ended)
    assert (state.captured, state.finished, state.reason) == (False, False, said)


def test_results_that_come_while_a_capture_is_awaited_are_results(bench: Bench) -> None:
    state = bench.step(Capturing(0.0, 0.0, Progress(), "too long"), at=BOTH)
    assert isinstance(state, Ended) and state.finished and state.reason == ""


@pytest.mark.parametrize(
    "state", [Planned(), Ended(1.0, Progress(), True, False), Capturing(0.0, 0.0, Progress(), "asked")]
)
def test_a_capture_is_asked_for_once_and_never_before_or_after(bench: Bench, state: State) -> None:
    assert bench.trial().capture(state, "again") is state
    assert bench.watch.told == []


@pytest.mark.parametrize("state", [Planned(), Running(0.0, ONE_RAISED), Failing(0.0, 0.0, ONE_RAISED)])
def test_a_driver_that_must_go_ends_it_as_it_stands(bench: Bench, state: State) -> None:
    ended = bench.trial().give_up(state, "interrupted twice")
    assert (ended.finished, ended.captured, ended.reason) == (False, False, "interrupted twice")
    assert ended.progress == (Progress() if isinstance(state, Planned) else ONE_RAISED)
    assert bench.watch.told == ["end"]


def test_what_has_ended_stays_so(bench: Bench) -> None:
    ended = Ended(1.0, BOTH, True, False)
    assert bench.step(ended) is ended and bench.trial().give_up(ended, "late") is ended
    assert bench.watch.told == []


# What is stored -------------------------------------------------------------------------------------------


def test_the_history_adds_up_what_the_ranks_brought() -> None:
    at = Progress(done={0: result(0), 1: result(1, leaks=["3 pages"])})
    stored = history(Ended(2.5, at, True, False, notes=("slow",)), RANKS)
    assert (stored["steps"], stored["decode_steps"], stored["retractions"]) == (11, 8, 4)
    assert stored["leaks"] == ["rank 1: 3 pages"] and stored["nbytes"] == {"step": 8}
    assert stored["finish"] == {"r0": "length", "r1": "length"}
    assert stored["done"] == [0, 1] and stored["failed"] == {} and stored["died"] == []
    assert stored["ranks"][1] == {
        "rank": 1, "role": "rank", "node": "here", "pid": 101, "device": "sim:1"
    }  # fmt: skip


def test_the_history_tells_who_died_from_who_raised() -> None:
    at = Progress(failed={0: "ValueError: no", 1: "ActorDiedError: gone"}, died={1})
    stored = history(Ended(2.5, at, False, True), RANKS)
    assert stored["failed"] == {"0": "ValueError: no", "1": "ActorDiedError: gone"}
    assert stored["died"] == [1] and stored["steps"] == 0


def test_latencies_are_those_of_all_copies_and_of_the_steps_of_one_rank() -> None:
    found = latencies(
        {rank: result(rank, latency_us={"step": [rank], "bitmask_copy": [10 + rank]}) for rank in (0, 1)}
    )
    assert found == {"step": [0], "bitmask_copy": [10, 11]}


def running() -> Running:
    return Running(controller.time.monotonic())


def failing() -> Failing:
    return Failing(controller.time.monotonic(), controller.time.monotonic(), Progress())


def test_a_client_that_lost_its_server_gives_the_agents_time_and_then_asks_for_a_capture(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Progress(gave_up="connection refused")
    failing = bench.step(Running(time.monotonic()), at=lost)
    assert isinstance(failing, Failing)
    monkeypatch.setattr(controller, "_FAILED_GRACE_S", -1.0)
    asked = bench.step(failing, at=lost)
    assert isinstance(asked, Capturing) and "connection refused" in asked.reason
    ended = bench.step(asked, at=lost, view=WatchView(captured=True))
    assert isinstance(ended, Ended) and not ended.finished
    stored = history(ended, RANKS, OTHERS)
    assert stored["gave_up"] == "connection refused" and stored["failed"] == {}
    assert stored["others"] == [{"name": "controller", "role": "controller", "node": "here", "pid": 99}]
