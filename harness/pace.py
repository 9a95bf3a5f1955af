"""How late an observer's samples come because it did not get the processor, and what the kernel says of that.

The observer's own side; what follows from lateness is ``starvation.py``'s.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

_PRESSURE = re.compile(r"^some avg10=([\d.]+)", re.MULTILINE)


class Pace:
    """Call ``begin`` in the observing thread when a sample begins, ``worked`` after work that takes its time."""

    def __init__(self, period_s: float) -> None:
        self.words = ""
        """`` (CPU pressure 87 %)`` when a sample was late and the kernel counts that, else empty."""
        self._period_s = period_s
        self._began_s: float | None = None
        self._cpu_s = 0.0
        self._busy_s = 0.0

    def begin(self) -> float | None:
        """Seconds by which this sample is late: since the one before, without what the observer meant to wait and
        what it did meanwhile (by the clock what it told of, all else by the processor time that it got). None for
        the first one."""
        now_s, cpu_s = time.monotonic(), time.thread_time()
        before_s, self._began_s = self._began_s, now_s
        did_s = self._busy_s + cpu_s - self._cpu_s
        self._cpu_s, self._busy_s = cpu_s, 0.0
        if before_s is None:
            return None
        late_s = max(0.0, now_s - before_s - max(self._period_s, did_s))
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
