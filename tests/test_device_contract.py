"""The contract of devices on the simulated one, and on CUDA's and Ascend's over fakes of their modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from device_contract import LONG_S, DeviceContract, Rig
from fake_rig import opened_fake
from sim_rig import FAST, Gate

from harness.devices.base import Stream
from harness.devices.sim import SimDevice, SimOptions
from harness.ledger import LedgerWriter


def held_by(gate_into: Callable[[Stream, Gate], None], stream: Stream) -> Callable[[], None]:
    gate = Gate()
    gate_into(stream, gate)
    gate.await_reached()
    return gate.open


@pytest.fixture(params=["sim", "cuda", "npu"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    path = tmp_path / "rank0.ledger"
    ledger = LedgerWriter.create(path, rank=0, world=1, node="here", device=request.param)
    if request.param == "sim":
        device = SimDevice(SimOptions(**FAST, host_timeout_s=LONG_S, stamp_interval_s=0.001), ledger)
        try:
            yield Rig(device, partial(held_by, lambda stream, gate: stream.run(gate, "gate")), path)
        finally:
            device.close(LONG_S)
    else:
        with opened_fake(request.param, ledger) as (device, fake):
            hold = partial(held_by, lambda stream, gate: stream.run(lambda: fake.launch(gate), "gate"))
            yield Rig(device, hold, path)
    ledger.close()


class TestContract(DeviceContract):
    pass
