"""Ray clusters: one of our own as a set of processes, or one that exists already.

A cluster of our own is not a child of Ray's driver (a plain ``ray.init()`` takes every rank along when the
driver is killed): it is started by Ray's own command in a session of its own, every process of it carries a
mark in its environment, and it lives until ``stop`` or until the agent that guards it ends it. An existing
cluster is used and left as it was.

Here: start, connect, end. Not here: rank actors (``rank_pool.py``), agents (``agents.py``).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import ray

from harness import process_control
from harness.guarded import GuardedCluster
from harness.machine import read_first_line
from harness.process_control import ProcessId

CHECKOUT = Path(__file__).resolve().parents[1]
"""What workers need on their path to import the packages of this project."""
PACKAGES = ("harness", "serving")
MARK = "HANGRIG_CLUSTER"

_SOCKET_FOLDER_MAX = 40
"""Ray adds about 60 characters to its folder, and a socket's path has at most 107."""
_OBJECT_STORE_BYTES = 96 * 2**20
_SHUTDOWN_S = 5.0
_REACH_S = 5.0

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Without, a call after the end would start another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # setproctitle would write a worker's title over its environment, and with it over our mark.
    "SPT_NOENV": "1",
    # Ray makes its workers nice (15); ranks under stress are to compete like any engine.
    "RAY_worker_niceness": "0",
}
_FOREIGN = ("RAY_ADDRESS", "RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_NAMESPACE")
_TOKEN_VARIABLES = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


_CURRENT_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""Where `ray start` notes the address of the cluster of a machine (2.60)."""

_DAEMONS = ("raylet", "gcs_server")
_log = logging.getLogger("hangrig.ray")


class ClusterError(RuntimeError):
    """A cluster, a rank or an agent that cannot be started, reached or ended. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Node:
    """``name`` is unique in the cluster and fit for a file name. ``local``: this process runs on it."""

    id: str
    name: str
    address: str
    local: bool


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the local cluster offers. ``workers`` processes are started ahead, so that as many ranks find a
    warm one; ``gpus`` and ``npus`` are counts."""

    workers: int = 2
    gpus: int = 0
    npus: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment of every process of the cluster, ranks too, above this process's own."""


class Cluster(Protocol):
    """A cluster that ranks and agents run on."""

    @property
    def guarded(self) -> GuardedCluster | None:
        """What an agent has to end when the driver is gone; None for a cluster that is not ours."""

    @property
    def env(self) -> Mapping[str, str]:
        """Variables that every worker has without asking."""

    def start(self, timeout_s: float) -> None: ...

    def broken(self) -> str | None:
        """Why ranks cannot be started on it any more; None while they can. Answers within seconds."""

    def stop(self, deadline_s: float) -> list[ProcessId]: ...


def nodes() -> tuple[Node, ...]:
    """The living nodes of the connected cluster, this one first."""
    here = ray.get_runtime_context().get_node_id()
    found = []
    for entry in ray.nodes():
        if entry["Alive"]:
            host = entry["NodeManagerHostname"].split(".")[0]
            node_id = entry["NodeID"]
            found.append(Node(node_id, f"{host}-{node_id[:8]}", entry["NodeManagerAddress"], node_id == here))
    return tuple(sorted(found, key=lambda node: (not node.local, node.name)))


class LocalCluster:
    """One node on this machine. Several may run side by side; a process is connected to one at a time.

    Token authentication is on: the token is the one that this process has, else a new one in its environment.
    """

    def __init__(self, options: ClusterOptions | None = None) -> None:
        self._options = options or ClusterOptions()
        self._id = secrets.token_hex(8)
        self.folder = Path(_short_temporary_folder()) / f"hg-{self._id}"
        """Made by ``start``, removed by ``stop``."""
        self.address = ""
        """host:port, empty before ``start``."""
        self._daemons: dict[ProcessId, str] = {}
        """Without one of these nothing works."""

    @property
    def guarded(self) -> GuardedCluster:
        return GuardedCluster(mark=(MARK, self._id), folder=self.folder)

    @property
    def env(self) -> Mapping[str, str]:
        return {**self._options.env, "PYTHONPATH": _python_path(self._options.env)}

    @property
    def logs(self) -> Path:
        """Ray's own logs and those of its workers; gone after ``stop``."""
        return self.folder / "session_latest" / "logs"

    def start(self, timeout_s: float) -> None:
        """Starts and connects. Raises ClusterError, with nothing left behind, when it is not up in time."""
        deadline = time.monotonic() + timeout_s
        _use_token()
        self.folder.mkdir(mode=0o700)
        log = self.folder / "start.log"
        with log.open("wb") as output:
            starter = subprocess.Popen(
                self._command(),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status = starter.wait(max(0.0, deadline - time.monotonic()))
            if status != 0:
                raise ClusterError(f"Ray did not start (status {status}): {_tail(log)}")
            self.address = (self.folder / "ray_current_cluster").read_text().strip()
            _connect(self.address, {})
            names = {p: read_first_line(Path(f"/proc/{p.pid}/comm")) for p in self.processes()}
            self._daemons = {process: name for process, name in names.items() if name in _DAEMONS}
        except subprocess.TimeoutExpired as error:
            raise self._failed(
                f"Ray was not up after {timeout_s:g} s: {_tail(log)}; give it more time or free this machine"
            ) from error
        except (ClusterError, OSError) as error:
            raise self._failed(str(error)) from error
        except BaseException:  # Ctrl-C in the middle of a start must leave nothing either
            self.stop(_SHUTDOWN_S)
            raise

    def broken(self) -> str | None:
        gone = [name for process, name in self._daemons.items() if not process_control.alive(process)]
        return f"Ray's {' and '.join(gone)} ended" if gone else None

    def processes(self) -> list[ProcessId]:
        """Every living process of the cluster: Ray's, the ranks, and what they started."""
        return self.guarded.processes()

    def stop(self, deadline_s: float) -> list[ProcessId]:
        """Disconnects, ends every process and removes the folder. Returns what would not die."""
        deadline = time.monotonic() + deadline_s
        disconnect(min(_SHUTDOWN_S, deadline_s / 2))
        left = self.guarded.end(max(0.0, deadline - time.monotonic()))
        self.address = ""
        return left

    def _failed(self, reason: str) -> ClusterError:
        left = self.stop(_SHUTDOWN_S)
        return ClusterError(reason + (f"; left behind: {left}" if left else ""))

    def _command(self) -> list[str]:
        options = self._options
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--port=0"]
        command += ["--disable-usage-stats", "--include-dashboard=false", "--include-log-monitor=false"]
        # The autoscaler's monitor is of no use on a cluster of fixed size and takes half a second.
        command += ["--no-monitor", "--log-style=record", "--log-color=false"]
        command += [f"--temp-dir={self.folder}", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
        command += [f"--num-cpus={options.workers}", f"--num-gpus={options.gpus}"]
        if options.npus:
            command += [f"--resources={json.dumps({'NPU': options.npus})}"]
        return command

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in _FOREIGN}
        return {**kept, **_QUIET, **self.env, MARK: self._id}


class ExistingCluster:
    """A cluster that somebody else runs. ``stop`` only disconnects."""

    def __init__(self, address: str) -> None:
        self.address = resolve_address(address)
        self._nodes: frozenset[str] = frozenset()

    @property
    def guarded(self) -> None:
        return None

    @property
    def env(self) -> Mapping[str, str]:
        return {}

    def start(self, timeout_s: float) -> None:
        """Connects. The packages of this project travel to its nodes. Raises ClusterError."""
        _reach(self.address, timeout_s)
        _connect(self.address, {"py_modules": [str(CHECKOUT / name) for name in PACKAGES]})
        self._nodes = frozenset(node.id for node in nodes())

    def broken(self) -> str | None:
        try:
            check_address(self.address)
        except ClusterError as error:
            return str(error)
        lost = self._nodes - {node.id for node in nodes()}
        return f"{len(lost)} of {len(self._nodes)} nodes are gone" if lost else None

    def stop(self, deadline_s: float) -> list[ProcessId]:
        disconnect(deadline_s)
        return []


def disconnect(deadline_s: float) -> None:
    """Takes this process off its cluster; a dead cluster cannot hold it up longer than ``deadline_s``."""
    if not ray.is_initialized():
        return
    # A daemon thread, because Ray's shutdown has no deadline of its own when its daemons do not answer.
    thread = threading.Thread(target=ray.shutdown, name="hangrig-ray-shutdown", daemon=True)
    thread.start()
    thread.join(deadline_s)


def _connect(address: str, runtime_env: Mapping[str, Any]) -> None:
    os.environ.update(_QUIET)
    _keep_off_standard_output()
    try:
        with _own_signal_handlers():
            ray.init(
                address=address,
                namespace="hangrig",
                runtime_env=dict(runtime_env) or None,
                log_to_driver=False,
                configure_logging=False,
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ClusterError(
            f"cannot connect to Ray at {address}: {error}; check the address, that this machine is one of "
            "its nodes, and the token (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token)"
        ) from error


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """Ray puts handlers of its own for SIGTERM into whoever connects: they end the driver where it stands, in the
    middle of a teardown too, and then nobody ends the cluster. Those that were there come back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _keep_off_standard_output() -> None:
    """Ray prints what raylets report (a worker that we killed) on the driver's standard output, where a
    program expects our JSON and nothing else; no setting forbids it (2.60). It goes to the log instead."""
    worker: Any = importlib.import_module("ray._private.worker")
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = _log_lines


def _log_lines(data: Mapping[str, Any], **_: object) -> None:
    for line in data.get("lines", ()):
        _log.info("%s: %s", data.get("pid"), line)


def resolve_address(address: str) -> str:
    """``auto`` → the cluster that this process or this machine belongs to: a Ray job's own, else the one that was
    started last here. Anything else is returned as it is. Raises ClusterError."""
    if address != "auto":
        return address
    named = os.environ.get("RAY_ADDRESS", "")
    if named and "://" not in named and named != "auto":
        return named
    try:
        return _CURRENT_CLUSTER.read_text().strip()
    except OSError as error:
        raise ClusterError(
            f"no Ray cluster runs on this machine (no RAY_ADDRESS, no {_CURRENT_CLUSTER}); give host:port of a head"
        ) from error


def check_address(address: str, timeout_s: float = _REACH_S) -> None:
    """Ray tries for minutes to connect to what is not there; this says it at once. Raises ClusterError."""
    address = resolve_address(address)
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ClusterError(
            f"{address!r} is no Ray address; give host:port of its head, as `ray start` prints it"
        )
    try:
        socket.create_connection((host, int(port)), min(_REACH_S, timeout_s)).close()
    except OSError as error:
        raise ClusterError(
            f"nothing answers at {address} ({error}); start a cluster there with `ray start --head`, or "
            "leave --ray-address away to get one of your own"
        ) from error


def _reach(address: str, timeout_s: float) -> None:
    check_address(address, timeout_s)
    check = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
    try:
        done = subprocess.run(check, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"Ray at {address} did not answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ClusterError(
            f"what answers at {address} is no healthy Ray head of version {ray.__version__}, or wants "
            f"another token (RAY_AUTH_MODE, RAY_AUTH_TOKEN_PATH): {said[-1] if said else 'no reason given'}"
        )


def _use_token() -> None:
    """Lets this process and its children authenticate. The token goes into no file of the user's."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    has_file = (Path.home() / ".ray" / "auth_token").exists()
    if not has_file and not any(name in os.environ for name in _TOKEN_VARIABLES):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # Ray took its settings from the environment when it was imported; `ray.init()` without an address renews
    # them in this way, with an address it does not (2.60). Versions without authentication lack these names.
    native = importlib.import_module("ray._raylet")
    if hasattr(native, "get_authentication_mode"):
        native.Config.initialize("")
        native.AuthenticationTokenLoader.instance().reset_cache()


def _python_path(env: Mapping[str, str]) -> str:
    """This checkout, then what the options and this process's environment name."""
    named = [env.get("PYTHONPATH", ""), os.environ.get("PYTHONPATH", "")]
    parts = [str(CHECKOUT), *(part for path in named for part in path.split(os.pathsep) if part)]
    return os.pathsep.join(dict.fromkeys(parts))


def _short_temporary_folder() -> str:
    usual = tempfile.gettempdir()
    return usual if len(usual) <= _SOCKET_FOLDER_MAX else "/tmp"


def _tail(path: Path, lines: int = 5) -> str:
    text = path.read_text(errors="replace").splitlines() if path.exists() else []
    return " | ".join([line.strip() for line in text if line.strip()][-lines:]) or "it said nothing"
