"""The observer's own clocks, and what the kernel says of a process that is looked at."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from harness.children import processor_times
from harness.pace import Clocks, Pace
from harness.process_control import identify, myself, read_thread
from harness.standing import Work
from harness.track import Labour, Quiet

PERIOD_S = 0.1


def paced(*readings: tuple[float, float, float]) -> Pace:
    """Readings of the monotonic clock, the clock of the boot, and the thread's processor time."""
    clocks: Iterator[Clocks] = (Clocks(*reading) for reading in readings)
    return Pace(PERIOD_S, lambda: next(clocks))


def test_a_sample_in_time_is_not_late_and_the_machine_was_awake() -> None:
    pace = paced((10.0, 500.0, 1.0), (10.1, 500.1, 1.01))
    assert pace.begin() is None
    assert pace.begin() == pytest.approx(0.0)
    assert pace.suspended_s == 0.0


def test_a_machine_that_slept_shows_in_the_clock_that_goes_on_and_makes_nothing_late() -> None:
    pace = paced((10.0, 500.0, 1.0), (10.1, 4100.1, 1.01), (10.2, 4100.2, 1.02))
    pace.begin()
    assert pace.begin() == pytest.approx(0.0)
    assert pace.suspended_s == pytest.approx(3600.0)
    pace.begin()
    assert pace.suspended_s == 0.0


def test_a_starved_observer_is_late_and_its_machine_did_not_sleep() -> None:
    pace = paced((10.0, 500.0, 1.0), (14.0, 504.001, 1.01))
    pace.begin()
    assert pace.begin() == pytest.approx(3.9)
    assert pace.suspended_s == 0.0


def test_work_that_the_observer_told_of_makes_no_sample_late() -> None:
    pace = paced((10.0, 500.0, 1.0), (12.0, 502.0, 1.0), (14.0, 504.0, 1.0))
    pace.begin()
    pace.worked(2.0)
    assert pace.begin() == pytest.approx(0.0)
    assert pace.begin() == pytest.approx(1.9)


def quiet(*looks: tuple[bool, float | None], unseen_s: float = 0.0) -> Quiet:
    found = Quiet(0.05)
    for sleeps, tree_cpu_s in looks:
        found.observe(Work(sleeps, 0.0, tree_cpu_s), PERIOD_S, unseen_s)
    return found


def test_a_tree_is_quiet_from_the_first_look_at_its_processor_times_to_the_last() -> None:
    assert quiet((True, 7.0), *[(True, None)] * 4, (True, 7.01), (True, None)).seconds == pytest.approx(0.5)
    assert quiet(*[(True, None)] * 9).seconds == 0.0


def test_a_tree_that_works_or_a_host_that_does_not_sleep_is_not_quiet() -> None:
    assert quiet((True, 7.0), *[(True, None)] * 9, (True, 7.4)).seconds == 0.0
    assert quiet((True, 7.0), *[(True, 7.0)] * 9, (False, None)).seconds == 0.0
    # A burst that came while nobody looked is held against all the time that passed.
    assert quiet((True, 7.0), (True, 7.25), unseen_s=4.0).seconds == pytest.approx(PERIOD_S)


def labour(*looks: tuple[float, bool]) -> Labour:
    found = Labour()
    for cpu_s, sleeps in looks:
        found.observe(Work(sleeps, cpu_s), PERIOD_S)
    return found


def test_a_host_is_at_work_when_it_gets_the_processor_or_wants_it() -> None:
    assert labour(*((1.0 + 0.05 * n, True) for n in range(8))).at_work
    assert labour(*((1.0, False) for _ in range(8))).at_work
    assert not labour(*((1.0 + 0.001 * n, n % 4 > 0) for n in range(8))).at_work
    assert not labour((1.0, False)).at_work


def test_only_the_last_second_counts() -> None:
    found = labour(*((1.0 + 0.1 * n, False) for n in range(20)), *((3.0, True) for _ in range(30)))
    assert not found.at_work and found.seconds <= 1.0 + PERIOD_S


SPIN = "import time\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


def test_the_processor_time_of_a_tree_holds_that_of_its_children() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", SPIN], stdin=subprocess.DEVNULL)
    try:
        own = myself()
        before = processor_times({0: own})[0]
        deadline_s = time.monotonic() + 25.0
        while processor_times({0: own})[0] < before + 0.2:
            assert time.monotonic() < deadline_s, "the child got no processor time"
            threading.Event().wait(0.05)
        seat = identify(child.pid)
        assert seat is not None
        # A child that is a seat of its own is no part of another's tree.
        both = processor_times({0: own, 1: seat})
        assert both[1] >= 0.1 and both[0] + both[1] >= before + 0.2
    finally:
        child.kill()
        child.wait(10)


def test_a_thread_has_a_state_and_a_processor_time_of_its_own() -> None:
    numbers: list[int] = []
    go, told = threading.Event(), threading.Event()

    def wait() -> None:
        numbers.append(threading.get_native_id())
        told.set()
        go.wait(20)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        assert told.wait(20)
        deadline_s = time.monotonic() + 20
        while (stat := read_thread(os.getpid(), numbers[0])) is not None and stat.state != "S":
            assert time.monotonic() < deadline_s, "it never sleeps"
        assert stat is not None and stat.cpu_ticks <= 100
    finally:
        go.set()
        thread.join(20)
    assert read_thread(os.getpid(), 1) is None or os.getpid() == 1
