"""The contract of devices on a real GPU or NPU: ``pytest -m cuda tests/hardware``, or ``npu``.

Left out unless asked for by its marker; asked for where there is no such device it fails and says what is missing.
``HANGRIG_TEST_DEVICE`` is the number of the device to take (0).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from device_contract import LONG_S, DeviceContract, Rig

from harness.devices.accelerator import AcceleratorDevice
from harness.devices.base import Stream
from harness.devices.facts import platform_facts
from harness.devices.opening import device_module, open_device
from harness.ledger import LedgerWriter

INDEX = int(os.environ.get("HANGRIG_TEST_DEVICE", "0"))
TAKEN_BYTES = 1 << 30
HOLD_S = 1.0
"""How long a held stream is busy: a test looks at it well before that."""


def open_real(kind: str, ledger: LedgerWriter | None) -> AcceleratorDevice:
    return open_device(kind, INDEX, rank=0, ledger=ledger, host_timeout_s=LONG_S)


def load_kernels(rig: Rig) -> None:
    """The first use of a kernel may wait for the device; here nothing is held yet."""
    x, y = rig.tensor(1.0), rig.tensor(0.0)
    rig.device.compute.run(lambda: y.copy_(x.mul_(2.0).add_(1.0)), "load")
    rig.device.delay(rig.device.compute, 1e-3, "load")
    rig.values(y)


class OnHardware(DeviceContract):
    kind: ClassVar[str]

    @pytest.fixture
    def rig(self, tmp_path: Path) -> Iterator[Rig]:
        path = tmp_path / "rank0.ledger"
        ledger = LedgerWriter.create(path, rank=0, world=1, node="here", device=f"{self.kind}:{INDEX}")
        device = open_real(self.kind, None)
        load_kernels(Rig(device, lambda stream: lambda: None, path))
        device.close(LONG_S)
        device = open_real(self.kind, ledger)

        def hold(stream: Stream) -> Callable[[], None]:
            device.delay(stream, HOLD_S, "hold")
            return lambda: None

        try:
            yield Rig(device, hold, path)
        finally:
            device.close(LONG_S)
            ledger.close()

    def test_the_platform_says_what_it_is(self) -> None:
        facts = platform_facts(self.kind, INDEX)
        runtime = facts["cuda"] if self.kind == "cuda" else facts["cann"]
        assert facts["device_name"] and facts["driver"] and runtime, facts

    def test_a_closed_device_has_given_its_memory_back(self) -> None:
        module = device_module(self.kind)
        open_real(self.kind, None).close(LONG_S)  # the first one makes the context
        free_bytes, _ = module.mem_get_info(INDEX)
        device = open_real(self.kind, None)
        held_bytes = device.memory().device_bytes
        tensor = device.empty((TAKEN_BYTES,), torch.uint8)
        assert module.mem_get_info(INDEX)[0] <= free_bytes - TAKEN_BYTES
        del tensor
        device.close(LONG_S)
        assert module.mem_get_info(INDEX)[0] > free_bytes - TAKEN_BYTES
        assert device.memory().device_bytes == held_bytes


@pytest.mark.cuda
class TestCuda(OnHardware):
    kind = "cuda"


@pytest.mark.npu
class TestNpu(OnHardware):
    kind = "npu"
