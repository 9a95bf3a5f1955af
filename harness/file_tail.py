"""The end of a file that somebody else writes: logs and records are worth most where they stop."""

from __future__ import annotations

import os
from pathlib import Path


def read_tail(path: Path, limit_bytes: int) -> bytes:
    """The last ``limit_bytes`` of a file, from a line's beginning when something was cut. Raises OSError."""
    with path.open("rb") as file:
        size_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(0, size_bytes - limit_bytes))
        tail = file.read(limit_bytes)
    if size_bytes > limit_bytes and b"\n" in tail:
        return tail[tail.index(b"\n") + 1 :]
    return tail
