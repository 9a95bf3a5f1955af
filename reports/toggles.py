"""What became of the toggles of a run: one row for each distinct answer. Pure; the sinks lay it out."""

from __future__ import annotations

from dataclasses import dataclass

from reports.model import Result


@dataclass(frozen=True, slots=True)
class ToggleRow:
    """``arms``: how many asked for it and were given it."""

    toggle: str
    requested: str
    resolved: str
    why: str
    arms: int

    @property
    def refused(self) -> bool:
        """Somebody asked for a value and did not get it."""
        return self.requested not in ("default", self.resolved)

    @property
    def line(self) -> str:
        return f"{self.toggle}: {self.requested} → {self.resolved}, {self.why}"


def toggle_rows(result: Result) -> tuple[ToggleRow, ...]:
    """By toggle, then by what was requested. Empty for a run of which no arm is known."""
    arms: dict[tuple[str, str, str, str], set[tuple[str, str]]] = {}
    for arm in result.arms:
        for item in arm.resolutions:
            key = (item.toggle, item.requested, item.resolved, item.why)
            arms.setdefault(key, set()).add((arm.scenario, arm.name))
    return tuple(ToggleRow(*key, len(those)) for key, those in sorted(arms.items()))
