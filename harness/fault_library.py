"""The standard faults: what may be broken at any site. Registered by name; ``fault_model.py`` has what all share.

Each class says at which sites it can act. What is particular to the built-in engine's scheduler, plan or heap is in
``fault_engine.py``.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

import harness.fault_engine  # noqa: F401 - registers its own
from harness.fault_model import Fault, register
from harness.faults import SITES, Passing

ALL = tuple(SITES)
HOST = tuple(name for name, site in SITES.items() if site.thread == "host")
SKIPPABLE = tuple(name for name, site in SITES.items() if site.skip)
_LONG_S = 86_400.0
_TAKEN_S = 10.0
"""For a thread to take a lock that nobody else knows."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@register
class Raise(Fault):
    """The code at the site gets an exception; on a stream's thread it is an error of the device."""

    name: Literal["raise"]
    sites: ClassVar[tuple[str, ...]] = ALL
    error: str = "RuntimeError"
    """The class of a built-in exception."""
    message: str = "broken on purpose"

    @field_validator("error")
    @classmethod
    def _is_an_exception(cls, value: str) -> str:
        found = getattr(builtins, value, None)
        if not (isinstance(found, type) and issubclass(found, Exception)):
            raise ValueError(f"{value!r} is no built-in exception; give one such as RuntimeError")
        return value

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        raise getattr(builtins, self.error)(self.message)


@register
class Skip(Fault):
    """The code leaves out what it was about to do: a collective, a part of a layer, a wait, a record."""

    name: Literal["skip"]
    sites: ClassVar[tuple[str, ...]] = SKIPPABLE

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing.skip()


@register
class Delay(Fault):
    """The thread that passes the site takes ``seconds`` longer, asleep or computing. At a stream's site on a real
    accelerator ``sleep`` keeps the stream busy; the other two hold up the host, which enqueues there."""

    name: Literal["delay"]
    sites: ClassVar[tuple[str, ...]] = ALL
    seconds: Seconds
    how: Literal["sleep", "compute", "child"] = "sleep"
    """``compute`` compiles on the thread itself, in ever other places of the compiler; ``child`` has a process of
    its own do so and waits for it, as compilers that call ptxas or a C compiler do."""

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        if self.how == "sleep":
            (passing.stall or time.sleep)(self.seconds)
        elif self.how == "child":
            spin = f"import time\nend = time.monotonic() + {self.seconds}\nwhile time.monotonic() < end: pass"
            subprocess.run([sys.executable, "-S", "-c", spin], stdin=subprocess.DEVNULL, check=True)
        else:
            tree, deadline_s = ast.parse(_source()), time.monotonic() + self.seconds
            while time.monotonic() < deadline_s:
                ast.unparse(tree)  # in Python, so that a stack shows the places


def _source() -> str:
    """A module of some size for a compiler to work on."""
    nested = "(a if b(c[d + 1], *e) else {f: [g for g in h if g % 3]})"
    return "\n".join(f"def kernel_{at}(b, *h):\n    return {nested} + {nested}" for at in range(200))


@register
class Block(Fault):
    """The thread waits for something that never comes. At a stream's site on a real accelerator the stream does."""

    name: Literal["block"]
    sites: ClassVar[tuple[str, ...]] = ALL

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        if passing.stall is None:
            threading.Event().wait(_LONG_S)
        else:
            passing.stall(None)


@register
class TakeLock(Fault):
    """A thread takes a Python lock and dies with it; the thread that passes the site wants it."""

    name: Literal["take_lock"]
    sites: ClassVar[tuple[str, ...]] = HOST

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        lock = threading.Lock()
        taker = threading.Thread(target=lock.acquire, name="lock-taker", daemon=True)
        taker.start()
        taker.join(_TAKEN_S)
        _wait_for_the_lock(lock)


def _wait_for_the_lock(lock: threading.Lock) -> None:
    lock.acquire(timeout=_LONG_S)


@register
class HoldGil(Fault):
    """A native call keeps the interpreter's lock: no thread of the process runs Python any more."""

    name: Literal["hold_gil"]
    sites: ClassVar[tuple[str, ...]] = ALL
    seconds: Seconds = _LONG_S

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        _native_call_that_keeps_the_gil(round(self.seconds * 1e6))


def _native_call_that_keeps_the_gil(microseconds: int) -> None:
    library = ctypes.PyDLL(None)  # unlike CDLL it does not let the lock go
    # One call, or other threads would have their turn between two; usleep may refuse a second and more.
    left_s = microseconds // 1_000_000
    while left_s:
        left_s = library.sleep(left_s)  # a signal ends it early
    library.usleep(microseconds % 1_000_000)


@register
class Stop(Fault):
    """The process is stopped (SIGSTOP); with ``seconds``, it is continued after that time."""

    name: Literal["stop"]
    sites: ClassVar[tuple[str, ...]] = ALL
    seconds: Seconds | None = None

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        own = os.getpid()
        if self.seconds is None:
            os.kill(own, signal.SIGSTOP)
            return
        wake = f"import os, time; time.sleep({self.seconds}); os.kill({own}, {int(signal.SIGCONT)})"
        with subprocess.Popen([sys.executable, "-S", "-c", wake], stdin=subprocess.DEVNULL):
            os.kill(own, signal.SIGSTOP)


@register
class Kill(Fault):
    """The process is killed (SIGKILL), as the out-of-memory killer does."""

    name: Literal["kill"]
    sites: ClassVar[tuple[str, ...]] = ALL

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@register
class FillDisk(Fault):
    """A write meets a full disk: the site gets the kernel's own ENOSPC."""

    name: Literal["fill_disk"]
    sites: ClassVar[tuple[str, ...]] = HOST

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        descriptor = os.open("/dev/full", os.O_WRONLY)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # a system without /dev/full's promise


@register
class BlockPipe(Fault):
    """A write to a pipe that nobody reads: it blocks once the pipe is full."""

    name: Literal["block_pipe"]
    sites: ClassVar[tuple[str, ...]] = HOST

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        memory["reader"], writer = os.pipe()  # kept open, or the write would fail instead
        _write_log(writer, b"x" * (1 << 20))


def _write_log(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@register
class Burn(Fault):
    """Busy processes beside the rank for ``seconds``: whoever else wants a core is starved, the watchdog too."""

    name: Literal["burn"]
    sites: ClassVar[tuple[str, ...]] = HOST
    seconds: Seconds
    processes: Annotated[int, Field(ge=1, le=64)] = 4

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        spin = f"import time\nend = time.monotonic() + {self.seconds}\nwhile time.monotonic() < end: pass"
        memory["burning"] = [
            subprocess.Popen([sys.executable, "-S", "-c", spin], stdin=subprocess.DEVNULL)
            for _ in range(self.processes)
        ]  # each ends by itself


@register
class HoardCores(Fault):
    """A cooperative kernel takes the cores that are free and waits for the rest, holding its own."""

    name: Literal["hoard_cores"]
    sites: ClassVar[tuple[str, ...]] = ("device.cores",)

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing.change("whole", False)


# Collectives -----------------------------------------------------------------------------------------------


@register
class ChangeShape(Fault):
    """One rank brings another number of rows."""

    name: Literal["change_shape"]
    sites: ClassVar[tuple[str, ...]] = ("comm.enqueue",)
    rows: Annotated[int, Field(ge=1)]

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        tensor = passing["tensor"]
        passing.change("tensor", tensor.new_zeros((self.rows, *tensor.shape[1:])))


@register
class ChangeDtype(Fault):
    """One rank brings another type."""

    name: Literal["change_dtype"]
    sites: ClassVar[tuple[str, ...]] = ("comm.enqueue",)
    dtype: Literal["float16", "bfloat16", "float64"] = "bfloat16"

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        import torch  # here: whoever only reads a scenario needs none of it

        passing.change("tensor", passing["tensor"].to(getattr(torch, self.dtype)))


@register
class ChangeGroup(Fault):
    """A collective of the control plane goes to another group."""

    name: Literal["change_group"]
    sites: ClassVar[tuple[str, ...]] = ("comm.host",)
    to: str

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing.change("group", self.to)


@register
class ChangeRoot(Fault):
    """A broadcast has another root on this rank."""

    name: Literal["change_root"]
    sites: ClassVar[tuple[str, ...]] = ("comm.host",)
    to: Annotated[int, Field(ge=0)]

    def finds(self, passing: Passing) -> bool:
        return passing.values.get("operation") == "broadcast"

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing.change("root", self.to)


@register
class ChangeStream(Fault):
    """A collective is enqueued on another stream than the communicator's own."""

    name: Literal["change_stream"]
    sites: ClassVar[tuple[str, ...]] = ("comm.enqueue",)
    to: Literal["copy", "update"] = "copy"

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing.change("stream", self.to)


@register
class Reorder(Fault):
    """A collective is held back and enqueued after the next one of ``after_group``."""

    name: Literal["reorder"]
    sites: ClassVar[tuple[str, ...]] = ("comm.enqueue",)
    held_group: str
    after_group: str
    times: Annotated[int, Field(ge=0)] = 2
    """Holding one back is one time, putting it behind the other the second."""

    def begun(self, passing: Passing, memory: Mapping[str, Any]) -> bool:
        return "held" in memory and passing["group"] == self.after_group and not passing["capturing"]

    def finds(self, passing: Passing) -> bool:
        return passing["group"] == self.held_group and not passing["capturing"]

    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing.skip()
        if passing["group"] == self.after_group:
            passing["enqueue"]()
            memory.pop("held")()
        else:
            memory["held"] = passing["enqueue"]
