"""What only an NVIDIA machine has: its driver, GPUs, their memory errors, who else holds them.

Here: those checks, pure functions of what `nvidia-smi` printed and of the environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.device_tools import GPU_PROCESSES, GPU_TABLE, DeviceSnapshot
from harness.doctor_report import Check, Memory, holders, own_pids
from harness.nvidia_smi import Gpu, GpuProcess, parse_gpus, parse_processes


def cuda_checks(snapshot: DeviceSnapshot, env: Mapping[str, str]) -> list[Check]:
    """All that is asked beside whether torch sees a device."""
    gpus = parse_gpus(snapshot.outputs.get(GPU_TABLE, ""))
    processes = parse_processes(snapshot.outputs.get(GPU_PROCESSES, ""))
    checks = [check_visible(env, gpus)]
    if GPU_TABLE in snapshot.outputs:
        checks += [check_gpus(gpus), check_health(gpus), check_holders(gpus, processes, own_pids())]
    return checks


def check_visible(env: Mapping[str, str], gpus: Sequence[Gpu]) -> Check:
    """CUDA_VISIBLE_DEVICES holds numbers or UUIDs; CUDA hides the first that it does not know and all after it
    (CUDA programming guide, environment variables)."""
    name = "CUDA_VISIBLE_DEVICES"
    text = env.get(name)
    if text is None:
        return Check(name, "ok", "not set: every device is visible")
    parts = [part.strip() for part in text.split(",")]
    if not text.strip() or parts[0] == "-1":
        return Check(name, "fail", f"{text!r} hides every device", "unset it, or name devices")
    known = [str(gpu.index) for gpu in gpus]
    uuids = [gpu.uuid for gpu in gpus]
    for part in parts:
        numbered = part.isdecimal() and (not gpus or part in known)
        named = part.startswith("MIG-") or any(
            uuid.startswith(part) for uuid in uuids if part.startswith("GPU-")
        )
        if not (numbered or named or (part.startswith("GPU-") and not gpus)):
            detail = f"{text}: {part!r} is no device of this machine; CUDA hides it and all after it"
            return Check(name, "fail", detail, f"name devices of {', '.join(known) or 'nvidia-smi -L'}")
    if len(set(parts)) < len(parts):
        return Check(name, "fail", f"{text} names a device twice: CUDA sees none then", "name each once")
    return Check(name, "ok", f"{text}: {len(parts)} devices")


def check_gpus(gpus: Sequence[Gpu]) -> Check:
    """How many there are, and of which driver."""
    if not gpus:
        return Check("GPUs", "fail", "nvidia-smi names none that we can read", "look at its raw output")
    names = [gpu.name for gpu in gpus]
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Check("GPUs", "ok", f"{counted}, driver {gpus[0].driver or 'unknown'}")


def check_health(gpus: Sequence[Gpu]) -> Check:
    """Uncorrected memory errors: since the driver was loaded they are a fault now, before that a sign of wear."""
    bad = [f"GPU {gpu.index}: {gpu.volatile} uncorrected memory errors" for gpu in gpus if gpu.volatile]
    worn = [
        f"GPU {gpu.index}: {gpu.aggregate} uncorrected memory errors ever" for gpu in gpus if gpu.aggregate
    ]
    if bad:
        mend = "do not run on it: leave it out of CUDA_VISIBLE_DEVICES, and reset or replace it"
        return Check("health", "fail", "; ".join(bad), mend)
    if worn:
        return Check("health", "warn", "; ".join(worn), "watch it: look at nvidia-smi -q -d ECC,ROW_REMAPPER")
    counted = sum(gpu.volatile is not None for gpu in gpus)
    return Check(
        "health", "ok", f"no uncorrected memory error on {counted} of {len(gpus)} GPUs that count them"
    )


def check_holders(gpus: Sequence[Gpu], processes: Sequence[GpuProcess], own: frozenset[int]) -> Check:
    """Whether somebody else uses the GPUs. ``own``: processes of ours."""
    indices = {gpu.uuid: gpu.index for gpu in gpus}
    return holders(
        [
            f"pid {one.pid} {one.name} on GPU {indices.get(one.uuid, '?')}"
            for one in processes
            if one.pid not in own
        ],
        [Memory(f"GPU {gpu.index}", gpu.used_mib, gpu.total_mib) for gpu in gpus],
    )
