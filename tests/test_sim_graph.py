"""Graphs of the simulated device: what a replay does, what a capture refuses, when arguments are taken."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from sim_rig import LONG_S, Gate, SiteGate, opened, visiting

from harness.devices.base import DeviceError
from harness.devices.sim import SimDevice
from harness.devices.sim_graph import SimGraph
from harness.ledger import LedgerReader, LedgerWriter

TOKENS, WIDTH, HEADS, SLOTS = 3, 8, 2, 16


class Layer:
    """One layer with what captures have to get right: weights, views, in-place writes into a cache."""

    def __init__(self, device: SimDevice, seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        self.up = torch.randn(2 * WIDTH, WIDTH, generator=source)
        self.down = torch.randn(WIDTH, WIDTH, generator=source)
        self.cache_SD = device.empty([SLOTS, WIDTH], torch.float32)

    def __call__(self, x_TD: torch.Tensor, slots_T: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x_TD, (WIDTH,))
        self.cache_SD[slots_T] = normed
        self.cache_SD[0].add_(1.0)
        gate, value = (normed @ self.up.t()).chunk(2, dim=-1)
        mixed = F.silu(gate) * value
        heads = mixed.view(TOKENS, HEADS, -1).transpose(0, 1)
        scores = torch.softmax(heads @ heads.transpose(1, 2), dim=-1, dtype=torch.float32)
        scores = scores.masked_fill(torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1), 0.0)
        joined = (scores @ heads).transpose(0, 1).reshape(TOKENS, WIDTH)
        weight, expert = torch.topk(joined.to(torch.float64), 2, dim=-1)
        spread = torch.zeros_like(joined).scatter_add_(1, expert, weight.to(torch.float32))
        return x_TD + F.linear(spread, self.down) + self.cache_SD.sum(0)


def step_of(layers: list[Layer], x: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> None:
    hidden = x
    for layer in layers:
        hidden = layer(hidden, slots)
    out.copy_(hidden)


def inputs(round_: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(100 + round_)
    slots = torch.randperm(SLOTS - 1, generator=source)[:TOKENS] + 1
    return torch.randn(TOKENS, WIDTH, generator=source), slots


def test_replays_equal_eager_and_run_no_python(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened() as device, torch.no_grad():
        captured, eager = ([Layer(device, seed) for seed in range(2)] for _ in range(2))
        x, slots = device.empty([TOKENS, WIDTH], torch.float32), device.empty([TOKENS], torch.int64)
        out, wanted = (device.empty([TOKENS, WIDTH], torch.float32) for _ in range(2))
        with device.capture("decode 3") as graph:
            assert device.capturing
            device.compute.run(lambda: step_of(captured, x, slots, out), "step")
        assert not device.capturing
        assert not any(layer.cache_SD.any() for layer in captured), "a capture leaves memory as it was"
        rounds = [inputs(number) for number in range(4)]
        expected = []
        for x_now, slots_now in rounds:
            step_of(eager, x_now, slots_now, wanted)
            expected.append(wanted.clone())

        def broken(*_: object) -> torch.Tensor:
            raise AssertionError("Python of the model ran on replay")

        monkeypatch.setattr(Layer, "__call__", broken)
        for (x_now, slots_now), one in zip(rounds, expected, strict=True):
            x.copy_(x_now)
            slots.copy_(slots_now)
            device.replay(graph)
            device.compute.synchronize(LONG_S)
            assert torch.equal(out, one)
        assert all(torch.equal(a.cache_SD, b.cache_SD) for a, b in zip(captured, eager, strict=True))


def test_a_replay_is_one_operation_in_order_and_opaque_work_runs_in_it(tmp_path: Path) -> None:
    path = tmp_path / "rank0.ledger"
    ledger = LedgerWriter.create(path, rank=0, world=1, node="here", device="sim")
    with opened(ledger=ledger) as device:
        x, seen = device.empty([1], torch.float32), list[float]()
        with device.capture("step") as graph:
            device.compute.run(lambda: x.add_(1.0), "add")
            device.compute.run(lambda: seen.append(x.item()), "all_reduce", opaque=True)
            device.compute.run(lambda: x.mul_(2.0), "double")
        assert seen == []
        device.compute.run(x.zero_, "zero")
        for _ in range(3):
            device.replay(graph)
        device.compute.synchronize(LONG_S)
        assert seen == [1.0, 3.0, 7.0]
        assert x.item() == 14.0
        reader = LedgerReader.open(path)
        labels = [one.label for one in reader.snapshot().streams["compute"].recent]
        assert labels == ["zero", *["graph.replay step"] * 3]
        reader.close()
    ledger.close()


@pytest.mark.parametrize("refused", [False, True])
def test_a_capture_waits_for_earlier_work_and_changes_nothing(refused: bool) -> None:
    with opened() as device:
        x = device.empty([2], torch.float32)

        def work() -> None:
            x[0] = 9.0
            x.view(2, 1)[1].mul_(3.0)
            if refused:
                x.tolist()

        device.compute.run(lambda: x.add_(5.0), "add")
        with suppress(DeviceError), device.capture("step") as graph:
            device.compute.run(work, "work")
        assert x.tolist() == [5.0, 5.0]
        assert graph.sealed is not refused
        if not refused:
            device.replay(graph)
            device.compute.synchronize(LONG_S)
            assert x.tolist() == [9.0, 15.0]


def test_views_are_not_kept_and_a_call_is_kept_once() -> None:
    with opened() as device:
        x, out = device.empty([4, 4], torch.float32), device.empty([16], torch.float32)
        with device.capture("step") as graph:
            device.compute.run(lambda: out.copy_((x.t() + 1.0).t()[None].squeeze(0).reshape(-1)), "work")
        assert graph.calls == 2


def test_graph_memory_counts_until_the_graph_goes() -> None:
    with opened() as device:
        x = device.empty([64], torch.float32)
        before = device.memory().device_bytes
        with device.capture("step") as graph:
            device.compute.run(lambda: (x + 1.0).mul_(2.0), "work")
        assert device.memory().device_bytes == before + 256
        del graph
        assert device.memory().device_bytes == before


# --- host arguments


def test_host_operations_take_the_newest_arguments_by_value() -> None:
    with opened() as device:
        seen: list[Any] = []
        flags = [device.external_event(f"layer {layer}") for layer in range(2)]
        with device.capture("step") as graph:
            for layer, flag in enumerate(flags):
                device.host_op(
                    lambda args, layer=layer: seen.append((layer, [*map(int, args[0])], args[1])),
                    (torch.zeros(2), 0),
                    flag,
                    "attention",
                )
        assert graph.host_ops == 2
        lengths, array = torch.tensor([1, 2]), numpy.array([7, 8])
        for number in (1, 2):
            device.graph_update(graph, [(lengths, number), (array, number)], None)
            lengths += 10
            array += 10
            device.replay(graph)
            device.compute.synchronize(LONG_S)
        assert seen == [
            (0, [1, 2], 1),
            (1, [7, 8], 1),
            (0, [11, 12], 2),
            (1, [17, 18], 2),
        ]


def test_an_eager_host_operation_takes_its_arguments_by_value_and_waits_for_no_event() -> None:
    gate, seen = Gate(), list[int]()
    with opened() as device:
        lengths = [3]
        device.compute.run(gate, "gate")
        device.host_op(lambda args: seen.append(args[0][0]), (lengths,), None, "eager")
        lengths[0] = 99
        gate.open()
        device.compute.synchronize(LONG_S)
    assert seen == [3]


def test_a_captured_host_operation_needs_its_event() -> None:
    with opened() as device, pytest.raises(TypeError, match="no external event"), device.capture("step"):
        device.host_op(lambda args: None, (), None, "attention")


def test_an_update_needs_one_argument_for_each_operation() -> None:
    with opened() as device:
        with device.capture("step") as graph:
            device.host_op(lambda args: None, (), device.external_event("layer 0"), "attention")
        with pytest.raises(ValueError, match="1 host operations, but 2"):
            device.graph_update(graph, [(), ()], None)


def test_a_fenced_update_binds_nothing_before_its_fence() -> None:
    gate, seen = Gate(), list[int]()
    with opened() as device:
        with device.capture("step") as graph:
            device.host_op(
                lambda args: seen.append(args[0]), (0,), device.external_event("layer 0"), "attention"
            )
        fence = device.event()
        device.graph_update(graph, [(1,)], None)
        device.compute.run(gate, "gate")
        device.replay(graph)
        device.compute.record(fence)
        device.graph_update(graph, [(2,)], fence)
        device.replay(graph)
        gate.open()
        device.compute.synchronize(LONG_S)
    assert seen == [1, 2]


# --- what a capture refuses


def refusals() -> dict[str, tuple[Callable[[torch.Tensor], object], str]]:
    return {
        "item": (lambda x: x[0].item(), "_local_scalar_dense"),
        "branch": (lambda x: 1 if x.sum() > 0 else 2, "_local_scalar_dense"),
        "tolist": (lambda x: x.tolist(), "Tensor.tolist"),
        "numpy": (lambda x: x.numpy(), "Tensor.numpy"),
        "asarray": (numpy.asarray, "Tensor.__array__"),
        "equal": (lambda x: torch.equal(x, x), "aten.equal"),
        "nonzero": (lambda x: x.nonzero(), "aten.nonzero"),
        "mask": (lambda x: x[x > 0], "with a mask"),
        "mask write": (lambda x: x.__setitem__(x == 0, torch.ones(4)), "with a mask"),
        "unique": (lambda x: x.unique(), "shape that depends on data"),
        "random": (lambda x: x + torch.rand(4), "aten.rand"),
        "multinomial": (lambda x: torch.multinomial(x + 1.0, 1), "aten.multinomial"),
        "from Python": (lambda x: x + torch.tensor([1.0, 2.0, 3.0, 4.0]), "made from Python values"),
        "resize": (lambda x: torch.zeros(0).resize_(4), "aten.resize_"),
    }


@pytest.mark.parametrize("name", refusals())
def test_a_capture_refuses_what_has_no_static_form(name: str) -> None:
    op, named = refusals()[name]
    with opened() as device:
        x = device.empty([4], torch.float32)
        with pytest.raises(DeviceError, match=named), device.capture("step") as graph:
            device.compute.run(lambda: op(x), "work")
        assert not device.capturing
        with pytest.raises(DeviceError, match="not completed"):
            device.replay(graph)
        device.compute.run(lambda: None, "the device still works")
        device.compute.synchronize(LONG_S)


def test_a_refusal_that_the_engine_swallowed_comes_again_at_the_end() -> None:
    with opened() as device:
        x, swallowed = device.empty([4], torch.float32), 0
        with pytest.raises(DeviceError, match="_local_scalar_dense"), device.capture("step"):
            try:
                device.compute.run(x[0].item, "work")
            except DeviceError:
                swallowed += 1
        assert swallowed == 1


ALLOWED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fused attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 2, 2)] * 3).reshape(-1),
    "index by integers": lambda x: x[torch.arange(4).flip(0)],
    "fill by mask": lambda x: x.clone().masked_fill_(x > 0, 3.0),
    "write by mask": lambda x: torch.index_put(x, (x > 0,), torch.zeros(())),
    "part": lambda x: x.clone().view(2, 2)[:, 1].fill_(2.0).repeat(2),
    "not a number": lambda x: (x / 0.0).nan_to_num(5.0),
    "sort": lambda x: x.sort(stable=True).values,
    "mixed types": lambda x: x.to(torch.bfloat16).mul(3).to(torch.float32),
    "empty": lambda x: torch.empty(4).copy_(x),
    "two results": lambda x: torch.cat(torch.var_mean(x.view(2, 2), dim=0)),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_replay_gives_what_eager_gives(name: str) -> None:
    op = ALLOWED[name]
    with opened() as device:
        x, out = device.empty([4], torch.float32), device.empty([4], torch.float32)
        with device.capture("step") as graph:
            device.compute.run(lambda: out.copy_(op(x)), "work")
        for seed in range(3):
            x.copy_(torch.randn(4, generator=torch.Generator().manual_seed(seed)))
            device.replay(graph)
            device.compute.synchronize(LONG_S)
            assert torch.equal(out, op(x))


def in_capture() -> dict[str, Callable[[SimDevice, SimGraph], object]]:
    return {
        "record": lambda device, graph: device.compute.record(device.event()),
        "wait": lambda device, graph: device.compute.wait(device.event()),
        "synchronize": lambda device, graph: device.compute.synchronize(LONG_S),
        "copy": lambda device, graph: device.copy_h2d(
            torch.zeros(1), device.host_empty([1], torch.float32, pinned=True), device.compute, "copy"
        ),
        "replay": lambda device, graph: device.replay(graph),
        "update": lambda device, graph: device.graph_update(graph, [], None),
        "capture": lambda device, graph: device.capture("inner").__enter__(),
    }


@pytest.mark.parametrize("name", in_capture())
def test_what_is_no_captured_work_is_refused(name: str) -> None:
    with opened() as device:
        with device.capture("first") as graph:
            pass
        with pytest.raises(DeviceError, match="capture"), device.capture("second"):
            in_capture()[name](device, graph)


def test_other_streams_go_on_during_a_capture() -> None:
    with opened() as device:
        seen: list[str] = []
        with device.capture("step"):
            device.copy.run(lambda: seen.append("copy"), "note")
            device.copy.synchronize(LONG_S)
        assert seen == ["copy"]


def test_an_error_in_a_replay_names_the_captured_operation() -> None:
    def fail() -> None:
        raise OSError("link down")

    with opened() as device:
        with device.capture("step") as graph:
            device.compute.run(lambda: None, "nothing")
            device.compute.run(fail, "layer 3 all_reduce", opaque=True)
        device.replay(graph)
        with pytest.raises(DeviceError, match=r"graph\.replay step.*link down.*layer 3 all_reduce"):
            device.compute.synchronize(LONG_S)


def test_a_replay_waits_for_its_update() -> None:
    gate = Gate()
    with opened() as device:
        seen: list[int] = []
        with device.capture("step") as graph:
            device.host_op(
                lambda args: seen.append(args[0]), (0,), device.external_event("layer 0"), "attention"
            )
        with visiting(SiteGate("graph.update", gate)):
            device.replay(graph)
            device.graph_update(graph, [(4,)], None)
            gate.await_reached()
            assert seen == []
            gate.open()
            device.compute.synchronize(LONG_S)
        assert seen == [4]
