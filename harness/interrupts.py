"""Ctrl-C and SIGTERM while a run is up. Not here: what a run does then (``session.py``)."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType


@dataclass(slots=True)
class Interrupts:
    """Ctrl-C and SIGTERM while a run is up: the first is a wish, the second an order.

    What comes later, or while everything is being ended anyway, is only counted: an interrupted teardown would
    leave processes behind, and it has its own deadlines.
    """

    count: int = 0
    ending: bool = False

    @contextlib.contextmanager
    def held(self) -> Iterator[Interrupts]:
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        for number in before:
            signal.signal(number, self._came)
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count == 2 and not self.ending:
            raise KeyboardInterrupt
