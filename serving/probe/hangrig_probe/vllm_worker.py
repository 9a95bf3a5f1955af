"""vLLM's workers: their rank, their steps, and the collectives that go past torch.distributed.

A worker waits for its engine core in ``dequeue``: parked, unless a thread of it still has an output to deliver.
One call of ``execute_model`` is one step, an empty one too. Not here: what the engine core decides.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from zlib import crc32

from .collectives import Describe, Kind, recorded
from .recorder import Place

if TYPE_CHECKING:
    from .probe import Probe

WRAPPER = "vllm.v1.worker.worker_base:WorkerWrapperBase."
WORKER = "vllm.v1.worker.gpu_worker:Worker."
PROCESS = "vllm.v1.executor.multiproc_executor:WorkerProc."
COORDINATOR = "vllm.distributed.parallel_state:GroupCoordinator."
SHARED_MEMORY = "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed."
"""On a CPU, ``tp`` and ``pp`` exchange tensors through shared memory."""
CUDA = "vllm.distributed.device_communicators.cuda_communicator:CudaCommunicator."

SHARED_MEMORY_CALLS = {
    "all_reduce": ("all_reduce", 0),
    "gather": ("gather", 0),
    "all_gather_into_tensor": ("all_gather_into_tensor", 1),
    "send_tensor_dict": ("send", None),
    "recv_tensor_dict": ("send", None),
}
"""Method: what torch.distributed calls the same, and which argument is the tensor."""
CUDA_CALLS = {
    "all_reduce": ("all_reduce", 0),
    "all_gather": ("all_gather_into_tensor", 0),
    "all_gatherv": ("all_gatherv", None),
    "reduce_scatter": ("reduce_scatter_tensor", 0),
    "reduce_scatterv": ("reduce_scatterv", None),
    "broadcast": ("broadcast", 0),
    "dispatch": ("dispatch", None),
    "combine": ("combine", None),
}


class WorkerHooks:
    """Hooks of one worker process."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._lock = threading.Lock()
        self._undelivered = 0
        """Outputs that the engine core has not been given yet."""
        self._waiting = False
        self._worked = False

    def install(self) -> None:
        wrap = partial(self._probe.patches.wrap, role="rank")
        wrap(WRAPPER + "init_device", before=self.take_seat)
        wrap(WRAPPER + "execute_model", around=self.execute_model)
        wrap(WORKER + "execute_dummy_batch", around=self.dummy)
        wrap(WORKER + "sample_tokens", around=self.sample_tokens)
        wrap(COORDINATOR + "__init__", around=self.coordinator)
        # With one worker the engine core is the rank, and these are not there.
        wrap = partial(self._probe.patches.wrap, role="worker process")
        wrap(PROCESS + "worker_busy_loop", before=self.loop)
        wrap(PROCESS + "_execute_worker_rpc", around=self.rpc)
        wrap(PROCESS + "handle_output", before=self.owed)
        wrap(PROCESS + "enqueue_output", after=self.delivered)
        for calls, target in ((SHARED_MEMORY_CALLS, SHARED_MEMORY), (CUDA_CALLS, CUDA)):
            if (target == CUDA) == (self._probe.config.device == "cuda"):
                for method, (operation, tensor_at) in calls.items():
                    self._record(target + method, operation, tensor_at)

    # --- the seat

    def take_seat(self, wrapper: Any, *_: Any, **__: Any) -> None:
        parallel = wrapper.vllm_config.parallel_config
        replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        device = self._probe.config.device
        self._probe.take_seat(
            replica * parallel.world_size + wrapper.global_rank,
            role="rank",
            device=device if device == "cpu" else f"{device}:{wrapper.worker.local_rank}",
            dp_rank=replica,
            tp_rank=wrapper.global_rank % parallel.tensor_parallel_size,
        )

    def coordinator(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """A group of the engine is made: what it makes inside gets its name."""
        recorder = self._probe.recorder
        name = kwargs.get("group_name", args[6] if len(args) > 6 else None)
        recorder.naming(str(name or "anonymous"))
        try:
            return call(*args, **kwargs)
        finally:
            recorder.naming(None)

    # --- waiting for the engine core

    def loop(self, *_: Any, **__: Any) -> None:
        self._wait()

    def rpc(self, call: Any, process: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            self._waiting = False
        if request[0] == "execute_model":
            self._probe.faults.blocks(self._received)
        elif request[0] != "sample_tokens":
            self._probe.recorder.phase("process" if self._worked else "startup")
        try:
            return call(process, request, *args, **kwargs)
        finally:
            self._wait()

    def _received(self) -> None:
        self._probe.recorder.phase("recv")

    def owed(self, *_: Any, **__: Any) -> None:
        with self._lock:
            self._undelivered += 1

    def delivered(self, *_: Any, **__: Any) -> None:
        with self._lock:
            self._undelivered = max(0, self._undelivered - 1)
            if self._waiting and not self._undelivered:
                self._probe.recorder.phase("parked")

    def _wait(self) -> None:
        with self._lock:
            self._waiting = True
            self._probe.recorder.phase("process" if self._undelivered else "parked")

    # --- steps

    def execute_model(self, call: Any, wrapper: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        decision = describe(scheduled)
        return self._step(decision, lambda: call(wrapper, scheduled, *args, **kwargs))

    def dummy(self, call: Any, *args: Any, **kwargs: Any) -> Any:
        """A step without a request, because another replica has one."""
        return self._step({"mode": "idle", "batch": 0, "own_tokens": [0]}, lambda: call(*args, **kwargs))

    def _step(self, decision: dict[str, Any], call: Callable[[], Any]) -> Any:
        probe = self._probe
        self._worked = True
        probe.recorder.new_step()
        probe.recorder.decision(decision)
        probe.recorder.phase("forward")
        try:
            probe.faults.at_step(decision["mode"])
            result = call()
        except Exception as error:
            probe.status.exception(error)
            raise
        probe.streams.beat(decision["mode"])
        return result

    def sample_tokens(self, call: Any, worker: Any, *args: Any, **kwargs: Any) -> Any:
        probe = self._probe
        probe.recorder.phase("process")
        try:
            result = call(worker, *args, **kwargs)
        except Exception as error:
            probe.status.exception(error)
            raise
        if probe.config.device != "cpu":
            stream = getattr(worker.model_runner, "async_output_copy_stream", None)
            if stream is not None:
                probe.streams.watch("copy", stream)
            probe.streams.beat("sample")
        return result

    # --- collectives past torch.distributed

    def _record(self, target: str, operation: str, tensor_at: int | None) -> None:
        probe = self._probe
        recorder = probe.recorder
        describe_tensor = Describe(-1 if tensor_at is None else tensor_at + 1)

        def place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Place | None:
            owner = args[0]
            return recorder.place(getattr(owner, "communicator", owner).device_group)

        kind = Kind(target, operation, place, describe_tensor, skipped=describe_tensor.tensor)
        probe.patches.replace(
            target,
            lambda original: recorded(original, kind, recorder, probe.faults, probe.status),
            role="worker process",
        )


def describe(scheduled: Any) -> dict[str, Any]:
    """The decision that a SchedulerOutput is."""
    tokens = scheduled.num_scheduled_tokens
    total = scheduled.total_num_scheduled_tokens
    if not tokens:
        mode = "idle"
    elif total == len(tokens) and not scheduled.scheduled_new_reqs:
        mode = "decode"  # One token each; of a prompt's last one it is not said.
    else:
        prefill = _prefilling(scheduled)
        mode = "decode" if not prefill else "prefill" if prefill == len(tokens) else "mixed"
    return {
        "mode": mode,
        "batch": len(tokens),
        "own_tokens": [total],
        "requests": crc_of(tokens),
        "retracted": sorted(scheduled.preempted_req_ids or ()),
        "finished": sorted(scheduled.finished_req_ids),
    }


def _prefilling(scheduled: Any) -> int:
    """How many of its requests compute tokens of their prompt, or compute them again."""
    cached = scheduled.scheduled_cached_reqs
    drafts = scheduled.scheduled_spec_decode_tokens
    begun = {one.req_id for one in scheduled.scheduled_new_reqs}
    begun.update(
        name for name, count in zip(cached.req_ids, cached.num_output_tokens, strict=False) if not count
    )
    return sum(
        name in begun or count > 1 + len(drafts.get(name, ()))
        for name, count in scheduled.num_scheduled_tokens.items()
    )


def crc_of(names: Iterable[str]) -> int:
    """Of the sorted request ids: equal on ranks that run the same batch."""
    return crc32("\n".join(sorted(names)).encode())
