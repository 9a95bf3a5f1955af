"""Between trials: whether this machine's accelerators are back to what they were before the first ranks came.

One hang must not fail the night: ranks that hung, leaked or died are replaced, and what they held comes back a
little later, or does not. The vendor's tool is asked, because a process that is gone cannot be. Only devices that
our ranks have held count: what somebody else does on another is no concern of ours.

Not here: what a rank that lives on has left behind (its own ``leaks``), who replaces ranks (``session.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from harness.device_tools import (
    GPU_PROCESSES,
    GPU_TABLE,
    NPU_TABLE,
    TOOL,
    table_commands,
)
from harness.npu_smi import parse_table
from harness.nvidia_smi import parse_gpus, parse_processes
from harness.tools import run_tools

SLACK_MIB = 512
"""More than before and still idle: a driver's own figures waver, and Ray or a monitor may have come since."""
_LOOK_S = 15.0
_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class InUse:
    """Memory of one device in MiB, by all processes; None: the tool does not say. ``processes``: those that it
    names, each as ``pid`` and its MiB."""

    used_mib: int | None
    processes: tuple[tuple[int, int | None], ...] = ()


Figures: TypeAlias = Mapping[str, InUse]
"""By device as ranks name theirs: ``cuda:0``."""
Look: TypeAlias = Callable[[], Figures | str]
"""Figures, or why there are none."""


def look(device: str) -> Figures | str:
    """Asks ``nvidia-smi`` or ``npu-smi``."""
    commands = table_commands(device)
    if commands is None:
        return f"{TOOL[device]} is not on PATH"
    results = run_tools(commands, deadline_s=time.monotonic() + _LOOK_S)
    said = {question: result.stdout.decode(errors="replace") for question, result in results.items()}
    problems = [result.problem for result in results.values() if result.problem is not None]
    found = gpus(said[GPU_TABLE], said[GPU_PROCESSES]) if device == "cuda" else npus(said[NPU_TABLE])
    return found or "; ".join(problems) or f"{TOOL[device]} named no device"


def gpus(table: str, processes: str) -> Figures:
    """From the two answers of ``nvidia-smi``."""
    held = [(one.uuid, (one.pid, one.used_mib)) for one in parse_processes(processes)]
    return {
        f"cuda:{gpu.index}": InUse(gpu.used_mib, tuple(use for uuid, use in held if uuid == gpu.uuid))
        for gpu in parse_gpus(table)
    }


def npus(text: str) -> Figures:
    """From ``npu-smi info``. A chip has the number that the tool gives it on the node, else its place in the
    table."""
    table = parse_table(text)
    return {
        f"npu:{place if chip.physical is None else chip.physical}": InUse(
            chip.used_mib,
            tuple(
                (one.pid, one.used_mib)
                for one in table.processes
                if (one.npu, one.chip) == (chip.npu, chip.chip)
            ),
        )
        for place, chip in enumerate(table.chips)
    }


@dataclass(slots=True)
class IdleDevices:
    """The devices of one session. ``look`` is asked when no rank of ours is up."""

    look: Look
    slack_mib: int = SLACK_MIB
    unknown: str = ""
    """Why nothing is known; then nothing is ever found to be busy."""
    _before: dict[str, InUse] = field(default_factory=dict)
    _held: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """Before the first ranks."""
        found = self.look()
        if isinstance(found, str):
            self.unknown = found
        else:
            self._before = dict(found)

    def hold(self, devices: Mapping[int, str]) -> None:
        """Ranks are up on these, by rank."""
        self._held.update(devices.values())

    def busy(self) -> str | None:
        """Why the devices that ranks have held are not idle; None when they are, or when nobody can tell."""
        if self.unknown:
            return None
        found = self.look()
        if isinstance(found, str):  # it answered before: a driver that hangs is a reason too
            return f"what they hold cannot be told any more: {found}"
        told = [self._more(name, found.get(name)) for name in sorted(self._held & self._before.keys())]
        return "; ".join(filter(None, told)) or None

    def wait(self, deadline_s: float, pause: Callable[[float], object] = time.sleep) -> str | None:
        """``busy`` until it is None, for ``deadline_s`` at most."""
        end = time.monotonic() + deadline_s
        while (why := self.busy()) is not None and time.monotonic() < end:
            pause(_EVERY_S)
        return why

    def _more(self, name: str, now: InUse | None) -> str:
        before = self._before[name].used_mib
        if now is None:
            return f"{name} is not listed any more"
        if before is None or now.used_mib is None or now.used_mib <= before + self.slack_mib:
            return ""
        holders = [f"{pid} ({'?' if mib is None else mib} MiB)" for pid, mib in now.processes]
        by = (
            f", held by process {', '.join(holders)}"
            if holders
            else ", held by no process that the tool names"
        )
        return f"{name} has {now.used_mib} MiB in use, {before} MiB before the first trial{by}"
