"""Collectives: named groups, sequence numbers, and where each one runs.

All communication of the engine passes here, so that every collective has a group, a sequence number, an
operation, a shape and a dtype in the ledger. Outside graphs a collective runs on the ``comm`` stream between two
events; inside a capture it becomes part of the graph on ``compute``, and a replay advances the group by the
number of collectives it captured. Control messages (the agreement of the ranks) use a group of their own and
block the host: sharing a gloo group between the two breaks the connection (HANGS.md).

Where gloo carries the data, the ranks first agree on the board what they bring: NCCL and HCCL wait for ever on a
mismatch, gloo would end the process.

Not here: what is gathered and why (``dp_attention.py``), the heap itself (``symmetric.py``).
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from harness import faults
from harness.devices.base import Device, Graph
from harness.ledger import LedgerWriter
from serving.board import PAYLOAD_BYTES, Board, BoardTimeout
from serving.symmetric import SymmetricHeap


class CommError(RuntimeError):
    """A collective did not complete: a peer is missing or brought something else."""


@dataclass(frozen=True, slots=True)
class CommOptions:
    """``shared`` is a directory in shared memory that all ranks see, empty when the ranks start."""

    rank: int
    world: int
    shared: Path
    timeout_s: float
    symmetric: bool = False
    agree_first: bool = True
    """Post the header of each collective on the board before gloo moves data. Off for nccl and hccl."""


class Comm:
    """The groups of one rank for one trial. ``token`` keeps the shared files of trials apart."""

    def __init__(
        self,
        options: CommOptions,
        device: Device,
        ledger: LedgerWriter | None,
        backends: ProcessGroups,
        token: str,
    ) -> None:
        self.options = options
        self._closed = False
        self._groups: dict[str, Group] = {}
        for name in ("agree", "experts"):
            symmetric = options.symmetric and name == "experts" and options.world > 1
            self._groups[name] = Group(name, options, device, ledger, backends, token, symmetric, self.closed)

    def group(self, name: str) -> Group:
        return self._groups[name]

    def closed(self) -> bool:
        return self._closed

    def replayed(self, graph: Graph) -> None:
        """Call right after ``device.replay(graph)``: advances each group by what the graph captured."""
        for group in self._groups.values():
            group.replayed(graph)

    def shut(self) -> None:
        """Makes every wait for a peer give up, so that stream threads can be joined."""
        self._closed = True

    def close(self) -> None:
        self._closed = True
        for group in self._groups.values():
            group.close()


class ProcessGroups:
    """The ``torch.distributed`` groups of this process. They outlive trials: ranks stay warm."""

    def __init__(self, *, rank: int, world: int, init_method: str, backend: str, timeout_s: float) -> None:
        self._groups: dict[str, dist.ProcessGroup] = {}
        if world == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(
            backend, init_method=init_method, rank=rank, world_size=world, timeout=timeout
        )
        ranks = list(range(world))
        self._groups["agree"] = dist.new_group(ranks, timeout=timeout, backend="gloo")
        self._groups["experts"] = dist.new_group(ranks, timeout=timeout, backend=backend)

    def get(self, name: str) -> dist.ProcessGroup | None:
        return self._groups.get(name)


def _all_gather(out: torch.Tensor, part: torch.Tensor, group: dist.ProcessGroup) -> None:
    """torch 2.13 renamed the operation and warns at the old name; torch 2.7 has the old name only."""
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    call(out, part, group=group)


def _reduce_scatter(out: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
    """As ``_all_gather``."""
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    call(out, whole, group=group)


def _fitted(header: str) -> bytes:
    """A header as a board record. A long one is cut, with a checksum of the whole at its end."""
    raw = header.encode()
    if len(raw) > PAYLOAD_BYTES:
        check = b"#%08x" % zlib.crc32(raw)
        raw = raw[: PAYLOAD_BYTES - len(check)] + check
    return raw.ljust(PAYLOAD_BYTES, b"\0")


class Group:
    """One named group over all ranks. Device collectives return at once; ``all_gather_host`` blocks."""

    def __init__(
        self,
        name: str,
        options: CommOptions,
        device: Device,
        ledger: LedgerWriter | None,
        backends: ProcessGroups,
        token: str,
        symmetric: bool,
        closed: Callable[[], bool],
    ) -> None:
        self.name = name
        self.rank = options.rank
        self.size = options.world
        self._options = options
        self._device = device
        self._ledger = ledger
        self._handle = ledger.group(name, range(options.world)) if ledger is not None else 0
        self._process_group = backends.get(name)
        self._captured: dict[str, int] = {}
        self._captured_now = 0
        self._runtime_sequence = 0
        self._closed = closed
        self._heap: SymmetricHeap | None = None
        self._board: Board | None = None
        if options.world > 1:
            if symmetric:
                self._heap = SymmetricHeap(
                    options.shared,
                    name=f"{token}-{name}",
                    member=options.rank,
                    size=options.world,
                    timeout_s=options.timeout_s,
                    stop=closed,
                )
            if options.agree_first and name != "agree":
                self._board = Board(
                    options.shared / f"{token}-{name}.board", member=options.rank, size=options.world
                )

    # Collectives on device tensors -------------------------------------------------------------------------

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``out`` (size * t, ...) becomes the ranks' ``part`` (t, ...) in rank order."""
        heap, group = self._heap, self._process_group

        def move() -> None:
            if heap is not None:
                heap.all_gather(out, part)
            elif group is None:
                out.copy_(part)
            else:
                _all_gather(out, part, group)

        self._enqueue("all_gather", part, move)

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """``out`` (t, ...) becomes this rank's share of the sum over ranks of ``whole`` (size * t, ...)."""
        heap, group = self._heap, self._process_group

        def move() -> None:
            if heap is not None:
                heap.reduce_scatter(out, whole)
            elif group is None:
                out.copy_(whole)
            else:
                _reduce_scatter(out, whole, group)

        self._enqueue("reduce_scatter", whole, move)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place: the sum over ranks."""
        heap, group = self._heap, self._process_group

        def move() -> None:
            if heap is not None:
                heap.all_reduce(tensor)
            elif group is not None:
                dist.all_reduce(tensor, group=group)

        self._enqueue("all_reduce", tensor, move)

    # The control plane -------------------------------------------------------------------------------------

    def all_gather_host(self, values: Sequence[int]) -> list[list[int]]:
        """Each rank's int64 ``values`` (equally many), in rank order. Blocks the host until all came."""
        sequence = self._ledger_enqueue("all_gather", (len(values),), "int64")
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.before", group=self.name, operation="all_gather", sequence=sequence)
        self._ledger_start(sequence)
        mine = torch.tensor(list(values), dtype=torch.int64)
        if self._process_group is None:
            rows = [mine.tolist()]
        else:
            out = torch.empty(self.size * len(values), dtype=torch.int64)
            _all_gather(out, mine, self._process_group)
            rows = out.view(self.size, len(values)).tolist()
        self._ledger_complete(sequence)
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.after", group=self.name, operation="all_gather", sequence=sequence)
        return rows

    # How a collective runs ---------------------------------------------------------------------------------

    def _enqueue(self, operation: str, tensor: torch.Tensor, move: Callable[[], None]) -> None:
        shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        label = f"{operation} {self.name}"
        if self._device.capturing:
            self._captured_now += 1

            def in_graph() -> None:
                self._carry(operation, shape, dtype, move, 0)

            self._device.compute.run(in_graph, label, opaque=True)
            return
        sequence = self._ledger_enqueue(operation, shape, dtype)

        def on_comm() -> None:
            self._ledger_start(sequence)
            self._carry(operation, shape, dtype, move, sequence)
            self._ledger_complete(sequence)

        ready, done = self._device.event(), self._device.event()
        self._device.compute.record(ready)
        self._device.comm.wait(ready)
        self._device.comm.run(on_comm, label, opaque=True)
        self._device.comm.record(done)
        self._device.compute.wait(done)

    def _carry(
        self, operation: str, shape: tuple[int, ...], dtype: str, move: Callable[[], None], sequence: int
    ) -> None:
        """Runs on a stream: agree on what is brought, then move the data."""
        self._runtime_sequence += 1
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.before", group=self.name, operation=operation, sequence=sequence)
        if self._board is not None:
            self._agree_on_header(self._board, f"{operation} {dtype} {shape}")
        move()
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.after", group=self.name, operation=operation, sequence=sequence)

    def _agree_on_header(self, board: Board, header: str) -> None:
        mine = _fitted(header)
        timeout_s = self._options.timeout_s
        try:
            headers = board.gather(self._runtime_sequence, mine, timeout_s=timeout_s, stop=self._closed)
            if any(other != mine for other in headers):
                self._wait_for_ever(timeout_s)
                sides = ", ".join(h.rstrip(b"\0").decode(errors="replace") for h in headers)
                raise CommError(f"group {self.name}: the ranks brought different collectives: {sides}")
        except BoardTimeout as error:
            raise CommError(f"group {self.name}: {header}: {error}") from error

    def _wait_for_ever(self, timeout_s: float) -> None:
        """What NCCL and HCCL do with a mismatch, up to the library's own timeout."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self._closed():
            time.sleep(1e-3)

    # Graphs ------------------------------------------------------------------------------------------------

    def capture_begins(self) -> None:
        self._captured_now = 0

    def capture_ended(self, graph: Graph) -> None:
        self._captured[graph.name] = self._captured_now

    def replayed(self, graph: Graph) -> None:
        count = self._captured.get(graph.name, 0)
        if count == 0 or self._ledger is None:
            return
        ledger, handle = self._ledger, self._handle
        sequence = ledger.collective_enqueue(handle, f"graph {graph.name}", (count,), "", count)
        self._device.compute.run(
            lambda: ledger.collective_complete(handle, sequence), "graph.collectives", opaque=True
        )

    # Ledger ------------------------------------------------------------------------------------------------

    def _ledger_enqueue(self, operation: str, shape: Sequence[int], dtype: str) -> int:
        if self._ledger is None:
            return 0
        return self._ledger.collective_enqueue(self._handle, operation, shape, dtype)

    def _ledger_start(self, sequence: int) -> None:
        if self._ledger is not None:
            self._ledger.collective_start(self._handle, sequence)

    def _ledger_complete(self, sequence: int) -> None:
        if self._ledger is not None:
            self._ledger.collective_complete(self._handle, sequence)

    def close(self) -> None:
        if self._heap is not None:
            self._heap.close()
        if self._board is not None:
            self._board.close()
