"""Paired ratios with an interval: the arithmetic of blocks that took turns.

Rounds come in pairs that run the arms in opposite order, so a drift that is even over a pair drops out. The
estimate is the median over pairs, because other work on the machine makes some pairs worthless; its interval
is a percentile bootstrap over pairs. Not here: where times come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DRAWS = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Ratio:
    """``value`` with its 95 % interval over ``pairs`` pairs of rounds."""

    value: float
    low: float
    high: float
    pairs: int

    def to_json(self) -> dict[str, float | int]:
        return {"value": self.value, "low": self.low, "high": self.high, "pairs": self.pairs}


def paired_ratio(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """``over`` to ``under``: times of the same rounds, in their order. Raises ValueError if they do not pair."""
    if len(over) != len(under) or len(over) < 2 or len(over) % 2:
        raise ValueError(f"{len(over)} and {len(under)} rounds cannot be paired")
    tops = np.asarray(over, dtype=float).reshape(-1, 2).sum(axis=1)
    bottoms = np.asarray(under, dtype=float).reshape(-1, 2).sum(axis=1)
    ratios = tops / bottoms
    drawn = np.random.default_rng(0).integers(0, len(ratios), size=(_DRAWS, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(medians, [tail, 100 - tail])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))
