"""Whose collectives of a step left the pattern of the steps before, read from ledgers and decision records. Pure.

A decision record may say how many collectives its rank had enqueued when its step began (``collectives``). With
that the ring of recent collectives falls into steps: earlier ones are patterns, and the rank whose step begins like
no pattern is the one that left something out, even where what it left out and what it did instead look alike. The
other rank, which kept to the pattern and may have crashed for it, is not to blame.

Sizes change with the batch, so a pattern knows only which of a step's collectives have the same size: SGLang's
DP gather sums the same buffer several times in a prefill, then another one (recorded in the tests).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from harness.diagnosis_case import Case, View
from harness.diagnosis_records import lost_after
from harness.ledger_snapshot import CollectiveRecord
from harness.livelock import whole
from harness.waits import describe

_Mark: TypeAlias = tuple[str, int, str]
"""Operation, the number of its size among the sizes of its step in the order in which they first appear, and its
type."""


@dataclass(frozen=True, slots=True)
class Left:
    """Rank ``rank`` left the pattern in ``step``: its ``position``-th collective of ``group`` (from 1) was ``did``,
    where whole steps that began alike went on with ``expected``. ``skipped``: what it did comes later in the
    pattern."""

    rank: int
    group: str
    step: int
    position: int
    sequence: int
    expected: str
    did: str
    skipped: bool


def left_the_pattern(case: Case, group: str, sequence: int | None = None) -> tuple[Left, ...]:
    """Ranks that did in the step to which that collective belongs (None: in the newest), while at least one kept to
    it. Empty where there is no pattern to hold them against."""
    steps = {
        rank: found
        for rank, view in case.views.items()
        if (found := _steps(view, group, sequence)) is not None and not lost_after(case, rank, found.step)
    }
    patterns = {pattern for known in steps.values() for pattern in known.whole if pattern}
    last = {rank: known for rank, known in steps.items() if known.last}
    if not patterns or not last:
        return ()
    newest = max(known.step for known in last.values())
    judged = {
        rank: _left(rank, group, known, patterns) for rank, known in last.items() if known.step == newest
    }
    deviating = tuple(left for left in judged.values() if left is not None)
    return deviating if len(deviating) < len(judged) else ()


@dataclass(frozen=True, slots=True)
class _Steps:
    whole: frozenset[tuple[_Mark, ...]]
    """Each whole step in the ring before the one that is judged."""
    last: tuple[CollectiveRecord, ...]
    """That one; empty where the ring has lost its beginning."""
    step: int


def _steps(view: View, group: str, sequence: int | None) -> _Steps | None:
    state = view.snapshot.groups.get(group) if view.snapshot is not None else None
    if view.snapshot is None or state is None:
        return None
    begun: list[tuple[int, int]] = []
    for record in view.snapshot.decisions:
        counts = record.get("collectives")
        count = whole(counts, group) if isinstance(counts, dict) else None
        step = whole(record, "step")
        if count is not None and step is not None:
            begun.append((step, count))
    if not begun:
        return None
    until = state.enqueued
    if sequence is not None:
        # A host ahead of its device has begun further steps since.
        until = next((count for _, count in begun if count >= sequence), until)
        begun = [(step, count) for step, count in begun if count < sequence]
        if not begun:
            return None
    records = {record.sequence: record for record in state.recent}
    complete = {_marks(_between(records, count, following)) for (_, count), (_, following) in pairwise(begun)}
    step, count = begun[-1]
    return _Steps(frozenset(complete), _between(records, count, until), step)


def _between(records: dict[int, CollectiveRecord], after: int, until: int) -> tuple[CollectiveRecord, ...]:
    """The collectives ``after + 1`` to ``until``; empty where the ring has lost one of them."""
    wanted = range(after + 1, until + 1)
    return tuple(records[s] for s in wanted) if all(s in records for s in wanted) else ()


def _marks(records: tuple[CollectiveRecord, ...]) -> tuple[_Mark, ...]:
    sizes: dict[tuple[int, ...], int] = {}
    return tuple(
        (record.operation, sizes.setdefault(record.shape, len(sizes)), record.dtype) for record in records
    )


def _left(rank: int, group: str, known: _Steps, patterns: set[tuple[_Mark, ...]]) -> Left | None:
    """None when some pattern begins like this step."""
    marks = _marks(known.last)
    best: tuple[_Mark, ...] = ()
    alike = -1
    for pattern in sorted(patterns):
        # Idle rounds add nothing but the last one again: the agreement whether there is work.
        tail = marks[len(pattern) :]
        if pattern[: len(marks)] == marks[: len(pattern)] and not set(tail) - {pattern[-1]}:
            return None
        same = next((i for i, (a, b) in enumerate(zip(pattern, marks, strict=False)) if a != b), len(pattern))
        if same > alike:
            best, alike = pattern, same
    did = known.last[alike]
    return Left(
        rank=rank,
        group=group,
        step=known.step,
        position=alike + 1,
        sequence=did.sequence,
        expected=_expected(best, alike, known.last),
        did=describe(did.operation, did.shape, did.dtype),
        skipped=marks[alike] in best[alike + 1 :],
    )


def _expected(pattern: tuple[_Mark, ...], position: int, records: tuple[CollectiveRecord, ...]) -> str:
    if position >= len(pattern):
        return "the end of the step"
    operation, size, dtype = pattern[position]
    seen = {mark[1]: record for mark, record in zip(_marks(records[:position]), records, strict=False)}
    return describe(operation, seen[size].shape, dtype) if size in seen else f"{operation} {dtype}".strip()
