"""Watched tests of a strange repository: a pytest of its own, whose tests stall, and what is left of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.process_control import marked_with
from harness.pytest_hang_watch import REPORT, SIGNAL, timeout_of
from harness.watch import guard

LIMIT_S = 120.0
GONE_S = 20.0
WATCHED = "import os, subprocess, sys, time, multiprocessing, threading\nimport pytest\n"
RANKS = """
def rank(number, path):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=number, world_size=2)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    if number == 1:
        lost_in_thought()
    dist.all_reduce(tensor)

def lost_in_thought():
    time.sleep(1000)

@pytest.mark.hang_watch(timeout=15)
def test_ranks(tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank, args=(n, tmp_path / "meet")) for n in range(2)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()
"""


@dataclass(frozen=True)
class Repository:
    """A folder with one test module, and a mark by which whatever it left behind is found."""

    folder: Path
    mark: str

    def pytest(self, source: str, *options: str) -> tuple[int, str]:
        (self.folder / "test_it.py").write_text(WATCHED + source)
        (self.folder / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
        environment = {**os.environ, "HANGRIG_TEST_MARK": self.mark}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def kept(self) -> list[Path]:
        return sorted((self.folder / ".hangrig").glob("*"))


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    made = Repository(tmp_path, f"{os.getpid()}-{tmp_path.name}")
    yield made
    deadline_s = time.monotonic() + GONE_S
    while (left := marked_with("HANGRIG_TEST_MARK", made.mark)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == [], "processes outlive the pytest that started them"


def test_the_signal_is_the_guards() -> None:
    assert (SIGNAL, REPORT) == (guard.SIGNAL, guard.REPORT)


def test_the_rank_that_the_others_wait_for_is_named_and_the_rest_goes_on(repository: Repository) -> None:
    status, said = repository.pytest(RANKS + "\ndef test_after():\n    pass\n")
    assert status == 1 and "1 failed, 1 passed" in said
    assert "host-blocked" in said and "lost_in_thought" in said
    assert "test_it.py::test_ranks was not over 15 s after it began" in said
    (folder,) = repository.kept()
    assert f"hangrig: test_it.py::test_ranks stalled, evidence: {folder}" in said
    document = json.loads(next(folder.glob("**/watch.json")).read_text())
    diagnosis = document["diagnosis"]
    assert (diagnosis["kind"], diagnosis["mechanism"]) == ("hang", "host-blocked")
    (culprit,) = diagnosis["culprits"]
    blamed = next(one for one in document["processes"] if one["pid"] == culprit["pid"])
    assert "lost_in_thought" in blamed["doing"]["words"]
    assert any("all_reduce" in one["doing"]["words"] for one in document["processes"] if one["doing"])
    assert list(folder.glob("**/sample-1/stacks/*.json"))


def test_a_test_that_is_quick_enough_leaves_nothing(repository: Repository) -> None:
    status, said = repository.pytest("@pytest.mark.hang_watch(timeout=30)\ndef test_quick():\n    pass\n")
    assert status == 0 and "1 passed" in said
    assert repository.kept() == []


@pytest.mark.parametrize("phase", ["set-up", "teardown"])
def test_a_fixture_that_stalls_fails_in_its_phase(repository: Repository, phase: str) -> None:
    stalls = ("threading.Event().wait()", "") if phase == "set-up" else ("", "threading.Event().wait()")
    status, said = repository.pytest(
        f"""
@pytest.fixture
def resource():
    {stalls[0] or "pass"}
    yield
    {stalls[1] or "pass"}

@pytest.mark.hang_watch(timeout=1)
def test_it(resource):
    pass
"""
    )
    assert status == 1 and "was not over 1 s after it began" in said
    assert f"ERROR at {'setup' if phase == 'set-up' else 'teardown'} of test_it" in said


def test_a_wait_in_native_code_ends_with_the_process_that_it_waits_for(repository: Repository) -> None:
    """``system`` goes on waiting after a signal, and no handler of Python's can run meanwhile."""
    status, said = repository.pytest(
        """
@pytest.mark.hang_watch(timeout=2)
def test_it():
    import ctypes
    ctypes.CDLL(None).system(b"sleep 1000")
"""
    )
    assert status == 1 and "1 failed" in said
    assert "test_it.py::test_it was not over 2 s after it began" in said


def test_the_report_survives_pytest_timeout_ending_the_process(repository: Repository) -> None:
    status, said = repository.pytest(
        """
@pytest.mark.timeout(6, method="thread")
@pytest.mark.hang_watch(timeout=1)
def test_it():
    import ctypes
    subprocess.Popen(["sleep", "1000"])
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""
    )
    assert status != 0 and "Timeout" in said
    (folder,) = repository.kept()
    assert "test_it.py::test_it was not over 1 s after it began" in (folder / REPORT).read_text()
    assert "was not over 1 s after it began" in said


def test_under_xdist_each_worker_is_watched_and_a_lost_one_has_its_report(repository: Repository) -> None:
    status, said = repository.pytest(
        """
@pytest.mark.hang_watch(timeout=1)
def test_python():
    threading.Event().wait()

@pytest.mark.timeout(6, method="thread")
@pytest.mark.hang_watch(timeout=1)
def test_native():
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def test_well():
    pass
""",
        "-n",
        "2",
    )
    assert status == 1 and "2 failed, 1 passed" in said
    assert "test_it.py::test_python was not over 1 s after it began" in said
    assert "test_it.py::test_native was not over 1 s after it began" in said
    assert len(repository.kept()) == 2


@pytest.mark.parametrize(
    "marker",
    [
        pytest.mark.hang_watch,
        pytest.mark.hang_watch(timeout=0),
        pytest.mark.hang_watch(timeout="soon"),
        pytest.mark.hang_watch(timeout=True),
        pytest.mark.hang_watch(5, patience=3),
        pytest.mark.hang_watch(5, 6),
    ],
)
def test_a_marker_without_a_sensible_time_is_refused(marker: pytest.MarkDecorator) -> None:
    with pytest.raises(pytest.UsageError, match="hang_watch"):
        timeout_of("test_it.py::test_it", marker.mark)


def test_a_refused_marker_ends_pytest_before_the_test_runs(repository: Repository) -> None:
    status, said = repository.pytest("@pytest.mark.hang_watch\ndef test_it():\n    pass\n")
    assert status == pytest.ExitCode.USAGE_ERROR
    assert "test_it.py::test_it: hang_watch(timeout=None): give the seconds" in said and "passed" not in said


def test_a_guard_that_is_killed_is_not_missed(repository: Repository) -> None:
    status, said = repository.pytest(
        """
@pytest.mark.hang_watch(timeout=30)
def test_it():
    subprocess.run(["pkill", "-KILL", "-f", f"harness.watch.guard {os.getpid()}"], check=True)

@pytest.mark.hang_watch(timeout=30)
def test_next():
    pass
"""
    )
    assert status == 0 and "2 passed" in said
