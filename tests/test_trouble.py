"""Ranks that are killed or stopped, drivers that are interrupted or killed, evidence that cannot be had.

Real processes throughout. After each of these, whatever happened: the run's directory says what is known, and no
process of it is left.
"""

from __future__ import annotations

import json
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import run_rig as rig

from harness import process_control
from harness.process_control import ProcessId

LONGEST_S = 280
pytestmark = [pytest.mark.hang, pytest.mark.timeout(LONGEST_S)]

# Each step of a trial takes 0.2 to 0.3 s, so that what a test does falls into it; the reference has no jitter.
SLOW = """
name = "slow-steps"
summary = "a healthy trial of about twenty seconds"

[engine]
kv_tokens = 1024
max_running = 8
graph_buckets = [1, 2]

[workload]
kind = "alternating"
requests = 2
long_decodes = 2
prompt_tokens = [8, 8]
decode_tokens = [60, 60]
grammar_share = 0.0

[arms]
pinned = ["pageable", "pinned"]

[jitter]
probability = 1.0
low_us = 200000
high_us = 300000
longest_share = 1.0
sites = ["rank.step"]
"""
STEP = 4
"""Steps after which a trial counts as under way; it has sixty."""
HANG = ("dp-pinned-hang", "--seed", "1")
HANG_SETTINGS = (
    'arms.symm_mem=["off"]',
    'arms.pinned=["pinned","pinned_snapshot"]',
    "workload.requests=10",
)


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    path = tmp_path / "slow-steps.toml"
    path.write_text(SLOW)
    return path


def test_a_killed_and_a_stopped_rank_are_named(tmp_path: Path, slow: Path) -> None:
    arguments = ["run", str(slow), "--trials", "1", "--json", *rig.options(rig.QUICK)]
    command = rig.Command.start(tmp_path, *arguments)
    with command:
        killed = act_on_a_rank(command, 0, 1, signal.SIGKILL)
        stopped = act_on_a_rank(command, 1, 0, signal.SIGSTOP)
        assert command.wait() == 1
        command.assert_nothing_left()
    assert not process_control.alive(stopped)
    report = json.loads(command.stdout)
    assert report == rig.load(command.path / "report.json")
    assert (report["verdict"], report["exit"]) == ("fail", 1)
    for arm in report["scenarios"][0]["arms"]:
        assert (arm["hangs"]["k"], arm["hangs"]["n"], arm["verdict"]) == (1, 1, "fail")

    trial, found = judged(command.trial_folder(0))
    assert (trial["outcome"], trial["verdict"]) == ("dead", "fail")
    assert (found["kind"], found["mechanism"]) == ("dead", "rank-dead")
    assert [culprit["rank"] for culprit in found["culprits"]] == [1]
    assert found["culprits"][0]["pid"] == killed.pid
    # The one that lives has its stacks; that the dead one has none is said.
    assert "MainThread" in rig.threads(command.trial_folder(0), 1, 0)
    assert any("rank 1" in lack["what"] for lack in found["missing_evidence"])

    trial, found = judged(command.trial_folder(1))
    assert (trial["outcome"], trial["verdict"]) == ("stopped", "fail")
    assert (found["kind"], found["mechanism"]) == ("stopped", "rank-stopped")
    assert [culprit["rank"] for culprit in found["culprits"]] == [0]
    assert found["culprits"][0]["pid"] == stopped.pid
    for rank in (0, 1):
        assert "MainThread" in rig.threads(command.trial_folder(1), 1, rank)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_what_is_known(tmp_path: Path, slow: Path, number: signal.Signals) -> None:
    """Ctrl-C, and `timeout`; Ray would have the second one end the driver where it stands."""
    command = rig.Command.start(tmp_path, "run", str(slow), "--trials", "1", "--json")
    with command:
        trial = command.trial()
        command.stepped(trial, STEP)
        command.send(number)
        assert command.wait() == 3
        command.assert_nothing_left()
    report = json.loads(command.stdout)
    assert (report["verdict"], report["exit"]) == ("unknown", 3)
    document, _ = judged(trial)
    assert (document["outcome"], document["verdict"]) == ("unknown", "unknown")
    (hang,) = [check for check in document["checks"] if check["name"] == "hang"]
    assert hang["reason"] == "interrupted"
    assert document["steps"] >= STEP
    for rank in (0, 1):
        assert {"MainThread", "hangrig-compute"} <= rig.threads(trial, 1, rank)
        assert rig.threads(trial, 1, rank, native=True)
    assert rig.load(trial / "evidence" / "manifest.json")["reason"] == "interrupted"
    # The second trial was planned and never began: the run says so, and the report counts it.
    assert not command.trial_folder(1).exists()
    for name in ("report.html", "summary.md", "junit.xml"):
        assert (command.path / name).stat().st_size > 0


def test_a_killed_driver_in_a_hang_leaves_a_run_that_can_be_reported(tmp_path: Path) -> None:
    # The agent suspects by then, and has five seconds more to be sure: the driver goes before that.
    settings = (*HANG_SETTINGS, "watchdog.confirm_after_s=5")
    arguments = ["run", *HANG, "--on-hang", "hold", *rig.options(settings)]
    command = rig.Command.start(tmp_path, *arguments, "--trials", "1")
    with command:
        trial = command.trial()
        command.hung(trial)
        command.send(signal.SIGKILL)
        assert command.wait() == -signal.SIGKILL
        command.assert_nothing_left()
    assert not (trial / "history.json").exists()
    # The agent has judged what there is, and written the reports: CI has something to read.
    cases = {case.get("name"): case for case in ET.parse(command.path / "junit.xml").iter("testcase")}
    assert len(cases) > 1 and any(case.find("error") is not None for case in cases.values())
    assert rig.load(command.path / "report.json")["exit"] == 3
    assert rig.load(trial / "evidence" / "manifest.json")["reason"].startswith("driver gone")
    for rank in (0, 1):
        for sample in (0, 1):
            assert {"MainThread", "hangrig-compute"} <= rig.threads(trial, sample, rank)

    again = rig.Command.start(tmp_path / "again", "report", str(command.path), "--json")
    with again:
        assert again.wait() == 3
    report = json.loads(again.stdout)
    assert report["verdict"] == "unknown"
    document, found = judged(trial)
    assert document["outcome"] == "hang"
    assert (found["kind"], found["mechanism"]) == ("hang", "stream-order")
    assert [culprit["rank"] for culprit in found["culprits"]] == [1]
    assert found["operation"]["label"].startswith("graph.replay decode.")
    assert (command.path / "report.html").exists()
    assert not command.trial_folder(1).exists()


def test_a_hang_is_explained_without_py_spy_and_unknown_without_a_disk(tmp_path: Path) -> None:
    arguments = ["run", *HANG, "--trials", "1", "--json", *rig.options((*rig.QUICK, *HANG_SETTINGS))]
    nothing = str(tmp_path / "no-such-py-spy")
    command = rig.Command.start(tmp_path, *arguments, env={"HANGRIG_PY_SPY": nothing})
    with command:
        second = command.trial(1)
        # From here on no file can be made below the second trial's evidence directory.
        (second / "evidence").rmdir()
        (second / "evidence").write_text("")
        status = command.wait()
        command.assert_nothing_left()

    first = command.trial_folder(0)
    document, found = judged(first)
    assert (document["outcome"], document["verdict"]) == ("hang", "pass")
    assert (found["mechanism"], found["confidence"]) == ("stream-order", "proven")
    assert [culprit["rank"] for culprit in found["culprits"]] == [1]
    assert found["operation"]["site"].startswith("serving/engine.py:")
    lacking = {lack["what"]: lack["why"] for lack in found["missing_evidence"]}
    for rank in (0, 1):
        stacks = rig.load(first / "evidence" / "sample-1" / "stacks" / f"rank{rank}.json")
        assert stacks["source"] == "faulthandler"
        functions = {frame["name"] for thread in stacks["threads"] for frame in thread["frames"]}
        assert {"run_trial", "step", "synchronize"} <= functions
        assert f"{nothing}: cannot start" in lacking[f"py-spy stacks of rank {rank}"]
        assert f"native stacks of rank {rank}" in lacking

    document, _ = judged(second, diagnosed=False)
    assert (document["outcome"], document["verdict"], status) == ("unknown", "unknown", 3)
    (hang,) = [check for check in document["checks"] if check["name"] == "hang"]
    assert "its evidence is not on disk" in hang["reason"]


def act_on_a_rank(command: rig.Command, number: int, rank: int, what: signal.Signals) -> ProcessId:
    """Sends a signal to a rank in the middle of a trial, and sees that it was not over before."""
    trial = command.trial(number)
    header = command.stepped(trial, STEP)[rank].header
    process = ProcessId(header.pid, header.start_time_ticks)
    assert process_control.send(process, what)
    assert not any(event["kind"] == "judged" for event in rig.events(trial))
    return process


def judged(trial: Path, *, diagnosed: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """trial.json and diagnosis.json."""
    found = rig.load(trial / "diagnosis.json") if diagnosed else {}
    return rig.load(trial / "trial.json"), found
