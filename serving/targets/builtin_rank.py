"""One rank as a worker process: what stays warm between trials, and one trial from start to clean end.

Warm: the process, its groups, the model's weights. New for each trial: device, ledger, engine, shared files. A
trial that left anything behind says so in ``RankResult.leaks``; a rank that raised is not used again.

Not here: how ranks are started and ended (``harness.cluster``), the engine's work (``engine.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness import faults
from harness.devices.base import Device, DeviceTimeout
from harness.fault_model import arm, load_file, parse
from harness.jitter import Jitter, JitterOptions
from harness.ledger import LedgerWriter
from harness.target import RankResult, TrialSpec
from serving.carriers import carrier_for
from serving.comm import Comm, CommOptions
from serving.deepseek_v2 import DeepseekV2
from serving.dp_attention import Padding
from serving.engine import Engine
from serving.engine_config import EngineConfig
from serving.groups import ProcessGroups, Topology
from serving.journal import Journal
from serving.model_config import load_config, preset
from serving.scheduler import Counters, SchedulerConfig
from serving.symmetric import GROWTH_BYTES
from serving.targets.builtin_device import Leftovers, RankDevice, rank_device
from serving.weights import SeededWeights, expert_range, head_range, load_weights
from serving.workload import for_rank, generate, longest_context, workload

_LOADED_S = 60.0
"""Of what is still enqueued when the last tensor was read."""
_CLOSE_S = 10.0
_CLOSE_FAILED_S = 0.5
"""After a failure: the process is ended anyway, and whoever waits for it wants the error."""
_PADDINGS = {"auto": None, "max_len": Padding.MAX_LEN, "sum_len": Padding.SUM_LEN}


class RankActor:
    """One rank of the built-in engine. ``rendezvous`` is a torch.distributed init method; ``dp`` are the attention
    groups, None: every rank is one. ``ranks_per_device``: how many share its device, itself among them."""

    def __init__(
        self,
        *,
        rank: int,
        world: int,
        device: str,
        model: Mapping[str, Any],
        rendezvous: str,
        shared: str,
        timeout_s: float,
        dp: int | None = None,
        ranks_per_device: int = 1,
    ) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._rank = rank
        self._world = world
        self._carrier = carrier_for(device, ranks_per_device)
        self._device = rank_device(device, rank)
        self._leftovers = Leftovers()
        self._shared = Path(shared)
        self._trials = 0
        self._topology = Topology(rank, world, dp or world)
        self._model = load_model(model, self._topology, self._device)
        self._groups = ProcessGroups(
            rank=rank,
            world=world,
            init_method=rendezvous,
            backend=self._carrier.backend,
            timeout_s=timeout_s,
            dp=dp,
        )

    def run_trial(self, spec: TrialSpec) -> RankResult:
        """Runs this rank's part of one trial. Raises what the engine or the device raised."""
        self._trials += 1
        began = time.monotonic()
        nemesis = _Nemesis.of(spec, self._rank)
        faults.activate(*nemesis.visitors, rank=self._rank)
        ledger = self._make_ledger(spec) if spec.ledger else None
        device = self._device.open(spec, self._rank, ledger)
        comm = Comm(
            CommOptions(
                rank=self._rank,
                world=self._world,
                shared=self._shared,
                timeout_s=spec.timeout_s,
                dp=self._topology.dp,
                symmetric=spec.toggles.get("symm_mem") == "on",
                symm_growth_bytes=spec.engine["symm_growth_bytes"] or GROWTH_BYTES,
                carrier=self._carrier,
            ),
            device,
            ledger,
            self._groups,
            token=f"{self._trials}",
        )
        # The ranks of an attention group make the same tokens: its first one brings them home.
        speaks = self._topology.member == 0
        journal = Journal(Path(spec.journal_paths[self._rank])) if speaks else None
        closing_s = _CLOSE_FAILED_S
        try:
            engine = make_engine(spec, self._model, device, comm, ledger, journal)
            began_steps = time.monotonic()
            engine.run()
            steps_s = time.monotonic() - began_steps
            result = _result(self._rank, engine, time.monotonic() - began, steps_s, speaks=speaks)
            del engine
            closing_s = _CLOSE_S
        finally:
            comm.shut()
            stuck = _close(device, closing_s)
            comm.close()
            faults.activate()
            nemesis.close()
            if journal is not None:
                journal.close()
            if ledger is not None:
                ledger.close()
        del comm
        left = self._leftovers.of(device, simulated=self._device.simulated)
        return replace(result, leaks=(*stuck, *left))

    def _make_ledger(self, spec: TrialSpec) -> LedgerWriter:
        return LedgerWriter.create(
            Path(spec.ledger_paths[self._rank]),
            rank=self._rank,
            world=self._world,
            node=spec.nodes.get(self._rank, "local"),
            device=self._device.label,
            decisions_path=Path(spec.decisions_paths[self._rank]),
        )


def _close(device: Device, timeout_s: float) -> list[str]:
    """Closes the device; what would not end is told, so that it hides no error before it."""
    try:
        device.close(timeout_s)
    except DeviceTimeout as error:
        return [str(error)]
    return []


def load_model(model: Mapping[str, Any], topology: Topology, device: RankDevice | None = None) -> DeepseekV2:
    """The share of a model that one rank holds: a preset with seeded weights, or a Hugging Face directory. Each
    tensor comes straight to ``device`` (None: a simulated one), so that the host never holds the weights."""
    device = device or rank_device("sim", topology.rank)
    directory = Path(model["directory"]) if model.get("directory") else None
    config = preset(model.get("preset") or "tiny") if directory is None else load_config(directory)
    experts = expert_range(config, topology.rank, topology.world)
    dtype, tensors = device.dtype(model), device.tensors
    device.check_room(config, experts, dtype)
    weights: Mapping[str, torch.Tensor]
    if directory is None:
        weights = SeededWeights(config, model.get("seed", 0), dtype, experts=experts, device=tensors)
    else:
        weights = load_weights(config, directory, dtype, experts=experts, device=tensors)
    made = DeepseekV2(config, weights, experts, head_range(config, topology.member, topology.attention_size))
    device.settle(_LOADED_S)
    return made


def make_engine(
    spec: TrialSpec,
    model: DeepseekV2,
    device: Device,
    comm: Comm,
    ledger: LedgerWriter | None,
    journal: Journal | None = None,
) -> Engine:
    """The engine of one rank with the trial's toggles, its requests waiting to arrive."""
    engine, toggles = spec.engine, spec.toggles
    share = comm.topology.dp_rank, comm.topology.dp
    everyone = generate(workload(spec.workload), seed=spec.seed, vocab_size=model.config.vocab_size)
    arrivals = [(arrival.step, arrival.request.request()) for arrival in for_rank(everyone, *share)]
    config = EngineConfig(
        scheduler=SchedulerConfig(
            kv_tokens=engine["kv_tokens"],
            page_size=engine["page_size"],
            chunk_tokens=engine["chunk_tokens"],
            max_prefill_tokens=engine["chunk_tokens"],
            max_running=engine["max_running"],
            admission_ratio=engine["admission_ratio"],
            retract_every=engine["retract_every"],
            prefix_cache=toggles.get("prefix_cache", "on") == "on",
        ),
        max_context=longest_context(everyone) + 1,
        graph_buckets=tuple(engine["graph_buckets"]),
        padding=_PADDINGS[engine["padding"]],
        overlap=toggles.get("overlap") == "on",
        graph=toggles.get("graph") == "on",
        pinned=toggles.get("pinned", "pageable"),  # type: ignore[arg-type]  # resolved values are checked
        check_steps=engine["check_steps"],
        sync_every=engine["sync_every"],
        cache_sync_every=engine["cache_sync_every"],
        output_parallel=engine["output_parallel"],
        control_broadcast=engine["control_broadcast"],
        expert_stats=engine["expert_stats"],
        stats_group=engine["stats_group"],
        exit_barrier=engine["exit_barrier"],
        allocate_room=engine["symm_growth_bytes"] is not None,
        check_copies=engine["check_copies"],
        sample_ahead=engine["sample_ahead"],
        wait_s=spec.timeout_s,
    )
    return Engine(config, model, device, comm, ledger, arrivals, journal)


@dataclass(frozen=True, slots=True)
class _Nemesis:
    """What breaks this rank's trial on purpose, and where it is told. Jitter comes first, as before anything."""

    visitors: tuple[faults.Visitor, ...]
    log: int | None

    @classmethod
    def of(cls, spec: TrialSpec, rank: int) -> _Nemesis:
        options = JitterOptions(**spec.jitter)
        jitter: list[faults.Visitor] = [Jitter(options, spec.seed, rank)] if options.probability > 0 else []
        if not spec.faults:
            return cls(tuple(jitter), None)
        for path in spec.fault_files:
            load_file(Path(path))
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        log = os.open(spec.fault_logs[rank], flags, 0o644) if rank in spec.fault_logs else None
        armed = arm([parse(table) for table in spec.faults], rank, seed=spec.seed, log=log)
        return cls((*jitter, *armed), log)

    def close(self) -> None:
        if self.log is not None:
            os.close(self.log)


def _result(rank: int, engine: Engine, duration_s: float, steps_s: float, *, speaks: bool) -> RankResult:
    """``speaks``: it is the rank that tells of its attention group's requests; the others count none."""
    counters = engine.scheduler.counters if speaks else Counters()
    ended = engine.ended if speaks else []
    return RankResult(
        rank=rank,
        steps=engine.steps,
        decode_steps=engine.decode_steps,
        duration_s=duration_s,
        tokens={str(request.id): list(request.output) for request in ended},
        finish={str(request.id): request.finish_reason or "" for request in ended},
        counters={
            "retractions": counters.retractions,
            "forced_retractions": counters.forced_retractions,
            "aborted": counters.aborted,
            "cached_tokens": counters.cached_tokens,
            "tokens_out": engine.tokens_out if speaks else 0,
            "steps_ms": int(steps_s * 1e3),
            **({"routed_tokens": sum(routed)} if (routed := engine.routed_tokens()) else {}),
        },
        latency_us=engine.latency_us(),
        nbytes={path: entry.nbytes for path, entry in engine.transfers.paths.items()},
        leaks=(),
    )
