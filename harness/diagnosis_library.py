"""What the accelerator's libraries say beside ledgers and stacks: recorders, HCCL's status, error codes. Pure.

The rules of a run go first: a ledger says more than a recorder, and nobody's log proves whom others waited for.
So a cause that was found gets facts; one that was not is taken from the recorders, or from the one rank whose log
holds a fault of its own device. A code that says a rank waited blames nobody: it is the log of who was hung upon.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from harness.diagnosis_flight import flight_finding
from harness.diagnosis_model import Cause, Fact, LibraryEvidence, LoggedCode
from harness.error_codes import Role
from harness.seats import seat_words

_ORDER: tuple[Role, ...] = ("fault", "unknown", "waited", "setup")
_MOST_FACTS = 12
_DONE = frozenset({"end", "completed"})


def with_library(cause: Cause, library: LibraryEvidence, world: int) -> Cause:
    """``cause`` with what the libraries add to it, or in the place of a hang that nothing else decided."""
    if cause.kind in ("slow", "none"):
        return cause
    facts = (*_code_facts(library.codes), *_status_facts(library))
    undecided = cause.mechanism == "unknown" and not cause.ranks
    if library.flights:
        finding = flight_finding(library.flights, world, library.unreadable)
        found = finding.cause
        if found is not None and undecided and (found.ranks or found.mechanism != "unknown"):
            return replace(found, facts=(*found.facts, *facts, *cause.facts))
        facts = (*(finding.facts if found is None else found.facts), *facts)
        if found is not None and cause.collective is None:
            cause = replace(cause, collective=found.collective)
    if undecided:
        faulty = {
            one.seat for one in library.codes if one.seat is not None and one.found.meaning.role == "fault"
        }
        if len(faulty) == 1:
            cause = replace(cause, mechanism="rank-dead", ranks=tuple(faulty), confidence="suspected")
            return replace(cause, facts=(*facts, *cause.facts))
    return replace(cause, facts=(*cause.facts, *facts))


def _code_facts(codes: Iterable[LoggedCode]) -> tuple[Fact, ...]:
    """Faults first; of codes that tell only that something failed, at most a few."""
    ordered = sorted(codes, key=lambda one: _ORDER.index(one.found.meaning.role))
    return tuple(
        Fact(
            f"{'the node' if one.seat is None else seat_words(one.seat)}: {one.found.words()}",
            one.evidence,
        )
        for one in ordered[:_MOST_FACTS]
    )


def _status_facts(library: LibraryEvidence) -> tuple[Fact, ...]:
    open_ = [word for word in library.status if word.status.lower() not in _DONE]
    return tuple(
        Fact(
            f"rank {word.rank}: HCCL's status file has {word.operation} {word.sequence} of group {word.group} as "
            f"{word.status}",
            word.evidence,
        )
        for word in open_[:_MOST_FACTS]
    )
