"""Rank processes for tests: started once a session, kept warm, given one job after another.

A job is a function of a test module that every rank of a world runs at once with its ``Seat``. Imports and
weights are paid for once. Ranks meet over gloo through a file in a directory of their own, and meet anew after
a job that raised. Every job has a deadline: then the stacks of the silent ranks are in the message and all
processes are ended.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from harness.devices.sim import SimDevice, SimOptions
from harness.ledger import LedgerWriter
from harness.scenario_model import Engine as EngineTable
from harness.scenario_model import Sim as SimTable
from harness.target import RankResult, TrialSpec
from serving.comm import Comm, CommOptions
from serving.engine import Engine
from serving.groups import ProcessGroups
from serving.targets.builtin_rank import RankActor

START_S = 120.0
"""Deadline of the imports."""
JOB_S = 60.0
"""Longest a job may take; none that passes comes near it."""
MEET_S = 30.0
"""Deadline of gloo."""
END_S = 10.0
"""Deadline of a rank's end, and of the last words of a silent one."""
WAIT_S = 20.0
"""Deadline of the waits inside an engine that is expected to be healthy."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the ranks of one world meet. Ranks that are told another place leave the one before."""

    world: int
    directory: Path
    dp: int
    """Attention groups."""

    @property
    def rendezvous(self) -> str:
        return f"file://{self.directory / 'rendezvous'}"


@dataclass(slots=True)
class Seat:
    """One rank in its process, as a job sees it. A place is used either by groups or by an actor."""

    rank: int
    place: Place
    _groups: ProcessGroups | None = None
    _actor: RankActor | None = None
    jobs: int = 0

    @property
    def world(self) -> int:
        return self.place.world

    @property
    def groups(self) -> ProcessGroups:
        if self._groups is None:
            self._groups = ProcessGroups(
                rank=self.rank,
                world=self.world,
                init_method=self.place.rendezvous,
                backend="gloo",
                timeout_s=MEET_S,
                dp=self.place.dp,
            )
        return self._groups

    @property
    def actor(self) -> RankActor:
        if self._actor is None:
            self._actor = RankActor(
                rank=self.rank,
                world=self.world,
                device="sim",
                model={"preset": "tiny", "seed": 0},
                rendezvous=self.place.rendezvous,
                shared=str(self.place.directory),
                timeout_s=MEET_S,
                dp=self.place.dp,
            )
        return self._actor

    @contextmanager
    def comm(
        self,
        name: str,
        *,
        ledger: LedgerWriter | None = None,
        timeout_s: float = WAIT_S,
        symmetric: bool = False,
    ) -> Iterator[tuple[SimDevice, Comm]]:
        """A device and its groups. ``name``: the same on all ranks, another one for each use in a job."""
        device = SimDevice(SimOptions(copy_latency_us=0.0, host_copy_latency_us=0.0), ledger, self.rank)
        options = CommOptions(
            rank=self.rank,
            world=self.world,
            shared=self.place.directory,
            timeout_s=timeout_s,
            dp=self.place.dp,
            symmetric=symmetric,
        )
        comm = Comm(options, device, ledger, self.groups, f"{name}.{self.jobs}")
        try:
            yield device, comm
        finally:
            comm.shut()
            device.close(END_S)
            comm.close()


Job = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job gave on one rank, or how it failed there: first line the exception, then its traceback."""

    value: Any = None
    error: str | None = None


class LocalRanks:
    """The processes, started when first needed. Rank r of every world is process r."""

    def __init__(self) -> None:
        shared_memory = Path("/dev/shm")
        self._root = Path(
            tempfile.mkdtemp(prefix="ranks-", dir=shared_memory if shared_memory.is_dir() else None)
        )
        self._processes: list[tuple[SpawnProcess, Connection]] = []
        self._place: Place | None = None
        self._places = 0
        self._kind = ""

    def run(
        self, world: int, job: Job, *args: Any, deadline_s: float = JOB_S, dp: int | None = None
    ) -> list[Any]:
        """The job's value on each rank. Fails with every rank's traceback if it raised anywhere. ``dp``: attention
        groups; None: every rank is one."""
        return _values(self.outcomes(world, job, *args, deadline_s=deadline_s, dp=dp))

    def outcomes(
        self, world: int, job: Job, *args: Any, deadline_s: float = JOB_S, dp: int | None = None
    ) -> list[Outcome]:
        return self._call("groups", world, dp or world, job, args, deadline_s)

    def trial(self, world: int, spec: TrialSpec, job: Job | None = None, *, dp: int | None = None) -> Trial:
        """One trial of the built-in engine, which must be healthy."""
        trial = self.stressed(world, spec, job, dp=dp)
        _values(list(trial.outcomes))
        return trial

    def stressed(
        self, world: int, spec: TrialSpec, job: Job | None = None, *, dp: int | None = None
    ) -> Trial:
        """One trial that may fail. ``dp``: attention groups; None: every rank is one."""
        return Trial(spec, tuple(self._call("actors", world, dp or world, job or run_trial, (spec,), JOB_S)))

    def pids(self) -> list[int | None]:
        return [process.pid for process, _ in self._processes]

    def close(self) -> None:
        """The processes have nothing to save."""
        self._end()
        shutil.rmtree(self._root)

    def _call(
        self, kind: str, world: int, dp: int, job: Job, args: Sequence[Any], deadline_s: float
    ) -> list[Outcome]:
        if world > len(self._processes):
            begun = len(self._processes)
            for rank in range(begun, world):
                self._start(rank)
            self._collect([pipe for _, pipe in self._processes[begun:]], START_S)
        place = self._place
        if place is None or (place.world, place.dp, self._kind) != (world, dp, kind):
            self._places += 1
            self._kind = kind
            self._place = Place(world, self._root / f"place-{self._places}", dp)
            self._place.directory.mkdir()
        ranks = self._processes[:world]
        for _, pipe in ranks:
            pipe.send((self._place, job, args, deadline_s))
        outcomes = self._collect([pipe for _, pipe in ranks], deadline_s + END_S)
        if any(outcome.error is not None for outcome in outcomes):
            self._place = None
        return outcomes

    def _collect(self, pipes: Sequence[Connection], deadline_s: float) -> list[Outcome]:
        deadline = time.monotonic() + deadline_s
        came: dict[int, Outcome] = {}
        while len(came) < len(pipes):
            silent = [pipe for rank, pipe in enumerate(pipes) if rank not in came]
            ready = wait(silent, max(0.0, deadline - time.monotonic()))
            if not ready:
                self._give_up([rank for rank in range(len(pipes)) if rank not in came], came)
            for rank, pipe in enumerate(pipes):
                if pipe in ready:
                    try:
                        came[rank] = pipe.recv()
                    except EOFError:
                        self._give_up([rank], came)
        return [came[rank] for rank in range(len(pipes))]

    def _give_up(self, silent: Sequence[int], came: Mapping[int, Outcome]) -> None:
        """Ends all processes and fails: some rank said nothing in time, or died."""
        self._end()
        dumps = [self._stacks(rank) for rank in silent]
        errors = [f"rank {rank}: {outcome.error}" for rank, outcome in came.items() if outcome.error]
        text = "\n".join(path.read_text() for path in dumps if path.exists())
        raise AssertionError("\n".join([f"no answer of the ranks {list(silent)}", *errors, text]))

    def _start(self, rank: int) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_main, args=(rank, theirs, self._stacks(rank)), name=f"rank-{rank}", daemon=True
        )
        process.start()
        theirs.close()
        self._processes.append((process, ours))

    def _stacks(self, rank: int) -> Path:
        return self._root / f"stacks-{rank}.txt"

    def _end(self) -> None:
        for process, _ in self._processes:
            process.kill()
        for process, pipe in self._processes:
            process.join(END_S)
            pipe.close()
        self._processes.clear()
        self._place = None


def _main(rank: int, pipe: Connection, stacks: Path) -> None:
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    seat: Seat | None = None
    pipe.send(Outcome())
    with stacks.open("w") as dump:
        while True:
            place, job, args, deadline_s = pipe.recv()
            if seat is None or seat.place != place:
                _leave()
                seat = Seat(rank, place)
            seat.jobs += 1
            faulthandler.dump_traceback_later(deadline_s, file=dump)
            outcome = _attempt(seat, job, args)
            if outcome.error is not None:
                seat = None
                _leave()
            faulthandler.cancel_dump_traceback_later()
            pipe.send(outcome)


def _attempt(seat: Seat, job: Job, args: Sequence[Any]) -> Outcome:
    try:
        return Outcome(job(seat, *args))
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error))}")


def _leave() -> None:
    """Closes the connections, so that a peer that still waits for this rank fails too."""
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _values(outcomes: Sequence[Outcome]) -> list[Any]:
    errors = [f"rank {rank}: {one.error}" for rank, one in enumerate(outcomes) if one.error is not None]
    assert not errors, "\n".join(errors)
    return [outcome.value for outcome in outcomes]


# Trials of the built-in engine ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trial:
    """What the ranks of one trial brought home."""

    spec: TrialSpec
    outcomes: tuple[Outcome, ...]

    @property
    def results(self) -> list[RankResult]:
        return [outcome.value for outcome in self.outcomes if outcome.error is None]

    @property
    def tokens(self) -> dict[str, list[int]]:
        return {name: list(tokens) for result in self.results for name, tokens in result.tokens.items()}

    @property
    def finish(self) -> dict[str, str]:
        return {name: reason for result in self.results for name, reason in result.finish.items()}

    def count(self, counter: str) -> int:
        """Over all ranks."""
        return sum(result.counters[counter] for result in self.results)


def run_trial(seat: Seat, spec: TrialSpec) -> RankResult:
    """The trial, with every page accounted for after every step."""
    step = Engine.step

    @functools.wraps(step)
    def checked(engine: Engine) -> bool:
        work = step(engine)
        engine.scheduler.check_integrity()
        return work

    with patch.object(Engine, "step", checked):
        return seat.actor.run_trial(spec)


BASE: Mapping[str, Mapping[str, Any]] = {
    "model": {"preset": "tiny", "seed": 0},
    "engine": EngineTable(
        kv_tokens=2048, page_size=1, chunk_tokens=16, max_running=4, graph_buckets=(2, 4)
    ).model_dump(),
    "toggles": {"pinned": "pageable", "overlap": "on", "graph": "on"},
    "sim": SimTable(copy_gbps=20.0).model_dump(),
    "jitter": {},
}


@dataclass(frozen=True, slots=True)
class Trials:
    """Makes specs, each with files of its own below ``directory``."""

    directory: Path
    workload: Mapping[str, Any]
    world: int = 2
    made: list[str] = field(default_factory=list)

    def spec(
        self, *, seed: int = 1, timeout_s: float = WAIT_S, ledger: bool = True, **tables: Any
    ) -> TrialSpec:
        """``tables``: what differs from ``BASE``, by table."""
        name = f"trial-{len(self.made)}"
        self.made.append(name)
        home = self.directory / name
        home.mkdir(parents=True)

        def paths(kind: str) -> dict[int, str]:
            return {rank: str(home / f"{kind}-{rank}") for rank in range(self.world)}

        return TrialSpec(
            id=name,
            seed=seed,
            workload={**self.workload, **tables.pop("workload", {})},
            client={},
            **{table: {**values, **tables.pop(table, {})} for table, values in BASE.items()},
            ledger_paths=paths("ledger"),
            decisions_paths=paths("decisions"),
            journal_paths=paths("journal"),
            timeout_s=timeout_s,
            ledger=ledger,
            **tables,
        )

    def of(self, world: int) -> Trials:
        return replace(self, world=world)
