"""Toggles: what a scenario asks for, what the platform gives, and why.

Here: the toggles' names and values, the facts a decision needs, and the rules, in the order in which one
toggle depends on another. Not here: where requests come from (`scenario.py`) and how an engine obeys.

A rule answers from `Facts` alone, so every platform can be asked on any machine. The safe answer is the
rule's default; a platform that answers otherwise names its evidence in ``why``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.device_facts import accelerators

VALUES: Mapping[str, tuple[str, ...]] = {
    "probe": ("off", "on"),
    "pinned": ("pageable", "pinned", "pinned_sync", "pinned_snapshot"),
    "symm_mem": ("off", "on"),
    "graph": ("off", "on"),
    "overlap": ("off", "on"),
    "prefix_cache": ("off", "on"),
    "defect": ("none", "D1", "D2", "D3", "D4"),
    "fault": ("off", "on", "twin"),
}
"""Every toggle with its values, in the order of resolution: a rule may look at the toggles before its own."""

DEVICES = ("sim", "cpu", "cuda", "npu")
BUILTIN = "builtin"
DEFAULT = "default"
"""What ``requested`` says where nobody asked: the platform chooses."""
SYMM_MEM_TORCH = (2, 8)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of the place where a trial will run. None means nobody looked."""

    device: str
    world: int
    torch_version: str
    device_count: int | None = None
    hip: bool = False
    target: str = BUILTIN
    peer_access: bool | None = None
    """Every rank's device can read the memory of every other one's."""
    graphs: bool | None = None
    """torch has captured graphs for the device."""
    shmem: str | None = None
    """On NPU: what stands against torch's symmetric memory there, in a clause."""

    @property
    def foreign(self) -> bool:
        """The engine is not ours: it has defaults of its own, and no modelled defects."""
        return self.target != BUILTIN

    @property
    def ranks_per_device(self) -> int:
        """Ranks of the built-in engine that one device holds, at most. Only CUDA lets processes share one: an NPU
        belongs to the process that took it, and a foreign engine places its ranks itself."""
        if self.device != "cuda" or self.foreign or not self.device_count:
            return 1
        return -(-self.world // self.device_count)


@dataclass(frozen=True, slots=True)
class Resolution:
    """One toggle of one trial: the two columns and the reason between them."""

    requested: str
    resolved: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"requested": self.requested, "resolved": self.resolved, "why": self.why}


Resolutions = Mapping[str, Resolution]
Answer = tuple[str, str]  # resolved, why


def gather_facts(device: str, world: int, target: str = BUILTIN) -> Facts:
    """Looks at this machine, at the call. Raises ValueError for a device that does not exist.

    Only versions are read for ``sim`` and ``cpu``; torch is imported for a real device, and a device without its
    module counts as absent (`doctor` says why).
    """
    from importlib.metadata import PackageNotFoundError, version

    if device not in DEVICES:
        raise ValueError(f"device {device!r} does not exist; allowed: {', '.join(DEVICES)}")
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "0"
    if device in ("sim", "cpu"):
        return Facts(device, world, torch_version, target=target)
    found = accelerators(device, world)
    return Facts(
        device,
        world,
        torch_version,
        device_count=found.count,
        hip=found.hip,
        target=target,
        peer_access=found.peer_access,
        graphs=found.graphs,
        shmem=found.shmem,
    )


def resolve(requested: Mapping[str, str], facts: Facts) -> dict[str, Resolution]:
    """Every toggle that the target has, in dependency order; those not in ``requested`` are asked for as DEFAULT.

    Raises ValueError for an unknown toggle or value: `scenario.py` has refused those before, with the file.
    """
    for name, value in requested.items():
        if name not in VALUES:
            raise ValueError(f"toggle {name!r} does not exist; allowed: {', '.join(VALUES)}")
        if value not in VALUES[name]:
            raise ValueError(f"{name} = {value!r} does not exist; allowed: {', '.join(VALUES[name])}")
    done: dict[str, Resolution] = {}
    for name in toggles_of(facts.target):
        asked = requested.get(name, DEFAULT)
        rule = _FOREIGN_RULES.get(name, _RULES[name]) if facts.foreign else _RULES[name]
        resolved, why = rule(asked, facts, done)
        done[name] = Resolution(asked, resolved, why)
    return done


def toggles_of(target: str) -> tuple[str, ...]:
    """The toggles that mean something for a target, in the order of resolution."""
    without = ("probe",) if target == BUILTIN else ("defect", "fault")
    return tuple(name for name in VALUES if name not in without)


def _pinned(asked: str, facts: Facts, done: Resolutions) -> Answer:
    if asked != DEFAULT:
        if facts.device == "npu" and asked != "pageable":
            return (
                asked,
                "as requested; the order of pinned copies on CANN is not proven, so this is observed",
            )
        return asked, "as requested"
    if facts.device == "cuda":
        return (
            "pinned",
            "CUDA orders pinned asynchronous copies in their stream (CUDA runtime, stream semantics)",
        )
    if facts.device == "npu":
        return "pageable", "safe default: nobody has shown pinned asynchronous copies to be ordered on CANN"
    return "pageable", "safe default"


def _symm_mem(asked: str, facts: Facts, done: Resolutions) -> Answer:
    if asked in ("off", DEFAULT):
        return "off", "as requested" if asked == "off" else "safe default"
    if facts.world < 2:
        return "off", f"needs at least 2 ranks, there is {facts.world}"
    if facts.device == "sim":
        return "on", "as requested; the symmetric heap is simulated"
    wanted = f"needs torch ≥ {'.'.join(map(str, SYMM_MEM_TORCH))} and CUDA or HIP"
    if facts.device != "cuda":
        probed = f"; NPUSHMEM: {facts.shmem}" if facts.device == "npu" and facts.shmem else ""
        return "off", f"{wanted}; the device is {facts.device}{probed}"
    if torch_release(facts.torch_version) < SYMM_MEM_TORCH:
        return "off", f"{wanted}; torch is {facts.torch_version}"
    if facts.device_count is not None and facts.device_count < facts.world:
        return "off", f"needs one device a rank: {facts.world} ranks, {facts.device_count} devices"
    if facts.peer_access is False:
        return (
            "off",
            "needs peer access between the ranks' devices, which this machine does not have between all",
        )
    return "on", "as requested"


def _graph(asked: str, facts: Facts, done: Resolutions) -> Answer:
    if asked in ("off", DEFAULT):
        return "off", "as requested" if asked == "off" else "safe default"
    if facts.hip:
        return "off", "host-argument updates of a captured graph were never tried on HIP"
    if facts.graphs is False:
        return "off", f"this torch has no captured graphs for {facts.device}"
    if facts.ranks_per_device > 1:
        return "off", (
            f"{facts.ranks_per_device} ranks share a device: gloo carries their data through the host, and a graph "
            "cannot hold that"
        )
    return "on", "as requested"


def _overlap(asked: str, facts: Facts, done: Resolutions) -> Answer:
    return ("off", "safe default") if asked == DEFAULT else (asked, "as requested")


def _prefix_cache(asked: str, facts: Facts, done: Resolutions) -> Answer:
    return ("on", "every engine under test ships with it on") if asked == DEFAULT else (asked, "as requested")


def _defect(asked: str, facts: Facts, done: Resolutions) -> Answer:
    if asked in ("none", DEFAULT):
        return "none", "as requested" if asked == "none" else "safe default"
    if facts.device != "sim":
        return "none", f"defects are modelled on sim only; the device is {facts.device}"
    if asked == "D1" and done["graph"].resolved == "off":
        return "none", "D1 is a missing fence before a graph update; graph is off, so nothing is updated"
    return asked, "as requested"


def _fault(asked: str, facts: Facts, done: Resolutions) -> Answer:
    if asked == DEFAULT:
        return "on", "the scenario's own faults, where it has any"
    return asked, "as requested"


def _probe(asked: str, facts: Facts, done: Resolutions) -> Answer:
    return ("on", "hangrig sees most with it") if asked == DEFAULT else (asked, "as requested")


def _foreign(name: str) -> Callable[[str, Facts, Resolutions], Answer]:
    """Where nobody asks, a foreign engine keeps its own default; a CPU has neither graphs nor peers' memory."""

    def rule(asked: str, facts: Facts, done: Resolutions) -> Answer:
        if asked == DEFAULT:
            return DEFAULT, f"the default of {facts.target}"
        if asked == "on" and facts.device == "cpu" and name in ("graph", "symm_mem"):
            return "off", "the device is cpu, which has none"
        return (asked, "as requested") if name != "symm_mem" else _symm_mem(asked, facts, done)

    return rule


def _foreign_pinned(asked: str, facts: Facts, done: Resolutions) -> Answer:
    if asked == DEFAULT:
        return DEFAULT, f"the default of {facts.target}"
    if facts.device == "cpu":
        return "pageable", "the device is cpu: there is no copy to pin memory for"
    if done["probe"].resolved == "off":
        return DEFAULT, f"the default of {facts.target}: no flag of it sets this, and the probe is off"
    return _pinned(asked, facts, done)


_FOREIGN_RULES: Mapping[str, Callable[[str, Facts, Resolutions], Answer]] = {
    "pinned": _foreign_pinned,
    **{name: _foreign(name) for name in ("symm_mem", "graph", "overlap", "prefix_cache")},
}
_RULES: Mapping[str, Callable[[str, Facts, Resolutions], Answer]] = {
    "probe": _probe,
    "pinned": _pinned,
    "symm_mem": _symm_mem,
    "graph": _graph,
    "overlap": _overlap,
    "prefix_cache": _prefix_cache,
    "defect": _defect,
    "fault": _fault,
}


def torch_release(version: str) -> tuple[int, int]:
    """Major and minor number of a torch version such as ``2.8.0a0+git1f`` ; (0, 0) where there is none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)
