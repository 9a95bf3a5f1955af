"""Copies and host memory of the simulated device without defects."""

from __future__ import annotations

import pytest
import torch
from sim_rig import LONG_S, Gate, SiteGate, buffer_of, opened, visiting

from harness.devices.base import DeviceError, DeviceTimeout
from harness.devices.sim_memory import CopyCost

BOTH_MODELS = pytest.mark.parametrize("model", ["cuda", "cann"])
SHORT_S = 0.02


# --- copies


@BOTH_MODELS
@pytest.mark.parametrize("pinned", [False, True])
def test_copies_carry_the_values_both_ways(model: str, pinned: bool) -> None:
    with opened(memory_model=model, copy_latency_us=50.0, host_copy_latency_us=50.0) as device:
        on_device = device.empty([4], torch.float32)
        there = buffer_of(device, [1.0, 2.0, 3.0, 4.0], pinned=pinned)
        back = device.host_empty([4], torch.float32, pinned=pinned)
        device.copy_h2d(on_device, there, device.compute, "there")
        device.compute.run(lambda: on_device.mul_(2.0), "double")
        device.copy_d2h(back, on_device, device.compute, "back")
        device.compute.synchronize(LONG_S)
        assert back.tensor.tolist() == [2.0, 4.0, 6.0, 8.0]
        assert back.pinned is pinned


def test_copies_of_other_shapes_or_types_are_refused() -> None:
    with opened() as device:
        buffer = device.host_empty([4], torch.float32, pinned=True)
        with pytest.raises(ValueError, match="must be the same"):
            device.copy_h2d(device.empty([2], torch.float32), buffer, device.compute, "copy")
        with pytest.raises(ValueError, match="must be the same"):
            device.copy_d2h(buffer, device.empty([4], torch.int64), device.compute, "copy")


HOST_GOES_ON = {
    ("cuda", "h2d", False): True,  # staged at the call
    ("cuda", "d2h", False): False,
    ("cuda", "h2d", True): True,
    ("cuda", "d2h", True): True,
    ("cann", "h2d", False): False,  # the accidental barrier
    ("cann", "d2h", False): False,
    ("cann", "h2d", True): True,
    ("cann", "d2h", True): True,
}


@pytest.mark.parametrize(("model", "way", "pinned"), HOST_GOES_ON)
def test_whether_the_host_goes_on_after_a_copy(model: str, way: str, pinned: bool) -> None:
    gate = Gate()
    with opened(memory_model=model, host_timeout_s=SHORT_S) as device:
        buffer = buffer_of(device, [1.0, 2.0], pinned=pinned)
        on_device = device.empty([2], torch.float32)
        device.compute.run(gate, "earlier work of the stream")
        gate.await_reached()

        def copy() -> None:
            if way == "h2d":
                device.copy_h2d(on_device, buffer, device.compute, "copy")
            else:
                device.copy_d2h(buffer, on_device, device.compute, "copy")

        if HOST_GOES_ON[model, way, pinned]:
            copy()
        else:
            with pytest.raises(DeviceTimeout, match="stream compute"):
                copy()
        gate.open()


def test_a_pageable_cann_copy_waits_for_its_stream_only() -> None:
    gate = Gate()
    with opened(memory_model="cann") as device:
        device.compute.run(gate, "gate")
        buffer = buffer_of(device, [1.0], pinned=False)
        on_device = device.empty([1], torch.float32)
        device.copy_h2d(on_device, buffer, device.copy, "beside")
        assert on_device.item() == 1.0
        gate.open()


@BOTH_MODELS
def test_a_pageable_source_may_be_overwritten_at_once_and_a_pinned_one_not(model: str) -> None:
    """The pinned half is no defect: it is what `non_blocking` says, and what makes D2 possible."""
    gate = Gate()
    with opened(memory_model=model) as device:
        targets = {pinned: device.empty([1], torch.float32) for pinned in (False, True)}
        for pinned in (False, True):
            buffer = buffer_of(device, [1.0], pinned=pinned)
            stream = device.compute if pinned else device.copy
            if pinned:
                stream.run(gate, "gate")
            device.copy_h2d(targets[pinned], buffer, stream, "copy")
            buffer.tensor.fill_(9.0)
        gate.open()
        device.compute.synchronize(LONG_S)
        device.copy.synchronize(LONG_S)
        assert (targets[False].item(), targets[True].item()) == (1.0, 9.0)


def test_pinned_copies_are_ordered_in_their_stream() -> None:
    gate = Gate()
    with opened() as device:
        seen: list[float] = []
        on_device = device.empty([1], torch.float32)
        with visiting(SiteGate("copy.h2d", gate)):
            device.copy_h2d(on_device, buffer_of(device, [5.0], pinned=True), device.compute, "copy")
            device.compute.run(lambda: seen.append(on_device.item()), "kernel")
            gate.await_reached()
            gate.open()
            device.compute.synchronize(LONG_S)
    assert seen == [5.0]


# --- host memory


def test_an_idle_block_is_reused_and_a_pending_one_is_not() -> None:
    gate, visitor = Gate(), SiteGate("never", Gate())
    with opened() as device, visiting(visitor):
        on_device = device.empty([3], torch.float32)
        first = buffer_of(device, [1.0, 2.0, 3.0], pinned=True)
        address = first.tensor.data_ptr()
        device.host_free(first)
        again = buffer_of(device, [1.0, 2.0, 3.0], pinned=True)
        assert again.tensor.data_ptr() == address
        device.compute.run(gate, "gate")
        device.copy_h2d(on_device, again, device.compute, "copy")
        device.host_free(again)
        other = buffer_of(device, [7.0, 7.0, 7.0], pinned=True)
        assert other.tensor.data_ptr() != address
        gate.open()
        device.compute.synchronize(LONG_S)
        assert on_device.tolist() == [1.0, 2.0, 3.0]
        once_more = device.host_empty([3], torch.float32, pinned=True)
        assert once_more.tensor.data_ptr() == address
        assert [site for site, _ in visitor.passed].count("host.reuse") == 2


def test_pools_and_size_classes_are_apart() -> None:
    with opened() as device:
        small = device.host_empty([4], torch.float32, pinned=True)
        address = small.tensor.data_ptr()
        device.host_free(small)
        for shape, pinned in (([4], False), ([4096], True)):
            assert device.host_empty(shape, torch.float32, pinned=pinned).tensor.data_ptr() != address
        assert device.host_empty([9], torch.int64, pinned=True).tensor.data_ptr() == address


def test_a_freed_buffer_cannot_be_used() -> None:
    with opened() as device:
        buffer = device.host_staging([1], torch.float32, pinned=True)
        device.host_free(buffer)
        with pytest.raises(DeviceError, match="after it was freed"):
            device.host_free(buffer)
        with pytest.raises(DeviceError, match="after it was freed"):
            device.copy_h2d(device.empty([1], torch.float32), buffer, device.compute, "copy")


def test_memory_figures_follow_what_is_held() -> None:
    with opened() as device:
        base = device.memory()
        assert (base.device_bytes, base.host_pinned_bytes, base.host_pageable_bytes) == (0, 0, 0)
        tensor = device.empty([256], torch.float32)
        view = tensor.view(2, 128)[1]
        pinned = device.host_empty([1000], torch.uint8, pinned=True)
        pageable = device.host_staging([1], torch.int64, pinned=False)
        assert (device.memory().device_bytes, device.memory().host_pinned_bytes) == (1024, 1024)
        assert device.memory().host_pageable_bytes > 0
        del tensor
        assert device.memory().device_bytes == 1024, "a view still refers to it"
        del view
        device.host_free(pinned)
        device.host_free(pageable)
        assert device.memory() == base


def test_a_copy_takes_its_modelled_time() -> None:
    assert CopyCost(latency_us=20.0, gbps=10.0).seconds(10**9) == pytest.approx(0.1 + 20e-6)
