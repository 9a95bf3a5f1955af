"""Where an operation was enqueued: the line of the engine, seen from the root of the package.

Not here: what is done with it (the ledger keeps it beside each operation).
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from harness import faults

_ROOT = Path(__file__).resolve().parents[2]
_SITES: dict[str, str | None] = {}
_PLUMBING = ("serving/collectives.py", "serving/transfer.py")
"""Layers of the engine that carry out a caller's wish: the caller is the site worth naming."""
_CARRIERS = ("harness/devices/", "harness/fault", "harness/jitter.py")
"""What lies between the engine's line and the stream. On hardware nothing of it does."""
_ARMED = str(_ROOT / "harness" / "fault_model.py")


def call_site() -> str:
    """``serving/engine.py:123``: the nearest caller outside the device, the comm layer and the faults, seen from
    the root of the package; a file elsewhere is named by its last two parts."""
    frame = sys._getframe(1)
    while True:
        filename = frame.f_code.co_filename
        try:
            shown = _SITES[filename]
        except KeyError:
            shown = _SITES[filename] = _shown(filename)
        outer = frame.f_back
        if shown is not None and (faults.ACTIVE is None or not _brought(outer)):
            return f"{shown}:{frame.f_lineno}"
        if outer is None:
            return "?:0"
        frame = outer


def _brought(caller: FrameType | None) -> bool:
    """The frame that it called is a fault's, in whatever file."""
    return caller is not None and caller.f_code.co_filename == _ARMED


def _shown(filename: str) -> str | None:
    path = Path(filename)
    if not path.is_relative_to(_ROOT):
        return "/".join(path.parts[-2:])
    inside = path.relative_to(_ROOT).as_posix()
    return None if inside.startswith(_CARRIERS) or inside in _PLUMBING else inside
