"""A rank whose streams all wait for events of their own device, and what only resembles it."""

from __future__ import annotations

import pytest
from ledger_builder import Group, Rank, Stream
from test_diagnose import blamed, evidence, facts

from harness.diagnose import diagnose
from harness.diagnosis_case import Case
from harness.diagnosis_events import lost_event


def lost(world: int = 2, culprit: int = 1, compute_waits: bool = True) -> list[Rank]:
    """The culprit's comm stream waits for an event, and compute is idle or waits for comm; its peers are in the
    collective that stands behind that wait."""
    ranks = [Rank(number, world, phase="wait-result", step=7) for number in range(world)]
    for rank in ranks:
        members = tuple(range(world))
        rank.groups["agree"] = Group(members).round(*["all_gather"] * 7)
        rank.groups["experts"] = Group(members).round(*["all_reduce"] * 24)
        rank.streams["compute"] = Stream([("project.1", 7), ("event.wait", 7)], done=1)
        rank.streams["comm"] = Stream([("event.wait", 7), ("all_gather experts", 7)], done=1)
        if rank.rank == culprit:
            rank.groups["experts"].add("all_gather")
            rank.streams["comm"].done = 0
            if not compute_waits:
                rank.streams["compute"] = Stream([("project.1", 7)], done=1)
        else:
            rank.groups["experts"].enter("all_gather")
    return ranks


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("compute_waits", [True, False])
def test_streams_that_all_wait_for_events_wait_for_one_that_does_not_come(
    world: int, compute_waits: bool
) -> None:
    found = diagnose(evidence(lost(world, world - 1, compute_waits)))
    assert (found.kind, found.mechanism, blamed(found)) == ("hang", "stream-order", [world - 1])
    assert found.confidence == "supported" and found.operation is not None
    assert found.operation.label == "event.wait"
    assert found.collective is not None and found.collective.waiting == tuple(range(world - 1))
    said = facts(found)
    assert f"rank {world - 1}: each of its streams with unfinished work" in said
    assert "its record was lost" in said and "not excluded" in said
    assert ("idle: compute" in said or "idle: copy" in said) and "rank 0: each of" not in said


@pytest.mark.parametrize("label", ["project.2", "graph.replay decode.4", "event.record"])
def test_a_stream_that_works_may_still_record_the_event(label: str) -> None:
    ranks = lost()
    ranks[1].streams["compute"].operations[-1] = (label, 7)
    assert lost_event(Case.of(evidence(ranks))) is None


def test_a_rank_in_a_collective_of_its_device_waits_for_its_peers() -> None:
    ranks = lost()
    ranks[1].groups["experts"].started = 25
    assert lost_event(Case.of(evidence(ranks))) is None


def test_streams_that_move_on_or_have_no_work_tell_nothing() -> None:
    ranks = lost()

    def between() -> None:
        ranks[1].changes += 1

    assert lost_event(Case.of(evidence(ranks, between))) is None
    idle = [Rank(0, 2), Rank(1, 2)]
    assert lost_event(Case.of(evidence(idle))) is None
