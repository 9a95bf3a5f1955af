"""Host memory of the simulated device and the copies between it and device memory.

``HostAllocator`` reuses blocks as PyTorch's caching host allocator does: size classes, a pinned and a
pageable pool, and a freed block stays out of reach while a copy still uses it. ``CopyEngine`` makes copies
take modelled time and follow a memory model:

=========  ==============================  =====================================  =========================
model      pageable, to the device         pageable, to the host                  pinned, both ways
=========  ==============================  =====================================  =========================
``cuda``   staged at the call, host goes   host waits for the copy                ordered in its stream,
           on                                                                     host goes on
``cann``   enqueued, then the host waits for the whole stream up to the copy      as above
=========  ==============================  =====================================  =========================

(PLATFORMS.md, "torch_npu and CANN"; HANGS.md, D1 to D4.)

Not here: streams and points (``sim_streams.py``). The allocator is used by the host thread only.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from harness import faults
from harness.devices.base import DeviceError, HostBuffer, Op, Stream
from harness.devices.life import Life
from harness.devices.sim_streams import Point, SimStream, Worker

_SMALLEST_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Modelled time of one copy: a fixed latency, then so many 10^9 bytes a second."""

    latency_us: float
    gbps: float

    def seconds(self, nbytes: int) -> float:
        return self.latency_us * 1e-6 + nbytes / (self.gbps * 1e9)


@dataclass(slots=True, eq=False)
class Block:
    """A size class's worth of host memory and the copies that may still use it."""

    memory: torch.Tensor  # [size] uint8
    pinned: bool
    copies: list[Point] = field(default_factory=list)
    held: bool = True

    def used_by(self, copy: Point) -> None:
        self.copies = [one for one in self.copies if not one.done]
        self.copies.append(copy)

    def idle(self) -> bool:
        return all(copy.done for copy in self.copies)


class SimHostBuffer:
    """A tensor in a block. ``reused`` marks the persistent arrays of defect D2, which are never freed."""

    __slots__ = ("_tensor", "block", "freed", "reused")

    def __init__(self, block: Block, shape: Sequence[int], dtype: torch.dtype, reused: bool) -> None:
        nbytes = math.prod(shape) * dtype.itemsize
        self._tensor = block.memory[:nbytes].view(dtype).view(*shape)
        self.block = block
        self.freed = False
        self.reused = reused

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensor

    @property
    def pinned(self) -> bool:
        return self.block.pinned


class HostAllocator:
    """Hands out host blocks and takes them back.

    D2: ``staging`` hands out the same array again while its last copy is pending. D4: a freed pinned block
    is handed out again at once.
    """

    def __init__(self, defects: frozenset[str]) -> None:
        self._reuses_staging = "D2" in defects
        self._forgets_copies = "D4" in defects
        self._free: dict[tuple[bool, int], list[Block]] = {}
        self._staging: dict[tuple[tuple[int, ...], torch.dtype, bool], list[Block]] = {}
        self._held_bytes = {True: 0, False: 0}

    def empty(self, shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> SimHostBuffer:
        size = _size_class(math.prod(shape) * dtype.itemsize)
        free = self._free.setdefault((pinned, size), [])
        for index in reversed(range(len(free))):
            if free[index].idle() or (pinned and (self._forgets_copies or _unfenced(free[index]))):
                block = free.pop(index)
                _visit_reuse(block)
                break
        else:
            block = Block(torch.zeros(size, dtype=torch.uint8), pinned)
        self._hold(block)
        return SimHostBuffer(block, shape, dtype, reused=False)

    def staging(self, shape: Sequence[int], dtype: torch.dtype, pinned: bool) -> SimHostBuffer:
        if not self._reuses_staging:
            return self.empty(shape, dtype, pinned)
        kept = self._staging.setdefault((tuple(shape), dtype, pinned), [])
        for block in kept:
            if not block.held:  # two buffers held at once are two arrays; a pending copy is not looked at
                _visit_reuse(block)
                break
        else:
            size = _size_class(math.prod(shape) * dtype.itemsize)
            block = Block(torch.zeros(size, dtype=torch.uint8), pinned)
            kept.append(block)
        self._hold(block)
        return SimHostBuffer(block, shape, dtype, reused=True)

    def free(self, buffer: HostBuffer) -> None:
        """Raises DeviceError if the buffer was freed before."""
        ours = _ours(buffer)
        ours.freed = True
        block = ours.block
        block.held = False
        self._held_bytes[block.pinned] -= block.memory.numel()
        if not ours.reused:
            self._free.setdefault((block.pinned, block.memory.numel()), []).append(block)

    def held_bytes(self, pinned: bool) -> int:
        return self._held_bytes[pinned]

    def _hold(self, block: Block) -> None:
        block.held = True
        self._held_bytes[block.pinned] += block.memory.numel()


class DeviceMeter:
    """Bytes of device memory that is still referenced, by a tensor, a view or a graph."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        self._numbers = itertools.count()

    def watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        number = next(self._numbers)
        self._sizes[number] = storage.nbytes()
        weakref.finalize(storage, self._sizes.pop, number).atexit = False

    def in_use_bytes(self) -> int:
        return sum(list(self._sizes.values()))


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    site: str
    label: str
    dst: torch.Tensor
    src: torch.Tensor
    done: Point = field(default_factory=Point)


class CopyEngine:
    """Copies in one of the two memory models; with D3 pinned ones run beside their stream."""

    def __init__(
        self,
        life: Life,
        *,
        model: str,
        defects: frozenset[str],
        cost: CopyCost,
        host_cost: CopyCost,
        host_timeout_s: float,
    ) -> None:
        self._life = life
        self._model = model
        self._cost = cost
        self._host_cost = host_cost
        self._host_timeout_s = host_timeout_s
        self.dma = Worker("dma", life) if "D3" in defects else None

    def h2d(self, dst: torch.Tensor, src: HostBuffer, stream: Stream, label: str) -> None:
        buffer = _ours(src)
        self._enqueue(_Copy("copy.h2d", label, dst, buffer.tensor), buffer, _stream(stream))

    def d2h(self, dst: HostBuffer, src: torch.Tensor, stream: Stream, label: str) -> None:
        buffer = _ours(dst)
        self._enqueue(_Copy("copy.d2h", label, buffer.tensor, src), buffer, _stream(stream))

    def _enqueue(self, copy: _Copy, buffer: SimHostBuffer, stream: SimStream) -> None:
        if copy.dst.shape != copy.src.shape or copy.dst.dtype != copy.src.dtype:
            raise ValueError(
                f"{copy.label}: a copy of {copy.src.dtype} {list(copy.src.shape)} into {copy.dst.dtype}"
                f" {list(copy.dst.shape)}; shapes and types must be the same"
            )
        stream.refuse_in_capture(f"the host copy {copy.label!r}")
        nbytes = copy.src.nbytes
        seconds = self._cost.seconds(nbytes)
        if buffer.pinned:
            buffer.block.used_by(copy.done)
            execute = partial(self._execute, copy, seconds, stream.name)
            beside = partial(self._hand_over, copy, execute, stream)
            stream.enqueue(execute if self.dma is None else beside, copy.label)
        elif self._model == "cuda" and copy.site == "copy.h2d":
            self._life.check()
            staged = replace(copy, src=copy.src.clone())
            self._life.delay_on_host(self._host_cost.seconds(nbytes))
            stream.enqueue(partial(self._execute, staged, seconds, stream.name), copy.label)
        else:
            buffer.block.used_by(copy.done)
            seconds += self._host_cost.seconds(nbytes)
            stream.enqueue(partial(self._execute, copy, seconds, stream.name), copy.label)
            stream.synchronize(self._host_timeout_s)

    def _hand_over(self, copy: _Copy, execute: Op, stream: SimStream) -> None:
        assert self.dma is not None
        stream.passed(copy.done)
        self.dma.post(execute, 0, copy.label)

    def _execute(self, copy: _Copy, seconds: float, stream: str) -> None:
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit(copy.site, stream=stream, label=copy.label)
        self._life.delay(seconds)
        copy.dst.copy_(copy.src)
        copy.done.finish()


def _size_class(nbytes: int) -> int:
    return max(_SMALLEST_BLOCK_BYTES, 1 << max(0, nbytes - 1).bit_length())


def _unfenced(block: Block) -> bool:
    """Whether a fault leaves out the look at the pending copy of a block."""
    if faults.ACTIVE is None:
        return False
    return faults.ACTIVE.visit("host.fence", pinned=block.pinned, nbytes=block.memory.numel()).skipped


def _visit_reuse(block: Block) -> None:
    if faults.ACTIVE is not None:
        faults.ACTIVE.visit("host.reuse", pinned=block.pinned, nbytes=block.memory.numel())


def _ours(buffer: HostBuffer) -> SimHostBuffer:
    if not isinstance(buffer, SimHostBuffer):
        raise TypeError(
            f"{buffer!r} is not a buffer of the simulated device; make it with device.host_empty()"
        )
    if buffer.freed:
        raise DeviceError("a host buffer is used after it was freed; free it after its last enqueue")
    return buffer


def _stream(stream: Stream) -> SimStream:
    if not isinstance(stream, SimStream):
        raise TypeError(f"{stream!r} is not a stream of the simulated device")
    return stream
