"""`make check-npu-api`: does what our code uses of torch_npu and torch.cuda exist? Fetches wheels, installs none.

    python -m checks.npu_api [--wheel FILE]... [--json]

Checked are the first release of torch_npu that our package admits, its newest 2.7 and its newest of all, and the
newest 2.7 and newest of all of torch (builds for macOS: the same Python, without the libraries of CUDA). Exit
status: 0 everything exists or is gated, 1 something is missing, 3 a wheel cannot be had. What was found is written
to docs/npu-api.md. Not here: what we use (``npu_names.py``), what a wheel offers (``npu_wheel.py``).
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from checks.npu_names import CUDA_FILES, FILES, GRAPH, Use, uses, variables
from checks.npu_wheel import Wheel, signature

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "npu-api.md"
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


@dataclass(frozen=True, slots=True)
class Part:
    """What is checked against one package's wheels: ``module`` stands for ``torch.npu`` or ``torch.cuda``, and its
    classes are defined in ``places``, the beginnings of files."""

    package: str
    module: str
    places: tuple[str, ...]
    files: tuple[str, ...]
    graph: str
    releases: tuple[str, ...]
    builds: tuple[str, ...]


NPU = Part(
    "torch_npu", "torch_npu.npu", ("torch_npu/npu/",), FILES, GRAPH,
    ("torch_npu==2.7.1", "torch_npu==2.7.*", "torch_npu"), ("manylinux_2_28_x86_64",),
)  # fmt: skip
CUDA = Part(
    "torch", "torch.cuda",
    ("torch/cuda/", "torch/distributed/_symmetric_memory/", "torch/_C/_distributed_c10d.pyi"),
    CUDA_FILES, "CUDAGraph", ("torch==2.7.*", "torch"), ("macosx_11_0_arm64", "macosx_14_0_arm64"),
)  # fmt: skip

GATED = {
    "NPU_SHMEM_SYMMETRIC_SIZE": (
        "2.7.1",
        "no allocator NPUSHMEM; harness/device_facts.py looks for it first",
    ),
    "PER_STREAM_QUEUE": ("2.7.1", "not known; it is only warned of"),
    "TORCH_HCCL_ASYNC_ERROR_HANDLING": ("2.7.1", "the name without TORCH_ is read; both are set"),
    "TORCH_HCCL_DESYNC_DEBUG": ("2.7.1", "the name without TORCH_ is read; both are set"),
}
"""Missing in that release alone, and how our code goes without: missing in another, it counts."""
LOOKED_FOR = (
    Use("", "graph", (1, ("auto_dispatch_capture",)), ""),
    Use(GRAPH, "update", (1, ()), ""),
    Use("", "host_memory_stats", None, ""),
    Use("", "_sleep", (1, ()), ""),
)
LOOKED_FOR_WORDS = ("NPUSHMEMSymmetricMemory", "_dump_hccl_trace", "_dump_hccl_trace_json")
"""Not used, but of interest to who writes for an NPU: whether it is there is said, and never fails."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    standing: Standing
    detail: str
    where: str


def check(wheel: Wheel, used: Sequence[Use], named: dict[str, str], part: Part = NPU) -> list[Finding]:
    """Every use and every variable, held against one wheel."""
    return [
        *(_check_use(wheel, use, part) for use in used),
        *(_check_variable(wheel, *one) for one in named.items()),
    ]


def _check_use(wheel: Wheel, use: Use, part: Part) -> Finding:
    node: ast.FunctionDef | ast.ClassDef | None
    if use.owner and "." not in use.owner:
        node = wheel.method(use.owner, use.name, part.places)
        bound = node is not None
    else:
        bound = wheel.binds(use.owner or part.module, use.name)
        node = wheel.defined(use.name, [use.owner.replace(".", "/")] if use.owner else part.places)
    if not bound and use.owner and wheel.defined(use.owner, part.places) is not None:
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


def fetch(requirement: str, folder: Path, part: Part = NPU) -> Wheel:
    """The wheel that fits Python 3.11 and the part's builds, kept in ``folder``. Raises WheelMissing."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as fresh:
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--implementation", "cp", "--python-version", "3.11", "--abi", "cp311",
            *(word for build in part.builds for word in ("--platform", build)),
            "--dest", fresh, "--find-links", str(folder), requirement,
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
    return Wheel(kept, part.package)


def _folder() -> Path:
    named = os.environ.get(KEPT)
    return Path(named) if named else Path.home() / ".cache" / "hangrig" / "wheels"


# Words -----------------------------------------------------------------------------------------------------


Table: TypeAlias = dict[str, list[Finding]]
"""By version of the wheel, the same rows in each."""


def document(npu: Table, extra: Table, cuda: Table) -> str:
    """docs/npu-api.md, but for the facts below its tables: a row a use, a column a release."""
    return f"""# What hangrig uses of torch_npu, and whether it exists

Written by `make check-npu-api`, which reads the wheels of torch_npu {_listed(npu)} (cp311, x86_64) and
of torch {_listed(cuda)} (cp311, macOS: the same Python) and runs nothing of them: nothing here was tried
on a device. *exists*: by the wheel's Python source, arguments included, or a text in its libraries where it is a
variable. *by name*: bound in C++, of which the name alone can be seen. *CANN*: read by CANN, as its manual says;
no wheel can show that. A dot stands for a positional argument.

{_rows(npu)}

## Not used, but looked for

{_rows(extra, placed=False)}

## torch.cuda and symmetric memory

{_rows(cuda)}
"""


def _listed(table: Table) -> str:
    *others, last = table
    return f"{', '.join(others)} and {last}" if others else last


def _rows(table: Table, *, placed: bool = True) -> str:
    last = [" first at |"] if placed else []
    lines = ["".join(["| used | " if placed else "| name | ", " | ".join(table), " |", *last])]
    lines.append("|---|" + "---|" * (len(table) + placed))
    for row in zip(*table.values(), strict=True):
        cells = [_cell(version, one) for version, one in zip(table, row, strict=True)]
        where = f" {row[0].where.partition(':')[0]} |" if placed else ""
        lines.append(f"| `{row[0].what}` | {' | '.join(cells)} |{where}")
    return "\n".join(lines)


def _cell(version: str, one: Finding) -> str:
    if one.standing == "missing":
        gate = _gate(version, one)
        return (
            f"not there: {gate}" if gate else "not there" if not one.where else f"**missing**: {one.detail}"
        )
    return one.standing if one.standing in ("exists", "by name") else f"{one.standing}: {one.detail}"


def _gate(version: str, one: Finding) -> str | None:
    release, why = GATED.get(one.what, ("", None))
    return why if version == release else None


def _missing(package: str, table: Table) -> list[str]:
    return [
        f"{package} {version}: {one.what}: {one.detail} (used at {one.where})"
        for version, rows in table.items()
        for one in rows
        if one.standing == "missing" and _gate(version, one) is None
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m checks.npu_api", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument(
        "--wheel",
        action="append",
        type=Path,
        help="read this one of torch_npu instead of fetching any, and write no document",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the findings as JSON, and write no document"
    )
    asked = parser.parse_args(argv)
    used, named = uses(ROOT), variables(ROOT)
    of_cuda = uses(ROOT, CUDA.files, CUDA.graph)
    try:
        wheels = [Wheel(path) for path in asked.wheel or ()] or [
            fetch(one, _folder()) for one in NPU.releases
        ]
        torches = [] if asked.wheel else [fetch(one, _folder(), CUDA) for one in CUDA.releases]
    except WheelMissing as error:
        print(error, file=sys.stderr)
        return 3
    npu = {wheel.version: check(wheel, used, named) for wheel in wheels}
    cuda = {wheel.version: check(wheel, of_cuda, {}, CUDA) for wheel in torches}
    missing = _missing("torch_npu", npu) + _missing("torch", cuda)
    if asked.json:
        tables = {"torch_npu": npu, "torch": cuda}
        print(
            json.dumps(
                {
                    name: {version: [_row(one) for one in rows] for version, rows in table.items()}
                    for name, table in tables.items()
                },
                indent=1,
            )
        )
    elif not asked.wheel:
        words = dict.fromkeys(LOOKED_FOR_WORDS, "")
        extra = {wheel.version: check(wheel, LOOKED_FOR, words) for wheel in wheels}
        DOCUMENT.write_text(document(npu, extra, cuda) + _facts(), encoding="utf-8")
    print(
        f"{len(used)} uses and {len(named)} variables in torch_npu {', '.join(npu)}; {len(of_cuda)} uses in torch "
        f"{', '.join(cuda) or '(not checked)'}: {len(missing)} missing",
        file=sys.stderr if asked.json else sys.stdout,
    )
    print("\n".join(missing), file=sys.stderr, end="\n" if missing else "")
    return 1 if missing else 0


def _row(one: Finding) -> dict[str, str]:
    return {"what": one.what, "standing": one.standing, "detail": one.detail, "where": one.where}


def _facts() -> str:
    """What stands below the tables is written by hand, and kept."""
    if not DOCUMENT.exists():
        return ""
    _, heading, rest = DOCUMENT.read_text(encoding="utf-8").partition("\n## Facts from the wheels\n")
    return heading + rest


if __name__ == "__main__":
    sys.exit(main())
