"""One attempt to start one node's share of a server: its files, its command, its processes, until it serves.

Not here: when a server counts as ready (``engine_ready.py``), trials (``engine_trial.py``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any

from harness import process_control
from harness.seats import seat_stem
from harness.target import EngineSpec
from serving.targets import engine_process, engine_tree
from serving.targets.dialect import Command, Dialect, Place
from serving.targets.engine_log import LogTail
from serving.targets.engine_model import write_model
from serving.targets.engine_process import PROBE_ENV, EngineServer
from serving.targets.engine_ready import Wait, write_text
from serving.targets.engine_tree import Seated

_SHOWN = ("PYTHONPATH", PROBE_ENV, "SPT_NOENV")
"""What the launcher itself adds to a server's environment, as far as it is told."""


@dataclass(frozen=True, slots=True)
class Watcher:
    """What the probe is told of the node: its name, and the process that may trace the engine's."""

    node: str
    tracer_pid: int | None


class EngineStart:
    """``run`` once, then ``end`` once, whatever ``run`` raised. ``place`` needs no model yet."""

    def __init__(self, dialect: Dialect, spec: EngineSpec, place: Place, watcher: Watcher, mark: str) -> None:
        self.spec = spec
        self.base_url = f"http://127.0.0.1:{place.port}"
        self.probe_folder = place.folder / "probe"
        self.vocab_size = 0
        self.seats: list[Seated] = []
        self.tail: LogTail | None = None
        self._dialect = dialect
        self._place = place
        self._watcher = watcher
        self._mark = mark
        self._command = Command(())
        self._server: EngineServer | None = None

    @property
    def has_probe(self) -> bool:
        return self.spec.toggles.get("probe", "on") == "on"

    @property
    def port_taken(self) -> bool:
        """The log spoke of an address in use."""
        return self.tail is not None and self.tail.port_taken

    def run(self, cancelled: Event) -> None:
        """Returns when the server serves and everybody is seated. Raises StartError, ModelMissing, ModelError,
        OSError."""
        model = write_model(self.spec.model, self._place.folder / "model")
        self.vocab_size = model.vocab_size
        place = replace(self._place, model=model.path, dummy=model.dummy)
        self._command = self._dialect.command(self.spec, place)
        self.probe_folder.mkdir(parents=True, exist_ok=True)
        self._server = EngineServer(self._command, self._probe_env(), place.folder, self._mark)
        self.tail = LogTail(self._server.log_path, self._dialect.troubles, self._dialect.harmless)
        wait = Wait(
            server=self._server,
            tail=self.tail,
            dialect=self._dialect,
            spec=self.spec,
            place=place,
            look=self._look,
            cancelled=cancelled,
            deadline_s=float(self.spec.target["start_s"]),
        )
        self.seats = wait.until_ready()
        self._server.remember()

    def _probe_env(self) -> dict[str, str]:
        """Puts the probe on the server's path; nothing where it is off."""
        if not self.has_probe:
            return {}
        from serving.targets.probe_path import assemble

        path = self._place.folder / "probe-path"
        assemble(path)
        config = {
            "schema": 1,
            "folder": str(self.probe_folder),
            "node": self._watcher.node,
            "device": self.spec.device,
            "world": self.spec.world,
            "pinned": self.spec.toggles.get("pinned"),
            "tracer_pid": self._watcher.tracer_pid,
            "faults": [dict(fault) for fault in self.spec.faults],
        }
        file = self._place.folder / "probe.json"
        write_text(file, json.dumps(config, indent=1))
        return {"PYTHONPATH": str(path), PROBE_ENV: str(file)}

    # While it runs ---------------------------------------------------------------------------------------

    def _look(self) -> list[Seated]:
        assert self._server is not None
        return engine_tree.seats(
            self._server.processes(),
            self._server.id,
            engine_tree.read_statuses(self.probe_folder),
            lambda title: self._dialect.seating(title, self.spec),
        )

    def alive(self) -> bool:
        """Whether the server's first process lives; an engine's own watchdog ends it last."""
        return self._server is not None and process_control.alive(self._server.id)

    def exit_words(self) -> str | None:
        return None if self._server is None else self._server.exit_words()

    def is_well(self) -> bool:
        """Everybody is alive, and nobody is stopped."""
        stats = [process_control.find(seated.id) for seated in self.seats]
        return bool(stats) and all(stat is not None and stat.state not in "TtZ" for stat in stats)

    def rank_files(self) -> dict[int, tuple[Path, Path]]:
        """Ledger and decisions of the ranks of this node that have a probe."""
        found = {}
        for seated in self.seats:
            if isinstance(seated.seat, int):
                stem = self.probe_folder / seat_stem(seated.seat)
                if stem.with_suffix(".ledger").exists():
                    found[seated.seat] = (stem.with_suffix(".ledger"), stem.with_suffix(".decisions.jsonl"))
        return found

    def processes(self) -> list[dict[str, Any]]:
        """Everybody as the target tells the harness of them."""
        return [self._process(seated) for seated in self.seats]

    def _process(self, seated: Seated) -> dict[str, Any]:
        stem = self.probe_folder / seat_stem(seated.seat)
        files = {
            "ledger_path": stem.with_suffix(".ledger"),
            "decisions_path": stem.with_suffix(".decisions.jsonl"),
            "faulthandler_path": stem.with_suffix(".dump.txt"),
        }
        if seated.seat == "server" and self._server is not None:
            files["log_path"] = self._server.log_path
        device = self.spec.device
        if isinstance(seated.seat, int) and device != "cpu":
            device = f"{device}:{seated.seat % max(1, self.spec.world // self._place.nodes)}"
        return {
            "seat": seated.seat,
            "role": seated.role,
            "pid": seated.id.pid,
            "start_time_ticks": seated.id.start_time_ticks,
            "device": seated.status.get("device") or device,
            **{name: str(path) for name, path in files.items() if path.exists()},
        }

    def testimony(self) -> dict[str, Any]:
        """How the server was started."""
        env = dict(self._command.env)
        if self._server is not None:
            env |= {name: self._server.env[name] for name in _SHOWN if name in self._server.env}
        return {
            "engine": f"{self._dialect.name} {self._place.version}",
            "command": " ".join(self._command.arguments),
            "env": engine_process.shown(env),
            "probe": {"on": self.has_probe, "processes": engine_tree.read_statuses(self.probe_folder)},
        }

    def end(self, deadline_s: float, grace_s: float) -> list[str]:
        """Ends all processes of the server; returns what would not die, in words. May be called again."""
        if self._server is None:
            return []
        left = self._server.end(deadline_s, min(grace_s, deadline_s / 2))
        return [f"{process.id.pid} ({process.state}) {process.title}" for process in left]
