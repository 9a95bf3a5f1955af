"""Heartbeat events: how a rank sees, without touching a stream, what an accelerator has done.

The host records an event behind each operation (a *mark*); one monitor thread asks the oldest mark of each stream
whether it has passed, tells the ledger, and stamps each look. It asks events only: on an NPU ``Stream.query``,
``hash`` and ``repr`` of a stream block on the task queue and hold the interpreter's lock (PLATFORMS.md, torch_npu).

While more than ``MOST_MARKS`` operations of one stream are pending the newest mark moves behind each further
one, so that the number of events is bounded; those operations are then seen to be done together, never too
early.

Not here: streams and what is enqueued (``accelerator_streams.py``).
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from harness.devices.base import Op
from harness.devices.life import Life

if TYPE_CHECKING:
    from harness.ledger import LedgerWriter

MOST_MARKS = 128


@dataclass(slots=True, eq=False)
class Mark:
    """A point of a stream. ``passed`` is set by the monitor, once."""

    event: Any
    stream: str
    number: int
    """Its place among all marks of the device, in the order in which the host enqueued them."""
    sequence: int
    """The ledger's number of the newest operation before it; 0: no operation of the ledger."""
    label: str
    calls: list[Op]
    """What is told when it has passed, before the ledger is."""
    kept: list[object]
    """What must not be freed before: memory of one stream's pool that another stream uses."""
    passed: bool = False


@dataclass(slots=True, eq=False)
class Marks:
    """The marks of one stream that were not yet seen to pass. The host appends, the monitor takes the oldest."""

    stream: str
    raw: Any
    pending: deque[Mark] = field(default_factory=deque)


class Heartbeats:
    """All marks of one device and the thread that watches them.

    ``put`` is called by the host thread. ``asked`` wraps a call that the device may answer with an error.
    """

    def __init__(
        self,
        raw_streams: dict[str, Any],
        new_event: Callable[[], Any],
        life: Life,
        ledger: LedgerWriter | None,
        *,
        interval_s: float,
        enter_thread: Op,
    ) -> None:
        """``enter_thread``: selects the device on the monitor's thread, as the current device is per thread."""
        self._marks = {name: Marks(name, raw) for name, raw in raw_streams.items()}
        self._new_event = new_event
        self._life = life
        self._ledger = ledger
        self._interval_s = interval_s
        self._enter_thread = enter_thread
        self._numbers = itertools.count()
        self._events: deque[Any] = deque()
        self._released: deque[list[object]] = deque()
        self.thread = threading.Thread(target=self._watch, name="hangrig-monitor", daemon=True)

    def put(
        self, stream: str, sequence: int, label: str, *, calls: Iterable[Op] = (), kept: Iterable[object] = ()
    ) -> Mark:
        """Records an event on the stream now: all that it holds is done when the mark has passed."""
        self._released.clear()  # here and not on the monitor's thread: freeing may record events
        marks = self._marks[stream]
        mark = self._newest(marks)
        if mark is None:
            mark = Mark(self._event(), stream, next(self._numbers), sequence, label, [*calls], [*kept])
        else:
            mark.number, mark.label = next(self._numbers), label
            mark.sequence = sequence or mark.sequence
            mark.calls += calls
            mark.kept += kept
        mark.event.record(marks.raw)
        marks.pending.append(mark)
        return mark

    def oldest(self, stream: str) -> str:
        """The label of what the stream has not been seen to pass; empty when there is none."""
        pending = self._marks[stream].pending
        return pending[0].label if pending else ""

    def release(self) -> None:
        """Lets go of all that is kept, when nothing runs any more or ever will."""
        for marks in self._marks.values():
            marks.pending.clear()
        self._events.clear()
        self._released.clear()

    def _event(self) -> Any:
        try:
            return self._events.pop()
        except IndexError:
            return self._new_event()

    @staticmethod
    def _newest(marks: Marks) -> Mark | None:
        """The mark to move, when there are too many. Whoever has popped a mark has it for itself."""
        if len(marks.pending) < MOST_MARKS:
            return None
        try:
            return marks.pending.pop()
        except IndexError:
            return None

    # --- the monitor's thread

    def _watch(self) -> None:
        try:
            self._enter_thread()
        except RuntimeError as error:
            self._life.fail("selecting the device for the monitor", error)
        while not self._life.closed.wait(self._interval_s):
            if not self._life.stopped.is_set():
                self.look()
            if self._ledger is not None:
                for name in self._marks:
                    self._ledger.stamp(name)

    def look(self) -> None:
        """Takes the marks that have passed and tells what follows, in the order of the host's enqueues.

        ``update`` is asked before ``compute``: an update that waited for a replay is then never told before it,
        which the ledger would take for a lost record. Asked again afterwards for those that a replay waited for.
        """
        updated = self._passed("update")
        computed = self._passed("compute")
        if computed:
            updated += self._passed("update", before=computed[-1].number)
        for mark in sorted(updated + computed, key=lambda one: one.number):
            self._tell(mark)
        for name in self._marks.keys() - {"update", "compute"}:
            for mark in self._passed(name):
                self._tell(mark)

    def _passed(self, stream: str, before: int | None = None) -> list[Mark]:
        pending, found = self._marks[stream].pending, list[Mark]()
        while pending:
            mark = pending.popleft()
            try:
                done = (before is None or mark.number < before) and mark.event.query()
            except RuntimeError as error:
                self._life.fail(f"{mark.label!r} on {stream}, or work before it,", error)
                done = False
            if not done:
                pending.appendleft(mark)
                break
            found.append(mark)
        return found

    def _tell(self, mark: Mark) -> None:
        try:
            for call in mark.calls:
                call()
        except Exception as error:  # kept as the device's error: the monitor is never lost
            self._life.fail(f"telling that {mark.label!r} on {mark.stream} is done", error)
        if self._ledger is not None and mark.sequence:
            self._ledger.complete(mark.stream, mark.sequence)
        event, mark.event, mark.passed = mark.event, None, True
        self._events.append(event)
        self._released.append([*mark.calls, *mark.kept])
        mark.calls, mark.kept = [], []
