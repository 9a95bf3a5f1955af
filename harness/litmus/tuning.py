"""Stress per device: what is tried, for how long a shot may last, and the choice among what was tried.

A race shows itself only in a window, and where that window lies is the device's affair. So for each family of
programs its control is shot under several settings first, and all programs of the family run under the one at which
the control was seen most often (of equals the one with the longest delay and the largest copy: the widest window).

Not here: who shoots (``session.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.litmus.bench import Stress

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class DeviceTable:
    """``delays_us`` × ``sizes`` are tried with ``shots`` each. ``deadline_s``: of one shot. ``start_s``: for a
    process to import torch and open the device, or to set a program up. ``budget_s``: for a program of 100 shots,
    and ``budget_per_shot_s`` more for each beyond; it ends early when that is used up."""

    delays_us: tuple[float, ...]
    sizes: tuple[int, ...]
    shots: int
    deadline_s: float
    start_s: float
    budget_s: float
    budget_per_shot_s: float

    def candidates(self) -> tuple[Stress, ...]:
        return tuple(Stress(delay, size) for delay in self.delays_us for size in self.sizes)

    def budget_of(self, shots: int) -> float:
        return self.budget_s + self.budget_per_shot_s * max(0, shots - 100)


TABLES: Mapping[str, DeviceTable] = {
    "sim": DeviceTable(
        delays_us=(0.0, 100.0, 300.0, 1000.0),
        sizes=(4 * KIB, 64 * KIB),
        shots=8,
        deadline_s=5.0,
        start_s=60.0,
        budget_s=4.0,
        budget_per_shot_s=0.02,
    ),
    # No figure below was measured on hardware. A copy engine moves about 25 to 60 GB/s: 1 MiB is 20 to 40 µs.
    "cuda": DeviceTable(
        delays_us=(0.0, 20.0, 100.0, 500.0, 2000.0),
        sizes=(4 * KIB, 256 * KIB, 4 * MIB),
        shots=12,
        deadline_s=20.0,
        start_s=180.0,
        budget_s=60.0,
        budget_per_shot_s=0.1,
    ),
    # Launches are slower, and the task queue's thread stands between host and device.
    "npu": DeviceTable(
        delays_us=(0.0, 50.0, 200.0, 1000.0, 5000.0),
        sizes=(4 * KIB, 256 * KIB, 4 * MIB),
        shots=12,
        deadline_s=30.0,
        start_s=300.0,
        budget_s=120.0,
        budget_per_shot_s=0.2,
    ),
}


@dataclass(frozen=True, slots=True)
class Tried:
    """One setting and how often the control showed itself under it."""

    stress: Stress
    seen: int
    shots: int

    @property
    def rate(self) -> float:
        return self.seen / self.shots if self.shots else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**self.stress.to_json(), "k": self.seen, "n": self.shots}


def chosen(tried: Sequence[Tried]) -> Tried:
    """The one at which the control was seen most often. ValueError where nothing was tried."""
    return max(tried, key=lambda one: (one.rate, one.stress.delay_us, one.stress.nbytes))
