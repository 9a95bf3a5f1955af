"""Is this machine ready, what is missing, and how to get it.

Here: checks that look at this machine and change nothing; each says what it found and how to mend it. Not
here: what only a machine with accelerators has (`doctor_device.py`), and the toggles' gates (`toggles.py`), which
decide per trial.
"""

from __future__ import annotations

import json
import os
import platform
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psutil

from harness.capture import find_py_spy
from harness.doctor_device import DEVICE_MEND, check_seen, real_device_checks
from harness.doctor_report import Check, DoctorReport, short
from harness.machine import package_version, read_first_line
from harness.target import installed_targets
from harness.toggles import DEVICES, SYMM_MEM_TORCH, torch_release

__all__ = [
    "Check", "DoctorReport", "check_cores", "check_device", "check_disk", "check_memory", "check_package",
    "check_ptrace", "check_py_spy", "check_shared_memory", "doctor",
]  # fmt: skip

MIB = 1 << 20
GIB = 1 << 30
CHILD_START_S = 20.0
DUMP_S = 20.0
CHILD_END_S = 5.0
CAP_SYS_PTRACE = 19
"""Bit of CapEff in /proc/self/status (linux/capability.h)."""

CHILD = """
import ctypes, sys
ctypes.CDLL(None).prctl(0x59616D61, -1, 0, 0, 0)  # PR_SET_PTRACER, any process: as ranks do
print("up", flush=True)
sys.stdin.read()
"""


def doctor(device: str = "sim", out: Path = Path("runs")) -> DoctorReport:
    """Looks at this machine. ``out`` is where runs would go. Raises ValueError for an unknown device."""
    if device not in DEVICES:
        raise ValueError(f"device {device!r} does not exist; allowed: {', '.join(DEVICES)}")
    checks: tuple[Callable[[], Check], ...] = (
        check_python,
        check_installed,
        check_torch,
        lambda: check_package("ray", "2.40"),
        lambda: check_package("xgrammar", "0.1.20"),
        check_ptrace,
        check_py_spy,
        check_cores,
        check_memory,
        check_shared_memory,
        lambda: check_disk(out),
    )
    found, raw = real_device_checks(device) if device in DEVICE_MEND else ([check_device(device)], {})
    return DoctorReport(device, (*(check() for check in checks), *found), raw)


def check_python() -> Check:
    """For the record: an older Python than 3.11 does not come this far."""
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_installed() -> Check:
    """Targets are found by entry point, which only an installed package has."""
    names = installed_targets()
    if "builtin" not in names:
        mend = "install the project into this environment: make setup, or pip install -e ."
        return Check("targets", "fail", "the builtin target is not installed", mend)
    return Check("targets", "ok", ", ".join(names))


def check_torch() -> Check:
    """Really imports torch: a broken accelerator backend makes the import itself fail (PLATFORMS.md)."""
    found = package_version("torch")
    if found is None:
        return Check("torch", "fail", "not installed", "make setup, or pip install torch")
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:
        mend = "source CANN's set_env.sh, remove torch_npu, or set TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return Check("torch", "fail", f"{found} does not import: {short(error)}", mend)
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        return Check(
            "torch", "fail", f"{found} has no gloo", "install a torch build with distributed and gloo"
        )
    found = str(torch.__version__)
    if torch_release(found) < SYMM_MEM_TORCH:
        return Check(
            "torch", "warn", f"{found}: symm_mem resolves to off", "use torch 2.8 or later for symm_mem"
        )
    return Check("torch", "ok", f"{found}, gloo")


def check_device(device: str) -> Check:
    """Whether the device is there at all; what else a real one needs is `doctor_device`'s."""
    if device in DEVICE_MEND:
        return check_seen(device)
    name = f"device {device}"
    if device == "sim":
        return Check(name, "ok", "simulated, needs no hardware and says nothing about any")
    return Check(name, "ok", "for sglang and vllm; latencies on it say nothing about an accelerator")


def check_package(name: str, least: str) -> Check:
    found = package_version(name)
    if found is None or find_spec(name) is None:
        return Check(name, "fail", "not installed", f"make setup, or pip install '{name}>={least}'")
    return Check(name, "ok", found)


def check_ptrace() -> Check:
    """Whether stacks may be read from outside: Yama's scope and the capability."""
    scope = read_first_line(Path("/proc/sys/kernel/yama/ptrace_scope")) or "0"
    capable = _has_capability(CAP_SYS_PTRACE)
    detail = f"ptrace_scope {scope}, CAP_SYS_PTRACE {'yes' if capable else 'no'}"
    if scope == "3":
        return Check(
            "ptrace", "fail", detail, "nobody may trace until kernel.yama.ptrace_scope is lowered (reboot)"
        )
    if scope == "2" and not capable:
        return Check(
            "ptrace", "fail", detail, "give the container SYS_PTRACE, or lower kernel.yama.ptrace_scope"
        )
    return Check("ptrace", "ok", detail)


def _has_capability(bit: int) -> bool:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    masks = [line.split()[1] for line in lines if line.startswith("CapEff:")]
    return bool(masks) and bool(int(masks[0], 16) >> bit & 1)


def check_py_spy() -> Check:
    """Really reads the stack of a child, through the same door as for a rank."""
    program = find_py_spy()
    if program is None:
        return Check("py-spy", "fail", "not found", "make setup, or pip install py-spy")
    with _child() as pid:
        if pid is None:
            return Check("py-spy", "warn", "the child to look at did not start in time", "look at the load")
        command = [str(program), "dump", "--json", "--pid", str(pid)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=DUMP_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Check("py-spy", "fail", short(error), "install py-spy again, or look at the load")
    version = package_version("py-spy") or str(program)
    mend = "allow ptrace: container capability SYS_PTRACE, or kernel.yama.ptrace_scope = 0"
    if done.returncode != 0:
        return Check("py-spy", "fail", f"{version} cannot read a stack: {short(done.stderr.decode())}", mend)
    try:
        threads = len(json.loads(done.stdout))
    except ValueError as error:
        return Check("py-spy", "fail", f"{version} printed no JSON: {short(error)}", "pip install -U py-spy")
    return Check("py-spy", "ok", f"{version} reads stacks ({threads} thread of a child)")


@contextmanager
def _child() -> Iterator[int | None]:
    """A Python process that waits for the end of its input; None when it is not up within CHILD_START_S."""
    command = [sys.executable, "-c", CHILD]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        readable, _, _ = select.select([process.stdout], [], [], CHILD_START_S)
        yield process.pid if readable and process.stdout.readline() == b"up\n" else None
    finally:
        process.kill()
        process.communicate(timeout=CHILD_END_S)


def check_cores() -> Check:
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return Check(
            "cores", "warn", f"{cores}", "two ranks on one core are slow: give this process more cores"
        )
    return Check("cores", "ok", f"{cores}")


def check_memory() -> Check:
    free = int(psutil.virtual_memory().available)
    detail = f"{free / GIB:.1f} GiB available"
    if free < GIB:
        return Check(
            "memory", "fail", detail, "Ray, two ranks and an agent need about 2 GiB: end other programs"
        )
    if free < 3 * GIB:
        return Check("memory", "warn", detail, "with 3 GiB Ray does not end ranks for lack of memory")
    return Check("memory", "ok", detail)


def check_shared_memory() -> Check:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Check("/dev/shm", "fail", short(error), "mount a tmpfs there")
    detail = f"{free / MIB:.0f} MiB free"
    if free < 128 * MIB:
        return Check(
            "/dev/shm", "warn", detail, "start the container with --shm-size=1g, or Ray uses the disk"
        )
    return Check("/dev/shm", "ok", detail)


def check_disk(out: Path) -> Check:
    """Evidence of a hang is some MiB a trial; ledgers and stacks must not be lost to a full disk."""
    folder = out.absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    detail = f"{free / GIB:.1f} GiB free under {folder}"
    if not os.access(folder, os.W_OK):
        return Check("disk", "fail", f"{folder} cannot be written", "choose another --out")
    if free < 256 * MIB:
        return Check("disk", "fail", detail, "free the disk or choose another --out")
    if free < 2 * GIB:
        return Check("disk", "warn", detail, "a long run with many hangs may need more")
    return Check("disk", "ok", detail)
