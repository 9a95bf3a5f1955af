"""What processes of engines do by their stacks: recorded dumps (README.md beside them), then single rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.stack_places import Doing, doing
from harness.stacks import Frame, ProcessStacks, ThreadStack
from harness.stacks_parse import parse_pyspy_json

CAPTURES = Path(__file__).parent / "captures"
WATCHED = Path(__file__).parent / "watch_captures"
SITE = "/venv/lib/python3.11/site-packages"
LIB = "/usr/lib/python3.11"
TORCH = f"{SITE}/torch/distributed/distributed_c10d.py"
DP_ATTENTION = f"{SITE}/sglang/srt/managers/scheduler_components/dp_attn.py"
SCHEDULER = f"{SITE}/sglang/srt/managers/scheduler.py"


def load(name: str) -> ProcessStacks:
    return parse_pyspy_json((CAPTURES / name).read_text(), pid=1, rank=None, native=False)


def stack(*frames: tuple[str, str], active: bool = False) -> ProcessStacks:
    """A process whose host thread has these frames, innermost first; files of Python's library as ``lib:...``."""
    made = tuple(
        Frame(name, file.replace("lib:", f"{LIB}/").replace("site:", f"{SITE}/"), 7) for name, file in frames
    )
    return ProcessStacks(1, None, "py-spy", False, (ThreadStack(1, "MainThread", active, False, made),))


# --- recorded


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("sglang-dp2-healthy/launch_server", "idle", "waits for requests in _setup_and_run_http_server"),
        (
            "sglang-dp2-healthy/data_parallel_controller",
            "idle",
            "requests in DataParallelController.event_loop",
        ),
        ("sglang-dp2-healthy/detokenizer", "idle", "requests in DetokenizerManager.event_loop"),
        (
            "sglang-dp2-healthy/scheduler_DP0_TP0",
            "collective",
            "in all_reduce, called by all_reduce_to_dp_local (sglang/srt/layers/layer_boundary/ops.py:358) for "
            "DeepseekV2DecoderLayer.forward",
        ),
        (
            "sglang-dp2-healthy/scheduler_DP1_TP1",
            "collective",
            "called by _dp_gather_via_all_reduce (sglang/srt/layers/dp_attention.py:713) for LogitsProcessor.",
        ),
        # The poll was seen in the making of the exception that ends it.
        (
            "sglang-dp2-scheduler1-stopped/data_parallel_controller",
            "idle",
            "DataParallelController.event_loop",
        ),
        (
            "sglang-dp2-scheduler1-stopped/scheduler_DP0_TP0",
            "collective",
            "in all_reduce, called by _dp_gather_via_all_reduce (sglang/srt/layers/dp_attention.py:713) for "
            "DeepseekV2DecoderLayer.forward",
        ),
        (
            "sglang-dp2-scheduler1-stopped/scheduler_DP1_TP1",
            "compute",
            "at work in DeepseekMLAForwardMixin.forward_absorb_core",
        ),
        ("vllm-tp2-healthy/api-server", "idle", "waits for requests in main"),
        (
            "vllm-tp2-healthy/engine-core",
            "waits-for-peer",
            "waits for the workers' answer in MultiprocExecutor",
        ),
        (
            "vllm-tp2-healthy/worker-tp0",
            "collective",
            "in all_gather, called by LogitsProcessor._gather_logits",
        ),
        (
            "vllm-tp2-healthy/worker-tp1",
            "collective",
            "in all_reduce, called by VocabParallelEmbedding.forward",
        ),
        ("vllm-tp2-worker1-stopped/engine-core", "waits-for-peer", "the workers' answer"),
        ("vllm-tp2-worker1-stopped/worker-tp0", "collective", "in all_reduce, called by VocabParallel"),
        (
            "vllm-tp2-worker1-stopped/worker-tp1",
            "compute",
            "at work in get_masked_input_and_mask (vllm/model_executor/layers/vocab_parallel_embedding.py:176) for "
            "VocabParallelEmbedding.forward",
        ),
    ],
)
def test_recorded_dumps(name: str, kind: str, words: str) -> None:
    found = doing(load(f"{name}.json"))
    assert found.kind == kind
    assert words in found.words()
    assert (found.left, found.between) == (None, False)


@pytest.mark.parametrize(
    ("name", "kind", "between", "words"),
    [
        ("sglang-dp2-idle/rank0", "collective", True, "in all_gather_single, called by exchange_sync_rows"),
        ("sglang-dp2-idle/rank1", "collective", True, "in all_gather_single, called by exchange_sync_rows"),
        ("sglang-dp2-idle/controller", "idle", False, "requests in DataParallelController.event_loop"),
        ("sglang-dp2-idle/detokenizer", "idle", False, "requests in DetokenizerManager.event_loop"),
        ("sglang-dp2-idle/server", "idle", False, "waits for requests"),
        ("vllm-tp2-between-steps/rank0", "idle", False, "its next step in WorkerProc.worker_busy_loop"),
        ("vllm-tp2-between-steps/rank1", "idle", False, "its next step in WorkerProc.worker_busy_loop"),
        ("vllm-tp2-between-steps/engine_core", "waits-for-peer", False, "the workers' answer"),
        ("vllm-tp2-between-steps/server", "idle", False, "waits for requests"),
    ],
)
def test_dumps_of_a_watch(name: str, kind: str, between: bool, words: str) -> None:
    stored = json.loads((WATCHED / f"{name}.json").read_text())
    found = doing(ProcessStacks.from_json(stored))
    assert (found.kind, found.between) == (kind, between)
    assert words in found.words()


def test_two_dumps_tell_whether_the_process_left_its_place() -> None:
    healthy, stopped = (
        load(f"sglang-dp2-{state}/scheduler_DP1_TP1.json") for state in ("healthy", "scheduler1-stopped")
    )
    assert doing(stopped, healthy).left is True
    assert doing(stopped, stopped).left is False


# --- waits by design, and waits for others


IDLE_WORKER = (
    ("SpinCondition.wait", "site:vllm/distributed/device_communicators/shm_broadcast.py"),
    ("MessageQueue.acquire_read", "site:vllm/distributed/device_communicators/shm_broadcast.py"),
    ("_GeneratorContextManager.__enter__", "lib:contextlib.py"),
    ("MessageQueue.dequeue", "site:vllm/distributed/device_communicators/shm_broadcast.py"),
    ("WorkerProc.worker_busy_loop", "site:vllm/v1/executor/multiproc_executor.py"),
    ("WorkerProc.worker_main", "site:vllm/v1/executor/multiproc_executor.py"),
)
IDLE_CORE = (
    ("Condition.wait", "lib:threading.py"),
    ("Queue.get", "lib:queue.py"),
    ("EngineCoreProc._process_input_queue", "site:vllm/v1/engine/core.py"),
    ("EngineCoreProc.run_busy_loop", "site:vllm/v1/engine/core.py"),
)
EVENT_LOOP = (
    ("EpollSelector.select", "lib:selectors.py"),
    ("BaseEventLoop._run_once", "lib:asyncio/base_events.py"),
    ("BaseEventLoop.run_forever", "lib:asyncio/base_events.py"),
    ("Runner.run", "lib:asyncio/runners.py"),
    ("serve", "/srv/serve.py"),
)


@pytest.mark.parametrize(
    ("frames", "kind", "waits_for"),
    [
        (IDLE_WORKER, "idle", "its next step"),
        (IDLE_CORE, "idle", "requests"),
        (EVENT_LOOP, "idle", "requests"),
        (
            (("Poller.poll", "site:zmq/sugar/poll.py"), ("IdleSleeper.maybe_sleep", SCHEDULER)),
            "idle",
            "requests",
        ),
        ((("Scheduler.event_loop_overlap", SCHEDULER),), "idle", "requests"),
        ((("check_tree_cache", "site:sglang/srt/mem_cache/radix_cache.py"), ("Scheduler.on_idle", SCHEDULER)),
         "idle", "requests"),
        ((("BaseProcess.join", "lib:multiprocessing/process.py"),
          ("run_data_parallel_controller_process", "site:sglang/srt/managers/data_parallel_controller.py")),
         "idle", "its children to end"),
        ((("Connection.recv", "lib:multiprocessing/connection.py"),
          ("run_scheduler_process_with_init_pipe", "site:sglang/srt/managers/data_parallel_controller.py")),
         "waits-for-peer", "its controller"),
        ((("Future.result", "lib:concurrent/futures/_base.py"), ("ask", "/srv/a.py")),
         "waits-for-peer", "an answer"),
        ((("Popen.wait", "lib:subprocess.py"), ("main", "/srv/a.py")), "waits-for-peer", "a child process"),
        ((("Thread.join", "lib:threading.py"), ("main", "/srv/a.py")), "waits-for-peer", "a thread of its own"),
        ((("Socket.recv", "site:zmq/sugar/socket.py"), ("main", "/srv/a.py")), "waits-for-peer", "a message"),
        ((("Event.synchronize", "site:torch/cuda/streams.py"), ("Scheduler.process_batch_result", SCHEDULER)),
         "device", "its device"),
        ((("Condition.wait", "lib:threading.py"), ("Event.wait", "lib:threading.py"), ("step", "/srv/a.py")),
         "lock", "a lock or an event"),
        ((("Queue.put", "lib:queue.py"), ("step", "/srv/a.py")), "io", "room to send"),
        ((("StreamHandler.flush", "lib:logging/__init__.py"), ("Logger.info", "lib:logging/__init__.py"),
          ("DataParallelController.event_loop", "site:sglang/srt/managers/data_parallel_controller.py")),
         "io", "its output"),
    ],
)  # fmt: skip
def test_waits(frames: tuple[tuple[str, str], ...], kind: str, waits_for: str) -> None:
    found = doing(stack(*frames))
    assert (found.kind, found.waits_for) == (kind, waits_for)


def test_a_callback_in_an_event_loop_is_work() -> None:
    json_call = (("JSONEncoder.encode", "lib:json/encoder.py"), ("Handle._run", "lib:asyncio/events.py"))
    assert doing(stack(*json_call, *EVENT_LOOP[1:])).kind == "compute"
    own = doing(stack(("handler", "/srv/app.py"), ("Handle._run", "lib:asyncio/events.py"), *EVENT_LOOP[1:]))
    assert (own.kind, own.site) == ("unknown", Frame("handler", "/srv/app.py", 7))


def test_a_busy_loop_that_is_no_engine_s_is_not_idle() -> None:
    assert doing(stack(("event_loop", "/srv/a.py"))).kind == "unknown"
    assert doing(stack(("event_loop", "/srv/a.py"), active=True)).kind == "compute"


# --- collectives


def test_the_operation_is_torch_s_and_the_caller_the_engine_s() -> None:
    found = doing(
        stack(
            ("all_gather_into_tensor", TORCH),
            ("_exception_logger.<locals>.wrapper", f"{SITE}/torch/distributed/c10d_logger.py"),
            ("GroupCoordinator.all_gather_into_tensor", f"{SITE}/sglang/srt/distributed/parallel_state.py"),
            ("gather", f"{SITE}/sglang/srt/layers/dp_attention.py"),
            ("Module._call_impl", f"{SITE}/torch/nn/modules/module.py"),
            ("Mixture.forward", f"{SITE}/sglang/srt/models/deepseek_v2.py"),
            ("Model.forward", f"{SITE}/sglang/srt/models/deepseek_v2.py"),
        )
    )
    assert (found.kind, found.operation) == ("collective", "all_gather_into_tensor")
    assert found.frame is not None and found.frame.filename == TORCH
    assert found.site is not None and found.site.name == "gather"
    assert found.layer is not None and found.layer.name == "Mixture.forward"


@pytest.mark.parametrize(
    ("frames", "operation", "between"),
    [
        ((("broadcast", TORCH), ("broadcast_pyobj", f"{SITE}/sglang/srt/utils/common.py"),
          ("SchedulerRequestReceiver.recv_requests", f"{SITE}/sglang/srt/managers/request_receiver.py")),
         "broadcast", True),
        ((("all_gather_into_tensor", TORCH), ("MLPSyncBatchInfo.all_gather", DP_ATTENTION),
          ("prepare_mlp_sync_batch_raw", DP_ATTENTION)), "all_gather_into_tensor", True),
        ((("barrier", TORCH), ("train", "train.py")), "barrier", False),
        ((("init_process_group", TORCH), ("start", "train.py")), "init_process_group", False),
        ((("PyNcclCommunicator.all_reduce", f"{SITE}/vllm/distributed/device_communicators/pynccl.py"),
          ("Layer.forward", f"{SITE}/vllm/model_executor/layers/linear.py")), "all_reduce", False),
        ((("futex_wait", "libc.so.6"), ("gloo::transport::uv::UnboundBuffer::waitRecv", "libtorch_cpu.so"),
          ("step", "train.py")), "a collective", False),
        ((("HcclAllReduce", "libhccl.so"), ("step", "train.py")), "allreduce", False),
    ],
)  # fmt: skip
def test_collectives(frames: tuple[tuple[str, str], ...], operation: str, between: bool) -> None:
    found = doing(stack(*frames))
    assert (found.kind, found.operation, found.between) == ("collective", operation, between)


def test_the_shared_memory_queue_beside_the_communicators_is_no_collective() -> None:
    assert doing(stack(*IDLE_WORKER)).kind == "idle"


def test_the_probe_s_own_frames_are_plumbing_but_its_faults_are_not() -> None:
    hook = ("wrapped", "/scratch/probe/hangrig_probe/patching.py")
    through = doing(stack(("all_reduce", TORCH), hook, ("step", "train.py")))
    assert through.site == Frame("step", "train.py", 7)
    blocked = doing(
        stack(("blocks", "/scratch/probe/hangrig_probe/faults.py"), hook, ("step", "x.py")), kernel="futex"
    )
    assert (blocked.kind, blocked.site) == (
        "lock",
        Frame("blocks", "/scratch/probe/hangrig_probe/faults.py", 7),
    )


# --- what only C or the kernel can say


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("futex", "lock"), ("clock_nanosleep", "sleep"), ("write", "io"), ("read", "io"),
        ("recvfrom", "waits-for-peer"), ("running", "compute"), ("ioctl", "unknown"), (None, "unknown"),
    ],
)  # fmt: skip
def test_the_kernel_s_word_for_a_call_into_c(kernel: str | None, kind: str) -> None:
    assert doing(stack(("take", "/srv/a.py"), ("main", "/srv/a.py")), kernel=kernel).kind == kind


def test_threads_of_a_kernel_in_a_forward_are_no_lock() -> None:
    frames = (("linear", f"{SITE}/sglang/srt/layers/linear.py"), ("Scheduler.run_batch", SCHEDULER))
    assert doing(stack(*frames), kernel="futex").kind == "compute"
    assert doing(stack(*frames), kernel="clock_nanosleep").kind == "sleep"


@pytest.mark.parametrize(
    ("native", "kind"),
    [
        ("clock_nanosleep", "sleep"), ("__futex_abstimed_wait_common", "lock"), ("__GI___libc_write", "io"),
        ("__libc_recv", "waits-for-peer"), ("cudaStreamSynchronize", "device"),
        ("aclrtSynchronizeStream", "device"),
        ("gomp_team_barrier_wait_end", "compute"), ("at::native::add", "compute"), ("0x7f00", "unknown"),
    ],
)  # fmt: skip
def test_native_frames(native: str, kind: str) -> None:
    assert doing(stack((native, "libsomething.so.1"), ("take", "/srv/a.py"))).kind == kind


def test_no_frames_say_nothing() -> None:
    empty = ProcessStacks(1, None, "py-spy", False, ())
    assert doing(empty) == Doing("unknown")
    assert doing(stack()).words() == "stands"


def test_a_dump_without_a_main_thread_is_read_by_its_first_thread() -> None:
    frames = (Frame("barrier", TORCH, 1), Frame("run", "train.py", 2))
    threads = (ThreadStack(5, "Thread-1", False, False, ()), ThreadStack(6, "Thread-2", False, False, frames))
    assert doing(ProcessStacks(1, 0, "py-spy", False, threads)).operation == "barrier"
