"""The order of a rank's collectives over all groups, the beat of its hosts' messages; each beside a near miss."""

from __future__ import annotations

import pytest
from ledger_builder import Group, Rank
from test_diagnose import blamed, evidence, facts

from harness.diagnose import Diagnosis, diagnose

STEP = ("attention", "experts", "experts", "attention", "experts", "experts")
STEPS = 4


class Hosts:
    """Ranks whose collectives are entered one after the other, each with a time of its own."""

    def __init__(self, world: int, *, host: tuple[str, ...] = ("agree",)) -> None:
        self.ranks = [Rank(number, world, step=0, phase="sample") for number in range(world)]
        self._host = host

    def does(self, rank: int, name: str, *, done: bool = True, started: bool = True) -> None:
        own = self.ranks[rank]
        everyone = tuple(range(own.world))
        group = own.groups.setdefault(name, Group(everyone, host=name in self._host))
        group.add("all_gather" if name == "agree" else "all_reduce")
        group.begun = (*group.begun, 2.0 + sum(len(one.begun) for one in own.groups.values()))
        if done:
            group.done = group.enqueued
        if done or started:
            group.started = group.enqueued
        own.step += name == "agree"

    def everyone(self, *names: str) -> None:
        for rank in range(len(self.ranks)):
            for name in names:
                self.does(rank, name)

    def diagnosed(self) -> Diagnosis:
        return diagnose(evidence(self.ranks))


def last_step(world: int, marks: dict[int, tuple[str, ...]], stands: dict[int, int]) -> Hosts:
    """Whole steps, and one in which each rank has enqueued ``marks`` (else a whole one) and completed as many as
    ``stands`` says (else one)."""
    hosts = Hosts(world)
    for _ in range(STEPS):
        hosts.everyone("agree", *STEP)
    hosts.everyone("agree")
    for rank in range(world):
        for at, name in enumerate(marks.get(rank, STEP)):
            done = stands.get(rank, 1)
            hosts.does(rank, name, done=at < done, started=at <= done)
    return hosts


@pytest.mark.parametrize(("world", "culprit"), [(2, 0), (2, 1), (3, 1), (4, 3)])
def test_a_collective_left_out_among_other_groups_names_the_rank(world: int, culprit: int) -> None:
    """Attention stands at its second one, which the culprit went past: it waits in the experts' next one."""
    left = (*STEP[:3], *STEP[4:])
    hosts = last_step(world, {culprit: left}, dict.fromkeys(range(world), 3))
    found = hosts.diagnosed()
    assert (found.mechanism, found.confidence, blamed(found)) == ("collective-skipped", "proven", [culprit])
    assert found.collective is not None and found.collective.group == "attention"
    assert (
        f"rank {culprit}: collective 4 of its step after agreement 5 is all_reduce experts, where {world * STEPS} "
        "whole steps that began alike went on with all_reduce attention: it left one out" in facts(found)
    )


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_collective_put_behind_another_is_a_matter_of_order(culprit: int) -> None:
    swapped = ("attention", "experts", "experts", "experts", "attention", "experts")
    found = last_step(2, {culprit: swapped}, {0: 3, 1: 3}).diagnosed()
    assert (found.mechanism, blamed(found)) == ("collective-order", [culprit])
    assert found.collective is not None and found.collective.mismatch is not None
    assert found.collective.mismatch.what == "order"
    assert "it put one behind others" in facts(found)


def test_a_step_of_a_new_kind_is_held_by_its_groups() -> None:
    hosts = last_step(2, {1: (*STEP[:3], *STEP[4:])}, {0: 3, 1: 3})
    for rank in hosts.ranks:
        for group in rank.groups.values():
            group.records[4 * STEPS if group is rank.groups["experts"] else 2 * STEPS :] = [
                ("all_gather", *record[1:])
                for record in group.records[4 * STEPS if group is rank.groups["experts"] else 2 * STEPS :]
            ]
    found = hosts.diagnosed()
    assert (found.mechanism, blamed(found)) == ("collective-skipped", [1])
    assert "went on with a collective of group attention" in facts(found)


def test_a_step_that_only_began_leaves_no_sequence() -> None:
    """Rank 1 has enqueued half of it: nothing is left out yet, and what it does instead is another question."""
    found = last_step(2, {1: STEP[:3]}, {0: 3, 1: 3}).diagnosed()
    assert "whole steps that began alike" not in facts(found)


def test_where_all_leave_their_sequence_nobody_is_blamed_for_it() -> None:
    left = (*STEP[:3], *STEP[4:])
    found = last_step(2, {0: left, 1: left}, {0: 3, 1: 3}).diagnosed()
    assert "whole steps that began alike" not in facts(found)


def test_ledgers_that_tell_no_order_between_groups_are_not_judged_by_it() -> None:
    hosts = last_step(2, {1: (*STEP[:3], *STEP[4:])}, {0: 3, 1: 3})
    for rank in hosts.ranks:
        for group in rank.groups.values():
            group.begun = ()
    assert "whole steps that began alike" not in facts(hosts.diagnosed())


# Beats -----------------------------------------------------------------------------------------------------------


def beating(skipper: int, *, every: int = 3, times: int = 2, early: int = 0) -> Hosts:
    """After every third step the hosts ask whether work is left. At the last question the skipper goes on to the
    next agreement, and the others come ``early`` steps too soon."""
    hosts = Hosts(2, host=("agree", "sync"))
    for number in range(1, every * (times + 1) - early + 1):
        hosts.everyone("agree", "experts")
        if number % every == 0 and number // every <= times:
            hosts.everyone("sync")
    for rank in range(2):
        hosts.does(rank, "agree" if rank == skipper else "sync", done=False)
    return hosts


@pytest.mark.parametrize("skipper", [0, 1])
def test_a_rank_that_misses_the_beat_of_a_message_left_it_out(skipper: int) -> None:
    found = beating(skipper).diagnosed()
    assert (found.mechanism, found.confidence, blamed(found)) == (
        "collective-skipped",
        "supported",
        [skipper],
    )
    assert found.collective is not None and found.collective.group == "sync"
    assert (
        f"rank {skipper} stands in agree without having entered sync, to which all ranks came in every 3 rounds "
        "before, and to which its peers came in that beat now" in facts(found)
    )


def test_a_rank_that_comes_to_a_message_before_its_beat_does_not_blame_its_peer() -> None:
    found = beating(1, early=1).diagnosed()
    assert (found.mechanism, blamed(found)) == ("collective-order", [0, 1])
    assert [piece.what for piece in found.missing_evidence] == ["which rank left the order of the others"]


@pytest.mark.parametrize("skipper", [0, 1])
def test_a_beat_may_count_the_steps_of_one_mode(skipper: int) -> None:
    """A cache is synchronised in every second prefill, and prefills come as they come."""
    hosts = Hosts(2, host=("agree", "cache"))
    modes = ("prefill", "prefill", "decode", "prefill", "decode", "decode", "prefill", "decode", "prefill")
    prefills = 0
    for step, mode in enumerate(modes, start=1):
        prefills += mode == "prefill"
        if mode == "prefill" and prefills % 2 == 0:
            hosts.everyone("cache")
        hosts.everyone("agree")
        for rank in hosts.ranks:
            counts = {name: group.enqueued for name, group in rank.groups.items()}
            rank.decisions.append({"step": step, "mode": mode, "collectives": counts})
        hosts.everyone("experts")
    for number in range(2):
        hosts.does(number, "agree" if number == skipper else "cache", done=False)
    found = hosts.diagnosed()
    assert (found.mechanism, blamed(found)) == ("collective-skipped", [skipper])
    assert "in every 2 prefills before" in facts(found)
