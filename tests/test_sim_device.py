"""The simulated device without defects: streams, events, errors, the end, the ledger and the fault sites."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest
import torch
from sim_rig import LONG_S, Gate, buffer_of, in_thread, joined, opened, visiting

from harness.devices.base import DeviceError, DeviceTimeout
from harness.devices.sim import CANNOT_SHOW, SimDevice, SimOptions
from harness.faults import Passing
from harness.ledger import LedgerReader, LedgerWriter

SHORT_S = 0.02


def threads_of(device: SimDevice) -> list[threading.Thread]:
    return [stream.thread for stream in (device.compute, device.copy, device.comm, device.update)]


# --- streams and events


def test_a_stream_runs_in_order_on_a_thread_of_its_name() -> None:
    with opened() as device:
        seen: list[tuple[int, str, bool]] = []
        for number in range(50):
            device.comm.run(
                lambda number=number: seen.append(
                    (number, threading.current_thread().name, torch.is_grad_enabled())
                ),
                "note",
            )
        device.comm.synchronize(LONG_S)
    assert seen == [(number, "hangrig-comm", False) for number in range(50)]


def test_streams_do_not_wait_for_each_other_but_for_events() -> None:
    gate, seen = Gate(), list[str]()
    with opened() as device:
        event = device.event()
        device.compute.run(gate, "gate")
        device.compute.run(lambda: seen.append("compute"), "note")
        device.compute.record(event)
        device.copy.run(lambda: seen.append("copy before"), "note")
        device.copy.synchronize(LONG_S)
        device.copy.wait(event)
        device.copy.run(lambda: seen.append("copy after"), "note")
        assert not event.query()
        gate.open()
        device.copy.synchronize(LONG_S)
        assert event.query()
    assert seen == ["copy before", "compute", "copy after"]


def test_an_operation_tells_when_the_stream_comes_to_it_and_when_it_has_passed() -> None:
    gate, seen = Gate(), list[str]()
    with opened() as device:
        device.comm.run(gate, "gate")
        device.comm.run(
            lambda: seen.append("op"),
            "note",
            began=lambda: seen.append("began"),
            done=lambda: seen.append("done"),
        )
        assert seen == []
        gate.open()
        device.comm.synchronize(LONG_S)
        with pytest.raises(DeviceError, match="only a replay has a time"), device.capture("g"):
            device.compute.run(lambda: None, "note", opaque=True, done=lambda: None)
    assert seen == ["began", "op", "done"]


def test_a_delay_keeps_one_stream_busy_and_no_other() -> None:
    with opened() as device:
        device.delay(device.copy, LONG_S, "busy")
        late, early = device.event(), device.event()
        device.copy.record(late)
        device.compute.record(early)
        early.synchronize(LONG_S)
        assert not late.query()


def test_an_event_that_was_never_recorded_is_done() -> None:
    with opened() as device:
        event = device.event()
        assert event.query()
        event.synchronize(SHORT_S)
        device.compute.wait(event)
        device.compute.synchronize(LONG_S)


def test_recording_again_moves_an_event_and_waits_keep_the_old_point() -> None:
    gate, seen = Gate(), list[str]()
    with opened() as device:
        event = device.event()
        device.compute.record(event)
        device.copy.wait(event)
        device.copy.run(lambda: seen.append("copy"), "note")
        device.compute.run(gate, "gate")
        device.compute.record(event)
        device.copy.synchronize(LONG_S)
        assert seen == ["copy"]
        assert not event.query()
        gate.open()
        event.synchronize(LONG_S)


def test_host_waits_pass_their_deadline_and_can_be_repeated() -> None:
    gate = Gate()
    with opened() as device:
        event = device.event()
        device.compute.run(gate, "gate")
        device.compute.record(event)
        with pytest.raises(DeviceTimeout, match="an event"):
            event.synchronize(SHORT_S)
        with pytest.raises(DeviceTimeout, match="stream compute"):
            device.compute.synchronize(SHORT_S)
        gate.open()
        event.synchronize(LONG_S)
        device.compute.synchronize(LONG_S)


# --- errors and the end


def fail() -> None:
    raise ZeroDivisionError("by purpose")


def test_an_error_is_kept_and_every_later_call_raises_it() -> None:
    with opened() as device:
        event = device.event()
        device.compute.run(fail, "divide")
        device.compute.record(event)
        with pytest.raises(DeviceError, match=r"'divide' on compute.*by purpose") as caught:
            device.compute.synchronize(LONG_S)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        buffer = device.host_empty([2], torch.float32, pinned=False)
        for call in (
            lambda: device.copy.synchronize(LONG_S),
            lambda: device.copy.run(lambda: None, "later"),
            lambda: device.copy.record(device.event()),
            event.query,
            lambda: event.synchronize(LONG_S),
            lambda: device.copy_h2d(torch.zeros(2), buffer, device.copy, "copy"),
        ):
            with pytest.raises(DeviceError, match="by purpose"):
                call()
        assert all(thread.is_alive() for thread in threads_of(device))


def test_an_error_releases_streams_and_hosts_that_wait() -> None:
    gate, raised = Gate(), list[BaseException]()
    with opened() as device:
        never = device.event()
        device.compute.run(gate, "gate")
        device.compute.run(fail, "divide")
        device.compute.record(never)
        device.copy.wait(never)
        device.copy.run(lambda: raised.append(AssertionError("ran after an error")), "later")

        def host() -> None:
            try:
                device.copy.synchronize(LONG_S)
            except DeviceError as error:
                raised.append(error)

        waiting = in_thread(host)
        gate.open()
        joined(waiting)
    assert [type(error) for error in raised] == [DeviceError]
    assert not any(thread.is_alive() for thread in threads_of(device))


def test_only_the_first_error_is_kept() -> None:
    with opened() as device:
        for stream in (device.compute, device.copy):
            with pytest.raises(DeviceError, match="'divide' on compute"):
                stream.run(fail, "divide")
                stream.synchronize(LONG_S)


def test_closing_a_hung_device_ends_all_threads() -> None:
    with opened() as device:
        flag, event = device.external_event("never"), device.event()
        with device.capture("stuck") as graph:
            device.host_op(lambda args: None, (1,), flag, "attention")
        device.replay(graph)
        device.compute.record(event)
        for stream in (device.copy, device.comm, device.update):
            stream.wait(event)
        raised: list[str] = []

        def host() -> None:
            try:
                device.update.synchronize(LONG_S)
            except DeviceError as error:
                raised.append(str(error))

        waiting = in_thread(host)
        with pytest.raises(DeviceTimeout):
            device.comm.synchronize(SHORT_S)
        device.close(LONG_S)
        joined(waiting)
        assert not any(thread.is_alive() for thread in threads_of(device))
        assert raised and "closed" in raised[0]
        with pytest.raises(DeviceError, match="closed"):
            device.compute.run(lambda: None, "late")


def test_close_names_a_thread_that_it_cannot_end() -> None:
    gate = Gate()
    with opened() as device:
        device.comm.run(gate, "a call into a library")
        gate.await_reached()
        with pytest.raises(DeviceTimeout, match=r"^hangrig-comm did not end"):
            device.close(SHORT_S)
        gate.open()


# --- the ledger and the fault sites


def test_the_ledger_has_each_operation_with_its_site(tmp_path: Path) -> None:
    gate = Gate()
    path = tmp_path / "rank0.ledger"
    ledger = LedgerWriter.create(path, rank=0, world=1, node="here", device="sim")
    with opened(ledger=ledger, stamp_interval_s=0.001) as device:
        event = device.event()
        device.compute.run(lambda: None, "first")
        device.compute.run(gate, "second")
        device.compute.record(event)
        device.copy.wait(event)
        device.copy_h2d(
            device.empty([1], torch.float32), buffer_of(device, [1.0], pinned=True), device.copy, "tokens"
        )
        gate.await_reached()
        reader = LedgerReader.open(path)
        before = reader.snapshot()
        compute, copy = before.streams["compute"], before.streams["copy"]
        assert (compute.enqueued, compute.completed) == (2, 1)
        assert compute.oldest is not None and compute.oldest.label == "second"
        assert compute.oldest.site.startswith("tests/test_sim_device.py:")
        assert copy.oldest is not None and copy.oldest.label == "event.wait"
        assert (copy.enqueued, copy.completed) == (2, 0)
        assert any(reader.snapshot().streams["update"].stamp_ns for _ in range(100_000)), "nobody stamped"
        waits = []
        for wait_for in (event.synchronize, device.copy.synchronize):
            with pytest.raises(DeviceTimeout):
                wait_for(SHORT_S)
            waits.append(reader.snapshot().host_wait())
        assert [wait and (wait.stream, wait.sequence) for wait in waits] == [("compute", 2), ("copy", 2)]
        gate.open()
        device.copy.synchronize(LONG_S)
        assert reader.snapshot().host_wait() is None
        after = reader.snapshot()
        assert (after.streams["compute"].completed, after.streams["copy"].completed) == (2, 2)
        assert [one.label for one in after.streams["copy"].recent] == ["event.wait", "tokens"]
        reader.close()
    ledger.close()


def test_an_operation_that_failed_stays_the_oldest(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ledger"
    ledger = LedgerWriter.create(path, rank=0, world=1, node="here", device="sim")
    with opened(ledger=ledger) as device:
        device.comm.run(fail, "all_reduce")
        with pytest.raises(DeviceError):
            device.comm.synchronize(LONG_S)
        reader = LedgerReader.open(path)
        oldest = reader.snapshot().streams["comm"].oldest
        assert oldest is not None and oldest.label == "all_reduce"
        reader.close()
    ledger.close()


def test_sites_are_passed_where_the_delay_must_be() -> None:
    passed: list[tuple[str, str]] = []

    class Names:
        def visit(self, passing: Passing) -> None:
            passed.append((passing.site, threading.current_thread().name))

    with opened() as device, visiting(Names()):
        event, flag = device.event(), device.external_event("layer 0")
        on_device = device.empty([1], torch.float32)
        buffer = buffer_of(device, [1.0], pinned=True)
        device.copy_h2d(on_device, buffer, device.compute, "there")
        device.compute.record(event)
        device.copy.wait(event)
        device.copy_d2h(buffer, on_device, device.copy, "back")
        device.copy.synchronize(LONG_S)
        with device.capture("step") as graph:
            device.host_op(lambda args: None, (), flag, "attention")
        device.graph_update(graph, [()], event)
        device.replay(graph)
        device.compute.synchronize(LONG_S)
    assert set(passed) == {
        ("copy.h2d", "hangrig-compute"),
        ("event.record", "hangrig-compute"),
        ("event.wait", "hangrig-copy"),
        ("copy.d2h", "hangrig-copy"),
        ("event.wait", "hangrig-update"),
        ("graph.update", "hangrig-update"),
        ("event.record", "hangrig-update"),
        ("graph.replay", "hangrig-compute"),
        ("event.wait", "hangrig-compute"),
    }


def test_an_error_in_a_visitor_is_a_device_error() -> None:
    class Broken:
        def visit(self, passing: Passing) -> None:
            raise OSError("link down")

    with opened() as device, visiting(Broken()):
        device.copy_h2d(
            device.empty([1], torch.float32),
            buffer_of(device, [1.0], pinned=True),
            device.compute,
            "there",
        )
        with pytest.raises(DeviceError, match="link down"):
            device.compute.synchronize(LONG_S)


# --- options


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"memory_model": "rocm"}, "rocm"),
        ({"defects": frozenset({"D1", "D9"})}, "D9"),
        ({"copy_gbps": 0.0}, "bandwidths"),
        ({"copy_latency_us": -1.0}, "latencies"),
        ({"stamp_interval_s": 0.0}, "stamp_interval_s"),
    ],
)
def test_options_that_cannot_be_are_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        SimOptions(**options)  # type: ignore[arg-type]


def test_what_it_cannot_show_is_said() -> None:
    assert "no evidence about hardware" in CANNOT_SHOW


def test_two_devices_do_not_share_streams() -> None:
    gate = Gate()
    with opened() as one, opened() as other:
        one.compute.run(gate, "gate")
        order = itertools.count()
        other.compute.run(lambda: next(order), "note")
        other.compute.synchronize(LONG_S)
        assert next(order) == 1
        gate.open()
