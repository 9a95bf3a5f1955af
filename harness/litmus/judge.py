"""Counted outcomes in, verdicts out: how often, is that allowed, and does silence say anything. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from harness.litmus.program import ALWAYS_BAD, DIED, ERROR, STALLED, Program
from harness.litmus.rules import RULES, Rule
from harness.rates import Observation, Rate, observation, rate

Verdict: TypeAlias = Literal["pass", "fail", "unknown", "skipped"]


@dataclass(slots=True)
class Counted:
    """What came of one program. ``ended``: why it was shot less often than asked; ``skipped``: why not at all."""

    outcomes: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    ended: str = ""
    skipped: str = ""
    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, outcome: str, why: str = "") -> None:
        """``why``: of an outcome that needs words, kept once each."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        kept = self.errors if outcome == ERROR else self.notes
        if why and why not in kept:
            kept.append(why)

    @property
    def shots(self) -> int:
        """Those that say something about an order: an error of the device does not."""
        return sum(self.outcomes.values()) - self.outcomes.get(ERROR, 0)

    def of(self, *outcomes: str) -> int:
        return sum(self.outcomes.get(one, 0) for one in outcomes)


@dataclass(frozen=True, slots=True)
class Judged:
    """One line of the report."""

    program: type[Program]
    rule: Rule
    counted: Counted
    observed: Rate
    power: bool
    verdict: Verdict
    why: str

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def observation(self) -> Observation:
        return observation(self.observed.k, self.observed.n)

    def to_json(self) -> dict[str, Any]:
        rules = RULES[self.name]
        return {
            "name": self.name,
            "kind": self.rule.kind,
            "family": self.program.family,
            "forbidden": self.rule.kind == "forbidden",
            "watched": list(watched(self.program, self.rule)),
            "observed": self.observed.to_json(),
            "observation": self.observation,
            "outcomes": dict(sorted(self.counted.outcomes.items())),
            "asked": self.counted.asked,
            "power": self.power,
            "shown_by": list(rules.shown_by),
            "verdict": self.verdict,
            "why": self.why,
            "source": self.rule.source,
            "means": rules.means,
            "notes": [*self.counted.errors, *self.counted.notes],
        }


def watched(program: type[Program], rule: Rule) -> tuple[str, ...]:
    """The outcomes that are counted: a program that is forbidden to show them may not stop either."""
    if rule.kind == "forbidden":
        return (*program.watched, *ALWAYS_BAD)
    return (*program.watched, STALLED, DIED) if program.may_stop else program.watched


def judge(
    programs: Mapping[str, type[Program]], counted: Mapping[str, Counted], model: str
) -> tuple[Judged, ...]:
    """A verdict for each program that was asked for, in the order of ``programs``."""
    rules = {name: RULES[name].by_model[model] for name in counted}
    seen = {
        name: counts.of(*watched(programs[name], rules[name])) > 0
        for name, counts in counted.items()
        if rules[name].kind == "control"
    }
    lines = []
    for name, program in programs.items():
        if name not in counted:
            continue
        power = any(seen.get(control, False) for control in RULES[name].shown_by)
        lines.append(_line(program, rules[name], counted[name], power))
    return tuple(lines)


def _line(program: type[Program], rule: Rule, counted: Counted, power: bool) -> Judged:
    observed = rate(counted.of(*watched(program, rule)), counted.shots)
    verdict, why = _verdict(program, rule, counted, observed, power)
    if counted.ended:
        why = f"{why}; {counted.ended}" if why else counted.ended
    return Judged(program, rule, counted, observed, power, verdict, why)


def _verdict(
    program: type[Program], rule: Rule, counted: Counted, observed: Rate, power: bool
) -> tuple[Verdict, str]:
    if counted.skipped:
        return "skipped", counted.skipped
    bad = [one for one in ALWAYS_BAD if counted.of(one) and one not in watched(program, rule)]
    bad = [one for one in bad if not (program.may_stop and one in (STALLED, DIED))]
    if bad:
        return "fail", f"{' and '.join(bad)} is forbidden in every program"
    if rule.kind == "forbidden" and observed.k:
        told = ", ".join(one for one in watched(program, rule) if counted.of(one))
        return "fail", f"forbidden: {told}"
    if counted.errors or counted.of(ERROR):
        return "unknown", f"an error: {' and '.join(counted.errors)}"
    if observed.n == 0:
        return "unknown", "no shot was finished"
    if rule.kind == "observed":
        return "pass", "told, not judged"
    if not power:
        control = program.name if rule.kind == "control" else " or ".join(RULES[program.name].shown_by)
        return "unknown", f"no power: {control} was not seen under this stress, so silence says nothing"
    return "pass", ""


def exit_status(lines: tuple[Judged, ...]) -> int:
    """1 a forbidden outcome, 3 something without power or unknown, 4 something could not be run here, else 0."""
    verdicts = {line.verdict for line in lines}
    for verdict, status in (("fail", 1), ("unknown", 3), ("skipped", 4)):
        if verdict in verdicts:
            return status
    return 0
