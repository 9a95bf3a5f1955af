"""Collectives between real rank processes: their values, what the ledger says, and ranks that do not match."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from harness.devices.base import DeviceError, DeviceTimeout
from harness.ledger import LedgerReader, LedgerWriter

if TYPE_CHECKING:
    from local_ranks import LocalRanks, Seat

    from harness.devices.sim import SimDevice
    from serving.comm import Group

LONG_S = 20.0
PEER_S = 2.5
"""How long a rank waits for a peer that will not come, where the test wants it to give up."""
LOOK_S = 0.2
"""When the test looks whether the ranks still wait."""


def values_of_all(seat: Seat, symmetric: bool) -> list[Any]:
    found: list[Any] = []
    with seat.comm("values", symmetric=symmetric) as (device, comm):
        group = comm.group("experts")
        for rows in (1, 3, 64):
            part = torch.full((rows, 2), float(seat.rank + 1))
            whole = torch.arange(seat.world * rows * 2, dtype=torch.float32).view(-1, 2) * (seat.rank + 1)
            gathered, share = torch.empty(seat.world * rows, 2), torch.empty(rows, 2)
            group.all_gather(gathered, part)
            group.reduce_scatter(share, whole)
            group.all_reduce(part)
            device.compute.synchronize(LONG_S)
            found.append((gathered.tolist(), share.tolist(), part.tolist()))
        found.append(comm.group("agree").all_gather_host([seat.rank, 7, -seat.rank]))
    return found


@pytest.mark.parametrize("symmetric", [False, True], ids=["gloo", "symmetric"])
@pytest.mark.parametrize("world", [1, 2])
def test_collectives_equal_plain_sums(ranks: LocalRanks, world: int, symmetric: bool) -> None:
    factor = sum(range(1, world + 1))
    for rank, found in enumerate(ranks.run(world, values_of_all, symmetric)):
        *collectives, agreed = found
        for rows, (gathered, share, reduced) in zip((1, 3, 64), collectives, strict=True):
            total = torch.arange(world * rows * 2, dtype=torch.float32).view(-1, 2) * factor
            assert gathered == [[float(r + 1)] * 2 for r in range(world) for _ in range(rows)]
            assert share == total[rank * rows : (rank + 1) * rows].tolist()
            assert reduced == [[float(factor)] * 2] * rows
        assert agreed == [[other, 7, -other] for other in range(world)]


def order_on_streams(seat: Seat) -> list[float]:
    """Compute work before and after a collective, without a wait of the host between them."""
    with seat.comm("order") as (device, comm):
        tensor = torch.zeros(4)
        device.compute.run(lambda: tensor.fill_(float(seat.rank + 1)), "before")
        comm.group("experts").all_reduce(tensor)
        device.compute.run(lambda: tensor.mul_(10.0), "after")
        device.compute.synchronize(LONG_S)
        return tensor.tolist()


def test_a_collective_is_ordered_with_the_work_around_it(ranks: LocalRanks) -> None:
    assert ranks.run(2, order_on_streams) == [[30.0] * 4] * 2


def counted(seat: Seat, directory: Path) -> tuple[list[float], list[float]]:
    ledger = LedgerWriter.create(
        directory / f"{seat.rank}.ledger", rank=seat.rank, world=seat.world, node="n", device="sim"
    )
    with seat.comm("counted", ledger=ledger) as (device, comm):
        group, eager, captured = comm.group("experts"), torch.ones(3), torch.ones(2, 5)
        comm.group("agree").all_gather_host([1, 2])
        group.capture_begins()
        with device.capture("two") as graph:
            group.all_reduce(captured)
            group.all_reduce(captured)
        group.capture_ended(graph)
        group.all_reduce(eager)
        for _ in range(3):
            device.replay(graph)
            comm.replayed(graph)
        group.all_reduce(eager)
        device.compute.synchronize(LONG_S)
    ledger.close()
    return eager.tolist(), captured.flatten().tolist()


def test_the_ledger_counts_each_collective_and_a_replay_as_many_as_it_captured(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    assert ranks.run(2, counted, tmp_path) == [([4.0] * 3, [2.0**6] * 10)] * 2
    for rank in range(2):
        reader = LedgerReader.open(tmp_path / f"{rank}.ledger")
        groups = reader.snapshot().groups
        reader.close()
        agree, experts = groups["agree"], groups["experts"]
        assert (agree.enqueued, agree.started, agree.completed, agree.ranks) == (1, 1, 1, (0, 1))
        assert (experts.enqueued, experts.started, experts.completed) == (8, 8, 8)
        first, *replays, last = experts.recent
        assert (first.sequence, first.operation, first.shape, first.dtype) == (
            1,
            "all_reduce",
            (3,),
            "float32",
        )
        assert last.sequence == 8 and last.operation == "all_reduce"
        assert {record.operation for record in replays} == {"graph two"}
        assert all(record.completed_ns is not None for record in experts.recent)


# Ranks that do not match ---------------------------------------------------------------------------------------


def all_reduce(size: int, dtype: torch.dtype = torch.float32) -> Callable[[Group], None]:
    return lambda group: group.all_reduce(torch.ones(size, dtype=dtype))


def all_gather(size: int) -> Callable[[Group], None]:
    return lambda group: group.all_gather(torch.empty(2 * size), torch.ones(size))


MISMATCHES: dict[str, tuple[Callable[[Group], None], ...]] = {
    "operation": (all_reduce(4), all_gather(4)),
    "size": (all_reduce(4), all_reduce(6)),
    "dtype": (all_reduce(4), all_reduce(4, torch.float64)),
}
SIDES = {
    "operation": ("all_reduce float32 (4,)", "all_gather float32 (4,)"),
    "size": ("all_reduce float32 (4,)", "all_reduce float32 (6,)"),
    "dtype": ("all_reduce float32 (4,)", "all_reduce float64 (4,)"),
}


def still_waits(device: SimDevice) -> bool:
    try:
        device.comm.synchronize(LOOK_S)
    except DeviceTimeout:
        return True
    return False


def error_of(device: SimDevice) -> str:
    try:
        device.compute.synchronize(PEER_S + LONG_S)
    except DeviceError as error:
        return str(error)
    return ""


def mismatched(seat: Seat, directory: Path) -> tuple[bool, dict[str, tuple[str, tuple[int, int, int]]]]:
    """All mismatches at a time, each on a device of its own, and one collective that rank 1 skips.

    Whether the rank still waits when looked at; by kind the error in the end, and what the ledger counted.
    """
    found = {}
    with ExitStack() as stack:
        opened = {}
        for kind in [*MISMATCHES, "skipped"]:
            ledger = LedgerWriter.create(
                directory / f"{kind}.{seat.rank}", rank=seat.rank, world=seat.world, node="n", device="sim"
            )
            stack.callback(ledger.close)
            device, comm = stack.enter_context(seat.comm(kind, ledger=ledger, timeout_s=PEER_S))
            comm.group("agree").all_gather_host([0])  # both ranks are here
            opened[kind] = device, comm.group("experts")
        for kind, sides in MISMATCHES.items():
            all_reduce(8)(opened[kind][1])
            sides[seat.rank](opened[kind][1])
        all_reduce(8)(opened["skipped"][1])
        if seat.rank == 0:
            all_reduce(8)(opened["skipped"][1])
        waits = still_waits(opened["operation"][0])
        for kind, (device, _) in opened.items():
            error = error_of(device)
            reader = LedgerReader.open(directory / f"{kind}.{seat.rank}")
            experts = reader.snapshot().groups["experts"]
            reader.close()
            found[kind] = error, (experts.enqueued, experts.started, experts.completed)
    return waits, found


def test_a_mismatch_makes_all_ranks_wait_and_names_the_sides_and_a_skip_the_missing(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    results = ranks.run(2, mismatched, tmp_path)
    pids = ranks.pids()
    assert [waits for waits, _ in results] == [True, True]
    for kind, sides in SIDES.items():
        for _, found in results:
            error, counts = found[kind]
            assert counts == (2, 2, 1)
            assert "the ranks brought different collectives: " + ", ".join(sides) in error
    (error, counts), gone_on = results[0][1]["skipped"], results[1][1]["skipped"]
    assert counts == (2, 2, 1)
    assert re.search(r"group experts: all_reduce float32 \(8,\): members \[1\] did not post", error)
    assert gone_on == ("", (1, 1, 1)), "the rank that skips is not held"
    # No process died: the same ones go on.
    assert ranks.run(2, order_on_streams) == [[30.0] * 4] * 2
    assert ranks.pids() == pids


def shut_while_waiting(seat: Seat) -> str:
    with seat.comm("shut", timeout_s=LONG_S) as (device, comm):
        comm.group("agree").all_gather_host([0])
        if seat.rank == 0:
            all_reduce(8)(comm.group("experts"))
            error = ""
            comm.shut()
            try:
                device.compute.synchronize(LONG_S)
            except DeviceError as raised:
                error = str(raised)
            return error
    return ""


def test_a_rank_that_waits_for_a_peer_can_be_ended(ranks: LocalRanks) -> None:
    error, _ = ranks.run(2, shut_while_waiting)
    assert "members [1] did not post record 1" in error
