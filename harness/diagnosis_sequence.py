"""The order in which one rank enqueued its collectives, over all of its groups, against whole steps before. Pure.

One thread of a rank enqueues all collectives, so the times in its ledger order them across groups. The agreement
that every step begins with cuts that order into steps, and the whole steps before the stall, of all ranks, are
patterns. The rank whose step goes on as no pattern does, where its peers wait for what should have come, is the one
that left it out or put it behind others; two ranks are enough to tell. No decision record is needed.

Sizes and types are left out: they vary with the batch (``diagnosis_plans.py``, ``diagnosis_steps.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import (
    AGREEMENT_GROUPS,
    collective,
    sides_of,
    still_waits,
    stream_of,
    wait_facts,
)
from harness.diagnosis_model import Cause, Fact, Mismatch
from harness.ledger_snapshot import CollectiveRecord
from harness.waits import GRAPH_PREFIX, Wait

Mark: TypeAlias = tuple[str, str]
"""Group and operation; all graphs are one."""
Pattern: TypeAlias = tuple[Mark, ...]

_TIMES_BEFORE = 2
"""Whole steps of a pattern that must have been seen before a departure from it names anybody."""


@dataclass(frozen=True, slots=True)
class Departure:
    """In its step after agreement ``agreement``, the ``position``-th collective (from 1) of the rank was ``did``,
    where ``times`` whole steps that began alike went on with ``expected``."""

    rank: int
    agreement: int
    position: int
    did: Mark | None
    expected: Mark
    times: int
    how: Literal["skipped", "order"]


def left_its_sequence(case: Case) -> Cause | None:
    """The ranks that others miss where they left the sequence of their steps, while at least one kept to it."""
    found = still_waits(case)
    departures = _departures(case) if found else {}
    missed = {
        rank: (one, wait)
        for rank, one in departures.items()
        if (wait := next((wait for wait in found if _misses(wait, one)), None)) is not None
    }
    if not missed or not case.others_known(()):
        return None
    ranks = tuple(sorted(missed))
    first, wait = missed[ranks[0]]
    skipped = all(one.how == "skipped" for one, _ in missed.values())
    facts = [_fact(case, one) for one, _ in missed.values()]
    for each in found:
        facts += wait_facts(case, each)
        if each.mismatched:
            facts += [Fact(side.words(), case.views[side.ranks[0]].ledger_path) for side in each.sides]
    for rank in ranks:
        facts += case.views[rank].doing()
    shown = Mismatch(wait.mismatch_kind(), sides_of(wait)) if wait.mismatched else None
    return Cause(
        kind="hang",
        mechanism="collective-skipped" if skipped else "collective-order",
        ranks=ranks,
        facts=tuple(facts),
        confidence="proven" if all(view.still for view in case.views.values()) else "supported",
        stream=stream_of(case, wait, ranks[0]),
        collective=collective(wait, shown if skipped else _order(first)),
        family=wait.operation,
        group=wait.group,
    )


def _misses(wait: Wait, one: Departure) -> bool:
    """Others wait for the rank in the group of what should have come, or it brought them something else there."""
    if wait.group != one.expected[0]:
        return False
    return one.rank in (*wait.missing, *wait.late) or (wait.mismatched and one.rank in wait.waiting)


def _fact(case: Case, one: Departure) -> Fact:
    did = _words(one.did) if one.did is not None else "the end of the step"
    how = "it left one out" if one.how == "skipped" else "it put one behind others"
    return Fact(
        f"rank {one.rank}: collective {one.position} of its step after agreement {one.agreement} is {did}, where "
        f"{one.times} whole steps that began alike went on with {_words(one.expected)}: {how}",
        case.views[one.rank].ledger_path,
    )


def _words(mark: Mark) -> str:
    group, operation = mark
    return f"{operation} {group}" if operation else f"a collective of group {group}"


def _order(one: Departure) -> Mismatch:
    sides = (
        [{"ranks": [one.rank], "group": one.did[0], "operation": one.did[1]}] if one.did is not None else []
    )
    return Mismatch(
        "order", (*sides, {"group": one.expected[0], "operation": one.expected[1], "usual": True})
    )


# Steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    agreement: int
    marks: Pattern
    stands: bool
    """Something of it, or of a step before, is not completed."""

    def by_groups(self) -> _Step:
        """With the groups alone: a step of a kind not seen before has the groups of the others."""
        return replace(self, marks=tuple((group, "") for group, _ in self.marks))


def _departures(case: Case) -> dict[int, Departure]:
    steps = {rank: _steps(view) for rank, view in case.views.items()}
    if not all(steps.values()):
        return {}
    by_groups = {rank: [one.by_groups() for one in own] for rank, own in steps.items()}
    return _held_against_whole_ones(steps) or _held_against_whole_ones(by_groups)


def _held_against_whole_ones(steps: Mapping[int, list[_Step]]) -> dict[int, Departure]:
    stands = min((one.agreement for own in steps.values() for one in own if one.stands), default=0)
    usual = Counter(one.marks for own in steps.values() for one in own if one.agreement < stands)
    now = Counter(one.marks for own in steps.values() for one in own if one.agreement >= stands)
    judged = {rank: _judge(rank, own, stands, usual, now) for rank, own in steps.items()}
    found = {rank: one for rank, one in judged.items() if one is not None}
    return found if len(found) < len(judged) else {}


def _judge(
    rank: int, own: list[_Step], stands: int, usual: Counter[Pattern], now: Counter[Pattern]
) -> Departure | None:
    """``stands``: the first agreement behind which a rank has something that is not completed."""
    for at, step in enumerate(own):
        if step.agreement < stands:
            continue
        last = step is own[-1]
        if any(one[: len(step.marks)] == step.marks if last else one == step.marks for one in usual):
            continue
        return _departure(rank, step, own[at + 1 :], usual, now)
    return None


def _departure(
    rank: int, step: _Step, later: list[_Step], usual: Counter[Pattern], now: Counter[Pattern]
) -> Departure | None:
    """From the pattern with which the step shares most; of several, one that a peer keeps to at this moment."""
    if not usual:
        return None
    marks = step.marks
    best = max(
        usual,
        key=lambda one: (
            _common(one, marks),
            max((_common(one, other) for other in now if other != marks), default=0),
            usual[one],
            one,
        ),
    )
    at = _common(best, marks)
    times = sum(count for one, count in usual.items() if one[: at + 1] == best[: at + 1])
    if at >= len(best) or times < _TIMES_BEFORE:
        return None  # it did more than it ever did: no question of something left out
    rest = marks[at:]
    how: Literal["skipped", "order"]
    most = max(one.count(best[at]) for one in usual)
    if any(one.marks.count(best[at]) > most for one in later):
        how = "order"  # it came with the next step
    elif any(best[at + by : at + by + len(rest)] == rest for by in range(1, len(best) - at + 1)):
        how = "skipped"
    elif not Counter(marks) - Counter(best):
        how = "order"
    else:
        return None
    return Departure(rank, step.agreement, at + 1, rest[0] if rest else None, best[at], times, how)


def _common(one: Pattern, other: Pattern) -> int:
    both = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(both) if a != b), min(len(one), len(other)))


def _steps(view: View) -> list[_Step]:
    """As far back as all of the rank's rings reach. A step begins behind its agreement."""
    groups = view.snapshot.groups if view.snapshot is not None else {}
    since_ns = max(
        (
            min(one.enqueued_ns for one in state.recent)
            for state in groups.values()
            if state.enqueued > _span(state.recent)
        ),
        default=0,
    )
    entered = sorted(
        (one.enqueued_ns, one.sequence, name, one)
        for name, state in groups.items()
        for one in state.recent
        if one.enqueued_ns >= since_ns
    )
    if any(one[0] == after[0] and one[2] != after[2] for one, after in pairwise(entered)):
        return []  # no order is told
    steps: list[_Step] = []
    marks: list[Mark] | None = None
    agreement, stands = 0, False
    for _, sequence, name, one in entered:
        if name in AGREEMENT_GROUPS:
            if marks is not None:
                steps.append(_Step(agreement, tuple(marks), stands))
            marks, agreement = [], sequence
        elif marks is not None:
            marks.append((name, "graph" if one.operation.startswith(GRAPH_PREFIX) else one.operation))
        stands = stands or one.completed_ns is None
    if marks is not None:
        steps.append(_Step(agreement, tuple(marks), stands))
    return steps


def _span(records: tuple[CollectiveRecord, ...]) -> int:
    """Collectives that the ring still shows."""
    return sum(one.shape[0] if one.operation.startswith(GRAPH_PREFIX) and one.shape else 1 for one in records)
