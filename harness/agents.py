"""The agents as the driver sees them: one a node, started, told what to watch, asked, and sent home.

The agent on the driver's own node is launched before the cluster, so that whatever kills the driver,
somebody is there to end what it started; the driver talks to it through files. The agents of other nodes
are launched through Ray by a courier each (``courier.py``). A silent or dead agent is reported, never taken
for a healthy trial.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

from harness import process_control
from harness.agent_files import AgentTrial, Command, Status, WatchedRank
from harness.agent_links import AgentOptions, CourierLink, Link, LocalLink
from harness.cluster import Cluster, nodes
from harness.process_control import ProcessId
from harness.seats import Seat
from harness.target import OtherProcess, RankProcess

_BEAT_S = 2.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """``problem``: why this node is not watched any more; then ``status`` is the last word, if there was one.
    ``complete``: this node's evidence of the trial is in the trial's evidence directory."""

    node: str
    status: Status | None
    problem: str | None = None
    complete: bool = False


@dataclass(slots=True)
class _Station:
    """One node: the way to its agent and what it was told last."""

    node: str
    link: Link
    command: Command = field(default_factory=lambda: Command(counter=0))
    fetched: bool = False

    def tell(self, **changes: Any) -> None:
        self.command = self.command.model_copy(update={**changes, "counter": self.command.counter + 1})
        self.link.send(self.command)


class Agents:
    """Not for several threads."""

    def __init__(self, options: AgentOptions | None = None) -> None:
        self._options = options or AgentOptions()
        self._stations: dict[str, _Station] = {}
        self._local = ""
        self._evidence: Path | None = None
        self._attempt = 0
        self._lock = Lock()
        self._home = Event()

    # Start and stop --------------------------------------------------------------------------------------

    def start(self, cluster: Cluster, timeout_s: float) -> None:
        """Launches the agent of this node, starts (or connects to) ``cluster``, launches the others.

        Raises ClusterError with nothing left behind.
        """
        deadline = time.monotonic() + timeout_s
        station = _Station("", LocalLink.launch(cluster.guarded, self._options, timeout_s))
        self._stations = {"": station}
        try:
            cluster.start(max(0.0, deadline - time.monotonic()))
            here, *others = nodes()
            station.node = self._local = here.name
            self._stations = {here.name: station}
            for node in others:
                link = CourierLink.launch(node, self._options, max(0.0, deadline - time.monotonic()))
                self._stations[node.name] = _Station(node.name, link)
        except BaseException:
            self.stop(self._options.end_s)
            cluster.stop(self._options.end_s)
            raise
        if others:
            Thread(target=self._beat, name="hangrig-agent-beat", daemon=True).start()

    def stop(self, deadline_s: float) -> list[ProcessId]:
        """Sends all agents home; ranks and cluster are left as they are. Returns what would not die."""
        self._home.set()
        left: list[ProcessId] = []
        with self._lock:
            for station in self._stations.values():
                station.tell(stop=True)
            for station in self._stations.values():
                left += station.link.retire(deadline_s)
            self._stations.clear()
        return left

    def pid_on(self, node: str) -> int:
        """The agent's process there, which ranks may allow to trace them."""
        return self._stations[node].link.agent.pid

    def broken(self) -> str | None:
        """Why this node is not watched any more; None while it is."""
        station = self._stations.get(self._local)
        if station is None or process_control.alive(station.link.agent):
            return None
        return f"the agent of {station.node} is gone"

    # A trial ---------------------------------------------------------------------------------------------

    def own(self, ranks: Sequence[RankProcess | OtherProcess]) -> None:
        """The processes that live now, to be ended when the driver is gone. Call it after every start or
        replace."""
        for station in self._stations.values():
            here = tuple(ProcessId(r.pid, r.start_time_ticks) for r in ranks if r.node == station.node)
            self._tell(station, owned=here)

    def begin_trial(self, trial: AgentTrial, placement: Mapping[Seat, str] | None = None) -> None:
        """From now on the agents watch. ``trial`` holds all ranks, ``placement`` the node of each.

        Ranks without a placement are on this node. On other nodes ``started_ns`` is when the agent hears of
        it.
        """
        self._evidence = trial.evidence
        self._attempt += 1
        for station in self._stations.values():
            here = tuple(r for r in trial.ranks if (placement or {}).get(r.rank, self._local) == station.node)
            part = None
            if here:
                folder = station.link.evidence_folder(trial.evidence)
                part = trial.model_copy(
                    update={
                        "ranks": here,
                        "attempt": self._attempt,
                        "evidence": folder,
                        "started_ns": trial.started_ns if station.node == self._local else None,
                    }
                )
            station.fetched = False
            self._tell(station, trial=part, done=(), capture=None)

    def mark_done(self, rank: int) -> None:
        """The driver has this rank's answer, or its exception."""
        for station in self._watching():
            if any(entry.rank == rank for entry in station.command.trial.ranks):  # type: ignore[union-attr]
                self._tell(station, done=tuple(sorted({*station.command.done, rank})))

    def capture_now(self, reason: str) -> None:
        """Asks all agents for a capture, once a trial; ``poll`` tells when it is there."""
        for station in self._watching():
            if station.command.capture is None:
                self._tell(station, capture=reason)

    def end_trial(self) -> None:
        """The agents stop watching. Evidence that is not there yet will not come; but one that suspects on this
        node, whose files are the trial's, is given time to write down that the trial went on."""
        local = self._stations.get(self._local)
        writes = local is not None and local.command.trial is not None and _suspects(local.link.ask()[0])
        for station in self._stations.values():
            self._tell(station, trial=None, done=(), capture=None)
        if local is not None and writes:
            self._await(local)
        self._evidence = None

    def poll(self) -> tuple[AgentStatus, ...]:
        """One look at all agents. When one has captured, the others are asked to, and evidence is fetched."""
        found = {station.node: self._look(station) for station in self._stations.values()}
        captured = [view for view in found.values() if _captured(view)]
        if captured:
            reason = captured[0].status.reason if captured[0].status is not None else None
            self.capture_now(f"captured on {captured[0].node}: {reason}")
            own = found[self._local]
            if _captured(own) or own.problem is not None or self._stations[self._local].command.trial is None:
                # The manifest of this node comes first; those of others are joined to it.
                found = {name: self._with_evidence(view) for name, view in found.items()}
        return tuple(found.values())

    def captured(self, views: Sequence[AgentStatus]) -> bool:
        """All nodes that watch a trial have their evidence in place, or cannot have it any more."""
        watching = {station.node for station in self._watching()}
        relevant = [view for view in views if view.node in watching]
        return any(view.complete for view in relevant) and all(
            view.complete or view.problem is not None for view in relevant
        )

    # Inside ----------------------------------------------------------------------------------------------

    def _watching(self) -> list[_Station]:
        return [station for station in self._stations.values() if station.command.trial is not None]

    def _tell(self, station: _Station, **changes: Any) -> None:
        with self._lock:
            station.tell(**changes)

    def _await(self, station: _Station) -> None:
        """Until the agent has handled its newest command, is gone, or has had the time of a capture."""
        deadline = time.monotonic() + self._options.capture_s
        while time.monotonic() < deadline and not self._home.wait(_POLL_S):
            status, problem = station.link.ask()
            if problem is not None or (status is not None and status.counter >= station.command.counter):
                return

    def _beat(self) -> None:
        """Remote agents take silence for the driver's end; this is the sign of life, while a trial runs
        too."""
        while not self._home.wait(_BEAT_S):
            for name, station in list(self._stations.items()):
                if name != self._local and not self._home.is_set():
                    self._tell(station)

    def _look(self, station: _Station) -> AgentStatus:
        status, problem = station.link.ask()
        trial = station.command.trial
        if status is not None and trial is not None and status.attempt != trial.attempt:
            status = status.model_copy(update={"evidence": None, "state": "idle", "reason": None})
        if problem is None and status is not None and status.state == "captured" and status.evidence is None:
            problem = f"its evidence is not on disk: {status.error}"
        complete = station.node == self._local and status is not None and status.evidence is not None
        return AgentStatus(station.node, status, problem, complete or station.fetched)

    def _with_evidence(self, view: AgentStatus) -> AgentStatus:
        station = self._stations[view.node]
        if view.complete or not _captured(view) or self._evidence is None:
            return view
        if view.status is None or view.status.evidence is None:
            return view  # it reached no disk there, so there is nothing to fetch
        problem = station.link.fetch(self._evidence, station.node)
        station.fetched = problem is None
        return AgentStatus(view.node, view.status, problem, station.fetched)


def watched(process: RankProcess, ledger: Path | None) -> WatchedRank:
    """A rank of a target as agents watch it. ``ledger``: where it writes for this trial, unless it says itself."""
    return WatchedRank(
        rank=process.rank,
        process=ProcessId(process.pid, process.start_time_ticks),
        ledger=_path(process.ledger_path) or ledger,
        faulthandler=_path(process.faulthandler_path),
        log=_path(process.log_path),
        decisions=_path(process.decisions_path),
    )


def watched_other(process: OtherProcess) -> WatchedRank:
    return WatchedRank(
        rank=process.name,
        process=ProcessId(process.pid, process.start_time_ticks),
        ledger=_path(process.ledger_path),
        faulthandler=_path(process.faulthandler_path),
        log=_path(process.log_path),
    )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _suspects(status: Status | None) -> bool:
    return status is not None and status.state in ("suspect", "capturing")


def _captured(view: AgentStatus) -> bool:
    return view.status is not None and view.status.state == "captured"
