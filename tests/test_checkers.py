"""Each check by a table: what a stored history says, and what it cannot say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness.checkers import NAMES, Check, Facts, Verdict, check, compare_tokens, verdict

HEALTHY = Facts(
    outcome="healthy",
    why_unknown="",
    expected="never",
    mechanism_expected=None,
    mechanism=None,
    tokens_expected="equal",
    tokens_exact=True,
    finished=True,
    leaks=(),
    retractions=12,
    retractions_required=10,
    aborted=(),
    tokens={"r0": [1, 2], "r1": [3]},
    reference={"r0": [1, 2], "r1": [3]},
)
D1: dict[str, Any] = {"expected": "sometimes", "mechanism_expected": "stream-order"}


def one(name: str, **changes: Any) -> Check:
    return next(found for found in check(replace(HEALTHY, **changes)) if found.name == name)


def test_a_healthy_trial_passes_every_check() -> None:
    found = check(HEALTHY)
    assert tuple(entry.name for entry in found) == NAMES
    assert {entry.verdict for entry in found} == {"pass"} and verdict(found) == "pass"


@pytest.mark.parametrize(
    ("changes", "said", "reason"),
    [
        ({"expected": "never"}, "pass", "no hang"),
        ({"expected": "sometimes"}, "pass", "no hang"),
        ({"expected": "any"}, "pass", "no hang"),
        ({"expected": "always"}, "fail", "this one was healthy"),
        (
            {"outcome": "hang", "mechanism": "livelock"},
            "fail",
            "no hang was expected: hang, mechanism livelock",
        ),
        ({"outcome": "dead"}, "fail", "dead, mechanism unknown"),
        ({"outcome": "stopped"}, "fail", "no hang was expected"),
        ({"outcome": "livelock"}, "fail", "no hang was expected"),
        ({"outcome": "hang", "expected": "any"}, "pass", "as expected (any)"),
        ({"outcome": "hang", "expected": "always"}, "pass", "as expected (always)"),
        ({"outcome": "hang", "mechanism": "stream-order", **D1}, "pass", "as expected (sometimes)"),
        ({"outcome": "hang", "mechanism": "livelock", **D1}, "fail", "expected was stream-order"),
        ({"outcome": "hang", "mechanism": "unknown", **D1}, "unknown", "expected was stream-order"),
        ({"outcome": "hang", "mechanism": None, **D1}, "unknown", "expected was stream-order"),
        ({"outcome": "slow"}, "pass", "slow, went on"),
        ({"outcome": "slow", "slow_s": 4.25}, "pass", "slow, went on after 4.2 s"),
        ({"outcome": "slow", "finished": False}, "unknown", "had not finished"),
        ({"outcome": "slow", "finished": False, "expected": "any"}, "unknown", "had not finished"),
        ({"outcome": "slow", "expected": "always"}, "unknown", "slow, went on"),
        ({"outcome": "unknown", "why_unknown": "interrupted"}, "unknown", "interrupted"),
        ({"outcome": "unknown"}, "unknown", "nothing is known"),
        ({"outcome": "unknown", "expected": "any"}, "unknown", "nothing is known"),
    ],
)
def test_hang(changes: dict[str, Any], said: Verdict, reason: str) -> None:
    found = one("hang", **changes)
    assert found.verdict == said and reason in found.reason


@pytest.mark.parametrize(
    ("changes", "said", "reason"),
    [
        ({}, "pass", "back to idle"),
        ({"leaks": ["rank 0: 3 pages", "rank 1: a thread"]}, "fail", "rank 0: 3 pages; rank 1: a thread"),
        ({"finished": False}, "skipped", "did not finish"),
    ],
)
def test_leak(changes: dict[str, Any], said: Verdict, reason: str) -> None:
    found = one("leak", **changes)
    assert found.verdict == said and reason in found.reason


@pytest.mark.parametrize(
    ("changes", "said", "reason"),
    [
        ({}, "pass", "all 3 tokens equal"),
        ({"tokens": {"r0": [1, 9], "r1": [3]}}, "fail", "1 of 2 requests differ, first request r0, token 1"),
        ({"tokens": {"r0": [1, 2]}}, "fail", "1 of 2 requests differ, first request r1, token 0"),
        ({"tokens": {"r0": [1, 2, 7], "r1": [3]}}, "fail", "first request r0, token 2"),
        ({"tokens": {"r0": [9, 2], "r1": [3]}, "tokens_expected": "any"}, "pass", "1 of 2 requests differ"),
        ({"tokens": {"r0": [9, 2], "r1": [3]}, "tokens_expected": "differ"}, "pass", "1 of 2"),
        ({"tokens": {"r0": [1]}, "finished": False}, "pass", "all 1 tokens equal"),
        ({"tokens": {"r0": [9]}, "finished": False}, "fail", "first request r0, token 0"),
        ({"tokens": {}, "finished": False}, "unknown", "no token to compare"),
        ({"tokens": {}, "finished": False, "tokens_expected": "any"}, "skipped", "before its first token"),
        ({"reference": {}, "tokens_expected": "any"}, "unknown", "no token to compare"),
        ({"reference": None, "reference_why": "it hung"}, "unknown", "there is no reference: it hung"),
    ],
)
def test_tokens(changes: dict[str, Any], said: Verdict, reason: str) -> None:
    found = one("tokens", **changes)
    assert found.verdict == said and reason in found.reason


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"retractions": 10}, "pass"),
        ({"retractions": 9}, "unknown"),
        ({"retractions": 9, "finished": False}, "skipped"),
        ({"retractions": 12, "finished": False}, "pass"),
        ({"retractions": 0, "retractions_required": 0}, "pass"),
        ({"aborted": ["r7 (aborted: it needs 900 tokens)"]}, "unknown"),
        ({"aborted": ["r7 (aborted: it needs 900 tokens)"], "finished": False}, "pass"),
        ({"aborted": ["r7 (aborted: it needs 900 tokens)"], "aborts_required": 1}, "pass"),
        ({"aborted": [], "aborts_required": 1}, "unknown"),
        ({"aborted": ["r7", "r8"], "aborts_required": 1}, "unknown"),
    ],
)
def test_pressure(changes: dict[str, Any], said: Verdict) -> None:
    assert one("pressure", **changes).verdict == said


def test_a_skipped_trial_skips_every_check_and_says_why() -> None:
    found = check(replace(HEALTHY, outcome="skipped", why_unknown="no npu device"))
    assert {(entry.verdict, entry.reason) for entry in found} == {("skipped", "no npu device")}
    assert tuple(entry.name for entry in found) == NAMES and verdict(found) == "skipped"


@pytest.mark.parametrize(
    ("said", "whole"),
    [
        (["pass", "unknown", "fail"], "fail"),
        (["pass", "unknown", "skipped"], "unknown"),
        (["pass", "skipped"], "pass"),
        (["skipped", "skipped"], "skipped"),
        ([], "unknown"),
    ],
)
def test_the_worst_check_is_the_trials_verdict(said: list[Verdict], whole: Verdict) -> None:
    assert verdict([Check(str(number), entry, "") for number, entry in enumerate(said)]) == whole


def test_a_request_counts_once_and_tokens_that_nobody_reached_do_not_count() -> None:
    found = compare_tokens({"a": [1, 2, 3], "b": [5]}, {"a": [1, 9, 9], "b": [5, 6]}, whole=False)
    assert (found.differ, found.compared, found.first) == (1, 4, "request a, token 1")
    found = compare_tokens({"a": [1, 2, 3], "b": [5]}, {"a": [1, 9, 9], "b": [5, 6]}, whole=True)
    assert (found.differ, found.compared) == (2, 5)


def test_below_float32_a_differing_trial_leaves_it_to_its_arm() -> None:
    facts = replace(HEALTHY, tokens={"a": [1, 2, 4]}, reference={"a": [1, 2, 3]}, tokens_exact=False)
    (found,) = [one for one in check(facts) if one.name == "tokens"]
    assert (found.verdict, found.reason) == (
        "pass",
        "1 of 1 requests differ, first request a, token 2; below float32 the arm decides, by how often",
    )
