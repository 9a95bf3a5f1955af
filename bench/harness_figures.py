"""Figures of the ledger: what it costs, as a whole and per operation.

Not here: the engine's own figures (``engine_figures.py``), captures (``capture_figures.py``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from bench.arms import Arm, Plan
from bench.figures import Figure, stepped
from bench.pair import HeldPair, RankPair
from bench.settings import Settings
from harness.devices.call_sites import call_site
from harness.ledger import LedgerReader, LedgerWriter

_WARM_STEPS = 4
_TIMED_STEPS = 40
LEDGER_ARM = Arm("ledger-on", ledger=True)
TIMED_ARM = Arm("ledger-timed", ledger=True, timed=True)


def ledger_share(pair: RankPair, settings: Settings) -> Figure:
    """The same steps with and without a ledger."""
    arms = [LEDGER_ARM, Arm("ledger-off")]
    plan = Plan(arms, settings.ledger_rounds, settings.block_steps, settings.warm_steps)
    says = "Decode steps with the ledger over the same without; 1.01 is one hundredth of a step."
    return stepped("ledger", says, plan, pair.run(plan), "ledger-off")


def ledger_operations(held: HeldPair, settings: Settings, step_us: float) -> Figure:
    """Each operation in a loop of its own and where the engine makes it, and what a step's come to.

    ``held``: of the timed arm. ``step_us``: a step with a ledger.
    """
    with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
        alone_ns = _operations_alone_ns(Path(folder), settings)
    held.step(_WARM_STEPS)
    spent_ns = held.step(_TIMED_STEPS)[0]
    arms: dict[str, dict[str, float]] = {name: {"alone_ns": cost_ns} for name, cost_ns in alone_ns.items()}
    sum_us = 0.0
    for name, spent in spent_ns.items():
        calls = len(spent) / _TIMED_STEPS
        sum_us += calls * median(spent) / 1e3
        arms.setdefault(name, {}).update(in_step_ns=median(spent), calls_per_step=calls)
    arms["all of a step"] = {"us_per_step": sum_us, "share_of_step": sum_us / step_us}
    return Figure(
        "ledger operations",
        "One operation in a loop of its own (the fastest of several batches), and on rank 0 between the engine's "
        "other work (median); their sum over a step, on all threads, to the step.",
        arms,
        [],
    )


# --- the ledger's operations ---------------------------------------------------------------------------------


def _operations_alone_ns(folder: Path, settings: Settings) -> dict[str, float]:
    path = folder / "rank0.ledger"
    writer = LedgerWriter.create(
        path, rank=0, world=2, node="n", device="sim:0", decisions_path=folder / "decisions.jsonl"
    )
    reader = LedgerReader.open(path)
    group = writer.group("experts", (0, 1))
    events = (0, 1, 2)
    sequence = [0]
    step = [0]

    def phase() -> None:
        step[0] += 1
        writer.phase("launch", step[0])

    def complete() -> None:
        sequence[0] += 1
        writer.complete("compute", sequence[0])

    def collective() -> None:
        last = writer.collective_enqueue(group, "all_gather", (16, 64), "float32")
        writer.collective_start(group, last)
        writer.collective_complete(group, last)

    decision = {
        "step": 100, "mode": "decode", "modes": ["decode", "decode"], "tokens": [8, 8], "padding": "max_len",
        "bucket": 8, "graph": True, "update": True, "retracted": [], "waiting": 0, "tokens_out": 800,
    }  # fmt: skip
    operations: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "phase": phase,
        "enqueue": lambda: writer.enqueue("compute", "metadata_copy", "serving/engine.py:197"),
        "call site": call_site,
        "complete": complete,
        "external_recorded": lambda: writer.external_recorded(0),
        "external_consumed": lambda: writer.external_consumed(events),
        "collective, all three": collective,
        "decision": lambda: writer.decision(decision),
        "stamp": lambda: writer.stamp("compute"),
    }
    try:
        costs = {
            name: _fastest_ns(operation, settings.calls, settings.batches)
            for name, operation in operations.items()
        }
        reads = max(1, settings.calls // 100)
        costs["snapshot read"] = _fastest_ns(reader.snapshot, reads, settings.batches)
    finally:
        reader.close()
        writer.close()
    nothing_ns = costs.pop("nothing")
    return {name: max(0.0, cost - nothing_ns) for name, cost in costs.items()}


def _fastest_ns(operation: Callable[[], object], calls: int, batches: int) -> float:
    fastest_ns = float("inf")
    for _ in range(batches):
        began_ns = time.perf_counter_ns()
        for _ in range(calls):
            operation()
        fastest_ns = min(fastest_ns, (time.perf_counter_ns() - began_ns) / calls)
    return fastest_ns
