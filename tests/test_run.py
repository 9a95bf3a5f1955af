"""Whole runs and stored ones: rerun, recheck, report, what is skipped, what time does not allow, what is held."""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import run_rig as rig
from typer.testing import CliRunner, Result

from harness import process_control
from harness import run as run_room
from harness import session as session_room
from harness.cli import app
from harness.interrupts import Interrupts
from harness.live import LiveView
from harness.process_control import ProcessId, myself
from harness.pytest_plugin import HangOutcome
from harness.request import BadRequest, RunOutcome, RunRequest
from harness.scenario import find_scenario, load
from harness.session import Job, Session
from harness.store import RunStore, load_schema

LONGEST_S = 240
PINNED = "dp-pinned-hang.pinned=pinned,symm_mem=off.seed-1"

hang = pytest.mark.hang
timeout = pytest.mark.timeout(LONGEST_S)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def stored(pinned_run: HangOutcome, tmp_path: Path) -> Path:
    """A copy of a real run, to be changed: three healthy trials, and one hang of the last."""
    path = tmp_path / "runs" / pinned_run.path.name
    shutil.copytree(pinned_run.path, path)
    return path


def trials(run: Path) -> dict[str, dict[str, Any]]:
    """trial.json by id, without the line that holds the run's own path."""
    documents = (rig.load(path) for path in sorted((run / "trials").glob("*/trial.json")))
    return {entry["id"]: {k: v for k, v in entry.items() if k != "rerun"} for entry in documents}


def diagnoses(run: Path) -> dict[str, dict[str, Any]]:
    return {path.parent.name: rig.load(path) for path in sorted((run / "trials").glob("*/diagnosis.json"))}


# A run ----------------------------------------------------------------------------------------------------


@hang
@timeout
def test_what_programs_read_is_as_the_schemas_say(pinned_run: HangOutcome) -> None:
    """The fixture has parsed the whole of standard output as one document: the report."""
    path = pinned_run.path
    for name, files in (
        ("report", [path / "report.json"]),
        ("run", [path / "run.json"]),
        ("trial", list(path.glob("trials/*/trial.json"))),
        ("diagnosis", list(path.glob("trials/*/diagnosis.json"))),
        ("manifest", list(path.glob("trials/*/evidence/manifest.json"))),
        ("ledger", list(path.glob("trials/*/evidence/sample-*/ledger/*.json"))),
        ("stacks", list(path.glob("trials/*/evidence/sample-*/stacks/*.json"))),
    ):
        assert files, name
        for file in files:
            jsonschema.validate(rig.load(file), load_schema(name))
    assert pinned_run.report == rig.load(path / "report.json")
    assert (path.parent / "latest").resolve() == path


@hang
@timeout
def test_a_rerun_takes_the_hang_holds_its_ranks_and_ends_them(
    pinned_run: HangOutcome, tmp_path: Path
) -> None:
    command = rig.Command.start(tmp_path, "rerun", str(pinned_run.path), "--on-hang", "hold", "--json")
    with command:
        trial = command.trial()
        said = command.wait_for_words(r"held until Ctrl-C: rank 0 pid (\d+), rank 1 pid (\d+)")
        held = {entry.header.pid: entry.header for entry in rig.snapshots(trial).values()}
        assert [int(pid) for pid in said.groups()] == list(held)
        for pid, header in held.items():
            assert process_control.alive(ProcessId(pid, header.start_time_ticks))
        assert (trial / "evidence" / "manifest.json").exists() and not (trial / "trial.json").exists()
        command.send(signal.SIGINT)
        assert command.wait() == 0
        command.assert_nothing_left()
    report = json.loads(command.stdout)
    jsonschema.validate(report, load_schema("report"))
    before, again = trials(pinned_run.path)[PINNED], trials(command.path)
    assert command.path != pinned_run.path and list(again) == [PINNED]
    for name in ("arm", "seed", "resolved", "expected", "mechanism_expected", "outcome", "verdict"):
        assert again[PINNED][name] == before[name], name
    signature = diagnoses(pinned_run.path)[PINNED]["signature"]
    assert diagnoses(command.path)[PINNED]["signature"] == signature
    text = [scenario["text"] for scenario in rig.load(pinned_run.path / "run.json")["scenarios"]]
    (entry,) = rig.load(command.path / "run.json")["scenarios"]
    assert entry["text"] in text


def test_arms_for_which_there_was_no_time_at_all_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def nothing_up(session: Session, world: int, view: LiveView) -> Iterator[tuple[None, None]]:
        yield None, None

    monkeypatch.setattr(Session, "_up", nothing_up)
    done = call(
        "run",
        "dp-retract",
        "--trials",
        "2",
        "--time-budget",
        "0.000000001s",
        "--json",
        "--out",
        str(tmp_path),
    )
    report = json.loads(done.stdout)
    assert (done.exit_code, report["verdict"], report["exit"]) == (3, "unknown", 3)
    assert report["scenarios"][0]["arms"][0]["trials"] == []
    assert "the time budget is used up: 2 of 2 planned trials were not run" in done.stderr
    stored = rig.load(tmp_path / "latest" / "run.json")
    assert stored["left_out"] == report["left_out"] == [trial["id"] for trial in stored["planned"]]
    assert report["never_run"] == []
    why = report["scenarios"][0]["arms"][0]["why"]
    assert why == "no trial ran; the time budget left out 2 of 2 planned trials"


def test_the_first_signal_is_a_wish_and_the_second_an_order() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    interrupts = Interrupts()
    with interrupts.held():
        signal.raise_signal(signal.SIGTERM)
        assert interrupts.count == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a third must not break into what the second one set going
        assert interrupts.count == 3
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_no_signal_breaks_into_the_end_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    def step(name: str, *, fails: bool = False) -> Any:
        def run(*_: object, **__: object) -> list[ProcessId]:
            signal.raise_signal(signal.SIGINT)
            ended.append(name)
            if fails:
                raise RuntimeError("the cluster is gone")
            return []

        return run

    monkeypatch.setattr(session_room.Agents, "start", lambda *_: None)
    monkeypatch.setattr(session_room.Ranks, "discard", step("ranks", fails=True))
    monkeypatch.setattr(session_room.Agents, "stop", step("agents"))
    monkeypatch.setattr(session_room.LocalCluster, "stop", step("cluster"))
    scenario = load(find_scenario("dp-retract"))
    request = RunRequest(scenarios=(scenario,), out=tmp_path)
    store = RunStore(tmp_path, {})
    with pytest.raises(RuntimeError, match="the cluster is gone"):
        Session(request, store, simulation=True).run([Job(scenario, [])])
    assert ended == ["ranks", "agents", "cluster"]


def test_a_place_that_cannot_be_written_is_bad_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = call("run", "dp-retract", "--out", str(tmp_path / "file" / "runs"))
    assert done.exit_code == 2 and done.stdout == ""
    assert "--out" in done.stderr and "Not a directory" in done.stderr


@pytest.mark.parametrize(
    ("address", "said"), [("nonsense", "is no Ray address"), ("127.0.0.1:1", "nothing answers")]
)
def test_a_ray_address_where_nobody_is_is_bad_usage(tmp_path: Path, address: str, said: str) -> None:
    done = call("run", "dp-retract", "--ray-address", address, "--out", str(tmp_path / "runs"))
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--ray-address" in done.stderr and said in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_is_run_again_from_where_it_lies_now(stored: Path, tmp_path: Path) -> None:
    moved = tmp_path / "some where" / "a run"
    moved.parent.mkdir()
    shutil.copytree(stored, moved)
    assert call("report", str(moved)).exit_code in (0, 1)
    line = shlex.join(["hangrig", "rerun", str(moved), PINNED])
    assert f"    {line}\n" in (moved / "summary.md").read_text()
    assert call("recheck", str(moved)).exit_code in (0, 1)
    assert rig.load(moved / "trials" / PINNED / "trial.json")["rerun"] == line


@pytest.mark.parametrize(("hold_s", "more_s"), [(1800.0, 1800.0), (None, 24 * 3600.0)])
def test_held_ranks_wait_at_least_as_long_as_they_are_held(
    stored: Path, hold_s: float | None, more_s: float
) -> None:
    scenario = load(find_scenario("dp-retract"))
    own_s = scenario.engine.step_timeout_s
    for on_hang, wait_s in (("hold", own_s + more_s), ("end", own_s)):
        request = RunRequest(scenarios=(scenario,), on_hang=on_hang, hold_s=hold_s)  # type: ignore[arg-type]
        assert Session(request, RunStore.open(stored), simulation=True).wait_s(scenario) == wait_s


@pytest.mark.parametrize("device", ["cuda", "npu"])
@pytest.mark.parametrize(("allowed", "status"), [((), 4), (("--allow-skip",), 0)])
def test_without_the_device_everything_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, allowed: tuple[str, ...], status: int
) -> None:
    gather = run_room.gather_facts
    monkeypatch.setattr(run_room, "gather_facts", lambda *asked: without_device(gather(*asked)))
    arguments = ["run", "dp-pinned-hang", "--device", device, "--trials", "1", "--out", str(tmp_path)]
    done = call(*arguments, "--json", *allowed)
    report = json.loads(done.stdout)
    jsonschema.validate(report, load_schema("report"))
    assert (done.exit_code, report["verdict"], report["simulation"]) == (status, "skipped", False)
    found = trials(tmp_path / "latest")
    assert found and {trial["verdict"] for trial in found.values()} == {"skipped"}
    assert {check["verdict"] for trial in found.values() for check in trial["checks"]} == {"skipped"}
    assert f"no {device} device" in json.dumps(found)


def without_device(facts: Any) -> Any:
    return replace(facts, device_count=0)


# A stored run ---------------------------------------------------------------------------------------------


def test_a_recheck_comes_to_the_same_verdicts(pinned_run: HangOutcome, stored: Path) -> None:
    for path in (*stored.glob("trials/*/diagnosis.json"), *stored.glob("trials/*/trial.json")):
        path.unlink()
    done = call("recheck", str(stored), "--json")
    assert done.exit_code == pinned_run.exit
    assert trials(stored) == trials(pinned_run.path) and len(trials(stored)) == 4
    assert diagnoses(stored) == diagnoses(pinned_run.path)
    report = json.loads(done.stdout)
    jsonschema.validate(report, load_schema("report"))
    assert report["scenarios"] == pinned_run.report["scenarios"]


def test_a_recheck_judges_by_what_is_stored_now(stored: Path) -> None:
    tokens = stored / "trials" / "dp-pinned-hang.pinned=pageable,symm_mem=off.seed-1" / "tokens.json"
    document = rig.load(tokens)
    request = sorted(document["requests"])[0]
    document["requests"][request][0] += 1
    tokens.write_text(json.dumps(document))
    done = call("recheck", str(stored), "--json")
    assert (done.exit_code, json.loads(done.stdout)["verdict"]) == (1, "fail")
    assert trials(stored)[tokens.parent.name]["outcome"] == "corrupt"


def test_a_report_is_written_again_and_judges_nothing_again(pinned_run: HangOutcome, stored: Path) -> None:
    written = ("report.json", "report.html", "summary.md", "junit.xml", "metrics.prom")
    for name in written:
        (stored / name).unlink()
    before = {path: path.read_bytes() for path in stored.glob("trials/*/*.json")}
    done = call("report", str(stored), "--json")
    assert done.exit_code == pinned_run.exit
    assert all((stored / name).stat().st_size for name in written)
    assert {path: path.read_bytes() for path in stored.glob("trials/*/*.json")} == before
    assert json.loads(done.stdout)["scenarios"] == pinned_run.report["scenarios"]


def test_a_report_judges_what_nobody_judged(pinned_run: HangOutcome, stored: Path) -> None:
    for name in ("trial.json", "diagnosis.json"):
        (stored / "trials" / PINNED / name).unlink()
    assert call("report", str(stored)).exit_code == pinned_run.exit
    assert trials(stored) == trials(pinned_run.path)
    assert diagnoses(stored) == diagnoses(pinned_run.path)


def test_a_run_that_goes_on_is_left_alone(stored: Path) -> None:
    own = myself()
    change(stored, finished_utc=None, driver={"pid": own.pid, "start_time_ticks": own.start_time_ticks})
    (stored / "trials" / PINNED / "trial.json").unlink()
    with pytest.raises(BadRequest, match=f"still going on .pid {own.pid}."):
        run_room.report(stored)
    assert not (stored / "trials" / PINNED / "trial.json").exists()


def test_a_run_whose_driver_is_gone_never_finished(stored: Path) -> None:
    change(stored, finished_utc=None, driver={"pid": myself().pid, "start_time_ticks": 1})
    outcome = run_room.report(stored)
    assert (outcome.exit, outcome.report["verdict"]) == (3, "unknown")


# Which trial is run again ---------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunRequest, str]]:
    """What a rerun would run, instead of running it."""
    kept: list[tuple[RunRequest, str]] = []

    def execute(request: RunRequest, jobs: Any) -> Path:
        ((job, arms),) = jobs
        (plan,) = job.trials
        assert [dict(arm.arm) for arm in arms] == [dict(plan.arm)]
        kept.append((request, plan.id))
        return Path()

    monkeypatch.setattr(run_room, "execute", execute)
    monkeypatch.setattr(run_room, "_report", lambda path: RunOutcome(0, path))
    return kept


Asked = list[tuple[RunRequest, str]]


def test_without_a_name_the_first_hang_is_run_again(stored: Path, asked: Asked) -> None:
    run_room.rerun(stored, None, {})
    ((request, trial),) = asked
    assert trial == PINNED
    assert (request.seed, request.trials, request.device) == (1, 1, "sim")
    assert [scenario.name for scenario in request.scenarios] == ["dp-pinned-hang"]


@pytest.mark.parametrize("verdict", ["fail", "unknown"])
def test_one_that_did_not_pass_comes_before_a_hang(stored: Path, asked: Asked, verdict: str) -> None:
    wanted = "dp-pinned-twin.pinned=pinned,symm_mem=off.seed-1"
    path = stored / "trials" / wanted / "trial.json"
    path.write_text(json.dumps({**rig.load(path), "verdict": verdict}))
    run_room.rerun(stored, None, {})
    assert asked[0][1] == wanted


def test_where_all_was_healthy_the_first_is_run_again(stored: Path, asked: Asked) -> None:
    path = stored / "trials" / PINNED / "trial.json"
    path.write_text(json.dumps({**rig.load(path), "outcome": "healthy"}))
    run_room.rerun(stored, None, {})
    assert asked[0][1] == rig.load(stored / "run.json")["planned"][0]["id"]


def test_a_named_trial_is_run_again_with_what_the_command_adds(stored: Path, asked: Asked) -> None:
    wanted = "dp-pinned-hang.pinned=pageable,symm_mem=off.seed-1"
    run_room.rerun(stored, wanted, {"on_hang": "hold", "hold_s": 3.0})
    ((request, trial),) = asked
    assert trial == wanted and (request.on_hang, request.hold_s) == ("hold", 3.0)


def test_versions_that_are_others_now_are_told(
    stored: Path, asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = rig.load(stored / "run.json")["versions"]
    change(stored, versions={**versions, "torch": "1.0"})
    run_room.rerun(stored, None, {})
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"version of torch: 1.0 then, {versions['torch']} now"]


def test_a_trial_that_was_never_planned_is_refused(stored: Path, asked: Asked) -> None:
    with pytest.raises(BadRequest, match="no trial 'nope'; it has:"):
        run_room.rerun(stored, "nope", {})
    change(stored, planned=[])
    with pytest.raises(BadRequest, match="names no planned trials"):
        run_room.rerun(stored, None, {})
    assert asked == []


def change(run: Path, **fields: Any) -> None:
    (run / "run.json").write_text(json.dumps({**rig.load(run / "run.json"), **fields}))


# Holding --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_fields", "said"),
    [
        (
            {"on_hang": "hold", "hold_s": 0.05},
            "held for 0.05 s, or until Ctrl-C: rank 0 pid 11, rank 1 pid 12\n",
        ),
        ({"on_hang": "end"}, ""),
    ],
)
def test_hung_ranks_are_held_for_the_time_that_was_asked(
    stored: Path, capsys: pytest.CaptureFixture[str], request_fields: Mapping[str, Any], said: str
) -> None:
    session = Session(RunRequest(scenarios=(), **request_fields), RunStore.open(stored), simulation=True)
    ranks = [{"rank": 0, "pid": 11}, {"rank": 1, "pid": 12}]
    before = time.monotonic()
    session._hold({"ranks": ranks}, LiveView(1))
    assert time.monotonic() - before >= request_fields.get("hold_s", 0.0)
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/no/such/python", "target.python = /no/such/python: no such program"),
        ("/bin/true", "target.python = /bin/true: is no Python that runs"),
        (sys.executable, "sglang is not installed there"),
    ],
)
def test_an_engine_that_is_not_there_is_told_before_anything_starts(
    tmp_path: Path, python: str, said: str
) -> None:
    done = call("run", "sglang-dp-cpu", "--set", f"target.python={python}", "--out", str(tmp_path / "runs"))
    assert done.exit_code == 2 and said in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_fault_that_only_the_simulated_device_can_have_is_refused_on_a_real_one(tmp_path: Path) -> None:
    said = call(
        "run", "scenarios/corpus/e2-cooperative-kernel.toml", "--device", "cuda", "--out", str(tmp_path)
    )
    assert said.exit_code == 2
    told = " ".join(said.output.split())
    assert "hoard_cores acts at device.cores, which cuda does not have" in told and "--device sim" in told
    assert not any(tmp_path.iterdir())
