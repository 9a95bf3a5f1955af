"""What moves the data of a group's collectives, and in which way.

==========  ========  ========================================================================================
device      backend   a collective
==========  ========  ========================================================================================
simulated   gloo      blocks the thread of its stream until all ranks have brought their part
CUDA        nccl      is enqueued on its stream and waits there, also for a peer that brings something else
NPU         hccl      the same
shared GPU  gloo      is *staged*: to the host, which waits, over gloo, and back. NCCL refuses two ranks on one GPU
==========  ========  ========================================================================================

Staged collectives are a barrier for the host in every layer: such a run shows that the engine works, and is no
measure of anything. Messages of the hosts go over gloo everywhere.

Not here: streams, ledger and graphs around a collective (``collectives.py``), who is in a group (``groups.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

_BACKENDS: Mapping[str, str] = {"sim": "gloo", "cuda": "nccl", "npu": "hccl"}
_SHARED = frozenset({"cuda"})
"""Devices that several processes may use at once."""


class CarrierError(ValueError):
    """A device whose ranks cannot exchange data in the way that was asked for."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """``backend``: of ``torch.distributed``, for data. ``staged``: through host memory."""

    backend: str = "gloo"
    staged: bool = False

    @property
    def enqueues(self) -> bool:
        """A collective returns at once and happens on the stream; a graph can hold it."""
        return self.backend != "gloo"


GLOO = Carrier()


def carrier_for(kind: str, ranks_per_device: int = 1) -> Carrier:
    """Of a device by its name. Raises CarrierError."""
    if kind not in _BACKENDS:
        raise CarrierError(f"no backend is known for {kind!r}; known: {', '.join(_BACKENDS)}")
    if ranks_per_device == 1 or kind == "sim":
        return Carrier(_BACKENDS[kind])
    if kind not in _SHARED:
        raise CarrierError(
            f"{ranks_per_device} ranks cannot share one {kind} device: it belongs to one process; use fewer ranks"
        )
    return Carrier("gloo", staged=True)


class Data(Protocol):
    """Moves data between the members of one group, on the calling thread or its current stream."""

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``out`` (size * t, ...) becomes the members' ``part`` (t, ...) in member order."""

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """``out`` (t, ...) becomes the sum over members of their rows [member * t, (member + 1) * t)."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place: the sum over members."""


class Heap(Data, Protocol):
    """A symmetric heap: memory of each member that all of them see, and collectives that use nothing else."""

    @property
    def registered_bytes(self) -> int:
        """Bytes of this rank's segment that its peers map."""

    def rounded(self, nbytes: int) -> int:
        """What a segment holds that is made for collectives of ``nbytes`` a member."""

    def reserve(self, nbytes: int) -> None:
        """Makes room for collectives of ``nbytes`` a member; registers where there is none yet, and then all
        members must come."""

    def close(self) -> None: ...


class Alone:
    """A group of one rank."""

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        out.copy_(part)

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        out.copy_(whole)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """It is the sum already."""


@dataclass(frozen=True, slots=True)
class GroupData:
    """``torch.distributed``. With nccl and hccl each call makes the current stream wait for the data, not the
    host."""

    group: dist.ProcessGroup

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """torch 2.13 renamed the operation and warns at the old name; torch 2.7 has the old name only."""
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        call(out, part, group=self.group)

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """As ``all_gather``."""
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        call(out, whole, group=self.group)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)
