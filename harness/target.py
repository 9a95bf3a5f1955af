"""What an engine must offer to be stressed, and how engines are found by name.

A target launches ranks, is driven through one trial at a time, says how far it is, and is stopped. It knows its
engine; the harness knows none. What it starts through Ray lives in a pool that the harness owns (``rank_pool.py``),
because ending it, hung or stopped, is the harness's affair: the ranks themselves, or one launcher a node whose
children they are.

Engines register in the entry-point group ``hangrig.targets`` under the name that scenarios use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

GROUP = "hangrig.targets"


class TargetError(RuntimeError):
    """A target that does not exist, or one that could not start. The message says what to do."""


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One worker process of the engine, as the harness watches it."""

    rank: int
    role: str
    node: str
    pid: int
    start_time_ticks: int
    device: str
    log_path: str | None = None
    faulthandler_path: str | None = None
    ledger_path: str | None = None
    """Where it writes its ledger for as long as it lives; None: into each trial's own directory."""
    decisions_path: str | None = None
    """As ``ledger_path``."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process of the engine that is no rank: it takes part in no collective, and may be the culprit all the
    same. ``name`` is unique in the engine: ``server``, ``controller``, ``detokenizer``, ``engine_core``,
    ``engine_core-1``, ``client`` (what sends the requests)."""

    name: str
    role: str
    node: str
    pid: int
    start_time_ticks: int
    log_path: str | None = None
    ledger_path: str | None = None
    faulthandler_path: str | None = None


@dataclass(frozen=True, slots=True)
class TrialSpec:
    """One trial as the engine sees it. Tables are those of the scenario, defaults filled in."""

    id: str
    seed: int
    toggles: Mapping[str, str]
    """Resolved values."""
    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    workload: Mapping[str, Any]
    client: Mapping[str, Any]
    sim: Mapping[str, Any]
    jitter: Mapping[str, Any]
    ledger_paths: Mapping[int, str]
    decisions_paths: Mapping[int, str]
    journal_paths: Mapping[int, str]
    """Where each rank writes its tokens as they come."""
    timeout_s: float
    """Deadline of the engine's own waits; lies above the watchdog's ceiling plus the capture."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Name of each rank's node, for its ledger."""
    ledger: bool = True
    faults: Sequence[Mapping[str, Any]] = ()
    """The scenario's faults as this arm has them; none in a reference."""
    fault_files: Sequence[str] = ()
    """Python files that register faults of the user's own."""
    fault_logs: Mapping[int, str] = field(default_factory=dict)
    """Where each rank writes what its faults did."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank brings home from a trial that it finished."""

    rank: int
    steps: int
    decode_steps: int
    duration_s: float
    tokens: Mapping[str, Sequence[int]]
    """Output tokens by request id."""
    finish: Mapping[str, str]
    counters: Mapping[str, int]
    latency_us: Mapping[str, Sequence[float]]
    nbytes: Mapping[str, int]
    leaks: Sequence[str]
    """What was not back to idle afterwards: pages, memory, threads. Empty is good."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a trial stands. A rank is in neither map while it runs."""

    done: Mapping[int, RankResult] = field(default_factory=dict)
    failed: Mapping[int, str] = field(default_factory=dict)
    """Ranks that raised or died, with what is known of why."""
    died: Collection[int] = ()
    """Those of ``failed`` whose process is gone: they owe an answer still, and never will give one."""
    gave_up: str = ""
    """Why the workload cannot go on, where that is no rank's word: a client that lost its server. Empty: it can."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What an engine is started with: of a scenario and one arm. Tables are those of the scenario, defaults filled
    in; ``toggles`` holds resolved values."""

    world: int
    device: str
    toggles: Mapping[str, str]
    target: Mapping[str, Any]
    model: Mapping[str, Any]
    engine: Mapping[str, Any]
    faults: Sequence[Mapping[str, Any]] = ()
    ranks_per_device: int = 1
    """Ranks of the built-in engine that share one accelerator."""


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What stays the same while ranks stay warm."""

    start: EngineSpec
    timeout_s: float
    scratch: Path
    """A directory on each node for files that outlive no run."""
    tracer_pids: Mapping[str, int] = field(default_factory=dict)
    """By node: the process that may trace the engine's processes there."""

    @property
    def world(self) -> int:
        return self.start.world


@dataclass(frozen=True, slots=True)
class Needs:
    """What a target asks of the pool: how many processes, and how many accelerators each of them holds."""

    processes: int
    devices: float = 1
    """A part of one where processes share it."""
    see_all: bool = False
    """A process sees the devices of the others too, and finds its own by its number."""
    role: str = "rank"
    spread: bool = False
    """One process a node."""


class RankPool(Protocol):
    """The rank processes, owned by the harness."""

    def start(self, rank_class: str, kwargs: Sequence[Mapping[str, Any]]) -> Sequence[RankProcess]:
        """One process a rank, each constructed with its own ``kwargs``."""

    def call(self, method: str, args: Sequence[Sequence[Any]]) -> None:
        """Calls ``method`` on every rank with that rank's ``args``; returns at once."""

    def poll(self) -> tuple[Mapping[int, Any], Mapping[int, str], Collection[int]]:
        """Results and failures of the last call so far, by rank; and which of the failed ranks are dead."""


class Target(Protocol):
    """An engine under test."""

    def validate(self, spec: EngineSpec, workload: Mapping[str, Any], seeds: Sequence[int]) -> None:
        """Raises TargetError for what the user got wrong and the engine can tell before anything starts."""

    def absent(self, spec: EngineSpec) -> str | None:
        """Why the engine cannot be started on this machine, with what to do; None: nothing is known against it.
        Takes seconds at most, and starts nothing that stays."""

    def fixed(self, spec: EngineSpec) -> Mapping[str, Any]:
        """What of ``spec`` needs a new start when it changes. Equal answers: the ranks may stay warm."""

    def commands(self, spec: EngineSpec) -> Sequence[str]:
        """The commands that start the engine, one a node, as a shell takes them; none where there is no command."""

    def needs(self, spec: EngineSpec) -> Needs: ...

    def launch(self, spec: LaunchSpec, pool: RankPool) -> Sequence[RankProcess]:
        """Starts the engine, ready to serve, and returns its ranks in order. Raises TargetError or ClusterError."""

    def drive(self, trial: TrialSpec) -> None:
        """Starts the trial's workload and returns."""

    def progress(self) -> Progress: ...

    def processes(self) -> Sequence[RankProcess]: ...

    def others(self) -> Sequence[OtherProcess]:
        """Processes of the engine that are no ranks."""

    def testimony(self, deadline_s: float) -> Mapping[str, Any]:
        """What the engine itself said of this trial (``evidence/engine.json``), ranks hung or dead. Empty where it
        has no voice of its own. Never raises."""

    def linger(self, deadline_s: float) -> bool:
        """After the capture of a hang, while the engine's own watchdog may act: waits until the engine is gone, or
        for ``deadline_s``. True: it is gone, or has no watchdog to wait for."""

    def stop(self, deadline_s: float) -> None:
        """Asks the engine to end. What does not end is ended by the pool."""


def installed_targets() -> tuple[str, ...]:
    """The names that `find_target` knows, sorted. Only an installed package has entry points."""
    return tuple(sorted(entry.name for entry in entry_points(group=GROUP)))


def find_target(name: str) -> Target:
    """A new target of that name. Raises TargetError naming those that exist."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    if name not in found:
        raise TargetError(
            f"target {name!r} is not installed; installed: {', '.join(installed_targets()) or 'none'} "
            f"(entry-point group {GROUP})"
        )
    target: Target = found[name].load()()
    return target
