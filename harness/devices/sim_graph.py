"""Graphs of the simulated device: a flat list of calls, made by a capture, that a replay does again.

Nothing of the Python code that made the calls runs on replay, except what a capture kept whole: operations
marked opaque, and operations with a host argument, which wait for their external event and run on the
newest arguments that an update bound.

Not here: how a capture makes the calls (``sim_capture.py``), who enqueues a graph (``sim.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from harness import faults
from harness.devices.base import HostArgs, HostOp
from harness.devices.life import Stopped
from harness.devices.sim_streams import Flag


class HostNode:
    """A captured operation with a host argument: wait for the flag, clear it, run on the newest arguments."""

    __slots__ = ("args", "flag", "op")

    def __init__(self, op: HostOp, args: HostArgs, flag: Flag) -> None:
        self.op = op
        self.args = args
        self.flag = flag

    def __call__(self) -> None:
        self.flag.wait()
        self.op(self.args)


class SimGraph:
    """Captured calls in order. ``events`` has the index of each host operation's external event."""

    def __init__(self, name: str) -> None:
        self.nodes: list[HostNode] = []
        self.sealed = False
        self.made: list[torch.Tensor] = []
        """Tensors that captured calls made, and that live as long as the graph."""
        self._name = name
        self._calls: list[Callable[[], object]] = []
        self._labels: list[str] = []

    @property
    def name(self) -> str:
        return self._name

    @property
    def host_ops(self) -> int:
        return len(self.nodes)

    @property
    def calls(self) -> int:
        return len(self._calls)

    @property
    def events(self) -> list[int]:
        return [node.flag.index for node in self.nodes]

    def add(self, call: Callable[[], object], label: str) -> None:
        self._calls.append(call)
        self._labels.append(label)

    def run(self) -> None:
        """Does the captured work, on the stream's thread. An error names the captured operation."""
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("graph.replay", graph=self._name)
        done = 0
        try:
            for call in self._calls:
                call()
                done += 1
        except Stopped:
            raise
        except Exception as error:
            error.add_note(f"in captured operation {self._labels[done]!r} of graph {self._name!r}")
            raise


def by_value(args: Sequence[HostArgs]) -> list[HostArgs]:
    """Copies of host arguments, which the caller may overwrite. One object given for all operations is
    copied once, so the operations must not write into their arguments."""
    memo: dict[int, Any] = {}
    return [_copied(one, memo) for one in args]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if value is None or isinstance(value, int | float | str | bytes):
        return value
    known = memo.get(id(value))
    if known is None:
        if isinstance(value, torch.Tensor):
            known = value.detach().clone()
        elif type(value) in (tuple, list):
            known = type(value)(_copied(item, memo) for item in value)
        else:
            known = copy.deepcopy(value)
        memo[id(value)] = known
    return known
