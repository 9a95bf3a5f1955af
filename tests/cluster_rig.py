"""Ranks that write real ledgers and then do as they are told, and a driver program that can be killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from harness import process_control
from harness.agent_files import AgentTrial
from harness.agents import AgentOptions, Agents, AgentStatus, watched
from harness.capture import install_faulthandler
from harness.cluster import ClusterOptions, ExistingCluster, LocalCluster, nodes
from harness.ledger import LedgerWriter
from harness.process_control import ProcessId
from harness.rank_pool import PoolOptions, RankPool
from harness.target import RankProcess
from harness.watchdog import WatchdogSettings

ROOT = Path(__file__).resolve().parents[1]
RANK = "cluster_rig:Rank"
ENV = {"PYTHONPATH": str(Path(__file__).parent)}
DEADLINE_S = 40.0
STEP_S = 0.01

# Short, so that a test is; the floor still bears a machine on which other work runs.
QUICK = WatchdogSettings(
    sample_period_s=0.05, floor_s=1.0, ceiling_s=2.0, startup_s=5.0, warm_steps=5, proof_still_s=0.5,
    confirm_after_s=0.3,
)  # fmt: skip
OPTIONS = AgentOptions(lifetime_s=300.0, capture_s=15.0, end_s=10.0, driver_silence_s=20.0)

T = TypeVar("T")


class Rank:
    """A rank without an engine. Its host thread is the one that Ray calls."""

    def __init__(self, rank: int, world: int, broken: bool = False) -> None:
        if broken:
            raise ValueError(f"rank {rank} was told to break")
        self._rank = rank
        self._world = world

    def environment(self, name: str) -> str | None:
        return os.environ.get(name)

    def run(self, ledger: str, steps: int, then: str) -> str:
        return run_rank(self._rank, self._world, ledger, steps, then)


def run_rank(rank: int, world: int, ledger: str, steps: int, then: str) -> str:
    """``steps`` steps; then "return", "raise", "wait" for ever, "meet" all others in a collective that never ends,
    "pause" for two seconds and return, or "compute:A,B": until file A is there, ``steps`` steps, and the same with
    B."""
    writer = LedgerWriter.create(Path(ledger), rank=rank, world=world, node="here", device="sim")
    clock = Event()
    for step in range(1, steps + 1):
        writer.phase("step", step)
        clock.wait(STEP_S)
    if then == "raise":
        raise RuntimeError(f"rank {rank} raised on purpose")
    if then == "meet":
        writer.collective_enter(writer.group("agree", range(world)), "all_gather", (5,), "int64")
    if then in ("wait", "meet"):
        stuck_here()
    if then == "pause":
        clock.wait(2.0)
        for step in range(steps + 1, 2 * steps + 1):
            writer.phase("step", step)
            clock.wait(STEP_S)
    for bout, end in enumerate(then.partition(":")[2].split(",") if then.startswith("compute") else ()):
        deeper(Path(end))
        for step in range((bout + 1) * steps + 1, (bout + 2) * steps + 1):
            writer.phase("step", step)
            clock.wait(STEP_S)
    return f"rank {rank} made {steps} steps"


def deeper(end: Path) -> None:
    """Its stack is another one at every look, so it computes; its ledger says nothing."""
    Event().wait(0.05)
    if not end.exists():
        deeper(end)


def stuck_here() -> None:
    """The name that a stack of a hung rank has to show."""
    Event().wait()


def until(found: Callable[[], T | None], what: str) -> T:
    """Waits for a truthy answer; raises when DEADLINE_S have passed."""
    deadline = time.monotonic() + DEADLINE_S
    clock = Event()
    while not (answer := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {DEADLINE_S:g} s")
        clock.wait(0.02)
    return answer


def until_captured(agents: Agents) -> AgentStatus:
    """Waits for the evidence of all nodes; returns the first node's view."""

    def look() -> AgentStatus | None:
        views = agents.poll()
        return views[0] if agents.captured(views) else None

    return until(look, "a capture")


def trial(
    identity: str, ranks: Sequence[RankProcess], folder: Path, settings: WatchdogSettings = QUICK
) -> AgentTrial:
    evidence = folder / identity / "evidence"
    evidence.mkdir(parents=True, exist_ok=True)
    return AgentTrial(
        id=identity,
        world=len(ranks),
        ranks=tuple(watched(rank, ledger(folder, identity, rank.rank)) for rank in ranks),
        evidence=evidence,
        started_ns=time.monotonic_ns(),
        watchdog=settings,
    )


def ledger(folder: Path, identity: str, rank: int) -> Path:
    return folder / identity / f"rank{rank}.ledger"


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def host_functions(evidence: Path, sample: int, rank: int) -> list[str]:
    """Function names of the rank's main thread, innermost first."""
    stacks = load(evidence / f"sample-{sample}" / "stacks" / f"rank{rank}.json")
    (main,) = [thread for thread in stacks["threads"] if thread["name"] == "MainThread"]
    return [frame["name"] for frame in main["frames"]]


def living(processes: Sequence[Sequence[int]]) -> list[ProcessId]:
    return [p for p in (ProcessId(*pair) for pair in processes) if process_control.alive(p)]


def start_driver(mode: str, folder: Path) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Runs this file as a driver; returns it with what it said when its ranks were hung.

    Its agents' spools lie under ``folder/tmp``.
    """
    (folder / "tmp").mkdir()
    driver = subprocess.Popen(
        [sys.executable, __file__, mode, str(folder)],
        # Of its own: without, it would join this process's, and a cluster of others could not be tried.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(folder / "tmp"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "t" * 32,
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert driver.stdout is not None
    line = driver.stdout.readline()
    if not line:
        raise RuntimeError(f"the driver ended with status {driver.wait(DEADLINE_S)} and said nothing")
    return driver, json.loads(line)


def drive(folder: Path) -> None:
    """A cluster, two ranks that hang, a trial; then it waits for whatever is done to it."""
    cluster, agents = LocalCluster(ClusterOptions(workers=2, env=ENV)), Agents(OPTIONS)
    pool = RankPool(cluster)
    try:
        agents.start(cluster, DEADLINE_S)
        ranks = pool.start(RANK, [{"rank": rank, "world": 2} for rank in range(2)])
        agents.own(ranks)
        # Patient settings: it is not the watchdog that is to find the hang here.
        agents.begin_trial(trial("killed", ranks, folder, WatchdogSettings()))
        pool.call("run", [(str(ledger(folder, "killed", rank)), 5, "wait") for rank in range(2)])
        until(lambda: all(_step(folder, rank) == 5 for rank in range(2)), "the ranks' last step")
        agent = agents.pid_on(ranks[0].node)
        found = {
            "folder": str(cluster.folder),
            "cluster": [(p.pid, p.start_time_ticks) for p in cluster.processes()],
            "ranks": [(rank.pid, rank.start_time_ticks) for rank in ranks],
            "agent": [(agent, process_control.start_time_ticks(agent))],
        }
        print(json.dumps(found), flush=True)
        Event().wait(300.0)
    finally:
        pool.stop(10.0)
        agents.stop(10.0)
        left = cluster.stop(10.0)
        print(json.dumps({"left": [p.pid for p in left]}), flush=True)


def drive_two_nodes(folder: Path) -> None:
    """Two raylets on this machine that somebody else runs; one rank and one agent on each; a hang."""
    with tempfile.TemporaryDirectory(prefix="hg-two-", dir="/tmp") as short:
        os.environ["RAY_TMPDIR"] = short
        _drive_two_nodes(folder)


def _drive_two_nodes(folder: Path) -> None:
    from ray.cluster_utils import Cluster

    theirs = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    theirs.add_node(num_cpus=1)
    cluster, agents = ExistingCluster(theirs.address), Agents(OPTIONS)
    try:
        agents.start(cluster, DEADLINE_S)
        here = nodes()
        pool = RankPool(cluster, PoolOptions(env=ENV, placement=[node.id for node in here]))
        ranks = pool.start(RANK, [{"rank": rank, "world": 2} for rank in range(2)])
        agents.own(ranks)
        placement = {rank.rank: rank.node for rank in ranks}
        agents.begin_trial(trial("two", ranks, folder), placement)
        pool.call("run", [(str(ledger(folder, "two", rank)), 40, "wait") for rank in range(2)])
        views: list[AgentStatus] = []

        def captured() -> bool:
            views[:] = agents.poll()
            return agents.captured(views)

        until(captured, "the evidence of two nodes")
        processes = [(r.pid, r.start_time_ticks) for r in ranks]
        spools = len(list(Path(tempfile.gettempdir()).glob("hg-agent-*")))
        for node in here:
            pid = agents.pid_on(node.name)
            processes.append((pid, process_control.start_time_ticks(pid) or 0))
        agents.end_trial()
        left = [*pool.stop(10.0), *agents.stop(10.0), *cluster.stop(10.0)]
        # What they run is still there when we have gone.
        theirs_alive = sum(process.poll() is None for process in _raylets(theirs))
        found = {
            "problems": [view.problem for view in views],
            "nodes": [node.name for node in here],
            "placement": list(placement.values()),
            "processes": processes,
            "spools": spools,
            "left": [process.pid for process in left],
            "raylets": theirs_alive,
        }
        print(json.dumps(found), flush=True)
    finally:
        theirs.shutdown()


def _raylets(theirs: Any) -> list[Any]:
    return [
        info.process
        for node in theirs.list_all_nodes()
        for kind, infos in node.all_processes.items()
        if kind == "raylet"
        for info in infos
    ]


def _step(folder: Path, rank: int) -> int:
    from harness.ledger import LedgerReader

    path = ledger(folder, "killed", rank)
    return LedgerReader.open(path).snapshot().host.step if path.exists() else 0


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        install_faulthandler(Path(sys.argv[4] + ".stacks"))
        print(run_rank(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), sys.argv[6]))
    else:
        {"one": drive, "two": drive_two_nodes}[sys.argv[1]](Path(sys.argv[2]))
