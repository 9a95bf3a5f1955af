"""One fake engine over two nodes of a cluster that somebody else runs, as a program.

python fake_nodes.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import fake_dialect as fake
from cluster_rig import DEADLINE_S, ENV, until

from harness.cluster import ExistingCluster, nodes
from harness.rank_pool import PoolOptions, RankPool
from harness.target import LaunchSpec, TrialSpec
from serving.targets import engine_tree


def serve_on_two_nodes(folder: Path) -> None:
    """A rank on each of two raylets that somebody else runs; the one on the other node is killed as a fault.

    Says what it saw as one line of JSON. A program of its own: a process is connected to one cluster at a time.
    """
    from ray.cluster_utils import Cluster

    theirs = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    theirs.add_node(num_cpus=1)
    cluster, target = ExistingCluster(theirs.address), fake.FakeTarget()
    kill = {"name": "kill", "role": "rank", "ranks": (1,), "after_tokens": 20}
    two = fake.spec(2, target={"nodes": 2, "dp": 1}, faults=[kill])
    try:
        cluster.start(DEADLINE_S)
        there = nodes()
        pool = RankPool(cluster, PoolOptions(env=ENV, placement=[node.id for node in there], role="launcher"))
        try:
            target.launch(LaunchSpec(start=two, timeout_s=60.0, scratch=folder), pool)
            found: dict[str, Any] = {
                "nodes": [node.name for node in there],
                "ranks": {rank.rank: rank.node for rank in target.processes()},
                "others": {other.name: other.node for other in target.others()},
            }
            table = {
                "kind": "alternating",
                "requests": 2,
                "grammar_share": 0.0,
                "decode_tokens": [4000, 4000],
            }
            target.drive(
                TrialSpec(
                    id="t", seed=1, toggles={}, model={}, engine={}, workload=table,
                    client={"parallelism": None, "step_s": 0.0, "deadline_s": DEADLINE_S}, sim={}, jitter={},
                    ledger_paths={}, decisions_paths={}, journal_paths={}, timeout_s=60.0,
                )
            )  # fmt: skip
            found["died"] = list(until(lambda: target.progress().died, "the death on the other node"))
            testimony = target.testimony(DEADLINE_S)
            found["faults"] = [(fault["name"], fault["seat"]) for fault in testimony["faults"]]
            found["sent"] = testimony["requests"]["sent"]
        finally:
            target.stop(20.0)
            left = [
                *pool.stop(10.0),
                *(process.id for mark in target._marks for process in engine_tree.find(mark)),
            ]
        print(json.dumps({**found, "left": left}), flush=True)
    finally:
        cluster.stop(10.0)
        theirs.shutdown()


if __name__ == "__main__":
    serve_on_two_nodes(Path(sys.argv[1]))
