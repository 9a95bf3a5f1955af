"""Figures of the engine: steps against their collectives, and each toggle against its other values.

Not here: the ledger and the capture (``harness_figures.py``).
"""

from __future__ import annotations

from bench.arms import Arm, Plan
from bench.figures import Figure, stepped
from bench.pair import RankPair
from bench.settings import Settings


def decode_step(pair: RankPair, settings: Settings) -> Figure:
    """How much of a decode step is collectives that nothing can save."""
    arms = [
        Arm("engine"),
        Arm("collectives", "collectives"),
        Arm("collectives-bare", "collectives-bare"),
    ]
    return _compare(
        pair,
        settings,
        "decode step against its collectives",
        "A decode step of 2 ranks (graph, overlap, pinned, gloo) over the same two processes running only its "
        "collectives on the same threads; bare: without the agreement on the board before each.",
        arms,
        base="collectives",
    )


def symmetric_memory(pair: RankPair, settings: Settings) -> Figure:
    arms = [Arm(f"symm_mem-{value}", toggles={"symm_mem": value}) for value in ("on", "off")]
    return _compare(
        pair, settings, "symm_mem", "Collectives through shared memory over gloo.", arms, base="symm_mem-off"
    )


def pinned(pair: RankPair, settings: Settings) -> Figure:
    values = ("pageable", "pinned", "pinned_sync", "pinned_snapshot")
    arms = [Arm(value, toggles={"pinned": value}) for value in values]
    return _compare(
        pair,
        settings,
        "pinned",
        "Step time of each way to copy over pageable copies, memory model cann.",
        arms,
        base="pageable",
    )


def graph(pair: RankPair, settings: Settings) -> Figure:
    arms = [Arm(f"graph-{value}", toggles={"graph": value}) for value in ("on", "off")]
    return _compare(pair, settings, "graph", "Replayed graphs over eager steps.", arms, base="graph-off")


def overlap(pair: RankPair, settings: Settings) -> Figure:
    arms = [Arm(f"overlap-{value}", toggles={"overlap": value}) for value in ("on", "off")]
    return _compare(
        pair, settings, "overlap", "The host one step ahead over waiting.", arms, base="overlap-off"
    )


def _compare(
    pair: RankPair, settings: Settings, name: str, says: str, arms: list[Arm], *, base: str
) -> Figure:
    plan = Plan(arms, settings.rounds, settings.block_steps, settings.warm_steps)
    return stepped(name, says, plan, pair.run(plan), base)
