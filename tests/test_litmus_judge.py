"""Verdicts of litmus programs from counted outcomes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.litmus.catalogue import PROGRAMS
from harness.litmus.judge import Counted, exit_status, judge
from harness.litmus.rules import MODELS, RULES
from harness.litmus.session import TUNED_BY


def verdicts(**outcomes: dict[str, int]) -> dict[str, str]:
    counted = {name.replace("_", "-"): Counted(dict(found)) for name, found in outcomes.items()}
    return {line.name: line.verdict for line in judge(PROGRAMS, counted, "cann")}


SEEN = {"old": 3, "new": 7}


@pytest.mark.parametrize(
    ("control", "found", "expected"),
    [
        (SEEN, {"new": 10}, "pass"),
        (SEEN, {"new": 9, "old": 1}, "fail"),
        (SEEN, {"new": 9, "torn": 1}, "fail"),
        (SEEN, {"new": 9, "stalled": 1}, "fail"),
        (SEEN, {"new": 9, "died": 1}, "fail"),
        (SEEN, {"new": 9, "other": 1}, "fail"),
        (SEEN, {"new": 9, "error": 1}, "unknown"),
        (SEEN, {"old": 1, "error": 9}, "fail"),
        (SEEN, {}, "unknown"),
        ({"new": 10}, {"new": 10}, "unknown"),
        ({"new": 10}, {"old": 1}, "fail"),
    ],
)
def test_silence_counts_only_where_the_control_was_seen(
    control: dict[str, int], found: dict[str, int], expected: str
) -> None:
    assert verdicts(copy_race=control, copy_then_kernel=found)["copy-then-kernel"] == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [(SEEN, "pass"), ({"old": 4}, "pass"), ({"new": 4}, "unknown"), ({"old": 3, "stalled": 1}, "fail")],
)
def test_a_control_has_to_be_seen_and_may_not_stop(found: dict[str, int], expected: str) -> None:
    assert verdicts(copy_race=found) == {"copy-race": expected}


def test_a_program_that_may_stop_shows_its_race_by_that_too() -> None:
    crossed = verdicts(group_reversed={"ordered": 5, "stalled": 2}, group_ordered={"ordered": 9})
    assert crossed == {"group-reversed": "pass", "group-ordered": "pass"}


def test_what_is_only_observed_is_never_judged() -> None:
    assert verdicts(group_two_streams={"crossed": 9}) == {"group-two-streams": "pass"}


def test_an_error_is_no_shot_of_the_rate() -> None:
    (line,) = judge(PROGRAMS, {"copy-race": Counted({"old": 1, "new": 3, "error": 6})}, "cuda")
    assert (line.observed.k, line.observed.n, line.observation) == (1, 4, "sometimes")


@pytest.mark.parametrize(
    ("names", "status"),
    [
        ({"copy-race": SEEN}, 0),
        ({"copy-race": {"new": 1}}, 3),
        ({"copy-race": SEEN, "copy-then-kernel": {"old": 1}, "reuse-pinned": {"new": 1}}, 1),
    ],
)
def test_the_worst_verdict_decides_the_status(names: dict[str, dict[str, int]], status: int) -> None:
    lines = judge(PROGRAMS, {name: Counted(found) for name, found in names.items()}, "cann")
    assert exit_status(lines) == status


def test_every_program_has_rules_for_each_model_and_a_control_that_gives_it_power() -> None:
    assert set(RULES) == set(PROGRAMS)
    for name, rules in RULES.items():
        assert set(rules.by_model) == set(MODELS)
        assert rules.shown_by
        for control in rules.shown_by:
            assert {rule.kind for rule in RULES[control].by_model.values()} == {"control"}
            assert PROGRAMS[control].ranks == PROGRAMS[name].ranks, "else it is not run under the same stress"
    for family, control in TUNED_BY.items():
        assert PROGRAMS[control].family == family
    assert {program.family for program in PROGRAMS.values()} == set(TUNED_BY)


def test_the_page_tells_every_program_as_the_rules_have_it() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "litmus.md").read_text()
    sections = dict(re.findall(r"^### ([\w-]+)\n(.*?)(?=^##)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(PROGRAMS)
    words = {"forbidden": "forbidden", "control": "allowed, and must be seen", "observed": "either way"}
    for name, section in sections.items():
        assert f"| a hit means | {RULES[name].means} |" in section
        assert f"| counted | {', '.join(PROGRAMS[name].watched)}" in section
        for model, rule in RULES[name].by_model.items():
            row = f"{words[rule.kind]} | {rule.source} |"
            assert f"| {row}" in section or f"| {model}: {row}" in section
