"""Host memory of a real accelerator and the copies between it and device memory.

A copy is torch's ``copy_(non_blocking=True)`` in its stream's context, and nothing else: whether the host waits
is up to pinning and the platform.

======  ====================================  =====================================  =======================
        pageable, to the device               pageable, to the host                  pinned, both ways
======  ====================================  =====================================  =======================
CUDA    the driver stages it; it may wait     the call returns when the copy is      in the stream's order,
        for the stream first                  done                                   the host goes on
CANN    enqueued, then the host waits for the whole stream up to the copy            as above
======  ====================================  =====================================  =======================

(CUDA runtime API, "API synchronization behavior"; PLATFORMS.md, "torch_npu and CANN".) Where the call itself waits,
the ledger is told before, as of any other wait of the host.

The pool hands out blocks of a size class. A block given back stays out of reach until the heartbeats of all copies
that use it have passed; torch's own allocator guards only memory that is returned to it.

Not here: device memory, which torch's caching allocator holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from harness import faults
from harness.devices.accelerator_streams import AcceleratorStream, our_stream
from harness.devices.base import DeviceError, HostBuffer, Stream
from harness.devices.heartbeats import Mark

_SMALLEST_BLOCK_BYTES = 512


@dataclass(slots=True, eq=False)
class Block:
    """A size class's worth of host memory and the copies that may still use it."""

    memory: torch.Tensor  # [size] uint8
    pinned: bool
    copies: list[Mark] = field(default_factory=list)

    def used_by(self, copy: Mark) -> None:
        self.copies = [one for one in self.copies if not one.passed]
        self.copies.append(copy)

    def idle(self) -> bool:
        return all(copy.passed for copy in self.copies)


class AcceleratorBuffer:
    """A tensor in a block."""

    __slots__ = ("_tensor", "block", "freed")

    def __init__(self, block: Block, shape: Sequence[int], dtype: torch.dtype) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        self._tensor = block.memory[:nbytes].view(dtype).view(*shape)
        self.block = block
        self.freed = False

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    @property
    def pinned(self) -> bool:
        return self.block.pinned


class HostPool:
    """Hands out host blocks and takes them back. Host thread. ``pinned``: page-locked memory of so many bytes."""

    def __init__(self, pinned: Callable[[int], torch.Tensor]) -> None:
        self._pinned = pinned
        self._free: dict[tuple[bool, int], list[Block]] = {}
        self._held_bytes = {True: 0, False: 0}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> AcceleratorBuffer:
        size = _size_class(math.prod(shape) * dtype.itemsize)
        free = self._free.setdefault((pinned, size), [])
        for index in reversed(range(len(free))):
            if free[index].idle() or (pinned and _unfenced(size)):
                block = free.pop(index)
                if faults.ACTIVE is not None:
                    faults.ACTIVE.visit("host.reuse", pinned=pinned, nbytes=size)
                break
        else:
            block = Block(self._pinned(size) if pinned else torch.empty(size, dtype=torch.uint8), pinned)
        self._held_bytes[pinned] += size
        return AcceleratorBuffer(block, shape, dtype)

    def free(self, buffer: HostBuffer) -> None:
        """Raises DeviceError if the buffer was freed before."""
        ours = our_buffer(buffer)
        ours.freed = True
        size = ours.block.memory.numel()
        self._held_bytes[ours.pinned] -= size
        self._free.setdefault((ours.pinned, size), []).append(ours.block)

    def held_bytes(self, pinned: bool) -> int:
        return self._held_bytes[pinned]

    def release(self) -> None:
        """Lets go of all blocks that nobody holds."""
        self._free.clear()


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of one device. ``waits_for_pageable``: the sites whose pageable copies make the host wait."""

    waits_for_pageable: frozenset[str]

    def h2d(self, dst: torch.Tensor, src: HostBuffer, stream: Stream, label: str) -> None:
        buffer = our_buffer(src)
        self._enqueue("copy.h2d", dst, buffer.tensor, buffer, our_stream(stream), label)

    def d2h(self, dst: HostBuffer, src: torch.Tensor, stream: Stream, label: str) -> None:
        buffer = our_buffer(dst)
        self._enqueue("copy.d2h", buffer.tensor, src, buffer, our_stream(stream), label)

    def _enqueue(
        self,
        site: str,
        dst: torch.Tensor,
        src: torch.Tensor,
        buffer: AcceleratorBuffer,
        stream: AcceleratorStream,
        label: str,
    ) -> None:
        if dst.shape != src.shape or dst.dtype != src.dtype:
            raise ValueError(
                f"{label}: a copy of {src.dtype} {list(src.shape)} into {dst.dtype} {list(dst.shape)}; shapes and"
                " types must be the same"
            )
        stream.refuse_in_capture(f"the host copy {label!r}")
        copy = partial(self._copy, site, dst, src, buffer.pinned, stream, label)
        # Both ends live until the copy is done, whatever the caller does with its tensors.
        buffer.block.used_by(stream.enqueue(copy, label, kept=(dst, src, buffer.block)))

    def _copy(
        self,
        site: str,
        dst: torch.Tensor,
        src: torch.Tensor,
        pinned: bool,
        stream: AcceleratorStream,
        label: str,
    ) -> None:
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit(site, stall=stream.stall, stream=stream.name, label=label)
        if not pinned and site in self.waits_for_pageable:
            stream.host_waits_for_newest()
        dst.copy_(src, non_blocking=True)


def pinned_block(nbytes: int) -> torch.Tensor:
    """Page-locked bytes from the allocator of the process's accelerator: torch asks CUDA's when there is one, else
    the one that torch_npu registers (its own modules call ``pin_memory()`` without a device, 2.7.1)."""
    # hangrig: allow HG103 -- the toggle `pinned` has decided before anybody calls this
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _size_class(nbytes: int) -> int:
    return max(_SMALLEST_BLOCK_BYTES, 1 << max(0, nbytes - 1).bit_length())


def _unfenced(nbytes: int) -> bool:
    """Whether a fault leaves out the look at the pending copy of a block."""
    if faults.ACTIVE is None:
        return False
    return faults.ACTIVE.visit("host.fence", pinned=True, nbytes=nbytes).skipped


def our_buffer(buffer: HostBuffer) -> AcceleratorBuffer:
    if not isinstance(buffer, AcceleratorBuffer):
        raise TypeError(f"{buffer!r} is not a buffer of this device; make it with device.host_empty()")
    if buffer.freed:
        raise DeviceError("a host buffer is used after it was freed; free it after its last enqueue")
    return buffer
