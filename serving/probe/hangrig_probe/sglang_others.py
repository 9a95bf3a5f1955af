"""The processes of SGLang that are no ranks: the data parallel controller, the detokenizer, the server.

They take part in no collective. The first two are loops around one receiving call, which says when they take up
work; the server is watched from outside, so here it only leaves its status and looks, once, for copies that
nobody gates.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from pathlib import Path
from time import monotonic_ns
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .sglang_sites import ungated

if TYPE_CHECKING:
    from .probe import Probe

CONTROLLER = "sglang.srt.managers.data_parallel_controller"
DETOKENIZER = "sglang.srt.managers.detokenizer_manager"
ENGINE = "sglang.srt.entrypoints.engine"
"""The server's side, which starts the others."""
BEAT_NS = 1_000_000
"""The controller polls its socket without a pause; it says once a millisecond that it is alive."""


class _Loop:
    """A loop that takes messages one by one; its step is the number of messages so far."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._recorder = probe.recorder
        self._faults = probe.faults
        self._messages = 0

    def run(self, call: Any, process: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the event loop."""
        try:
            return call(process, *args, **kwargs)
        except Exception as error:
            left_by(self._probe, error)
            raise


class Controller(_Loop):
    """The data parallel controller: polls for requests and hands each to a scheduler."""

    def __init__(self, probe: Probe) -> None:
        super().__init__(probe)
        self._busy = False
        self._beat = 0

    def install(self) -> None:
        self._probe.take_seat("controller", role="controller", device="cpu")
        wrap = self._probe.patches.wrap
        wrap(f"{CONTROLLER}:DataParallelController.event_loop", around=self.run)
        wrap(f"{CONTROLLER}:sock_recv", before=self.receive, after=self.received)

    def receive(self, *_: Any, **__: Any) -> None:
        now = monotonic_ns()
        if self._busy or now - self._beat >= BEAT_NS:
            self._busy = False
            self._beat = now
            self._recorder.phase("recv", self._messages)
            self._faults.blocks()

    def received(self, *_: Any, **__: Any) -> None:
        self._busy = True
        self._messages += 1
        self._recorder.phase("process", self._messages)


class Detokenizer(_Loop):
    """The detokenizer: sleeps in its socket until a scheduler has output for it."""

    def install(self) -> None:
        self._probe.take_seat("detokenizer", role="detokenizer", device="cpu")
        wrap = self._probe.patches.wrap
        wrap(f"{DETOKENIZER}:DetokenizerManager.event_loop", around=self.run)
        wrap(f"{DETOKENIZER}:sock_recv", before=self.receive, after=self.received)

    def receive(self, *_: Any, **__: Any) -> None:
        self._recorder.phase("parked", self._messages)

    def received(self, *_: Any, **__: Any) -> None:
        self._messages += 1
        self._recorder.phase("process", self._messages)
        self._faults.blocks()


class Server:
    """The process that serves HTTP and starts the others."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe

    def install(self) -> None:
        self._probe.take_seat("server", role="server", device="cpu")
        self._without_ledger()
        # Plugins are loaded before most of the engine is imported.
        self._probe.patches.when_imported(ENGINE, self._engine_imported)
        threading.Thread(target=self._look_for_sites, name="hangrig-sites", daemon=True).start()

    def _engine_imported(self, _: ModuleType) -> None:
        if not loads_plugins(CONTROLLER, "run_data_parallel_controller_process"):
            self._probe.patches.replace(
                f"{ENGINE}:run_data_parallel_controller_process", lambda _: controller_process
            )
        if not loads_plugins(DETOKENIZER, "run_detokenizer_process"):
            self._probe.status.hook(DETOKENIZER, "missing: this version loads no plugins in the detokenizer")

    def _without_ledger(self) -> None:
        """Nothing here would ever write it, and a ledger that stands still speaks of a process that does."""
        self._probe.recorder.ledger = None
        for name in ("server.ledger", "server.decisions.jsonl"):
            (self._probe.config.folder / name).unlink(missing_ok=True)

    def _look_for_sites(self) -> None:
        try:
            spec = importlib.util.find_spec("sglang.srt")
            folder = next(iter((spec and spec.submodule_search_locations) or ()), None)
            if folder is not None:
                self._probe.status.set(bypass=ungated(Path(folder)))
                self._probe.status.write()
        except Exception as error:
            self._probe.status.error(f"looking for ungated copies: {error!r}")


def left_by(probe: Probe, error: Exception) -> None:
    """``error`` leaves an event loop: says so at once, with the time: the errors of its peers are often echoes."""
    probe.status.set(exception_ns=monotonic_ns())
    probe.status.exception(error)


def loads_plugins(module: str, entry: str) -> bool:
    """Whether a process entry loads plugins itself (0.5.20's controller and detokenizer do not)."""
    code = getattr(getattr(sys.modules.get(module), entry, None), "__code__", None)
    return code is None or "load_plugins" in code.co_names


def controller_process(*args: Any, **kwargs: Any) -> None:
    """Begins a controller process that loads plugins. A spawned process finds it by its name, unpatched there."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    importlib.import_module(CONTROLLER).run_data_parallel_controller_process(*args, **kwargs)
