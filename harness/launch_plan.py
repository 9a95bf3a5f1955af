"""What an engine is started with, from a scenario and one arm: the seam between scenarios and targets.

Here: one record filled in. Not here: what a target makes of it (``serving.targets``) and when it is started
(``ranks.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.arms import ArmPlan
from harness.scenario_model import Scenario
from harness.target import EngineSpec, find_target
from harness.toggles import DEFAULT


def engine_spec(
    scenario: Scenario, device: str, toggles: Mapping[str, str], ranks_per_device: int = 1
) -> EngineSpec:
    """``toggles``: resolved values, without those that are left to the engine."""
    return EngineSpec(
        world=scenario.target.ranks,
        device=device,
        toggles=dict(toggles),
        target=scenario.target.model_dump(),
        model=scenario.model.model_dump(),
        engine=scenario.engine.model_dump(),
        faults=[fault.model_dump() for fault in scenario.faults],
        ranks_per_device=ranks_per_device,
    )


def arm_spec(scenario: Scenario, device: str, arm: ArmPlan) -> EngineSpec:
    resolved = {name: choice.resolved for name, choice in arm.resolutions.items()}
    return engine_spec(scenario, device, {n: value for n, value in resolved.items() if value != DEFAULT})


def commands(scenario: Scenario, device: str, arms: Sequence[ArmPlan]) -> list[dict[str, Any]]:
    """The commands that start the engine, for each arm that is run; empty for an engine without commands.

    Raises TargetError.
    """
    target = find_target(scenario.target.name)
    found = [
        (arm, list(target.commands(arm_spec(scenario, device, arm)))) for arm in arms if arm.same_as is None
    ]
    return [{"arm": arm.arm_string, "commands": lines} for arm, lines in found if lines]
