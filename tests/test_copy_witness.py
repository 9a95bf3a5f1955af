"""The copy witness against each way in which a copy goes wrong, at gates that make the order exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sim_rig import LONG_S, Gate, in_thread, joined, opened

from harness.devices.sim import SimDevice
from serving.copy_witness import CopyWitness, WrongCopy
from serving.transfer import POLICIES, PinnedPolicy, Transfers

STEP = 7


def watched(device: SimDevice, policy: PinnedPolicy = "pinned") -> tuple[Transfers, CopyWitness]:
    witness = CopyWitness(device)
    witness.step = STEP
    return Transfers(device, policy, wait_s=LONG_S, witness=witness), witness


def values(*numbers: int) -> Callable[[torch.Tensor], object]:
    return lambda host: host.copy_(torch.tensor(numbers, dtype=host.dtype))


def drained(device: SimDevice, witness: CopyWitness) -> list[WrongCopy]:
    device.compute.synchronize(LONG_S)
    device.copy.synchronize(LONG_S)
    return witness.settle()


def fetch(device: SimDevice, transfers: Transfers, source: torch.Tensor) -> Any:
    ready = device.event()
    device.compute.record(ready)
    return transfers.to_host(source, ready, "next_token_copy")


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_that_bring_what_they_should_say_nothing(policy: PinnedPolicy) -> None:
    with opened() as device:
        transfers, witness = watched(device, policy)
        target = device.empty((3,), torch.int64)
        for number in range(4):
            transfers.to_device(target, values(number, 2, 3), "metadata_copy")
            fetched = fetch(device, transfers, target)
            fetched.done.synchronize(LONG_S)
            assert transfers.values(fetched) == [number, 2, 3]
            transfers.release(fetched)
        assert drained(device, witness) == []


def test_a_source_that_is_written_again() -> None:
    """D2: the second fill goes into the array that the first copy has still to read."""
    gate = Gate()
    with opened(defects=frozenset({"D2"})) as device:
        transfers, witness = watched(device)
        first, second = (device.empty((2,), torch.int64) for _ in range(2))
        device.compute.run(gate, "earlier work")
        transfers.to_device(first, values(1, 5), "metadata_copy")
        transfers.to_device(second, values(2, 5), "metadata_copy")
        gate.open()
        assert drained(device, witness) == [WrongCopy("metadata_copy", STEP, "compute", 1, 2)]


def test_a_consumer_that_comes_before_the_copy() -> None:
    """D3: the copy runs on an engine beside the stream, which does not wait for it."""
    with opened(defects=frozenset({"D3"}), copy_latency_us=200_000.0) as device:
        transfers, witness = watched(device)
        transfers.to_device(device.empty((2,), torch.int64), values(1, 2), "token_count_copy")
        device.compute.run(lambda: None, "consumer")
        device.compute.synchronize(LONG_S)
        assert witness.settle() == [WrongCopy("token_count_copy", STEP, "compute", 2, 2)]


def test_a_result_that_the_host_reads_too_early() -> None:
    """D5: what was read is held against the device's values, when those are there."""
    gate = Gate()
    with opened() as device:
        transfers, witness = watched(device)
        source = device.empty((1,), torch.int64)
        device.compute.run(gate, "earlier work")
        device.compute.run(lambda: source.fill_(9), "sample")
        fetched = fetch(device, transfers, source)
        assert transfers.values(fetched) == [0]
        assert witness.settle() == [], "nothing is known yet"
        transfers.release(fetched)
        gate.open()
        assert drained(device, witness) == [WrongCopy("next_token_copy", STEP, "copy", 1, 1)]


def test_a_source_on_the_device_that_is_written_while_the_copy_reads_it() -> None:
    """D6: the next step's tokens come without a fence behind the copy."""
    gate = Gate()
    with opened() as device:
        transfers, witness = watched(device)
        source = device.empty((1,), torch.int64)
        device.compute.run(lambda: source.fill_(3), "sample")
        device.copy.run(gate, "other traffic")
        fetched = fetch(device, transfers, source)
        device.compute.run(lambda: source.fill_(4), "sample of the next step")
        device.compute.synchronize(LONG_S)
        gate.open()
        fetched.done.synchronize(LONG_S)
        assert transfers.values(fetched) == [4]
        transfers.release(fetched)
        assert drained(device, witness) == [WrongCopy("next_token_copy", STEP, "copy", 1, 1)]


def test_the_witness_waits_for_nothing() -> None:
    gate = Gate()
    with opened() as device:
        transfers, witness = watched(device)
        device.compute.run(gate, "earlier work")

        def step() -> None:
            transfers.to_device(device.empty((1,), torch.int64), values(1), "metadata_copy")
            transfers.release(fetch(device, transfers, device.empty((1,), torch.int64)))
            assert witness.settle() == []

        joined(in_thread(step))  # with compute at the gate
        gate.open()
        assert drained(device, witness) == []
