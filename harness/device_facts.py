"""What torch and the platform say of the accelerators of this machine, before anything runs on them.

Looked at in the process that plans a run: no tensor is made there, so no device gets a context or loses memory.
Everything is asked at the call, and what cannot be had is None: nobody looked.

Not here: what follows for a toggle (``toggles.py``), whether the machine is ready (``doctor.py``).
"""

from __future__ import annotations

import ctypes.util
import mmap
import os
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any

_GRAPHS = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
"""The class of a captured graph in ``torch.cuda`` and ``torch.npu``."""
_SHMEM = b"NPUSHMEMSymmetricMemory"
_SHMEM_SIZE = "NPU_SHMEM_SYMMETRIC_SIZE"


@dataclass(frozen=True, slots=True)
class Accelerators:
    """The devices of one kind. ``count`` 0: torch sees none, or has no module for them."""

    count: int
    hip: bool = False
    peer_access: bool | None = None
    """Each of the first devices, as many as ranks, can read the memory of each other one."""
    graphs: bool | None = None
    """Work can be captured and replayed with new host arguments."""
    shmem: str | None = None
    """On NPU: what stands against torch's symmetric memory there, in a clause."""


def accelerators(device: str, world: int) -> Accelerators:
    """Of ``cuda`` or ``npu``, for ``world`` ranks. Imports torch, which loads torch_npu by itself."""
    import torch

    try:
        module: Any = torch.get_device_module(device)
        count = int(module.device_count())
    except (RuntimeError, AttributeError, ImportError):
        return Accelerators(0)
    return Accelerators(
        count=count,
        hip=device == "cuda" and torch.version.hip is not None,
        peer_access=_peer_access(module, world) if device == "cuda" and 1 < world <= count else None,
        graphs=hasattr(module, _GRAPHS[device]),
        shmem=npu_shmem() if device == "npu" else None,
    )


def _peer_access(module: Any, world: int) -> bool | None:
    try:
        return all(module.can_device_access_peer(one, other) for one, other in permutations(range(world), 2))
    except (RuntimeError, AssertionError, AttributeError):
        return None


def npu_shmem() -> str:
    """Why the symmetric heap cannot stand on torch_npu's ``NPUSHMEM``: its parts are sought, none is loaded.

    torch_npu's own library names the allocator from some release between 2.7.1 and 2.14.0 on (the wheels); it loads
    ``libshmem`` and takes its size from the environment; its barrier and signals raise (PLATFORMS.md, HCCL).
    """
    spec = find_spec("torch_npu")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    libraries = [
        path for folder in folders for path in [Path(folder) / "lib" / "libtorch_npu.so"] if path.exists()
    ]
    if not libraries:
        return "torch_npu is not installed"
    if not any(_mentions(path, _SHMEM) for path in libraries):
        return "this torch_npu has no such allocator"
    if not _library("shmem"):
        return "libshmem is on no library path"
    if not os.environ.get(_SHMEM_SIZE):
        return f"{_SHMEM_SIZE} is not set"
    return "all its parts are there, but its barrier and signals are not supported, and the heap needs them"


def _mentions(path: Path, text: bytes) -> bool:
    """Whether the file holds ``text``: a library is searched, not loaded."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    except (OSError, ValueError):
        return False


def _library(name: str) -> bool:
    """Whether the loader would find ``lib<name>.so``: on the environment's paths, or where the system keeps it."""
    folders = [Path(part) for part in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if part]
    named = any(
        next(folder.glob(f"lib{name}.so*"), None) is not None for folder in folders if folder.is_dir()
    )
    return named or ctypes.util.find_library(name) is not None
