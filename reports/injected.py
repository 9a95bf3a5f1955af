"""What was broken on purpose in a trial, and when: the nemesis's own record beside the diagnosis. Pure view.

Acts of one fault at one site are one line: a fault may act in every step. Not here: what faults are
(`harness.faults`), and any conclusion; no diagnosis sees this.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.store import StoredTrial
from reports import fields
from reports.fields import Document
from reports.model import TrialResult

_WHERE = ("group", "operation", "stream", "label", "part", "layer", "mode", "graph", "event", "request")
"""Values of a pass that say where it was, in this order; others are in the file."""


@dataclass(frozen=True, slots=True)
class InjectedRow:
    """Acts of one fault on one rank at one site. ``at_s``: of the first, since the rank began the trial; None where
    it was not recorded. ``step`` and ``last_step``: of the first and the last one."""

    rank: int
    fault: str
    site: str
    where: str
    step: int
    last_step: int
    at_s: float | None
    acts: int
    evidence: str


@dataclass(frozen=True, slots=True)
class Injected:
    """A trial with faults; no rows: none of them acted."""

    trial: TrialResult
    rows: tuple[InjectedRow, ...]


def injected(stored: StoredTrial, trial: TrialResult) -> Injected | None:
    """None for a trial in which no fault was asked for."""
    acts = stored.fault_acts()
    if not acts:
        return None
    rows = [row for rank, told in sorted(acts.items()) for row in _rows(rank, told)]
    return Injected(trial, tuple(rows))


def _rows(rank: int, told: tuple[Document, ...]) -> list[InjectedRow]:
    together: dict[tuple[int, str, str], list[Document]] = {}
    for act in told:
        key = (fields.integer(act, "index"), fields.text(act, "fault", "?"), fields.text(act, "site", "?"))
        together.setdefault(key, []).append(act)
    return [
        InjectedRow(
            rank=rank,
            fault=fault,
            site=site,
            where=_where(fields.table(same[0], "values")),
            step=fields.integer(same[0], "step"),
            last_step=fields.integer(same[-1], "step"),
            at_s=fields.number(same[0], "at_s"),
            acts=len(same),
            evidence=f"faults/rank{rank}.jsonl",
        )
        for (_, fault, site), same in sorted(together.items())
    ]


def _where(values: Document) -> str:
    return ", ".join(f"{name} {values[name]}" for name in _WHERE if isinstance(values.get(name), str | int))
