"""Figures of the harness: what the ledger costs, as a whole and per operation, and how fast stacks are had.

Not here: the engine's own figures (``engine_figures.py``).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from bench.arms import Arm, Plan
from bench.errors import BenchError
from bench.figures import Between, Figure, stepped
from bench.pair import HeldPair, RankPair
from bench.ratio import paired_ratio
from bench.settings import Settings
from harness.capture import CaptureRank, CaptureRequest, capture, find_py_spy
from harness.devices.sim_streams import call_site
from harness.ledger import LedgerReader, LedgerWriter
from harness.tools import run_tools

_CAPTURE_S = 20.0
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


def capture_time(held: HeldPair, settings: Settings) -> Figure:
    """Everything the harness captures of both ranks, against one py-spy after another."""
    py_spy = find_py_spy()
    if py_spy is None:
        raise BenchError("py-spy is not installed; install it with: pip install py-spy")
    seconds: dict[str, list[float]] = {"harness.capture": [], "py-spy together": [], "py-spy in turn": []}
    with tempfile.TemporaryDirectory(prefix="hangrig-bench-") as folder:
        for turn in range(2 * settings.captures):
            request = CaptureRequest(
                held.ranks, Path(folder) / f"{turn}", sample=0, native=True, deadline_s=_CAPTURE_S
            )
            ways: list[tuple[str, Callable[[], None]]] = [
                ("harness.capture", partial(_captured, request)),
                ("py-spy together", partial(_dumped, py_spy, [held.ranks])),
                ("py-spy in turn", partial(_dumped, py_spy, [(rank,) for rank in held.ranks])),
            ]
            for name, way in ways if turn % 2 == 0 else reversed(ways):
                began_s = time.monotonic()
                way()
                seconds[name].append(time.monotonic() - began_s)
    base = "py-spy in turn"
    return Figure(
        "capture",
        "Plain and native stacks of 2 ranks that stand still; harness.capture also takes ledgers and syncs "
        "everything to disk.",
        {name: {"s": median(values)} for name, values in seconds.items()},
        [
            Between(name, base, "s", paired_ratio(values, seconds[base]))
            for name, values in seconds.items()
            if name != base
        ],
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


# --- captures ------------------------------------------------------------------------------------------------


def _captured(request: CaptureRequest) -> None:
    report = capture(request)
    if report.missing:
        raise BenchError(f"the capture lacks {'; '.join(f'{m.what}: {m.why}' for m in report.missing)}")


def _dumped(py_spy: Path, turns: Sequence[Sequence[CaptureRank]]) -> None:
    """Plain, then native dumps; the ranks of one turn at once, one turn after the other."""
    for options in ([], ["--native"]):
        for ranks in turns:
            commands = {
                rank.rank: [str(py_spy), "dump", "--pid", str(rank.pid), "--json", *options] for rank in ranks
            }
            results = run_tools(commands, deadline_s=time.monotonic() + _CAPTURE_S)
            problems = [
                f"rank {rank}: {result.problem}" for rank, result in results.items() if result.problem
            ]
            if problems:
                raise BenchError(f"py-spy: {'; '.join(problems)}")
