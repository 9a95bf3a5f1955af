"""What this machine says now of what a run stood on: drivers, CANN, an engine's package and commit, the processor.

Here: files and the vendors' tools, read leniently under a deadline; what cannot be had is None with the reason. No
engine and no accelerator library is imported: they may be what hangs. Not here: what the run itself recorded
(`machine.py`), and whether it is good enough (`doctor.py`).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from harness.tools import run_tools

TOOLS_S = 15.0
"""npu-smi takes seconds on a loaded machine, and for ever on one whose driver hangs."""
ASCEND = Path("/usr/local/Ascend")
_SMI: Mapping[str, Sequence[str]] = {
    "nvidia-smi": ("--query-gpu=name,driver_version", "--format=csv,noheader"),
    "npu-smi": ("info",),
}


@dataclass(frozen=True, slots=True)
class Reading:
    """One fact. ``value`` None: not known, and ``why`` says why; else ``why`` says where it was read."""

    name: str
    value: str | None
    why: str


# --- drivers -----------------------------------------------------------------------------------------------


def driver_readings(root: Path = Path("/")) -> list[Reading]:
    """NVIDIA's and Ascend's drivers, devices, firmware and CANN. ``root`` stands for ``/`` in tests."""
    answers = _ask(_SMI)
    return [
        *_nvidia(answers["nvidia-smi"], root),
        *_ascend(answers["npu-smi"], root),
    ]


def _ask(tools: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, str]]:
    """Per tool what it printed and what was wrong; tools that are not there are not started."""
    found = {name: path for name in tools if (path := shutil.which(name)) is not None}
    commands = {name: (path, *tools[name]) for name, path in found.items()}
    answers = {name: ("", f"{name}: not found") for name in tools}
    for name, result in run_tools(commands, deadline_s=time.monotonic() + TOOLS_S).items():
        answers[name] = (result.stdout.decode(errors="replace"), result.problem or "")
    return answers


def _nvidia(answer: tuple[str, str], root: Path) -> Iterator[Reading]:
    said, problem = answer
    rows = [line.rpartition(",") for line in said.splitlines() if "," in line] if not problem else []
    if rows:
        names = [name.strip() for name, _, _ in rows]
        counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        yield Reading("nvidia devices", counted, "nvidia-smi")
        yield Reading("nvidia driver", rows[0][2].strip(), "nvidia-smi")
        return
    version = root / "proc/driver/nvidia/version"
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _read(version))
    yield Reading("nvidia devices", None, problem or "nvidia-smi named none")
    yield Reading("nvidia driver", found[1] if found else None, str(version) if found else problem or "none")


def _ascend(answer: tuple[str, str], root: Path) -> Iterator[Reading]:
    said, problem = answer
    chips = re.findall(r"^\|\s*\d+\s+(\S+)\s*\|\s*(?:OK|Warning|Alarm|Critical|UNKNOWN)", said, re.MULTILINE)
    if chips and not problem:
        counted = ", ".join(f"{chips.count(chip)} x {chip}" for chip in dict.fromkeys(chips))
        yield Reading("ascend devices", counted, "npu-smi info")
    else:
        yield Reading("ascend devices", None, problem or "npu-smi info names none that we can read")
    folder = root / ASCEND.relative_to("/")
    for name, part in (("ascend driver", "driver"), ("ascend firmware", "firmware")):
        path = folder / part / "version.info"
        yield _keyed(name, [path])
    homes = [
        Path(home) for key in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME") if (home := os.environ.get(key))
    ]
    homes += [folder / "cann", folder / "ascend-toolkit" / "latest", folder / "nnae" / "latest"]
    arch = f"{platform.machine()}-linux"
    named = ("ascend_toolkit_install.info", "ascend_nnae_install.info")
    yield _keyed(
        "cann", [path for home in homes for file in named for path in (home / arch / file, home / file)]
    )


def _keyed(name: str, paths: Sequence[Path]) -> Reading:
    """The ``version=`` of the first file that has one."""
    for path in paths:
        found = re.search(r"^\s*version\s*=\s*(\S+)", _read(path), re.IGNORECASE | re.MULTILINE)
        if found is not None:
            return Reading(name, found[1], str(path))
    return Reading(name, None, f"no {paths[0]}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")[: 1 << 16]
    except OSError:
        return ""


def processor() -> Reading:
    """The model of the first processor, where the kernel tells."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^(?:model name|Hardware|CPU implementer)\s*:\s*(.+)$", _read(path), re.MULTILINE)
    if found is None:
        return Reading("processor", None, f"{path} names no model")
    return Reading("processor", found[1].strip(), str(path))


# --- packages ----------------------------------------------------------------------------------------------


def package_readings(python: str, names: Sequence[str]) -> list[Reading]:
    """Version and commit of packages in the environment of an interpreter (``""``: of this one), without running
    it."""
    folders = _site_folders(python)
    where = (
        "this environment" if folders is None else ", ".join(map(str, folders)) or f"no packages of {python}"
    )
    readings = []
    for name in names:
        found = _distribution(name, folders)
        if found is None:
            readings.append(Reading(name, None, f"not in {where}"))
            continue
        readings.append(Reading(name, found.version, f"its metadata in {where}"))
        readings.append(_commit(name, found))
    return readings


def _site_folders(python: str) -> list[str] | None:
    """None: what this interpreter imports from."""
    if not python:
        return None
    program = shutil.which(python)
    if program is None:
        return []
    base = Path(program).absolute().parent.parent  # a link of a virtual environment is not to be followed
    patterns = ("lib/python3*/site-packages", "lib64/python3*/site-packages", "lib/python3*/dist-packages",
                "lib/python3/dist-packages", "local/lib/python3*/dist-packages")  # fmt: skip
    folders = [path for pattern in patterns for path in sorted(base.glob(pattern))]
    return [str(path) for path in {folder.resolve(): folder for folder in reversed(folders)}.values()]


def _distribution(name: str, folders: list[str] | None) -> Distribution | None:
    if folders is None:
        context = DistributionFinder.Context(name=name)
    else:
        context = DistributionFinder.Context(name=name, path=folders)
    try:
        return next(iter(MetadataPathFinder.find_distributions(context)), None)
    except (OSError, ValueError):
        return None


def _commit(name: str, found: Distribution) -> Reading:
    """From the address it was installed from, its checkout, or its version (``0.9.1+g1a2b3c4d5``)."""
    label = f"{name} commit"
    origin = _origin(found)
    vcs = origin.get("vcs_info")
    if isinstance(vcs, dict) and vcs.get("commit_id"):
        return Reading(label, str(vcs["commit_id"]), "the address that it was installed from")
    url = urlsplit(str(origin.get("url", "")))
    if url.scheme == "file":
        checkout = Path(unquote(url.path))
        head = next((head for folder in (checkout, *checkout.parents) if (head := git_head(folder))), None)
        if head is not None:
            return Reading(label, head, "the checkout that it was installed from, as it is now")
    local = re.search(r"\+(?:.*\.)?g([0-9a-f]{7,40})", found.version)
    if local is not None:
        return Reading(label, local[1], "its version")
    return Reading(label, None, "installed from a package index, or without a record of where from")


def _origin(found: Distribution) -> dict[str, Any]:
    try:
        document = json.loads(found.read_text("direct_url.json") or "{}")
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def git_head(folder: Path) -> str | None:
    """The commit that a checkout stands on, read from its files; None where it is none."""
    git = folder / ".git"
    if git.is_file():  # a worktree
        git = folder / _read(git).removeprefix("gitdir:").strip()
    head = _read(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head if re.fullmatch(r"[0-9a-f]{40,64}", head) else None
    ref = head.removeprefix("ref:").strip()
    common = git / (_read(git / "commondir").strip() or ".")
    for place in (git, common):
        if re.fullmatch(r"[0-9a-f]{40,64}", value := _read(place / ref).strip()):
            return value
    packed = re.search(
        rf"^([0-9a-f]{{40,64}}) {re.escape(ref)}$", _read(common / "packed-refs"), re.MULTILINE
    )
    return packed[1] if packed else None
