"""A rank that ran something else than was agreed, or came to another group; each rule beside a near miss."""

from __future__ import annotations

from typing import Any

import pytest
from ledger_builder import Group, Rank
from test_diagnose import blamed, evidence, facts

from harness.diagnose import Diagnosis, diagnose

MAX_LEN = {"tokens": [4, 1], "padding": "max_len", "bucket": 0, "graph": False}
GRAPH = {"tokens": [4, 1], "padding": "max_len", "bucket": 4, "graph": True}


def stepping(world: int = 2, *, shape: tuple[int, ...] = (4, 64)) -> list[Rank]:
    """Four eager steps of two collectives, padded to the longest; all hosts stand in the fifth."""
    ranks = [Rank(number, world, step=5) for number in range(world)]
    for rank in ranks:
        group = rank.groups["experts"] = Group(tuple(range(world)))
        for step in range(1, 5):
            rank.decisions.append({"step": step, **MAX_LEN, "collectives": {"experts": group.enqueued}})
            group.add("all_gather", shape).add("reduce_scatter", (shape[0] * 2, *shape[1:]))
        group.round()
    return ranks


def last(ranks: list[Rank], record: dict[str, Any]) -> None:
    for rank in ranks:
        counts = {"experts": rank.groups["experts"].enqueued}
        rank.decisions.append({"step": 5, **record, "collectives": counts})


def replays(rank: Rank, graph: str) -> None:
    rank.groups["experts"].add(f"graph {graph}", (4,), "", 4)
    rank.streams["compute"].operations.append((f"graph.replay {graph}", 5))


def found(ranks: list[Rank]) -> Diagnosis:
    return diagnose(evidence(ranks))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_runs_eagerly_what_all_agreed_to_replay_is_named(culprit: int) -> None:
    ranks = stepping()
    last(ranks, GRAPH)
    for rank in ranks:
        if rank.rank == culprit:
            rank.groups["experts"].enter("all_reduce", (4, 64))
        else:
            replays(rank, "decode.4")
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [culprit])
    assert diagnosis.stream == "comm"
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    assert diagnosis.collective.mismatch.what == "operation"
    assert (
        f"rank {culprit}: at step 5 the ranks agreed on the graph of bucket 4 for tokens [4, 1], and it brought "
        "all_reduce (4, 64) float32" in facts(diagnosis)
    )


@pytest.mark.parametrize("culprit", [0, 1])
def test_another_bucket_than_the_agreed_one_is_a_mismatch_of_sizes(culprit: int) -> None:
    ranks = stepping()
    last(ranks, GRAPH)
    for rank in ranks:
        replays(rank, "decode.2" if rank.rank == culprit else "decode.4")
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [culprit])
    assert diagnosis.stream == "compute"
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    assert diagnosis.collective.mismatch.what == "size"


@pytest.mark.parametrize("culprit", [0, 1])
def test_rows_that_do_not_fit_the_agreed_counts_name_the_rank(culprit: int) -> None:
    ranks = stepping()
    last(ranks, MAX_LEN)
    for rank in ranks:
        rank.groups["experts"].enter("all_gather", (1 if rank.rank == culprit else 4, 64))
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [culprit])


def test_rows_of_a_group_that_never_fitted_the_counts_name_nobody_by_them() -> None:
    ranks = stepping(shape=(7, 64))
    last(ranks, MAX_LEN)
    for rank in ranks:
        rank.groups["experts"].enter("all_gather", (1 if rank.rank else 4, 64))
    assert blamed(found(ranks)) == [0, 1], "both sides are shown, and nobody is chosen"


def test_where_nothing_tells_the_sides_apart_it_is_said_what_is_missing() -> None:
    ranks = stepping(shape=(7, 64))
    last(ranks, MAX_LEN)
    for rank in ranks:
        rank.groups["experts"].enter("all_gather", (1 if rank.rank else 4, 64))
    diagnosis = found(ranks)
    assert (diagnosis.confidence, blamed(diagnosis)) == ("suspected", [0, 1])
    assert [piece.what for piece in diagnosis.missing_evidence] == ["which side brought what was due"]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_collective_whose_step_has_lost_its_record_is_not_held_against_another(culprit: int) -> None:
    """The step's record, of another plan, is there of one rank only."""
    ranks = stepping()
    last(ranks, {**MAX_LEN, "tokens": [9, 1]})
    for rank in ranks:
        rank.groups["experts"].enter("all_gather", (2 if rank.rank == culprit else 9, 64))
    ranks[1 - culprit].decisions.pop()
    diagnosis = found(ranks)
    assert f"rank {1 - culprit}: at step 4 the ranks agreed" not in facts(diagnosis)
    assert blamed(diagnosis) != [1 - culprit]


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_type_that_a_group_never_had_names_its_rank_in_a_step_of_a_new_kind(culprit: int) -> None:
    ranks = stepping()
    for rank in ranks:
        rank.decisions.clear()
        kind = "bfloat16" if rank.rank == culprit else "float32"
        rank.groups["experts"].enter("all_to_all", (4, 64), kind)
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [culprit])
    assert diagnosis.confidence == "supported"
    assert f"rank {culprit}: no collective of group experts before was bfloat16 on any rank" in facts(
        diagnosis
    )


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_root_that_a_group_never_had_names_its_rank_one_against_one(culprit: int) -> None:
    ranks = stepping()
    for rank in ranks:
        rank.groups["world"] = Group((0, 1), host=True).round(*["broadcast from 0"] * 3)
        rank.groups["world"].enter(f"broadcast from {int(rank.rank == culprit)}")
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [culprit])


def test_what_a_rank_wrote_down_that_it_ran_is_believed() -> None:
    ranks = stepping(shape=(7, 64))
    last(ranks, MAX_LEN)
    ranks[0].decisions[-1]["ran"] = {**MAX_LEN, "padding": "sum_len"}
    for rank in ranks:
        rank.groups["experts"].enter("all_reduce" if rank.rank == 0 else "all_gather", (5, 64))
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [0])
    assert "and it ran an eager step padded sum_len for tokens [4, 1]" in facts(diagnosis)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_type_that_no_step_had_names_the_rank_that_brought_it(culprit: int) -> None:
    ranks = stepping()
    last(ranks, MAX_LEN)
    for rank in ranks:
        rank.groups["experts"].enter("all_gather", (4, 64), "float64" if rank.rank == culprit else "float32")
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [culprit])
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    assert diagnosis.collective.mismatch.what == "dtype"


def test_a_host_that_is_a_step_ahead_of_its_device_is_judged_in_the_step_that_stands() -> None:
    ranks = stepping()
    last(ranks, MAX_LEN)
    for rank in ranks:
        group = rank.groups["experts"]
        group.enter("all_gather", (4, 64), "float64" if rank.rank else "float32").add(
            "reduce_scatter", (8, 64)
        )
        rank.decisions.append({"step": 6, **MAX_LEN, "collectives": {"experts": group.enqueued}})
        group.add("all_gather", (4, 64)).add("reduce_scatter", (8, 64))
        rank.step = 6
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-mismatch", [1])
    assert "in its step 5" in facts(diagnosis)


def test_two_roots_are_a_mismatch_of_roots() -> None:
    ranks = stepping(3)
    for rank in ranks:
        rank.groups["world"] = Group((0, 1, 2), host=True).round(*["broadcast from 0"] * 3)
        rank.groups["world"].enter(f"broadcast from {int(rank.rank == 2)}")
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis), diagnosis.stream) == ("collective-mismatch", [2], "host")
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    assert diagnosis.collective.mismatch.what == "root"


# Groups --------------------------------------------------------------------------------------------------


def four(times: int) -> list[Rank]:
    """Ranks 0 and 1 are an attention group, 2 and 3 another; each had so many agreements of its own. Ranks 2 and 3
    are in one of all ranks, the others in the agreement of the next step."""
    ranks = [Rank(number, 4, step=5) for number in range(4)]
    for rank in ranks:
        own = (0, 1) if rank.rank < 2 else (2, 3)
        rank.groups["agree"] = Group((0, 1, 2, 3), host=True).round(*["all_gather"] * 4)
        rank.groups["attention_host"] = Group(own, host=True).round(*["all_reduce"] * times)
        if rank.rank < 2:
            rank.groups["agree"].enter("all_gather")
        else:
            rank.groups["world"] = Group((0, 1, 2, 3), host=True).enter("all_reduce")
    return ranks


def test_an_operation_that_belongs_to_a_narrower_group_names_the_ranks_that_came() -> None:
    diagnosis = found(four(3))
    assert (diagnosis.mechanism, blamed(diagnosis), diagnosis.stream) == (
        "collective-skipped",
        [2, 3],
        "host",
    )
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    shown = diagnosis.collective
    assert (shown.group, shown.waiting, shown.missing) == ("world", (2, 3), (0, 1))
    assert diagnosis.collective.mismatch.what == "group"
    assert "rank 2 carried out all_reduce (4,) float32 3 times in group attention_host" in facts(diagnosis)


def test_an_operation_that_nobody_did_before_is_not_in_a_wrong_group() -> None:
    assert "wrong" not in found(four(0)).signature and blamed(found(four(0))) != [2, 3]


def test_an_operation_that_the_wide_group_did_before_belongs_there() -> None:
    ranks = four(3)
    for rank in ranks:
        world = Group((0, 1, 2, 3), host=True).round("all_reduce")
        rank.groups["world"] = world.enter("all_reduce") if rank.rank > 1 else world
    assert blamed(found(ranks)) != [2, 3]


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_operation_that_peers_await_in_its_own_group_is_in_a_wrong_one(culprit: int) -> None:
    """The wide group has carried other messages often, and has the same members."""
    ranks = [Rank(number, 2, step=5) for number in range(2)]
    for rank in ranks:
        rank.groups["sync"] = Group((0, 1), host=True).round(*["all_reduce"] * 3)
        rank.groups["world"] = Group((0, 1), host=True).round(*["broadcast from 0"] * 40)
        rank.groups["world" if rank.rank == culprit else "sync"].enter("all_reduce")
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [culprit])
    assert diagnosis.collective is not None and diagnosis.collective.mismatch is not None
    assert diagnosis.collective.mismatch.what == "group"


def test_an_operation_that_the_other_group_carried_before_may_belong_there() -> None:
    ranks = [Rank(number, 2, step=5) for number in range(2)]
    for rank in ranks:
        rank.groups["sync"] = Group((0, 1), host=True).round(*["all_reduce"] * 3)
        rank.groups["world"] = Group((0, 1), host=True).round(*["all_reduce"] * 3)
        rank.groups["world" if rank.rank else "sync"].enter("all_reduce")
    assert blamed(found(ranks)) == [0, 1]


def test_a_group_that_nobody_used_before_blames_no_peer_for_not_coming() -> None:
    ranks = [Rank(number, 2, step=5) for number in range(2)]
    for rank in ranks:
        rank.groups["sync"] = Group((0, 1), host=True).round("all_reduce")
    ranks[0].groups["sync"].enter("all_reduce")
    ranks[1].groups["world"] = Group((0, 1), host=True).enter("all_gather")
    diagnosis = found(ranks)
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-order", [0, 1])


# Rounds of control messages ------------------------------------------------------------------------------


def rounds(culprit: int, *, order: tuple[str, str] = ("world", "agree"), length: int = 6) -> list[Rank]:
    """Each round a broadcast, then an agreement. All but the culprit are in the broadcast of the next round, and it
    is in the agreement."""
    ranks = [Rank(number, 2, step=length + 1, phase="receive") for number in range(2)]
    for rank in ranks:
        for name in order:
            rank.groups[name] = Group((0, 1), host=True)
        for _ in range(length):
            for name in order:
                rank.groups[name].round("message")
        rank.groups[order[1] if rank.rank == culprit else order[0]].enter("message")
    return ranks


def in_order(ranks: list[Rank]) -> list[Rank]:
    """The builder knows no times: the collectives of a rank are entered one after the other, by turns."""
    for rank in ranks:
        for offset, group in enumerate(rank.groups.values()):
            group.begun = tuple(2.0 * turn + offset for turn in range(group.enqueued))
    return ranks


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_rank_that_went_past_a_broadcast_of_its_round_is_named_one_against_one(culprit: int) -> None:
    diagnosis = found(in_order(rounds(culprit)))
    assert (diagnosis.mechanism, blamed(diagnosis)) == ("collective-skipped", [culprit])
    assert diagnosis.collective is not None and diagnosis.collective.group == "world"
    assert f"rank {culprit} went from its agree to agree, which it never did before" in facts(diagnosis)


def test_a_rank_that_often_goes_past_the_broadcast_left_nothing_out() -> None:
    ranks = in_order(rounds(1))
    group = ranks[1].groups["agree"]
    group.round("message")
    group.begun = (*group.begun[:-2], group.begun[-3] + 0.5, group.begun[-1], group.begun[-1] + 2.0)
    assert "which it never did before" not in facts(found(ranks))
