"""Small programs that stand for ranks, and stand-ins for a py-spy that fails."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.capture import CaptureRank, find_py_spy
from harness.processes import read_process
from harness.stacks_parse import parse_pyspy_json

DEADLINE_S = 30.0

# argv: directory, rank, what the main thread does.
PROGRAM = """
import ctypes, signal, sys, threading
from pathlib import Path
from harness.ledger import LedgerWriter
from harness.tracing import allow_tracing_by, install_faulthandler
directory, rank, mode = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def stand_before_a_peer():
    threading.Event().wait()

def count_for_ever():
    number = 0
    while True:
        number += 1

def hold_the_lock_of_all_threads():
    library = ctypes.PyDLL(None)
    while True:
        library.sleep(1000)

def first_place():
    sys.stdin.readline()
    second_place()

def second_place():
    print("moved", flush=True)
    sys.stdin.readline()

if mode != "deaf":
    install_faulthandler(directory / f"fault{rank}.txt")
w = LedgerWriter.create(directory / f"rank{rank}.ledger", rank=rank, world=2, node="n", device="sim")
w.phase("decode", 7)
w.enqueue("compute", "graph.replay decode-4", "engine.py:12")
for name in ("hangrig-compute", "hangrig-copy"):
    threading.Thread(target=stand_before_a_peer, name=name, daemon=True).start()
print("ready", flush=True)
{"wait": stand_before_a_peer, "deaf": stand_before_a_peer, "busy": count_for_ever,
 "gil": hold_the_lock_of_all_threads, "steps": first_place}[mode]()
"""


INNERMOST = {
    "wait": "Condition.wait",
    "deaf": "Condition.wait",
    "busy": "count_for_ever",
    "gil": "hold_the_lock_of_all_threads",
    "steps": "first_place",
}


@dataclass(frozen=True, slots=True)
class Child:
    process: subprocess.Popen[str]
    target: CaptureRank

    def say(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def state(self) -> str:
        return read_process(self.target.pid, self.target.start_time_ticks).state

    def until(self, *states: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while self.state() not in states:
            assert time.monotonic() < deadline_s, f"the child is {self.state()}, not {states}"

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.until("T")


class Children:
    """Starts children in ``directory``; the fixture ends them."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        self._directory = directory
        self._stack = stack

    def start(self, rank: int, mode: str = "wait") -> Child:
        log = self._directory / f"log{rank}.txt"
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self._directory), str(rank), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
        )
        self._stack.callback(_end, process)
        log.write_text(f"rank {rank} says hello\n")
        entry = read_process(process.pid, 0)
        child = Child(
            process,
            CaptureRank(
                rank=rank,
                pid=process.pid,
                start_time_ticks=entry.start_time_ticks,
                ledger_path=self._directory / f"rank{rank}.ledger",
                faulthandler_path=self._directory / f"fault{rank}.txt",
                log_path=log,
            ),
        )
        assert child.line() == "ready"
        _settle(process.pid, mode)
        return child


def _settle(pid: int, mode: str) -> None:
    """Returns when all threads of the child are where they stay."""
    py_spy = find_py_spy()
    assert py_spy is not None
    deadline_s = time.monotonic() + DEADLINE_S
    expected = {"host": INNERMOST[mode], "compute": "Condition.wait", "copy": "Condition.wait"}
    seen: dict[str, str] = {}
    while seen != expected:
        assert time.monotonic() < deadline_s, f"the child does not settle: {seen}"
        done = subprocess.run(
            [py_spy, "dump", "--pid", str(pid), "--json"],
            capture_output=True,
            text=True,
            check=True,
            timeout=DEADLINE_S,
        )
        stacks = parse_pyspy_json(done.stdout, pid=pid, rank=None, native=False)
        seen = {thread.role: thread.frames[0].name for thread in stacks.threads if thread.frames}


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(DEADLINE_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def children_in(directory: Path) -> Iterator[Children]:
    with contextlib.ExitStack() as stack:
        yield Children(directory, stack)


def stand_in(directory: Path, body: str) -> Path:
    """An executable in place of py-spy: a Python program; ``pid`` is the process that it shall dump."""
    path = directory / "py-spy"
    path.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        f"pid = int(sys.argv[sys.argv.index('--pid') + 1])\n{body}\n"
    )
    path.chmod(0o755)
    return path
