"""The probe beside a device: heartbeat events, copies, the toggle pinned, captured graphs.

The device is a stand-in with the names of torch.cuda that the probe uses; an event passes when the test says so.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from probe_rig import config, counts, ledger, modules, probe, seated, status, torch_as_it_was

from serving.probe.hangrig_probe import graphs
from serving.probe.hangrig_probe.collectives import Describe, Kind, recorded
from serving.probe.hangrig_probe.probe import Probe

WAIT_S = 20.0


class FakeEvent:
    made = 0

    def __init__(self) -> None:
        FakeEvent.made += 1
        self.stream: Any = "never"
        self.passed = False

    def record(self, stream: Any = "current") -> None:
        self.stream, self.passed = stream, False

    def query(self) -> bool:
        return self.passed


class FakeStream:
    def __init__(self) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


class FakeModule:
    """Records which events it made, oldest first."""

    def __init__(self) -> None:
        self.events: list[FakeEvent] = []
        self.stream = FakeStream()

    def Event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]

    def current_stream(self) -> FakeStream:
        return self.stream


class FakeTensor:
    """Has the attributes and methods of a tensor that copies look at."""

    def __init__(self, where: str = "cpu", pinned: bool = False) -> None:
        self.is_cpu = where == "cpu"
        self.pinned = pinned
        self.copied: list[Any] = []

    def numel(self) -> int:
        return 16

    def element_size(self) -> int:
        return 4

    def is_pinned(self) -> bool:
        return self.pinned

    def pin_memory(self) -> FakeTensor:
        return FakeTensor("cpu", True)

    def copy_(self, source: FakeTensor, non_blocking: bool = False) -> FakeTensor:
        self.copied.append(source)
        return self

    def to(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (self, args)

    def cuda(self, device: Any = None, non_blocking: bool = False) -> FakeTensor:
        return FakeTensor("cuda")

    def cpu(self) -> FakeTensor:
        return FakeTensor()


def _on_device(folder: Path, pinned: str | None = None) -> tuple[Probe, FakeModule, Any]:
    """A seat whose device is a fake one; its tensors are of a class of their own."""
    made = probe(folder, device="cuda", pinned=pinned)
    made.recorder.seated(0, folder, world=2, node="n", device="cuda:0")
    made.status.seated(folder, "rank0")
    module = FakeModule()
    tensors = type("Tensor", (FakeTensor,), dict(vars(FakeTensor)))
    made.streams.use(module, 0)
    made.pinned.install(tensors, lambda source, pin_memory: tensors("cpu", pin_memory))
    made.copies.install(module, tensors)
    return made, module, tensors


def test_a_beat_is_done_when_its_events_have_passed(tmp_path: Path) -> None:
    made, module, _ = _on_device(tmp_path)
    made.streams.watch("comm", "the comm stream")
    made.recorder.name_group("a", "tp", (0, 1))
    token = made.recorder.begin("a", "all_reduce")
    assert token is not None
    made.recorder.leave()
    made.recorder.defer(token)
    try:
        made.streams.beat("decode")
        made.streams.beat("decode")
        assert [event.stream for event in module.events] == ["current", "the comm stream"] * 2
        module.events[2].passed = True  # Later on the same stream, so what it says is not believed yet.
        made.streams.look()
        assert ledger(tmp_path).streams["compute"].completed == 0
        module.events[0].passed = True  # Now both of compute have, and none of comm.
        made.streams.look()
        snapshot = ledger(tmp_path)
        assert [
            (s.enqueued, s.completed) for s in (snapshot.streams["compute"], snapshot.streams["comm"])
        ] == [
            (2, 2),
            (2, 0),
        ]
        assert snapshot.groups["tp"].completed == 0
        assert snapshot.streams["comm"].stamp_ns > 0
        module.events[1].passed = True
        made.streams.look()
        snapshot = ledger(tmp_path)
        assert (snapshot.streams["comm"].completed, snapshot.groups["tp"].completed) == (1, 1)
        assert snapshot.streams["compute"].recent[-1].label == "batch decode"
    finally:
        made.streams.stop(WAIT_S)


def test_a_collective_of_device_tensors_is_done_with_the_next_beat(tmp_path: Path) -> None:
    made, module, tensors = _on_device(tmp_path)
    made.recorder.name_group("a", "tp", (0, 1))
    tensors.shape, tensors.dtype = (4, 8), "torch.float16"
    kind = Kind(
        name="fake.all_reduce",
        operation="all_reduce",
        place=lambda args, kwargs: made.recorder.place("a"),
        describe=Describe(0, ["tensor"]),
        skipped=lambda args, kwargs: None,
    )
    reduce = recorded(lambda tensor: tensor, kind, made.recorder, made.faults, made.status)
    try:
        reduce(tensors("cuda"))
        assert counts(ledger(tmp_path)) == {"tp": (1, 0)}
        reduce(tensors("cpu"))
        made.streams.beat()
        module.events[0].passed = True
        made.streams.look()
        group = ledger(tmp_path).groups["tp"]
        assert (group.enqueued, group.completed) == (2, 2)
        assert (group.recent[0].shape, group.recent[0].dtype) == ((4, 8), "float16")
    finally:
        made.streams.stop(WAIT_S)


def test_the_monitor_looks_by_itself_and_not_during_a_capture(tmp_path: Path) -> None:
    made, module, _ = _on_device(tmp_path)
    asked = threading.Event()

    def query() -> bool:
        assert not made.streams.capturing
        asked.set()
        return True

    try:
        made.streams.capturing = True
        made.streams.beat("decode")
        assert module.events == []
        made.streams.capturing = False
        made.streams.beat("decode")
        module.events[0].query = query  # type: ignore[method-assign]
        assert asked.wait(WAIT_S)
    finally:
        made.streams.stop(WAIT_S)


def test_copies_that_do_not_wait_are_recorded_with_kind_and_site(tmp_path: Path) -> None:
    made, module, tensors = _on_device(tmp_path)
    device, pinned, pageable = tensors("cuda"), tensors("cpu", True), tensors()
    try:
        device.copy_(pinned, non_blocking=True)
        device.copy_(pageable, True)
        pageable.to("cuda:0", non_blocking=True)
        pageable.cuda(non_blocking=True)
        pinned.copy_(device, non_blocking=True)
        device.copy_(pageable)  # These wait, or stay where they are.
        pageable.to("cuda")
        device.cpu()
        device.copy_(tensors("cuda"), non_blocking=True)
        pageable.to("cpu", non_blocking=True)
        stream = ledger(tmp_path).streams["copy"]
        assert [record.label for record in stream.recent] == [
            "copy.h2d pinned 64 B",
            *["copy.h2d pageable 64 B"] * 3,
            "copy.d2h pinned 64 B",
        ]
        assert {record.site.rpartition(":")[0].rpartition("/")[2] for record in stream.recent} == {
            "test_probe_devices.py"
        }
        assert stream.completed == 0
        made.streams.beat("decode")
        module.events[0].passed = True
        made.streams.look()
        assert ledger(tmp_path).streams["copy"].completed == 5
        made.status.write()
        assert status(tmp_path)["copies"] == {"h2d pinned": 1, "h2d pageable": 3, "d2h pinned": 1}
    finally:
        made.streams.stop(WAIT_S)


def test_pinned_sync_synchronises_and_pinned_snapshot_copies_first(tmp_path: Path) -> None:
    for folder in ("sync", "snapshot"):
        (tmp_path / folder).mkdir()
    _, module, tensors = _on_device(tmp_path / "sync", "pinned_sync")
    tensors("cuda").copy_(tensors("cpu", True), non_blocking=True)
    tensors("cpu", True).copy_(tensors("cuda"), non_blocking=True)
    tensors("cuda").copy_(tensors("cpu", True))
    assert module.stream.synchronized == 2
    _, module, tensors = _on_device(tmp_path / "snapshot", "pinned_snapshot")
    device, source = tensors("cuda"), tensors("cpu", True)
    device.copy_(source, non_blocking=True)
    block = device.copied[0]
    assert block is not source
    assert (block.pinned, block.copied) == (True, [source])
    moved, _ = source.to("cuda", non_blocking=True)
    assert moved is not source
    assert moved.copied == [source]
    source.copy_(device, non_blocking=True)
    assert source.copied == [device]
    assert module.stream.synchronized == 0


ASKERS = """
def may_pin(): return True
"""
ASKER = """
from fake_platform import may_pin
def ask(): return may_pin()
"""


@pytest.mark.parametrize(
    ("device", "policy", "answer"),
    [
        ("cuda", None, True),
        ("cuda", "pageable", False),
        ("cuda", "pinned", True),
        ("npu", "pinned_snapshot", True),
        ("cpu", "pageable", True),
    ],
)
def test_the_override_answers_and_counts_who_asks(
    tmp_path: Path, device: str, policy: str | None, answer: bool
) -> None:
    made = probe(tmp_path, device=device, pinned=policy)
    with modules({"fake_platform": ASKERS, "fake_asker": ASKER}):
        assert made.pinned.override("fake_platform:may_pin", rebind="fake_")
        assert [sys.modules["fake_asker"].ask() for _ in range(3)] == [answer] * 3
    made.status.seated(tmp_path, "rank0")
    document = status(tmp_path)
    assert document["pinned"]["asked"] == policy
    assert document["pinned"]["applied"] == (policy if device != "cpu" else None)
    assert document["pinned"]["answers"] == {"<string>:3": 3}


def test_who_bypasses_the_override_is_listed(tmp_path: Path) -> None:
    made, _, tensors = _on_device(tmp_path, "pageable")
    device, pinned, pageable = tensors("cuda"), tensors("cpu", True), tensors()

    def pins() -> None:
        pageable.pin_memory()

    def copies(source: Any) -> None:
        device.copy_(source, non_blocking=True)

    def obeys() -> None:
        device.copy_(pageable, non_blocking=True)

    pins()
    copies(pinned)
    copies(pinned)
    obeys()
    made.status.write()
    lines = [int(site.rpartition(":")[2]) for site in status(tmp_path)["bypass"]]
    assert lines == [function.__code__.co_firstlineno + 1 for function in (pins, copies)]


def test_a_replay_counts_what_its_capture_saw(tmp_path: Path) -> None:
    class CUDAGraph:
        def capture_begin(self) -> None: ...

        def capture_end(self) -> None: ...

        def replay(self) -> None: ...

    made, module, _ = _on_device(tmp_path)
    module.CUDAGraph = CUDAGraph  # type: ignore[attr-defined]
    graphs.install(module, made.recorder, made.streams, made.status)
    made.recorder.name_group("a", "tp", (0, 1))
    graph = CUDAGraph()
    graph.capture_begin()
    assert made.streams.capturing
    for _ in range(3):
        assert made.recorder.begin("a", "all_reduce") is None
    graph.capture_end()
    assert ledger(tmp_path).groups["tp"].enqueued == 0
    graph.replay()
    graph.replay()
    group = ledger(tmp_path).groups["tp"]
    assert (group.enqueued, group.completed, group.recent[-1].operation) == (6, 0, "graph")
    try:
        made.streams.beat()
        module.events[0].passed = True
        made.streams.look()
        assert ledger(tmp_path).groups["tp"].completed == 6
    finally:
        made.streams.stop(WAIT_S)


def test_a_device_that_fails_turns_its_own_part_off(tmp_path: Path) -> None:
    made, module, tensors = _on_device(tmp_path)
    module.Event = None  # type: ignore[method-assign, assignment]
    made.streams.beat("decode")
    made.streams.beat("decode")
    tensors.is_pinned = None
    assert tensors("cuda").copy_(tensors("cpu"), non_blocking=True).copied
    errors = status(tmp_path)["errors"]
    assert [error.split(":")[0] for error in errors] == [
        "heartbeat events are off",
        "copies are no longer recorded",
    ]


def test_on_a_cpu_nothing_of_a_tensor_is_wrapped(tmp_path: Path) -> None:
    import torch

    before = {name: getattr(torch.Tensor, name) for name in ("to", "copy_", "cuda", "cpu", "pin_memory")}
    with torch_as_it_was():
        seated(tmp_path, pinned="pageable")
    assert {name: getattr(torch.Tensor, name) for name in before} == before
    assert config(tmp_path).device == "cpu"
