"""Who can no longer move, over hand-made ledgers: each knot beside the twin in which somebody still may."""

from __future__ import annotations

from ledger_builder import Group, Rank, Stream

from harness.blocked import Blocked, blocked
from harness.waits import waits

PAIR = (0, 1)


def behind_experts(rank: Rank, copy: str = "next_token_copy") -> None:
    """The host copies pageably: it waits for ``copy``, whose stream waits for compute, which waits for a collective
    of the experts."""
    rank.phase = "sample"
    rank.streams["comm"] = Stream([("event.wait", 9), ("all_reduce experts", 9)], done=1)
    rank.streams["compute"] = Stream([("gemm", 9), ("event.wait", 9), ("sample", 9)], done=1)
    rank.streams["copy"] = Stream([("event.wait", 9), (copy, 9)])
    rank.host_wait = ("copy", 2)
    rank.groups["experts"] = Group(PAIR).round("all_reduce").enter("all_reduce")
    rank.groups["agree"] = Group(PAIR).round("all_gather")


def in_agreement(rank: Rank) -> None:
    """It left a collective of the experts out, and its host is in the agreement of the next step."""
    rank.phase = "agree"
    rank.groups["experts"] = Group(PAIR).round("all_reduce")
    rank.groups["agree"] = Group(PAIR, host=True).round("all_gather").enter("all_gather")


def skipped() -> list[Rank]:
    ranks = [Rank(0), Rank(1)]
    behind_experts(ranks[0])
    in_agreement(ranks[1])
    return ranks


def look(ranks: list[Rank], *, still: tuple[int, ...] = (), assumed: tuple[int, ...] = ()) -> Blocked | None:
    snapshots = {rank.rank: rank.snapshot() for rank in ranks}
    found = waits(snapshots)
    seen = {rank: snapshot for rank, snapshot in snapshots.items() if not still or rank in still}
    return blocked(seen, found, assumed=assumed)


def test_a_host_in_a_synchronisation_behind_a_collective_that_its_peer_left_out() -> None:
    stuck = look(skipped())
    assert stuck is not None and stuck.hosts == (0, 1)
    assert {(wait.group, wait.missing) for wait in stuck.waits} == {("agree", (0,)), ("experts", (1,))}
    text = "\n".join(stuck.facts)
    assert (
        "rank 0: the host waits for next_token_copy (operation 2 of copy), which stands in event.wait" in text
    )
    assert "rank 1: the host itself is in all_gather 2 of group agree" in text


def test_without_the_synchronisation_the_host_may_still_come() -> None:
    ranks = skipped()
    ranks[0].host_wait = None
    assert look(ranks) is None


def test_a_synchronisation_that_is_over_holds_nobody() -> None:
    ranks = skipped()
    ranks[0].host_wait = ("compute", 1)
    assert look(ranks) is None


def test_a_kernel_before_the_collective_may_end() -> None:
    ranks = skipped()
    ranks[0].streams["compute"].done = 0
    ranks[0].host_wait = ("compute", 1)
    assert look(ranks) is None
    ranks = skipped()
    # An event may come from the stream that still computes.
    ranks[0].streams["update"] = Stream([("graph.update decode.4", 9)])
    assert look(ranks) is None


def test_a_peer_that_moves_or_was_not_seen_to_stand_may_come() -> None:
    assert look(skipped(), still=(0,)) is None
    assert look(skipped(), still=(1,)) is None


def test_events_alone_prove_nothing() -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        rank.streams["compute"] = Stream([("event.wait", 9)])
        rank.streams["copy"] = Stream([("event.wait", 9)])
        rank.host_wait = ("copy", 1)
    assert look(ranks) is None


def test_all_members_inside_is_no_knot() -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        behind_experts(rank)
    assert look(ranks) is None


def test_both_hosts_in_synchronisations_behind_each_others_groups() -> None:
    ranks = [Rank(0), Rank(1)]
    for rank, (mine, other) in zip(ranks, (("experts", "stats"), ("stats", "experts")), strict=True):
        rank.streams["comm"] = Stream([(f"all_reduce {mine}", 9)])
        rank.streams["compute"] = Stream([("event.wait", 9), ("token_count_copy", 9)])
        rank.host_wait = ("compute", 2)
        rank.groups[mine] = Group(PAIR).round("all_reduce").enter("all_reduce")
        rank.groups[other] = Group(PAIR).round("all_reduce")
    stuck = look(ranks)
    assert stuck is not None and stuck.hosts == (0, 1)


def test_a_replay_whose_peer_does_not_replay() -> None:
    ranks = [Rank(0), Rank(1)]
    behind_experts(ranks[0])
    ranks[0].streams["compute"] = Stream([("graph.replay decode.4", 9), ("sample", 9)])
    ranks[0].streams["comm"] = Stream()
    experts = ranks[0].groups["experts"] = Group(PAIR).round("all_reduce")
    experts.add("graph decode.4", (4,), "", 4)
    in_agreement(ranks[1])
    stuck = look(ranks)
    assert stuck is not None and stuck.hosts == (0, 1)


def test_who_stands_when_one_host_is_taken_to_stand() -> None:
    ranks = skipped()
    ranks[1].groups["agree"] = Group(PAIR).round("all_gather")
    ranks[1].phase = "launch"
    assert look(ranks) is None
    stuck = look(ranks, assumed=(1,))
    assert stuck is not None and stuck.hosts == (0, 1)


def test_a_registration_needs_the_streams_of_whoever_is_missing() -> None:
    """Nobody enqueues it: a stream that still runs may come to it though the host stands."""
    ranks = skipped()
    symm = Group(PAIR).round("register")
    ranks[0].groups["symm"] = Group(PAIR, host=True).round("register").enter("register")
    ranks[0].streams["comm"] = Stream([("reserve symm", 9)])
    ranks[0].groups["experts"] = Group(PAIR).round("all_reduce")
    ranks[1].groups["symm"] = symm
    ranks[1].streams["comm"] = Stream([("gemm", 9)])
    assert look(ranks) is None


def test_an_engine_that_records_no_synchronisation_is_held_by_its_phase() -> None:
    ranks = skipped()
    ranks[0].host_wait = None
    ranks[0].phase = "wait-result"
    stuck = look(ranks)
    assert stuck is not None and "does not bring" in "\n".join(stuck.facts)
