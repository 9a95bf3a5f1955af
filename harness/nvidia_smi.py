"""What ``nvidia-smi`` prints as CSV, as values. Pure, and lenient: a field without a number is None.

Fields are those of ``nvidia-smi --help-query-gpu`` that drivers of the last years all know; one unknown name
makes the tool refuse the whole question. Which commands are run is in `device_tools.py`."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass

GPU_FIELDS = (
    "index", "uuid", "name", "driver_version", "memory.total", "memory.used", "utilization.gpu", "temperature.gpu",
    "ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.aggregate.total",
)  # fmt: skip
PROCESS_FIELDS = ("gpu_uuid", "pid", "process_name", "used_memory")


@dataclass(frozen=True, slots=True)
class Gpu:
    """Memory in MiB. ``volatile``: uncorrected memory errors since the driver was loaded, ``aggregate``: ever; None
    where the GPU does not count them."""

    index: int
    uuid: str
    name: str
    driver: str
    total_mib: int | None
    used_mib: int | None
    volatile: int | None
    aggregate: int | None


@dataclass(frozen=True, slots=True)
class GpuProcess:
    uuid: str
    pid: int
    name: str
    used_mib: int | None


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """``--query-gpu`` with GPU_FIELDS and a heading. Rows without an index are left out."""
    found = []
    for row in _rows(text):
        index = _whole(row.get("index"))
        if index is None:
            continue
        found.append(
            Gpu(
                index,
                row.get("uuid", ""),
                row.get("name", ""),
                row.get("driver_version", ""),
                _whole(row.get("memory.total")),
                _whole(row.get("memory.used")),
                _whole(row.get("ecc.errors.uncorrected.volatile.total")),
                _whole(row.get("ecc.errors.uncorrected.aggregate.total")),
            )
        )
    return tuple(found)


def parse_processes(text: str) -> tuple[GpuProcess, ...]:
    """``--query-compute-apps`` with PROCESS_FIELDS and a heading. In a container the driver shows none."""
    found = []
    for row in _rows(text):
        pid = _whole(row.get("pid"))
        if pid is not None:
            used = next((value for name, value in row.items() if name.startswith("used_")), None)
            found.append(GpuProcess(row.get("gpu_uuid", ""), pid, row.get("process_name", ""), _whole(used)))
    return tuple(found)


def _rows(text: str) -> list[dict[str, str]]:
    """By the heading's names, without units: ``memory.used [MiB]`` is ``memory.used``."""
    lines = list(csv.reader(io.StringIO(text), skipinitialspace=True))
    if not lines:
        return []
    names = [re.sub(r"\s*\[.*\]$", "", name).strip() for name in lines[0]]
    return [dict(zip(names, (cell.strip() for cell in line), strict=False)) for line in lines[1:] if line]


def _whole(text: str | None) -> int | None:
    found = re.match(r"\d+", text or "")
    return int(found[0]) if found else None
