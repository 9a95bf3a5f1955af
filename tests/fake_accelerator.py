"""Stands in for ``torch.cuda`` or ``torch.npu`` on a machine without either: the part of their API that we use.

Strict: a name or an argument that the real module lacks (torch 2.7 to 2.13, torch_npu 2.7.1 to 2.14.0) raises.
Streams are threads with queues, so an operation that is not ordered runs when its stream likes. Within
``host()`` torch operations on "device" tensors (made with the fake's ``torch_device``) only enqueue, as kernels
do, on the thread's current stream; host memory is read and written at once. Copies follow the platform: what
non_blocking does with pageable memory differs (PLATFORMS.md). An external event is a flag, a task group can be
made anew, a capture takes what is enqueued.

Stricter than hardware, so that tests see what would bite there: a stream may not be hashed, printed or asked,
and an event is asked only by a thread that has selected its device.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

LONG_S = 30.0
ON_DEVICE = torch.device("cpu", 0)  # factories called with it are told from those for the host
_CYCLES_PER_S = 1e9

Item = Callable[[], None]


class FakeStream:
    def __init__(self, module: FakeAccelerator, name: str) -> None:
        self.module = module
        self.device_index = module.current_device()
        self.capture: FakeGraph | None = None
        self.group: list[Item] | None = None
        self.updating: FakeGroup | None = None
        self.given: list[tuple[str, str]] = []
        """What was enqueued, for tests that look at orders: (kind, thread)."""
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._main, name=f"fake-{name}", daemon=True)
        self.thread.start()

    def put(self, item: Item, kind: str) -> None:
        self.module.check()
        self.given.append((kind, threading.current_thread().name))
        if self.group is not None:
            self.group.append(item)
        elif self.updating is not None:
            self.updating.coming.append(item)
        elif self.capture is not None:
            self.capture.items.append(item)
        else:
            self._queue.put(item)

    def end(self) -> None:
        self._queue.put(None)

    def wait_for_all(self) -> None:
        if self.capture is not None:
            raise RuntimeError("operation not permitted when stream is capturing")
        reached = threading.Event()
        self._queue.put(reached.set)
        while not reached.wait(0.01):
            self.module.check()
            if self.module.stopped.is_set():
                raise RuntimeError("the test is over")

    def _main(self) -> None:
        with torch.no_grad():
            while (item := self._queue.get()) is not None:
                if self.module.stopped.is_set() or self.module.error:
                    continue
                try:
                    item()
                except Exception as error:
                    self.module.error = f"device-side: {type(error).__name__}: {error}"

    def _refuse(self, *_: object) -> Any:
        raise AssertionError("a stream is asked, hashed or printed: on an NPU that blocks with the lock held")

    query = __hash__ = __repr__ = _refuse
    npu_stream = cuda_stream = property(_refuse)

    def synchronize(self) -> None:
        raise AssertionError("a synchronisation of the driver has no deadline")


class FakeEvent:
    def __init__(self, module: FakeAccelerator, enable_timing: bool) -> None:
        self._module = module
        self._device_index = module.current_device()
        self._enable_timing = enable_timing
        self._point: threading.Event | None = None
        self.time_s = 0.0

    def record(self, stream: FakeStream) -> None:
        if stream.capture is not None:
            raise RuntimeError("this event is recorded in a capture")
        point = self._point = threading.Event()

        def reach() -> None:
            self.time_s = time.perf_counter()
            point.set()

        stream.put(reach, "record")

    def wait(self, stream: FakeStream) -> None:
        if stream.capture is not None:
            raise RuntimeError("this event is waited for in a capture")
        point = self._point
        if point is not None:
            stream.put(lambda: self._module.block(point), "wait")

    def query(self) -> bool:
        self._module.check()
        if self._module.current_device() != self._device_index:
            raise AssertionError("an event is asked by a thread that has not selected its device")
        return self._point is None or self._point.is_set()

    def synchronize(self) -> None:
        raise AssertionError("a synchronisation of the driver has no deadline")

    def elapsed_time(self, end_event: FakeEvent) -> float:
        assert self._enable_timing and end_event._enable_timing, "made without enable_timing"
        return (end_event.time_s - self.time_s) * 1e3


class FakeExternalEvent:
    """torch.npu.ExternalEvent: a flag. A record while it is set changes nothing."""

    def __init__(self, module: FakeAccelerator) -> None:
        self._module = module
        self._flag = threading.Event()

    def record(self, stream: FakeStream) -> None:
        stream.put(self._flag.set, "external record")

    def wait(self, stream: FakeStream) -> None:
        stream.put(lambda: self._module.block(self._flag), "external wait")

    def reset(self, stream: FakeStream) -> None:
        stream.put(self._flag.clear, "external reset")


class FakeGroup:
    """A task group of a captured graph: an update replaces its tasks by as many new ones."""

    def __init__(self, tasks: list[Item]) -> None:
        self.tasks = tasks
        self.coming: list[Item] = []

    def run(self) -> None:
        for task in self.tasks:
            task()


class FakeGraph:
    """torch.cuda.CUDAGraph and torch.npu.NPUGraph."""

    def __init__(self, module: FakeAccelerator) -> None:
        self._module = module
        self.items: list[Item] = []
        self.live = False

    def replay(self) -> None:
        assert self.live, "replayed without a capture, or after its reset"
        self._module.current_stream().put(lambda: [item() for item in self.items], "replay")

    def reset(self) -> None:
        self.items.clear()
        self.live = False


class FakeAccelerator:
    """One of the two modules. ``error``: what every call raises from now on, as after a failed kernel."""

    def __init__(self, kind: str, devices: int = 1) -> None:
        assert kind in ("cuda", "npu")
        self.kind = kind
        self.devices = devices
        self.error = ""
        self.stopped = threading.Event()
        self.let_go = threading.Event()
        """Set, no stream waits for anything any more: so a test that hangs on purpose can be cleaned up."""
        self.peers: set[frozenset[int]] = set()
        self._streams: list[FakeStream] = []
        self._thread = threading.local()
        self._default = FakeStream(self, "default")
        self._streams.append(self._default)
        self._device_storages: dict[int, int] = {}
        self._pinned_storages: set[int] = set()
        self.asked_from: set[str] = set()
        if kind == "cuda":
            self.CUDAGraph = self._cuda_graph
            self._sleep = self._cuda_sleep
        else:
            self.NPUGraph = lambda: FakeGraph(self)
            self.ExternalEvent = lambda: FakeExternalEvent(self)
            self.graph_task_group_begin = self._group_begin
            self.graph_task_group_end = self._group_end
            self.graph_task_update_begin = self._update_begin
            self.graph_task_update_end = self._update_end

    # --- what both modules have

    def Stream(self, device: int | None = None, priority: int = 0) -> FakeStream:
        self.check()
        stream = FakeStream(self, str(len(self._streams)))
        self._streams.append(stream)
        return stream

    def Event(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> FakeEvent:
        return FakeEvent(self, enable_timing)

    def stream(self, stream: FakeStream) -> Any:
        return self._entered(stream)

    @contextmanager
    def _entered(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream()
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def set_stream(self, stream: FakeStream) -> None:
        self._thread.stream = stream

    def current_stream(self, device: int | None = None) -> FakeStream:
        current: FakeStream = getattr(self._thread, "stream", self._default)
        return current

    def set_device(self, device: int) -> None:
        assert 0 <= device < self.devices, "invalid device ordinal"
        self._thread.device = device

    def current_device(self) -> int:
        return getattr(self._thread, "device", 0)

    def device_count(self) -> int:
        return self.devices

    def is_available(self) -> bool:
        return self.devices > 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_device_name(self, device: int | None = None) -> str:
        return f"Fake {self.kind}"

    def mem_get_info(self, device: int | None = None) -> tuple[int, int]:
        return (1 << 30) - sum(self._device_storages.values()), 1 << 30

    def memory_stats(self, device: int | None = None) -> dict[str, int]:
        used = sum(self._device_storages.values())
        return {"allocated_bytes.all.current": used, "reserved_bytes.all.current": used}

    def empty_cache(self) -> None:
        self.check()
        for stream in self._streams:
            stream.wait_for_all()  # freeing waits for the device

    def can_device_access_peer(self, device: int, peer_device: int) -> bool:
        return frozenset({device, peer_device}) in self.peers

    @contextmanager
    def graph(
        self,
        graph: FakeGraph,
        pool: object = None,
        stream: FakeStream | None = None,
        capture_error_mode: str = "global",
    ) -> Iterator[None]:
        assert stream is not None and capture_error_mode == "thread_local"
        self.empty_cache()
        with self.stream(stream):
            stream.capture = graph
            try:
                yield
            finally:
                stream.capture = None
            graph.live = True

    # --- CUDA's

    def _cuda_graph(self, keep_graph: bool = False) -> FakeGraph:
        return FakeGraph(self)

    def _cuda_sleep(self, cycles: int) -> None:
        self.current_stream().put(
            lambda: self.let_go.wait(min(cycles / _CYCLES_PER_S, LONG_S)) and None, "sleep"
        )

    # --- torch_npu's

    def _group_begin(self, stream: FakeStream) -> None:
        assert stream.capture is not None and stream.group is None, "a task group belongs into a capture"
        stream.group = []

    def _group_end(self, stream: FakeStream) -> FakeGroup:
        tasks, stream.group = stream.group, None
        assert tasks is not None and stream.capture is not None
        group = FakeGroup(tasks)
        stream.capture.items.append(group.run)
        return group

    def _update_begin(self, stream: FakeStream, handle: FakeGroup) -> None:
        assert stream.capture is None, "the stream of an update must not be capturing"
        handle.coming = []
        stream.updating = handle

    def _update_end(self, stream: FakeStream) -> None:
        group, stream.updating = stream.updating, None
        assert group is not None
        coming = group.coming
        if len(coming) != len(group.tasks):
            raise RuntimeError(f"the group has {len(group.tasks)} tasks, the update {len(coming)}")
        stream.put(lambda: setattr(group, "tasks", coming), "update")

    # --- for the tests

    def pinned(self, nbytes: int) -> torch.Tensor:
        """What ``torch.empty(pin_memory=True)`` gives there."""
        block = torch.zeros(nbytes, dtype=torch.uint8)
        self._pinned_storages.add(_storage(block))
        return block

    def launch(self, call: Item) -> None:
        """A kernel that runs ``call``, on the current stream."""
        self.current_stream().put(call, "kernel")

    def host(self) -> Deferring:
        return Deferring(self)

    def check(self) -> None:
        if self.error:
            raise RuntimeError(self.error)

    def block(self, signal: threading.Event) -> None:
        """On a stream's thread."""
        while not signal.wait(0.001):
            if self.let_go.is_set() or self.error:
                return

    def end(self) -> None:
        self.let_go.set()
        self.stopped.set()
        for stream in self._streams:
            stream.end()
        for stream in self._streams:
            stream.thread.join(LONG_S)
            assert not stream.thread.is_alive()

    # --- which memory is where

    def made_on_device(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        pointer = storage.data_ptr()
        self._device_storages[pointer] = storage.nbytes()
        weakref.finalize(storage, self._device_storages.pop, pointer, None).atexit = False

    def on_device(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._device_storages

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return _storage(tensor) in self._pinned_storages


class Deferring(TorchDispatchMode):
    """On the host thread: operations on device tensors are enqueued on the current stream."""

    def __init__(self, module: FakeAccelerator) -> None:
        super().__init__()
        self._module = module

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        module = self._module
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if not any(map(module.on_device, tensors)):
            result = func(*args, **kwargs)
            if kwargs.get("device") == ON_DEVICE and kwargs["device"].index == 0:
                module.made_on_device(result)
            return result
        name = func.overloadpacket.__name__
        if name == "copy_":
            return self._copy(args[0], args[1], bool(args[2]) if len(args) > 2 else False)
        stream = module.current_stream()
        if func._schema.is_mutable:
            stream.put(lambda: func(*args, **kwargs) is None, name)
            return kwargs["out"] if "out" in kwargs else args[0]
        if any(argument.alias_info is not None for argument in func._schema.arguments):
            return func(*args, **kwargs)  # a view
        if name == "_local_scalar_dense":
            stream.wait_for_all()
            return func(*args, **kwargs)
        result = tree_map_only(torch.Tensor, _like, func(*_shapes(args), **_shapes(kwargs)))
        made = tree_leaves(result)
        for one in made:
            module.made_on_device(one)

        def compute() -> None:
            for one, value in zip(made, tree_leaves(func(*args, **kwargs)), strict=True):
                one.copy_(value)

        stream.put(compute, name)
        return result

    def _copy(self, dst: torch.Tensor, src: torch.Tensor, non_blocking: bool) -> torch.Tensor:
        module, stream = self._module, self._module.current_stream()
        host = next((one for one in (dst, src) if not module.on_device(one)), None)
        pageable = host is not None and not module.is_pinned(host)
        if pageable and host is src and module.kind == "cuda":
            src = src.clone()  # staged at the call
        stream.put(lambda: dst.copy_(src) is None, "copy")
        staged = module.kind == "cuda" and host is not None and host is not dst
        if host is not None and (not non_blocking or (pageable and not staged)):
            stream.wait_for_all()
        return dst


def _shapes(values: Any) -> Any:
    """The arguments without contents, which are not there yet: what comes out has the right shape all the same."""
    moved = tree_map_only(torch.Tensor, lambda one: one.to("meta"), values)
    return tree_map_only(torch.device, lambda _: torch.device("meta"), moved)


def _like(meta: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
