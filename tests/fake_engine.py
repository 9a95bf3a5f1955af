"""A small engine as a double for the launcher's tests: a real process tree behind real HTTP, and no model.

    python fake_engine.py --port N [--ranks 2] [...]

The server starts one scheduler a rank, and a controller, with titles of their own, and has all schedulers make one
step after the other: each step waits for all of them, so that one that stops holds up everybody, as a collective
does. A token is a function of its prompt and its place. Standard library only: it runs in any Python.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REFUSED, BROKEN, STUCK, GARBLED, FATAL = 5001, 5002, 5003, 5004, 5005
"""First tokens of prompts that the server does not serve like others: HTTP 400, an error in the stream, no token at
all, an event that is no JSON, HTTP 500."""
STEP_S = 0.01


def token(prompt: list[int], place: int) -> int:
    return zlib.crc32(repr((prompt, place)).encode()) % 1000 + 1


# A scheduler -----------------------------------------------------------------------------------------------


def schedule(retract_every: int) -> None:
    """One line in, one line out: the requests of a step, and the token of each."""
    running: dict[str, dict[str, Any]] = {}
    steps = 0
    for line in sys.stdin:
        for request in json.loads(line)["new"]:
            running[request["id"]] = {**request, "made": 0, "retracted": 0}
        steps += bool(running)
        if retract_every and running and steps % retract_every == 0:
            loser = running[max(running)]
            loser["retracted"] += 1
        made = {}
        for name, request in list(running.items()):
            if request["prompt"][0] == STUCK:
                continue
            request["made"] += 1
            over = request["made"] >= request["count"]
            made[name] = [token(request["prompt"], request["made"] - 1), over, request["retracted"]]
            if over:
                del running[name]
        print(json.dumps({"made": made, "running": len(running), "pid": os.getpid()}), flush=True)


# The server ------------------------------------------------------------------------------------------------


class Engine:
    """Schedulers, and the loop that has them step."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.streams: dict[str, queue.Queue[Any]] = {}
        self.waiting: list[list[dict[str, Any]]] = [[] for _ in range(options.ranks)]
        self.lock = threading.Lock()
        self.counts = {"retractions": 0, "tokens": 0, "steps": 0, "peak": 0}
        self.running = [0] * options.ranks
        self.stepped_s = time.monotonic()
        here = str(Path(__file__).resolve())
        self.schedulers = [
            subprocess.Popen(
                [
                    f"fake::scheduler_DP{rank + options.first_rank}_TP{rank + options.first_rank}",
                    here,
                    "--schedule",
                    str(options.retract_every),
                ],
                executable=sys.executable,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(options.ranks)
        ]
        self.controller = subprocess.Popen(
            ["fake::data_parallel_controller", here, "--idle"],
            executable=sys.executable,
            stdin=subprocess.PIPE,
        )
        if options.orphan:
            # Its parent is gone at once, and so is its session.
            subprocess.run(
                [sys.executable, here, "--orphan-maker"], check=True, timeout=30, stdout=subprocess.DEVNULL
            )

    def children(self) -> list[subprocess.Popen[Any]]:
        return [*self.schedulers, self.controller]

    def loop(self) -> None:
        while True:
            for rank, scheduler in enumerate(self.schedulers):
                with self.lock:
                    new, self.waiting[rank] = self.waiting[rank], []
                try:
                    assert scheduler.stdin is not None
                    scheduler.stdin.write(json.dumps({"new": new}) + "\n")
                    scheduler.stdin.flush()
                except OSError:
                    pass  # it is found dead below
            for rank, scheduler in enumerate(self.schedulers):
                assert scheduler.stdout is not None
                line = scheduler.stdout.readline()
                if not line:
                    self.lost(rank)
                self.answered(rank, json.loads(line))
            self.stepped_s = time.monotonic()
            time.sleep(STEP_S)

    def lost(self, rank: int) -> None:
        print(f"[TP{rank}] Traceback (most recent call last): scheduler {rank} died", flush=True)
        if self.options.deaf:
            threading.Event().wait()
        self.end(1)

    def answered(self, rank: int, answer: dict[str, Any]) -> None:
        self.running[rank] = answer["running"]
        self.counts["peak"] = max(self.counts["peak"], sum(self.running))
        self.counts["steps"] += bool(answer["made"])
        for name, (made, over, retracted) in answer["made"].items():
            self.counts["tokens"] += 1
            stream = self.streams[name]
            if over:
                self.counts["retractions"] += retracted
                if retracted:
                    print(f"[TP{rank}] Testing retraction. #retracted_reqs: {retracted}", flush=True)
            stream.put((made, over, retracted, rank))

    def submit(self, body: dict[str, Any]) -> queue.Queue[Any]:
        stream: queue.Queue[Any] = queue.Queue()
        rank = body.get("rank") or 0
        with self.lock:
            self.streams[body["id"]] = stream
            self.waiting[rank].append({"id": body["id"], "prompt": body["prompt"], "count": body["count"]})
        return stream

    def healthy(self) -> bool:
        return time.monotonic() - self.stepped_s < 1.0

    def watchdog(self) -> None:
        while time.monotonic() - self.stepped_s < self.options.watchdog:
            time.sleep(0.1)
        print(f"Scheduler watchdog timeout ({self.options.watchdog:g} s)", flush=True)
        self.end(2)

    def end(self, status: int) -> None:
        for child in self.children():
            child.kill()
        os._exit(status)


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def plain(self, status: int, text: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            if self.path == "/health":
                self.plain(200 if engine.healthy() and not engine.options.unhealthy else 503)
            elif self.path == "/metrics":
                self.plain(200, metrics(engine))
            else:
                self.plain(404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if self.path == "/flush":
                return self.plain(200)
            kind = body["prompt"][0]
            if kind == REFUSED or engine.options.refuse:
                return self.plain(400, "I do not like this prompt")
            if kind == FATAL:
                return self.plain(500, "the engine is dead")
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            if kind == BROKEN:
                return self.event({"error": "out of luck"})
            if kind == GARBLED:
                self.wfile.write(b"data: {nonsense\n\n")
                return None
            stream = engine.submit(body)
            while True:
                made, over, retracted, rank = stream.get()
                event = {"tokens": [made], "finish": "length" if over else None}
                self.event({**event, "retractions": retracted, "rank": rank})
                if over:
                    self.wfile.write(b"data: [DONE]\n\n")
                    return None

        def event(self, event: dict[str, Any]) -> None:
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    return Handler


def metrics(engine: Engine) -> str:
    lines = ["# TYPE fake_running gauge"]
    lines += [f'fake_running{{dp_rank="{rank}"}} {count}' for rank, count in enumerate(engine.running)]
    lines += ["# TYPE fake_used gauge", f"fake_used {engine.options.leak}"]
    for name in ("retractions", "tokens", "steps"):
        lines += [f"# TYPE fake_{name} counter", f"fake_{name}_total {engine.counts[name]}"]
    lines += ["# TYPE fake_peak gauge", f"fake_peak {engine.counts['peak']}"]
    return "\n".join(lines) + "\n"


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128


def serve(options: argparse.Namespace) -> None:
    print("fake engine: starting", flush=True)
    if options.die:
        print("RuntimeError: this engine was told to die", flush=True)
        sys.exit(3)
    if options.once and not Path(options.once).exists():
        Path(options.once).touch()
        print("OSError: [Errno 98] Address already in use", flush=True)
        sys.exit(1)
    engine = Engine(options)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if options.deaf else lambda number, frame: engine.end(0))
    threading.Thread(target=engine.loop, daemon=True).start()
    if options.watchdog:
        threading.Thread(target=engine.watchdog, daemon=True).start()
    server = Server(("127.0.0.1", options.port), handler(engine))
    print("fake engine: ready to roll", flush=True)
    server.serve_forever()


def make_orphan() -> None:
    if os.fork() > 0:
        os._exit(0)
    os.setsid()
    os.execv(sys.executable, [sys.executable, str(Path(__file__).resolve()), "--idle-for-ever"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--first-rank", type=int, default=0, help="of a node")
    parser.add_argument("--retract-every", type=int, default=0, help="steps between two retractions")
    parser.add_argument(
        "--watchdog", type=float, default=0.0, help="seconds without a step until it ends itself"
    )
    parser.add_argument("--leak", type=int, default=0, help="KV tokens that are never given back")
    parser.add_argument("--die", action="store_true", help="during the start")
    parser.add_argument("--once", default="", help="a file: the first start says that its port is taken")
    parser.add_argument("--unhealthy", action="store_true")
    parser.add_argument("--refuse", action="store_true", help="every generation")
    parser.add_argument("--deaf", action="store_true", help="to SIGTERM, and to the death of schedulers")
    parser.add_argument("--orphan", action="store_true", help="start a process that leaves the tree")
    parser.add_argument("--schedule", type=int, default=None, help=argparse.SUPPRESS)
    for hidden in ("--idle", "--idle-for-ever", "--orphan-maker"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.schedule is not None:
        schedule(options.schedule)
    elif options.orphan_maker:
        make_orphan()
    elif options.idle_for_ever:
        threading.Event().wait()
    elif options.idle:
        sys.stdin.read()
    else:
        serve(options)


if __name__ == "__main__":
    main()
