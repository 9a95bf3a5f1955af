"""Trials counted: by pool and arm, what is left out and why, and two arms side by side. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.gate.model import Comparison, Pool, Trial
from harness.rates import more_often, rate, sign_test

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True)
class ArmCount:
    """One pinned value under one setting of the other toggles, in one pool."""

    pool: Pool
    pinned: str
    others: str
    counted: int
    hangs: int
    left_out: Mapping[str, int]
    """Trials that do not count, by reason."""

    def to_json(self) -> dict[str, Any]:
        return {
            "scenario": self.pool.scenario,
            "model": self.pool.model,
            "pinned": self.pinned,
            "others": self.others,
            "hangs": rate(self.hangs, self.counted).to_json(),
            "left_out": dict(self.left_out),
        }


def in_pools(trials: Sequence[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """By pool, the one with most trials that count under ``pinned`` first: it is what a bound is about."""
    pools: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        pools.setdefault(trial.pool.key, []).append(trial)
    return dict(sorted(pools.items(), key=lambda item: (-counted(item[1], "pinned")[1], item[0])))


def counted(trials: Sequence[Trial], pinned: str) -> tuple[int, int]:
    """Hangs, and trials that count, of one pinned value."""
    own = [trial for trial in trials if trial.pinned == pinned and trial.counts]
    return sum(trial.hung for trial in own), len(own)


def arm_counts(trials: Sequence[Trial]) -> tuple[ArmCount, ...]:
    """Every arm of every pool, in the order of ``in_pools``."""
    found = []
    for members in in_pools(trials).values():
        arms: dict[tuple[str, str], list[Trial]] = {}
        for trial in members:
            arms.setdefault((trial.pinned, trial.others), []).append(trial)
        for (pinned, others), own in sorted(arms.items()):
            reasons = Counter(_left_out(trial) for trial in own if not trial.counts)
            hangs, number = counted(own, pinned)
            found.append(ArmCount(own[0].pool, pinned, others, number, hangs, dict(sorted(reasons.items()))))
    return tuple(found)


def _left_out(trial: Trial) -> str:
    if trial.spoiled:
        return trial.spoiled
    return trial.weak if trial.known else trial.outcome


# --- two arms ----------------------------------------------------------------------------------------------


def pairs(trials: Sequence[Trial], one: str, other: str) -> list[tuple[Trial, Trial]]:
    """Trials of two pinned values with the same run, other toggles and seed, of which both ends are known.

    A trial repeated in another run is another pair; one without a partner says nothing about a difference.
    """
    sides: tuple[dict[_Key, Trial], ...] = ({}, {})
    for trial in trials:
        for value, side in zip((one, other), sides, strict=True):
            if trial.pinned == value and trial.known and trial.seed is not None:
                side[trial.run, trial.others, trial.seed] = trial
    first, second = sides
    return [(first[key], second[key]) for key in first if key in second]


def compared(trials: Sequence[Trial], one: str, other: str) -> list[tuple[Trial, Trial]]:
    """Pairs in which the tokens of both were held against the same reference."""
    return [(a, b) for a, b in pairs(trials, one, other) if a.compared and b.compared]


def hang_comparison(trials: Sequence[Trial], arm: str, against: str, alpha: float) -> Comparison:
    """Fisher's exact test over pairs: do more of ``arm`` hang?"""
    both = pairs(trials, arm, against)
    k, other = sum(a.hung for a, _ in both), sum(b.hung for _, b in both)
    p = more_often(k, len(both), other, len(both))
    return Comparison(arm, against, "hang", k, len(both), other, p, p <= alpha)


def token_comparison(trials: Sequence[Trial], arm: str, against: str, alpha: float) -> Comparison:
    """The sign test over pairs: do requests of ``arm`` differ from the reference more often?

    The pair is the unit: after one wrong token the rest of a request, and of the batch, may follow from it.
    """
    both = compared(trials, arm, against)
    more = sum(a.tokens_differ > b.tokens_differ for a, b in both)
    fewer = sum(a.tokens_differ < b.tokens_differ for a, b in both)
    p = sign_test(more, fewer)
    return Comparison(arm, against, "tokens", more, len(both), fewer, p, p <= alpha)
