"""Programs of a captured graph whose host argument is updated while a replay is pending.

Two steps of a decode loop with the host one step ahead: update, replay, update, replay. The second update may run
only when the first replay has taken its argument; an engine says so with a fence behind the replay. Without one the
second record can find the first still unconsumed. On CANN that record is lost (HANGS.md, D1), and the second replay
waits for one that does not come: after a while the program makes another, so that the device goes on.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from harness.devices.base import DeviceTimeout, Event
from harness.litmus.program import STALLED, Program

_RESCUE = 9
"""The argument of the update that lets a stopped replay go on."""
_PATIENCE_S = 0.05
"""How long an unfenced program waits for its second replay: many times what it takes on any device."""


class GraphFenced(Program):
    """Each update waits for the replay before it."""

    name: ClassVar[str] = "graph-fenced"
    family: ClassVar[str] = "graphs"
    watched: ClassVar[tuple[str, ...]] = ("newer-argument", "lost-record")
    fenced: ClassVar[bool] = True

    def setup(self) -> None:
        device = self.device
        self.cell = self.bench.on_device(1)
        self.used = self.bench.on_device(2)
        flag = device.external_event("litmus argument")
        with device.capture("litmus") as self.graph:
            device.host_op(lambda args: _put(self.cell, args[0]), (0,), flag, "argument")
        self.rescued = False

    def prepare(self) -> None:
        if self.rescued:  # its flag may have been left set
            self.setup()
        self.bench.fill(self.used, 0)

    def body(self) -> None:
        replayed = self.device.event("replayed")
        self.bench.lead(self.device.compute)
        for step in (1, 2):
            self.device.graph_update(self.graph, [(step,)], replayed if self.fenced else None)
            self.device.replay(self.graph)
            self._keep(step - 1)
            self.device.compute.record(replayed)
            self.bench.pause()
        self._rescue(replayed)

    def observe(self) -> str:
        first, second = self.used.tolist()
        if (first, second) == (1, 2):
            return "own"
        if first == 1 and second == _RESCUE:
            return (
                STALLED if self.fenced else "late"
            )  # without a fence the patience is short: it may be the machine
        if first != 2:
            return "other"
        return "lost-record" if second == _RESCUE else "newer-argument"

    def _keep(self, row: int) -> None:
        self.device.compute.run(lambda: _put(self.used[row : row + 1], self.cell), "keep")

    def _rescue(self, replayed: Event) -> None:
        """Half of what is left of the shot, for a program that must not stop: nothing else may look like it."""
        try:
            replayed.synchronize(self.bench.left_s / 2 if self.fenced else _PATIENCE_S)
        except DeviceTimeout:
            self.rescued = True
            self.device.graph_update(self.graph, [(_RESCUE,)], None)


class GraphUnfenced(GraphFenced):
    """Updates wait for nothing."""

    name: ClassVar[str] = "graph-unfenced"
    fenced: ClassVar[bool] = False


def _put(cell: torch.Tensor, value: int | torch.Tensor) -> None:
    """A captured operation gets its argument as a number where it is run again, else as a tensor on the device."""
    if isinstance(value, int):
        cell.fill_(value)
    else:
        cell.copy_(value)
