"""What a foreign engine prints, read while it grows: its last lines, and those that speak of trouble.

Not here: when it is read and what becomes of it (``engine_witness.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

TROUBLES = (
    "watchdog", "timeout", "timed out", "traceback", "exception", "error", "fatal", "killed", "sigkill", "sigquit",
    "sigabrt", "sigterm", "enforcenotmet", "no available shared memory", "out of memory", "died", " dead",
    "core dumped", "already in use",
)  # fmt: skip
"""Words of trouble in the log of any engine, in lower case."""
PORT_TAKEN = ("already in use", "errno 98", "eaddrinuse")
_KEPT_LINES = 200
_LINE_CHARACTERS = 500
_READ_BYTES = 1 << 20
"""At most so much in one go: what an engine prints without end must not hold up who reads."""
_PART_BYTES = 1 << 16
"""Kept of a line that does not end."""


class LogTail:
    """``read`` is called by one thread at a time. ``troubles`` and ``harmless`` are a dialect's, on top of
    ``TROUBLES``."""

    def __init__(self, path: Path, troubles: Sequence[str] = (), harmless: Sequence[str] = ()) -> None:
        self._path = path
        self._troubles = (*TROUBLES, *troubles)
        self._harmless = tuple(harmless)
        self._offset = 0
        self._part = b""
        self._last: deque[str] = deque(maxlen=_KEPT_LINES)
        self.port_taken = False
        """Some line said that an address was in use."""

    def read(self, each: Callable[[str], None] | None = None) -> list[str]:
        """The lines of trouble since the last call; ``each`` is given every new line. A line counts when it has
        ended."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read(_READ_BYTES)
        except OSError:  # not there yet, or its folder has gone
            return []
        self._offset += len(new)
        *ended, part = (self._part + new).split(b"\n")
        self._part = part[-_PART_BYTES:]
        said = []
        for raw in ended:
            line = raw.decode(errors="replace").rstrip("\r")[:_LINE_CHARACTERS]
            if not line.strip():
                continue
            self._last.append(line)
            if each is not None:
                each(line)
            if self._speaks_of_trouble(line.lower()):
                said.append(line)
        return said

    def last(self, count: int) -> list[str]:
        """The last lines, one that has not ended included."""
        part = self._part.decode(errors="replace").strip()[:_LINE_CHARACTERS]
        lines = [*self._last, part] if part else list(self._last)
        return lines[-count:]

    def _speaks_of_trouble(self, line: str) -> bool:
        self.port_taken |= any(word in line for word in PORT_TAKEN)
        if any(word in line for word in self._harmless):
            return False
        return any(word in line for word in self._troubles)
