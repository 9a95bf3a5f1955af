"""The heap on CUDA over a stand-in for torch's symmetric memory: members are threads, a barrier is a barrier.

What torch's own memory does (mapping, NVLink) is not here; that its names and arguments exist is.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sim_rig import LONG_S, in_thread, joined

from serving import symmetric_cuda
from serving.symmetric_cuda import CudaHeap

SIZE = 3
GROWTH = 256


class Memory:
    """``torch.distributed._symmetric_memory`` for threads; ``group`` is a member's number. ``met``: barriers so far
    by member."""

    def __init__(self, *, leave_out: int | None = None) -> None:
        """``leave_out``: this one of each member's barriers is not waited for."""
        self._barrier = threading.Barrier(SIZE)
        self._brought: dict[int, torch.Tensor] = {}
        self._leave_out = leave_out
        self.registered = [0] * SIZE
        self.met = [0] * SIZE

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(size, 0xEE, dtype=dtype, device=device)

    def rendezvous(self, tensor: torch.Tensor, group: int) -> Any:
        self._brought[group] = tensor
        self._barrier.wait(LONG_S)
        segments = [self._brought[member] for member in range(SIZE)]
        self._barrier.wait(LONG_S)
        self.registered[group] += 1
        assert len({segment.numel() for segment in segments}) == 1

        def get_buffer(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            nbytes = torch.Size(sizes).numel() * dtype.itemsize
            return segments[rank][:nbytes].view(dtype).view(sizes)

        def barrier(channel: int = 0) -> None:
            self.met[group] += 1
            if self.met[group] != self._leave_out:
                self._barrier.wait(LONG_S)

        return SimpleNamespace(get_buffer=get_buffer, barrier=barrier)


def on_members(memory: Memory, work: Callable[[int, CudaHeap], Any]) -> list[Any]:
    found: dict[int, Any] = {}
    carried: list[int] = []

    def carry(nbytes: int, exchange: Callable[[], None]) -> None:
        carried.append(nbytes)
        exchange()

    def member(index: int) -> None:
        heap = CudaHeap(
            index,  # type: ignore[arg-type]
            name="h",
            member=index,
            size=SIZE,
            device=torch.device("cpu"),
            carry=carry,
            growth_bytes=GROWTH,
        )
        found[index] = work(index, heap)

    with patch.object(symmetric_cuda, "torch_memory", lambda: memory):
        for thread in [in_thread(lambda index=index: member(index)) for index in range(SIZE)]:  # type: ignore[misc]
            joined(thread)
    assert len(carried) == sum(memory.registered)
    return [found[index] for index in range(SIZE)]


def part(member: int, rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(member)
    return torch.randint(-50, 50, (rows, 2), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_collectives_give_what_plain_sums_give(dtype: torch.dtype) -> None:
    whole = [part(member, 2 * SIZE, dtype) for member in range(SIZE)]
    total = torch.stack(whole).sum(0).to(dtype)

    def work(member: int, heap: CudaHeap) -> tuple[torch.Tensor, ...]:
        gathered = torch.empty(2 * SIZE * SIZE, 2, dtype=dtype)
        heap.all_gather(gathered, whole[member])
        share = torch.empty(2, 2, dtype=dtype)
        heap.reduce_scatter(share, whole[member])
        reduced = whole[member].clone()
        heap.all_reduce(reduced)
        return gathered, share, reduced

    memory = Memory()
    for member, (gathered, share, reduced) in enumerate(on_members(memory, work)):
        assert torch.equal(gathered, torch.cat(whole))
        assert torch.equal(share, total[2 * member : 2 * member + 2])
        assert torch.equal(reduced, total)
    assert memory.met == [6] * SIZE, "all have written, all have read, for each of three"


def test_a_heap_grows_together_and_keeps_what_may_still_be_read() -> None:
    def work(member: int, heap: CudaHeap) -> list[int]:
        sizes = []
        for rows in (8, 30, 33, 8):  # 64, 240, 264 and 64 bytes
            heap.all_reduce(part(member, rows))
            sizes.append(heap.registered_bytes)
        assert heap.rounded(GROWTH + 1) == 2 * GROWTH
        kept = len(heap._segments)
        heap.close()
        return [*sizes, kept]

    memory = Memory()
    assert on_members(memory, work) == [[GROWTH, GROWTH, 2 * GROWTH, 2 * GROWTH, 2]] * SIZE
    assert memory.registered == [2] * SIZE


def slow_sum(memory: Memory) -> list[float]:
    """What member 0 makes of a sum when it reads late, and the others bring their next part as soon as they may."""
    brought = threading.Semaphore(0)

    def work(member: int, heap: CudaHeap) -> list[float]:
        values, add_up = torch.full((4,), float(member)), heap._add_up

        def late(out: torch.Tensor, parts: list[torch.Tensor]) -> None:
            for _ in range(SIZE - 1):
                brought.acquire(timeout=0.2)  # in vain where nobody may bring it before this one has read
            add_up(out, parts)

        with patch.object(heap, "_add_up", late if member == 0 else add_up):
            heap.all_reduce(values)
        _, handle = heap._segments[-1]
        handle.get_buffer(member, (4,), torch.float32).fill_(100.0)
        brought.release()
        return list(values.tolist())

    first: list[float] = on_members(memory, work)[0]
    return first


def test_nobody_overwrites_what_a_slow_member_reads() -> None:
    """With the second barrier left out the slow one reads the next collective's numbers: the test has power."""
    assert slow_sum(Memory()) == [3.0] * 4
    assert slow_sum(Memory(leave_out=2)) == [200.0] * 4


def test_torch_has_the_names_and_arguments_that_are_used() -> None:
    memory = symmetric_cuda.torch_memory()
    assert list(inspect.signature(memory.rendezvous).parameters) == ["tensor", "group"]
    assert {"dtype", "device"} <= set(inspect.signature(memory.empty).parameters)
    handle = torch._C._distributed_c10d._SymmetricMemory
    assert callable(handle.get_buffer) and callable(handle.barrier)
