"""Finds the files of a directory and reads each of them once, within bounds. The only part that touches the disk.

Regular files only: a pipe or a device would not end. Links to directories are not followed. What a file is, is
``recognise``'s.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, replace
from pathlib import Path

from harness.ledger_layout import LedgerError
from harness.ledger_reader import LedgerReader
from harness.ledger_snapshot import Snapshot
from harness.offline.recognise import DumpsError, Recognised, recognise

MOST_FILES = 5000
MOST_BYTES = 256 * 2**20
"""Of one file: a recorder of 20,000 entries has 12 MB."""
_SKIPPED = frozenset({".git", "__pycache__", "node_modules"})


@dataclass(frozen=True, slots=True)
class Found:
    """``files`` in the order of their names. ``left_out``: files beyond the bound."""

    files: tuple[Recognised, ...]
    left_out: int


def find_dumps(directory: Path) -> Found:
    """Raises DumpsError where there is no directory to read."""
    try:
        mode = directory.stat().st_mode
    except OSError as error:
        raise DumpsError(
            f"{directory}: {error.strerror or error}; give the directory that holds the dumps"
        ) from None
    if not stat.S_ISDIR(mode):
        raise DumpsError(f"{directory}: is no directory; give the directory that holds the dumps")
    paths: list[Path] = []
    refused: list[OSError] = []
    for folder, folders, names in os.walk(directory, onerror=refused.append):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        paths += [Path(folder) / name for name in sorted(names)]
        if len(paths) > MOST_FILES:
            break
    if refused and not paths:
        raise DumpsError(f"{directory}: {refused[0].strerror}; make it readable")
    chosen = paths[:MOST_FILES]
    found = tuple(
        one for path in chosen if (one := _read(path, str(path.relative_to(directory)))) is not None
    )
    return Found(found, len(paths) - len(chosen))


def _read(path: Path, name: str) -> Recognised | None:
    """None for what is no file."""
    try:
        # Not blocking, and looked at once it is open: a pipe may have taken its place.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return Recognised(name, "damaged", problem=f"cannot be read: {error.strerror or error}")
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            return None
        if about.st_size > MOST_BYTES:
            return Recognised(
                name, "unknown", problem=f"has {about.st_size} bytes; read are at most {MOST_BYTES}"
            )
        try:
            content = file.read(MOST_BYTES)
        except OSError as error:
            return Recognised(name, "damaged", problem=f"cannot be read: {error.strerror or error}")
    found = recognise(name, content)
    return _ledger(path, found) if found.kind == "ledger" and found.snapshot is None else found


def _ledger(path: Path, found: Recognised) -> Recognised:
    try:
        reader = LedgerReader.open(path)
        try:
            snapshot = reader.snapshot()
        finally:
            reader.close()
    except LedgerError as error:
        return replace(found, kind="damaged", problem=str(error).removeprefix(f"{path}: "))
    return replace(found, snapshot=_as_of_its_own_time(snapshot), rank=snapshot.header.rank)


def _as_of_its_own_time(snapshot: Snapshot) -> Snapshot:
    """Read now, perhaps on another machine with another clock: taken at the last sign that is in the file."""
    moments = [snapshot.host.since_ns, snapshot.host.heartbeat_ns]
    for stream in snapshot.streams.values():
        moments += [stream.stamp_ns, *(record.enqueued_ns for record in stream.recent)]
    for group in snapshot.groups.values():
        moments += [record.completed_ns or record.started_ns or record.enqueued_ns for record in group.recent]
    return replace(snapshot, taken_ns=max(moments))
