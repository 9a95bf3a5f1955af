"""The way from the driver to one agent: files on this node, or a courier on another.

What is said on it is the business of ``agents.py``.
"""

from __future__ import annotations

import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from harness import agent_files, agent_launch, process_control
from harness.agent_files import AgentConfig, Command, Status
from harness.cluster import ClusterError, Node
from harness.courier import Courier, agent_of, unpack
from harness.guarded import GuardedCluster
from harness.process_control import ProcessId
from harness.store import StoreError

_ANSWER_S = 10.0
"""How long a courier may take to answer; it only reads and writes small files."""


@dataclass(frozen=True, slots=True)
class AgentOptions:
    """``lifetime_s``: an agent that outlives it ends everything; above the run's own time budget."""

    lifetime_s: float = 24 * 3600.0
    capture_s: float = 30.0
    end_s: float = 10.0
    driver_silence_s: float = 30.0
    run: Path | None = None
    """The run's directory: the driver's own agent writes its reports when the driver is gone."""
    stale_s: float = 10.0
    """An agent whose heartbeat is this late counts as dead."""

    def config(self, driver: ProcessId | None, guarded: GuardedCluster | None) -> AgentConfig:
        return AgentConfig(
            driver=driver,
            driver_silence_s=self.driver_silence_s,
            cluster=guarded,
            lifetime_s=self.lifetime_s,
            capture_s=self.capture_s,
            end_s=self.end_s,
            run=None if driver is None else self.run,
        )


class Link(Protocol):
    """The way to one agent."""

    @property
    def agent(self) -> ProcessId: ...

    def send(self, command: Command) -> None: ...

    def ask(self) -> tuple[Status | None, str | None]:
        """The newest status and what is wrong."""

    def evidence_folder(self, wanted: Path) -> Path:
        """Where the agent is to put evidence that is wanted at ``wanted``."""

    def fetch(self, wanted: Path, node: str) -> str | None:
        """Brings the evidence to ``wanted``. Returns why it could not."""

    def retire(self, deadline_s: float) -> list[ProcessId]: ...


class LocalLink:
    """Files on this node."""

    def __init__(self, spool: Path, agent: ProcessId, options: AgentOptions) -> None:
        self._spool = spool
        self._agent = agent
        self._options = options

    @classmethod
    def launch(cls, guarded: GuardedCluster | None, options: AgentOptions, timeout_s: float) -> LocalLink:
        """Raises ClusterError."""
        spool = agent_launch.make_spool()
        config = options.config(process_control.myself(), guarded)
        try:
            return cls(spool, agent_launch.launch(spool, config, timeout_s), options)
        except agent_launch.AgentLaunchError as error:
            raise ClusterError(str(error)) from error

    @property
    def agent(self) -> ProcessId:
        return self._agent

    def send(self, command: Command) -> None:
        try:
            agent_files.write(self._spool, agent_files.COMMAND, command)
        except agent_files.SpoolError as error:
            raise ClusterError(str(error)) from error

    def ask(self) -> tuple[Status | None, str | None]:
        try:
            status = agent_files.read(self._spool, agent_files.STATUS, Status)
        except agent_files.SpoolError as error:
            return None, str(error)
        return status, agent_launch.problem(self._agent, status, self._options.stale_s)

    def evidence_folder(self, wanted: Path) -> Path:
        return wanted

    def fetch(self, wanted: Path, node: str) -> str | None:
        return None

    def retire(self, deadline_s: float) -> list[ProcessId]:
        return agent_launch.retire(self._spool, self._agent, deadline_s)


class CourierLink:
    """Through the actor on the agent's node."""

    def __init__(self, actor: Any, spool: Path, agent: ProcessId, options: AgentOptions) -> None:
        self._actor = actor
        self._spool = spool
        self._agent = agent
        self._options = options
        self._command = Command(counter=0).model_dump_json(by_alias=True)

    @classmethod
    def launch(cls, node: Node, options: AgentOptions, timeout_s: float) -> CourierLink:
        """Raises ClusterError."""
        deadline = time.monotonic() + timeout_s
        settings = {
            "num_cpus": 0,
            "lifetime": "detached",
            "name": f"courier-{node.name}-{process_control.myself().pid}",
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
        }
        actor = ray.remote(Courier).options(**settings).remote()
        config = options.config(None, None).model_dump_json(by_alias=True)
        try:
            answer = ray.get(actor.launch.remote(config, timeout_s), timeout=deadline - time.monotonic())
        except ray.exceptions.RayError as error:
            ray.kill(actor, no_restart=True)
            raise ClusterError(f"no agent on node {node.name} ({node.address}): {error}") from error
        return cls(actor, Path(answer[0]), agent_of(answer), options)

    @property
    def agent(self) -> ProcessId:
        return self._agent

    def send(self, command: Command) -> None:
        self._command = command.model_dump_json(by_alias=True)
        self._actor.exchange.remote(self._command, self._options.stale_s)

    def ask(self) -> tuple[Status | None, str | None]:
        answer = self._actor.exchange.remote(self._command, self._options.stale_s)
        try:
            text, problem = ray.get(answer, timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            return None, f"its courier does not answer: {error}"
        return (None if text is None else Status.model_validate_json(text)), problem

    def evidence_folder(self, wanted: Path) -> Path:
        # Old evidence would be taken for the new trial's.
        self._actor.forget_evidence.remote()
        return self._spool / agent_files.EVIDENCE

    def fetch(self, wanted: Path, node: str) -> str | None:
        try:
            archive = ray.get(self._actor.evidence.remote(), timeout=self._options.capture_s)
            unpack(archive, wanted, node)
        except (ray.exceptions.RayError, StoreError, OSError, tarfile.TarError) as error:
            return f"its evidence did not come: {error}"
        return None

    def retire(self, deadline_s: float) -> list[ProcessId]:
        try:
            left = ray.get(self._actor.retire.remote(deadline_s), timeout=deadline_s + _ANSWER_S)
        except ray.exceptions.RayError:
            # The courier is gone; the agent misses the driver soon and ends by itself.
            left = [(self._agent.pid, self._agent.start_time_ticks)]
        ray.kill(self._actor, no_restart=True)
        return [ProcessId(pid, ticks) for pid, ticks in left]
