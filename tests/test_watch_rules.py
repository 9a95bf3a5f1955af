"""Stall or no stall, judged from looks at an engine without ledgers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from harness.seats import Seat
from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.watch.activity import Activity
from harness.watch.looks import Look, Opinion, SeatLook, SeatState, WatchSettings
from harness.watch.metrics import HealthState, Traffic
from harness.watch.rules import Judge, judge_once

GLOO = "site-packages/torch/distributed/distributed_c10d.py"
SCHEDULER = "site-packages/sglang/srt/managers/scheduler.py"
ALL_REDUCE = (("all_reduce", GLOO), ("gather", SCHEDULER), ("Scheduler.run_batch", SCHEDULER))
SYNC = (("all_gather_into_tensor", GLOO), ("prepare_mlp_sync_batch_raw", SCHEDULER))
RECEIVE = (("Scheduler.recv_requests", SCHEDULER),)
EXPERTS = (("experts", SCHEDULER), ("Scheduler.run_batch", SCHEDULER))
SCORES = (("scores", SCHEDULER), ("Scheduler.run_batch", SCHEDULER))
LOCK = (("Condition.wait", "/usr/lib/python3.11/threading.py"), ("admit", SCHEDULER))
LOADING = (("read", SCHEDULER), ("ModelRunner.load_model", SCHEDULER))
SYNCHRONIZE = (("Event.synchronize", "site-packages/torch/cuda/streams.py"), ("copy_done", SCHEDULER))
CONTROLLER = (
    ("DataParallelController.event_loop", "site-packages/sglang/srt/managers/data_parallel_controller.py"),
)

Frames = tuple[tuple[str, str], ...]


class Engine:
    """Two ranks and a controller; every look is a second after the one before."""

    def __init__(self, **settings: float) -> None:
        self.judge = Judge(WatchSettings(**settings))  # type: ignore[arg-type]
        self.now_s = 100.0
        self.busy_s: dict[Seat, float] = {}
        self.wakes: dict[Seat, int] = {}
        self.looks: list[Look] = []

    def look(
        self,
        *,
        stacks: Mapping[Seat, Frames] | None = None,
        states: Mapping[Seat, SeatState] | None = None,
        busy: Mapping[Seat, float] | None = None,
        turns: Mapping[Seat, int] | None = None,
        traffic: Traffic | None = None,
        health: HealthState = "unknown",
        asked_s: float = 0.0,
        well_s: float | None = None,
        missing: tuple[int, ...] = (),
    ) -> Opinion:
        self.now_s += 1.0
        seats = []
        for seat, role in ((0, "rank"), (1, "rank"), ("controller", "controller")):
            self.busy_s[seat] = self.busy_s.get(seat, 0.0) + (busy or {}).get(seat, 0.0)
            self.wakes[seat] = self.wakes.get(seat, 0) + (turns or {}).get(seat, 0)
            frames = (stacks or {}).get(seat, CONTROLLER if stacks and seat == "controller" else None)
            seats.append(
                SeatLook(
                    seat,
                    role,
                    (states or {}).get(seat, "alive"),
                    Activity(int(self.now_s * 1e9), self.busy_s[seat], self.wakes[seat], None),
                    None if frames is None else process(seat, frames),
                )
            )
        look = Look(self.now_s, tuple(seats), traffic, health, health != "unknown", asked_s, well_s, missing)
        self.looks.append(look)
        return self.judge.observe(look)


def process(seat: Seat, frames: Frames) -> ProcessStacks:
    made = tuple(Frame(name, file, 3) for name, file in frames)
    return ProcessStacks(1, seat, "py-spy", False, (ThreadStack(1, "MainThread", False, False, made),))


def traffic(running: float = 0.0, tokens: float = 0.0) -> Traffic:
    return Traffic(running, 0.0, tokens, {"sglang:realtime_tokens_total": tokens})


# --- well


def test_an_engine_that_makes_tokens_is_well_and_is_left_alone() -> None:
    engine = Engine()
    for second in range(30):
        opinion = engine.look(traffic=traffic(8, 100.0 * second))
    assert opinion.standing == "well"
    assert not opinion.want_stacks


def test_an_idle_engine_is_well_and_is_looked_at_now_and_then() -> None:
    engine = Engine()
    wanted = []
    stacks: dict[Seat, Frames] = {0: RECEIVE, 1: RECEIVE}
    for _ in range(40):
        opinion = engine.look(traffic=traffic(0, 7), stacks=stacks if wanted and wanted[-1] else None)
        wanted.append(opinion.want_stacks)
        assert opinion.standing == "well"
    assert 2 <= sum(wanted) <= 6


def test_ranks_that_turn_over_in_their_idle_collective_are_well() -> None:
    engine = Engine()
    for _ in range(30):
        opinion = engine.look(stacks={0: SYNC, 1: SYNC}, turns={0: 800, 1: 800}, busy={0: 0.9, 1: 0.9})
    assert opinion.standing == "well"


def test_one_rank_asleep_in_its_loop_and_its_peer_in_the_loop_s_collective_are_well() -> None:
    engine = Engine()
    for _ in range(30):
        opinion = engine.look(stacks={0: RECEIVE, 1: SYNC}, turns={0: 1, 1: 1})
    assert opinion.standing == "well"


def test_a_rank_that_works_is_waited_for() -> None:
    engine = Engine()
    for second in range(40):
        rank = EXPERTS if second % 2 else SCORES
        opinion = engine.look(stacks={0: ALL_REDUCE, 1: rank}, busy={1: 1.0}, turns={1: 1})
        assert opinion.standing in ("well", "unsure")


def test_an_engine_that_loads_has_longer() -> None:
    engine = Engine()
    for _ in range(30):
        opinion = engine.look(stacks={0: ALL_REDUCE, 1: LOADING})
    assert (opinion.standing, opinion.reason) == ("suspect", "frozen")
    for _ in range(200):
        opinion = engine.look(stacks={0: ALL_REDUCE, 1: LOADING})
    assert opinion.standing == "stalled"


# --- processes


def test_a_stopped_process_is_a_stall_once_it_lasts() -> None:
    engine = Engine()
    assert engine.look().standing != "stalled"
    assert engine.look(states={1: "stopped"}).standing == "suspect"
    engine.look(states={1: "stopped"})
    opinion = engine.look(states={1: "stopped"})
    assert (opinion.standing, opinion.reason, opinion.facts) == (
        "stalled",
        "stopped",
        ("rank 1: stopped for 2.0 s",),
    )


def test_a_process_that_goes_on_after_a_stop_is_forgiven() -> None:
    engine = Engine()
    engine.look(states={1: "stopped"})
    assert engine.look(traffic=traffic(1, 1)).standing == "well"
    assert engine.look(states={1: "stopped"}).standing == "suspect"


def test_a_death_is_a_stall_at_once() -> None:
    engine = Engine()
    engine.look()
    assert engine.look(states={"controller": "dead"}).reason == "dead"


def test_a_rank_that_never_comes_is_a_stall_after_a_while() -> None:
    engine = Engine()
    opinions = [engine.look(missing=(3,)) for _ in range(12)]
    assert opinions[0].standing == "suspect"
    assert (opinions[-1].standing, opinions[-1].reason) == ("stalled", "missing")


# --- requests that wait


def test_tokens_that_do_not_come_while_the_ranks_stand() -> None:
    engine = Engine()
    engine.look(traffic=traffic(7, 500))
    engine.look(traffic=traffic(7, 501))
    opinions = [engine.look(traffic=traffic(7, 501), stacks={0: ALL_REDUCE, 1: SCORES}) for _ in range(12)]
    first = next(number for number, opinion in enumerate(opinions, 1) if opinion.standing == "stalled")
    assert first == 10  # seconds since the last token
    assert opinions[-1].reason == "tokens"
    assert (
        opinions[-1].facts[0]
        == "7 running, 0 waiting, 501 tokens so far, and nothing moved in the metrics for 12.0 s"
    )


def test_a_stale_count_of_requests_is_no_stall_while_the_ranks_go_round_idle() -> None:
    engine = Engine()
    for _ in range(30):
        opinion = engine.look(traffic=traffic(1, 500), stacks={0: SYNC, 1: RECEIVE}, turns={0: 500, 1: 500})
    assert opinion.standing == "suspect"
    assert engine.judge.conclude(engine.looks[-1], opinion).standing == "unsure"


def test_tokens_that_do_not_come_while_a_rank_works_are_slow_at_the_end() -> None:
    engine = Engine()
    for second in range(80):
        rank = EXPERTS if second % 2 else SCORES
        opinion = engine.look(traffic=traffic(7, 501), stacks={0: ALL_REDUCE, 1: rank}, busy={1: 1.0})
    assert (opinion.standing, opinion.reason) == ("suspect", "slow")
    assert engine.judge.conclude(engine.looks[-1], opinion).standing == "stalled"


def test_a_short_wait_at_the_end_is_not_known_to_be_a_stall() -> None:
    engine = Engine()
    engine.look(traffic=traffic(7, 500))
    for _ in range(6):
        opinion = engine.look(traffic=traffic(7, 500), stacks={0: ALL_REDUCE, 1: SCORES})
    concluded = engine.judge.conclude(engine.looks[-1], opinion)
    assert concluded.standing == "unsure"
    assert "10 s would be a finding" in concluded.missing[0]


def test_a_health_question_without_an_answer_and_a_controller_that_is_held_up() -> None:
    engine = Engine()
    engine.look(health="well", well_s=100.5, stacks={0: SYNC, 1: SYNC})
    stacks: dict[Seat, Frames] = {0: SYNC, 1: SYNC, "controller": LOCK}
    turns: dict[Seat, int] = {0: 500, 1: 500}
    opinions = [
        engine.look(health="well", well_s=100.5, asked_s=1.0 + second, stacks=stacks, turns=turns)
        for second in range(14)
    ]
    assert opinions[0].standing != "stalled"
    assert (opinions[-1].standing, opinions[-1].reason) == ("stalled", "health")


def test_good_health_answers_are_progress() -> None:
    engine = Engine()
    for _ in range(30):
        opinion = engine.look(health="well", well_s=engine.now_s, stacks={0: SYNC, 1: ALL_REDUCE})
    assert opinion.standing == "well"


# --- nobody says whether anybody waits


@pytest.mark.parametrize("frames", [SCORES, LOCK, RECEIVE, ALL_REDUCE])
def test_ranks_that_wait_for_one_that_does_nothing(frames: Frames) -> None:
    engine = Engine()
    opinions = [engine.look(stacks={0: ALL_REDUCE, 1: frames}) for _ in range(13)]
    stalled = [number for number, opinion in enumerate(opinions) if opinion.standing == "stalled"]
    assert stalled[0] == 10  # ten seconds from the first dump to the last
    assert opinions[-1].reason == "frozen"


def test_standing_is_what_dumps_have_shown_and_not_what_passed_since() -> None:
    engine = Engine()
    engine.look(stacks={0: ALL_REDUCE, 1: SCORES})
    engine.look(stacks={0: ALL_REDUCE, 1: SCORES})
    for _ in range(20):
        opinion = engine.look()
    assert opinion.standing == "suspect"
    assert engine.judge.stood_s(0) == 1.0
    assert opinion.want_stacks


def test_ranks_that_spin_in_a_wait_are_not_known_to_hang() -> None:
    engine = Engine()
    for _ in range(30):
        opinion = engine.look(stacks={0: SYNCHRONIZE, 1: SYNCHRONIZE}, busy={0: 1.0, 1: 1.0})
    assert opinion.standing == "unsure"
    assert "metrics would tell" in opinion.missing[0]


def test_a_controller_that_is_held_up_is_a_stall_of_a_known_engine_only() -> None:
    stacks: dict[Seat, Frames] = {0: RECEIVE, 1: RECEIVE, "controller": LOCK}
    for engine_known, standing in ((True, "stalled"), (False, "unsure")):
        engine = Engine(engine=engine_known)
        for _ in range(12):
            opinion = engine.look(stacks=stacks)
        assert (opinion.standing, opinion.reason) == (standing, "held")


def test_without_stacks_and_without_metrics_nothing_can_be_told() -> None:
    engine = Engine()
    for _ in range(5):
        opinion = engine.look()
    assert opinion.standing == "unsure"
    assert opinion.missing == (
        "stacks of ranks 0, 1 and controller",
        "metrics, or a health answer, that say whether requests are in the engine",
    )


def test_stacks_are_taken_less_often_while_they_show_movement() -> None:
    engine = Engine()
    taken = 0
    wanted = True
    for second in range(60):
        rank = EXPERTS if second % 2 else SCORES
        opinion = engine.look(stacks={0: SCORES, 1: rank} if wanted else None, busy={0: 1.0, 1: 1.0})
        taken += wanted
        wanted = opinion.want_stacks
    assert 6 <= taken <= 15


# --- two looks, now


def once(*looks: dict[str, object]) -> Opinion:
    engine = Engine()
    for look in looks:
        engine.look(**look)  # type: ignore[arg-type]
    return judge_once(engine.looks[0], engine.looks[1], WatchSettings())


@pytest.mark.parametrize(
    ("first", "second", "standing"),
    [
        # Both schedulers of a healthy engine may be met in a collective: one moves, or tokens do.
        ({"stacks": {0: ALL_REDUCE, 1: ALL_REDUCE}}, {"stacks": {0: ALL_REDUCE, 1: SCORES}}, "well"),
        (
            {"stacks": {0: ALL_REDUCE, 1: ALL_REDUCE}, "traffic": traffic(7, 1)},
            {"stacks": {0: ALL_REDUCE, 1: ALL_REDUCE}, "traffic": traffic(7, 2)},
            "well",
        ),
        (
            {"stacks": {0: ALL_REDUCE, 1: ALL_REDUCE}},
            {"stacks": {0: ALL_REDUCE, 1: ALL_REDUCE}, "turns": {0: 90}},
            "well",
        ),
        ({"stacks": {0: RECEIVE, 1: RECEIVE}}, {"stacks": {0: RECEIVE, 1: RECEIVE}}, "well"),
        ({"stacks": {0: ALL_REDUCE, 1: SCORES}}, {"stacks": {0: ALL_REDUCE, 1: SCORES}}, "unsure"),
        ({"stacks": {0: ALL_REDUCE, 1: ALL_REDUCE}}, {"stacks": {0: ALL_REDUCE, 1: ALL_REDUCE}}, "unsure"),
        ({"stacks": {0: RECEIVE, 1: RECEIVE, "controller": LOCK}},
         {"stacks": {0: RECEIVE, 1: RECEIVE, "controller": LOCK}}, "unsure"),
        ({}, {}, "unsure"),
        ({"states": {1: "stopped"}}, {"states": {1: "stopped"}}, "stalled"),
        (
            {"stacks": {0: SCORES, 1: SCORES}, "states": {1: "stopped"}},
            {"stacks": {0: EXPERTS, 1: EXPERTS}},
            "well",
        ),
        ({}, {"states": {1: "dead"}}, "stalled"),
        ({"missing": (2,)}, {"missing": (2,)}, "stalled"),
    ],
)  # fmt: skip
def test_what_two_looks_can_say(first: dict[str, object], second: dict[str, object], standing: str) -> None:
    assert once(first, second).standing == standing


def test_two_looks_say_what_they_cannot() -> None:
    still: dict[str, object] = {"stacks": {0: ALL_REDUCE, 1: SCORES}}
    opinion = once(still, still)
    assert "watch with --timeout" in opinion.missing[0]
    assert opinion.facts[0].startswith("rank 0: in all_reduce, called by gather")
