"""The Ascend NPU device: what ``accelerator.py`` leaves open, as CANN and torch_npu have it.

Host arguments of a graph go the way that torch_npu's own ``NPUGraph.update`` goes (torch_npu 2.7.1 and 2.14.0,
``npu/graphs.py``), and that defect D1 of HANGS.md is about. In the capture each host operation waits for its
external event and resets it, and its arguments are written by a *task group*. An update, on its own stream,
makes the tasks of each group anew with new numbers and then records the external event. That is a flag: a
record while it is set is lost. Nothing but the fence makes an update wait for the replay before.

The tasks of an update must be as many and of the same kind as those of the group (CANN,
``aclmdlRICaptureTaskUpdateBegin``), so each number is one ``fill_``, which takes it by value. It needs a driver of
25.0.RC1 or later (ibid.); an older one fails with ACL_ERROR_RT_FEATURE_NOT_SUPPORT at the first update.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from harness import faults
from harness.devices.accelerator import AcceleratorDevice
from harness.devices.accelerator_graph import AcceleratorGraph, ExternalFlag, HostNode
from harness.devices.accelerator_streams import AcceleratorStream, wait_on_host
from harness.devices.base import HostArgs

_MATRIX = 4096
"""Rows of the matrices whose product keeps the device busy: large, so that a delay is few launches and does not
fill the task queue of 4,096."""
_SAMPLE_PRODUCTS = 20


class NpuDevice(AcceleratorDevice):
    """One Ascend NPU (one chip)."""

    waits_for_pageable: ClassVar[frozenset[str]] = frozenset({"copy.h2d", "copy.d2h"})
    _product_s: float | None = None
    _matrices: tuple[torch.Tensor, ...] = ()

    def _graph(self) -> Any:
        return self._module.NPUGraph()

    def _external_event(self) -> Any:
        return self._module.ExternalEvent()

    def _write_captured(self, graph: AcceleratorGraph) -> None:
        for node in graph.nodes:
            _write(node, node.numbers)

    def _before_captured(self, node: HostNode) -> None:
        stream = self.compute.raw
        node.flag.raw.wait(stream)
        node.flag.raw.reset(stream)
        self._module.graph_task_group_begin(stream)
        try:
            _write(node, node.numbers)
        finally:
            node.handle = self._module.graph_task_group_end(stream)

    def _update(self, graph: AcceleratorGraph, args: Sequence[HostArgs]) -> None:
        recorded: list[Any] = []

        def rebind() -> None:
            stream = self.update.raw
            for layer, (node, one) in enumerate(zip(graph.nodes, args, strict=True)):
                numbers = self._rebound(graph, layer, one)
                self._module.graph_task_update_begin(stream, node.handle)
                try:
                    _write(node, numbers)
                finally:
                    self._module.graph_task_update_end(stream)
                if self._record(node.flag):
                    recorded.extend(self._recorded([node.flag]))

        self.update.enqueue(rebind, f"graph.update {graph.name}", calls=recorded, kept=(graph,))

    def _record(self, flag: ExternalFlag) -> bool:
        """Whether it was recorded: a fault may leave it out, and the flag stays as it is."""
        record = partial(flag.raw.record, self.update.raw)
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit(
                "event.record", stall=self.update.stall, stream="update", event=flag.name, record=record
            )
            if passing.skipped:
                return False
        record()
        return True

    def _before_replay(self, graph: AcceleratorGraph) -> None:
        """Nothing: the captured waits are in the graph."""

    def _prepare_delay(self) -> None:
        """How long one product of large matrices takes. ``torch.npu._sleep`` is there in 2.14.0, not in 2.7.1."""
        if self._product_s is not None:
            return
        aside = self._module.Stream()  # of its own, on which nothing waits
        began, ended = (self._module.Event(enable_timing=True) for _ in range(2))
        with self._module.stream(aside):
            self._matrices = tuple(
                torch.zeros((_MATRIX, _MATRIX), dtype=torch.float16, device=self.torch_device)
                for _ in range(3)
            )
            self._products(2)  # compiles
            began.record(aside)
            self._products(_SAMPLE_PRODUCTS)
            ended.record(aside)
        wait_on_host(ended.query, self._life, self._host_timeout_s, "the calibration of delays")
        self._product_s = began.elapsed_time(ended) * 1e-3 / _SAMPLE_PRODUCTS

    def _occupy(self, seconds: float) -> None:
        assert self._product_s is not None
        self._products(max(1, math.ceil(seconds / self._product_s)))

    def _products(self, count: int) -> None:
        one, other, out = self._matrices
        for _ in range(count):
            torch.mm(one, other, out=out)

    def _stall(self, stream: AcceleratorStream, seconds: float | None) -> None:
        with stream.context():
            if seconds is None:
                self._module.ExternalEvent().wait(stream.raw)  # which nobody records
                return
            self._prepare_delay()
            self._occupy(seconds)


def _write(node: HostNode, numbers: Sequence[int]) -> None:
    for place, number in enumerate(numbers):
        node.flat[place].fill_(number)
