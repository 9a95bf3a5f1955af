"""A simulated accelerator: real threads, real tensors, modelled time, and two memory models.

Each stream is a thread with a first-in first-out queue. Copies take a latency and a bandwidth and follow the
memory model of CUDA or of CANN. Replayed graphs wait on external events, which an update stream records.
Four defects can be switched on; each is a way in which a platform or an engine has gone wrong (HANGS.md):

====  ==================================================================================================
D1    ``graph_update`` does not wait for its fence. A record on a flag that is still set is lost; replays
      then run one update behind and stop at the first step without one. Nothing sleeps: the hang is the
      missed flag
D2    ``host_staging`` hands out the same array again while its last copy is pending
D3    pinned copies run on a DMA engine beside their stream; only a wait on the host waits for them
D4    a freed pinned block is handed out again although a pending copy reads it
====  ==================================================================================================

What it cannot show is in ``CANNOT_SHOW``, which reports made on it repeat.

Captures: an event record, an event wait, a host copy or a synchronisation on ``compute`` while capturing is
refused with DeviceError, and so are a replay and a second capture. Other streams are not captured.

Not here: streams (``sim_streams.py``), host memory and copies (``sim_memory.py``), graphs
(``sim_graph.py``, ``sim_capture.py``), cores (``sim_cores.py``).
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from harness import faults
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
from harness.devices.life import Life
from harness.devices.sim_capture import Recorder
from harness.devices.sim_cores import CoreOptions, Cores
from harness.devices.sim_graph import SimGraph, by_value
from harness.devices.sim_memory import CopyCost, CopyEngine, DeviceMeter, HostAllocator, SimHostBuffer
from harness.devices.sim_streams import Flag, SimEvent, SimStream
from harness.ledger_layout import EXTERNAL_EVENTS

if TYPE_CHECKING:
    from harness.ledger import LedgerWriter

CANNOT_SHOW: str = (
    "This was a simulation: threads and CPU tensors behind a model of streams, events and copies. It shows "
    "what the program's order of operations allows under that model. It is no evidence about hardware: it "
    "cannot show whether a real platform orders copies, events or graph updates as the model says, nor real "
    "latencies, bandwidths or rates of hangs, nor faults of drivers, firmware, caches, links or collective "
    "kernels. A seed fixes workload, faults and jitter, not the schedule of threads, so outcomes are rates."
)

MEMORY_MODELS = ("cuda", "cann")
DEFECTS = ("D1", "D2", "D3", "D4")


@dataclass(frozen=True, slots=True)
class SimOptions:
    """How one simulated device behaves. Raises ValueError for a model, defect or number that cannot be."""

    memory_model: str = "cann"
    """``cuda`` or ``cann``: what a ``non_blocking`` copy of pageable memory does (see ``sim_memory.py``)."""
    defects: frozenset[str] = frozenset()
    """Of D1, D2, D3, D4: those of this rank."""
    copy_latency_us: float = 20.0
    """Fixed part of one copy, on the stream (or the DMA engine)."""
    copy_gbps: float = 20.0
    """10^9 bytes a second, one way."""
    host_copy_latency_us: float = 5.0
    """Fixed part of staging a pageable copy: on the host for ``cuda`` to the device, else on the stream."""
    host_copy_gbps: float = 8.0
    host_timeout_s: float = 600.0
    """Deadline of the waits that are hidden inside calls: pageable copies, the drain before a capture."""
    switch_interval_s: float = 5e-5
    """Of the interpreter, process-wide. At Python's default a stream starts 5 ms late beside a busy host."""
    cores: CoreOptions = field(default_factory=CoreOptions)
    """What kernels and collectives hold of the device; off where nothing is said."""
    stamp_interval_s: float = 0.05
    """How often the monitor thread stamps the streams in the ledger."""

    def __post_init__(self) -> None:
        if self.memory_model not in MEMORY_MODELS:
            raise ValueError(f"memory_model {self.memory_model!r} is not one of {', '.join(MEMORY_MODELS)}")
        unknown = sorted(self.defects - set(DEFECTS))
        if unknown:
            raise ValueError(f"defects {', '.join(unknown)} are not among {', '.join(DEFECTS)}")
        if min(self.copy_latency_us, self.host_copy_latency_us) < 0.0:
            raise ValueError("copy latencies must not be negative")
        if min(self.copy_gbps, self.host_copy_gbps, self.host_timeout_s, self.switch_interval_s) <= 0.0:
            raise ValueError("bandwidths, host_timeout_s and switch_interval_s must be above 0")
        if self.stamp_interval_s <= 0.0:
            raise ValueError("stamp_interval_s must be above 0")


class SimDevice:
    """The simulated accelerator of one rank. Its methods are called by the rank's host thread."""

    def __init__(self, options: SimOptions, ledger: LedgerWriter | None = None, rank: int = 0) -> None:
        self.options = options
        self.rank = rank
        self._ledger = ledger
        sys.setswitchinterval(options.switch_interval_s)
        self._life = Life()
        self._cores = Cores(options.cores, self._life)
        self._streams = {name: SimStream(name, self._life, ledger) for name in STREAM_NAMES}
        if options.cores.total:
            for stream in self._streams.values():
                stream.around = self._cores.kernel
        self._host = HostAllocator(options.defects)
        self._meter = DeviceMeter()
        self._copies = CopyEngine(
            self._life,
            model=options.memory_model,
            defects=options.defects,
            cost=CopyCost(options.copy_latency_us, options.copy_gbps),
            host_cost=CopyCost(options.host_copy_latency_us, options.host_copy_gbps),
            host_timeout_s=options.host_timeout_s,
        )
        self._flags = 0
        self._recorder: Recorder | None = None
        self._monitor = threading.Thread(target=self._stamp, name="hangrig-monitor", daemon=True)
        if ledger is not None:
            self._monitor.start()

    @property
    def name(self) -> str:
        return "sim"

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def compute(self) -> SimStream:
        return self._streams["compute"]

    @property
    def copy(self) -> SimStream:
        return self._streams["copy"]

    @property
    def comm(self) -> SimStream:
        return self._streams["comm"]

    @property
    def update(self) -> SimStream:
        return self._streams["update"]

    @property
    def capturing(self) -> bool:
        return self._recorder is not None

    def event(self, name: str = "") -> SimEvent:
        return SimEvent(self._life, name)

    def external_event(self, name: str) -> Flag:
        """Its number in the order of creation is its index in the ledger. ValueError when that is full."""
        flag = Flag(self._life, name, self._flags)
        if self._ledger is not None:
            if flag.index >= EXTERNAL_EVENTS:
                raise ValueError(
                    f"external event {name!r}: a ledger holds {EXTERNAL_EVENTS}; share them between graphs"
                )
            self._ledger.name_external(flag.index, name)
        self._flags += 1
        return flag

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Holds zeros, so that a run is the same each time."""
        tensor = torch.zeros(tuple(shape), dtype=dtype)
        self._meter.watch(tensor)
        return tensor

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> SimHostBuffer:
        return self._host.empty(shape, dtype, pinned)

    def host_staging(self, shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> SimHostBuffer:
        return self._host.staging(shape, dtype, pinned)

    def host_free(self, buffer: HostBuffer) -> None:
        self._host.free(buffer)

    def copy_h2d(self, dst: torch.Tensor, src: HostBuffer, stream: Stream, label: str) -> None:
        """ValueError if shapes or types differ; DeviceTimeout if a pageable copy passes its deadline."""
        self._copies.h2d(dst, src, stream, label)

    def copy_d2h(self, dst: HostBuffer, src: torch.Tensor, stream: Stream, label: str) -> None:
        """ValueError if shapes or types differ; DeviceTimeout if a pageable copy passes its deadline."""
        self._copies.d2h(dst, src, stream, label)

    def host_op(self, op: HostOp, args: HostArgs, event: ExternalEvent | None, label: str) -> None:
        """TypeError if a captured one has no external event of this device."""
        (bound,) = by_value([args])
        if self._recorder is None:
            self.compute.enqueue(partial(op, bound), label)
            return
        if not isinstance(event, Flag):
            raise TypeError(f"{label}: captured with {event!r}, which is no external event of the device")
        self._recorder.host_op(op, bound, event, label)

    @contextmanager
    def capture(self, name: str) -> Iterator[SimGraph]:
        """Waits for all streams first, because captured operations run once on the host thread.

        Raises DeviceError inside, at the operation that cannot be captured, and at the end if the block went
        on after such a refusal.
        """
        if self._recorder is not None:
            raise DeviceError(f"capture of {name!r} inside the capture of {self._recorder.graph.name!r}")
        for stream in self._streams.values():
            stream.synchronize(self.options.host_timeout_s)
        graph = SimGraph(name)
        recorder = self._recorder = Recorder(graph)
        self.compute.recorder = recorder.take
        try:
            yield graph
        finally:
            self._recorder = None
            self.compute.recorder = None
            recorder.put_back()
        if recorder.refusal is not None:
            raise recorder.refusal
        for tensor in graph.made:
            self._meter.watch(tensor)
        graph.sealed = True

    def collective(self) -> AbstractContextManager[None]:
        return self._cores.collective()

    def graph_update(self, graph: Graph, args: Sequence[HostArgs], fence: Event | None) -> None:
        """``args`` are taken by value now. Raises ValueError if there is not one tuple for each operation."""
        ours = self._sealed(graph, "an update")
        if len(args) != ours.host_ops:
            raise ValueError(
                f"graph {ours.name!r} has {ours.host_ops} host operations, but {len(args)} arguments came"
            )
        if fence is not None and "D1" not in self.options.defects:
            self.update.wait(fence)
        self.update.enqueue(partial(self._rebind, ours, by_value(args)), f"graph.update {ours.name}")

    def replay(self, graph: Graph) -> None:
        ours = self._sealed(graph, "a replay")
        self.compute.enqueue(partial(self._replay, ours), f"graph.replay {ours.name}")

    def delay(self, stream: Stream, seconds: float, label: str) -> None:
        """TypeError for a stream of another device."""
        if not isinstance(stream, SimStream):
            raise TypeError(f"{stream!r} is not a stream of the simulated device")
        stream.delay(seconds, label)

    def memory(self) -> MemoryFigures:
        """``device_bytes``: what ``empty`` and captures made and something still refers to."""
        return MemoryFigures(
            device_bytes=self._meter.in_use_bytes(),
            host_pinned_bytes=self._host.held_bytes(True),
            host_pageable_bytes=self._host.held_bytes(False),
        )

    def close(self, timeout_s: float) -> None:
        """Ends every wait and drops what is queued. An operation that blocks elsewhere cannot be interrupted:
        then DeviceTimeout names its thread."""
        deadline_s = time.monotonic() + timeout_s
        self._life.close()
        workers = [*self._streams.values(), *([] if self._copies.dma is None else [self._copies.dma])]
        for worker in workers:
            worker.end()
        threads = [worker.thread for worker in workers]
        if self._ledger is not None:
            threads.append(self._monitor)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        alive = [thread.name for thread in threads if thread.is_alive()]
        if alive:
            raise DeviceTimeout(f"{', '.join(alive)} did not end within {timeout_s:g} s")

    def _sealed(self, graph: Graph, what: str) -> SimGraph:
        if not isinstance(graph, SimGraph):
            raise TypeError(f"{graph!r} is not a graph of the simulated device")
        self.compute.refuse_in_capture(f"{what} of graph {graph.name!r}")
        if not graph.sealed:
            raise DeviceError(f"{what} of graph {graph.name!r}, whose capture was not completed")
        return graph

    def _rebind(self, graph: SimGraph, args: Sequence[HostArgs]) -> None:
        """On the update stream: bind the arguments of each operation, then record its external event."""
        for layer, (node, bound) in enumerate(zip(graph.nodes, args, strict=True)):
            if faults.ACTIVE is None:
                node.args = bound
                self._record(node.flag)
                continue
            passing = faults.ACTIVE.visit("graph.update", graph=graph.name, layer=layer, args=bound)
            node.args = passing["args"]
            record = partial(self._record, node.flag)
            passing = faults.ACTIVE.visit(
                "event.record", stream="update", event=node.flag.name, record=record
            )
            if not passing.skipped:
                record()

    def _record(self, flag: Flag) -> None:
        if self._ledger is not None:
            self._ledger.external_recorded(flag.index)
        flag.record()

    def _replay(self, graph: SimGraph) -> None:
        """On the compute stream. The waits count as made before the replay is seen to be complete, so that a
        fenced update never looks as if it had overtaken one."""
        graph.run()
        if self._ledger is not None and graph.nodes:
            self._ledger.external_consumed(graph.events)

    def _stamp(self) -> None:
        while not self._life.closed.wait(self.options.stamp_interval_s):
            for stream in self._streams.values():
                stream.stamp()


if TYPE_CHECKING:
    _conforms: type[Device] = SimDevice
