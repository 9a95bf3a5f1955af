"""Runs several outside tools at once, each with a bound on its time and on its output.

What the tools are and what their output means is the callers' business. A tool that is late is killed with
all processes that it started.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

AT_ONCE = 32
"""Tools that run at the same time; each holds memory for the symbols of its target."""
OUTPUT_LIMIT_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_KILL_GRACE_S = 2.0
_CLOSED_GRACE_S = 1.0
"""How long a tool that has closed its output may still live; the others are not read meanwhile."""
_WORDS_CHARACTERS = 500

Key = TypeVar("Key")
Command: TypeAlias = Sequence[str]


@dataclass(frozen=True, slots=True)
class ToolResult:
    """``problem`` None: the tool ended by itself with status 0. ``killed``: it was ended by us."""

    stdout: bytes
    stderr: bytes
    returncode: int | None
    killed: bool
    problem: str | None


@dataclass(slots=True)
class _Running(Generic[Key]):
    key: Key
    process: subprocess.Popen[bytes]
    output: dict[int, bytearray] = field(default_factory=dict)
    problem: str | None = None
    unread: int = 0
    """Its streams that have not come to their end."""


def run_tools(commands: Mapping[Key, Command], *, deadline_s: float) -> dict[Key, ToolResult]:
    """Runs all commands at the same time, but no more than ``AT_ONCE``. ``deadline_s`` is a point of
    ``time.monotonic``.

    Never raises for what a tool does: each result says what went wrong, in the tool's own words where it has
    any.
    """
    results: dict[Key, ToolResult] = {}
    waiting = deque(commands.items())
    running: set[Key] = set()
    with selectors.DefaultSelector() as selector:
        tools: list[_Running[Key]] = []
        while waiting or running:
            while waiting and len(running) < AT_ONCE and time.monotonic() < deadline_s:
                key, command = waiting.popleft()
                started = _start(key, command, selector)
                if isinstance(started, ToolResult):
                    results[key] = started
                else:
                    tools.append(started)
                    running.add(key)
            if time.monotonic() >= deadline_s:
                break
            if not running:
                continue  # none of them could start: there is nothing to hear from
            for ended in _read(selector, deadline_s):
                results[ended.key] = _finish(ended, deadline_s)
                running.discard(ended.key)
        # Killed together, waited for one after the other.
        late = [tool for tool in tools if tool.key in running]
        for tool in late:
            tool.problem = "killed: it had not ended at the deadline"
            _kill(tool.process)
        results |= {tool.key: _finish(tool, deadline_s) for tool in late}
    for key, command in waiting:
        problem = f"{command[0]}: not started, the deadline had passed"
        results[key] = ToolResult(b"", b"", None, False, problem)
    return {key: results[key] for key in commands}


def _start(key: Key, command: Command, selector: selectors.BaseSelector) -> _Running[Key] | ToolResult:
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        return ToolResult(b"", b"", None, False, f"{command[0]}: cannot start ({error.strerror})")
    tool = _Running(key, process)
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            tool.output[stream.fileno()] = bytearray()
            tool.unread += 1
            selector.register(stream, selectors.EVENT_READ, tool)
    return tool


def _read(selector: selectors.BaseSelector, deadline_s: float) -> list[_Running[Any]]:
    """One round of reading; returns the tools whose streams have all ended, or that said too much."""
    ended: list[_Running[Any]] = []
    for ready, _ in selector.select(max(0.0, deadline_s - time.monotonic())):
        tool: _Running[Any] = ready.data
        if tool.problem is not None:
            continue  # it was just killed; its other stream is closed with it
        data = os.read(ready.fd, _CHUNK_BYTES)
        held = tool.output[ready.fd]
        held += data[: OUTPUT_LIMIT_BYTES - len(held)]
        if not data:
            selector.unregister(ready.fileobj)
            tool.unread -= 1
        elif len(held) >= OUTPUT_LIMIT_BYTES:
            tool.problem = f"more than {OUTPUT_LIMIT_BYTES >> 20} MiB of output"
            _kill(tool.process)
            for stream in (tool.process.stdout, tool.process.stderr):
                if stream is not None and stream in _registered(selector):
                    selector.unregister(stream)
        if tool.problem is not None or tool.unread == 0:
            ended.append(tool)
    return ended


def _registered(selector: selectors.BaseSelector) -> list[Any]:
    return [key.fileobj for key in selector.get_map().values()]


def _finish(tool: _Running[Any], deadline_s: float) -> ToolResult:
    """Waits for a tool that has closed its streams or was killed."""
    process = tool.process
    killed = tool.problem is not None
    try:
        left_s = max(0.0, deadline_s - time.monotonic())
        process.wait(_KILL_GRACE_S if killed else min(_CLOSED_GRACE_S, left_s))
    except subprocess.TimeoutExpired:
        if not killed:
            killed = True
            tool.problem = "killed: it had closed its output and did not end"
            _kill(process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_GRACE_S)
    if process.returncode is None:
        tool.problem = f"did not end at the deadline, nor within {_KILL_GRACE_S} s of being killed"
    for stream in (process.stdout, process.stderr):
        if stream is not None:
            stream.close()
    stdout, stderr = (bytes(held) for held in tool.output.values())
    problem = tool.problem
    if problem is None and process.returncode != 0:
        problem = _words(stderr) or f"ended with status {process.returncode} and said nothing"
    return ToolResult(stdout, stderr, process.returncode, killed, problem)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):  # It ended just now.
        os.killpg(process.pid, signal.SIGKILL)


def _words(stderr: bytes) -> str:
    """What the tool said, without its own stack, on one line."""
    said = stderr.decode("utf-8", "replace").split("Stack backtrace:")[0]
    return " ".join(said.split())[:_WORDS_CHARACTERS]
