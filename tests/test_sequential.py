"""When a run may end early: right as often as it says, and open only while something can still be settled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_fixture import ARMS, RunBuilder
from typer.testing import CliRunner

import reports
from harness import run as run_room
from harness.arms import TrialPlan, arm_string, expand
from harness.cli import app
from harness.scenario import find_scenario, load
from harness.sequential import ALPHA, BETA, FREQUENT, ODDS, RARE, Answer, Sequential, StopError, sprt
from harness.store import load_schema, read_run

PINNED = ("pageable", "pinned")
RUNS = 2000


def plans(arms: Sequence[dict[str, str]], trials: int, scenario: str = "s") -> list[TrialPlan]:
    model = expand(load(find_scenario("dp-pinned-hang")), "sim", 1)[0]
    return [
        TrialPlan(
            f"{scenario}.{arm_string(arm)}.{seed}", scenario, "sim", arm, arm_string(arm), seed, seed,
            model.resolutions, model.expectation, (),
        )
        for seed in range(trials)
        for arm in arms
    ]  # fmt: skip


def run_through(
    arms: Sequence[dict[str, str]], trials: int, hung: Sequence[Sequence[bool]]
) -> tuple[Sequential, int]:
    """Trial by trial in rounds until it is over; how many rounds that took. ``hung``: by arm and seed."""
    planned = plans(arms, trials)
    asked = Sequential.of([planned])
    for plan in planned:
        if plan.arm == arms[0] and asked.over:
            return asked, plan.seed
        arm = list(arms).index(dict(plan.arm))
        asked.observe(plan, "hang" if hung[arm][plan.seed] else "healthy")
    return asked, trials


def pinned_arms(*values: str) -> list[dict[str, str]]:
    return [{"pinned": value} for value in values]


def the(asked: Sequential) -> Answer:
    (answer,) = asked.answers()
    return answer


# Known distributions --------------------------------------------------------------------------------------------


def test_equal_arms_are_told_apart_no_more_often_than_stated() -> None:
    generator = np.random.default_rng(1)
    wrong = 0
    for _ in range(RUNS // 4):
        hung = generator.random((2, 400)) < 0.3
        asked, _ = run_through(pinned_arms(*PINNED), 400, hung.tolist())
        wrong += the(asked).words.startswith("hangs")
    assert wrong / (RUNS // 4) <= ALPHA


def test_a_difference_of_the_stated_size_is_missed_no_more_often_than_stated() -> None:
    """Rates whose discordant pairs are ODDS to one."""
    generator = np.random.default_rng(2)
    base = 0.2
    other = ODDS * base / (1.0 - base + ODDS * base)
    found, rounds = 0, []
    for _ in range(RUNS // 4):
        hung = np.stack([generator.random(400) < base, generator.random(400) < other])
        asked, took = run_through(pinned_arms(*PINNED), 400, hung.tolist())
        found += the(asked).words.startswith("hangs more often")
        rounds.append(took)
    assert found / (RUNS // 4) >= 1.0 - BETA - 0.01  # overshoot moves it a little either way
    assert np.mean(rounds) < 60


@pytest.mark.parametrize(("true_rate", "answer"), [(RARE, -1), (FREQUENT, 1)])
def test_one_arms_rate_is_told_as_often_as_stated(true_rate: float, answer: int) -> None:
    generator = np.random.default_rng(3)
    right = 0
    for _ in range(RUNS):
        hung, settled, trials = 0, 0, 0
        while not settled:
            trials += 1
            hung += generator.random() < true_rate
            settled = sprt(hung, trials, RARE, FREQUENT)
        right += settled == answer
    assert right / RUNS >= 1.0 - max(ALPHA, BETA) - 0.01


# Ends -----------------------------------------------------------------------------------------------------------


def test_a_clear_difference_ends_after_a_few_rounds() -> None:
    asked, rounds = run_through(pinned_arms(*PINNED), 100, [[False] * 100, [True] * 100])
    assert rounds == 8 and the(asked).standing == "decided"
    assert (
        the(asked).words
        == "hangs more often (in 8 pairs only the one hung, in 0 only the other, 0 were alike)"
    )
    assert the(asked).question == "s, pinned pinned against pageable"


@pytest.mark.parametrize("hangs", [False, True])
def test_arms_that_are_always_alike_are_settled_too(hangs: bool) -> None:
    asked, rounds = run_through(pinned_arms(*PINNED), 100, [[hangs] * 100] * 2)
    assert rounds == 31 and the(asked).words.startswith("differs in less than 10 % of pairs")


def test_too_few_trials_can_never_settle_it_and_are_not_run() -> None:
    asked, rounds = run_through(pinned_arms(*PINNED), 7, [[False] * 7, [True] * 7])
    assert rounds == 0
    assert the(asked) == Answer(
        "s, pinned pinned against pageable",
        "never",
        "7 more pairs cannot settle it (in 0 pairs only the one hung, in 0 only the other, 0 were alike)",
    )


def test_what_became_impossible_on_the_way_ends_the_run() -> None:
    hung = [[False] * 9, [True] * 2 + [False] * 7]
    asked, rounds = run_through(pinned_arms(*PINNED), 9, hung)
    assert rounds < 9 and the(asked).standing == "never"


def test_every_other_value_is_compared_with_the_safe_one_and_alpha_is_shared() -> None:
    arms = [
        {"pinned": pinned, "symm_mem": symm}
        for pinned in ("pinned", "pageable", "pinned_sync")
        for symm in ("off", "on")
    ]
    asked = Sequential.of([plans(arms, 40)])
    assert [answer.question for answer in asked.answers()] == [
        "s, pinned pinned against pageable with symm_mem=off",
        "s, pinned pinned against pageable with symm_mem=on",
        "s, pinned pinned_sync against pageable with symm_mem=off",
        "s, pinned pinned_sync against pageable with symm_mem=on",
    ]
    planned = plans(arms, 40)
    for plan in planned:
        asked.observe(plan, "hang" if plan.arm["pinned"] == "pinned" and plan.seed < 8 else "healthy")
        if plan.seed == 7 and plan.arm == arms[-1]:
            assert asked.answers()[0].standing == "open", "8 pairs settle one question, not one of four"


def test_an_arm_alone_is_asked_for_its_rate() -> None:
    asked, rounds = run_through([{"pinned": "pageable"}], 100, [[False] * 100])
    assert rounds == 31 and the(asked).words.startswith("hangs in 1 % or less")
    assert Sequential.of([plans([{}], 5)]).answers()[0].question == "s, default"


def test_an_unknown_outcome_has_no_say() -> None:
    arms = pinned_arms(*PINNED)
    planned = plans(arms, 20)
    asked = Sequential.of([planned])
    for plan in planned:
        asked.observe(plan, "unknown" if plan.seed % 2 else "healthy")
    assert "10 were alike" in the(asked).words and the(asked).standing == "never"


@given(outcomes=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
@settings(max_examples=60, deadline=None)
def test_what_is_said_to_be_never_settled_stays_so(outcomes: list[tuple[bool, bool]]) -> None:
    arms, total = pinned_arms(*PINNED), len(outcomes)
    planned = plans(arms, total)
    asked = Sequential.of([planned])
    lost = False
    for plan in planned:
        lost = lost or the(asked).standing == "never"
        asked.observe(plan, "hang" if outcomes[plan.seed][arms.index(dict(plan.arm))] else "healthy")
        if lost:
            assert the(asked).standing == "never"
    assert the(asked).standing != "open"


# The option -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arms", "toggle", "said"),
    [
        (
            [{"graph": "off", "symm_mem": "off"}, {"graph": "on", "symm_mem": "on"}],
            None,
            r"name one: --stop sprt:graph",
        ),
        ([{"pinned": "pageable"}], "pinned", "no arms differ in 'pinned'; toggles that vary: none"),
    ],
)
def test_a_rule_that_does_not_fit_is_refused(
    arms: list[dict[str, str]], toggle: str | None, said: str
) -> None:
    with pytest.raises(StopError, match=said):
        Sequential.of([plans(arms, 5)], toggle)


@pytest.mark.parametrize(
    ("rule", "said"), [("soon", "there is sprt and sprt:TOGGLE"), ("sprt:graph", "no arms differ in 'graph'")]
)
def test_bad_usage_ends_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, said: str
) -> None:
    monkeypatch.setattr(run_room, "Session", None)
    done = CliRunner().invoke(app, ["run", "dp-pinned-hang", "--stop", rule, "--out", str(tmp_path / "runs")])
    assert done.exit_code == 2 and said in done.output
    assert not (tmp_path / "runs").exists()


def test_the_reports_say_what_was_settled_and_what_was_not_needed(tmp_path: Path) -> None:
    planned = [
        {"id": f"{arm_string(arm)}-s{seed}", "scenario": "dp-pinned-hang", "arm": arm, "seed": seed}
        for seed in range(10)
        for arm in ARMS
    ]
    builder = RunBuilder(tmp_path, planned=planned)
    for seed in range(8):
        builder.trial(ARMS[0], seed)
        builder.trial(ARMS[1], seed, "hang", expected="any", tokens_expected="any")
    asked, _ = run_through(list(map(dict, ARMS)), 10, [[False] * 10, [True] * 10])
    left_out = [one["id"] for one in planned if one["seed"] >= 8]
    path = builder.finish(left_out=left_out, stop="sprt", stopping=asked.to_json())
    jsonschema.validate(
        json.loads((path / "run.json").read_text())["stopping"], load_schema("run")["properties"]["stopping"]
    )
    result = reports.write_all(path)
    assert result.exit == 0 and result.never_run == ()
    assert "the stopping rule left out 4 more" in result.headline
    report = json.loads((path / "report.json").read_text())
    jsonschema.validate(report, load_schema("report"))
    assert [row["standing"] for row in report["stopping"]] == ["decided"]
    for name in ("summary.md", "report.html"):
        text = (path / name).read_text()
        assert "hangs more often" in text and "4 planned trials were not needed" in text
    assert read_run(path).run["stop"] == "sprt"
