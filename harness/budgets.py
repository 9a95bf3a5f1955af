"""How long a rank may stand still before anybody wonders, learned from how long it stood still and went on.
Pure.

A budget belongs to one rank in one phase: a rank that is always ten times slower gets budgets of its own.
Here are the numbers only; what is concluded from an exceeded budget is the watchdog's.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

_GAPS_KEPT = 256
_TAIL_QUANTILE = 0.99

_Pause: TypeAlias = tuple[float, int]  # seconds, work


@dataclass(frozen=True, slots=True)
class WatchdogSettings:
    """All durations in seconds, as the agent's own clock shows them."""

    sample_period_s: float = 0.1
    """How often the agent means to take a sample."""
    floor_s: float = 1.5
    """No budget is shorter. A stop that is continued within this time is nothing."""
    ceiling_s: float = 30.0
    """No learned budget is longer; also what a warm rank gets in a phase that nobody has left yet, until it
    has settled."""
    budget_multiple: float = 8.0
    """A learned budget is this multiple of the tail (99th percentile) of the pauses seen in that phase."""
    startup_s: float = 60.0
    """Budget of the first occurrence of a phase on a cold rank: compilation, first step. May exceed the
    ceiling."""
    warm_steps: int = 20
    """A rank that moved by this many steps is no longer cold."""
    settled_steps: int = 20
    """After so many steps in one trial the pauses of all phases together speak for one that it never left."""
    patient_phases: frozenset[str] = frozenset(
        {"startup", "load", "warmup", "capture", "compile", "register"}
    )
    """Phases whose every occurrence may be a first one; they always have the startup budget."""
    parked_phase: str = "parked"
    """The phase of a host that waits for the driver. It owes nobody anything."""
    proof_still_s: float = 0.5
    """How long ranks must have stood still before their ledgers, read one after the other, prove a wait."""
    confirm_after_s: float = 0.5
    """A suspicion is confirmed by a sample at least this much later."""
    idle_s: float = 3.0
    """Budget of a rank that all others wait for while it does nothing that can be seen: its host sleeps, its
    streams have no work left, and it and its children get no more than ``idle_share`` of a processor. No such
    budget is below the floor. In patient phases there is none."""
    idle_share: float = 0.05
    """Of one processor: what a process gets that only waits (threads that look after streams, heartbeats)."""
    starved_multiple: float = 5.0
    """A gap between two samples counts for at most this many periods: beyond it the agent itself was starved,
    or the machine was suspended, and what ranks did meanwhile is not known."""
    livelock_s: float = 10.0
    """Steps that move for this long without one finished token are a livelock, if they were futile."""
    livelock_steps: int = 50
    """The least number of such steps."""
    livelock_futile: int = 10
    """The least number of them seen to be futile: they retracted, or ran nothing although requests waited."""

    def __post_init__(self) -> None:
        if not 0.0 < self.sample_period_s <= self.floor_s <= self.ceiling_s:
            raise ValueError(
                f"watchdog: 0 < sample_period_s ({self.sample_period_s}) <= floor_s ({self.floor_s}) <= "
                f"ceiling_s ({self.ceiling_s}) does not hold"
            )
        if self.idle_s <= 0.0 or not 0.0 < self.idle_share < 1.0:
            raise ValueError("watchdog: idle_s must be above 0, and idle_share between 0 and 1")
        if self.confirm_after_s <= 0.0 or self.budget_multiple < 1.0 or self.starved_multiple < 1.0:
            raise ValueError(
                "watchdog: confirm_after_s must be above 0, budget_multiple and starved_multiple at least 1"
            )


class Budgets:
    """The pauses of one rank, by phase.

    A pause is learned with the work that its step announced (tokens), where a ledger tells: one prefill after a
    thousand decodes is owed what its tokens need, though the phase bears the same name.
    """

    def __init__(self, settings: WatchdogSettings) -> None:
        self._settings = settings
        self._pauses: dict[str, deque[_Pause]] = {}
        self.left: set[str] = set()
        """Phases that this rank has entered and left again."""

    def learn(self, phase: str, gap_s: float, work: int = 0) -> None:
        """The rank stood still for ``gap_s`` while in ``phase``, and went on. ``work`` 0: not known."""
        self._pauses.setdefault(phase, deque(maxlen=_GAPS_KEPT)).append((gap_s, work))

    def budget_s(
        self, phase: str, *, warm: bool, settled: bool, left_by_others: bool, work: int = 0
    ) -> float:
        """Seconds that the rank may stand still in ``phase`` now.

        ``warm``: it has made ``warm_steps``. ``settled``: it has made ``settled_steps``, so its usual pauses
        are known; a phase that it was never seen to leave was too short for the samples. ``left_by_others``:
        another rank has come through this phase. ``work``: what its step announced.
        """
        settings = self._settings
        if phase in settings.patient_phases:
            return max(settings.startup_s, settings.ceiling_s)
        if phase in self.left:
            return self._learned_s(list(self._pauses.get(phase, ())), work)
        if not warm:
            return max(settings.startup_s, settings.floor_s)
        return self.pause_s(work) if left_by_others or settled else settings.ceiling_s

    def pause_s(self, work: int = 0) -> float:
        """Learned from the pauses of all phases together."""
        return self._learned_s([pause for pauses in self._pauses.values() for pause in pauses], work)

    def _learned_s(self, pauses: list[_Pause], work: int) -> float:
        settings = self._settings
        tail_s = _tail_s(pauses)
        most = max((known for _, known in pauses), default=0)
        if 0 < most < work:
            comparable = [pause for pause in pauses if 2 * pause[1] >= work]
            tail_s = max(tail_s, _tail_s(comparable)) if comparable else tail_s * work / most
        elif work:
            tail_s = max(tail_s, _tail_s([pause for pause in pauses if 2 * pause[1] >= work]))
        return min(max(settings.budget_multiple * tail_s, settings.floor_s), settings.ceiling_s)


def _tail_s(pauses: list[_Pause]) -> float:
    if not pauses:
        return 0.0
    gaps = sorted(gap_s for gap_s, _ in pauses)
    return gaps[min(len(gaps) - 1, math.ceil(_TAIL_QUANTILE * len(gaps)) - 1)]
