"""A run is held against an earlier one: what is worse fails, what cannot be told is said, chance is none."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from run_fixture import ARMS, RunBuilder
from typer.testing import CliRunner, Result

from harness import run as run_room
from harness.cli import app
from harness.store import RunStore, load_schema
from reports import write_all
from reports.compare_runs import compare_runs, render, significant
from reports.model import Result as RunResult

ANY = {"expected": "any", "tokens_expected": "any"}


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


class Night:
    """A stored run of the arms that are given trials; ``text``: the scenario as run.json keeps it."""

    def __init__(self, out: Path, text: str = "{}") -> None:
        self.builder = RunBuilder(out)
        self.text = text
        self.arms: list[dict[str, Any]] = []

    def trials(self, arm: int, healthy: int, hung: int = 0, **changes: Any) -> Night:
        for seed in range(healthy + hung):
            self.builder.trial(ARMS[arm], seed, "hang" if seed < hung else "healthy", **{**ANY, **changes})
        value = ARMS[arm]["pinned"]
        resolved = {"pinned": {"requested": value, "resolved": value, "why": ""}}
        self.arms.append(
            {"arm": dict(ARMS[arm]), "arm_string": f"pinned={value}", "same_as": None, "resolved": resolved}
        )
        return self

    def end(self, baseline: Path | None = None, asked: str = "last-pass", **fields: Any) -> Path:
        if baseline is not None:
            fields["baseline"] = {"asked": asked, "run": str(baseline)}
        scenarios = [{"name": "dp-pinned-hang", "text": self.text, "arms": self.arms}]
        return self.builder.finish(scenarios=scenarios, **fields)


def reported(path: Path) -> tuple[RunResult, dict[str, Any]]:
    result = write_all(path)
    document = json.loads((path / "report.json").read_text())
    jsonschema.validate(document, load_schema("report"))
    return result, document


def test_the_same_again_is_no_regression(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(0, 8).trials(1, 4, 4).end()
    second = Night(tmp_path / "b").trials(0, 8).trials(1, 4, 4).end(first)
    result, document = reported(second)
    assert (result.verdict, result.exit) == ("pass", 0)
    assert document["baseline"]["verdict"] == "no-regression"
    assert document["baseline"]["run"] == str(first)
    assert json.loads((second / "baseline.json").read_text())["arms"][1]["hangs"]["before"]["k"] == 4


def test_more_hangs_than_one_rate_explains_fail_the_run_everywhere(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(0, 12).trials(1, 11, 1).end()
    second = Night(tmp_path / "b").trials(0, 12).trials(1, 2, 10).end(first)
    result, document = reported(second)
    assert (result.verdict, result.exit, document["exit"]) == ("fail", 1, 1)
    assert "hangs went from 1 of 12 to 10 of 12" in result.headline
    for name in ("summary.md", "report.html"):
        assert "hangs went from 1 of 12 to 10 of 12" in (second / name).read_text(), name
    case = ET.parse(second / "junit.xml").getroot().find("./testsuite[@name='the baseline']/testcase/failure")
    assert case is not None and "worse than the baseline" in str(case.get("message"))


def test_one_more_hang_of_a_kind_that_was_there_is_chance(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(1, 10, 2).end()
    second = Night(tmp_path / "b").trials(1, 8, 4).end(first)
    assert reported(second)[0].verdict == "pass"


def test_a_hang_that_nobody_expected_and_the_baseline_never_showed_is_worse(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(1, 12).end()
    second = Night(tmp_path / "b").trials(1, 11, 1).end(first)
    result, document = reported(second)
    assert (result.verdict, result.exit) == ("fail", 1)
    (row,) = document["baseline"]["comparison"]["signatures"]
    assert (row["status"], row["before"], row["after"], row["known"]) == ("new", 0, 1, False)
    assert "a hang that the baseline has not" in result.headline


@pytest.mark.parametrize(
    ("changes", "regression"),
    [
        ({"expected": "sometimes", "min_rate": 0.01}, False),
        ({"expected": "sometimes", "min_rate": 0.01, "mechanism_expected": "stream-order"}, False),
        ({"expected": "never"}, True),
    ],
)
def test_a_new_hang_that_the_scenario_expects_is_no_regression(
    tmp_path: Path, changes: dict[str, Any], regression: bool
) -> None:
    first = Night(tmp_path / "a").trials(1, 12, **changes).end()
    second = Night(tmp_path / "b").trials(1, 11, 1, **changes).end()
    assert (compare_runs(first, second)["verdict"] == "regression") is regression


def test_a_known_issue_is_told_and_is_no_regression(tmp_path: Path) -> None:
    issue = {
        "signature": "stream-order/compute/graph.replay/serving.engine", "link": "https://example.org/1",
        "expires": "2999-01-01", "note": "seen before",
    }  # fmt: skip
    known = {"file": "known-issues.toml", "on": "2026-12-01", "issues": [issue]}
    first = Night(tmp_path / "a").trials(1, 12).end()
    second = Night(tmp_path / "b").trials(1, 11, 1).end(first, known_issues=known)
    result, document = reported(second)
    assert (result.verdict, document["baseline"]["verdict"]) == ("pass", "no-regression")
    (row,) = document["baseline"]["comparison"]["signatures"]
    assert row["known"] and row["link"] == issue["link"]
    assert "signature new, a known issue" in (second / "summary.md").read_text()


def test_a_signature_that_is_gone_is_told(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(1, 6, 6).end()
    second = Night(tmp_path / "b").trials(1, 12).end(first)
    result, document = reported(second)
    assert result.verdict == "pass"
    assert [row["status"] for row in document["baseline"]["comparison"]["signatures"]] == ["gone"]


def test_other_tokens_in_more_trials_are_worse(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(0, 10).end()
    second = Night(tmp_path / "b")
    for seed in range(10):
        second.builder.trial(ARMS[0], seed, "corrupt" if seed < 8 else "healthy", **ANY)
    result, _ = reported(second.end(first))
    assert "trials with other tokens went from 0 of 10 to 8 of 10" in result.headline
    assert result.exit == 1


def slower(arm: int, factor: float, path: str = "step") -> dict[str, Any]:
    return {"latency": {path: [factor * (100.0 + place) for place in range(40)]}}


@pytest.mark.parametrize(
    ("factor", "path", "regression", "told"),
    [
        (1.3, "step", True, "the median step takes 1.30 times as long"),
        (1.02, "step", False, None),
        (1.3, "next_token_copy", False, "the median next_token_copy takes 1.30 times as long"),
    ],
)
def test_slower_counts_past_the_practical_threshold_and_for_the_step(
    tmp_path: Path, factor: float, path: str, regression: bool, told: str | None
) -> None:
    first = Night(tmp_path / "a").trials(0, 8, **slower(0, 1.0, path)).end()
    second = Night(tmp_path / "b").trials(0, 8, **slower(0, factor, path)).end(first)
    document = compare_runs(first, second)
    assert (document["verdict"] == "regression") is regression
    (arm,) = document["arms"]
    assert [*arm["reasons"], *arm["notes"]] == ([] if told is None else [told])


def test_many_arms_do_not_find_a_regression_by_chance() -> None:
    """Each test alone would call 0 of 9 to 4 of 9 (p = 0.041) a regression; among twenty it is none."""
    assert significant([0.041]) == [0]
    assert significant([0.041] * 20) == []
    assert significant([*[0.041] * 20, 0.0001]) == [20]
    assert significant([]) == []


def test_weaker_evidence_is_told_and_is_no_regression(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(0, 60).end()
    second = Night(tmp_path / "b").trials(0, 6).end(first)
    result, document = reported(second)
    (arm,) = document["baseline"]["comparison"]["arms"]
    assert result.verdict == "pass"
    assert arm["notes"] == [
        "weaker evidence: 6 trials against 60 leave a rate of up to 45.9 % open, before 6 %"
    ]
    assert "the evidence is weaker in 1 arm" in document["baseline"]["sentence"]


def test_another_version_is_told_and_another_machine_forbids_latencies(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(0, 8, **slower(0, 1.0)).end()
    other_torch = Night(tmp_path / "b").trials(0, 8, **slower(0, 1.5)).end(versions={"torch": "2.14.0"})
    document = compare_runs(first, other_torch)
    assert document["verdict"] == "regression"
    assert "version of torch (2.13.0 → 2.14.0)" in document["sentence"]
    machine = {"cpu": {"model": "another processor", "cores": 64}, "kernel": "6.1"}
    other_machine = Night(tmp_path / "c").trials(0, 8, **slower(0, 1.5)).end(machine=machine)
    document = compare_runs(first, other_machine)
    assert document["verdict"] == "no-regression" and document["arms"][0]["step"]["ratio"] is None
    assert "latencies are not compared" in document["sentence"]


def test_arms_that_are_defined_otherwise_are_not_compared(tmp_path: Path) -> None:
    first = (
        Night(tmp_path / "a", text='{"workload": {"requests": 9}, "trials": {"count": 2}}').trials(0, 8).end()
    )
    more = (
        Night(tmp_path / "b", text='{"workload": {"requests": 9}, "trials": {"count": 8}}').trials(0, 8).end()
    )
    other = Night(tmp_path / "c", text='{"workload": {"requests": 99}}').trials(0, 8).end(first, asked="it")
    assert compare_runs(first, more)["verdict"] == "no-regression"
    result, document = reported(other)
    assert (result.verdict, result.exit) == ("unknown", 3)
    comparison = document["baseline"]["comparison"]
    assert (comparison["verdict"], comparison["arms"]) == ("not-comparable", [])
    assert "its requests, model or toggles" in comparison["not_compared"][0]["why"]
    assert "its requests, model or toggles" in render(comparison)


def test_an_arm_of_one_run_alone_is_named(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(0, 8).end()
    second = Night(tmp_path / "b").trials(0, 8).trials(1, 8).end()
    document = compare_runs(first, second)
    assert document["verdict"] == "no-regression"
    why = [(one["arm"], one["why"]) for one in document["not_compared"]]
    assert why == [("pinned=pinned", "only in the later run")]


def test_the_comparison_outlives_its_baseline(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(0, 12).trials(1, 12).end()
    second = Night(tmp_path / "b").trials(0, 12).trials(1, 2, 10).end(first)
    before = reported(second)[1]
    first.rename(tmp_path / "gone")
    assert reported(second)[1]["baseline"] == before["baseline"]
    (second / "baseline.json").unlink()
    result, document = reported(second)
    assert document["baseline"]["verdict"] == "not-comparable" and result.verdict == "unknown"


def test_the_first_of_70_1_3_4_0_holds(tmp_path: Path) -> None:
    first = Night(tmp_path / "a").trials(1, 12).end()
    broken = Night(tmp_path / "b").trials(1, 2, 10).end(first, error="it broke")
    assert reported(broken)[0].exit == 70
    unknown = Night(tmp_path / "c").trials(1, 2, 9)
    unknown.builder.trial(ARMS[1], 50, "unknown", **ANY)
    assert reported(unknown.end(first))[0].exit == 1
    failed = Night(tmp_path / "d", text='{"workload": {}}').trials(1, 2, 10, expected="never", verdict="fail")
    assert reported(failed.end(first))[0].exit == 1, "its own failure comes before what cannot be compared"


# The command ----------------------------------------------------------------------------------------------


def skipped(tmp_path: Path, *more: str) -> Result:
    """A run on a device that is not there: all of a run but its trials."""
    out = str(tmp_path / "runs")
    return call("run", "dp-retract", "--device", "npu", "--out", out, "--trials", "1", *more)


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_room, "_absent", lambda request: "no npu device on this machine")


def test_a_baseline_that_is_not_there_is_bad_usage_before_anything_starts(tmp_path: Path) -> None:
    done = skipped(tmp_path, "--baseline", str(tmp_path / "none"))
    assert done.exit_code == 2 and "--baseline" in done.stderr and "does not exist" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_first_night_has_no_baseline_and_says_so(tmp_path: Path) -> None:
    done = skipped(tmp_path, "--baseline", "last-pass", "--json")
    report = json.loads(done.stdout)
    assert (done.exit_code, report["verdict"]) == (4, "skipped")
    assert (report["baseline"]["verdict"], report["baseline"]["run"]) == ("none", None)
    assert "this is the first night" in done.stderr


def test_last_pass_is_the_newest_pass_of_the_same_scenarios(tmp_path: Path) -> None:
    skipped(tmp_path)
    first = (tmp_path / "runs" / "latest").resolve()
    report = json.loads((first / "report.json").read_text())
    (first / "report.json").write_text(json.dumps({**report, "verdict": "pass"}))
    skipped(tmp_path)
    done = skipped(tmp_path, "--baseline", "last-pass", "--json", "--allow-skip")
    report = json.loads(done.stdout)
    assert report["baseline"]["run"] == str(first) and done.exit_code == 0
    assert report["baseline"]["sentence"].startswith("nothing was run")
    jsonschema.validate(report, load_schema("report"))
    document = RunStore.open(tmp_path / "runs" / "latest").document
    jsonschema.validate(document, load_schema("run"))
    assert document["baseline"] == {"asked": "last-pass", "run": str(first)}
    other = json.loads(
        skipped(tmp_path, "--baseline", "last-pass", "--json", "--set", "workload.requests=7").stdout
    )
    assert other["baseline"]["run"] is None, "other requests are another experiment"
