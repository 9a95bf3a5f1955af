"""Figures of the harness: what the ledger costs, as a whole and per operation, and how fast stacks are had.

Not here: the engine's own figures (``engine_figures.py``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from bench.arms import Arm, Plan
from bench.figures import Between, Figure, stepped
from bench.pair import BenchError, HeldPair, RankPair
from bench.ratio import paired_ratio
from bench.settings import Settings
from harness.capture import CaptureRequest, capture, find_py_spy
from harness.ledger import LedgerReader, LedgerWriter
from harness.ledger_snapshot import Snapshot
from harness.tools import run_tools

_CAPTURE_S = 20.0
_COUNTED_STEPS = 20
LEDGER_ARM = Arm("ledger-on", ledger=True)
_STAMP_INTERVAL_S = 0.05


def ledger_share(pair: RankPair, settings: Settings) -> Figure:
    """The same steps with and without a ledger."""
    arms = [LEDGER_ARM, Arm("ledger-off")]
    plan = Plan(arms, settings.ledger_rounds, settings.block_steps, settings.warm_steps)
    says = "Decode steps with the ledger over the same without; 1.01 is one hundredth of a step."
    return stepped("ledger", says, plan, pair.run(plan), "ledger-off")


def ledger_operations(held: HeldPair, settings: Settings, step_us: float) -> Figure:
    """Nanoseconds of each operation alone, and what a step's operations come to."""
    with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
        costs_ns = _operation_costs_ns(Path(folder), settings)
    counts = _operations_per_step(held)
    sum_us = sum(counts.get(name, 0.0) * cost_ns for name, cost_ns in costs_ns.items()) / 1e3
    arms = {
        name: {"ns": cost_ns, "calls_per_step": counts.get(name, 0.0)} for name, cost_ns in costs_ns.items()
    }
    arms["all of a step"] = {"us_per_step": sum_us, "share_of_step": sum_us / step_us}
    return Figure(
        "ledger operations",
        "Time of one operation in an idle process, the fastest of several batches; calls per step of one rank.",
        arms,
        [],
    )


def capture_time(held: HeldPair, settings: Settings) -> Figure:
    """Everything the harness captures of both ranks, against one py-spy after another."""
    py_spy = find_py_spy()
    if py_spy is None:
        raise BenchError("py-spy is not installed; install it with: pip install py-spy")
    together_s, apart_s = [], []
    with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
        for turn in range(2 * settings.captures):
            ways: list[Callable[[], None]] = [
                lambda turn=turn: together_s.append(_together(held, Path(folder), turn)),  # type: ignore[misc]
                lambda: apart_s.append(_apart(held, py_spy)),
            ]
            for way in ways if turn % 2 == 0 else reversed(ways):
                way()
    arms = {
        "harness.capture": {"s": median(together_s)},
        "py-spy one after another": {"s": median(apart_s)},
    }
    ratio = paired_ratio(together_s, apart_s)
    return Figure(
        "capture",
        "Plain and native stacks of 2 ranks, with ledgers and everything synced to disk, over py-spy alone.",
        arms,
        [Between("harness.capture", "py-spy one after another", "s", ratio)],
    )


# --- the ledger's operations ---------------------------------------------------------------------------------


def _operation_costs_ns(folder: Path, settings: Settings) -> dict[str, float]:
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

    def graph_collectives() -> None:
        last = writer.collective_enqueue(group, "graph decode.8", (4,), "", 4)
        writer.collective_complete(group, last)

    decision = {
        "step": 100, "mode": "decode", "modes": ["decode", "decode"], "tokens": [8, 8], "padding": "max_len",
        "bucket": 8, "graph": True, "update": True, "retracted": [], "waiting": 0, "tokens_out": 800,
    }  # fmt: skip
    operations: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "phase": phase,
        "enqueue": lambda: writer.enqueue("compute", "metadata_copy", "serving/engine.py:197"),
        "complete": complete,
        "external_recorded": lambda: writer.external_recorded(0),
        "external_consumed": lambda: writer.external_consumed(events),
        "collective": collective,
        "graph_collectives": graph_collectives,
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


def _operations_per_step(held: HeldPair) -> Mapping[str, float]:
    """Counted in the ledger of rank 0 over some steps."""
    path = held.ranks[0].ledger_path
    assert path is not None
    held.step(2)
    before = _snapshot(path)
    began_s = time.monotonic()
    held.step(_COUNTED_STEPS)
    duration_s = time.monotonic() - began_s
    after = _snapshot(path)
    counts = {name: value - _counts(before)[name] for name, value in _counts(after).items()}
    counts["stamp"] = len(after.streams) * duration_s / _STAMP_INTERVAL_S
    counts["external_consumed"] = counts["graph_collectives"] = counts["decision"] = _COUNTED_STEPS
    return {name: value / _COUNTED_STEPS for name, value in counts.items()}


def _snapshot(path: Path) -> Snapshot:
    reader = LedgerReader.open(path)
    try:
        return reader.snapshot()
    finally:
        reader.close()


def _counts(snapshot: Snapshot) -> dict[str, float]:
    agreements = snapshot.groups["agree"].completed
    return {
        "phase": snapshot.host.phase_changes,
        "enqueue": sum(stream.enqueued for stream in snapshot.streams.values()),
        "complete": sum(stream.completed for stream in snapshot.streams.values()),
        "external_recorded": sum(event.records for event in snapshot.external),
        "collective": agreements,
    }


# --- captures ------------------------------------------------------------------------------------------------


def _together(held: HeldPair, folder: Path, turn: int) -> float:
    began_s = time.monotonic()
    report = capture(
        CaptureRequest(held.ranks, folder / f"{turn}", sample=0, native=True, deadline_s=_CAPTURE_S)
    )
    duration_s = time.monotonic() - began_s
    if report.missing:
        raise BenchError(f"the capture lacks {'; '.join(f'{m.what}: {m.why}' for m in report.missing)}")
    return duration_s


def _apart(held: HeldPair, py_spy: Path) -> float:
    began_s = time.monotonic()
    for options in ([], ["--native"]):
        for rank in held.ranks:
            command = [str(py_spy), "dump", "--pid", str(rank.pid), "--json", *options]
            result = run_tools({rank.rank: command}, deadline_s=time.monotonic() + _CAPTURE_S)[rank.rank]
            if result.problem is not None:
                raise BenchError(f"py-spy of rank {rank.rank}: {result.problem}")
    return time.monotonic() - began_s
