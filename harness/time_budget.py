"""A time budget: in which order trials run under it, and which of them still fit.

A budget that ends a run must leave all arms with nearly as many trials, also those of the last scenario. So under
one the trials run in rounds, one trial of each arm of every scenario in turn, and the round in which a trial does
not fit any more is the last: two arms never differ by more than one trial. Not here: running them (``session.py``)
and what fewer trials are worth (``reports.verdicts``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from harness.arms import TrialPlan

Round: TypeAlias = list[tuple[int, TrialPlan]]
"""Trials with the index of the job that each is of."""


def rounds(jobs: Sequence[Sequence[TrialPlan]], *, whole: bool) -> list[Round]:
    """The trials of all jobs in running order. ``whole``: a round has one trial of each arm; else there is one
    round, job after job, as planned."""
    planned = [(place, plan) for place, trials in enumerate(jobs) for plan in trials]
    if not whole:
        return [planned]
    indices = sorted({plan.index for _, plan in planned})
    return [[one for one in planned if one[1].index == index] for index in indices]


class TimeBudget:
    """What is left of the time, against what trials took so far. ``budget_s`` None: everything fits."""

    def __init__(self, budget_s: float | None, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._ends_s = float("inf") if budget_s is None else now_s() + budget_s
        self._longest_s: dict[tuple[str, str], float] = {}
        """By scenario and arm: with the start of its ranks, a reference and a capture where it had them."""

    def fits(self, plan: TrialPlan) -> bool:
        """Whether a trial of this arm would end in time if it took as long as the longest one so far.

        An arm that has had no trial is expected to take as long as the longest of its scenario; where there was
        none either, its trial is started as long as there is any time.
        """
        now_s = self._now_s()
        return now_s < self._ends_s and now_s + self._expected_s(plan) <= self._ends_s

    def took(self, plan: TrialPlan, duration_s: float) -> None:
        key = (plan.scenario, plan.arm_string)
        self._longest_s[key] = max(duration_s, self._longest_s.get(key, 0.0))

    def _expected_s(self, plan: TrialPlan) -> float:
        own = self._longest_s.get((plan.scenario, plan.arm_string))
        if own is not None:
            return own
        return max((s for (name, _), s in self._longest_s.items() if name == plan.scenario), default=0.0)
