"""Cores of the simulated device: who takes which, and how a hoarding kernel and a collective stop each other."""

from __future__ import annotations

import pytest
from sim_rig import LONG_S, Gate, opened, visiting

from harness.devices.base import DeviceTimeout
from harness.devices.sim import SimDevice
from harness.devices.sim_cores import CoreOptions
from harness.fault_model import arm, parse

SHORT_S = 0.05
COOPERATIVE = ("sample",)


def cores(**changes: object) -> CoreOptions:
    return CoreOptions(**{"total": 8, "collective": 4, "part_us": 0.0, "cooperative": COOPERATIVE, **changes})  # type: ignore[arg-type]


def carry(device: SimDevice, gate: Gate) -> None:
    """A collective on comm that stands at ``gate`` once it has all its cores."""

    def collective() -> None:
        with device.collective():
            gate()

    device.comm.run(collective, "all_reduce stats", opaque=True)


def test_a_cooperative_kernel_waits_for_a_collective_and_others_do_not() -> None:
    gate, done = Gate(), []
    with opened(cores=cores()) as device:
        carry(device, gate)
        gate.await_reached()
        device.compute.run(lambda: done.append("gemm"), "gemm")
        device.compute.synchronize(LONG_S)
        device.compute.run(lambda: done.append("sample"), "sample")
        with pytest.raises(DeviceTimeout):
            device.compute.synchronize(SHORT_S)
        assert done == ["gemm"]
        gate.open()
        device.compute.synchronize(LONG_S)
        assert done == ["gemm", "sample"]


def test_two_collectives_fit_beside_each_other_and_a_kernel_that_waits_holds_nothing() -> None:
    first, second = Gate(), Gate()
    with opened(cores=cores()) as device:
        carry(device, first)
        first.await_reached()
        device.compute.run(lambda: None, "sample")

        def beside() -> None:
            with device.collective():
                second()

        device.copy.run(beside, "all_reduce experts", opaque=True)
        second.await_reached()
        second.open()
        first.open()
        for stream in (device.compute, device.copy, device.comm):
            stream.synchronize(LONG_S)


def test_a_kernel_that_holds_what_it_has_and_a_collective_that_starts_stop_each_other() -> None:
    gate = Gate()
    (hoard,) = arm([parse({"name": "hoard_cores", "times": 0})], 0, seed=1)
    slow = cores(part_us=200_000.0)
    with opened(cores=slow) as device, visiting(hoard):
        carry(device, gate)
        device.compute.run(lambda: None, "gemm")  # lets comm begin
        device.compute.synchronize(LONG_S)
        while device._cores._free == 8:
            pass
        device.compute.run(lambda: None, "sample")
        for stream in (device.compute, device.comm):
            with pytest.raises(DeviceTimeout):
                stream.synchronize(0.5)
        assert device._cores._free == 0 and not gate.reached.is_set()


def test_without_cores_nothing_is_taken() -> None:
    gate = Gate()
    with opened() as device:
        carry(device, gate)
        gate.await_reached()
        device.compute.run(lambda: None, "sample")
        device.compute.synchronize(LONG_S)
        gate.open()


@pytest.mark.parametrize("wrong", [{"total": -1}, {"collective": 8}, {"collective": 0}, {"part_us": -1.0}])
def test_numbers_that_cannot_be(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="cores"):
        cores(**wrong)
