"""Streams and events of a real accelerator, over the module that torch has for it (``torch.cuda``, ``torch.npu``).

The host thread runs each operation at once, within its stream: that enqueues the kernels. Behind each operation it
records a heartbeat event (``heartbeats.py``). Faults and jitter act on the host, where an operation is enqueued: a
fault that would hold up a stream's own thread on the simulated device keeps the stream busy instead (``stall``).

Host waits poll an event up to their deadline and never call a synchronisation of the driver, which has none.
``record`` may block for as long as an NPU's task queue is full, with the interpreter's lock held; that shows in the
ledger as a host that stands in its phase while the monitor's stamps stop.

Not here: memory and copies (``accelerator_memory.py``), graphs (``accelerator_graph.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from harness import faults
from harness.devices.base import DeviceError, DeviceTimeout, Event, Op
from harness.devices.call_sites import call_site
from harness.devices.heartbeats import Heartbeats, Mark
from harness.devices.life import Life

if TYPE_CHECKING:
    from harness.ledger import LedgerWriter

T = TypeVar("T")
_LONGEST_PAUSE_S = 1e-3
_FIRST_PAUSE_S = 20e-6
_EAGER_LOOKS = 20
"""So often a host wait asks before it sleeps at all: most waits of a decode step are shorter than a sleep."""


def guarded(life: Life, where: str, call: Callable[[], T]) -> T:
    """What ``call`` gives. An error of it is the device's from now on, and raised as DeviceError."""
    try:
        return call()
    except DeviceError:
        raise
    except Exception as error:
        life.fail(where, error)
        life.check()
        raise


def wait_on_host(query: Callable[[], bool], life: Life, timeout_s: float, what: str) -> None:
    """Returns when ``query`` does. Raises DeviceTimeout after ``timeout_s``, DeviceError if the device failed."""
    deadline_s = time.monotonic() + timeout_s
    looks, pause_s = 0, _FIRST_PAUSE_S
    while not guarded(life, f"waiting for {what}", query):
        life.check()
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise DeviceTimeout(f"{what} was not done after {timeout_s:g} s")
        looks += 1
        if looks > _EAGER_LOOKS:
            life.stopped.wait(min(pause_s, left_s))
            pause_s = min(2.0 * pause_s, _LONGEST_PAUSE_S)
    life.check()


class AcceleratorEvent:
    """One event of the platform: recording again moves it, and never recorded means done."""

    __slots__ = ("_life", "_raw", "behind", "name", "recorded")

    def __init__(self, life: Life, raw: Any, name: str = "") -> None:
        self._life = life
        self._raw = raw
        self.name = name
        self.recorded = False
        self.behind: tuple[AcceleratorStream, int] | None = None
        """The stream, and the last operation before the point."""

    def query(self) -> bool:
        self._life.check()
        return not self.recorded or bool(guarded(self._life, "an event's query", self._raw.query))

    def synchronize(self, timeout_s: float) -> None:
        self._life.check()
        if not self.recorded:
            return
        if self.behind is not None and not self.query():
            stream, sequence = self.behind
            stream.host_waits(sequence)
        wait_on_host(self._raw.query, self._life, timeout_s, "an event")

    def record_on(self, stream: AcceleratorStream, newest: int) -> None:
        self._raw.record(stream.raw)
        self.recorded = True
        self.behind = (stream, newest)

    def wait_on(self, raw_stream: Any) -> None:
        self._raw.wait(raw_stream)


class AcceleratorStream:
    """A stream of the platform. ``home``: it is the host thread's current stream, so that tensors made outside
    operations are in its order."""

    def __init__(
        self,
        name: str,
        raw: Any,
        module: Any,
        life: Life,
        heartbeats: Heartbeats,
        ledger: LedgerWriter | None,
        *,
        home: bool,
        stall: Callable[[AcceleratorStream, float | None], None],
    ) -> None:
        self.raw = raw
        self.recorder: Callable[[Op, str], None] | None = None
        """Set during a capture: takes operations instead of the stream."""
        self._name = name
        self._module = module
        self._life = life
        self._heartbeats = heartbeats
        self._ledger = ledger
        self._home = home
        self._stall = stall
        self._newest = 0

    @property
    def name(self) -> str:
        return self._name

    def run(
        self, op: Op, label: str, *, opaque: bool = False, began: Op | None = None, done: Op | None = None
    ) -> None:
        if self.recorder is not None:
            if began is not None or done is not None:
                raise DeviceError(
                    f"{label!r} in a capture wants to tell when it runs; only a replay has a time"
                )
            self.recorder(op, label)
            return
        if began is not None:
            self._life.check()
            self._mark(0, f"before {label}", calls=[began])
        # What another stream's operation uses must live until it is done: the caching allocator hands a freed block
        # out again in the order of the stream that it was made on.
        kept = () if self._home else (op,)
        self.enqueue(op, label, calls=() if done is None else (done,), kept=kept)

    def enqueue(self, op: Op, label: str, *, calls: Iterable[Op] = (), kept: Iterable[object] = ()) -> Mark:
        """Runs what enqueues the kernels, whether or not a capture is being gathered. Raises DeviceError when it
        raises: the ledger then keeps the operation as unfinished."""
        self._life.check()
        sequence = 0 if self._ledger is None else self._ledger.enqueue(self._name, label, call_site())
        self._newest = sequence
        guarded(self._life, f"{label!r} on {self._name}", partial(self._carry, op, label))
        return self._mark(sequence, label, calls=calls, kept=kept)

    def record(self, event: Event) -> None:
        self.refuse_in_capture("an event record")
        self._life.check()
        ours = our_event(event)
        record = partial(ours.record_on, self, self._newest)
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit(
                "event.record", stall=self.stall, stream=self._name, event=ours.name, record=record
            )
            if passing.skipped:
                return
        guarded(self._life, f"an event record on {self._name}", record)

    def wait(self, event: Event) -> None:
        self.refuse_in_capture("an event wait")
        ours = our_event(event)
        if ours.recorded:
            label = f"event.wait {ours.name}" if ours.name else "event.wait"
            self.enqueue(partial(self._wait, ours), label)

    def synchronize(self, timeout_s: float) -> None:
        self.wait_for(self.reach(), timeout_s)

    def reach(self) -> Mark:
        """A mark behind all that the stream was given."""
        self.refuse_in_capture("a synchronisation")
        self._life.check()
        return self._mark(0, "synchronize")

    def wait_for(self, mark: Mark, timeout_s: float) -> None:
        """Waits on the host, as ``synchronize`` does."""
        self.host_waits(self._newest)
        wait_on_host(partial(_passed, mark), self._life, timeout_s, f"stream {self._name}")

    def host_waits(self, sequence: int) -> None:
        """The host is about to wait for the operation of that number in the ledger."""
        if self._ledger is not None and sequence:
            self._ledger.host_waits(self._name, sequence)

    def host_waits_for_newest(self) -> None:
        """The same, for what is being enqueued now: the call itself will wait."""
        self.host_waits(self._newest)

    def refuse_in_capture(self, what: str) -> None:
        if self.recorder is not None:
            raise DeviceError(f"{what} on {self._name} during a graph capture; move it out of the capture")

    def stall(self, seconds: float | None) -> None:
        """Keeps the stream busy for so long, None: for ever. What a fault does to a stream's own thread
        elsewhere."""
        self._stall(self, seconds)

    def context(self) -> AbstractContextManager[Any]:
        """Within it this stream is the current one."""
        if self._home:
            return nullcontext()
        entered: AbstractContextManager[Any] = self._module.stream(self.raw)
        return entered

    def _carry(self, op: Op, label: str) -> None:
        with torch.no_grad(), self.context():
            if faults.ACTIVE is not None:
                faults.ACTIVE.visit("device.operation", stall=self.stall, stream=self._name, label=label)
            op()

    def _wait(self, event: AcceleratorEvent) -> None:
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit("event.wait", stall=self.stall, stream=self._name, event=event.name)
            if passing.skipped:
                return
        event.wait_on(self.raw)

    def _mark(
        self, sequence: int, label: str, *, calls: Iterable[Op] = (), kept: Iterable[object] = ()
    ) -> Mark:
        put = partial(self._heartbeats.put, self._name, sequence, label, calls=calls, kept=kept)
        return guarded(self._life, f"the heartbeat of {label!r} on {self._name}", put)


def _passed(mark: Mark) -> bool:
    event = mark.event  # the monitor takes it away once it has passed, and may be late
    return mark.passed or event is None or bool(event.query())


def our_event(event: Event) -> AcceleratorEvent:
    if not isinstance(event, AcceleratorEvent):
        raise TypeError(f"{event!r} is not an event of this device; make it with device.event()")
    return event


def our_stream(stream: object) -> AcceleratorStream:
    if not isinstance(stream, AcceleratorStream):
        raise TypeError(f"{stream!r} is not a stream of this device")
    return stream
