"""The CUDA device: what ``accelerator.py`` leaves open, as CUDA has it.

Host arguments of a graph: an update copies all of them, from a pinned block of its own, into the graph's static
tensor on ``update`` and records one event; a replay waits for that event before it is launched. CUDA's events
are no flags: a wait is for the newest record at the time of the call (CUDA runtime API,
``cudaStreamWaitEvent``), so none is lost and a missing fence cannot stop a replay. It makes the replay before
read numbers that are not its own.

torch >= 2.8 has ``torch.cuda.Event(external=True)``, which a capture turns into wait nodes. They are not used: one
wait in front of the launch is the same order, and torch 2.7 has it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from harness import faults
from harness.devices.accelerator import AcceleratorDevice
from harness.devices.accelerator_graph import AcceleratorGraph, HostNode
from harness.devices.accelerator_streams import AcceleratorStream, wait_on_host
from harness.devices.base import HostArgs

_SAMPLE_CYCLES = 20_000_000
"""About 10 ms at 2 GHz: long against the launch, short for whoever waits."""
_FOR_EVER_CYCLES = 1 << 62


class CudaDevice(AcceleratorDevice):
    """One CUDA GPU."""

    waits_for_pageable: ClassVar[frozenset[str]] = frozenset({"copy.d2h"})
    _cycles_per_s: float | None = None

    def _graph(self) -> Any:
        return self._module.CUDAGraph()

    def _external_event(self) -> Any:
        return None

    def _write_captured(self, graph: AcceleratorGraph) -> None:
        graph.static.copy_(torch.tensor(graph.numbers, dtype=torch.int64))

    def _before_captured(self, node: HostNode) -> None:
        """Nothing: the replay as a whole waits."""

    def _update(self, graph: AcceleratorGraph, args: Sequence[HostArgs]) -> None:
        staging = self._host.empty((len(graph.numbers),), torch.int64, True)
        recorded: list[Any] = []

        def bring() -> None:
            numbers: list[int] = []
            for layer, one in enumerate(args):
                numbers += self._rebound(graph, layer, one)
            staging.tensor.copy_(torch.tensor(numbers, dtype=torch.int64))
            graph.static.copy_(staging.tensor, non_blocking=True)
            record = partial(graph.bound.record, self.update.raw)
            if faults.ACTIVE is not None:
                passing = faults.ACTIVE.visit(
                    "event.record", stall=self.update.stall, stream="update", event=graph.name, record=record
                )
                if passing.skipped:
                    return
            record()
            recorded.extend(self._recorded([node.flag for node in graph.nodes]))

        mark = self.update.enqueue(
            bring, f"graph.update {graph.name}", calls=recorded, kept=(graph, staging.block)
        )
        staging.block.used_by(mark)
        self._host.free(staging)

    def _before_replay(self, graph: AcceleratorGraph) -> None:
        if not graph.nodes:
            return
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit(
                "event.wait", stall=self.compute.stall, stream="compute", event=graph.name
            )
            if passing.skipped:
                return
        graph.bound.wait(self.compute.raw)

    def _prepare_delay(self) -> None:
        """How many cycles ``torch.cuda._sleep``, torch's own busy kernel, spins in a second."""
        if self._cycles_per_s is not None:
            return
        aside = self._module.Stream()  # of its own, on which nothing waits
        began, ended = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(aside):
            self._module._sleep(1000)  # loads the kernel
            began.record(aside)
            self._module._sleep(_SAMPLE_CYCLES)
            ended.record(aside)
        wait_on_host(ended.query, self._life, self._host_timeout_s, "the calibration of delays")
        self._cycles_per_s = _SAMPLE_CYCLES / (began.elapsed_time(ended) * 1e-3)

    def _occupy(self, seconds: float) -> None:
        assert self._cycles_per_s is not None
        self._module._sleep(max(1, int(seconds * self._cycles_per_s)))

    def _stall(self, stream: AcceleratorStream, seconds: float | None) -> None:
        with stream.context():
            if seconds is None:
                self._module._sleep(_FOR_EVER_CYCLES)
                return
            self._prepare_delay()
            self._occupy(seconds)
