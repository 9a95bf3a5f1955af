"""What the probe costs, where it runs: windows of steps that are recorded and windows that are not, in turn.

On when ``HANGRIG_PROBE_MEASURE`` gives the number of steps of a window; only for the benchmark, since half of the
steps leave no trace. The windows go on, off, off, on, so that a drift that is even over four of them drops out; all
ranks of an engine that steps in lockstep switch at the same step. The hooks stay in place in both kinds: what is
left out is what they record. Times of whole windows go to the status, field ``measure``.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .recorder import Recorder
    from .status import Status

VARIABLE = "HANGRIG_PROBE_MEASURE"
_KEPT = 4000
_ON = (True, False, False, True)


class Measure:
    """Counts steps. ``step`` is called at the beginning of each, before anything is recorded of it."""

    def __init__(self, recorder: Recorder, status: Status, steps: int) -> None:
        self._recorder = recorder
        self._status = status
        self._steps = steps
        self._ledger = recorder.ledger
        self._began_ns = 0
        self._window_us: dict[str, list[float]] = {"on": [], "off": []}

    def step(self, number: int) -> None:
        """A window ends where its steps are full. Its first step counts with it: so do the others' first ones."""
        if number % self._steps:
            return
        now_ns = time.perf_counter_ns()
        window = number // self._steps
        if self._began_ns:
            kind = "on" if _ON[(window - 1) % 4] else "off"
            times = self._window_us[kind]
            if len(times) < _KEPT:
                times.append(round((now_ns - self._began_ns) / 1e3, 1))
        self._recorder.ledger = self._ledger if _ON[window % 4] else None
        self._status.set(measure={"steps": self._steps, **self._window_us})
        self._began_ns = time.perf_counter_ns()


def measure(recorder: Recorder, status: Status) -> Measure | None:
    """For a rank whose ledger is made; None unless the variable asks for it."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        status.error(f"{VARIABLE}={text}: must be a number of steps, 1 or more")
        return None
    return Measure(recorder, status, int(text))
