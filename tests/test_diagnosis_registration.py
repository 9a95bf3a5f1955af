"""Registrations that wait for ranks which wait for them, and members that may still come."""

from __future__ import annotations

import pytest
from ledger_builder import Group, Rank, Stream
from test_diagnose import blamed, evidence, facts
from test_watchdog import SETTINGS, Bench, alarms

from harness.diagnose import diagnose
from harness.standing import Confirmed

MIB = 1 << 20
ROOM = (2 * MIB,)
"""A segment of two halves, as it was registered at the start."""


def registered(world: int) -> list[Rank]:
    """All have registered once and made collectives since."""
    ranks = [Rank(number, world, phase="wait-result", step=12) for number in range(world)]
    members = tuple(range(world))
    for rank in ranks:
        rank.groups["agree"] = Group(members).round(*["all_gather"] * 12)
        rank.groups["symm"] = Group(members).add("register", ROOM, "uint8")
        rank.groups["symm"].done = rank.groups["symm"].started = 1
        rank.groups["experts"] = Group(members).round(*["all_gather", "reduce_scatter"] * 6)
    return ranks


def in_collective(ranks: list[Rank], inside: tuple[int, ...], nbytes: int) -> list[Rank]:
    """All stand in one collective of the experts on comm; those ``inside`` register in the course of it."""
    for rank in ranks:
        rank.streams["comm"] = Stream([("all_reduce experts", 12)])
        rank.streams["compute"] = Stream([("event.wait", 12)])
        rank.groups["experts"].enter("all_reduce", (nbytes // 4,))
        if rank.rank in inside:
            rank.groups["symm"].enter("register", (64 * MIB,), "uint8")
    return ranks


@pytest.mark.parametrize(("world", "inside"), [(2, (1,)), (2, (0,)), (4, (2,)), (4, (0, 3))])
def test_who_registers_without_a_need_is_blamed(world: int, inside: tuple[int, ...]) -> None:
    found = diagnose(evidence(in_collective(registered(world), inside, 4096)))
    assert (found.mechanism, found.confidence, found.stream) == ("registration-stall", "proven", "comm")
    assert blamed(found) == list(inside)
    assert found.collective is not None and found.collective.group == "symm"
    assert found.operation is not None and found.operation.label == "all_reduce experts"
    said = facts(found)
    assert (
        f"rank {inside[0]} registers within all_reduce 13 of group experts, of 4096 bytes, which fit into"
        in said
    )
    assert "waits in all_reduce 13 of group experts for rank" in said and "in the course of it" in said


@pytest.mark.parametrize(("world", "absent"), [(2, (1,)), (4, (2,))])
def test_who_does_not_register_for_a_collective_that_needs_it_is_blamed(
    world: int, absent: tuple[int, ...]
) -> None:
    inside = tuple(rank for rank in range(world) if rank not in absent)
    found = diagnose(evidence(in_collective(registered(world), inside, 8 * MIB)))
    assert (found.mechanism, blamed(found)) == ("registration-stall", list(absent))
    assert "of 8388608 bytes, which are more than the 1048576" in facts(found)


def test_of_four_the_one_that_did_not_register_is_odd_whatever_it_was_for() -> None:
    found = diagnose(evidence(in_collective(registered(4), (0, 1, 2), 4096)))
    assert (found.mechanism, blamed(found)) == ("registration-stall", [3])


def allocating(world: int, early: int) -> list[Rank]:
    """Rank ``early`` registers on its host before the agreement in which the others stand."""
    ranks = registered(world)
    for rank in ranks:
        rank.step, rank.phase = 13, "agree"
        if rank.rank == early:
            rank.phase = "allocate"
            rank.streams["compute"] = Stream([("reserve experts", 13)])
            rank.groups["symm"].enter("register", (64 * MIB,), "uint8")
        else:
            rank.groups["agree"].enter("all_gather")
    return ranks


@pytest.mark.parametrize(("world", "early"), [(2, 0), (2, 1), (4, 1)])
def test_an_allocation_in_another_place_than_the_others(world: int, early: int) -> None:
    found = diagnose(evidence(allocating(world, early)))
    assert (found.mechanism, found.confidence, blamed(found)) == ("registration-stall", "proven", [early])
    assert found.stream == "compute"


def test_a_member_that_computes_may_still_come() -> None:
    ranks = allocating(2, 0)
    ranks[1].phase = "launch"
    ranks[1].groups["agree"].started = ranks[1].groups["agree"].done = 13
    found = diagnose(evidence(ranks))
    assert found.mechanism != "registration-stall"


def stalled(ranks: list[Rank]) -> tuple[Bench, float]:
    bench = Bench(world=len(ranks))
    bench.warm()
    for rank, made in zip(bench.ranks, ranks, strict=True):
        rank.streams, rank.groups = made.streams, made.groups
    return bench, bench.now_s


@pytest.mark.parametrize("ranks", [allocating(2, 0), in_collective(registered(2), (1,), 4096)])
def test_the_watchdog_takes_it_for_a_proof(ranks: list[Rank]) -> None:
    bench, stalled_s = stalled(ranks)
    found = alarms(bench.run(2.0))
    assert found[0].reason == "registration" and found[0].road == "proof"  # type: ignore[union-attr]
    last = found[-1]
    assert isinstance(last, Confirmed) and last.confirmed_ns / 1e9 - stalled_s < SETTINGS.floor_s


def test_within_a_replay_the_peers_keep_their_budget() -> None:
    ranks = registered(2)
    for rank in ranks:
        rank.streams["compute"] = Stream([("graph.replay decode.4", 12)])
        rank.groups["experts"].add("graph decode.4", (4,), "", 4)
    ranks[1].groups["symm"].enter("register", (64 * MIB,), "uint8")
    bench, _ = stalled(ranks)
    assert alarms(bench.run(SETTINGS.floor_s - 0.2)) == []
    found = alarms(bench.run(1.5))
    assert found[0].reason == "registration"  # type: ignore[union-attr]
    blame = diagnose(evidence(ranks))
    assert (blame.mechanism, blame.confidence, blamed(blame)) == ("registration-stall", "supported", [1])
