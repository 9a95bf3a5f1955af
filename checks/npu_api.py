"""`make check-npu-api`: does what our code uses of torch_npu exist in it? Fetches wheels, installs none.

    python -m checks.npu_api [--wheel FILE]... [--json]

Checked are the newest release of 2.7 and the newest of all. Exit status: 0 everything exists or is gated, 1
something is missing, 3 a wheel cannot be had. What was found is written to docs/npu-api.md. Not here: what we use
(``npu_names.py``), what a wheel offers (``npu_wheel.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from checks.npu_names import Use, uses, variables
from checks.npu_wheel import Wheel, signature

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "npu-api.md"
RELEASES = ("torch_npu==2.7.*", "torch_npu")
KEPT = "HANGRIG_NPU_WHEELS"
"""Names the folder in which wheels are kept; one of the user's cache else."""
_DOWNLOAD_S = 600.0

Standing: TypeAlias = Literal["exists", "by name", "CANN", "missing"]

CANN_VARIABLES = {
    "ASCEND_HOME_PATH": "CANN set_env.sh sets it",
    "ASCEND_TOOLKIT_HOME": "CANN set_env.sh sets it",
    "ASCEND_PROCESS_LOG_PATH": "CANN environment variables, log",
    "ASCEND_WORK_PATH": "CANN environment variables, working directory",
    "ASCEND_RT_VISIBLE_DEVICES": "CANN environment variables, AscendCL",
    "HCCL_CONNECT_TIMEOUT": "CANN environment variables, HCCL",
    "HCCL_OP_EXPANSION_MODE": "CANN environment variables, HCCL",
}
"""Read by CANN, not by torch_npu, with what documents it: no wheel can show them."""
TORCH_VARIABLES = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "PyTorch, torch/__init__.py"}
GATED = {
    "NPU_SHMEM_SYMMETRIC_SIZE": "no allocator NPUSHMEM there; harness/device_facts.py looks for it first",
    "PER_STREAM_QUEUE": "not known there; it is only warned of",
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": "the name without TORCH_ is read there; both are set",
    "TORCH_HCCL_DESYNC_DEBUG": "the name without TORCH_ is read there; both are set",
}
"""Missing in some release, and how our code goes without."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    standing: Standing
    detail: str
    where: str


def check(wheel: Wheel, used: Sequence[Use], named: dict[str, str]) -> list[Finding]:
    """Every use and every variable, held against one wheel."""
    return [
        *(_check_use(wheel, use) for use in used),
        *(_check_variable(wheel, *one) for one in named.items()),
    ]


def _check_use(wheel: Wheel, use: Use) -> Finding:
    if use.owner.startswith("torch_npu"):
        bound = wheel.binds(use.owner, use.name)
        node = wheel.defined(use.name)
    elif use.owner:
        node = wheel.method(use.owner, use.name)
        bound = node is not None
    else:
        bound = wheel.binds("torch_npu.npu", use.name)
        node = wheel.defined(use.name)
    if not bound and use.owner and wheel.defined(use.owner) is not None:
        library = wheel.in_libraries(use.name)
        if library is not None:
            return Finding(use.words, "by name", f"bound in C++; its name is in {library}", use.where)
    if not bound:
        return Finding(use.words, "missing", "no such name", use.where)
    if use.arguments is None or node is None:
        return Finding(use.words, "exists", "", use.where)
    takes = signature(node)
    if takes is None:
        return Finding(use.words, "by name", "its arguments are C++'s", use.where)
    if not takes.takes(*use.arguments):
        return Finding(use.words, "missing", f"takes ({', '.join(takes.names)})", use.where)
    return Finding(use.words, "exists", f"({', '.join(takes.names)})", use.where)


def _check_variable(wheel: Wheel, name: str, where: str) -> Finding:
    if name in TORCH_VARIABLES:
        return Finding(name, "exists", TORCH_VARIABLES[name], where)
    place = wheel.in_sources(name) or wheel.in_libraries(name)
    if place is not None:
        return Finding(name, "exists", place, where)
    if name in CANN_VARIABLES:
        return Finding(name, "CANN", CANN_VARIABLES[name], where)
    return Finding(name, "missing", "neither in the wheel nor known to be CANN's", where)


# Wheels ----------------------------------------------------------------------------------------------------


class WheelMissing(RuntimeError):
    """Cannot be had now; the message says what to do."""


def fetch(requirement: str, folder: Path) -> Wheel:
    """The wheel that fits Python 3.11 on x86_64, kept in ``folder``. Raises WheelMissing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11", "--abi", "cp311",
            "--platform", "manylinux_2_28_x86_64", "--dest", fresh, "--find-links", str(folder), requirement,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False)
        except subprocess.TimeoutExpired as late:
            raise WheelMissing(
                f"{requirement}: not there after {_DOWNLOAD_S:g} s; try again, or --wheel FILE"
            ) from late
        found = list(Path(fresh).glob("*.whl"))
        if done.returncode or not found:
            last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
            raise WheelMissing(f"{requirement}: {last}; see to the package index, or give --wheel FILE")
        kept = folder / found[0].name
        found[0].replace(kept)
    return Wheel(kept)


def _folder() -> Path:
    named = os.environ.get(KEPT)
    return Path(named) if named else Path.home() / ".cache" / "hangrig" / "wheels"


# Words -----------------------------------------------------------------------------------------------------


def document(found: dict[str, list[Finding]]) -> str:
    """docs/npu-api.md, but for the facts below its table: a row a use, a column a release."""
    versions = list(found)
    lines = [
        "# What hangrig uses of torch_npu, and whether it exists",
        "",
        "Written by `make check-npu-api`, which reads the wheels of torch_npu "
        + " and ".join(versions)
        + " (cp311, x86_64) and",
        "runs nothing of them: nothing here was tried on an NPU. *exists*: by the wheel's Python source, arguments",
        "included. *by name*: bound in C++, of which the name alone can be seen. *CANN*: read by CANN, as its",
        "manual says. A dot stands for a positional argument.",
        "",
        "| used | " + " | ".join(versions) + " | first at |",
        "|---|" + "---|" * (len(versions) + 1),
    ]
    for rows in zip(*found.values(), strict=True):
        cells = [_cell(one) for one in rows]
        lines.append(f"| `{rows[0].what}` | {' | '.join(cells)} | {rows[0].where.partition(':')[0]} |")
    return "\n".join(lines) + "\n"


def _cell(one: Finding) -> str:
    if one.standing == "missing" and _gate(one) is not None:
        return f"not there: {_gate(one)}"
    return one.standing if one.standing in ("exists", "by name") else f"{one.standing}: {one.detail}"


def _gate(one: Finding) -> str | None:
    return GATED.get(one.what.partition("(")[0])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.npu_api", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--wheel", action="append", type=Path, help="read this one instead of fetching any")
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON, and write no document"
    )
    asked = parser.parse_args(argv)
    used, named = uses(ROOT), variables(ROOT)
    try:
        wheels = [Wheel(path) for path in asked.wheel or ()] or [fetch(one, _folder()) for one in RELEASES]
    except WheelMissing as error:
        print(error, file=sys.stderr)
        return 3
    found = {wheel.version: check(wheel, used, named) for wheel in wheels}
    missing = [
        f"torch_npu {version}: {one.what}: {one.detail} (used at {one.where})"
        for version, rows in found.items()
        for one in rows
        if one.standing == "missing" and _gate(one) is None
    ]
    if asked.json:
        print(json.dumps({version: [_row(one) for one in rows] for version, rows in found.items()}, indent=1))
    else:
        DOCUMENT.write_text(document(found) + _facts(), encoding="utf-8")
        print(
            f"{len(used)} uses and {len(named)} variables in {', '.join(found)}: {len(missing)} missing; {DOCUMENT}"
        )
    print("\n".join(missing), file=sys.stderr, end="\n" if missing else "")
    return 1 if missing else 0


def _row(one: Finding) -> dict[str, str]:
    return {"what": one.what, "standing": one.standing, "detail": one.detail, "where": one.where}


def _facts() -> str:
    """What stands below the table is written by hand, and kept."""
    if not DOCUMENT.exists():
        return ""
    _, heading, rest = DOCUMENT.read_text(encoding="utf-8").partition("\n## ")
    return heading + rest


if __name__ == "__main__":
    sys.exit(main())
