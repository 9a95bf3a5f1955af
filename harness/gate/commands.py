"""The commands that would supply what a yes still needs. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from harness.gate.model import Pool, Trial

SCENARIO = "dp-pinned-gate"
"""Has all arms, all hot paths and the retractions that count."""
LATENCY_SCENARIO = "dp-pinned-latency"


def litmus(device: str, iterations: int | None = None) -> str:
    more = [] if iterations is None else ["--iterations", str(iterations)]
    return shlex.join(["hangrig", "litmus", "--device", device, *more])


def run(
    device: str,
    trials: int,
    pool: Pool | None = None,
    known: Sequence[Trial] = (),
    *,
    scenario: str = SCENARIO,
    settings: Sequence[str] = (),
) -> str:
    """``trials`` more per arm of ``pool``, with seeds that none of its ``known`` trials has; of ``scenario`` where
    there is no pool yet. ``settings``: beside those of the pool."""
    words = ["hangrig", "run", scenario if pool is None else pool.source, "--device", device]
    words += ["--trials", str(trials)]
    seeds = [trial.seed for trial in known if trial.seed is not None]
    if seeds:
        words += ["--seed", str(max(seeds) + 1)]
    for setting in (*(() if pool is None else pool.settings), *settings):
        words += ["--set", setting]
    return shlex.join(words)


def report(run_path: str) -> str:
    return shlex.join(["hangrig", "report", run_path])


def doctor(device: str) -> str:
    return shlex.join(["hangrig", "doctor", "--device", device])
