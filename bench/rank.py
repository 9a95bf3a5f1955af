"""One rank of the benchmark as a process: takes commands from a pipe, builds arms, times their blocks.

Not here: what an arm does in a step (``stepper.py``), who starts ranks (``pair.py``), what times mean
(``ratio.py``).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from bench.arms import MODEL, WAIT_S, WORLD, Arm, Blocks, Plan
from bench.stepper import BenchRank, Stepper
from bench.timed_ledger import TimedLedger, counted
from harness.tracing import install_faulthandler

IDLE_S = 120.0
"""A rank that hears nothing for so long ends."""
HELD_STEPS = 100
"""Decode steps that a held arm has in it."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Build the arm if none is held, run some steps, stand still. Answered when the rank stands."""

    arm: Arm
    steps: int


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a hold. Answered when all is closed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """What a command raised; the rank has ended."""

    text: str


Command: TypeAlias = Plan | Hold | Release
Spent: TypeAlias = dict[str, Sequence[int]]
Answer: TypeAlias = list[Blocks] | Spent | Failed | None
"""Times by arm for a plan; for a hold the nanoseconds of each call into a timed ledger, by operation, else
nothing; None for a release. The first None of all says that the rank is up."""


def main(rank: int, shared: str, folder: str, pipe: Connection) -> None:
    """The whole life of a rank. Ends when the pipe closes, after a failure, or when nobody speaks."""
    try:
        install_faulthandler(Path(folder) / f"fault{rank}.txt")
        actor = BenchRank(
            rank=rank,
            world=WORLD,
            device="sim",
            model=MODEL.model_dump(),
            rendezvous=f"file://{shared}/rendezvous",
            shared=shared,
            timeout_s=WAIT_S,
        )
        _serve(actor, Path(folder), pipe)
    except EOFError:
        return  # the benchmark is gone
    except Exception:
        pipe.send(Failed(traceback.format_exc()))


def _serve(actor: BenchRank, folder: Path, pipe: Connection) -> None:
    pipe.send(None)
    arm: Stepper | None = None
    with ExitStack() as held:
        while pipe.poll(IDLE_S):
            command: Command = pipe.recv()
            if isinstance(command, Plan):
                pipe.send(run(actor, command, folder))
            elif isinstance(command, Hold):
                if arm is None:
                    arm = actor.stepper(command.arm, HELD_STEPS, folder)
                    held.callback(arm.close)
                pipe.send(_hold(arm, command.steps))
            else:
                held.close()
                arm = None
                pipe.send(None)


def _hold(arm: Stepper, steps: int) -> Spent:
    if isinstance(arm.ledger, TimedLedger):
        arm.ledger.forget()
    for _ in range(steps):
        arm.step()
    arm.drain()
    return counted(arm.ledger.spent_ns) if isinstance(arm.ledger, TimedLedger) else {}


def run(actor: BenchRank, plan: Plan, folder: Path) -> list[Blocks]:
    """Times all blocks of a plan on this rank."""
    with ExitStack() as opened:
        arms: list[Stepper] = []
        for arm in plan.arms:
            made = actor.stepper(arm, plan.steps, folder)
            opened.callback(made.close)
            for _ in range(plan.warm_steps):
                made.step()
            made.drain()
            arms.append(made)
        times = [Blocks([], []) for _ in arms]
        for number in range(plan.rounds):
            order = range(len(arms)) if number % 2 == 0 else reversed(range(len(arms)))
            for index in order:
                wall_s, cpu_s = _block(arms[index], plan.block_steps)
                times[index].wall_s.append(wall_s)
                times[index].cpu_s.append(cpu_s)
        return times


def _block(arm: Stepper, steps: int) -> tuple[float, float]:
    """Seconds of wall clock, and of the processor in all threads of this rank."""
    arm.align()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        arm.step()
    arm.drain()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s
