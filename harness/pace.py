"""How late an observer's samples come because it did not get the processor, what the kernel says of that, and
whether the machine slept.

The observer's own side; what follows from lateness is ``starvation.py``'s.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PRESSURE = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Clocks:
    """Seconds: the clock that stands still while the machine is suspended, the one that goes on, and the processor
    time of the calling thread."""

    monotonic_s: float
    boottime_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Clocks:
        return cls(time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.thread_time())


class Pace:
    """Call ``begin`` in the observing thread when a sample begins, ``worked`` after work that takes its time."""

    def __init__(self, period_s: float, clocks: Callable[[], Clocks] = Clocks.now) -> None:
        self.words = ""
        """`` (CPU pressure 87 %)`` when a sample was late and the kernel counts that, else empty."""
        self.suspended_s = 0.0
        """How long the machine slept between the last two samples."""
        self._period_s = period_s
        self._clocks = clocks
        self._began: Clocks | None = None
        self._busy_s = 0.0

    def begin(self) -> float | None:
        """Seconds by which this sample is late: since the one before, without what the observer meant to wait and
        what it did meanwhile (by the clock what it told of, all else by the processor time that it got). None for
        the first one."""
        before, now = self._began, self._clocks()
        self._began = now
        busy_s, self._busy_s = self._busy_s, 0.0
        if before is None:
            return None
        passed_s = now.monotonic_s - before.monotonic_s
        asleep_s = now.boottime_s - before.boottime_s - passed_s
        # The clocks are read one after the other; less than a period may lie between the readings.
        self.suspended_s = asleep_s if asleep_s > self._period_s else 0.0
        late_s = max(0.0, passed_s - max(self._period_s, busy_s + now.cpu_s - before.cpu_s))
        if late_s > self._period_s:
            self.words = _pressure()
        return late_s

    def worked(self, seconds: float) -> None:
        self._busy_s += seconds


def _pressure() -> str:
    """The share of the last ten seconds in which some task waited for a processor."""
    try:
        found = _PRESSURE.search(Path("/proc/pressure/cpu").read_text())
    except OSError:  # a kernel that does not count it
        return ""
    return f" (CPU pressure {float(found[1]):.0f} %)" if found else ""
