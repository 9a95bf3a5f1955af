"""What a real device and the software under it are, for reports.

Asked of torch's module, in a process that may use the device. Not here: what the platform can do
(``device_facts.py``), and the vendors' tools (``environment.py``, whose drivers are repeated here).
"""

from __future__ import annotations

from importlib import import_module

import torch

from harness.devices.opening import device_module
from harness.environment import driver_readings
from harness.machine import package_version


def platform_facts(kind: str, index: int = 0) -> dict[str, str | None]:
    """``device_name``, ``driver``, ``cuda``, ``cann``, ``torch`` and ``torch_npu``; None for what does not apply or
    cannot be had. Raises DeviceUnavailable."""
    module = device_module(kind)
    readings = {one.name: one.value for one in driver_readings()}
    return {
        "device_name": module.get_device_name(index),
        "driver": readings.get("nvidia driver" if kind == "cuda" else "ascend driver"),
        "cuda": (torch.version.cuda or torch.version.hip) if kind == "cuda" else None,
        "cann": (_loaded_cann() or readings.get("cann")) if kind == "npu" else None,
        "torch": torch.__version__,
        "torch_npu": package_version("torch_npu") if kind == "npu" else None,
    }


def _loaded_cann() -> str | None:
    """The CANN that torch_npu runs with: ``torch_npu.npu.utils.get_cann_version`` (wheels 2.7.1 and 2.14.0)."""
    try:
        said = import_module("torch_npu.npu.utils").get_cann_version()
    except (ImportError, AttributeError, RuntimeError):
        return None
    return str(said) or None
