"""The four ways of a host-device copy, each at a gate that holds the stream where the test wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sim_rig import LONG_S, Gate, SiteGate, in_thread, joined, opened, visiting

from harness.devices.base import DeviceTimeout, Event
from harness.devices.sim import SimDevice
from serving.transfer import POLICIES, PinnedPolicy, Transfers

SHORT_S = 0.05
"""Deadline of waits that must not succeed."""


def values(*numbers: int) -> Callable[[torch.Tensor], object]:
    return lambda host: host.copy_(torch.tensor(numbers, dtype=host.dtype))


def recorded(device: SimDevice) -> Event:
    event = device.event()
    device.compute.record(event)
    return event


def is_blocked(call: Callable[[], None], gate: Gate) -> bool:
    """Whether ``call`` waits for what stands at the gate; opens the gate and lets it end."""
    thread = in_thread(call)
    thread.join(SHORT_S)
    blocked = thread.is_alive()
    gate.open()
    joined(thread)
    return blocked


def test_the_policies_are_those_of_the_toggle() -> None:
    assert POLICIES == ("pageable", "pinned", "pinned_sync", "pinned_snapshot")


@pytest.mark.parametrize("model", ["cuda", "cann"])
@pytest.mark.parametrize("policy", POLICIES)
def test_values_arrive_and_every_block_comes_back(policy: PinnedPolicy, model: str) -> None:
    with opened(memory_model=model) as device:
        transfers = Transfers(device, policy, wait_s=LONG_S)
        target = device.empty((3,), torch.int64)
        for number in range(5):
            transfers.to_device(target, values(number, 2, 3), "metadata_copy")
            fetched = transfers.to_host(target, recorded(device), "next_token_copy")
            fetched.done.synchronize(LONG_S)
            assert fetched.tensor.tolist() == [number, 2, 3]
            assert fetched.buffer.pinned == (policy != "pageable")
            transfers.release(fetched)
        memory = device.memory()
    assert (memory.host_pinned_bytes, memory.host_pageable_bytes) == (0, 0)


def test_each_path_is_accounted_for() -> None:
    with opened() as device:
        transfers = Transfers(device, "pinned", wait_s=LONG_S)
        counts, mask = device.empty((2,), torch.int64), device.empty((3, 16), torch.int32)
        for _ in range(4):
            transfers.to_device(counts, values(1, 2), "token_count_copy")
        transfers.to_device(mask, lambda host: host.fill_(-1), "bitmask_copy")
        transfers.release(transfers.to_host(counts, recorded(device), "next_token_copy"))
        paths = transfers.paths
    assert {name: (len(path.host_us), path.nbytes) for name, path in paths.items()} == {
        "token_count_copy": (4, 4 * 16),
        "bitmask_copy": (1, 3 * 16 * 4),
        "next_token_copy": (1, 16),
    }
    assert all(us > 0.0 for path in paths.values() for us in path.host_us)


@pytest.mark.parametrize(
    ("policy", "model", "waits"),
    [
        ("pageable", "cann", True),  # the accidental barrier
        ("pageable", "cuda", False),
        ("pinned", "cann", False),
        ("pinned", "cuda", False),
        ("pinned_sync", "cann", True),
        ("pinned_sync", "cuda", True),
        ("pinned_snapshot", "cann", False),
    ],
)
def test_what_a_copy_to_the_device_waits_for(policy: PinnedPolicy, model: str, waits: bool) -> None:
    gate = Gate()
    with opened(memory_model=model) as device:
        transfers = Transfers(device, policy, wait_s=LONG_S)
        target = device.empty((1,), torch.int64)
        device.compute.run(gate, "earlier work")
        assert is_blocked(lambda: transfers.to_device(target, values(7), "token_count_copy"), gate) == waits
        device.compute.synchronize(LONG_S)
        assert target.tolist() == [7]


@pytest.mark.parametrize(("policy", "waits"), [("pinned", False), ("pinned_sync", True), ("pageable", True)])
def test_what_a_copy_to_the_host_waits_for(policy: PinnedPolicy, waits: bool) -> None:
    gate, made = Gate(), []
    with opened(memory_model="cann") as device:
        transfers = Transfers(device, policy, wait_s=LONG_S)
        source = device.empty((1,), torch.int64)
        device.compute.run(gate, "earlier work")
        device.compute.run(lambda: source.fill_(9), "sample")
        ready = recorded(device)
        assert is_blocked(lambda: made.append(transfers.to_host(source, ready, "n")), gate) == waits
        made[0].done.synchronize(LONG_S)
        assert made[0].tensor.tolist() == [9]
        transfers.release(made[0])


def test_a_copy_to_the_host_is_not_done_before_its_source_is_ready() -> None:
    gate = Gate()
    with opened() as device:
        transfers = Transfers(device, "pinned", wait_s=LONG_S)
        source = device.empty((1,), torch.int64)
        device.compute.run(gate, "earlier work")
        fetched = transfers.to_host(source, recorded(device), "next_token_copy")
        assert not fetched.done.query()
        gate.open()
        fetched.done.synchronize(LONG_S)
        transfers.release(fetched)


@pytest.mark.parametrize("policy", ["pinned_sync"])
def test_the_synchronisation_has_a_deadline(policy: PinnedPolicy) -> None:
    gate = Gate()
    with opened() as device:
        transfers = Transfers(device, policy, wait_s=SHORT_S)
        device.compute.run(gate, "earlier work")
        with pytest.raises(DeviceTimeout, match="stream compute was not done after"):
            transfers.to_device(device.empty((1,), torch.int64), values(1), "metadata_copy")
        gate.open()


@pytest.mark.parametrize(
    ("policy", "seen"), [("pinned", [2, 2]), ("pinned_snapshot", [1, 2]), ("pinned_sync", [1, 2])]
)
def test_a_private_block_saves_the_values_of_a_source_that_is_reused(
    policy: PinnedPolicy, seen: list[int]
) -> None:
    """Defect D2: the second fill overwrites the source of the first copy, which is still pending."""
    gate = Gate()
    with opened(defects=frozenset({"D2"})) as device:
        transfers = Transfers(device, policy, wait_s=LONG_S)
        first, second = (device.empty((1,), torch.int64) for _ in range(2))
        if policy != "pinned_sync":
            device.compute.run(gate, "earlier work")
        transfers.to_device(first, values(1), "metadata_copy")
        transfers.to_device(second, values(2), "metadata_copy")
        gate.open()
        device.compute.synchronize(LONG_S)
        assert [first.item(), second.item()] == seen


def test_the_source_of_a_snapshot_is_free_at_once_and_the_private_block_only_after_the_copy() -> None:
    gate = Gate()
    with opened() as device:
        transfers = Transfers(device, "pinned_snapshot", wait_s=LONG_S)
        reuses = SiteGate("none", gate)
        device.compute.run(gate, "earlier work")
        with visiting(reuses):
            for number in range(3):
                transfers.to_device(device.empty((1,), torch.int64), values(number), "metadata_copy")
        passed: list[dict[str, Any]] = [context for site, context in reuses.passed if site == "host.reuse"]
        gate.open()
    assert len(passed) == 2, "the same source again for the second and third copy, a new private block each"


def test_a_failed_fill_is_raised_where_it_is_made() -> None:
    def broken(host: torch.Tensor) -> None:
        raise ValueError("no such row")

    with opened() as device, pytest.raises(ValueError, match="no such row"):
        Transfers(device, "pinned", wait_s=LONG_S).to_device(device.empty((1,), torch.int64), broken, "m")
