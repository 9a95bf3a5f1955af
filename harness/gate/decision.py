"""Evidence in, the gate's answer out. Pure; docs/gate.md has the rule in words.

*No* when a need failed, *yes* when all are met, else *not yet*. A simulation opens no gate and shuts none: whatever
it shows, its answer is *not yet*, and what is missing is a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.gate import commands
from harness.gate.blame import blame
from harness.gate.counting import ArmCount, arm_counts
from harness.gate.model import STATUS, Answer, Blame, Evidence, Lack, Need, Trial, Wish
from harness.gate.needs import Seen, needs
from harness.gate.platforms import Chosen, choose

SCHEMA = 1
_BLAME_TRIALS = 10
"""Enough for Fisher's test where one arm always hangs and the other never does."""


@dataclass(frozen=True, slots=True)
class Gate:
    """The answer with all that it rests on."""

    answer: Answer
    chosen: Chosen
    wish: Wish
    trials_wanted: int
    needs: tuple[Need, ...]
    missing: tuple[Lack, ...]
    blame: Blame
    arms: tuple[ArmCount, ...]

    @property
    def exit(self) -> int:
        return STATUS[self.answer]

    @property
    def simulation(self) -> bool:
        return self.chosen.device == "sim"

    def to_json(self) -> dict[str, Any]:
        blamed = self.blame
        return {
            "schema": SCHEMA,
            "answer": self.answer,
            "for": self.chosen.platform,
            "device": self.chosen.device,
            "simulation": self.simulation,
            "bound": self.wish.bound,
            "confidence": self.wish.confidence,
            "trials_wanted": self.trials_wanted,
            "needs": [need.to_json() for need in self.needs],
            "missing": [lack.to_json() for lack in self.missing],
            "blame": blamed.at_fault,
            "blame_why": blamed.why,
            "blame_reuse": blamed.reuse,
            "blame_simulation": blamed.simulation,
            "tests": [test.to_json() for test in blamed.tests],
            "arms": [arm.to_json() for arm in self.arms],
            "evidence": [
                *(_evidence(one, True, "") for one in self.chosen.counted),
                *(_evidence(one, False, why) for one, why in self.chosen.others),
            ],
        }


def _evidence(one: Evidence, counts: bool, why: str) -> dict[str, Any]:
    return {
        "path": one.path,
        "kind": one.kind,
        "device": one.device,
        "platform": dict(one.facts),
        "counts": counts,
        "why": why,
        "notes": list(one.notes),
    }


def decide(evidence: Sequence[Evidence], wish: Wish) -> Gate:
    """Raises GateError where the evidence is of several platforms or of none that was asked for, ValueError for a
    bound or confidence that no trials can show."""
    chosen = choose(evidence, wish)
    trials = _trials(chosen.counted)
    seen = Seen(chosen, wish, trials)
    found = needs(seen)
    simulation = chosen.device == "sim"
    answer: Answer = "not yet"
    if not simulation and any(need.verdict == "failed" for need in found):
        answer = "no"
    elif not simulation and all(need.verdict == "met" for need in found):
        answer = "yes"
    blamed = replace(blame(trials, wish.confidence), simulation=simulation)
    if not trials and (simulated := _trials(chosen.simulated)):
        blamed = replace(blame(simulated, wish.confidence), simulation=True)
    lacks = [lack for need in found for lack in need.lacks]
    if simulation:
        lacks = _device_lacks(chosen, seen.trials_wanted)
    elif answer == "no" and blamed.at_fault is None and any(trial.hung for trial in trials):
        lacks.append(Lack(f"what is at fault: {blamed.why}", seen.more(_BLAME_TRIALS)))
    return Gate(
        answer,
        chosen,
        wish,
        seen.trials_wanted,
        found,
        tuple(dict.fromkeys(lacks)),
        blamed,
        arm_counts(trials),
    )


def _trials(evidence: Sequence[Evidence]) -> tuple[Trial, ...]:
    return tuple(trial for one in evidence for trial in one.trials)


def _device_lacks(chosen: Chosen, trials: int) -> list[Lack]:
    """More of a simulation would not help."""
    device = "cuda" if chosen.facts.get("memory_model") == "cuda" else "npu"
    what = "evidence of a device: a simulation opens no gate"
    return [Lack(what, commands.litmus(device)), Lack(what, commands.run(device, trials))]
