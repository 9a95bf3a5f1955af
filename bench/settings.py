"""How long a benchmark takes: one frozen table a size.

Here: repetitions and sizes. Not here: what is compared (``arms.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.synthetic import CASES, Case


@dataclass(frozen=True, slots=True)
class Settings:
    """A *block* is a few steps of one arm, timed as a whole; a *round* has one block of every arm."""

    name: str
    block_steps: int = 10
    """Steps between two waits for the device; the host runs ahead within a block only."""
    warm_steps: int = 8
    """Decode steps of each arm before the first block."""
    rounds: int = 24
    """Of the figures of the engine, with every second round in reverse order. Even."""
    ledger_rounds: int = 100
    """Of the ledger's figure, which looks for a smaller difference. Even."""
    calls: int = 20_000
    """Of each ledger operation in a batch, and a hundredth of it for reading a snapshot."""
    batches: int = 5
    """Batches of each ledger operation; the fastest counts."""
    captures: int = 3
    """Pairs of captures of each number of processes, each way."""
    captured: tuple[int, ...] = (2, 4, 8)
    """Processes whose stacks are captured."""
    cases: tuple[Case, ...] = CASES
    """Of made-up evidence that is analysed."""
    worlds: tuple[int, ...] = (16, 256, 1024, 4096)
    """Ranks in it."""
    scale_repeats: int = 2
    """Diagnoses of each. Even."""
    disk_worlds: tuple[int, ...] = (16, 256, 1024)
    """Ranks in evidence that is read from disk."""
    reported: tuple[int, ...] = (104, 1000)
    """Trials of runs that are reported; more than one size."""
    hang_seeds: int = 12
    """Trials with jitter, and as many without, in search of a hang."""

    def __post_init__(self) -> None:
        if min(self.rounds, self.ledger_rounds) < 2 or self.rounds % 2 or self.ledger_rounds % 2:
            raise ValueError("rounds and ledger_rounds must be even, 2 or more: half of them run in reverse")


FULL = Settings("full")
QUICK = Settings(
    "quick", block_steps=6, warm_steps=4, rounds=6, ledger_rounds=16, calls=4_000, batches=3, captures=1,
    captured=(2, 4), cases=("order", "stuck"), worlds=(16, 256, 1024), disk_worlds=(16, 64, 256),
    reported=(40, 400), hang_seeds=4,
)  # fmt: skip
SMALLEST = Settings(
    "smallest", block_steps=2, warm_steps=2, rounds=2, ledger_rounds=2, calls=200, batches=2, captures=1,
    captured=(2,), cases=("skipped", "stacks"), worlds=(8, 16), disk_worlds=(8, 16), reported=(8, 16), hang_seeds=0,
)  # fmt: skip
