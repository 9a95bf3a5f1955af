"""What one planned trial is to its ranks, its watchdog and its judge: values in, values out.

Not here: running it (``session.py``), which trials there are (``arms.py``).
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.arms import TrialPlan
from harness.controller import Ended
from harness.fault_model import Fault
from harness.judge import TrialContext
from harness.scenario_model import Scenario
from harness.store import TrialStore, safe_name
from harness.target import RankProcess, TrialSpec
from harness.toggles import BUILTIN
from harness.watchdog import WatchdogSettings

_REFERENCE = {
    "pinned": "pageable",
    "symm_mem": "off",
    "graph": "off",
    "overlap": "off",
    "defect": "none",
    "fault": "off",
}
"""The undisturbed reference: nothing runs ahead, nothing is captured, nothing is retracted on purpose."""


def reference_path(run: Path, scenario: str, seed: int) -> Path:
    """Tokens of the undisturbed reference of one scenario and seed."""
    return run / "reference" / f"{safe_name(scenario)}.seed-{seed}.json"


def context(planned: Mapping[str, Any], scenario: Scenario, run: Path, simulation: bool) -> TrialContext:
    """``planned``: ``TrialPlan.to_json()``."""
    return TrialContext(
        planned=planned,
        target=scenario.target.name,
        world=scenario.target.ranks,
        simulation=simulation,
        retractions_required=scenario.require.retractions,
        aborts_required=scenario.require.aborted,
        tokens_exact=in_float32(scenario, str(planned["device"])),
        faults=broken(scenario, resolved(planned)),
        rerun=shlex.join(["hangrig", "rerun", str(run), planned["id"]]),
    )


def resolved(planned: Mapping[str, Any]) -> dict[str, str]:
    """The toggles of a planned trial as its engine has them."""
    return {name: str(one["resolved"]) for name, one in planned["resolved"].items()}


def trial_spec(
    scenario: Scenario,
    plan: TrialPlan,
    store: TrialStore,
    ranks: Sequence[RankProcess],
    wait_s: float,
    *,
    reference: bool,
) -> TrialSpec:
    """What the ranks are told. ``reference``: the undisturbed one of the seed."""
    # A foreign engine outlives its trials, and so do its ledgers: its ranks say where they are.
    numbers = [] if is_foreign(scenario) else [entry.rank for entry in ranks]
    (store.path / "tokens").mkdir(exist_ok=True)
    sim = scenario.sim.model_dump()
    sim["defects"] = [] if reference else plan.to_json()["defects"]
    engine = scenario.engine.model_dump()
    jitter = scenario.jitter.model_dump()
    if reference:
        engine["retract_every"] = 0
        jitter["probability"] = 0.0
    return TrialSpec(
        id=store.id,
        seed=plan.seed,
        toggles=plan.toggles | _REFERENCE if reference else plan.toggles,
        model=scenario.model.model_dump(),
        engine=engine,
        workload=scenario.workload.model_dump(),
        client=scenario.client.model_dump(),
        sim=sim,
        jitter=jitter,
        ledger_paths={rank: str(store.ledger_path(rank)) for rank in numbers},
        decisions_paths={rank: str(store.decisions_path(rank)) for rank in numbers},
        journal_paths={r.rank: str(store.path / "tokens" / f"rank{r.rank}.jsonl") for r in ranks},
        timeout_s=wait_s,
        nodes={entry.rank: entry.node for entry in ranks},
        faults=[] if reference else broken(scenario, plan.toggles),
        fault_logs={rank: str(store.fault_log_path(rank)) for rank in numbers},
    )


def broken(scenario: Scenario, toggles: Mapping[str, str]) -> list[dict[str, Any]]:
    """The faults of one arm of the built-in engine: as the scenario has them, or as its twin has."""
    switch = toggles.get("fault", "off")
    if switch == "off" or is_foreign(scenario):
        return []
    faults = [fault for fault in scenario.faults if isinstance(fault, Fault)]
    return [(fault.repaired() if switch == "twin" else fault).model_dump(mode="json") for fault in faults]


def in_float32(scenario: Scenario, device: str) -> bool:
    """Whether equal tokens can be asked of a single trial: in a simulation, with the small presets, and where a
    foreign engine was told float32. What a directory stores is taken for less."""
    if is_foreign(scenario):
        return scenario.engine.dtype == "float32"
    return device == "sim" or (scenario.model.directory is None and scenario.model.preset != "lite")


def is_foreign(scenario: Scenario) -> bool:
    """The engine is not the built-in one."""
    return scenario.target.name != BUILTIN


def output_tokens(ended: Ended) -> dict[str, list[int]]:
    """Output tokens by request."""
    return {k: list(v) for result in ended.progress.done.values() for k, v in result.tokens.items()}


def watchdog_settings(scenario: Scenario, *, warm: bool) -> WatchdogSettings:
    """Ranks that have been through a trial are warm: their first steps compile nothing."""
    names = {entry.name for entry in dataclasses.fields(WatchdogSettings)}
    settings = WatchdogSettings(
        **{name: value for name, value in scenario.watchdog.model_dump().items() if name in names}
    )
    return dataclasses.replace(settings, warm_steps=0) if warm else settings


def title(plan: TrialPlan) -> str:
    """The trial for people."""
    return f"{plan.scenario} {plan.arm_string} seed {plan.seed}"


def one_line(document: Mapping[str, Any]) -> str:
    """The end of a trial for the log: outcome, verdict, and the first check that did not pass."""
    text = f"{document['outcome']} in {document['duration_s']:.1f} s, {document['verdict']}"
    bad = [one for one in document["checks"] if one["verdict"] in ("fail", "unknown")]
    return f"{text}: {bad[0]['name']}: {bad[0]['reason']}" if bad else text
