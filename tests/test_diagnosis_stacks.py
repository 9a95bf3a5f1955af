"""What stacks alone show of a stall: recorded engines first, then one rule a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.diagnosis_model import Cause, Fact
from harness.diagnosis_stacks import SeatStacks, stack_cause
from harness.seats import Seat
from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.stacks_parse import parse_pyspy_json

CAPTURES = Path(__file__).parent / "captures"
STALLED = (Fact("7 requests run, and no token came for 10 s", "evidence/sample-1/metrics.json"),)

GLOO = "site-packages/torch/distributed/distributed_c10d.py"
ALL_REDUCE = (("all_reduce", GLOO), ("gather", "site-packages/sglang/srt/layers/dp_attention.py"))
BARRIER = (("barrier", GLOO), ("sync", "site-packages/sglang/srt/layers/dp_attention.py"))
SHM = "site-packages/vllm/distributed/device_communicators/shm_broadcast.py"
DEQUEUE = (
    ("MessageQueue.dequeue", SHM),
    ("WorkerProc.worker_busy_loop", "site-packages/vllm/v1/executor/multiproc_executor.py"),
)
FORWARD = (("scores", "model.py"), ("Attention.forward", "model.py"))
OWN = (("take", "engine.py"), ("main", "engine.py"))
LOOP = (("event_loop", "site-packages/sglang/srt/managers/data_parallel_controller.py"),)
WORKERS = (
    ("MessageQueue.dequeue", SHM),
    ("get_response", "site-packages/vllm/v1/executor/multiproc_executor.py"),
)


def recorded(name: str, seat: Seat) -> ProcessStacks:
    text = (CAPTURES / f"{name}.json").read_text()
    return parse_pyspy_json(text, pid=1, rank=seat, native=False)


def stack(seat: Seat, frames: tuple[tuple[str, str], ...], *, native: bool = False) -> ProcessStacks:
    made = tuple(Frame(name, file, 1) for name, file in frames)
    return ProcessStacks(1, seat, "py-spy", native, (ThreadStack(1, "MainThread", False, False, made),))


def standing(
    seat: Seat, frames: tuple[tuple[str, str], ...], role: str = "rank", **more: object
) -> SeatStacks:
    """A live process that is at one place in both samples."""
    at = stack(seat, frames)
    fields: dict[str, object] = {
        "busy_share": 0.0,
        "turns_per_s": 0.0,
        "stacks_path": f"stacks/{seat}",
        **more,
    }
    return SeatStacks(seat, role, "alive", 40, before=at, after=at, **fields)  # type: ignore[arg-type]


def brief(cause: Cause) -> tuple[str, str, tuple[Seat, ...], str]:
    return cause.kind, cause.mechanism, cause.ranks, cause.confidence


# --- recorded engines


def sglang(state: str) -> list[SeatStacks]:
    folder = f"sglang-dp2-{state}"
    names: dict[Seat, tuple[str, str]] = {
        0: ("rank", "scheduler_DP0_TP0"),
        1: ("rank", "scheduler_DP1_TP1"),
        "controller": ("controller", "data_parallel_controller"),
        "detokenizer": ("detokenizer", "detokenizer"),
        "server": ("server", "launch_server"),
    }
    return [
        SeatStacks(
            seat,
            role,
            "stopped" if state.endswith("stopped") and seat == 1 else "alive",
            1,
            before=recorded(f"{folder}/{name}", seat),
            after=recorded(f"{folder}/{name}", seat),
            stopped_twice=True,
            stacks_path=f"evidence/sample-1/stacks/{seat}.json",
            processes_path="evidence/sample-1/processes.json",
        )
        for seat, (role, name) in names.items()
    ]


def vllm_stopped() -> list[SeatStacks]:
    folder = "vllm-tp2-worker1-stopped"
    names: dict[Seat, tuple[str, str]] = {
        0: ("rank", "worker-tp0"),
        1: ("rank", "worker-tp1"),
        "engine_core": ("engine_core", "engine-core"),
        "server": ("server", "api-server"),
    }
    return [
        SeatStacks(
            seat,
            role,
            "stopped" if seat == 1 else "alive",
            1,
            before=recorded(f"{folder}/{name}", seat),
            after=recorded(f"{folder}/{name}", seat),
            stopped_twice=True,
        )
        for seat, (role, name) in names.items()
    ]


def test_both_schedulers_in_a_collective_are_no_hang() -> None:
    cause = stack_cause(sglang("healthy"), stalled=None)
    assert brief(cause) == ("none", "unknown", (), "suspected")


def test_even_in_a_stall_two_ranks_in_different_collectives_name_nobody() -> None:
    cause = stack_cause(sglang("healthy"), stalled=STALLED)
    assert brief(cause) == ("hang", "collective-skipped", (), "suspected")
    assert "rank 0 in all_reduce by all_reduce_to_dp_local" in cause.facts[1].fact


def test_a_stopped_scheduler_is_named_with_or_without_other_signs() -> None:
    for stalled in (None, STALLED):
        cause = stack_cause(sglang("scheduler1-stopped"), stalled=stalled)
        assert brief(cause) == ("stopped", "rank-stopped", (1,), "proven")
        assert cause.collective is not None
        assert (cause.collective.operation, cause.collective.waiting, cause.collective.missing) == (
            "all_reduce", (0,), (1,),
        )  # fmt: skip
        said = [fact.fact for fact in cause.facts if "stall" not in fact.fact]
        assert "rank 1: its process (pid 1) is stopped in both samples" in said
        assert any(fact.startswith("rank 1: last seen at work in DeepseekMLAForwardMixin") for fact in said)
        assert any("all_reduce, called by _dp_gather_via_all_reduce" in fact for fact in said)
    assert cause.facts[0] == STALLED[0]


def test_a_stopped_worker_of_vllm_is_named() -> None:
    cause = stack_cause(vllm_stopped(), stalled=None)
    assert brief(cause) == ("stopped", "rank-stopped", (1,), "proven")
    assert any("engine_core (pid 1): waits for the workers' answer" in fact.fact for fact in cause.facts)


# --- processes


def test_the_first_that_died_is_named_before_those_that_followed() -> None:
    gone = [
        SeatStacks(seat, "rank", "dead", 40, died_s=died_s, exit=exit_words)
        for seat, died_s, exit_words in ((0, 4.5, "signal SIGABRT"), (1, 3.2, "signal SIGKILL"))
    ]
    cause = stack_cause([*gone, standing("server", LOOP, "server")], stalled=None)
    assert brief(cause) == ("dead", "rank-dead", (1,), "supported")
    assert cause.facts[0].fact == (
        "rank 1: its process (pid 40) is gone: signal SIGKILL, seen 3.2 s after the watch began"
    )
    assert brief(stack_cause(gone[:1], stalled=None)) == ("dead", "rank-dead", (0,), "proven")


def test_those_that_go_at_once_are_all_suspected() -> None:
    gone = [SeatStacks(seat, "rank", "dead", 40) for seat in (0, 1)]
    assert brief(stack_cause(gone, stalled=None)) == ("dead", "rank-dead", (0, 1), "suspected")


def test_death_comes_before_a_stop() -> None:
    both = [SeatStacks(0, "rank", "stopped", 40), SeatStacks(1, "rank", "dead", 41)]
    assert brief(stack_cause(both, stalled=None))[:3] == ("dead", "rank-dead", (1,))
    once = stack_cause(both[:1], stalled=None)
    assert (once.mechanism, once.confidence) == ("rank-stopped", "supported")


# --- held up in its own doing


def test_a_rank_in_a_lock_while_its_peers_wait() -> None:
    seats = [
        standing(0, ALL_REDUCE),
        standing(1, OWN, kernel="futex"),
        standing("engine_core", WORKERS, "engine_core"),
    ]
    cause = stack_cause(seats, stalled=STALLED)
    assert brief(cause) == ("hang", "host-blocked", (1,), "supported")
    assert (
        "rank 1 (pid 40): held up, waits for a lock in take (engine.py:1), in both samples"
        in cause.facts[1].fact
    )
    assert cause.collective is not None and cause.collective.missing == (1,)


def test_with_ranks_elsewhere_a_place_is_a_suspicion_and_a_stop_is_still_a_stop() -> None:
    seats = [standing(0, ALL_REDUCE), standing(1, OWN, kernel="futex")]
    assert stack_cause(seats, stalled=STALLED, complete=False).confidence == "suspected"
    stopped = SeatStacks(1, "rank", "stopped", 40, stopped_twice=True)
    assert (
        stack_cause([standing(0, ALL_REDUCE), stopped], stalled=None, complete=False).confidence == "proven"
    )


@pytest.mark.parametrize("role", ["controller", "engine_core"])
def test_a_process_that_brings_work_sleeps_while_the_ranks_are_idle(role: str) -> None:
    seats = [standing(0, DEQUEUE), standing(1, DEQUEUE), standing(role, OWN, role, kernel="clock_nanosleep")]
    cause = stack_cause(seats, stalled=STALLED)
    assert brief(cause) == ("hang", "host-blocked", (role,), "supported")
    assert cause.signature == f"hang/host-blocked/host/take/-/{role}"


def test_of_two_that_are_held_up_the_rank_is_nearer() -> None:
    seats = [standing(0, OWN, kernel="write"), standing("controller", OWN, "controller", kernel="futex")]
    assert stack_cause(seats, stalled=STALLED).ranks == (0,)
    two = [standing(rank, OWN, kernel="write") for rank in (0, 1)]
    assert brief(stack_cause(two, stalled=STALLED)) == ("hang", "host-blocked", (0, 1), "suspected")


def test_without_a_stall_a_lock_is_no_one_s_fault() -> None:
    assert (
        stack_cause([standing(0, ALL_REDUCE), standing(1, OWN, kernel="futex")], stalled=None).kind == "none"
    )


def test_native_stacks_say_what_plain_ones_cannot() -> None:
    native = stack(1, (("clock_nanosleep", "libc.so.6"), *OWN), native=True)
    plain = [standing(0, ALL_REDUCE), standing(1, OWN)]
    closer = [standing(0, ALL_REDUCE), standing(1, OWN, native=native)]
    assert stack_cause(plain, stalled=STALLED).facts[1].fact.startswith("rank 1 (pid 40): stands in take")
    assert (
        stack_cause(closer, stalled=STALLED)
        .facts[1]
        .fact.startswith("rank 1 (pid 40): held up, sleeps in take")
    )


# --- one rank elsewhere


def test_an_idle_worker_while_its_peer_waits_in_a_collective_left_it_out() -> None:
    seats = [standing(0, ALL_REDUCE), standing(1, DEQUEUE), standing("engine_core", WORKERS, "engine_core")]
    cause = stack_cause(seats, stalled=STALLED)
    assert brief(cause) == ("hang", "collective-skipped", (1,), "supported")
    assert cause.facts[1].fact == "rank 0 in all_reduce; rank 1 is in none"


def test_a_rank_that_goes_on_while_its_peers_wait_is_slow() -> None:
    before, after = stack(1, FORWARD), stack(1, (("experts", "model.py"), ("Mixture.forward", "model.py")))
    moving = SeatStacks(1, "rank", "alive", 41, before=before, after=after, busy_share=1.0)
    cause = stack_cause([standing(0, ALL_REDUCE), moving], stalled=STALLED)
    assert brief(cause) == ("slow", "rank-slow", (1,), "supported")


def test_a_rank_that_burns_a_core_in_one_place_hangs_for_an_unknown_reason() -> None:
    seats = [standing(0, ALL_REDUCE), standing(1, FORWARD, busy_share=1.0)]
    cause = stack_cause(seats, stalled=STALLED)
    assert brief(cause) == ("hang", "unknown", (1,), "supported")
    assert cause.family == "scores"


def test_a_rank_that_does_nothing_in_its_forward_is_blocked() -> None:
    cause = stack_cause([standing(0, ALL_REDUCE), standing(1, FORWARD)], stalled=STALLED)
    assert brief(cause) == ("hang", "host-blocked", (1,), "supported")


def test_a_rank_of_which_nothing_is_known_is_not_blamed() -> None:
    unseen = SeatStacks(1, "rank", "alive", 41)
    cause = stack_cause([standing(0, ALL_REDUCE), unseen], stalled=STALLED)
    assert brief(cause) == ("hang", "unknown", (), "suspected")
    assert Fact("rank 1: no stacks", "") in cause.facts


def test_two_ranks_elsewhere_decide_nothing() -> None:
    seats = [standing(0, ALL_REDUCE), standing(1, FORWARD), standing(2, FORWARD)]
    assert brief(stack_cause(seats, stalled=STALLED)) == ("hang", "unknown", (), "suspected")


# --- collectives


def test_of_many_ranks_the_one_in_another_collective_is_suspected() -> None:
    seats = [standing(rank, ALL_REDUCE) for rank in (0, 1, 3)] + [standing(2, BARRIER)]
    cause = stack_cause(seats, stalled=STALLED)
    assert brief(cause) == ("hang", "collective-skipped", (2,), "suspected")


def test_all_in_one_collective_name_nobody() -> None:
    cause = stack_cause([standing(rank, ALL_REDUCE) for rank in (0, 1)], stalled=STALLED)
    assert brief(cause) == ("hang", "unknown", (), "suspected")
    assert cause.collective is not None and cause.collective.waiting == (0, 1)


def test_a_loop_that_two_dumps_met_at_one_place_moves() -> None:
    seats = [standing(0, ALL_REDUCE), standing(1, ALL_REDUCE, turns_per_s=900.0)]
    cause = stack_cause(seats, stalled=STALLED)
    assert brief(cause) == ("slow", "rank-slow", (1,), "supported")


def test_all_ranks_moving_is_slow_at_most() -> None:
    seats = [standing(rank, ALL_REDUCE, turns_per_s=900.0) for rank in (0, 1)]
    assert brief(stack_cause(seats, stalled=STALLED)) == ("slow", "unknown", (), "suspected")


def test_signatures_are_equal_over_ranks_and_pids() -> None:
    one = stack_cause([standing(0, ALL_REDUCE), standing(1, OWN, kernel="futex")], stalled=STALLED)
    other = stack_cause([standing(1, ALL_REDUCE), standing(0, OWN, kernel="futex")], stalled=STALLED)
    assert one.signature == other.signature == "hang/host-blocked/host/take/-/-"
