"""The rules behind a verdict, row by row: trials in, verdict and exit status out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from run_fixture import ARMS, SCENARIO, RunBuilder, d1_run

from harness.store import read_run
from reports import markdown
from reports.diagnosis import read_diagnosis
from reports.model import ArmResult, Check, Expectation, Result, TrialResult, Verdict
from reports.result import build
from reports.verdicts import exit_status, judge_arm, worst


def trial(
    outcome: str, mechanism: str | None = None, verdict: Verdict = "pass", differ: int = 0
) -> TrialResult:
    """A trial whose checkers had no objection of their own, unless ``verdict`` says so."""
    diagnosis = (
        None if mechanism is None else read_diagnosis({"mechanism": mechanism, "signature": mechanism})
    )
    return TrialResult(
        id="t", scenario="s", arm={}, seed=0, device="sim", target="builtin", outcome=outcome,
        verdict=verdict, expectation=Expectation(), checks=(Check("hang", verdict, "a reason"),),
        steps=1, tokens=1, retractions=0, duration_s=1.0, tokens_differ=differ,
        tokens_compared=0 if outcome == "skipped" else 10, ranks=2, resolutions=(), rerun="",
        diagnosis=diagnosis, problems=(),
    )  # fmt: skip


HEALTHY = trial("healthy")
HANG = trial("hang", "stream-order")
CORRUPT = trial("corrupt", differ=3)
UNKNOWN = trial("unknown", verdict="unknown")
SKIPPED = trial("skipped", verdict="skipped")
NEVER = Expectation("never")
SOMETIMES = Expectation("sometimes", min_rate=0.5, mechanism="stream-order", tokens="any")
RARELY = Expectation("sometimes", min_rate=0.01)
ALWAYS = Expectation("always", mechanism="rank-dead")
ANY = Expectation("any", tokens="any")


@pytest.mark.parametrize(
    ("expectation", "trials", "verdict", "why"),
    [
        (NEVER, [HEALTHY] * 5, "pass", "no hang in 5 trials, rate at most 52.2 %"),
        (NEVER, [HEALTHY] * 4 + [HANG], "fail", "1 of 5 hung"),
        (NEVER, [trial("livelock")], "fail", "1 of 1 hung"),
        (NEVER, [trial("dead")], "fail", "1 of 1 hung"),
        (NEVER, [HEALTHY, trial("slow")], "pass", "no hang in 2 trials"),
        (NEVER, [HEALTHY, UNKNOWN], "unknown", "1 trial unknown: hang: a reason"),
        (NEVER, [HANG, UNKNOWN], "fail", "1 of 1 hung"),
        (NEVER, [UNKNOWN], "unknown", "no trial has a known outcome"),
        (NEVER, [HEALTHY, CORRUPT], "fail", "tokens differ from the reference in 1 of 2 trials"),
        (NEVER, [SKIPPED, SKIPPED], "skipped", "a reason"),
        (NEVER, [SKIPPED, HEALTHY], "pass", "no hang in 1 trial"),
        (NEVER, [], "unknown", "no trial ran"),
        (NEVER, [HEALTHY, trial("healthy", verdict="fail")], "fail", "1 trial failed: hang: a reason"),
        (SOMETIMES, [HEALTHY, HANG, HANG], "pass", "2 of 3 hung"),
        (SOMETIMES, [HEALTHY] * 5, "unknown", "too few trials"),
        (SOMETIMES, [HEALTHY] * 6, "fail", "at least 50 %, 0 of 6 hung"),
        (RARELY, [HEALTHY] * 60, "unknown", "too few trials"),
        (Expectation("sometimes"), [HEALTHY] * 400, "unknown", "0 of 400 hung"),
        (
            SOMETIMES,
            [HANG, trial("hang", "livelock")],
            "fail",
            "by stream-order, the diagnosis says livelock",
        ),
        (SOMETIMES, [HANG, trial("hang", "unknown")], "unknown", "unknown mechanism, not stream-order"),
        (SOMETIMES, [HANG, trial("hang")], "unknown", "1 hang of unknown mechanism"),
        (SOMETIMES, [HANG, CORRUPT], "pass", "1 of 2 hung"),
        (ALWAYS, [trial("dead", "rank-dead")] * 3, "pass", "3 of 3 hung"),
        (ALWAYS, [trial("dead", "rank-dead"), HEALTHY], "fail", "1 of 2 hung"),
        (ALWAYS, [UNKNOWN], "unknown", "no trial has a known outcome"),
        (ANY, [HEALTHY, HANG, CORRUPT], "pass", "observed, 1 of 3 hung"),
        (ANY, [UNKNOWN], "unknown", "no trial has a known outcome"),
        (Expectation("any", tokens="differ"), [HEALTHY, CORRUPT], "pass", "1 of 2 did"),
        (Expectation("any", tokens="differ"), [HEALTHY] * 9, "unknown", "0 of 9 did"),
        (Expectation("any", 0.5, tokens="differ"), [HEALTHY] * 9, "fail", "0 of 9 did"),
    ],
)
def test_arm_verdicts(expectation: Expectation, trials: list[TrialResult], verdict: str, why: str) -> None:
    found = judge_arm(expectation, trials)
    assert found.verdict == verdict
    assert why in found.why


def test_an_arm_with_trials_that_never_ran_is_unknown_unless_it_failed() -> None:
    assert judge_arm(NEVER, [HEALTHY], never_run=2).verdict == "unknown"
    assert judge_arm(NEVER, [], never_run=1).verdict == "unknown"
    assert judge_arm(NEVER, [HANG], never_run=2).verdict == "fail"


@pytest.mark.parametrize(
    ("verdicts", "expected"),
    [
        (["pass", "skipped", "unknown", "fail"], "fail"),
        (["pass", "skipped", "unknown"], "unknown"),
        (["pass", "skipped"], "skipped"),
        (["pass"], "pass"),
        ([], "unknown"),
    ],
)
def test_the_worst_verdict_wins(verdicts: list[Any], expected: str) -> None:
    assert worst(verdicts) == expected


@pytest.mark.parametrize(
    ("verdict", "allow_skip", "internal_error", "status"),
    [
        ("pass", False, False, 0),
        ("fail", False, False, 1),
        ("unknown", False, False, 3),
        ("skipped", False, False, 4),
        ("skipped", True, False, 0),
        ("fail", True, False, 1),
        ("fail", False, True, 70),
    ],
)
def test_exit_statuses(verdict: Any, allow_skip: bool, internal_error: bool, status: int) -> None:
    assert exit_status(verdict, allow_skip=allow_skip, internal_error=internal_error) == status


def built(path: Path) -> Result:
    return build(read_run(path))


def test_an_expected_hang_passes(tmp_path: Path) -> None:
    result = built(d1_run(tmp_path))
    assert (result.verdict, result.exit) == ("pass", 0)
    assert [(arm.hangs.k, arm.hangs.n, arm.observation) for arm in result.arms] == [
        (0, 6, "never"),
        (4, 6, "sometimes"),
    ]
    assert result.headline == (
        "12 trials in 2 arms behaved as expected, 4 hangs among them, as the scenario expects."
    )
    assert [(row.mechanism, row.count, row.status) for row in result.signatures] == [
        ("stream-order", 4, "new")
    ]


def planned_arm(arm: Mapping[str, str], hang: str, same_as: str | None = None) -> dict[str, Any]:
    expected = {"hang": hang, "min_rate": None, "mechanism": None, "tokens": "equal"}
    resolved = {"pinned": {"requested": arm["pinned"], "resolved": "pageable", "why": "cannot pin here"}}
    return {"arm": dict(arm), "expected": expected, "same_as": same_as, "resolved": resolved}


def test_an_arm_that_resolves_to_another_shows_its_counts_once(tmp_path: Path) -> None:
    plan = [
        planned_arm(ARMS[0], "never"),
        planned_arm({"pinned": "pinned_sync"}, "never", "pinned=pageable"),
    ]
    builder = RunBuilder(tmp_path, plan=plan)
    for seed in range(3):
        builder.trial(ARMS[0], seed)
    result = built(builder.finish())
    twin = result.arms[1]
    assert (twin.same_as, twin.verdict, twin.hangs.n, twin.trials) == ("pinned=pageable", "pass", 3, ())
    assert twin.resolutions[0].changed
    assert (result.verdict, len(result.trials)) == ("pass", 3)


def test_planned_trials_that_never_ran_are_listed_and_make_the_run_unknown(tmp_path: Path) -> None:
    planned = [{"id": f"pinned=pageable-s{seed}", "scenario": SCENARIO, "arm": ARMS[0]} for seed in range(3)]
    builder = RunBuilder(tmp_path, planned=planned)
    builder.trial(ARMS[0], 0)
    result = built(builder.finish())
    assert result.never_run == ("pinned=pageable-s1", "pinned=pageable-s2")
    assert (result.verdict, result.exit) == ("unknown", 3)
    assert "2 planned trials never ran" in result.headline


def test_of_many_trials_that_never_ran_some_are_named_and_all_counted(tmp_path: Path) -> None:
    planned = [{"id": f"s{seed}", "scenario": SCENARIO, "arm": ARMS[0]} for seed in range(11)]
    builder = RunBuilder(tmp_path, planned=planned)
    builder.trial(ARMS[0], 0)
    said = markdown.render(built(builder.finish()))
    assert [f"`s{seed}`" in said for seed in range(11)] == [True] * 8 + [False] * 3
    assert "and 3 more, in `report.json`" in said


def test_an_arm_without_a_single_trial_is_unknown(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, plan=[planned_arm(ARMS[0], "never"), planned_arm(ARMS[1], "never")])
    builder.trial(ARMS[0], 0)
    result = built(builder.finish())
    assert [arm.verdict for arm in result.arms] == ["pass", "unknown"]
    assert result.exit == 3


def test_skipped_runs(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, device="npu")
    builder.trial(ARMS[0], 0, "skipped", device="npu")
    stored = read_run(builder.finish())
    assert (build(stored).verdict, build(stored).exit) == ("skipped", 4)
    assert build(stored, allow_skip=True).exit == 0
    assert build(stored).headline == f"{SCENARIO}, pinned=pageable: no NPU on this machine."


def test_hangrigs_own_error_wins(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    builder.trial(ARMS[0], 0)
    result = built(builder.finish(error="ClusterError: no raylet"))
    assert (result.verdict, result.exit) == ("unknown", 70)
    assert "ClusterError: no raylet" in result.problems[0] and "ClusterError: no raylet" in result.headline


def test_on_hardware_a_few_flipped_tokens_are_no_corruption_unless_the_check_says_so(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path, device="npu")
    builder.trial(ARMS[0], 0, device="npu", tokens_differ=2)
    failed = [{"name": "tokens", "verdict": "fail", "reason": "more than pageable trials among themselves"}]
    builder.trial(ARMS[1], 0, device="npu", tokens_differ=90, checks=failed, verdict="fail")
    result = built(builder.finish())
    assert [(arm.corrupt.k, arm.verdict) for arm in result.arms] == [(0, "pass"), (1, "fail")]
    assert not result.simulation


def test_latency_comes_from_trials_that_ran_to_their_end(tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path)
    for seed, outcome in enumerate(("healthy", "corrupt", "hang", "slow", "unknown")):
        builder.trial(ARMS[0], seed, outcome, latency={"step": [float(seed + 1)] * 10})
    step = built(builder.finish()).arms[0].latency_us["step"]
    assert (step.count, step.p50, step.p95) == (20, 1.5, 2.0)


# Tokens below float32 -------------------------------------------------------------------------------------


def noisy(tmp_path: Path, differ: Mapping[str, int], trials: int = 20) -> dict[str, ArmResult]:
    """Arms on an NPU in which so many of the trials have a differing token."""
    builder = RunBuilder(tmp_path, device="npu")
    for value, count in differ.items():
        for seed in range(trials):
            changes = {"tokens_exact": False, "device": "npu", "expected": "any"}
            if seed < count:
                changes["tokens_differ"] = 1
            builder.trial({"pinned": value}, seed, "corrupt" if seed < count else "healthy", **changes)
    return {str(arm.arm["pinned"]): arm for arm in build(read_run(builder.finish())).arms}


def test_a_flip_now_and_then_is_the_engines_own_noise(tmp_path: Path) -> None:
    arms = noisy(tmp_path, {"pageable": 3, "pinned": 4})
    assert [arm.verdict for arm in arms.values()] == ["pass", "pass"]
    assert "4 of 20 trials, in 3 of 20 with pageable copies" in arms["pinned"].why


def test_more_flips_than_with_pageable_copies_fail(tmp_path: Path) -> None:
    arms = noisy(tmp_path, {"pageable": 1, "pinned": 9})
    assert (arms["pageable"].verdict, arms["pinned"].verdict) == ("pass", "fail")
    assert "more often (p = 0.0042)" in arms["pinned"].why


@pytest.mark.parametrize(
    ("differ", "trials", "said"),
    [({"pinned": 1}, 20, "no arm with pageable copies"), ({"pageable": 0, "pinned": 1}, 2, "too few trials")],
)
def test_without_a_measure_nothing_is_known(
    tmp_path: Path, differ: Mapping[str, int], trials: int, said: str
) -> None:
    arm = noisy(tmp_path, differ, trials)["pinned"]
    assert arm.verdict == "unknown" and said in arm.why
