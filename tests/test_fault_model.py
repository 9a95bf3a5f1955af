"""Registered faults: which pass they act at, what they tell, and how wrong ones are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from harness import fault_model, faults
from harness.fault_model import Armed, Fault, arm, load_file, parse, register, registered
from harness.faults import SITES, FaultError, Passing


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    registered()
    before = dict(fault_model._REGISTERED)
    yield
    fault_model._REGISTERED.clear()
    fault_model._REGISTERED.update(before)
    faults.activate()


def skip(**fields: Any) -> Fault:
    return parse({"name": "skip", "site": "comm.enqueue", **fields})


def passes(fault: Fault, count: int, rank: int = 0, **values: Any) -> list[int]:
    """Numbers, from 0, of the passes at which it acted."""
    armed = Armed(fault, 0, rank, seed=7)
    acted = []
    for number in range(count):
        one = Passing(fault.place, rank, number, {"group": "experts", "operation": "all_reduce", **values})
        armed.visit(one)
        acted += [number] if one.skipped else []
    return acted


def test_it_acts_once_unless_told_otherwise() -> None:
    assert passes(skip(), 5) == [0]
    assert passes(skip(times=3), 5) == [0, 1, 2]
    assert passes(skip(times=0), 5) == [0, 1, 2, 3, 4]
    assert passes(skip(after=2), 5) == [2]


def test_steps_and_values_choose_the_pass() -> None:
    assert passes(skip(steps=[2, 3], times=0), 5) == [2, 3]
    assert passes(skip(where={"group": "experts"}, times=0), 2) == [0, 1]
    assert passes(skip(where={"group": "agree"}), 2) == []
    assert passes(skip(where={"group": ["agree", "experts"]}), 2) == [0]


def test_a_seed_fixes_the_draw() -> None:
    drawn = passes(skip(probability=0.3, times=0), 200)
    assert drawn == passes(skip(probability=0.3, times=0), 200)
    assert 30 < len(drawn) < 90
    assert drawn != passes(skip(probability=0.3, times=0, seed=8), 200)
    assert drawn != passes(skip(probability=0.3, times=0), 200, rank=1)


def test_only_its_ranks_are_armed() -> None:
    chosen = [skip(ranks=[1]), skip()]
    assert [len(arm(chosen, rank, seed=0)) for rank in (0, 1)] == [1, 2]


def test_the_twin_watches_or_has_other_values() -> None:
    assert skip().repaired().probability == 0.0
    delay = parse({"name": "delay", "site": "rank.step", "seconds": 5.0, "twin": {"seconds": 0.1}})
    assert delay.repaired().model_dump()["seconds"] == 0.1
    assert delay.repaired().twin == {}


def test_what_it_did_is_told_before_it_is_done(tmp_path: Path) -> None:
    fault = parse({"name": "raise", "site": "rank.step", "error": "ValueError", "message": "no"})
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    faults.activate(*arm([fault], 3, seed=0, log=log), rank=3)
    assert faults.ACTIVE is not None
    with pytest.raises(ValueError, match=r"^no$"):
        faults.ACTIVE.visit("rank.step", step=4, engine=object())
    os.close(log)
    (line,) = (tmp_path / "log").read_text().splitlines()
    told = json.loads(line)
    assert told.pop("at_s") >= 0
    assert told == {
        "fault": "raise", "index": 0, "rank": 3, "step": 4, "site": "rank.step", "values": {"step": 4},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"name": "skpi"}, "there is no fault 'skpi'; known: .*skip"),
        ({"name": "skip", "site": "rank.step"}, "cannot act at 'rank.step'; allowed: .*comm.enqueue"),
        (
            {"name": "skip", "site": "comm.enqueue", "where": {"grp": 1}},
            "where.grp: comm.enqueue offers group",
        ),
        ({"name": "skip", "steps": [5, 2]}, r"\[5, 2\] ends before it begins"),
        ({"name": "raise", "error": "Opps"}, "'Opps' is no built-in exception"),
        ({"name": "delay"}, "Field required"),
        ({"name": "delay", "seconds": 1, "sekunden": 1}, "Extra inputs"),
    ],
)
def test_a_wrong_table_is_refused(table: dict[str, Any], told: str) -> None:
    with pytest.raises(FaultError, match=told):
        parse(table)


def test_a_pass_lets_only_be_changed_what_its_site_offers() -> None:
    one = Passing("rank.plan", 0, 1, {"plan": 1, "tokens": 2})
    one.change("plan", 5)
    assert one["plan"] == 5
    with pytest.raises(FaultError, match="does not let 'tokens' be changed, only plan"):
        one.change("tokens", 3)
    with pytest.raises(FaultError, match=r"rank\.plan cannot be left out"):
        one.skip()
    with pytest.raises(FaultError, match=r"has no value 'bucket'; it offers step"):
        one["bucket"]


def test_a_class_that_cannot_be_used_is_refused() -> None:
    class NoAct(Fault):
        name: Literal["no_act"]
        sites: ClassVar[tuple[str, ...]] = ("rank.step",)

    class NoSite(Fault):
        name: Literal["no_site"]
        sites: ClassVar[tuple[str, ...]] = ("rank.stp",)

    class Taken(Fault):
        name: Literal["skip"]
        sites: ClassVar[tuple[str, ...]] = ("rank.step",)

        def act(self, passing: Passing, memory: dict[str, Any]) -> None: ...

    for fault, told in ((NoAct, "say what it does"), (NoSite, "no site 'rank.stp'"), (Taken, "is taken by")):
        with pytest.raises(FaultError, match=told):
            register(fault)


def test_a_file_of_faults(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    with pytest.raises(FaultError, match="is no Python file"):
        load_file(path)
    path.write_text("x = 1\n")
    with pytest.raises(FaultError, match="registers no fault"):
        load_file(path)
    path.write_text("raise SystemExit(3)\n")
    with pytest.raises(FaultError, match=r"mine\.py: SystemExit: 3"):
        load_file(path)
    path.write_text("x = = 1\n")
    with pytest.raises(FaultError, match=r"SyntaxError: .*line 1"):
        load_file(path)


def test_a_file_may_have_its_annotations_as_texts(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(
        "from __future__ import annotations\n"
        "from typing import ClassVar, Literal\n"
        "from harness.fault_model import Fault, register\n"
        "class Mine: pass\n"
        "@register\n"
        "class Late(Fault):\n"
        "    name: Literal['late']\n"
        "    sites: ClassVar[tuple[str, ...]] = ('rank.step',)\n"
        "    nth: int = 3\n"
        "    def act(self, passing, memory): memory['mine'] = Mine()\n"
    )
    load_file(path)
    memory: dict[str, Any] = {}
    parse({"name": "late", "nth": 4}).act(Passing("rank.step", 0, 0, {}), memory)
    assert type(memory["mine"]).__name__ == "Mine"
    load_file(path)  # again in another trial of a warm rank


def test_every_standard_fault_and_site_is_documented() -> None:
    for name, fault in registered().items():
        assert fault.__doc__ and fault.__doc__ != Fault.__doc__, name
        assert set(fault.sites) <= set(SITES), name
    for name, site in SITES.items():
        assert site.what and set(site.changes) <= set(site.keys), name


def test_a_collective_is_held_back_until_the_next_of_another_group_and_then_no_more() -> None:
    table = {"name": "reorder", "held_group": "stats", "after_group": "experts", "times": 2}
    (armed,) = arm([parse(table)], 0, seed=1)
    made: list[str] = []

    def enqueue(group: str) -> None:
        values = {"group": group, "capturing": False, "enqueue": lambda: made.append(group)}
        one = Passing("comm.enqueue", 0, 5, values)
        armed.visit(one)
        if not one.skipped:
            made.append(group)

    for group in ("experts", "stats", "experts", "experts", "stats"):
        enqueue(group)
    assert made == ["experts", "experts", "stats", "experts", "stats"]


def test_a_rank_allocates_early_only_what_it_has_no_room_for() -> None:
    class Room:
        grown: tuple[int, str] | None = None

        def has_room(self, rows: int) -> bool:
            return rows <= 8

        def make_room(self, rows: int, phase: str) -> None:
            self.grown = (rows, phase)

    (armed,) = arm([parse({"name": "register_early"})], 0, seed=1)
    engine = Room()
    armed.visit(Passing("rank.batch", 0, 5, {"tokens": 8, "engine": engine}))
    assert engine.grown is None
    armed.visit(Passing("rank.batch", 0, 6, {"tokens": 9, "engine": engine}))
    assert engine.grown == (9, "agree")


def test_a_native_call_keeps_every_other_thread_from_running() -> None:
    """In a process of its own: a thread that counts stands as long as the call lasts, and no longer."""
    program = """
import itertools, threading, time
from harness.fault_model import arm, parse, registered
from harness.faults import Passing
registered()
(armed,) = arm([parse({"name": "hold_gil", "site": "rank.step", "seconds": 1.0})], 0, seed=1)
stop, counted = threading.Event(), itertools.count()
def count():
    while not stop.wait(0.001):
        next(counted)
threading.Thread(target=count, daemon=True).start()
before = next(counted)
armed.visit(Passing("rank.step", 0, 1, {"step": 1, "engine": None}))
held = next(counted) - before
while next(counted) < before + held + 10:
    time.sleep(0.01)
stop.set()
print(held)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0 and int(done.stdout) < 10, (done.stdout, done.stderr)


def test_a_disk_is_full_and_a_pipe_is_never_read() -> None:
    (full,) = arm([parse({"name": "fill_disk", "site": "rank.log"})], 0, seed=1)
    with pytest.raises(OSError, match="No space left"):
        full.visit(Passing("rank.log", 0, 1, {"step": 1, "descriptor": 0}))
    (pipe,) = arm([parse({"name": "block_pipe", "site": "rank.log"})], 0, seed=1)
    one = Passing("rank.log", 0, 1, {"step": 1, "descriptor": 0})
    writer = threading.Thread(target=pipe.visit, args=(one,), daemon=True)
    writer.start()
    writer.join(0.5)
    assert writer.is_alive(), "the write came back although nobody reads"
    os.read(pipe._memory["reader"], 1 << 16)
    while writer.is_alive() and os.read(pipe._memory["reader"], 1 << 16):
        writer.join(0.01)
    writer.join(10.0)
    assert not writer.is_alive()
