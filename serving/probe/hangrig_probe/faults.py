"""Faults made inside the process, each once, at the first fitting place after its time has come.

The launcher makes an empty file ``due-<i>`` when fault ``i`` is due; the process it is meant for looks for it
once a step, and only while it has faults left. What is done is in the status *before* it is done. Engine hooks
call the places: ``at_step`` before a forward pass, ``blocks`` where the main thread takes up work, ``aborts``
where a request can be dropped, ``skips`` where a collective begins. Not here: stop and kill, which come from
outside.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Config
    from .status import Status

LOOK_S = 0.02
"""Loops that spin look for due files no more often than this."""
OUTSIDE = ("stop", "kill")


class InjectedError(RuntimeError):
    """Raised on purpose by the fault ``raise``; the only exception that leaves a hook."""


@dataclass
class _Pending:
    index: int
    table: Mapping[str, Any]
    due_file: Path
    due: bool = False


class Faults:
    """The faults of this process's seat. Steps and loops call it from one thread; ``skips`` from any."""

    def __init__(self, config: Config, status: Status, step: Callable[[], int]) -> None:
        self._config = config
        self._status = status
        self._step = step
        self._lock = threading.Lock()
        self._mode = ""
        self._looked_s = 0.0
        self._pending: dict[str, list[_Pending]] = {}
        self.skipping = False
        """Is a fault ``skip_collective`` due? Looked at before every collective: an attribute, not a call."""

    def forked(self) -> None:
        self._lock = threading.Lock()
        self._pending = {}
        self.skipping = False

    def seated(self, seat: int | str, role: str) -> None:
        """From now on the faults meant for this seat are made here."""
        for index, table in enumerate(self._config.faults):
            name = str(table["name"])
            ranks = table.get("ranks") or ()
            mine = table.get("role", "rank") == role and (role != "rank" or not ranks or seat in ranks)
            if mine and name not in OUTSIDE:
                due_file = self._config.folder / f"due-{index}"
                self._pending.setdefault(name, []).append(_Pending(index, table, due_file))

    def look(self) -> None:
        """Has the time of a fault come? One look at the file system for each that is left."""
        for waiting in list(self._pending.values()):
            for one in waiting:
                if not one.due and one.due_file.exists():
                    one.due = True
        self.skipping = any(one.due for one in self._pending.get("skip_collective", ()))

    # --- the places

    def at_step(self, mode: str) -> None:
        """Before a forward pass of ``mode``: idle, prefill, decode or mixed. May raise InjectedError."""
        self._mode = mode
        one = self._take("raise", lambda table: _fits(table.get("mode", "any"), mode))
        if one is not None:
            what = f"raised before the forward pass of a batch of mode {mode}"
            self._made(one, what)
            raise InjectedError(f"hangrig fault {one.index}: {what}, step {self._step()}")

    def blocks(self, before: Callable[[], None] | None = None) -> None:
        """Where the main thread takes up its next piece of work. May block for as long as the scenario says;
        ``before`` is called first then."""
        if "block" not in self._pending:
            return
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self.look()
        one = self._take("block", lambda table: True)
        if one is not None:
            seconds = float(one.table.get("seconds", 3600.0))
            self._made(one, f"the main thread blocks for {seconds:g} s")
            if before is not None:
                before()
            _block(seconds)

    def aborts(self, choose: Callable[[], str | None]) -> str | None:
        """When due, asks ``choose`` for the id of a running request and returns it, once, for the hook to drop."""
        for one in self._pending.get("abort_by_clock", ()):
            if one.due:
                chosen = choose()
                if chosen is None:
                    return None
                self._pending["abort_by_clock"].remove(one)
                self._made(one, f"dropped request {chosen}")
                return chosen
        return None

    def skips(self, group: str, operation: str) -> bool:
        """Is this collective to be left out? True once a fault."""
        with self._lock:
            one = self._take(
                "skip_collective",
                lambda table: (
                    table.get("group") in (None, group)
                    and table.get("operation") in (None, operation)
                    and _fits(table.get("mode", "any"), self._mode)
                ),
            )
            self.skipping = any(other.due for other in self._pending.get("skip_collective", ()))
        if one is None:
            return False
        self._made(one, f"skipped {operation} of group {group}")
        return True

    def _take(self, name: str, fits: Callable[[Mapping[str, Any]], bool]) -> _Pending | None:
        for one in self._pending.get(name, ()):
            if one.due and fits(one.table):
                self._pending[name].remove(one)
                return one
        return None

    def _made(self, one: _Pending, what: str) -> None:
        if not self._pending.get(str(one.table["name"])):
            self._pending.pop(str(one.table["name"]), None)
        self._status.fault(one.index, str(one.table["name"]), self._step(), self._mode, what)


def _fits(wanted: str, mode: str) -> bool:
    return wanted in ("any", mode) or (mode == "mixed" and wanted == "prefill")


def _block(seconds: float) -> None:
    """A wait that signal handlers still interrupt: the engine's own end must work."""
    threading.Event().wait(seconds)
