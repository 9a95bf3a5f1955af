"""Builds stored runs for the tests of reports: through the store's own writers, with the ledger's own types.

A run here looks like one of the D1 scenario: a pageable arm that is healthy and a pinned arm that hangs in a
replayed graph. Latencies come from a seeded generator, so every figure is the same each time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from harness.ledger_snapshot import (
    CollectiveRecord,
    ExternalState,
    GroupState,
    Header,
    HostState,
    OpRecord,
    Snapshot,
    StreamState,
)
from harness.store import RunStore, TrialStore, safe_name, write_json

SCENARIO = "dp-pinned-hang"
NOTE = "The sim device models streams, events and copies on a CPU. It is no evidence about hardware."
SITE = "serving/engine.py:212"
SECOND_NS = 1_000_000_000
ARMS: tuple[Mapping[str, str], ...] = ({"pinned": "pageable"}, {"pinned": "pinned"})
MEDIANS_US = {"step": 9000.0, "next_token_copy": 40.0, "bitmask_copy": 60.0, "token_count_copy": 20.0}


def arm_string(arm: Mapping[str, str]) -> str:
    return ",".join(f"{name}={arm[name]}" for name in sorted(arm))


@dataclass(slots=True)
class RunBuilder:
    """Adds trials to a run that it creates under ``out``. ``plan`` gives arms as run.json keeps them."""

    out: Path
    device: str = "sim"
    plan: Sequence[Mapping[str, Any]] = ()
    planned: Sequence[Mapping[str, Any]] = ()
    store: RunStore = field(init=False)

    def __post_init__(self) -> None:
        manifest: dict[str, Any] = {
            "command": f"hangrig run {SCENARIO}",
            "argv": ["hangrig", "run", SCENARIO],
            "seed": 7,
            "versions": {"hangrig": "0.1.0", "torch": "2.13.0"},
            "machine": {"cpu": {"model": "a processor", "cores": 2}, "kernel": "6.1"},
            "device": self.device,
            "simulation": self.device == "sim",
            "simulation_note": NOTE if self.device == "sim" else "",
            "scenarios": [{"name": SCENARIO, "text": "{}", "arms": list(self.plan)}],
            "planned": list(self.planned),
        }
        self.store = RunStore.create(self.out, "a-run", manifest)

    @property
    def path(self) -> Path:
        return self.store.path

    def trial(
        self, arm: Mapping[str, str], seed: int, outcome: str = "healthy", **changes: Any
    ) -> TrialStore:
        """A trial with its trial.json; a hang gets its evidence and diagnosis. ``changes`` replace fields."""
        trial = self.store.trial(safe_name(f"{arm_string(arm)}-s{seed}"))
        latency = changes.pop("latency", None)
        trial.write_latency(latencies(seed, arm) if latency is None else latency)
        diagnosis = changes.pop("diagnosis", None)
        if outcome not in ("healthy", "corrupt", "skipped"):
            write_evidence(trial)
            trial.write_diagnosis({**stream_order_diagnosis(), **(diagnosis or {})})
        trial.write_trial({**trial_document(trial.id, arm, seed, outcome, self.path), **changes})
        return trial

    def finish(self, **fields: Any) -> Path:
        self.store.finish(**fields)
        return self.path


def d1_run(out: Path, *, healthy: int = 6, hung: int = 4, **changes: Any) -> Path:
    """``healthy`` pageable trials, and a pinned arm in which ``hung`` of ``healthy`` hang as expected."""
    builder = RunBuilder(out, **changes)
    for seed in range(healthy):
        builder.trial(ARMS[0], seed)
    for seed in range(healthy):
        expected = {"expected": "sometimes", "min_rate": 0.3, "mechanism_expected": "stream-order"}
        builder.trial(ARMS[1], seed, "hang" if seed < hung else "healthy", tokens_expected="any", **expected)
    return builder.finish()


def trial_document(
    trial_id: str, arm: Mapping[str, str], seed: int, outcome: str, run: Path
) -> dict[str, Any]:
    verdict = {"unknown": "unknown", "skipped": "skipped"}.get(outcome, "pass")
    reason = {"hang": "no watermark moved for 4.0 s", "skipped": "no NPU on this machine"}.get(outcome, "")
    return {
        "id": trial_id,
        "arm": dict(arm),
        "seed": seed,
        "resolved": {
            "pinned": {"requested": arm.get("pinned", "pageable"), "resolved": arm.get("pinned", "pageable"),
                       "why": "the sim device pins on request"},
            "symm_mem": {"requested": "on", "resolved": "off", "why": "needs torch 2.8 or newer and CUDA"},
        },
        "scenario": SCENARIO,
        "device": "sim",
        "target": "builtin",
        "expected": "never",
        "min_rate": None,
        "mechanism_expected": None,
        "tokens_expected": "equal",
        "outcome": outcome,
        "verdict": verdict,
        "checks": [
            {"name": "hang", "verdict": verdict, "reason": reason},
            {"name": "leak", "verdict": "pass", "reason": ""},
            {"name": "tokens", "verdict": "pass", "reason": "0 of 480 differ"},
            {"name": "pressure", "verdict": "pass", "reason": "9 retractions"},
        ],
        "steps": 120,
        "tokens": 480,
        "retractions": 9,
        "duration_s": 12.5,
        "tokens_differ": 3 if outcome == "corrupt" else 0,
        "tokens_compared": 0 if outcome == "skipped" else 480,
        "ranks": [{"rank": r, "role": "worker", "node": "node-0", "pid": 4000 + r} for r in (0, 1)],
        "rerun": f"hangrig rerun {run} {trial_id}",
    }  # fmt: skip


def latencies(seed: int, arm: Mapping[str, str], count: int = 80) -> dict[str, list[float]]:
    """Per hot path ``count`` samples; pinned copies take 0.7 of the time that pageable ones take."""
    generator = np.random.default_rng((seed, len(arm_string(arm))))
    factor = 0.7 if arm.get("pinned") == "pinned" else 1.0
    return {
        path: [
            float(v)
            for v in median * (factor if path != "step" else 1.0) * generator.lognormal(0, 0.2, count)
        ]
        for path, median in MEDIANS_US.items()
    }


def stream_order_diagnosis() -> dict[str, Any]:
    return {
        "kind": "hang",
        "mechanism": "stream-order",
        "culprits": [{"rank": 1, "role": "worker", "node": "node-0", "pid": 4001, "device": "sim:1"}],
        "stream": "compute",
        "operation": {"label": "graph.replay decode[8]", "sequence": 412, "site": SITE, "pending_s": 6.2},
        "collective": None,
        "proof": [
            {"fact": "on rank 1 the record of update.3 came before replay 58 had consumed the last one",
             "evidence": "evidence/sample-1/ledger/rank1.json"},
            {"fact": "rank 1 waits in replay 61 for update.3, and no update is enqueued",
             "evidence": "evidence/sample-1/ledger/rank1.json"},
            {"fact": "rank 0 waits in the collectives of the same replay",
             "evidence": "evidence/sample-1/stacks/rank0.json"},
        ],
        "confidence": "proven",
        "signature": "stream-order/compute/graph.replay/serving.engine",
        "last_progress_s": 5.9,
        "suspected_s": 8.4,
        "confirmed_s": 10.4,
        "captured_s": 11.9,
        "missing_evidence": [{"what": "native stack of rank 0", "why": "py-spy ended with status 1"}],
    }  # fmt: skip


def write_evidence(trial: TrialStore, thread: str = "compute") -> None:
    """Two samples of two ranks, their process table, stacks merged, and the capture's manifest."""
    for index in (0, 1):
        folder = trial.evidence / f"sample-{index}"
        for part in ("ledger", "stacks"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for rank in (0, 1):
            write_json(folder / "ledger" / f"rank{rank}.json", snapshot(rank, index).to_json())
            write_json(folder / "stacks" / f"rank{rank}.json", stacks(rank))
        table = [{"rank": r, "pid": 4000 + r, "state": "S", "start_time_ticks": 1, "rss_bytes": 2**28,
                  "exit": None} for r in (0, 1)]  # fmt: skip
        write_json(folder / "processes.json", {"ranks": table})
    write_json(trial.evidence / "merged.json", merged(thread))
    times = {"last_progress_s": 5.9, "suspected_s": 8.4, "confirmed_s": 10.4, "captured_s": 11.9}
    write_json(
        trial.evidence / "manifest.json",
        {
            "reason": "no watermark moved for 2.5 s in decode",
            "times": times,
            "samples": [{"index": 0, "taken_s": 8.4}, {"index": 1, "taken_s": 10.4}],
            "missing": [],
        },
    )


def merged(thread: str = "compute") -> dict[str, Any]:
    both = [f"rank 0 {thread}", f"rank 1 {thread}"]
    leaf = [
        {"frame": "all_reduce (serving/collectives.py)", "members": both[:1], "children": []},
        {"frame": "wait_external (harness/devices/sim.py)", "members": both[1:], "children": []},
    ]
    replay = {"frame": "replay (harness/devices/sim.py)", "members": both, "children": leaf}
    run = {"frame": "run (threading.py)", "members": both, "children": [replay]}
    host = ["rank 0 host", "rank 1 host"]
    wait = {"frame": "synchronize (harness/devices/sim.py)", "members": host, "children": []}
    step = {"frame": "step (serving/engine.py)", "members": host, "children": [wait]}
    return {"roots": [run, step]}


def stacks(rank: int) -> dict[str, Any]:
    frames = [{"name": "synchronize", "filename": "harness/devices/sim.py", "line": 88}]
    thread = {"thread_id": 1, "name": "hangrig-host", "active": False, "owns_gil": False, "frames": frames}
    return {"pid": 4000 + rank, "rank": rank, "source": "py-spy", "native": False, "threads": [thread]}


def snapshot(rank: int, index: int) -> Snapshot:
    """A rank that waits in a replay; on rank 1 one record of an update event was overtaken."""
    taken_ns = (100 + 2 * index) * SECOND_NS
    since_ns = 96 * SECOND_NS
    replay = OpRecord(412, "graph.replay decode[8]", SITE, 61, since_ns, None)
    idle = StreamState(500, 500, None, 0, taken_ns, ())
    collective = CollectiveRecord(183, "all_reduce", (8, 64), "float32", since_ns, since_ns, None)
    return Snapshot(
        header=Header(1, rank, 2, 4000 + rank, 1, "node-0", "boot", f"sim:{rank}"),
        taken_ns=taken_ns,
        boottime_ns=taken_ns,
        host=HostState("wait_result", 62, since_ns, since_ns),
        streams={
            "compute": StreamState(415, 411, replay, since_ns, taken_ns, (replay,)),
            "copy": idle,
            "comm": idle,
            "update": idle,
        },
        external=(ExternalState("update.3", 61, 60, rank, 58 * rank),),
        groups={"dp": GroupState("dp", (0, 1), 183, 183, 182, (collective,))},
        decisions=(),
    )
