"""A tiny engine of real processes for tests of ``hangrig watch``: titles, places and metrics as SGLang's.

Two ranks run all-reduces of torch over gloo, a controller looks for work, a server answers ``/metrics`` and
``/health``. Only the engine's own code is small: it lies in files whose names are SGLang's, so that its places are
known. What it does is said by files in its folder: ``work`` (batches), ``hold-<seat>`` (that process waits for a
lock that nobody gives back), ``skip-1`` (rank 1 leaves a collective out and looks for requests), ``spin-1`` (it
computes).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.process_control import children_of, end, identify
from harness.process_tree import Tree, read_tree

READY_S = 90.0

COMMON = '''
import ctypes, os, threading, time
from pathlib import Path

FOLDER = Path(os.environ["TINY_FOLDER"])
LOCK = threading.Lock()
LOCK.acquire()


def told(name):
    return (FOLDER / name).exists()


def set_title(title):
    """As setproctitle does: over the arguments."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, title.encode(), len(title))
'''

SCHEDULER = """
import os, sys, time
import torch
import torch.distributed as dist
from sglang.common import FOLDER, LOCK, set_title, told


class Scheduler:
    def __init__(self, rank):
        self.rank, self.tokens = rank, 0
        set_title(f"sglang::scheduler_DP{rank}_TP{rank}")
        dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=rank, world_size=2)
        (FOLDER / f"up-{rank}").touch()

    def recv_requests(self):
        time.sleep(0.005)
        (FOLDER / f"beat-{self.rank}").touch()
        return told("work")

    def event_loop_normal(self):
        while True:
            if self.recv_requests():
                self.run_batch()

    def run_batch(self):
        if told(f"hold-{self.rank}"):
            self.take_lock()
        if told(f"skip-{self.rank}"):
            while True:
                self.recv_requests()
        while told(f"spin-{self.rank}"):
            self.forward()
        self.forward()
        dist.all_reduce(torch.ones(4))
        self.tokens += 1
        if self.rank == 0:
            (FOLDER / "tokens.tmp").write_text(str(self.tokens))
            os.replace(FOLDER / "tokens.tmp", FOLDER / "tokens")

    def take_lock(self):
        LOCK.acquire()

    def forward(self):
        return torch.ones(64, 64) @ torch.ones(64, 64)


if __name__ == "__main__":
    Scheduler(int(sys.argv[1])).event_loop_normal()
"""

CONTROLLER = """
import time
from sglang.common import FOLDER, LOCK, set_title, told


class DataParallelController:
    def event_loop(self):
        while True:
            time.sleep(0.01)
            if told("hold-controller"):
                self.dispatch()

    def dispatch(self):
        LOCK.acquire()


if __name__ == "__main__":
    set_title("sglang::data_parallel_controller")
    DataParallelController().event_loop()
"""

SERVER = '''
import asyncio, os, subprocess, sys, time
from sglang.common import FOLDER, told

PADDING = "-" * 60  # room for a title


async def answer(reader, writer):
    path = (await reader.readline()).decode().split(" ")[1]
    while (await reader.readline()).strip():
        pass
    status, body = "404 Not Found", ""
    if path == "/metrics" and "--enable-metrics" in sys.argv:
        tokens = (FOLDER / "tokens").read_text() if told("tokens") else "0"
        status = "200 OK"
        body = (
            "# TYPE sglang:num_running_reqs gauge\\n"
            f'sglang:num_running_reqs{{dp_rank="0"}} {float(told("work"))}\\n'
            f'sglang:realtime_tokens_total{{mode="decode"}} {tokens}.0\\n'
        )
    if path == "/health":
        status = "200 OK" if await beats() else "503 Service Unavailable"
    head = f"HTTP/1.1 {status}\\r\\nContent-Length: {len(body)}\\r\\nConnection: close\\r\\n\\r\\n"
    writer.write((head + body).encode())
    await writer.drain()
    writer.close()


async def beats():
    """Both ranks looked for work since the question, and the controller would have told them."""
    asked = time.time()
    while time.time() < asked + 20 and not told("mute"):
        await asyncio.sleep(0.05)
        times = [(FOLDER / f"beat-{rank}").stat().st_mtime for rank in (0, 1)]
        if min(times) > asked and not told("hold-controller"):
            return True
    await asyncio.sleep(max(0.0, asked + 20 - time.time()))
    return False


async def serve():
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))
    async with server:
        (FOLDER / "serving").touch()
        await server.serve_forever()


def main():
    for arguments in (("scheduler", "0"), ("scheduler", "1"), ("data_parallel_controller",)):
        subprocess.Popen([sys.executable, "-m", f"sglang.srt.managers.{arguments[0]}", *arguments[1:], PADDING])
    asyncio.run(serve())


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True, slots=True)
class TinyEngine:
    """``pid`` is its server's."""

    pid: int
    folder: Path

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def untell(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def tree(self) -> Tree:
        return read_tree(self.pid)

    def pid_of(self, seat: object) -> int:
        return next(member.process.pid for member in self.tree().members if member.seat == seat)

    def wait_for_tokens(self, more: int = 5) -> None:
        """Until so many further batches ran."""
        start = self._tokens()
        deadline_s = time.monotonic() + READY_S
        while self._tokens() < start + more:
            if time.monotonic() > deadline_s:
                raise TimeoutError("the tiny engine runs no batches")
            time.sleep(0.02)

    def _tokens(self) -> int:
        path = self.folder / "tokens"
        return int(path.read_text() or 0) if path.exists() else 0


@contextmanager
def tiny_engine(folder: Path, port: int, *flags: str) -> Iterator[TinyEngine]:
    """A running engine, ended with all its processes, stopped ones too."""
    package = folder / "site-packages" / "sglang"
    (package / "srt" / "managers").mkdir(parents=True)
    for path in (package, package / "srt", package / "srt" / "managers"):
        (path / "__init__.py").write_text("")
    (package / "common.py").write_text(COMMON)
    (package / "launch_server.py").write_text(SERVER)
    (package / "srt" / "managers" / "scheduler.py").write_text(SCHEDULER)
    (package / "srt" / "managers" / "data_parallel_controller.py").write_text(CONTROLLER)
    state = folder / "state"
    state.mkdir()
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "site-packages"),
        "TINY_FOLDER": str(state),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--tp",
        "2",
        "--dp",
        "2",
        "--enable-dp-attention",
    ]
    command += ["--device", "cpu", "--port", str(port), *flags]
    log = folder / "server.log"
    with log.open("wb") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    known = {identify(server.pid)}
    try:
        deadline_s = time.monotonic() + READY_S
        while not all((state / name).exists() for name in ("up-0", "up-1", "serving")):
            known |= set(children_of(server.pid))
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the tiny engine did not come up: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield TinyEngine(server.pid, state)
    finally:
        known |= set(children_of(server.pid))
        left = end([process for process in known if process is not None], 10.0, grace_s=0.0)
        server.wait(10.0)
        if left:
            raise RuntimeError(f"processes of the tiny engine outlived its end: {left}")
