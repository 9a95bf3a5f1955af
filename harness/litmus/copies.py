"""Programs of copies to the device and the kernels that read what they brought; events between streams; barriers.

The *kernel* is ``_look``: it reads the copy's target on ``compute`` and keeps what it saw, whatever comes later.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from harness.litmus.program import Program


class Copied(Program):
    """A pinned source of new values, a target on the device with old ones, and what a kernel saw of the target."""

    family: ClassVar[str] = "copies"
    watched: ClassVar[tuple[str, ...]] = ("old", "torn")

    def setup(self) -> None:
        self.source = self.bench.host(pinned=True)
        self.target = self.bench.on_device()
        self.seen = self.bench.on_device()

    def prepare(self) -> None:
        self.source.tensor.fill_(self.bench.new)
        self.bench.fill(self.target, self.bench.old)
        self.bench.fill(self.seen, 0)

    def observe(self) -> str:
        return self.bench.told(self.seen, {self.bench.new: "new", self.bench.old: "old"})

    def _copy_beside(self) -> None:
        """On ``copy``, which is kept busy first."""
        self.bench.lead(self.device.copy)
        self.device.copy_h2d(self.target, self.source, self.device.copy, "copy")

    def _look(self) -> None:
        self.device.compute.run(lambda: _keep(self.seen, self.target), "look")


def _keep(seen: torch.Tensor, target: torch.Tensor) -> None:
    seen.copy_(target)


class CopyThenKernel(Copied):
    """A pinned copy, then a kernel, on one stream."""

    name: ClassVar[str] = "copy-then-kernel"

    def body(self) -> None:
        self.bench.lead(self.device.compute)
        self.device.copy_h2d(self.target, self.source, self.device.compute, "copy")
        self._look()


class CopyEventKernel(Copied):
    """A pinned copy and its event on one stream, the kernel behind that event on another."""

    name: ClassVar[str] = "copy-event-kernel"

    def body(self) -> None:
        copied = self.device.event("copied")
        self._copy_beside()
        self.device.copy.record(copied)
        self.bench.pause()
        self.device.compute.wait(copied)
        self._look()


class CopyRace(Copied):
    """The same without the event: the kernel may come first."""

    name: ClassVar[str] = "copy-race"

    def body(self) -> None:
        self._copy_beside()
        self.bench.pause()
        self._look()


class EventRerecorded(Copied):
    """An event is recorded before the copy and again behind it, then waited for: the newest record counts."""

    name: ClassVar[str] = "event-rerecorded"

    def body(self) -> None:
        copied = self.device.event("copied")
        self.device.copy.record(copied)
        self._copy_beside()
        self.device.copy.record(copied)
        self.bench.pause()
        self.device.compute.wait(copied)
        self._look()


class EventRerecordedLate(Copied):
    """The wait is enqueued, then its event recorded again on an idle stream: the wait keeps the record it had."""

    name: ClassVar[str] = "event-rerecorded-late"

    def body(self) -> None:
        copied = self.device.event("copied")
        self._copy_beside()
        self.device.copy.record(copied)
        self.device.compute.wait(copied)
        self.device.update.record(copied)
        self.bench.pause()
        self._look()


class EventMoved(Copied):
    """An event behind the copy is recorded again on an idle stream before the wait: it covers the copy no more."""

    name: ClassVar[str] = "event-moved"

    def body(self) -> None:
        copied = self.device.event("copied")
        self._copy_beside()
        self.device.copy.record(copied)
        self.device.update.record(copied)
        self.device.compute.wait(copied)
        self._look()


class PinnedBarrier(Program):
    """Is earlier work of the stream done when a pinned copy's call returns? Then the host did not run ahead."""

    name: ClassVar[str] = "barrier-pinned"
    family: ClassVar[str] = "barriers"
    watched: ClassVar[tuple[str, ...]] = ("ran-ahead",)
    pinned: ClassVar[bool] = True

    def setup(self) -> None:
        self.source = self.bench.host(pinned=self.pinned)
        self.target = self.bench.on_device()
        self.ahead = False

    def prepare(self) -> None:
        self.source.tensor.fill_(self.bench.new)

    def body(self) -> None:
        earlier = self.device.event("earlier work")
        self.bench.lead(self.device.compute)
        self.device.compute.record(earlier)
        self.device.copy_h2d(self.target, self.source, self.device.compute, "copy")
        self.ahead = not earlier.query()

    def observe(self) -> str:
        if self.bench.told(self.target, {self.bench.new: "new"}) != "new":
            return "other"
        return "ran-ahead" if self.ahead else "waited"


class PageableBarrier(PinnedBarrier):
    """The same with pageable memory: the accidental barrier that pinning takes away."""

    name: ClassVar[str] = "barrier-pageable"
    pinned: ClassVar[bool] = False
