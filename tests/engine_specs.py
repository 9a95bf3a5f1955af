"""What the tests of the targets for foreign engines start from: specs made of scenario words, and of recipes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.arms import plan_arms
from harness.launch_plan import arm_spec
from harness.scenario import model_for
from harness.scenario_model import Scenario
from harness.target import EngineSpec
from harness.toggles import Facts
from serving.targets.dialect import Place
from serving.targets.engine_model import find_model
from serving.targets.sglang import SglangDialect
from serving.targets.vllm import VllmDialect
from serving.workload import Arrival, generate, workload

SCENARIOS = Path(__file__).parents[1] / "scenarios"
RECIPES = (
    "sglang-dp-cpu", "sglang-dp-npu", "sglang-dp-npu-retract", "sglang-dp-cuda", "vllm-dp-cuda", "vllm-tp-cpu",
    "vllm-ascend",
)  # fmt: skip
DIALECTS = {"sglang": SglangDialect(), "vllm": VllmDialect()}
WORKLOAD = {"kind": "bursts", "bursts": 1, "requests_per_burst": 2, "prompt_tokens": [8, 8]}


def scenario(name: str, device: str = "cpu", /, **tables: Any) -> Scenario:
    """A small scenario; ``tables`` are laid over it, table by table."""
    document: dict[str, Any] = {
        "name": "words",
        "summary": "words",
        "workload": WORKLOAD,
        "target": {"name": name, "device": device, "python": "python"},
    }
    if name == "vllm":
        document["engine"] = {"page_size": 16, "context_tokens": 512}
    for key, table in tables.items():
        given = document.get(key)
        document[key] = {**given, **table} if isinstance(given, dict) else table
    return model_for(document).model_validate(document)


def recipe(name: str) -> Scenario:
    """A recipe's scenario file, as it is, for an interpreter called python."""
    document = tomllib.loads((SCENARIOS / f"{name}.toml").read_text())
    document["target"]["python"] = "python"
    return model_for(document).model_validate(document)


def spec_of(chosen: Scenario, arm: int = 0) -> EngineSpec:
    """The spec of one arm on a machine that has what it asks for."""
    device = chosen.target.device or "cpu"
    ranks = chosen.target.ranks
    facts = Facts(device, ranks, "2.9.0", device_count=ranks, target=chosen.target.name)
    return arm_spec(chosen, device, plan_arms(chosen, device, facts)[arm])


def spec(name: str, device: str = "cpu", /, **tables: Any) -> EngineSpec:
    return spec_of(scenario(name, device, **tables))


def arrivals(chosen: Scenario, seed: int = 0) -> tuple[Arrival, ...]:
    return generate(workload(chosen.workload.model_dump()), seed=seed, vocab_size=1024)


def place(chosen: EngineSpec, node: int = 0, version: str | None = None) -> Place:
    """Of a command that is only shown."""
    model = find_model(chosen.model, Path("MODEL"))
    return Place(
        node=node,
        nodes=chosen.target["nodes"],
        host="127.0.0.1",
        port="PORT",
        ports=tuple(f"PORT+{i}" for i in range(1, 17)),
        model=model.path,
        dummy=model.dummy,
        folder=Path("FOLDER"),
        version=version,
    )


def argv(chosen: EngineSpec, node: int = 0, version: str | None = None) -> list[str]:
    """What the server gets, without the interpreter and the module."""
    dialect = DIALECTS[chosen.target["name"]]
    return list(dialect.command(chosen, place(chosen, node, version)).arguments[3:])


def env(chosen: EngineSpec) -> Mapping[str, str]:
    return DIALECTS[chosen.target["name"]].command(chosen, place(chosen)).env


def value(arguments: list[str], flag: str) -> str | None:
    """What follows ``flag``; None where it is not there."""
    return arguments[arguments.index(flag) + 1] if flag in arguments else None
