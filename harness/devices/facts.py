"""What a real device is, and whether it is back to what it was: for reports, and between trials.

Asked of torch's module in a process that has opened the device (or is about to): the figures of the allocator are
that process's own. Not here: what the platform can do (``device_facts.py``) and the vendors' tools
(``environment.py``, whose drivers are repeated here).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from harness.devices.opening import device_module
from harness.environment import driver_readings
from harness.machine import package_version

MIB = 1 << 20
SLACK_BYTES = 256 * MIB
"""What a device may have less free than before and still count as idle: libraries keep workspaces,
communicators and compiled kernels that they made in the first trial."""


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


@dataclass(frozen=True, slots=True)
class IdleFigures:
    """Bytes of one device: free and in all as the driver counts them, for all processes; what torch's allocator of
    this process has handed out."""

    free_bytes: int
    total_bytes: int
    allocated_bytes: int


def idle_figures(module: Any, index: int) -> IdleFigures:
    """``module``: ``torch.cuda`` or ``torch.npu``. What torch only caches is given back first. Call it when nothing
    runs: freeing waits for the device, without a deadline."""
    module.empty_cache()
    free, total = module.mem_get_info(index)
    allocated = module.memory_stats(index).get("allocated_bytes.all.current", 0)
    return IdleFigures(int(free), int(total), int(allocated))


def not_idle(before: IdleFigures, after: IdleFigures, slack_bytes: int = SLACK_BYTES) -> str:
    """Why the device is not back to what it was; empty when it is."""
    kept = after.allocated_bytes - before.allocated_bytes
    if kept > 0:
        return f"{kept} bytes of device memory are still held by tensors"
    missing = before.free_bytes - after.free_bytes
    if missing > slack_bytes:
        return (
            f"{missing / MIB:.0f} MiB less of {after.total_bytes / MIB:.0f} MiB are free than before"
            f" ({slack_bytes / MIB:.0f} MiB are allowed): another process, or memory that a library kept"
        )
    return ""
