"""What the gate looks at and what it answers: frozen types, without a rule. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from harness.checkers import HANGS

Answer: TypeAlias = Literal["yes", "no", "not yet"]
Blamed: TypeAlias = Literal["pinning", "barrier"]
NeedVerdict: TypeAlias = Literal["met", "failed", "missing"]
Document: TypeAlias = Mapping[str, Any]

PAGEABLE, PINNED, SYNC, SNAPSHOT = "pageable", "pinned", "pinned_sync", "pinned_snapshot"
PINNING = (PINNED, SYNC, SNAPSHOT)
"""The values of the toggle ``pinned`` that pin."""
SHARED = "its ranks shared a device, so gloo carried their collectives and no graph was captured"
"""Why a trial is weak evidence, and its latencies none."""
STATUS: Mapping[Answer, int] = {"yes": 0, "no": 1, "not yet": 3}


class GateError(Exception):
    """The evidence that was named cannot be judged as it is; the message says what to give instead."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What makes trials comparable: one scenario with one engine, model, workload and pressure.

    ``definition`` is that as canonical JSON, without the toggles. ``source`` is what to type for the scenario, and
    ``settings`` the ``--set`` that it was run with.
    """

    scenario: str
    definition: str
    model: str
    source: str = ""
    settings: tuple[str, ...] = ()
    foreign: bool = False
    """The engine is not the built-in one: the first trial of a seed is the reference of the others."""

    @property
    def key(self) -> tuple[str, str]:
        return self.scenario, self.definition


@dataclass(frozen=True, slots=True)
class Trial:
    """One stored trial, as far as the gate cares."""

    id: str
    run: str
    pool: Pool
    pinned: str
    """Resolved value of the toggle; what was merely asked for says nothing."""
    others: str
    """The other toggles as resolved, as one string."""
    seed: int | None
    outcome: str
    weak: str = ""
    """Why it says nothing that it did not hang; empty where it does."""
    tokens_differ: int = 0
    """Requests whose output differs from the reference of the seed."""
    tokens_compared: int = 0
    """0 for a trial that is the reference itself."""
    signature: str = ""
    spoiled: str = ""
    """Why it cannot count whatever came of it; empty where it may."""

    @property
    def hung(self) -> bool:
        return self.outcome in HANGS

    @property
    def known(self) -> bool:
        """How it ended is known, and nothing spoils it."""
        return self.outcome not in ("unknown", "skipped") and not self.spoiled

    @property
    def compared(self) -> bool:
        """It ended by itself and its tokens were compared with the reference's."""
        return self.known and not self.hung and self.tokens_compared > 0

    @property
    def counts(self) -> bool:
        """It says something about a bound: a hang always does, its absence only under pressure."""
        return self.known and (self.hung or not self.weak)


@dataclass(frozen=True, slots=True)
class LitmusTest:
    """One line of a litmus result: ``k`` of ``n`` shots showed the outcome that is watched."""

    name: str
    forbidden: bool
    k: int
    n: int
    power: bool
    verdict: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One directory that was named. ``facts``: the platform as far as it was recorded."""

    path: str
    kind: Literal["run", "litmus"]
    device: str
    simulation: bool
    facts: Mapping[str, str]
    trials: tuple[Trial, ...] = ()
    tests: tuple[LitmusTest, ...] = ()
    latency: Document | None = None
    """Of a run: what `reports.compare` says of it by ``pinned``; None where it cannot compare."""
    notes: tuple[str, ...] = ()
    identity: str = ""
    """Of a run: the same for copies of it."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked: a hang rate below ``bound`` with ``confidence`` (one-sided).

    ``device`` None: where the evidence is from. ``wanted``: words that choose one of several platforms.
    """

    bound: float = 0.01
    confidence: float = 0.95
    device: str | None = None
    wanted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that a yes needs and that is not there, with the command that would supply it."""

    what: str
    command: str

    def to_json(self) -> dict[str, str]:
        return {"what": self.what, "command": self.command}


@dataclass(frozen=True, slots=True)
class Need:
    """One condition of a yes. ``figures`` is what ``found`` was worded from."""

    name: str
    verdict: NeedVerdict
    found: str
    wanted: str
    figures: Document = field(default_factory=dict)
    lacks: tuple[Lack, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "found": self.found,
            "wanted": self.wanted,
            "figures": dict(self.figures),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """One symptom of one arm against another, over seeds that both have.

    ``hang``: ``k`` of ``n`` trials hung against ``against_k`` of ``n``, Fisher's exact test. ``tokens``: of ``n``
    pairs more requests differed in ``k`` and fewer in ``against_k``, the exact sign test. ``p`` is one-sided;
    ``shown``: it is small enough.
    """

    arm: str
    against: str
    symptom: Literal["hang", "tokens"]
    k: int
    n: int
    against_k: int
    p: float
    shown: bool

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Blame:
    """What is at fault, why, and the tests behind it. ``reuse``: pinning, by the reuse of a copy's source.
    ``simulation``: by trials of a simulated device."""

    at_fault: Blamed | None
    why: str
    tests: tuple[Comparison, ...] = ()
    reuse: bool = False
    simulation: bool = False
