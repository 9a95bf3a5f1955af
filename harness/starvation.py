"""Whether the observer itself was starved: how late its samples came, and how far budgets widen for it. Pure.

An observer that is late saw nothing meanwhile, and whoever starves it may well starve the ranks: their pauses grow
as its own do. So budgets widen by what the observer lost of its own time, for as long as that is recent. Work that
the observer chose to do (a capture) is no starvation; the caller leaves it out of ``late_s``.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
"""Lateness counts for so long."""
MOST = 10.0
"""No budget widens by more than this factor."""


class Starvation:
    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self._recent: deque[tuple[float, float, float]] = deque()  # when, gap, how much of it was lost
        self._now_s = 0.0
        self.total_s = 0.0
        """Seconds by which samples were late, since the beginning."""
        self.longest_s = 0.0

    def observe(self, gap_s: float, late_s: float | None = None) -> bool:
        """One more sample, ``gap_s`` after the one before and ``late_s`` later than it was meant; None: whatever it
        is beyond a period. Returns whether it was late enough to speak of: by more than a period."""
        self._now_s += gap_s
        late_s = max(0.0, gap_s - self._period_s if late_s is None else min(late_s, gap_s))
        starved = late_s > self._period_s
        lost_s = late_s if starved else 0.0
        self._recent.append((self._now_s, gap_s, lost_s))
        while self._recent[0][0] < self._now_s - WINDOW_S:
            self._recent.popleft()
        self.total_s += lost_s
        self.longest_s = max(self.longest_s, lost_s)
        return starved

    @property
    def share(self) -> float:
        """Of the last seconds, those that were lost; 0 to 1."""
        whole_s = max(WINDOW_S, sum(gap_s for _, gap_s, _ in self._recent))
        return sum(lost_s for _, _, lost_s in self._recent) / whole_s

    @property
    def widening(self) -> float:
        """The factor by which budgets widen now; 1 for an observer that has its time."""
        return min(MOST, 1.0 / max(1.0 - self.share, 1.0 / MOST))
