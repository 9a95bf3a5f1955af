"""The ranks of a run: up when a trial needs them, warm while trials are healthy, replaced after a hang.

Not here: the processes themselves (``rank_pool.py``) and what an engine needs to start (its target).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.agents import Agents
from harness.cluster import Cluster, nodes
from harness.process_control import ProcessId
from harness.rank_pool import DeviceKind, PoolOptions, RankPool
from harness.target import LaunchSpec, RankProcess, Target, find_target

_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What must be the same for ranks to be used again."""

    target: str
    world: int
    device: DeviceKind
    model: Mapping[str, Any]
    timeout_s: float


class Ranks:
    """At most one set of ranks lives at a time."""

    def __init__(self, cluster: Cluster, agents: Agents, scratch: Path, *, start_s: float) -> None:
        self._cluster = cluster
        self._agents = agents
        self._scratch = scratch
        self._start_s = start_s
        self._wanted: Wanted | None = None
        self._pool: RankPool | None = None
        self._target: Target | None = None
        self._ranks: tuple[RankProcess, ...] = ()
        self.trials = 0
        """Trials that the ranks now up have been through."""

    @property
    def target(self) -> Target:
        if self._target is None:
            raise RuntimeError("no ranks are up; call ensure first")
        return self._target

    def ensure(self, wanted: Wanted) -> Sequence[RankProcess]:
        """The ranks, warm where they fit. Raises ClusterError or TargetError, with nothing left behind."""
        if self._wanted == wanted:
            return self._ranks
        self.discard(_END_S)
        target = find_target(wanted.target)
        self._scratch.mkdir(parents=True, exist_ok=True)
        options = PoolOptions(
            device=wanted.device,
            start_s=self._start_s,
            dumps=self._scratch,
            # Simulated ranks share memory and write into the run directory: all on this node. Ranks on several
            # nodes come with the accelerators.
            placement=[nodes()[0].id] * wanted.world if wanted.device == "sim" else None,
        )
        pool = RankPool(self._cluster, options, tracer=self._agents.pid_on, owner=self._agents.own)
        self._pool, self._target = pool, target
        spec = LaunchSpec(
            world=wanted.world,
            device=wanted.device,
            model=wanted.model,
            timeout_s=wanted.timeout_s,
            scratch=self._scratch,
        )
        try:
            self._ranks = tuple(target.launch(spec, pool))
        except BaseException:
            self.discard(_END_S)
            raise
        self._wanted = wanted
        self.trials = 0
        return self._ranks

    def discard(self, deadline_s: float) -> list[ProcessId]:
        """Ends the ranks, hung or stopped ones too. Returns what would not die."""
        left: list[ProcessId] = []
        if self._target is not None:
            self._target.stop(deadline_s)
        if self._pool is not None:
            left = self._pool.stop(deadline_s)
        self._target = self._pool = self._wanted = None
        self._ranks = ()
        return left
