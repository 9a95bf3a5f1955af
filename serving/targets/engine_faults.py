"""Faults that are due after so many tokens: stop and kill from outside, the others by a file that the probe sees.

Not here: what a fault means (``harness.scenario_faults``), how the probe carries one out (``serving/probe``).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from harness import process_control
from serving.targets.engine_tree import Seated

_SIGNALS = {"stop": signal.SIGSTOP, "kill": signal.SIGKILL}
_DUE = "due-{}"


class Faults:
    """The faults of one server on one node, each once in a trial. ``due`` may be called by any thread."""

    def __init__(
        self, tables: Sequence[Mapping[str, Any]], seats: Callable[[], Sequence[Seated]], folder: Path
    ) -> None:
        """``folder``: where the probe looks for the files."""
        self._tables = tuple(tables)
        self._seats = seats
        self._folder = folder
        self._lock = Lock()
        self._fired: set[int] = set()
        self._records: list[dict[str, Any]] = []
        self._since_ns = time.monotonic_ns()
        self._next = self._least()

    def begin(self) -> None:
        """A trial begins: none has happened."""
        with self._lock:
            for index in range(len(self._tables)):
                (self._folder / _DUE.format(index)).unlink(missing_ok=True)
            self._fired.clear()
            self._records.clear()
            self._since_ns = time.monotonic_ns()
            self._next = self._least()

    def due(self, tokens: int) -> None:
        """The client has received ``tokens`` of the trial."""
        if tokens < self._next:
            return
        with self._lock:
            for index, table in enumerate(self._tables):
                if index not in self._fired and tokens >= table["after_tokens"]:
                    self._fired.add(index)
                    self._happen(index, table)
            self._next = self._least()

    def records(self) -> list[dict[str, Any]]:
        """Those that happened from outside on this node, and those whose file was laid."""
        with self._lock:
            return [dict(record) for record in self._records]

    def _least(self) -> float:
        left = (t["after_tokens"] for index, t in enumerate(self._tables) if index not in self._fired)
        return min(left, default=float("inf"))

    def _happen(self, index: int, table: Mapping[str, Any]) -> None:
        number = _SIGNALS.get(table["name"])
        if number is None:
            self._lay(index, table)
            return
        for seated in self._seats():
            if hit(table, seated):
                self._record(index, table, seated.seat, _signal(seated, number))

    def _lay(self, index: int, table: Mapping[str, Any]) -> None:
        path = self._folder / _DUE.format(index)
        try:
            path.touch()
        except OSError as error:
            self._record(index, table, None, f"cannot tell the probe: {path}: {error.strerror}")
            return
        self._record(index, table, None, "due")

    def _record(self, index: int, table: Mapping[str, Any], seat: object, what: str) -> None:
        at_s = round((time.monotonic_ns() - self._since_ns) / 1e9, 3)
        self._records.append(
            {"index": index, "name": table["name"], "seat": seat, "at_s": at_s, "what": what}
        )


def hit(table: Mapping[str, Any], seated: Seated) -> bool:
    """Whether the fault is meant for this process."""
    if table["role"] != seated.role:
        return False
    return seated.role != "rank" or not table["ranks"] or seated.seat in table["ranks"]


def _signal(seated: Seated, number: signal.Signals) -> str:
    try:
        sent = process_control.send(seated.id, number)
    except PermissionError:
        return f"{number.name} to process {seated.id.pid} is not allowed"
    return (
        f"{number.name} to process {seated.id.pid}" if sent else f"process {seated.id.pid} was gone already"
    )
