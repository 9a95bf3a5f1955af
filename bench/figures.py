"""What a figure is: arms with their numbers, and ratios between arms of the same run.

Not here: which figures there are (``engine_figures.py``, ``harness_figures.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.arms import Blocks, Plan
from bench.ratio import Ratio, paired_ratio


@dataclass(frozen=True, slots=True)
class Between:
    """A ratio of ``quantity`` between two arms of one figure."""

    over: str
    under: str
    quantity: str
    ratio: Ratio

    def to_json(self) -> dict[str, Any]:
        return {"over": self.over, "under": self.under, "quantity": self.quantity, **self.ratio.to_json()}


@dataclass(frozen=True, slots=True)
class Figure:
    """``arms``: by name, numbers by quantity, the unit in the quantity's name."""

    name: str
    says: str
    arms: Mapping[str, Mapping[str, float]]
    ratios: Sequence[Between]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "says": self.says,
            "arms": {name: dict(values) for name, values in self.arms.items()},
            "ratios": [ratio.to_json() for ratio in self.ratios],
        }


def stepped(name: str, says: str, plan: Plan, times: Sequence[Sequence[Blocks]], base: str) -> Figure:
    """The figure of a plan: every arm against ``base``, in wall clock and in processor time.

    ``times``: by rank, by arm. A step's time is the mean over ranks, which wait for each other; its processor
    time is the sum.
    """
    wall_s = _over_ranks(times, lambda blocks: blocks.wall_s, 1.0 / len(times))
    cpu_s = _over_ranks(times, lambda blocks: blocks.cpu_s, 1.0)
    arms = {}
    ratios = []
    under = [arm.name for arm in plan.arms].index(base)
    for index, arm in enumerate(plan.arms):
        step_s = median(wall_s[index]) / plan.block_steps
        arms[arm.name] = {
            "step_us": step_s * 1e6,
            "steps_per_s": 1.0 / step_s,
            "cpu_us_per_step": median(cpu_s[index]) / plan.block_steps * 1e6,
        }
        if index != under:
            for quantity, values in (("step_us", wall_s), ("cpu_us_per_step", cpu_s)):
                ratio = paired_ratio(values[index], values[under])
                ratios.append(Between(arm.name, base, quantity, ratio))
    return Figure(name, says, arms, ratios)


def _over_ranks(
    times: Sequence[Sequence[Blocks]], seconds: Callable[[Blocks], Sequence[float]], factor: float
) -> list[list[float]]:
    """By arm, by round: the sum over ranks, times ``factor``."""
    arms = range(len(times[0]))
    return [
        [factor * sum(parts) for parts in zip(*(seconds(rank[arm]) for rank in times), strict=True)]
        for arm in arms
    ]
