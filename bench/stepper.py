"""The arms of one rank as things that step: the engine, or only the collectives of its step.

All arms of a plan live side by side in one process, each with a device, groups and shared files of its own. A
drained arm's threads sleep, so arms can take turns. Not here: timing, and the process around it (``rank.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from bench.arms import ROWS, WAIT_S, WORLD, Arm, trial_spec
from bench.timed_ledger import TimedLedger
from harness.devices.base import Event, Graph
from harness.devices.sim import SimDevice, SimOptions
from harness.ledger import LedgerWriter
from harness.target import TrialSpec
from serving.comm import Comm, CommOptions
from serving.dp_attention import LocalState, Mode
from serving.targets.builtin_rank import RankActor, make_engine

_CLOSE_S = 10.0
_PREFILL_LIMIT_STEPS = 200


class Stepper:
    """One arm of one rank."""

    def __init__(
        self, step: Callable[[], None], device: SimDevice, comm: Comm, ledger: LedgerWriter | None
    ) -> None:
        self.step = step
        self.ledger = ledger
        self._device = device
        self._comm = comm

    def align(self) -> None:
        """Returns when all ranks came here."""
        self._comm.group("agree").all_gather_host([0])

    def drain(self) -> None:
        """Waits until everything that was enqueued is done."""
        for stream in (self._device.compute, self._device.copy, self._device.comm, self._device.update):
            stream.synchronize(WAIT_S)

    def close(self) -> None:
        """Ends threads and files, with requests under way or not."""
        self._comm.shut()
        self._device.close(_CLOSE_S)
        self._comm.close()
        if self.ledger is not None:
            self.ledger.close()


class BenchRank(RankActor):
    """The built-in engine's rank with its warm groups and weights, stepped from outside."""

    def stepper(self, arm: Arm, decode_steps: int, folder: Path) -> Stepper:
        """A new arm, past its prefills. All ranks make the same arms in the same order."""
        self._trials += 1
        spec = trial_spec(arm, decode_steps, folder)
        ledger = self._ledger(arm, spec)
        device = _device(spec, ledger, self._rank)
        options = CommOptions(
            rank=self._rank,
            world=WORLD,
            shared=self._shared,
            timeout_s=WAIT_S,
            symmetric=spec.toggles["symm_mem"] == "on",
            agree_first=arm.kind != "collectives-bare",
        )
        comm = Comm(options, device, ledger, self._groups, token=f"bench-{self._trials}")
        make = self._engine if arm.kind == "engine" else self._collectives
        return Stepper(make(spec, device, comm, ledger), device, comm, ledger)

    def _ledger(self, arm: Arm, spec: TrialSpec) -> LedgerWriter | None:
        if not arm.timed:
            return self._make_ledger(spec) if arm.ledger else None
        return TimedLedger.create(
            Path(spec.ledger_paths[self._rank]),
            rank=self._rank,
            world=WORLD,
            node="local",
            device=f"sim:{self._rank}",
            decisions_path=Path(spec.decisions_paths[self._rank]),
        )

    def _engine(
        self, spec: TrialSpec, device: SimDevice, comm: Comm, ledger: LedgerWriter | None
    ) -> Callable[[], None]:
        engine = make_engine(spec, self._model, device, comm, ledger)

        def step() -> None:
            if not engine.step():
                raise RuntimeError(f"arm {spec.id}: the requests ended before the blocks did")

        while not engine.decode_steps:
            if engine.steps == _PREFILL_LIMIT_STEPS:
                raise RuntimeError(f"arm {spec.id}: no decode step within {_PREFILL_LIMIT_STEPS} steps")
            step()
        return step

    def _collectives(
        self, spec: TrialSpec, device: SimDevice, comm: Comm, ledger: LedgerWriter | None
    ) -> Callable[[], None]:
        """The agreement on the host, the rest in a replayed graph, the host one step ahead: as in the engine."""
        config, experts = self._model.config, comm.group("experts")
        local_TD = device.empty((ROWS, config.hidden_size), self._model.dtype)
        gathered_GD = device.empty((WORLD * ROWS, config.hidden_size), self._model.dtype)
        graph: Graph
        experts.capture_begins()
        with device.capture("collectives") as graph:
            for layer in range(config.num_hidden_layers):
                if self._model.is_moe(layer):
                    experts.all_gather(gathered_GD, local_TD)
                    experts.reduce_scatter(local_TD, gathered_GD)
        experts.capture_ended(graph)
        row = LocalState(1, Mode.DECODE, ROWS, graph=True, work=True).row()
        before: list[Event] = []

        def step() -> None:
            comm.group("agree").all_gather_host(row)
            device.replay(graph)
            comm.replayed(graph)
            done = device.event()
            device.compute.record(done)
            before.append(done)
            if len(before) > 1:
                before.pop(0).synchronize(WAIT_S)

        return step


def _device(spec: TrialSpec, ledger: LedgerWriter | None, rank: int) -> SimDevice:
    sim = spec.sim
    options = SimOptions(
        memory_model=sim["memory_model"],
        copy_latency_us=sim["copy_latency_us"],
        copy_gbps=sim["copy_gbps"],
        host_timeout_s=WAIT_S,
    )
    return SimDevice(options, ledger, rank)
