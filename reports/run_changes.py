"""What is not the same about two runs beside their outcomes: versions, machine, drivers, scenarios.

A change is always told. It forbids a comparison only where the numbers would compare something else than the
engine: latencies of machines of another shape, any figure of an arm that is defined otherwise. A new version of
torch, CANN or a driver forbids nothing, since it may be what a night is there to find. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from harness.run_list import definitions
from reports import fields
from reports.fields import Document

_IGNORED = frozenset({"boot_id", "python"})
"""Of the machine: other after every boot, or a path."""
_SHAPE = ("architecture", "cores", "memory_bytes", "cpu")
"""Of the machine: what decides how fast it is. Its name is not: a container has another one every night."""
_MEMORY_SHARE = 0.05
"""Two machines of one kind may differ by so much in the memory that they report."""


@dataclass(frozen=True, slots=True)
class Change:
    """``latencies``: it forbids holding latencies against each other."""

    what: str
    before: str
    after: str
    latencies: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "before": self.before,
            "after": self.after,
            "forbids": "latencies" if self.latencies else None,
        }


def changes(before: Document, after: Document) -> tuple[Change, ...]:
    """From run.json to run.json, in the order versions, drivers, machine."""
    return (
        *_differing(before, after, "versions", "version of "),
        *_differing(before, after, "drivers", ""),
        *_differing(before, after, "machine", "machine: "),
    )


def _differing(before: Document, after: Document, table: str, prefix: str) -> Iterator[Change]:
    then, now = fields.table(before, table), fields.table(after, table)
    for key in sorted({*then, *now} - _IGNORED):
        old, new = then.get(key), now.get(key)
        if old != new and not (key == "memory_bytes" and _about_equal(old, new)):
            other_shape = table == "machine" and key in _SHAPE
            other_devices = table == "drivers" and key.endswith("devices")
            yield Change(f"{prefix}{key}", _text(old), _text(new), other_shape or other_devices)


def _about_equal(old: object, new: object) -> bool:
    if not isinstance(old, int) or not isinstance(new, int):
        return False
    return abs(old - new) <= _MEMORY_SHARE * max(old, new)


def _text(value: object) -> str:
    return "not known" if value is None else str(value)


def defined_otherwise(before: Document, after: Document) -> frozenset[tuple[str, str]]:
    """Arms (scenario, arm string) whose requests, model or resolved toggles are not those of the other run. One
    that a run does not define is not among them: nothing is known against it."""
    then, now = _definitions(before), _definitions(after)
    return frozenset(key for key in then.keys() & now.keys() if then[key] != now[key])


def _definitions(run: Document) -> dict[tuple[str, str], str]:
    try:
        return definitions(run)
    except (KeyError, TypeError, ValueError, AttributeError):  # of an older hangrig, or damaged
        return {}
