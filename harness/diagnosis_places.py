"""Where threads stand, in words: the engine's own line first, and the wait that it is in. Pure."""

from __future__ import annotations

import re

from harness.nemesis_frames import without_machinery
from harness.stacks import Frame, ProcessStacks, is_wait
from harness.stillness import host_thread

_STREAMS = ("compute", "copy", "comm", "update")
_IDLE = ("Worker._main", "get")
"""Innermost frames of a stream thread whose queue is empty."""
_STANDARD = re.compile(r"(?:^|/)lib/python3[.]\d+/(?!(?:site|dist)-packages/)|^<|^[\w.]+$")
_LIBRARIES = re.compile(r"(?:^|/)(?:site|dist)-packages/(?:torch|torch_npu|ray|numpy|zmq|uvloop)/")
_PLUMBING = re.compile(r"(?:^|/)(?:harness/devices/\w+|serving/(?:comm|board|transfer|symmetric))[.]py$")
"""Layers of this project that carry out a caller's wish."""
_TRACEBACK_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)
_OURS = re.compile(r"^(?:.*/)?(?=(?:harness|serving)/[\w/]+[.]py$)")


def host_place(stacks: ProcessStacks) -> str:
    """``_finish (serving/engine.py:277), waiting in synchronize (...)``; empty without a host stack.

    The first is the innermost frame of the engine, the second the outermost wait that it called.
    """
    thread = host_thread(stacks)
    frames = () if thread is None else tuple(frame for frame in thread.frames if not frame.native)
    if thread is None or not frames:
        return words(thread.frames[0]) if thread is not None and thread.frames else ""
    engine = [index for index, frame in enumerate(frames) if _is_engine(frame)]
    at = next((index for index in engine if not is_wait(frames[index])), engine[0] if engine else 0)
    waits = [frame for frame in frames[:at] if is_wait(frame)]
    return words(frames[at]) + (f", waiting in {words(waits[-1])}" if waits else "")


def stream_places(stacks: ProcessStacks) -> str:
    """``compute in Flag.wait, copy idle``: the threads that stand for streams on a simulated device."""
    said = []
    for thread in stacks.threads:
        if thread.role not in _STREAMS or not thread.frames:
            continue
        first = thread.frames[0]
        waits = [frame for frame in thread.frames if is_wait(frame)]
        telling = [frame for frame in waits if not _STANDARD.search(frame.filename)] or waits
        place = telling[0] if telling else first
        said.append(f"{thread.role} {'idle' if first.name in _IDLE else f'in {place.name}'}")
    return ", ".join(said)


def raising_place(traceback: str) -> str:
    """The innermost frame of the engine in the text of the last exception; empty without a traceback."""
    innermost_last = [
        Frame(name, file, int(line)) for file, line, name in _TRACEBACK_FRAME.findall(traceback)
    ]
    frames = without_machinery(innermost_last[::-1])
    engine = [frame for frame in frames if _is_engine(frame)]
    return words((engine or frames)[0]) if frames else ""


def words(frame: Frame) -> str:
    """``name (file:line)``, files of this project from its root."""
    line = f":{frame.line}" if frame.line else ""
    ours = _OURS.sub("", frame.filename)
    return f"{frame.name} ({ours if ours != frame.filename else frame.short_file()}{line})"


def _is_engine(frame: Frame) -> bool:
    return not any(pattern.search(frame.filename) for pattern in (_STANDARD, _LIBRARIES, _PLUMBING))
