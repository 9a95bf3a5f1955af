"""Suspicion and confirmation over hand-made samples: each hang beside the healthy twin that resembles it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from ledger_builder import Group, Rank, Stream, lost, replaying
from test_blocked import behind_experts, in_agreement

from harness.seats import Seat
from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.standing import Work
from harness.watchdog import (
    Confirmed,
    Healthy,
    RankView,
    Sample,
    Standing,
    Suspect,
    Watchdog,
    WatchdogSettings,
)

SETTINGS = WatchdogSettings()
PERIOD_S = SETTINGS.sample_period_s


class Bench:
    """Two ranks (or more) and a watchdog; time passes only in ``run``."""

    def __init__(
        self, world: int = 2, settings: WatchdogSettings = SETTINGS, seen: int | None = None
    ) -> None:
        self.ranks = [Rank(number, world, phase="launch", step=0) for number in range(world)]
        self.state = dict.fromkeys(range(world), "sleeping")
        self.done = dict.fromkeys(range(world), False)
        self.watchdog = Watchdog(settings, world)
        self.now_s = 0.0
        self.seen = world if seen is None else seen
        self.cpu_share: dict[int, float] = {}
        """Of a processor, what the host thread of a rank gets; of those named here the kernel tells."""
        self.children_share = dict.fromkeys(range(world), 0.0)
        """What the rest of its process tree gets."""
        self.asleep = dict.fromkeys(range(world), True)
        self.suspended_s = 0.0
        """That the machine slept before the next sample."""
        self._cpu_s = dict.fromkeys(range(world), (0.0, 0.0))

    def sample(self) -> Standing:
        views = tuple(
            RankView(
                r.rank,
                r.snapshot(self.now_s),
                self.state[r.rank],  # type: ignore[arg-type]
                self.done[r.rank],
                self.work(r.rank),
            )
            for r in self.ranks[: self.seen]
        )
        suspended_s, self.suspended_s = self.suspended_s, 0.0
        return self.watchdog.observe(Sample(int(self.now_s * 1e9), views, suspended_s=suspended_s))

    def work(self, rank: int) -> Work | None:
        if rank not in self.cpu_share:
            return None
        host_s, rest_s = self._cpu_s[rank]
        host_s += self.cpu_share[rank] * PERIOD_S
        rest_s += self.children_share[rank] * PERIOD_S
        self._cpu_s[rank] = (host_s, rest_s)
        looked = self.watchdog.wants_processor_times and round(self.now_s / PERIOD_S) % 5 == 0
        return Work(self.asleep[rank], host_s, host_s + rest_s if looked else None)

    def run(
        self, seconds: float, each: Callable[[], None] = lambda: None, *, period_s: float = PERIOD_S
    ) -> list[Standing]:
        standings = []
        for _ in range(round(seconds / period_s)):
            self.now_s += period_s
            each()
            standings.append(self.sample())
        return standings

    def step(self, *only: int) -> None:
        for rank in self.ranks:
            if not only or rank.rank in only:
                rank.step += 1
                rank.changes += 2
                rank.phase = ("launch", "agree", "wait-result")[rank.step % 3]

    def warm(self, seconds: float = 4.0) -> None:
        standings = self.run(seconds, self.step)
        assert all(isinstance(standing, Healthy) for standing in standings)


def alarms(standings: list[Standing]) -> list[Standing]:
    return [standing for standing in standings if not isinstance(standing, Healthy)]


def test_a_stall_is_suspected_after_the_floor_and_confirmed_a_little_later() -> None:
    bench = Bench()
    bench.warm()
    stalled_s = bench.now_s
    standings = bench.run(4)
    first = alarms(standings)[0]
    assert isinstance(first, Suspect)
    assert (first.road, first.reason, first.ranks) == ("budget", "stalled", (0, 1))
    assert first.last_progress_ns == int(stalled_s * 1e9)
    confirmed = standings[-1]
    assert isinstance(confirmed, Confirmed)
    assert confirmed.confirmed_ns - confirmed.since_ns >= SETTINGS.confirm_after_s * 1e9
    assert first.since_ns / 1e9 - stalled_s == pytest.approx(SETTINGS.floor_s, abs=2 * PERIOD_S)


def test_a_suspect_that_goes_on_is_slow() -> None:
    bench = Bench()
    bench.warm()
    standings = bench.run(1.8)
    assert isinstance(standings[-1], Suspect)
    bench.step()
    bench.now_s += PERIOD_S
    healthy = bench.sample()
    assert isinstance(healthy, Healthy)
    assert healthy.slow == (0, 1) and "stalled" in healthy.note


def test_a_suspect_that_goes_on_under_the_second_sample_is_slow() -> None:
    bench = Bench()
    bench.warm()
    assert isinstance(bench.run(4)[-1], Confirmed)
    doubted = bench.watchdog.confirm({}, {}, moved={1})
    assert isinstance(doubted, Suspect) and "the ledger of rank 1 moved" in doubted.proof[-1]
    bench.now_s += PERIOD_S
    bench.step()
    healthy = bench.sample()
    assert isinstance(healthy, Healthy) and healthy.slow == (0, 1)


def test_the_first_occurrence_of_a_phase_has_the_startup_budget() -> None:
    bench = Bench()
    for rank in bench.ranks:
        rank.phase = "prefill"
    assert not alarms(bench.run(SETTINGS.startup_s - 1))
    assert alarms(bench.run(3))


def test_a_rank_that_waits_is_as_patient_as_the_rank_it_waits_for() -> None:
    bench = Bench()
    bench.warm()
    bench.ranks[1].phase = "compile"
    assert not alarms(bench.run(SETTINGS.ceiling_s + 5))
    assert not alarms(bench.run(1, bench.step))


def test_a_rank_always_ten_times_slower_gets_a_budget_of_its_own() -> None:
    bench = Bench()
    bench.warm(3)

    def slow_turns() -> None:
        if round(bench.now_s / PERIOD_S) % 10 == 0:
            bench.step()

    assert not alarms(bench.run(20, slow_turns))
    assert bench.watchdog.budget_s(0) > 4 * SETTINGS.floor_s
    assert not alarms(bench.run(4))
    assert alarms(bench.run(8))


def test_parked_and_finished_ranks_owe_nothing() -> None:
    bench = Bench()
    bench.warm()
    for rank in bench.ranks:
        rank.phase = "parked"
        rank.changes += 1
    assert not alarms(bench.run(2 * SETTINGS.startup_s, period_s=0.4))
    bench.ranks[0].phase = "launch"
    bench.done[0] = True
    assert not alarms(bench.run(2 * SETTINGS.startup_s, period_s=0.4))


def test_a_dead_process_is_suspected_at_once_and_confirmed() -> None:
    bench = Bench()
    bench.warm()
    bench.state[1] = "dead"
    (suspect,) = bench.run(PERIOD_S)
    assert isinstance(suspect, Suspect)
    assert (suspect.reason, suspect.road, suspect.ranks) == ("dead", "proof", (1,))
    assert isinstance(bench.run(1)[-1], Confirmed)


def test_a_death_is_no_end_of_a_task_though_the_driver_hears_of_both_at_once() -> None:
    bench = Bench()
    bench.warm()
    bench.state[1] = "dead"
    bench.run(PERIOD_S)
    bench.done[1] = True
    assert isinstance(bench.run(1)[-1], Confirmed)
    at_once = Bench()
    at_once.warm()
    at_once.state[1], at_once.done[1] = "dead", True
    found = at_once.run(1)[-1]
    assert isinstance(found, Confirmed)
    assert (found.reason, found.ranks) == ("dead", (1,))


def test_a_rank_that_outlived_its_task_may_end() -> None:
    bench = Bench()
    bench.warm()
    bench.done[1] = True
    bench.run(PERIOD_S, lambda: bench.step(0))
    bench.state[1] = "dead"
    assert not alarms(bench.run(3, lambda: bench.step(0)))


@pytest.mark.parametrize("state", ["dead", "missing"])
def test_a_process_that_ends_after_its_task_is_nothing(state: str) -> None:
    bench = Bench()
    bench.warm()
    for rank in bench.ranks:
        rank.phase = "parked"
    bench.state[1], bench.done[1] = state, True
    assert not alarms(bench.run(5))


def test_missing_before_it_was_ever_seen_is_nothing() -> None:
    bench = Bench()
    bench.state[1] = "missing"
    assert not alarms(bench.run(5, lambda: bench.step(0)))


def test_a_stop_longer_than_the_budget_is_stopped_and_a_shorter_one_nothing() -> None:
    bench = Bench()
    bench.warm()
    bench.state[1] = "stopped"
    assert not alarms(bench.run(SETTINGS.floor_s - 2 * PERIOD_S))
    bench.state[1] = "sleeping"
    assert not alarms(bench.run(1, bench.step))
    bench.state[1] = "stopped"
    found = alarms(bench.run(4))
    assert isinstance(found[-1], Confirmed)
    assert (found[-1].reason, found[-1].ranks) == ("stopped", (1,))


def test_a_stopped_process_does_not_compile() -> None:
    bench = Bench()
    bench.warm()
    bench.ranks[1].phase = "compile"
    bench.state[1] = "stopped"
    found = alarms(bench.run(SETTINGS.floor_s + SETTINGS.confirm_after_s + 3 * PERIOD_S))
    assert isinstance(found[-1], Confirmed)
    assert (found[-1].reason, found[-1].ranks) == ("stopped", (1,))


def into(bench: Bench, phase: str) -> None:
    for rank in bench.ranks:
        rank.phase = phase


def test_a_rank_that_made_whole_steps_has_its_usual_budget_in_a_phase_never_seen_before() -> None:
    bench = Bench(settings=replace(SETTINGS, warm_steps=0))
    bench.warm(3)
    into(bench, "process")
    found = alarms(bench.run(SETTINGS.floor_s + SETTINGS.confirm_after_s + 3 * PERIOD_S))
    assert isinstance(found[-1], Confirmed)
    assert found[-1].reason == "stalled"


def test_before_that_it_has_the_ceiling() -> None:
    bench = Bench(settings=replace(SETTINGS, warm_steps=0))
    bench.warm(1)
    into(bench, "process")
    assert not alarms(bench.run(SETTINGS.ceiling_s - 1))


def test_the_usual_budget_of_a_slow_rank_is_longer() -> None:
    bench = Bench(settings=replace(SETTINGS, warm_steps=0, settled_steps=5))

    def slow_turns() -> None:
        if round(bench.now_s / PERIOD_S) % 10 == 0:
            bench.step()

    assert not alarms(bench.run(10, slow_turns))
    into(bench, "process")
    assert not alarms(bench.run(6))
    assert alarms(bench.run(4))


@pytest.mark.parametrize("phase", sorted(SETTINGS.patient_phases))
def test_a_phase_that_may_be_a_first_one_stays_patient(phase: str) -> None:
    bench = Bench()
    bench.warm()
    into(bench, phase)
    assert not alarms(bench.run(SETTINGS.startup_s - 1, period_s=0.4))


def in_groups(bench: Bench, *names: str) -> None:
    for rank in bench.ranks:
        for name in names:
            rank.groups[name] = Group(tuple(range(len(bench.ranks)))).round("all_reduce")


def test_a_member_whose_task_is_over_never_comes() -> None:
    bench = Bench()
    bench.warm()
    in_groups(bench, "experts")
    bench.run(0.2)
    bench.ranks[0].groups["experts"].enter("all_reduce")
    bench.done[1] = True
    found = alarms(bench.run(SETTINGS.proof_still_s + SETTINGS.confirm_after_s + 0.3))
    assert isinstance(found[-1], Confirmed)
    assert (found[-1].road, found[-1].reason, found[-1].ranks) == ("proof", "collective", (0,))
    assert any("rank 1 never entered" in fact for fact in found[-1].proof)


def test_what_a_rank_left_queued_when_its_task_ended_never_comes_once_it_stands() -> None:
    bench = Bench()
    bench.warm()
    in_groups(bench, "experts")
    bench.run(0.2)
    bench.ranks[0].groups["experts"].enter("all_reduce")
    bench.ranks[1].groups["experts"].add("all_reduce")
    bench.done[1] = True

    def carries_on() -> None:
        bench.ranks[1].streams["compute"].operations.append(("gemm", 9))

    assert not alarms(bench.run(SETTINGS.floor_s - 2 * PERIOD_S, carries_on))
    found = alarms(bench.run(2 * SETTINGS.proof_still_s + SETTINGS.confirm_after_s))
    assert found and isinstance(found[-1], Confirmed)
    assert (found[-1].road, found[-1].reason, found[-1].ranks) == ("proof", "collective", (0,))


def test_what_finished_ranks_left_in_a_stream_alarms_nobody() -> None:
    bench = Bench()
    in_groups(bench, "experts")
    bench.warm()
    bench.ranks[0].groups["experts"].enter("all_reduce")
    bench.done = {0: True, 1: True}
    assert not alarms(bench.run(5))


def test_being_in_a_collective_is_no_hang() -> None:
    bench = Bench()
    bench.warm()
    in_groups(bench, "experts")

    def peer_computes() -> None:
        bench.ranks[1].streams["compute"].operations.append(("gemm", 1))
        bench.ranks[1].streams["compute"].done += 1

    bench.ranks[0].groups["experts"].enter("all_reduce")
    assert not alarms(bench.run(SETTINGS.ceiling_s - 1, peer_computes))


def test_a_parked_peer_is_given_the_time_to_be_started() -> None:
    bench = Bench()
    in_groups(bench, "agree")
    bench.warm()
    bench.ranks[1].phase = "parked"
    bench.ranks[0].groups["agree"].enter("all_gather")
    assert not alarms(bench.run(SETTINGS.floor_s - 3 * PERIOD_S))
    assert alarms(bench.run(1))[0].reason == "collective"  # type: ignore[union-attr]


def test_a_mismatch_is_proof() -> None:
    bench = Bench()
    in_groups(bench, "experts")
    bench.warm()
    bench.ranks[0].groups["experts"].enter("all_reduce", (8, 4))
    bench.ranks[1].groups["experts"].enter("all_reduce", (6, 4))
    found = alarms(bench.run(1.2))
    assert isinstance(found[0], Suspect) and isinstance(found[-1], Confirmed)
    assert found[0].reason == "mismatch"
    assert any("different size" in fact for fact in found[0].proof)


def test_equal_collectives_on_all_ranks_are_left_to_the_budget() -> None:
    bench = Bench()
    in_groups(bench, "experts")
    bench.warm()
    for rank in bench.ranks:
        rank.groups["experts"].enter("all_reduce")
    assert not alarms(bench.run(SETTINGS.floor_s - 2 * PERIOD_S))


def test_a_cycle_of_queued_collectives_is_proof() -> None:
    bench = Bench()
    in_groups(bench, "left", "right")
    bench.warm()
    for rank, (first, second) in zip(bench.ranks, (("left", "right"), ("right", "left")), strict=True):
        rank.groups[first].enter("all_reduce")
        rank.groups[second].add("all_reduce")
    found = alarms(bench.run(1.2))
    assert isinstance(found[0], Suspect)
    assert (found[0].reason, found[0].road, found[0].ranks) == ("cycle", "proof", (0, 1))
    assert found[0].since_ns / 1e9 <= bench.now_s - SETTINGS.proof_still_s


def test_a_circle_whose_member_may_still_come_waits_for_its_budget() -> None:
    bench = Bench()
    in_groups(bench, "left", "right")
    bench.warm()
    bench.ranks[0].groups["left"].enter("all_reduce")
    bench.ranks[1].groups["right"].enter("all_reduce")
    bench.ranks[1].phase = "compile"
    assert not alarms(bench.run(SETTINGS.ceiling_s))


def test_a_circle_of_hosts_that_are_held_is_proof() -> None:
    """Neither can come while it is inside: the one carries its collective itself, the other waits for a result
    behind its own."""
    bench = Bench()
    in_groups(bench, "agree", "experts")
    bench.warm()
    for rank in bench.ranks:
        rank.groups["agree"].host = True
    bench.ranks[1].groups["agree"].enter("all_gather")
    bench.ranks[1].phase = "agree"
    bench.ranks[0].groups["experts"].enter("all_reduce")
    bench.ranks[0].phase = "wait-result"
    bench.ranks[0].streams["compute"] = Stream([("event.wait", 9)])
    bench.ranks[0].streams["copy"] = Stream([("event.wait", 9)])
    found = alarms(bench.run(SETTINGS.floor_s - 2 * PERIOD_S))
    assert found and isinstance(found[0], Suspect)
    assert (found[0].reason, found[0].road, found[0].ranks) == ("cycle", "proof", (0, 1))
    bench.ranks[0].streams["compute"] = Stream([("gemm", 9)])  # it may be computing on its way there
    bench.step()
    assert not alarms(bench.run(SETTINGS.floor_s - 2 * PERIOD_S))


def test_a_starved_observer_widens_the_budget() -> None:
    bench = Bench()
    bench.warm()
    bench.now_s += 60.0
    assert isinstance(bench.sample(), Healthy)
    assert not alarms(bench.run(0.5))


def test_a_partial_view_waits_for_the_ceiling() -> None:
    bench = Bench(seen=1)
    bench.warm()
    assert not alarms(bench.run(SETTINGS.ceiling_s - 1))
    assert alarms(bench.run(3))


def test_an_unreadable_ledger_is_unknown_not_guilty() -> None:
    watchdog = Watchdog(SETTINGS, 1)
    standing: Standing = Healthy(0)
    for turn in range(200):
        standing = watchdog.observe(Sample(turn * 10**9, (RankView(0, None, "sleeping", False),)))
    assert isinstance(standing, Healthy)
    assert standing.unknown == (0,)


def decide(bench: Bench, **fields: object) -> None:
    bench.step()
    for rank in bench.ranks:
        rank.decisions.append(
            {"step": rank.step, "tokens": [4, 4], "retracted": [], "tokens_out": 5} | fields
        )


# A lost record -------------------------------------------------------------------------------------

WARM_RANKS = replace(SETTINGS, warm_steps=0)
"""What ranks get that have been through a trial: the ceiling in phases not left yet."""


def starved(overtaken: int = 1) -> Bench:
    """Rank 1 is short of a record; nothing moved in this trial, so every budget is the ceiling."""
    bench = Bench(settings=WARM_RANKS)
    for rank in bench.ranks:
        replaying(rank, fenced=rank.rank == 0, overtaken=overtaken * rank.rank)
    return bench


def test_a_lost_record_is_proof_long_before_a_budget() -> None:
    bench = starved()
    found = alarms(bench.run(SETTINGS.proof_still_s + SETTINGS.confirm_after_s + 3 * PERIOD_S))
    assert isinstance(found[0], Suspect) and isinstance(found[-1], Confirmed)
    assert (found[0].reason, found[0].road, found[0].ranks) == ("lost-record", "proof", (0, 1))
    assert found[0].since_ns - found[0].last_progress_ns <= (SETTINGS.proof_still_s + 2 * PERIOD_S) * 1e9
    said = "\n".join(found[-1].proof)
    assert "rank 1: compute stands in graph.replay decode.4, number 9 of that graph" in said
    assert "'decode.4 attention.0' has 9 records, 1 of them" in said
    assert "rank 0: the host waits in phase 'wait-result' of step 10" in said


def drain(bench: Bench) -> None:
    for rank in bench.ranks:
        rank.phase, rank.step = "drain", 9


def a_peer_waits_for_the_result(bench: Bench) -> None:
    bench.ranks[1].phase = "agree"


def it_waits_while_a_peer_agrees(bench: Bench) -> None:
    bench.ranks[0].phase = "agree"


def a_peer_has_ended(bench: Bench) -> None:
    bench.done[0] = True


def events_are_shared_between_graphs(bench: Bench) -> None:
    bench.ranks[1].external = [replace(e, name="layer 0") for e in bench.ranks[1].external]


@pytest.mark.parametrize(
    "change",
    [drain, a_peer_waits_for_the_result, it_waits_while_a_peer_agrees, a_peer_has_ended,
     events_are_shared_between_graphs],
)  # fmt: skip
def test_wherever_the_hosts_wait_a_lost_record_is_proof(change: Callable[[Bench], None]) -> None:
    bench = starved()
    change(bench)
    assert {standing.reason for standing in alarms(bench.run(1.5))} == {"lost-record"}  # type: ignore[union-attr]


def nothing_was_overtaken(bench: Bench) -> None:
    lost(bench.ranks[1], 0)


def its_updates_are_fenced(bench: Bench) -> None:
    """A completion that was seen late makes a fenced record look overtaken."""
    replaying(bench.ranks[1], fenced=True, overtaken=1)


def a_replay_ran_on_its_own_record(bench: Bench) -> None:
    """Replay 7 completed at 5 s, before update 8 was queued at 6 s."""
    bench.ranks[1].streams["compute"].times[7] = (4, 5)
    bench.ranks[1].streams["update"].times[8] = (6, 6)


def a_record_is_still_to_come(bench: Bench) -> None:
    bench.ranks[1].streams["update"].done -= 1


def it_is_no_replay(bench: Bench) -> None:
    bench.ranks[1].streams["compute"].operations[8] = ("gemm", 9)


def its_host_launches(bench: Bench) -> None:
    bench.ranks[1].phase = "launch"


def a_peer_launches(bench: Bench) -> None:
    bench.ranks[0].phase = "launch"


def all_hosts_agree(bench: Bench) -> None:
    for rank in bench.ranks:
        rank.phase = "agree"


def its_result_is_older_than_the_replay(bench: Bench) -> None:
    """The copy of step 8 is under way; after it the host may bring the update."""
    bench.ranks[1].streams["copy"].done -= 1


def its_result_has_come(bench: Bench) -> None:
    bench.ranks[1].streams["copy"].done = 18


def it_agrees_while_its_peer_is_a_step_behind(bench: Bench) -> None:
    bench.ranks[1].phase = "agree"
    compute = bench.ranks[0].streams["compute"]
    compute.operations = [(label, step - 1) for label, step in compute.operations]


def a_process_is_stopped(bench: Bench) -> None:
    bench.state[0] = "stopped"


def nobody_looks_at_its_streams(bench: Bench) -> None:
    bench.ranks[1].stamp_age_s = 5.0


def a_member_never_came_to_the_replay(bench: Bench) -> None:
    bench.ranks[0].streams["compute"] = Stream([("gemm", 9)])
    bench.ranks[0].groups["experts"].records.pop()


def a_rank_is_out_of_sight(bench: Bench) -> None:
    bench.ranks[0], bench.ranks[1] = bench.ranks[1], bench.ranks[0]
    bench.seen = 1


@pytest.mark.parametrize(
    "change",
    [nothing_was_overtaken, its_updates_are_fenced, a_replay_ran_on_its_own_record, a_record_is_still_to_come,
     it_is_no_replay, its_host_launches, a_peer_launches, all_hosts_agree, its_result_is_older_than_the_replay,
     its_result_has_come, it_agrees_while_its_peer_is_a_step_behind, a_process_is_stopped,
     nobody_looks_at_its_streams, a_member_never_came_to_the_replay, a_rank_is_out_of_sight],
)  # fmt: skip
def test_what_only_resembles_a_lost_record_is_no_proof(change: Callable[[Bench], None]) -> None:
    bench = starved()
    change(bench)
    assert all(standing.reason != "lost-record" for standing in alarms(bench.run(10)))  # type: ignore[union-attr]


def test_more_completed_replays_than_records_that_were_not_overtaken_is_no_proof() -> None:
    bench = starved()
    lost(bench.ranks[1], 2, records=10, waits=9)
    assert not alarms(bench.run(10))


def test_a_replay_that_goes_on_after_all_was_slow() -> None:
    bench = starved()
    assert isinstance(bench.run(0.8)[-1], Suspect)
    bench.ranks[1].streams["compute"].done += 1
    healthy = bench.run(PERIOD_S)[-1]
    assert isinstance(healthy, Healthy)
    assert healthy.slow == (0, 1)


# Livelock ------------------------------------------------------------------------------------------


def test_steps_that_retract_for_ever_are_a_livelock() -> None:
    bench = Bench()
    bench.warm(2)
    found = alarms(bench.run(SETTINGS.livelock_s + 2, lambda: decide(bench, retracted=[3])))
    assert isinstance(found[0], Suspect) and isinstance(found[-1], Confirmed)
    assert found[0].reason == "livelock"


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": [0, 0], "mode": "idle"},
        {"tokens": [256, 0], "mode": "prefill"},
    ],
    ids=["idle for the whole run", "a very long prefill"],
)
def test_steps_without_tokens_are_no_livelock_by_themselves(fields: dict[str, object]) -> None:
    bench = Bench()
    bench.warm(2)
    assert not alarms(bench.run(3 * SETTINGS.livelock_s, lambda: decide(bench, **fields)))


def test_retractions_with_finished_tokens_are_no_livelock() -> None:
    bench = Bench()
    bench.warm(2)
    assert not alarms(
        bench.run(
            3 * SETTINGS.livelock_s,
            lambda: decide(bench, retracted=[3], tokens_out=round(bench.now_s)),
        )
    )


def test_a_host_stack_that_moves_takes_the_confirmation_back() -> None:
    bench = Bench()
    bench.warm()
    assert isinstance(bench.run(3)[-1], Confirmed)
    before = {rank.rank: rank.stacks() for rank in bench.ranks}
    assert isinstance(bench.watchdog.confirm(before, before), Confirmed)
    bench.ranks[1].frames = ("build", "compile_kernel", "step")
    after = {rank.rank: rank.stacks() for rank in bench.ranks}
    taken_back = bench.watchdog.confirm(before, after)
    assert isinstance(taken_back, Suspect)
    assert any("rank 1" in fact for fact in taken_back.proof)
    assert isinstance(bench.run(1)[-1], Confirmed)
    bench.run(SETTINGS.startup_s)
    assert isinstance(bench.watchdog.confirm(before, after), Confirmed)


def in_places(*frames: tuple[str, str]) -> ProcessStacks:
    """A host thread; frames innermost first."""
    host = ThreadStack(1, "MainThread", False, False, tuple(Frame(name, file, 1) for name, file in frames))
    return ProcessStacks(1, 1, "py-spy", False, (host,))


COMPILING = in_places(
    ("Popen._try_wait", "/usr/lib/python3.11/subprocess.py"), ("Popen.wait", "/usr/lib/python3.11/subprocess.py"),
    ("load_kernel", "serving/forward.py"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("stacks", "at_work", "doubted"),
    [
        (COMPILING, {1}, True),
        (COMPILING, set(), False),
        (in_places(("wait", "/usr/lib/python3.11/threading.py"), ("step", "serving/engine.py")), {1}, False),
    ],
    ids=["its compiler works", "its compiler sleeps", "it waits for something else"],
)
def test_a_rank_that_waits_for_a_process_of_its_own_is_as_busy_as_that(
    stacks: ProcessStacks, at_work: set[Seat], doubted: bool
) -> None:
    bench = Bench()
    bench.warm()
    assert isinstance(bench.run(4)[-1], Confirmed)
    both = {1: stacks}
    standing = bench.watchdog.confirm(both, both, children_at_work=at_work)
    assert isinstance(standing, Suspect) is doubted
    if doubted:
        assert "rank 1 waits for a process of its own that is at work" in standing.proof
        bench.run(SETTINGS.startup_s)
        assert isinstance(bench.watchdog.confirm(both, both, children_at_work=at_work), Confirmed)


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="floor_s"):
        WatchdogSettings(floor_s=40.0)
    with pytest.raises(ValueError, match="confirm_after_s"):
        WatchdogSettings(confirm_after_s=0.0)


# Hosts inside synchronisations ------------------------------------------------------------------------------


def pageable_skip(bench: Bench) -> None:
    """Rank 1 left a collective out and is in the agreement; rank 0 copies pageably behind that collective."""
    behind_experts(bench.ranks[0])
    in_agreement(bench.ranks[1])


def test_hosts_inside_synchronisations_that_wait_for_each_other_are_a_proof_without_any_budget() -> None:
    bench = Bench()
    pageable_skip(bench)
    bench.run(PERIOD_S)
    standings = bench.run(SETTINGS.proof_still_s + SETTINGS.confirm_after_s + 3 * PERIOD_S)
    confirmed = standings[-1]
    assert isinstance(confirmed, Confirmed)
    assert (confirmed.road, confirmed.reason, confirmed.ranks) == ("proof", "cycle", (0, 1))


def test_the_same_hosts_are_not_accused_while_a_kernel_runs_or_nobody_looks_at_the_streams() -> None:
    bench = Bench()
    pageable_skip(bench)
    bench.ranks[0].streams["compute"].done = 0
    assert not alarms(bench.run(5))
    bench.ranks[0].streams["compute"].done = 1
    bench.ranks[0].stamp_age_s = 5.0
    assert not alarms(bench.run(5))


def test_the_same_hosts_are_not_accused_when_nobody_has_looked_since_they_moved() -> None:
    """The interpreter's lock may be kept: then a stream stands before an event that has come."""
    bench = Bench()
    pageable_skip(bench)

    def kept() -> None:
        bench.ranks[0].stamp_age_s = bench.now_s

    assert not alarms(bench.run(5, kept))


def test_the_same_hosts_with_one_that_moves_are_not_accused() -> None:
    bench = Bench()
    pageable_skip(bench)

    def heartbeat() -> None:
        bench.ranks[1].changes += 1

    assert not alarms(bench.run(5, heartbeat))


# Ranks that do nothing, and hosts that compute ---------------------------------------------------------------


def one_for_whom_all_wait(bench: Bench) -> None:
    """Rank 1 has come to its launch and goes no further; rank 0 waits behind the collective that it owes."""
    behind_experts(bench.ranks[0])
    bench.ranks[1].phase = "launch"
    bench.ranks[1].groups["experts"] = Group((0, 1)).round("all_reduce")
    bench.cpu_share = {0: 0.0, 1: 0.0}


def test_a_rank_that_all_wait_for_and_that_does_nothing_is_suspected_long_before_its_first_budget() -> None:
    bench = Bench()
    one_for_whom_all_wait(bench)
    standings = bench.run(SETTINGS.idle_s + 2.5)
    first, last = alarms(standings)[0], standings[-1]
    assert isinstance(first, Suspect) and isinstance(last, Confirmed)
    assert (first.road, first.reason, first.ranks) == ("budget", "stalled", (0, 1))
    assert "rank 1: nothing moved for" in first.proof[0] and "its host sleeps" in first.proof[0]
    assert first.since_ns >= SETTINGS.idle_s * 1e9


def test_the_same_rank_with_a_compiler_of_its_own_keeps_its_first_budget() -> None:
    bench = Bench()
    one_for_whom_all_wait(bench)
    bench.children_share[1] = 0.6
    assert not alarms(bench.run(SETTINGS.startup_s - 2))


def test_the_same_rank_that_reads_from_a_disk_or_computes_keeps_its_first_budget() -> None:
    bench = Bench()
    one_for_whom_all_wait(bench)
    bench.asleep[1] = False
    assert not alarms(bench.run(SETTINGS.startup_s - 2))


def test_the_same_rank_in_a_phase_of_patience_or_unseen_keeps_its_first_budget() -> None:
    bench = Bench()
    one_for_whom_all_wait(bench)
    bench.ranks[1].phase = "load"
    assert not alarms(bench.run(20))
    bench.ranks[1].phase = "launch"
    del bench.cpu_share[1]
    assert not alarms(bench.run(20))


def test_the_same_rank_with_work_on_its_device_keeps_its_first_budget() -> None:
    bench = Bench()
    one_for_whom_all_wait(bench)
    bench.ranks[1].streams["compute"] = Stream([("gemm", 9)])
    assert not alarms(bench.run(20))


def test_a_rank_that_does_nothing_while_another_is_not_seen_to_wait_for_it_keeps_its_first_budget() -> None:
    bench = Bench(world=3)
    one_for_whom_all_wait(bench)
    bench.ranks[2].phase = "launch"
    assert not alarms(bench.run(20))


def test_a_rank_of_which_no_thread_runs_is_suspected_whatever_its_old_ledger_says() -> None:
    """A native call keeps the interpreter's lock: by the ledger all members are inside the collective."""

    def frozen() -> Bench:
        bench = Bench()
        one_for_whom_all_wait(bench)
        behind_experts(bench.ranks[1])
        bench.ranks[1].phase, bench.ranks[1].host_wait = "launch", None
        return bench

    assert not alarms(frozen().run(20))  # somebody looks at its streams
    bench = frozen()
    bench.ranks[1].stamp_age_s = 5.0
    bench.cpu_share[1] = 0.3  # it works
    assert not alarms(bench.run(10))
    bench.cpu_share[1] = 0.0
    bench.children_share[1] = 0.5  # its other threads ask for the lock again and again
    assert isinstance(bench.run(SETTINGS.idle_s + 2.5)[-1], Confirmed)


def test_a_starved_observer_is_more_patient_with_a_rank_that_does_nothing() -> None:
    bench = Bench()
    one_for_whom_all_wait(bench)
    bench.run(1)
    bench.run(4, period_s=1.0)  # late by 0.9 s, four times
    assert bench.watchdog.starved_s > 3.0
    assert not alarms(bench.run(1.5))


def test_a_rank_behind_the_driver_is_not_idle() -> None:
    bench = Bench()
    one_for_whom_all_wait(bench)
    bench.ranks[1].phase = SETTINGS.parked_phase
    bench.ranks[0].groups = {}
    bench.ranks[0].phase = SETTINGS.parked_phase
    assert not alarms(bench.run(20))


def computing(bench: Bench) -> None:
    """Rank 1 computes in a native call; rank 0 waits in the agreement."""
    bench.warm()
    bench.cpu_share = {0: 0.0, 1: 0.9}
    bench.asleep[1] = False
    bench.ranks[0].phase, bench.ranks[1].phase = "agree", "launch"
    bench.ranks[0].groups["agree"] = Group((0, 1), host=True).round("all_gather").enter("all_gather")
    bench.ranks[1].groups["agree"] = Group((0, 1)).round("all_gather")


def test_a_host_that_computes_in_one_native_call_is_slow_until_patience_ends() -> None:
    bench = Bench()
    computing(bench)
    assert isinstance(bench.run(4)[-1], Confirmed)
    doubted = bench.watchdog.confirm({}, {})
    assert isinstance(doubted, Suspect) and "the host of rank 1 computes" in doubted.proof[-1]
    bench.now_s += PERIOD_S
    bench.step()
    healthy = bench.sample()
    assert isinstance(healthy, Healthy) and healthy.slow == (0, 1)
    # One that never comes back hangs, however much it computes: a warm one when the ceiling is reached.
    bench.run(SETTINGS.ceiling_s - 2)
    assert isinstance(bench.watchdog.confirm({}, {}), Suspect)
    bench.run(5)
    assert isinstance(bench.watchdog.confirm({}, {}), Confirmed)


def test_a_host_that_starves_wants_the_processor_and_computes_too() -> None:
    bench = Bench()
    computing(bench)
    bench.cpu_share[1] = 0.05
    assert isinstance(bench.run(4)[-1], Confirmed)
    assert isinstance(bench.watchdog.confirm({}, {}), Suspect)


def test_a_host_that_spins_in_a_wait_does_not_compute() -> None:
    bench = Bench()
    computing(bench)
    bench.ranks[1].streams["compute"] = Stream([("gemm", 9)])
    bench.run(4)
    assert isinstance(bench.watchdog.confirm({}, {}), Confirmed)
    bench = Bench()
    computing(bench)
    bench.run(4)
    spins = {1: bench.ranks[1].stacks()}  # in Event.synchronize
    assert isinstance(bench.watchdog.confirm({}, spins), Confirmed)


# A machine that slept ------------------------------------------------------------------------------------------


def test_what_stood_still_before_the_machine_slept_begins_anew() -> None:
    bench = Bench()
    bench.warm()
    assert isinstance(bench.run(1.8)[-1], Suspect)
    bench.suspended_s = 3600.0
    bench.now_s += PERIOD_S
    woken = bench.sample()
    assert isinstance(woken, Healthy) and woken.slow == ()
    assert "suspended for 3600.0 s while ranks 0, 1 were suspected" in woken.note
    assert bench.watchdog.suspended_s == 3600.0
    assert not alarms(bench.run(SETTINGS.floor_s - PERIOD_S))
    assert isinstance(bench.run(2)[-1], Confirmed)


def test_a_machine_that_sleeps_again_and_again_raises_no_alarm() -> None:
    bench = Bench()
    bench.warm()

    def sleep() -> None:
        if round(bench.now_s / PERIOD_S) % 10 == 0:
            bench.suspended_s = 20.0

    assert not alarms(bench.run(10, sleep))


def test_a_hang_that_was_confirmed_stays_one_when_the_machine_slept() -> None:
    bench = Bench()
    bench.warm()
    assert isinstance(bench.run(4)[-1], Confirmed)
    bench.suspended_s = 5.0
    bench.now_s += PERIOD_S
    assert isinstance(bench.sample(), Confirmed)
