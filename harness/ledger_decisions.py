"""Decisions as lines of JSON: for the ring, where they must fit, and for a file, where they are whole.

A first divergence between ranks may lie an hour back, long out of the ring: hence the file. It is opened
without blocking, so a full pipe loses lines instead of stopping the host; a regular file on a file system
that itself blocks still blocks.

A write costs a host as much as all else that is done for a decision, so lines wait for each other, for a moment.
None is lost with the process: a line that waits is in the ring, which is mapped, whole and not yet overwritten.
Standard library only.
"""

from __future__ import annotations

import atexit
import json
import json.encoder
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.ledger_layout import DECISION_BYTES, LAYOUT, LedgerError

FLUSH_S = 0.05
"""A line waits no longer for the next one, nor, while somebody stamps the ledger, for a stamp."""
PENDING_LINES = LAYOUT.decisions.slots // 2
"""Nor for more lines than these."""
_CLOSE_S = 1.0

_encoder = json.JSONEncoder(separators=(",", ":"), default=str, skipkeys=True, check_circular=False)


def _kept_encoder() -> Callable[[object], str]:
    """What ``_encoder.encode`` would make anew for each record, which is a third of its time."""
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return _encoder.encode
    kept = make(None, str, json.encoder.encode_basestring_ascii, None, ":", ",", False, True, True)
    return lambda record: "".join(kept(record, 0))


_encode = _kept_encoder()


class DecisionFile:
    """Appends lines to a file and counts those it could not take. Never raises after it was opened."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor: int | None = os.open(
                path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644
            )
        except OSError as error:
            raise LedgerError(
                f"{path}: cannot append decisions ({error.strerror}); make its directory first, "
                "or give another decisions_path"
            ) from error
        self.pending: deque[bytes] = deque()
        self._flushing = threading.Lock()
        self._flushed_s = 0.0
        self._lost = 0
        self._dropped = 0
        self._broken_line = False
        atexit.register(self.flush)

    def append(self, line: bytes) -> int:
        """Returns how many lines were lost so far. Host thread."""
        self.pending.append(line)
        if len(line) > DECISION_BYTES:
            self.flush(FLUSH_S)  # the ring has not got the whole of it
        elif (
            time.monotonic() - self._flushed_s > FLUSH_S
            or len(self.pending) >= PENDING_LINES
            or self._descriptor is None
        ):
            self.flush()
        if len(self.pending) > LAYOUT.decisions.slots:  # a file system that blocks has blocked another thread
            self._dropped += self._take() is not None
        return self._lost + self._dropped

    def flush(self, wait_s: float = 0.0) -> None:
        """Hands the file what waits, unless another thread is about it. Any thread."""
        if not self._flushing.acquire(timeout=wait_s):
            return
        try:
            self._flushed_s = time.monotonic()
            lines = [line for _ in range(len(self.pending)) if (line := self._take()) is not None]
            if lines:
                self._write(lines)
        finally:
            self._flushing.release()

    def _take(self) -> bytes | None:
        """The oldest line that waits; None when another thread was faster."""
        try:
            return self.pending.popleft()
        except IndexError:
            return None

    def _write(self, lines: list[bytes]) -> None:
        whole = b"\n".join((*([b""] if self._broken_line else []), *lines, b""))
        try:
            written = 0 if self._descriptor is None else os.write(self._descriptor, whole)
        except OSError:
            # Full disk, full pipe, lost mount: the host path must not stop for a log. The loss is counted.
            written = 0
        if written == len(whole):
            self._broken_line = False
            return
        if written:
            self._broken_line = not whole[:written].endswith(b"\n")
        taken = whole[:written].count(b"\n") - whole.startswith(b"\n")
        self._lost += len(lines) - max(0, taken)

    def close(self) -> None:
        self.flush(_CLOSE_S)
        atexit.unregister(self.flush)
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def compact(record: Mapping[str, object]) -> bytes:
    """One line of JSON without its end; what JSON does not know is written as text."""
    return _encode(record if isinstance(record, dict) else dict(record)).encode()


def shortened(record: Mapping[str, object]) -> bytes:
    """The entries of ``record``, in their order, that fit into the ring, and ``"truncated": true``."""
    kept: dict[str, object] = {"truncated": True}
    for key, value in record.items():
        if len(compact({**kept, key: value})) <= DECISION_BYTES:
            kept[key] = value
    return compact(kept)
