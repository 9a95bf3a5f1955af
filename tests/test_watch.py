"""``hangrig watch`` on real processes: small programs, and a tiny engine over gloo (``watch_rig.py``)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner
from watch_rig import TinyEngine, tiny_engine

from harness.cli import app
from harness.process_control import ProcessId, identify
from harness.process_tree import Member
from harness.stacks import ProcessStacks
from harness.watch.command import request_of, run_watch
from harness.watch.looks import WatchSettings
from harness.watch.run import WatchError, WatchRequest, WatchResult, watch
from harness.watch.sources import Deaths, access_problem
from harness.watch.text import document, text

QUICK = WatchSettings(stall_s=3.0, quiet_s=1.5, stopped_s=1.0)
LONG_S = 60.0
"""Longer than any stall here takes to be confirmed: when this passes, there was none."""


def once(pid: int, out: Path) -> WatchResult:
    return watch(WatchRequest((pid,), None, out, settings=QUICK))


def until(pid: int, out: Path, timeout_s: float = LONG_S) -> WatchResult:
    return watch(WatchRequest((pid,), timeout_s, out, settings=QUICK))


def blamed(result: WatchResult) -> tuple[str, str, list[int | None]]:
    assert result.diagnosis is not None
    diagnosis = result.diagnosis
    return diagnosis.kind, diagnosis.mechanism, [culprit.rank for culprit in diagnosis.culprits]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def program(code: str) -> Iterator[int]:
    """A Python process that has said that it is up."""
    command = [sys.executable, "-c", f"print(flush=True)\n{code}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


# --- single processes


def test_a_busy_process_is_well(tmp_path: Path) -> None:
    with program("while True: sum(range(1000))") as pid:
        result = once(pid, tmp_path)
    assert (result.verdict, result.exit, result.diagnosis) == ("healthy", 0, None)
    assert not (result.folder / "diagnosis.json").exists()


def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    with program("import signal; signal.pause()") as pid:
        os.kill(pid, signal.SIGSTOP)
        result = once(pid, tmp_path)
        still = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    assert (result.exit, blamed(result)[:2]) == (1, ("stopped", "rank-stopped"))
    assert result.diagnosis is not None and result.diagnosis.culprits[0].pid == pid
    assert still == "T"  # as it was found


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()", "waits for a lock"),
        ("import time; time.sleep(600)", "sleeps"),
        ("import os; r, w = os.pipe()\nwhile True: os.write(w, b'x' * 4096)", "waits for room to write"),
    ],
)
def test_of_a_lone_process_that_is_held_up_nothing_can_be_told(code: str, words: str, tmp_path: Path) -> None:
    with program(code) as pid:
        result = once(pid, tmp_path)
    assert (result.verdict, result.exit) == ("cannot tell", 3)
    assert result.seats[0].doing is not None and words in result.seats[0].doing.words()
    assert "watch with --timeout" in text(result)
    assert result.diagnosis is not None and result.diagnosis.kind == "none"


def test_a_process_that_ends_while_it_is_watched_is_dead(tmp_path: Path) -> None:
    with program("import signal; signal.pause()") as pid:
        killer = threading.Timer(1.5, os.kill, (pid, signal.SIGKILL))
        killer.start()
        result = until(pid, tmp_path)
        killer.join()
    assert (result.exit, blamed(result)[:2]) == (1, ("dead", "rank-dead"))


def test_there_must_be_such_a_process(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(WatchError, match=f"no process {ended.pid}: give the pid of a running server"):
        once(ended.pid, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_to_do_when_a_process_may_not_be_looked_into() -> None:
    if os.geteuid() != 0:
        foreign = 1
    else:
        # Root may look into everything, so a child gives its rights up and asks about us.
        code = (
            "import os, sys; sys.path.insert(0, sys.argv[2]);"
            "from harness.watch.sources import access_problem; from harness.process_tree import read_tree;"
            "pid = int(sys.argv[1]); members = [m for m in read_tree(pid).members if m.process.pid == pid];"
            "os.setgid(65534); os.setuid(65534);"
            "print(access_problem(members))"
        )
        root = Path(__file__).parent.parent
        command = [sys.executable, "-c", code, str(os.getpid()), str(root)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"hangrig may not look into process {os.getpid()}: it belongs to root" in said
        assert "SYS_PTRACE" in said and "sudo" in said
        return
    member = Member(0, "rank", 0, ProcessId(foreign, 1), 0, "init", None)
    assert "SYS_PTRACE" in (access_problem([member]) or "")


def test_deaths_are_seen_in_their_order() -> None:
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(3)]
    processes = [identify(child.pid) for child in children]
    deaths = Deaths([process for process in processes if process is not None])
    for child in (children[2], children[0]):
        child.kill()
        assert deaths.wait(LONG_S)
    first, second = processes[2], processes[0]
    assert first is not None and second is not None
    assert deaths.died_s[first] < deaths.died_s[second]
    assert processes[1] not in deaths.died_s
    deaths.close()
    children[1].kill()
    for child in children:
        child.wait()


# --- the tiny engine


@pytest.fixture
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TinyEngine]:
    flags = getattr(request, "param", ())
    with tiny_engine(tmp_path / "engine", free_port(), *flags) as running:
        yield running


def check_stored(result: WatchResult) -> None:
    """Two samples with stacks of every process that lives, and documents that can be read again."""
    folder = result.folder
    assert result.diagnosis is not None
    stored = json.loads((folder / "diagnosis.json").read_text())
    assert stored == json.loads(json.dumps(result.diagnosis.to_json()))
    for number in (0, 1):
        sample = folder / "evidence" / f"sample-{number}"
        names = {entry["name"] for entry in json.loads((sample / "processes.json").read_text())["ranks"]}
        assert names == {"rank0", "rank1", "controller", "server"}
        assert json.loads((sample / "metrics.json").read_text())["url"]
        for path in (sample / "stacks").glob("*.json"):
            ProcessStacks.from_json(json.loads(path.read_text()))
    for fact in stored["proof"]:
        assert (folder / fact["evidence"]).exists(), fact
    assert json.loads((folder / "evidence" / "manifest.json").read_text())["reason"] == result.opinion.reason


def test_an_idle_and_a_working_engine_are_well_until_a_rank_is_stopped_and_then_killed(
    engine: TinyEngine, tmp_path: Path
) -> None:
    out = tmp_path / "runs"
    idle = [once(engine.pid, out), until(engine.pid, out, 4.0)]
    engine.tell("work")
    engine.wait_for_tokens()
    working = [once(engine.pid, out) for _ in range(3)] + [until(engine.pid, out, 4.0)]
    # Half a second may be too short to see a starved process move, and never long enough to call it sick.
    assert {result.verdict for result in (*idle, *working)} <= {"healthy", "cannot tell"}
    assert idle[1].verdict == working[-1].verdict == "healthy"
    assert {seat.member.seat for seat in idle[0].seats} == {0, 1, "controller", "server"}

    rank = engine.pid_of(1)
    os.kill(rank, signal.SIGSTOP)
    for result in (once(engine.pid, out), until(engine.pid, out)):
        assert (result.exit, *blamed(result)) == (1, "stopped", "rank-stopped", [1])
        assert result.diagnosis is not None and result.diagnosis.confidence == "proven"
        assert result.diagnosis.culprits[0].pid == rank
        check_stored(result)
        lines = text(result).splitlines()
        assert lines[0] == f"NOT HEALTHY: rank 1 (pid {rank}, cpu): stopped, rank-stopped, proven"
        assert any(
            "rank 0" in line and "in all_reduce, called by Scheduler.run_batch" in line for line in lines
        )
    os.kill(rank, signal.SIGCONT)
    engine.wait_for_tokens()
    assert until(engine.pid, out, 4.0).verdict == "healthy"

    killer = threading.Timer(1.5, os.kill, (rank, signal.SIGKILL))
    killer.start()
    result = until(engine.pid, out)
    killer.join()
    assert (result.exit, *blamed(result)) == (1, "dead", "rank-dead", [1])


@pytest.mark.parametrize("engine", [("--enable-metrics",)], indirect=True)
def test_by_metrics_a_rank_that_computes_is_no_stall_and_one_that_waits_for_a_lock_is(
    engine: TinyEngine, tmp_path: Path
) -> None:
    engine.tell("work")
    engine.wait_for_tokens()
    engine.tell("spin-1")
    result = until(engine.pid, tmp_path / "runs", 7.0)
    assert (result.verdict, result.exit) == ("cannot tell", 3)
    assert any("at work" in fact for fact in result.opinion.facts)
    engine.untell("spin-1")
    engine.wait_for_tokens()
    assert until(engine.pid, tmp_path / "runs", 3.0).verdict == "healthy"
    engine.tell("hold-1")
    result = until(engine.pid, tmp_path / "runs")
    assert (result.exit, *blamed(result)) == (1, "hang", "host-blocked", [1])
    assert result.opinion.reason == "tokens"
    assert result.diagnosis is not None and result.diagnosis.confidence == "supported"
    assert result.diagnosis.collective is not None and result.diagnosis.collective.waiting == (0,)
    assert "take_lock" in result.diagnosis.signature
    check_stored(result)


def test_a_rank_that_leaves_a_collective_out_is_named_without_metrics(
    engine: TinyEngine, tmp_path: Path
) -> None:
    engine.tell("mute")  # no health answers either: stacks alone
    engine.tell("work")
    engine.wait_for_tokens()
    engine.tell("skip-1")
    result = until(engine.pid, tmp_path / "runs")
    assert (result.exit, *blamed(result)) == (1, "hang", "collective-skipped", [1])
    assert result.diagnosis is not None and result.diagnosis.confidence == "supported"
    check_stored(result)


def test_a_controller_that_waits_for_a_lock_is_named_by_the_health_question(
    engine: TinyEngine, tmp_path: Path
) -> None:
    engine.tell("hold-controller")
    result = until(engine.pid, tmp_path / "runs")
    assert (result.exit, *blamed(result)) == (1, "hang", "host-blocked", [None])
    assert result.diagnosis is not None and result.diagnosis.culprits[0].role == "controller"
    check_stored(result)


# --- the command


def test_the_command_gives_one_document_and_stores_it(tmp_path: Path) -> None:
    said: list[str] = []
    with program("import signal; signal.pause()") as pid:
        os.kill(pid, signal.SIGSTOP)
        request = request_of((pid,), once=True, timeout_s=None, out=tmp_path, metrics=None)
        found, words, status = run_watch(request, said.append)
    assert status == found["exit"] == 1
    assert words.startswith("NOT HEALTHY: ")
    assert found["processes"][0]["pid"] == pid and found["processes"][0]["state"] == "stopped"
    stored = json.loads((Path(found["directory"]) / "watch.json").read_text())
    assert stored == {"schema": 1, **json.loads(json.dumps(found))}
    jsonschema.validate(found["diagnosis"]["culprits"], {"type": "array", "minItems": 1})
    assert any(f"kill -CONT {pid}" in step for step in found["next"])


def test_the_exit_status_and_the_output_are_the_contract_s(tmp_path: Path) -> None:
    runner = CliRunner()
    with program("while True: sum(range(1000))") as pid:
        well = runner.invoke(app, ["watch", str(pid), "--once", "--json", "--out", str(tmp_path)])
        short = runner.invoke(app, ["watch", str(pid), "--timeout", "2s", "--out", str(tmp_path)])
        both = runner.invoke(app, ["watch", str(pid), "--once", "--timeout", "2s"])
    assert well.exit_code == 0
    assert json.loads(well.stdout)["verdict"] == "healthy"
    assert short.exit_code == 0
    assert short.stdout.startswith("HEALTHY: ")
    assert "watching 1 process of other for 2 s; no metrics" in short.stderr
    assert both.exit_code == 2
    gone = runner.invoke(app, ["watch", str(pid), "--once", "--out", str(tmp_path)])
    assert gone.exit_code == 2
    assert f"no process {pid}" in gone.stderr


def test_without_once_the_watch_lasts_as_long_as_it_is_told() -> None:
    one = request_of((1,), once=False, timeout_s=None, out=Path("runs"), metrics=None)
    assert one.timeout_s == 600.0
    assert request_of((1,), once=True, timeout_s=5.0, out=Path("runs"), metrics="u").timeout_s is None


def test_a_healthy_document_has_no_diagnosis(tmp_path: Path) -> None:
    with program("while True: sum(range(1000))") as pid:
        found = document(once(pid, tmp_path))
    assert (found["verdict"], found["diagnosis"], found["next"][0].startswith("nothing")) == (
        "healthy",
        None,
        True,
    )
