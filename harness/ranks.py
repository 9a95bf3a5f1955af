"""The ranks of a run: up when a trial needs them, warm while trials are healthy, replaced after a hang.

Not here: the processes themselves (``rank_pool.py``) and what an engine needs to start (its target).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.agents import Agents
from harness.cluster import Cluster, ClusterError, Node, nodes
from harness.process_control import ProcessId
from harness.rank_environment import Patience, RankEnvironment, Written, written
from harness.rank_pool import DeviceKind, PoolOptions, RankPool
from harness.target import EngineSpec, LaunchSpec, Needs, RankProcess, Target, find_target

_END_S = 10.0


class Ranks:
    """At most one set of ranks lives at a time."""

    def __init__(
        self,
        cluster: Cluster,
        agents: Agents,
        scratch: Path,
        *,
        start_s: float,
        patience: Patience | None = None,
    ) -> None:
        """``scratch``: a directory of this run on every node. ``patience``: of the accelerators' libraries."""
        self._cluster = cluster
        self._agents = agents
        self._scratch = scratch
        self._start_s = start_s
        self._patience = patience
        self._key: tuple[object, ...] = ()
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

    @property
    def environments(self) -> Mapping[int, RankEnvironment]:
        """What was set for the accelerator's libraries, by process that the pool started; empty on sim and cpu."""
        return {} if self._pool is None else self._pool.environments

    def written(self, device: str) -> Written | None:
        """Where the accelerator's libraries write, on every node; None where there are none. Processes whose users
        set something of their own may differ; then it is the first one's word."""
        first = next(iter(self.environments.values()), None)
        return None if first is None else written(device, first.effective)

    def ensure(self, name: str, spec: EngineSpec, timeout_s: float) -> Sequence[RankProcess]:
        """The ranks of target ``name``, warm where they fit. Raises ClusterError or TargetError, with nothing
        left behind."""
        target = find_target(name)
        key = (name, spec.world, spec.device, timeout_s, target.fixed(spec))
        if self._key == key:
            return self._ranks
        self.discard(_END_S)
        self._scratch.mkdir(parents=True, exist_ok=True)
        there = nodes()
        if not there:
            raise ClusterError("no node of the cluster is alive")
        pool = RankPool(
            self._cluster,
            self._options(target.needs(spec), spec, there),
            tracer=self._agents.pid_on,
            owner=self._agents.own,
        )
        self._pool, self._target = pool, target
        launch = LaunchSpec(
            start=spec,
            timeout_s=timeout_s,
            scratch=self._scratch,
            tracer_pids={node.name: self._agents.pid_on(node.name) for node in there},
        )
        try:
            self._ranks = tuple(target.launch(launch, pool))
        except BaseException:
            self.discard(_END_S)
            raise
        self._agents.own([*pool.processes, *self._ranks, *target.others()])
        self._key = key
        self.trials = 0
        return self._ranks

    def _options(self, needs: Needs, spec: EngineSpec, there: Sequence[Node]) -> PoolOptions:
        kind: DeviceKind = spec.device  # type: ignore[assignment]  # validated by the request
        placement = None
        if needs.spread and needs.processes > 1:
            if len(there) < needs.processes:
                raise ClusterError(
                    f"the engine wants {needs.processes} nodes (target.nodes), the cluster has {len(there)}"
                )
            placement = [node.id for node in there[: needs.processes]]
        elif kind in ("sim", "cpu"):
            # Ranks of a simulation share memory and write into the run directory, and a CPU engine is on one
            # machine: all on this node.
            placement = [there[0].id] * needs.processes
        return PoolOptions(
            device=kind,
            role=needs.role,
            start_s=self._start_s,
            dumps=self._scratch,
            placement=placement,
            devices=needs.devices,
            see_all=needs.see_all,
            patience=self._patience,
            engine_env=spec.target.get("env", {}),
        )

    def broken(self) -> str | None:
        """Why no ranks can be started here any more; None while they can."""
        return self._cluster.broken() or self._agents.broken()

    def discard(self, deadline_s: float) -> list[ProcessId]:
        """Ends the ranks, hung or stopped ones too. Returns what would not die."""
        left: list[ProcessId] = []
        if self._target is not None:
            self._target.stop(deadline_s)
        if self._pool is not None:
            left = self._pool.stop(deadline_s)
        self._target = self._pool = None
        self._key, self._ranks = (), ()
        return left
