"""Litmus programs on the simulated device: defects are caught by name, sound models by none, and nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from harness.litmus.bench import Stress
from harness.litmus.catalogue import PROGRAMS
from harness.litmus.command import LitmusDone, LitmusRequest, run_litmus
from harness.litmus.crew import COMMAND
from harness.litmus.judge import Judged
from harness.litmus.program import STALLED
from harness.litmus.tuning import DeviceTable
from harness.process_control import ProcessId, children_of, identify, wait_gone
from harness.store import load_schema

ROOT = Path(__file__).resolve().parents[1]
LONG_S = 60.0
TABLE = DeviceTable(
    delays_us=(1000.0,),
    sizes=(4096,),
    shots=6,
    deadline_s=4.0,
    start_s=LONG_S,
    budget_s=20.0,
    budget_per_shot_s=0.0,
)
"""One setting, so that a test starts few shots; no budget that a loaded machine would use up."""
CAUGHT_BY = {
    "D1": {"graph-fenced"},
    "D2": {"staging-reused"},
    "D3": {"copy-then-kernel", "copy-event-kernel", "event-rerecorded", "event-rerecorded-late"},
    "D4": {"staging-reused", "block-freed"},
}
SINGLE = ",".join(
    name for name, program in PROGRAMS.items() if program.ranks == 1 and "sim" in program.devices
)
FAKE = (sys.executable, str(ROOT / "tests" / "litmus_child.py"))


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process of a test outlives it."""
    before = set(children_of(os.getpid()))
    yield
    assert wait_gone(set(children_of(os.getpid())) - before, 0.0) == []


def run(
    tmp_path: Path,
    only: str,
    table: DeviceTable = TABLE,
    *,
    command: tuple[str, ...] = COMMAND,
    iterations: int = 12,
    **wishes: Any,
) -> LitmusDone:
    request = LitmusRequest(out=tmp_path, only=tuple(only.split(",")), iterations=iterations, **wishes)
    return run_litmus(request, lambda said: None, command=command, table=table)


def lines(done: LitmusDone) -> Mapping[str, Judged]:
    assert done.findings is not None
    return {line.name: line for line in done.findings.lines}


def names(done: LitmusDone, verdict: str) -> set[str]:
    return {name for name, line in lines(done).items() if line.verdict == verdict}


# --- the simulated device ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["cuda", "cann"])
@pytest.mark.parametrize("defect", sorted(CAUGHT_BY))
def test_each_defect_is_caught_by_its_programs_and_no_other(tmp_path: Path, defect: str, model: str) -> None:
    table = replace(TABLE, deadline_s=3.0, budget_s=4.0)  # D1 costs half a deadline a shot
    done = run(tmp_path, SINGLE, table if defect == "D1" else TABLE, defects=(defect,), model=model, seed=7)
    assert names(done, "fail") == CAUGHT_BY[defect]
    assert done.exit == 1
    assert names(done, "unknown") == set()


@pytest.mark.parametrize("model", ["cuda", "cann"])
def test_a_sound_model_shows_nothing_forbidden_and_every_control(tmp_path: Path, model: str) -> None:
    done = run(tmp_path, SINGLE, model=model, seed=3)
    assert done.exit == 0
    assert names(done, "pass") == set(SINGLE.split(","))
    for line in lines(done).values():
        assert line.power
        assert line.observed.n == 12 or line.name == "graph-unfenced"
        assert (line.observed.k > 0) == (line.rule.kind != "forbidden")


def test_pageable_copies_are_a_barrier_in_the_model_of_cann_and_not_in_that_of_cuda(tmp_path: Path) -> None:
    seen = {
        model: lines(run(tmp_path, "barrier-pageable", model=model))["barrier-pageable"]
        for model in ("cann", "cuda")
    }
    assert (seen["cann"].rule.kind, seen["cann"].observed.k) == ("forbidden", 0)
    assert seen["cuda"].rule.kind == "observed" and seen["cuda"].observed.k > 0


def test_two_ranks_cross_their_collectives_only_where_their_orders_differ(tmp_path: Path) -> None:
    done = run(tmp_path, "group-ordered", seed=2)
    assert done.exit == 0
    found = lines(done)
    assert set(found) == {"group-reversed", "group-ordered"}, "the control comes along"
    assert 0 < found["group-reversed"].observed.k < found["group-reversed"].observed.n
    assert found["group-ordered"].counted.outcomes == {"ordered": 12}


def test_the_stress_is_the_one_under_which_the_control_was_seen_most(tmp_path: Path) -> None:
    table = replace(TABLE, delays_us=(0.0, 2000.0))
    done = run(tmp_path, "copy-then-kernel", table, iterations=2)
    tuned = done.document["stress"]["copies"]
    assert tuned["control"] == "copy-race"
    assert [(one["delay_us"], one["n"]) for one in tuned["tried"]] == [(0.0, 6), (2000.0, 6)]
    assert tuned["k"] == max(one["k"] for one in tuned["tried"])
    assert Stress(tuned["delay_us"], tuned["nbytes"]) in table.candidates()


# --- what goes wrong ---------------------------------------------------------------------------------------


def deeds(monkeypatch: pytest.MonkeyPatch, **deed: str) -> None:
    monkeypatch.setenv(
        "LITMUS_TEST", json.dumps({name.replace("_", "-"): what for name, what in deed.items()})
    )
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def test_silence_without_power_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deeds(monkeypatch, copy_race="never")
    done = run(tmp_path, "copy-then-kernel", command=FAKE)
    assert done.exit == 3
    assert names(done, "unknown") == {"copy-race", "copy-then-kernel"}
    assert "no power" in lines(done)["copy-then-kernel"].why


def test_a_program_that_hangs_is_ended_and_the_next_has_a_fresh_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deeds(monkeypatch, copy_then_kernel="hang")
    monkeypatch.setattr("harness.litmus.crew._GRACE_S", 0.5)
    table = replace(TABLE, deadline_s=2.0)
    done = run(tmp_path, "copy-then-kernel,copy-event-kernel", table, command=FAKE)
    found = lines(done)
    assert done.exit == 1
    assert found["copy-then-kernel"].counted.outcomes == {"new": 11, STALLED: 1}, "and goes on behind it"
    assert found["copy-then-kernel"].verdict == "fail"
    assert found["copy-event-kernel"].counted.outcomes == {"new": 12}


def test_a_program_that_kills_its_process_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deeds(monkeypatch, copy_then_kernel="die")
    done = run(tmp_path, "copy-then-kernel", command=FAKE)
    line = lines(done)["copy-then-kernel"]
    assert line.counted.outcomes == {"new": 11, "died": 1}
    assert line.verdict == "fail"
    assert any("SIGKILL" in note for note in line.counted.notes)


def test_an_error_of_the_device_is_unknown_and_no_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deeds(monkeypatch, copy_then_kernel="raise")
    done = run(tmp_path, "copy-then-kernel", command=FAKE)
    line = lines(done)["copy-then-kernel"]
    assert (line.verdict, line.observed.n) == ("unknown", 11)
    assert "the device is on fire" in line.why
    assert "on fire" in (Path(done.document["run"]) / "rank0.log").read_text(), "the trace is kept"


def test_a_value_that_nobody_wrote_fails_even_a_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deeds(monkeypatch, copy_race="foreign")
    done = run(tmp_path, "copy-race", command=FAKE)
    assert names(done, "fail") == {"copy-race"}


def test_processes_that_cannot_start_leave_everything_unknown(tmp_path: Path) -> None:
    done = run(tmp_path, "copy-then-kernel", command=(sys.executable, "-c", "raise SystemExit('no driver')"))
    assert done.exit == 3
    assert names(done, "unknown") == {"copy-race", "copy-then-kernel"}
    assert "no driver" in lines(done)["copy-race"].why


def test_what_was_shot_before_the_processes_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deeds(monkeypatch, copy_then_kernel="die")
    monkeypatch.setenv("LITMUS_ONCE", str(tmp_path / "once"))
    done = run(tmp_path, "copy-then-kernel,copy-event-kernel", command=FAKE)
    assert {name: line.verdict for name, line in lines(done).items()} == {
        "copy-race": "pass",
        "copy-then-kernel": "fail",
        "copy-event-kernel": "unknown",
    }
    assert "FileExistsError" in lines(done)["copy-event-kernel"].why


PARENT = """
import sys
from pathlib import Path
from harness.litmus.command import LitmusRequest, run_litmus
from test_litmus import FAKE, TABLE
request = LitmusRequest(out=Path(sys.argv[1]), only=("copy-race",), iterations=2)
run_litmus(request, lambda said: None, table=TABLE, command=FAKE)
"""


def test_a_killed_command_takes_its_processes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deeds(monkeypatch, copy_race="hang")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)])
    try:
        child = _await_child(parent.pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(LONG_S)
        assert wait_gone([child], LONG_S) == []
    finally:
        parent.kill()
        parent.wait(LONG_S)


def _await_child(pid: int) -> ProcessId:
    """The process that shoots, once the parent has started it."""
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        for child in children_of(pid):
            command = Path(f"/proc/{child.pid}/cmdline").read_bytes()
            if b"litmus_child" in command and identify(child.pid) == child:
                return child
        time.sleep(0.01)
    raise AssertionError("the command started no process")


# --- what is stored ----------------------------------------------------------------------------------------


def test_the_stored_document_follows_its_schema_and_says_that_it_is_a_simulation(tmp_path: Path) -> None:
    done = run(tmp_path, "copy-then-kernel", iterations=3, defects=("D3",))
    folder = Path(done.document["run"])
    stored = json.loads((folder / "litmus.json").read_text())
    jsonschema.validate(stored, load_schema("litmus"))
    assert stored == done.document
    assert folder.parent == tmp_path and folder.name.endswith("-litmus")
    assert stored["simulation"] and "no evidence about hardware" in stored["simulation_note"]
    assert stored["defects"] == ["D3"] and stored["verdict"] == "fail" and stored["exit"] == 1
    (test,) = [test for test in stored["tests"] if test["name"] == "copy-then-kernel"]
    assert test["forbidden"] and test["power"] and test["verdict"] == "fail"
    assert test["observed"]["k"] > 0 and test["observation"] in ("sometimes", "always")
    assert stored["platform"]["torch"] == torch.__version__
    text = (folder / "litmus.md").read_text()
    assert "Simulation." in text and "| copy-then-kernel | old, torn | no |" in text
