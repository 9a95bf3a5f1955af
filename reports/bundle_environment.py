"""What a bundled run stood on: what the run recorded, and what this machine says now where it was made here."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from harness.environment import Reading, driver_readings, package_readings, processor
from reports import fields
from reports.bundle_files import Gathered
from reports.fields import Document

SCHEMA = 1
ENGINE_PACKAGES: Mapping[str, Sequence[str]] = {
    "builtin": ("hangrig",),
    "sglang": ("sglang", "sgl-kernel", "torch", "torch-npu"),
    "vllm": ("vllm", "vllm-ascend", "torch", "torch-npu"),
}
"""By target; of another target its own name."""
_ELSEWHERE = "the run was made on another machine and did not record it"


def environment(facts: Sequence[Reading]) -> dict[str, Any]:
    """The document of environment.json."""
    rows = [{"what": one.name, "value": one.value, "from": one.why} for one in facts]
    return {"schema": SCHEMA, "facts": rows}


def readings(found: Gathered, trial: str) -> list[Reading]:
    """All facts, the run's own first. The host's name is not among them."""
    run = found.document("run.json") or {}
    machine, drivers = fields.table(run, "machine"), fields.table(run, "drivers")
    recorded = [
        _recorded(name, value)
        for table in (fields.table(run, "versions"), machine, drivers)
        for name, value in table.items()
        if name != "node"
    ]
    engine = found.document(f"trials/{trial}/evidence/engine.json") or {}
    if said := fields.optional_text(engine, "engine"):
        recorded.append(Reading("engine", said, "evidence/engine.json"))
    if fields.text(machine, "node") != socket.gethostname():
        lacking = ("nvidia driver", "ascend driver", "cann", "processor", "engine commit")
        return [*recorded, *(Reading(name, None, _ELSEWHERE) for name in lacking if name not in drivers)]
    target, python = _target(run)
    now = [*driver_readings(), processor()]
    now += package_readings(python, ENGINE_PACKAGES.get(target, (target,)))
    if target != "builtin":
        now += package_readings("", ("hangrig",))
    there = {(one.name, one.value) for one in recorded}
    return [
        *recorded,
        *(
            Reading(one.name, one.value, f"{one.why}, when bundled")
            for one in now
            if one.name not in drivers and (one.name, one.value) not in there
        ),
    ]


def _recorded(name: str, value: object) -> Reading:
    if value is None:
        return Reading(name, None, "run.json: not installed, or not there")
    return Reading(name, str(value), "run.json")


def _target(run: Document) -> tuple[str, str]:
    """The target's name and its interpreter (``""``: this one)."""
    for row in fields.rows(run, "scenarios"):
        try:
            scenario = json.loads(fields.text(row, "text"))
        except ValueError:
            continue
        target = fields.table(scenario if isinstance(scenario, Mapping) else {}, "target")
        return fields.text(target, "name", "builtin"), fields.text(target, "python")
    return "builtin", ""
