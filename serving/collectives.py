"""One group's collectives on device tensors: where each one runs, and what the ledger has of it.

Outside graphs a collective runs on the ``comm`` stream between two events; inside a capture it becomes part of the
graph on ``compute``, and a replay advances the group by the number of collectives it captured. What moves the data
is a carrier (``carriers.py``).

On a real accelerator the host enqueues a collective and goes on; when the stream comes to it and has passed it the
device tells. A *staged* one it carries out itself, between two copies.

Not here: collectives between hosts (``host_collectives.py``), which groups a rank has (``comm.py``), what is
gathered and why (``dp_attention.py``), the heap itself (``symmetric.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from harness import faults
from harness.devices.base import Device, Graph, Stream
from harness.ledger import LedgerWriter
from serving.carriers import GLOO, Alone, Data, GroupData, Heap
from serving.host_collectives import CommError, CommOptions, HostGroup
from serving.symmetric import SymmetricHeap
from serving.symmetric_cuda import CudaHeap

__all__ = ["CommError", "CommOptions", "Group"]

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Carries the data: what the result goes into, and what this rank brings (the same tensor for an all-reduce)."""


@dataclass(frozen=True, slots=True)
class _Collective:
    """One collective as it is carried out. ``sequence`` 0: in a graph. ``stall``: see ``Stream.stall``."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    move: Callable[[], None]
    sequence: int = 0
    stall: Callable[[float | None], None] | None = None


def _nothing() -> None:
    """A place on a stream, to be told when it is passed."""


class Group(HostGroup):
    """One named group. Device collectives return at once; those that end in ``_host`` block the host.

    ``member`` is this rank's place in ``ranks``.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        options: CommOptions,
        device: Device,
        ledger: LedgerWriter | None,
        process_group: dist.ProcessGroup | None,
        token: str,
        closed: Callable[[], bool],
        other: Callable[[str], Group],
        registration: Group | None = None,
    ) -> None:
        """``other`` gives this rank's group of another name; ``registration``: that of the symmetric heap which
        carries this group's data."""
        super().__init__(name, ranks, options, ledger, process_group, token, closed, other)
        self._device = device
        self._captured: dict[str, int] = {}
        self._captured_now = 0
        self._heap: Heap | None = None
        self._data: Data = Alone()
        self._room_bytes = 0
        if self.size == 1:
            return
        if registration is not None:
            self._data = self._heap = self._make_heap(registration)
        elif process_group is not None:
            self._data = GroupData(process_group)

    def _make_heap(self, registration: Group) -> Heap:
        options = self._options
        if options.carrier == GLOO:
            return SymmetricHeap(
                options.shared,
                name=self.files,
                member=self.member,
                size=self.size,
                timeout_s=options.timeout_s,
                stop=self._closed,
                carry=registration.register,
                growth_bytes=options.symm_growth_bytes,
            )
        if options.carrier.backend != "nccl" or self._process_group is None:
            raise CommError(
                f"group {self.name}: no symmetric memory beside {options.carrier.backend}; set symm_mem = off"
            )
        return CudaHeap(
            self._process_group,
            name=self.files,
            member=self.member,
            size=self.size,
            device=self._device.torch_device,
            carry=registration.register,
            growth_bytes=options.symm_growth_bytes,
        )

    # Collectives on device tensors -------------------------------------------------------------------------

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``out`` (size * t, ...) becomes the ranks' ``part`` (t, ...) in rank order."""
        self._enqueue("all_gather", part, self._data.all_gather, out)

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """``out`` (t, ...) becomes this rank's share of the sum over ranks of ``whole`` (size * t, ...)."""
        self._enqueue("reduce_scatter", whole, self._data.reduce_scatter, out)

    def all_reduce(self, tensor: torch.Tensor, *, join: bool = True) -> None:
        """In place: the sum over ranks. Without ``join`` compute goes on at once, and only what follows on ``comm``
        may use the result."""
        self._enqueue("all_reduce", tensor, self._reduced, None, join)

    def _reduced(self, into: torch.Tensor, brought: torch.Tensor) -> None:
        self._data.all_reduce(into)

    def connect(self) -> None:
        """Makes the communicator of a carrier that makes it at the first collective: one number, summed up, and
        waited for. Host thread, all members."""
        self._put("connect", self._device.empty((1,), torch.int32), self._reduced, None)
        self._device.comm.synchronize(self._options.timeout_s)

    def has_room(self, nbytes: int) -> bool:
        """Whether the host has made room for collectives of ``nbytes``; always without a symmetric heap."""
        return self._heap is None or nbytes <= self._room_bytes

    def make_room(self, nbytes: int, timeout_s: float) -> None:
        """Grows the symmetric heap to hold collectives of ``nbytes``, and waits until all members have: an
        allocation from its pool. On ``compute``, in the order of the group's collectives. Host thread."""
        heap = self._heap
        if heap is None or self.has_room(nbytes):
            return
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("symm.reserve", group=self.name, nbytes=nbytes)
        self._room_bytes = heap.rounded(nbytes)
        self._device.compute.run(lambda: heap.reserve(nbytes), f"reserve {self.name}", opaque=True)
        self._device.compute.synchronize(timeout_s)

    def register(self, nbytes: int, exchange: Callable[[], None]) -> None:
        """Carries a registration of segments of ``nbytes``, on the stream's thread where it turns out to be needed:
        that thread writes both of the group's sections in the ledger. Nothing of it is enqueued before."""
        shape, sequence = (nbytes,), 0
        if self._ledger is not None:
            sequence = self._ledger.collective_enter(self._handle, "register", shape, "uint8")
        self._carry(_Collective("register", shape, "uint8", exchange, sequence))
        self._ledger_complete(sequence)

    # How a collective runs ---------------------------------------------------------------------------------

    def _enqueue(
        self,
        operation: str,
        tensor: torch.Tensor,
        move: Move,
        out: torch.Tensor | None,
        join: bool = True,
    ) -> None:
        """``move`` carries ``tensor``, unless a fault has it otherwise, into ``out`` (None: in place)."""
        if faults.ACTIVE is None:
            self._put(operation, tensor, move, out, join)
            return
        stream = "compute" if self._device.capturing else "comm"
        passing = faults.ACTIVE.visit(
            "comm.enqueue",
            group=self.name,
            operation=operation,
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            tensor=tensor,
            stream=stream,
            capturing=self._device.capturing,
            enqueue=partial(self._put, operation, tensor, move, out, join),
        )
        if not passing.skipped:
            self._put(operation, passing["tensor"], move, out, join, stream=passing["stream"])

    def _put(
        self,
        operation: str,
        tensor: torch.Tensor,
        move: Move,
        out: torch.Tensor | None,
        join: bool = True,
        *,
        stream: str = "comm",
    ) -> None:
        """Enqueues it on ``stream`` between two events, or captures it into the graph on ``compute``."""
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        label = f"{operation} {self.name}"
        into = tensor if out is None else out
        if self._device.capturing:
            self._capture(_Collective(operation, shape, dtype, partial(move, into, tensor)), label)
            return
        sequence = self._ledger_enqueue(operation, shape, dtype)
        ready = self._device.event()
        carrier = getattr(self._device, stream)
        self._device.compute.record(ready)
        carrier.wait(ready)
        if self._options.carrier.staged and self.size > 1:
            self._stage(carrier, label, operation, tensor, move, out, sequence)
        else:
            what = _Collective(operation, shape, dtype, partial(move, into, tensor), sequence, carrier.stall)

            def on_comm() -> None:
                with self._device.collective():
                    self._carry(what)

            carrier.run(
                on_comm,
                label,
                opaque=True,
                began=lambda: self._ledger_start(sequence),
                done=lambda: self._ledger_complete(sequence),
            )
        if join:
            done = self._device.event()
            carrier.record(done)
            self._device.compute.wait(done)

    def _capture(self, what: _Collective, label: str) -> None:
        if self._options.carrier.staged and self.size > 1:
            raise CommError(
                f"{label}: a graph cannot hold a collective that the host carries out; set graph = off, or give "
                "each rank a device of its own"
            )
        self._captured_now += 1
        self._device.compute.run(lambda: self._carry(what), label, opaque=True)

    def _stage(
        self,
        stream: Stream,
        label: str,
        operation: str,
        tensor: torch.Tensor,
        move: Move,
        out: torch.Tensor | None,
        sequence: int,
    ) -> None:
        """To the host, which waits for it, over gloo, and back onto the stream. Pinned memory throughout: a
        pageable copy would wait in the driver, which has no deadline."""
        device, into = self._device, tensor if out is None else out
        brought = device.host_empty(tensor.shape, tensor.dtype, pinned=True)
        taken = brought if out is None else device.host_empty(out.shape, out.dtype, pinned=True)
        device.copy_d2h(brought, tensor, stream, f"{label} to host")
        stream.run(_nothing, f"{label} on host", opaque=True, done=lambda: self._ledger_start(sequence))
        arrived = device.event()
        stream.record(arrived)
        arrived.synchronize(self._options.timeout_s)
        dtype = str(tensor.dtype).removeprefix("torch.")
        data = partial(move, taken.tensor, brought.tensor)
        self._carry(_Collective(operation, tuple(tensor.shape), dtype, data, sequence))
        device.copy_h2d(into, taken, stream, f"{label} to device")
        stream.run(_nothing, f"{label} done", opaque=True, done=lambda: self._ledger_complete(sequence))
        for buffer in {id(buffer): buffer for buffer in (brought, taken)}.values():
            device.host_free(buffer)

    def _carry(self, what: _Collective) -> None:
        """On a stream's thread, or on the host where the device enqueues: agree on what is brought, then move the
        data."""
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.before", stall=what.stall, heap=self._heap, **self._told(what))
        if self._board is not None:
            self._agree_on_header(self._board, f"{what.operation} {what.dtype} {what.shape}")
        what.move()
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.after", stall=what.stall, **self._told(what))

    def _told(self, what: _Collective) -> dict[str, Any]:
        return {"group": self.name, "operation": what.operation, "sequence": what.sequence}

    # Graphs ------------------------------------------------------------------------------------------------

    def capture_begins(self) -> None:
        self._captured_now = 0

    def capture_ended(self, graph: Graph) -> None:
        self._captured[graph.name] = self._captured_now

    def replayed(self, graph: Graph) -> None:
        count = self._captured.get(graph.name, 0)
        self.count += count
        if count == 0 or self._ledger is None:
            return
        ledger, handle = self._ledger, self._handle
        sequence = ledger.collective_enqueue(handle, f"graph {graph.name}", (count,), "", count)
        self._device.compute.run(
            lambda: None,
            "graph.collectives",
            opaque=True,
            done=lambda: ledger.collective_complete(handle, sequence),
        )

    def close(self) -> None:
        if self._heap is not None:
            self._heap.close()
        super().close()
