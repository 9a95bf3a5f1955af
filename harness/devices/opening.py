"""Opens a real accelerator by its name, or says why it cannot be: no module, no device, a forked process.

The modules of a platform are loaded here and nowhere else, at the call.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

from harness.devices.accelerator import AcceleratorDevice, Platform
from harness.devices.accelerator_memory import pinned_block
from harness.devices.base import DeviceUnavailable

if TYPE_CHECKING:
    from harness.ledger import LedgerWriter

KINDS = ("cuda", "npu")
_opened_by: set[int] = set()


def open_device(
    kind: str, index: int, *, rank: int, ledger: LedgerWriter | None, host_timeout_s: float
) -> AcceleratorDevice:
    """Device ``index`` of those that this process sees. Call it on the rank's host thread.

    Raises DeviceUnavailable when there is no such device or the process cannot use it, naming what to do.
    """
    module = device_module(kind)
    if not 0 <= index < module.device_count():
        raise DeviceUnavailable(
            f"rank {rank} wants {kind}:{index}, but this process sees {module.device_count()}"
            f" (numbered from 0); check {_VISIBLE[kind]} and the number of ranks"
        )
    platform = Platform(kind, module, index, torch.device(kind, index), pinned_block)
    device = _device_class(kind)(platform, ledger, host_timeout_s=host_timeout_s)
    _opened_by.add(os.getpid())
    return device


_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


def device_module(kind: str) -> Any:
    """``torch.cuda`` or ``torch.npu``, when it can be used here. Raises DeviceUnavailable."""
    if kind not in KINDS:
        raise DeviceUnavailable(f"there is no accelerator {kind!r}; known: {', '.join(KINDS)}")
    if kind == "npu":
        _load_torch_npu()
    module = torch.get_device_module(kind)
    if _in_forked_child(module):
        raise DeviceUnavailable(
            f"this process was forked from one that had used {kind}, and the driver does not survive that; start "
            "processes with multiprocessing's 'spawn' (Ray does)"
        )
    if not module.is_available():
        raise DeviceUnavailable(_why_unavailable(kind))
    return module


def _load_torch_npu() -> None:
    try:
        importlib.import_module("torch_npu")
    except ImportError as error:
        raise DeviceUnavailable(
            f"torch_npu cannot be loaded ({error}); install the version that fits torch {torch.__version__} and "
            "source CANN's set_env.sh, or run in an image that has both"
        ) from error


def _in_forked_child(module: Any) -> bool:
    """By what we opened ourselves, and by what the module knows (``_is_in_bad_fork`` of both, looked up here)."""
    if _opened_by and os.getpid() not in _opened_by:
        return True
    return bool(module._is_in_bad_fork())


def _why_unavailable(kind: str) -> str:
    if kind == "cuda" and torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA; install a CUDA build, or use --device sim"
    return f"torch finds no usable {kind} device; `hangrig doctor --device {kind}` says what is missing"


def _device_class(kind: str) -> type[AcceleratorDevice]:
    if kind == "cuda":
        from harness.devices.cuda import CudaDevice

        return CudaDevice
    from harness.devices.npu import NpuDevice

    return NpuDevice
