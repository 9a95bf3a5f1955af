"""The capture on real processes: what it takes from well, stopped, busy and dead ones."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from capture_rig import DEADLINE_S, Child, Children, children_in, stand_in

from harness.capture import (
    LOG_TAIL_BYTES,
    CaptureReport,
    CaptureRequest,
    allow_tracing_by,
    capture,
    find_py_spy,
    read_tail,
)
from harness.ledger import Snapshot
from harness.stacks import ProcessStacks, same_place, wait_frames

# What py-spy 0.4.3 printed when it ran as another user.
REFUSAL = (
    "Permission Denied: Try running again with elevated permissions by going 'sudo env \\\"PATH=$PATH\\\" !!'"
)


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    yield from children_in(tmp_path)


def take(tmp_path: Path, *children: Child, **more: object) -> CaptureReport:
    request = CaptureRequest(
        ranks=tuple(child.target for child in children), out=tmp_path / "evidence", sample=0, deadline_s=60.0
    )
    return capture(replace(request, **more))  # type: ignore[arg-type]


def lacks(report: CaptureReport) -> dict[str, str]:
    return {missing.what: missing.why for missing in report.missing}


def stored(tmp_path: Path, name: str) -> dict[str, object]:
    document = json.loads((tmp_path / "evidence" / "sample-0" / name).read_text())
    assert isinstance(document, dict) and document["schema"] == 1
    return document


def test_healthy_ranks_give_everything(tmp_path: Path, children: Children) -> None:
    waiting, busy = children.start(0), children.start(1, "busy")
    report = take(tmp_path, waiting, busy, native=True)
    assert report.missing == ()
    for number, child in enumerate((waiting, busy)):
        stacks = report.stacks[number]
        assert (stacks.pid, stacks.rank, stacks.source, stacks.native) == (
            child.process.pid,
            number,
            "py-spy",
            False,
        )
        assert {thread.role for thread in stacks.threads} == {"host", "compute", "copy"}
        compute = stacks.thread("compute")
        assert compute is not None and [frame.name for frame in compute.frames[:3]] == [
            "Condition.wait",
            "Event.wait",
            "stand_before_a_peer",
        ]
        assert [frame.name for frame in wait_frames(compute)] == ["Condition.wait", "Event.wait"]
        assert ProcessStacks.from_json(stored(tmp_path, f"stacks/rank{number}.json")) == stacks
        native = ProcessStacks.from_json(stored(tmp_path, f"stacks/rank{number}.native.json"))
        assert native == report.native[number] and native.native
        assert any(frame.native for thread in native.threads for frame in thread.frames)
        snapshot = Snapshot.from_json(stored(tmp_path, f"ledger/rank{number}.json"))
        assert snapshot == report.snapshots[number] and snapshot.host.step == 7
        log = tmp_path / "evidence" / "logs" / f"rank{number}.txt"
        assert log.read_text() == f"rank {number} says hello\n"
    host = report.stacks[1].thread("host")
    assert host is not None and host.active and host.frames[0].name == "count_for_ever"
    assert wait_frames(host) == ()
    rows = stored(tmp_path, "processes.json")["ranks"]
    assert isinstance(rows, list) and [(row["rank"], row["pid"]) for row in rows] == [
        (0, waiting.process.pid),
        (1, busy.process.pid),
    ]
    assert rows[0]["state"] in ("R", "S") and rows[1]["state"] == "R" and rows[0]["rss_bytes"] > 1 << 20
    assert rows[1]["host_state"] == "R" and rows[1]["host_cpu_s"] > 0.0
    assert rows[0]["host_cpu_s"] >= 0.0 and rows[0]["children_cpu_s"] >= 0.0
    waiting.until("S")
    busy.until("R")


def test_a_stopped_rank_is_dumped_without_suspending_it_and_stays_stopped(
    tmp_path: Path, children: Children
) -> None:
    well, stopped = children.start(0), children.start(1)
    stopped.stop()
    report = take(tmp_path, well, stopped, native=True)
    assert set(report.stacks) == {0, 1} and set(report.native) == {0}
    assert [entry.state for entry in report.processes][1:] == ["T"]
    host = report.stacks[1].thread("host")
    assert host is not None and "stand_before_a_peer" in [frame.name for frame in host.frames]
    assert list(lacks(report)) == ["native stacks of rank 1"]
    assert "state T" in lacks(report)["native stacks of rank 1"]
    assert [missing.impossible for missing in report.missing] == [True]
    assert stopped.state() == "T"
    well.until("S")


def test_dead_ranks_leave_their_ledger(tmp_path: Path, children: Children) -> None:
    zombie, gone = children.start(0), children.start(1)
    gone.process.kill()
    gone.process.wait(DEADLINE_S)
    zombie.process.kill()
    zombie.until("Z")
    report = take(tmp_path, zombie, gone, native=True)
    assert [(entry.state, entry.exit) for entry in report.processes] == [
        ("Z", "signal SIGKILL"),
        ("dead", None),
    ]
    assert report.stacks == {} and set(report.snapshots) == {0, 1}
    why = lacks(report)
    assert "signal SIGKILL" in why["stacks of rank 0"]
    assert why["stacks of rank 1"] == f"process {gone.process.pid} is gone"
    assert "native stacks of rank 1" in why


def test_a_number_given_to_another_process_is_not_that_rank(tmp_path: Path, children: Children) -> None:
    child = children.start(0)
    other = replace(child.target, start_time_ticks=child.target.start_time_ticks - 1)
    report = take(tmp_path, Child(child.process, other))
    assert report.processes[0].state == "dead" and report.stacks == {}
    unknown = replace(child.target, pid=0)
    report = take(tmp_path, Child(child.process, unknown))
    assert report.processes[0].state == "missing"
    assert lacks(report)["stacks of rank 0"] == "no process is known for this rank"


def test_a_refused_py_spy_falls_back_to_the_rank_itself(tmp_path: Path, children: Children) -> None:
    child, holder = children.start(0), children.start(1, "gil")
    py_spy = stand_in(tmp_path, f'sys.exit("{REFUSAL}")')
    report = take(tmp_path, child, holder, py_spy=py_spy, native=True)
    why = lacks(report)
    assert why["py-spy stacks of rank 0"].startswith("py-spy: Permission Denied: Try running again")
    assert "native stacks of rank 0" in why and "stacks of rank 0" not in why
    stacks = report.stacks[0]
    assert stacks.source == "faulthandler" and len(stacks.threads) == 3
    assert stacks == ProcessStacks.from_json(stored(tmp_path, "stacks/rank0.json"))
    host = stacks.thread("host")
    assert host is not None
    assert [frame.name for frame in host.frames] == ["wait", "wait", "stand_before_a_peer", "<module>"]
    assert [frame.name for frame in wait_frames(host)] == ["wait", "wait"]
    held = report.stacks[1].thread("host")
    assert held is not None and held.frames[0].name == "hold_the_lock_of_all_threads"
    assert child.process.poll() is None and holder.process.poll() is None


def test_the_second_fallback_reads_only_its_own_dump(tmp_path: Path, children: Children) -> None:
    child = children.start(0, "steps")
    py_spy = stand_in(tmp_path, f'sys.exit("{REFUSAL}")')
    first = take(tmp_path, child, py_spy=py_spy).stacks[0]
    child.say("go on")
    assert child.line() == "moved"
    second = take(tmp_path, child, py_spy=py_spy).stacks[0]
    for stacks, place in ((first, "first_place"), (second, "second_place")):
        host = stacks.thread("host")
        assert host is not None and host.frames[0].name == place and len(stacks.threads) == 3


def test_py_spy_that_cannot_start_or_is_not_there(
    tmp_path: Path, children: Children, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = children.start(0)
    report = take(tmp_path, child, py_spy=tmp_path / "no-such-tool")
    assert report.stacks[0].source == "faulthandler"
    assert "cannot start (No such file or directory)" in lacks(report)["py-spy stacks of rank 0"]
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "empty" / "python"))
    assert find_py_spy() is None
    report = take(tmp_path, child)
    assert report.stacks[0].source == "faulthandler"
    assert "pip install py-spy" in lacks(report)["py-spy stacks of rank 0"]


def test_py_spy_is_found_beside_the_interpreter_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_py_spy() == Path(sys.executable).parent / "py-spy"
    monkeypatch.setenv("HANGRIG_PY_SPY", "/somewhere/py-spy")
    assert find_py_spy() == Path("/somewhere/py-spy")


def test_a_hanging_py_spy_is_killed_and_leaves_nobody_stopped(tmp_path: Path, children: Children) -> None:
    child, stopped = children.start(0), children.start(1)
    stopped.stop()
    py_spy = stand_in(
        tmp_path,
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.kill(pid, signal.SIGSTOP)\ntime.sleep(3600)",
    )
    report = take(tmp_path, child, stopped, py_spy=py_spy, deadline_s=2.0, native=True)
    why = lacks(report)
    assert "killed: it had not ended at the deadline" in why["py-spy stacks of rank 0"]
    child.until("S")
    assert report.stacks[0].source == "faulthandler"
    assert stopped.state() == "T"
    assert "is stopped and cannot answer a signal" in why["stacks of rank 1"]
    assert {"native stacks of rank 0", "native stacks of rank 1"} <= set(why)


def test_a_real_py_spy_killed_at_work_leaves_nobody_stopped(tmp_path: Path, children: Children) -> None:
    waiting, busy = children.start(0), children.start(1, "busy")
    py_spy = stand_in(
        tmp_path,
        f"tool = {str(find_py_spy())!r}\n"
        "os.execv(tool, [tool, 'record', '--native', '--rate', '1000', '--duration', '3600',"
        " '-o', os.devnull, '--pid', str(pid)])",
    )
    report = take(tmp_path, waiting, busy, py_spy=py_spy, deadline_s=2.0)
    assert all(
        "killed: it had not ended at the deadline" in lacks(report)[f"py-spy stacks of rank {n}"]
        for n in (0, 1)
    )
    waiting.until("S")
    busy.until("R")
    assert {stacks.source for stacks in report.stacks.values()} == {"faulthandler"}


def test_a_rank_without_a_handler_is_not_killed_by_the_question(tmp_path: Path, children: Children) -> None:
    child = children.start(0, "deaf")
    report = take(tmp_path, child, py_spy=tmp_path / "no-such-tool")
    assert "has no handler for SIGUSR2" in lacks(report)["stacks of rank 0"]
    assert child.process.poll() is None
    without = Child(child.process, replace(child.target, faulthandler_path=None))
    report = take(tmp_path, without, py_spy=tmp_path / "no-such-tool")
    assert lacks(report)["stacks of rank 0"] == "faulthandler: this process has no dump file"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("while True: os.write(1, b'x' * 65536)", "more than 8 MiB of output"),
        ("print('not json')", "expected the output of py-spy --json"),
        ("print('[]')", "expected the output of py-spy --json"),
        ("sys.exit(3)", "ended with status 3 and said nothing"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with status -11"),
    ],
)
def test_odd_tools(tmp_path: Path, children: Children, body: str, words: str) -> None:
    child = children.start(0)
    report = take(tmp_path, child, py_spy=stand_in(tmp_path, body))
    assert words in lacks(report)["py-spy stacks of rank 0"]
    assert report.stacks[0].source == "faulthandler"
    child.until("S")


def test_two_samples_tell_who_moved(tmp_path: Path, children: Children) -> None:
    still, moving = children.start(0), children.start(1, "steps")
    before = take(tmp_path, still, moving)
    moving.say("go on")
    assert moving.line() == "moved"
    after = take(tmp_path, still, moving, sample=1)
    for number, same in ((0, True), (1, False)):
        first, second = before.stacks[number].thread("host"), after.stacks[number].thread("host")
        assert first is not None and second is not None
        assert same_place(first, second) is same
    assert (tmp_path / "evidence" / "sample-1" / "stacks" / "rank1.json").exists()


def test_a_disk_that_refuses_loses_files_but_not_the_report(tmp_path: Path, children: Children) -> None:
    child = children.start(0)
    (tmp_path / "evidence").write_text("a file where the directory should be")
    report = take(tmp_path, child)
    assert report.stacks[0].source == "py-spy" and 0 in report.snapshots
    assert {"processes.json on disk", "rank0.json on disk", "rank0.txt on disk"} <= set(lacks(report))


def test_missing_ledgers_and_logs_are_named(tmp_path: Path, children: Children) -> None:
    child = children.start(0)
    nowhere = replace(child.target, ledger_path=tmp_path / "none.ledger", log_path=tmp_path / "none.txt")
    why = lacks(take(tmp_path, Child(child.process, nowhere)))
    assert "none.ledger: expected a ledger" in why["ledger of rank 0"]
    assert "No such file" in why["logs/rank0.txt"]


def test_log_tails_are_bounded_and_begin_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %06d\n" % number for number in range(20_000)))
    tail = read_tail(path, LOG_TAIL_BYTES)
    assert LOG_TAIL_BYTES - 12 <= len(tail) <= LOG_TAIL_BYTES
    assert tail.startswith(b"line ") and tail.endswith(b"line 019999\n")
    path.write_bytes(b"short")
    assert read_tail(path, LOG_TAIL_BYTES) == b"short"


def test_the_tracing_rule_exists_only_under_yama() -> None:
    assert allow_tracing_by(1) is Path("/proc/sys/kernel/yama/ptrace_scope").exists()


def test_a_stopped_rank_continues_when_told(tmp_path: Path, children: Children) -> None:
    """The stop of the rig is a real one: the control of the tests that look at the state."""
    child = children.start(0)
    child.stop()
    child.process.send_signal(signal.SIGCONT)
    child.until("R", "S")
