"""What a running server says of itself over HTTP: its metrics, and whether it is well.

Here: where it listens, one bounded request, and what SGLang's and vLLM's metrics say of requests and progress. A
server may be sick: every request has a deadline, and no answer is an answer. Not here: the client of the targets,
which sends work (`serving.targets`).
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Literal, TypeAlias

HealthState: TypeAlias = Literal["well", "asked", "unwell", "unknown"]

_LIMIT_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_LISTEN = "0A"  # net/tcp_states.h
_SOCKET = re.compile(r"^socket:\[(\d+)\]$")
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{.*\})?\s+([-+\w.]+)(?:\s+\d+)?$")
_RUNNING = frozenset({"sglang:num_running_reqs", "vllm:num_requests_running"})
_WAITING = frozenset({"sglang:num_queue_reqs", "vllm:num_requests_waiting"})
# What grows while an engine works and stands when it does not. Not: processor time, what arrives, what the server
# itself counts of HTTP, and when a counter was made.
_PROGRESS = re.compile(
    r"^(?:sglang|vllm)[:_](?!http)\w*(?:token|forward_execution|attention_steps|preempt|retract|graph_passes)\w*$"
)
_NO_PROGRESS = re.compile(r"_created$|max_total_num_tokens|_bucket$|hicache_host_total|encoder")
_TOKENS = re.compile(r"^(?:sglang|vllm)[:_](?:realtime_tokens|generation_tokens|prompt_tokens)_total$")
# Only this machine is asked; a proxy would not know it.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Traffic:
    """``running`` and ``waiting``: requests, now; None: not among the metrics. ``tokens``: prompt and output tokens
    since the server started. ``marks``: every sample that moves while the engine works."""

    running: float | None
    waiting: float | None
    tokens: float | None
    marks: Mapping[str, float] = field(repr=False)

    @property
    def owed(self) -> bool | None:
        """Requests are in the engine; None: not known."""
        known = [count for count in (self.running, self.waiting) if count is not None]
        return any(count > 0 for count in known) if known else None

    def words(self) -> str:
        counts = ((self.running, "running"), (self.waiting, "waiting"))
        said = ", ".join(f"{count:g} {word}" for count, word in counts if count is not None)
        tokens = f", {self.tokens:g} tokens so far" if self.tokens is not None else ""
        return f"{said or 'requests not counted'}{tokens}"


def read_metrics(text: str) -> Traffic:
    """Prometheus' text format as SGLang and vLLM fill it; lines that are no samples are left out."""
    totals: dict[str, float] = {}
    marks: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        with suppress(ValueError):
            name, value = match[1], float(match[3])
            totals[name] = totals.get(name, 0.0) + value
            if _PROGRESS.match(name) and not _NO_PROGRESS.search(name):
                marks[match[1] + (match[2] or "")] = value
    return Traffic(
        running=_sum(totals, _RUNNING),
        waiting=_sum(totals, _WAITING),
        tokens=_sum(totals, frozenset(name for name in totals if _TOKENS.match(name))),
        marks=marks,
    )


def _sum(totals: Mapping[str, float], names: frozenset[str]) -> float | None:
    found = [totals[name] for name in names if name in totals]
    return sum(found) if found else None


@dataclass(frozen=True, slots=True)
class Answer:
    """``status`` None: there was no answer, and ``why`` says how it came."""

    status: int | None
    text: str = ""
    why: str = ""


def get(url: str, deadline_s: float) -> Answer:
    """One GET, whole within about ``deadline_s`` (each wait for more of it is bounded too). Never raises."""
    ends_s = time.monotonic() + deadline_s
    late = Answer(None, why=f"no answer within {deadline_s:g} s")
    try:
        with _OPENER.open(url, timeout=deadline_s) as response:
            content = b""
            while len(content) < _LIMIT_BYTES and (more := response.read1(_CHUNK_BYTES)):
                content += more
                if time.monotonic() > ends_s:
                    return late
            return Answer(response.status, content.decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code)
    except TimeoutError:
        return late
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, "reason", error)
        return (
            late
            if isinstance(reason, TimeoutError)
            else Answer(None, why=str(reason) or type(error).__name__)
        )


def listening(pid: int) -> tuple[tuple[str, int], ...]:
    """Addresses and ports on which the process waits for TCP connections, in its own network namespace; an address
    for all is given as the loopback one. Empty where we may not look."""
    inodes = set()
    folder = Path("/proc") / str(pid)
    with suppress(OSError):
        for entry in (folder / "fd").iterdir():
            with suppress(OSError):
                match = _SOCKET.match(str(entry.readlink()))
                if match is not None:
                    inodes.add(match[1])
    found = []
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (folder / "net" / name).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN and fields[9] in inodes:
                    found.append(_address(fields[1]))
    return tuple(dict.fromkeys(found))


def base_url(pid: int, command: Sequence[str], default_port: int, deadline_s: float) -> str | None:
    """Where the server ``pid`` answers HTTP: its ``--port``, else its engine's usual one, else another that it
    listens on and that answers ``GET /metrics``. None: nowhere that we can see."""
    places = listening(pid)
    named = _flag(command, "--port")
    for port in (int(named) if named and named.isdecimal() else None, default_port):
        for address, number in places:
            if number == port:
                return _url(address, number)
    for address, number in places:
        if get(f"{_url(address, number)}/metrics", deadline_s).status is not None:
            return _url(address, number)
    return None


class HealthCheck:
    """Asks ``/health`` in a thread of its own, one request at a time.

    SGLang answers when anything came back from its schedulers after the question, and asks them for one token when
    they are idle; it gives up after 20 s with 503 (``http_server.py``, read). vLLM only says whether its engine has
    died.
    """

    def __init__(self, url: str, *, deadline_s: float, pause_s: float) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._state: HealthState = "unknown"
        self._why = "not asked yet"
        self._asked_s: float | None = None
        self._well_s: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="hangrig-health", daemon=True)
        self._thread.start()

    @property
    def state(self) -> HealthState:
        """The last answer; ``asked`` while the first is out."""
        with self._lock:
            return self._state

    @property
    def why(self) -> str:
        with self._lock:
            return self._why

    @property
    def well_s(self) -> float | None:
        """When the server last began an answer that it is well, by ``time.monotonic``."""
        with self._lock:
            return self._well_s

    def asked_for_s(self) -> float:
        """How long the present question has been out; 0: none is."""
        with self._lock:
            return 0.0 if self._asked_s is None else time.monotonic() - self._asked_s

    def close(self) -> None:
        """Asks no more. A question that is out ends by its own deadline."""
        self._ended.set()

    def _ask(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                self._asked_s = time.monotonic()
                if self._state == "unknown":
                    self._state, self._why = "asked", "no answer yet"
            answer = get(self._url, self._deadline_s)
            with self._lock:
                if answer.status == 200:
                    self._state, self._why, self._well_s = "well", "answered 200", self._asked_s
                else:
                    self._state = "unwell"
                    self._why = answer.why or f"answered {answer.status}"
                self._asked_s = None
            self._ended.wait(self._pause_s)


def _flag(command: Sequence[str], flag: str) -> str | None:
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else next(iter(command[position + 1 :]), None)
    return None


def _url(address: str, port: int) -> str:
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"


def _address(text: str) -> tuple[str, int]:
    """``0100007F:1F90`` as ``("127.0.0.1", 8080)``: words of four bytes, each in the machine's order."""
    host, port = text.split(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    raw = struct.pack(f"={len(words)}I", *words)
    if not any(raw):
        return ("127.0.0.1", int(port, 16))
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return (socket.inet_ntop(family, raw), int(port, 16))
