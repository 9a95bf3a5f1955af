"""Rings of records in the mapped file, and the counters of a group whose records go into two of them.

What stands in which ring is in ``ledger_layout.py``. Between the engine's own work the code and the data of a
ring are cold, and memory is what a record costs: all rings share their code, and a ring is one small object.
Standard library only.
"""

from __future__ import annotations

import mmap
import sys
import threading
from zlib import adler32

from harness.ledger_layout import BODY_HEAD, CHECKSUM_BASE, LAYOUT, SEQUENCE, LedgerError, Section

_BODY_AT = SEQUENCE.size
_PAYLOAD_AT = SEQUENCE.size + BODY_HEAD.size
_pack_head = BODY_HEAD.pack

# As many replays as the ring of enqueued collectives holds; older ones are complete or their details are
# lost.
_BATCHES_KEPT = LAYOUT.collective[0].slots


def sequences_of(mapping: mmap.mmap) -> memoryview:
    """The file as 8-byte numbers. Storing one is a single store, where ``pack_into`` first writes zeros: a rank
    that is stopped in between would leave a record without a sequence."""
    if sys.byteorder != "little":
        raise LedgerError("a ledger is little-endian, and can only be written on a host that is")
    return memoryview(mapping).cast("Q")


class Ring:
    """Writes the records of one section. One thread only. ``sequences``: what ``sequences_of`` gives."""

    __slots__ = ("_base", "_mapping", "_sequences", "_slots", "_stride", "count")

    def __init__(self, mapping: mmap.mmap, sequences: memoryview, section: Section) -> None:
        self._mapping = mapping
        self._sequences = sequences
        self._base = section.offset
        self._slots = section.slots
        self._stride = section.stride
        self.count = 0

    def write(self, payload: bytes) -> int:
        """Writes the next record and returns its number, from 1. What a longer one left behind it stays there."""
        at = self._base + self.count % self._slots * self._stride
        self.count = number = self.count + 1
        sequence = 2 * number
        nbytes = len(payload)
        index = at // 8
        self._sequences[index] = sequence - 1
        self._mapping[at + _BODY_AT : at + _PAYLOAD_AT + nbytes] = (
            _pack_head(adler32(payload, sequence % CHECKSUM_BASE), nbytes) + payload
        )
        self._sequences[index] = sequence
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
        first = self.batches.pop(sequence, 0) if self.batches else sequence
        if first == 0:
            first = self._first_of_batch(sequence)
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

    def _first_of_batch(self, sequence: int) -> int:
        """Of the replay that ``sequence`` is in the middle of; itself where there is none."""
        found = (first for last, first in self.batches.items() if first <= sequence <= last)
        return next(found, sequence)
