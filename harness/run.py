"""One run, top to bottom: plan, run the trials, judge, report. And a stored run again: rerun, recheck, report.

Not here: options and printing (``cli.py``), trials in progress (``session.py``), the reports themselves.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness.arms import ArmPlan, expand, plan_arms
from harness.cluster import ClusterError, check_address
from harness.corpus import CorpusView, Wish, jobs, manifest, variants
from harness.corpus import request as corpus_request
from harness.environment import driver_readings, package_readings
from harness.fault_model import Fault, load_file
from harness.faults import ONLY_ON_SIM, FaultError
from harness.judge import HISTORY, judge
from harness.known_issues import again, known_issues_here
from harness.launch_plan import arm_spec, commands
from harness.live import LiveView
from harness.machine import machine_facts, versions
from harness.process_control import ProcessId, alive, myself
from harness.request import LAST_PASS, BadRequest, RunOutcome, RunRequest
from harness.run_list import definitions, last_pass, runs_in
from harness.scenario import from_record, record
from harness.scenario_model import Scenario
from harness.sequential import RULE, Sequential, StopError
from harness.session import Job, Session
from harness.store import RunStore, StoreError, read_run, write_json
from harness.target import TargetError, find_target
from harness.toggles import BUILTIN, gather_facts
from harness.trial_choice import choose_trial
from harness.trial_spec import context, reference_path
from reports import write_all
from reports.corpus import Corpus, write
from reports.terminal import show


def run(request: RunRequest) -> RunOutcome:
    """Runs all trials of the request and reports. What can go wrong while running ends in the report; what
    the user got wrong raises BadRequest before anything starts."""
    planned = [_job(scenario, request) for scenario in request.scenarios]
    return _report(execute(request, planned, extra=_baseline(request, planned)))


def corpus(wish: Wish, out: Path, argv: Sequence[str], *, json: bool) -> Corpus:
    """Runs the chosen part of the hang corpus, stores it as a run, reports and scores it."""
    chosen = variants(wish)
    asked = corpus_request(wish, chosen, out=out, argv=argv, json=json)
    planned = jobs(wish, chosen)
    view = CorpusView(sum(len(job.trials) for job, _ in planned), chosen)
    path = execute(asked, planned, name="corpus", extra=manifest(chosen), view=view)
    write_all(path)
    return write(path)


def rerun(path: Path, trial: str | None, overrides: Mapping[str, Any]) -> RunOutcome:
    """One stored trial again, same arm and seed, as a run of its own. ``trial`` None: the first that did not
    pass, else the first hang, else the first. Says where versions or machine differ. Raises StoreError,
    ScenarioError or BadRequest."""
    stored = RunStore.open(path)
    document = stored.document
    files = _load_faults(stored)
    planned = _choose(stored, trial)
    entry = next(e for e in document["scenarios"] if e["name"] == planned["scenario"])
    scenario = from_record(entry, device=document["device"])
    overrides = {
        **overrides,
        "known_issues": overrides.get("known_issues") or again(document.get("known_issues")),
    }
    request = RunRequest(
        scenarios=(scenario,), device=document["device"], seed=planned["seed"], trials=1,
        fault_files=files, **overrides,
    )  # fmt: skip
    job, arms = _job(scenario, request)
    chosen = [plan for plan in job.trials if dict(plan.arm) == planned["arm"]]
    if not chosen:
        raise BadRequest(f"{planned['id']}: on this machine its arm is the same as another one")
    for line in _differences(document):
        print(line, file=sys.stderr)
    kept = [arm for arm in arms if dict(arm.arm) == planned["arm"]]
    return _report(execute(request, [(Job(scenario, chosen), kept)]))


def report(path: Path, known_issues: Path | None = None) -> RunOutcome:
    """Writes the reports of a stored run again. Trials that nobody judged (the driver was killed) are.

    ``known_issues`` takes the place of the file that the run remembers."""
    store = RunStore.open(path)
    known = _known_issues(store, known_issues)
    _judge_stored(store, only_unjudged=True)
    store.remember(**known)
    return _report(store.path)


def recheck(path: Path, known_issues: Path | None = None) -> RunOutcome:
    """Judges every trial of a stored run with the checkers and the diagnosis of now, and reports."""
    store = RunStore.open(path)
    known = _known_issues(store, known_issues)
    _judge_stored(store, only_unjudged=False)
    store.remember(**known)
    return _report(store.path)


# A run -----------------------------------------------------------------------------------------------------

_Job = tuple[Job, Sequence[ArmPlan]]


def _job(scenario: Scenario, request: RunRequest) -> _Job:
    facts = gather_facts(request.device, scenario.target.ranks, scenario.target.name)
    arms = plan_arms(scenario, request.device, facts)
    trials = expand(scenario, request.device, request.trials, request.seed, facts)
    return Job(scenario, trials), arms


def execute(
    request: RunRequest,
    planned: Sequence[_Job],
    *,
    name: str | None = None,
    extra: Mapping[str, Any] | None = None,
    view: LiveView | None = None,
) -> Path:
    """Runs the trials of the jobs; returns the run's directory. ``extra``: more for run.json."""
    for job, arms in planned:
        _validate(job, arms, request)
    _stopping(request, planned)
    if request.ray_address is not None:
        try:
            check_address(request.ray_address)
        except ClusterError as failure:
            raise BadRequest(f"--ray-address: {failure}") from failure
    simulation = request.device == "sim"
    name = name or (request.scenarios[0].name if len(request.scenarios) == 1 else "set")
    own = myself()
    manifest = {
        "command": shlex.join(["hangrig", *request.argv]),
        "argv": list(request.argv),
        "seed": request.seed,
        "versions": versions(),
        "engine_versions": _engine_versions([job.scenario for job, _ in planned]),
        "machine": machine_facts(),
        "drivers": _drivers() if not simulation else {},
        "device": request.device,
        "simulation": simulation,
        "simulation_note": _simulation_note() if simulation else None,
        "scenarios": [record(job.scenario, arms, request.device) for job, arms in planned],
        "commands": [
            {"scenario": job.scenario.name, **row}
            for job, arms in planned
            for row in commands(job.scenario, request.device, arms)
        ],
        "planned": [plan.to_json() for job, _ in planned for plan in job.trials],
        "settings": list(request.settings),
        "fault_files": [path.name for path in request.fault_files],
        "allow_skip": request.allow_skip,
        "time_budget_s": request.time_budget_s,
        "stop": request.stop,
        "known_issues": request.known_issues,
        **(extra or {}),
        "driver": {"pid": own.pid, "start_time_ticks": own.start_time_ticks},
    }
    try:
        store = RunStore.create(request.out, name, manifest)
    except StoreError as failure:  # nothing has started: --out is what is wrong
        raise BadRequest(f"--out {request.out}: {failure}") from failure
    for path in request.fault_files:  # a run can be repeated without the user's file
        store.keep_fault_file(path)
    error: str | None = None
    left_out: tuple[str, ...] = ()
    stopping = _stopping(request, planned)
    absent = _absent(request)
    try:
        if absent is not None:
            _skip(store, planned, absent, simulation)
        else:
            session = Session(request, store, simulation, view=view, stopping=stopping)
            left_out = session.run([job for job, _ in planned])
    except KeyboardInterrupt:
        pass  # what was not run is planned and missing, so the report says unknown
    except (ClusterError, StoreError) as failure:
        error = str(failure)
    except Exception as failure:  # hangrig's own error must not cost the reports of what was run
        error = f"{type(failure).__name__}: {failure}"
        traceback.print_exc(file=sys.stderr)
    said = None if stopping is None else stopping.to_json()
    store.finish(left_out=list(left_out), stopping=said, **({} if error is None else {"error": error}))
    return store.path


def _validate(job: Job, arms: Sequence[ArmPlan], request: RunRequest) -> None:
    scenario, device = job.scenario, request.device
    seeds = sorted({plan.seed for plan in job.trials})
    for fault in scenario.faults:
        if isinstance(fault, Fault) and device != "sim" and fault.place in ONLY_ON_SIM:
            raise BadRequest(
                f"{scenario.name}: the fault {fault.name} acts at {fault.place}, which {device} does not have:"
                f" {ONLY_ON_SIM[fault.place]}; use --device sim"
            )
    try:
        target = find_target(scenario.target.name)
        for arm in arms:
            if arm.same_as is None:
                target.validate(arm_spec(scenario, device, arm), scenario.workload.model_dump(), seeds)
        here = request.ray_address is None and _absent(request) is None  # else it is sought where it will run
        if here and scenario.target.name == BUILTIN:
            _devices_for_all(scenario, device)
        missing = target.absent(arm_spec(scenario, device, arms[0])) if here else None
    except TargetError as error:
        raise BadRequest(f"{scenario.name}: {error}") from error
    if missing is not None:
        raise BadRequest(f"{scenario.name}: {missing}")


def _engine_versions(scenarios: Sequence[Scenario]) -> dict[str, str] | None:
    """torch and torch_npu of an engine that has an environment of its own; None where ``versions`` are the engine's
    too, or where there are several."""
    pythons = {scenario.target.python for scenario in scenarios}
    if len(pythons) != 1 or not (python := pythons.pop()):
        return None
    found = package_readings(python, ("torch", "torch_npu"))
    return {one.name: one.value for one in found if one.value is not None}


def _devices_for_all(scenario: Scenario, device: str) -> None:
    """Ranks may share a GPU; an NPU belongs to one process. Raises BadRequest."""
    if device != "npu":
        return
    ranks, count = scenario.target.ranks, gather_facts(device, scenario.target.ranks).device_count or 0
    if count < ranks:
        raise BadRequest(
            f"{scenario.name}: target.ranks = {ranks}, each of which needs an NPU of its own, and this machine has "
            f"{count}; use --set target.ranks={count}, or --ray-address of a cluster that has more"
        )


def _stopping(request: RunRequest, planned: Sequence[_Job]) -> Sequential | None:
    """Raises BadRequest for a rule that does not fit the scenarios."""
    if request.stop is None:
        return None
    rule, _, toggle = request.stop.partition(":")
    if rule != RULE:
        raise BadRequest(f"--stop {request.stop!r}: there is {RULE} and {RULE}:TOGGLE")
    try:
        return Sequential.of([job.trials for job, _ in planned], toggle or None)
    except StopError as error:
        raise BadRequest(str(error)) from error


def _drivers() -> dict[str, str]:
    return {one.name: one.value for one in driver_readings() if one.value is not None}


def _simulation_note() -> str:
    from harness.devices.sim import CANNOT_SHOW  # torch: only a run needs it

    return CANNOT_SHOW


def _absent(request: RunRequest) -> str | None:
    """Why the device is not there; None when it is."""
    if request.device in ("sim", "cpu") or request.ray_address is not None:
        return None  # devices of a cluster are on its nodes: Ray says whether there are enough
    count = gather_facts(request.device, 1).device_count
    if count:
        return None
    return f"no {request.device} device on this machine (hangrig doctor --device {request.device} says why)"


def _skip(store: RunStore, jobs: Sequence[_Job], why: str, simulation: bool) -> None:
    for job, _ in jobs:
        for plan in job.trials:
            trial = store.trial(plan.id)
            write_json(trial.path / HISTORY, {"skipped": why})
            known = context(plan.to_json(), job.scenario, store.path, simulation)
            judge(trial, known, reference_path(store.path, plan.scenario, plan.seed))


def _report(path: Path) -> RunOutcome:
    """Writes all reports of a run; run.json says what they need to know of the request."""
    result = write_all(path)
    if "corpus" in RunStore.open(path).document:
        write(path)
    return RunOutcome(result.exit, path, result.to_json(), partial(show, result))


def _baseline(request: RunRequest, planned: Sequence[_Job]) -> dict[str, Any]:
    """What run.json is to say of the baseline; nothing where none was asked for. Found before the run has a
    directory, so that no run is its own baseline."""
    if request.baseline is None:
        return {}
    if request.baseline != LAST_PASS:
        try:
            found = RunStore.open(Path(request.baseline)).path
        except StoreError as error:
            raise BadRequest(f"--baseline {error}") from error
        return {"baseline": {"asked": request.baseline, "run": str(found)}}
    records = [record(job.scenario, arms, request.device) for job, arms in planned]
    entry = last_pass(runs_in(request.out), request.device, definitions({"scenarios": records}))
    if entry is None:
        print(f"--baseline last-pass: none under {request.out} yet, this is the first night", file=sys.stderr)
    return {"baseline": {"asked": LAST_PASS, "run": None if entry is None else str(entry.path.absolute())}}


# A stored run ----------------------------------------------------------------------------------------------


def _judge_stored(store: RunStore, *, only_unjudged: bool) -> None:
    """Trials that left a directory. A run whose driver still lives is left alone."""
    document = store.document
    driver = document.get("driver")
    if document.get("finished_utc") is None and driver is not None and alive(ProcessId(**driver)):
        raise BadRequest(f"{store.path}: the run is still going on (pid {driver['pid']}); wait for its end")
    _load_faults(store)
    for entry in document["scenarios"]:
        plans = [
            plan
            for plan in document.get("planned", [])
            if plan["scenario"] == entry["name"]
            and (folder := store.path / "trials" / plan["id"]).is_dir()
            and not (only_unjudged and (folder / "trial.json").exists())
        ]
        if not plans:
            continue  # a run of an older hangrig, whose keys are gone, can still be reported
        scenario = from_record(entry, device=document["device"])
        for plan in plans:
            judge(
                store.trial(plan["id"]),
                context(plan, scenario, store.path, bool(document["simulation"])),
                reference_path(store.path, scenario.name, plan["seed"]),
            )


def _known_issues(store: RunStore, named: Path | None) -> dict[str, Any]:
    """What run.json is to remember anew: the named file, or the one here if the run remembers none."""
    if named is None and store.document.get("known_issues") is not None:
        return {}
    found = known_issues_here(named)
    return {} if found is None else {"known_issues": found}


def _load_faults(store: RunStore) -> tuple[Path, ...]:
    """The files of faults that the run was made with, registered again."""
    files = store.fault_files()
    try:
        for path in files:
            load_file(path)
    except FaultError as error:
        raise BadRequest(f"{store.path}: {error}") from error
    return files


def _choose(store: RunStore, trial: str | None) -> Mapping[str, Any]:
    """The planned trial to run again."""
    planned = {plan["id"]: plan for plan in store.document.get("planned", [])}
    if not planned:
        raise BadRequest(f"{store.path}: run.json names no planned trials; run the scenario anew")
    judged = [entry.trial for entry in read_run(store.path).trials if entry.trial is not None]
    return dict(planned[choose_trial(store.path, list(planned), judged, trial)])


def _differences(document: Mapping[str, Any]) -> list[str]:
    """Where this machine is not what the stored run saw."""
    lines = []
    for what, then, now in (
        ("version", document.get("versions", {}), versions()),
        ("machine", document.get("machine", {}), machine_facts()),
    ):
        for key in sorted({*then, *now}):
            if then.get(key) != now.get(key):
                lines.append(f"{what} of {key}: {then.get(key)} then, {now.get(key)} now")
    return lines
