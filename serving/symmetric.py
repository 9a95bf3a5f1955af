"""The symmetric heap: memory that every rank of a group maps, and collectives that use nothing else.

A rank writes its part into its own segment and reads its peers' parts where they lie; a board of signals says
when. Growing the heap is a *registration*: a collective of its own, which all ranks of the group must enter,
because each has to map the others' new segments. A rank that grows alone waits for ever (HANGS.md, F1). Who makes
the heap may have each registration carried as a collective, with a place in the ledger.

Here: growth, which all heaps share, and the heap of the simulated device: POSIX shared memory, all ranks on one
machine. Not here: the heap on CUDA (``symmetric_cuda.py``).
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch

from harness import faults
from serving.board import Board, BoardTimeout

GROWTH_BYTES = 1 << 20
_SIGNAL = struct.Struct("<QI")  # bytes written, their crc32
_SETTLE_POLL_S = 20e-6


Carry = Callable[[int, Callable[[], None]], None]
"""Carries a registration: given the bytes of a segment and what exchanges and maps the segments."""


def _uncarried(nbytes: int, exchange: Callable[[], None]) -> None:
    exchange()


class GrowingHeap(ABC):
    """Segments that grow together on all members. ``parts``: how many of a collective's size a segment has."""

    parts: ClassVar[int] = 1

    def __init__(self, *, name: str, carry: Carry, growth_bytes: int) -> None:
        """``growth_bytes``: a part holds a multiple of that."""
        self._name = name
        self._carry = carry
        self._growth_bytes = growth_bytes
        self._part_bytes = 0

    @property
    def registered_bytes(self) -> int:
        """Bytes of this rank's segment that its peers map."""
        return self.parts * self._part_bytes

    def rounded(self, nbytes: int) -> int:
        """What a segment holds that is made for collectives of ``nbytes`` a member."""
        return -(-nbytes // self._growth_bytes) * self._growth_bytes

    def reserve(self, nbytes: int) -> None:
        """Makes room for collectives of ``nbytes`` a member; registers where there is none yet, and then all
        members must come. On the thread that carries the collectives."""
        if nbytes > self._part_bytes:
            self._register(nbytes)

    def _register(self, nbytes: int) -> None:
        if faults.ACTIVE is not None:
            nbytes = faults.ACTIVE.visit("symm.register", group=self._name, nbytes=nbytes, heap=self)[
                "nbytes"
            ]
        part_bytes = self.rounded(nbytes)
        self._carry(self.parts * part_bytes, lambda: self._exchange(part_bytes))

    @abstractmethod
    def _exchange(self, part_bytes: int) -> None:
        """Collective: every member brings a new segment of the same size and maps all others'."""


class SymmetricHeap(GrowingHeap):
    """One segment a rank, at the same size everywhere; two halves used in turn.

    Two halves make one signal a collective enough: a rank may overwrite a half only after it saw every peer
    arrive at the collective after the one that used it.
    """

    parts = 2

    def __init__(
        self,
        directory: Path,
        *,
        name: str,
        member: int,
        size: int,
        timeout_s: float,
        stop: Callable[[], bool],
        carry: Carry = _uncarried,
        growth_bytes: int = GROWTH_BYTES,
    ) -> None:
        super().__init__(name=name, carry=carry, growth_bytes=growth_bytes)
        self._directory = directory
        self._member = member
        self._size = size
        self._timeout_s = timeout_s
        self._stop = stop
        self._signals = Board(directory / f"{name}.signals", member=member, size=size)
        self._registrations = Board(directory / f"{name}.registrations", member=member, size=size)
        self._signal = 0
        self._generation = 0
        self._maps: list[mmap.mmap] = []
        self._segments: list[torch.Tensor] = []

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``out`` (size * t, ...) becomes the members' ``part`` (t, ...) in member order."""
        half = self._write(part)
        rows = part.shape[0]
        for member in range(self._size):
            out[member * rows : (member + 1) * rows].copy_(self._view(member, half, part))

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """``out`` (t, ...) becomes the sum over members of their rows [member * t, (member + 1) * t)."""
        half = self._write(whole)
        rows = out.shape[0]
        begin = self._member * rows
        out.copy_(self._view(0, half, whole)[begin : begin + rows])
        for member in range(1, self._size):
            out.add_(self._view(member, half, whole)[begin : begin + rows])

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place: the sum over members, added in member order, so equal to the bit on all ranks."""
        half = self._write(tensor)
        tensor.copy_(self._view(0, half, tensor))
        for member in range(1, self._size):
            tensor.add_(self._view(member, half, tensor))

    def close(self) -> None:
        """Lets the memory go and removes this rank's files; peers that still map them keep their view."""
        self._segments = []  # unmapped with the last tensor that views them
        self._maps = []
        self._signals.close()
        self._registrations.close()
        for path in self._directory.glob(f"{self._name}.segment-{self._member}-*"):
            path.unlink(missing_ok=True)

    def _write(self, tensor: torch.Tensor) -> int:
        """Puts ``tensor`` into this rank's segment, signals, waits for all signals; returns the half used."""
        nbytes = tensor.numel() * tensor.element_size()
        self.reserve(nbytes)
        self._signal += 1
        half = self._signal % 2
        self._view(self._member, half, tensor).copy_(tensor)
        signal = _SIGNAL.pack(nbytes, self._checksum(self._member, half, nbytes))
        signals = self._signals.gather(self._signal, signal, timeout_s=self._timeout_s, stop=self._stop)
        for member, theirs in enumerate(signals):
            self._settle(member, half, _SIGNAL.unpack_from(theirs))
        return half

    def _settle(self, member: int, half: int, signal: tuple[int, int]) -> None:
        """Waits until the data that a signal speaks of can be seen: on aarch64 the signal may come first."""
        nbytes, wanted = signal
        deadline = time.monotonic() + self._timeout_s
        while self._checksum(member, half, nbytes) != wanted:
            if time.monotonic() > deadline or self._stop():
                raise BoardTimeout(f"the data of member {member} did not arrive after its signal", (member,))
            time.sleep(_SETTLE_POLL_S)

    def _checksum(self, member: int, half: int, nbytes: int) -> int:
        begin = half * self._part_bytes
        return zlib.crc32(memoryview(self._maps[member])[begin : begin + nbytes])

    def _exchange(self, half_bytes: int) -> None:
        self._generation += 1
        own = self._path(self._member, self._generation)
        handle = os.open(own, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(handle, 0, 2 * half_bytes)
        finally:
            os.close(handle)
        self._registrations.gather(
            self._generation, struct.pack("<Q", half_bytes), timeout_s=self._timeout_s, stop=self._stop
        )
        maps = []
        for member in range(self._size):
            handle = os.open(self._path(member, self._generation), os.O_RDWR)
            try:
                maps.append(mmap.mmap(handle, 2 * half_bytes))
            finally:
                os.close(handle)
        # The segments before are unmapped with their last view. All members came here, so all have mapped this
        # rank's old one, and its name is needed no more: without this, each growth would keep its memory.
        self._maps = maps
        self._segments = [torch.frombuffer(m, dtype=torch.uint8) for m in maps]
        self._part_bytes = half_bytes
        self._path(self._member, self._generation - 1).unlink(missing_ok=True)

    def _path(self, member: int, generation: int) -> Path:
        return self._directory / f"{self._name}.segment-{member}-{generation}"

    def _view(self, member: int, half: int, like: torch.Tensor) -> torch.Tensor:
        begin = half * self._part_bytes
        nbytes = like.numel() * like.element_size()
        return self._segments[member][begin : begin + nbytes].view(like.dtype).view(like.shape)
