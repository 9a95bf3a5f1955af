"""Statistics against published and computed values, and the answers that are not numbers."""

from __future__ import annotations

import numpy as np
import pytest

from reports.statistics import (
    RESAMPLES,
    _resampled_medians,
    percentiles,
    ratio_of_medians,
)


def test_percentiles() -> None:
    found = percentiles([float(v) for v in range(101)])
    assert found is not None
    assert found.to_json() == {"p50": 50.0, "p95": 95.0, "p99": 99.0, "count": 101}
    assert percentiles([]) is None


def trials(median: float, number: int = 8, samples: int = 60, spread: float = 0.1) -> list[list[float]]:
    generator = np.random.default_rng(int(median * 100) + number)
    return [(median * generator.lognormal(0.0, spread, samples)).tolist() for _ in range(number)]


@pytest.mark.parametrize(
    ("own", "against", "verdict"),
    [
        (trials(0.7), trials(1.0), "faster"),
        (trials(1.3), trials(1.0), "slower"),
        (trials(1.0, samples=400), trials(1.0, number=9, samples=400), "same"),
        (trials(1.02, samples=4000, spread=0.02), trials(1.0, samples=4000, spread=0.02), "same"),
        (trials(1.0, spread=0.9), trials(1.05, spread=0.9), "too-few-samples"),
        (trials(0.5, number=4), trials(1.0), "too-few-samples"),
        (trials(0.5, samples=3), trials(1.0), "too-few-samples"),
        ([], trials(1.0), "too-few-samples"),
        (trials(1.0), [[]], "too-few-samples"),
        (trials(1.0), [[0.0] * 50] * 8, "too-few-samples"),
    ],
)
def test_ratio_verdicts(own: list[list[float]], against: list[list[float]], verdict: str) -> None:
    found = ratio_of_medians(own, against, seed=1)
    assert found.verdict == verdict, found
    assert found.why


def test_a_sure_but_small_difference_is_not_called_faster() -> None:
    own, against = trials(0.97, samples=4000, spread=0.02), trials(1.0, samples=4000, spread=0.02)
    found = ratio_of_medians(own, against, seed=1)
    assert found.high is not None
    assert found.high < 1.0
    assert found.verdict == "same"
    assert ratio_of_medians(own, against, seed=1, threshold=0.01).verdict == "faster"


def test_the_same_seed_gives_the_same_interval() -> None:
    first, again, other = (ratio_of_medians(trials(0.7), trials(1.0), seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.low != other.low


def test_trials_are_resampled_and_not_samples() -> None:
    """Two kinds of trial, many equal samples in each: only whole trials explain the spread."""
    own = [[1.0] * 500] * 4 + [[2.0] * 500] * 4
    found = ratio_of_medians(own, [[1.0] * 500] * 8, seed=1)
    assert (found.low, found.high) == (1.0, 2.0)


def test_resampled_medians_are_those_of_the_drawn_samples() -> None:
    generator = np.random.default_rng(5)
    blocks = [generator.normal(10, 3, size) for size in (7, 1, 12, 4, 9)]
    found = _resampled_medians(blocks, np.random.default_rng(11), 200)
    draws = np.random.default_rng(11).integers(0, len(blocks), size=(200, len(blocks)))
    plain = [float(np.median(np.concatenate([blocks[i] for i in draw]))) for draw in draws]
    assert found.tolist() == pytest.approx(plain)


def test_the_interval_of_five_trials_is_wide_enough() -> None:
    """A plain bootstrap over five blocks covers about 85 %; the widened one must keep its promise."""
    generator = np.random.default_rng(0)
    covered = 0
    for seed in range(120):
        sides = [
            [(generator.lognormal(0, 0.2, 30) * generator.lognormal(0, 0.1)).tolist() for _ in range(5)]
            for _ in range(2)
        ]
        found = ratio_of_medians(sides[0], sides[1], seed=seed, resamples=RESAMPLES // 2)
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 1.0 <= found.high
    assert covered >= 0.9 * 120
