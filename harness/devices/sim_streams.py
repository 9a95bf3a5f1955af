"""Streams, events and flags of the simulated device.

A stream is a daemon thread with a first-in first-out queue. Every wait, on the host or on a stream thread,
goes through one ``Life``: when an operation fails or the device is closed, all of them end. Locks are held
for bookkeeping only, never while an operation runs.

Not here: what a copy costs (``sim_memory.py``), what a graph is (``sim_graph.py``).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import torch

from harness import faults
from harness.devices.base import DeviceError, DeviceTimeout, Event, Op
from harness.devices.call_sites import call_site
from harness.devices.life import Life, Stopped

if TYPE_CHECKING:
    from harness.ledger import LedgerWriter


class Point:
    """One moment in one stream: set once, when all work before it is done.

    ``transfers`` are copies that the stream handed to the DMA engine and went past (defect D3): only a wait
    on the host looks at them.
    """

    __slots__ = ("behind", "done", "signal", "transfers")

    def __init__(self, behind: tuple[SimStream, int] | None = None) -> None:
        self.behind = behind
        """The stream, and the last operation before the point."""
        self.done = False
        self.signal = threading.Event()
        self.transfers: tuple[Point, ...] = ()

    def finish(self) -> None:
        self.done = True
        self.signal.set()

    def wait_on_host(self, life: Life, timeout_s: float, what: str) -> None:
        """Raises DeviceTimeout after ``timeout_s``, DeviceError if the device failed or was closed."""
        deadline_s = time.monotonic() + timeout_s
        life.check()
        if self.behind is not None and not self.done:
            stream, sequence = self.behind
            stream.host_waits(sequence)
        try:
            came = life.block(self.signal, timeout_s)
            for transfer in self.transfers if came else ():
                came = came and life.block(transfer.signal, max(0.0, deadline_s - time.monotonic()))
        except Stopped:
            life.check()
            raise
        if not came:
            raise DeviceTimeout(f"{what} was not done after {timeout_s:g} s")


class SimEvent:
    """The newest point that was recorded in it, as in PyTorch: recording again moves it."""

    __slots__ = ("_life", "name", "point")

    def __init__(self, life: Life, name: str = "") -> None:
        self._life = life
        self.name = name
        self.point: Point | None = None

    def query(self) -> bool:
        self._life.check()
        point = self.point
        return point is None or (point.done and all(transfer.done for transfer in point.transfers))

    def synchronize(self, timeout_s: float) -> None:
        self._life.check()
        if self.point is not None:
            self.point.wait_on_host(self._life, timeout_s, "an event")


class Flag:
    """An external event: a flag in device memory. A record while it is set changes nothing, and is lost."""

    __slots__ = ("_life", "_name", "_raised", "index")

    def __init__(self, life: Life, name: str, index: int) -> None:
        self.index = index
        self._life = life
        self._name = name
        self._raised = threading.Event()

    @property
    def name(self) -> str:
        return self._name

    def record(self) -> None:
        """Writes 1."""
        self._raised.set()

    def wait(self) -> None:
        """Waits for 1, then writes 0. On a stream thread."""
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit("event.wait", stream="compute", event=self._name)
            if passing.skipped:
                return
        self._life.block(self._raised, None)
        self._raised.clear()


class Worker:
    """A daemon thread that runs what is posted to it, in order, until the device stops."""

    def __init__(self, name: str, life: Life) -> None:
        self.thread = threading.Thread(target=self._main, name=f"hangrig-{name}", daemon=True)
        self._worker_name = name
        self._life = life
        self._queue: SimpleQueue[tuple[Op, int, str] | None] = SimpleQueue()
        self.thread.start()

    def post(self, op: Op, sequence: int, label: str) -> None:
        """``sequence`` 0: not an operation of the ledger."""
        self._queue.put((op, sequence, label))

    def end(self) -> None:
        """Asks the thread to end after what it runs now; what is queued is dropped once the life stopped."""
        self._queue.put(None)

    def carry(self, op: Op, label: str) -> None:
        """Runs one operation, on the thread."""
        op()

    def completed(self, sequence: int) -> None:
        """Called on the thread after each operation of the ledger."""

    def _main(self) -> None:
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                if self._life.stopped.is_set():
                    continue
                op, sequence, label = item
                try:
                    if sequence and faults.ACTIVE is not None:
                        faults.ACTIVE.visit("device.operation", stream=self._worker_name, label=label)
                    self.carry(op, label)
                    if sequence:
                        self.completed(sequence)
                except Stopped:
                    continue
                except BaseException as error:  # kept as the device's error: a thread is never lost
                    self._life.fail(f"{label!r} on {self._worker_name}", error)
                del item, op  # what the operation holds (tensors) lives no longer than it


class SimStream(Worker):
    """A stream. The host enqueues; the thread completes. With a ledger, both sides are written down."""

    def __init__(self, name: str, life: Life, ledger: LedgerWriter | None) -> None:
        self._name = name
        self._ledger = ledger
        self._transfers: list[Point] = []
        self._newest = 0
        """The last operation that was enqueued, by its number in the ledger."""
        self.recorder: Callable[[Op, str, bool], None] | None = None
        """Set during a capture: takes operations instead of the queue."""
        self.around: Callable[[str, str], AbstractContextManager[None]] | None = None
        """Entered around each operation, given the stream's name and the operation's label."""
        super().__init__(name, life)

    @property
    def name(self) -> str:
        return self._name

    @property
    def stall(self) -> None:
        return None

    def run(
        self, op: Op, label: str, *, opaque: bool = False, began: Op | None = None, done: Op | None = None
    ) -> None:
        if self.recorder is None:
            self.enqueue(op if began is done is None else partial(_told, op, began, done), label)
        elif began is done is None:
            self.recorder(op, label, opaque)
        else:
            raise DeviceError(f"{label!r} in a capture wants to tell when it runs; only a replay has a time")

    def delay(self, seconds: float, label: str) -> None:
        self.run(partial(self._life.delay, seconds), label, opaque=True)

    def record(self, event: Event) -> None:
        self.refuse_in_capture("an event record")
        self._life.check()
        point, ours = Point((self, self._newest)), _ours(event)
        self.post(lambda: self._record(point, ours.name), 0, "event.record")
        ours.point = point

    def wait(self, event: Event) -> None:
        self.refuse_in_capture("an event wait")
        ours = _ours(event)
        point = ours.point
        if point is not None:
            label = f"event.wait {ours.name}" if ours.name else "event.wait"
            self.enqueue(lambda: self._wait(point, ours.name), label)

    def synchronize(self, timeout_s: float) -> None:
        self.refuse_in_capture("a synchronisation")
        self._life.check()
        point = Point((self, self._newest))
        self.post(lambda: self._reach(point), 0, "synchronize")
        point.wait_on_host(self._life, timeout_s, f"stream {self._name}")

    def enqueue(self, op: Op, label: str) -> None:
        """Queues an operation that the ledger counts, whether or not a capture is under way. Records and
        synchronisations are not counted: the operation before them tells the same."""
        self._life.check()
        sequence = 0 if self._ledger is None else self._ledger.enqueue(self._name, label, call_site())
        self._newest = sequence
        self.post(op, sequence, label)

    def host_waits(self, sequence: int) -> None:
        """The host is about to wait for the operation of that number in the ledger."""
        if self._ledger is not None and sequence:
            self._ledger.host_waits(self._name, sequence)

    def carry(self, op: Op, label: str) -> None:
        if self.around is None:
            op()
            return
        with self.around(self._name, label):
            op()

    def passed(self, transfer: Point) -> None:
        """On the stream's thread: the stream goes on although ``transfer`` is not done."""
        self._transfers = [one for one in self._transfers if not one.done]
        self._transfers.append(transfer)

    def refuse_in_capture(self, what: str) -> None:
        if self.recorder is not None:
            raise DeviceError(f"{what} on {self._name} during a graph capture; move it out of the capture")

    def stamp(self) -> None:
        """On the monitor's thread: somebody looked."""
        if self._ledger is not None:
            self._ledger.stamp(self._name)

    def completed(self, sequence: int) -> None:
        if self._ledger is not None:
            self._ledger.complete(self._name, sequence)

    def _record(self, point: Point, name: str) -> None:
        reach = partial(self._reach, point)
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit("event.record", stream=self._name, event=name, record=reach)
            if passing.skipped:
                return
        reach()

    def _reach(self, point: Point) -> None:
        if self._transfers:
            point.transfers = tuple(one for one in self._transfers if not one.done)
        point.finish()

    def _wait(self, point: Point, name: str) -> None:
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit("event.wait", stream=self._name, event=name)
            if passing.skipped:
                return
        self._life.block(point.signal, None)


def _told(op: Op, began: Op | None, done: Op | None) -> None:
    if began is not None:
        began()
    op()
    if done is not None:
        done()


def _ours(event: Event) -> SimEvent:
    if not isinstance(event, SimEvent):
        raise TypeError(f"{event!r} is not an event of the simulated device; make it with device.event()")
    return event
