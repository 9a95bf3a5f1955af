"""The launcher of a foreign engine on one node: starts its share of the server, drives the client on the first
node, answers what it knows, ends everything.

One process a node, started by the harness's pool, which calls one method at a time: each returns soon, and what
takes long runs in a thread. All arguments and answers are plain JSON-able values.

Not here: the driver's side (``engine_target.py``), a start (``engine_start.py``), a trial (``engine_trial.py``).
"""

from __future__ import annotations

import importlib
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from threading import Event, Thread
from typing import Any

from harness import process_control
from harness.ledger import LedgerError, LedgerWriter
from harness.target import EngineSpec
from serving.model_config import ModelError
from serving.targets import engine_process, engine_tree
from serving.targets.dialect import Dialect, Place
from serving.targets.engine_faults import Faults
from serving.targets.engine_model import ModelMissing
from serving.targets.engine_process import StartError
from serving.targets.engine_ready import engine_version
from serving.targets.engine_start import EngineStart, Watcher
from serving.targets.engine_trial import EngineTrial
from serving.targets.engine_witness import Witness

_log = logging.getLogger("hangrig.engine")

_GRACE_S = 8.0
"""For a server that is well to end by itself; SGLang looks every 5 s whether it was asked to."""
_GRACE_UNWELL_S = 1.0
_JOIN_S = 5.0
_STATUS_EVERY_S = 1.0
_LOG_LINES = 100


class EngineHost:
    """See the module. ``dialect``: ``module:Class``. ``folder``: this server's own, on every node."""

    def __init__(
        self, *, spec: Mapping[str, Any], dialect: str, node: int, nodes: int, folder: str, mark: str
    ) -> None:
        """Raises StartError when what ends the server later cannot be set up."""
        module, name = dialect.split(":")
        self._dialect: Dialect = getattr(importlib.import_module(module), name)()
        self._spec = EngineSpec(**spec)
        self._node, self._nodes = node, nodes
        self._folder = Path(folder) / f"node{node}"
        self._mark = mark
        self._guard = engine_process.start_guard(mark)
        engine_process.become_subreaper()
        self._cancelled = Event()
        self._threads: list[Thread] = []
        self._phase, self._why = "new", ""
        self._version = ""
        self._start: EngineStart | None = None
        self._witness: Witness | None = None
        self._ledger: LedgerWriter | None = None
        self._trial: EngineTrial | None = None
        self._statuses: tuple[float, list[dict[str, Any]]] = (0.0, [])
        self._faults = Faults(
            self._spec.faults,
            lambda: self._start.seats if self._start is not None else (),
            self._folder / "probe",
        )

    # Start -----------------------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Free ports, this node's address, and the engine's version; or a ``problem``. Takes a minute at most."""
        try:
            self._version = engine_version(self._spec.target["python"] or sys.executable, self._dialect)
            (self._folder / "probe").mkdir(parents=True, exist_ok=True)
            return {
                "ports": engine_process.free_ports(1 + self._dialect.ports),
                "address": _own_address() if self._nodes > 1 else "127.0.0.1",
                "problem": None,
            }
        except StartError as error:
            return {"problem": str(error)}
        except OSError as error:
            return {"problem": f"{self._folder}: {error.strerror}; free space there, or let us write to it"}

    def launch(
        self, port: int, ports: Sequence[int], host: str, node_name: str, tracer_pid: int | None
    ) -> None:
        """Begins the start and returns; ``state`` tells how it goes. A start that failed may be tried again.

        ``ports`` and ``host``: of node 0.
        """
        self._phase, self._why = "starting", ""
        place = Place(
            node=self._node,
            nodes=self._nodes,
            host=host,
            port=port,
            ports=tuple(ports),
            model="",
            dummy=False,
            folder=self._folder,
            version=self._version,
        )
        self._start = EngineStart(
            self._dialect, self._spec, place, Watcher(node_name, tracer_pid), self._mark
        )
        start = self._start
        self._run(lambda: self._until_ready(start, node_name), "hangrig-start")

    def state(self) -> dict[str, Any]:
        """``phase``: new, starting, ready, failed. ``processes``: once it is ready."""
        ready = self._phase == "ready" and self._start is not None
        return {
            "phase": self._phase,
            "why": self._why,
            "port_taken": self._start is not None and self._start.port_taken,
            "processes": self._start.processes() if ready and self._start is not None else [],
            "ledger": str(self._ledger.path) if self._ledger is not None else None,
        }

    def end_server(self) -> None:
        """Ends the attempt at hand, on a node where it did not fail by itself; ``launch`` may make another."""
        self._cancelled.set()
        if self._witness is not None:
            self._witness.close()
            self._witness = None
        if self._start is not None:
            self._start.end(_JOIN_S, 0.0)
        for thread in self._threads:
            thread.join(_JOIN_S)
        self._cancelled.clear()

    def _until_ready(self, start: EngineStart, node_name: str) -> None:
        try:
            if self._node == 0 and self._ledger is None:
                self._ledger = self._make_ledger(node_name)
            start.run(self._cancelled)
            assert start.tail is not None
            self._witness = Witness(start.tail, self._read_line)
            base_url = start.base_url if self._node == 0 else None
            self._witness.watch(start.seats, base_url, self._dialect.health)
            self._phase = "ready"
        except (StartError, ModelMissing, ModelError, LedgerError) as error:
            self._fail(start, str(error))
        except OSError as error:
            self._fail(start, f"{self._folder}: {error}; free space there, or let us write to it")
        except Exception as error:  # ours; nobody else would say that the start is over
            _log.exception("the start failed")
            self._fail(start, f"{type(error).__name__}: {error}")

    def _fail(self, start: EngineStart, why: str) -> None:
        left = start.end(_JOIN_S, 0.0)
        self._why = why + (f"; would not die: {'; '.join(left)}" if left else "")
        self._phase = "failed"

    def _make_ledger(self, node_name: str) -> LedgerWriter:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / "client.ledger"
        ledger = LedgerWriter.create(path, rank=0, world=self._spec.world, node=node_name, device="client")
        ledger.phase("parked", 0)
        return ledger

    # A trial ---------------------------------------------------------------------------------------------

    def drive(self, table: Mapping[str, Any]) -> None:
        """Begins a trial and returns. ``table``: seed, workload, client table, journal."""
        if self._start is None or self._witness is None:
            raise RuntimeError("no server is up on this node")
        if self._trial is not None:
            self._trial.stop("another trial begins")
        self._faults.begin()
        self._witness.begin()
        trial = EngineTrial(self._dialect, self._start, self._faults, table, self._ledger)
        self._trial = trial
        self._run(trial.run, "hangrig-client")

    def progress(self, tokens: int) -> dict[str, Any]:
        """``tokens``: what the client on node 0 has received, for the faults of the other nodes."""
        if self._node != 0:
            self._faults.due(tokens)
        trial = self._trial
        return {
            "client": asdict(trial.view()) if trial is not None else None,
            "done": trial is not None and trial.results is not None,
            "deaths": self._deaths(),
            "exceptions": self._exceptions(),
            "server": self._start.exit_words() if self._start is not None else None,
        }

    def results(self) -> dict[str, Any]:
        """``ranks``: the fields of `harness.target.RankResult`, on node 0, once ``progress`` says done. ``steps``:
        of this node's ranks."""
        trial = self._trial
        return {
            "ranks": (trial.results if trial is not None else None) or [],
            "steps": {str(rank): both for rank, both in trial.steps().items()} if trial is not None else {},
        }

    def _deaths(self) -> list[dict[str, Any]]:
        witness = self._witness
        if witness is None:
            return []
        return [
            {
                "seat": death.seated.seat,
                "pid": death.seated.id.pid,
                "at_s": witness.since_s(death.at_ns),
                "exit": death.exit,
                "words": death.words,
            }
            for death in witness.deaths
        ]

    def _exceptions(self) -> dict[str, str]:
        """By seat: what a probe saw its process raise."""
        read_s, statuses = self._statuses
        if time.monotonic() - read_s > _STATUS_EVERY_S:
            statuses = engine_tree.read_statuses(self._folder / "probe")
            self._statuses = (time.monotonic(), statuses)
        return {str(s["seat"]): str(s["exception"]) for s in statuses if s.get("exception") and "seat" in s}

    def _read_line(self, line: str) -> None:
        if self._trial is not None:
            self._trial.logged += self._dialect.retracted(line)

    # Afterwards ------------------------------------------------------------------------------------------

    def testimony(self) -> dict[str, Any]:
        """This node's part of ``evidence/engine.json``."""
        self._statuses = (0.0, [])
        trial = self._trial.account() if self._trial is not None else None
        view = self._trial.view() if self._trial is not None else None
        start, witness = self._start, self._witness
        return {
            "schema": 1,
            **(start.testimony() if start is not None else {}),
            "said": witness.said() if witness is not None else [],
            "deaths": self._deaths(),
            "exceptions": self._exceptions(),
            "faults": self._faults.records(),
            "retractions": trial.retractions() if trial is not None else 0,
            "preemptions": trial.preemptions() if trial is not None else 0,
            "requests": {"sent": view.sent, "finished": view.finished, "failed": view.failed} if view else {},
            "metrics": dict(trial.after.samples) if trial is not None else {},
            "log": start.tail.last(_LOG_LINES) if start is not None and start.tail is not None else [],
        }

    def alive(self) -> bool:
        """Whether the server's first process lives."""
        return self._start is not None and self._start.alive()

    def stop(self, deadline_s: float) -> list[str]:
        """Ends the server and all its processes, removes its folder, and says what would not die. The launcher
        itself stays, for whoever started it to end."""
        deadline = time.monotonic() + deadline_s
        view = self._trial.view() if self._trial is not None else None
        idle = view is None or (view.over and not view.gave_up)
        well = self._phase == "ready" and idle and self._start is not None and self._start.is_well()
        self._cancelled.set()
        if self._trial is not None:
            self._trial.stop("the server is being ended")
        if self._witness is not None:
            self._witness.close()
        left: list[str] = []
        if self._start is not None:
            left = self._start.end(deadline_s, _GRACE_S if well else _GRACE_UNWELL_S)
        for thread in self._threads:
            thread.join(max(0.0, min(_JOIN_S, deadline - time.monotonic())))
        if self._start is not None:  # a start that was going on may have made more
            left = self._start.end(max(1.0, deadline - time.monotonic()), 0.0)
        process_control.end([self._guard], _JOIN_S, grace_s=0.0)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._phase = "stopped"
        return left

    def _run(self, target: Callable[[], None], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


def _own_address() -> str:
    """This node's address, as its cluster knows it."""
    import ray

    return str(ray.util.get_node_ip_address())
