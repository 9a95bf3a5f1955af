"""The vendors' tools, asked about the devices of this node: ``npu-smi`` and ``nvidia-smi``.

Here: which questions are asked, and their raw answers under one deadline. A tool that is not on PATH, fails or
does not answer is said; nothing raises for it. Not here: what the answers mean (`npu_smi.py`, `nvidia_smi.py`,
the doctor) and where they are stored (`device_evidence.py`)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from harness.npu_smi import NpuTable, parse_table
from harness.nvidia_smi import GPU_FIELDS, PROCESS_FIELDS
from harness.tools import run_tools

TOOLS_S = 15.0
"""npu-smi takes seconds on a loaded machine, and for ever on one whose driver hangs."""
TOOL: Mapping[str, str] = {"npu": "npu-smi", "cuda": "nvidia-smi"}
NPU_TABLE = "npu-smi-info"
NPU_KINDS = ("usages", "memory", "ecc", "proc-mem")
"""Asked of a card; ``health`` is asked of a chip: of a card it is the controller's too, and has no error code."""
GPU_TABLE = "nvidia-smi-gpus"
GPU_PROCESSES = "nvidia-smi-processes"
_FIRST_SHARE = 0.5
"""Of the deadline, for the table that names the cards."""
_SAID = 200

Commands = dict[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """``outputs``: what was printed, by question, also by tools that failed. ``problems``: why a question has no
    whole answer. ``late``: those that the deadline cut off."""

    device: str
    outputs: Mapping[str, str] = field(default_factory=dict)
    problems: Mapping[str, str] = field(default_factory=dict)
    late: frozenset[str] = frozenset()

    @property
    def table(self) -> NpuTable:
        """Of NPUs; empty where there is none."""
        return parse_table(self.outputs.get(NPU_TABLE, ""))


def take_snapshot(device: str, deadline_s: float) -> DeviceSnapshot:
    """Asks everything about the devices of one kind. ``deadline_s``: a point of ``time.monotonic``. Nothing is
    asked for a device without a tool."""
    name = TOOL.get(device)
    if name is None:
        return DeviceSnapshot(device)
    path = shutil.which(name)
    if path is None:
        return DeviceSnapshot(device, problems={name: f"{name} is not on PATH"})
    if device == "cuda":
        return _run(DeviceSnapshot(device), _gpu_commands(path), deadline_s)
    left_s = max(0.0, deadline_s - time.monotonic())
    first = _run(
        DeviceSnapshot(device),
        {NPU_TABLE: (path, "info"), "npu-smi-map": (path, "info", "-m")},
        time.monotonic() + _FIRST_SHARE * left_s,
    )
    return _run(first, _npu_commands(path, first.table), deadline_s)


def table_commands(device: str) -> Commands | None:
    """The questions for who holds how much memory of which device; None where the tool is not on PATH."""
    path = shutil.which(TOOL[device])
    if path is None:
        return None
    if device == "npu":
        return {NPU_TABLE: (path, "info")}
    return {
        name: command for name, command in _gpu_commands(path).items() if name in (GPU_TABLE, GPU_PROCESSES)
    }


def _gpu_commands(path: str) -> Commands:
    return {
        GPU_TABLE: (path, f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,nounits"),
        GPU_PROCESSES: (path, f"--query-compute-apps={','.join(PROCESS_FIELDS)}", "--format=csv,nounits"),
        "nvidia-smi-q": (path, "-q"),
    }


def _npu_commands(path: str, table: NpuTable) -> Commands:
    health: Commands = {
        health_of(chip.npu, chip.chip): (
            path, "info", "-t", "health", "-i", str(chip.npu), "-c", str(chip.chip)
        )
        for chip in table.chips
    }  # fmt: skip
    others: Commands = {
        f"npu-smi-{kind}-{card}": (path, "info", "-t", kind, "-i", str(card))
        for kind in NPU_KINDS
        for card in table.cards
    }
    return health | others


def health_of(npu: int, chip: int) -> str:
    """The question for the health of one chip."""
    return f"npu-smi-health-{npu}.{chip}"


def ecc_of(npu: int) -> str:
    return f"npu-smi-ecc-{npu}"


def _run(before: DeviceSnapshot, commands: Commands, deadline_s: float) -> DeviceSnapshot:
    outputs, problems, late = dict(before.outputs), dict(before.problems), set(before.late)
    for question, result in run_tools(commands, deadline_s=deadline_s).items():
        said = result.stdout.decode(errors="replace")
        if said.strip():
            outputs[question] = said
        if result.killed or (result.problem is not None and result.returncode is None):
            late.add(question)
        if result.problem is not None:
            # Both tools tell what is wrong on standard output.
            own = "" if result.killed else " ".join(said.split())[:_SAID]
            problems[question] = f"{result.problem}: {own}" if own else result.problem
        elif not said.strip():
            problems[question] = "printed nothing"
    return DeviceSnapshot(before.device, outputs, problems, frozenset(late))
