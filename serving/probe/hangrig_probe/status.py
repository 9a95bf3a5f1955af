"""What the probe says about itself: ``<stem>.probe.json``, replaced in one step.

Which hooks are on, what failed, which faults were made and when, the last exception of the engine's own loop.
Before its process has a seat the status is kept in memory. Nothing here raises: what cannot be written is said
once on standard error, where the engine's log has it. Not here: what the engine did (that is the ledger).
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.ledger import process_start_time_ticks

SCHEMA = 1
ERRORS_KEPT = 20
TEXT_KEPT = 8000
"""Characters of one traceback: its end is kept."""
FLUSH_S = 5.0
"""Counters reach the file no more often than this."""


class Status:
    """One process's status. Any thread."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._fields: dict[str, Any] = {}
        self._hooks: dict[str, str] = {}
        self._roles: dict[str, str | None] = {}
        self._errors: list[str] = []
        self._faults: list[dict[str, Any]] = []
        self._said_unwritable = False
        self._dirty = False
        self._written_s = 0.0

    def forked(self) -> None:
        """In a child: another process, not yet seated. The hooks are its own, what happened is not."""
        self._lock = threading.Lock()
        self._path = None
        self._fields = {}
        self._errors = []
        self._faults = []
        self._said_unwritable = False

    # --- what there is to say

    def seated(self, folder: Path, stem: str, **fields: Any) -> None:
        """From now on the status goes to ``folder/<stem>.probe.json``."""
        self._path = folder / f"{stem}.probe.json"
        self.set(**fields)
        self.write()

    def set(self, **fields: Any) -> None:
        with self._lock:
            self._fields.update(fields)
            self._dirty = True

    def hook(self, name: str, state: str) -> None:
        """``state``: "on", "missing: why", "off: why" or "waiting: for what"."""
        with self._lock:
            self._hooks[name] = state
            self._dirty = True
        if self._path is not None:
            self.write()

    def waits(self, name: str, module_name: str, role: str | None) -> None:
        """Hook ``name`` waits for its module, which a process of ``role`` (None: any) must import."""
        self._roles[name] = role
        self.hook(name, f"waiting: {module_name} is not imported yet")

    def settle(self) -> None:
        """The engine works now: what still waits for its module waits in vain, or is not needed here."""
        with self._lock:
            for name in [name for name, state in self._hooks.items() if state.startswith("waiting")]:
                if self._roles[name] in (None, self._fields.get("role")):
                    self._hooks[name] = "missing: its module was not imported by the first step"
                else:
                    del self._hooks[name]
        self.write()

    def error(self, text: str) -> None:
        """Something of the probe's own failed."""
        with self._lock:
            if len(self._errors) < ERRORS_KEPT:
                self._errors.append(text[-TEXT_KEPT:])
        if not self.write():
            self._say(text)

    def failed(self, what: str, error: BaseException) -> None:
        """As ``error``, with the traceback."""
        self.error(f"{what}: {_text(error)}")

    def exception(self, error: BaseException) -> None:
        """The engine's own loop ended in ``error``: the first one is kept, what follows is its echo."""
        with self._lock:
            self._fields.setdefault("exception", _text(error)[-TEXT_KEPT:])
        self.write()

    def fault(self, index: int, name: str, step: int, mode: str, what: str) -> None:
        """Fault ``index`` is made now. Call it before it is: afterwards the process may be gone."""
        with self._lock:
            self._faults.append({"index": index, "name": name, "step": step, "mode": mode, "what": what})
        self.write()

    # --- the file

    def changed(self) -> None:
        """A counter inside a field moved; ``flush`` writes it."""
        self._dirty = True

    def flush(self) -> None:
        """Writes what changed, unless that was done a moment ago."""
        if self._dirty and time.monotonic() - self._written_s >= FLUSH_S:
            self.write()

    def document(self) -> dict[str, Any]:
        with self._lock:
            document: dict[str, Any] = {
                "schema": SCHEMA,
                "seat": None,
                "role": None,
                "pid": os.getpid(),
                "start_time_ticks": process_start_time_ticks(os.getpid()),
                "device": None,
                "engine": self._engine,
                "hooks": dict(self._hooks),
                "errors": list(self._errors),
                "copies": {},
                "pinned": {"asked": None, "answers": {}},
                "bypass": [],
                "faults": list(self._faults),
                "exception": None,
                "dp_rank": None,
                "tp_rank": None,
            }
            document.update(self._fields)
            return document

    def write(self) -> bool:
        """Is all of it in the file now?"""
        path = self._path
        if path is None:
            return False
        try:
            text = json.dumps(self.document(), default=str, indent=1)
            with self._lock:
                self._dirty = False
                self._written_s = time.monotonic()
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                temporary.write_text(text, encoding="utf-8")
                temporary.replace(path)
            return True
        except (OSError, ValueError, TypeError, RuntimeError) as error:
            if not self._said_unwritable:
                self._said_unwritable = True
                self._say(f"cannot write {path} ({error}); errors so far: {self._errors}")
            return False

    def _say(self, text: str) -> None:
        with suppress(OSError):  # The log is closed too: nobody is left to tell.
            print(f"hangrig_probe[{os.getpid()}]: {text}", file=sys.stderr, flush=True)


def _text(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
