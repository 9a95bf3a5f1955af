"""The commands, thin: options in, a call, an exit status out.

Here: what a user types and reads. Not here: anything that a program would want to call, which lives in
`harness.run` and its neighbours. Those are imported inside the commands, so that ``--help`` stays quick.

Exit status (DESIGN.md): 0 as expected, 1 an unexpected hang or regression, 2 bad usage, 3 unknown, 4 skipped,
70 an error of hangrig's own. With ``--json`` standard output holds one JSON document and nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer

from harness import durations
from harness.cli_text import doctor_lines, plan, plan_lines
from harness.fault_model import load_file, registered
from harness.faults import FaultError
from harness.known_issues import known_issues_here
from harness.launch_plan import commands
from harness.request import BadRequest, OnHang, RunOutcome, RunRequest
from harness.scenario import (
    Scenario,
    ScenarioError,
    corpus_files,
    find_scenario,
    list_scenarios,
    load,
    record,
    scenario_files,
)
from harness.store import RunStore, StoreError, resolve_run
from harness.target import TargetError, installed_targets
from harness.toggles import DEVICES, VALUES

USAGE_ERROR = 2
OWN_ERROR = 70
INTERRUPTED = 130  # what shells expect after Ctrl-C

P = ParamSpec("P")

app = typer.Typer(
    name="hangrig",
    help="Makes rare hangs of LLM serving happen, and says which rank and stream stopped and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """The console entry."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller (``>&-``): nobody wants to read it
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115 - until the end
    app()


def say(text: str) -> None:
    typer.echo(text, err=True)


def print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps({"schema": 1, **document}, indent=1))


def fail_usage(message: str) -> NoReturn:
    say(message)
    raise typer.Exit(USAGE_ERROR)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Turns what a command raises into a message and the exit status that the contract asks for."""

    @functools.wraps(command)
    def guard(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (ScenarioError, BadRequest, TargetError) as error:
            fail_usage(str(error))
        except StoreError as error:
            say(f"hangrig: {error}")
            raise typer.Exit(OWN_ERROR) from error
        except KeyboardInterrupt as error:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from error
        except (typer.Exit, typer.Abort, typer.BadParameter):
            raise
        except Exception as error:
            say("".join(traceback.format_exception(error)))
            say(f"hangrig: an error of its own, {type(error).__name__}: {error}; report the lines above")
            raise typer.Exit(OWN_ERROR) from error

    return guard


# --- options -----------------------------------------------------------------------------------------------


def parse_device(value: str | None) -> str | None:
    if value is not None and value not in DEVICES:
        raise typer.BadParameter(f"{value!r} does not exist; allowed: {', '.join(DEVICES)}")
    return value


def parse_duration_s(text: str) -> float:
    """As ``harness.durations``. Raises BadParameter."""
    try:
        return durations.parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def parse_on_hang(text: str) -> tuple[OnHang, float | None]:
    """``end``, ``hold`` or ``hold=30m``: what is done with hung ranks, and for how long."""
    action, equals, duration = text.partition("=")
    if action == "end" and not equals:
        return "end", None
    if action == "hold":
        return "hold", parse_duration_s(duration) if equals else None
    raise typer.BadParameter(f"{text!r} is not allowed; write end, hold or hold=30m")


def run_folder(text: str) -> Path:
    """A stored run that the user named; one that is none is bad usage."""
    try:
        return RunStore.open(Path(text)).path
    except StoreError as error:
        fail_usage(str(error))


def words(text: str | None) -> tuple[str, ...]:
    """The parts of a list with commas; none for none."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def load_scenarios(names: Sequence[str], settings: Sequence[str], device: str | None) -> tuple[Scenario, ...]:
    """All scenarios, or every problem of all of them at once. ``device`` None: each scenario's own."""
    problems, scenarios = [], []
    for name in names:
        try:
            scenarios.append(load(find_scenario(name), settings, device))
        except ScenarioError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ScenarioError(problems)
    twice = sorted({s.name for s in scenarios if sum(s.name == other.name for other in scenarios) > 1})
    if twice:
        fail_usage(f"two scenarios are named {', '.join(twice)}; rename one, or run them one after the other")
    return tuple(scenarios)


def load_faults(files: Sequence[Path]) -> None:
    """Registers the faults of the user's own files, which scenarios then may name."""
    names = [path.name for path in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        fail_usage(f"--faults: two files are named {', '.join(twice)}; rename one")
    try:
        for path in files:
            load_file(path.absolute())
        registered()
    except FaultError as error:
        fail_usage(f"--faults {error}")


def device_of(scenarios: Sequence[Scenario]) -> str:
    """Where to run when no ``--device`` says so: where all the scenarios say, sim where none does."""
    wanted = {scenario.target.device or "sim": scenario.name for scenario in scenarios}
    if len(wanted) > 1:
        told = ", ".join(f"{name} on {device}" for device, name in sorted(wanted.items()))
        fail_usage(f"the scenarios run on different devices ({told}); give --device, or run them one by one")
    return next(iter(wanted))


def check_targets(scenarios: Sequence[Scenario]) -> None:
    """Refuses a target that is not installed, before anything starts."""
    installed = installed_targets()
    for scenario in scenarios:
        if scenario.target.name not in installed:
            fail_usage(
                f"{scenario.name}: target.name={scenario.target.name}: is not installed; "
                f"installed: {', '.join(installed) or 'none (pip install -e .)'}"
            )


Json = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
DeviceOption = Annotated[
    str, typer.Option("--device", callback=parse_device, help=f"Where: {', '.join(DEVICES)}.")
]
RunDeviceOption = Annotated[
    str | None,
    typer.Option(
        "--device", callback=parse_device, help=f"Where: {', '.join(DEVICES)}; the scenario's own, else sim."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Changes a key, as workload.requests=401."),
]
Faults = Annotated[
    list[Path] | None,
    typer.Option("--faults", metavar="FILE", help="A Python file that registers faults of your own."),
]
KnownIssues = Annotated[
    Path | None,
    typer.Option(
        "--known-issues", metavar="FILE", help="Hangs that are known; known-issues.toml here, else none."
    ),
]
OnHangOption = Annotated[str, typer.Option(metavar="end|hold[=30m]", help="What to do with hung ranks.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's directory, as runs/latest.")]


# --- output -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """A reader that has seen enough (``| head``) changes no exit status: 1 would say that something hung."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def leave(document: dict[str, Any], text: str, status: int, as_json: bool) -> NoReturn:
    """Prints one answer, for programs or for people, and leaves with its status."""
    with printing():
        if as_json:
            print_json(document)
        else:
            typer.echo(text)
    raise typer.Exit(status)


def finish(outcome: RunOutcome, as_json: bool) -> NoReturn:
    """Prints what came of a run and leaves with its status."""
    with printing():
        if outcome.show is not None:
            outcome.show(sys.stderr if as_json else sys.stdout)
        if as_json:
            print_json(outcome.report)
    raise typer.Exit(outcome.exit)


def print_plan(request: RunRequest) -> None:
    """``--dry-run``: the trials in running order, and what each arm's toggles resolve to, and why."""
    plans = [plan(scenario, request) for scenario in request.scenarios]
    budget_s = request.time_budget_s
    if request.json:
        rows = [
            {
                **record(p.scenario, p.arms, request.device),
                "trials": [trial.to_json() for trial in p.trials],
                "commands": commands(p.scenario, request.device, p.arms),
            }
            for p in plans
        ]
        asked = {"device": request.device, "seed": request.seed, "time_budget_s": budget_s}
        print_json({"dry_run": True, **asked, "scenarios": rows})
        return
    typer.echo("\n".join(line for p in plans for line in plan_lines(p, request.device)))
    if budget_s is not None:
        typer.echo(
            f"in {budget_s:g} s, in rounds: a trial of every arm of every scenario, then the next seed"
        )


# --- commands ----------------------------------------------------------------------------------------------


@app.command("run", epilog="Example: hangrig run dp-retract --trials 5 --set workload.requests=401")
@guarded
def run_command(
    scenarios: Annotated[list[str], typer.Argument(metavar="SCENARIO...", help="Names or .toml files.")],
    device: RunDeviceOption = None,
    settings: Settings = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Per arm; the scenario's count else.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the first trial; trial i has seed + i.")] = 0,
    time_budget: Annotated[
        str | None, typer.Option(metavar="2h", help="Starts no trial that would not end in it.")
    ] = None,
    stop: Annotated[
        str | None, typer.Option(metavar="sprt[:TOGGLE]", help="Ends when the arms' difference is settled.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(metavar="RUN|last-pass", help="Worse than that run is a failure.")
    ] = None,
    on_hang: OnHangOption = "end",
    ray_address: Annotated[str | None, typer.Option(metavar="A", help="A Ray cluster that runs.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")] = Path("runs"),
    allow_skip: Annotated[bool, typer.Option("--allow-skip", help="Exit 0 when all was skipped.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Prints the trials and runs none.")] = False,
    faults: Faults = None,
    known_issues: KnownIssues = None,
    as_json: Json = False,
) -> None:
    """Runs scenarios: N trials per arm, watched, diagnosed and reported."""
    action, hold_s = parse_on_hang(on_hang)
    load_faults(faults or ())
    loaded = load_scenarios(scenarios, settings or (), device)
    request = RunRequest(
        scenarios=loaded,
        device=device or device_of(loaded),
        seed=seed,
        trials=trials,
        out=out,
        settings=tuple(settings or ()),
        on_hang=action,
        hold_s=hold_s,
        ray_address=ray_address,
        allow_skip=allow_skip,
        json=as_json,
        time_budget_s=None if time_budget is None else parse_duration_s(time_budget),
        stop=stop,
        baseline=baseline,
        fault_files=tuple(path.absolute() for path in faults or ()),
        known_issues=known_issues_here(known_issues),
        argv=tuple(sys.argv[1:]),
    )
    check_targets(request.scenarios)
    if dry_run:
        print_plan(request)
        return
    from harness import run

    finish(run.run(request), as_json)


@app.command("corpus", epilog="Example: hangrig corpus --only A1,D1 --seeds 3")
@guarded
def corpus_command(
    only: Annotated[
        str | None, typer.Option(metavar="A1,D,...", help="Rows, families, controls or files; all else.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trials of each row, seed by seed.")] = 1,
    twins: Annotated[
        int | None, typer.Option(min=1, help="Trials of each twin and control; as many as seeds else.")
    ] = None,
    wide: Annotated[int, typer.Option(min=1, help="At most so many of anything with more than 2 ranks.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Only what fits into five minutes.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The first one.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """The hang corpus: how many hangs are found and blamed on the right rank, and how many false alarms."""
    from harness import run
    from harness.corpus import Wish
    from reports.corpus import show

    chosen = words(only)
    if only is not None and not chosen:
        fail_usage("--only: names no row; give ids or names such as A1,D1, or leave it out for all of them")
    wish = Wish(chosen, seeds, twins, wide, quick, seed)
    found = run.corpus(wish, out, sys.argv[1:], json=as_json)
    with printing():
        show(found, sys.stderr if as_json else sys.stdout)
        if as_json:
            print_json(found.to_json())
        else:
            typer.echo(f"{found.run}/corpus.md")
    raise typer.Exit(found.exit)


@app.command("rerun", epilog="Example: hangrig rerun runs/latest")
@guarded
def rerun_command(
    run_path: RunArgument,
    trial: Annotated[str | None, typer.Argument(metavar="TRIAL", help="A trial's id.")] = None,
    on_hang: OnHangOption = "end",
    ray_address: Annotated[str | None, typer.Option(metavar="A", help="A Ray cluster that runs.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")] = Path("runs"),
    known_issues: KnownIssues = None,
    as_json: Json = False,
) -> None:
    """The same trial again; without TRIAL the first not passed, else the first hang, else the first."""
    path = run_folder(run_path)
    action, hold_s = parse_on_hang(on_hang)
    overrides: dict[str, Any] = {
        "on_hang": action,
        "hold_s": hold_s,
        "ray_address": ray_address,
        "out": out,
        "json": as_json,
        "known_issues": known_issues_here(known_issues),
        "argv": tuple(sys.argv[1:]),
    }
    from harness import run

    finish(run.rerun(path, trial, overrides), as_json)


@app.command("list", epilog="Example: hangrig list --json")
@guarded
def list_command(
    corpus: Annotated[
        bool, typer.Option("--corpus", help="The rows and controls of the hang corpus.")
    ] = False,
    as_json: Json = False,
) -> None:
    """The scenarios that come with hangrig, one line each."""
    files = corpus_files() if corpus else scenario_files()
    scenarios = list_scenarios(files)
    rows = [
        {"name": s.name, "summary": s.summary, "reports": list(s.reports), "path": str(files[s.name])}
        for s in scenarios
    ]
    width = max((len(scenario.name) for scenario in scenarios), default=0)
    lines = [f"{scenario.name:{width}}  {scenario.summary}" for scenario in scenarios]
    leave({"scenarios": rows}, "\n".join(lines), 0, as_json)


@app.command("doctor", epilog="Example: hangrig doctor --device npu")
@guarded
def doctor_command(device: DeviceOption = "sim", as_json: Json = False) -> None:
    """Is this machine ready, what is missing, and how to get it."""
    from harness.doctor import doctor

    report = doctor(device)
    leave(report.to_json(), "\n".join(doctor_lines(report)), report.exit, as_json)


@app.command("report", epilog="Example: hangrig report runs/latest")
@guarded
def report_command(run_path: RunArgument, known_issues: KnownIssues = None, as_json: Json = False) -> None:
    """Writes the reports of a stored run again."""
    path = run_folder(run_path)
    from harness import run

    finish(run.report(path, known_issues), as_json)


@app.command("recheck", epilog="Example: hangrig recheck runs/latest")
@guarded
def recheck_command(run_path: RunArgument, known_issues: KnownIssues = None, as_json: Json = False) -> None:
    """Diagnoses and checks a stored run again, from its evidence, and writes the reports."""
    path = run_folder(run_path)
    from harness import run

    finish(run.recheck(path, known_issues), as_json)


@app.command("bundle", epilog="Example: hangrig bundle runs/latest --out report.tar.gz")
@guarded
def bundle_command(
    run_path: RunArgument,
    trial: Annotated[str | None, typer.Argument(metavar="TRIAL", help="A trial's id.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The archive; RUN-TRIAL.tar.gz else.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replaces a file that is there.")] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND|TEXT", help="Not replaced: host, user, ip, path, email, prompt, or a text."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """A redacted archive of one trial for a bug report; without TRIAL the one that rerun would take."""
    from reports import bundle

    try:
        resolve_run(run_path)
    except StoreError as error:
        fail_usage(str(error))
    made = bundle.make(Path(run_path), trial, out=out, force=force, keep=keep or ())
    leave(made.to_json(), made.text(), 0, as_json)


@app.command("prune", epilog="Example: hangrig prune runs --keep-days 30 --keep 60 --dry-run")
@guarded
def prune_command(
    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="Where runs are stored, as runs.")],
    keep_days: Annotated[float | None, typer.Option(min=0, help="Older runs go.")] = None,
    keep: Annotated[int | None, typer.Option(min=1, help="With so many newer ones a run goes.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Says what would go; removes nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Removes old runs; never the newest pass of a kind, one that is going on, or one that was renamed."""
    if keep_days is None and keep is None:
        raise typer.BadParameter("give --keep-days, --keep or both")
    if not runs_dir.is_dir():
        fail_usage(f"{runs_dir}: is no directory; give the one that holds the runs")
    from harness.prune import prune

    done = prune(runs_dir, keep_days=keep_days, keep=keep, dry_run=dry_run)
    leave(done.to_json(), done.text(), OWN_ERROR if done.failed else 0, as_json)


@app.command("watch", epilog="Example: hangrig watch 4711 --timeout 10m")
@guarded
def watch_command(
    pids: Annotated[
        list[int], typer.Argument(metavar="PID...", min=1, help="Of the server; its tree is found.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Two samples now, and what they show.")] = False,
    timeout: Annotated[str | None, typer.Option(metavar="10m", help="Waits so long for a stall.")] = None,
    metrics: Annotated[str | None, typer.Option(metavar="URL", help="Where it serves /metrics.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the evidence is stored.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """The watchdog on a server that hangrig did not start. 0 healthy, 1 not healthy, 3 cannot tell."""
    if once and timeout is not None:
        raise typer.BadParameter("give either --once or --timeout")
    from harness.watch.command import WatchError, request_of, run_watch

    timeout_s = None if timeout is None else parse_duration_s(timeout)
    request = request_of(tuple(pids), once=once, timeout_s=timeout_s, out=out, metrics=metrics)
    try:
        document, text, status = run_watch(request, say)
    except WatchError as error:
        fail_usage(str(error))
    leave(document, text, status, as_json)


@app.command("diagnose", epilog="Example: hangrig diagnose dumps/ --json")
@guarded
def diagnose_command(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Stacks, recorders, ledgers: what there is.")
    ],
    as_json: Json = False,
) -> None:
    """A diagnosis of dumps brought from elsewhere. 0 healthy, 1 not healthy, 3 cannot tell."""
    from harness.offline.command import DumpsError, run_diagnose

    try:
        document, text, status = run_diagnose(directory, say)
    except DumpsError as error:
        fail_usage(str(error))
    leave(document, text, status, as_json)


@app.command("litmus", epilog="Example: hangrig litmus --device sim --model cann --defect D3")
@guarded
def litmus_command(
    device: Annotated[str, typer.Option("--device", help="Where: sim, cuda or npu.")] = "sim",
    iterations: Annotated[int, typer.Option(min=1, help="Shots of each program.")] = 300,
    model: Annotated[
        str | None,
        typer.Option(metavar="cuda|cann", help="The memory model of sim; cann where none is given."),
    ] = None,
    defect: Annotated[
        list[str] | None, typer.Option(metavar="D1|D2|D3|D4", help="Breaks sim in one way; may be repeated.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Programs; their controls are run too.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the stress.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")] = Path("runs"),
    allow_skip: Annotated[bool, typer.Option("--allow-skip", help="Exit 0 when all was skipped.")] = False,
    as_json: Json = False,
) -> None:
    """Small stream programs under stress: does a device order copies, events and graph updates as promised?"""
    from harness.litmus.command import LitmusError, LitmusRequest, run_litmus

    if only is not None and not words(only):
        fail_usage("--only: names no program; give names such as copy-race, or leave it out for all of them")
    try:
        request = LitmusRequest(device, model, iterations, seed, words(only), tuple(defect or ()), out)
        done = run_litmus(request, say, allow_skip=allow_skip)
    except LitmusError as error:
        fail_usage(str(error))
    with printing():
        done.show(sys.stderr if as_json else sys.stdout)
        if as_json:
            print_json(done.document)
    raise typer.Exit(done.exit)


@app.command("gate", epilog="Example: hangrig gate pinned runs/20261201T220000Z-dp-pinned-gate runs/*-litmus")
@guarded
def gate_command(
    what: Annotated[str, typer.Argument(metavar="pinned", help="What the gate is for.")],
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Directories of hangrig run and hangrig litmus.")
    ],
    device: Annotated[
        str | None, typer.Option("--device", callback=parse_device, help="npu or cuda; that of the evidence.")
    ] = None,
    wanted: Annotated[
        list[str] | None,
        typer.Option("--for", metavar="TEXT", help="One platform of several: cann=8.2.RC1, or a part of it."),
    ] = None,
    bound: Annotated[float, typer.Option(metavar="0.01", help="Hangs must be rarer than this.")] = 0.01,
    confidence: Annotated[float, typer.Option(metavar="0.95", help="Of the bound; one-sided.")] = 0.95,
    as_json: Json = False,
) -> None:
    """May pinned memory be enabled on this platform? 0 yes, 1 no, 3 not yet, with what is missing."""
    if what != "pinned":
        raise typer.BadParameter(f"{what!r} has no gate; allowed: pinned", param_hint="pinned")
    from harness.gate.decision import decide
    from harness.gate.evidence import read_evidence
    from harness.gate.model import GateError, Wish
    from harness.rates import trials_for
    from reports import gate

    try:
        trials_for(bound, confidence)
    except ValueError as error:
        fail_usage(f"--bound {bound:g} --confidence {confidence:g}: {error}")
    try:
        evidence = gate.with_latency(read_evidence(runs))
        decision = decide(evidence, Wish(bound, confidence, device, tuple(wanted or ())))
    except GateError as error:
        fail_usage(str(error))
    leave(gate.document(decision), gate.render(decision), decision.exit, as_json)


@app.command("plan", epilog="Example: hangrig plan --rate 0.01 --confidence 0.95")
@guarded
def plan_command(
    rate: Annotated[float, typer.Option(metavar="0.01", help="The hang rate that is to be excluded.")] = 0.01,
    confidence: Annotated[float, typer.Option(metavar="0.95", help="One-sided.")] = 0.95,
    power: Annotated[
        float | None, typer.Option(metavar="0.9", help="Gets there so probably at --true-rate; allows hangs.")
    ] = None,
    true_rate: Annotated[
        float, typer.Option(metavar="0.001", help="The rate that is believed to be the true one.")
    ] = 0.0,
    as_json: Json = False,
) -> None:
    """How many trials, with how many hangs among them at most, show that a hang is rarer than a rate."""
    from harness.rates import plan_trials

    if power is not None and not true_rate:
        raise typer.BadParameter("needs --true-rate: how rare hangs are believed to be", param_hint="--power")
    try:
        found = plan_trials(rate, confidence, true_rate=true_rate, power=power or 0.0)
    except ValueError as error:
        fail_usage(str(error))
    leave(found.to_json(), found.words(), 0, as_json)


@app.command("audit", epilog="Example: hangrig audit sglang --baseline audit.json")
@guarded
def audit_command(
    what: Annotated[
        str,
        typer.Argument(metavar="PATH_OR_PACKAGE", help="A folder, file or wheel, or an installed package."),
    ],
    style: Annotated[
        str, typer.Option("--format", metavar="text|json|sarif", help="What is printed.")
    ] = "text",
    select: Annotated[str | None, typer.Option(metavar="HG103,...", help="These rules; all else.")] = None,
    ignore: Annotated[str | None, typer.Option(metavar="HG103,...", help="Not these.")] = None,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH_OR_PACKAGE", help="Read for base classes only, as vLLM for a plugin of it."
        ),
    ] = None,
    tests: Annotated[bool, typer.Option("--tests", help="Audits tests too.")] = False,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Findings that were there before are no news.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Writes what is found now as the baseline; exits 0.")
    ] = None,
    docs_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Of docs/audit.md, for the links in SARIF.")
    ] = None,
) -> None:
    """Reads an engine's Python source, runs nothing of it, and names what hangs on another platform."""
    if style not in ("text", "json", "sarif"):
        raise typer.BadParameter(f"{style!r} is no format; allowed: text, json, sarif", param_hint="--format")
    from harness.audit.command import AuditRequest, run_audit
    from harness.audit.sarif import sarif
    from harness.audit.source import AuditError

    request = AuditRequest(
        what, words(select), words(ignore), tuple(reference or ()), tests, baseline, write_baseline
    )
    try:
        result = run_audit(request)
    except AuditError as error:
        fail_usage(str(error))
    if style == "sarif":
        leave({}, json.dumps(sarif(result, version("hangrig"), docs_url), indent=1), result.exit, False)
    leave(result.to_json(), result.text(), result.exit, style == "json")


@app.command("history", epilog="Example: hangrig history runs --out history.html")
@guarded
def history_command(
    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="Where runs are stored.")] = Path(
        "runs"
    ),
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The page; RUNS_DIR/history.html else.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Many nights on one page: trends and steps of each arm, signatures from first to last."""
    from harness.store import write_bytes
    from reports import history, history_page
    from reports.write import encode

    try:
        found = history.read(runs_dir)
    except history.HistoryError as error:
        fail_usage(str(error))
    page = out or runs_dir / "history.html"
    write_bytes(page, encode(history_page.render(found)))
    leave(found.to_json(), f"{history_page.text(found)}\n{page}", 0, as_json)


@app.command("compare", epilog="Example: hangrig compare runs/latest --by pinned")
@guarded
def compare_command(
    run_path: RunArgument,
    other: Annotated[str | None, typer.Argument(metavar="RUN", help="A later run.")] = None,
    by: Annotated[str | None, typer.Option(metavar="TOGGLE", help=f"One of {', '.join(VALUES)}.")] = None,
    as_json: Json = False,
) -> None:
    """The arms of a run by one toggle, or two runs, side by side."""
    if (other is None) == (by is None):
        raise typer.BadParameter("give either --by TOGGLE or a second RUN")
    if by is not None and by not in VALUES:
        raise typer.BadParameter(f"{by!r} is no toggle; allowed: {', '.join(VALUES)}", param_hint="--by")
    path = run_folder(run_path)
    if other is not None:
        from reports import compare_runs

        runs = compare_runs.compare_runs(path, run_folder(other))
        leave(runs, compare_runs.render(runs), compare_runs.exit_status(runs), as_json)
    from reports import compare

    try:
        document = compare.compare_run(path, by or "")
    except compare.CompareError as error:
        fail_usage(str(error))
    compare.write(path, document)
    leave(document, compare.render(document), compare.exit_status(document), as_json)


if __name__ == "__main__":
    main()
