"""The probe's hooks on vLLM, on modules with vLLM 0.32's names: seats, phases, steps, decisions, faults.

What the real engine does under them is shown by the engine tests; here each hook's own logic, and that names
which a version of vLLM lacks are reported.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from probe_rig import counts, ledger, modules, probe, status, torch_as_it_was

from serving.probe.hangrig_probe import vllm_hooks
from serving.probe.hangrig_probe.faults import InjectedError
from serving.probe.hangrig_probe.probe import Probe
from serving.probe.hangrig_probe.vllm_worker import crc_of, describe

WORKER_BASE = """
class WorkerWrapperBase:
    def __init__(self, global_rank, vllm_config, worker):
        self.global_rank, self.vllm_config, self.worker = global_rank, vllm_config, worker
    def __getattr__(self, name): return getattr(self.worker, name)
    def init_device(self): pass
    def execute_model(self, scheduled): return self.worker.execute_model(scheduled)
"""
GPU_WORKER = """
class Worker:
    def __init__(self, local_rank, act): self.local_rank, self.act = local_rank, act
    def execute_model(self, scheduled): return self.act("execute_model")
    def sample_tokens(self, grammar): return self.act("sample_tokens")
    def execute_dummy_batch(self): return self.act("execute_dummy_batch")
    def check_health(self): return self.act("check_health")
"""
MULTIPROC = """
class WorkerProc:
    def __init__(self, worker, requests):
        self.worker, self.requests, self.queue, self.delivered = worker, list(requests), [], []
    def worker_busy_loop(self):
        for request in self.requests:
            self._execute_worker_rpc(request)
    def _execute_worker_rpc(self, request):
        method, args, _, output_rank = request
        output = getattr(self.worker, method)(*args)
        if output_rank is None or output_rank == self.worker.global_rank:
            self.handle_output(output)
    def handle_output(self, output): self.queue.append(output)
    def enqueue_output(self, output): self.delivered.append(output)
class MultiprocExecutor: pass
"""
EXECUTOR = """
class Executor:
    def __init__(self, vllm_config): self.vllm_config = vllm_config
class UniProcExecutor(Executor): pass
class MultiprocExecutor(Executor): pass
"""
CORE = """
class EngineCore:
    def step_with_batch_queue(self): return None
    def execute_dummy_batch(self): pass
class EngineCoreProc(EngineCore):
    def __init__(self, scheduler, act): self.scheduler, self.act = scheduler, act
    def has_work(self): return self.scheduler.has_requests()
    def run_busy_loop(self): self.act("run")
    def _process_input_queue(self): self.act("input")
    def _handle_client_request(self, kind, request): self.act("request")
class DPEngineCoreProc(EngineCoreProc):
    def run_busy_loop(self): self.act("run")
    def _has_global_unfinished_reqs(self, local): return self.act("agree")
"""
SCHEDULER = """
class Scheduler:
    def __init__(self): self.requests, self.running, self.waiting, self.next = {}, [], [], None
    def has_requests(self): return bool(self.requests)
    def get_request_counts(self): return len(self.running), len(self.waiting)
    def schedule(self, throttle=False): return self.next
    def update_from_output(self, scheduled, output): return output
    def finish_requests(self, names, status): pass
"""
PARALLEL = """
import torch.distributed as dist
class GroupCoordinator:
    def __init__(self, group_ranks, local_rank, backend, use_device_communicator, use_mq=False, group_name=None):
        pass
"""
CPU_COMMUNICATOR = """
class _CPUSHMDistributed:
    def __init__(self, communicator): self.communicator, self.calls = communicator, []
    def all_reduce(self, input, group=None): self.calls.append("all_reduce")
    def all_gather_into_tensor(self, output, input, group=None): self.calls.append("all_gather_into_tensor")
    def gather(self, input, gather_list, dst=-1, group=None): self.calls.append("gather")
    def send_tensor_dict(self, tensors, dst): self.calls.append("send")
    def recv_tensor_dict(self, src): self.calls.append("recv")
"""
PLATFORM = """
import functools
@functools.cache
def is_pin_memory_available(): return True
"""
TORCH_UTILS = """
from vllm.utils.platform_utils import is_pin_memory_available
def __getattr__(name):
    if name == "PIN_MEMORY": return is_pin_memory_available()
    raise AttributeError(name)
"""
UTILS = """
PIN_MEMORY = True
class CpuGpuBuffer:
    def __init__(self, *size, pin_memory=PIN_MEMORY): self.pinned = pin_memory
"""
VLLM = {
    "vllm.utils.platform_utils": PLATFORM,
    "vllm.utils.torch_utils": TORCH_UTILS,
    "vllm.v1.utils": UTILS,
    "vllm.v1.worker.worker_base": WORKER_BASE,
    "vllm.v1.worker.gpu_worker": GPU_WORKER,
    "vllm.v1.executor.multiproc_executor": MULTIPROC,
    "vllm.v1.executor.abstract": EXECUTOR,
    "vllm.v1.engine.core": CORE,
    "vllm.v1.core.sched.scheduler": SCHEDULER,
    "vllm.distributed.parallel_state": PARALLEL,
    "vllm.distributed.device_communicators.cpu_communicator": CPU_COMMUNICATOR,
}


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    with torch_as_it_was(), modules(VLLM):
        yield


def _vllm(name: str) -> Any:
    return sys.modules[f"vllm.{name}"]


def _installed(folder: Path, **more: Any) -> Probe:
    made = probe(folder, **more)
    vllm_hooks.install(made)
    return made


def _config(**more: Any) -> Any:
    values = {"data_parallel_index": 0, "data_parallel_rank": 0, "world_size": 2, "tensor_parallel_size": 2}
    return SimpleNamespace(parallel_config=SimpleNamespace(**{**values, **more}))


def _scheduled(tokens: dict[str, int], new: tuple[str, ...] = (), **more: Any) -> Any:
    cached = [name for name in tokens if name not in new]
    values = {
        "num_scheduled_tokens": tokens,
        "total_num_scheduled_tokens": sum(tokens.values()),
        "scheduled_new_reqs": [SimpleNamespace(req_id=name) for name in new],
        "scheduled_cached_reqs": SimpleNamespace(req_ids=cached, num_output_tokens=[5] * len(cached)),
        "scheduled_spec_decode_tokens": {},
        "preempted_req_ids": None,
        "finished_req_ids": set(),
    }
    return SimpleNamespace(**{**values, **more})


# Workers -------------------------------------------------------------------------------------------------------


class Worker:
    """A worker process: what its engine core sends it, and what the ledger said in the middle of each call."""

    def __init__(self, folder: Path, rank: int = 0, config: Any = None, **more: Any) -> None:
        self.folder = folder
        self.probe = _installed(folder, **more)
        self.seen: list[tuple[str, str, int]] = []
        config = config or _config()
        self.stem = f"rank{config.parallel_config.data_parallel_index * 2 + rank}"
        worker = _vllm("v1.worker.gpu_worker").Worker(rank, self.act)
        self.wrapper = _vllm("v1.worker.worker_base").WorkerWrapperBase(rank, config, worker)
        self.wrapper.init_device()

    def act(self, what: str) -> str:
        host = ledger(self.folder, self.stem).host
        self.seen.append((what, host.phase, host.step))
        return what

    def process(self, *requests: tuple[Any, ...]) -> Any:
        return _vllm("v1.executor.multiproc_executor").WorkerProc(self.wrapper, requests)

    @property
    def phase(self) -> str:
        return ledger(self.folder, self.stem).host.phase


def _call(method: str, *args: Any, output_rank: int | None = 0) -> tuple[Any, ...]:
    return (method, args, {}, output_rank)


def test_a_worker_takes_its_rank_counts_steps_and_parks_between_them(tmp_path: Path) -> None:
    worker = Worker(tmp_path, 1)
    worker.process(
        _call("check_health"),
        _call("execute_model", _scheduled({"a": 7}, new=("a",))),
        _call("sample_tokens", None),
        _call("execute_model", _scheduled({})),
        _call("check_health"),
        _call("execute_dummy_batch"),
    ).worker_busy_loop()
    assert worker.seen == [
        ("check_health", "startup", 0),
        ("execute_model", "forward", 1),
        ("sample_tokens", "process", 1),
        ("execute_model", "forward", 2),
        ("check_health", "process", 2),
        ("execute_dummy_batch", "forward", 3),
    ]
    assert worker.phase == "parked"
    decisions = ledger(tmp_path, "rank1").decisions
    assert [(one["step"], one["mode"], one["batch"], one["own_tokens"]) for one in decisions] == [
        (1, "prefill", 1, [7]),
        (2, "idle", 0, [0]),
        (3, "idle", 0, [0]),
    ]
    document = status(tmp_path, "rank1")
    assert (document["seat"], document["tp_rank"], document["dp_rank"], document["errors"]) == (1, 1, 0, [])
    assert {state for name, state in document["hooks"].items() if "cuda" not in name} == {"on"}


def test_a_worker_of_the_second_replica_has_the_next_ranks(tmp_path: Path) -> None:
    Worker(tmp_path, 1, _config(data_parallel_index=1))
    assert (status(tmp_path, "rank3")["dp_rank"], status(tmp_path, "rank3")["tp_rank"]) == (1, 1)


def test_a_worker_that_owes_an_output_is_not_parked(tmp_path: Path) -> None:
    """With asynchronous scheduling a thread of its own delivers what the main thread has computed."""
    worker = Worker(tmp_path)
    process = worker.process(_call("execute_model", _scheduled({"a": 1})))
    process.worker_busy_loop()
    assert worker.phase == "process"
    thread = threading.Thread(target=process.enqueue_output, args=(process.queue.pop(),))
    thread.start()
    thread.join()
    assert worker.phase == "parked"


def test_a_step_that_raises_is_in_the_status_and_passes(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    worker.wrapper.worker.act = lambda what: {}[what]
    with pytest.raises(KeyError, match="execute_model"):
        worker.process(_call("execute_model", _scheduled({"a": 1}))).worker_busy_loop()
    assert "KeyError: 'execute_model'" in status(tmp_path)["exception"]
    assert worker.phase == "parked"


@pytest.mark.parametrize(("mode", "fires"), [("decode", True), ("idle", False)])
def test_a_worker_raises_where_the_scenario_says(tmp_path: Path, mode: str, fires: bool) -> None:
    worker = Worker(tmp_path, faults=[{"name": "raise", "ranks": [0], "mode": mode}])
    (tmp_path / "due-0").touch()
    process = worker.process(_call("execute_model", _scheduled({"a": 1})))
    if fires:
        with pytest.raises(InjectedError):
            process.worker_busy_loop()
        assert worker.seen == []
        assert "InjectedError" in status(tmp_path)["exception"]
    else:
        process.worker_busy_loop()
        assert worker.seen == [("execute_model", "forward", 1)]


def test_a_worker_blocks_where_it_takes_up_a_batch(tmp_path: Path) -> None:
    worker = Worker(tmp_path, faults=[{"name": "block", "ranks": [0], "seconds": 0.05}])
    (tmp_path / "due-0").touch()
    worker.process(_call("check_health"), _call("execute_model", _scheduled({"a": 1}))).worker_busy_loop()
    (fault,) = status(tmp_path)["faults"]
    assert (fault["name"], fault["step"]) == ("block", 0)
    assert worker.seen[-1] == ("execute_model", "forward", 1)


def test_collectives_through_shared_memory_are_recorded_and_can_be_skipped(tmp_path: Path) -> None:
    import torch

    worker = Worker(tmp_path, faults=[{"name": "skip_collective", "operation": "all_reduce", "group": "tp"}])
    worker.probe.recorder.name_group("device group", "tp", (0, 1))
    communicator = SimpleNamespace(device_group="device group")
    shared = _vllm("distributed.device_communicators.cpu_communicator")._CPUSHMDistributed(communicator)
    part = torch.ones(3, 8, dtype=torch.bfloat16)
    shared.all_reduce(part, group="device group")
    shared.all_gather_into_tensor(torch.empty(6, 8), part)
    shared.gather(part, None, dst=0)
    shared.send_tensor_dict({}, 1)
    (tmp_path / "due-0").touch()
    worker.probe.recorder.new_step()
    shared.all_reduce(part)
    assert shared.calls == ["all_reduce", "all_gather_into_tensor", "gather", "send"]
    group = ledger(tmp_path).groups["tp"]
    assert [(one.operation, one.shape, one.dtype) for one in group.recent] == [
        ("all_reduce", (3, 8), "bfloat16"),
        ("all_gather_into_tensor", (3, 8), "bfloat16"),
        ("gather", (3, 8), "bfloat16"),
        ("send", (), ""),
    ]
    assert counts(ledger(tmp_path))["tp"] == (4, 4)
    assert status(tmp_path)["faults"][0]["what"] == "skipped all_reduce of group tp"


def test_what_a_coordinator_makes_has_its_name(tmp_path: Path) -> None:
    worker = Worker(tmp_path)
    names: list[str | None] = []
    coordinator = _vllm("distributed.parallel_state").GroupCoordinator

    class Sub(coordinator):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    recorder = worker.probe.recorder
    real, recorder.naming = recorder.naming, lambda name: (names.append(name), real(name))[1]  # type: ignore
    Sub([[0, 1]], 0, "gloo", True, group_name="tp")
    Sub([[0, 1]], 0, "gloo", True, False, "ep")
    assert names == ["tp", None, "ep", None]


@pytest.mark.parametrize(
    ("scheduled", "mode"),
    [
        (_scheduled({}), "idle"),
        (_scheduled({"a": 1, "b": 1}), "decode"),
        (_scheduled({"a": 9, "b": 3}, new=("a", "b")), "prefill"),
        (_scheduled({"a": 1}, new=("a",)), "prefill"),
        (_scheduled({"a": 1, "b": 40}), "mixed"),
        (_scheduled({"a": 3, "b": 2}, scheduled_spec_decode_tokens={"a": [7, 7], "b": [7]}), "decode"),
        (
            _scheduled(
                {"a": 1, "b": 2},
                scheduled_cached_reqs=SimpleNamespace(req_ids=["a", "b"], num_output_tokens=[0, 0]),
            ),
            "prefill",
        ),
    ],
)
def test_what_a_batch_is(scheduled: Any, mode: str) -> None:
    assert describe(scheduled)["mode"] == mode


def test_a_decision_names_who_left_and_who_lost_its_place() -> None:
    found = describe(_scheduled({"b": 1, "a": 1}, preempted_req_ids={"z", "y"}, finished_req_ids={"x"}))
    assert (found["retracted"], found["finished"]) == (["y", "z"], ["x"])
    assert found["requests"] == crc_of(["a", "b"]) != crc_of(["a", "c"])


# Engine core ---------------------------------------------------------------------------------------------------


class Core:
    """An engine core, and the phase and step that its ledger had in the middle of each call."""

    def __init__(self, folder: Path, config: Any = None, **more: Any) -> None:
        self.folder = folder
        self.probe = _installed(folder, **more)
        config = config or _config()
        _vllm("v1.executor.abstract").MultiprocExecutor(config)
        replica = config.parallel_config.data_parallel_index
        self.stem = f"engine_core-{replica}" if replica else "engine_core"
        self.scheduler = _vllm("v1.core.sched.scheduler").Scheduler()
        self.process = _vllm("v1.engine.core").DPEngineCoreProc(self.scheduler, self.act)

    def act(self, what: str) -> str:
        return f"{what} in {self.at()}"

    def at(self) -> str:
        host = ledger(self.folder, self.stem).host
        return f"{host.phase} {host.step}"

    def input(self) -> str:
        return str(self.process._process_input_queue() or self.at())


def test_an_engine_core_is_parked_without_work_and_moves_with_it(tmp_path: Path) -> None:
    core = Core(tmp_path)
    assert core.at() == "startup 0"
    assert core.input() == "parked 0"
    core.process._handle_client_request("ADD", None)
    assert core.at() == "recv 0"
    core.scheduler.requests = {"a": 1, "b": 2}
    core.scheduler.running, core.scheduler.waiting = ["a"], ["b"]
    assert core.input() == "recv 0"
    core.scheduler.next = _scheduled({"a": 5}, new=("a",), preempted_req_ids={"b"}, finished_req_ids={"c"})
    core.scheduler.schedule()
    assert core.at() == "forward 1"
    output = SimpleNamespace(new_token_ids=[4, 5])
    core.scheduler.update_from_output(core.scheduler.next, {0: SimpleNamespace(outputs=[output, output])})
    assert core.at() == "process 1"
    core.scheduler.finish_requests(["a", "unknown"], SimpleNamespace(name="FINISHED_ABORTED"))
    core.scheduler.finish_requests("b", SimpleNamespace(name="FINISHED_STOPPED"))
    core.scheduler.next = _scheduled({"b": 1})
    core.scheduler.schedule()
    assert core.process._has_global_unfinished_reqs(True) is not None
    assert core.at() == "agree 2"
    core.process.execute_dummy_batch()
    assert core.at() == "forward 3"
    core.scheduler.requests = {}
    core.process._process_input_queue()
    core.process.step_with_batch_queue()
    assert core.at() == "forward 3"
    first, second, third = ledger(tmp_path, "engine_core").decisions
    assert (first["mode"], first["running"], first["waiting"], first["tokens_out"]) == ("prefill", 1, 1, 0)
    assert (first["retracted"], first["finished"], first["aborted"]) == (["b"], ["c"], [])
    assert (second["mode"], second["tokens_out"], second["aborted"]) == ("decode", 4, ["a"])
    assert (third["mode"], third["step"]) == ("idle", 3)
    document = status(tmp_path, "engine_core")
    assert (document["role"], document["errors"]) == ("engine_core", [])


def test_the_second_engine_core_has_a_name_of_its_own(tmp_path: Path) -> None:
    assert Core(tmp_path, _config(data_parallel_index=1)).at() == "startup 0"


def test_an_engine_core_blocks_where_it_takes_up_work(tmp_path: Path) -> None:
    core = Core(tmp_path, faults=[{"name": "block", "role": "engine_core", "seconds": 0.05}])
    core.scheduler.requests = {"a": 1}
    (tmp_path / "due-0").touch()
    assert core.input() == "recv 0"
    assert [one["name"] for one in status(tmp_path, "engine_core")["faults"]] == ["block"]


def test_the_exception_that_ends_an_engine_core_is_kept(tmp_path: Path) -> None:
    core = Core(tmp_path)
    core.process.act = lambda what: {}[what]
    with pytest.raises(KeyError):
        core.process.run_busy_loop()
    assert "KeyError: 'run'" in status(tmp_path, "engine_core")["exception"]


def test_with_one_worker_the_engine_core_is_the_rank(tmp_path: Path) -> None:
    worker = Worker(tmp_path, config=_config(world_size=1, tensor_parallel_size=1))
    _vllm("v1.executor.abstract").UniProcExecutor(_config())
    scheduler = _vllm("v1.core.sched.scheduler").Scheduler()
    scheduler.next = _scheduled({"a": 1})
    worker.wrapper.execute_model(scheduler.schedule())
    assert worker.seen == [("execute_model", "forward", 1)]
    assert ledger(tmp_path).decisions_total == 1
    assert not (tmp_path / "engine_core.ledger").exists()


# Versions, pinning ---------------------------------------------------------------------------------------------


def test_names_that_a_version_lacks_are_reported_and_the_rest_works(tmp_path: Path) -> None:
    del _vllm("v1.executor.multiproc_executor").WorkerProc._execute_worker_rpc
    del _vllm("v1.core.sched.scheduler").Scheduler.update_from_output
    worker = Worker(tmp_path)
    worker.wrapper.execute_model(_scheduled({"a": 1}))
    assert worker.seen == [("execute_model", "forward", 1)]
    hooks = status(tmp_path)["hooks"]
    missing = {name.rpartition(":")[2]: state for name, state in hooks.items() if state.startswith("missing")}
    assert missing == {
        "WorkerProc._execute_worker_rpc": "missing: WorkerProc has no _execute_worker_rpc",
        "Scheduler.update_from_output": "missing: Scheduler has no update_from_output",
    }


@pytest.mark.parametrize(("device", "answer"), [("cuda", False), ("cpu", True)])
def test_the_override_reaches_who_asked_before_and_who_asks_later(
    tmp_path: Path, device: str, answer: bool
) -> None:
    _installed(tmp_path, device=device, pinned="pageable")
    assert _vllm("utils.torch_utils").PIN_MEMORY is answer
    assert _vllm("v1.utils").PIN_MEMORY is answer
    assert _vllm("v1.utils").CpuGpuBuffer(3).pinned is answer
    with modules({"vllm.later": "from vllm.utils.torch_utils import PIN_MEMORY"}):
        assert sys.modules["vllm.later"].PIN_MEMORY is answer
