"""Reads fields of stored documents that may be damaged, foreign or hostile, without ever raising.

A report must come out of a run that died half-way: a field of the wrong type reads as absent, and the
verdict rules turn absence into ``unknown``. What a field means is said where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Document: TypeAlias = Mapping[str, Any]
_EMPTY: dict[str, Any] = {}


def text(document: Document, key: str, default: str = "") -> str:
    value = document.get(key)
    return value if isinstance(value, str) else default


def optional_text(document: Document, key: str) -> str | None:
    value = document.get(key)
    return value if isinstance(value, str) and value else None


def integer(document: Document, key: str, default: int = 0) -> int:
    value = document.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


def optional_integer(document: Document, key: str) -> int | None:
    value = document.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def number(document: Document, key: str) -> float | None:
    """A finite number, else None (JSON written elsewhere may hold NaN)."""
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def flag(document: Document, key: str) -> bool:
    return document.get(key) is True


def table(document: Document, key: str) -> Document:
    value = document.get(key)
    return value if isinstance(value, Mapping) else _EMPTY


def rows(document: Document, key: str) -> tuple[Document, ...]:
    """The objects in a list of objects; whatever else is in the list is left out."""
    value = document.get(key)
    if not isinstance(value, list):
        return ()
    return tuple(row for row in value if isinstance(row, Mapping))


def integers(document: Document, key: str) -> tuple[int, ...]:
    value = document.get(key)
    if not isinstance(value, list):
        return ()
    return tuple(item for item in value if isinstance(item, int) and not isinstance(item, bool))


def texts(document: Document, key: str) -> tuple[str, ...]:
    value = document.get(key)
    if not isinstance(value, list):
        return ()
    return tuple(str(item) for item in value)


def finite(values: Sequence[float]) -> list[float]:
    """The samples that are finite and not negative: a latency is both, whatever a damaged file says."""
    return [float(value) for value in values if math.isfinite(value) and value >= 0]
