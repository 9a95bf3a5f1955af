"""What the doctor looks at for a real device, whichever it is: torch sees it, who else uses it, what the
environment hides.

Here: those checks, and the order of all that are asked for a device. What only Ascend or only NVIDIA has is in
`doctor_npu.py` and `doctor_cuda.py`; how their tools are run in `device_tools.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from harness.device_tools import TOOL, TOOLS_S, DeviceSnapshot, take_snapshot
from harness.doctor_cuda import cuda_checks
from harness.doctor_npu import npu_checks, torch_loads_npu
from harness.doctor_report import Check, short
from harness.machine import package_version
from harness.rank_environment import traps
from harness.scenario_model import Watchdog

DEVICE_MEND: Mapping[str, str] = {
    "cuda": "use a machine with an NVIDIA or AMD GPU, its driver, and a torch build for it",
    "npu": "use an Ascend machine with CANN sourced and torch_npu that fits torch (docs: CANN image)",
}


def real_device_checks(
    device: str, env: Mapping[str, str] = os.environ
) -> tuple[list[Check], dict[str, str]]:
    """For ``cuda`` and ``npu``: the checks, and what the vendor's tool printed by question."""
    snapshot = take_snapshot(device, time.monotonic() + TOOLS_S)
    checks = [check_seen(device), check_tool(snapshot)]
    checks += npu_checks(snapshot, env) if device == "npu" else cuda_checks(snapshot, env)
    checks += check_environment(device, env)
    return checks, dict(snapshot.outputs)


def check_seen(device: str) -> Check:
    """Whether torch sees devices of that kind. torch_npu is never imported by name: torch loads it itself."""
    name = f"device {device}"
    mend = DEVICE_MEND[device]
    if device == "npu" and package_version("torch_npu") is None:
        return Check(name, "missing", "torch_npu is not installed", mend)
    try:
        import torch

        module = torch.get_device_module(device)
        count = int(module.device_count()) if module.is_available() else 0
    except (ImportError, OSError, RuntimeError, AttributeError, AssertionError) as error:
        return Check(name, "missing", short(error), mend)
    if count == 0:
        return Check(name, "missing", f"torch {torch.__version__} sees no {device} device", mend)
    if device == "npu" and not torch_loads_npu(os.environ):
        mend = "unset TORCH_DEVICE_BACKEND_AUTOLOAD: ranks import torch alone and would have no torch.npu"
        return Check(name, "fail", f"{count} devices, and torch does not load torch_npu by itself", mend)
    if count == 1:
        mend = "two ranks need a device each: NCCL and HCCL refuse to share one"
        return Check(name, "warn", "1 device", mend)
    return Check(name, "ok", f"{count} devices")


def check_tool(snapshot: DeviceSnapshot) -> Check:
    """Whether the vendor's tool answers: without it the evidence of a hang has no word of the device."""
    tool = TOOL[snapshot.device]
    if tool in snapshot.problems:
        mend = "mount it into the container and put it on PATH: evidence of a hang lacks the device's state without"
        return Check(tool, "warn", snapshot.problems[tool], mend)
    asked = {*snapshot.outputs, *snapshot.problems}
    if snapshot.late:
        detail = f"{len(snapshot.late)} of {len(asked)} questions had no answer after {TOOLS_S:g} s"
        return Check(
            tool, "fail", detail, "look at dmesg and the driver: a tool that hangs is a driver that hangs"
        )
    if snapshot.problems:
        question, problem = next(iter(snapshot.problems.items()))
        detail = f"{len(snapshot.problems)} of {len(asked)} questions failed: {question}: {short(problem)}"
        whole = len(snapshot.problems) == len(asked)
        return Check(
            tool, "fail" if whole else "warn", detail, "run it by hand; it may need rights or a newer driver"
        )
    return Check(tool, "ok", f"{len(asked)} questions answered")


def check_environment(device: str, env: Mapping[str, str]) -> Iterator[Check]:
    """One check a trap, else one that says there is none. Times are held against the watchdog's of a scenario that
    sets none; a run holds them against its scenarios' own, and sets what is not set."""
    watchdog = Watchdog()
    found = traps(device, env, watchdog.longest_s())
    if not found:
        detail = f"nothing ends or hides a hang before the watchdog is done ({watchdog.longest_s():g} s)"
        yield Check("environment", "ok", detail)
    for trap in found:
        yield Check(trap.name, trap.severity, f"{trap.value or 'empty'}: {trap.why}", trap.mend)
