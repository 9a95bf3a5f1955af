"""The symmetric heap: its collectives against plain sums, its growth, and that nothing else carries the data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from sim_rig import LONG_S, in_thread, joined

from harness.devices.base import DeviceError, DeviceTimeout
from harness.ledger import LedgerReader, LedgerWriter
from harness.ledger_snapshot import Snapshot
from harness.waits import waits
from serving.board import BoardTimeout
from serving.symmetric import SymmetricHeap

if TYPE_CHECKING:
    from local_ranks import LocalRanks, Seat

    from harness.target import TrialSpec

MIB = 1 << 20


def never() -> bool:
    return False


def on_members(
    directory: Path, size: int, work: Callable[[int, SymmetricHeap], Any], *, timeout_s: float = LONG_S
) -> list[Any]:
    """Runs ``work`` as every member, each on a thread; its values by member."""
    found: dict[int, Any] = {}

    def member(index: int) -> None:
        heap = SymmetricHeap(directory, name="h", member=index, size=size, timeout_s=timeout_s, stop=never)
        try:
            found[index] = work(index, heap)
        except BoardTimeout as error:
            found[index] = error
        opened.wait(LONG_S)
        heap.close()

    opened = threading.Barrier(size)
    threads = [in_thread(lambda index=index: member(index)) for index in range(size)]  # type: ignore[misc]
    for thread in threads:
        joined(thread)
    return [found[index] for index in range(size)]


def part(member: int, shape: Sequence[int], round_: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * round_ + member)
    return torch.randint(-50, 50, tuple(shape), generator=generator).to(torch.float32)


SHAPES = [(1, 1), (3, 64), (4, 64), (7, 5), (0, 64), (300, 64), (5000, 64), (2, 64)]
"""The last but one outgrows the first segment of one MiB."""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives_equal_plain_sums_over_sizes_and_growth(tmp_path: Path, size: int) -> None:
    def work(member: int, heap: SymmetricHeap) -> list[tuple[torch.Tensor, ...]]:
        found = []
        for round_, (rows, width) in enumerate(SHAPES):
            gathered = torch.empty(size * rows, width)
            heap.all_gather(gathered, part(member, (rows, width), round_))
            share = torch.empty(rows, width)
            heap.reduce_scatter(share, part(member, (size * rows, width), round_))
            everything = part(member, (rows, width), round_)
            heap.all_reduce(everything)
            found.append((gathered, share, everything))
        return found

    results = on_members(tmp_path, size, work)
    for round_, (rows, width) in enumerate(SHAPES):
        parts = [part(member, (rows, width), round_) for member in range(size)]
        total = torch.stack([part(m, (size * rows, width), round_) for m in range(size)]).sum(0)
        for member in range(size):
            gathered, share, everything = results[member][round_]
            assert torch.equal(gathered, torch.cat(parts))
            assert torch.equal(share, total[member * rows : (member + 1) * rows])
            assert torch.equal(everything, torch.stack(parts).sum(0))


def test_many_repetitions_in_turn_never_mix(tmp_path: Path) -> None:
    """Two halves and one signal a collective: a fast member must not overwrite what a slow one still reads."""
    size, rounds = 3, 400

    def work(member: int, heap: SymmetricHeap) -> int:
        wrong = 0
        for round_ in range(rounds):
            tensor = torch.full((64,), float(round_ * size + member))
            heap.all_reduce(tensor)
            wrong += not tensor.eq(size * size * round_ + sum(range(size))).all()
        return wrong

    assert on_members(tmp_path, size, work) == [0] * size


def test_all_ranks_get_the_same_bits(tmp_path: Path) -> None:
    def work(member: int, heap: SymmetricHeap) -> torch.Tensor:
        tensor = torch.randn(500, generator=torch.Generator().manual_seed(member)) * 10.0**member
        heap.all_reduce(tensor)
        return tensor

    first, *others = on_members(tmp_path, 4, work)
    assert all(torch.equal(first, other) for other in others)


def test_growth_registers_anew_and_keeps_one_segment_a_member(tmp_path: Path) -> None:
    def work(member: int, heap: SymmetricHeap) -> tuple[list[int], int, int]:
        sizes = []
        for mebibytes in (1, 1, 2, 3, 4, 1):
            heap.all_reduce(torch.zeros(mebibytes * MIB // 4))
            sizes.append(heap.registered_bytes // MIB)
        names = list(tmp_path.glob(f"h.segment-{member}-*"))
        maps = Path("/proc/self/maps").read_text().count(f"/h.segment-{member}-")
        return sizes, len(names), maps

    results = on_members(tmp_path, 2, work)
    assert [sizes for sizes, _, _ in results] == [[2, 2, 4, 6, 8, 8]] * 2
    assert [names for _, names, _ in results] == [1, 1], "segments that were outgrown are removed"
    # Each member maps each segment; one that lags may still be about to let the one before go.
    assert all(maps <= 3 for _, _, maps in results)
    assert list(tmp_path.iterdir()) == [], "closing leaves no file"


def test_a_member_that_grows_alone_waits_and_names_who_did_not_come(tmp_path: Path) -> None:
    def work(member: int, heap: SymmetricHeap) -> torch.Tensor:
        tensor = torch.ones(16)
        heap.all_reduce(tensor)
        if member == 0:
            heap.all_reduce(torch.ones(2 * MIB // 4))
        return tensor

    alone, other = on_members(tmp_path, 2, work, timeout_s=0.1)
    assert isinstance(alone, BoardTimeout)
    assert alone.missing == (1,)
    assert "record 2" in str(alone), "the second registration"
    assert other.eq(2.0).all()


def test_a_wait_for_peers_ends_when_the_heap_is_told_to_stop(tmp_path: Path) -> None:
    stopped = threading.Event()
    heap = SymmetricHeap(tmp_path, name="h", member=0, size=2, timeout_s=LONG_S, stop=stopped.is_set)
    caught: list[BoardTimeout] = []

    def wait() -> None:
        try:
            heap.all_reduce(torch.ones(4))
        except BoardTimeout as error:
            caught.append(error)

    thread = in_thread(wait)
    stopped.set()
    joined(thread)
    assert [error.missing for error in caught] == [(1,)]
    heap.close()


def test_room_can_be_asked_for_and_what_is_there_is_not_registered_again(tmp_path: Path) -> None:
    def work(member: int, heap: SymmetricHeap) -> list[int]:
        sizes = []
        for nbytes in (1, MIB, 3 * MIB, 2 * MIB):
            heap.reserve(nbytes)
            sizes.append(heap.registered_bytes // MIB)
        heap.all_reduce(torch.ones(4))
        return sizes

    assert on_members(tmp_path, 2, work) == [[2, 2, 6, 6]] * 2
    assert list(tmp_path.iterdir()) == []


# Registrations are collectives ---------------------------------------------------------------------------------

PEER_S = 1.5
"""How long a rank waits for a peer that will not come, where the test wants it to give up."""
LOOK_S = 0.3
"""When the test looks at the ledgers of ranks that wait."""


def registrations(seat: Seat, directory: Path, alone: int | None, differ: bool) -> tuple[str, Snapshot]:
    """Grows twice with collectives, then once on request: on all ranks, on one ``alone``, or to sizes that
    ``differ``. The error, and the ledger while the ranks wait or at the end."""
    path = directory / f"{seat.rank}.ledger"
    ledger = LedgerWriter.create(path, rank=seat.rank, world=seat.world, node="n", device="sim")
    with ExitStack() as stack:
        stack.callback(ledger.close)
        device, comm = stack.enter_context(seat.comm("grow", ledger=ledger, timeout_s=PEER_S, symmetric=True))
        group = comm.group("experts")
        heap = group._heap
        assert heap is not None
        for mebibytes in (1, 2):
            group.all_reduce(torch.ones(mebibytes * MIB // 4))
        wanted = (4 + 2 * (differ and seat.rank)) * MIB
        if alone in (None, seat.rank):
            device.comm.run(lambda: heap.reserve(wanted), "reserve", opaque=True)
        group.all_reduce(torch.ones(16))
        with suppress(DeviceTimeout):
            device.comm.synchronize(LOOK_S if alone is not None or differ else LONG_S)
        reader = LedgerReader.open(path)
        snapshot = reader.snapshot()
        reader.close()
        try:
            device.compute.synchronize(LONG_S)
        except DeviceError as error:
            return str(error), snapshot
        return "", snapshot


def test_each_registration_is_a_collective_of_a_group_of_its_own(ranks: LocalRanks, tmp_path: Path) -> None:
    for error, snapshot in ranks.run(2, registrations, tmp_path, None, False):
        assert error == ""
        symm = snapshot.groups["symm"]
        assert symm.ranks == (0, 1)
        assert (symm.enqueued, symm.started, symm.completed) == (3, 3, 3)
        assert [(r.operation, r.shape, r.dtype) for r in symm.recent] == [
            ("register", (2 * MIB * half,), "uint8") for half in (1, 2, 4)
        ]


def test_a_rank_that_grows_alone_is_seen_waiting_in_its_registration(
    ranks: LocalRanks, tmp_path: Path
) -> None:
    outcomes = ranks.run(2, registrations, tmp_path, 0, False)
    found = {wait.group: wait for wait in waits({rank: snap for rank, (_, snap) in enumerate(outcomes)})}
    register, experts = found["symm"], found["experts"]
    assert (register.operation, register.sequence) == ("register", 3)
    assert (register.waiting, register.missing) == ((0,), (1,))
    assert (experts.waiting, experts.late) == ((1,), (0,)), "it queued its part behind the registration"
    assert "group symm: register uint8 (8388608,): members [1] did not post record 3" in outcomes[0][0]
    assert "members [0] did not post" in outcomes[1][0]


def test_registrations_of_different_sizes_wait_and_show_both(ranks: LocalRanks, tmp_path: Path) -> None:
    outcomes = ranks.run(2, registrations, tmp_path, None, True)
    (wait,) = waits({rank: snap for rank, (_, snap) in enumerate(outcomes)})
    assert (wait.group, wait.waiting, wait.mismatch_kind()) == ("symm", (0, 1), "size")
    assert [side.shape for side in wait.sides] == [(8 * MIB,), (12 * MIB,)]
    for error, _ in outcomes:
        assert "group symm: the ranks brought different collectives: register uint8 (8388608,), " in error


# Nothing else carries the data ---------------------------------------------------------------------------------

_DATA_PLANE = (
    "allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced", "broadcast", "gather", "scatter", "alltoall", "alltoall_base",
    "send", "recv", "recv_anysource", "barrier", "monitored_barrier",
)  # fmt: skip


def only_the_agreement_may_communicate(stack: ExitStack, agreement: dist.ProcessGroup) -> list[str]:
    """From now on any other group's operation raises in this process. Names the operations that did."""
    tried: list[str] = []

    def guarded(name: str, method: Any) -> Any:
        def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if group.group_name != agreement.group_name:
                tried.append(name)
                raise AssertionError(f"{name} on the process group {group.group_name}")
            return method(group, *args, **kwargs)

        return call

    for name in _DATA_PLANE:
        if hasattr(dist.ProcessGroup, name):
            method = getattr(dist.ProcessGroup, name)
            stack.enter_context(patch.object(dist.ProcessGroup, name, guarded(name, method)))
    return tried


def collectives_under_guard(seat: Seat, symmetric: bool) -> tuple[str, list[str], list[float]]:
    agreement = seat.groups.get("agree")
    assert agreement is not None
    with ExitStack() as stack:
        device, comm = stack.enter_context(seat.comm("guard", symmetric=symmetric))
        tried = only_the_agreement_may_communicate(stack, agreement)
        group = comm.group("experts")
        with device.capture("g") as graph:
            captured = device.empty((4,), torch.float32)
            group.all_reduce(captured)
        whole, share, gathered = torch.ones(8), torch.zeros(4), torch.zeros(8)
        error = ""
        for _ in range(3):
            assert comm.group("agree").all_gather_host([seat.rank]) == [[0], [1]]
            group.all_gather(gathered, torch.full((4,), float(seat.rank)))
            group.reduce_scatter(share, whole)
            group.all_reduce(whole)
            device.replay(graph)
            try:
                device.compute.synchronize(LONG_S)
            except RuntimeError as raised:
                error = str(raised)
                break
        return error, tried, [*gathered.tolist(), *share.tolist(), *whole.tolist()]


def test_no_process_group_carries_the_experts_data_with_symmetric_memory(ranks: LocalRanks) -> None:
    for error, tried, values in ranks.run(2, collectives_under_guard, True):
        assert (error, tried) == ("", [])
        assert values == [0.0] * 4 + [1.0] * 4 + [8.0] * 4 + [8.0] * 8


def test_the_guard_does_see_a_process_group_that_carries_data(ranks: LocalRanks) -> None:
    for error, tried, _ in ranks.run(2, collectives_under_guard, False):
        assert tried, "without symmetric memory gloo carries the data"
        assert "on the process group" in error


def engine_under_guard(seat: Seat, spec: TrialSpec) -> list[str]:
    from local_ranks import run_trial

    agreement = seat.actor._groups.get("agree")
    assert agreement is not None
    with ExitStack() as stack:
        tried = only_the_agreement_may_communicate(stack, agreement)
        run_trial(seat, spec)
        return tried


def test_a_whole_trial_brings_no_data_to_a_process_group(ranks: LocalRanks, tmp_path: Path) -> None:
    from local_ranks import Trials

    table = {"kind": "bursts", "bursts": 2, "requests_per_burst": 3, "prompt_tokens": (4, 20)}
    spec = Trials(tmp_path, table).spec(toggles={"symm_mem": "on", "pinned": "pinned"})
    trial = ranks.stressed(2, spec, engine_under_guard)
    assert [(outcome.error, outcome.value) for outcome in trial.outcomes] == [(None, [])] * 2
