"""A watchdog that is starved itself, and budgets that know a prefill from a decode."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_builder import Group, Rank, Stream
from test_watchdog import PERIOD_S, SETTINGS, Bench, alarms

from harness.budgets import Budgets
from harness.starvation import MOST, WINDOW_S, Starvation
from harness.track import announced
from harness.watchdog import Confirmed, Healthy, RankView, Sample, Suspect, Watchdog

PHASES = ("launch", "agree", "wait-result")


class Healthily:
    """Two ranks that meet in a collective at every step and are never longer about one than their usual pauses."""

    def __init__(self, pauses: Sequence[tuple[float, float]]) -> None:
        self._moves: tuple[list[float], list[float]] = ([], [])
        met_s = 0.0
        for both in pauses:
            for moves, pause_s in zip(self._moves, both, strict=True):
                moves.append(met_s + pause_s)
            met_s = max(moves[-1] for moves in self._moves)
        self.end_s = min(moves[-1] for moves in self._moves)

    def view(self, number: int, at_s: float) -> RankView:
        steps = [bisect_right(moves, at_s) for moves in self._moves]
        rank = Rank(number, phase=PHASES[steps[number] % 3], step=steps[number], changes=2 * steps[number])
        agree = rank.groups["agree"] = Group((0, 1), started=steps[number], done=min(steps))
        if steps[number]:
            agree.add("all_gather", count=steps[number])
        return RankView(number, rank.snapshot(at_s), "sleeping", False)


IMPATIENT = replace(SETTINGS, floor_s=0.2)
pauses = st.floats(0.5, 4.0)
"""The usual range: a factor of eight, as budgets take for granted."""
gaps = st.one_of(st.just(PERIOD_S), st.floats(PERIOD_S, 1.0), st.floats(1.0, 40.0))
torn = st.sampled_from([0.0, 0.5, 0.999])
"""How long before a sample's time a rank was read, as a share of the gap before it."""


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(pauses, pauses), min_size=1, max_size=20),
    st.lists(st.tuples(gaps, torn, torn), min_size=1, max_size=40),
    st.integers(0, 100),
)
def test_no_pattern_of_the_observer_s_gaps_makes_an_alarm_of_healthy_ranks(
    both: list[tuple[float, float]], pattern: list[tuple[float, float, float]], well: int
) -> None:
    ranks = Healthily(list(islice(cycle(both), 600)))
    watchdog = Watchdog(IMPATIENT, 2)
    now_s = 0.0
    for gap_s, *early in [(PERIOD_S, 0.0, 0.0)] * well + pattern * 5:
        now_s += gap_s
        if now_s > ranks.end_s:
            break
        views = tuple(ranks.view(number, now_s - share * gap_s) for number, share in enumerate(early))
        standing = watchdog.observe(Sample(int(now_s * 1e9), views))
        assert isinstance(standing, Healthy), (now_s, standing)


def test_the_property_can_fail_a_rank_that_stands_is_found_once_the_observer_is_back() -> None:
    bench = Bench()
    bench.warm()
    bench.now_s += 20.0
    bench.sample()
    found = alarms(bench.run(MOST * SETTINGS.floor_s + WINDOW_S))
    assert isinstance(found[-1], Confirmed) and found[-1].reason == "stalled"


def test_a_starved_observer_is_patient_for_a_while_and_then_as_before() -> None:
    bench = Bench()
    bench.warm()
    usual_s = bench.watchdog.budget_s(0)
    bench.now_s += 6.0
    for _ in range(60):
        bench.step()
    bench.sample()
    assert bench.watchdog.budget_s(0) > 2 * usual_s
    assert bench.watchdog.starved_s == pytest.approx(6.0 - PERIOD_S)
    assert not alarms(bench.run(WINDOW_S + 1, bench.step))
    assert bench.watchdog.budget_s(0) == pytest.approx(usual_s)


def test_lateness_is_what_the_observer_did_not_mean() -> None:
    starvation = Starvation(0.1)
    assert not starvation.observe(2.0, late_s=0.0)  # two seconds of a capture
    assert (starvation.total_s, starvation.widening) == (0.0, 1.0)
    assert not starvation.observe(0.15)
    assert starvation.observe(5.1)
    assert starvation.total_s == pytest.approx(5.0)
    assert starvation.widening == pytest.approx(2.0)
    for _ in range(round(WINDOW_S / 0.1) + 1):
        starvation.observe(0.1)
    assert (starvation.widening, round(starvation.total_s)) == (1.0, 5)
    starvation.observe(1000.0)
    assert starvation.widening == MOST


def test_a_pause_behind_a_gap_is_learned_as_long_as_the_steps_were() -> None:
    bench = Bench()
    bench.warm()
    before_s = bench.watchdog.budget_s(0)
    for turn in range(3):
        bench.now_s += 20.0
        for _ in range(200):
            bench.step()
        bench.sample()
        bench.run(WINDOW_S + 1, bench.step)
        assert bench.watchdog.budget_s(0) == pytest.approx(before_s), turn


# A prefill is not a decode ---------------------------------------------------------------------------------------

DECODE, PREFILL = 8, 400


def learned(*pauses: tuple[float, int]) -> Budgets:
    budgets = Budgets(SETTINGS)
    budgets.left.add("wait-result")
    for gap_s, work in pauses:
        budgets.learn("wait-result", gap_s, work)
    return budgets


def budget_s(budgets: Budgets, work: int) -> float:
    return budgets.budget_s("wait-result", warm=True, settled=True, left_by_others=True, work=work)


def test_a_long_prefill_after_a_thousand_decodes_has_what_its_tokens_need() -> None:
    budgets = learned(*[(0.1, DECODE)] * 1000)
    assert budget_s(budgets, DECODE) == SETTINGS.floor_s
    assert budget_s(budgets, 2 * DECODE) == SETTINGS.floor_s
    assert budget_s(budgets, 4 * DECODE) == pytest.approx(3.2)
    assert budget_s(budgets, PREFILL) == SETTINGS.ceiling_s
    assert budget_s(budgets, 0) == SETTINGS.floor_s


def test_once_a_prefill_was_seen_its_like_have_a_learned_budget() -> None:
    budgets = learned((0.9, PREFILL), *[(0.1, DECODE)] * 200)
    assert budget_s(budgets, PREFILL) == budget_s(budgets, PREFILL + 50) == pytest.approx(7.2)
    assert budget_s(budgets, DECODE) == SETTINGS.floor_s


def test_what_a_step_announces_is_in_its_decision_or_its_collectives() -> None:
    rank = Rank(0)
    assert announced(rank.snapshot()) == 0
    rank.decisions = [{"tokens": [4, 4]}]
    assert announced(rank.snapshot()) == 8
    rank.decisions.append({"own_tokens": [300], "mode": "prefill"})
    assert announced(rank.snapshot()) == 300
    rank.decisions += [{"tokens": [4, 4]}, {"tokens": [4, 4]}]
    assert announced(rank.snapshot()) == 8
    rank.groups["gather"] = Group((0, 1)).round("all_gather").enter("all_gather", (512, 64))
    assert announced(rank.snapshot()) == 512
    rank.groups["gather"].done = 2
    rank.groups["gather"].round("all_gather")
    assert announced(rank.snapshot()) == 8


def test_a_watchdog_that_saw_decodes_grants_the_first_long_prefill_its_time() -> None:
    def decode() -> None:
        bench.step()
        for rank in bench.ranks:
            rank.decisions = [{"step": rank.step, "tokens": [4, 4], "tokens_out": rank.step, "retracted": []}]

    bench = Bench()
    bench.run(100, decode)
    for rank in bench.ranks:
        rank.groups["gather"] = Group((0, 1)).enter("all_gather", (PREFILL, 64))
        rank.streams["compute"] = Stream([("gemm", rank.step)])
        rank.changes += 1
    assert not alarms(bench.run(SETTINGS.ceiling_s - 1))
    found = alarms(bench.run(3))
    assert isinstance(found[0], Suspect) and found[0].reason == "stalled"
