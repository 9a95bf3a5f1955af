"""Starting an agent on this machine, and ending it. The same for the driver and for a courier; without
Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from threading import Event

from harness import agent_files, process_control
from harness.agent_files import AgentConfig, SpoolError, Status
from harness.process_control import ProcessId

_CHECKOUT = Path(__file__).resolve().parents[1]
_POLL_S = 0.02


class AgentLaunchError(RuntimeError):
    """The agent did not come up; the message holds what it said."""


def make_spool() -> Path:
    """A private directory on this node, for one agent."""
    return Path(tempfile.mkdtemp(prefix="hg-agent-"))


def launch(spool: Path, config: AgentConfig, timeout_s: float) -> ProcessId:
    """Starts an agent that no longer belongs to this process. Raises AgentLaunchError."""
    deadline = time.monotonic() + timeout_s
    try:
        agent_files.write(spool, agent_files.CONFIG, config)
        with (spool / agent_files.LOG).open("ab") as log:
            starter = subprocess.Popen(
                [sys.executable, "-m", "harness.agent", str(spool)],
                env=_environment(config),
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except (SpoolError, OSError) as error:
        raise AgentLaunchError(f"cannot start an agent: {error}") from error
    try:
        # It returns as soon as the agent has detached itself.
        if starter.wait(timeout_s) != 0:
            raise AgentLaunchError(f"the agent ended with status {starter.returncode}: {_log_tail(spool)}")
    except subprocess.TimeoutExpired as error:
        starter.kill()
        starter.wait()
        raise AgentLaunchError(f"the agent was not up after {timeout_s:g} s: {_log_tail(spool)}") from error
    pause = Event()
    while (status := agent_files.read(spool, agent_files.STATUS, Status)) is None:
        if time.monotonic() > deadline:
            raise AgentLaunchError(f"the agent wrote no status in {timeout_s:g} s: {_log_tail(spool)}")
        pause.wait(_POLL_S)
    return status.process


def retire(spool: Path, agent: ProcessId, deadline_s: float) -> list[ProcessId]:
    """Waits for an agent that was told to stop, kills it if it does not, removes the spool. Returns
    survivors."""
    left = process_control.wait_gone([agent], deadline_s / 2)
    left = process_control.end(left, deadline_s / 2, grace_s=0.0)
    shutil.rmtree(spool, ignore_errors=True)
    return left


def problem(agent: ProcessId, status: Status | None, stale_s: float) -> str | None:
    """Why the agent does not watch any more, None while it does. On the agent's own node."""
    if not process_control.alive(agent):
        return f"the agent (process {agent.pid}) is gone"
    if status is None:
        return None
    due_ns = max(status.heartbeat_ns, status.busy_until_ns) + int(stale_s * 1e9)
    late_s = (time.monotonic_ns() - due_ns) / 1e9
    return (
        None
        if late_s < 0
        else f"the agent (process {agent.pid}) has been silent for {late_s + stale_s:.0f} s"
    )


def _environment(config: AgentConfig) -> dict[str, str]:
    # Nothing by which the agent could be taken for a process of the cluster that it has to end.
    marks = {"HANGRIG_CLUSTER"} if config.cluster is None else {"HANGRIG_CLUSTER", config.cluster.mark[0]}
    kept = {k: v for k, v in os.environ.items() if k not in marks and not k.startswith("RAY_")}
    inherited = os.environ.get("PYTHONPATH", "")
    kept["PYTHONPATH"] = f"{_CHECKOUT}{os.pathsep}{inherited}" if inherited else str(_CHECKOUT)
    return kept


def _log_tail(spool: Path) -> str:
    try:
        lines = (spool / agent_files.LOG).read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    return " | ".join(lines[-3:]) or "it said nothing"
