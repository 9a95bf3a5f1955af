"""One rank as a worker process: what stays warm between trials, and one trial from start to clean end.

Warm: the process, its groups, the model's weights. New for each trial: device, ledger, engine, shared files. A
trial that left anything behind says so in ``RankResult.leaks``; a rank that raised is not used again.

Not here: how ranks are started and ended (``harness.cluster``), the engine's work (``engine.py``).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness import faults
from harness.devices.base import Device, DeviceTimeout
from harness.devices.sim import SimDevice, SimOptions
from harness.devices.sim_cores import CoreOptions
from harness.fault_model import arm, load_file, parse
from harness.jitter import Jitter, JitterOptions
from harness.ledger import LedgerWriter
from harness.target import RankResult, TrialSpec
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
from serving.weights import expert_range, head_range, load_weights, random_weights
from serving.workload import for_rank, generate, longest_context, workload

_CLOSE_S = 10.0
_CLOSE_FAILED_S = 0.5
"""After a failure: the process is ended anyway, and whoever waits for it wants the error."""
_PADDINGS = {"auto": None, "max_len": Padding.MAX_LEN, "sum_len": Padding.SUM_LEN}


class RankActor:
    """One rank of the built-in engine. ``rendezvous`` is a torch.distributed init method; ``dp`` are the attention
    groups, None: every rank is one."""

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
    ) -> None:
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self._rank = rank
        self._world = world
        self._device_name = device
        self._shared = Path(shared)
        self._trials = 0
        self._topology = Topology(rank, world, dp or world)
        self._model = load_model(model, self._topology)
        self._groups = ProcessGroups(
            rank=rank, world=world, init_method=rendezvous, backend="gloo", timeout_s=timeout_s, dp=dp
        )

    def run_trial(self, spec: TrialSpec) -> RankResult:
        """Runs this rank's part of one trial. Raises what the engine or the device raised."""
        self._trials += 1
        began = time.monotonic()
        nemesis = _Nemesis.of(spec, self._rank)
        faults.activate(*nemesis.visitors, rank=self._rank)
        ledger = self._make_ledger(spec) if spec.ledger else None
        device = _make_device(spec, self._device_name, self._rank, ledger)
        comm = Comm(
            CommOptions(
                rank=self._rank,
                world=self._world,
                shared=self._shared,
                timeout_s=spec.timeout_s,
                dp=self._topology.dp,
                symmetric=spec.toggles.get("symm_mem") == "on",
                symm_growth_bytes=spec.engine["symm_growth_bytes"] or GROWTH_BYTES,
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
        return replace(result, leaks=(*stuck, *_leaks(device)))

    def _make_ledger(self, spec: TrialSpec) -> LedgerWriter:
        return LedgerWriter.create(
            Path(spec.ledger_paths[self._rank]),
            rank=self._rank,
            world=self._world,
            node=spec.nodes.get(self._rank, "local"),
            device=f"{self._device_name}:{self._rank}",
            decisions_path=Path(spec.decisions_paths[self._rank]),
        )


def _close(device: Device, timeout_s: float) -> list[str]:
    """Closes the device; what would not end is told, so that it hides no error before it."""
    try:
        device.close(timeout_s)
    except DeviceTimeout as error:
        return [str(error)]
    return []


def load_model(model: Mapping[str, Any], topology: Topology) -> DeepseekV2:
    """The share of a model that one rank holds: a preset with seeded weights, or a Hugging Face directory."""
    rank, world = topology.rank, topology.world
    shared = topology.member, topology.attention_size
    if model.get("directory"):
        directory = Path(model["directory"])
        config = load_config(directory)
        experts = expert_range(config, rank, world)
        weights = load_weights(config, directory, experts=experts)
        return DeepseekV2(config, weights, experts, head_range(config, *shared))
    config = preset(model.get("preset") or "tiny")
    experts = expert_range(config, rank, world)
    made = random_weights(config, model.get("seed", 0), experts=experts)
    return DeepseekV2(config, made, experts, head_range(config, *shared))


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


def _make_device(spec: TrialSpec, name: str, rank: int, ledger: LedgerWriter | None) -> SimDevice:
    if name != "sim":
        raise NotImplementedError(f"the built-in engine does not run on {name!r} yet; use --device sim")
    sim = spec.sim
    options = SimOptions(
        memory_model=sim["memory_model"],
        copy_latency_us=sim["copy_latency_us"],
        copy_gbps=sim["copy_gbps"],
        host_timeout_s=spec.timeout_s,
        cores=CoreOptions(
            total=sim["cores"],
            collective=sim["collective_cores"],
            part_us=sim["collective_part_us"],
            cooperative=tuple(sim["cooperative"]),
        ),
        defects=frozenset(defect["name"] for defect in sim["defects"] if rank in defect["ranks"]),
    )
    return SimDevice(options, ledger, rank)


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


def _leaks(device: SimDevice) -> list[str]:
    memory = device.memory()
    found = []
    if memory.host_pinned_bytes or memory.host_pageable_bytes:
        found.append(
            f"host blocks still handed out: {memory.host_pinned_bytes} bytes pinned, "
            f"{memory.host_pageable_bytes} bytes pageable"
        )
    threads = [t.name for t in threading.enumerate() if t.name.startswith("hangrig-")]
    if threads:
        found.append(f"threads still alive: {', '.join(threads)}")
    return found
