"""Collectives that a rank left out, by how many it had entered when each step began. Pure.

A decision record may say how many collectives its rank had enqueued so far in each group (``collectives``). All
members of a group must have the same count at the same step. At the first step at which they do not, one of them
left something out, or did something more, since the step before: which one, the steps before that tell, in which
all did alike. Both records may lie thousands of steps before the stall, long out of every ring.

Where the records are equal to the end, the ledger goes on: of a rank whose host has begun a further step it says
how many collectives the last recorded one had. Not here: sizes and operations (``diagnosis_steps.py``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from harness.diagnosis_case import Case
from harness.diagnosis_collectives import AGREEMENT_GROUPS, collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact, StreamName
from harness.diagnosis_records import owed_until
from harness.ledger_snapshot import GroupState
from harness.livelock import whole
from harness.waits import Wait, by_host, lists_of_members

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
        odd = set(self.odd)
        others = [count for rank, count in self.did.items() if rank not in odd] or list(self.usual)
        least = min(others, default=0)
        return bool(odd) and all(self.did[rank] < least for rank in odd)


def uneven(case: Case) -> Uneven | None:
    """The earliest difference in any group; None when there is none."""
    told = _told(case)
    names = sorted(set().union(*(counts for table in told.values() for counts in table.values())))
    found = [
        one
        for name in names
        for members in _members(case, name)
        if (one := _uneven_in(case, name, {rank: told[rank] for rank in members})) is not None
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
    snapshots = [snapshot for rank in found.did if (snapshot := case.views[rank].snapshot) is not None]
    states = [state for snapshot in snapshots if (state := snapshot.groups.get(found.group)) is not None]
    return "host" if any(_of_the_host(found.group, state) for state in states) else "comm"


# Counts --------------------------------------------------------------------------------------------------


_Table: TypeAlias = Mapping[int, Mapping[str, Any]]
"""Of one rank, by step: its collectives so far, by group."""
_Column: TypeAlias = Mapping[int, int]
"""Of those, one group's."""


def _told(case: Case) -> dict[int, _Table]:
    """By rank. Ranks that tell the same share one table: thousands do."""
    tables: dict[int, _Table] = {}
    known: dict[int, _Table] = {}
    one: _Table = {}
    for rank in case.views:
        records = case.decisions(rank)
        if id(records) not in known:
            said = ((step, record.get("collectives")) for step, record in records.items())
            table = {step: counts for step, counts in said if isinstance(counts, dict)}
            one = one or table
            known[id(records)] = one if table == one else table
        tables[rank] = known[id(records)]
    return tables


def _columns(name: str, tables: Mapping[int, _Table]) -> dict[int, _Column]:
    """By rank. Ranks that tell the same of this group share one column."""
    columns: dict[int, _Column] = {}
    known: dict[int, _Column] = {}
    one: _Column = {}
    for rank, table in tables.items():
        if id(table) not in known:
            column = {step: n for step, counts in table.items() if (n := whole(counts, name)) is not None}
            one = one or column
            known[id(table)] = one if column == one else column
        columns[rank] = known[id(table)]
    return columns


def _members(case: Case, name: str) -> Iterable[tuple[int, ...]]:
    """The ranks of each group of that name; of one whose ledger says nothing of it there is no telling."""
    states = (snapshot.groups.get(name) for snapshot in case.snapshots().values())
    listed = lists_of_members(state for state in states if state is not None)
    return [members for members in sorted(listed) if len(members) > 1 and set(members) <= case.views.keys()]


def _uneven_in(case: Case, name: str, tables: Mapping[int, _Table]) -> Uneven | None:
    counted = _columns(name, tables)
    different = tuple({id(column): column for column in counted.values()}.values())
    common = sorted(set(different[0]).intersection(*different[1:]))
    first = None
    if len(different) > 1:
        first = next((step for step in common if len({column[step] for column in different}) > 1), None)
    before = common if first is None else common[: common.index(first)]
    if len(before) < _ALIKE_BEFORE:
        return None
    since = before[-1]
    whatever = name in AGREEMENT_GROUPS
    records = {rank: case.decisions(rank) for rank in tables}
    history = _History(next(iter(counted.values())), next(iter(records.values())), tuple(before), whatever)
    if first is not None and _made_up(case, name, tables):
        return None
    if first is not None:
        did = {rank: found[first] - found[since] for rank, found in counted.items()}
        usual = history.usual(records[min(records)][since], first - since)
        return Uneven(name, since, first, did, usual, _odd(did, usual))
    if not whatever and _a_host_is_in(case, name, tables):
        return None  # it comes in a beat of its own (``diagnosis_control.py``), which steps of one kind do not tell
    told = sorted({step for column in different for step in column if step >= since})
    later = {id(column): [step for step in told if step in column] for column in different}
    spans = {
        rank: _after(case, name, rank, column, records[rank], later[id(column)], told)
        for rank, column in counted.items()
    }
    odd = {
        rank: span
        for rank, own in spans.items()
        if (span := next((one for one in own if history.unlike(one)), None)) is not None
    }
    if not odd or len(odd) == len(records):
        return None
    shown = min(odd.values(), key=lambda span: span.since)
    did = {rank: span.count for rank, span in odd.items()}
    did |= {
        rank: span.count
        for rank, own in spans.items()
        for span in own
        if rank not in odd and span.since == shown.since
    }
    until = shown.since + shown.steps if name in AGREEMENT_GROUPS else None
    return Uneven(name, shown.since, until, did, history.usual(shown.record, shown.steps), tuple(sorted(odd)))


@dataclass(frozen=True, slots=True)
class _Span:
    """``count`` collectives in ``steps`` steps from ``since`` on, whose record this is."""

    since: int
    steps: int
    count: int
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _History:
    """What all ranks did alike: their counts, and the records of one of them, at ``steps``, the last included."""

    counts: Mapping[int, int]
    records: Mapping[int, Mapping[str, Any]]
    steps: tuple[int, ...]
    whatever: bool
    """The group is entered in every step, whatever its kind."""
    _known: dict[tuple[Any, ...], tuple[int, ...]] = field(default_factory=dict)

    def usual(self, record: Mapping[str, Any], steps: int) -> tuple[int, ...]:
        """Numbers of collectives that steps of the kind of this record's had; none for a kind not seen before.
        Where every step had equally many, also those without a record, as many for each of ``steps``."""
        of = (*map(repr, _kind(record)), steps)
        if of not in self._known:
            self._known[of] = self._usual(record, steps)
        return self._known[of]

    def _usual(self, record: Mapping[str, Any], steps: int) -> tuple[int, ...]:
        done = [(a, b - a, self.counts[b] - self.counts[a]) for a, b in pairwise(self.steps)]
        each = {change // gap if change % gap == 0 else -1 for _, gap, change in done}
        kind = _kind(record)
        seen = self.whatever or any(_kind(self.records[step]) == kind for step, _, _ in done)
        of_its_kind = {change for step, _, change in done if _kind(self.records[step]) == kind}
        if seen and len(each) == 1 and -1 not in each and len(done) > 1:
            scaled = each.pop() * steps
            sure = self.whatever or steps == 1 or any(gap > 1 for _, gap, _ in done)
            return (scaled,) if sure else tuple(sorted({scaled, *of_its_kind}))
        return tuple(sorted(of_its_kind))

    def unlike(self, span: _Span) -> bool:
        usual = self.usual(span.record, span.steps)
        return bool(usual) and span.count not in usual


def _kind(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Steps of one kind have the same collectives, but for their sizes."""
    tokens = record.get("tokens")
    empty = isinstance(tokens, list | tuple) and not any(tokens)
    return (empty, record.get("graph"), record.get("bucket"), record.get("padding"))


def _odd(did: Mapping[int, int], usual: tuple[int, ...]) -> tuple[int, ...]:
    odd = tuple(rank for rank, count in sorted(did.items()) if count not in usual)
    if usual and 0 < len(odd) < len(did):
        return odd
    often = Counter(did.values())
    most = max(often, key=lambda value: (often[value], value))
    if often[most] * 2 > len(did):
        return tuple(rank for rank, count in sorted(did.items()) if count != most)
    return ()


def _after(
    case: Case,
    name: str,
    rank: int,
    counts: Mapping[int, int],
    records: Mapping[int, Mapping[str, Any]],
    steps: Sequence[int],
    told: Sequence[int],
) -> list[_Span]:
    """What the rank's own records, and then its ledger, say of the steps that not all ranks have a record of: of
    ``steps``, the first one of which all have. The control plane is entered before the record of its step, so of it
    the ledger says nothing more.

    ``told`` are the steps of which any rank has a record. One of them in between means that the rank's own was
    lost: then nobody knows in which step it did what."""
    spans = [
        _Span(a, b - a, counts[b] - counts[a], records[a]) for a, b in pairwise(steps) if _next(told, a, b)
    ]
    view, last = case.views[rank], steps[-1]
    state = view.snapshot.groups.get(name) if view.snapshot is not None else None
    if view.snapshot is None or state is None or not view.still or _of_the_host(name, state):
        return spans
    if view.snapshot.host.step > last and _next(told, last, owed_until(view) + 1):
        spans.append(_Span(last, 1, state.enqueued - counts[last], records[last]))
    return spans


def _next(told: Sequence[int], step: int, other: int) -> bool:
    """No rank has a record of a step between the two."""
    at = bisect_right(told, step)
    return at == len(told) or told[at] >= other


def _made_up(case: Case, name: str, ranks: Iterable[int]) -> bool:
    """By now all have entered equally many, in the same step: what was late came after another, and was not left
    out."""
    snapshots = [case.views[rank].snapshot for rank in ranks]
    known = [snapshot for snapshot in snapshots if snapshot is not None and name in snapshot.groups]
    if len(known) < len(snapshots) or len({snapshot.host.step for snapshot in known}) > 1:
        return False
    return len({snapshot.groups[name].enqueued for snapshot in known}) == 1


def _a_host_is_in(case: Case, name: str, ranks: Iterable[int]) -> bool:
    snapshots = (case.views[rank].snapshot for rank in ranks)
    states = (snapshot.groups.get(name) for snapshot in snapshots if snapshot is not None)
    return any(_of_the_host(name, state) for state in states if state is not None)


def _of_the_host(name: str, state: GroupState) -> bool:
    return name in AGREEMENT_GROUPS or (bool(state.recent) and all(map(by_host, state.recent)))
