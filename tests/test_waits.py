"""Who waits for whom: several groups of one name, each of its own; and circles over several groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from ledger_builder import Group, Rank

from harness.waits import Wait, cycle_in, lacking, waits


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


def wait_of(
    group: str, waiting: tuple[int, ...], missing: tuple[int, ...], late: tuple[int, ...] = ()
) -> Wait:
    return Wait(group, 5, "all_gather", (*waiting, *missing, *late), waiting, missing, late, (), ())


def circle(*found: Wait) -> list[tuple[int, str, int]]:
    return [(link.rank, link.wait.group, link.following) for link in cycle_in(found)]


def test_a_circle_goes_through_several_groups_and_begins_with_its_smallest_rank() -> None:
    assert circle(wait_of("a", (2,), (3,)), wait_of("b", (3,), (1,)), wait_of("c", (1,), (2,))) == [
        (1, "c", 2),
        (2, "a", 3),
        (3, "b", 1),
    ]


def test_ranks_that_wait_for_those_in_a_circle_are_not_in_it() -> None:
    found = (wait_of("a", (0, 1), (2,)), wait_of("b", (2,), (3,)), wait_of("c", (3,), (), late=(2,)))
    assert circle(*found) == [(2, "b", 3), (3, "c", 2)]


def test_a_root_makes_no_circle() -> None:
    found = (wait_of("a", (0, 1, 2), (3,)), wait_of("b", (4, 5), (0,)))
    assert circle(*found) == []
    assert {rank: wait.group for rank, wait in lacking(found).items()} == {3: "a", 0: "b"}


@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9))), max_size=6))
def test_a_circle_is_found_exactly_where_there_is_one(parties: list[tuple[set[int], set[int]]]) -> None:
    found = [
        wait_of(f"g{number}", tuple(sorted(waiting)), tuple(sorted(missing - waiting)))
        for number, (waiting, missing) in enumerate(parties)
    ]
    after = {rank: {b for w in found if rank in w.waiting for b in w.missing} for rank in range(10)}
    reach = {rank: set(after[rank]) for rank in after}
    for middle in range(10):
        for rank in range(10):
            if middle in reach[rank]:
                reach[rank] |= reach[middle]
    circling = [rank for rank in range(10) if rank in reach[rank]]
    links = cycle_in(found)
    assert bool(links) == bool(circling)
    if links:
        assert links[0].rank == min(circling)
        assert len({link.rank for link in links}) == len(links)
        assert [link.following for link in links] == [link.rank for link in (*links[1:], links[0])]
        assert all(link.rank in link.wait.waiting and link.following in link.wait.missing for link in links)


def test_thousands_that_wait_for_thousands_are_not_spelt_out() -> None:
    """Two groups crossed: 2,048 ranks in one wait for the others, who wait in the other for them."""
    low, high = tuple(range(2048)), tuple(range(2048, 4096))
    assert circle(wait_of("a", low, high), wait_of("b", high, low)) == [(0, "a", 2048), (2048, "b", 0)]


def test_who_is_through_with_a_collective_is_neither_late_nor_missing() -> None:
    """A root that has sent goes on; the others may be held up inside."""
    ranks = [Rank(number) for number in range(2)]
    ranks[0].groups["agree"] = Group((0, 1), host=True).round("broadcast from 0")
    ranks[1].groups["agree"] = Group((0, 1), host=True).enter("broadcast from 0")
    (wait,) = waits({rank.rank: rank.snapshot() for rank in ranks})
    assert (wait.waiting, wait.missing, wait.late) == ((1,), (), ())
