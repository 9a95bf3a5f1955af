"""Rates and tests of counts against published and computed values; how many trials a bound takes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from harness.rates import (
    at_least,
    at_most,
    more_often,
    observation,
    plan_trials,
    rate,
    sign_test,
    trials_for,
)


@pytest.mark.parametrize(
    ("k", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.3085),  # Clopper and Pearson's own tables, two-sided 95 %
        (10, 10, 0.6915, 1.0),
        (5, 10, 0.1871, 0.8129),
        (1, 20, 0.0013, 0.2487),
        (15, 16, 0.6977, 0.9984),
        (0, 0, 0.0, 1.0),
    ],
)
def test_rates_have_the_exact_interval(k: int, n: int, low: float, high: float) -> None:
    found = rate(k, n)
    assert [found.low, found.high] == pytest.approx([low, high], abs=5e-5)
    assert found.to_json() == {"k": k, "n": n, "low": found.low, "high": found.high, "confidence": 0.95}


def test_an_interval_covers_the_true_rate_at_least_as_often_as_it_says() -> None:
    for true in (0.02, 0.3, 0.77):
        covered = sum(
            float(stats.binom.pmf(k, 16, true))
            for k in range(17)
            if rate(k, 16).low <= true <= rate(k, 16).high
        )
        assert covered >= 0.95


@pytest.mark.parametrize(("k", "n"), [(-1, 4), (5, 4)])
def test_impossible_counts_are_refused(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="0 <= k <= n"):
        rate(k, n)


def test_observation_words() -> None:
    found = [observation(k, n) for k, n in ((0, 0), (0, 9), (1, 9), (9, 9))]
    assert found == ["never", "never", "sometimes", "always"]


# --- one-sided bounds and the trials that they take ---


def test_one_sided_bounds_are_the_ends_of_a_wider_two_sided_interval() -> None:
    for k, n in ((0, 7), (3, 40), (40, 40)):
        wide = rate(k, n, 0.90)
        assert (at_least(k, n, 0.95), at_most(k, n, 0.95)) == pytest.approx((wide.low, wide.high))


@pytest.mark.parametrize(
    ("bound", "confidence", "hangs", "trials"),
    [
        (0.01, 0.95, 0, 299),  # ln 0.05 / ln 0.99 = 298.07
        (0.01, 0.95, 1, 473),  # 0.99**473 + 473 * 0.01 * 0.99**472 = 0.0498
        (0.01, 0.99, 0, 459),
        (0.05, 0.95, 0, 59),
        (0.001, 0.95, 0, 2995),
        (0.5, 0.5, 0, 1),
    ],
)
def test_trials_that_a_bound_takes(bound: float, confidence: float, hangs: int, trials: int) -> None:
    assert trials_for(bound, confidence, hangs) == trials


@given(bound=st.floats(0.002, 0.6), confidence=st.floats(0.5, 0.999), hangs=st.integers(0, 6))
def test_that_many_trials_show_the_bound_and_one_fewer_do_not(
    bound: float, confidence: float, hangs: int
) -> None:
    trials = trials_for(bound, confidence, hangs)
    assert at_most(hangs, trials, confidence) <= bound * (1 + 1e-9)
    if trials - 1 > hangs:
        assert at_most(hangs, trials - 1, confidence) > bound * (1 - 1e-9)


@pytest.mark.parametrize(
    ("bound", "confidence", "hangs", "said"),
    [
        (0.0, 0.95, 0, "bound must lie between 0 and 1"),
        (1.0, 0.95, 0, "bound must lie between 0 and 1"),
        (0.01, 1.0, 0, "confidence must lie between 0 and 1"),
        (math.nan, 0.95, 0, "bound must lie"),
        (0.01, 0.95, -1, "negative"),
        (1e-9, 0.95, 0, "more than"),
    ],
)
def test_what_no_trials_can_show_is_refused(bound: float, confidence: float, hangs: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        trials_for(bound, confidence, hangs)


def test_a_plan_without_power_allows_no_hang() -> None:
    plan = plan_trials(0.01)
    assert (plan.trials, plan.allowed, plan.power) == (299, 0, 1.0)


@pytest.mark.parametrize("true_rate", [0.0005, 0.001, 0.003])
@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
def test_a_plan_reaches_its_power_and_one_hang_fewer_would_not(true_rate: float, power: float) -> None:
    plan = plan_trials(0.01, true_rate=true_rate, power=power)
    assert stats.binom.cdf(plan.allowed, plan.trials, true_rate) == pytest.approx(plan.power)
    assert plan.power >= power
    assert at_most(plan.allowed, plan.trials) <= 0.01 < at_most(plan.allowed, plan.trials - 1)
    for fewer in range(plan.allowed):
        assert stats.binom.cdf(fewer, trials_for(0.01, hangs=fewer), true_rate) < power


@pytest.mark.parametrize(("true_rate", "power"), [(0.01, 0.5), (0.02, 0.5), (-0.1, 0.5), (0.0, 1.0)])
def test_a_plan_that_cannot_come_true_is_refused(true_rate: float, power: float) -> None:
    with pytest.raises(ValueError, match="must lie"):
        plan_trials(0.01, true_rate=true_rate, power=power)


# --- tests of one arm against another ---


@pytest.mark.parametrize(
    ("counts", "p"),
    [
        ((3, 4, 1, 4), 17 / 70),  # the lady tasting tea (Fisher, The Design of Experiments, 1935)
        ((4, 4, 0, 4), 1 / 70),
        ((0, 9, 5, 9), 1.0),
        ((5, 5, 0, 0), 1.0),
    ],
)
def test_fishers_test(counts: tuple[int, int, int, int], p: float) -> None:
    assert more_often(*counts) == pytest.approx(p)


@given(n=st.integers(1, 40), m=st.integers(1, 40), first=st.integers(0, 40), second=st.integers(0, 40))
def test_fishers_test_is_scipys(n: int, m: int, first: int, second: int) -> None:
    k, j = min(first, n), min(second, m)
    wanted = stats.fisher_exact([[k, n - k], [j, m - j]], alternative="greater").pvalue
    assert more_often(k, n, j, m) == pytest.approx(wanted)


@pytest.mark.parametrize(("more", "fewer", "p"), [(0, 0, 1.0), (5, 0, 1 / 32), (1, 1, 0.75), (0, 4, 1.0)])
def test_the_sign_test(more: int, fewer: int, p: float) -> None:
    assert sign_test(more, fewer) == pytest.approx(p)
