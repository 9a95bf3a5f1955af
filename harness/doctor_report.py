"""What the doctor's checks answer with: one record a check, and all of them for one device.

Here: values, their JSON, and the judgement of a device's memory, which is one for all vendors. Not here: any look
at the machine (`doctor.py`, `doctor_device.py`, `doctor_npu.py`, `doctor_cuda.py`)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["ok", "warn", "fail", "missing"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. *warn* does not stand in the way; *missing* is the asked device."""

    name: str
    status: Status
    detail: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All checks for one device. ``raw``: what the vendor's tools printed, by question."""

    device: str
    checks: tuple[Check, ...]
    raw: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def ready(self) -> bool:
        return all(check.status in ("ok", "warn") for check in self.checks)

    @property
    def exit(self) -> int:
        """4 when the asked device is missing, else 1 when something is to mend, else 0 (CONTRACTS.md)."""
        states = {check.status for check in self.checks}
        return 4 if "missing" in states else 1 if "fail" in states else 0

    def to_json(self) -> dict[str, Any]:
        checks = [dataclasses.asdict(check) for check in self.checks]
        return {
            "schema": 1,
            "device": self.device,
            "ready": self.ready,
            "checks": checks,
            "raw": dict(self.raw),
        }


BUSY = 0.10
"""Of a device's memory; an idle 910C chip shows about 5 % (3.4 of 64 GiB in public tables of npu-smi)."""
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one device, in MiB; None: not known."""

    name: str
    used_mib: int | None
    total_mib: int | None

    @property
    def in_use(self) -> bool:
        return bool(self.total_mib and self.used_mib is not None and self.used_mib > BUSY * self.total_mib)


def holders(others: Sequence[str], memory: Sequence[Memory]) -> Check:
    """Whether somebody else uses the devices. ``others``: processes that are not ours, in words."""
    name = "device memory"
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        mend = (
            "end them or leave their devices out: they change what is measured, and their memory is missing"
        )
        return Check(name, "warn", f"other processes: {', '.join(others[:_SHOWN])}{more}", mend)
    held = [f"{one.name} {one.used_mib} of {one.total_mib} MiB" for one in memory if one.in_use]
    if held:
        mend = "a process of another container, or one that died, holds it: look from the host"
        return Check(name, "warn", f"in use by nobody that is seen here: {'; '.join(held)}", mend)
    known = sum(one.used_mib is not None for one in memory)
    return Check(name, "ok", f"free on {known} of {len(memory)} devices")


def own_pids() -> frozenset[int]:
    """This process and its parent: whoever asks is no other user."""
    return frozenset({os.getpid(), os.getppid()})


def short(error: object) -> str:
    """The first line of a message, cut: details of a check fit on a line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
