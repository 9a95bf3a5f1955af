"""Collectives that a rank left out, by how many it had entered when each step began. Pure.

A decision record may say how many collectives its rank had enqueued so far in each group (``collectives``). All
members of a group must have the same count at the same step. At the first step at which they do not, one of them
left something out, or did something more, since the step before: which one, the steps before that tell, in which
all did alike. Both records may lie thousands of steps before the stall, long out of every ring.

Where the records are equal to the end, the ledger goes on: of a rank whose host has begun a further step it says
how many collectives the last recorded one had. Not here: sizes and operations (``diagnosis_steps.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from harness.diagnosis_case import Case
from harness.diagnosis_collectives import AGREEMENT_GROUPS, collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact, StreamName
from harness.livelock import whole
from harness.waits import Wait, by_host

_ALIKE_BEFORE = 2
"""Recorded steps with equal counts that there must be before a difference: ranks whose steps are numbered each by
itself differ from the start."""


@dataclass(frozen=True, slots=True)
class Uneven:
    """Since the record of ``since``, and until that of ``until`` (None: until the stall), the members of ``group``
    entered ``did`` collectives there, by rank. ``odd``: those whose number is unlike that of earlier steps
    (``usual``), or unlike most; empty where nobody can tell."""

    group: str
    since: int
    until: int | None
    did: Mapping[int, int]
    usual: tuple[int, ...]
    odd: tuple[int, ...]

    @property
    def step(self) -> int:
        """An agreement is entered before the record of its step, all others after it."""
        return self.until if self.group in AGREEMENT_GROUPS and self.until is not None else self.since

    @property
    def fewer(self) -> bool:
        """What is odd about them is that they did less."""
        others = [count for rank, count in self.did.items() if rank not in self.odd] or list(self.usual)
        return bool(self.odd) and all(self.did[rank] < min(others, default=0) for rank in self.odd)


def uneven(case: Case) -> Uneven | None:
    """The earliest difference in any group; None when there is none."""
    records = {rank: case.decisions(rank) for rank in case.views}
    names = sorted(
        {name for found in records.values() for record in found.values() for name in _counts(record)}
    )
    found = [
        one
        for name in names
        for members in _members(case, name)
        if (one := _uneven_in(case, name, {rank: records[rank] for rank in members})) is not None
    ]
    return min(found, key=lambda one: (one.step, one.group not in AGREEMENT_GROUPS, one.group), default=None)


def uneven_cause(case: Case, found: Uneven) -> Cause:
    """Whoever did less than in other steps left a collective out."""
    waiting = still_waits(case)
    telling = next((wait for wait in waiting if _is_of(wait, found)), None)
    facts = [
        _fact(case, found, rank) for rank in sorted(found.did, key=lambda rank: (rank not in found.odd, rank))
    ]
    for wait in waiting:
        facts += wait_facts(case, wait)
        if wait.mismatched:
            facts += [Fact(side.words(), case.views[side.ranks[0]].ledger_path) for side in wait.sides]
    complete = case.others_known(()) and bool(found.odd)
    shown = telling or (waiting[0] if waiting else None)
    return Cause(
        kind="hang",
        mechanism="collective-skipped" if found.fewer else "collective-mismatch",
        ranks=found.odd if complete else (),
        facts=tuple(facts),
        confidence=("proven" if found.usual else "supported") if complete else "suspected",
        stream=_stream(case, found),
        collective=collective(shown) if shown is not None else None,
        family=f"{found.group} {'fewer' if found.fewer else 'more'}",
        group=found.group,
    )


def _is_of(wait: Wait, found: Uneven) -> bool:
    return wait.group == found.group and bool(set(wait.members) & set(found.did))


def _fact(case: Case, found: Uneven, rank: int) -> Fact:
    did = found.did[rank]
    until = f"that of step {found.until}" if found.until is not None else "the stall"
    if rank in found.odd:
        usual = (
            f", where such a step had {' or '.join(map(str, found.usual))} on every rank"
            if found.usual
            else ", unlike its peers"
        )
        what = f"{'left one out' if found.fewer else 'did more'}: " if found.usual else ""
    else:
        usual, what = "", ""
    some = "no collective" if did == 0 else f"{did} collective{'s' if did > 1 else ''}"
    between = f"between its record of step {found.since} and {until}"
    return Fact(
        f"rank {rank} {what}{some} of group {found.group} {between}{usual}",
        case.decisions_path(rank),
    )


def _stream(case: Case, found: Uneven) -> StreamName:
    """The control plane is the host's; the rest is carried by the comm stream, or within a graph."""
    if found.group in AGREEMENT_GROUPS:
        return "host"
    for rank in found.did:
        snapshot = case.views[rank].snapshot
        state = snapshot.groups.get(found.group) if snapshot is not None else None
        if state is not None and state.recent and all(map(by_host, state.recent)):
            return "host"
    return "comm"


# Counts --------------------------------------------------------------------------------------------------


def _counts(record: Mapping[str, Any]) -> Mapping[str, Any]:
    counts = record.get("collectives")
    return counts if isinstance(counts, Mapping) else {}


def _members(case: Case, name: str) -> Iterable[tuple[int, ...]]:
    """The ranks of each group of that name; of one whose ledger says nothing of it there is no telling."""
    listed = {
        snapshot.groups[name].ranks for snapshot in case.snapshots().values() if name in snapshot.groups
    }
    return [members for members in sorted(listed) if len(members) > 1 and set(members) <= case.views.keys()]


def _uneven_in(
    case: Case, name: str, records: Mapping[int, Mapping[int, Mapping[str, Any]]]
) -> Uneven | None:
    counted = {
        rank: {step: n for step, record in found.items() if (n := whole(_counts(record), name)) is not None}
        for rank, found in records.items()
    }
    common = sorted(set.intersection(*(set(found) for found in counted.values())))
    alike = [step for step in common if len({found[step] for found in counted.values()}) == 1]
    if len(alike) < _ALIKE_BEFORE:
        return None
    first = next((step for step in common if step > alike[0] and step not in alike), None)
    before = [step for step in common if first is None or step < first]
    if len(before) < _ALIKE_BEFORE or any(step not in alike for step in before):
        return None
    some = next(iter(counted.values()))
    one = next(iter(records.values()))
    since = before[-1]
    usual = _usual(some, one, before, since, until=first)
    if first is not None:
        did = {rank: found[first] - found[since] for rank, found in counted.items()}
        return Uneven(name, since, first, did, usual, _odd(did, usual))
    # A collective of the host is entered before the record of its step, so the rest of the ledger is not a step.
    did = {} if name in AGREEMENT_GROUPS else _since_the_last(case, name, counted, since)
    odd = tuple(rank for rank, count in sorted(did.items()) if usual and count not in usual)
    if not odd or len(odd) == len(records):
        return None
    return Uneven(name, since, None, did, usual, odd)


def _usual(
    counts: Mapping[int, int],
    records: Mapping[int, Mapping[str, Any]],
    steps: list[int],
    since: int,
    *,
    until: int | None,
) -> tuple[int, ...]:
    """Numbers of collectives that steps of the kind of ``since`` had while all ranks did alike; where every step
    had equally many whatever its kind, so many for each step between."""
    done = [(a, b - a, counts[b] - counts[a]) for a, b in pairwise(steps)]
    each = {change // gap if change % gap == 0 else -1 for _, gap, change in done}
    if len(each) == 1 and -1 not in each and len(done) > 1:
        return (each.pop() * ((until - since) if until is not None else 1),)
    kind = _kind(records[since])
    return tuple(sorted({change for step, _, change in done if _kind(records[step]) == kind}))


def _kind(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Steps of one kind have the same collectives, but for their sizes."""
    tokens = record.get("tokens")
    empty = isinstance(tokens, list | tuple) and not any(tokens)
    return (empty, record.get("graph"), record.get("bucket"), record.get("padding"))


def _odd(did: Mapping[int, int], usual: tuple[int, ...]) -> tuple[int, ...]:
    odd = tuple(rank for rank, count in sorted(did.items()) if count not in usual)
    if usual and 0 < len(odd) < len(did):
        return odd
    values = sorted(did.values())
    most = max(values, key=lambda value: (values.count(value), value))
    if values.count(most) * 2 > len(values):
        return tuple(rank for rank, count in sorted(did.items()) if count != most)
    return ()


def _since_the_last(
    case: Case, name: str, counted: Mapping[int, Mapping[int, int]], since: int
) -> dict[int, int]:
    """Of the ranks that are through with the step ``since`` and wrote no record after it: collectives after it."""
    did = {}
    for rank, found in counted.items():
        snapshot = case.views[rank].snapshot
        state = snapshot.groups.get(name) if snapshot is not None else None
        over = snapshot is not None and snapshot.host.step > since == max(found)
        if over and state is not None and case.views[rank].still:
            did[rank] = state.enqueued - found[since]
    return did
