"""Each rule of the diagnosis on hand-made evidence, beside the healthy twin that resembles it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_builder import SITE, Group, Rank, Stream, lost, replaying

from harness.diagnose import (
    Diagnosis,
    Evidence,
    EvidenceSample,
    Missing,
    RankEvidence,
    Times,
    diagnose,
)
from harness.stacks import Frame

TIMES = Times(1.0, 2.5, 3.0, 3.4)


def look(ranks: Iterable[Rank], at_s: float, **fields: Any) -> EvidenceSample:
    return EvidenceSample(
        at_s,
        {
            r.rank: RankEvidence(
                r.snapshot(at_s), r.stacks(), None, "S", 1000 + r.rank, "node-a", "sim", **fields
            )
            for r in ranks
        },
    )


def evidence(ranks: list[Rank], between: Callable[[], None] = lambda: None, **fields: Any) -> Evidence:
    first = look(ranks, 100.0)
    between()
    return Evidence(len(ranks), (first, look(ranks, 101.0)), TIMES, **fields)


def set_rank(found: Evidence, rank: int, only: tuple[int, ...] = (0, 1), **fields: Any) -> Evidence:
    samples = tuple(
        replace(sample, ranks={**sample.ranks, rank: replace(sample.ranks[rank], **fields)})
        if position in only
        else sample
        for position, sample in enumerate(found.samples)
    )
    return replace(found, samples=samples)


def blamed(diagnosis: Diagnosis) -> list[int | None]:
    return [culprit.rank for culprit in diagnosis.culprits]


def facts(diagnosis: Diagnosis) -> str:
    return "\n".join(fact.fact for fact in diagnosis.proof)


def two(world: int = 2) -> list[Rank]:
    ranks = [Rank(number, world) for number in range(world)]
    for rank in ranks:
        for name in ("agree", "experts"):
            rank.groups[name] = Group(tuple(range(world))).round(*["all_gather", "reduce_scatter"] * 3)
        rank.groups["agree"].round(*["all_gather"] * (rank.step - 6))
        rank.decisions = [
            {"step": step, "mode": "decode", "modes": ["decode"] * world, "tokens": [4] * world, "bucket": 4,
             "graph": True, "update": True, "retracted": [], "tokens_out": step}
            for step in range(1, rank.step)
        ]  # fmt: skip
    return ranks


# D1 -----------------------------------------------------------------------------------------------


def d1() -> Evidence:
    ranks = two()
    replaying(ranks[0], fenced=True)
    replaying(ranks[1], fenced=False, overtaken=1)
    return evidence(ranks, device_is_simulation=True)


def test_a_lost_record_is_blamed_on_the_rank_whose_update_overtook() -> None:
    found = diagnose(d1())
    assert (found.kind, found.mechanism, found.confidence) == ("hang", "stream-order", "proven")
    assert blamed(found) == [1]
    assert found.stream == "compute"
    assert found.operation is not None
    assert (found.operation.label, found.operation.sequence) == ("graph.replay decode.4", 9)
    assert found.operation.site == SITE
    assert found.operation.pending_s == pytest.approx(3.0)
    said = facts(found)
    assert (
        "'decode.4 attention.0' has 9 records and 8 waits by completed replays; record 6 was the first"
        in said
    )
    assert "rank 1: of the last 8 updates on the update stream none came after a wait" in said
    assert (
        "rank 0: no record overtook another; of the last 8 updates on the update stream each came after"
        in said
    )
    assert "has enqueued gemm on compute, no replay, and no update of decode.4 after step 9" in said
    assert (
        "rank 1: compute has not finished graph.replay decode.4, replay 9 of that graph, since 3.00 s" in said
    )
    assert "(operation 9 of the stream, enqueued at" in said
    assert "so replay 9 waits for a record 10 (so for 2 of the graph's 2 events)" in said
    assert "rank 0: compute has not finished graph.replay decode.4" in said


def test_the_argument_comes_in_order_and_without_repeats() -> None:
    starts = [fact.fact.split(" ", 3)[:3] for fact in diagnose(d1()).proof]
    assert [start[1] for start in starts] == ["1:"] * 5 + ["0:"] * 3 + ["0:", "1:"]
    assert len({fact.fact for fact in diagnose(d1()).proof}) == len(starts)
    argument = (
        "has not finished graph.replay",
        "9 records and 8 waits",
        "no further record comes",
        "(a fence)",
    )
    assert all(part in fact.fact for part, fact in zip(argument, diagnose(d1()).proof, strict=False))


def test_overtaken_records_that_were_not_all_lost_make_it_supported_only() -> None:
    ranks = two()
    replaying(ranks[0], fenced=True)
    replaying(ranks[1], fenced=False, overtaken=2)
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence, blamed(found)) == ("stream-order", "supported", [1])
    assert "more replays completed (8) than records were not overtaken" in facts(found)


def test_a_doubtful_rank_is_not_blamed_beside_one_without_doubt() -> None:
    ranks = two()
    replaying(ranks[0], fenced=False, overtaken=1)
    ranks[0].streams["compute"].times[7] = (4, 5)
    ranks[0].streams["update"].times[8] = (6, 6)
    replaying(ranks[1], fenced=False, overtaken=1)
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence, blamed(found)) == ("stream-order", "proven", [1])


def test_a_fenced_update_overtakes_nothing_whatever_was_counted() -> None:
    ranks = two()
    for rank in ranks:
        replaying(rank, fenced=True, overtaken=1)
    assert diagnose(evidence(ranks)).mechanism == "unknown"


def test_an_empty_step_starves_the_replay_too() -> None:
    ranks = two()
    for rank, fenced in zip(ranks, (True, False), strict=True):
        replaying(rank, fenced=fenced, overtaken=0 if fenced else 1)
        rank.streams["compute"].operations.pop()
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence, blamed(found)) == ("stream-order", "proven", [1])
    assert "waits for a result, with no update of decode.4" in facts(found)


def test_the_decision_of_a_step_without_update_is_named() -> None:
    ranks = two()
    replaying(ranks[0], fenced=True)
    replaying(ranks[1], fenced=False, overtaken=2)
    for rank in ranks:
        rank.decisions.append({"step": 10, "mode": "prefill", "tokens": [256, 4], "update": False})
    found = diagnose(evidence(ranks))
    assert (
        "step 10, in which the host stands, is a prefill step without an update (tokens [256, 4])"
        in facts(found)
    )


def test_two_lost_records_stop_the_host_in_its_own_wait() -> None:
    ranks = two()
    replaying(ranks[0], fenced=True)
    replaying(ranks[1], fenced=False, overtaken=2)
    lost(ranks[1], 2, waits=7)
    compute = ranks[1].streams["compute"]
    compute.operations[-1] = ("sample", 9)
    compute.done, ranks[1].step = 7, 9
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence, blamed(found)) == ("stream-order", "proven", [1])
    assert "2 replays had their updates and are unfinished" in facts(found)


def test_a_replay_that_the_last_step_left_behind() -> None:
    ranks = two()
    replaying(ranks[0], fenced=True)
    replaying(ranks[1], fenced=False, overtaken=1)
    for rank in ranks:
        rank.streams["compute"].operations.pop()
        rank.phase, rank.step = "drain", 9
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence, blamed(found)) == ("stream-order", "proven", [1])


def test_an_update_that_is_still_to_come_makes_it_supported_only() -> None:
    ranks = two()
    replaying(ranks[0], fenced=True)
    replaying(ranks[1], fenced=False, overtaken=1)
    for rank in ranks:
        rank.phase = "launch"
        rank.streams["compute"].operations.pop()
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence) == ("stream-order", "supported")


def test_both_ranks_unfenced_are_both_culprits() -> None:
    ranks = two()
    for rank in ranks:
        replaying(rank, fenced=False, overtaken=3)
    assert blamed(diagnose(evidence(ranks))) == [0, 1]


def test_fenced_replays_that_stand_are_not_stream_order() -> None:
    ranks = two()
    for rank in ranks:
        replaying(rank, fenced=True)
    found = diagnose(evidence(ranks))
    assert (found.kind, found.mechanism, blamed(found)) == ("hang", "unknown", [])


def test_fenced_replays_that_go_on_are_healthy() -> None:
    ranks = two()
    for rank in ranks:
        replaying(rank, fenced=True)

    def complete() -> None:
        for rank in ranks:
            rank.streams["compute"].done += 1

    found = diagnose(evidence(ranks, complete))
    assert (found.kind, found.mechanism, blamed(found)) == ("none", "unknown", [])


def test_a_replay_that_waits_for_an_absent_rank_is_not_stream_order() -> None:
    ranks = two()
    replaying(ranks[0], fenced=False, overtaken=1)
    replaying(ranks[1], fenced=False, pending=False)
    ranks[1].groups["experts"].records.pop()
    ranks[1].groups["experts"].done -= 4
    found = set_rank(evidence(ranks), 1, task_done=True)
    diagnosis = diagnose(found)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [1])


def test_stacks_of_stream_threads_add_facts_and_decide_nothing() -> None:
    for with_them in (d1(), mismatched(), skipped()):
        without = with_them
        for rank in range(with_them.world):
            stacks = with_them.samples[0].ranks[rank].stacks
            assert stacks is not None
            only_host = replace(stacks, threads=tuple(t for t in stacks.threads if t.role == "host"))
            without = set_rank(without, rank, stacks=only_host)
        one, other = diagnose(with_them), diagnose(without)
        extra = {fact for fact in one.proof if "its simulated streams" in fact.fact}
        assert {fact.fact.split(":")[0] for fact in extra} == {f"rank {r}" for r in range(with_them.world)}
        assert len(extra) == with_them.world
        assert replace(one, proof=tuple(f for f in one.proof if f not in extra)) == other


# Processes and exceptions -------------------------------------------------------------------------


def skipped(exception: str | None = "ValueError: no rows") -> Evidence:
    """Rank 0 waits in the experts' all_gather 7; rank 1 never came."""
    ranks = two()
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].phase = "launch"
    return set_rank(evidence(ranks), 1, exception=exception, task_done=True)


def test_a_dead_rank() -> None:
    found = set_rank(skipped(None), 1, (1,), state="dead", exit="signal 9", task_done=False)
    diagnosis = diagnose(set_rank(found, 1, (0,), task_done=False))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("dead", "rank-dead", [1])
    assert "signal 9" in facts(diagnosis)
    assert "rank 1: its ledger ends in phase 'launch' of step 10" in facts(diagnosis)
    assert diagnosis.collective is not None
    assert (diagnosis.collective.waiting, diagnosis.collective.missing) == ((0,), (1,))


def test_a_driver_that_was_told_of_a_death_has_no_exception_of_the_rank() -> None:
    """What Ray raises in the driver when a rank's process is killed; its words contain "connection error"."""
    told = (
        "ActorDiedError: The actor died unexpectedly before finishing this task. The actor is dead because "
        "its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker unexpectedly "
        "exits with a connection error code 2. End of file."
    )
    found = set_rank(skipped(told), 1, (0, 1), state="dead")
    found = set_rank(found, 0, exception="CommError: Connection closed by peer")
    diagnosis = diagnose(found)
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("dead", "rank-dead", [1])
    assert diagnosis.confidence == "proven"
    no_table = set_rank(found, 1, (0, 1), state=None)
    assert (diagnose(no_table).kind, blamed(diagnose(no_table))) == ("dead", [1])


@pytest.mark.parametrize("state", ["dead", "T"])
def test_a_rank_that_ended_inside_a_collective_does_not_wait_there(state: str) -> None:
    ranks = two()
    for rank in ranks:
        rank.groups["experts"].enter("all_gather")
    diagnosis = diagnose(set_rank(evidence(ranks), 1, (1,), state=state))
    assert blamed(diagnosis) == [1]
    assert diagnosis.collective is not None
    assert (diagnosis.collective.waiting, diagnosis.collective.missing) == ((0,), ())
    assert "rank 1 is in all_gather" not in facts(diagnosis)


def test_of_several_dead_ranks_the_first_is_blamed() -> None:
    found = evidence(two(3))
    found = set_rank(found, 2, (1,), state="dead", exit="signal 9")
    found = set_rank(
        found, 0, (1,), state="dead", exit="exit 1", exception="RuntimeError: Connection reset by peer"
    )
    diagnosis = diagnose(found)
    assert blamed(diagnosis) == [2]
    assert "rank 0: its process (pid 1000) is gone" in facts(diagnosis)


def killed_by_gloo() -> Evidence:
    """gloo ends the ranks that got what rank 2 should not have sent."""
    found = mismatched()
    for rank in (0, 1):
        exit_words = "gloo::EnforceNotMet: op.preamble.length <= op.nbytes. 960 vs 576"
        found = set_rank(found, rank, (1,), state="dead", exit=exit_words)
    return found


def test_a_process_that_gloo_killed_is_not_the_cause() -> None:
    diagnosis = diagnose(killed_by_gloo())
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("dead", "collective-mismatch", [2])
    assert "rank 0: its process (pid 1000) is gone: gloo::EnforceNotMet" in facts(diagnosis)


def test_a_stopped_rank() -> None:
    ranks = two()
    ranks[0].groups["experts"].enter("all_gather")
    diagnosis = diagnose(set_rank(evidence(ranks), 1, state="T"))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("stopped", "rank-stopped", [1])
    assert diagnosis.confidence == "proven"


def test_a_rank_that_raised_before_a_collective() -> None:
    diagnosis = diagnose(skipped())
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("hang", "collective-skipped", [1])
    assert diagnosis.confidence == "proven"
    assert diagnosis.proof[0].fact == "rank 1 raised ValueError: no rows"
    assert "rank 1: its ledger ends in phase 'launch' of step 10" in facts(diagnosis)
    assert diagnosis.collective is not None
    assert (diagnosis.collective.group, diagnosis.collective.sequence) == ("experts", 7)


def test_a_rank_whose_device_failed_is_blamed_for_those_that_wait_for_it() -> None:
    """It had enqueued the collective already, so nobody misses it there."""
    ranks = two()
    ranks[0].groups["experts"].enter("all_reduce")
    ranks[1].groups["experts"].add("all_reduce")
    traceback = "  File 'x.py', line 1, in synchronize\n    self.wait(timeout_s)\n"
    found = set_rank(
        evidence(ranks), 1, exception=f"{traceback}a.b.DeviceError: 'embed' failed: index out of range"
    )
    diagnosis = diagnose(set_rank(found, 1, task_done=True))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("hang", "rank-dead", [1])
    assert diagnosis.proof[0].fact == "rank 1 raised a.b.DeviceError: 'embed' failed: index out of range"
    assert diagnosis.signature == "hang/rank-dead/host/DeviceError/-/-"


def test_the_place_of_an_exception_is_the_engine_s_own_line() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/x/serving/engine.py", line 129, in step\n'
        '    launched = self._launch(batch, plan)\n  File "/x/serving/engine.py", line 184, in _launch\n'
        '  File "/x/serving/transfer.py", line 60, in to_device\n'
        '  File "/y/lib/python3.11/site-packages/torch/functional.py", line 7, in stack\nValueError: no rows'
    )
    diagnosis = diagnose(skipped(text))
    assert diagnosis.proof[0].fact == "rank 1 raised ValueError: no rows, in _launch (serving/engine.py:184)"
    assert diagnosis.proof[0].evidence == "history.json"


def test_the_host_s_place_is_the_engine_s_own_line_and_its_wait() -> None:
    def frame(name: str, file: str, line: int) -> Frame:
        return Frame(name, file, line)

    stacks = Rank(0).stacks()
    host = replace(
        stacks.threads[0],
        frames=(
            frame("Condition.wait", "/usr/lib/python3.11/threading.py", 331),
            frame("Life.block", "/x/harness/devices/sim_streams.py", 108),
            frame("SimEvent.synchronize", "/x/harness/devices/sim_streams.py", 184),
            frame("Transfers.wait", "/x/serving/transfer.py", 80),
            frame("Engine._finish", "/x/serving/engine.py", 277),
            frame("Engine.step", "/x/serving/engine.py", 131),
        ),
    )
    found = set_rank(d1(), 1, stacks=replace(stacks, rank=1, threads=(host,)))
    assert (
        ", in Engine._finish (serving/engine.py:277), waiting in Transfers.wait (serving/transfer.py:80)"
        in facts(diagnose(found))
    )
    foreign = replace(
        host,
        frames=(
            frame("poll", "/v/lib/python3.11/site-packages/zmq/sugar/poll.py", 106),
            frame("recv_requests", "/v/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", 900),
        ),
    )
    found = set_rank(d1(), 1, stacks=replace(stacks, rank=1, threads=(foreign,)))
    assert (
        ", in recv_requests (sglang/srt/managers/scheduler.py:900), waiting in poll (zmq/sugar/poll.py:106)"
        in facts(diagnose(found))
    )


def test_the_rank_that_logged_the_timeout_does_not_get_the_blame() -> None:
    ranks = two()
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].phase = "process"
    found = set_rank(evidence(ranks), 0, exception="CommError: timed out")
    diagnosis = diagnose(found)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("host-blocked", [1])


# Collectives and decisions ------------------------------------------------------------------------


def mismatched() -> Evidence:
    """Three ranks in one collective; rank 2 brought another size."""
    ranks = two(3)
    for rank in ranks:
        rank.groups["experts"].enter("all_gather", (6, 4) if rank.rank == 2 else (8, 4))
    return evidence(ranks)


def test_a_mismatch_shows_both_sides_and_blames_the_odd_one() -> None:
    diagnosis = diagnose(mismatched())
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("hang", "collective-mismatch", [2])
    mismatch = diagnosis.to_json()["collective"]["mismatch"]
    assert mismatch["what"] == "size"
    assert [side["ranks"] for side in mismatch["sides"]] == [[0, 1], [2]]


@pytest.mark.parametrize(
    ("operation", "dtype", "what"),
    [("all_reduce", "float32", "operation"), ("all_gather", "bfloat16", "dtype")],
)
def test_what_differs_is_named(operation: str, dtype: str, what: str) -> None:
    ranks = two()
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].groups["experts"].enter(operation, (4,), dtype)
    diagnosis = diagnose(evidence(ranks))
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    assert diagnosis.collective.mismatch.what == what
    assert blamed(diagnosis) == [1], "its own earlier rounds announce all_gather float32"


def test_sizes_that_differed_before_may_differ() -> None:
    ranks = two()
    for rank in ranks:
        group = rank.groups["experts"]
        group.add("all_to_all", (rank.rank + 1, 4))
        group.round()
        group.enter("all_to_all", (rank.rank + 3, 4))
    assert diagnose(evidence(ranks)).mechanism == "unknown"


def test_a_rank_that_left_one_out_seems_to_bring_another() -> None:
    ranks = two()
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].groups["experts"].enter("reduce_scatter")
    diagnosis = diagnose(evidence(ranks))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [1])


STEP = ("agree", "all_reduce", "all_reduce", "all_reduce", "all_gather")


def stepping(rank: int, last: tuple[str, ...], *, whole: int = 4) -> Rank:
    """Whole steps that all look alike, then one that ends where the rank stands."""
    made = Rank(rank, phase="forward", step=whole + 1)
    group = made.groups["tp"] = Group((0, 1))
    for step in range(1, whole + 2):
        counts = {"tp": group.enqueued}
        made.decisions.append({"step": step, "mode": "decode", "tokens": [4, 4], "collectives": counts})
        if step <= whole:
            group.round(*STEP)
    group.round(*last[:-1])
    group.enter(last[-1])
    return made


def test_one_of_several_equal_collectives_left_out_is_seen_by_the_pattern_of_the_steps() -> None:
    """Two all-reduces of one size, then the third: rank 1 left one out and came to the all-gather early. By the
    last two collectives alone, both ranks would seem to follow an earlier round."""
    ranks = [stepping(0, STEP[:4]), stepping(1, (*STEP[:3], STEP[4]))]
    found = diagnose(evidence(ranks))
    assert (found.kind, found.mechanism, blamed(found)) == ("hang", "collective-skipped", [1])
    assert (
        "collective 4 of group tp in its step 5 (number 24) is all_gather (4,) float32, where whole steps that "
        "began alike went on with all_reduce (4,) float32: it left one out" in facts(found)
    )
    assert found.collective is not None and found.collective.group == "tp"


def test_gloo_kills_the_innocent_rank_first_and_the_one_that_skipped_is_blamed() -> None:
    ranks = [stepping(0, STEP[:4]), stepping(1, (*STEP[:3], STEP[4]))]
    gone = set_rank(evidence(ranks, deaths={0: 1.0, 1: 1.4}), 0, state="dead")
    gone = set_rank(gone, 1, state="dead", exception="RuntimeError: Connection reset by peer")
    found = diagnose(gone)
    assert (found.kind, found.mechanism, blamed(found)) == ("dead", "collective-skipped", [1])


def test_a_step_unlike_all_others_is_a_mismatch_and_no_skip() -> None:
    ranks = [stepping(0, STEP[:4]), stepping(1, (*STEP[:3], "barrier"))]
    found = diagnose(evidence(ranks))
    assert (found.mechanism, blamed(found)) == ("collective-mismatch", [1])


def test_idle_rounds_after_a_step_are_no_deviation() -> None:
    from harness.diagnosis_case import Case
    from harness.diagnosis_steps import left_the_pattern

    rank = stepping(0, (*STEP, "all_gather", "all_gather"))
    peer = stepping(1, (*STEP, "all_gather", "all_gather", "all_gather"))
    assert left_the_pattern(Case.of(evidence([rank, peer])), "tp") == ()


def test_equal_collectives_that_move_are_healthy() -> None:
    ranks = two()
    for rank in ranks:
        rank.groups["experts"].enter("all_gather")

    def go_on() -> None:
        for rank in ranks:
            rank.groups["experts"].round().enter("reduce_scatter")

    assert diagnose(evidence(ranks, go_on)).kind == "none"


def test_a_rank_steps_ahead_left_the_collective_out() -> None:
    ranks = two()
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].step = 11
    ranks[1].groups["agree"].enter("all_gather")
    ranks[0].decisions.append({"step": 10, "tokens": [4, 0]})
    ranks[1].decisions.append({"step": 11, "tokens": [4, 0]})
    diagnosis = diagnose(evidence(ranks))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [1])


def crossed(*, queued: bool) -> list[Rank]:
    ranks = two()
    for rank in ranks:
        rank.groups["cache"] = Group((0, 1)).round("all_reduce")
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].groups["cache"].enter("all_reduce")
    if queued:
        ranks[0].groups["cache"].add("all_reduce")
        ranks[1].groups["experts"].add("all_gather")
    return ranks


@pytest.mark.parametrize(("queued", "confidence"), [(True, "proven"), (False, "supported")])
def test_two_groups_in_two_orders(queued: bool, confidence: str) -> None:
    diagnosis = diagnose(evidence(crossed(queued=queued)))
    assert (diagnosis.kind, diagnosis.mechanism) == ("hang", "collective-order")
    assert (blamed(diagnosis), diagnosis.confidence) == ([0, 1], confidence)
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    assert diagnosis.collective.mismatch.what == "order"


def test_a_group_that_a_rank_never_used_was_skipped_not_reordered() -> None:
    ranks = crossed(queued=False)
    ranks[1].groups["experts"] = Group((0, 1))
    diagnosis = diagnose(evidence(ranks))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [1])


def test_ranks_that_saw_different_tokens_decided_differently() -> None:
    ranks = two(3)
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].decisions[4]["tokens"] = [4, 0, 4]
    diagnosis = diagnose(evidence(ranks))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("decision-divergence", [1])
    assert "rank 1: at step 5, the first on which the ranks differ, tokens is [4, 0, 4]" in facts(diagnosis)


def test_a_first_divergence_an_hour_back_is_found_in_the_decision_files() -> None:
    ranks = two()
    ranks[0].groups["agree"].enter("all_gather")
    ranks[1].step = 11
    files = {
        rank: tuple({"step": step, "tokens": [4, 0 if (rank, step) == (1, 3) else 4]} for step in range(1, 4))
        for rank in (0, 1)
    }
    for rank in ranks:
        rank.decisions = rank.decisions[-2:]
    diagnosis = diagnose(evidence(ranks, decisions=files))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [1])
    assert diagnosis.proof[0].evidence == "decisions/rank0.jsonl"
    assert "step 3, the first" in facts(diagnosis)


# One rank's own doing -----------------------------------------------------------------------------


def blocked() -> list[Rank]:
    ranks = two()
    ranks[0].phase = "agree"
    ranks[0].groups["agree"].enter("all_gather")
    ranks[1].phase = "process"
    ranks[1].frames = ("acquire", "_log", "step")
    return ranks


def test_a_host_that_stands_while_all_wait_for_it() -> None:
    diagnosis = diagnose(evidence(blocked()))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("hang", "host-blocked", [1])
    assert diagnosis.stream == "host"
    assert "waits for a lock (acquire)" in facts(diagnosis)
    assert diagnosis.signature == "hang/host-blocked/host/-/agree/process"


def test_streams_that_nobody_looked_at_make_the_host_the_suspect() -> None:
    ranks = blocked()
    ranks[1].streams["compute"] = Stream([("gemm", 9)])
    stuck = diagnose(evidence(ranks))
    assert (stuck.mechanism, stuck.stream, blamed(stuck)) == ("unknown", "compute", [1])
    assert "rank 1: what keeps gemm from ending, no ledger shows. Needed: what the device" in facts(stuck)
    assert "nobody is missing" not in facts(stuck)
    ranks[1].stamp_age_s = 30.0
    held = diagnose(evidence(ranks))
    assert (held.mechanism, held.stream, blamed(held)) == ("host-blocked", "host", [1])


def test_a_rank_that_goes_on_while_the_others_wait_is_slow() -> None:
    ranks = blocked()

    def prefill() -> None:
        ranks[1].streams["compute"].operations.append(("gemm", 10))

    diagnosis = diagnose(evidence(ranks, prefill))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("slow", "rank-slow", [1])


def test_a_host_whose_stack_moves_is_slow() -> None:
    ranks = blocked()

    def compile_on() -> None:
        ranks[1].frames = ("lower", "compile", "warmup")

    diagnosis = diagnose(evidence(ranks, compile_on))
    assert (diagnosis.kind, blamed(diagnosis)) == ("slow", [1])


def test_a_heap_that_grows_on_one_rank_only() -> None:
    ranks = two()
    for rank in ranks:
        rank.groups["symmetric"] = Group((0, 1)).round("register")
    ranks[0].groups["symmetric"].enter("register")
    ranks[1].step = 12
    ranks[1].phase = "parked"
    diagnosis = diagnose(evidence(ranks))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("registration-stall", [0])


def test_steps_that_move_for_nothing() -> None:
    ranks = two()

    def go_on() -> None:
        for rank in ranks:
            for step in range(10, 60):
                rank.decisions.append({"step": step, "tokens": [4, 4], "retracted": [7], "tokens_out": 9})
            rank.step = 60

    diagnosis = diagnose(evidence(ranks, go_on, reason="livelock"))
    assert (diagnosis.kind, diagnosis.mechanism, blamed(diagnosis)) == ("livelock", "livelock", [0, 1])
    assert "retracted again and again: 7" in facts(diagnosis)


def test_a_storm_of_retractions_that_finishes_tokens_is_healthy() -> None:
    ranks = two()

    def go_on() -> None:
        for rank in ranks:
            for step in range(10, 60):
                rank.decisions.append({"step": step, "tokens": [4, 4], "retracted": [7], "tokens_out": step})
            rank.step = 60

    assert diagnose(evidence(ranks, go_on)).kind == "none"


# Form ---------------------------------------------------------------------------------------------


def test_the_document_has_every_field_of_the_contract() -> None:
    document = diagnose(replace(d1(), missing=(Missing("npu-smi", "no such tool"),))).to_json()
    assert json.loads(json.dumps(document)) == document
    assert set(document) >= {
        "schema", "kind", "mechanism", "culprits", "stream", "operation", "collective", "proof", "confidence",
        "signature", "last_progress_s", "suspected_s", "confirmed_s", "captured_s", "missing_evidence",
    }  # fmt: skip
    assert document["culprits"] == [
        {"rank": 1, "role": "rank", "node": "node-a", "pid": 1001, "device": "sim"}
    ]
    assert document["missing_evidence"] == [{"what": "npu-smi", "why": "no such tool", "impossible": False}]
    assert (document["last_progress_s"], document["captured_s"]) == (1.0, 3.4)
    paths = {fact["evidence"] for fact in document["proof"]}
    assert "evidence/sample-1/ledger/rank1.json" in paths
    assert "evidence/sample-1/stacks/rank1.json" in paths


def test_the_signature_is_the_same_for_other_ranks_steps_and_buckets() -> None:
    ranks = two()
    replaying(ranks[0], fenced=False, overtaken=4)
    replaying(ranks[1], fenced=True)
    for rank in ranks:
        rank.pid = 5000 + rank.rank
        compute = rank.streams["compute"]
        compute.operations = [(label.replace(".4", ".16"), step) for label, step in compute.operations]
    other = diagnose(evidence(ranks))
    assert blamed(other) == [0]
    assert other.signature == diagnose(d1()).signature == "hang/stream-order/compute/graph.replay/-/-"


def test_nothing_at_all_is_unknown() -> None:
    diagnosis = diagnose(Evidence(2, ()))
    assert (diagnosis.kind, diagnosis.mechanism, diagnosis.confidence) == ("hang", "unknown", "suspected")
    assert blamed(diagnosis) == []


CASES: dict[str, Callable[[], Evidence]] = {
    "d1": d1,
    "d1-both": lambda: evidence([*_both_unfenced()]),
    "skipped": skipped,
    "ended": lambda: skipped(None),
    "mismatch": mismatched,
    "order": lambda: evidence(crossed(queued=True)),
    "blocked": lambda: evidence(blocked()),
    "stopped": lambda: set_rank(d1(), 0, state="T"),
    "dead": lambda: set_rank(d1(), 0, state="dead", snapshot=None),
    "gloo": killed_by_gloo,
    "moving": lambda: evidence(_moving(), between=_MOVE),
    "diverged": lambda: evidence(_diverged()),
    "timeout logged": lambda: set_rank(evidence(blocked()), 0, exception="TimeoutError"),
}


def _both_unfenced() -> list[Rank]:
    ranks = two()
    for rank in ranks:
        replaying(rank, fenced=False, overtaken=2)
    return ranks


_MOVING: list[Rank] = []


def _moving() -> list[Rank]:
    """Rank 0 waits in the agreement, streams go on everywhere: healthy, overtaken records and all."""
    _MOVING[:] = _both_unfenced()
    _MOVING[0].groups["agree"].enter("all_gather")
    return _MOVING


def _MOVE() -> None:
    for rank in _MOVING:
        rank.streams["compute"].done += 1


def _diverged() -> list[Rank]:
    ranks = two(3)
    ranks[0].groups["experts"].enter("all_gather")
    ranks[1].decisions[4]["tokens"] = [4, 0, 4]
    return ranks


PIECES = ("snapshot", "stacks", "state", "exception", "all", "decisions")


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=100, deadline=None, derandomize=True)
@given(data=st.data())
def test_missing_evidence_never_raises_and_never_blames_the_innocent(name: str, data: st.DataObject) -> None:
    full = CASES[name]()
    guilty = set(blamed(diagnose(full)))
    removals = st.tuples(st.integers(0, 1), st.integers(0, full.world - 1), st.sampled_from(PIECES))
    reduced = full
    for position, rank, piece in data.draw(st.sets(removals, max_size=10)):
        reduced = without(reduced, position, rank, piece)
    if data.draw(st.booleans()):
        reduced = replace(reduced, samples=reduced.samples[: data.draw(st.integers(0, 1))])
    diagnosis = diagnose(reduced)
    json.dumps(diagnosis.to_json())
    assert set(blamed(diagnosis)) <= guilty
    if reduced != full:
        assert diagnosis.missing_evidence or _only_optional_gone(full, reduced)


def without(found: Evidence, position: int, rank: int, piece: str) -> Evidence:
    if position >= len(found.samples) or rank not in found.samples[position].ranks:
        return found
    if piece == "all":
        sample = found.samples[position]
        kept = {number: one for number, one in sample.ranks.items() if number != rank}
        samples = (*found.samples[:position], replace(sample, ranks=kept), *found.samples[position + 1 :])
        return replace(found, samples=samples)
    if piece == "decisions":
        snapshot = found.samples[position].ranks[rank].snapshot
        gone = None if snapshot is None else replace(snapshot, decisions=())
        return set_rank(found, rank, (position,), snapshot=gone)
    return set_rank(found, rank, (position,), **{piece: None})


def _only_optional_gone(full: Evidence, reduced: Evidence) -> bool:
    """Decisions and exceptions are no files of a sample: whether there were any cannot be told."""
    return len(full.samples) == len(reduced.samples) and all(
        one.ranks.keys() == other.ranks.keys()
        and all(
            (one.ranks[rank].snapshot is None) == (other.ranks[rank].snapshot is None)
            and one.ranks[rank].stacks == other.ranks[rank].stacks
            and one.ranks[rank].state == other.ranks[rank].state
            for rank in one.ranks
        )
        for one, other in zip(full.samples, reduced.samples, strict=True)
    )


def test_the_first_to_die_is_blamed_also_where_the_engine_ended_the_rest() -> None:
    found = set_rank(evidence(two(), deaths={"server": 3.0, 1: 1.0, 0: 1.3}), 0, state="dead")
    found = set_rank(found, 1, state="dead")
    with_server = replace(
        found,
        samples=tuple(
            replace(sample, others={"server": RankEvidence(state="dead", pid=9, role="server")})
            for sample in found.samples
        ),
    )
    told = diagnose(with_server)
    assert (told.kind, told.mechanism, blamed(told)) == ("dead", "rank-dead", [1])
    assert "server: its process (pid 9) is gone since 3.00 s" in facts(told)


def test_a_stopped_process_that_is_no_rank_is_named_by_its_role() -> None:
    found = evidence(two())
    stopped = RankEvidence(state="T", pid=77, node="node-a", role="controller")
    told = diagnose(
        replace(found, samples=tuple(replace(s, others={"controller": stopped}) for s in found.samples))
    )
    assert (told.kind, told.mechanism) == ("stopped", "rank-stopped")
    assert [(c.rank, c.role, c.pid) for c in told.culprits] == [(None, "controller", 77)]
