"""Two groups entered in two orders, one communicator on two streams, and what only resembles them."""

from __future__ import annotations

import pytest
from ledger_builder import Group, Rank, Stream
from test_diagnose import blamed, evidence, facts
from test_watchdog import SETTINGS, Bench, alarms

from harness.diagnose import diagnose
from harness.diagnosis_case import Case
from harness.diagnosis_order import two_orders
from harness.standing import Confirmed

STEPS = 6
USUAL = ("all_gather experts", "reduce_scatter experts", "all_reduce stats")


def eager(world: int = 2) -> list[Rank]:
    """Whole eager steps 1 to 6, each with two collectives of the experts and one of the recorder."""
    ranks = [Rank(number, world, phase="wait-result", step=STEPS + 1) for number in range(world)]
    for rank in ranks:
        members = tuple(range(world))
        operations = [(label, step) for step in range(1, STEPS + 1) for label in USUAL]
        rank.streams["comm"] = Stream(operations, done=len(operations))
        rank.groups["agree"] = Group(members).round(*["all_gather"] * (STEPS + 1))
        rank.groups["experts"] = Group(members).round(*["all_gather", "reduce_scatter"] * STEPS)
        rank.groups["stats"] = Group(members).round(*["all_reduce"] * STEPS)
    return ranks


def stands(rank: Rank, *queued: tuple[str, int]) -> None:
    """Its comm stream stands in the first of ``queued`` (label, step); those behind it are not begun."""
    for position, (label, step) in enumerate(queued):
        operation, group = label.split()
        rank.streams["comm"].operations.append((label, step))
        rank.groups[group].add(operation)
        if position == 0:
            rank.groups[group].started = rank.groups[group].enqueued


def crossed(world: int, odd: tuple[int, ...]) -> list[Rank]:
    """Step 6's sum was held back on the ``odd`` ranks until the first collective of step 7 was queued."""
    ranks = eager(world)
    for rank in ranks:
        rank.streams["comm"].operations.pop()
        rank.streams["comm"].done -= 1
        rank.groups["stats"].records.pop()
        rank.groups["stats"].done = rank.groups["stats"].started = STEPS - 1
        held, first = ("all_reduce stats", STEPS), ("all_gather experts", STEPS + 1)
        if rank.rank in odd:
            stands(rank, first, (held[0], STEPS + 1))
        else:
            stands(rank, held, first)
    return ranks


@pytest.mark.parametrize(("world", "odd"), [(2, (1,)), (2, (0,)), (4, (2,)), (4, (0, 3))])
def test_the_rank_that_left_its_own_order_is_blamed(world: int, odd: tuple[int, ...]) -> None:
    found = diagnose(evidence(crossed(world, odd)))
    assert (found.mechanism, found.confidence, found.stream) == ("collective-order", "proven", "comm")
    assert blamed(found) == list(odd)
    assert found.collective is not None and found.collective.mismatch is not None
    assert found.collective.mismatch.what == "order"
    said = facts(found)
    assert (
        f"rank {odd[0]}: its comm stream has the groups experts, experts in step 6, where its steps before had "
        "experts, experts, stats" in said
    )
    assert "which queued it behind another" in said


def test_without_a_history_the_fewer_ranks_are_blamed_and_of_two_both() -> None:
    ranks = crossed(4, (2,))
    for rank in ranks:
        stream = rank.streams["comm"]
        rank.streams["comm"] = Stream(stream.operations[-2:], done=0)
    found = diagnose(evidence(ranks))
    assert (found.mechanism, found.confidence, blamed(found)) == ("collective-order", "supported", [2])
    ranks = crossed(2, (1,))
    for rank in ranks:
        rank.streams["comm"] = Stream(rank.streams["comm"].operations[-2:], done=0)
    found = diagnose(evidence(ranks))
    assert (found.mechanism, blamed(found)) == ("collective-order", [0, 1])


def test_a_collective_that_was_never_queued_is_no_question_of_order() -> None:
    ranks = crossed(2, (1,))
    ranks[1].streams["comm"].operations.pop()
    ranks[1].groups["stats"].records.pop()
    assert two_orders(Case.of(evidence(ranks))) is None


# One communicator, two streams -----------------------------------------------------------------------------------


def beside(*culprits: int, world: int = 2) -> list[Rank]:
    """All stand in the sum of step 6; the culprits have it on a side stream, and on comm what comes after it."""
    ranks = eager(world)
    for rank in ranks:
        rank.groups.pop("stats")
        if rank.rank in culprits:
            rank.streams["copy"] = Stream([("event.wait", STEPS), ("all_reduce experts", STEPS)], done=1)
            rank.groups["experts"].add("all_reduce")
            stands(rank, ("all_gather experts", STEPS + 1))
        else:
            stands(rank, ("all_reduce experts", STEPS), ("all_gather experts", STEPS + 1))
    return ranks


@pytest.mark.parametrize(("world", "culprits"), [(2, (1,)), (2, (0, 1)), (4, (0,)), (4, (1, 2))])
def test_a_communicator_on_two_streams_of_a_rank(world: int, culprits: tuple[int, ...]) -> None:
    found = diagnose(evidence(beside(*culprits, world=world)))
    assert (found.mechanism, found.stream, blamed(found)) == ("stream-order", "copy", list(culprits))
    assert found.operation is not None and found.operation.label == "all_reduce experts"
    assert found.collective is not None and found.collective.group == "experts"
    assert (
        f"rank {culprits[0]}: unfinished collectives of group experts are on two of its streams, comm and copy"
        in facts(found)
    )


def test_a_copy_that_waits_beside_a_collective_is_none() -> None:
    ranks = beside(1)
    stream = ranks[1].streams["copy"]
    stream.operations[-1] = ("next_token_copy", STEPS)
    assert diagnose(evidence(ranks)).mechanism != "stream-order"


def test_the_watchdog_takes_a_group_on_two_streams_for_a_proof() -> None:
    bench = Bench()
    bench.warm()
    for rank, made in zip(bench.ranks, beside(1), strict=True):
        rank.streams, rank.groups, rank.phase = made.streams, made.groups, "launch"
    stalled_s = bench.now_s
    first, last = (found := alarms(bench.run(2.0)))[0], found[-1]
    assert not isinstance(first, Confirmed) and (first.reason, first.road) == ("side-streams", "proof")  # type: ignore[union-attr]
    assert isinstance(last, Confirmed) and last.confirmed_ns / 1e9 - stalled_s < SETTINGS.floor_s
    assert "rank 1: unfinished collectives of group experts on comm and copy" in last.proof


def test_a_rank_that_still_moves_proves_nothing_of_two_streams() -> None:
    bench = Bench()
    bench.warm()
    for rank, made in zip(bench.ranks, beside(1), strict=True):
        rank.streams, rank.groups, rank.phase = made.streams, made.groups, "launch"

    def moves() -> None:
        bench.ranks[0].changes += 1

    assert alarms(bench.run(1.2, moves)) == []


def test_a_skipped_collective_whose_successor_is_queued_is_no_question_of_order() -> None:
    """Step 6's sum was left out; that of step 7, with its number, is queued behind step 7's first collective."""
    ranks = crossed(2, (1,))
    stands(ranks[0], ("all_reduce stats", STEPS + 1))
    ranks[0].groups["stats"].started = STEPS
    assert two_orders(Case.of(evidence(ranks))) is None


@pytest.mark.parametrize(("counts", "order"), [((6, 5), False), ((6, 6), True)])
def test_between_hosts_in_two_steps_the_newest_common_record_counts(
    counts: tuple[int, int], order: bool
) -> None:
    ranks = crossed(2, (1,))
    for rank, count in zip(ranks, counts, strict=True):
        rank.step = 8 + rank.rank
        begun = [(6 + rank.rank, 5), (8, count)]
        rank.decisions = [{"step": step, "collectives": {"stats": n, "experts": 12}} for step, n in begun]
    assert (two_orders(Case.of(evidence(ranks))) is not None) == order
