"""The dialect of ``fake_engine.py``, the target that speaks it, and what tests need to run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster_rig import DEADLINE_S

from harness import process_control
from harness.process_control import ProcessId
from harness.target import EngineSpec
from serving.targets import engine_tree
from serving.targets.dialect import Call, Command, Count, Piece, Place, Seating
from serving.targets.engine_process import end_marked, free_ports
from serving.targets.engine_target import EngineTarget
from serving.targets.engine_tree import MARK, TreeProcess
from serving.workload import Arrival, RequestSpec

PROGRAM = Path(__file__).with_name("fake_engine.py")
_SCHEDULER = re.compile(r"fake::scheduler_DP\d+_TP(\d+)\b")
_RETRACTED = re.compile(r"#retracted_reqs: (\d+)")


class FakeDialect:
    name = "fake"
    distributions: Sequence[str] = ("no-such-engine", "pip")
    ports = 2
    health = Call("GET", "/health")
    metrics = Call("GET", "/metrics")
    samples: Mapping[Count, Sequence[str]] = {
        "running": ("fake_running",),
        "used_tokens": ("fake_used",),
        "retractions": ("fake_retractions_total",),
        "tokens_out": ("fake_tokens_total",),
        "steps": ("fake_absent", "fake_steps_total"),
    }
    rank_label = "dp_rank"
    flush = Call("POST", "/flush")
    troubles: Sequence[str] = ("testing retraction",)
    harmless: Sequence[str] = ("no error",)

    def problem(self, spec: EngineSpec, arrivals: Sequence[Arrival]) -> str | None:
        return "engine.kv_tokens = 13: unlucky; use another" if spec.engine["kv_tokens"] == 13 else None

    def data_parallel(self, spec: EngineSpec) -> int:
        return int(spec.target["dp"] or spec.world)

    def command(self, spec: EngineSpec, place: Place) -> Command:
        python = spec.target["python"] or sys.executable
        return Command(
            (
                python, str(PROGRAM), "--port", str(place.port),
                "--ranks", str(spec.world // place.nodes),
                "--first-rank", str(spec.world // place.nodes * place.node),
                "--retract-every", str(spec.engine["retract_every"]), *spec.target["args"],
            ),
            {"FAKE_MODEL": place.model, **spec.target["env"]},
        )  # fmt: skip

    def expected(self, spec: EngineSpec, node: int) -> Sequence[Seating]:
        share = spec.world // spec.target["nodes"]
        ranks = [Seating(rank, "rank") for rank in range(node * share, (node + 1) * share)]
        return [*ranks, Seating("controller", "controller")]

    def seating(self, title: str, spec: EngineSpec) -> Seating | None:
        found = _SCHEDULER.match(title)
        if found is not None:
            return Seating(int(found[1]), "rank")
        controller = title.startswith("fake::data_parallel_controller")
        return Seating("controller", "controller") if controller else None

    def call(self, request: RequestSpec, dp_rank: int | None, spec: EngineSpec) -> Call:
        body = {"id": request.id, "prompt": list(request.prompt), "count": request.max_new_tokens}
        return Call("POST", "/generate", {**body, "rank": dp_rank})

    def piece(self, event: Mapping[str, Any]) -> Piece:
        if "error" in event:
            return Piece(error=event["error"])
        return Piece(
            tokens=tuple(event["tokens"]),
            finish=event["finish"],
            dp_rank=event["rank"],
            retractions=event["retractions"],
        )

    def retracted(self, line: str) -> int:
        found = _RETRACTED.search(line)
        return int(found[1]) if found else 0


class FakeTarget(EngineTarget):
    def __init__(self) -> None:
        super().__init__(FakeDialect())


def spec(world: int = 2, **tables: Mapping[str, Any]) -> EngineSpec:
    """Tables are laid over these defaults."""
    target = {
        "name": "fake", "ranks": world, "dp": None, "python": None, "nodes": 1, "args": [], "env": {},
        "start_s": 60.0, "engine_watchdog_s": None, "after_capture": "end", "let_s": 60.0,
    }  # fmt: skip
    engine = {"kv_tokens": 1024, "retract_every": 0}
    return EngineSpec(
        world=world,
        device="cpu",
        toggles={"probe": "off"},
        target={**target, **tables.get("target", {})},
        model={"preset": None, "directory": None, "seed": 0, **tables.get("model", {})},
        engine={**engine, **tables.get("engine", {})},
        faults=tuple(tables.get("faults", ())),  # type: ignore[arg-type]
    )


class FakeServer:
    """A fake engine that nobody launched, with all its processes marked ``mark``; ended with ``end``."""

    def __init__(self, mark: str, *arguments: str, world: int = 2) -> None:
        self.mark = mark
        (self.port,) = free_ports(1)
        self.base_url = f"http://127.0.0.1:{self.port}"
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), "--port", str(self.port), "--ranks", str(world), *arguments],
            env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if "ready to roll" in line:
                return
        raise RuntimeError(f"the fake engine ended with status {self.process.wait(DEADLINE_S)}")

    @property
    def id(self) -> ProcessId:
        found = process_control.identify(self.process.pid)
        assert found is not None
        return found

    def tree(self) -> list[TreeProcess]:
        return engine_tree.find(self.mark)

    def end(self) -> None:
        left = end_marked(self.mark, time.time(), time.monotonic() + DEADLINE_S)
        self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert left == []


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
