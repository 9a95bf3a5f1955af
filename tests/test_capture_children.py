"""The capture where ranks have processes of their own, and where targets are many, deep, or in odd states."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from capture_rig import DEADLINE_S, stand_in

from harness import dumps
from harness.capture import CaptureRank, CaptureReport, CaptureRequest, capture, find_py_spy
from harness.children import MOST_OF_ONE, children_of_seats
from harness.process_control import ProcessId, children_of, end, identify, wait_gone
from harness.processes import read_process
from harness.stacks import ProcessStacks
from harness.store import load_schema, read_samples

# For a stand-in of py-spy. A tracer attaches by a stop of its own. While the first is under way the two are one:
# the tracer takes it, and its target runs again.
STOP = """
    os.kill(pid, signal.SIGSTOP)
    while open(f'/proc/{pid}/stat').read().rpartition(')')[2].split()[0] != 'T':
        time.sleep(0.001)
"""

REFUSED = 'sys.exit("Permission Denied: Try running again with elevated permissions")'

# Prepended to each program: argv 1 is the file for its stacks.
HEAD = """
import multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path
from harness.tracing import install_faulthandler
install_faulthandler(Path(sys.argv[1]))

def rank_waits():
    print("ready", flush=True)
    threading.Event().wait()

def child_stands_here(where):
    where.set()
    time.sleep(1000)

def fork():
    context = multiprocessing.get_context("fork")
    there = context.Event()
    context.Process(target=child_stands_here, args=(there,)).start()
    there.wait()
"""


class Programs:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack

    def start(self, body: str, rank: int = 0) -> CaptureRank:
        fault = self.folder / f"fault{rank}.txt"
        process = subprocess.Popen(
            [sys.executable, "-c", f"{HEAD}\n{body}\nrank_waits()", str(fault)],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(_end, process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        ticks = read_process(process.pid, 0).start_time_ticks
        return CaptureRank(rank, process.pid, ticks, faulthandler_path=fault)

    def take(self, *ranks: CaptureRank, **more: object) -> CaptureReport:
        request = CaptureRequest(ranks=ranks, out=self.folder / "evidence", sample=0, deadline_s=60.0)
        return capture(replace(request, **more))  # type: ignore[arg-type]


def _end(process: subprocess.Popen[str]) -> None:
    own = identify(process.pid)
    end([*children_of(process.pid), *([own] if own else [])], DEADLINE_S, grace_s=0.0)
    process.wait(DEADLINE_S)
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(tmp_path, stack)


def lacks(report: CaptureReport) -> dict[str, str]:
    return {missing.what: missing.why for missing in report.missing}


def functions(stacks: ProcessStacks) -> list[str]:
    host = stacks.thread("host")
    assert host is not None
    return [frame.name for frame in host.frames]


def test_each_child_has_a_dump_of_its_own(programs: Programs) -> None:
    other = programs.start("", rank=1)
    rank = programs.start("fork(); subprocess.Popen(['sleep', '1000'])")
    report = programs.take(rank, other, native=True)
    assert report.missing == ()
    forked, sleeper = report.children
    assert (forked.of, forked.parent, forked.python) == (0, rank.pid, True)
    assert (sleeper.of, sleeper.command, sleeper.python) == (0, "sleep 1000", False)
    assert list(report.child_stacks) == [forked.process.pid]
    assert "child_stands_here" in functions(report.child_stacks[forked.process.pid])
    assert "rank_waits" in functions(report.stacks[0])
    folder = programs.folder / "evidence"
    table = json.loads((folder / "sample-0" / "processes.json").read_text())
    jsonschema.validate(table, load_schema("processes"))
    dump = folder / "sample-0" / "children" / f"rank0.{forked.process.pid}.json"
    jsonschema.validate(json.loads(dump.read_text()), load_schema("stacks"))
    assert [row["pid"] for row in table["children"]] == [forked.process.pid, sleeper.process.pid]
    (sample,) = read_samples(folder)
    assert list(sample.children) == [f"rank0.{forked.process.pid}"] and set(sample.stacks) == {0, 1}
    assert ProcessStacks.from_json(sample.children[f"rank0.{forked.process.pid}"]).rank == forked.words
    assert (folder / "sample-0" / "children" / f"rank0.{forked.process.pid}.native.json").exists()


def test_where_py_spy_is_refused_a_forked_child_answers_for_itself(programs: Programs) -> None:
    rank = programs.start(
        "fork(); fork(); subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    )
    report = programs.take(rank, py_spy=stand_in(programs.folder, REFUSED))
    first, second, other_program = report.children
    assert functions(report.stacks[0])[-2:] == ["rank_waits", "<module>"]
    for child in (first, second):
        stacks = report.child_stacks[child.process.pid]
        assert stacks.source == "faulthandler" and "child_stands_here" in functions(stacks)
    assert other_program.process.pid not in report.child_stacks
    assert "no handler for SIGUSR2" in lacks(report)[f"stacks of {other_program.words}"]
    assert all(read_process(child.process.pid, 0).alive for child in report.children)


def test_children_are_bounded_in_number_and_the_rest_is_counted(programs: Programs) -> None:
    rank = programs.start(f"[subprocess.Popen(['sleep', '1000']) for _ in range({MOST_OF_ONE + 3})]")
    report = programs.take(rank)
    assert len(report.children) == MOST_OF_ONE
    assert lacks(report)["stacks of 3 more children of rank 0"].startswith(f"{MOST_OF_ONE} a rank")


def test_the_work_of_children_is_counted_also_of_those_that_have_ended(programs: Programs) -> None:
    spin = "end = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    busy = programs.start(
        f"subprocess.run([sys.executable, '-S', '-c', {'import time' + chr(10) + spin!r}], check=True)"
    )
    idle = programs.start("subprocess.Popen(['sleep', '1000'])", rank=1)
    report = programs.take(busy, idle)
    assert report.children_cpu_s[0] >= 0.3 > report.children_cpu_s[1]
    assert [child.of for child in report.children] == [1]


def test_a_seat_below_another_seat_is_no_child(programs: Programs) -> None:
    rank = programs.start("subprocess.Popen(['sh', '-c', 'sleep 1000; true'])")
    own = ProcessId(rank.pid, rank.start_time_ticks)
    (shell,) = [child for child in children_of_seats({0: own}).found if child.parent == rank.pid]
    below = children_of_seats({0: own, "shell": shell.process}).found
    assert [(child.of, child.parent) for child in below] == [("shell", shell.process.pid)]
    reused = ProcessId(own.pid, own.start_time_ticks - 1)
    assert children_of_seats({0: reused}).found == ()


def test_a_stopped_child_is_dumped_and_stays_stopped(programs: Programs) -> None:
    rank = programs.start("fork()")
    (child,) = children_of(rank.pid)
    os.kill(child.pid, signal.SIGSTOP)
    _until(child, "T")
    report = programs.take(rank, native=True)
    assert "child_stands_here" in functions(report.child_stacks[child.pid])
    assert report.children[0].state == "T" and read_process(child.pid, 0).state == "T"
    assert list(lacks(report)) == [f"native stacks of child {child.pid} of rank 0"]


def _until(process: ProcessId, state: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while (found := read_process(process.pid, process.start_time_ticks).state) != state:
        assert time.monotonic() < deadline_s, f"the process is {found}, not {state}"


def _until_it_has_a_child(process: ProcessId) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not children_of(process.pid):
        assert time.monotonic() < deadline_s, "no child"
        time.sleep(0.001)


def test_a_target_that_is_stopped_while_it_is_dumped_stays_stopped(programs: Programs) -> None:
    rank = programs.start("")
    tool = str(find_py_spy())
    py_spy = stand_in(
        programs.folder,
        f"if '--nonblocking' not in sys.argv:{STOP}os.execv({tool!r}, [{tool!r}, *sys.argv[1:]])",
    )
    report = programs.take(rank, py_spy=py_spy)
    assert "rank_waits" in functions(report.stacks[0]) and report.stacks[0].source == "py-spy"
    assert read_process(rank.pid, rank.start_time_ticks).state == "T"


def test_a_py_spy_that_hangs_on_a_target_that_was_stopped_meanwhile_gets_a_second_try(
    programs: Programs,
) -> None:
    rank = programs.start("")
    tool = str(find_py_spy())
    py_spy = stand_in(
        programs.folder,
        f"if '--nonblocking' not in sys.argv:{STOP}    sys.exit('it was stopped')\n"
        f"os.execv({tool!r}, [{tool!r}, *sys.argv[1:]])",
    )
    report = programs.take(rank, py_spy=py_spy)
    assert report.stacks[0].source == "py-spy" and report.missing == ()


def test_an_uninterruptible_rank_is_dumped_without_suspending_it(programs: Programs) -> None:
    fifo = programs.folder / "fifo"
    os.mkfifo(fifo)
    # Until its child has opened the pipe, the parent of a posix_spawn waits in the kernel, deaf to signals.
    actions = f"[(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, os.O_RDONLY, 0)]"
    rank = programs.start(
        f"print('ready', flush=True)\nos.posix_spawn('/bin/true', ['true'], {{}}, file_actions={actions})"
    )
    own = ProcessId(rank.pid, rank.start_time_ticks)
    # Before it has a child, a wait for its disk looks the same.
    _until_it_has_a_child(own)
    _until(own, "D")
    report = programs.take(rank, native=True)
    assert functions(report.stacks[0]) == ["<module>"] and report.stacks[0].source == "py-spy"
    assert "state D" in lacks(report)["native stacks of rank 0"]
    assert [entry.state for entry in report.processes] == ["D"]
    os.close(os.open(fifo, os.O_WRONLY))
    assert wait_gone(children_of(rank.pid), DEADLINE_S) == []


def test_two_hundred_threads_and_the_hundred_that_faulthandler_shows(programs: Programs) -> None:
    rank = programs.start(
        "for _ in range(200): threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    report = programs.take(rank, native=True)
    assert len(report.stacks[0].threads) == len(report.native[0].threads) == 201
    assert "rank_waits" in functions(report.stacks[0]) and report.missing == ()
    refused = programs.take(rank, py_spy=stand_in(programs.folder, REFUSED))
    assert len(refused.stacks[0].threads) == 100
    assert "newest 100 threads" in lacks(refused)["the oldest threads of rank 0"]


def test_a_recursion_too_deep_for_py_spy_shows_its_innermost_frames(programs: Programs) -> None:
    deep = "def deeper(n):\n    rank_waits() if n == 0 else deeper(n - 1)\n"
    rank = programs.start(f"sys.setrecursionlimit(100000)\n{deep}\ndeeper(15000)")
    report = programs.take(rank)
    assert report.stacks[0].source == "faulthandler" and "py-spy stacks of rank 0" in lacks(report)
    names = functions_of_any(report.stacks[0])
    assert "rank_waits" in names and names.count("deeper") > 50


def functions_of_any(stacks: ProcessStacks) -> list[str]:
    """Of the first thread: without its outermost frame it cannot be told to be the main one."""
    return [frame.name for frame in stacks.threads[0].frames]


def test_a_deadline_too_short_for_native_stacks_leaves_them_out(programs: Programs) -> None:
    ranks = [programs.start("", rank=number) for number in range(2)]
    report = programs.take(*ranks, native=True, deadline_s=0.45)
    assert report.native == {}
    assert "were left for them" in lacks(report)["native stacks of rank 0"]
    assert all(read_process(rank.pid, rank.start_time_ticks).alive for rank in ranks)


def test_a_deadline_that_is_over_takes_nothing_and_disturbs_nobody(programs: Programs) -> None:
    rank = programs.start("")
    report = programs.take(rank, native=True, deadline_s=0.0)
    assert (
        report.stacks == {}
        and "not started, the deadline had passed" in lacks(report)["py-spy stacks of rank 0"]
    )
    assert lacks(report)["stacks of rank 0"] == "faulthandler: not asked, the deadline had passed"
    assert (programs.folder / "fault0.txt").read_text() == ""


def test_a_number_given_away_under_the_dump_is_noticed(
    programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = programs.start("")
    seen = dumps.read_stat(rank.pid)
    assert seen is not None
    monkeypatch.setattr(
        dumps, "read_stat", lambda pid: replace(seen, start_time_ticks=seen.start_time_ticks + 7)
    )
    report = programs.take(rank)
    assert "its number was given to another one" in lacks(report)["py-spy stacks of rank 0"]
