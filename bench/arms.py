"""What is compared: an arm is one way to run a step, and a plan how arms alternate.

Here: names, toggles and the trial specification behind an arm. Not here: running it (``rank.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from harness.scenario_model import Engine, Jitter, Model, PrefixTree, Sim
from harness.target import TrialSpec

WORLD = 2
ROWS = 8
"""Requests that decode on each rank, and the only graph bucket."""
WAIT_S = 30.0
"""Deadline of every wait inside a rank."""
MODEL = Model(preset="tiny")

Kind = Literal["engine", "collectives", "collectives-bare"]
"""The engine's step; the collectives of such a step on the same threads; the same without the board."""

BASE: Mapping[str, str] = {"pinned": "pinned", "symm_mem": "off", "graph": "on", "overlap": "on"}


@dataclass(frozen=True, slots=True)
class Arm:
    """``toggles`` are laid over BASE."""

    name: str
    kind: Kind = "engine"
    toggles: Mapping[str, str] = field(default_factory=dict)
    ledger: bool = False
    timed: bool = False
    """Every call into the ledger is timed where it is made."""

    def all_toggles(self) -> dict[str, str]:
        return {**BASE, **self.toggles}


@dataclass(frozen=True, slots=True)
class Plan:
    """Every round runs one block of each arm, in order and, every second time, in reverse (A B B A)."""

    arms: Sequence[Arm]
    rounds: int
    block_steps: int
    warm_steps: int

    @property
    def steps(self) -> int:
        """Decode steps of each arm."""
        return self.warm_steps + self.rounds * self.block_steps


@dataclass(frozen=True, slots=True)
class Blocks:
    """One rank's times of one arm, per block in order of time: seconds of wall clock and of its processor."""

    wall_s: list[float]
    cpu_s: list[float]


def trial_spec(arm: Arm, decode_steps: int, folder: Path) -> TrialSpec:
    """A trial in which every rank decodes ROWS requests for ``decode_steps`` steps and more."""
    tokens = decode_steps + 64
    engine = Engine(
        kv_tokens=2 * ROWS * (tokens + 64),
        chunk_tokens=256,
        max_running=ROWS,
        graph_buckets=(ROWS,),
        step_timeout_s=WAIT_S,
    )
    requests = PrefixTree(
        kind="prefix_tree",
        requests=WORLD * ROWS,
        root_tokens=8,
        child_tokens=(2, 8),
        decode_tokens=(tokens, tokens),
        grammar_share=0.5,
    )
    ranks = range(WORLD)
    return TrialSpec(
        id=arm.name,
        seed=1,
        toggles=arm.all_toggles(),
        model=MODEL.model_dump(),
        engine=engine.model_dump(),
        workload=requests.model_dump(),
        client={},
        sim=Sim().model_dump(),
        jitter=Jitter().model_dump(),
        ledger_paths={rank: str(folder / f"{arm.name}-{rank}.ledger") for rank in ranks},
        decisions_paths={rank: str(folder / f"{arm.name}-{rank}.decisions.jsonl") for rank in ranks},
        journal_paths={rank: str(folder / f"{arm.name}-{rank}.tokens.jsonl") for rank in ranks},
        timeout_s=WAIT_S,
        ledger=arm.ledger,
    )
