"""The symmetric heap on CUDA: torch's symmetric memory (torch 2.8), a GPU for each rank, peer access between all.

A rank puts its part into its own segment, and kernels of the others read it where it lies, over NVLink or PCIe. A
barrier on the stream (torch's signal pads) says that all have written, a second one that all have read; so a
captured graph may hold it, whatever ran before. Everything is enqueued on the current stream; only a registration
(``rendezvous``) holds the host, until all members have come.

NVSHMEM and the one-kernel collectives of torch (``torch.ops.symm_mem``) are not used: what is under test is who
waits for whom, and here each of those waits has a name.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from serving.symmetric import Carry, GrowingHeap


def torch_memory() -> Any:
    """torch's module, which is private: looked up at the call."""
    return importlib.import_module("torch.distributed._symmetric_memory")


class CudaHeap(GrowingHeap):
    """One segment a rank. ``group``: its members, whose store the registrations use."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        name: str,
        member: int,
        size: int,
        device: torch.device,
        carry: Carry,
        growth_bytes: int,
    ) -> None:
        super().__init__(name=name, carry=carry, growth_bytes=growth_bytes)
        self._group = group
        self._member = member
        self._size = size
        self._device = device
        self._segments: list[tuple[torch.Tensor, Any]] = []
        """With torch's handle of each, the newest last. Work that is still enqueued may read the older ones."""

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``out`` (size * t, ...) becomes the members' ``part`` (t, ...) in member order."""
        rows = part.shape[0]
        for member, theirs in enumerate(self._written(part)):
            out[member * rows : (member + 1) * rows].copy_(theirs)
        self._meet()

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """``out`` (t, ...) becomes the sum over members of their rows [member * t, (member + 1) * t)."""
        rows = out.shape[0]
        own = slice(self._member * rows, (self._member + 1) * rows)
        self._add_up(out, [theirs[own] for theirs in self._written(whole)])

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place: the sum over members, added in member order, so equal to the bit on all ranks."""
        self._add_up(tensor, self._written(tensor))

    def close(self) -> None:
        """Lets the memory go. Nothing that uses it may be enqueued any more."""
        self._segments.clear()

    def _add_up(self, out: torch.Tensor, parts: list[torch.Tensor]) -> None:
        out.copy_(parts[0])
        for theirs in parts[1:]:
            out.add_(theirs)
        self._meet()

    def _written(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Puts ``tensor`` into this rank's segment; the members' parts, once all have written."""
        self.reserve(tensor.numel() * tensor.element_size())
        _, handle = self._segments[-1]
        shape = tuple(tensor.shape)
        views = [handle.get_buffer(member, shape, tensor.dtype) for member in range(self._size)]
        views[self._member].copy_(tensor)
        self._meet()
        return views

    def _meet(self) -> None:
        """On the stream: all members have come to here. It waits for ever for one that does not."""
        _, handle = self._segments[-1]
        handle.barrier(channel=0)

    def _exchange(self, part_bytes: int) -> None:
        memory = torch_memory()
        segment = memory.empty(part_bytes, dtype=torch.uint8, device=self._device)
        self._segments.append((segment, memory.rendezvous(segment, self._group)))
        self._part_bytes = part_bytes
