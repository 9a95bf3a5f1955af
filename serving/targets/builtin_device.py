"""The device of one rank: which one it is, how a trial opens it, and what it holds when a trial is over.

The only place of the engine that tells the simulated device from a real one.

Not here: what a rank does with it (``builtin_rank.py``), the devices themselves (``harness.devices``).
"""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from harness.devices.base import Device, DeviceTimeout
from harness.devices.opening import device_module, open_device
from harness.devices.sim import SimDevice, SimOptions
from harness.devices.sim_cores import CoreOptions
from harness.held_devices import held, local_index
from harness.ledger import LedgerWriter
from harness.target import TrialSpec
from serving.model_config import ModelConfig, ModelError
from serving.weights import stored_dtype, tensor_shapes

_GIB = 2**30
SLACK_BYTES = 2**28
"""What may be in use beyond what the first trial left: libraries keep workspaces and compiled kernels."""
_LARGE = frozenset({"lite"})
_POLL_S = 1e-3


@dataclass(frozen=True, slots=True)
class RankDevice:
    """``label``: as reports name it."""

    kind: str
    label: str
    index: int
    tensors: torch.device

    @property
    def simulated(self) -> bool:
        return self.kind == "sim"

    def settle(self, timeout_s: float) -> None:
        """Waits until what was enqueued outside any trial is done: the streams of a trial are not ordered behind
        it. Raises DeviceTimeout."""
        if self.simulated:
            return
        module = device_module(self.kind)
        done, deadline_s = module.Event(), time.monotonic() + timeout_s
        done.record(module.current_stream())
        while not done.query():
            if time.monotonic() > deadline_s:
                raise DeviceTimeout(f"{self.label} did not finish loading weights within {timeout_s:g} s")
            time.sleep(_POLL_S)

    def open(self, spec: TrialSpec, rank: int, ledger: LedgerWriter | None) -> Device:
        """A new device for one trial."""
        if self.simulated:
            return SimDevice(_sim_options(spec, rank), ledger, rank)
        return open_device(self.kind, self.index, rank=rank, ledger=ledger, host_timeout_s=spec.timeout_s)

    def dtype(self, model: Mapping[str, Any]) -> torch.dtype:
        """Of weights and activations: float32 in a simulation and for the small presets, whose tokens are compared
        for equality (a changed batch flips one now and then in bfloat16: DESIGN.md); else what a directory stores,
        and bfloat16 for a preset of a real model's size."""
        if self.simulated:
            return torch.float32
        if model.get("directory"):
            return stored_dtype(Path(model["directory"]))
        return torch.bfloat16 if model.get("preset") in _LARGE else torch.float32

    def check_room(self, config: ModelConfig, experts: range, dtype: torch.dtype) -> None:
        """Raises ModelError when a real device has less free memory than this rank's weights take."""
        if self.simulated:
            return
        free, _ = device_module(self.kind).mem_get_info(self.index)
        needed = dtype.itemsize * sum(math.prod(shape) for shape in tensor_shapes(config, experts).values())
        if needed > free:
            raise ModelError(
                f"this rank's weights take {needed / _GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
                f"{self.label} has {free / _GIB:.1f} GiB free; use more ranks, a smaller model, or find what else "
                "is on the device"
            )


def rank_device(kind: str, rank: int) -> RankDevice:
    """Selects the device on this thread. Raises DeviceUnavailable or ValueError when this process has none."""
    if kind == "sim":
        return RankDevice(kind, f"{kind}:{rank}", 0, torch.device("cpu"))
    index = local_index(kind)
    device_module(kind).set_device(index)
    name = next(iter(held()), str(index))
    return RankDevice(kind, f"{kind}:{name}", index, torch.device(kind, index))


class Leftovers:
    """What a rank's trials leave behind, from one to the next. Beyond the first trial libraries may keep
    ``SLACK_BYTES``: cuBLAS holds a workspace for each stream that it met, from torch's own allocator, and each
    trial has new streams."""

    def __init__(self) -> None:
        self._floor_bytes: int | None = None

    def of(self, device: Device, *, simulated: bool) -> list[str]:
        """After the device was closed and the engine is gone; empty is good."""
        memory = device.memory()
        found = []
        if memory.host_pinned_bytes or memory.host_pageable_bytes:
            found.append(
                f"host blocks still handed out: {memory.host_pinned_bytes} bytes pinned, "
                f"{memory.host_pageable_bytes} bytes pageable"
            )
        if not simulated:
            gc.collect()  # an engine and its parts refer to each other
            found += self._grown(device.memory().device_bytes)
        threads = [t.name for t in threading.enumerate() if t.name.startswith("hangrig-")]
        if threads:
            found.append(f"threads still alive: {', '.join(threads)}")
        return found

    def _grown(self, in_use: int) -> list[str]:
        floor = self._floor_bytes
        if floor is None:
            self._floor_bytes = in_use
            return []
        if in_use <= floor + SLACK_BYTES:
            return []
        return [f"device memory: {in_use} bytes in use after the trial, {floor} after the first one"]


def _sim_options(spec: TrialSpec, rank: int) -> SimOptions:
    sim = spec.sim
    return SimOptions(
        memory_model=sim["memory_model"],
        copy_latency_us=sim["copy_latency_us"],
        copy_gbps=sim["copy_gbps"],
        host_timeout_s=spec.timeout_s,
        cores=CoreOptions(
            total=sim["cores"],
            collective=sim["collective_cores"],
            part_us=sim["collective_part_us"],
            cooperative=tuple(sim["cooperative"]),
        ),
        defects=frozenset(defect["name"] for defect in sim["defects"] if rank in defect["ranks"]),
    )
