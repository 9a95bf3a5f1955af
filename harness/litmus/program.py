"""What a litmus program is: a few lines of stream work whose outcome has a name.

A program is set up once on a device and shot many times: ``prepare`` puts memory into a known state, ``body`` is
the few lines that the program is about, ``observe`` names what came of them. Programs are written against
``harness.devices.base`` alone, so that one source runs on every device.

Not here: the programs (``copies.py``, ``reuse.py``, ``graphs.py``, ``groups.py``), which of their outcomes a memory
model forbids (``rules.py``), stress (``bench.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from harness.litmus.bench import Bench

STALLED = "stalled"
"""The program was not through at its deadline."""
DIED = "died"
"""The process that ran it ended by a signal, or without a word."""
ERROR = "error"
"""The device raised an error. It says nothing about an order."""
OTHER = "other"
"""Memory held a value that nobody wrote."""
ALWAYS_BAD = (STALLED, DIED, OTHER)
"""Forbidden in every program and by every model, unless the program says that it may come to a stop."""


class Program(ABC):
    """One litmus test. ``watched``: the outcomes that a broken order shows; the others are as written."""

    name: ClassVar[str]
    family: ClassVar[str]
    """Programs of a family are run under the same stress, at which their control shows itself most often."""
    watched: ClassVar[tuple[str, ...]]
    ranks: ClassVar[int] = 1
    devices: ClassVar[tuple[str, ...]] = ("sim", "cuda", "npu")
    """Where there is something to learn from it."""
    may_stop: ClassVar[bool] = False
    """To stall or to die is an outcome that this program is allowed, and watched like the others."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.device = bench.device
        self.setup()

    @abstractmethod
    def setup(self) -> None:
        """Makes buffers, events and graphs."""

    @abstractmethod
    def prepare(self) -> None:
        """Before each shot, without stress: afterwards all streams are idle."""

    @abstractmethod
    def body(self) -> None:
        """The program. Raises DeviceTimeout where a wait of it passes the shot's deadline."""

    @abstractmethod
    def observe(self) -> str:
        """The outcome, when all streams are idle again."""

    def shoot(self, number: int) -> str:
        """One shot; ``number`` seeds its stress. Raises DeviceTimeout when it stalls."""
        self.bench.begin(number)
        self.prepare()
        self.bench.settle()
        self.bench.side_work()
        self.body()
        self.bench.settle()
        return self.observe()
