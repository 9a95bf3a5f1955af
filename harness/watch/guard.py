"""The process beside a pytest process that looks into it when a test stalls: ``python -m harness.watch.guard PID``.

It is told on its standard input, a JSON object a line, when a watched test begins, when its set-up is done and when
it is over. A test that is not over in time is captured with its whole process tree, diagnosed, and stored in the
test's folder; then the guard sends ``SIGNAL``, on which the plugin raises in the test. What the test itself started
(not its set-up: that may serve others) is ended when it is over, or sooner where it does not end on the signal,
because it waits in native code: then what waits for those processes fails. The guard lives in a session of its own
and needs nothing of pytest's process, so what it found is stored also when pytest is ended meanwhile; it ends when
its input does.

Not here: what pytest is told (``harness.pytest_hang_watch``), what a look means (``run.py`` beside this).
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.process_control import ProcessId, children_of, end, identify, send

SIGNAL = signal.SIGURG
"""Ignored where no handler is set, so one that comes too late hurts nobody."""
REPORT = "report.txt"
GRACE_S = 5.0
"""From the signal to the end of the test's processes, and from there until it is said that nothing helps."""
_END_S = 5.0
_READ_BYTES = 1 << 16


@dataclass(slots=True)
class Watched:
    """One test. ``began_ticks``: when it, or its body, began, as the kernel counts the start of processes; those of
    pytest's that started later are its own."""

    test: str
    timeout_s: float
    folder: Path
    began_ticks: int


class Input:
    """Lines of the standard input, with a deadline. None at a deadline; EOFError when pytest is gone."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def line(self, timeout_s: float | None) -> dict[str, Any] | None:
        ends_s = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left_s = None if ends_s is None else max(0.0, ends_s - time.monotonic())
            ready, _, _ = select.select([self._descriptor], [], [], left_s)
            if not ready:
                return None
            read = os.read(self._descriptor, _READ_BYTES)
            if not read:
                raise EOFError
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


class Guard:
    def __init__(self, pytest: ProcessId, told: Input) -> None:
        self._pytest = pytest
        self._told = told

    def run(self) -> None:
        """Until pytest is gone."""
        with suppress(EOFError):
            while True:
                line = self._told.line(None)
                if line is not None and "test" in line:
                    began_ticks = _ticks(line["began_s"])
                    self._watch(Watched(line["test"], line["timeout_s"], Path(line["folder"]), began_ticks))

    def _watch(self, watched: Watched) -> None:
        ends_s = time.monotonic() + watched.timeout_s
        while (line := self._told.line(max(0.0, ends_s - time.monotonic()))) is not None:
            if "done" in line:
                return
            watched.began_ticks = _ticks(line["began_s"])
        own = self._own(watched)
        text = self._capture(watched)
        try:
            send(self._pytest, SIGNAL)
            over = self._over(GRACE_S)
            self._end_processes(watched, own | self._own(watched))
            if not over and not self._over(GRACE_S):
                _say(f"{text}\n{watched.test} waits in native code and cannot be ended from outside; ")
                _say("pytest-timeout or Ctrl-C ends it with its pytest process\n")
                self._over(None)
        except EOFError:  # pytest was ended: nobody else shows what was found, or ends what the test started
            _say(f"{text}\n")
            self._end_processes(watched, own)
            raise

    def _over(self, timeout_s: float | None) -> bool:
        """Waits for the test's end. A test whose set-up stalled is not over when its body begins."""
        while (line := self._told.line(timeout_s)) is not None:
            if "done" in line:
                return True
        return False

    def _capture(self, watched: Watched) -> str:
        """The report's text, stored; never raises."""
        try:
            # Heavy, and most tests end in time.
            from harness.store import write_json
            from harness.watch.run import capture_stall
            from harness.watch.text import document, text

            fact = f"{watched.test} was not over {watched.timeout_s:g} s after it began"
            result = capture_stall(self._pytest.pid, watched.folder, fact, without=(os.getpid(),))
            write_json(watched.folder / "watch.json", document(result))
            found = text(result)
        except Exception:
            found = f"{watched.test}: nothing could be captured\n{traceback.format_exc()}"
        try:
            watched.folder.mkdir(parents=True, exist_ok=True)
            (watched.folder / REPORT).write_text(found + "\n", encoding="utf-8")
        except OSError as error:
            found += f"\nnot stored: {error}"
        return found

    def _own(self, watched: Watched) -> frozenset[ProcessId]:
        """What the test has started so far; never this process or one that it starts itself."""
        mine = {os.getpid(), *(process.pid for process in children_of(os.getpid()))}
        below = children_of(self._pytest.pid)
        return frozenset(p for p in below if p.start_time_ticks >= watched.began_ticks and p.pid not in mine)

    def _end_processes(self, watched: Watched, own: frozenset[ProcessId]) -> None:
        left = end(own.union(children_of(*(process.pid for process in own))), _END_S, grace_s=0.0)
        if left:
            _say(f"{watched.test}: still alive: {', '.join(str(process.pid) for process in left)}\n")


def _ticks(boottime_s: float) -> int:
    """In proc(5)'s clock ticks since boot (field starttime)."""
    return int(boottime_s * os.sysconf("SC_CLK_TCK"))


def _say(text: str) -> None:
    """On pytest's own standard error, which no capture of a test swallows."""
    with suppress(OSError):
        os.write(2, text.encode())


def main() -> None:
    pytest = identify(int(sys.argv[1]))
    if pytest is not None:
        Guard(pytest, Input(0)).run()


if __name__ == "__main__":
    main()
