"""Frames of what breaks an engine on purpose, left out of whatever is read from a stack or a traceback. Pure.

On hardware nobody has them: a diagnosis that could see them would know the fault instead of finding it, and the
line that it names would be the fault's and not the engine's. What a fault calls (a lock, a write, a compiler)
stays, as if the engine's line had called it. Merged stacks keep all frames: they are for people, who may know.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from harness.stacks import Frame, ProcessStacks

_ROOM = "harness/"
"""In the names of all files of the machinery."""
_MACHINERY = re.compile(r"(?:^|/)harness/(?:fault\w*|jitter)[.]py$")
_ARMED = re.compile(r"(?:^|/)harness/fault_model[.]py$")


def is_machinery(filename: str) -> bool:
    """A file of the sites, the faults or the jitter; one that a user brought is known by who calls it."""
    return _MACHINERY.search(filename) is not None


def without_machinery(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """``frames``, innermost first, without those of the machinery and of the file of the fault that it called."""
    if not any(
        _ROOM in frame.filename for frame in frames
    ):  # most stacks: it is asked of each of thousands of ranks
        return tuple(frames)
    brought = {
        inner.filename
        for inner, outer in _calls(frames)
        if _ARMED.search(outer.filename) and outer.name.rsplit(".", 1)[-1] == "visit"
    }
    return tuple(f for f in frames if not is_machinery(f.filename) and f.filename not in brought)


def engine_stacks(stacks: ProcessStacks | None) -> ProcessStacks | None:
    """Stacks as a real engine would show them."""
    if stacks is None:
        return None
    frames = [without_machinery(thread.frames) for thread in stacks.threads]
    if all(len(kept) == len(thread.frames) for kept, thread in zip(frames, stacks.threads, strict=True)):
        return stacks
    threads = tuple(replace(thread, frames=kept) for kept, thread in zip(frames, stacks.threads, strict=True))
    return replace(stacks, threads=threads)


def _calls(frames: Sequence[Frame]) -> list[tuple[Frame, Frame]]:
    """(called, caller) of the frames of Python."""
    python = [frame for frame in frames if not frame.native]
    return list(pairwise(python))
