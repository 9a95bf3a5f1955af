"""What commands print for people: the plan of a run, and whether a machine is ready.

Here: pure text, a list of lines each. Not here: reports (`reports`), options and exit statuses (`cli.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.arms import ArmPlan, TrialPlan, expand, plan_arms
from harness.doctor import DoctorReport
from harness.launch_plan import commands
from harness.request import RunRequest
from harness.scenario_model import Scenario
from harness.toggles import BUILTIN, gather_facts


@dataclass(frozen=True, slots=True)
class Plan:
    """One scenario's part of a run."""

    scenario: Scenario
    arms: Sequence[ArmPlan]
    trials: Sequence[TrialPlan]


def plan(scenario: Scenario, request: RunRequest) -> Plan:
    """What ``request`` would run of ``scenario`` on this machine."""
    facts = gather_facts(request.device, scenario.target.ranks, scenario.target.name)
    arms = plan_arms(scenario, request.device, facts)
    return Plan(scenario, arms, expand(scenario, request.device, request.trials, request.seed, facts))


def doctor_lines(report: DoctorReport) -> list[str]:
    """A line a check, and below it how to mend what it found."""
    lines = []
    for check in report.checks:
        lines.append(f"{check.status:8}{check.name:13} {check.detail}")
        if check.mend:
            lines.append(f"{'':22}→ {check.mend}")
    return [*lines, "ready" if report.ready else "not ready"]


def plan_lines(plan: Plan, device: str) -> list[str]:
    """The arms with their expectations and resolved toggles, and the trials in running order."""
    run = sum(arm.same_as is None for arm in plan.arms)
    counts = f"{len(plan.arms)} arms, {len(plan.trials)} trials, {len(plan.trials) // run} per arm"
    lines = [f"{plan.scenario.name} on {device}: {counts}"]
    if device != "sim" and plan.scenario.target.name == BUILTIN:
        lines.append("  [sim] is ignored on a real device")
    for arm in plan.arms:
        expected = arm.expectation.hang
        if arm.expectation.min_rate is not None:
            expected += f" (at least {arm.expectation.min_rate:g})"
        lines.append(f"  {arm.arm_string}: hang {expected}, tokens {arm.expectation.tokens}")
        if arm.same_as is not None:
            lines.append(f"    the same as {arm.same_as}: not run again")
        for name, choice in arm.resolutions.items():
            lines.append(f"    {name}: {choice.requested} → {choice.resolved}, {choice.why}")
    for row in commands(plan.scenario, device, plan.arms):
        lines.append(f"  the engine in arm {row['arm']}:")
        lines += [f"    {line}" for line in row["commands"]]
    lines += [f"  trial {trial.id}" for trial in plan.trials]
    return lines
