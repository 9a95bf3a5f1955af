"""How numbers and names read, in every sink alike. Pure formatting: no file, no markup."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from harness import rates
from harness.rates import Rate

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


percent = rates.percent
"""Here too, since sinks find all their words here."""


def clean(text: str) -> str:
    """``text`` with replacement characters for controls and lone surrogates, both of which JSON can carry."""
    return _UNPRINTABLE.sub("\ufffd", text)


def arm_name(arm: Mapping[str, Any]) -> str:
    """An arm as one string, its toggles sorted: ``pinned=pageable,symm_mem=off``."""
    return ",".join(f"{toggle}={arm[toggle]}" for toggle in sorted(arm)) or "default"


def k_of_n(rate: Rate) -> str:
    return f"{rate.k} of {rate.n}"


def ranges(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0, 1``, ``ranks 0 to 6, 8``."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    return f"rank {parts[0]}" if parts == [str(runs[0][0])] else f"ranks {', '.join(parts)}"


def hung(hangs: Rate, slow: int) -> str:
    """``1 of 4``, or ``1 of 4, 2 slow``: what was slow is no hang."""
    return f"{k_of_n(hangs)}, {slow} slow" if slow else k_of_n(hangs)


def interval(rate: Rate) -> str:
    if rate.n == 0:
        return "nothing tried"
    return f"{percent(rate.low).removesuffix(' %')} to {percent(rate.high)}"


def seconds(value: float | None) -> str:
    if value is None:
        return "unknown"
    if value < 0.0005:
        return "0 s"
    if value < 1.0:
        return f"{value * 1000:.0f} ms"
    if value < 120.0:
        return f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 7200.0 else f"{value / 3600:.1f} h"


def microseconds(value: float) -> str:
    if value < 1000.0:
        return f"{value:.3g} µs" if value < 100.0 else f"{value:.0f} µs"
    if value < 1_000_000.0:
        return f"{value / 1000:.3g} ms" if value < 100_000.0 else f"{value / 1000:.0f} ms"
    return f"{value / 1_000_000:.3g} s"


def count(number: int, noun: str, plural: str | None = None) -> str:
    """``1 trial``, ``3 trials``."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listing(items: list[str], most: int = 3) -> str:
    """``a, b and c``; past ``most``, ``a, b, c and 4 more``."""
    if len(items) > most:
        return f"{', '.join(items[:most])} and {len(items) - most} more"
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
