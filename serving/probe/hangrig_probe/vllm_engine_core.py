"""vLLM's engine core: its phases, and what it schedules.

``parked`` while it has no request; ``recv`` where it takes up work, ``schedule``, ``forward`` from the moment a
batch goes to the workers until its output is back, ``process``, and ``agree`` where the replicas of a data
parallel engine ask each other who has work. Where the engine core is the rank, the worker's hooks count the
steps.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .vllm_worker import describe

if TYPE_CHECKING:
    from .probe import Probe

EXECUTOR = "vllm.v1.executor.abstract:Executor."
CORE = "vllm.v1.engine.core:EngineCore."
CORE_PROCESS = "vllm.v1.engine.core:EngineCoreProc."
REPLICA = "vllm.v1.engine.core:DPEngineCoreProc."
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler."
ONE_PROCESS = "UniProcExecutor"


class EngineCoreHooks:
    """Hooks of one engine core process."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._tokens_out = 0
        self._aborted: list[str] = []

    def install(self) -> None:
        wrap = partial(self._probe.patches.wrap, role="engine_core")
        wrap(EXECUTOR + "__init__", before=self.take_seat)
        wrap(CORE_PROCESS + "run_busy_loop", around=self.loop)
        wrap(REPLICA + "run_busy_loop", around=self.loop)
        wrap(REPLICA + "_has_global_unfinished_reqs", before=self.agree)
        wrap(CORE_PROCESS + "_process_input_queue", before=self.receive)
        wrap(CORE_PROCESS + "_handle_client_request", before=self.request)
        wrap(CORE + "step_with_batch_queue", before=self.step)
        wrap(CORE + "execute_dummy_batch", before=self.dummy)
        wrap(SCHEDULER + "schedule", before=self.schedule, after=self.scheduled)
        wrap(SCHEDULER + "finish_requests", before=self.finish)
        wrap(SCHEDULER + "update_from_output", before=self.process, after=self.processed)

    def take_seat(self, executor: Any, vllm_config: Any, *_: Any, **__: Any) -> None:
        if any(kind.__name__ == ONE_PROCESS for kind in type(executor).__mro__):
            return  # No worker processes: this one will be the rank.
        parallel = vllm_config.parallel_config
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        self._probe.take_seat(
            f"engine_core-{replica}" if replica else "engine_core", role="engine_core", dp_rank=replica
        )

    @property
    def _counts_steps(self) -> bool:
        return not isinstance(self._probe.seat, int)

    def loop(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._probe.status.exception(error)
            raise

    def receive(self, core: Any, *_: Any, **__: Any) -> None:
        self._probe.recorder.phase("recv")
        self._probe.faults.blocks()
        if not core.has_work():
            self._probe.recorder.phase("parked")

    def request(self, *_: Any, **__: Any) -> None:
        if self._probe.recorder.phase_name == "parked":
            self._probe.recorder.phase("recv")

    def schedule(self, *_: Any, **__: Any) -> None:
        self._probe.recorder.phase("schedule")

    def scheduled(self, output: Any, scheduler: Any, *_: Any, **__: Any) -> None:
        recorder = self._probe.recorder
        if self._counts_steps:
            running, waiting = scheduler.get_request_counts()
            recorder.new_step()
            aborted, self._aborted = self._aborted, []
            recorder.decision(
                {
                    **describe(output),
                    "running": running,
                    "waiting": waiting,
                    "tokens_out": self._tokens_out,
                    "aborted": aborted,
                }
            )
        recorder.phase("forward")

    def step(self, core: Any, *_: Any, **__: Any) -> None:
        if not core.scheduler.has_requests():
            self._probe.recorder.phase("forward")  # For the output of a batch from before.

    def dummy(self, *_: Any, **__: Any) -> None:
        recorder = self._probe.recorder
        if self._counts_steps:
            recorder.new_step()
            recorder.decision({"mode": "idle", "batch": 0, "own_tokens": [0], "tokens_out": self._tokens_out})
        recorder.phase("forward")

    def process(self, *_: Any, **__: Any) -> None:
        self._probe.recorder.phase("process")

    def processed(self, outputs: Any, *_: Any, **__: Any) -> None:
        self._tokens_out += sum(
            len(output.new_token_ids) for each in outputs.values() for output in each.outputs
        )

    def finish(self, scheduler: Any, names: Any, status: Any, *_: Any, **__: Any) -> None:
        if getattr(status, "name", "") == "FINISHED_ABORTED":
            known = scheduler.requests if names is None else [names] if isinstance(names, str) else names
            self._aborted += [str(name) for name in known if name in scheduler.requests]

    def agree(self, *_: Any, **__: Any) -> None:
        self._probe.recorder.phase("agree")
