"""A notice board in shared memory: the ranks of one group post small records and read each other's.

It serves two neighbours. ``collectives.py`` uses it where gloo runs on the simulated device: NCCL and HCCL wait for
ever when the ranks of a group bring different collectives, gloo kills the process (PLATFORMS.md), so the ranks
agree on the board before any data moves. ``symmetric.py`` uses it as the signals of a symmetric heap.

All ranks must share one machine's memory. Nothing here knows what a record means.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

_DEPTH = 8
"""Posts kept per rank. A rank cannot be more than one post ahead of a peer it waits for, so 2 would do."""
_RECORD_BYTES = 64
_BODY = struct.Struct("<Q52s")  # sequence, payload
_CHECK = struct.Struct("<I")  # crc32 of the body: aarch64 may show a later store before an earlier one
PAYLOAD_BYTES = 52
_YIELDS = 50
"""Looks at the board between which only the processor is offered to others, before the first sleep. A peer is
mostly a few microseconds away, and a sleep of 20 us takes 75 us and more."""
_POLL_S = 20e-6


class BoardTimeout(TimeoutError):
    """A peer did not post in time. ``missing`` lists the members that had not."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


def fitted(header: str) -> bytes:
    """A header as a board record. A long one is cut, with a checksum of the whole at its end."""
    raw = header.encode()
    if len(raw) > PAYLOAD_BYTES:
        check = b"#%08x" % zlib.crc32(raw)
        raw = raw[: PAYLOAD_BYTES - len(check)] + check
    return raw.ljust(PAYLOAD_BYTES, b"\0")


class Board:
    """Posts of ``size`` members. ``member`` is this rank's index in the group, 0-based."""

    def __init__(self, path: Path, *, member: int, size: int) -> None:
        self._path = path
        self._member = member
        self._size = size
        length = size * _DEPTH * _RECORD_BYTES
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.posix_fallocate(handle, 0, length)
            self._map = mmap.mmap(handle, length)
        finally:
            os.close(handle)

    def post(self, sequence: int, payload: bytes) -> None:
        """Makes ``payload`` (at most 52 bytes, else ValueError) this member's record ``sequence`` (from 1)."""
        if len(payload) > PAYLOAD_BYTES:
            raise ValueError(f"a record of {len(payload)} bytes; a board keeps {PAYLOAD_BYTES}")
        body = _BODY.pack(sequence, payload)
        offset = self._offset(self._member, sequence)
        self._map[offset : offset + _RECORD_BYTES] = body + _CHECK.pack(zlib.crc32(body))

    def read(self, member: int, sequence: int) -> bytes | None:
        """The member's record of that number, padded with zeros; None while it is not there."""
        offset = self._offset(member, sequence)
        raw = self._map[offset : offset + _RECORD_BYTES]
        body = raw[: _BODY.size]
        if _CHECK.unpack_from(raw, _BODY.size)[0] != zlib.crc32(body):
            return None
        found, payload = _BODY.unpack(body)
        return payload if found == sequence else None

    def gather(
        self, sequence: int, payload: bytes, *, timeout_s: float, stop: Callable[[], bool] | None = None
    ) -> list[bytes]:
        """Posts, then waits until every member has posted ``sequence``; returns all payloads by member.

        Raises BoardTimeout at the deadline, or at once when ``stop`` answers True.
        """
        self.post(sequence, payload)
        deadline = time.monotonic() + timeout_s
        records: list[bytes | None] = [None] * self._size
        looks = 0
        while True:
            missing = [m for m in range(self._size) if records[m] is None]
            for member in missing:
                records[member] = self.read(member, sequence)
            if all(record is not None for record in records):
                return [record for record in records if record is not None]
            if time.monotonic() > deadline or (stop is not None and stop()):
                waiting = tuple(m for m in range(self._size) if records[m] is None)
                raise BoardTimeout(f"members {list(waiting)} did not post record {sequence}", waiting)
            looks += 1
            if looks <= _YIELDS:
                os.sched_yield()
            else:
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Removes the file too: members that opened it keep it, and one that did not yet is late anyway."""
        self._map.close()
        self._path.unlink(missing_ok=True)

    @staticmethod
    def _offset(member: int, sequence: int) -> int:
        return (member * _DEPTH + sequence % _DEPTH) * _RECORD_BYTES
