"""Each rule of the audit on small pieces of source: what it objects to, and what it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from audit_rig import audit_source

# --- HG101: import-time private accelerator names ---


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("from torch._C import _cuda_releasePool\n", [1]),
        ("from torch.cuda.memory import (\n    CUDAPluggableAllocator,\n"
         "    _cuda_beginAllocateCurrentThreadToPool,\n)\n", [1]),
        ("import torch\nif torch.cuda.is_available():\n    pool = torch._C._cuda_releasePool\n", [3]),
        ("try:\n    from torch._C import _cuda_endAllocateToPool\nexcept ImportError:\n    x = None\n", [2]),
        ("import torch\nclass Pool:\n    end = torch._C._cuda_endAllocateToPool\n", [3]),
        ("import torch\ndef end(call=torch._C._cuda_endAllocateToPool): ...\n", [2]),
        ("import torch\n@torch._C._cuda_wrap\ndef end(): ...\n", [2]),
        ("import torch as t\nraw = getattr(t._C, '_cuda_getCurrentRawStream', None)\n", [2]),
        ("from torch import _C\nraw = _C._cuda_getCurrentRawStream\n", [1, 2]),
        ("import torch_npu\nh = torch_npu._C._NPUTaskGroupHandle\n", [2]),
        ("from torch_npu._C import _weak_ref_tensor\n", [1]),
        ("from torch.cuda import _sleep\n", [1]),
        ("import torch\ndef f(h: torch._C._cuda_Handle): ...\n", [2]),
        ("import torch\nwrap = lambda call=torch._C._cuda_x: call\n", [2]),
    ],
)  # fmt: skip
def test_a_private_name_that_an_import_needs_is_found(tmp_path: Path, source: str, lines: list[int]) -> None:
    assert audit_source(tmp_path, source, "HG101") == lines


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ndef release(pool):\n    torch._C._cuda_releasePool(0, pool)\n",
        "def end():\n    from torch._C import _cuda_endAllocateToPool\n    return _cuda_endAllocateToPool\n",
        "import torch\nclass Pool:\n    def end(self):\n        return torch._C._cuda_endAllocateToPool\n",
        "import torch\nend = lambda pool: torch._C._cuda_releasePool(0, pool)\n",
        "import torch\nHAS = hasattr(torch._C, '_cuda_releasePool')\n",
        "from __future__ import annotations\nimport torch\ndef f(h: torch._C._cuda_Handle): ...\n"
        "x: torch._C.Y\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch._C import _cuda_x\n",
        "import torch\nif __name__ == '__main__':\n    torch._C._cuda_init()\n",
        "import torch\nf = torch.ops.mine._npu_attention\n",
        "from mine._C import _cuda_thing\n",
        "from torch.cuda.memory import CUDAPluggableAllocator\n",
    ],
)
def test_a_lookup_at_the_call_is_no_finding(tmp_path: Path, source: str) -> None:
    assert audit_source(tmp_path, source, "HG101") == []


# --- HG103: pinned allocations past the switch ---


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch\ndef f(n):\n    return torch.empty(n, pin_memory=True)\n", [3]),
        ("import torch\ndef f(x):\n    return torch.from_numpy(x).pin_memory()\n", [3]),
        ("import torch\ndef f(n):\n    pin = True\n    return torch.zeros(n, pin_memory=pin)\n", [4]),
        ("def f(x):\n    return x.new_zeros(3, pin_memory=True)\n", [2]),
        ("import torch\nTABLE = torch.zeros(3, pin_memory=True)\n", [2]),
        ("import torch\ndef f(n, fast):\n    if fast:\n"
         "        return torch.empty(n, pin_memory=True)\n", [4]),
        ("import torch\ndef f(n):\n    if is_pin_memory_available():\n        n += 1\n"
         "    return torch.empty(n, pin_memory=True)\n", [5]),
    ],
)  # fmt: skip
def test_pinning_that_asks_nobody_is_found(tmp_path: Path, source: str, lines: list[int]) -> None:
    assert audit_source(tmp_path, source, "HG103") == lines


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ndef f(n):\n    return torch.empty(n, pin_memory=is_pin_memory_available())\n",
        "import torch\ndef f(n):\n    _pin = is_pin_memory_available()\n"
        "    return torch.empty(n, pin_memory=_pin)\n",
        "import torch\ndef f(n, pin_memory=True):\n    return torch.empty(n, pin_memory=pin_memory)\n",
        "import torch\ndef f(x):\n    if is_pin_memory_available():\n        x = x.pin_memory()\n"
        "    return x\n",
        "import torch\ndef f(x, pin):\n    return x.pin_memory() if pin else x\n",
        "def f(x):\n    if not is_pin_memory_available():\n        return x\n    return x.pin_memory()\n",
        "def f(x):\n    assert x.device.type == 'cpu'\n    return x.pin_memory()\n",
        "def f(x, pin):\n    return pin and x.pin_memory()\n",
        "import torch\ndef f(x):\n    return torch.empty(3, pin_memory=True).cuda(non_blocking=True)\n",
        "from torch.utils.data import DataLoader\ndef f(d):\n    return DataLoader(d, pin_memory=True)\n",
        "class Batch:\n    def pin_memory(self):\n        self.x = self.x.pin_memory()\n"
        "        return self\n",
        "import torch\ndef f(n):\n    return torch.empty(n, pin_memory=False)\n",
        "def f(x):\n    return x if _is_cpu_engine() else x.pin_memory()\n",
    ],
)
def test_pinning_behind_the_switch_or_a_device_check_is_no_finding(tmp_path: Path, source: str) -> None:
    assert audit_source(tmp_path, source, "HG103") == []


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("engine/cuda/code.py", 0),
        ("engine/flashinfer_backend.py", 0),
        ("engine/npu/code.py", 1),
        ("engine/lora.py", 1),
    ],
)
def test_a_file_for_cuda_alone_pins_as_it_likes(tmp_path: Path, name: str, found: int) -> None:
    source = "import torch\ndef f(n):\n    return torch.empty(n, pin_memory=True)\n"
    assert len(audit_source(tmp_path, source, "HG103", name)) == found


# --- HG104: sources reused in flight ---

KEPT = """
import torch
class Rows:
    def __init__(self, n, pin):
        self.rows_cpu = torch.zeros(n, dtype=torch.int32, device="cpu", pin_memory=pin)
        self.rows_np = self.rows_cpu.numpy()
        self.rows = torch.zeros(n, device="npu")
    def fill(self, values):
        {write}
        self.rows.copy_({source}, non_blocking=True)
        {after}
"""


@pytest.mark.parametrize(
    "write", ["self.rows_cpu[0] = 1", "self.rows_np[: len(values)] = values", "self.rows_cpu.fill_(3)"]
)
def test_a_buffer_that_is_written_each_step_and_copied_is_found(tmp_path: Path, write: str) -> None:
    source = KEPT.format(write=write, source="self.rows_cpu[: len(values)]", after="pass")
    assert audit_source(tmp_path, source, "HG104") == [9]


@pytest.mark.parametrize(
    ("write", "source", "after"),
    [
        ("self.rows_cpu[0] = 1", "self.rows_cpu", "self.copied.record()"),
        ("self.copied.synchronize(); self.rows_cpu[0] = 1", "self.rows_cpu", "pass"),
        ("self.rows_cpu[0] = 1", "self.rows_cpu.clone()", "pass"),
        ("values.sort()", "self.rows_cpu", "pass"),
        ("self.rows[0] = 1", "self.rows_cpu", "pass"),
    ],
)
def test_an_event_a_fresh_copy_or_no_write_is_no_finding(
    tmp_path: Path, write: str, source: str, after: str
) -> None:
    assert audit_source(tmp_path, KEPT.format(write=write, source=source, after=after), "HG104") == []


LOOP = """
import torch
def feed(steps, device, stream):
    staging = torch.empty(8, pin_memory=True)
    for values in steps:
        {write}
        staging.to(device, non_blocking={blocking})
        {after}
"""


def test_a_buffer_made_before_a_loop_and_overwritten_in_it_is_found(tmp_path: Path) -> None:
    source = LOOP.format(write="staging[:] = values", blocking="True", after="pass")
    assert audit_source(tmp_path, source, "HG104") == [6]


@pytest.mark.parametrize(
    ("write", "blocking", "after"),
    [
        ("staging[:] = values", "True", "stream.synchronize()"),
        ("staging[:] = values", "False", "pass"),
        ("staging = torch.tensor(values, pin_memory=True); staging[0] = 1", "True", "pass"),
    ],
)
def test_a_loop_that_waits_blocks_or_allocates_is_no_finding(
    tmp_path: Path, write: str, blocking: str, after: str
) -> None:
    assert audit_source(tmp_path, LOOP.format(write=write, blocking=blocking, after=after), "HG104") == []


# --- HG105: questions to a stream ---


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("import torch\ndef f():\n    return torch.npu.current_stream().query()\n", [3]),
        ("def f(self):\n    return self.copy_stream.query()\n", [2]),
        ("def f(stream):\n    return launch(stream.npu_stream)\n", [2]),
        ("import torch\ndef f(d):\n    s = torch.get_device_module(d).Stream()\n    return hash(s)\n", [4]),
        (
            "import torch\ndef f(d):\n    s = torch.npu.Stream()\n    print(f'on {s}')\n    return {s: 1}\n",
            [4, 5],
        ),
    ],
)
def test_a_question_to_a_stream_is_found(tmp_path: Path, source: str, lines: list[int]) -> None:
    assert audit_source(tmp_path, source, "HG105") == lines


@pytest.mark.parametrize(
    "source",
    [
        "def f(event):\n    return event.query()\n",
        "import torch\ndef f():\n    return torch.cuda.current_stream().query()\n",
        "def f(session):\n    return session.query()\n",
        "import torch\ndef f(d):\n    s = torch.npu.Stream()\n    return hash(s.name)\n",
        "def f(stream):\n    return f'{stream}'\n",
        "import torch\ndef g(d):\n    value = torch.npu.Stream()\nclass N:\n    def __hash__(self):\n"
        "        return hash(self.value)\n",
    ],
)
def test_events_cuda_and_other_queries_are_no_finding(tmp_path: Path, source: str) -> None:
    assert audit_source(tmp_path, source, "HG105") == []


@pytest.mark.parametrize("name", ["engine/cuda/code.py", "engine/_xpu/code.py", "nccl_transport.py"])
def test_a_file_for_another_device_asks_streams_what_it_likes(tmp_path: Path, name: str) -> None:
    assert audit_source(tmp_path, "def f(stream):\n    return stream.query()\n", "HG105", name) == []


# --- HG106: unbounded waits in teardown ---


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("class W:\n    def close(self):\n        self.thread.join()\n", [3]),
        ("class W:\n    def __exit__(self, *error):\n        self.process.terminate()\n"
         "        self.process.wait()\n", [4]),
        ("class W:\n    def __del__(self):\n        self.queue.get()\n", [3]),
        ("class W:\n    def shutdown(self):\n        self.pipe.recv()\n", [3]),
        ("import torch.distributed as dist\ndef destroy():\n    dist.barrier()\n"
         "    dist.destroy_process_group()\n", [3, 4]),
        ("from torch.distributed import barrier\ndef stop_workers():\n    barrier()\n", [3]),
        ("import ray\ndef shutdown(actors):\n    ray.get([a.stop.remote() for a in actors])\n", [3]),
        ("import atexit\ndef farewell():\n    thread.join()\natexit.register(farewell)\n", [3]),
        ("import signal\ndef on_term(signum, frame):\n    child.wait()\n"
         "signal.signal(signal.SIGTERM, on_term)\n", [3]),
        ("import atexit\n@atexit.register\ndef farewell():\n    future.result()\n", [4]),
        ("class W:\n    def close(self):\n        self.executor.shutdown(wait=True)\n", [3]),
        ("class W:\n    def stop(self):\n        self.thread.join(timeout=None)\n", [3]),
        ("class W:\n    async def close(self):\n        await self.process.wait()\n", [3]),
    ],
)  # fmt: skip
def test_a_wait_without_a_bound_in_teardown_is_found(tmp_path: Path, source: str, lines: list[int]) -> None:
    assert audit_source(tmp_path, source, "HG106") == lines


@pytest.mark.parametrize(
    "source",
    [
        "class W:\n    def close(self):\n        self.thread.join(timeout=5)\n        self.thread.join(5)\n",
        "class W:\n    def run(self):\n        self.thread.join()\n",
        "def close(names):\n    return ', '.join(names)\n",
        "class W:\n    def close(self):\n        self.process.kill()\n        self.process.wait()\n",
        "import asyncio\nasync def close(p):\n    await asyncio.wait_for(p.wait(), 5)\n",
        "import asyncio\nasync def close(p):\n    async with asyncio.timeout(5):\n        await p.wait()\n",
        "def close(future):\n    if future.done():\n        future.result()\n",
        "def stop(handle):\n    if handle.done:\n        handle.wait()\n",
        "import torch.distributed as dist\nclass Profiler:\n    def stop(self):\n        dist.barrier()\n",
        "class W:\n    def shutdown(self):\n        if self.pipe.poll(1.0):\n            self.pipe.recv()\n",
        "import ray\ndef shutdown(a):\n    ray.get(a.stop.remote(), timeout=5)\n",
        "def close(self):\n    return self.context.get()\n",
        "async def shutdown(self):\n    await self.shutdown_event.wait()\n",
        "import torch.distributed as dist\ndef stop_profile():\n    dist.barrier()\n",
        "def close(self):\n    def later():\n        self.thread.join()\n    return later\n",
    ],
)
def test_a_bounded_wait_or_one_elsewhere_is_no_finding(tmp_path: Path, source: str) -> None:
    assert audit_source(tmp_path, source, "HG106") == []
