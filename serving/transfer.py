"""Host-device copies of the hot path, in the four ways that the toggle ``pinned`` names.

``pageable``         source in pageable memory; on CANN such a copy ends in a synchronisation of its stream
``pinned``           source pinned, the host goes on at once
``pinned_sync``      pinned, then the stream is synchronised: is it the pinning or the lost barrier?
``pinned_snapshot``  pinned, the source copied into a private block first: is it the reuse of the source?

Every copy has a path name, and the time the host spent in it is kept per path: that is what pinning saves.
Not here: what the values mean (``engine.py``, ``sampling.py``), how a copy is carried out (the device), and whether
it brought what it was to bring (``copy_witness.py``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch

from harness.devices.base import Device, Event, HostBuffer
from serving.copy_witness import CopyWitness, Look

PinnedPolicy: TypeAlias = Literal["pageable", "pinned", "pinned_sync", "pinned_snapshot"]
POLICIES: tuple[PinnedPolicy, ...] = get_args(PinnedPolicy)


@dataclass(slots=True)
class HotPath:
    """What one path cost the host: microseconds of each copy, and bytes in all."""

    host_us: list[float] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """A copy to the host that is under way. ``tensor`` is valid after ``done``."""

    buffer: HostBuffer
    done: Event
    look: Look | None = None

    @property
    def tensor(self) -> torch.Tensor:
        return self.buffer.tensor


class Transfers:
    """The copies of one rank. ``wait_s`` is the deadline of the host's own waits."""

    def __init__(
        self, device: Device, policy: PinnedPolicy, *, wait_s: float, witness: CopyWitness | None = None
    ) -> None:
        self._device = device
        self._policy = policy
        self._pinned = policy != "pageable"
        self._wait_s = wait_s
        self._witness = witness
        self.paths: dict[str, HotPath] = defaultdict(HotPath)

    def to_device(self, dst: torch.Tensor, fill: Callable[[torch.Tensor], object], path: str) -> None:
        """``fill`` writes the values into the source (shape and dtype of ``dst``); copied on ``compute``.

        What ``fill`` takes is not counted: it costs the same however the copy is made.
        """
        began = time.perf_counter_ns()
        source = self._device.host_staging(dst.shape, dst.dtype, pinned=self._pinned)
        filling = time.perf_counter_ns()
        fill(source.tensor)
        began += time.perf_counter_ns() - filling
        if self._policy == "pinned_snapshot":
            private = self._device.host_empty(dst.shape, dst.dtype, pinned=True)
            private.tensor.copy_(source.tensor)
            self._device.host_free(source)
            source = private
        wanted = None if self._witness is None else source.tensor.clone()
        self._device.copy_h2d(dst, source, self._device.compute, path)
        if self._witness is not None and wanted is not None:
            self._witness.brought(wanted, dst, path)
        if self._policy == "pinned_sync":
            self._device.compute.synchronize(self._wait_s)
        self._device.host_free(source)
        self._account(path, began, dst)

    def to_host(self, src: torch.Tensor, ready: Event, path: str) -> Fetched:
        """Copies ``src`` on ``copy``, after ``ready``. The caller waits for ``done`` and then releases it."""
        began = time.perf_counter_ns()
        buffer = self._device.host_empty(src.shape, src.dtype, pinned=self._pinned)
        done = self._device.event(f"{path}.done")
        look = None if self._witness is None else self._witness.fetching(src, path)
        self._device.copy.wait(ready)
        self._device.copy_d2h(buffer, src, self._device.copy, path)
        self._device.copy.record(done)
        if self._policy == "pinned_sync":
            self._device.copy.synchronize(self._wait_s)
        self._account(path, began, src)
        return Fetched(buffer, done, look)

    def values(self, fetched: Fetched) -> list[Any]:
        """What the host finds in the copy now."""
        if self._witness is not None and fetched.look is not None:
            self._witness.read(fetched.look, fetched.tensor)
        found: list[Any] = fetched.tensor.tolist()
        return found

    def release(self, fetched: Fetched) -> None:
        self._device.host_free(fetched.buffer)

    def _account(self, path: str, began_ns: int, tensor: torch.Tensor) -> None:
        entry = self.paths[path]
        entry.host_us.append((time.perf_counter_ns() - began_ns) / 1e3)
        entry.nbytes += tensor.numel() * tensor.element_size()
