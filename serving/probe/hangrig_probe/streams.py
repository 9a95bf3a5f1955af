"""How far the device is: one heartbeat event a stream, recorded by the worker after each batch.

One monitor thread asks the events, never a stream (on an NPU a stream's own query blocks and holds the GIL),
and stamps the ledger on every pass. When all events of a beat have passed, the copies and collectives enqueued
before it are done. While a graph is being captured nothing is asked: a query from another thread would break
the capture. On a CPU all of this is off. Not here: what ran on the streams.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from .recorder import Recorder, Token
from .status import Status

PASS_S = 0.02
"""Between two passes of the monitor."""
STREAMS = ("compute", "copy", "comm", "update")


class _Beat:
    __slots__ = ("copies", "events", "tokens")

    def __init__(self, copies: int, tokens: list[Token]) -> None:
        self.events: list[tuple[str, Any, int]] = []  # ledger's stream, event, sequence
        self.copies = copies
        self.tokens = tokens


class Streams:
    """The streams of one device. ``beat`` and ``watch`` belong to the worker's thread."""

    def __init__(self, recorder: Recorder, status: Status) -> None:
        self._recorder = recorder
        self._status = status
        self.forked()

    def forked(self) -> None:
        self._module: Any = None
        self._index = 0
        self._watched: dict[str, Any] = {}
        self._beats: deque[_Beat] = deque()
        self._spare: list[Any] = []
        self._monitor: threading.Thread | None = None
        self._wake = threading.Event()
        self.last_copy = 0
        """Sequence of the newest copy on the ledger's stream ``copy``."""
        self.capturing = False

    def use(self, module: Any, index: int) -> None:
        """``module``: torch.cuda, torch.npu, or what behaves so; ``index``: of the device in it."""
        self._module = module
        self._index = index

    def watch(self, name: str, stream: Any) -> None:
        """From now on ``stream`` has a heartbeat under the ledger's name ``name``. compute is the current stream
        unless it is given here."""
        if name in STREAMS:
            self._watched[name] = stream
        else:
            self._status.error(f"no stream of a ledger is called {name!r}; there are {', '.join(STREAMS)}")

    def beat(self, label: str = "") -> None:
        """A batch was enqueued: records one event on each stream."""
        if self._module is None or self.capturing or self._recorder.ledger is None:
            return
        try:
            beat = _Beat(self.last_copy, self._recorder.take_deferred())
            for name, stream in {"compute": None, **self._watched}.items():
                event = self._spare.pop() if self._spare else self._module.Event()
                event.record(*(() if stream is None else (stream,)))
                if name == "copy":
                    # Copies have numbers of their own there, so theirs is the newest copy's.
                    beat.events.append((name, event, self.last_copy))
                else:
                    sequence = self._recorder.enqueue(name, f"batch {label}".strip(), "streams.py:beat")
                    beat.events.append((name, event, sequence))
            self._beats.append(beat)
            if self._monitor is None:
                self._monitor = threading.Thread(target=self._watch, name="hangrig-probe", daemon=True)
                self._monitor.start()
        except Exception as error:
            self._module = None
            self._status.failed("heartbeat events are off", error)

    def stop(self, deadline_s: float) -> None:
        """Ends the monitor. For tests: an engine's ends with the engine."""
        self._module = None
        self._wake.set()
        if self._monitor is not None:
            self._monitor.join(deadline_s)

    def _watch(self) -> None:
        module, wake = self._module, self._wake
        try:
            if module is not None and hasattr(module, "set_device"):
                module.set_device(self._index)  # A new thread is on device 0.
            while not wake.wait(PASS_S):
                if not self.capturing:
                    self.look()
        except Exception as error:
            self._module = None
            self._status.failed("the monitor of the heartbeat events has ended", error)

    def look(self) -> None:
        """One pass: asks the events that are still out, oldest first, and stamps."""
        recorder = self._recorder
        behind: set[str] = set()
        for beat in list(self._beats):
            left = []
            for name, event, sequence in beat.events:
                if name not in behind and event.query():
                    recorder.completed(name, sequence)
                    self._spare.append(event)
                else:
                    behind.add(name)
                    left.append((name, event, sequence))
            beat.events = left
            if left:
                continue
            if beat is self._beats[0]:
                self._beats.popleft()
                recorder.completed("copy", beat.copies)
                for token in beat.tokens:
                    recorder.complete(token)
        for name in ("compute", "copy", *self._watched):
            recorder.stamp(name)
