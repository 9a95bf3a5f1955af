"""Where ranks go: one device each, ids as CANN takes them, spread over nodes that each have an agent.

Ray's custom resource NPU stands for the devices, so this needs none; several raylets on one machine stand for
nodes. What it shows is placement and evidence, nothing about hardware.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import cluster_rig as rig
import pytest

from harness.agents import Agents, AgentStatus
from harness.cluster import ClusterError, ClusterOptions, ExistingCluster, LocalCluster, nodes
from harness.rank_pool import PoolOptions, RankPool, ascending

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
DRIVER_S = 200.0


@pytest.mark.parametrize(
    ("given", "taken"),
    [("10,9,2", "2,9,10"), ("0,1,2", "0,1,2"), ("7", "7"), ("", ""), ("0-3", "0-3"), ("a,b", "a,b")],
)
def test_visible_devices_ascend(given: str, taken: str) -> None:
    assert ascending(given) == taken


def visible(pool: RankPool, world: int) -> dict[int, str]:
    """What each rank's CANN would see."""
    pool.call("environment", [(VISIBLE,)] * world)
    answers: dict[int, str] = rig.until(
        lambda: len(pool.poll()[0]) == world and pool.poll()[0], "the ranks' environment"
    )
    return answers


@pytest.mark.cluster
@pytest.mark.timeout(240)
def test_sixteen_npus_are_given_out_one_a_rank_or_several_to_a_launcher() -> None:
    """A node of 910C: 16 devices, 16 ranks; then two launchers of eight devices; a 17th rank is refused."""
    cluster, agents = LocalCluster(ClusterOptions(workers=4, npus=16, env=rig.ENV)), Agents(rig.OPTIONS)
    agents.start(cluster, rig.DEADLINE_S)
    options = PoolOptions(device="npu", start_s=120.0)
    pool = RankPool(cluster, options)
    try:
        ranks = pool.start(rig.RANK, [{"rank": rank, "world": 16} for rank in range(16)])
        seen = visible(pool, 16)
        assert sorted(int(text) for text in seen.values()) == list(range(16))
        assert {rank.rank: rank.device for rank in ranks} == {
            rank: f"npu:{text}" for rank, text in seen.items()
        }
        with pytest.raises(ClusterError, match="the devices are taken"):
            RankPool(cluster, PoolOptions(device="npu", start_s=1.0)).start(
                rig.RANK, [{"rank": 0, "world": 1}]
            )
        assert pool.stop(20.0) == []
        with pytest.raises(ClusterError, match="17 ranks on npu need 17 NPU, the cluster has 16"):
            pool.start(rig.RANK, [{"rank": rank, "world": 17} for rank in range(17)])
        launchers = RankPool(cluster, PoolOptions(device="npu", devices=8, start_s=60.0))
        try:
            launchers.start(rig.RANK, [{"rank": rank, "world": 2} for rank in range(2)])
            lists = [[int(one) for one in text.split(",")] for text in visible(launchers, 2).values()]
            assert [sorted(one) for one in lists] == lists
            assert sorted(one for devices in lists for one in devices) == list(range(16))
        finally:
            assert launchers.stop(20.0) == []
    finally:
        pool.stop(20.0)
        agents.stop(10.0)
        left = cluster.stop(10.0)
    assert left == []


@pytest.mark.cluster
@pytest.mark.timeout(300)
def test_ranks_over_two_nodes_have_an_agent_each_and_a_hang_has_evidence_of_both(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join([str(rig.ROOT), str(Path(__file__).parent)]),
            "TMPDIR": str(tmp_path / "tmp"), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "t" * 32,
        },
        capture_output=True, text=True, timeout=DRIVER_S, check=False, start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    found["ranks"] = {int(rank): where for rank, where in found["ranks"].items()}
    assert len(found["nodes"]) == 2
    by_node = Counter(node for node, _ in found["ranks"].values())
    assert dict(by_node) == dict.fromkeys(found["nodes"], 2), "two of the four ranks on each node"
    for node in found["nodes"]:
        devices = [device for where, device in found["ranks"].values() if where == node]
        assert sorted(devices) == ["npu:0", "npu:1"], "a device of its node each"
    assert len(set(found["agents"])) == 2 and found["problems"] == [None, None]
    assert found["watched"] == {
        node: [rank for rank, (where, _) in sorted(found["ranks"].items()) if where == node]
        for node in found["nodes"]
    }
    evidence = tmp_path / "npus" / "evidence"
    for sample in range(2):
        table = rig.load(evidence / f"sample-{sample}" / "processes.json")["ranks"]
        assert [entry["rank"] for entry in table] == [0, 1, 2, 3]
        for rank in range(4):
            assert "stuck_here" in rig.host_functions(evidence, sample, rank), (sample, rank)
            assert (evidence / f"sample-{sample}" / "ledger" / f"rank{rank}.json").exists()
    assert "stalled" in found["reasons"], (
        "found by its budget: each agent proves with the ledgers of its node"
    )
    manifest = rig.load(evidence / "manifest.json")
    assert list(manifest["nodes"]) == found["nodes"][1:]
    assert found["left"] == [] and rig.living(found["processes"]) == []
    assert list((tmp_path / "tmp").iterdir()) == []


def drive(folder: Path) -> None:
    """Two raylets that somebody else runs, two NPUs each; four ranks in a collective that never ends.

    Says what it saw as one line of JSON. A program of its own: a process is connected to one cluster at a time.
    """
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "resources": {"NPU": 2}}
    theirs = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    theirs.add_node(**node)
    cluster, agents = ExistingCluster(theirs.address), Agents(rig.OPTIONS)
    try:
        agents.start(cluster, rig.DEADLINE_S)
        pool = RankPool(cluster, PoolOptions(device="npu", env=rig.ENV), tracer=agents.pid_on)
        ranks = pool.start(rig.RANK, [{"rank": rank, "world": 4} for rank in range(4)])
        agents.own(ranks)
        agents.begin_trial(rig.trial("npus", ranks, folder), {rank.rank: rank.node for rank in ranks})
        pool.call("run", [(str(rig.ledger(folder, "npus", rank)), 40, "meet") for rank in range(4)])
        views: list[AgentStatus] = []

        def captured() -> bool:
            views[:] = agents.poll()
            return agents.captured(views)

        rig.until(captured, "the evidence of two nodes")
        there = [one.name for one in nodes()]
        watched = {
            name: sorted(one.rank for one in trial.ranks)
            for name, station in agents._stations.items()
            if (trial := station.command.trial) is not None
        }
        pids = [agents.pid_on(name) for name in there]
        agents.end_trial()
        left = [*pool.stop(10.0), *agents.stop(10.0), *cluster.stop(10.0)]
        found = {
            "nodes": there,
            "ranks": {rank.rank: (rank.node, rank.device) for rank in ranks},
            "agents": pids,
            "watched": watched,
            "problems": [view.problem for view in views],
            "reasons": [view.status.reason if view.status is not None else None for view in views],
            "processes": [(rank.pid, rank.start_time_ticks) for rank in ranks],
            "left": [process.pid for process in left],
        }
        print(json.dumps(found), flush=True)
    finally:
        theirs.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="hg-two-", dir="/tmp") as short:
        os.environ["RAY_TMPDIR"] = short
        drive(Path(sys.argv[1]))
