"""The cores of the simulated device: what kernels must have at once, and what a running collective holds.

Off unless a device has a number of cores. A collective in flight holds some, which its parts take one after the
other as they start. A *cooperative* kernel needs all cores of the device at once, because its parts wait for each
other. Launched well it takes all or none; where it takes the free ones and waits for the rest (HANGS.md, E2), it
and a collective that has not all of its own wait for each other, and no rank is missing.

Other kernels take no cores here, nor do operations within a graph. Not here: streams (``sim_streams.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from harness import faults
from harness.devices.life import Life

_POLL_S = 100e-6


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """Raises ValueError for numbers that cannot be."""

    total: int = 0
    """Cores of the device; 0 switches the model off."""
    collective: int = 4
    """Cores that a collective in flight holds."""
    part_us: float = 1000.0
    """From the start of one part of a collective to that of the next."""
    cooperative: tuple[str, ...] = ()
    """Labels of the operations that are cooperative kernels."""

    def __post_init__(self) -> None:
        if self.total < 0 or self.part_us < 0.0:
            raise ValueError("cores: the number and the time of a part must not be negative")
        if self.total and not 0 < self.collective < self.total:
            raise ValueError(f"cores: a collective holds 1 to {self.total - 1} of {self.total}")


class Cores:
    """Of one device. Its methods are called on stream threads."""

    def __init__(self, options: CoreOptions, life: Life) -> None:
        self._options = options
        self._life = life
        self._lock = threading.Lock()
        self._free = options.total

    def collective(self) -> AbstractContextManager[None]:
        """Around a collective, from its start to its end."""
        return self._parts() if self._options.total else nullcontext()

    def kernel(self, stream: str, label: str) -> AbstractContextManager[None]:
        """Around an operation of a stream."""
        if label not in self._options.cooperative:
            return nullcontext()
        whole = True
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit("device.cores", stream=stream, label=label, whole=True)
            whole = passing["whole"]
        return self._all(whole)

    @contextmanager
    def _parts(self) -> Iterator[None]:
        held = 0
        try:
            for part in range(self._options.collective):
                if part:
                    self._life.delay(self._options.part_us * 1e-6)
                self._take(1)
                held += 1
            yield
        finally:
            self._give(held)

    @contextmanager
    def _all(self, whole: bool) -> Iterator[None]:
        held = 0
        try:
            while held < self._options.total:
                held += self._take(self._options.total if whole else 1)
            yield
        finally:
            self._give(held)

    def _take(self, count: int) -> int:
        """``count`` cores at once, when they are free. Raises Stopped when the device fails or closes."""
        while True:
            with self._lock:
                if self._free >= count:
                    self._free -= count
                    return count
            self._life.delay(_POLL_S)

    def _give(self, count: int) -> None:
        with self._lock:
            self._free += count
