"""Programs of host memory: a source written over, a block handed out again, a result read back too early."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch

from harness.devices.base import HostBuffer
from harness.litmus.program import Program

_BLOCKS = 4
"""So many blocks of one size are taken while a copy from a freed one is pending."""


class Reused(Program):
    """A copy of new values to a target, and host memory that is written over after it was enqueued."""

    family: ClassVar[str] = "reuse"
    watched: ClassVar[tuple[str, ...]] = ("overwritten", "torn")

    def setup(self) -> None:
        self.target = self.bench.on_device()

    def prepare(self) -> None:
        self.bench.fill(self.target, self.bench.old)

    def observe(self) -> str:
        return self.bench.told(self.target, {self.bench.new: "new", self.bench.later: "overwritten"})

    def _copy(self, source: HostBuffer) -> None:
        self.bench.lead(self.device.compute)
        self.device.copy_h2d(self.target, source, self.device.compute, "copy")


class Overwritten(Reused):
    """The program keeps the source, and writes over it itself."""

    pinned: ClassVar[bool] = True

    def setup(self) -> None:
        super().setup()
        self.source = self.bench.host(pinned=self.pinned)

    def prepare(self) -> None:
        super().prepare()
        self.source.tensor.fill_(self.bench.new)

    def _overwrite(self) -> None:
        self.source.tensor.fill_(self.bench.later)


class ReusePinned(Overwritten):
    """A pinned source is written over while its copy may be pending."""

    name: ClassVar[str] = "reuse-pinned"

    def body(self) -> None:
        self._copy(self.source)
        self._overwrite()


class ReusePageable(ReusePinned):
    """A pageable source is written over when the copy's call has returned."""

    name: ClassVar[str] = "reuse-pageable"
    pinned: ClassVar[bool] = False


class ReuseAfterEvent(Overwritten):
    """A pinned source is written over when an event behind its copy has come."""

    name: ClassVar[str] = "reuse-after-event"

    def body(self) -> None:
        copied = self.device.event("copied")
        self._copy(self.source)
        self.device.compute.record(copied)
        self.bench.await_event(copied)
        self._overwrite()


class StagingReused(Reused):
    """A staging buffer is freed after the enqueue, the next one of the same shape taken and filled."""

    name: ClassVar[str] = "staging-reused"

    def setup(self) -> None:
        super().setup()
        self.next_target = self.bench.on_device()

    def body(self) -> None:
        first = self._staged(self.bench.new)
        self._copy(first)
        self.device.host_free(first)
        second = self._staged(self.bench.later)
        self.device.copy_h2d(self.next_target, second, self.device.compute, "next copy")
        self.device.host_free(second)

    def _staged(self, value: int) -> HostBuffer:
        buffer = self.device.host_staging([self.bench.count], torch.int32, pinned=True)
        buffer.tensor.fill_(value)
        return buffer


class BlockFreed(Reused):
    """A pinned block is freed while its copy is pending; others of its size are taken and written."""

    name: ClassVar[str] = "block-freed"

    def body(self) -> None:
        block = self.bench.host(pinned=True)
        block.tensor.fill_(self.bench.new)
        self._copy(block)
        self.device.host_free(block)
        taken = [self.bench.host(pinned=True) for _ in range(_BLOCKS)]
        for one in taken:
            one.tensor.fill_(self.bench.later)
        for one in taken:
            self.device.host_free(one)


class TensorFreed(Reused):
    """The same with torch's own pinned allocator, which our devices do not ask for each block."""

    name: ClassVar[str] = "tensor-freed"
    devices: ClassVar[tuple[str, ...]] = ("cuda", "npu")

    def body(self) -> None:
        self.bench.lead(self.device.compute)
        # Nothing but torch knows the tensor when the operation is enqueued: operations of compute are not kept.
        self.device.compute.run(partial(_copy_from, self.target, self._pinned(self.bench.new)), "copy")
        taken = [self._pinned(self.bench.later) for _ in range(_BLOCKS)]
        taken.clear()

    def _pinned(self, value: int) -> torch.Tensor:
        # hangrig: allow HG103 -- the program tests pinned memory; where it may not be had the device says so first
        tensor = torch.empty(self.bench.count, dtype=torch.int32, pin_memory=True)
        return tensor.fill_(value)


def _copy_from(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


class ReadbackEarly(Program):
    """A pinned device-to-host copy is read on the host without a wait."""

    name: ClassVar[str] = "readback-early"
    family: ClassVar[str] = "readback"
    watched: ClassVar[tuple[str, ...]] = ("old", "torn")
    pinned: ClassVar[bool] = True

    def setup(self) -> None:
        self.source = self.bench.on_device()
        self.result = self.bench.host(pinned=self.pinned)
        self.saw = ""

    def prepare(self) -> None:
        self.result.tensor.fill_(self.bench.old)
        self.bench.fill(self.source, self.bench.new)

    def body(self) -> None:
        self.bench.lead(self.device.compute)
        self.device.copy_d2h(self.result, self.source, self.device.compute, "read back")
        self._await()
        self.saw = self.bench.told(self.result.tensor, {self.bench.new: "new", self.bench.old: "old"})

    def _await(self) -> None:
        """Nothing to wait for."""

    def observe(self) -> str:
        return self.saw


class ReadbackAfterEvent(ReadbackEarly):
    """The same, read when an event behind the copy has come."""

    name: ClassVar[str] = "readback-after-event"

    def _await(self) -> None:
        copied = self.device.event("read back")
        self.device.compute.record(copied)
        self.bench.await_event(copied)


class ReadbackPageable(ReadbackEarly):
    """The same into pageable memory: the call itself has to wait."""

    name: ClassVar[str] = "readback-pageable"
    pinned: ClassVar[bool] = False
