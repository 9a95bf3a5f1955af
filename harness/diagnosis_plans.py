"""What a rank ran in a step, against what all ranks had agreed to run. Pure.

A decision record has the outcome of the agreement: the token counts of all ranks, the padding, the graph's bucket.
What the rank then brought to its collectives is in the ledger: a replay or single operations, of so many rows.
Where the two do not fit the rank departed, whatever its peers did; so two ranks are enough to tell who. An engine
may also write down itself that it ran something else (``ran``).

Rows are held against token counts only in groups whose earlier collectives fitted them.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from harness.diagnosis_case import Case
from harness.diagnosis_model import Fact
from harness.diagnosis_records import lost_after
from harness.ledger_snapshot import CollectiveRecord
from harness.livelock import whole
from harness.waits import GRAPH_PREFIX, Wait, describe, record_at

_HOW = ("tokens", "padding", "bucket", "graph")
_FITTING_BEFORE = 3
"""Earlier collectives of a group whose rows must all have fitted the agreed counts."""
_NUMBER = re.compile(r"(\d+)$")


@dataclass(frozen=True, slots=True)
class Departed:
    """Rank ``rank`` departed in ``step``: ``fact`` says from what."""

    rank: int
    step: int
    fact: Fact


def departed(case: Case, wait: Wait) -> tuple[Departed, ...]:
    """The ranks inside the collective that brought something else than was agreed, while one at least brought
    that."""
    found = tuple(one for rank in wait.waiting if (one := _departed(case, rank, wait)) is not None)
    return found if len(found) < len(wait.waiting) else ()


def first_departed(case: Case) -> Departed | None:
    """The earliest step of which a rank's own record says that it ran something else."""
    found = [
        Departed(rank, step, _said(case, rank, step, record))
        for rank in case.views
        for step, record in case.decisions(rank).items()
        if _ran_otherwise(record)
    ]
    return min(found, key=lambda one: (one.step, one.rank), default=None)


def agreed_words(record: Mapping[str, Any]) -> str:
    """``the graph of bucket 4`` or ``an eager step padded sum_len``, with the token counts."""
    if record.get("graph"):
        how = f"the graph of bucket {record.get('bucket')}"
    else:
        how = f"an eager step padded {record.get('padding')}"
    return f"{how} for tokens {record.get('tokens')}"


def _departed(case: Case, rank: int, wait: Wait) -> Departed | None:
    snapshot = case.views[rank].snapshot
    state = snapshot.groups.get(wait.group) if snapshot is not None else None
    brought = record_at(state, wait.sequence) if state is not None else None
    at = _record_of(case, rank, wait.group, wait.sequence)
    if brought is None or at is None or lost_after(case, rank, at[0]):
        return None
    step, record = at
    if _ran_otherwise(record):
        return Departed(rank, step, _said(case, rank, step, record))
    if _fits(record, brought) is not False:
        return None
    if _by_rows(brought) and not _rows_fit_before(case, wait):
        return None
    what = describe(brought.operation, brought.shape, brought.dtype)
    fact = f"rank {rank}: at step {step} the ranks agreed on {agreed_words(record)}, and it brought {what}"
    return Departed(rank, step, Fact(fact, case.decisions_path(rank)))


def _ran_otherwise(record: Mapping[str, Any]) -> bool:
    ran = record.get("ran")
    return isinstance(ran, Mapping) and any(name in ran and ran[name] != record.get(name) for name in _HOW)


def _said(case: Case, rank: int, step: int, record: Mapping[str, Any]) -> Fact:
    return Fact(
        f"rank {rank}: at step {step} the ranks agreed on {agreed_words(record)}, and it ran "
        f"{agreed_words({**record, **record['ran']})}",
        case.decisions_path(rank),
    )


def _record_of(case: Case, rank: int, group: str, sequence: int) -> tuple[int, Mapping[str, Any]] | None:
    """The step to which a collective belongs: the last one whose record counts fewer."""
    table = case.decisions(rank)
    counted = case.once(f"counted {group} {id(table)}", lambda: _Counted.of(table, group))
    place = bisect_left(counted.least_from, sequence) - 1
    if place < 0:
        return None
    step = counted.steps[place]
    return step, table[step]


@dataclass(frozen=True, slots=True)
class _Counted:
    """The steps whose records count the collectives of a group, in order, and the least count from each one on:
    many collectives of many ranks are looked for."""

    steps: tuple[int, ...]
    least_from: tuple[int, ...]

    @classmethod
    def of(cls, table: Mapping[int, Mapping[str, Any]], group: str) -> _Counted:
        counts = {step: count for step in sorted(table) if (count := _count(table[step], group)) is not None}
        least = [*accumulate(reversed(counts.values()), min)]
        return cls(tuple(counts), tuple(reversed(least)))


def _count(record: Mapping[str, Any], group: str) -> int | None:
    counts = record.get("collectives")
    return whole(counts, group) if isinstance(counts, Mapping) else None


def _by_rows(brought: CollectiveRecord) -> bool:
    return not brought.operation.startswith(GRAPH_PREFIX)


def _fits(record: Mapping[str, Any], brought: CollectiveRecord) -> bool | None:
    """None: the record says too little."""
    graph, bucket = record.get("graph"), whole(record, "bucket")
    if not isinstance(graph, bool):
        return None
    if graph != brought.operation.startswith(GRAPH_PREFIX):
        return False
    if graph:
        number = _NUMBER.search(brought.operation)
        return None if number is None or bucket is None else int(number[1]) == bucket
    rows = _rows(record)
    return None if rows is None or not brought.shape else brought.shape[0] in rows


def _rows(record: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Rows that an eager step's collectives may have: of a rank, and of all together."""
    tokens, padding = record.get("tokens"), record.get("padding")
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(one, int) for one in tokens):
        return None
    if padding == "max_len":
        return (max(tokens), max(tokens) * len(tokens))
    return (sum(tokens),) if padding == "sum_len" else None


def _rows_fit_before(case: Case, wait: Wait) -> bool:
    """Found out once, although each rank that departed asks."""
    return case.once(
        f"rows fit {wait.group} {wait.sequence} {wait.members[:1]}", lambda: _all_fit(_before(case, wait))
    )


def _all_fit(before: Iterable[tuple[Mapping[str, Any], CollectiveRecord]]) -> bool:
    fitting = 0
    for record, brought in before:
        fit = _fits(record, brought)
        if fit is False:
            return False
        fitting += fit is True
    return fitting >= _FITTING_BEFORE


def _before(case: Case, wait: Wait) -> Iterator[tuple[Mapping[str, Any], CollectiveRecord]]:
    """Earlier single collectives of the group on any rank, each with the record of its step."""
    for rank in wait.waiting:
        snapshot = case.views[rank].snapshot
        state = snapshot.groups.get(wait.group) if snapshot is not None else None
        for brought in state.recent if state is not None else ():
            at = _record_of(case, rank, wait.group, brought.sequence)
            if brought.sequence < wait.sequence and at is not None and _by_rows(brought):
                yield at[1], brought
