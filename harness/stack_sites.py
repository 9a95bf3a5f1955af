"""The places of engines that a stack is read with: plumbing, collectives, waits, loops without work. Pure data.

Known are SGLang 0.5.20 to 0.5.23, vLLM 0.32, torch, zmq and Python's library. A place is a function, without its
module and class, and the end of its file's path. How a stack is read with them is ``stack_places.py``.
"""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

PlaceKind: TypeAlias = Literal[
    "idle", "collective", "device", "waits-for-peer", "compute", "lock", "sleep", "io", "unknown"
]
"""``idle``: waits for work, by design. ``device``: waits for its own device, where a collective of the device may
stand. ``waits-for-peer``: for another process's answer or message. ``compute``: at work. ``lock``, ``sleep`` and
``io``: held up in its own doing."""
Asked: TypeAlias = Literal[
    "loop",
    "message",
    "answer",
    "child",
    "thread",
    "lock",
    "room",
    "output",
    "network",
    "device",
    "data",
    "call",
]
"""What plumbing was asked for by the code that called it."""
Pattern: TypeAlias = re.Pattern[str]

LIBRARY = re.compile(
    r"""(?:^|/)lib/python3[.]\d+/(?!(?:site|dist)-packages/) | ^<frozen
      | ^(?:asyncio|concurrent|ctypes|http|importlib|json|logging|multiprocessing|urllib)/
      | ^(?:contextlib|copy|functools|pickle|queue|runpy|selectors|socket|ssl|subprocess|threading)[.]py$
      | (?:^|(?:^|/)(?:site|dist)-packages/)(?:
            torch | torch_npu | zmq | uvloop | numpy | ray | anyio | starlette | fastapi | uvicorn | requests
          | urllib3 | httpx | httpcore | triton | sgl_kernel | tqdm | psutil | typing_extensions
        )(?:/|[.]py)
      | (?:^|/)hangrig_probe/(?!faults[.]py)
      | (?:^|/)(?:harness/devices/\w+|harness/rank_pool|serving/(?:comm|board|transfer|symmetric))[.]py$
      | (?:^|/)vllm/_custom_ops[.]py$
      | (?:^|(?:^|/)(?:vllm|sglang/srt)/)distributed/
        (?:device_communicators/\w+|parallel_state|communication_op|utils)[.]py$
    """,
    re.VERBOSE,
)
"""Files that carry out a caller's wish. py-spy's text has them without the folders above their package."""
PLUMBING_CALLS: tuple[tuple[str, frozenset[str]], ...] = (
    ("io_struct.py", frozenset({"sock_recv", "sock_send"})),
    ("sglang/srt/utils/common.py", frozenset({"broadcast_pyobj"})),
    ("utils/common.py", frozenset({"broadcast_pyobj"})),
)
"""Functions that do, in files that do not."""

OPERATION = re.compile(
    r"""_?(?:all_reduce\w* | all_gather\w* | reduce_scatter\w* | all_to_all\w* | broadcast\w* | gather\w*
      | scatter\w* | reduce | barrier | monitored_barrier | send\w* | recv\w* | isend | irecv | batch_isend_irecv
      | new_group | split_group | init_process_group | destroy_process_group | store_based_barrier
      | new_process_group_helper | rendezvous\w* )$""",
    re.VERBOSE,
)
COLLECTIVE_FILES = re.compile(
    r"(?:^|/)torch/distributed/(?:distributed_c10d|_functional_collectives|rendezvous|nn/functional)[.]py$|"
    r"(?:^|/)serving/(?:comm|symmetric)[.]py$|"
    r"(?:^|(?:^|/)(?:vllm|sglang/srt)/)distributed/"
    r"(?:parallel_state|communication_op|device_communicators/(?!shm_)\w+)[.]py$"
)
COLLECTIVE_NATIVE = re.compile(r"^(?:gloo::|c10d::(?!TCPStore)|hccl::|p?nccl[A-Z]|Hccl[A-Z])")
NATIVE_OPERATION = re.compile(
    r"(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|barrier)", re.IGNORECASE
)

BETWEEN = re.compile(
    r"(?:.*[.])?(?:recv_requests|ingest_requests|\w*mlp_sync\w*|_has_global_unfinished_reqs|has_unfinished_dp)$"
)
"""Collectives called for these are part of the loop: ranks go through them with or without work."""

STARTING = re.compile(
    r"(?:.*[.])?(?:load_model|load_weights|init_device|init_distributed_environment|init_torch_distributed|"
    r"initialize_model_parallel|capture\w*|warmup\w*|compile_or_warm_up_model|_initialize_kv_caches|profile_run|"
    r"determine_available_memory|init_memory_pool|_wait_and_warmup)$|"
    r"(?:^|[.])(?:Scheduler|TpModelWorker|ModelRunner|EngineCore(?:Proc)?|WorkerProc|Worker)[.]__init__$"
)
"""An engine that does these is not ready yet; compiling and loading take minutes."""

LOOP_FILES = re.compile(r"(?:^|/)(?:asyncio/|uvloop/|selectors[.]py$)")
AT_WORK = re.compile(
    r"(?:.*[.])?(?:forward\w*|run_batch|execute_model|_execute_worker_rpc|sample_tokens|load_model|"
    r"capture_model|compile_or_warm_up_model|warmup\w*|backward)$"
)


def _called(name: str) -> Pattern:
    return re.compile(rf"(?:.*[.])?(?:{name})$")


def _in(file: str, short: str = "") -> Pattern:
    """``short``: the same files as py-spy's text names them, where those have lost their package."""
    return re.compile(rf"(?:^|/)(?:{file})[.]py$" + (rf"|^(?:{short})[.]py$" if short else ""))


_CONNECTION = _in("multiprocessing/connection")
ASKED: tuple[tuple[Asked, Pattern, Pattern], ...] = (
    ("loop", _called("run|run_forever|run_until_complete|_run_once"), _in("asyncio/(?:runners|base_events)")),
    ("loop", _called("run"), _in("uvloop/__init__")),
    (
        "device",
        _called(r"\w*synchronize|wait"),
        _in(r"torch(?:_npu)?/(?:cuda|npu|xpu|accelerator)/(?:\w+/)*\w+"),
    ),
    (
        "device",
        _called(r"\w*synchronize|wait\w*|block"),
        _in(r"harness/devices/\w+"),
    ),
    ("call", _called("main_loop"), _in("ray/_private/worker")),
    (
        "data",
        _called("__next__|_next_data|_get_data|_try_get_data"),
        _in("torch/utils/data/dataloader"),
    ),
    ("message", _called("dequeue|acquire_read"), _in("shm_broadcast")),
    ("room", _called("enqueue|acquire_write"), _in("shm_broadcast")),
    ("message", _called("sock_recv"), _in("io_struct")),
    ("room", _called("sock_send"), _in("io_struct")),
    ("message", _called(r"recv\w*|poll|select"), _in(r"zmq/[\w/]+")),
    ("room", _called(r"send\w*"), _in(r"zmq/[\w/]+")),
    ("message", _called("get"), _in("queue|multiprocessing/queues")),
    ("room", _called("put"), _in("queue|multiprocessing/queues")),
    ("answer", _called("result|exception"), _in("concurrent/futures/_base")),
    ("answer", _called("get|wait"), _in(r"ray/[\w/]+")),
    (
        "child",
        _called("join|wait|poll|communicate"),
        _in(r"subprocess|multiprocessing/(?:process|popen_\w+)"),
    ),
    ("message", _called(r"_?recv\w*|poll|wait|accept"), _CONNECTION),
    ("room", _called(r"_?send\w*"), _CONNECTION),
    ("thread", _called("join|_wait_for_tstate_lock"), _in("threading")),
    ("lock", _called(r"wait\w*|acquire|__enter__"), _in("threading|multiprocessing/synchronize")),
    ("output", _called("emit|flush|write"), _in(r"logging/\w+")),
    (
        "network",
        _called(r"read\w*|recv\w*|connect|urlopen|getresponse|begin|accept"),
        _in("socket|ssl|http/client"),
    ),
    ("message", _called("select"), _in("selectors")),
)
"""By the plumbing's functions."""

_SGLANG = r"sglang/srt/(?:\w+/)*\w+"
_SHORT = r"(?:scheduler_components/)?\w+"
_VLLM = r"vllm/v1/(?:\w+/)*\w+"
_EXECUTOR = r"vllm/v1/executor/\w+"
_WORKERS = "the workers' answer"
SITES: tuple[tuple[Pattern, Pattern, PlaceKind, str], ...] = (
    (
        _called(r"event_loop\w*|recv_requests|_pull_raw_reqs|ingest_requests"),
        _in(_SGLANG, _SHORT),
        "idle",
        "requests",
    ),
    (_called("maybe_sleep|maybe_sleep_on_idle|on_idle"), _in(_SGLANG, _SHORT), "idle", "requests"),
    (
        _called(r"_wait_\w+|load_snapshot"),
        _in(r"sglang/srt/entrypoints/\w+", "http_server|engine"),
        "waits-for-peer",
        "the processes that it starts",
    ),
    (
        _called("run_scheduler_process_with_init_pipe"),
        _in(_SGLANG, _SHORT),
        "waits-for-peer",
        "its controller",
    ),
    (
        _called("launch_server|run_data_parallel_controller_process|_launch_subprocesses"),
        _in(_SGLANG, _SHORT),
        "idle",
        "its children to end",
    ),
    (_called("worker_busy_loop"), _in(_EXECUTOR), "idle", "its next step"),
    (_called("_process_input_queue|run_busy_loop"), _in(r"vllm/v1/engine/\w+"), "idle", "requests"),
    (
        _called(r"process_input_socket\w*"),
        _in("vllm/v1/engine/coordinator"),
        "idle",
        "reports of the engines",
    ),
    (
        _called("get_response|_wait_for_response|result|collective_rpc|execute_model|sample_tokens"),
        _in(_EXECUTOR),
        "waits-for-peer",
        _WORKERS,
    ),
    (_called(r"step\w*|_process_engine_step"), _in("vllm/v1/engine/core"), "waits-for-peer", _WORKERS),
    (
        _called(r"get_output\w*|_?call_utility\w*"),
        _in("vllm/v1/engine/core_client"),
        "waits-for-peer",
        "the engine core's answer",
    ),
    (
        _called(
            r"wait_for_ready|wait_for_engine_startup|_?wait_for_\w+|startup_handshake|_perform_handshake\w*"
        ),
        _in(_VLLM),
        "waits-for-peer",
        "processes that start",
    ),
    (_called(r"join_first|monitor_\w+"), _in(_VLLM), "idle", "its children to end"),
)
"""Functions of the engines whose waits mean something of their own, and for what they wait."""

DEFAULTS: dict[Asked, tuple[PlaceKind, str]] = {
    "message": ("waits-for-peer", "a message"),
    "answer": ("waits-for-peer", "an answer"),
    "child": ("waits-for-peer", "a child process"),
    "thread": ("waits-for-peer", "a thread of its own"),
    "data": ("waits-for-peer", "its data loader"),
    "call": ("idle", "its next call"),
    "network": ("waits-for-peer", "the network"),
    "lock": ("lock", "a lock or an event"),
    "room": ("io", "room to send"),
    "output": ("io", "its output"),
    "device": ("device", "its device"),
}


def _native(names: str) -> Pattern:
    return re.compile(rf"^_*(?:GI_+)?(?:libc_)?(?:{names})")


IN_C: tuple[tuple[PlaceKind, str, Pattern], ...] = (
    (
        "device",
        "its device",
        _native(r"cuda\w*[Ss]ynchronize|cu\w*Synchronize|aclrt\w*[Ss]ynchronize|aclrt\w*Wait"),
    ),
    ("compute", "", _native(r"gomp_|GOMP_|kmp|omp_|at::|mkl|dnnl|openblas|cblas|[sd]gemm")),
    ("sleep", "", _native(r"(?:clock_)?nanosleep|usleep|pysleep|time_sleep")),
    (
        "lock",
        "a lock",
        _native(r"\w*futex|pthread_(?:cond|mutex|rwlock)|sem_\w*wait|PyThread_acquire_lock|lll_lock"),
    ),
    ("io", "room to write", _native(r"(?:writev?|send|sendto|sendmsg|fsync|fdatasync)$")),
    ("io", "input", _native(r"(?:readv?|pread\w*)$")),
    ("waits-for-peer", "a message", _native(r"(?:recv|recvfrom|recvmsg|p?poll|p?select|epoll_p?wait\w*)$")),
)
"""By native frames."""

KERNEL: dict[str, tuple[PlaceKind, str]] = {
    "futex": ("lock", "a lock"),
    "flock": ("lock", "a file's lock"),
    "nanosleep": ("sleep", ""),
    "clock_nanosleep": ("sleep", ""),
    "write": ("io", "room to write"),
    "writev": ("io", "room to write"),
    "sendto": ("io", "room to write"),
    "sendmsg": ("io", "room to write"),
    "fsync": ("io", "its disk"),
    "read": ("io", "input"),
    "recvfrom": ("waits-for-peer", "a message"),
    "recvmsg": ("waits-for-peer", "a message"),
    "accept": ("waits-for-peer", "a connection"),
    "connect": ("waits-for-peer", "a connection"),
    "wait4": ("waits-for-peer", "a child process"),
    "waitid": ("waits-for-peer", "a child process"),
}
"""By the system call that the kernel has the thread in."""
