"""Arms and trials: a scenario's combinations of toggles, what each resolves to, and the trials of a run.

Here: pure expansion. Not here: the file format (`scenario_model.py`), the toggles' rules (`toggles.py`) and
running anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.scenario_model import Expect, Scenario
from harness.toggles import DEFAULT, Facts, Resolution, gather_facts, resolve


@dataclass(frozen=True, slots=True)
class Expectation:
    """What an arm should do on one device. ``min_rate`` is set where ``hang`` is *sometimes*."""

    hang: str
    min_rate: float | None
    mechanism: str | None
    tokens: str
    kind: str | None = None
    culprits: tuple[int, ...] | None = None
    """Ranks that the diagnosis must name; None: any."""
    stream: str | None = None
    group: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "hang": self.hang,
            "min_rate": self.min_rate,
            "mechanism": self.mechanism,
            "tokens": self.tokens,
            "kind": self.kind,
            "culprits": None if self.culprits is None else list(self.culprits),
            "stream": self.stream,
            "group": self.group,
        }


@dataclass(frozen=True, slots=True)
class ArmPlan:
    """One arm on one device. ``same_as`` names an earlier arm that resolves to the same: it is not run."""

    arm: Mapping[str, str]  # as requested: the toggles that vary
    arm_string: str
    resolutions: Mapping[str, Resolution]  # all toggles
    expectation: Expectation
    defects: tuple[tuple[str, tuple[int, ...]], ...]  # on sim: name and ranks
    same_as: str | None

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": dict(self.arm),
            "arm_string": self.arm_string,
            "resolved": {name: resolution.to_json() for name, resolution in self.resolutions.items()},
            "expected": self.expectation.to_json(),
            "defects": [{"name": name, "ranks": list(ranks)} for name, ranks in self.defects],
            "same_as": self.same_as,
        }


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """One arm with one seed. ``id`` is a plain file name, unique in a run."""

    id: str
    scenario: str
    device: str
    arm: Mapping[str, str]
    arm_string: str
    index: int  # 0 for the first seed
    seed: int
    resolutions: Mapping[str, Resolution]
    expectation: Expectation
    defects: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def toggles(self) -> dict[str, str]:
        """What the engine gets: resolved values, without the toggles that are left to it."""
        return {
            name: resolution.resolved
            for name, resolution in self.resolutions.items()
            if resolution.resolved != DEFAULT
        }

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "scenario": self.scenario,
            "device": self.device,
            "arm": dict(self.arm),
            "arm_string": self.arm_string,
            "seed": self.seed,
            "resolved": {name: resolution.to_json() for name, resolution in self.resolutions.items()},
            "expected": self.expectation.to_json(),
            "defects": [{"name": name, "ranks": list(ranks)} for name, ranks in self.defects],
        }


def arm_string(arm: Mapping[str, str]) -> str:
    """``pinned=pageable,symm_mem=off``: the toggles sorted; ``default`` where none is named."""
    return ",".join(f"{name}={arm[name]}" for name in sorted(arm)) or "default"


def requested_arms(scenario: Scenario) -> tuple[dict[str, str], ...]:
    """The combinations of the toggles that vary, in file order; where none varies, the fixed toggles."""
    varied = scenario.arms.varied()
    if not varied:
        return (scenario.toggles.values(),)
    arms = [dict(zip(varied, values, strict=True)) for values in product(*varied.values())]
    excluded = [entry.values() for entry in scenario.arms.exclude]
    return tuple(arm for arm in arms if not any(has_all(arm, entry) for entry in excluded))


def has_all(arm: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(arm.get(name) == value for name, value in wanted.items())


def matching(scenario: Scenario, device: str, arm: Mapping[str, str]) -> tuple[Expect, ...]:
    """The expectations of an arm on a device, the most specific first; fixed toggles count as the arm's."""
    full = scenario.toggles.values() | dict(arm)
    found = [e for e in scenario.expect if device in e.device and has_all(full, e.arm.values())]
    return tuple(sorted(found, key=lambda e: -len(e.arm.values())))


def expectation(scenario: Scenario, device: str, arm: Mapping[str, str]) -> Expectation:
    """The most specific expectation; *never*, with equal tokens, where the scenario says nothing."""
    found = matching(scenario, device, arm)
    chosen = found[0] if found else Expect()
    everyone = tuple(range(scenario.target.ranks))
    return Expectation(
        chosen.hang,
        chosen.min_rate,
        chosen.mechanism,
        chosen.tokens,
        kind=chosen.kind,
        culprits=everyone if chosen.culprits == "all" else chosen.culprits,
        stream=chosen.stream,
        group=chosen.group,
    )


def plan_arms(scenario: Scenario, device: str, facts: Facts | None = None) -> tuple[ArmPlan, ...]:
    """Every arm, in file order. ``facts`` are looked up on this machine where they are not given."""
    facts = facts or gather_facts(device, scenario.target.ranks, scenario.target.name)
    if facts.device != device:
        raise ValueError(f"facts are of {facts.device!r}, not of {device!r}")
    seen: dict[tuple[str, ...], str] = {}
    plans = []
    for arm in requested_arms(scenario):
        resolutions = resolve(scenario.toggles.values() | arm, facts)
        outcome = tuple(resolution.resolved for resolution in resolutions.values())
        text = arm_string(arm)
        plans.append(
            ArmPlan(
                arm=arm,
                arm_string=text,
                resolutions=resolutions,
                expectation=expectation(scenario, device, arm),
                defects=_defects(scenario, device, resolutions),
                same_as=seen.get(outcome),
            )
        )
        seen.setdefault(outcome, text)
    return tuple(plans)


def _defects(
    scenario: Scenario, device: str, resolutions: Mapping[str, Resolution]
) -> tuple[tuple[str, tuple[int, ...]], ...]:
    if device != "sim" or "defect" not in resolutions:
        return ()
    toggled = resolutions["defect"].resolved
    everywhere = tuple(range(scenario.target.ranks))
    chosen: list[tuple[str, tuple[int, ...]]] = [
        (d.name, d.ranks or everywhere) for d in scenario.sim.defects
    ]
    if toggled != "none":
        chosen.append((toggled, scenario.sim.defect_ranks or everywhere))
    return tuple(chosen)


def expand(
    scenario: Scenario,
    device: str,
    trials: int | None = None,
    seed: int = 0,
    facts: Facts | None = None,
) -> tuple[TrialPlan, ...]:
    """The trials in running order. Trial i has seed ``seed + i``, the same in every arm.

    ``trials`` per arm replaces the scenario's count. Arms that are the same as an earlier one have none.
    """
    arms = [arm for arm in plan_arms(scenario, device, facts) if arm.same_as is None]
    indices = range(trials if trials is not None else scenario.trials.count)
    if scenario.trials.interleaved:
        order = [(arm, index) for index in indices for arm in arms]
    else:
        order = [(arm, index) for arm in arms for index in indices]
    return tuple(_trial(scenario, device, arm, index, seed + index) for arm, index in order)


def _trial(scenario: Scenario, device: str, arm: ArmPlan, index: int, seed: int) -> TrialPlan:
    return TrialPlan(
        id=f"{scenario.name}.{arm.arm_string}.seed-{seed}",
        scenario=scenario.name,
        device=device,
        arm=arm.arm,
        arm_string=arm.arm_string,
        index=index,
        seed=seed,
        resolutions=arm.resolutions,
        expectation=arm.expectation,
        defects=arm.defects,
    )
