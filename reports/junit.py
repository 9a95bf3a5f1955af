"""junit.xml: a suite a scenario, a case a trial, as the contract lays it down.

Unexpected is a failure, unknown an error, no hardware a skip; an expected hang passes and carries its
diagnosis in ``system-out``. Planned trials that never ran are errors: a green file must mean that all ran. Those
that a time budget or a stopping rule left out are one skip an arm.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from reports.baseline import lines
from reports.hang_text import diagnosis_lines
from reports.known import known_lines
from reports.model import ArmResult, Baseline, Result, ScenarioResult, TrialResult

_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def clean(text: str) -> str:
    """``text`` without the characters that XML 1.0 cannot hold, not even escaped."""
    return _ILLEGAL.sub("", text)


def render(result: Result) -> bytes:
    """The document as UTF-8 with its declaration."""
    root = ET.Element("testsuites", {"name": "hangrig"})
    for scenario in result.scenarios:
        root.append(_suite(result, scenario))
    if result.baseline is not None:
        root.append(_baseline_suite(result.baseline))
    if result.never_run or result.problems:
        root.append(_run_suite(result))
    for key in ("tests", "failures", "errors", "skipped"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    ET.indent(root)
    document: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return document


def _suite(result: Result, scenario: ScenarioResult) -> ET.Element:
    suite = ET.Element("testsuite", {"name": clean(scenario.name)})
    properties = ET.SubElement(suite, "properties")
    for name, value in (("device", result.device), ("seed", str(result.seed)), ("run", result.run)):
        ET.SubElement(properties, "property", {"name": name, "value": clean(value)})
    if result.simulation:
        ET.SubElement(properties, "property", {"name": "simulation", "value": clean(result.simulation_note)})
    for arm in scenario.arms:
        for item in arm.resolutions:
            told = f"{item.requested} → {item.resolved}, {item.why}"
            name = clean(f"{arm.name}: {item.toggle}")
            ET.SubElement(properties, "property", {"name": name, "value": clean(told)})
        if arm.same_as is not None:
            same = {"name": clean(f"{arm.name}: same as"), "value": clean(arm.same_as)}
            ET.SubElement(properties, "property", same)
        for trial in arm.trials:
            suite.append(_case(arm, trial))
        if arm.left_out:
            suite.append(_left_out_case(arm, result.leaver))
        if _judged_as_a_whole(arm):
            suite.append(_arm_case(arm))
    return _counted(suite)


def _judged_as_a_whole(arm: ArmResult) -> bool:
    """The arm failed or is unknown by its counts alone: no trial of it says so by itself."""
    return (
        arm.same_as is None
        and arm.verdict in ("fail", "unknown")
        and all(trial.verdict != arm.verdict for trial in arm.trials)
    )


def _case(arm: ArmResult, trial: TrialResult) -> ET.Element:
    case = ET.Element("testcase", {"classname": clean(trial.scenario), "name": clean(trial.name)})
    case.set("time", f"{trial.duration_s or 0.0:.3f}")
    reasons = [
        f"{check.name}: {check.reason}" if check.reason else check.name
        for check in trial.checks
        if check.verdict == trial.verdict
    ]
    told = [*reasons, *trial.problems] or [f"outcome {trial.outcome}"]
    message = clean("; ".join([*told, *known_lines(trial.known)]))
    lines = [] if trial.outcome in ("healthy", "skipped") else diagnosis_lines(trial)
    detail = clean("\n".join([*lines, f"again with: {trial.rerun}"]))
    if trial.verdict == "fail":
        ET.SubElement(case, "failure", {"message": message, "type": clean(trial.outcome)}).text = detail
    elif trial.verdict == "unknown":
        ET.SubElement(case, "error", {"message": message, "type": "unknown"}).text = detail
    elif trial.verdict == "skipped":
        ET.SubElement(case, "skipped", {"message": message})
    elif lines:
        ET.SubElement(case, "system-out").text = detail
    return case


def _left_out_case(arm: ArmResult, leaver: str) -> ET.Element:
    """One an arm: a night may leave out thousands of trials."""
    name = clean(f"{arm.name} ({leaver.removeprefix('the ')})")
    case = ET.Element("testcase", {"classname": clean(arm.scenario), "name": name, "time": "0.000"})
    message = f"{arm.left_out} of {arm.planned} planned trials were left out by {leaver}"
    ET.SubElement(case, "skipped", {"message": message})
    return case


def _arm_case(arm: ArmResult) -> ET.Element:
    case = ET.Element("testcase", {"classname": clean(arm.scenario), "name": clean(f"{arm.name} (arm)")})
    case.set("time", "0.000")
    kind = "failure" if arm.verdict == "fail" else "error"
    ET.SubElement(case, kind, {"message": clean(arm.why), "type": "expectation"})
    return case


def _baseline_suite(baseline: Baseline) -> ET.Element:
    suite = ET.Element("testsuite", {"name": "the baseline"})
    case = ET.SubElement(suite, "testcase", {"classname": "baseline", "name": clean(baseline.asked)})
    tag = {"regression": "failure", "not-comparable": "error", "none": "skipped"}.get(baseline.verdict)
    if tag is not None:
        found = ET.SubElement(case, tag, {"message": clean(baseline.sentence)})
        found.text = clean("\n".join(lines(baseline)))
    return _counted(suite)


def _run_suite(result: Result) -> ET.Element:
    suite = ET.Element("testsuite", {"name": "the run itself"})
    for trial in result.never_run:
        case = ET.SubElement(suite, "testcase", {"classname": "planned", "name": clean(trial)})
        ET.SubElement(case, "error", {"message": "planned, but never ran", "type": "unknown"})
    if result.problems:
        case = ET.SubElement(suite, "testcase", {"classname": "run directory", "name": "readable"})
        error = ET.SubElement(case, "error", {"message": clean(result.problems[0]), "type": "unknown"})
        error.text = clean("\n".join(result.problems))
    return _counted(suite)


def _counted(suite: ET.Element) -> ET.Element:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.get('time', '0')) for case in cases):.3f}")
    return suite
