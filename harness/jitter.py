"""Jitter: seeded delays at the boundaries of copies, events and collectives. It breaks nothing and widens windows.

Not here: the sites that it passes (``faults.py``), and the fault that delays on purpose (``fault_library.py``).
"""

from __future__ import annotations

import math
import random
import threading
import time
from dataclasses import dataclass, field

from harness.faults import SITES, FaultError, Passing


@dataclass(frozen=True, slots=True)
class JitterOptions:
    """Seeded delays. Lengths are log-uniform, as in rr's chaos mode: short ones often, long ones rarely."""

    probability: float = 0.0
    """Share of passes that are delayed, 0 to 1."""
    low_us: float = 1.0
    high_us: float = 2_000.0
    sites: tuple[str, ...] = ("copy.h2d", "copy.d2h", "event.wait", "graph.update", "comm.before")
    longest_share: float = 0.2
    """At most this share of the wall time is spent in delays (of one rank), counted from one second before
    the start so that the first steps are delayed too."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.sites) - set(SITES))
        if unknown:
            raise FaultError(f"jitter.sites: {unknown} do not exist; allowed: {', '.join(SITES)}")
        if not 0.0 <= self.probability <= 1.0:
            raise FaultError(f"jitter.probability: {self.probability} is not between 0 and 1")
        if not 0.0 <= self.longest_share <= 1.0:
            raise FaultError(f"jitter.longest_share: {self.longest_share} is not between 0 and 1")
        if not 0.0 < self.low_us <= self.high_us:
            raise FaultError(
                f"jitter: low_us {self.low_us} must be above 0 and not above high_us {self.high_us}"
            )


@dataclass(slots=True)
class Jitter:
    """Delays the thread that passes a site. For one seed the n-th pass of a site draws the same delay, which is
    left out where it would exceed ``longest_share``."""

    options: JitterOptions
    seed: int
    rank: int
    delayed: int = 0
    _spent_s: float = 0.0
    _started_s: float = field(default_factory=time.monotonic)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _random: dict[str, random.Random] = field(default_factory=dict)

    def visit(self, passing: Passing) -> None:
        if passing.site not in self.options.sites:
            return
        delay_s = self._draw(passing.site)
        if delay_s > 0.0:
            time.sleep(delay_s)

    def _draw(self, site: str) -> float:
        with self._lock:
            source = self._random.get(site)
            if source is None:
                source = self._random[site] = random.Random(f"{self.seed}/{self.rank}/{site}")
            chosen = source.random() < self.options.probability
            exponent = source.uniform(math.log(self.options.low_us), math.log(self.options.high_us))
            if not chosen:
                return 0.0
            delay_s = math.exp(exponent) * 1e-6
            elapsed_s = time.monotonic() - self._started_s + 1.0
            if self._spent_s + delay_s > self.options.longest_share * elapsed_s:
                return 0.0
            self._spent_s += delay_s
            self.delayed += 1
            return delay_s
