"""Processes are known by pid and start time, and ended whatever state they are in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from harness import process_control
from harness.process_control import ProcessId

DEADLINE_S = 30.0
WAITS = "import threading; print(flush=True); threading.Event().wait(200)"
IGNORES = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {WAITS}"
HAS_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {WAITS!r}]); {WAITS}"

Start = Callable[..., ProcessId]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def begin(program: str, lines: int = 1, **env: str) -> ProcessId:
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, **env}
        )
        started.append(process)
        assert process.stdout is not None
        for _ in range(lines):  # one from each process, when it is ready
            process.stdout.readline()
        found = process_control.identify(process.pid)
        assert found is not None
        return found

    yield begin
    for process in started:
        process_control.end(process_control.children_of(process.pid), DEADLINE_S, grace_s=0.0)
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_a_process_is_known_by_pid_and_start_time(start: Start) -> None:
    process = start(WAITS)
    other = ProcessId(process.pid, process.start_time_ticks + 1)
    assert process_control.alive(process)
    assert not process_control.alive(other)
    assert not process_control.send(other, signal.SIGKILL)
    assert process_control.end([other], DEADLINE_S) == []
    assert process_control.alive(process)


@pytest.mark.parametrize("program", [WAITS, IGNORES])
def test_what_ends_is_gone_though_nobody_collected_it(start: Start, program: str) -> None:
    process = start(program)
    assert process_control.end([process], DEADLINE_S, grace_s=0.5) == []
    assert not process_control.alive(process)
    stat = process_control.find(process)
    assert stat is not None
    assert stat.gone


@pytest.mark.parametrize("grace_s", [0.0, DEADLINE_S / 2])
def test_a_stopped_process_ends(start: Start, grace_s: float) -> None:
    process = start(WAITS)
    assert process_control.send(process, signal.SIGSTOP)
    assert process_control.end([process], DEADLINE_S, grace_s=grace_s) == []


def test_what_does_not_end_is_returned(start: Start) -> None:
    process = start(WAITS)
    assert process_control.wait_gone([process], 0.1) == [process]


def test_children_are_found_by_descent_and_by_mark(start: Start) -> None:
    process = start(HAS_CHILD, lines=2, HANGRIG_TEST_MARK="mine")
    (child,) = process_control.children_of(process.pid)
    assert process_control.children_of(child.pid) == []
    assert process_control.marked_with("HANGRIG_TEST_MARK", "mine") == sorted([process, child])
    assert process_control.marked_with("HANGRIG_TEST_MARK", "min") == []
    # Orphaned, it is nobody's child that we know, but still carries the mark.
    process_control.end([process], DEADLINE_S, grace_s=0.0)
    assert process_control.children_of(process.pid) == []
    assert process_control.marked_with("HANGRIG_TEST_MARK", "mine") == [child]
    assert process_control.end([child], DEADLINE_S) == []


def test_this_process_knows_itself() -> None:
    own = process_control.myself()
    assert own == ProcessId(os.getpid(), process_control.start_time_ticks(os.getpid()) or 0)
    assert process_control.alive(own)
