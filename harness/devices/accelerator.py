"""What CUDA and Ascend NPUs share: one device over the module that torch has for it (``torch.get_device_module``).

The host thread enqueues; the device runs; one monitor thread sees it (``heartbeats.py``). ``compute`` is made the
current stream of the thread that opens the device, so that a tensor made or filled outside an operation is in its
order. Which device is current is per thread: a thread that opens none calls ``select()``.

On a real accelerator the sites of a stream are passed by the host, where it enqueues. A record that a fault leaves
out is a record that was never made: the waits for it pass. ``faults.ONLY_ON_SIM`` has the sites that it lacks.

Not here: what differs (``cuda.py``, ``npu.py``), who makes a device (``opening.py``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from harness import faults
from harness.devices.accelerator_graph import AcceleratorGraph, ExternalFlag, HostNode, bound_numbers
from harness.devices.accelerator_memory import AcceleratorBuffer, Copies, HostPool
from harness.devices.accelerator_streams import AcceleratorEvent, AcceleratorStream, guarded, our_stream
from harness.devices.base import (
    STREAM_NAMES,
    Device,
    DeviceError,
    DeviceTimeout,
    Event,
    ExternalEvent,
    Graph,
    HostArgs,
    HostBuffer,
    HostOp,
    MemoryFigures,
    Stream,
)
from harness.devices.heartbeats import Heartbeats
from harness.devices.life import Life
from harness.ledger_layout import EXTERNAL_EVENTS

if TYPE_CHECKING:
    from harness.ledger import LedgerWriter


@dataclass(frozen=True, slots=True)
class Platform:
    """What a device stands on. ``module``: ``torch.cuda``, ``torch.npu``."""

    kind: str
    module: Any
    index: int
    tensors: torch.device
    """Where its tensors live."""
    pinned: Callable[[int], torch.Tensor]
    """Page-locked host memory of so many bytes, as uint8."""


class AcceleratorDevice(ABC):
    """One accelerator as one rank sees it. Made and used by the rank's host thread."""

    waits_for_pageable: ClassVar[frozenset[str]]
    """The sites whose pageable copies make the host wait."""

    def __init__(
        self,
        platform: Platform,
        ledger: LedgerWriter | None = None,
        *,
        host_timeout_s: float,
        watch_interval_s: float = 1e-3,
    ) -> None:
        """``host_timeout_s``: deadline of the waits hidden inside calls (before a capture). ``watch_interval_s``:
        how often the monitor looks."""
        self.platform = platform
        self._module = platform.module
        self._ledger = ledger
        self._host_timeout_s = host_timeout_s
        self._life = Life()
        self.select()
        raw = {name: self._module.Stream() for name in STREAM_NAMES}
        self._beats = Heartbeats(
            raw, self._module.Event, self._life, ledger, interval_s=watch_interval_s, enter_thread=self.select
        )
        self._streams = {name: self._stream(name, stream) for name, stream in raw.items()}
        self._host = HostPool(platform.pinned)
        self._copies = Copies(self.waits_for_pageable)
        self._flags = 0
        self._gathered: AcceleratorGraph | None = None
        self._graphs: list[AcceleratorGraph] = []
        self._entered = self._module.current_stream()
        self._module.set_stream(raw["compute"])
        self._beats.thread.start()

    def _stream(self, name: str, raw: Any) -> AcceleratorStream:
        return AcceleratorStream(
            name,
            raw,
            self._module,
            self._life,
            self._beats,
            self._ledger,
            home=name == "compute",
            stall=self._stall,
        )

    def select(self) -> None:
        """Makes this device the current one of the calling thread."""
        self._module.set_device(self.platform.index)

    @property
    def name(self) -> str:
        return self.platform.kind

    @property
    def torch_device(self) -> torch.device:
        return self.platform.tensors

    @property
    def compute(self) -> AcceleratorStream:
        return self._streams["compute"]

    @property
    def copy(self) -> AcceleratorStream:
        return self._streams["copy"]

    @property
    def comm(self) -> AcceleratorStream:
        return self._streams["comm"]

    @property
    def update(self) -> AcceleratorStream:
        return self._streams["update"]

    @property
    def capturing(self) -> bool:
        return self._gathered is not None

    def event(self, name: str = "") -> AcceleratorEvent:
        return AcceleratorEvent(self._life, self._module.Event(), name)

    def external_event(self, name: str) -> ExternalFlag:
        """Its number in the order of creation is its index in the ledger. ValueError when that is full."""
        index = self._flags
        if self._ledger is not None:
            if index >= EXTERNAL_EVENTS:
                raise ValueError(
                    f"external event {name!r}: a ledger holds {EXTERNAL_EVENTS}; share them between graphs"
                )
            self._ledger.name_external(index, name)
        self._flags += 1
        return ExternalFlag(name, index, self._external_event())

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, device=self.torch_device)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> AcceleratorBuffer:
        return self._host.empty(shape, dtype, pinned)

    def host_staging(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> AcceleratorBuffer:
        return self._host.empty(shape, dtype, pinned)

    def host_free(self, buffer: HostBuffer) -> None:
        self._host.free(buffer)

    def copy_h2d(self, dst: torch.Tensor, src: HostBuffer, stream: Stream, label: str) -> None:
        """ValueError if shapes or types differ. Without a deadline where the platform itself waits."""
        self._copies.h2d(dst, src, stream, label)

    def copy_d2h(self, dst: HostBuffer, src: torch.Tensor, stream: Stream, label: str) -> None:
        """ValueError if shapes or types differ. Without a deadline where the platform itself waits."""
        self._copies.d2h(dst, src, stream, label)

    def host_op(self, op: HostOp, args: HostArgs, event: ExternalEvent | None, label: str) -> None:
        """TypeError if a captured one has no external event of this device, or other arguments than whole numbers
        and tuples of them."""
        if self._gathered is None:
            self.compute.enqueue(partial(op, args), label)
            return
        if not isinstance(event, ExternalFlag):
            raise TypeError(f"{label}: captured with {event!r}, which is no external event of the device")
        self._gathered.add_host_op(HostNode(op, args, event, label), self._before_captured)

    @contextmanager
    def capture(self, name: str) -> Iterator[AcceleratorGraph]:
        """Gathers operations; at the end of the block they run once, then are captured. Waits for all streams
        first. Raises DeviceError when an operation cannot be captured."""
        if self._gathered is not None:
            raise DeviceError(f"capture of {name!r} inside the capture of {self._gathered.name!r}")
        self._drain(self._host_timeout_s)
        graph = self._gathered = AcceleratorGraph(name)
        self.compute.recorder = graph.add
        try:
            yield graph
            self.compute.recorder = None
            guarded(self._life, f"the capture of {name!r}", partial(self._seal, graph))
        finally:
            self._gathered = None
            self.compute.recorder = None

    def collective(self) -> AbstractContextManager[None]:
        return nullcontext()

    def graph_update(self, graph: Graph, args: Sequence[HostArgs], fence: Event | None) -> None:
        """``args`` are taken by value now. Raises ValueError if there is not one tuple for each operation, or
        one of another length than was captured. Without ``fence`` nothing waits for the replay before."""
        ours = self._sealed(graph, "an update")
        bound_numbers(ours, args)
        if fence is not None:
            self.update.wait(fence)
        self._update(ours, args)

    def replay(self, graph: Graph) -> None:
        ours = self._sealed(graph, "a replay")
        calls = []
        if self._ledger is not None and ours.nodes:
            calls.append(partial(self._ledger.external_consumed, ours.events))
        self.compute.enqueue(partial(self._replay, ours), f"graph.replay {ours.name}", calls=calls)

    def delay(self, stream: Stream, seconds: float, label: str) -> None:
        """TypeError for a stream of another device. Calibrates at its first call, for which it waits."""
        ours = our_stream(stream)
        self._prepare_delay()
        ours.run(partial(self._occupy, seconds), label)

    def memory(self) -> MemoryFigures:
        """``device_bytes``: what torch's allocator has handed out in this process."""
        stats = self._module.memory_stats(self.platform.index)
        return MemoryFigures(
            device_bytes=int(stats.get("allocated_bytes.all.current", 0)),
            host_pinned_bytes=self._host.held_bytes(True),
            host_pageable_bytes=self._host.held_bytes(False),
        )

    def close(self, timeout_s: float) -> None:
        """Waits for all streams, ends the monitor and gives memory back. Raises DeviceTimeout naming the
        streams that hang and what they stand in; their memory is not given back then, since freeing waits
        without a deadline."""
        deadline_s = time.monotonic() + timeout_s
        hung = [] if self._life.stopped.is_set() else self._hung(deadline_s)
        drained = not hung and not self._life.stopped.is_set()
        self._life.close()
        self._beats.thread.join(max(0.1, deadline_s - time.monotonic()))
        if self._beats.thread.is_alive():
            hung.append(f"{self._beats.thread.name} did not end")
        if drained and not hung:
            self._give_back()
        if hung:
            raise DeviceTimeout(f"{'; '.join(hung)} within {timeout_s:g} s")

    def _hung(self, deadline_s: float) -> list[str]:
        """The streams that have not passed all they were given at the deadline, each with what it stands in."""
        found = []
        try:
            marks = {name: stream.reach() for name, stream in self._streams.items()}
            for name, mark in marks.items():
                try:
                    self._streams[name].wait_for(mark, max(0.0, deadline_s - time.monotonic()))
                except DeviceTimeout:
                    found.append(f"stream {name} did not end {self._beats.oldest(name)!r}")
        except DeviceError:
            pass  # it failed on the way: no stream ends anything more, and the error is told where it is met
        return found

    def _give_back(self) -> None:
        for graph in self._graphs:
            graph.raw.reset()
        self._graphs.clear()
        self._beats.release()
        self._host.release()
        self._module.set_stream(self._entered)
        self._module.empty_cache()

    def _drain(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        for stream in self._streams.values():
            stream.synchronize(max(0.0, deadline_s - time.monotonic()))

    def _sealed(self, graph: Graph, what: str) -> AcceleratorGraph:
        if not isinstance(graph, AcceleratorGraph):
            raise TypeError(f"{graph!r} is not a graph of this device")
        self.compute.refuse_in_capture(f"{what} of graph {graph.name!r}")
        if not graph.sealed:
            raise DeviceError(f"{what} of graph {graph.name!r}, whose capture was not completed")
        return graph

    def _seal(self, graph: AcceleratorGraph) -> None:
        """The two runs of the operations. The mode ``thread_local`` lets other threads (the monitor's, those of
        NCCL and HCCL) ask their events meanwhile."""
        graph.place(self.torch_device)
        graph.raw, graph.bound = self._graph(), self._module.Event()
        with torch.no_grad():
            self._write_captured(graph)
            graph.run(captured=False)
        self.compute.synchronize(self._host_timeout_s)
        with (
            torch.no_grad(),
            self._module.graph(graph.raw, stream=self.compute.raw, capture_error_mode="thread_local"),
        ):
            graph.run(captured=True)
        graph.sealed = True
        self._graphs.append(graph)

    def _replay(self, graph: AcceleratorGraph) -> None:
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("graph.replay", stall=self.compute.stall, graph=graph.name)
        self._before_replay(graph)
        graph.raw.replay()

    def _rebound(self, graph: AcceleratorGraph, layer: int, args: HostArgs) -> list[int]:
        """The numbers that an update brings to one operation, when a fault has had its say."""
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit(
                "graph.update", stall=self.update.stall, graph=graph.name, layer=layer, args=args
            )
            args = passing["args"]
        return graph.nodes[layer].numbers_of(args)

    def _recorded(self, flags: Sequence[ExternalFlag]) -> list[Callable[[], None]]:
        """What the ledger is told when the update stream has passed their records."""
        if self._ledger is None:
            return []
        return [partial(self._ledger.external_recorded, flag.index) for flag in flags]

    # --- what differs

    @abstractmethod
    def _graph(self) -> Any:
        """A new, empty graph of the platform."""

    @abstractmethod
    def _external_event(self) -> Any:
        """The platform's external event, or None where an update is waited for otherwise."""

    @abstractmethod
    def _write_captured(self, graph: AcceleratorGraph) -> None:
        """Enqueues on ``compute`` that the static tensor gets the arguments as they were captured."""

    @abstractmethod
    def _before_captured(self, node: HostNode) -> None:
        """What is captured in front of a host operation."""

    @abstractmethod
    def _update(self, graph: AcceleratorGraph, args: Sequence[HostArgs]) -> None:
        """Enqueues on ``update`` that the next replay takes ``args``, and the records of the external events."""

    @abstractmethod
    def _before_replay(self, graph: AcceleratorGraph) -> None:
        """On ``compute``, in front of a replay."""

    @abstractmethod
    def _prepare_delay(self) -> None:
        """Measures, once, what ``_occupy`` needs to know."""

    @abstractmethod
    def _occupy(self, seconds: float) -> None:
        """Keeps the current stream busy."""

    @abstractmethod
    def _stall(self, stream: AcceleratorStream, seconds: float | None) -> None:
        """Keeps ``stream`` busy; None: for ever. Within a fault, so nothing is counted."""


if TYPE_CHECKING:

    def _conforms(device: AcceleratorDevice) -> Device:
        return device
