"""The probe's parts without an engine: what they record, and that nothing of theirs reaches the engine."""

from __future__ import annotations

import importlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from probe_rig import ledger, modules, probe, seated, status, torch_as_it_was

from serving.probe.hangrig_probe.config import ConfigError, load
from serving.probe.hangrig_probe.faults import InjectedError
from serving.probe.hangrig_probe.patching import Patches
from serving.probe.hangrig_probe.status import Status

WAIT_S = 20.0


@pytest.fixture(autouse=True)
def torch_restored() -> Iterator[None]:
    with torch_as_it_was():
        yield


# Configuration -------------------------------------------------------------------------------------------------


GOOD: dict[str, Any] = {
    "schema": 1,
    "folder": "/run/probe",
    "node": "n0",
    "device": "npu",
    "world": 2,
    "pinned": "pageable",
    "tracer_pid": 17,
    "faults": [{"name": "block", "role": "rank"}],
}


def test_the_probe_is_off_unless_the_variable_names_a_file(tmp_path: Path) -> None:
    assert load({}) is None
    assert load({"HANGRIG_PROBE": ""}) is None
    file = tmp_path / "probe.json"
    file.write_text(json.dumps(GOOD))
    found = load({"HANGRIG_PROBE": str(file)})
    assert found is not None
    assert (found.folder, found.device, found.pinned, found.tracer_pid) == (
        Path("/run/probe"),
        "npu",
        "pageable",
        17,
    )
    assert found.faults[0]["name"] == "block"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read"),
        ("{", "not JSON"),
        ("[]", "expected an object"),
        (json.dumps({**GOOD, "schema": 2}), "schema: expected 1, found 2"),
        (json.dumps({**GOOD, "device": "tpu"}), "device: expected cpu or cuda or npu, found 'tpu'"),
        (json.dumps({**GOOD, "world": True}), "world: expected a number of ranks, found True"),
        (json.dumps({**GOOD, "folder": None}), "folder: expected a path"),
        (json.dumps({**GOOD, "pinned": "maybe"}), "pinned: expected null or pageable"),
        (json.dumps({**GOOD, "tracer_pid": "x"}), "tracer_pid: expected null or a number"),
        (json.dumps({**GOOD, "faults": [{}]}), "faults: expected a list of tables with a name"),
    ],
)
def test_a_damaged_configuration_names_the_file_and_what_is_wrong(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "probe.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load({"HANGRIG_PROBE": str(file)})
    assert str(file) in str(caught.value)


# Status --------------------------------------------------------------------------------------------------------


def test_the_status_has_every_field_and_is_replaced_whole(tmp_path: Path) -> None:
    made = seated(tmp_path, 1)
    made.status.error("one thing failed")
    document = status(tmp_path, "rank1")
    assert set(document) == {
        *("schema", "seat", "role", "pid", "start_time_ticks", "device", "engine", "hooks", "errors"),
        *("copies", "pinned", "bypass", "faults", "exception", "dp_rank", "tp_rank"),
    }
    assert (document["seat"], document["role"], document["engine"]) == (1, "rank", "fake 1")
    assert document["errors"] == ["one thing failed"]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


def test_the_first_exception_of_the_engine_is_kept(tmp_path: Path) -> None:
    made = seated(tmp_path)
    for text in ("cause", "echo"):
        try:
            raise ValueError(text)
        except ValueError as error:
            made.status.exception(error)
    assert "ValueError: cause" in status(tmp_path)["exception"]
    assert __file__ in status(tmp_path)["exception"]


def test_where_nothing_can_be_written_the_log_says_so_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "no-folder"
    file.touch()
    made = seated(file)
    made.recorder.phase("forward")
    made.recorder.decision({"mode": "decode"})
    made.status.error("more")
    made.status.write()
    said = capsys.readouterr().err
    assert said.count("cannot write") == 1
    assert "cannot make a ledger" in "".join(made.status.document()["errors"])


# Patching ------------------------------------------------------------------------------------------------------


SOURCE = """
class Engine:
    def __init__(self, rank): self.rank, self.calls = rank, []
    def step(self, batch, *, tokens=1):
        self.calls.append(batch)
        if batch == "bad": raise KeyError("bad")
        return batch * tokens
    @staticmethod
    def total(a, b): return a + b
    @classmethod
    def made(cls, rank): return cls(rank)
    number = 7
class Child(Engine): pass
def free(x): return x + 1
"""


@pytest.fixture
def patches() -> Iterator[tuple[Patches, Status]]:
    made = Status("fake")
    with modules({"fake_engine.core": SOURCE}):
        yield Patches(made), made


def _module(name: str = "fake_engine.core") -> Any:
    return sys.modules[name]


def test_hooks_see_arguments_and_results(patches: tuple[Patches, Status]) -> None:
    seen: list[Any] = []

    def around(call: Any, engine: Any, batch: str, **more: Any) -> str:
        seen.append(("around", engine.rank, batch, more))
        return str(call(engine, batch, **more)).upper()

    made, states = patches
    target = "fake_engine.core:Engine."
    assert made.wrap(target + "step", before=lambda e, batch, **more: seen.append(("before", batch, more)))
    assert made.wrap(target + "step", after=lambda result, e, *_, **__: seen.append(("after", result)))
    assert made.wrap(target + "step", around=around)
    assert made.wrap(target + "total", before=lambda a, b: seen.append((a, b)))
    assert made.wrap(target + "made", before=lambda cls, rank: seen.append((cls.__name__, rank)))
    assert made.wrap("fake_engine.core:Child.step", before=lambda *_, **__: seen.append("child"))
    engine = _module().Engine.made(3)
    assert engine.step("ab", tokens=2) == "ABAB"
    assert _module().Engine.total(2, 3) == engine.total(2, 3) == 5
    assert _module().Child(1).step("c") == "C"
    assert seen == [
        ("Engine", 3),
        ("around", 3, "ab", {"tokens": 2}),
        ("before", "ab", {"tokens": 2}),
        ("after", "abab"),
        (2, 3),
        (2, 3),
        "child",
        ("around", 1, "c", {}),
        ("before", "c", {}),
        ("after", "c"),
    ]
    assert set(states.document()["hooks"].values()) == {"on"}


def _before_fails(call: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("ours")


def _after_fails(call: Any, *args: Any, **kwargs: Any) -> Any:
    call(*args, **kwargs)
    raise RuntimeError("ours")


def _swallows(call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return call(*args, **kwargs)
    except KeyError:
        raise RuntimeError("ours") from None


@pytest.mark.parametrize(
    "hook",
    [
        {"around": _before_fails},
        {"around": _after_fails},
        {"around": _swallows},
        {"before": lambda *_, **__: 1 / 0},
        {"after": lambda *_, **__: 1 / 0},
    ],
)
def test_a_hook_that_fails_is_off_and_the_original_runs_once(
    patches: tuple[Patches, Status], hook: dict[str, Callable[..., Any]]
) -> None:
    made, states = patches
    made.wrap("fake_engine.core:Engine.step", **hook)
    engine = _module().Engine(0)
    with pytest.raises(KeyError, match="bad"):
        engine.step("bad")
    assert [engine.step("a"), engine.step("b")] == ["a", "b"]
    assert engine.calls == ["bad", "a", "b"]
    assert states.document()["hooks"]["fake_engine.core:Engine.step"].startswith("off: ")
    assert len(states.document()["errors"]) == 1


def test_what_the_original_raises_passes_and_leaves_the_hook_on(patches: tuple[Patches, Status]) -> None:
    made, states = patches
    made.wrap("fake_engine.core:Engine.step", around=lambda call, *args: call(*args))
    with pytest.raises(KeyError):
        _module().Engine(0).step("bad")
    assert states.document()["hooks"] == {"fake_engine.core:Engine.step": "on"}


def test_only_a_fault_that_was_asked_for_leaves_a_hook(patches: tuple[Patches, Status]) -> None:
    def fault(*_: Any, **__: Any) -> None:
        raise InjectedError("on purpose")

    made, states = patches
    made.wrap("fake_engine.core:Engine.step", before=fault)
    made.wrap("fake_engine.core:free", around=lambda call, x: fault())
    engine = _module().Engine(0)
    for _ in range(2):
        with pytest.raises(InjectedError):
            engine.step("a")
        with pytest.raises(InjectedError):
            _module().free(1)
    assert engine.calls == []
    assert set(states.document()["hooks"].values()) == {"on"}


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("fake_engine.core:Engine.gone", "missing: Engine has no gone"),
        ("fake_engine.core:Gone.step", "missing: fake_engine.core has no Gone"),
        ("fake_engine.core:Engine.number", "missing: number of Engine is no function"),
    ],
)
def test_a_missing_name_is_in_the_status(patches: tuple[Patches, Status], target: str, why: str) -> None:
    made, states = patches
    assert made.wrap(target, before=print) is False
    assert states.document()["hooks"] == {target: why}


def test_copies_made_by_import_are_bound_again_where_asked(patches: tuple[Patches, Status]) -> None:
    made, _ = patches
    with modules(
        {
            "fake_user": "from fake_engine.core import free as mine",
            "other_user": "from fake_engine.core import free",
        }
    ):
        made.wrap("fake_engine.core:free", around=lambda call, x: -call(x), rebind="fake_")
        assert (_module().free(1), _module("fake_user").mine(1)) == (-2, -2)
        assert _module("other_user").free(1) == 2


def test_a_module_that_comes_later_is_patched_when_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_engine.py").write_text(SOURCE)
    (tmp_path / "late_user.py").write_text("from late_engine import free\n")
    monkeypatch.syspath_prepend(tmp_path)
    states = Status("fake")
    made = Patches(states)
    for target in ("late_engine:free", "late_engine:gone", "never_engine:free"):
        assert made.wrap(target, around=lambda call, x: -call(x), role="rank") is True
    assert made.wrap("not_here:free", before=print, role="engine_core")
    assert states.document()["hooks"]["late_engine:free"] == "waiting: late_engine is not imported yet"
    try:
        late_user = importlib.import_module("late_user")
        late_engine: Any = importlib.import_module("late_engine")
        assert (late_engine.free(1), late_user.free(1)) == (-2, -2)
        assert type(late_engine.__loader__).__name__ == type(late_engine.__spec__.loader).__name__
        assert "Loader" in type(late_engine.__loader__).__name__
        assert type(late_engine.__loader__).__module__ != "serving.probe.hangrig_probe.patching"
        states.set(role="rank")
        states.settle()
        assert states.document()["hooks"] == {
            "late_engine:free": "on",
            "late_engine:gone": "missing: late_engine has no gone",
            "never_engine:free": "missing: its module was not imported by the first step",
        }
    finally:
        sys.modules.pop("late_engine", None)
        sys.modules.pop("late_user", None)


# Faults --------------------------------------------------------------------------------------------------------


def _due(folder: Path, index: int = 0) -> None:
    (folder / f"due-{index}").touch()


def test_a_raise_waits_for_its_time_and_its_mode_and_comes_once(tmp_path: Path) -> None:
    made = seated(tmp_path, faults=[{"name": "raise", "role": "rank", "ranks": [0], "mode": "idle"}])
    made.recorder.new_step()
    made.faults.at_step("idle")
    _due(tmp_path)
    made.recorder.new_step()
    made.faults.at_step("decode")
    assert status(tmp_path)["faults"] == []
    with pytest.raises(InjectedError, match="hangrig fault 0: raised before the forward pass"):
        made.faults.at_step("idle")
    assert status(tmp_path)["faults"] == [
        {
            "index": 0,
            "name": "raise",
            "step": 2,
            "mode": "idle",
            "what": "raised before the forward pass of a batch of mode idle",
        }
    ]
    made.faults.at_step("idle")


@pytest.mark.parametrize(
    ("fault", "seat", "role", "fires"),
    [
        ({"ranks": [1]}, 1, "rank", True),
        ({"ranks": [1]}, 0, "rank", False),
        ({"ranks": []}, 0, "rank", True),
        ({"role": "controller"}, 0, "rank", False),
        ({"role": "controller"}, "controller", "controller", True),
        ({"role": "engine_core"}, "engine_core-1", "engine_core", True),
    ],
)
def test_a_fault_is_made_in_the_processes_it_is_meant_for(
    tmp_path: Path, fault: dict[str, Any], seat: int | str, role: str, fires: bool
) -> None:
    made = seated(tmp_path, seat, role, faults=[{"name": "stop"}, {"name": "raise", **fault}])
    _due(tmp_path, 1)
    made.recorder.new_step()
    if fires:
        with pytest.raises(InjectedError):
            made.faults.at_step("mixed")
    else:
        made.faults.at_step("mixed")


def test_a_block_holds_the_thread_and_the_status_says_so_first(tmp_path: Path) -> None:
    made = seated(
        tmp_path,
        "controller",
        "controller",
        faults=[{"name": "block", "role": "controller", "seconds": 0.05}],
    )
    made.faults.blocks()
    _due(tmp_path)
    said: list[str] = []

    def loop() -> None:
        while not made.status.document()["faults"]:
            made.faults.blocks(lambda: said.append(status(tmp_path, "controller")["faults"][0]["what"]))

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert said == ["the main thread blocks for 0.05 s"]


def test_an_abort_asks_for_a_request_until_there_is_one(tmp_path: Path) -> None:
    made = seated(tmp_path, faults=[{"name": "abort_by_clock"}])
    assert made.faults.aborts(lambda: "early") is None
    _due(tmp_path)
    made.recorder.new_step()
    assert made.faults.aborts(lambda: None) is None
    assert made.faults.aborts(lambda: "r7") == "r7"
    assert made.faults.aborts(lambda: "r8") is None
    assert [one["what"] for one in status(tmp_path)["faults"]] == ["dropped request r7"]


def test_a_skip_fits_group_and_operation_and_comes_once(tmp_path: Path) -> None:
    made = seated(tmp_path, faults=[{"name": "skip_collective", "group": "tp", "operation": "all_reduce"}])
    assert made.faults.skipping is False
    _due(tmp_path)
    made.recorder.new_step()
    assert made.faults.skipping is True
    asked = [("tp", "broadcast"), ("dp", "all_reduce"), ("tp", "all_reduce"), ("tp", "all_reduce")]
    assert [made.faults.skips(*one) for one in asked] == [False, False, True, False]
    assert made.faults.skipping is False


def test_a_skip_waits_for_a_step_of_its_mode(tmp_path: Path) -> None:
    made = seated(tmp_path, faults=[{"name": "skip_collective", "mode": "idle"}])
    _due(tmp_path)
    skipped = []
    for mode in ("decode", "mixed", "idle", "idle"):
        made.recorder.new_step()
        made.faults.at_step(mode)
        skipped.append(made.faults.skips("tp", "all_reduce"))
    assert skipped == [False, False, True, False]
    assert status(tmp_path)["faults"][0]["mode"] == "idle"


# Recorder ------------------------------------------------------------------------------------------------------


def test_before_a_seat_everything_may_be_called_and_nothing_is_recorded(tmp_path: Path) -> None:
    made = probe(tmp_path)
    made.recorder.phase("recv")
    made.recorder.heartbeat()
    made.recorder.decision({"mode": "idle"})
    made.recorder.name_group("tp", "tp", (0, 1))
    made.recorder.end(made.recorder.begin("tp", "all_reduce"))
    made.streams.beat("decode")
    made.faults.at_step("idle")
    made.faults.blocks()
    assert made.recorder.new_step() == 1
    assert list(tmp_path.iterdir()) == []


def test_a_seat_has_a_ledger_a_status_and_a_place_for_its_stacks(tmp_path: Path) -> None:
    made = seated(tmp_path, 1)
    made.take_seat(0, role="rank")
    assert {path.name for path in tmp_path.iterdir()} == {
        "rank1.ledger",
        "rank1.decisions.jsonl",
        "rank1.probe.json",
        "rank1.dump.txt",
    }
    snapshot = ledger(tmp_path, "rank1")
    assert (snapshot.header.rank, snapshot.header.world, snapshot.header.node) == (1, 2, "node-a")
    assert snapshot.host.phase == "startup"


def test_steps_phases_and_decisions(tmp_path: Path) -> None:
    made = seated(tmp_path)
    made.recorder.name_group("a", "tp", (0, 1))
    made.recorder.new_step()
    made.recorder.end(made.recorder.begin("a", "all_reduce", (4, 8), "bfloat16"))
    made.recorder.decision({"finished": ["x" * 700], "mode": "decode", "retracted": [], "batch": 3})
    made.recorder.phase("forward")
    snapshot = ledger(tmp_path)
    assert (snapshot.host.phase, snapshot.host.step) == ("forward", 1)
    assert snapshot.decisions[-1] == {
        "truncated": True,
        "step": 1,
        "dp": 0,
        "mode": "decode",
        "retracted": [],
        "batch": 3,
        "collectives": {"tp": 1},
    }
    whole = json.loads((tmp_path / "rank0.decisions.jsonl").read_text())
    assert whole["finished"] == ["x" * 700]


def test_what_is_inside_a_collective_is_part_of_it(tmp_path: Path) -> None:
    made = seated(tmp_path)
    for key in ("a", "b"):
        made.recorder.name_group(key, "tp", (0, 1))
    made.recorder.name_group("one", "pp", (0,))
    outer = made.recorder.begin("a", "all_reduce")
    assert made.recorder.begin("b", "broadcast") is None
    made.recorder.end(None)
    inside = ledger(tmp_path).groups["tp"]
    assert (inside.enqueued, inside.started, inside.completed) == (1, 1, 0)
    made.recorder.end(outer)
    assert made.recorder.begin("one", "all_reduce") is None
    made.recorder.end(made.recorder.begin("b", "broadcast"))
    groups = ledger(tmp_path).groups
    assert {name: (one.ranks, one.enqueued, one.completed) for name, one in groups.items()} == {
        "tp": ((0, 1), 1, 1),
        "tp-1": ((0, 1), 1, 1),
    }


def test_many_threads_write_one_ledger(tmp_path: Path) -> None:
    made = seated(tmp_path)
    names = ("a", "b", "c", "d")
    for name in names:
        made.recorder.name_group(name, name, (0, 1))

    def work(name: str) -> None:
        for _ in range(300):
            made.recorder.end(made.recorder.begin(name, "all_reduce", (2,), "int64"))
            made.recorder.phase(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    groups = ledger(tmp_path).groups
    assert {name: (one.enqueued, one.completed) for name, one in groups.items()} == dict.fromkeys(
        names, (300, 300)
    )


def test_groups_that_a_ledger_has_no_room_for_are_named_in_the_status(tmp_path: Path) -> None:
    made = seated(tmp_path)
    for number in range(33):
        made.recorder.name_group(number, f"g{number}", (0, 1))
        made.recorder.end(made.recorder.begin(number, "barrier"))
    assert len(ledger(tmp_path).groups) == 32
    assert "no room for group 'g32'" in status(tmp_path)["errors"][0]
