"""Ranks that went apart, found in what they wrote down of each step; each rule beside a near miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ledger_builder import Group, Rank
from test_diagnose import blamed, evidence, facts

from harness.diagnose import Diagnosis, diagnose

Edit = Callable[[int, int, dict[str, Any]], None]
"""Changes a record: (rank, step, record)."""
BEGUN = 12
"""The step in which every host stands; the records go up to the one before."""


def records(world: int, last: int, edit: Edit) -> dict[int, list[dict[str, Any]]]:
    """What ranks in good health write down: every third step is a prefill, of 4 collectives; the others have 6."""
    made: dict[int, list[dict[str, Any]]] = {}
    for rank in range(world):
        entered = 0
        made[rank] = []
        for step in range(1, last + 1):
            prefill = step % 3 == 0
            record = {
                "step": step, "mode": "prefill" if prefill else "decode",
                "modes": ["prefill" if prefill else "decode", *["decode"] * (world - 1)],
                "tokens": [9 if prefill else 2, *[2] * (world - 1)],
                "padding": "sum_len" if prefill else "max_len", "bucket": 0 if prefill else 2, "graph": not prefill,
                "collectives": {"agree": step, "experts": entered},
            }  # fmt: skip
            entered += 4 if prefill else 6
            edit(rank, step, record)
            made[rank].append(record)
    return made


def nothing(rank: int, step: int, record: dict[str, Any]) -> None:
    pass


def standing(world: int, found: dict[int, list[dict[str, Any]]]) -> list[Rank]:
    """All ranks agreed on all steps with a record, and are in the agreement of the next one, but the last rank,
    which does not come to it."""
    ranks = [Rank(number, world, step=BEGUN) for number in range(world)]
    done = len(found[0])
    for rank in ranks:
        everyone = tuple(range(world))
        rank.groups["agree"] = Group(everyone, host=True).round(*["all_gather"] * done)
        last = found[rank.rank][-1]
        entered = last["collectives"]["experts"] + (6 if last["graph"] else 4)
        rank.groups["experts"] = Group(everyone).round(*["all_reduce"] * entered)
        rank.decisions = found[rank.rank]
        rank.phase = "agree"
    for rank in ranks[:-1]:
        rank.groups["agree"].enter("all_gather")
    ranks[-1].phase = "schedule"
    return ranks


def told(ranks: list[Rank], found: dict[int, list[dict[str, Any]]]) -> Diagnosis:
    """The rings keep the newest records, the files all of them."""
    return diagnose(evidence(ranks, decisions={rank: tuple(whole) for rank, whole in found.items()}))


def verdict(diagnosis: Diagnosis) -> tuple[str, list[int | None]]:
    return diagnosis.mechanism, blamed(diagnosis)


# Counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("skipper", [0, 1])
def test_an_agreement_left_out_thousands_of_steps_ago_is_found_where_it_was(skipper: int) -> None:
    def skips(rank: int, step: int, record: dict[str, Any]) -> None:
        if rank == skipper and step >= 40:
            record["collectives"]["agree"] -= 1

    found = records(2, 2500, skips)
    ranks = standing(2, found)
    for rank in ranks:
        rank.step = 2501
    diagnosis = told(ranks, found)
    assert verdict(diagnosis) == ("collective-skipped", [skipper])
    assert (diagnosis.confidence, diagnosis.stream) == ("proven", "host")
    assert diagnosis.collective is not None and diagnosis.collective.group == "agree"
    assert (
        f"rank {skipper} left one out: no collective of group agree between its record of step 39 and that of "
        "step 40, where such a step had 1 on every rank" in facts(diagnosis)
    )


def test_ranks_that_number_their_steps_each_by_itself_are_not_held_against_each_other() -> None:
    def own(rank: int, step: int, record: dict[str, Any]) -> None:
        record["collectives"]["agree"] += 5 * rank

    found = records(2, BEGUN - 1, own)
    assert verdict(told(standing(2, found), found)) == ("host-blocked", [1])


def left_out(skipper: int, at: int, by: int) -> Edit:
    def skips(rank: int, step: int, record: dict[str, Any]) -> None:
        if rank == skipper and step > at:
            record["collectives"]["experts"] -= by

    return skips


@pytest.mark.parametrize("skipper", [0, 1])
def test_a_collective_left_out_of_a_prefill_is_told_by_the_prefills_before(skipper: int) -> None:
    found = records(2, BEGUN - 1, left_out(skipper, at=9, by=2))
    diagnosis = told(standing(2, found), found)
    assert verdict(diagnosis) == ("collective-skipped", [skipper])
    assert (diagnosis.confidence, diagnosis.stream) == ("proven", "comm")
    assert (
        f"rank {skipper} left one out: 2 collectives of group experts between its record of step 9"
        in facts(diagnosis)
    )


def test_what_all_leave_out_together_is_nobodys_fault() -> None:
    found = records(2, BEGUN - 1, lambda _, step, record: left_out(0, 9, 2)(0, step, record))
    assert verdict(told(standing(2, found), found)) == ("host-blocked", [1])


def test_more_than_usual_is_no_skip() -> None:
    found = records(2, BEGUN - 1, left_out(1, at=9, by=-1))
    assert verdict(told(standing(2, found), found)) == ("collective-mismatch", [1])


def test_with_no_step_of_that_kind_before_two_ranks_are_not_told_apart_and_three_are() -> None:
    for world, expected in ((2, []), (3, [2])):
        found = records(world, BEGUN - 1, left_out(world - 1, at=3, by=2))
        diagnosis = told(standing(world, found), found)
        assert blamed(diagnosis) == expected, "step 3 is the first prefill"


def test_the_last_step_of_a_rank_that_wrote_no_further_record_is_in_its_ledger() -> None:
    found = records(2, 9, nothing)
    ranks = standing(2, found)
    before = found[0][-1]["collectives"]["experts"]
    for rank in ranks:
        rank.step = 10
        rank.groups["experts"] = Group((0, 1)).round(*["all_reduce"] * before)
    ranks[0].phase, ranks[0].step = "wait-result", 9
    ranks[0].groups["experts"].round("all_reduce", "all_reduce").enter("all_reduce").add("all_reduce")
    ranks[0].groups["agree"].records.pop()
    ranks[1].phase = "agree"
    ranks[1].groups["agree"].enter("all_gather")
    ranks[1].groups["experts"].round("all_reduce", "all_reduce")
    diagnosis = told(ranks, found)
    assert verdict(diagnosis) == ("collective-skipped", [1])
    assert diagnosis.collective is not None
    assert (diagnosis.collective.group, diagnosis.collective.missing) == ("experts", (1,))


# The outcome of the agreement ----------------------------------------------------------------------------


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_step_made_twice_is_a_decision_of_one_rank(culprit: int) -> None:
    def again(rank: int, step: int, record: dict[str, Any]) -> None:
        if (rank, step) == (culprit, 7):
            record |= {"passes": 2, "failed": [{"request": "r1", "reason": "its grammar refused token 6"}]}

    found = records(2, BEGUN - 1, again)
    diagnosis = told(standing(2, found), found)
    assert verdict(diagnosis) == ("decision-divergence", [culprit])
    assert f"rank {culprit} made step 7 2 times: r1 failed (its grammar refused token 6)" in facts(diagnosis)


def test_the_earliest_departure_decides() -> None:
    def both(rank: int, step: int, record: dict[str, Any]) -> None:
        left_out(0, at=9, by=2)(rank, step, record)
        if (rank, step) == (1, 5):
            record["passes"] = 2

    found = records(2, BEGUN - 1, both)
    assert verdict(told(standing(2, found), found)) == ("decision-divergence", [1])


# One attention group -------------------------------------------------------------------------------------


def grouped(edit: Edit) -> Edit:
    """Ranks 0 and 1 are an attention group, 2 and 3 another."""

    def with_batch(rank: int, step: int, record: dict[str, Any]) -> None:
        record |= {"dp": rank // 2, "own_tokens": 2, "requests": ["a", "b"], "aborted": [], "retracted": []}
        edit(rank, step, record)

    return with_batch


@pytest.mark.parametrize("culprit", [0, 1, 2, 3])
def test_the_rank_that_drops_a_request_alone_is_named_and_its_peer_is_not(culprit: int) -> None:
    def drops(rank: int, step: int, record: dict[str, Any]) -> None:
        if rank == culprit and step == 8:
            record |= {"aborted": ["b"], "requests": ["a"], "own_tokens": 1}

    found = records(4, BEGUN - 1, grouped(drops))
    assert verdict(told(standing(4, found), found)) == ("decision-divergence", [culprit])


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_order_of_victims_that_no_retraction_had_before_is_odd(culprit: int) -> None:
    def retracts(rank: int, step: int, record: dict[str, Any]) -> None:
        if step % 4 == 0 and rank < 2:
            victims = [["b", 1, -9, -2], ["a", 4, -3, -1]]
            if (rank, step) == (culprit, 8):
                victims.reverse()
            record |= {"victims": victims, "retracted": [victims[0][0]], "requests": [victims[1][0]]}

    found = records(4, BEGUN - 1, grouped(retracts))
    diagnosis = told(standing(4, found), found)
    assert verdict(diagnosis) == ("decision-divergence", [culprit])
    assert f"rank {culprit} considered its victims in the order" in facts(diagnosis)


def test_two_ranks_that_differ_without_a_word_why_are_both_named() -> None:
    def differs(rank: int, step: int, record: dict[str, Any]) -> None:
        if (rank, step) == (3, 8):
            record["requests"] = ["a", "c"]

    found = records(4, BEGUN - 1, grouped(differs))
    assert verdict(told(standing(4, found), found)) == ("decision-divergence", [2, 3])


def test_attention_groups_may_differ_from_each_other() -> None:
    found = records(4, BEGUN - 1, grouped(lambda rank, _, record: record.update(requests=[rank // 2])))
    assert verdict(told(standing(4, found), found)) == ("host-blocked", [3])


# A rank that raised --------------------------------------------------------------------------------------


def test_of_two_collectives_that_miss_a_rank_that_raised_the_step_s_own_is_told() -> None:
    """Rank 0 has no token to wait for and is in the next agreement already; rank 2 raised at the launch."""
    found = records(3, BEGUN - 1, nothing)
    ranks = standing(3, found)
    for rank in ranks:
        rank.groups["experts"].done -= 6
        rank.groups["experts"].started -= 5
    ranks[1].groups["agree"].records.pop()
    ranks[1].phase = "wait-result"
    ranks[2].step, ranks[2].phase = BEGUN - 1, "launch"
    del ranks[2].groups["experts"].records[-6:]
    ranks[2].groups["experts"].started -= 1
    whole = evidence(ranks, exceptions={2: "IndexError: list index out of range"})
    diagnosis = diagnose(whole)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [2])
    assert diagnosis.collective is not None and diagnosis.collective.group == "experts"


def test_an_agreement_left_out_of_the_last_step_is_in_its_rank_s_own_record() -> None:
    """Its peers meet its next agreement with their own of this step, and raise."""

    def skips(rank: int, step: int, record: dict[str, Any]) -> None:
        if rank == 1 and step == BEGUN - 1:
            record["collectives"]["agree"] -= 1

    found = records(2, BEGUN - 1, skips)
    found[0].pop()
    ranks = standing(2, found)
    error = "AgreementError: the ranks are at different steps: [11, 12]"
    diagnosis = diagnose(evidence(ranks, exceptions={0: error, 1: error}))
    assert verdict(diagnosis) == ("collective-skipped", [1])


def test_a_rank_that_ends_a_request_in_a_step_of_its_own_record_is_held_to_its_last_step() -> None:
    """Rank 1 left a part of step 9 out and wrote a record of step 10, which rank 0 did not."""
    found = records(2, 10, left_out(1, at=9, by=2))
    found[0].pop()
    ranks = standing(2, found)
    ranks[0].groups["experts"].done -= 2
    ranks[0].groups["experts"].started -= 1
    assert verdict(told(ranks, found)) == ("collective-skipped", [1])


def test_a_host_that_did_not_come_to_a_broadcast_of_its_step_left_nothing_out() -> None:
    def broadcasts(rank: int, step: int, record: dict[str, Any]) -> None:
        record["collectives"]["world"] = step

    found = records(2, BEGUN - 1, broadcasts)
    ranks = standing(2, found)
    for rank in ranks:
        rank.groups["world"] = Group((0, 1), host=True).round(*["broadcast from 0"] * (BEGUN - 1))
    ranks[0].groups["agree"].records.pop()
    ranks[0].groups["world"].enter("broadcast from 0")
    assert verdict(told(ranks, found)) == ("host-blocked", [1])


def test_a_step_of_a_kind_that_none_had_before_says_nothing_of_its_rank() -> None:
    """Rank 1 recorded a step in which nobody had a token; all steps before had tokens."""

    def empty(rank: int, step: int, record: dict[str, Any]) -> None:
        record["collectives"]["experts"] = 4 * (step - 1)
        if step == BEGUN - 1:
            record |= {"tokens": [0, 0], "graph": False, "bucket": 0, "padding": "sum_len", "mode": "idle"}

    found = records(2, BEGUN - 1, empty)
    found[0].pop()
    ranks = standing(2, found)
    for rank in ranks:
        rank.groups["experts"] = Group((0, 1)).round(*["all_reduce"] * 4 * (BEGUN - 2))
    diagnosis = diagnose(evidence(ranks, exceptions={1: "RuntimeError: broken"}))
    assert (verdict(diagnosis), diagnosis.confidence) == (("collective-skipped", [1]), "proven")
    assert "left one out" not in facts(diagnosis)


def test_steps_without_a_record_had_nothing_of_which_less_could_be_done() -> None:
    """Of the steps since its last but one record, in which nobody had a token, rank 1 wrote down only the last."""

    def even(rank: int, step: int, record: dict[str, Any]) -> None:
        record["collectives"]["experts"] = 4 * min(step - 1, BEGUN - 4)
        if step > BEGUN - 4:
            record |= {"tokens": [0, 0], "graph": False, "bucket": 0, "padding": "sum_len"}

    found = records(2, BEGUN - 1, even)
    found = {0: found[0][:-3], 1: [*found[1][:-3], found[1][-1]]}
    ranks = standing(2, found)
    for rank in ranks:
        rank.groups["experts"] = Group((0, 1)).round(*["all_reduce"] * 4 * (BEGUN - 4))
    assert "left one out" not in facts(told(ranks, found)) and "did more" not in facts(told(ranks, found))


# Lost records --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 1, 2])
def test_a_rank_whose_newest_records_are_lost_did_not_do_more(cut: int) -> None:
    found = records(3, BEGUN - 1, nothing)
    ranks = standing(3, found)
    found[cut] = found[cut][:5]
    ranks[cut].decisions = found[cut]
    assert verdict(told(ranks, found)) == ("host-blocked", [2])


def test_a_rank_that_lost_records_in_between_did_not_do_more() -> None:
    found = records(2, BEGUN - 1, nothing)
    ranks = standing(2, found)
    found[0] = [*found[0][:4], *found[0][7:]]
    ranks[0].decisions = found[0]
    assert verdict(told(ranks, found)) == ("host-blocked", [1])


@pytest.mark.parametrize("skipper", [0, 1])
def test_agreements_fewer_than_steps_tell_who_left_one_out_where_the_records_of_then_are_gone(
    skipper: int,
) -> None:
    """One rank is in the question after its step, its peer still in the agreement of it. Neither ring reaches
    back to when their counts were equal."""
    ranks = [Rank(number, 2, step=1000, phase="agree") for number in range(2)]
    for rank in ranks:
        behind = int(rank.rank == skipper)
        rank.groups["agree"] = Group((0, 1), host=True).round(*["all_gather"] * (999))
        rank.decisions = [
            {"step": step, "tokens": [0, 0], "collectives": {"agree": step - behind}} for step in (976, 992)
        ]
        if behind:
            rank.phase = "sync"
            rank.groups["sync"] = Group((0, 1), host=True).enter("all_reduce")
        else:
            rank.groups["agree"].enter("all_gather")
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence, blamed(found)) == (
        "collective-skipped",
        "supported",
        [skipper],
    )
    assert found.collective is not None and found.collective.group == "agree"
    assert f"rank {skipper} has begun 1 steps more than it entered agreements" in facts(found)


def test_a_rank_that_has_not_come_to_the_agreement_of_its_step_skipped_none() -> None:
    ranks = [Rank(number, 2, step=1000, phase="agree") for number in range(2)]
    for rank in ranks:
        rank.groups["agree"] = Group((0, 1), host=True).round(*["all_gather"] * 999)
    ranks[0].groups["agree"].enter("all_gather")
    ranks[1].phase = "cache-sync"
    ranks[1].groups["cache"] = Group((0, 1), host=True).enter("all_reduce")
    found = diagnose(evidence(ranks))
    assert "entered agreements" not in facts(found)
    assert blamed(found) == [0, 1]
