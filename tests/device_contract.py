"""What holds for every device: the simulated one, CUDA's and Ascend's over a fake of their modules, and real ones.

A test module subclasses ``DeviceContract`` and gives it a fixture ``rig``. Operations are torch operations on the
device's tensors, as an engine's are. What is particular to a device is tested beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness.devices.base import Device, DeviceError, DeviceTimeout, HostArgs, Stream
from harness.ledger import LedgerReader

LONG_S = 30.0
SHORT_S = 0.02


@dataclass
class Rig:
    """A device, how to keep one of its streams busy, and the ledger that it writes."""

    device: Device
    hold: Callable[[Stream], Callable[[], None]]
    """Keeps the stream busy until what it returns is called (on hardware: for a while)."""
    ledger_path: Path

    def tensor(self, *values: float) -> torch.Tensor:
        made = self.device.empty((len(values),), torch.float32)
        for place, value in enumerate(values):
            made[place].fill_(value)
        return made

    def values(self, tensor: torch.Tensor) -> list[float]:
        """What it holds when all streams have passed what they were given."""
        for stream in (self.device.update, self.device.comm, self.device.copy, self.device.compute):
            stream.synchronize(LONG_S)
        found: list[float] = tensor.tolist()
        return found

    def reader(self) -> LedgerReader:
        return LedgerReader.open(self.ledger_path)


def until(what: Callable[[], object]) -> None:
    """What the monitor tells comes a moment after it is so."""
    deadline_s = time.monotonic() + LONG_S
    while not what():
        assert time.monotonic() < deadline_s, "it did not come to be"
        time.sleep(1e-3)


def fail() -> None:
    raise ZeroDivisionError("by purpose")


class DeviceContract:
    # --- streams and events

    def test_a_stream_runs_in_order(self, rig: Rig) -> None:
        x = rig.tensor(1.0)
        for factor in (2.0, 3.0):
            rig.device.compute.run(lambda factor=factor: x.mul_(factor).add_(1.0), "step")
        assert rig.values(x) == [10.0]

    def test_streams_wait_for_events_and_for_nothing_else(self, rig: Rig) -> None:
        x, y = rig.tensor(1.0), rig.tensor(0.0)
        rig.device.compute.synchronize(LONG_S)
        event, early = rig.device.event("ready"), rig.device.event()
        release = rig.hold(rig.device.compute)
        rig.device.compute.run(lambda: x.fill_(5.0), "fill")
        rig.device.compute.record(event)
        rig.device.copy.run(lambda: y.copy_(x), "read early")
        rig.device.copy.record(early)
        early.synchronize(LONG_S)
        assert y.tolist() == [1.0] and not event.query()
        rig.device.copy.wait(event)
        rig.device.copy.run(lambda: y.copy_(x), "read late")
        release()
        assert rig.values(y) == [5.0] and event.query()

    def test_an_event_that_was_never_recorded_is_done(self, rig: Rig) -> None:
        event = rig.device.event()
        assert event.query()
        event.synchronize(SHORT_S)
        rig.device.compute.wait(event)
        rig.device.compute.synchronize(LONG_S)

    def test_recording_again_moves_an_event_and_waits_keep_the_old_point(self, rig: Rig) -> None:
        event, passed = rig.device.event(), rig.device.event()
        rig.device.compute.record(event)
        rig.device.copy.wait(event)
        rig.device.copy.record(passed)
        release = rig.hold(rig.device.compute)
        rig.device.compute.record(event)
        passed.synchronize(LONG_S)
        assert not event.query()
        release()
        event.synchronize(LONG_S)

    def test_host_waits_pass_their_deadline_and_can_be_repeated(self, rig: Rig) -> None:
        event = rig.device.event()
        release = rig.hold(rig.device.compute)
        rig.device.compute.record(event)
        with pytest.raises(DeviceTimeout, match="an event"):
            event.synchronize(SHORT_S)
        with pytest.raises(DeviceTimeout, match="stream compute"):
            rig.device.compute.synchronize(SHORT_S)
        release()
        event.synchronize(LONG_S)
        rig.device.compute.synchronize(LONG_S)

    def test_an_operation_tells_when_the_stream_comes_to_it_and_when_it_has_passed(self, rig: Rig) -> None:
        seen: list[str] = []
        x = rig.tensor(0.0)
        release = rig.hold(rig.device.comm)
        rig.device.comm.run(
            lambda: x.add_(1.0),
            "note",
            began=lambda: seen.append("began"),
            done=lambda: seen.append("done"),
        )
        with pytest.raises(DeviceTimeout):
            rig.device.comm.synchronize(SHORT_S)
        assert seen == []
        release()
        rig.device.comm.synchronize(LONG_S)
        until(lambda: seen == ["began", "done"])

    def test_a_delay_keeps_one_stream_busy_and_no_other(self, rig: Rig) -> None:
        x = rig.tensor(0.0)
        rig.device.delay(rig.device.copy, 0.3, "busy")
        late, early = rig.device.event(), rig.device.event()
        rig.device.copy.record(late)
        rig.device.compute.run(lambda: x.add_(1.0), "step")
        rig.device.compute.record(early)
        early.synchronize(LONG_S)
        assert not late.query()
        late.synchronize(LONG_S)

    # --- errors and the end

    def test_an_error_is_kept_and_every_later_call_raises_it(self, rig: Rig) -> None:
        with pytest.raises(DeviceError, match=r"'divide' on compute.*by purpose") as caught:
            rig.device.compute.run(fail, "divide")
            rig.device.compute.synchronize(LONG_S)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        event = rig.device.event()
        for call in (
            lambda: rig.device.copy.synchronize(LONG_S),
            lambda: rig.device.copy.run(lambda: None, "later"),
            lambda: rig.device.copy.record(event),
            event.query,
            lambda: event.synchronize(LONG_S),
        ):
            with pytest.raises(DeviceError, match="by purpose"):
                call()

    def test_a_closed_device_takes_nothing_more_and_can_be_closed_again(self, rig: Rig) -> None:
        rig.device.close(LONG_S)
        with pytest.raises(DeviceError, match="closed"):
            rig.device.compute.run(lambda: None, "late")
        rig.device.close(LONG_S)

    # --- host memory and copies

    @pytest.mark.parametrize("pinned", [True, False])
    def test_copies_bring_what_the_source_held(self, rig: Rig, pinned: bool) -> None:
        source = rig.device.host_staging([3], torch.float32, pinned=pinned)
        source.tensor.copy_(torch.tensor([1.0, 2.0, 3.0]))
        there = rig.device.empty([3], torch.float32)
        back = rig.device.host_empty([3], torch.float32, pinned=pinned)
        copied, done = rig.device.event(), rig.device.event()
        rig.device.copy_h2d(there, source, rig.device.compute, "there")
        rig.device.compute.run(lambda: there.mul_(2.0), "double")
        rig.device.compute.record(copied)
        rig.device.copy.wait(copied)
        rig.device.copy_d2h(back, there, rig.device.copy, "back")
        rig.device.copy.record(done)
        done.synchronize(LONG_S)
        assert back.tensor.tolist() == [2.0, 4.0, 6.0]
        assert source.pinned is back.pinned is pinned

    def test_a_pinned_copy_reads_its_source_when_the_stream_comes_to_it(self, rig: Rig) -> None:
        """The host goes on at once: so a source that is overwritten too early brings the wrong values."""
        source = rig.device.host_empty([1], torch.float32, pinned=True)
        source.tensor.fill_(1.0)
        there = rig.tensor(0.0)
        rig.device.compute.synchronize(LONG_S)
        release = rig.hold(rig.device.compute)
        rig.device.copy_h2d(there, source, rig.device.compute, "there")
        source.tensor.fill_(2.0)
        release()
        assert rig.values(there) == [2.0]

    @pytest.mark.parametrize("pinned", [True, False])
    def test_a_freed_block_is_handed_out_again_when_no_copy_uses_it(self, rig: Rig, pinned: bool) -> None:
        device = rig.device
        there = rig.tensor(0.0)
        buffer = device.host_empty([1], torch.float32, pinned=pinned)
        buffer.tensor.fill_(1.0)
        place = buffer.tensor.data_ptr()
        release = rig.hold(device.compute) if pinned else lambda: None  # a pageable copy may wait
        device.copy_h2d(there, buffer, device.compute, "there")
        device.host_free(buffer)
        if pinned:
            other = device.host_empty([1], torch.float32, pinned=True)
            assert other.tensor.data_ptr() != place, "handed out while a copy reads it"
            device.host_free(other)
        release()
        assert rig.values(there) == [1.0]

        held = []

        def again() -> bool:
            held.append(device.host_empty([1], torch.float32, pinned=pinned))
            return place == held[-1].tensor.data_ptr()

        until(again)
        for one in held:
            device.host_free(one)

    def test_figures_count_what_is_handed_out(self, rig: Rig) -> None:
        before = rig.device.memory()
        tensor = rig.device.empty([1 << 20], torch.uint8)
        pinned = rig.device.host_empty([1000], torch.uint8, pinned=True)
        pageable = rig.device.host_empty([1000], torch.uint8, pinned=False)
        held = rig.device.memory()
        assert held.device_bytes - before.device_bytes >= tensor.nbytes
        assert held.host_pinned_bytes == held.host_pageable_bytes == 1024
        rig.device.host_free(pinned)
        rig.device.host_free(pageable)
        del tensor
        assert rig.device.memory() == before

    def test_a_copy_that_does_not_fit_and_a_buffer_that_is_gone_are_refused(self, rig: Rig) -> None:
        buffer = rig.device.host_empty([2], torch.float32, pinned=False)
        with pytest.raises(ValueError, match=r"tokens.*\[2\] into .*\[3\]"):
            rig.device.copy_h2d(rig.device.empty([3], torch.float32), buffer, rig.device.compute, "tokens")
        rig.device.host_free(buffer)
        with pytest.raises(DeviceError, match="after it was freed"):
            rig.device.host_free(buffer)
        with pytest.raises(DeviceError, match="after it was freed"):
            rig.device.copy_h2d(rig.device.empty([2], torch.float32), buffer, rig.device.compute, "tokens")

    # --- graphs

    def test_a_replay_does_the_captured_work_again(self, rig: Rig) -> None:
        x = rig.tensor(0.0)
        with rig.device.capture("step") as graph:
            assert rig.device.capturing
            rig.device.compute.run(lambda: x.add_(1.0), "add")
            rig.device.compute.run(lambda: x.mul_(2.0), "double")
        assert not rig.device.capturing and graph.name == "step" and graph.host_ops == 0
        rig.device.compute.run(lambda: x.fill_(1.0), "start")
        for _ in range(3):
            rig.device.replay(graph)
        assert rig.values(x) == [22.0]

    def test_each_replay_takes_the_numbers_of_its_update(self, rig: Rig) -> None:
        """Two host operations, updated before each replay, each update fenced by the replay before."""
        device = rig.device
        rows = 5
        seen = device.empty((rows, 3), torch.int64)
        at = device.empty((1,), torch.int64).zero_()
        first, second = device.external_event("first"), device.external_event("second")
        taken = device.empty((3,), torch.int64).zero_()

        def lengths(args: HostArgs) -> None:
            taken[:2].copy_(torch.as_tensor(args[0]))

        def one_more(args: HostArgs) -> None:
            taken[2:].copy_(torch.as_tensor(args[0]))

        def write() -> None:
            seen.index_copy_(0, at, taken.unsqueeze(0))
            at.add_(1)

        with device.capture("decode") as graph:
            device.host_op(lengths, ((0, 0),), first, "attention.0")
            device.host_op(one_more, ((0,),), second, "attention.1")
            device.compute.run(write, "write")
        assert graph.host_ops == 2
        device.compute.run(at.zero_, "start")
        fence = None
        for step in range(rows):
            device.graph_update(graph, [((step, 2 * step),), ((7 + step,),)], fence)
            device.replay(graph)
            fence = device.event()
            device.compute.record(fence)
        assert rig.values(seen) == [[step, 2 * step, 7 + step] for step in range(rows)]
        snapshot = rig.reader()
        until(lambda: [one.records for one in snapshot.snapshot().external] == [rows, rows])
        until(lambda: [one.waits for one in snapshot.snapshot().external] == [rows, rows])
        assert [one.overtaken for one in snapshot.snapshot().external] == [0, 0]
        snapshot.close()

    def test_outside_a_capture_an_operation_takes_its_numbers_as_they_are(self, rig: Rig) -> None:
        x = rig.tensor(0.0)
        rig.device.host_op(lambda args: x.fill_(float(args[0])), (3,), None, "attention")
        assert rig.values(x) == [3.0]

    def test_what_a_capture_cannot_hold_is_refused(self, rig: Rig) -> None:
        device = rig.device
        event = device.event()
        device.compute.record(event)
        buffer = device.host_empty([1], torch.float32, pinned=True)
        x = rig.tensor(0.0)
        refused = {
            "an event record on compute": lambda: device.compute.record(event),
            "an event wait on compute": lambda: device.compute.wait(event),
            "a synchronisation on compute": lambda: device.compute.synchronize(LONG_S),
            "the host copy 'there'": lambda: device.copy_h2d(x, buffer, device.compute, "there"),
            "only a replay has a time": lambda: device.compute.run(fail, "note", opaque=True, done=fail),
        }
        for match, call in refused.items():
            with pytest.raises(DeviceError, match=match), device.capture("g"):
                call()
        with pytest.raises(DeviceError, match="inside the capture"), device.capture("a"), device.capture("b"):
            raise AssertionError("a second capture began")
        with pytest.raises(DeviceError, match="not completed"):
            with pytest.raises(DeviceError), device.capture("g") as graph:
                device.compute.record(event)
            device.replay(graph)
        with pytest.raises(TypeError, match="no external event"), device.capture("g"):
            device.host_op(lambda args: None, ((1,),), None, "attention")

    def test_an_update_must_fit_its_graph(self, rig: Rig) -> None:
        flag = rig.device.external_event("layer 0")
        with rig.device.capture("step") as graph:
            rig.device.host_op(lambda args: None, ((1,),), flag, "attention")
        with pytest.raises(ValueError, match="1 host operations, but 2"):
            rig.device.graph_update(graph, [((1,),), ((1,),)], None)

    # --- the ledger

    def test_the_ledger_has_each_operation_with_its_site(self, rig: Rig) -> None:
        device = rig.device
        x = rig.tensor(0.0)
        reader = rig.reader()
        began = reader.snapshot().streams["compute"].enqueued
        event = device.event("ready")
        device.compute.run(lambda: x.add_(1.0), "first")
        release = rig.hold(device.compute)
        device.compute.run(lambda: x.add_(1.0), "second")
        device.compute.record(event)
        device.copy.wait(event)
        until(lambda: reader.snapshot().streams["compute"].completed >= began + 1)
        until(lambda: reader.snapshot().streams["update"].stamp_ns)
        before = reader.snapshot()
        compute, copy = before.streams["compute"], before.streams["copy"]
        assert compute.enqueued == began + 3 and compute.completed == began + 1
        assert compute.recent[-1].label == "second"
        assert compute.recent[-1].site.startswith("tests/device_contract.py:")
        assert copy.oldest is not None and copy.oldest.label == "event.wait ready"
        with pytest.raises(DeviceTimeout):
            event.synchronize(SHORT_S)
        wait = reader.snapshot().host_wait()
        assert wait is not None and (wait.stream, wait.sequence) == ("compute", began + 3)
        release()
        device.copy.synchronize(LONG_S)
        until(lambda: reader.snapshot().host_wait() is None)
        until(lambda: reader.snapshot().streams["copy"].completed == 1)
        assert reader.snapshot().streams["compute"].completed == began + 3
        reader.close()

    def test_an_operation_that_failed_stays_the_oldest(self, rig: Rig) -> None:
        with pytest.raises(DeviceError):
            rig.device.comm.run(fail, "all_reduce")
            rig.device.comm.synchronize(LONG_S)
        reader = rig.reader()
        oldest = reader.snapshot().streams["comm"].oldest
        assert oldest is not None and oldest.label == "all_reduce"
        reader.close()
