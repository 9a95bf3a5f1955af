"""The copy witness: what each copy of a hot path was to bring, held against what came.

A copy that ran too late, from a source that was written again, or out of a block that was given away raises
nothing; tokens are wrong, many steps later. For each copy the witness keeps what its source held when it was
enqueued (to the host: what the device held at the copy's event), takes what its consumer finds, in the order of the
consumer, and compares the two when both are surely there. It waits for nothing and holds nothing up: it may not be
the barrier whose want it is to show. So on a real device it takes what it compares into pinned memory of its own,
which it keeps until the end.

Not here: the copies (``transfer.py``), and what a difference means (``harness.diagnosis_corruption``).
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import asdict, dataclass
from typing import Any

import torch

from harness.devices.base import Device, Event, HostBuffer


def off_host(tensor: torch.Tensor) -> bool:
    """The host cannot look at it without waiting."""
    return tensor.device.type != "cpu"


@dataclass(frozen=True, slots=True)
class WrongCopy:
    """``elements`` of the ``of`` values of a copy differ from what its source held. ``step``: of its enqueue."""

    path: str
    step: int
    stream: str
    elements: int
    of: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Look:
    """One copy. ``wanted`` and ``found`` are both valid after ``taken``; ``found`` None: not read yet."""

    path: str
    step: int
    stream: str
    wanted: torch.Tensor
    found: torch.Tensor | None
    taken: Event
    room: HostBuffer | None = None
    """Where the device's side of it lies, where that is host memory."""

    def compared(self) -> WrongCopy | None:
        assert self.found is not None
        differ = int((self.wanted != self.found).sum())
        if not differ:
            return None
        return WrongCopy(self.path, self.step, self.stream, differ, self.wanted.numel())


class CopyWitness:
    """Of one rank. ``step`` is the host's; the engine sets it. Host thread only."""

    def __init__(self, device: Device) -> None:
        self.step = 0
        self._device = device
        self._open: deque[Look] = deque()
        self._rooms: dict[tuple[torch.Size, torch.dtype], list[HostBuffer]] = defaultdict(list)

    def brought(self, wanted: torch.Tensor, dst: torch.Tensor, path: str) -> None:
        """Call right after the enqueue of a copy on ``compute``; ``wanted`` is a private copy of its source."""
        found, room = self._room(dst)
        taken = self._take(dst, found, path)
        self._open.append(Look(path, self.step, self._device.compute.name, wanted, found, taken, room))

    def fetching(self, src: torch.Tensor, path: str) -> Look:
        """Call before anything else is enqueued on ``compute`` after the event that a copy of ``src`` to the host
        waits for. ``read`` is to be told what the host found."""
        wanted, room = self._room(src)
        taken = self._take(src, wanted, path)
        return Look(path, self.step, self._device.copy.name, wanted, None, taken, room)

    def read(self, look: Look, found: torch.Tensor) -> None:
        """The host reads ``found`` now."""
        look.found = found.clone()
        self._open.append(look)

    def settle(self) -> list[WrongCopy]:
        """The copies since the last call that are surely done and brought something else."""
        wrong, still_open = [], deque[Look]()
        for look in self._open:
            if not look.taken.query():
                still_open.append(look)
                continue
            if (one := look.compared()) is not None:
                wrong.append(one)
            if look.room is not None:
                self._rooms[look.room.tensor.shape, look.room.tensor.dtype].append(look.room)
        self._open = still_open
        return wrong

    def close(self) -> None:
        """Gives the memory back of all that was settled."""
        for rooms in self._rooms.values():
            for room in rooms:
                self._device.host_free(room)
        self._rooms.clear()

    def _room(self, like: torch.Tensor) -> tuple[torch.Tensor, HostBuffer | None]:
        """Where a copy of ``like`` can be compared without waiting for a stream."""
        if not off_host(like):
            return self._device.empty(like.shape, like.dtype), None
        kept = self._rooms[like.shape, like.dtype]
        room = kept.pop() if kept else self._device.host_empty(like.shape, like.dtype, pinned=True)
        return room.tensor, room

    def _take(self, source: torch.Tensor, into: torch.Tensor, path: str) -> Event:
        """Enqueues: ``into`` gets what an operation on ``compute`` finds in ``source`` at this place."""

        def take() -> None:
            into.copy_(source, non_blocking=True)

        taken = self._device.event()
        self._device.compute.run(take, f"copy_witness {path}")
        self._device.compute.record(taken)
        return taken
