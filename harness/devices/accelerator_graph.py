"""Graphs of a real accelerator: what is captured, and the host arguments that a replay takes.

A captured operation cannot take Python numbers, which would be frozen into it. So each tuple of whole numbers
of its arguments is an int64 tensor of that length on the device, a single number one of no dimension; all of
them lie in one static tensor of the graph. How new numbers get there is what CUDA and CANN do differently
(``cuda.py``, ``npu.py``).

The operations of a capture are gathered first. They run once as they are, to warm up (libraries make their
workspaces and communicators then, which a capture refuses), and a second time while the stream is captured. So what
they write into memory from before the capture is written. Operations and tensors that they use live as long as the
graph.

Not here: who enqueues a graph, and its ledger (``accelerator.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from harness.devices.base import HostArgs, HostOp, Op


class ExternalFlag:
    """An external event. ``raw``: the platform's, where it has one; ``index``: its place in the ledger."""

    __slots__ = ("_name", "index", "raw")

    def __init__(self, name: str, index: int, raw: Any) -> None:
        self._name = name
        self.index = index
        self.raw = raw

    @property
    def name(self) -> str:
        return self._name


class HostNode:
    """A captured operation with host arguments. ``handle``: of its task group, where the platform has one."""

    __slots__ = ("flag", "flat", "handle", "label", "numbers", "op", "shapes")

    def __init__(self, op: HostOp, args: HostArgs, flag: ExternalFlag, label: str) -> None:
        self.op = op
        self.flag = flag
        self.label = label
        self.shapes = [_shape(value, label) for value in args]
        self.numbers = self.numbers_of(args)
        self.flat = torch.empty(0, dtype=torch.int64)
        """Its part of the graph's static tensor."""
        self.handle: Any = None

    def numbers_of(self, args: HostArgs) -> list[int]:
        """One after the other. Raises ValueError for arguments of other lengths than the captured ones."""
        shapes = [_shape(value, self.label) for value in args]
        if shapes != self.shapes:
            raise ValueError(
                f"{self.label}: captured with host arguments of shapes {self.shapes}, updated with {shapes}; pad"
                " them to the graph's bucket"
            )
        flat: list[int] = []
        for value in args:
            flat += value if isinstance(value, tuple | list) else (value,)
        return flat

    def run(self) -> None:
        sizes = [shape[0] if shape else 1 for shape in self.shapes]
        parts = torch.split(self.flat, sizes)
        self.op(tuple(part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)))


class AcceleratorGraph:
    """Captured operations. ``raw``: the platform's graph; ``bound``: what an update recorded, where one waits
    so."""

    def __init__(self, name: str) -> None:
        self.nodes: list[HostNode] = []
        self.sealed = False
        self.raw: Any = None
        self.bound: Any = None
        self.static = torch.empty(0, dtype=torch.int64)
        self._name = name
        self._calls: list[tuple[Callable[[], object], str]] = []
        self._captured = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def host_ops(self) -> int:
        return len(self.nodes)

    @property
    def events(self) -> list[int]:
        return [node.flag.index for node in self.nodes]

    @property
    def numbers(self) -> list[int]:
        """The host arguments as they were captured, of all operations."""
        return [number for node in self.nodes for number in node.numbers]

    def add(self, op: Op, label: str) -> None:
        self._calls.append((op, label))

    def add_host_op(self, node: HostNode, before: Callable[[HostNode], None]) -> None:
        """``before`` is captured too, in front of the operation; the warm-up leaves it out."""
        self.nodes.append(node)
        self._calls.append((partial(self._host_op, node, before), node.label))

    def place(self, device: torch.device) -> None:
        """Makes the static tensor of all arguments, uninitialised."""
        self.static = torch.empty(len(self.numbers), dtype=torch.int64, device=device)
        parts = torch.split(self.static, [len(node.numbers) for node in self.nodes])
        for node, part in zip(self.nodes, parts, strict=True):
            node.flat = part

    def run(self, *, captured: bool) -> None:
        """All operations, in order, on the current stream: to warm up, or ``captured``. An error names the
        operation."""
        self._captured = captured
        for call, label in self._calls:
            try:
                call()
            except Exception as error:
                error.add_note(f"in captured operation {label!r} of graph {self._name!r}")
                raise

    def _host_op(self, node: HostNode, before: Callable[[HostNode], None]) -> None:
        if self._captured:
            before(node)
        node.run()


def bound_numbers(graph: AcceleratorGraph, args: Sequence[HostArgs]) -> list[list[int]]:
    """The numbers of each host operation. Raises ValueError if there is not one tuple of arguments for each."""
    if len(args) != graph.host_ops:
        raise ValueError(
            f"graph {graph.name!r} has {graph.host_ops} host operations, but {len(args)} arguments came"
        )
    return [node.numbers_of(one) for node, one in zip(graph.nodes, args, strict=True)]


def _shape(value: object, label: str) -> tuple[int, ...]:
    if isinstance(value, int):
        return ()
    if isinstance(value, tuple | list) and all(isinstance(item, int) for item in value):
        return (len(value),)
    raise TypeError(
        f"{label}: a captured operation takes whole numbers and tuples of them as host arguments, not {value!r}"
    )
