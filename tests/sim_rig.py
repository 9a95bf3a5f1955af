"""What the tests of the simulated device share: gates that make its schedule exact.

An operation that stands at a gate says so and goes on when the test opens it, so a test states an order
instead of waiting for one. Every wait has the deadline ``LONG_S``, which no passing test comes near.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from harness import faults
from harness.devices.sim import SimDevice, SimOptions
from harness.ledger import LedgerWriter

LONG_S = 30.0
FAST = {"copy_latency_us": 0.0, "host_copy_latency_us": 0.0}


class Gate:
    """An operation that tells when it is reached and ends when it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        if not self._opened.wait(LONG_S):
            raise AssertionError("the test did not open the gate")

    def open(self) -> None:
        self._opened.set()

    def await_reached(self) -> None:
        assert self.reached.wait(LONG_S), "nothing came to the gate"


@dataclass
class SiteGate:
    """A visitor: the passes of ``site`` stand at ``gate``; all passes are counted."""

    site: str
    gate: Gate
    only: Callable[[dict[str, Any]], bool] = lambda context: True
    passed: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def visit(self, passing: faults.Passing) -> None:
        self.passed.append((passing.site, passing.values))
        if passing.site == self.site and self.only(passing.values):
            self.gate()


@contextmanager
def visiting(visitor: faults.Visitor) -> Iterator[None]:
    faults.activate(visitor)
    try:
        yield
    finally:
        faults.activate()


@contextmanager
def opened(*, ledger: LedgerWriter | None = None, **options: Any) -> Iterator[SimDevice]:
    """A device without modelled copy time that is closed at the end, gates or not."""
    device = SimDevice(SimOptions(**{**FAST, "host_timeout_s": LONG_S, **options}), ledger)
    try:
        yield device
    finally:
        device.close(LONG_S)


def in_thread(call: Callable[[], None]) -> threading.Thread:
    """Runs what may block the host beside the test; the test ends it with ``joined``."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def joined(thread: threading.Thread) -> None:
    thread.join(LONG_S)
    assert not thread.is_alive()


def buffer_of(device: SimDevice, values: list[float], *, pinned: bool, staging: bool = False) -> Any:
    make = device.host_staging if staging else device.host_empty
    buffer = make([len(values)], torch.float32, pinned=pinned)
    buffer.tensor.copy_(torch.tensor(values))
    return buffer
