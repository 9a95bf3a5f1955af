"""No rule sees the fault: stacks, tracebacks and enqueue sites name the engine's line instead."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import fault_model, faults
from harness.diagnosis_places import host_place, raising_place
from harness.fault_model import arm, load_file, parse, registered
from harness.nemesis_frames import engine_stacks, without_machinery
from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.stillness import left_place

LIBRARY = "/site/harness/fault_library.py"
MODEL = "/site/harness/fault_model.py"
SITES = "/site/harness/faults.py"
ENGINE = "/site/serving/engine.py"

MINE = """
from typing import Any, ClassVar, Literal
from harness.devices.call_sites import call_site
from harness.fault_model import Fault, register
from harness.faults import Passing

@register
class Mine(Fault):
    name: Literal["mine"]
    sites: ClassVar[tuple[str, ...]] = ("rank.step",)
    def act(self, passing: Passing, memory: dict[str, Any]) -> None:
        passing["engine"].append(call_site())
        helper()

def helper() -> None:
    raise KeyError("mine")
"""


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    registered()
    before = dict(fault_model._REGISTERED)
    yield
    fault_model._REGISTERED.clear()
    fault_model._REGISTERED.update(before)
    faults.activate()


def stacks(*frames: tuple[str, str]) -> ProcessStacks:
    thread = ThreadStack(1, "MainThread", False, False, tuple(Frame(name, file, 7) for name, file in frames))
    return ProcessStacks(1, 0, "py-spy", False, (thread,))


def through(*inner: tuple[str, str]) -> ProcessStacks:
    """A host thread inside a fault that the engine's step passed."""
    return stacks(
        *inner,
        ("act", LIBRARY),
        ("visit", MODEL),
        ("visit", SITES),
        ("_begin_step", ENGINE),
        ("step", ENGINE),
    )


def test_what_a_fault_calls_is_called_by_the_engines_line() -> None:
    waiting = through(("wait", "/usr/lib/python3.11/threading.py"))
    seen = engine_stacks(waiting)
    assert seen is not None
    assert [frame.name for frame in seen.threads[0].frames] == ["wait", "_begin_step", "step"]
    place = host_place(seen)
    assert place == "_begin_step (serving/engine.py:7), waiting in wait (threading.py:7)"


def test_a_fault_in_a_file_of_its_own_is_left_out_with_its_helpers() -> None:
    mine = "/home/me/my_faults.py"
    frames = stacks(
        ("helper", mine), ("act", mine), ("visit", MODEL), ("visit", SITES), ("step", ENGINE)
    ).threads[0]
    assert [frame.name for frame in without_machinery(frames.frames)] == ["step"]


def test_a_callers_file_is_no_fault_only_because_it_called_one() -> None:
    frames = stacks(("visit", MODEL), ("visit", SITES), ("step", ENGINE)).threads[0].frames
    assert [frame.name for frame in without_machinery(frames)] == ["step"]


def test_a_host_that_goes_on_only_inside_the_machinery_stays_where_it_is() -> None:
    assert not left_place(through(("_spin", LIBRARY)), through(("_turn", LIBRARY), ("_spin", LIBRARY)))
    compiler = "/usr/lib/python3.11/ast.py"
    assert left_place(through(("visit_List", compiler)), through(("visit_Name", compiler)))


def test_a_traceback_names_the_engines_line() -> None:
    fault = parse({"name": "raise", "error": "IndexError", "message": "no request", "site": "rank.step"})
    faults.activate(*arm([fault], 0, seed=1))
    try:
        assert faults.ACTIVE is not None
        faults.ACTIVE.visit("rank.step", step=1, engine=None)
    except IndexError:
        said = traceback.format_exc()
    assert "fault_library" in said
    place = raising_place(said)
    assert place.startswith("test_a_traceback_names_the_engines_line (") and "test_nemesis_frames" in place


def test_a_file_of_faults_is_left_out_of_tracebacks_and_sites(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    load_file(file)
    sites: list[str] = []
    faults.activate(*arm([parse({"name": "mine"})], 0, seed=1))
    assert faults.ACTIVE is not None
    with pytest.raises(KeyError) as caught:
        faults.ACTIVE.visit("rank.step", step=1, engine=sites)
    said = "".join(traceback.format_exception(caught.value))
    assert "mine.py" in said and "mine.py" not in raising_place(said)
    assert [site.rpartition(":")[0] for site in sites] == ["tests/test_nemesis_frames.py"]


def test_a_compilation_leaves_its_place() -> None:
    """The host thread as py-spy would see it, over and over: a compiler's frames under the engine's line."""
    fault = parse({"name": "delay", "site": "rank.step", "seconds": 0.4, "how": "compute"})
    faults.activate(*arm([fault], 0, seed=1))
    places: set[tuple[Any, ...]] = set()
    done = threading.Event()

    def work() -> None:
        assert faults.ACTIVE is not None
        faults.ACTIVE.visit("rank.step", step=1, engine=None)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    deadline_s = time.monotonic() + 10.0
    while not done.wait(0.002) and time.monotonic() < deadline_s:
        frame = sys._current_frames().get(thread.ident or 0)
        frames = []
        while frame is not None:
            frames.append(Frame(frame.f_code.co_name, frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        left = without_machinery(frames)
        assert not any("fault_" in one.filename for one in left)
        places.add(tuple(one.place for one in left))
    thread.join()
    assert len(places) > 3
