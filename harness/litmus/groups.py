"""Programs of two ranks that use one communicator from two streams.

A communicator pairs the collectives of its members in the order in which each member starts them. Where nothing
orders two all-reduces of one size, on two streams, alike on every member, the first of one may meet the second of
another. Both then get a wrong sum, or both wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.distributed as dist

from harness.devices.base import Stream
from harness.litmus.program import Program

_RANKS = 2


class Grouped(Program):
    """Two vectors, each summed over both ranks. ``first`` and ``second`` are the sums, ready on any stream."""

    family: ClassVar[str] = "groups"
    watched: ClassVar[tuple[str, ...]] = ("crossed",)
    ranks: ClassVar[int] = _RANKS

    def setup(self) -> None:
        self.first = self.bench.on_device()
        self.second = self.bench.on_device()

    def prepare(self) -> None:
        self.bench.fill(self.first, self._part(1))
        self.bench.fill(self.second, self._part(10))
        self.bench.settle()
        self.bench.meet()

    def observe(self) -> str:
        sums = self._told(self.first, 1), self._told(self.second, 10)
        return "ordered" if sums == ("sum", "sum") else "crossed"

    def _part(self, unit: int, rank: int | None = None) -> int:
        """What a rank brings to the vector of that unit: 1 or 2 times it."""
        return unit * (1 + (self.bench.rank if rank is None else rank))

    def _told(self, sums: torch.Tensor, unit: int) -> str:
        return self.bench.told(sums, {sum(self._part(unit, rank) for rank in range(_RANKS)): "sum"})

    def _sum(self, stream: Stream, vector: torch.Tensor, label: str) -> None:
        self.bench.lead(stream)
        stream.run(all_reduce(vector), label)

    def _two_streams(self, *, reverse: bool, ordered: bool) -> None:
        """``first`` on ``comm``, ``second`` on ``compute``, in that order or the reverse of it."""
        jobs = [(self.device.comm, self.first), (self.device.compute, self.second)]
        if reverse:
            jobs.reverse()
        (one, vector), (other, next_vector) = jobs
        self._sum(one, vector, "all_reduce")
        if ordered:
            begun = self.device.event("all_reduce")
            one.record(begun)
            other.wait(begun)
        self._sum(other, next_vector, "all_reduce")


class GroupOrdered(Grouped):
    """Two streams, an event between their collectives, the same order on both ranks."""

    name: ClassVar[str] = "group-ordered"

    def body(self) -> None:
        self._two_streams(reverse=False, ordered=True)


class GroupReversed(Grouped):
    """Every other shot rank 1 has the other order: crossed collectives can be seen."""

    name: ClassVar[str] = "group-reversed"
    may_stop: ClassVar[bool] = True

    def body(self) -> None:
        reverse = self.bench.rng.random() < 0.5 and self.bench.rank == 1
        self._two_streams(reverse=reverse, ordered=True)


class GroupTwoStreams(Grouped):
    """The same order of calls on both ranks, and no event between the streams."""

    name: ClassVar[str] = "group-two-streams"
    may_stop: ClassVar[bool] = True

    def body(self) -> None:
        self._two_streams(reverse=False, ordered=False)


def all_reduce(vector: torch.Tensor) -> Callable[[], None]:
    """An operation of a stream: the sum of ``vector`` over all ranks, in place."""

    def run() -> None:
        work = dist.all_reduce(vector, async_op=True)
        work.wait()

    return run
