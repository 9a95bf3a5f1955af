"""The commands: exit statuses, one JSON document on standard output, mistakes told before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
from run_fixture import ARMS, RunBuilder
from typer.testing import CliRunner

import harness
from harness import cli
from harness.cli import app, parse_duration_s, parse_on_hang
from harness.request import BadRequest, RunOutcome, RunRequest
from harness.scenario import ScenarioError
from harness.store import StoreError, load_schema

ROOT = Path(__file__).parent.parent
CONSOLE_S = 60
REPORT: dict[str, Any] = {
    "schema": 1,
    "verdict": "pass",
    "simulation": True,
    "scenarios": [
        {
            "name": "dp-retract",
            "verdict": "pass",
            "arms": [
                {
                    "arm": {"pinned": "pageable"},
                    "expected": "never",
                    "observation": "never",
                    "hangs": {"k": 0, "n": 3, "low": 0.0, "high": 0.7, "confidence": 0.95},
                    "verdict": "pass",
                    "same_as": None,
                },
                {"arm": {"pinned": "pinned"}, "same_as": "pinned=pageable"},
            ],
        }
    ],
    "signatures": [{"signature": "s1", "mechanism": "stream-order", "count": 2}],
}


class Run:
    """Stands where `harness.run` stands: answers with what a test wants and keeps what it was asked."""

    def __init__(self, status: int = 0, error: BaseException | None = None) -> None:
        self.status = status
        self.error = error
        self.asked: list[Any] = []

    def answer(self, *asked: Any) -> RunOutcome:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return RunOutcome(self.status, Path("runs/x"), REPORT, lambda stream: print("SHOWN", file=stream))

    run = rerun = report = recheck = answer


def call(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Run:
    stand_in = Run()
    monkeypatch.setattr(harness, "run", stand_in, raising=False)
    monkeypatch.setattr(cli, "installed_targets", lambda: ("builtin",))
    return stand_in


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    builder = RunBuilder(tmp_path)
    for arm in ARMS:
        for seed in range(8):
            builder.trial(arm, seed)
    builder.store.finish()
    return builder.path


# --- help and usage ---


@pytest.mark.parametrize(
    "command",
    [
        "run",
        "rerun",
        "list",
        "doctor",
        "report",
        "recheck",
        "bundle",
        "compare",
        "history",
        "diagnose",
        "gate",
        "plan",
        "audit",
        "prune",
    ],
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = call(command, "--help")
    assert done.exit_code == 0
    assert f"Example: hangrig {command}" in done.output


def test_no_command_is_promised_that_does_not_work() -> None:
    names = {command.name for command in app.registered_commands}
    assert names == {
        "run",
        "rerun",
        "list",
        "doctor",
        "report",
        "recheck",
        "compare",
        "history",
        "watch",
        "litmus",
        "gate",
        "plan",
        "bundle",
        "diagnose",
        "corpus",
        "prune",
        "audit",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run"], "SCENARIO"),
        (["run", "dp-retrakt"], "did you mean dp-retract"),
        (["run", "dp-retract", "--set", "workload.request=3"], "did you mean workload.requests"),
        (["run", "dp-retract", "--set", "sim.copy_gbps=1", "--device", "npu"], "simulated device"),
        (["run", "dp-retract", "dp-retract"], "two scenarios are named dp-retract"),
        (["run", "dp-retract", "--device", "tpu"], "allowed: sim, cpu, cuda, npu"),
        (["run", "dp-retract", "--trials", "0"], "--trials"),
        (["run", "dp-retract", "--seed", "-1"], "--seed"),
        (["run", "dp-retract", "--on-hang", "keep"], "hold=30m"),
        (["run", "dp-retract", "--time-budget", "long"], "1h30m"),
        (["run", "dp-retract", "--set", "target.name=none"], "target.name=none: is not installed"),
        (["report", "/none"], "does not exist"),
        (["rerun", "/none"], "does not exist"),
        (["recheck", "/"], "is no run directory"),
        (["compare", "/none", "--by", "pinned"], "does not exist"),
        (["compare", "/none"], "either --by TOGGLE or a second RUN"),
        (["compare", "/none", "--by", "pin"], "is no toggle"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_usage_is_told_and_exits_2(runs: Run, arguments: list[str], said: str) -> None:
    done = call(*arguments)
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""
    assert runs.asked == []


@pytest.mark.parametrize(
    ("text", "seconds"), [("2h", 7200), ("1h30m", 5400), ("90s", 90), ("90", 90), ("1.5m", 90)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "2d", "-3", "0", "0s", "h", "2 h"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_duration_s(text)


def test_what_to_do_on_a_hang() -> None:
    assert parse_on_hang("end") == ("end", None)
    assert parse_on_hang("hold") == ("hold", None)
    assert parse_on_hang("hold=30m") == ("hold", 1800)
    with pytest.raises(typer.BadParameter):
        parse_on_hang("end=3")


# --- run ---


@pytest.mark.parametrize("status", [0, 1, 3, 4, 70])
def test_the_status_of_a_run_is_handed_on(runs: Run, status: int) -> None:
    runs.status = status
    assert call("run", "dp-retract").exit_code == status


def test_options_reach_the_run(runs: Run, tmp_path: Path) -> None:
    done = call(
        "run", "dp-retract", "dp-idle-burst", "--set", "trials.count=9", "--trials", "2", "--seed", "5",
        "--time-budget", "2h", "--on-hang", "hold=1m", "--ray-address", "a:1",
        "--out", str(tmp_path), "--allow-skip", "--json",
    )  # fmt: skip
    assert done.exit_code == 0
    ((request,),) = runs.asked
    assert isinstance(request, RunRequest)
    assert [scenario.name for scenario in request.scenarios] == ["dp-retract", "dp-idle-burst"]
    assert {scenario.trials.count for scenario in request.scenarios} == {9}
    assert (request.trials, request.seed, request.time_budget_s) == (2, 5, 7200)
    assert (request.on_hang, request.hold_s, request.ray_address) == ("hold", 60, "a:1")
    assert request.out == tmp_path
    assert request.allow_skip and request.json and request.device == "sim"
    assert request.settings == ("trials.count=9",)


def test_json_is_one_document_and_people_read_standard_error(runs: Run) -> None:
    done = call("run", "dp-retract", "--json")
    assert json.loads(done.stdout) == REPORT
    assert done.stderr == "SHOWN\n"


def test_people_read_the_result_once(runs: Run) -> None:
    done = call("run", "dp-retract")
    assert done.stdout == "SHOWN\n" and done.stderr == ""


def test_a_trial_that_the_run_never_planned_is_bad_usage(runs: Run, stored: Path) -> None:
    runs.error = BadRequest("no trial 'x'; it has: y")
    done = call("rerun", str(stored), "x")
    assert done.exit_code == 2 and "it has: y" in done.stderr


def test_an_error_of_its_own_exits_70(runs: Run) -> None:
    runs.error = RuntimeError("broken")
    done = call("run", "dp-retract", "--json")
    assert done.exit_code == 70 and done.stdout == ""
    assert "RuntimeError: broken" in done.stderr and "Traceback" in done.stderr


def test_a_disk_that_refuses_exits_70_without_a_traceback(runs: Run) -> None:
    runs.error = StoreError(Path("runs/x"), "cannot write: No space left on device")
    done = call("run", "dp-retract")
    assert done.exit_code == 70
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


def test_a_scenario_error_from_deeper_exits_2(runs: Run) -> None:
    runs.error = ScenarioError([])
    assert call("run", "dp-retract").exit_code == 2


def test_ctrl_c_is_no_regression(runs: Run) -> None:
    runs.error = KeyboardInterrupt()
    assert call("run", "dp-retract").exit_code == cli.INTERRUPTED


# --- dry run ---


def test_a_dry_run_tells_the_plan_and_runs_nothing(runs: Run) -> None:
    done = call("run", "dp-pinned-hang", "--dry-run", "--json", "--trials", "2", "--seed", "3")
    plan = json.loads(done.stdout)
    jsonschema.validate(plan, load_schema("plan"))
    (scenario,) = plan["scenarios"]
    assert len(scenario["arms"]) == 8 and len(scenario["trials"]) == 16
    assert {trial["seed"] for trial in scenario["trials"]} == {3, 4}
    assert runs.asked == [] and done.exit_code == 0


def test_a_dry_run_says_why_a_toggle_is_off(runs: Run) -> None:
    said = call("run", "dp-pinned-hang", "--dry-run", "--device", "npu", "--trials", "5").stdout
    assert "symm_mem: on → off, needs torch ≥ 2.8 and CUDA or HIP" in said
    assert "the same as pinned=pageable,symm_mem=off: not run again" in said
    assert "[sim] is ignored" in said
    assert "8 arms, 20 trials, 5 per arm" in said


# --- stored runs ---


def test_rerun_names_the_trial(runs: Run, stored: Path) -> None:
    trial = next((stored / "trials").iterdir()).name
    assert call("rerun", str(stored), trial, "--on-hang", "hold").exit_code == 0
    path, asked, overrides = runs.asked[0]
    assert (path, asked, overrides["on_hang"]) == (stored.resolve(), trial, "hold")
    assert call("rerun", str(stored)).exit_code == 0
    assert runs.asked[1][1] is None


@pytest.mark.parametrize("command", ["report", "recheck"])
def test_a_stored_run_is_handed_on(runs: Run, stored: Path, command: str) -> None:
    latest = stored.parent / "latest"
    assert json.loads(call(command, str(latest), "--json").stdout) == REPORT
    assert runs.asked == [(stored.resolve(), None)]


def test_a_run_whose_head_is_damaged_is_bad_usage(runs: Run, stored: Path) -> None:
    (stored / "run.json").write_text('{"schema": 1, "na')
    done = call("report", str(stored))
    assert done.exit_code == 2 and "damaged or half-written" in done.stderr
    assert runs.asked == []


def test_arms_are_compared(stored: Path) -> None:
    done = call("compare", str(stored), "--by", "pinned", "--json")
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("compare"))
    assert document["by"] == "pinned"
    assert (stored / "compare-pinned.json").exists()
    assert document["sentence"] in call("compare", str(stored), "--by", "pinned").stdout


def test_runs_are_compared(stored: Path) -> None:
    done = call("compare", str(stored), str(stored), "--json")
    assert json.loads(done.stdout)["verdict"] == "no-regression"
    assert done.exit_code == 0


def test_a_toggle_that_the_run_does_not_have(stored: Path) -> None:
    done = call("compare", str(stored), "--by", "prefix_cache")
    assert done.exit_code == 2 and done.stdout == ""


# --- list, doctor, the console entry ---


def test_list() -> None:
    document = json.loads(call("list", "--json").stdout)
    jsonschema.validate(document, load_schema("list"))
    names = [row["name"] for row in document["scenarios"]]
    assert "dp-pinned-hang" in names
    assert [line.split()[0] for line in call("list").stdout.splitlines()] == names
    rows = json.loads(call("list", "--corpus", "--json").stdout)["scenarios"]
    assert "a1-idle-raises" in {row["name"] for row in rows}


def test_doctor_of_a_device_that_is_not_here() -> None:
    done = call("doctor", "--device", "npu", "--json")
    document = json.loads(done.stdout)
    jsonschema.validate(document, load_schema("doctor"))
    assert done.exit_code == 4 and document["ready"] is False


def console(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=CONSOLE_S, check=False, env=environment, cwd=ROOT
    )


def test_the_console_entry() -> None:
    done = console("list", "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["schema"] == 1
    done = console("run", "nope")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr


def test_help_is_quick_because_it_imports_no_engine() -> None:
    heavy = ("torch", "ray", "serving", "reports")
    code = f"import sys, harness.cli; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=CONSOLE_S, check=True, cwd=ROOT
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["report"], ["report", "--json"], ["compare", "--by", "pinned"]])
def test_a_reader_that_leaves_early_changes_no_status(stored: Path, arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "harness.cli", arguments[0], str(stored), *arguments[1:]],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=CONSOLE_S, cwd=ROOT, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_closed_streams_change_no_status(stored: Path, closed: str) -> None:
    command = [sys.executable, "-m", "harness.cli", "report", str(stored)]
    (stored / "report.json").unlink(missing_ok=True)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command], timeout=CONSOLE_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0
    assert json.loads((stored / "report.json").read_bytes())["verdict"] == "pass"
