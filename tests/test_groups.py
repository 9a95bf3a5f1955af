"""Groups of some of the ranks, and what hosts tell each other in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.ledger import LedgerReader, LedgerWriter
from serving.comm import CommError
from serving.groups import GROUPS, GroupError, Topology

if TYPE_CHECKING:
    from local_ranks import LocalRanks, Seat

LONG_S = 20.0
PEER_S = 1.0
"""How long a rank waits for a peer that will not come, where the test wants it to give up."""


@pytest.mark.parametrize(
    ("world", "dp", "attention"),
    [
        (1, 1, [(0,)]),
        (2, 2, [(0,), (1,)]),
        (2, 1, [(0, 1), (0, 1)]),
        (4, 2, [(0, 1), (0, 1), (2, 3), (2, 3)]),
        (6, 2, [(0, 1, 2), (0, 1, 2), (0, 1, 2), (3, 4, 5), (3, 4, 5), (3, 4, 5)]),
    ],
)
def test_each_rank_is_in_one_attention_group_and_in_all_others_with_everybody(
    world: int, dp: int, attention: list[tuple[int, ...]]
) -> None:
    places = [Topology(rank, world, dp) for rank in range(world)]
    assert [place.members("attention") for place in places] == attention
    assert [place.members("attention_host") for place in places] == attention
    for place in places:
        assert place.members("attention")[place.member] == place.rank
        assert place.dp_rank == sorted(set(attention)).index(place.members("attention"))
        for name in GROUPS.keys() - {"attention", "attention_host"}:
            assert place.members(name) == tuple(range(world))


@pytest.mark.parametrize(("rank", "world", "dp"), [(0, 4, 3), (0, 2, 0), (0, 2, 4), (2, 2, 2), (-1, 2, 1)])
def test_ranks_that_cannot_be_split_are_refused(rank: int, world: int, dp: int) -> None:
    with pytest.raises(GroupError):
        Topology(rank, world, dp)


def test_a_group_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(GroupError, match="there is no group 'expert'; there are agree, experts, attention"):
        Topology(0, 2, 2).members("expert")


def values_of_all(seat: Seat) -> dict[str, list[Any]]:
    """What each group gives for values that depend on the rank, on the host or on the device by its kind."""
    found: dict[str, list[Any]] = {}
    with seat.comm("values") as (device, comm):
        for name, (_, plane) in GROUPS.items():
            group, mine = comm.group(name), [seat.rank, 7, -seat.rank]
            if plane == "host":
                group.barrier_host()
                found[name] = [
                    group.all_gather_host(mine),
                    group.all_reduce_host(mine, "min"),
                    group.all_reduce_host(mine, "max"),
                    group.all_reduce_host(mine, "sum"),
                    group.broadcast_host(mine, group.size - 1),
                ]
            else:
                tensor = torch.tensor(mine, dtype=torch.float32)
                group.all_reduce(tensor)
                device.compute.synchronize(LONG_S)
                found[name] = [int(value) for value in tensor.tolist()]
    return found


@pytest.mark.parametrize(("world", "dp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_collectives_are_those_of_the_groups_members(ranks: LocalRanks, world: int, dp: int) -> None:
    for rank, found in enumerate(ranks.run(world, values_of_all, dp=dp)):
        for name, (_, plane) in GROUPS.items():
            members = Topology(rank, world, dp).members(name)
            total = [sum(members), 7 * len(members), -sum(members)]
            first, last = members[0], members[-1]
            if plane == "device":
                assert found[name] == total
                continue
            gathered, least, most, added, told = found[name]
            assert gathered == [[member, 7, -member] for member in members]
            assert (least, most) == ([first, 7, -last], [last, 7, -first])
            assert added == total
            assert told == [last, 7, -last]


def in_the_ledger(seat: Seat, directory: Path) -> None:
    ledger = LedgerWriter.create(
        directory / f"{seat.rank}.ledger", rank=seat.rank, world=seat.world, node="n", device="sim"
    )
    with seat.comm("ledger", ledger=ledger) as (device, comm):
        host = comm.group("attention_host")
        host.all_gather_host([1, 2])
        host.all_reduce_host([seat.rank], "max")
        host.broadcast_host([1, 2, 3], 1)
        host.barrier_host()
        comm.group("attention").all_reduce(torch.ones(5))
        device.compute.synchronize(LONG_S)
    ledger.close()


def test_the_ledger_has_the_groups_in_use_with_their_members_and_operations(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    ranks.run(4, in_the_ledger, tmp_path, dp=2)
    for rank in range(4):
        reader = LedgerReader.open(tmp_path / f"{rank}.ledger")
        groups = reader.snapshot().groups
        reader.close()
        assert set(groups) == {"agree", "experts", "attention", "attention_host"}
        members = Topology(rank, 4, 2).members("attention")
        assert groups["attention"].ranks == groups["attention_host"].ranks == members
        assert groups["agree"].ranks == (0, 1, 2, 3)
        host = groups["attention_host"]
        assert (host.enqueued, host.started, host.completed) == (4, 4, 4)
        assert [(r.operation, r.shape, r.dtype) for r in host.recent] == [
            ("all_gather", (2,), "int64"),
            ("all_reduce", (1,), "int64"),
            ("broadcast from 1", (3,), "int64"),
            ("barrier", (0,), "int64"),
        ]
        assert [(r.operation, r.shape) for r in groups["attention"].recent] == [("all_reduce", (5,))]


MISMATCHES = {
    "operation": ("all_reduce int64 (2,)", "all_gather int64 (2,)"),
    "length": ("all_reduce int64 (2,)", "all_reduce int64 (3,)"),
    "root": ("broadcast from 0 int64 (1,)", "broadcast from 1 int64 (1,)"),
}


def mismatched(seat: Seat, kind: str) -> str:
    with seat.comm(kind, timeout_s=PEER_S) as (_, comm):
        group, other = comm.group("world"), seat.rank == 1
        group.barrier_host()
        try:
            if kind == "root":
                group.broadcast_host([5], seat.rank)
            elif kind == "operation" and other:
                group.all_gather_host([1, 2])
            else:
                group.all_reduce_host([1, 2, 3] if other else [1, 2], "sum")
        except CommError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("kind", MISMATCHES)
def test_hosts_that_bring_different_things_wait_and_live(ranks: LocalRanks, kind: str) -> None:
    sides = "the ranks brought different collectives: " + ", ".join(MISMATCHES[kind])
    found = ranks.run(2, mismatched, kind)
    pids = ranks.pids()
    assert found == [f"group world: {sides}"] * 2
    ranks.run(2, values_of_all)
    assert ranks.pids() == pids, "no process died"


def alone(seat: Seat) -> str:
    with seat.comm("alone", timeout_s=PEER_S) as (_, comm):
        try:
            if seat.rank == 0:
                comm.group("sync").all_reduce_host([1], "max")
        except CommError as error:
            return str(error)
    return ""


def test_a_host_that_nobody_joins_gives_up_and_names_who_is_missing(ranks: LocalRanks) -> None:
    error, other = ranks.run(2, alone)
    assert error == "group sync: all_reduce int64 (1,): members [1] did not post record 1"
    assert other == ""
