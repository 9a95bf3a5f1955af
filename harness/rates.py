"""How often something happened and what that says: exact intervals and tests, and the trials that a bound takes.

Here: pure functions of counts. Not here: what is counted, percentiles and ratios (`reports.statistics`), and
what an answer is good for (`gate.py`). The unit of every count is the trial: what happens inside one trial shares
a process, a workload and a machine's mood.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from scipy import stats

CONFIDENCE = 0.95
MOST_TRIALS = 10_000_000
"""A plan that needs more than this is refused: nobody runs it."""

Observation: TypeAlias = Literal["never", "sometimes", "always"]


@dataclass(frozen=True, slots=True)
class Rate:
    """``k`` of ``n`` with a two-sided interval [low, high]; all three numbers are probabilities in [0, 1]."""

    k: int
    n: int
    low: float
    high: float
    confidence: float

    def to_json(self) -> dict[str, Any]:
        return {"k": self.k, "n": self.n, "low": self.low, "high": self.high, "confidence": self.confidence}


def rate(k: int, n: int, confidence: float = CONFIDENCE) -> Rate:
    """The Clopper-Pearson interval of ``k`` in ``n``: exact, so never narrower than it claims.

    With ``n`` = 0 nothing is known and the interval is [0, 1]. Raises ValueError unless 0 <= k <= n.
    """
    _within(confidence=confidence)
    one_sided = (1.0 + confidence) / 2.0
    return Rate(k, n, at_least(k, n, one_sided), at_most(k, n, one_sided), confidence)


def at_most(k: int, n: int, confidence: float = CONFIDENCE) -> float:
    """The one-sided upper Clopper-Pearson bound: a higher rate shows ``k`` or fewer with less than 1 - confidence.

    1 for ``n`` = 0. Raises ValueError unless 0 <= k <= n.
    """
    _counts(k, n)
    _within(confidence=confidence)
    return 1.0 if k == n else float(stats.beta.ppf(confidence, k + 1, n - k))


def at_least(k: int, n: int, confidence: float = CONFIDENCE) -> float:
    """The one-sided lower bound, as `at_most`; 0 for ``k`` = 0."""
    _counts(k, n)
    _within(confidence=confidence)
    return 0.0 if k == 0 else float(stats.beta.ppf(1.0 - confidence, k, n - k + 1))


def observation(k: int, n: int) -> Observation:
    """How often it happened. Nothing in nothing tried is ``never``; the interval says how little that is."""
    if k == 0:
        return "never"
    return "always" if k == n else "sometimes"


def percent(share: float) -> str:
    """``0.1234`` as ``12.3 %``; whole numbers without a decimal; never 0 or 100 for what is not."""
    figure = share * 100.0
    if 0.0 < figure < 0.1:
        return "<0.1 %"
    if 99.9 < figure < 100.0:
        return ">99.9 %"
    return f"{figure:.1f}".removesuffix(".0") + " %"


# --- how many trials ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoundPlan:
    """``trials`` with at most ``allowed`` hangs among them show a rate of at most ``bound`` with ``confidence``.

    ``power``: how probable it is to get there when the true rate is ``true_rate``. A rate as high as ``bound``
    gets there by luck with at most 1 - confidence.
    """

    trials: int
    allowed: int
    bound: float
    confidence: float
    true_rate: float
    power: float

    def to_json(self) -> dict[str, Any]:
        return {"schema": 1, **asdict(self)}

    def words(self) -> str:
        hangs = {0: "without a hang", 1: "with at most 1 hang"}.get(
            self.allowed, f"with at most {self.allowed} hangs"
        )
        rare, sure = percent(self.bound), percent(self.confidence)
        return (
            f"{self.trials} trials {hangs} show that hangs are rarer than {rare}, with {sure} confidence "
            f"(one-sided, exact)\nat a true rate of {percent(self.true_rate)} so few hangs come with probability "
            f"{percent(self.power)}; at {rare} or more with {percent(1.0 - self.confidence)} at the most"
        )


def trials_for(bound: float, confidence: float = CONFIDENCE, hangs: int = 0) -> int:
    """The least number of trials that, with ``hangs`` hangs among them, puts `at_most` at or below ``bound``.

    Without a hang this is ln(1 - confidence) / ln(1 - bound), rounded up: 299 for 0.01 and 0.95. Raises
    ValueError for a bound or confidence outside (0, 1), negative hangs, or more than MOST_TRIALS.
    """
    _within(bound=bound, confidence=confidence)
    if hangs < 0:
        raise ValueError(f"hangs cannot be negative, as {hangs}")
    if not _shows(MOST_TRIALS, hangs, bound, confidence):
        raise ValueError(f"a bound of {bound:g} at {confidence:g} takes more than {MOST_TRIALS} trials")
    low, high = hangs, MOST_TRIALS  # low never shows it, high does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _shows(middle, hangs, bound, confidence) else (middle, high)
    return high


def plan_trials(
    bound: float, confidence: float = CONFIDENCE, *, true_rate: float = 0.0, power: float = 0.0
) -> BoundPlan:
    """The fewest trials, with the hangs allowed among them, that reach the bound with ``power`` at ``true_rate``.

    With ``power`` 0 no hang is allowed. Raises ValueError as `trials_for` does, and where ``true_rate`` is not
    below ``bound``: no number of trials would show it.
    """
    _within(bound=bound, confidence=confidence)
    if not 0.0 <= power < 1.0:
        raise ValueError(f"power must lie between 0 and 1, not {power}")
    if not 0.0 <= true_rate < bound:
        raise ValueError(
            f"the true rate must lie below the bound {bound:g} that is to be shown, not {true_rate}"
        )
    allowed = 0
    while True:
        trials = trials_for(bound, confidence, allowed)
        reached = float(stats.binom.cdf(allowed, trials, true_rate))
        if reached >= power:
            return BoundPlan(trials, allowed, bound, confidence, true_rate, reached)
        allowed += 1


def _shows(trials: int, hangs: int, bound: float, confidence: float) -> bool:
    """`at_most` <= ``bound``, by the binomial tail that defines it."""
    return trials > hangs and float(stats.binom.cdf(hangs, trials, bound)) <= 1.0 - confidence


# --- one arm against another -------------------------------------------------------------------------------


def more_often(k: int, n: int, against_k: int, against_n: int) -> float:
    """Fisher's exact test, one-sided: how probable are ``k`` or more of ``n``, if both arms have one rate.

    1 where an arm has no trials. Raises ValueError for impossible counts.
    """
    _counts(k, n)
    _counts(against_k, against_n)
    if not n or not against_n:
        return 1.0
    return float(stats.hypergeom.sf(k - 1, n + against_n, k + against_k, n))


def sign_test(more: int, fewer: int) -> float:
    """The exact sign test, one-sided, over pairs: how probable are ``more`` or more, if either is as likely.

    Pairs without a difference say nothing and are not counted. 1 where there are none.
    """
    _counts(more, more + fewer)
    return 1.0 if more == 0 else float(stats.binom.sf(more - 1, more + fewer, 0.5))


def _counts(k: int, n: int) -> None:
    if not 0 <= k <= n:
        raise ValueError(f"a rate needs 0 <= k <= n, not k={k}, n={n}")


def _within(**shares: float) -> None:
    for name, value in shares.items():
        if not (0.0 < value < 1.0 and math.isfinite(value)):
            raise ValueError(f"{name} must lie between 0 and 1, not {value}")
