"""What an engine may ask of an accelerator: streams, events, buffers, copies and graphs.

The engine is written once, against these protocols; each device is a module beside this one (``sim.py``,
``cuda.py``, ``npu.py``). Nothing here runs anything. The words are PyTorch's, with three additions that the
Ascend case needs:

* an *external event* is a flag, not a counter: a record writes 1, a wait waits for 1 and then writes 0,
  so a record made while the flag is still 1 is lost (CANN, `NPUGraph.update`);
* a *host argument* is a value (for example sequence lengths) that a captured operation took from host
  memory; a replayed graph takes the newest value that an update bound to it. In a capture on a real accelerator a
  tuple of whole numbers comes to the operation as an int64 tensor of the device, of that length;
* a *staging buffer* is the host source of one copy to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch

STREAM_NAMES = ("compute", "copy", "comm", "update")

Op: TypeAlias = Callable[[], None]
HostArgs: TypeAlias = tuple[Any, ...]
HostOp: TypeAlias = Callable[[HostArgs], None]


class DeviceError(RuntimeError):
    """An operation failed on the device. Sticky: every later wait on that device raises it again."""


class DeviceUnavailable(RuntimeError):
    """There is no such device, or this process cannot use it. Says what to do."""


class DeviceTimeout(TimeoutError):
    """A host wait on a stream or an event passed its deadline."""


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """Bytes in use now. ``host_pinned`` and ``host_pageable`` count blocks handed out, not cached ones."""

    device_bytes: int
    host_pinned_bytes: int
    host_pageable_bytes: int


class Event(Protocol):
    """A point in a stream. Never recorded means done, as in PyTorch."""

    def query(self) -> bool: ...

    def synchronize(self, timeout_s: float) -> None:
        """Waits on the host. Raises DeviceTimeout after ``timeout_s``, DeviceError if the device failed."""


class ExternalEvent(Protocol):
    """A flag that lives outside graphs: see the module's docstring."""

    @property
    def name(self) -> str: ...


class Stream(Protocol):
    """A first-in first-out queue of device work."""

    @property
    def name(self) -> str: ...

    def run(
        self, op: Op, label: str, *, opaque: bool = False, began: Op | None = None, done: Op | None = None
    ) -> None:
        """Enqueues ``op``. During a capture on ``compute`` the operation is recorded instead.

        ``opaque`` marks an operation that a capture keeps whole (a collective, a fused kernel): it is not
        executed while capturing and runs as it is on replay. On a real accelerator it changes nothing.

        ``began`` and ``done`` are called, on a thread of the device, when the stream has come to ``op`` and when it
        has passed it: on a real accelerator ``op`` only enqueues, so what it does itself comes too early. Not in
        a capture.
        """

    def record(self, event: Event) -> None: ...

    def wait(self, event: Event) -> None:
        """Later work of this stream starts after ``event``; the host does not wait."""

    def synchronize(self, timeout_s: float) -> None: ...

    @property
    def stall(self) -> Callable[[float | None], None] | None:
        """What keeps the stream busy for so many seconds (None: for ever) in a fault that the host passes. None
        where the stream has a thread that a fault can hold up itself."""


class HostBuffer(Protocol):
    """A block of host memory handed out by the device's host allocator."""

    @property
    def tensor(self) -> torch.Tensor: ...

    @property
    def pinned(self) -> bool: ...


class Graph(Protocol):
    """Captured work of ``compute``. ``host_ops`` is the number of operations with a host argument."""

    @property
    def name(self) -> str: ...

    @property
    def host_ops(self) -> int: ...


class Device(Protocol):
    """One accelerator as one rank sees it. All methods are called by the rank's host thread."""

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device:
        """Where tensors of this device live: weights are brought there."""

    @property
    def compute(self) -> Stream: ...

    @property
    def copy(self) -> Stream: ...

    @property
    def comm(self) -> Stream: ...

    @property
    def update(self) -> Stream: ...

    @property
    def capturing(self) -> bool: ...

    def event(self, name: str = "") -> Event:
        """``name``: for people and faults, of an event that something particular depends on."""

    def external_event(self, name: str) -> ExternalEvent: ...

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> HostBuffer:
        """A buffer that the caller keeps until ``host_free``. Contents undefined."""

    def host_staging(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> HostBuffer:
        """The source of one host-to-device copy: no pending copy reads it. Free it after the enqueue."""

    def host_free(self, buffer: HostBuffer) -> None:
        """Gives the block back. It is handed out again only when no enqueued copy uses it any more."""

    def copy_h2d(self, dst: torch.Tensor, src: HostBuffer, stream: Stream, label: str) -> None:
        """A ``non_blocking`` copy. Whether the host waits depends on pinning and the platform."""

    def copy_d2h(self, dst: HostBuffer, src: torch.Tensor, stream: Stream, label: str) -> None:
        """A ``non_blocking`` copy. Whether the host waits depends on pinning and the platform."""

    def host_op(self, op: HostOp, args: HostArgs, event: ExternalEvent | None, label: str) -> None:
        """Enqueues ``op(args)`` on ``compute``; ``args`` are taken by value now.

        During a capture it becomes a node that, on every replay, waits for ``event`` (and clears it),
        then runs ``op`` with the newest arguments bound by ``graph_update``. Outside one, ``event`` is unused.
        In a capture on a real accelerator ``op`` is called twice (a warm-up, the capture) and never again: it gets
        int64 tensors of the device in place of numbers, and must not look at their values on the host.
        """

    def capture(self, name: str) -> AbstractContextManager[Graph]:
        """Records what is enqueued on ``compute`` instead of queueing it. Tensors become static. A real accelerator
        runs it once, at the end of the block, before it captures it."""

    def graph_update(self, graph: Graph, args: Sequence[HostArgs], fence: Event | None) -> None:
        """Enqueues on ``update``: wait for ``fence``, then per host operation rebind and record its event."""

    def collective(self) -> AbstractContextManager[None]:
        """Around a collective that a stream carries, on that stream's thread: what it holds of the device
        meanwhile. A real accelerator has nothing to do here."""

    def replay(self, graph: Graph) -> None:
        """Enqueues the captured operations on ``compute``, as one operation."""

    def delay(self, stream: Stream, seconds: float, label: str) -> None:
        """Enqueues work that keeps ``stream`` busy for about so long and changes nothing. The host goes on."""

    def memory(self) -> MemoryFigures: ...

    def close(self, timeout_s: float) -> None:
        """Ends the device's threads or waits for its streams. Raises DeviceTimeout if they do not end."""
