"""A scheduler that follows a script: one line a pass of its loop.

A line is None (no batch), or a table: ``mode``, ``rids``, and perhaps ``tokens`` (of all ranks), ``retract``,
``refuse`` (request ids that go before the batch is made), ``finish``, ``abort`` (that end with it), ``idle`` (so
many passes without a batch).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from sglang.srt.distributed.parallel_state import GroupCoordinator
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, ForwardMode, Req, ScheduleBatch
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import VERSION, publish
from sglang.srt.utils.common import is_pin_memory_available


@dataclass
class AbortReq:
    rid: str
    abort_message: str | None = None


class Scheduler:
    waiting_queue: list[Req]

    if VERSION == "0.5.20":

        def __init__(
            self,
            server_args: dict[str, Any],
            port_args: str,
            gpu_id: int,
            tp_rank: int,
            moe_ep_rank: int,
            pp_rank: int,
            attn_cp_rank: int,
            moe_dp_rank: int,
            dp_rank: int | None,
        ) -> None:
            self._build(server_args, port_args, tp_rank)

    else:

        def __init__(self, server_args: dict[str, Any], port_args: str) -> None:
            self._build(server_args, port_args, int(os.environ["RANK"]))

    def _build(self, server_args: dict[str, Any], port_args: str, rank: int) -> None:
        torch.distributed.init_process_group(
            "gloo", init_method=port_args, rank=rank, world_size=2, timeout=timedelta(seconds=60)
        )
        self.rank = rank
        self.tp = GroupCoordinator([[0, 1]], rank, group_name="tp")
        self.attention = GroupCoordinator([[0], [1]], rank, group_name="attention_tp")
        self.script = server_args["script"][rank]
        self.requests: dict[str, Req] = {}
        self.waiting_queue = []
        self.running_batch = ScheduleBatch(ForwardMode.DECODE, [])
        self.last_batch: ScheduleBatch | None = None
        self.heard: list[AbortReq] = []

    def run_event_loop(self) -> None:
        for line in self.script:
            for _ in range((line or {}).get("idle", 1)):
                self.step(line)

    def step(self, line: dict[str, Any] | None) -> None:
        self.line = line or {}
        self.ingest_requests()
        batch = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
        if batch:
            self.process_batch_result(batch, self.run_batch(batch))
        else:
            self.on_idle()
        self.last_batch = batch

    def ingest_requests(self) -> list[Any]:
        return []

    def get_next_batch_to_run(
        self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None
    ) -> ScheduleBatch | None:
        for rid in self.line.get("retract", ()):
            self.requests[rid].reset_for_retract()
        for rid in self.line.get("refuse", ()):
            _make_abort_req(Req(rid))
        if "mode" not in self.line:
            return None
        requests = [self.requests.setdefault(rid, Req(rid)) for rid in self.line["rids"]]
        self.running_batch = ScheduleBatch(
            ForwardMode[self.line["mode"]], requests, 7 * len(requests), self.line.get("tokens")
        )
        is_pin_memory_available("cuda")
        return self.running_batch

    def run_batch(self, batch: ScheduleBatch) -> torch.Tensor:
        return self.attention.all_reduce(self.tp.all_reduce(torch.ones(3)))

    def process_batch_result(self, batch: ScheduleBatch, result: torch.Tensor) -> None:
        for request in batch.reqs:
            request.output_ids.append(int(result[0]))
            if request.rid in self.line.get("finish", ()):
                request.finished_reason = FINISH_LENGTH()
            elif request.rid in self.line.get("abort", ()) or request.to_finish is not None:
                request.finished_reason = FINISH_ABORT()

    def on_idle(self) -> None:
        pass

    def abort_request(self, request: AbortReq) -> None:
        self.heard.append(request)
        self.requests[request.rid].to_finish = FINISH_ABORT()


def _make_abort_req(req: Req) -> AbortReq:
    return AbortReq(req.rid)


def run_scheduler_process(script: str, meet: str, rank: int, dp_rank: int | None, attention: bool) -> None:
    """Says on standard output what it heard and how it ended."""
    load_plugins()
    os.environ["RANK"] = str(rank)
    publish(rank, dp_rank, attention)
    arguments: list[Any] = [{"script": json.loads(script)}, meet]
    if VERSION == "0.5.20":
        arguments += [0, rank, 0, 0, 0, 0, dp_rank]
    scheduler = Scheduler(*arguments)
    try:
        scheduler.run_event_loop()
        said = "done"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    counted = {rid: request.retraction_count for rid, request in scheduler.requests.items()}
    print(json.dumps({"said": said, "heard": [one.rid for one in scheduler.heard], "retractions": counted}))
    torch.distributed.destroy_process_group()  # Without it torch aborts now and then at the end of a process.
