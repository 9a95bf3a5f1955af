"""Numbers from trials: percentiles, ratios of medians. Rates are in `harness.rates`.

Pure functions of plain numbers; nothing here knows a run, a file or a sink. The unit of statistics is the
trial: samples inside one trial share a process, a workload and a machine's mood, so an interval resamples
whole trials and never single samples. "Too few samples" is an answer here, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from harness.rates import CONFIDENCE

PRACTICAL_THRESHOLD = 0.05
"""A ratio nearer to 1 than this is not worth a change, however sure it is."""
MIN_TRIALS = 5
"""Fewer blocks than this on a side and a bootstrap over blocks has too few distinct resamples to trust."""
MIN_SAMPLES = 30
"""Fewer samples than this on a side, over all its trials, and a median is not compared."""
RESAMPLES = 4000

RatioVerdict: TypeAlias = Literal["faster", "slower", "same", "too-few-samples"]
_Floats: TypeAlias = npt.NDArray[np.float64]
_Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one set of latencies, in the unit of the samples (microseconds everywhere in reports)."""

    p50: float
    p95: float
    p99: float
    count: int

    def to_json(self) -> dict[str, Any]:
        return {"p50": self.p50, "p95": self.p95, "p99": self.p99, "count": self.count}


def percentiles(samples: Sequence[float]) -> Percentiles | None:
    """None for no samples: a percentile of nothing is not zero."""
    if not samples:
        return None
    p50, p95, p99 = np.percentile(np.asarray(samples, dtype=np.float64), (50.0, 95.0, 99.0))
    return Percentiles(float(p50), float(p95), float(p99), len(samples))


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of one side over median of the other, with its interval; below 1 means faster.

    ``ratio``, ``low`` and ``high`` are None where they cannot be computed. ``why`` is one clause in words.
    """

    ratio: float | None
    low: float | None
    high: float | None
    verdict: RatioVerdict
    why: str

    def to_json(self) -> dict[str, Any]:
        return {
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "verdict": self.verdict,
            "why": self.why,
        }


def ratio_of_medians(
    trials: Sequence[Sequence[float]],
    against: Sequence[Sequence[float]],
    *,
    seed: int,
    threshold: float = PRACTICAL_THRESHOLD,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    min_trials: int = MIN_TRIALS,
    min_samples: int = MIN_SAMPLES,
) -> Ratio:
    """Compares two arms; each inner sequence holds the samples of one trial.

    The interval is a percentile bootstrap that draws whole trials, widened for few trials (the "expanded
    percentile" interval of Hesterberg, The American Statistician 69, 2015: a plain one with five blocks
    covers well under what it claims). A difference must be sure (the interval leaves out 1) *and* big (the
    ratio is at least ``threshold`` away from 1). ``same`` needs an interval that lies inside the threshold
    on both sides. Whatever lies between is undecided, and more trials would decide it: too few samples.
    """
    own, other = _blocks(trials), _blocks(against)
    if not own or not other:
        return Ratio(None, None, None, "too-few-samples", "no samples on one side")
    base = float(np.median(np.concatenate(other)))
    if base <= 0.0:
        return Ratio(None, None, None, "too-few-samples", "the median compared with is zero: below the clock")
    point = float(np.median(np.concatenate(own))) / base
    fewest = min(len(own), len(other))
    if fewest < min_trials:
        why = f"{fewest} trials on the smaller side, {min_trials} needed"
        return Ratio(point, None, None, "too-few-samples", why)
    smallest = min(sum(map(len, own)), sum(map(len, other)))
    if smallest < min_samples:
        why = f"{smallest} samples on the smaller side, {min_samples} needed"
        return Ratio(point, None, None, "too-few-samples", why)
    generator = np.random.default_rng(seed)
    above, below = (_resampled_medians(side, generator, resamples) for side in (own, other))
    low, high = _expanded_interval(above, below, fewest, confidence)
    verdict, why = _judge(point, low, high, threshold)
    return Ratio(point, low, high, verdict, why)


def _judge(point: float, low: float, high: float, threshold: float) -> tuple[RatioVerdict, str]:
    upper, lower = 1.0 + threshold, 1.0 / (1.0 + threshold)
    if high < 1.0 and point <= lower:
        return "faster", f"the interval leaves out 1 and the difference passes {threshold * 100:g} %"
    if low > 1.0 and point >= upper:
        return "slower", f"the interval leaves out 1 and the difference passes {threshold * 100:g} %"
    if lower < low and high < upper:
        return "same", f"the whole interval lies within {threshold * 100:g} % of 1"
    return (
        "too-few-samples",
        f"the interval decides neither a difference of {threshold * 100:g} % nor its absence",
    )


def _blocks(trials: Sequence[Sequence[float]]) -> list[_Floats]:
    return [np.asarray(samples, dtype=np.float64) for samples in trials if len(samples)]


def _expanded_interval(above: _Floats, below: _Floats, fewest: int, confidence: float) -> tuple[float, float]:
    t = float(stats.t.ppf(0.5 + confidence / 2.0, fewest - 1))
    tail = float(stats.norm.cdf(-math.sqrt(fewest / (fewest - 1)) * t))
    usable = below > 0.0  # a draw of blocks below the clock's resolution has no ratio
    low, high = np.quantile(above[usable] / below[usable], (tail, 1.0 - tail))
    return float(low), float(high)


def _resampled_medians(blocks: list[_Floats], generator: np.random.Generator, resamples: int) -> _Floats:
    """Medians of ``resamples`` draws of whole blocks, exact, without building any drawn sample.

    The pooled samples are sorted once; ``below[b, i]`` counts the samples of block b among the first i. A
    draw gives each block a weight, and the rank that a median needs is found by bisection over i.
    """
    order = np.argsort(np.concatenate(blocks), kind="stable")
    pooled = np.concatenate(blocks)[order]
    owner = np.repeat(np.arange(len(blocks)), [len(block) for block in blocks])[order]
    below = np.zeros((len(blocks), len(pooled) + 1), dtype=np.int64)
    for block in range(len(blocks)):
        np.cumsum(owner == block, out=below[block, 1:])
    draws = generator.integers(0, len(blocks), size=(resamples, len(blocks)))
    weights = np.stack([np.bincount(draw, minlength=len(blocks)) for draw in draws]).astype(np.int64)
    total = weights @ below[:, -1]
    lower = pooled[_rank(weights, below, (total + 1) // 2) - 1]
    upper = pooled[_rank(weights, below, total // 2 + 1) - 1]
    medians: _Floats = (lower + upper) / 2.0
    return medians


def _rank(weights: _Ints, below: _Ints, wanted: _Ints) -> _Ints:
    """For each draw the least i such that the first i pooled samples weigh ``wanted`` or more."""
    low = np.ones(len(weights), dtype=np.int64)
    high = np.full(len(weights), below.shape[1] - 1, dtype=np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        enough = (weights * below[:, middle].T).sum(axis=1) >= wanted
        high = np.where(enough, middle, high)
        low = np.where(enough, low, middle + 1)
    return low
