"""A function in a process of its own: what it takes of memory and time is then its own.

Not here: what is measured (``scale_figures.py``).
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from bench.errors import BenchError

T = TypeVar("T")
_END_S = 5.0


def apart(function: Callable[..., T], *arguments: object, timeout_s: float) -> T:
    """What ``function`` returns. It and its arguments must be importable, as for any spawned process. Raises
    BenchError, with its traceback, where it raises, ends or takes longer; the process is gone in any case."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_main, args=(theirs, function, arguments), name="bench-apart", daemon=True
    )
    process.start()
    theirs.close()
    answered = False
    try:
        if not ours.poll(timeout_s):
            raise BenchError(f"{function.__name__}{arguments} did not end within {timeout_s:g} s")
        answer = ours.recv()
        answered = True
    except EOFError as error:
        raise BenchError(f"{function.__name__}{arguments} ended without an answer") from error
    finally:
        ours.close()
        process.join(_END_S if answered else 0)
        if process.is_alive():
            process.kill()
            process.join(_END_S)
        process.close()
    if isinstance(answer, _Raised):
        raise BenchError(f"{function.__name__}{arguments} failed:\n{answer.text}")
    result: T = answer
    return result


class _Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def _main(pipe: Connection, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception:
        pipe.send(_Raised(traceback.format_exc()))


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    return _status_bytes("VmRSS")


def highest_bytes() -> int:
    """The most that was in use since the start, or since ``forget_highest``."""
    return _status_bytes("VmHWM")


def forget_highest() -> None:
    """Lets ``highest_bytes`` start from what is in use now, where the kernel lets us (proc(5), clear_refs)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the highest of all is then an upper bound


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise BenchError(f"/proc/self/status has no {name}")
