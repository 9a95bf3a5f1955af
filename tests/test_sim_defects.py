"""Each defect of the simulated device beside its sound twin: the same order of calls, another outcome."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from sim_rig import LONG_S, Gate, SiteGate, buffer_of, opened, visiting

from harness.devices.base import DeviceTimeout
from harness.devices.sim import SimDevice
from harness.devices.sim_graph import SimGraph
from harness.ledger import LedgerReader, LedgerWriter, Snapshot

SHORT_S = 0.05
BOTH = pytest.mark.parametrize("defect", [True, False], ids=["defect", "sound"])


@contextmanager
def ledgered(path: Path, defects: frozenset[str]) -> Iterator[tuple[SimDevice, LedgerReader]]:
    ledger = LedgerWriter.create(path, rank=0, world=1, node="here", device="sim")
    with opened(ledger=ledger, defects=defects) as device:
        reader = LedgerReader.open(path)
        yield device, reader
        reader.close()
    ledger.close()


def captured(device: SimDevice, layers: int, seen: list[int]) -> SimGraph:
    with device.capture("decode") as graph:
        for layer in range(layers):
            flag = device.external_event(f"layer {layer}")
            device.host_op(lambda args: seen.append(args[0]), (0,), flag, f"layer {layer} attention")
    return graph


# --- D1: the update of a graph does not wait for the replay before it


def three_decodes(device: SimDevice, graph: SimGraph, gate: Gate) -> None:
    """The host runs two steps ahead while the first replay stands, as when nothing makes it wait."""
    fence = device.event()
    for number in (1, 2, 3):
        if number == 1:
            device.compute.run(gate, "earlier work")
        device.graph_update(graph, [(number,)] * graph.host_ops, fence)
        device.replay(graph)
        device.compute.record(fence)


def settled(reader: LedgerReader, device: SimDevice, defect: bool) -> Snapshot:
    """Lets the update stream do all it can before the first replay starts, where it does not wait for it."""
    if defect:
        device.update.synchronize(LONG_S)
    return reader.snapshot()


@BOTH
def test_d1_lost_records_stop_the_replays_for_good(tmp_path: Path, defect: bool) -> None:
    gate, seen = Gate(), list[int]()
    with ledgered(tmp_path / "rank0.ledger", frozenset({"D1"} if defect else ())) as (device, reader):
        graph = captured(device, 2, seen)
        three_decodes(device, graph, gate)
        gate.await_reached()
        before = settled(reader, device, defect)
        gate.open()
        if defect:
            assert [one.records for one in before.external] == [3, 3]
            assert [one.overtaken for one in before.external] == [2, 2]
            assert [one.first_overtaken for one in before.external] == [2, 2]
            assert before.streams["update"].enqueued == 3, "no waits for a fence"
            with pytest.raises(DeviceTimeout):
                device.compute.synchronize(SHORT_S)
            assert seen == [3, 3], "one replay ran, and with the arguments of the third step"
            stuck = reader.snapshot()
            oldest = stuck.streams["compute"].oldest
            assert oldest is not None and oldest.label == "graph.replay decode"
            assert (stuck.streams["compute"].enqueued, stuck.streams["compute"].completed) == (4, 2)
            assert [one.waits for one in stuck.external] == [1, 1]
        else:
            device.compute.synchronize(LONG_S)
            assert seen == [1, 1, 2, 2, 3, 3]
            after = reader.snapshot()
            assert [(one.records, one.waits, one.overtaken) for one in after.external] == [(3, 3, 0)] * 2
            labels = [one.label for one in after.streams["update"].recent]
            assert labels == ["graph.update decode", *["event.wait", "graph.update decode"] * 2]
            assert after.streams["compute"].completed == after.streams["compute"].enqueued == 4


def test_d1_comes_as_wrong_lengths_first_and_stops_at_a_step_without_update(tmp_path: Path) -> None:
    """Replays run one update behind as long as updates come (HANGS.md, D1)."""
    earlier, prefill, used = Gate(), Gate(), SimpleQueue[int]()
    with ledgered(tmp_path / "rank0.ledger", frozenset({"D1"})) as (device, reader):
        fence = device.event()
        with device.capture("decode") as graph:
            device.host_op(
                lambda args: used.put(args[0]), (0,), device.external_event("layer 0"), "attention"
            )

        def decode(step: int) -> None:
            device.graph_update(graph, [(step,)], fence)
            device.replay(graph)
            device.compute.record(fence)

        device.compute.run(earlier, "earlier work")
        decode(1)
        decode(2)  # its record finds the flag set, and is lost
        device.update.synchronize(LONG_S)
        earlier.open()
        assert used.get(timeout=LONG_S) == 2, "replay 1 used the lengths of step 2"
        for step in (3, 4):
            decode(step)
            assert used.get(timeout=LONG_S) == step, f"replay {step - 1} used the lengths of step {step}"
        device.compute.run(prefill, "a prefill, which makes no update")
        with pytest.raises(DeviceTimeout):
            device.compute.synchronize(SHORT_S)
        assert not prefill.reached.is_set()
        (external,) = reader.snapshot().external
        assert (external.records, external.waits) == (4, 3)


def test_a_fenced_update_is_never_counted_as_overtaken(tmp_path: Path) -> None:
    seen: list[int] = []
    with ledgered(tmp_path / "rank0.ledger", frozenset()) as (device, reader):
        graph, fence = captured(device, 4, seen), device.event()
        for number in range(200):
            device.graph_update(graph, [(number,)] * 4, fence)
            device.replay(graph)
            device.compute.record(fence)
        device.compute.synchronize(LONG_S)
        after = reader.snapshot()
        assert [(one.records, one.waits, one.overtaken) for one in after.external] == [(200, 200, 0)] * 4
        assert seen == [number for number in range(200) for _ in range(4)]


# --- D2: a reused host array


def staged_twice(device: SimDevice, *, pinned: bool) -> list[float]:
    gate = Gate()
    targets = [device.empty([1], torch.float32) for _ in range(2)]
    device.compute.run(gate, "earlier work")
    for value, target in zip((1.0, 2.0), targets, strict=True):
        buffer = buffer_of(device, [value], pinned=pinned, staging=True)
        device.copy_h2d(target, buffer, device.compute, "token count")
        device.host_free(buffer)
    gate.open()
    device.compute.synchronize(LONG_S)
    return [target.item() for target in targets]


@BOTH
def test_d2_a_reused_array_is_overwritten_before_its_pinned_copy(defect: bool) -> None:
    with opened(memory_model="cuda", defects=frozenset({"D2"} if defect else ())) as device:
        assert staged_twice(device, pinned=True) == ([2.0, 2.0] if defect else [1.0, 2.0])


def test_d2_does_not_show_with_pageable_memory() -> None:
    with opened(memory_model="cuda", defects=frozenset({"D2"})) as device:
        assert staged_twice(device, pinned=False) == [1.0, 2.0]


def test_d2_gives_two_arrays_when_both_are_held() -> None:
    with opened(defects=frozenset({"D2"})) as device:
        one, other = (device.host_staging([1], torch.float32, pinned=True) for _ in range(2))
        assert one.tensor.data_ptr() != other.tensor.data_ptr()
        device.host_free(one)
        device.host_free(other)
        assert device.memory().host_pinned_bytes == 0


# --- D3: pinned copies beside their stream


@BOTH
def test_d3_a_later_kernel_runs_before_the_copy(defect: bool) -> None:
    gate, kernel = Gate(), Gate()
    kernel.open()
    with opened(defects=frozenset({"D3"} if defect else ())) as device:
        seen: list[float] = []
        on_device = device.empty([1], torch.float32)
        buffer = buffer_of(device, [5.0], pinned=True)
        with visiting(SiteGate("copy.h2d", gate)):
            device.copy_h2d(on_device, buffer, device.compute, "tokens")
            device.compute.run(lambda: seen.append(on_device.item()), "kernel")
            device.compute.run(kernel, "after the kernel")
            gate.await_reached()
            if defect:
                kernel.await_reached()
            assert kernel.reached.is_set() is defect
            gate.open()
            device.compute.synchronize(LONG_S)
        assert seen == ([0.0] if defect else [5.0])
        assert on_device.item() == 5.0


@pytest.mark.parametrize("how", ["stream", "event"])
def test_d3_is_cured_by_a_wait_on_the_host(how: str) -> None:
    gate = Gate()
    with opened(defects=frozenset({"D3"})) as device:
        event = device.event()
        on_device = device.empty([1], torch.float32)
        with visiting(SiteGate("copy.h2d", gate)):
            device.copy_h2d(on_device, buffer_of(device, [5.0], pinned=True), device.compute, "tokens")
            device.compute.record(event)
            gate.await_reached()
            with pytest.raises(DeviceTimeout):
                event.synchronize(SHORT_S) if how == "event" else device.compute.synchronize(SHORT_S)
            assert not event.query()
            gate.open()
            event.synchronize(LONG_S) if how == "event" else device.compute.synchronize(LONG_S)
        assert on_device.item() == 5.0


@BOTH
def test_d3_an_event_does_not_order_another_stream(defect: bool) -> None:
    gate, reached = Gate(), Gate()
    reached.open()
    with opened(defects=frozenset({"D3"} if defect else ())) as device:
        event = device.event()
        on_device = device.empty([1], torch.float32)
        with visiting(SiteGate("copy.h2d", gate)):
            device.copy_h2d(on_device, buffer_of(device, [5.0], pinned=True), device.copy, "tokens")
            device.copy.record(event)
            device.compute.wait(event)
            device.compute.run(reached, "kernel")
            gate.await_reached()
            if defect:
                reached.await_reached()
            assert reached.reached.is_set() is defect
            gate.open()
            device.compute.synchronize(LONG_S)


def test_d3_leaves_pageable_copies_ordered() -> None:
    gate = Gate()
    with opened(memory_model="cuda", defects=frozenset({"D3"})) as device:
        seen: list[float] = []
        on_device = device.empty([1], torch.float32)
        with visiting(SiteGate("copy.h2d", gate)):
            device.copy_h2d(on_device, buffer_of(device, [5.0], pinned=False), device.compute, "tokens")
            device.compute.run(lambda: seen.append(on_device.item()), "kernel")
            gate.await_reached()
            gate.open()
            device.compute.synchronize(LONG_S)
        assert seen == [5.0]


def test_d3_alone_does_not_give_a_pending_block_away() -> None:
    gate = Gate()
    with opened(defects=frozenset({"D3"})) as device:
        buffer = buffer_of(device, [5.0], pinned=True)
        address = buffer.tensor.data_ptr()
        with visiting(SiteGate("copy.h2d", gate)):
            device.copy_h2d(device.empty([1], torch.float32), buffer, device.compute, "tokens")
            gate.await_reached()
            device.host_free(buffer)
            assert device.host_empty([1], torch.float32, pinned=True).tensor.data_ptr() != address
            gate.open()


# --- D4: a freed block is handed out while a copy reads it


def freed_and_taken(device: SimDevice, *, pinned: bool) -> float:
    gate = Gate()
    target = device.empty([1], torch.float32)
    device.compute.run(gate, "earlier work")
    buffer = buffer_of(device, [1.0], pinned=pinned)
    device.copy_h2d(target, buffer, device.compute, "bitmask")
    device.host_free(buffer)
    buffer_of(device, [2.0], pinned=pinned)
    gate.open()
    device.compute.synchronize(LONG_S)
    return target.item()


@BOTH
def test_d4_a_freed_pinned_block_is_overwritten_before_its_copy(defect: bool) -> None:
    with opened(memory_model="cuda", defects=frozenset({"D4"} if defect else ())) as device:
        assert freed_and_taken(device, pinned=True) == (2.0 if defect else 1.0)


def test_d4_does_not_show_with_pageable_memory() -> None:
    with opened(memory_model="cuda", defects=frozenset({"D4"})) as device:
        assert freed_and_taken(device, pinned=False) == 1.0
