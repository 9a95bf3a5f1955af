"""What a hang test gets from the plugin: the outcome, its words, and no process that outlives the test."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from run_fixture import ARMS, RunBuilder

from harness import pytest_plugin
from harness.diagnosis_model import nothing_stopped
from harness.pytest_plugin import HangOutcome, read_outcome, run_scenarios
from reports import write_all

IMPORT_S = 60


# What came of a run -------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path) -> HangOutcome:
    builder = RunBuilder(tmp_path)
    builder.trial(ARMS[0], 1)
    builder.trial(ARMS[1], 1, "hang")
    corrupt = builder.trial({"pinned": "pinned_sync"}, 1, "corrupt")
    corrupt.write_diagnosis(nothing_stopped((), (), simulation=True).to_json())
    result = write_all(builder.finish())
    return read_outcome(result.to_json(), result.exit)


def test_a_failed_expectation_says_the_diagnosis(stored: HangOutcome) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        stored.expect("healthy")
    message = str(failure.value)
    assert message.startswith("expected outcome healthy, not hang\n")
    for words in (
        "hang: stream-order (proven)",
        "culprit: rank 1 (worker on node-0, pid 4001)",
        "stream: compute, graph.replay decode[8] #412 from serving/engine.py:212, unfinished for 6.2 s",
        "proof: on rank 1 the record of update.3 came before replay 58 had consumed the last one",
        "missing evidence: native stack of rank 0",
        f"again with: hangrig rerun {stored.path} pinned=pinned-s1",
    ):
        assert words in message


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"mechanism": "livelock"}, "mechanism livelock, not stream-order"),
        ({"culprits": [0]}, "culprit ranks [0], not [1]"),
        ({"culprits": []}, "culprit ranks [], not [1]"),
    ],
)
def test_a_wrong_mechanism_or_culprit_fails(stored: HangOutcome, asked: dict[str, object], said: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=re.escape(said)):
        stored.expect("hang", arm=ARMS[1], **asked)  # type: ignore[arg-type]


def test_what_is_as_expected_passes(stored: HangOutcome) -> None:
    stored.expect("hang", arm=ARMS[1], mechanism="stream-order", culprits=[1])
    stored.expect("healthy", arm=ARMS[0], culprits=[])


def test_a_trial_without_a_diagnosis_says_its_checks(stored: HangOutcome) -> None:
    with pytest.raises(pytest.fail.Exception, match="tokens: pass: 0 of 480 differ"):
        stored.expect("healthy", arm={"pinned": "pinned_sync"})


def test_an_arm_that_was_not_run_is_an_error_and_no_pass(stored: HangOutcome) -> None:
    with pytest.raises(ValueError, match="no trial of any scenario has"):
        stored.expect("healthy", arm={"pinned": "pinned_snapshot"})


# Running ------------------------------------------------------------------------------------------------


def test_pytest_loads_it_without_the_engine() -> None:
    heavy = ("torch", "ray", "pydantic", "numpy", "reports", "harness.store")
    code = f"import sys, harness.pytest_plugin; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=IMPORT_S, check=True
    )
    assert done.stdout.strip() == "[]"


def command(monkeypatch: pytest.MonkeyPatch, folder: Path, program: str) -> None:
    """Stands where ``hangrig`` stands: runs ``program`` instead, with the folder as its working directory."""
    script = folder / "hangrig"
    script.write_text(f"#!{sys.executable}\nimport json, signal, sys, time\n{program}\n")
    script.chmod(0o755)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "executable", str(script))


def test_arguments_reach_the_command_and_its_report_comes_back(
    monkeypatch: pytest.MonkeyPatch, stored: HangOutcome, tmp_path: Path
) -> None:
    report = json.dumps(json.dumps(stored.report))
    program = f"open('asked', 'w').write(json.dumps(sys.argv[1:]))\nprint({report})\nsys.exit({stored.exit})"
    command(monkeypatch, tmp_path, program)
    outcome = run_scenarios(["dp-retract", "--seed", "3"])
    assert outcome == stored
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked == ["-m", "harness.cli", "run", "dp-retract", "--seed", "3", "--json"]


def test_without_the_device_the_test_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builder = RunBuilder(tmp_path / "runs", device="npu")
    checks = [{"name": "hang", "verdict": "skipped", "reason": "no npu device on this machine"}]
    builder.trial(ARMS[0], 1, "skipped", checks=checks)
    report = json.dumps(json.dumps(write_all(builder.finish()).to_json()))
    command(monkeypatch, tmp_path, f"print({report}); sys.exit(4)")
    with pytest.raises(pytest.skip.Exception, match="no npu device on this machine"):
        run_scenarios(["dp-retract"])


@pytest.mark.parametrize("status", [2, 70, -9])
def test_a_command_that_made_no_run_fails_the_test_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int
) -> None:
    end = f"sys.exit({status})" if status > 0 else "import os; os.kill(os.getpid(), 9)"
    command(monkeypatch, tmp_path, f"print('did you mean dp-retract?', file=sys.stderr, flush=True); {end}")
    with pytest.raises(pytest.fail.Exception, match=rf"status {status}:\ndid you mean dp-retract\?"):
        run_scenarios(["dp-retrakt"])


def test_a_run_that_takes_too_long_is_asked_to_end_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = """
def end(number, frame):
    open("ended", "w").write("in order")
    sys.exit(3)
signal.signal(signal.SIGTERM, end)
time.sleep(600)
"""
    command(monkeypatch, tmp_path, program)
    monkeypatch.setattr(pytest_plugin, "RUN_S", 1.0)
    with pytest.raises(subprocess.TimeoutExpired):
        run_scenarios(["dp-retract"])
    assert (tmp_path / "ended").read_text() == "in order"


def test_one_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen('up', 'w').close()\ntime.sleep(600)"
    command(monkeypatch, tmp_path, program)
    monkeypatch.setattr(pytest_plugin, "RUN_S", 1.0)
    monkeypatch.setattr(pytest_plugin, "STOP_S", 0.5)
    started: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def remember(*args: object, **kwargs: object) -> subprocess.Popen[str]:
        started.append(start(*args, **kwargs))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", remember)
    with pytest.raises(subprocess.TimeoutExpired):
        run_scenarios(["dp-retract"])
    assert started[0].returncode is not None and started[0].returncode < 0
