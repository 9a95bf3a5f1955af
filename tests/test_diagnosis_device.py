"""A collective that all have entered beside a kernel that does not end, and what only resembles it."""

from __future__ import annotations

import pytest
from ledger_builder import Group, Rank, Stream
from test_diagnose import blamed, evidence, facts

from harness.diagnose import diagnose
from harness.diagnosis_case import Case
from harness.diagnosis_device import no_room


def stuck(world: int = 2, kernels: tuple[int, ...] | None = None) -> list[Rank]:
    """All are in a sum on comm; compute of the ranks with ``kernels`` (all) stands in the sampler."""
    ranks = [Rank(number, world, phase="wait-result", step=12) for number in range(world)]
    for rank in ranks:
        members = tuple(range(world))
        rank.groups["agree"] = Group(members).round(*["all_gather"] * 12)
        rank.groups["stats"] = Group(members).round(*["all_reduce"] * 11).enter("all_reduce")
        rank.streams["comm"] = Stream([("event.wait", 12), ("all_reduce stats", 12)], done=1)
        if kernels is None or rank.rank in kernels:
            rank.streams["compute"] = Stream([("expert_counts", 12), ("sample", 12)], done=1)
    return ranks


@pytest.mark.parametrize("world", [2, 4])
def test_a_kernel_beside_a_collective_that_all_entered_lacks_room(world: int) -> None:
    found = diagnose(evidence(stuck(world)))
    assert (found.kind, found.mechanism, found.stream) == ("hang", "collective-order", "compute")
    assert (found.confidence, blamed(found)) == ("supported", list(range(world)))
    assert found.operation is not None and found.operation.label == "sample"
    assert found.collective is not None
    assert (found.collective.group, found.collective.missing) == ("stats", ())
    said = facts(found)
    assert "entered it and brought the same: nobody is missing" in said
    assert (
        "no event is between sample on compute and the collective on comm" in said and "not excluded" in said
    )


def test_the_ranks_without_such_a_kernel_are_not_named() -> None:
    found = diagnose(evidence(stuck(4, kernels=(2,))))
    assert (found.mechanism, found.confidence, blamed(found)) == ("collective-order", "suspected", [2])


def test_compute_that_waits_for_the_collective_is_no_kernel() -> None:
    ranks = stuck()
    for rank in ranks:
        rank.streams["compute"].operations[-1] = ("event.wait", 12)
    assert no_room(Case.of(evidence(ranks))) is None


def test_a_member_that_is_missing_explains_the_stall() -> None:
    ranks = stuck()
    ranks[1].groups["stats"].records.pop()
    ranks[1].groups["stats"].started = 11
    ranks[1].streams["comm"] = Stream()
    assert no_room(Case.of(evidence(ranks))) is None


def test_a_kernel_beside_a_collective_that_moves_on_is_work() -> None:
    ranks = stuck()

    def between() -> None:
        for rank in ranks:
            rank.changes += 1

    assert no_room(Case.of(evidence(ranks, between))) is None
