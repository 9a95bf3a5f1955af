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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

OUTPUT_LIMIT_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 16
_KILL_GRACE_S = 2.0
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
class _Running:
    process: subprocess.Popen[bytes]
    output: dict[int, bytearray] = field(default_factory=dict)
    problem: str | None = None


def run_tools(commands: Mapping[Key, Command], *, deadline_s: float) -> dict[Key, ToolResult]:
    """Runs all commands at the same time. ``deadline_s`` is a point of ``time.monotonic``.

    Never raises for what a tool does: each result says what went wrong, in the tool's own words where it has
    any.
    """
    results: dict[Key, ToolResult] = {}
    running: dict[Key, _Running] = {}
    with selectors.DefaultSelector() as selector:
        for key, command in commands.items():
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except OSError as error:
                results[key] = ToolResult(
                    b"", b"", None, False, f"{command[0]}: cannot start ({error.strerror})"
                )
                continue
            tool = running[key] = _Running(process)
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    tool.output[stream.fileno()] = bytearray()
                    selector.register(stream, selectors.EVENT_READ, tool)
        _read_all(selector, deadline_s)
    for key, tool in running.items():
        results[key] = _finish(tool, deadline_s)
    return results


def _read_all(selector: selectors.BaseSelector, deadline_s: float) -> None:
    while selector.get_map():
        remaining_s = deadline_s - time.monotonic()
        if remaining_s <= 0:
            return
        for ready, _ in selector.select(remaining_s):
            tool: _Running = ready.data
            data = os.read(ready.fd, _CHUNK_BYTES)
            held = tool.output[ready.fd]
            held += data[: OUTPUT_LIMIT_BYTES - len(held)]
            if not data:
                selector.unregister(ready.fileobj)
            elif len(held) >= OUTPUT_LIMIT_BYTES:
                tool.problem = f"more than {OUTPUT_LIMIT_BYTES >> 20} MiB of output"
                selector.unregister(ready.fileobj)
                _kill(tool.process)


def _finish(tool: _Running, deadline_s: float) -> ToolResult:
    process = tool.process
    killed = tool.problem is not None
    try:
        process.wait(max(0.0, deadline_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        killed = True
        tool.problem = "killed: it had not ended at the deadline"
        _kill(process)
        try:
            process.wait(_KILL_GRACE_S)
        except subprocess.TimeoutExpired:
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
