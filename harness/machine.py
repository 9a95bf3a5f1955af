"""Which machine and which versions: what run.json records so that a run can be repeated and compared.

Here: facts read from the system without importing an engine or an accelerator. Not here: whether they are
good enough (`doctor.py`).
"""

from __future__ import annotations

import os
import platform
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("hangrig", "torch", "torch_npu", "ray", "py-spy", "xgrammar", "numpy", "scipy", "pydantic")


def package_version(name: str) -> str | None:
    """The installed version, without importing the package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Python and PACKAGES."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: package_version(name) for name in PACKAGES}


def machine_facts() -> dict[str, str | int | None]:
    """Host name, system, processor cores this process may use, and memory in bytes."""
    return {
        "node": socket.gethostname(),
        "system": platform.system(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
        "python": sys.executable,
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(psutil.virtual_memory().total),
        "boot_id": read_first_line(Path("/proc/sys/kernel/random/boot_id")),
    }


def read_first_line(path: Path) -> str | None:
    """The first line of a small system file; None where it cannot be read."""
    try:
        return path.read_text(encoding="ascii", errors="replace").partition("\n")[0].strip()
    except OSError:
        return None
