"""Builds the Result of a stored run: documents in, one frozen model out.

The only place that knows the field names of run.json, trial.json and diagnosis.json. A damaged or missing
document becomes an unknown trial with its problem named; nothing in a run directory makes this raise.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.rates import Rate, observation, rate
from harness.store import StoredRun, StoredTrial
from reports import fields, verdicts
from reports.diagnosis import read_diagnosis
from reports.engine import notes, read_engine
from reports.fields import Document
from reports.known import KnownIssues, combine, read_known
from reports.model import (
    ArmResult,
    Check,
    Expectation,
    Recognition,
    Resolution,
    Result,
    ScenarioResult,
    SignatureResult,
    TrialResult,
    Verdict,
)
from reports.statistics import Percentiles, percentiles
from reports.words import arm_name, count, listing

UNREADABLE = "(unreadable)"
"""The scenario of a trial whose own document is lost and that no plan names."""
COMPARABLE_OUTCOMES = frozenset({"healthy", "corrupt"})
"""Trials whose latencies count: one that hung or was slow says nothing about the speed of its copies."""


def build(stored: StoredRun, *, allow_skip: bool = False) -> Result:
    """The whole run as one model. ``allow_skip`` turns exit status 4 into 0, and changes no verdict."""
    run = stored.run
    plan = _read_plan(run)
    arms = _group(stored, plan)
    found = {trial.id for trial in stored.trials}
    said = set(fields.texts(run, "left_out"))
    left_out = tuple(trial_id for trial_id in plan.trials if trial_id in said - found)
    never_run = tuple(trial_id for trial_id in plan.trials if trial_id not in found | said)
    for trial_id in (*left_out, *never_run):
        planned = plan.trials[trial_id]
        arm = arms.setdefault((planned.scenario, arm_name(planned.arm)), _Arm(planned.arm))
        arm.never_run += trial_id not in said
        arm.left_out += trial_id in said
    stopping = _stopping(run)
    if stopping and all(standing != "open" for _, standing, _ in stopping):
        plan.leaver = "the stopping rule"
    scenarios = _scenarios(arms, plan)
    error = fields.optional_text(run, "error")
    unfinished = () if stored.finished else ("run.json: the run never finished",)
    problems = (*stored.problems, *unfinished, *((f"hangrig's own error: {error}",) if error else ()))
    verdict = verdicts.worst(scenario.verdict for scenario in scenarios)
    if problems and verdict in ("pass", "skipped"):
        verdict = "unknown"  # what is lost may be the trial that failed
    return Result(
        run=str(stored.path),
        name=fields.text(run, "name", stored.path.name),
        verdict=verdict,
        exit=verdicts.exit_status(
            verdict,
            allow_skip=allow_skip or fields.flag(run, "allow_skip"),
            internal_error=error is not None,
        ),
        headline=f"Hangrig's own error: {error}"
        if error
        else _headline(verdict, scenarios, never_run, problems, plan.leaver),
        seed=fields.integer(run, "seed"),
        device=fields.text(run, "device", "unknown"),
        simulation=_is_simulation(run),
        simulation_note=fields.text(run, "simulation_note", "Simulated device: no evidence about hardware."),
        command=_command(run),
        started_utc=fields.text(run, "started_utc", "unknown"),
        finished_utc=fields.optional_text(run, "finished_utc"),
        versions=fields.table(run, "versions"),
        machine=fields.table(run, "machine"),
        scenarios=scenarios,
        signatures=_signatures([trial for arm in arms.values() for trial in arm.trials]),
        never_run=never_run,
        problems=(*problems, *_trial_problems(stored)),
        engine_notes=_engine_notes(run, [trial for arm in arms.values() for trial in arm.trials]),
        time_budget_s=fields.number(run, "time_budget_s"),
        left_out=left_out,
        stopping=stopping,
    )


def _stopping(run: Document) -> tuple[tuple[str, str, str], ...]:
    """What run.json has of ``--stop``: question, standing, answer."""
    rows = fields.rows(fields.table(run, "stopping"), "answers")
    return tuple(
        (fields.text(row, "question", "?"), fields.text(row, "standing", "open"), fields.text(row, "words"))
        for row in rows
    )


def _engine_notes(run: Document, trials: Sequence[TrialResult]) -> tuple[str, ...]:
    voices = [trial.engine for trial in trials if trial.engine is not None]
    on_cpu = voices and fields.text(run, "device") == "cpu"
    caution = [
        "a real engine on a CPU: its hangs are real, its latencies are no evidence about an accelerator"
    ]
    return (*(caution if on_cpu else ()), *notes(voices))


def _is_simulation(run: Document) -> bool:
    # A run.json that lost the flag still says its device; in doubt the reader is warned.
    return fields.flag(run, "simulation") or fields.text(run, "device", "sim") == "sim"


def _command(run: Document) -> str:
    argv = fields.texts(run, "argv")
    return fields.text(run, "command") if not argv else shlex.join(argv)


def _trial_problems(stored: StoredRun) -> Iterable[str]:
    for trial in stored.trials:
        for problem in trial.problems:
            yield f"trials/{trial.id}/{problem}"


# --- the plan ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Planned:
    scenario: str
    arm: Mapping[str, Any]


@dataclass(slots=True)
class _Plan:
    """What run.json says was to happen: arms in their order, with expectations, and the trials' ids."""

    arms: dict[tuple[str, str], Document] = field(default_factory=dict)
    trials: dict[str, _Planned] = field(default_factory=dict)
    leaver: str = "the time budget"
    """What left out planned trials, if any were."""


@dataclass(slots=True)
class _Arm:
    arm: Mapping[str, Any]
    trials: list[TrialResult] = field(default_factory=list)
    never_run: int = 0
    left_out: int = 0


def _read_plan(run: Document) -> _Plan:
    plan = _Plan()
    for scenario in fields.rows(run, "scenarios"):
        name = fields.text(scenario, "name", UNREADABLE)
        for arm in fields.rows(scenario, "arms"):
            plan.arms[name, arm_name(fields.table(arm, "arm"))] = arm
    planned_trials = run.get("planned")
    for entry in planned_trials if isinstance(planned_trials, list) else ():
        if isinstance(entry, str):
            plan.trials[entry] = _Planned(UNREADABLE, {})
        elif isinstance(entry, Mapping) and fields.optional_text(entry, "id"):
            planned = _Planned(fields.text(entry, "scenario", UNREADABLE), fields.table(entry, "arm"))
            plan.trials[fields.text(entry, "id")] = planned
    return plan


def _planned_expectation(arm: Document) -> Expectation:
    expected = fields.table(arm, "expected")
    return Expectation(
        hang=fields.text(expected, "hang", "any"),
        min_rate=fields.number(expected, "min_rate"),
        mechanism=fields.optional_text(expected, "mechanism"),
        tokens=fields.text(expected, "tokens", "equal"),
    )


# --- trials ------------------------------------------------------------------------------------------------


def read_trial(
    stored: StoredTrial, run: str, planned: _Planned | None = None, known: KnownIssues | None = None
) -> TrialResult:
    """One trial as a row of the model; without its trial.json it is an unknown trial."""
    document: Document = stored.trial if stored.trial is not None else {"outcome": "unknown"}
    planned = planned or _Planned(UNREADABLE, {})
    scenario = fields.text(document, "scenario", planned.scenario)
    diagnosis = None if stored.diagnosis is None else read_diagnosis(stored.diagnosis)
    latency = {path: tuple(fields.finite(samples)) for path, samples in stored.latency.items()}
    return TrialResult(
        id=stored.id,
        scenario=scenario,
        arm=fields.table(document, "arm") or planned.arm,
        seed=fields.optional_integer(document, "seed"),
        device=fields.text(document, "device", "unknown"),
        target=fields.text(document, "target", "unknown"),
        outcome=fields.text(document, "outcome", "unknown"),
        verdict=_verdict(fields.text(document, "verdict")),
        expectation=Expectation(
            hang=fields.text(document, "expected", "any"),
            min_rate=fields.number(document, "min_rate"),
            mechanism=fields.optional_text(document, "mechanism_expected"),
            tokens=fields.text(document, "tokens_expected", "equal"),
        ),
        checks=tuple(_check(row) for row in fields.rows(document, "checks")),
        steps=fields.integer(document, "steps"),
        tokens=fields.integer(document, "tokens"),
        retractions=fields.integer(document, "retractions"),
        duration_s=fields.number(document, "duration_s"),
        tokens_differ=fields.integer(document, "tokens_differ"),
        tokens_compared=fields.integer(document, "tokens_compared"),
        ranks=len(fields.rows(document, "ranks")),
        resolutions=_resolutions(document),
        # Where the run is now: it may have been copied since trial.json was written.
        rerun=shlex.join(["hangrig", "rerun", run, stored.id]),
        diagnosis=diagnosis,
        problems=stored.problems,
        latency_us=latency,
        engine=None if stored.engine is None else read_engine(stored.engine),
        known=(known or KnownIssues()).recognise(scenario, diagnosis),
        notes=fields.texts(document, "notes"),
        tokens_exact=document.get("tokens_exact") is not False,
    )


def _verdict(text: str) -> Verdict:
    return text if text in ("pass", "fail", "skipped") else "unknown"  # type: ignore[return-value]


def _check(row: Document) -> Check:
    return Check(
        fields.text(row, "name", "?"), fields.text(row, "verdict", "unknown"), fields.text(row, "reason")
    )


def _resolutions(document: Document) -> tuple[Resolution, ...]:
    resolved = fields.table(document, "resolved")
    return tuple(
        Resolution(toggle, str(row.get("requested")), str(row.get("resolved")), fields.text(row, "why"))
        for toggle, row in sorted(resolved.items())
        if isinstance(row, Mapping)
    )


# --- arms and scenarios ------------------------------------------------------------------------------------


def _group(stored: StoredRun, plan: _Plan) -> dict[tuple[str, str], _Arm]:
    """Arms in the order of the plan, then in the order their first trial ended."""
    arms = {key: _Arm(fields.table(arm, "arm")) for key, arm in plan.arms.items()}
    known = read_known(stored.run)
    for trial in stored.trials:
        read = read_trial(trial, str(stored.path), plan.trials.get(trial.id), known)
        arms.setdefault((read.scenario, arm_name(read.arm)), _Arm(read.arm)).trials.append(read)
    for arm in arms.values():
        arm.trials.sort(key=lambda trial: (trial.seed is None, trial.seed or 0, trial.id))
    return arms


def _scenarios(arms: Mapping[tuple[str, str], _Arm], plan: _Plan) -> tuple[ScenarioResult, ...]:
    built: dict[tuple[str, str], ArmResult] = {}
    twins: list[tuple[str, str]] = []
    for key, arm in arms.items():
        planned = plan.arms.get(key)
        if planned is not None and fields.optional_text(planned, "same_as") and not arm.trials:
            twins.append(key)
        else:
            built[key] = _arm(key[0], arm, planned, plan.leaver, _pageable(key[0], arm, arms))
    for key in twins:
        built[key] = _twin(key[0], arms[key], plan.arms[key], built)
    names = dict.fromkeys(name for name, _ in arms)
    scenarios = []
    for name in names:
        own = tuple(built[key] for key in arms if key[0] == name)
        scenarios.append(ScenarioResult(name, verdicts.worst(arm.verdict for arm in own), own))
    return tuple(scenarios)


def _pageable(scenario: str, arm: _Arm, arms: Mapping[tuple[str, str], _Arm]) -> Rate | None:
    """How often tokens differ in the arm that has pageable copies and is alike otherwise: the measure of noise. An
    arm that does not vary them is its own; None where that arm is not in the run."""
    wanted = {**arm.arm, "pinned": "pageable"} if "pinned" in arm.arm else arm.arm
    other = arms.get((scenario, arm_name(wanted)))
    return None if other is None else verdicts.corrupt_rate(other.trials)


def _arm(scenario: str, arm: _Arm, planned: Document | None, leaver: str, pageable: Rate | None) -> ArmResult:
    trials = arm.trials
    # A trial's own expectation comes first: it is what its checkers judged by.
    stated = [trial.expectation for trial in trials if trial.target != "unknown"]
    fallback = _planned_expectation(planned) if planned is not None else Expectation()
    expectation = stated[0] if stated else fallback
    finding = verdicts.judge_arm(expectation, trials, arm.never_run, arm.left_out, leaver, pageable)
    hangs, corrupt = verdicts.hang_rate(trials), verdicts.corrupt_rate(trials)
    samples = _samples(trials)
    return ArmResult(
        scenario=scenario,
        arm=arm.arm,
        expectation=expectation,
        verdict=finding.verdict,
        why=finding.why,
        observation=observation(hangs.k, hangs.n),
        hangs=hangs,
        corrupt=corrupt,
        same_as=None,
        resolutions=trials[0].resolutions if trials else _resolutions(planned or {}),
        latency_us=_latency(samples),
        samples_us=samples,
        trials=tuple(trials),
        planned=len(trials) + arm.never_run + arm.left_out,
        left_out=arm.left_out,
    )


def _twin(
    scenario: str, arm: _Arm, planned: Document, built: Mapping[tuple[str, str], ArmResult]
) -> ArmResult:
    """An arm that resolves to what another one resolves to: run once, and it says so.

    Its verdict and counts are the other's. ``trials`` stays empty: nothing is counted twice.
    """
    name = fields.text(planned, "same_as")
    other = built.get((scenario, name))
    nothing = rate(0, 0)
    return ArmResult(
        scenario=scenario,
        arm=arm.arm,
        expectation=_planned_expectation(planned),
        verdict="unknown" if other is None else other.verdict,
        why=f"resolves to the same as {name}" + (", which is not in this run" if other is None else ""),
        observation="never" if other is None else other.observation,
        hangs=nothing if other is None else other.hangs,
        corrupt=nothing if other is None else other.corrupt,
        same_as=name,
        resolutions=_resolutions(planned),
        latency_us={} if other is None else other.latency_us,
        samples_us={},
        trials=(),
    )


def _samples(trials: Sequence[TrialResult]) -> dict[str, tuple[tuple[float, ...], ...]]:
    usable = [trial for trial in trials if trial.outcome in COMPARABLE_OUTCOMES]
    paths = sorted({path for trial in usable for path in trial.latency_us})
    return {
        path: tuple(trial.latency_us[path] for trial in usable if trial.latency_us.get(path))
        for path in paths
    }


def _latency(samples: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Percentiles]:
    found = {
        path: percentiles([value for trial in trials for value in trial]) for path, trials in samples.items()
    }
    return {path: figures for path, figures in found.items() if figures is not None}


# --- the run -----------------------------------------------------------------------------------------------


def _signatures(trials: Sequence[TrialResult]) -> tuple[SignatureResult, ...]:
    """One row a signature, most frequent first."""
    groups: dict[str, list[tuple[TrialResult, Recognition]]] = {}
    for trial in trials:
        if trial.diagnosis is not None and trial.known is not None:
            groups.setdefault(trial.diagnosis.signature, []).append((trial, trial.known))
    found = []
    for signature, members in groups.items():
        mechanism = members[0][0].diagnosis.mechanism if members[0][0].diagnosis else "unknown"
        ids = tuple(trial.id for trial, _ in members)
        known = combine([known for _, known in members])
        found.append(SignatureResult(signature, mechanism, len(members), known, ids))
    return tuple(sorted(found, key=lambda row: (-row.count, row.signature)))


def _headline(
    verdict: Verdict,
    scenarios: Sequence[ScenarioResult],
    never_run: Sequence[str],
    problems: Sequence[str],
    leaver: str,
) -> str:
    """The verdict in one sentence. ``leaver``: what left out planned trials, if any were."""
    arms = [arm for scenario in scenarios for arm in scenario.arms]
    trials = [trial for arm in arms for trial in arm.trials]
    if verdict == "pass":
        hangs = sum(trial.stopped for trial in trials)
        tail = f", {count(hangs, 'hang')} among them, as the scenario expects" if hangs else ""
        slow = sum(arm.slow for arm in arms)
        tail += f"; {count(slow, 'trial was', 'trials were')} slow" if slow else ""
        left_out = sum(arm.left_out for arm in arms)
        tail += f"; {leaver} left out {left_out} more" if left_out else ""
        return f"{count(len(trials), 'trial')} in {count(len(arms), 'arm')} behaved as expected{tail}."
    guilty = [arm for arm in arms if arm.verdict == verdict and arm.same_as is None]
    if guilty:
        rest = f" ({count(len(guilty) - 1, 'other arm')} likewise)" if len(guilty) > 1 else ""
        return f"{guilty[0].scenario}, {guilty[0].name}: {guilty[0].why}{rest}."
    if never_run:
        return f"Planned trials never ran: {listing(list(never_run))}."
    return f"{problems[0]}." if problems else "No trial is in this run."
