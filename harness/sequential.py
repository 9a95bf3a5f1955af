"""When a run may end before all its trials: ``--stop sprt``. Pure: outcomes in, answers out.

The arms that differ only in one toggle are compared, seed by seed, with the arm that has its first (safe) value.
Of each pair of trials it matters whether exactly one of them hung. Two of Wald's sequential probability ratio tests
run on that (A. Wald, Sequential Analysis, 1947; of two proportions by pairs, chapter 6):

===============  ==========================================================================================
which of them    of the pairs that differ, half are the other arm's against ODDS to one, in either direction
how often        pairs differ in RARE of all cases against in FREQUENT: settles arms that both (never) hang
===============  ==========================================================================================

With one arm only, its rate of hangs is RARE against FREQUENT. A difference is found by chance in at most ALPHA of
runs, all questions together (ALPHA is divided by their number), and missed in about BETA per question. A question
that no outcome of the trials left can settle is *never* decided, and is said to be. Not here: running
(``session.py``); the intervals of arms, which take no notice of how a run ended (``rates.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from harness.arms import TrialPlan
from harness.toggles import VALUES

ALPHA = BETA = 0.05
ODDS = 4.0
"""A difference that counts: of the trials that differ, four hung in one arm for each that hung in the other."""
RARE, FREQUENT = 0.01, 0.10
RULE = "sprt"
_HUNG = frozenset({"hang", "livelock", "dead", "stopped"})
_NO_SAY = frozenset({"unknown", "skipped"})

Standing: TypeAlias = Literal["open", "decided", "never"]


@dataclass(frozen=True, slots=True)
class Answer:
    """``standing`` *never*: no outcome of the trials left settles it."""

    question: str
    standing: Standing
    words: str

    def to_json(self) -> dict[str, str]:
        return {"question": self.question, "standing": self.standing, "words": self.words}


class StopError(ValueError):
    """The rule cannot be used on these scenarios; the message says why and what to give."""


def sprt(k: int, n: int, low: float, high: float, alpha: float = ALPHA, beta: float = BETA) -> int:
    """1: the rate is ``high`` rather than ``low``; -1: it is ``low``; 0: not settled. ``k`` of ``n``."""
    ratio = k * math.log(high / low) + (n - k) * math.log((1.0 - high) / (1.0 - low))
    if ratio >= math.log((1.0 - beta) / alpha):
        return 1
    return -1 if ratio <= math.log(beta / (1.0 - alpha)) else 0


@dataclass(slots=True)
class Pair:
    """One arm against another, by seed. ``left``: pairs still to come."""

    question: str
    left: int
    alpha: float = ALPHA
    both: int = 0
    """Pairs in which both or none hung."""
    more: int = 0
    """Pairs in which only the arm hung that is compared."""
    fewer: int = 0

    def answer(self) -> Answer:
        words = self._settled(0, 0, 0)
        found = (
            f"in {self.more} pairs only the one hung, in {self.fewer} only the other, {self.both} were alike"
        )
        if words:
            return Answer(self.question, "decided", f"{words} ({found})")
        outcomes = [(more, self.left - more, 0) for more in range(self.left + 1)]
        outcomes.append((0, 0, self.left))
        if any(self._settled(*outcome) for outcome in outcomes):
            return Answer(self.question, "open", f"not settled yet ({found})")
        return Answer(self.question, "never", f"{self.left} more pairs cannot settle it ({found})")

    def _settled(self, more: int, fewer: int, both: int) -> str:
        """What is settled when so many pairs more have come; empty: nothing."""
        more, fewer = self.more + more, self.fewer + fewer
        differ = more + fewer
        often = ODDS / (1.0 + ODDS)
        up, down = (sprt(k, differ, 0.5, often, alpha=self.alpha / 2.0) for k in (more, fewer))
        if up == 1:
            return "hangs more often"
        if down == 1:
            return "hangs less often"
        if up == down == -1:
            return f"no difference of {ODDS:g} to 1"
        if sprt(differ, differ + self.both + both, RARE, FREQUENT) == -1:
            return f"differs in less than {FREQUENT * 100:g} % of pairs"
        return ""


@dataclass(slots=True)
class Alone:
    """The rate of one arm that has nothing to be compared with."""

    question: str
    left: int
    alpha: float = ALPHA
    hung: int = 0
    trials: int = 0

    def answer(self) -> Answer:
        found = f"{self.hung} of {self.trials} hung"
        settled = sprt(self.hung, self.trials, RARE, FREQUENT, alpha=self.alpha)
        if settled:
            words = (
                f"hangs in {FREQUENT * 100:g} % or more"
                if settled == 1
                else f"hangs in {RARE * 100:g} % or less"
            )
            return Answer(self.question, "decided", f"{words}, of these two ({found})")
        ends = (self.hung, self.hung + self.left)
        if any(sprt(k, self.trials + self.left, RARE, FREQUENT, alpha=self.alpha) for k in ends):
            return Answer(self.question, "open", f"not settled yet ({found})")
        return Answer(self.question, "never", f"{self.left} more trials cannot settle it ({found})")


_Key: TypeAlias = tuple[str, str]  # scenario, arm


@dataclass(slots=True)
class Sequential:
    """All questions of a run."""

    toggle: str | None
    """By which arms are compared; None: no toggle varies."""
    _pairs: dict[tuple[_Key, _Key], Pair] = field(default_factory=dict)
    _alone: dict[_Key, Alone] = field(default_factory=dict)
    _outcomes: dict[tuple[_Key, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, jobs: Sequence[Sequence[TrialPlan]], toggle: str | None = None) -> Sequential:
        """``jobs``: the trials of each scenario. ``toggle`` None: `pinned` where it varies, else the only one that
        does. Raises StopError when there is no such toggle, or several and none was named."""
        made = cls(_chosen([plan for job in jobs for plan in job], toggle))
        for job in jobs:
            made._ask(job)
        for question in made._questions():
            question.alpha = ALPHA / len(made._questions())
        return made

    def observe(self, plan: TrialPlan, outcome: str) -> None:
        """The outcome of trial.json. One that is unknown has no say: its pair does not come."""
        key, seed = _key(plan), plan.seed
        self._outcomes[key, seed] = outcome
        alone = self._alone.get(key)
        if alone is not None:
            alone.left -= 1
            if outcome not in _NO_SAY:
                alone.trials += 1
                alone.hung += outcome in _HUNG
        for (base, other), pair in self._pairs.items():
            if key not in (base, other):
                continue
            outcomes = [self._outcomes.get((side, seed)) for side in (other, base)]
            if None in outcomes:
                continue
            pair.left -= 1
            if _NO_SAY.isdisjoint(outcomes):
                mine, its = (one in _HUNG for one in outcomes)
                pair.both += mine == its
                pair.more += mine and not its
                pair.fewer += its and not mine

    def answers(self) -> tuple[Answer, ...]:
        return tuple(question.answer() for question in self._questions())

    @property
    def over(self) -> bool:
        """More trials would settle nothing."""
        return all(answer.standing != "open" for answer in self.answers())

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": RULE,
            "toggle": self.toggle,
            "alpha": ALPHA,
            "beta": BETA,
            "answers": [answer.to_json() for answer in self.answers()],
        }

    def _questions(self) -> list[Pair | Alone]:
        return [*self._pairs.values(), *self._alone.values()]

    def _ask(self, plans: Sequence[TrialPlan]) -> None:
        arms = {_key(plan): dict(plan.arm) for plan in plans}
        seeds = {key: {plan.seed for plan in plans if _key(plan) == key} for key in arms}
        asked: set[_Key] = set()
        for key, arm in arms.items():
            base = self._base(arm, arms)
            if base is None or base == key or self.toggle is None:
                continue
            asked |= {key, base}
            rest = {name: value for name, value in arm.items() if name != self.toggle}
            where = f"{key[0]}, {self.toggle} {arm[self.toggle]} against {arms[base][self.toggle]}"
            where += f" with {_words(rest)}" if rest else ""
            self._pairs[base, key] = Pair(where, len(seeds[key] & seeds[base]))
        for key in arms:
            if key not in asked:
                self._alone[key] = Alone(f"{key[0]}, {key[1] or 'its only arm'}", len(seeds[key]))

    def _base(self, arm: Mapping[str, str], arms: Mapping[_Key, Mapping[str, str]]) -> _Key | None:
        """The arm that has the toggle's first value and is alike otherwise."""
        if self.toggle is None or self.toggle not in arm:
            return None
        alike = {
            key: other[self.toggle]
            for key, other in arms.items()
            if self.toggle in other and {**other, self.toggle: arm[self.toggle]} == arm
        }
        order = VALUES[self.toggle]
        return min(alike, key=lambda key: order.index(alike[key]))


def _chosen(plans: Sequence[TrialPlan], toggle: str | None) -> str | None:
    values: dict[str, set[str]] = {}
    for plan in plans:
        for name, value in plan.arm.items():
            values.setdefault(name, set()).add(value)
    varied = sorted(name for name, found in values.items() if len(found) > 1)
    if toggle is not None and toggle not in varied:
        said = ", ".join(varied) or "none"
        raise StopError(f"--stop {RULE}:{toggle}: no arms differ in {toggle!r}; toggles that vary: {said}")
    if toggle is None and len(varied) > 1 and "pinned" not in varied:
        said = ", ".join(varied)
        raise StopError(f"--stop {RULE}: several toggles vary ({said}); name one: --stop {RULE}:{varied[0]}")
    return toggle or ("pinned" if "pinned" in varied else next(iter(varied), None))


def _key(plan: TrialPlan) -> _Key:
    return plan.scenario, plan.arm_string


def _words(arm: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={arm[name]}" for name in sorted(arm))
