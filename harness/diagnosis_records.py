"""Decision records of the same step held against each other. Pure.

Here: the first step at which ranks differ that should not, and how that is worded. What it means is
``diagnosis_decisions.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.diagnosis_case import Case, View
from harness.diagnosis_model import Fact

MUST_AGREE = ("mode_agreed", "modes", "tokens", "passes")
"""Fields of a decision record that are the outcome of the agreement, so equal on all ranks; ``passes``, where it is
there, how often the rank made the step."""
PEERS_AGREE = ("aborted", "requests", "mode", "batch", "own_tokens", "retracted")
"""Fields that are equal on the ranks of one attention group: they compute the same batch."""
FOLLOWS_AGREEMENT = ("padding", "bucket", "graph")
"""Fields that follow from it; where only these differ, the collectives of the step tell the story."""
_AGREED = (*MUST_AGREE, *FOLLOWS_AGREEMENT)
_BEFORE_THE_RECORD = ("schedule", "receive", "cache-sync", "agree")
"""Phases of a step that come before its record."""
_ABSENT = {"passes": 1}
"""What a record says that does not have the field."""

Records = Mapping[int, Mapping[str, Any]]
"""Of one step, by rank."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """At ``step``, the first one, the records differ in ``name``."""

    step: int
    name: str
    records: Records

    @property
    def values(self) -> dict[int, Any]:
        return {rank: value_of(record, self.name) for rank, record in self.records.items()}


def first_divergence(case: Case, fields: tuple[str, ...]) -> Divergence | None:
    """The first step at which the ranks differ in one of ``fields``: MUST_AGREE or FOLLOWS_AGREEMENT."""
    return _firsts(case).by_fields[fields]


def first_peer_divergence(case: Case) -> Divergence | None:
    """The first step at which ranks of one attention group differ."""
    return _firsts(case).of_peers


def lost_after(case: Case, rank: int, step: int) -> bool:
    """The rank's newest record is that of ``step``, and peers have one of a later step of which it owes one too:
    what it did since may belong to either."""
    told = case.once("recorded steps", lambda: {one for other in case.views for one in case.decisions(other)})
    own, until = case.decisions(rank), owed_until(case.views[rank])
    return not any(one > step for one in own) and any(step < one <= until for one in told)


def owed_until(view: View) -> int:
    """The newest step of which the rank owes a record, should the ranks have agreed on anything in it; -1 without a
    ledger."""
    if view.snapshot is None:
        return -1
    return view.snapshot.host.step - (view.snapshot.host.phase in _BEFORE_THE_RECORD)


@dataclass(slots=True)
class _Firsts:
    by_fields: dict[tuple[str, ...], Divergence | None]
    of_peers: Divergence | None = None


def _firsts(case: Case) -> _Firsts:
    """All of them, in one walk through the records: of thousands of ranks they are what a diagnosis costs."""
    return case.once("firsts", lambda: _walk(case))


def _walk(case: Case) -> _Firsts:
    # One table after the other, each record once: that is the order in which they lie in memory.
    agreed: dict[int, tuple[Any, ...]] = {}
    of_peers: dict[tuple[int, int], tuple[Any, ...]] = {}
    unlike: set[int] = set()
    peers_unlike: set[int] = set()
    tables = {id(table): table for rank in case.views if (table := case.decisions(rank))}
    for table in tables.values():
        for step, record in table.items():
            row = tuple(map(record.get, _AGREED))
            if agreed.setdefault(step, row) != row:
                unlike.add(step)
            group = record.get("dp")
            if isinstance(group, int):
                row = tuple(map(record.get, PEERS_AGREE))
                if of_peers.setdefault((group, step), row) != row:
                    peers_unlike.add(step)
    found = _Firsts({MUST_AGREE: None, FOLLOWS_AGREEMENT: None})
    for fields in found.by_fields:
        differing = (_differing_at(step, _at(case, step), fields) for step in sorted(unlike))
        found.by_fields[fields] = next((one for one in differing if one is not None), None)
    differing = (_peers_at(step, _at(case, step)) for step in sorted(peers_unlike))
    found.of_peers = next((one for one in differing if one is not None), None)
    return found


def _at(case: Case, step: int) -> Records:
    return {rank: found[step] for rank in case.views if step in (found := case.decisions(rank))}


def _differing_at(step: int, at: Records, fields: tuple[str, ...]) -> Divergence | None:
    for name in fields:
        having = {rank: record for rank, record in at.items() if name in record or name in _ABSENT}
        if _differ(having, name):
            return Divergence(step, name, having)
    return None


def _peers_at(step: int, at: Records) -> Divergence | None:
    groups: dict[int, dict[int, Mapping[str, Any]]] = {}
    for rank, record in at.items():
        if isinstance(group := record.get("dp"), int):
            groups.setdefault(group, {})[rank] = record
    for members in groups.values():
        for name in PEERS_AGREE:
            if _differ({rank: record for rank, record in members.items() if name in record}, name):
                return Divergence(step, name, members)
    return None


def divergence_facts(case: Case, fields: tuple[str, ...]) -> list[Fact]:
    found = first_divergence(case, fields)
    return [] if found is None else differing_facts(case, found)


def minority_of(values: Mapping[int, Any]) -> tuple[int, ...]:
    """The ranks outside the majority; all of them when there is none."""
    parties: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        parties.setdefault(repr(value), []).append(rank)
    most = max(len(party) for party in parties.values())
    if sum(len(party) == most for party in parties.values()) > 1:
        return tuple(sorted(values))
    return tuple(sorted(rank for party in parties.values() if len(party) < most for rank in party))


def differing_facts(case: Case, found: Divergence) -> list[Fact]:
    if found.name == "passes":
        return [_passes_fact(case, found.step, rank, found.records[rank]) for rank in sorted(found.records)]
    return [
        Fact(
            f"rank {rank}: at step {found.step}, the first on which the ranks differ, {found.name} is {value}",
            case.decisions_path(rank),
        )
        for rank, value in sorted(found.values.items())
    ]


def _passes_fact(case: Case, step: int, rank: int, record: Mapping[str, Any]) -> Fact:
    passes = value_of(record, "passes")
    said = (
        f"made step {step} {passes} times"
        if passes != 1
        else f"made step {step} once, as every rank every step"
    )
    failed = record.get("failed")
    why = [
        f"{one.get('request', 'a request')} failed ({one.get('reason', 'no reason given')})"
        for one in (failed if isinstance(failed, list | tuple) else ())
        if isinstance(one, Mapping)
    ]
    return Fact(f"rank {rank} {said}{': ' if why else ''}{', '.join(why)}", case.decisions_path(rank))


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """What the record says of it, or means by not saying it."""
    return record.get(name, _ABSENT.get(name))


def _differ(records: Records, name: str) -> bool:
    return not _alike([value_of(record, name) for record in records.values()])


def _alike(values: list[Any]) -> bool:
    """All are equal. One call that compares: this is asked for each step of thousands of ranks."""
    return not values or values.count(values[0]) == len(values)
