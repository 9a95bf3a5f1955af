"""A time budget leaves all arms with nearly as many trials, starts none that would not fit, and hides none."""

from __future__ import annotations

import functools
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fixture import ARMS, RunBuilder
from typer.testing import CliRunner

from harness import session as session_room
from harness.arms import TrialPlan, expand
from harness.cli import app
from harness.live import LiveView
from harness.request import RunRequest
from harness.scenario import find_scenario, load
from harness.session import Job, Session
from harness.store import RunStore, load_schema, safe_name
from harness.time_budget import TimeBudget, rounds
from reports import write_all


class Clock:
    """Stands still but for the trials."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


SCENARIOS = ("dp-pinned-hang", "dp-idle-burst")
scenario = functools.cache(lambda name: load(find_scenario(name)))


class Whole:
    """Ranks on a cluster that works."""

    def broken(self) -> None:
        return None


def planned(names: Sequence[str] = ("dp-retract",), trials: int = 5) -> list[tuple[TrialPlan, ...]]:
    return [expand(scenario(name), "sim", trials) for name in names]


def counts(plans: Sequence[TrialPlan]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for plan in plans:
        key = (plan.scenario, plan.arm_string)
        found[key] = found.get(key, 0) + 1
    return found


def test_without_a_budget_jobs_run_one_after_the_other() -> None:
    jobs = planned(SCENARIOS, 2)
    (only,) = rounds(jobs, whole=False)
    assert [plan for _, plan in only] == [plan for trials in jobs for plan in trials]
    assert [place for place, _ in only] == sorted(place for place, _ in only)


def test_with_one_every_arm_of_every_scenario_has_its_turn_in_each_round() -> None:
    jobs = planned(SCENARIOS, 3)
    found = rounds(jobs, whole=True)
    assert len(found) == 3
    arms = set(counts([plan for trials in jobs for plan in trials]))
    for number, trials in enumerate(found):
        assert {(plan.scenario, plan.arm_string) for _, plan in trials} == arms
        assert {plan.index for _, plan in trials} == {number}


def test_a_trial_that_would_not_end_in_time_is_not_started() -> None:
    clock, ((first, *_),) = Clock(), planned()
    budget = TimeBudget(100.0, clock)
    assert budget.fits(first), "nothing is known of it yet"
    budget.took(first, 30.0)
    budget.took(first, 20.0)
    clock.now_s += 70.0
    assert budget.fits(first), "the longest one would just end in time"
    clock.now_s += 0.5
    assert not budget.fits(first)


def test_an_arm_without_a_trial_is_held_to_the_longest_of_its_scenario() -> None:
    clock = Clock()
    hang, burst = planned(SCENARIOS, 1)
    budget = TimeBudget(100.0, clock)
    budget.took(hang[0], 80.0)
    clock.now_s += 30.0
    assert not budget.fits(hang[1])
    assert budget.fits(burst[0])
    clock.now_s += 70.0
    assert not budget.fits(burst[0]), "the time is over"


def drive(
    monkeypatch: pytest.MonkeyPatch, names: Sequence[str], seconds: dict[str, float], budget_s: float
) -> tuple[list[TrialPlan], tuple[str, ...]]:
    """Runs a session whose trials only take time: ``seconds`` by scenario, or by scenario and arm."""
    clock, ran = Clock(), []

    @contextmanager
    def nothing_up(session: Session, world: int, view: LiveView) -> Iterator[tuple[None, Whole]]:
        yield None, Whole()

    def trial(self: Session, scenario: Any, plan: TrialPlan, *_: object, **__: object) -> None:
        ran.append(plan)
        clock.now_s += seconds.get(f"{plan.scenario} {plan.arm_string}", seconds.get(plan.scenario, 1.0))

    monkeypatch.setattr(Session, "_up", nothing_up)
    monkeypatch.setattr(Session, "_trial", trial)
    monkeypatch.setattr(session_room.time, "monotonic", clock)
    scenarios = tuple(scenario(name) for name in names)
    jobs = [Job(*pair) for pair in zip(scenarios, planned(names, 20), strict=True)]
    request = RunRequest(scenarios=scenarios, time_budget_s=budget_s)
    session = Session(request, RunStore(Path(), {}), simulation=True)
    budget = TimeBudget
    monkeypatch.setattr(session_room, "TimeBudget", lambda total_s: budget(total_s, clock))
    left_out = session.run(jobs)
    first = sum(plan.index == 0 for plan in ran)
    assert clock.now_s <= 1000.0 + budget_s or len(ran) == first, (
        "what is known to take too long is not started"
    )
    return ran, left_out


def test_all_arms_get_nearly_as_many_trials_however_long_each_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SCENARIOS
    slow = "dp-pinned-hang pinned=pinned,symm_mem=off"
    ran, left_out = drive(
        monkeypatch, names, {"dp-pinned-hang": 3.0, slow: 40.0, "dp-idle-burst": 7.0}, 600.0
    )
    found = counts(ran)
    assert len(found) == len(counts([plan for trials in planned(names, 1) for plan in trials]))
    assert max(found.values()) - min(found.values()) <= 1 and min(found.values()) > 1
    everything = {plan.id for trials in planned(names, 20) for plan in trials}
    assert {plan.id for plan in ran} | set(left_out) == everything
    assert not {plan.id for plan in ran} & set(left_out)


@settings(max_examples=40, deadline=None)
@given(durations_s=st.lists(st.floats(0.5, 50.0), min_size=9, max_size=9), budget_s=st.floats(1.0, 5000.0))
def test_no_arm_gets_two_trials_more_than_another(durations_s: list[float], budget_s: float) -> None:
    arms = sorted(counts([plan for trials in planned(SCENARIOS, 1) for plan in trials]))
    seconds = {f"{name} {arm}": durations_s[place] for place, (name, arm) in enumerate(arms)}
    with pytest.MonkeyPatch.context() as patch:
        ran, left_out = drive(patch, SCENARIOS, seconds, budget_s)
    found = counts(ran)
    assert max(found.get(arm, 0) for arm in arms) - min(found.get(arm, 0) for arm in arms) <= 1
    assert len(ran) + len(left_out) == 20 * len(arms)


# Reports --------------------------------------------------------------------------------------------------


def ended_by_its_budget(out: Path, ran: int = 12, plan: int = 100) -> Path:
    """``plan`` trials of two arms of which ``ran`` have run and are healthy."""
    ids = {
        (arm["pinned"], seed): safe_name(f"pinned={arm['pinned']}-s{seed}")
        for arm in ARMS
        for seed in range(plan)
    }
    rows = [
        {"id": ids[arm["pinned"], seed], "scenario": "dp-pinned-hang", "arm": dict(arm)}
        for seed in range(plan)
        for arm in ARMS
    ]
    builder = RunBuilder(out, planned=rows)
    for seed in range(ran):
        for arm in ARMS:
            builder.trial(arm, seed)
    left_out = [row["id"] for row in rows[2 * ran :]]
    return builder.finish(time_budget_s=7200.0, left_out=left_out)


def test_what_the_budget_left_out_is_told_and_makes_nothing_unknown(tmp_path: Path) -> None:
    run = ended_by_its_budget(tmp_path)
    result = write_all(run)
    assert (result.verdict, result.exit, result.never_run) == ("pass", 0, ())
    report = json.loads((run / "report.json").read_text())
    jsonschema.validate(report, load_schema("report"))
    assert len(report["left_out"]) == 176 and report["time_budget_s"] == 7200.0
    for arm in report["scenarios"][0]["arms"]:
        assert (arm["planned"], arm["left_out"], arm["hangs"]["n"]) == (100, 88, 12)
        assert "no hang in 12 trials, rate at most 26.5 %" in arm["why"]
        assert "the time budget left out 88 of 100 planned trials" in arm["why"]
    told = "24 of 200 planned trials were run in 2.0 h, 12 of 100 in each arm"
    assert told in (run / "summary.md").read_text() and told in (run / "report.html").read_text()
    suite = ET.parse(run / "junit.xml").getroot()
    assert (suite.get("errors"), suite.get("skipped"), suite.get("tests")) == ("0", "2", "26")
    assert "hangrig_run_trials_left_out 176.0" in (run / "metrics.prom").read_text()


def test_a_planned_trial_that_is_missing_without_a_reason_is_still_unknown(tmp_path: Path) -> None:
    run = ended_by_its_budget(tmp_path)
    document = json.loads((run / "run.json").read_text())
    lost = document["left_out"].pop()
    (run / "run.json").write_text(json.dumps(document))
    result = write_all(run)
    assert (result.verdict, result.exit, result.never_run) == ("unknown", 3, (lost,))


def test_a_rate_that_too_few_trials_cannot_show_stays_unknown(tmp_path: Path) -> None:
    """Fewer trials are judged by their interval: 0 of 3 does not say that a hang of at least 30 % is gone."""
    builder = RunBuilder(
        tmp_path, planned=[{"id": "left", "scenario": "dp-pinned-hang", "arm": dict(ARMS[1])}]
    )
    for seed in range(3):
        builder.trial(ARMS[1], seed, expected="sometimes", min_rate=0.3, tokens_expected="any")
    result = write_all(builder.finish(left_out=["left"]))
    assert result.verdict == "unknown"
    assert "too few trials to say that it is gone; the time budget left out 1 of 4" in result.arms[0].why


def test_a_dry_run_tells_the_order_under_a_budget() -> None:
    done = CliRunner().invoke(app, ["run", "dp-retract", "--time-budget", "2h", "--dry-run"])
    assert done.exit_code == 0 and "in 7200 s, in rounds" in done.stdout
    done = CliRunner().invoke(app, ["run", "dp-retract", "--time-budget", "2h", "--dry-run", "--json"])
    assert json.loads(done.stdout)["time_budget_s"] == 7200.0
