"""What an engine must offer to be stressed, and how engines are found by name.

A target launches ranks, is driven through one trial at a time, says how far it is, and is stopped. It knows its
engine; the harness knows none. Ranks live in a pool that the harness owns (``cluster.py``), because ending them,
hung or stopped ones too, is the harness's affair.

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


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What stays the same while ranks stay warm."""

    world: int
    device: str
    model: Mapping[str, Any]
    timeout_s: float
    scratch: Path
    """A directory on each node for files that outlive no run."""


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

    def validate(self, model: Mapping[str, Any], workload: Mapping[str, Any], seeds: Sequence[int]) -> None:
        """Raises TargetError for what the user got wrong and the engine can tell before anything starts."""

    def launch(self, spec: LaunchSpec, pool: RankPool) -> Sequence[RankProcess]: ...

    def drive(self, trial: TrialSpec) -> None:
        """Starts the trial's workload and returns."""

    def progress(self) -> Progress: ...

    def processes(self) -> Sequence[RankProcess]: ...

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
