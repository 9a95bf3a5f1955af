"""What CUDA's and Ascend's devices do beyond the contract, over fakes of their modules."""

from __future__ import annotations

import inspect
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from device_contract import LONG_S, SHORT_S, until
from fake_accelerator import FakeAccelerator, FakeEvent, FakeGraph, FakeStream
from fake_rig import opened_fake
from sim_rig import Gate, visiting

from harness.devices import opening
from harness.devices.accelerator import AcceleratorDevice
from harness.devices.base import (
    STREAM_NAMES,
    DeviceError,
    DeviceTimeout,
    DeviceUnavailable,
    Event,
    Graph,
    HostArgs,
)
from harness.devices.facts import platform_facts
from harness.devices.heartbeats import MOST_MARKS, Heartbeats
from harness.devices.life import Life
from harness.fault_library import Block, Delay, Raise, Skip
from harness.fault_model import Armed, Fault
from harness.ledger import LedgerReader, LedgerWriter

KINDS = ("cuda", "npu")
Opened = tuple[AcceleratorDevice, FakeAccelerator]


@pytest.fixture(params=KINDS)
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    with opened_fake(request.param) as pair:
        yield pair


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[LedgerWriter]:
    made = LedgerWriter.create(tmp_path / "rank0.ledger", rank=0, world=1, node="here", device="npu")
    yield made
    made.close()


def held(opened: Opened, name: str) -> Callable[[], None]:
    """Keeps a stream busy until it is called."""
    device, fake = opened
    gate = Gate()
    getattr(device, name).run(lambda: fake.launch(gate), "gate")
    gate.await_reached()
    return gate.open


# --- host arguments of graphs, with the fence and without it


def counting(device: AcceleratorDevice, steps: int) -> tuple[Graph, torch.Tensor, torch.Tensor]:
    """A graph that writes its host argument into the next row; the rows; where the next one goes."""
    rows = device.empty((steps,), torch.int64).zero_()
    at = device.empty((1,), torch.int64).zero_()
    flag = device.external_event("attention.0")

    def write(args: HostArgs) -> None:
        rows.index_copy_(0, at, args[0])

    with device.capture("decode") as graph:
        device.host_op(write, ((0,),), flag, "attention.0")
        device.compute.run(lambda: at.add_(1), "next")
    device.compute.run(at.zero_, "start")
    return graph, rows, at


def test_on_an_npu_an_update_that_overtakes_a_replay_loses_its_record_and_the_last_replay_hangs(
    ledger: LedgerWriter,
) -> None:
    """Defect D1 of HANGS.md, as torch_npu makes it: both replays wait for one flag, that was raised twice."""
    with opened_fake("npu", ledger) as opened:
        device, _ = opened
        graph, rows, _ = counting(device, 3)
        release = held(opened, "compute")
        for step in (1, 2):
            device.graph_update(graph, [((step,),)], None)
            device.replay(graph)
        device.update.synchronize(LONG_S)
        reader = LedgerReader.open(ledger.path)
        until(lambda: reader.snapshot().external[0].records == 2)
        assert reader.snapshot().external[0].overtaken == 1
        release()
        until(lambda: reader.snapshot().external[0].waits == 1)
        assert rows.tolist()[0] == 2, "the first replay took the numbers of the second"
        with pytest.raises(DeviceTimeout):
            device.compute.synchronize(SHORT_S)
        oldest = reader.snapshot().streams["compute"].oldest
        assert oldest is not None and oldest.label == "graph.replay decode"
        reader.close()


def test_on_cuda_an_update_that_overtakes_a_replay_changes_its_numbers_and_nothing_hangs() -> None:
    with opened_fake("cuda") as opened:
        device, _ = opened
        graph, rows, _ = counting(device, 3)
        release = held(opened, "compute")
        for step in (1, 2):
            device.graph_update(graph, [((step,),)], None)
            device.replay(graph)
        device.update.synchronize(LONG_S)
        release()
        device.compute.synchronize(LONG_S)
        assert rows.tolist()[:2] == [2, 2]


def test_a_fence_keeps_each_update_behind_the_replay_before(opened: Opened) -> None:
    device, _ = opened
    graph, rows, _ = counting(device, 3)
    release = held(opened, "compute")
    fence: Event | None = None
    for step in (1, 2, 3):
        device.graph_update(graph, [((step,),)], fence)
        device.replay(graph)
        fence = device.event()
        device.compute.record(fence)
    release()
    device.compute.synchronize(LONG_S)
    assert rows.tolist() == [1, 2, 3]


def test_an_update_brings_as_many_numbers_as_were_captured(opened: Opened) -> None:
    device, _ = opened
    graph, _, _ = counting(device, 1)
    with pytest.raises(ValueError, match=r"attention.0: captured with .*\[\(1,\)\], updated with \[\(2,\)\]"):
        device.graph_update(graph, [((1, 2),)], None)
    with pytest.raises(TypeError, match="whole numbers"), device.capture("g"):
        device.host_op(lambda args: None, ("text",), device.external_event("x"), "attention")


def test_a_capture_runs_its_operations_once_before(opened: Opened) -> None:
    device, _ = opened
    x = device.empty((1,), torch.int64).zero_()
    calls = []
    with device.capture("warm") as graph:
        device.compute.run(lambda: calls.append(x.add_(1)), "add")
        assert calls == []
    device.replay(graph)
    device.compute.synchronize(LONG_S)
    assert len(calls) == 2 and x.tolist() == [2], "a warm-up, a capture, and one replay that calls nothing"


def test_an_operation_that_cannot_be_captured_is_named(opened: Opened) -> None:
    device, _ = opened

    def refuses() -> None:
        raise ValueError("no")

    told = r"the capture of 'g'.*no.*operation 'attention' of graph 'g'"
    with pytest.raises(DeviceError, match=told), device.capture("g"):
        device.compute.run(refuses, "attention")
    assert not device.capturing


# --- heartbeats


def test_more_pending_operations_than_marks_are_all_seen_to_be_done(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ledger"
    ledger = LedgerWriter.create(path, rank=0, world=1, node="here", device="cuda")
    with opened_fake("cuda", ledger) as opened:
        device, _ = opened
        told: list[int] = []
        release = held(opened, "comm")
        for number in range(2 * MOST_MARKS):
            device.comm.run(lambda: None, "note", done=lambda number=number: told.append(number))
        assert len(device._beats._marks["comm"].pending) <= MOST_MARKS
        release()
        until(lambda: told == list(range(2 * MOST_MARKS)))
        reader = LedgerReader.open(path)
        until(lambda: reader.snapshot().streams["comm"].completed == 2 * MOST_MARKS + 1)
        reader.close()
    ledger.close()


def test_the_monitor_enqueues_nothing(opened: Opened) -> None:
    """Recording an event can block with the interpreter's lock held: the host does it, never the monitor."""
    device, fake = opened
    seen: list[str] = []
    device.comm.run(
        lambda: None, "note", began=lambda: seen.append("began"), done=lambda: seen.append("done")
    )
    until(lambda: seen == ["began", "done"])
    givers = {thread for stream in fake._streams for _, thread in stream.given}
    assert givers == {threading.current_thread().name}


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_stream_uses_lives_until_it_is_seen_to_be_done(kind: str) -> None:
    """The caching allocator hands a freed block out again in the order of the stream on which it was made."""
    with opened_fake(kind, watch_interval_s=LONG_S) as opened:  # the monitor looks when the test says so
        device, _ = opened
        tensor = device.empty((4,), torch.float32)
        alive = weakref.ref(tensor)
        buffer = device.host_empty((4,), torch.float32, pinned=True)
        device.copy_d2h(buffer, tensor, device.copy, "tokens")
        del tensor
        device.copy.synchronize(LONG_S)
        device.compute.run(lambda: None, "note")
        assert alive() is not None
        device._beats.look()
        assert alive() is not None, "the monitor frees nothing: that may record events"
        device.compute.run(lambda: None, "note")
        assert alive() is None


class Scripted:
    """An event that is done from the n-th question on, whichever event of the script is asked."""

    def __init__(self, asked: Iterator[int], done_at: int) -> None:
        self._asked = asked
        self._done_at = done_at

    def record(self, stream: object) -> None:
        pass

    def query(self) -> bool:
        return next(self._asked) >= self._done_at


def test_updates_and_replays_are_told_in_the_order_in_which_they_happened() -> None:
    """Each update waits for the replay before it and each replay for its update, while the monitor asks one stream
    after the other: however far the device comes in between, an update never seems to have overtaken a replay."""
    order = [f"{what} {step}" for step in (1, 2, 3) for what in ("update", "compute")]
    for gaps in itertools.product(range(4), repeat=len(order)):
        told: list[str] = []
        asked, times = itertools.count(), itertools.accumulate(gaps)
        beats = Heartbeats(
            dict.fromkeys(STREAM_NAMES, object()),
            lambda asked=asked, times=times: Scripted(asked, next(times)),
            Life(),
            None,
            interval_s=1.0,
            enter_thread=lambda: None,
        )
        for name in order:
            beats.put(name.split()[0], 0, name, calls=[partial(told.append, name)])
        for _ in range(20):
            beats.look()
        assert told == order, gaps


def test_an_error_of_the_platform_is_the_devices_and_ends_every_wait(opened: Opened) -> None:
    device, fake = opened
    event = device.event()
    release = held(opened, "compute")
    device.compute.record(event)
    waiting = threading.Timer(0.05, setattr, (fake, "error", "an illegal memory access was encountered"))
    waiting.start()
    with pytest.raises(DeviceError, match="illegal memory access"):
        event.synchronize(LONG_S)
    release()
    with pytest.raises(DeviceError, match="illegal memory access"):
        device.compute.run(lambda: None, "later")


def test_closing_names_the_streams_that_hang_and_frees_nothing(opened: Opened) -> None:
    device, _ = opened
    release = held(opened, "comm")
    device.comm.run(lambda: None, "all_reduce experts")
    with pytest.raises(DeviceTimeout, match=r"^stream comm did not end 'gate' within"):
        device.close(SHORT_S)
    assert not device._beats.thread.is_alive()
    release()


def test_closing_gives_the_thread_back_its_stream(opened: Opened) -> None:
    device, fake = opened
    assert fake.current_stream() is device.compute.raw
    device.close(LONG_S)
    assert fake.current_stream() is fake._default


def test_a_pageable_copy_that_waits_is_announced(ledger: LedgerWriter) -> None:
    """On CANN the call itself waits for the stream: the ledger has to say for which operation, before."""
    with opened_fake("npu", ledger) as opened:
        device, _ = opened
        reader = LedgerReader.open(ledger.path)
        release = held(opened, "compute")
        buffer = device.host_empty((1,), torch.float32, pinned=False)
        there = device.empty((1,), torch.float32)
        seen: list[Any] = []

        def look() -> None:
            until(lambda: reader.snapshot().host_wait())
            seen.append(reader.snapshot().host_wait())
            release()

        looking = threading.Thread(target=look)
        looking.start()
        device.copy_h2d(there, buffer, device.compute, "tokens")
        looking.join(LONG_S)
        assert [(wait.stream, wait.sequence) for wait in seen] == [("compute", 2)]
        reader.close()


# --- faults at sites that the host passes here


def armed(fault: Fault) -> Armed:
    return Armed(fault, 0, 0, seed=0)


def test_a_delay_at_a_streams_site_keeps_the_stream_busy_and_not_the_host(opened: Opened) -> None:
    device, _ = opened
    event = device.event()
    with visiting(armed(Delay(name="delay", site="device.operation", seconds=0.3))):
        device.copy.run(lambda: None, "slow")
        device.copy.record(event)
        assert not event.query()
    event.synchronize(LONG_S)


def test_a_block_at_a_streams_site_stops_the_stream_for_ever(opened: Opened) -> None:
    device, _ = opened
    with visiting(armed(Block(name="block", site="copy.d2h"))):
        buffer = device.host_empty((1,), torch.float32, pinned=True)
        device.copy_d2h(buffer, device.empty((1,), torch.float32), device.copy, "tokens")
    with pytest.raises(DeviceTimeout, match="stream copy"):
        device.copy.synchronize(SHORT_S)
    device.compute.synchronize(LONG_S)


def test_an_exception_at_a_streams_site_is_an_error_of_the_device(opened: Opened) -> None:
    device, _ = opened
    with visiting(armed(Raise(name="raise", site="copy.h2d", message="link down"))):
        buffer = device.host_empty((1,), torch.float32, pinned=True)
        with pytest.raises(DeviceError, match=r"'tokens' on compute.*link down"):
            device.copy_h2d(device.empty((1,), torch.float32), buffer, device.compute, "tokens")


def test_a_wait_that_is_left_out_orders_nothing(opened: Opened) -> None:
    device, _ = opened
    release = held(opened, "compute")
    event = device.event()
    device.compute.record(event)
    with visiting(armed(Skip(name="skip", site="event.wait", where={"stream": "copy"}))):
        device.copy.wait(event)
    device.copy.synchronize(LONG_S)
    release()


def test_on_an_npu_a_lost_record_leaves_its_replay_waiting() -> None:
    with opened_fake("npu") as opened:
        device, _ = opened
        graph, _, _ = counting(device, 1)
        with visiting(armed(Skip(name="skip", site="event.record", where={"event": "attention.0"}))):
            device.graph_update(graph, [((1,),)], None)
            device.replay(graph)
        with pytest.raises(DeviceTimeout, match="stream compute"):
            device.compute.synchronize(SHORT_S)


# --- opening


def test_what_is_not_there_is_named_with_what_to_do() -> None:
    with pytest.raises(DeviceUnavailable, match="no accelerator 'rocm'; known: cuda, npu"):
        opening.open_device("rocm", 0, rank=0, ledger=None, host_timeout_s=1.0)
    with pytest.raises(DeviceUnavailable, match=r"torch_npu cannot be loaded.*set_env.sh"):
        opening.open_device("npu", 0, rank=0, ledger=None, host_timeout_s=1.0)


def test_without_a_usable_gpu_opening_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator("cuda", devices=0)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake)
    with pytest.raises(DeviceUnavailable, match=r"build without CUDA|no usable cuda device"):
        opening.open_device("cuda", 0, rank=0, ledger=None, host_timeout_s=1.0)
    fake.end()


def test_a_device_beyond_the_visible_ones_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator("cuda", devices=2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake)
    with pytest.raises(DeviceUnavailable, match=r"rank 3 wants cuda:2, .* sees 2 .*CUDA_VISIBLE_DEVICES"):
        opening.open_device("cuda", 2, rank=3, ledger=None, host_timeout_s=1.0)
    fake.end()


def test_a_forked_process_may_not_open_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake)
    monkeypatch.setattr(opening, "_opened_by", {os.getpid() + 1})
    with pytest.raises(DeviceUnavailable, match=r"forked.*spawn"):
        opening.device_module("cuda")
    monkeypatch.setattr(opening, "_opened_by", {os.getpid()})
    assert opening.device_module("cuda") is fake
    monkeypatch.setattr(fake, "_is_in_bad_fork", lambda: True)
    with pytest.raises(DeviceUnavailable, match=r"forked.*spawn"):
        opening.device_module("cuda")
    fake.end()


def test_facts_of_the_platform_have_every_key(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAccelerator("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: fake)
    facts = platform_facts("cuda")
    assert list(facts) == ["device_name", "driver", "cuda", "cann", "torch", "torch_npu"]
    assert facts["device_name"] == "Fake cuda" and facts["torch"] == torch.__version__
    assert facts["cann"] is facts["torch_npu"] is None
    fake.end()


# --- the fake itself


@pytest.mark.parametrize(
    ("name", "real"),
    [
        ("Stream", torch.cuda.Stream.__new__),
        ("Event", torch.cuda.Event.__new__),
        ("CUDAGraph", torch.cuda.CUDAGraph.__new__),
        ("graph", torch.cuda.graph.__init__),
        *[
            (name, getattr(torch.cuda, name))
            for name in (
                "stream", "set_stream", "current_stream", "set_device", "current_device", "device_count",
                "is_available", "get_device_name", "mem_get_info", "memory_stats", "empty_cache",
                "can_device_access_peer", "_sleep", "_is_in_bad_fork",
            )
        ],
    ],
)  # fmt: skip
def test_the_fake_of_cuda_takes_no_argument_that_torch_does_not(name: str, real: Callable[..., Any]) -> None:
    fake = FakeAccelerator("cuda")
    taken = list(inspect.signature(getattr(fake, name)).parameters)
    offered = [one for one in inspect.signature(real).parameters if one not in ("cls", "self")]
    assert len(taken) <= len(offered)
    # A first argument is only ever given by its place, so its name may differ.
    assert set(taken[1:]) <= set(offered), name
    fake.end()


@pytest.mark.parametrize(
    ("fake", "real"),
    [(FakeEvent, torch.cuda.Event), (FakeGraph, torch.cuda.CUDAGraph), (FakeStream, torch.cuda.Stream)],
)
def test_the_fakes_objects_have_no_method_that_torchs_lack(fake: type, real: type) -> None:
    # Those of the fake's machinery, and what torch's C base has in builds with CUDA.
    own = {"put", "end", "wait_for_all", "npu_stream", "cuda_stream"} if fake is FakeStream else set()
    assert {name for name in vars(fake) if not name.startswith("_")} - own <= set(dir(real))
