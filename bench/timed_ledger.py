"""A ledger that measures its own operations where they are made, between the engine's other work.

There an operation costs about three times what it costs in a loop of its own, because its code and data were
pushed out of the caches meanwhile. Not here: that loop (``harness_figures.py``).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness.ledger import LedgerWriter

OPERATIONS = (
    "phase",
    "decision",
    "enqueue",
    "complete",
    "stamp",
    "external_recorded",
    "external_consumed",
    "collective_enqueue",
    "collective_start",
    "collective_complete",
)


class TimedLedger(LedgerWriter):
    """``spent_ns``: by operation, nanoseconds of wall clock of each call since ``forget()``."""

    def __init__(self, path: Path, mapping: Any, decisions_path: Path | None) -> None:
        self.spent_ns: dict[str, list[int]] = defaultdict(list)
        super().__init__(path, mapping, decisions_path)
        for name in OPERATIONS:
            setattr(self, name, _timed(getattr(self, name), self.spent_ns[name]))

    def forget(self) -> None:
        for spent in self.spent_ns.values():
            spent.clear()


def _timed(operation: Callable[..., Any], spent_ns: list[int]) -> Callable[..., Any]:
    clock = time.perf_counter_ns

    def call(*arguments: Any) -> Any:
        began_ns = clock()
        result = operation(*arguments)
        spent_ns.append(clock() - began_ns)
        return result

    return call


def counted(spent_ns: dict[str, list[int]]) -> dict[str, Sequence[int]]:
    """A copy that can leave the process, without operations that were never called."""
    return {name: tuple(spent) for name, spent in spent_ns.items() if spent}
