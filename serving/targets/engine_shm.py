"""Shared memory that a foreign engine leaves behind: files in ``/dev/shm`` whose makers were killed.

Engines remove theirs at an orderly end at best; a harness that starts servers by the hundred would fill the memory
of its machine. Removed is only what the ended processes had mapped and what was made since they were started.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

_ROOT = Path("/dev/shm")
_log = logging.getLogger("hangrig.engine")


def of(pids: Iterable[int]) -> set[Path]:
    """The files there that living processes have mapped, as far as we may look."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:  # gone meanwhile
            continue
        paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if f" {_ROOT}/" in line)
        found |= {Path(path) for path in paths if not path.endswith(" (deleted)")}
    return found


def remove(paths: Iterable[Path], since: float) -> list[Path]:
    """Removes those that exist still and are not older than ``since`` (seconds of the file system's clock); returns
    them. What cannot be removed is logged."""
    removed = []
    for path in sorted(paths):
        try:
            if path.parent == _ROOT and path.stat().st_ctime >= since:
                path.unlink()
                removed.append(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            _log.warning("%s: cannot be removed (%s)", path, error.strerror)
    return removed
