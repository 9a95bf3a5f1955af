"""What every group of ranks is, and the collectives between its hosts: they block the host, and go over gloo.

Where gloo carries data, the ranks first agree on the board what they bring: NCCL and HCCL wait for ever on a
mismatch, gloo would end the process. The agreement of each step goes without: it is in every step's path, and
what it brings never changes.

Not here: collectives on device tensors (``collectives.py``), which groups a rank has (``comm.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

from harness import faults
from harness.ledger import LedgerWriter
from serving.board import Board, BoardTimeout, fitted
from serving.carriers import GLOO, Carrier, GroupData
from serving.groups import Topology, of_the_device
from serving.symmetric import GROWTH_BYTES

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
    """Post the header of each collective on the board before gloo moves data."""
    carrier: Carrier = GLOO

    @property
    def topology(self) -> Topology:
        return Topology(self.rank, self.world, self.dp or self.world)


class HostGroup:
    """One named group as its hosts use it. ``member`` is this rank's place in ``ranks``."""

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        options: CommOptions,
        ledger: LedgerWriter | None,
        process_group: dist.ProcessGroup | None,
        token: str,
        closed: Callable[[], bool],
        other: Callable[[str], HostGroup],
    ) -> None:
        """``other`` gives this rank's group of another name."""
        self.name = name
        self.ranks = ranks
        self.member = ranks.index(options.rank)
        self.size = len(ranks)
        self.count = 0
        """Collectives that this rank has enqueued or entered, those of replayed graphs too."""
        self.files = f"{token}-{name}-{ranks[0]}"
        """Beginning of the names of the files that the members share."""
        self._other = other
        self._options = options
        self._ledger = ledger
        self._handle = ledger.group(name, ranks) if ledger is not None else 0
        self._process_group = process_group
        self._posted = 0
        self._closed = closed
        self._board: Board | None = None
        elsewhere = options.carrier.enqueues and of_the_device(name)  # where the platform itself waits
        if self.size > 1 and options.agree_first and name != "agree" and not elsewhere:
            self._board = Board(options.shared / f"{self.files}.board", member=self.member, size=self.size)

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
            GroupData(group).all_gather(out, mine)
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
        if self._board is not None:
            self._board.close()
