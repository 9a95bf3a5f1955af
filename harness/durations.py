"""Durations as people write them. Standard library only: what runs before hangrig is installed reads them too."""

from __future__ import annotations

import re

_UNITS_S = {"h": 3600.0, "m": 60.0, "s": 1.0}


def parse_duration_s(text: str) -> float:
    """``2h``, ``30m``, ``1h30m``, ``90s`` or ``90`` as seconds. Raises ValueError."""
    if re.fullmatch(r"\d+(\.\d+)?", text):
        total_s = float(text)
    elif re.fullmatch(r"(\d+(\.\d+)?[hms])+", text):
        total_s = sum(float(n) * _UNITS_S[unit] for n, _, unit in re.findall(r"(\d+(\.\d+)?)([hms])", text))
    else:
        raise ValueError(f"{text!r} is no duration; write 2h, 30m, 1h30m or 90s")
    if total_s <= 0:
        raise ValueError(f"{text!r} is no time at all")
    return total_s
