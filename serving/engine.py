"""The engine of one rank: ``step()`` schedules, agrees, prepares, runs forward, samples and finishes.

With overlap the host is one step ahead of the device: it launches step n, then waits for the result of step n-1.
The order within a step is what makes the pinned-memory hang possible (HANGS.md, D1), so it is kept in one place.
Nothing in the hot path waits for the device but the result of the step before, unless a copy does so by itself.

Not here: which requests run (``scheduler.py``), what the ranks agree on (``dp_attention.py``), the stream
operations of a forward pass (``forward.py``).
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from harness import faults
from harness.devices.base import Device, Event, Graph, HostArgs
from harness.ledger import LedgerWriter
from serving.comm import Comm
from serving.control import Control
from serving.copy_witness import CopyWitness
from serving.decisions import MODES, Decisions
from serving.deepseek_v2 import DeepseekV2
from serving.dp_attention import LocalState, Mode, Padding, StepPlan, agree
from serving.engine_config import EngineConfig
from serving.forward import DeviceState, Features, Forward, Workspace, zeroed
from serving.journal import Journal
from serving.requests import Batch, BatchMode, Request
from serving.rows import Rows
from serving.sampling import Grammars, sample
from serving.scheduler import Scheduler
from serving.transfer import Fetched, Transfers


@dataclass(frozen=True, slots=True)
class Launched:
    """A step whose forward pass is enqueued and whose tokens are not sampled yet."""

    ws: Workspace
    sampled: tuple[str, ...]  # request ids in the order of the sampled rows


@dataclass(frozen=True, slots=True)
class Pending:
    """A step whose tokens are on their way to the host."""

    step: int
    batch: Batch
    sampled: tuple[str, ...]
    fetched: Fetched | None


class Engine:
    """One rank. ``arrivals``: the requests of its attention group with the step in which each one arrives,
    ascending; all ranks of the group are given the same ones and decide alike."""

    def __init__(
        self,
        config: EngineConfig,
        model: DeepseekV2,
        device: Device,
        comm: Comm,
        ledger: LedgerWriter | None,
        arrivals: Sequence[tuple[int, Request]],
        journal: Journal | None = None,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config.scheduler)
        self._witness = CopyWitness(device) if config.check_copies else None
        self.transfers = Transfers(device, config.pinned, wait_s=config.wait_s, witness=self._witness)
        self.step_us: dict[str, list[float]] = defaultdict(list)
        self.steps = 0
        self.decode_steps = 0
        self.tokens_out = 0
        self.ended: list[Request] = []
        self._model = model
        self._device = device
        self._comm = comm
        self._rank = comm.topology.rank
        self._dp_rank = comm.topology.dp_rank
        self._ledger = ledger
        self._journal = journal
        self._arrivals = deque(arrivals)
        self._grammars = Grammars(model.config.vocab_size)
        self._requests: dict[str, Request] = {}
        self._rows = Rows(config.scheduler.max_running)
        self._decisions = Decisions(ledger, comm.topology)
        shared = config.expert_stats and config.stats_group == "experts"
        self._features = Features(
            stats=config.expert_stats,
            stats_group=config.stats_group,
            stats_joined=shared and config.graph,
            output_parallel=config.output_parallel,
        )
        self._state = self._make_state(self._rows.count)
        self._forward = Forward(model, device, comm, self._state, self._features)
        self._control = Control(comm, sync_every=config.sync_every, cache_sync_every=config.cache_sync_every)
        self._graphs: dict[int, tuple[Graph, Workspace]] = {}
        self._replay_done: Event | None = None
        most = max(self._rows.count, *config.graph_buckets)
        self._results = device.empty((most,), torch.int64) if config.sample_ahead else None
        self._result_read: Event | None = None
        self._pending: Pending | None = None
        self._step_began_ns = 0
        self._again = False
        if config.graph:
            self._phase("capture")
            for bucket in config.graph_buckets:
                self._graphs[bucket] = self._capture(bucket)

    # One step ----------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Runs one step together with all other ranks. False when no rank has work left."""
        self._begin_step()
        left = self._pass()
        while self._again:
            self._again = False
            left = self._pass()
        return left

    def run_again(self, request_id: str, reason: str) -> None:
        """Gives up a request that runs and makes this step once more without it, alone: what a rank does that
        recovers by itself from a result that it cannot use. Its peers are on their way to the next step by then."""
        self._again = self.scheduler.abort(request_id, reason)
        if self._again:
            self._decisions.again(request_id, reason)

    def _pass(self) -> bool:
        """What a step does once it has begun."""
        batch = self.scheduler.schedule()
        for request_id in batch.retracted:
            self._rows.release(request_id)
        self._end_requests(batch.aborted)
        written_back = self._sync_cache(batch)
        work = bool(self._arrivals) or self.scheduler.has_work()
        agreed = self._agree(batch, work)
        plan = self._planned(batch, agreed)
        self._record(batch, agreed, plan, written_back)
        launched = None if plan.empty else self._launch(batch, plan)
        if self.config.overlap and self._may_sample_ahead(launched):
            before, self._pending = self._pending, self._sample(launched, batch)
            self._finish(before)
        elif self.config.overlap:
            self._finish(self._pending)
            self._pending = self._sample(launched, batch)
        else:
            self._finish(self._sample(launched, batch))
        self._end_step(plan)
        if self._control.syncs_in(self.steps):
            self._phase("sync")
        return self._control.work_left(self.steps, work, plan.work)

    def run(self) -> None:
        """Steps until no rank has work, then makes sure that nothing is left behind."""
        while self.step():
            pass
        self._finish(self._pending)
        self._pending = None
        self._phase("drain")
        for stream in (self._device.compute, self._device.copy, self._device.comm, self._device.update):
            stream.synchronize(self.config.wait_s)
        if self._witness is not None:
            self._decisions.add(self.steps, _wrong(self._witness))
            self._witness.close()
        self.scheduler.check_integrity()
        self._phase("teardown")
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("rank.exit", engine=self)
        if self.config.exit_barrier:
            self._control.meet()
        self._phase("parked")

    def _begin_step(self) -> None:
        self.steps += 1
        self._step_began_ns = time.perf_counter_ns()
        if self.config.control_broadcast:
            self._phase("receive")
            self._control.heed(self.steps)
        if self._witness is not None:
            self._witness.step = self.steps
        self._phase("schedule")
        if faults.ACTIVE is not None:
            faults.ACTIVE.visit("rank.step", step=self.steps, engine=self)
        while self._arrivals and self._arrivals[0][0] <= self.steps:
            _, request = self._arrivals.popleft()
            self._requests[request.id] = request
            if request.grammar is not None:
                self._grammars.start(request.id, request.grammar)
            self.scheduler.add(request)

    def _sync_cache(self, batch: Batch) -> int | None:
        if self.config.cache_sync_every and batch.mode is BatchMode.PREFILL:
            self._phase("cache-sync")
        return self._control.written_back(batch, self.scheduler.pool.inserted_pages)

    def _agree(self, batch: Batch, work: bool) -> StepPlan:
        self._phase("agree")
        local = LocalState(
            step=self.steps,
            mode=MODES[batch.mode],
            tokens=batch.num_tokens,
            graph=self.config.graph,
            work=work,
        )
        group, alone = self._comm.group("agree"), False
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit("rank.batch", **self._told(batch), batch=batch, engine=self)
            alone = passing.skipped
        return agree(
            group,
            local,
            buckets=self.config.graph_buckets,
            padding=self.config.padding,
            check_steps=self.config.check_steps,
            alone=alone,
            attention_size=self._comm.topology.attention_size,
        )

    def _planned(self, batch: Batch, agreed: StepPlan) -> StepPlan:
        """What this rank makes of what the ranks agreed on: the same, unless a fault has it otherwise."""
        if faults.ACTIVE is None:
            return agreed
        passing = faults.ACTIVE.visit(
            "rank.plan", **self._told(batch, agreed), plan=agreed, buckets=self.config.graph_buckets
        )
        plan: StepPlan = passing["plan"]
        return plan

    def _record(self, batch: Batch, agreed: StepPlan, plan: StepPlan, written_back: int | None) -> None:
        """Before the launch: a step that hangs has its record."""
        further: dict[str, Any] = {"waiting": len(self.scheduler.waiting), "tokens_out": self.tokens_out}
        if written_back is not None:
            further["written_back"] = written_back
        self._decisions.record(self.steps, batch, agreed, plan, self._comm.counts(), self.ended, further)

    def _told(self, batch: Batch, plan: StepPlan | None = None) -> dict[str, Any]:
        """What a fault may look at: this rank's part of a step. ``idle``: it has no token while others have."""
        tokens = batch.num_tokens
        told: dict[str, Any] = {
            "step": self.steps,
            "mode": MODES[batch.mode].name.lower(),
            "tokens": tokens,
            "grammar": any(row.request.grammar is not None for row in batch.rows),
        }
        if plan is not None:
            told["idle"] = tokens == 0 and not plan.empty
        return told

    def _launch(self, batch: Batch, plan: StepPlan) -> Launched | None:
        """None when a fault left the forward pass out."""
        self._phase("launch")
        if faults.ACTIVE is not None:
            passing = faults.ACTIVE.visit(
                "rank.launch", **self._told(batch, plan), graph=plan.graph, bucket=plan.bucket
            )
            if passing.skipped:
                return None
        if self.config.allocate_room:
            self.make_room(plan.rows, "launch")
        rows = batch.rows
        prefix = self._rows.assign(batch)
        if plan.graph:
            graph, ws = self._graphs[plan.bucket]
        else:
            sizes = (batch.num_tokens, len(rows), len(batch.sampling), len(prefix))
            ws = Workspace.make(
                self._device, self._model, plan, self._dp_rank, sizes=sizes, features=self._features
            )
        self.transfers.to_device(
            ws.counts_W, lambda host: host.copy_(torch.tensor(plan.tokens)), "token_count_copy"
        )
        if batch.num_tokens or plan.graph:
            self.transfers.to_device(
                ws.packed, lambda host: self._rows.pack(host, batch, ws, prefix), "metadata_copy"
            )
        args: HostArgs = (tuple(row.kv_len for row in rows), tuple(row.q_len for row in rows))
        if plan.graph:
            self._replay(graph, ws, args)
        else:
            self._forward.enqueue(ws, args)
        return Launched(ws, batch.sampling)

    def has_room(self, rows: int) -> bool:
        """Whether the symmetric heap has been grown to hold a pass of so many gathered rows."""
        return self._comm.group("experts").has_room(self._collective_bytes(rows))

    def make_room(self, rows: int, phase: str) -> None:
        """Grows it, together with all ranks, where it does not; goes on in ``phase``."""
        if not self.has_room(rows):
            self._phase("allocate")
            self._comm.group("experts").make_room(self._collective_bytes(rows), self.config.wait_s)
            self._phase(phase)

    def _collective_bytes(self, rows: int) -> int:
        """Of the largest collective around the experts."""
        return rows * self._model.config.hidden_size * self._model.dtype.itemsize

    def _replay(self, graph: Graph, ws: Workspace, args: HostArgs) -> None:
        """Update the host arguments for this step, fenced by the previous replay; then replay."""
        kv_lens, q_lens = args
        padded = len(ws.rows_B) - len(kv_lens)
        args = (kv_lens + (0,) * padded, q_lens + (1,) * padded)
        self._device.graph_update(graph, self._forward.host_args(args), self._replay_done)
        self._device.replay(graph)
        self._replay_done = self._device.event()
        self._device.compute.record(self._replay_done)
        self._comm.replayed(graph)
        if self._features.stats:
            self._forward.add_up(ws)

    def _sample(self, launched: Launched | None, batch: Batch) -> Pending:
        self._phase("sample")
        if launched is None or not launched.sampled:
            return Pending(self.steps, batch, (), None)
        ws, sampled = launched.ws, launched.sampled
        mask_SW = None
        if any(self._grammars.constrained(request_id) for request_id in sampled):
            mask_SW = self._device.empty((len(ws.sample_S), self._grammars.words()), torch.int32)
            self.transfers.to_device(mask_SW, lambda host: self._grammars.fill(host, sampled), "bitmask_copy")
        tokens_S = self._result(len(ws.sample_S))
        last_token_R = self._state.last_token_R

        def run() -> None:
            tokens_S.copy_(sample(ws.logits_SV, mask_SW))
            last_token_R.index_copy_(0, ws.sample_rows_S, tokens_S)

        ready = self._device.event()
        self._device.compute.run(run, "sample")
        self._device.compute.record(ready)
        fetched = self.transfers.to_host(tokens_S, ready, "next_token_copy")
        self._result_read = fetched.done
        return Pending(self.steps, batch, sampled, fetched)

    def _may_sample_ahead(self, launched: Launched | None) -> bool:
        """A grammar's mask needs the token before; without one nothing has to be waited for."""
        if not self.config.sample_ahead or launched is None:
            return False
        return not any(self._grammars.constrained(request_id) for request_id in launched.sampled)

    def _result(self, rows: int) -> torch.Tensor:
        """Where a step's tokens go. The shared buffer may be written once the copy of the step before has read
        it."""
        if self._results is None:
            return self._device.empty((rows,), torch.int64)
        if self._result_read is not None:
            self._device.compute.wait(self._result_read)
        return self._results[:rows]

    def _finish(self, pending: Pending | None) -> None:
        """Waits for the tokens of a step and hands them to its requests."""
        if pending is None:
            return
        tokens: dict[str, int] = {}
        ended: set[str] = set()
        if pending.fetched is not None:
            self._phase("wait-result")
            if not self._unawaited(pending):
                pending.fetched.done.synchronize(self.config.wait_s)
            values = self.transfers.values(pending.fetched)
            self.transfers.release(pending.fetched)
            rows = zip(pending.sampled, values, strict=False)  # graph rows are padded
            # A request that ended after this step was launched drops the step's token.
            tokens = {request_id: token for request_id, token in rows if request_id in self._requests}
            self._phase("process")
            if faults.ACTIVE is not None:
                tokens = {name: self._token(pending.step, name, token) for name, token in tokens.items()}
            if self._journal is not None:
                self._journal.append(pending.step, tokens)
            for request_id, token in tokens.items():
                if self._grammars.accept(request_id, token):
                    ended.add(request_id)
        finished = self.scheduler.commit(pending.batch, tokens, ended)
        self.tokens_out += len(tokens)
        self._end_requests([request.id for request in finished])
        if pending.batch.rows and self.scheduler.idle():  # once: it walks the pool, and peers may go on
            self.scheduler.check_integrity()

    def _unawaited(self, pending: Pending) -> bool:
        """Whether a fault has the host read a result without waiting for its copy."""
        if faults.ACTIVE is None:
            return False
        grammar = any(self._grammars.constrained(name) for name in pending.sampled)
        sampled = len(pending.sampled)
        passing = faults.ACTIVE.visit("rank.result", step=pending.step, sampled=sampled, grammar=grammar)
        return passing.skipped

    def _token(self, step: int, request: str, token: int) -> int:
        if faults.ACTIVE is None:
            return token
        grammar = self._grammars.constrained(request)
        passing = faults.ACTIVE.visit(
            "rank.token", step=step, request=request, token=token, grammar=grammar, engine=self
        )
        return int(passing["token"])

    def _end_step(self, plan: StepPlan) -> None:
        kind = "step" if Mode.PREFILL not in plan.modes else "prefill_step"
        if not plan.empty:
            self.step_us[kind].append((time.perf_counter_ns() - self._step_began_ns) / 1e3)
            self.decode_steps += kind == "step"
        if self._witness is not None:
            self._decisions.add(self.steps, _wrong(self._witness))

    # Buffers, graphs ---------------------------------------------------------------------------------------

    def _make_state(self, rows: int) -> DeviceState:
        model, scheduler = self._model, self.config.scheduler
        width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
        slots = scheduler.kv_tokens + scheduler.page_size
        state = DeviceState(
            kv=tuple(
                self._device.empty((slots, width), model.dtype) for _ in range(model.config.num_hidden_layers)
            ),
            table_RM=self._device.empty((rows, self.config.max_context), torch.int64),
            last_token_R=self._device.empty((rows,), torch.int64),
        )
        zeroed(self._device, *state.kv, state.table_RM, state.last_token_R)
        return state

    def _capture(self, bucket: int) -> tuple[Graph, Workspace]:
        dp, size = self._comm.topology.dp, self._comm.topology.attention_size
        plan = StepPlan(0, (Mode.DECODE,) * dp, (bucket,) * dp, Padding.MAX_LEN, bucket, True, size)
        sizes = (bucket, bucket, bucket, 0)
        ws = Workspace.make(
            self._device, self._model, plan, self._dp_rank, sizes=sizes, features=self._features
        )
        zeroed(self._device, ws.packed, ws.counts_W)
        return self._forward.capture(ws, f"decode.{bucket}"), ws

    def _end_requests(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._grammars.forget(request_id)
            self._rows.release(request_id)
            self.ended.append(self._requests.pop(request_id))

    def _phase(self, name: str) -> None:
        if self._ledger is not None:
            self._ledger.phase(name, self.steps)

    # What a trial brings home ------------------------------------------------------------------------------

    def routed_tokens(self) -> list[int]:
        """Tokens that each expert got on all ranks, all layers together; empty without ``expert_stats``."""
        return self._forward.routed_tokens() if self._features.stats else []

    def latency_us(self) -> Mapping[str, list[float]]:
        """Microseconds: host time of each copy per path, and whole steps."""
        return {path: entry.host_us for path, entry in self.transfers.paths.items()} | dict(self.step_us)


def _wrong(witness: CopyWitness) -> dict[str, Any]:
    """An entry for the decisions: the copies that were found to have brought something else, if there are any."""
    wrong = [one.to_json() for one in witness.settle()]
    return {"copies": wrong} if wrong else {}
