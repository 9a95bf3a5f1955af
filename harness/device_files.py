"""The files that an accelerator's libraries write for their ranks, by rank or pid; recorders are asked for theirs.

Here: the pipes that make a rank's monitor thread dump, and which files of a node are which rank's. Nothing raises
for a file that is not there. Not here: where the libraries were told to write (`rank_environment.py`), copying into
the evidence (`device_evidence.py`), and what the files say.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_STATUS = re.compile(r"torch_hccl_status-\d+_.*_(\d+)_\d+\.log")
"""``torch_hccl_status-RANK_MASTER_DEVICE_RANKS_PID_TIME.log`` (torch_npu, ``ProcessGroupHCCL.cpp``)."""
_LOG = re.compile(r"(?:plog|device)-(\d+)_\d+[^/]*\.log")
"""CANN's logs of a process on the host and on its devices: ``debug/plog/plog-PID_TIME.log``,
``debug/device-0/device-PID_TIME.log``."""
_MOST_FILES = 20_000
"""Of a folder of logs that is walked; a night of CANN's default settings leaves some thousands."""
_MTIME_STEP_S = 0.02
"""Times of files come from the kernel's coarse clock, which stands up to a tick behind."""


@dataclass(frozen=True, slots=True)
class Pressed:
    """``why`` is empty where the byte was taken."""

    rank: int
    why: str


def press(prefix: str, rank: int) -> Pressed:
    """Asks the monitor thread of a rank for a dump: torch reads from ``<prefix><rank>.pipe`` about once a second,
    whatever the rank's other threads do (``ProcessGroupNCCL.hpp``, DumpPipe)."""
    if not prefix:
        return Pressed(rank, "it was told of no pipe")
    path = Path(f"{prefix}{rank}.pipe")
    try:
        # Without a reader this fails at once instead of waiting for one.
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Pressed(rank, "its library made no pipe: no default process group, or the recorder is off")
    except OSError as error:
        return Pressed(rank, f"nobody reads from its pipe ({error.strerror})")
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return Pressed(rank, f"{path} is no pipe")
        os.write(descriptor, b"1")
    except OSError as error:
        return Pressed(rank, f"its pipe takes nothing ({error.strerror})")
    finally:
        os.close(descriptor)
    return Pressed(rank, "")


def newest_dump(prefixes: Sequence[str], rank: int, since: float) -> tuple[Path, float] | None:
    """The recorder's file of a rank and its time, if it was written after ``since`` (seconds of the wall clock)."""
    found = []
    for prefix in prefixes:
        path = Path(f"{prefix}{rank}")
        try:
            about = path.stat()
        except OSError:
            continue
        if stat.S_ISREG(about.st_mode) and about.st_size > 0 and about.st_mtime >= since - _MTIME_STEP_S:
            found.append((about.st_mtime, path))
    return (max(found)[1], max(found)[0]) if found else None


def status_files(folder: str, pids: Collection[int]) -> dict[int, list[Path]]:
    """HCCL's status files by pid; a process has one for each size of its groups."""
    found: dict[int, list[Path]] = {}
    for path in sorted(_walk(Path(folder))) if folder else ():
        named = _STATUS.fullmatch(path.name)
        if named is not None and int(named[1]) in pids:
            found.setdefault(int(named[1]), []).append(path)
    return found


def log_files(folders: Sequence[str], pids: Collection[int]) -> dict[int, list[Path]]:
    """CANN's logs by pid, those last written first."""
    found: dict[int, dict[Path, float]] = {}
    for folder in folders:
        for path in _walk(Path(folder)):
            named = _LOG.fullmatch(path.name)
            if named is None or int(named[1]) not in pids:
                continue
            try:
                found.setdefault(int(named[1]), {})[path] = path.stat().st_mtime
            except OSError:
                continue
    return {pid: sorted(times, key=lambda path: (-times[path], path.name)) for pid, times in found.items()}


def _walk(folder: Path) -> Iterator[Path]:
    seen = 0
    for root, _, names in os.walk(folder):
        for name in names:
            yield Path(root) / name
        seen += len(names)
        if seen > _MOST_FILES:
            return
