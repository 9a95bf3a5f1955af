"""Which evidence may be counted together: one device, one platform. Pure.

Two pieces of evidence are of different platforms when a fact that both recorded differs. Such evidence is never
mixed: GateError names both sides. A fact that one of them lacks tells nothing; what a *yes* must have recorded is a
need of its own (``needs.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.gate.model import Evidence, GateError, Wish

GATED = ("npu", "cuda", "sim")
"""Devices that can be asked about: a CPU has no copy to pin memory for."""
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "npu": ("device_name", "driver", "cann", "torch", "torch_npu"),
    "cuda": ("device_name", "driver", "torch"),
    "sim": (),
}
"""Facts without which nobody could say later what an answer was about."""
_WORDS: Mapping[str, str] = {
    "device_name": "",
    "driver": "driver ",
    "firmware": "firmware ",
    "cann": "CANN ",
    "cuda": "CUDA ",
    "torch": "torch ",
    "torch_npu": "torch_npu ",
    "engine": "",
    "architecture": "",
    "memory_model": "memory model ",
}


@dataclass(frozen=True, slots=True)
class Chosen:
    """``counted``: of the device and platform asked about. ``others``: what does not count, each with the reason.
    ``simulated``: of those, what came from a simulation, for a blame that is labelled as such."""

    device: str
    platform: str
    facts: Mapping[str, str]
    counted: tuple[Evidence, ...]
    others: tuple[tuple[Evidence, str], ...]

    @property
    def simulated(self) -> tuple[Evidence, ...]:
        return tuple(one for one, _ in self.others if one.simulation)


def choose(evidence: Sequence[Evidence], wish: Wish) -> Chosen:
    """Raises GateError where there is more than one device or platform to choose from, or none of those asked."""
    device = _device(evidence, wish)
    others: list[tuple[Evidence, str]] = []
    own = []
    for one in evidence:
        if one.device == device and (device == "sim" or not one.simulation):
            own.append(one)
        elif one.simulation:
            others.append((one, "a simulation is no evidence about hardware"))
        else:
            others.append((one, f"it is of {one.device}"))
    counted = []
    for one in own:
        unmet = [text for text in wish.wanted if not _fits(one.facts, text)]
        if unmet:
            others.append((one, f"not for {unmet[0]}: {describe(device, one.facts)}"))
        else:
            counted.append(one)
    if wish.wanted and own and not counted:
        known = sorted({describe(device, one.facts) for one in own})
        raise GateError(f"--for: no evidence is for {', '.join(wish.wanted)}; there is {'; '.join(known)}")
    _refuse_mixed(counted)
    facts = _together(counted)
    return Chosen(device, describe(device, facts), facts, tuple(counted), tuple(others))


def _device(evidence: Sequence[Evidence], wish: Wish) -> str:
    if wish.device is not None:
        if wish.device not in GATED:
            raise GateError(
                f"--device {wish.device}: has no copy to pin memory for; allowed: {', '.join(GATED)}"
            )
        return wish.device
    real = sorted({one.device for one in evidence if one.device in ("npu", "cuda") and not one.simulation})
    if len(real) > 1:
        sides = " and of ".join(_named(evidence, device) for device in real)
        raise GateError(f"the evidence is of {sides}; choose with --device")
    if real:
        return real[0]
    if any(one.device == "sim" for one in evidence):
        return "sim"
    seen = ", ".join(sorted({one.device for one in evidence}))
    raise GateError(f"the evidence is of {seen}, where nothing is pinned; give --device npu or --device cuda")


def _named(evidence: Sequence[Evidence], device: str) -> str:
    return f"{device} ({next(one.path for one in evidence if one.device == device)})"


def _refuse_mixed(evidence: Sequence[Evidence]) -> None:
    for at, one in enumerate(evidence):
        for other in evidence[:at]:
            for name in one.facts.keys() & other.facts.keys():
                family = one.device == "npu" and one.kind != other.kind
                if not same(name, one.facts[name], other.facts[name], family=family):
                    sides = " and ".join(f"{side.facts[name]} ({side.path})" for side in (other, one))
                    raise GateError(
                        f"the evidence is of different platforms, {name} {sides}; give evidence of one, or choose "
                        f"with --for {name}={one.facts[name]}"
                    )


def same(name: str, one: str, other: str, *, family: bool = False) -> bool:
    """Whether two records of a fact can be of one platform.

    A package's version has its build's label (+cpu, +cu128) in some records and not in others. ``family``: the
    records come from different tools. npu-smi names a family where torch_npu names the chip (Ascend910,
    Ascend910_9392), and a run reads CANN's version from its files where a litmus result asks torch_npu.
    """
    if one == other:
        return True
    if name == "device_name" or (family and name == "cann"):
        short, long = sorted((_plain(one), _plain(other)), key=len)
        return family and short != "" and short in long
    return one.partition("+")[0] == other.partition("+")[0] and ("+" in one) != ("+" in other)


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _fits(facts: Mapping[str, str], text: str) -> bool:
    """``text`` is NAME=VALUE, or a part of any fact."""
    name, equals, value = text.partition("=")
    if equals and name in _WORDS:
        return name in facts and same(name, facts[name], value)
    return any(text.lower() in f"{_WORDS.get(name, '')}{fact}".lower() for name, fact in facts.items())


def _together(evidence: Sequence[Evidence]) -> dict[str, str]:
    """Each fact as the first that has it says it."""
    found: dict[str, str] = {}
    for one in evidence:
        for name, fact in one.facts.items():
            found.setdefault(name, fact)
    return found


def describe(device: str, facts: Mapping[str, str]) -> str:
    """``npu (Ascend910, driver 25.2.0, CANN 8.2.RC1, torch 2.7.1, torch_npu 2.7.1)``."""
    if device == "sim":
        model = facts.get("memory_model")
        return f"the simulated device{'' if model is None else f' (memory model {model})'}"
    told = [f"{word}{facts[name]}" for name, word in _WORDS.items() if name in facts]
    return f"{device} ({', '.join(told) or 'nothing recorded'})"


def unrecorded(device: str, evidence: Sequence[Evidence]) -> dict[str, list[str]]:
    """Required facts that a piece of evidence does not have, by its path."""
    lacks = {one.path: [name for name in REQUIRED[device] if name not in one.facts] for one in evidence}
    return {path: names for path, names in lacks.items() if names}
