"""The one result model that every sink renders; nothing here reads, judges or writes.

A Result is what a run showed, in the words of the contract for report.json (see ``Result.to_json``). Sinks
add layout, never facts. Times are seconds since a trial's start, latencies microseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from harness.rates import Observation, Rate
from reports.engine import EngineVoice
from reports.statistics import Percentiles
from reports.words import arm_name

SCHEMA = 1

Verdict: TypeAlias = Literal["pass", "fail", "unknown", "skipped"]
SignatureStatus: TypeAlias = Literal["new", "known", "changed"]
BaselineVerdict: TypeAlias = Literal["no-regression", "regression", "not-comparable", "none"]

STOPPED_OUTCOMES = frozenset({"hang", "livelock", "dead", "stopped"})
"""Outcomes that count as a hang where a scenario says how often one may happen: the work did not end by
itself. A slow trial did, in time, and does not count."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    verdict: str
    reason: str


@dataclass(frozen=True, slots=True)
class Culprit:
    rank: int | None
    role: str
    node: str
    pid: int | None
    device: str | None

    @property
    def name(self) -> str:
        return self.role if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Operation:
    label: str
    sequence: int | None
    site: str
    pending_s: float | None


@dataclass(frozen=True, slots=True)
class Collective:
    group: str
    sequence: int | None
    operation: str
    waiting: tuple[int, ...]
    missing: tuple[int, ...]
    mismatch_what: str | None
    mismatch_sides: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fact:
    """One step of a proof. ``evidence`` is a path inside the trial's directory."""

    fact: str
    evidence: str


@dataclass(frozen=True, slots=True)
class Missing:
    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    kind: str
    mechanism: str
    culprits: tuple[Culprit, ...]
    stream: str | None
    operation: Operation | None
    collective: Collective | None
    proof: tuple[Fact, ...]
    confidence: str
    signature: str
    last_progress_s: float | None
    suspected_s: float | None
    confirmed_s: float | None
    captured_s: float | None
    went_on_s: float | None
    """Of what was slow."""
    missing_evidence: tuple[Missing, ...]


@dataclass(frozen=True, slots=True)
class Recognition:
    """What the known issues say of a hang. ``link`` empty: no entry names it. ``why``: what has changed, or why
    an entry that names it does not count. ``expires``: the last day of an entry that counts."""

    status: SignatureStatus
    link: str = ""
    expires: str | None = None
    note: str = ""
    title: str | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "link": self.link or None,
            "expires": self.expires,
            "note": self.note or None,
            "title": self.title,
            "why": self.why or None,
        }


@dataclass(frozen=True, slots=True)
class Resolution:
    """What became of one toggle: a request, what the platform gave, and why."""

    toggle: str
    requested: str
    resolved: str
    why: str

    @property
    def changed(self) -> bool:
        return self.requested != self.resolved


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a scenario says about an arm. ``min_rate`` and ``mechanism`` are None where it says nothing."""

    hang: str = "any"
    min_rate: float | None = None
    mechanism: str | None = None
    tokens: str = "equal"


@dataclass(frozen=True, slots=True)
class TrialResult:
    id: str
    scenario: str
    arm: Mapping[str, Any]
    seed: int | None
    device: str
    target: str
    outcome: str
    verdict: Verdict
    expectation: Expectation
    checks: tuple[Check, ...]
    steps: int
    tokens: int
    retractions: int
    duration_s: float | None
    tokens_differ: int
    tokens_compared: int
    ranks: int
    resolutions: tuple[Resolution, ...]
    rerun: str
    diagnosis: Diagnosis | None
    problems: tuple[str, ...]
    latency_us: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    engine: EngineVoice | None = None
    """What a foreign engine said; None for the built-in one."""
    known: Recognition | None = None
    """None where the diagnosis has no signature."""
    notes: tuple[str, ...] = ()
    """What the watchdog has to say beside a verdict: suspicions that fell, and that it was starved itself."""
    tokens_exact: bool = True
    """One differing token is one too many: the model works in float32."""

    @property
    def stopped(self) -> bool:
        return self.outcome in STOPPED_OUTCOMES

    @property
    def conclusive(self) -> bool:
        return self.outcome not in ("unknown", "skipped")

    @property
    def differs(self) -> bool:
        """Its tokens differ from the reference's. Whether that is more than the target's own noise, where it has
        any (not ``tokens_exact``), is its arm's to say."""
        if self.outcome == "corrupt":
            return True
        failed = any(check.name == "tokens" and check.verdict == "fail" for check in self.checks)
        return self.tokens_differ > 0 and (failed or self.device == "sim" or not self.tokens_exact)

    @property
    def name(self) -> str:
        return f"{arm_name(self.arm)} seed={'?' if self.seed is None else self.seed}"


@dataclass(frozen=True, slots=True)
class ArmResult:
    """One arm of one scenario. ``why`` is a clause that gives the verdict's reason.

    ``latency_us`` holds the percentiles by hot path over the trials that ran to their end; ``samples_us``
    the samples themselves, one tuple a trial.
    """

    scenario: str
    arm: Mapping[str, Any]
    expectation: Expectation
    verdict: Verdict
    why: str
    observation: Observation
    hangs: Rate
    corrupt: Rate
    same_as: str | None
    resolutions: tuple[Resolution, ...]
    latency_us: Mapping[str, Percentiles]
    samples_us: Mapping[str, tuple[tuple[float, ...], ...]]
    trials: tuple[TrialResult, ...]
    planned: int = 0
    """Trials that the run planned for it, with those that were left out or never ran."""
    left_out: int = 0
    """Planned trials that the time budget or the stopping rule left out."""

    @property
    def name(self) -> str:
        return arm_name(self.arm)

    @property
    def slow(self) -> int:
        """Trials that were slow; they are no hangs."""
        return sum(trial.outcome == "slow" for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        return {
            "arm": dict(self.arm),
            "expected": self.expectation.hang,
            "min_rate": self.expectation.min_rate,
            "expected_mechanism": self.expectation.mechanism,
            "expected_tokens": self.expectation.tokens,
            "observation": self.observation,
            "hangs": self.hangs.to_json(),
            "corrupt": self.corrupt.to_json(),
            "verdict": self.verdict,
            "why": self.why,
            "same_as": self.same_as,
            "latency_us": {path: self.latency_us[path].to_json() for path in sorted(self.latency_us)},
            "planned": self.planned,
            "left_out": self.left_out,
            "trials": [trial.id for trial in self.trials],
        }


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    name: str
    verdict: Verdict
    arms: tuple[ArmResult, ...]

    def to_json(self) -> dict[str, Any]:
        arms = [arm.to_json() for arm in self.arms]
        return {"name": self.name, "verdict": self.verdict, "arms": arms}


@dataclass(frozen=True, slots=True)
class SignatureResult:
    signature: str
    mechanism: str
    count: int
    known: Recognition
    trials: tuple[str, ...]

    @property
    def status(self) -> SignatureStatus:
        return self.known.status

    def to_json(self) -> dict[str, Any]:
        return {
            "signature": self.signature,
            "mechanism": self.mechanism,
            "count": self.count,
            **self.known.to_json(),
            "trials": list(self.trials),
        }


@dataclass(frozen=True, slots=True)
class Baseline:
    """What came of holding a run against an earlier one. ``asked``: as the command line has it. ``run`` None: there
    was none, and the verdict is *none*. ``comparison``: the document of ``hangrig compare RUN RUN``."""

    asked: str
    run: str | None
    verdict: BaselineVerdict
    sentence: str
    comparison: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.asked,
            "run": self.run,
            "verdict": self.verdict,
            "sentence": self.sentence,
            "comparison": None if self.comparison is None else dict(self.comparison),
        }


@dataclass(frozen=True, slots=True)
class Result:
    """A whole run. ``never_run`` are planned trials without a directory and without a reason; ``problems`` name
    damaged files."""

    run: str
    name: str
    verdict: Verdict
    exit: int
    headline: str
    seed: int
    device: str
    simulation: bool
    simulation_note: str
    command: str
    started_utc: str
    finished_utc: str | None
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    scenarios: tuple[ScenarioResult, ...]
    signatures: tuple[SignatureResult, ...]
    never_run: tuple[str, ...]
    problems: tuple[str, ...]
    engine_notes: tuple[str, ...] = ()
    """What must be known of the probe in a foreign engine."""
    time_budget_s: float | None = None
    left_out: tuple[str, ...] = ()
    """Planned trials that the time budget or the stopping rule left out; they are not in ``never_run``."""
    stopping: tuple[tuple[str, str, str], ...] = ()
    """Of ``--stop``: each question, how it stands (open, decided, never) and the answer in words."""
    baseline: Baseline | None = None
    """None where no baseline was asked for."""

    @property
    def settled(self) -> bool:
        """More trials would have settled nothing of what was asked with ``--stop``."""
        return bool(self.stopping) and all(standing != "open" for _, standing, _ in self.stopping)

    @property
    def leaver(self) -> str:
        """What left out planned trials, if any were."""
        return "the stopping rule" if self.settled else "the time budget"

    @property
    def arms(self) -> tuple[ArmResult, ...]:
        return tuple(arm for scenario in self.scenarios for arm in scenario.arms)

    @property
    def trials(self) -> tuple[TrialResult, ...]:
        return tuple(trial for arm in self.arms for trial in arm.trials)

    def to_json(self) -> dict[str, Any]:
        """The document of report.json and of ``hangrig run --json``."""
        return {
            "schema": SCHEMA,
            "run": self.run,
            "name": self.name,
            "verdict": self.verdict,
            "exit": self.exit,
            "headline": self.headline,
            "seed": self.seed,
            "device": self.device,
            "simulation": self.simulation,
            "simulation_note": self.simulation_note,
            "scenarios": [scenario.to_json() for scenario in self.scenarios],
            "signatures": [signature.to_json() for signature in self.signatures],
            "never_run": list(self.never_run),
            "time_budget_s": self.time_budget_s,
            "left_out": list(self.left_out),
            "stopping": [
                {"question": question, "standing": standing, "words": said}
                for question, standing, said in self.stopping
            ],
            "baseline": None if self.baseline is None else self.baseline.to_json(),
            "problems": list(self.problems),
            "engine_notes": list(self.engine_notes),
        }
