"""Where a watch gets its looks from: the processes of a tree, their deaths, the server's metrics and health.

Reading only; nothing here stops, signals or changes a process. Stacks are ``capture.py``'s, what a look means is
``rules.py``'s.
"""

from __future__ import annotations

import os
import pwd
import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from harness.capture import PY_SPY
from harness.process_control import ProcessId, alive, find
from harness.process_tree import Member, Tree
from harness.seats import Seat
from harness.stacks import ProcessStacks
from harness.watch.activity import Activity, read_activity
from harness.watch.looks import Look, SeatLook, SeatState
from harness.watch.metrics import Answer, HealthCheck, Traffic, base_url, get, read_metrics

_METRICS_S = 2.0
_PROBING_S = 1.0
_SILENCE_S = 5.0
"""A server that does not answer is asked again after so long: looks go on meanwhile."""
_HEALTH_S = 30.0
_HEALTH_PAUSE_S = 2.0
_DEFAULT_PORTS = {"sglang": 30000, "vllm": 8000}
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
MEND = (
    "run hangrig as the same user or as root (sudo); where kernel.yama.ptrace_scope is not 0, run it as root or "
    "`sudo sysctl kernel.yama.ptrace_scope=0`; a container needs --cap-add SYS_PTRACE (Kubernetes: "
    "securityContext.capabilities.add: [SYS_PTRACE]); or give a copy of py-spy alone the right (`sudo setcap "
    f"cap_sys_ptrace+ep COPY`) and name it in {PY_SPY}"
)


class Deaths:
    """Sees processes end, in order, also those of others. Close it."""

    def __init__(self, processes: Sequence[ProcessId]) -> None:
        self.died_s: dict[ProcessId, float] = {}
        """When a process was seen to end, by ``time.monotonic``; 0 for one that was gone before."""
        self._poller = select.poll()
        self._watched: dict[int, ProcessId] = {}
        for process in processes:
            self._add(process)

    def wait(self, timeout_s: float) -> bool:
        """Waits for the next death, at most ``timeout_s``; whether there was one."""
        ready = self._poller.poll(max(0, round(timeout_s * 1000)))
        now_s = time.monotonic()
        for descriptor, _ in ready:
            self._poller.unregister(descriptor)
            os.close(descriptor)
            self.died_s[self._watched.pop(descriptor)] = now_s
        return bool(ready)

    def settle(self, for_s: float) -> None:
        """Waits so long, and notes who ends meanwhile."""
        ends_s = time.monotonic() + for_s
        while (left_s := ends_s - time.monotonic()) > 0:
            self.wait(left_s)

    def close(self) -> None:
        for descriptor in self._watched:
            os.close(descriptor)
        self._watched.clear()

    def _add(self, process: ProcessId) -> None:
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            self.died_s[process] = 0.0
            return
        if not alive(process):
            os.close(descriptor)
            self.died_s[process] = 0.0
            return
        self._watched[descriptor] = process
        self._poller.register(descriptor, select.POLLIN)


@dataclass(slots=True)
class Sources:
    """Everything but stacks. ``url``: where the server answers; None: nowhere that is known."""

    tree: Tree
    url: str | None
    metrics_url: str | None
    health: HealthCheck | None
    metrics: Answer = field(default_factory=lambda: Answer(None, why="not asked"))
    """The last answer of the metrics."""
    _ask_again_s: float = 0.0

    @classmethod
    def of(cls, tree: Tree, metrics_url: str | None, *, ask_health: bool) -> Sources:
        """Finds the server's port. SGLang is asked for its health when ``ask_health``: that makes it generate."""
        url = None if metrics_url is None else metrics_url.rstrip("/").removesuffix("/metrics")
        for member in tree.members:
            if url is None and member.role == "server":
                port = _DEFAULT_PORTS.get(tree.engine, 0)
                url = base_url(member.process.pid, member.title.split(" "), port, _PROBING_S)
        health = None
        if ask_health and url is not None and tree.engine == "sglang":
            health = HealthCheck(f"{url}/health", deadline_s=_HEALTH_S, pause_s=_HEALTH_PAUSE_S)
        return cls(tree, url, metrics_url or (None if url is None else f"{url}/metrics"), health)

    def look(self, stacks: Mapping[Seat, ProcessStacks], activities: Mapping[Seat, Activity]) -> Look:
        """One look now. ``stacks``: those that were just taken."""
        traffic = self._traffic()
        health = self.health
        return Look(
            taken_s=time.monotonic(),
            seats=tuple(
                SeatLook(
                    seat=member.seat,
                    role=watched_role(member, self.tree),
                    state=state_of(member.process),
                    activity=activities.get(member.seat),
                    stacks=stacks.get(member.seat),
                )
                for member in self.tree.members
            ),
            traffic=traffic,
            health="unknown" if health is None else health.state,
            generates=health is not None,
            asked_s=0.0 if health is None else health.asked_for_s(),
            well_s=None if health is None else health.well_s,
            missing_ranks=self.tree.missing_ranks(),
        )

    def activities(self) -> dict[Seat, Activity]:
        found = {member.seat: read_activity(member.process) for member in self.tree.members}
        return {seat: activity for seat, activity in found.items() if activity is not None}

    def generates_now(self, deadline_s: float) -> bool:
        """SGLang answers that something came back from its schedulers since the question."""
        return self.url is not None and get(f"{self.url}/health", deadline_s).status == 200

    def close(self) -> None:
        if self.health is not None:
            self.health.close()

    def _traffic(self) -> Traffic | None:
        now_s = time.monotonic()
        if self.metrics_url is None or self.metrics.status == 404 or now_s < self._ask_again_s:
            return None
        self.metrics = get(self.metrics_url, _METRICS_S)
        if self.metrics.status is None:
            self._ask_again_s = now_s + _SILENCE_S
        traffic = read_metrics(self.metrics.text) if self.metrics.status == 200 else None
        return traffic if traffic is not None and (traffic.marks or traffic.owed is not None) else None


def state_of(process: ProcessId) -> SeatState:
    stat = find(process)
    if stat is None or stat.gone:
        return "dead"
    return "stopped" if stat.state in ("T", "t") else "alive"


def watched_role(member: Member, tree: Tree) -> str:
    """In a program that is no known engine, those that have no children do the work."""
    if tree.engine != "other" or member.role != "other":
        return member.role
    launches = any(other.parent == member.process.pid for other in tree.members)
    return "other" if launches else "rank"


def access_problem(members: Sequence[Member]) -> str | None:
    """Why the stacks of these processes may not be read, and what to do; None where they may, or where the py-spy
    that the environment names may have a right of its own."""
    if os.environ.get(PY_SPY):
        return None
    for member in members:
        pid = member.process.pid
        try:
            # The same rules as for tracing: ptrace(2), "Ptrace access mode checking".
            os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
        except PermissionError:
            return f"hangrig may not look into process {pid}: {_whose(pid)}. To mend it: {MEND}"
        except OSError:  # gone meanwhile
            continue
    return None


def _whose(pid: int) -> str:
    owner = None
    with suppress(OSError):
        owner = Path(f"/proc/{pid}").stat().st_uid
    if owner is not None and owner != os.geteuid():
        with suppress(KeyError):
            return f"it belongs to {pwd.getpwuid(owner).pw_name}"
        return f"it belongs to user {owner}"
    scope = "0"
    with suppress(OSError):
        scope = _YAMA.read_text().strip()
    if scope != "0":
        return f"kernel.yama.ptrace_scope is {scope}, and hangrig did not start it"
    return "this container or user lacks the capability SYS_PTRACE"
