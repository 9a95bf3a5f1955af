"""The two rank processes, shared by all figures: started once, spoken to by pipe, always ended.

Not here: what ranks do (``rank.py``).
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from bench.arms import WORLD, Arm, Blocks, Plan
from bench.errors import BenchError
from bench.rank import Answer, Command, Failed, Hold, Release, Spent, main
from harness.capture import CaptureRank
from harness.processes import read_process

START_S = 60.0
"""Both ranks up: imports, weights, groups."""
ANSWER_S = 90.0
"""The longest command."""
_END_S = 5.0
_SHARED_MEMORY = Path("/dev/shm")


class RankPair:
    """Both ranks. Use ``started()``."""

    def __init__(self, processes: Sequence[BaseProcess], pipes: Sequence[Connection], folder: Path) -> None:
        self._processes = processes
        self._pipes = pipes
        self._folder = folder

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid or 0 for process in self._processes)

    def run(self, plan: Plan) -> list[list[Blocks]]:
        """By rank, by arm. Raises BenchError."""
        answers = self.ask(plan, ANSWER_S)
        return [answer for answer in answers if isinstance(answer, list)]

    @contextmanager
    def held(self, arm: Arm) -> Iterator[HeldPair]:
        """The ranks stand still between steps, with the arm's threads, as in a hang."""
        self.ask(Hold(arm, 0), ANSWER_S)
        yield HeldPair(self, arm, tuple(self._capture_rank(arm, rank) for rank in range(WORLD)))
        self.ask(Release(), ANSWER_S)

    def _capture_rank(self, arm: Arm, rank: int) -> CaptureRank:
        pid = self.pids[rank]
        return CaptureRank(
            rank=rank,
            pid=pid,
            start_time_ticks=read_process(pid, 0).start_time_ticks,
            ledger_path=self._folder / f"{arm.name}-{rank}.ledger" if arm.ledger else None,
            faulthandler_path=self._folder / f"fault{rank}.txt",
        )

    def ask(self, command: Command, timeout_s: float) -> list[Answer]:
        """Says ``command`` to both ranks. Raises BenchError."""
        for pipe in self._pipes:
            pipe.send(command)
        return self.answers(timeout_s)

    def answers(self, timeout_s: float) -> list[Answer]:
        """One answer of each rank, by rank. Raises BenchError for a failure, an end, or silence."""
        deadline_s = time.monotonic() + timeout_s
        found: dict[int, Answer] = {}
        while len(found) < len(self._pipes):
            silent = [pipe for rank, pipe in enumerate(self._pipes) if rank not in found]
            ready = wait(silent, max(0.0, deadline_s - time.monotonic()))
            if not ready:
                missing = [rank for rank in range(len(self._pipes)) if rank not in found]
                raise BenchError(f"ranks {missing} did not answer within {timeout_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = self._pipes.index(pipe)
                try:
                    answer: Answer = pipe.recv()
                except EOFError as error:
                    raise BenchError(f"rank {rank} ended without an answer") from error
                if isinstance(answer, Failed):
                    raise BenchError(f"rank {rank} failed:\n{answer.text}")
                found[rank] = answer
        return [found[rank] for rank in range(len(self._pipes))]


@dataclass(frozen=True, slots=True)
class HeldPair:
    """Ranks that stand still."""

    pair: RankPair
    arm: Arm
    ranks: tuple[CaptureRank, ...]

    def step(self, steps: int) -> list[Spent]:
        """Runs some steps and stands still again. By rank: what a timed arm's ledger spent."""
        answers = self.pair.ask(Hold(self.arm, steps), ANSWER_S)
        return [answer for answer in answers if isinstance(answer, dict)]


@contextmanager
def started() -> Iterator[RankPair]:
    """Starts both ranks with files of their own; at the end, whatever happened, both are gone."""
    shared = Path(tempfile.mkdtemp(prefix="hangrig-bench-", dir=_SHARED_MEMORY))
    folder = Path(tempfile.mkdtemp(prefix="hangrig-bench-"))
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    try:
        for rank in range(WORLD):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=main,
                args=(rank, str(shared), str(folder), theirs),
                name=f"bench-rank{rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        pair = RankPair(processes, pipes, folder)
        pair.answers(START_S)
        yield pair
    finally:
        for pipe in pipes:
            pipe.close()
        _end(processes)
        shutil.rmtree(shared, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _end(processes: Sequence[BaseProcess]) -> None:
    deadline_s = time.monotonic() + _END_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join(_END_S)
        process.close()
