"""One group's collectives: on device tensors and between hosts, where each one runs, and what the ledger has of it.

Outside graphs a collective runs on the ``comm`` stream between two events; inside a capture it becomes part of the
graph on ``compute``, and a replay advances the group by the number of collectives it captured. Those between hosts
block the host.

Where gloo carries the data, the ranks first agree on the board what they bring: NCCL and HCCL wait for ever on a
mismatch, gloo would end the process. The agreement of each step goes without: it is in every step's path, and
what it brings never changes.

Not here: which groups a rank has (``comm.py``), what is gathered and why (``dp_attention.py``), the heap itself
(``symmetric.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from harness import faults
from harness.devices.base import Device, Graph
from harness.ledger import LedgerWriter
from serving.board import Board, BoardTimeout, fitted
from serving.groups import Topology, all_gather, reduce_scatter
from serving.symmetric import GROWTH_BYTES, SymmetricHeap

T = TypeVar("T")
Reduction = Literal["min", "max", "sum"]
_REDUCTIONS = {"min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}


class CommError(RuntimeError):
    """A collective did not complete: a peer is missing or brought something else."""


@dataclass(frozen=True, slots=True)
class CommOptions:
    """``shared`` is a directory in shared memory that all ranks see, empty when the ranks start."""

    rank: int
    world: int
    shared: Path
    timeout_s: float
    dp: int | None = None
    """Attention groups; None: every rank is one."""
    symmetric: bool = False
    symm_growth_bytes: int = GROWTH_BYTES
    agree_first: bool = True
    """Post the header of each collective on the board before gloo moves data. Off for nccl and hccl."""

    @property
    def topology(self) -> Topology:
        return Topology(self.rank, self.world, self.dp or self.world)


class Group:
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
        self.name = name
        self._other = other
        self.ranks = ranks
        self.member = ranks.index(options.rank)
        self.size = len(ranks)
        self.count = 0
        """Collectives that this rank has enqueued or entered, those of replayed graphs too."""
        self._options = options
        self._device = device
        self._ledger = ledger
        self._handle = ledger.group(name, ranks) if ledger is not None else 0
        self._process_group = process_group
        self._captured: dict[str, int] = {}
        self._captured_now = 0
        self._posted = 0
        self._closed = closed
        self._heap: SymmetricHeap | None = None
        self._room_bytes = 0
        self._board: Board | None = None
        if self.size == 1:
            return
        files = f"{token}-{name}-{ranks[0]}"
        if registration is not None:
            self._heap = SymmetricHeap(
                options.shared,
                name=files,
                member=self.member,
                size=self.size,
                timeout_s=options.timeout_s,
                stop=closed,
                carry=registration.register,
                growth_bytes=options.symm_growth_bytes,
            )
        if options.agree_first and name != "agree":
            self._board = Board(options.shared / f"{files}.board", member=self.member, size=self.size)

    # Collectives on device tensors -------------------------------------------------------------------------

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """``out`` (size * t, ...) becomes the ranks' ``part`` (t, ...) in rank order."""
        heap, group = self._heap, self._process_group

        def move(part: torch.Tensor) -> None:
            if heap is not None:
                heap.all_gather(out, part)
            elif group is None:
                out.copy_(part)
            else:
                all_gather(out, part, group)

        self._enqueue("all_gather", part, move)

    def reduce_scatter(self, out: torch.Tensor, whole: torch.Tensor) -> None:
        """``out`` (t, ...) becomes this rank's share of the sum over ranks of ``whole`` (size * t, ...)."""
        heap, group = self._heap, self._process_group

        def move(whole: torch.Tensor) -> None:
            if heap is not None:
                heap.reduce_scatter(out, whole)
            elif group is None:
                out.copy_(whole)
            else:
                reduce_scatter(out, whole, group)

        self._enqueue("reduce_scatter", whole, move)

    def all_reduce(self, tensor: torch.Tensor, *, join: bool = True) -> None:
        """In place: the sum over ranks. Without ``join`` compute goes on at once, and only what follows on ``comm``
        may use the result."""
        heap, group = self._heap, self._process_group

        def move(tensor: torch.Tensor) -> None:
            if heap is not None:
                heap.all_reduce(tensor)
            elif group is not None:
                dist.all_reduce(tensor, group=group)

        self._enqueue("all_reduce", tensor, move, join)

    # The control plane -------------------------------------------------------------------------------------

    def all_gather_host(self, values: Sequence[int]) -> list[list[int]]:
        """Each member's int64 ``values`` (equally many), in member order. Blocks the host until all came."""
        if faults.ACTIVE is not None:
            passing = self._visit_host(faults.ACTIVE, "all_gather", values)
            values = passing["values"]
            if passing.skipped:
                return [list(values)] * self.size
        mine, group = torch.tensor(list(values), dtype=torch.int64), self._process_group

        def move() -> list[list[int]]:
            if group is None:
                return [mine.tolist()]
            out = torch.empty(self.size * len(values), dtype=torch.int64)
            all_gather(out, mine, group)
            rows: list[list[int]] = out.view(self.size, len(values)).tolist()
            return rows

        return self._on_host("all_gather", len(values), move)

    def all_reduce_host(self, values: Sequence[int], op: Reduction) -> list[int]:
        """Least, largest or sum of the members' int64 ``values`` (equally many), one by one."""
        if faults.ACTIVE is not None:
            passing = self._visit_host(faults.ACTIVE, "all_reduce", values)
            values = passing["values"]
            if passing.skipped:
                return list(values)
            if passing["group"] != self.name:
                return self._other(passing["group"]).all_reduce_host(values, op)
        mine, group = torch.tensor(list(values), dtype=torch.int64), self._process_group

        def move() -> list[int]:
            if group is not None:
                dist.all_reduce(mine, op=_REDUCTIONS[op], group=group)
            reduced: list[int] = mine.tolist()
            return reduced

        return self._on_host("all_reduce", len(values), move)

    def broadcast_host(self, values: Sequence[int], root: int) -> list[int]:
        """The int64 values of member ``root``; all members give equally many. The operation in the ledger names
        the root, so that two roots are two operations."""
        if faults.ACTIVE is not None:
            passing = self._visit_host(faults.ACTIVE, "broadcast", values, root)
            values, root = passing["values"], passing["root"]
            if passing.skipped:
                return list(values)
            if passing["group"] != self.name:
                return self._other(passing["group"]).broadcast_host(values, root)
        mine, group = torch.tensor(list(values), dtype=torch.int64), self._process_group

        def move() -> list[int]:
            if group is not None:
                dist.broadcast(mine, src=self.ranks[root], group=group)
            told: list[int] = mine.tolist()
            return told

        return self._on_host(f"broadcast from {root}", len(values), move)

    def barrier_host(self) -> None:
        """Returns when all members came."""
        if faults.ACTIVE is not None and self._visit_host(faults.ACTIVE, "barrier", ()).skipped:
            return
        group = self._process_group

        def move() -> None:
            if group is not None:
                dist.barrier(group=group)

        self._on_host("barrier", 0, move)

    def _visit_host(
        self, active: faults.Active, operation: str, values: Sequence[int], root: int | None = None
    ) -> faults.Passing:
        return active.visit("comm.host", group=self.name, operation=operation, values=list(values), root=root)

    def _on_host(self, operation: str, count: int, move: Callable[[], T]) -> T:
        """Carries a collective out on the calling thread, with what belongs to every one."""
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit(
                "comm.before", group=self.name, operation=operation, sequence=self.count + 1, heap=None
            )
        self.count += 1
        ledger = self._ledger
        sequence = (
            0 if ledger is None else ledger.collective_enter(self._handle, operation, (count,), "int64")
        )
        if self._board is not None:
            self._agree_on_header(self._board, f"{operation} int64 {(count,)}")
        found = move()
        self._ledger_complete(sequence)
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.after", group=self.name, operation=operation, sequence=sequence)
        return found

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
        self._carry("register", shape, "uint8", exchange, sequence)
        self._ledger_complete(sequence)

    # How a collective runs ---------------------------------------------------------------------------------

    def _enqueue(
        self, operation: str, tensor: torch.Tensor, move: Callable[[torch.Tensor], None], join: bool = True
    ) -> None:
        """``move`` carries the data of the tensor that it is given, which is ``tensor`` unless a fault has it
        otherwise."""
        if faults.ACTIVE is None:
            self._put(operation, tensor, partial(move, tensor), join)
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
            enqueue=partial(self._put, operation, tensor, partial(move, tensor), join),
        )
        if not passing.skipped:
            brought = passing["tensor"]
            self._put(operation, brought, partial(move, brought), join, stream=passing["stream"])

    def _put(
        self,
        operation: str,
        tensor: torch.Tensor,
        move: Callable[[], None],
        join: bool = True,
        *,
        stream: str = "comm",
    ) -> None:
        """Enqueues it on ``stream`` between two events, or captures it into the graph on ``compute``."""
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
            with self._device.collective():
                self._carry(operation, shape, dtype, move, sequence)

        ready = self._device.event()
        carrier = getattr(self._device, stream)
        self._device.compute.record(ready)
        carrier.wait(ready)
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

    def _carry(
        self, operation: str, shape: tuple[int, ...], dtype: str, move: Callable[[], None], sequence: int
    ) -> None:
        """Runs on a stream: agree on what is brought, then move the data."""
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit(
                "comm.before", group=self.name, operation=operation, sequence=sequence, heap=self._heap
            )
        if self._board is not None:
            self._agree_on_header(self._board, f"{operation} {dtype} {shape}")
        move()
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("comm.after", group=self.name, operation=operation, sequence=sequence)

    def _agree_on_header(self, board: Board, header: str) -> None:
        mine = fitted(header)
        timeout_s = self._options.timeout_s
        self._posted += 1  # one thread at a time: a group carries either streams' or the host's collectives
        try:
            headers = board.gather(self._posted, mine, timeout_s=timeout_s, stop=self._closed)
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

    # Ledger ------------------------------------------------------------------------------------------------

    def _ledger_enqueue(self, operation: str, shape: Sequence[int], dtype: str) -> int:
        self.count += 1
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
