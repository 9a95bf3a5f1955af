"""Rings of records in the mapped file, and the counters of a group whose records go into two of them.

What stands in which ring is in ``ledger_layout.py``. Standard library only.
"""

from __future__ import annotations

import mmap
import struct
import threading
from zlib import crc32

from harness.ledger_layout import LAYOUT, SEQUENCE, Section

_pack_sequence_into = SEQUENCE.pack_into

# As many replays as the ring of enqueued collectives holds; older ones are complete or their details are
# lost.
_BATCHES_KEPT = LAYOUT.collective[0].slots


class Ring:
    """Writes the records of one section. One thread only."""

    __slots__ = ("_base", "_map", "_pack_body", "_slots", "_stride", "count")

    def __init__(self, mapping: mmap.mmap, section: Section) -> None:
        self._map = mapping
        self._base = section.offset
        self._slots = section.slots
        self._stride = section.stride
        self._pack_body = struct.Struct(f"<II{section.payload_bytes}s").pack_into
        self.count = 0

    def write(self, payload: bytes) -> int:
        """Writes the next record and returns its number, from 1."""
        number = self.count + 1
        at = self._base + self.count % self._slots * self._stride
        sequence = 2 * number
        _pack_sequence_into(self._map, at, sequence - 1)
        self._pack_body(self._map, at + 8, crc32(payload, sequence & 0xFFFFFFFF), len(payload), payload)
        _pack_sequence_into(self._map, at, sequence)
        self.count = number
        return number


class Group:
    """Counters of one group. Its collectives end on ``comm`` or, in a replay, on ``compute``: so a lock."""

    __slots__ = (
        "batches",
        "completed",
        "early",
        "enqueue",
        "enqueued",
        "lock",
        "log",
        "name",
        "ranks",
        "started",
    )

    def __init__(self, name: str, ranks: tuple[int, ...], enqueue: Ring, log: Ring) -> None:
        self.name = name
        self.ranks = ranks
        self.enqueue = enqueue
        self.log = log
        self.lock = threading.Lock()
        self.enqueued = 0
        self.started = 0
        self.completed = 0
        self.batches: dict[int, int] = {}  # last sequence of a replay's collectives -> the first
        self.early: list[tuple[int, int]] = []  # completed ranges above ``completed``

    def add_batch(self, first: int, last: int) -> None:
        """Sequences ``first`` to ``last`` belong to one replay."""
        self.batches[last] = first
        if len(self.batches) > _BATCHES_KEPT:
            del self.batches[next(iter(self.batches))]

    def complete(self, sequence: int) -> int:
        """Marks ``sequence`` done, with those before it in the same replay. Returns the first one marked."""
        first = sequence
        for last, batch_first in self.batches.items():
            if batch_first <= sequence <= last:
                first = batch_first
                break
        self.batches.pop(sequence, None)
        if not self.early and first <= self.completed + 1:
            self.completed = max(self.completed, sequence)
            return first
        self.early.append((first, sequence))
        self.early.sort()
        joined = [(0, self.completed)]
        for low, high in self.early:
            if low <= joined[-1][1] + 1:
                joined[-1] = (joined[-1][0], max(joined[-1][1], high))
            else:
                joined.append((low, high))
        self.completed = joined[0][1]
        self.early = joined[1:]
        return first
