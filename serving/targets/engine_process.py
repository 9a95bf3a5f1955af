"""One node's server of a foreign engine as a set of processes: started, listed, ended, whatever state it is in.

The server runs in a session of its own with everything it prints in one file. All its processes carry a mark in
their environment; the launcher that starts it is their subreaper, so orphans stay its descendants; and a guard
outside both ends what carries the mark when the launcher itself was killed (``engine_guard.py``).

Not here: who sits where (``engine_tree.py``), what the server prints (``engine_log.py``), whether it serves
(``engine_host.py``).
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from harness import process_control
from harness.process_control import ProcessId
from serving.targets import engine_shm, engine_tree
from serving.targets.dialect import Command
from serving.targets.engine_tree import MARK, TreeProcess

PROBE_ENV = "HANGRIG_PROBE"
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_GUARD_S = 30.0
_TRACKERS_S = 2.0
"""Python's resource trackers get so long to remove shared memory after the processes that made it."""
_FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS", PROBE_ENV, MARK)
"""Set for the launcher, by Ray or by hangrig's own environment, and wrong for the engine."""
_SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY", "CREDENTIALS")
"""Last words of the names of what must not be shown."""
_FIRST_PORT = 20000


class StartError(RuntimeError):
    """A server that could not be started. The message says what to do."""


class EngineServer:
    """A running server. Not for several threads, but for ``processes`` and ``exit_words``."""

    def __init__(self, command: Command, env: Mapping[str, str], folder: Path, mark: str) -> None:
        """Starts it. ``env``: what is laid over the launcher's environment. Raises StartError."""
        self.mark = mark
        self.log_path = folder / "server.log"
        self.env = environment(command, env, mark)
        self.started = time.time()
        self._memory: set[Path] = set()
        try:
            self.log_path.unlink(missing_ok=True)  # of an attempt before
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    command.arguments,
                    env=self.env,
                    cwd=folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(f"cannot start {command.arguments[0]}: {error.strerror} ({folder})") from error
        # Not gone yet: it is our child, and nobody has waited for it.
        self.id = process_control.identify(self._process.pid) or ProcessId(self._process.pid, 0)

    def exit_words(self) -> str | None:
        """How the server's first process ended; None while it lives."""
        code = self._process.poll()
        return None if code is None else exit_words(code << 8 if code >= 0 else -code)

    def processes(self) -> list[TreeProcess]:
        return engine_tree.find(self.mark, os.getpid())

    def remember(self) -> list[ProcessId]:
        """All processes of now. Their shared memory is removed at the end, also when they have gone by then."""
        now = [process.id for process in self.processes()]
        self._memory |= engine_shm.of(process.pid for process in now)
        return now

    def end(self, deadline_s: float, grace_s: float) -> list[TreeProcess]:
        """Asks the server to end, then kills all its processes, stopped ones too. Returns what lives on."""
        deadline = time.monotonic() + deadline_s
        all_of_them = self.remember()
        if grace_s > 0 and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            process_control.wait_gone(all_of_them, min(grace_s, deadline_s))
        left = end_marked(self.mark, self.started, deadline, os.getpid(), self._process)
        _reap(all_of_them, self._process)
        engine_shm.remove(self._memory, self.started)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        return left


def end_marked(
    mark: str,
    since: float,
    deadline: float,
    adopter: int | None = None,
    child: subprocess.Popen[bytes] | None = None,
) -> list[TreeProcess]:
    """Kills all processes of the server marked ``mark``; returns what lives at ``deadline`` (monotonic seconds).

    Repeated until a look finds none: a process may start another while it is being ended. Shared memory that
    they had mapped and that was made after ``since`` (seconds of the wall clock) goes too. Orphans that are this
    process's children by now are waited for; ``child``, the server, keeps its exit status.
    """
    memory: set[Path] = set()
    while True:
        found = engine_tree.find(mark, adopter)
        if not found or time.monotonic() > deadline:
            break
        memory |= engine_shm.of(process.id.pid for process in found)
        trackers = [process.id for process in found if process.is_tracker]
        others = [process.id for process in found if not process.is_tracker]
        process_control.end(others, max(0.0, deadline - time.monotonic()), grace_s=0.0)
        _reap(others, child)
        process_control.wait_gone(trackers, min(_TRACKERS_S, max(0.0, deadline - time.monotonic())))
        process_control.end(trackers, max(0.0, deadline - time.monotonic()), grace_s=0.0)
        _reap(trackers, child)
    engine_shm.remove(memory, since)
    return found


def _reap(ended: list[ProcessId], child: subprocess.Popen[bytes] | None) -> None:
    """A subreaper inherits orphans, and their zombies with them. ``child`` is left to its ``Popen``, which would
    take a status that somebody else has read for 0."""
    if child is not None:
        child.poll()
    for process in ended:
        if child is not None and process.pid == child.pid:
            continue
        stat = process_control.find(process)
        if stat is not None and stat.gone and stat.parent == os.getpid():
            with suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def environment(command: Command, env: Mapping[str, str], mark: str) -> dict[str, str]:
    """The whole environment of a server: the launcher's without what is Ray's and hangrig's own, the dialect's
    words, and the mark. Programs beside the engine's interpreter come first, as if it were activated."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _FOREIGN and not name.startswith("RAY_")
    }
    programs = str(Path(command.arguments[0]).parent)
    inherited["PATH"] = os.pathsep.join(filter(None, (programs, inherited.get("PATH", ""))))
    path = [part for part in (env.get("PYTHONPATH"), command.env.get("PYTHONPATH")) if part]
    ours = {
        # A title must not be written over the mark (setproctitle).
        "SPT_NOENV": "1",
        "PYTHONUNBUFFERED": "1",
        MARK: mark,
        **({"PYTHONPATH": os.pathsep.join(path)} if path else {}),
    }
    return {**inherited, **env, **command.env, **ours}


def shown(env: Mapping[str, str]) -> dict[str, str]:
    """Variables as they may be stored and printed: what looks like a secret by its name keeps only that."""
    return {
        name: "***" if name.upper().split("_")[-1] in _SECRET else value
        for name, value in sorted(env.items())
    }


def exit_words(code: int) -> str:
    """``signal SIGKILL`` or ``status 1``, of a code as ``waitpid`` gives it."""
    if code & 0x7F:
        number = code & 0x7F
        return f"signal {signal.Signals(number).name if number in set(signal.Signals) else number}"
    return f"status {code >> 8}"


def become_subreaper() -> None:
    """From now on orphans among this process's descendants are its children. Raises StartError."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise StartError(f"cannot adopt orphans: {os.strerror(ctypes.get_errno())} (PR_SET_CHILD_SUBREAPER)")


def start_guard(mark: str) -> ProcessId:
    """The process that ends the server when this one is gone. Call it before ``become_subreaper``: it must be
    nobody's descendant. Raises StartError."""
    own = process_control.myself()
    command = [
        sys.executable,
        "-m",
        "serving.targets.engine_guard",
        str(own.pid),
        str(own.start_time_ticks),
        mark,
    ]
    starter = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    assert starter.stdout is not None
    try:
        ready, _, _ = select.select([starter.stdout], [], [], _GUARD_S)
        line = starter.stdout.readline() if ready else b""
        starter.wait(_GUARD_S)
    except subprocess.TimeoutExpired:
        starter.kill()
        raise StartError(f"the guard did not detach within {_GUARD_S:g} s") from None
    finally:
        starter.stdout.close()
    guard = process_control.identify(int(line)) if line.strip().isdigit() else None
    if guard is None:
        raise StartError(f"the guard did not start (status {starter.returncode}): {' '.join(command)}")
    return guard


def free_ports(count: int, tries: int = 100) -> list[int]:
    """``count`` consecutive ports that nobody uses now, below those that the kernel deals out. Raises
    StartError."""
    try:
        first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        first_ephemeral = 32768
    last = (first_ephemeral if first_ephemeral > _FIRST_PORT + 2 * count else 65000) - count
    dice = random.SystemRandom()
    for _ in range(tries):
        first = dice.randint(_FIRST_PORT, last)
        if all(_is_free(port) for port in range(first, first + count)):
            return list(range(first, first + count))
    raise StartError(
        f"no {count} consecutive free ports between {_FIRST_PORT} and {last} after {tries} tries"
    )


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True
