"""Fault sites: what the engine, the device and the comm layer pass through, and what may happen there.

A site is a name. Code that passes one asks ``if faults.ACTIVE is not None`` and, only then, visits it: with
no fault active a site costs one attribute test. Jitter, the visitor here, breaks nothing: it delays operations
at the boundaries of copies, events and collectives.

Not here: which faults a scenario chooses (``scenario.py``) and the defects of the simulated device
(``devices/sim.py``), which model a platform and not a mistake of the engine.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

SITES = (
    "copy.h2d",
    "copy.d2h",
    "event.record",
    "event.wait",
    "graph.update",
    "graph.replay",
    "host.reuse",
    "comm.before",
    "comm.after",
    "rank.step",
)


class FaultError(ValueError):
    """A site that does not exist, or a parameter out of range."""


class Visitor(Protocol):
    """Something that acts where a site is passed, on the thread that passes it."""

    def visit(self, site: str, **context: Any) -> None: ...


class Chain:
    """Several visitors, in order."""

    def __init__(self, visitors: Iterable[Visitor]) -> None:
        self._visitors = tuple(visitors)

    def visit(self, site: str, **context: Any) -> None:
        for visitor in self._visitors:
            visitor.visit(site, **context)


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

    def visit(self, site: str, **context: Any) -> None:
        if site not in self.options.sites:
            return
        delay_s = self._draw(site)
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


ACTIVE: Visitor | None = None
"""What is visited now in this process; None (the usual case) costs one attribute test at each site."""


def activate(*visitors: Visitor) -> None:
    """Makes the visitors active in this process, replacing those before; none at all switches them off."""
    global ACTIVE  # noqa: PLW0603 - one attribute test per site is the point
    ACTIVE = None if not visitors else visitors[0] if len(visitors) == 1 else Chain(visitors)
