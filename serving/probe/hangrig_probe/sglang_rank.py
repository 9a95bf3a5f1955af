"""The probe in a scheduler process of SGLang: phases, steps and decisions of its event loop, and the faults there.

Here: what the event loop calls, for every loop that SGLang has (normal, overlapped, pipelined, disaggregated).
Not here: the groups (``sglang_groups.py``), and how a record is written or a fault found due (the probe's core).

A *step* is one batch run, the idle batches of attention data parallelism included, so its number is the same on
all ranks of a world. A loop without a batch is no step: it spins thousands of times a second, and from the second
one on it only says that it is alive. Of what happened since the last decision, the next one tells: it is written
before its forward pass, so that a pass that never ends has its decision on file.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

from .sglang_groups import GroupHooks
from .sglang_others import left_by

if TYPE_CHECKING:
    from .probe import Probe

SCHEDULER = "sglang.srt.managers.scheduler"
_S = f"{SCHEDULER}:Scheduler."
MODES = {
    "EXTEND": "prefill",
    "SPLIT_PREFILL": "prefill",
    "DLLM_EXTEND": "prefill",
    "PREBUILT": "prefill",
    "DECODE": "decode",
    "TARGET_VERIFY": "decode",
    "DRAFT_EXTEND_V2": "decode",
    "MIXED": "mixed",
    "IDLE": "idle",
}
"""What a decision calls the engine's ForwardMode. One that is not here is told by its own name."""
TOKENS_TO_GO = 8
"""A request that the clock fault picks has so many tokens left at least: ending a step early would be no fault."""


class RankHooks:
    """One scheduler's hooks and what they carry from one to the next. Main thread only."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._recorder = probe.recorder
        self._faults = probe.faults
        self._idle = False
        self._overdue: partial[str | None] | None = None
        self._open: list[Any] = []
        self._tokens_before = 0
        self._tokens_out = 0
        self._retracted: list[str] = []
        self._finished: list[str] = []
        self._aborted: list[str] = []

    def install(self) -> None:
        wrap = self._probe.patches.wrap
        wrap(_S + "__init__", around=self.build)
        wrap(_S + "run_event_loop", around=self.loop)
        wrap(_S + "ingest_requests", before=self.receive, after=self.received)
        wrap(_S + "get_next_batch_to_run", before=self.schedule)
        wrap(_S + "get_next_disagg_prefill_batch_to_run", before=self.schedule)
        wrap(_S + "get_next_disagg_decode_batch_to_run", before=self.schedule)
        wrap(_S + "run_batch", before=self.run, after=self.ran)
        wrap(_S + "process_batch_result", before=self.process, after=self.processed)
        wrap(_S + "on_idle", before=self.idle)
        wrap(f"{SCHEDULER}:_make_abort_req", after=self.turned_away)
        wrap("sglang.srt.managers.schedule_batch:Req.reset_for_retract", after=self.retracted)
        GroupHooks(self._probe).install()

    # --- the life of the process

    def build(self, call: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler is being built: from here on this process is a rank."""
        self._take_seat(scheduler, args, kwargs)
        try:
            return call(scheduler, *args, **kwargs)
        except Exception as error:
            left_by(self._probe, error)
            raise

    def _take_seat(self, scheduler: Any, args: Any, kwargs: Any) -> None:
        """From the constructor's arguments (0.5.20), or from what the process was published with (later ones)."""
        context = importlib.import_module("sglang.srt.runtime_context")
        parallel = context.get_parallel()
        given = inspect.signature(type(scheduler).__init__).bind(scheduler, *args, **kwargs).arguments
        if "tp_rank" in given:
            tp_rank, pp_rank, dp_rank = (given[name] for name in ("tp_rank", "pp_rank", "dp_rank"))
            replicated, gpu = not parallel.enable_dp_attention, given.get("gpu_id", 0)
        else:
            tp_rank, pp_rank, dp_rank = parallel.tp_rank, parallel.pp_rank, parallel.dp_rank
            replicated, gpu = not parallel.attn_dp_enabled, context.get_device().gpu_id
        # Replicas are worlds of their own, each counting its ranks from 0.
        before = dp_rank * parallel.tp_size * parallel.pp_size if replicated and dp_rank is not None else 0
        kind = self._probe.config.device
        self._probe.take_seat(
            before + pp_rank * parallel.tp_size + tp_rank,
            role="rank",
            device=kind if kind == "cpu" else f"{kind}:{gpu or 0}",
            dp_rank=dp_rank,
            tp_rank=tp_rank,
        )

    def loop(self, call: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._probe.config.device != "cpu" and getattr(scheduler, "enable_overlap", False):
            # Otherwise the forward pass runs on the loop's own stream.
            self._probe.streams.watch("compute", scheduler.forward_stream)
        try:
            return call(scheduler, *args, **kwargs)
        except Exception as error:
            left_by(self._probe, error)
            raise

    # --- one pass of the loop

    def receive(self, *_: Any, **__: Any) -> None:
        self._faults.blocks()
        if not self._idle:
            self._recorder.phase("recv")

    def received(self, _: Any, scheduler: Any, *__: Any, **___: Any) -> None:
        if self._overdue is None:
            self._overdue = partial(overdue, scheduler)
        request = self._faults.aborts(self._overdue)
        if request is not None:
            # The engine's own way out of a batch. It is safe when every rank is told, and only this one is.
            abort = sys.modules[SCHEDULER].AbortReq
            scheduler.abort_request(abort(rid=request, abort_message="Request running timeout reached."))

    def schedule(self, scheduler: Any, *_: Any, **__: Any) -> None:
        if self._idle and not scheduler.waiting_queue:
            return
        self._idle = False
        self._recorder.phase("schedule")

    def run(self, scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
        self._idle = False
        self._recorder.new_step()
        mode = MODES.get(batch.forward_mode.name) or batch.forward_mode.name.lower()
        requests = batch.reqs or []
        record: dict[str, object] = {"mode": mode, "batch": len(requests)}
        everyone = getattr(batch, "global_num_tokens", None)
        if everyone is not None and len(everyone) > 1:
            record["tokens"] = [int(n) for n in everyone]
        else:
            own = len(requests) if mode in ("decode", "idle") else batch.extend_num_tokens
            record["own_tokens"] = [int(own or 0)]
        record["waiting"] = len(scheduler.waiting_queue)
        record["requests"] = crc32("\n".join(sorted(r.rid for r in requests)).encode())
        record["tokens_out"] = self._tokens_out
        record["retracted"], self._retracted = self._retracted, []
        record["finished"], self._finished = self._finished, []
        record["aborted"], self._aborted = self._aborted, []
        self._recorder.decision(record)
        self._recorder.phase("forward")
        self._faults.at_step(mode)

    def ran(self, _: Any, __: Any, batch: Any, *___: Any, **____: Any) -> None:
        self._probe.streams.beat(batch.forward_mode.name.lower())

    def process(self, _: Any, batch: Any, *__: Any, **___: Any) -> None:
        self._recorder.phase("process")
        # A request that ended under overlap is in one more batch: only those still open can end now.
        self._open = [request for request in batch.reqs or () if request.finished_reason is None]
        self._tokens_before = sum(len(request.output_ids) for request in self._open)

    def processed(self, *_: Any, **__: Any) -> None:
        self._tokens_out += sum(len(request.output_ids) for request in self._open) - self._tokens_before
        for request in self._open:
            reason = request.finished_reason
            if reason is not None:
                ended = self._aborted if type(reason).__name__ == "FINISH_ABORT" else self._finished
                ended.append(request.rid)
        self._open = []

    def idle(self, *_: Any, **__: Any) -> None:
        self._idle = True
        self._recorder.phase("idle")

    # --- what becomes of requests outside of a batch

    def retracted(self, _: Any, request: Any, *__: Any) -> None:
        """Whatever path it came by: the engine's own counter of the request goes up here."""
        self._retracted.append(request.rid)

    def turned_away(self, _: Any, request: Any, *__: Any, **___: Any) -> None:
        """A request that ends without a result being processed: queued, refused, or alone too large."""
        self._aborted.append(request.rid)


def overdue(scheduler: Any) -> str | None:
    """The running request that has been at it longest, where there is another and it is not about to end."""
    running = [
        request
        for request in scheduler.running_batch.reqs or ()
        if request.finished_reason is None and request.to_finish is None
    ]
    late = [
        request
        for request in running
        if request.sampling_params.max_new_tokens - len(request.output_ids) >= TOKENS_TO_GO
    ]
    if len(running) < 2 or not late:
        return None
    return str(min(late, key=lambda request: request.time_stats.forward_entry_time).rid)
