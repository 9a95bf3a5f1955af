"""``@pytest.mark.hang_watch(timeout=60)``: a test of any repository that stalls fails with a diagnosis.

    @pytest.mark.hang_watch(timeout=60)
    def test_all_reduce(tmp_path):
        ...

A process beside pytest (``harness.watch.guard``, started with the first such test) is told when the test begins
and ends. When the time is up, set-up and teardown included, it takes stacks of pytest's whole process tree, names
the process that the others wait for, stores all of it and signals; the handler here raises in the test. The folder
(``--hangrig-out``, else ``.hangrig`` below pytest's root) is kept, and stays whole when pytest-timeout or a crash
ends the process: give that a longer time. Under pytest-xdist each worker has its guard, and the controller shows
the report of a worker that was lost.

Loaded with every pytest of the environment: at import it needs pytest and the standard library only.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

MARKER = "hang_watch"
SIGNAL = signal.SIGURG
"""The guard's: see there."""
REPORT = "report.txt"
_END_S = 10.0
_NAME_CHARACTERS = 80
_SECTION = "hangrig"


class HangWatch:
    """The hooks of one pytest process."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._guard: subprocess.Popen[bytes] | None = None
        self._watched: _Watched | None = None
        self._stalled: list[tuple[str, Path]] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        marker = item.get_closest_marker(MARKER)
        if marker is None:
            return (yield)
        timeout_s = timeout_of(item.nodeid, marker)
        watched = self._watched = _Watched(item.nodeid, self._folder(item.nodeid))
        before = signal.signal(SIGNAL, watched.interrupt)
        self._tell(test=item.nodeid, timeout_s=timeout_s, folder=str(watched.folder), began_s=_boottime_s())
        try:
            return (yield)
        finally:
            self._tell(done=True)
            signal.signal(SIGNAL, before)
            self._watched = None
            if watched.report is not None:
                self._stalled.append((item.nodeid, watched.folder))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        with self._interruptible():
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        if self._watched is not None:
            self._tell(body=True, began_s=_boottime_s())
        with self._interruptible():
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        with self._interruptible():
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """A phase in which the time was up fails, also when the test ended by other means."""
        report = yield
        text = None if self._watched is None else self._watched.take()
        if text is not None:
            if not report.failed:
                report.outcome, report.longrepr = "failed", text
            elif text not in str(report.longrepr):
                report.sections.append((_SECTION, text))
        return report

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        """Of pytest-xdist, in the controller: a worker was lost in this test; its guard may have been quicker."""
        folders = sorted(self._out().glob(f"*-{_safe(crashitem)}"))
        for folder in folders[-1:]:
            with suppress(OSError):
                report.sections.append((_SECTION, (folder / REPORT).read_text(encoding="utf-8")))
                self._stalled.append((crashitem, folder))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, folder in self._stalled:
            terminalreporter.write_line(f"hangrig: {test} stalled, evidence: {folder}")

    def pytest_unconfigure(self) -> None:
        guard = self._guard
        if guard is None or guard.stdin is None:
            return
        with suppress(BrokenPipeError):
            guard.stdin.close()
        try:
            guard.wait(_END_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Between the phases pytest's own code runs, in which nothing may be raised."""
        if self._watched is None:
            yield
            return
        with self._watched.interruptible():
            yield

    def _tell(self, **line: Any) -> None:
        """A guard that is gone (killed) is not missed: the test runs as if it were not watched."""
        guard = self._guard = self._guard or self._start()
        assert guard.stdin is not None
        with suppress(BrokenPipeError):
            guard.stdin.write(json.dumps(line).encode() + b"\n")
            guard.stdin.flush()

    def _start(self) -> subprocess.Popen[bytes]:
        capture = self._config.pluginmanager.getplugin("capturemanager")
        command = [sys.executable, "-m", "harness.watch.guard", str(os.getpid())]
        if capture is None:
            return _guard(command)
        with capture.global_and_fixture_disabled():  # its standard error is the terminal's
            return _guard(command)

    def _folder(self, test: str) -> Path:
        return self._out() / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{_safe(test)}"

    def _out(self) -> Path:
        chosen: Path | None = self._config.getoption("--hangrig-out")
        return (self._config.rootpath / ".hangrig") if chosen is None else chosen.absolute()


class _Watched:
    """The test that runs."""

    def __init__(self, test: str, folder: Path) -> None:
        self.test = test
        self.folder = folder
        self.report: str | None = None
        self._armed = False
        self._pending = False
        self._taken = False

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """The handler: raises in the test, or as soon as the test goes on."""
        try:
            self.report = (self.folder / REPORT).read_text(encoding="utf-8").rstrip()
        except OSError:
            return  # not our guard's signal
        if self._armed:
            pytest.fail(self.report, pytrace=False)
        self._pending = True

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        if self._pending:
            self._pending = False
            pytest.fail(self.report or "", pytrace=False)
        self._armed = True
        try:
            yield
        finally:
            self._armed = False

    def take(self) -> str | None:
        """The report, for the first phase that ends after it came."""
        if self._taken or self.report is None:
            return None
        self._taken = True
        return self.report


def _guard(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def timeout_of(test: str, marker: pytest.Mark) -> float:
    """The marker's seconds. Raises UsageError where they make no sense."""
    found = marker.kwargs.get("timeout", marker.args[0] if marker.args else None)
    strange = sorted(set(marker.kwargs) - {"timeout"})
    if strange or len(marker.args) > 1:
        raise pytest.UsageError(f"{test}: hang_watch takes timeout=SECONDS and nothing else")
    if isinstance(found, bool) or not isinstance(found, int | float) or not found > 0:
        raise pytest.UsageError(
            f"{test}: hang_watch(timeout={found!r}): give the seconds after which the test has stalled"
        )
    return float(found)


def _safe(test: str) -> str:
    """A test's name as part of a file's: the end of it, where parameters are."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", test)[-_NAME_CHARACTERS:].strip("-")
