"""Who waits for whom, where several groups have one name: each attention group is one of its own."""

from __future__ import annotations

from ledger_builder import Group, Rank

from harness.waits import waits


def ranks_of(*groups: Group) -> dict[int, Rank]:
    return {rank: Rank(rank, world=4, groups={"attention": group}) for rank, group in enumerate(groups)}


def test_groups_of_one_name_without_a_common_rank_are_apart() -> None:
    """The second attention group is idle and has entered few collectives: nobody waits for it."""
    operations = ("all_reduce",) * 5
    first, second = (0, 1), (2, 3)
    ranks = ranks_of(
        Group(first).round(*operations).enter("all_reduce"),
        Group(first).round(*operations),
        Group(second).round("all_reduce"),
        Group(second).round("all_reduce"),
    )
    (found,) = waits({rank: one.snapshot() for rank, one in ranks.items()})
    assert (found.group, found.sequence, found.members) == ("attention", 6, first)
    assert (found.waiting, found.missing, found.late, found.unknown) == ((0,), (1,), (), ())


def test_both_may_wait_at_once() -> None:
    ranks = ranks_of(
        Group((0, 1)).round("all_reduce"),
        Group((0, 1)).round("all_reduce").enter("all_reduce"),
        Group((2, 3)).enter("all_gather"),
        Group((2, 3)),
    )
    del ranks[3]
    found = waits({rank: one.snapshot() for rank, one in ranks.items()})
    assert [(wait.waiting, wait.missing, wait.unknown) for wait in found] == [
        ((1,), (0,), ()),
        ((2,), (), (3,)),
    ]


def test_a_rank_that_lists_other_members_is_still_of_the_group_that_it_shares() -> None:
    ranks = ranks_of(Group((0, 1, 2)).enter("all_reduce"), Group((1, 2)), Group((2,)), Group((3,)))
    (found,) = waits({rank: one.snapshot() for rank, one in ranks.items()})
    assert (found.members, found.waiting, found.missing) == ((0, 1, 2), (0,), (1, 2))
