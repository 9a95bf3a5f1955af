"""A CUDA or Ascend device over the fake of its module (``fake_accelerator.py``), closed at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from fake_accelerator import LONG_S, ON_DEVICE, FakeAccelerator

from harness.devices.accelerator import AcceleratorDevice, Platform
from harness.devices.cuda import CudaDevice
from harness.devices.npu import NpuDevice
from harness.ledger import LedgerWriter

CLASSES: dict[str, type[AcceleratorDevice]] = {"cuda": CudaDevice, "npu": NpuDevice}


@contextmanager
def opened_fake(
    kind: str, ledger: LedgerWriter | None = None, *, devices: int = 2, **options: Any
) -> Iterator[tuple[AcceleratorDevice, FakeAccelerator]]:
    """On device 1 of ``devices``, so that a thread that does not select it is seen. Torch operations of the test on
    the device's tensors are enqueued, as on hardware."""
    fake = FakeAccelerator(kind, devices)
    platform = Platform(kind, fake, devices - 1, ON_DEVICE, fake.pinned)
    device = CLASSES[kind](platform, ledger, host_timeout_s=LONG_S, **options)
    try:
        # The product of large matrices takes a CPU seconds.
        with fake.host(), patch("harness.devices.npu._MATRIX", 64):
            yield device, fake
    finally:
        fake.let_go.set()
        device.close(LONG_S)
        fake.end()
