"""The first step at which ranks that should agree did not, from their decision records. Pure.

A hang may come thousands of steps after its cause. What the ranks wrote down of each step shows the cause where it
happened, in one of four ways, asked in this order within a step:

1. a rank left out an agreement, or entered one more (``diagnosis_counts.py``);
2. the outcome of the agreement differs, or a rank made the step more than once;
3. the ranks of one attention group took different batches;
4. a rank left out a collective of its forward pass (``diagnosis_counts.py``).

The earliest step decides. Here: 2, 3 and the choice. What a rank ran otherwise than agreed is
``diagnosis_plans.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.diagnosis_case import Case
from harness.diagnosis_collectives import (
    AGREEMENT_GROUPS,
    collective,
    drift_fact,
    drifted,
    still_waits,
    wait_facts,
)
from harness.diagnosis_counts import Uneven, uneven, uneven_cause
from harness.diagnosis_model import Cause, Fact
from harness.diagnosis_plans import first_departed
from harness.diagnosis_records import (
    MUST_AGREE,
    Divergence,
    Records,
    differing_facts,
    first_divergence,
    first_peer_divergence,
    minority_of,
)


def first_departure(case: Case) -> Cause | None:
    """The cause at the earliest step at which a rank's records leave those of its peers; None when they do not, or
    when a rank is seen before that to have run something else than was agreed: ``mismatch`` tells that."""
    waiting = still_waits(case) or not case.snapshots()
    if not waiting and not any(view.exception for view in case.views.values()):
        return None  # nothing stands for want of another: whatever they did unlike each other, it is not why
    agreed = first_divergence(case, MUST_AGREE)
    peers = first_peer_divergence(case)
    counts = uneven(case)
    found: list[tuple[int, int, Uneven | Divergence]] = []
    if counts is not None:
        found.append((counts.step, 0 if counts.group in AGREEMENT_GROUPS else 4, counts))
    if agreed is not None:
        found.append((agreed.step, 1, agreed))
    if peers is not None:
        found.append((peers.step, 2, peers))
    if not found:
        return None
    step, place, first = min(found, key=lambda entry: entry[:2])
    departed = first_departed(case)
    if departed is not None and (departed.step, 3) < (step, place):
        return None
    if isinstance(first, Uneven):
        return uneven_cause(case, first)
    return _peers_cause(case, first) if first is peers else _agreed_cause(case, first)


def divergence(case: Case, fields: tuple[str, ...]) -> Cause | None:
    """The ranks' records of one step disagree in one of ``fields``, on which they had agreed."""
    found = first_divergence(case, fields)
    return None if found is None else _agreed_cause(case, found)


# All ranks -----------------------------------------------------------------------------------------------


def _agreed_cause(case: Case, found: Divergence) -> Cause:
    values = found.values
    alone = (
        tuple(rank for rank, passes in sorted(values.items()) if passes != 1)
        if found.name == "passes"
        else ()
    )
    facts = differing_facts(case, found)
    behind = drifted(case)
    facts += [drift_fact(case, rank) for rank in behind]
    waiting = still_waits(case)
    for wait in waiting:
        facts += wait_facts(case, wait)
    complete = values.keys() == case.views.keys() and case.others_known(())
    # Those that wait for the rank that went its own way tell more than what it waits for itself.
    telling = next(
        (wait for wait in waiting if set(wait.missing) & set(alone)), waiting[0] if waiting else None
    )
    return Cause(
        kind="hang",
        mechanism="collective-skipped" if behind else "decision-divergence",
        ranks=(behind or alone or minority_of(values)) if complete else (),
        facts=tuple(facts),
        confidence="supported" if complete else "suspected",
        stream="host",
        collective=collective(telling) if telling is not None else None,
        family="decision",
        group=telling.group if telling is not None else "",
    )


# One attention group -------------------------------------------------------------------------------------


def _peers_cause(case: Case, found: Divergence) -> Cause:
    """The rank that dropped a request by itself is the culprit (HANGS.md, C1), or the one that considered victims
    in an order in which no rank did before (C3)."""
    records = found.records
    odd = _dropped_alone(records) or _new_order(case, found)
    complete = case.others_known(()) and _all_told(case, found)
    facts = [
        Fact(
            f"rank {rank}: at step {found.step}, the first on which ranks of one attention group differ, "
            f"{found.name} is {found.values[rank]}{_dropped(records[rank])}",
            case.decisions_path(rank),
        )
        for rank in sorted(records)
    ]
    facts += [_order_fact(case, found, rank) for rank in odd if not _dropped_alone(records)]
    waiting = still_waits(case)
    for wait in waiting:
        facts += wait_facts(case, wait)
        if wait.mismatched:
            facts += [Fact(side.words(), case.views[side.ranks[0]].ledger_path) for side in wait.sides]
    return Cause(
        kind="hang",
        mechanism="decision-divergence",
        ranks=(odd or minority_of(found.values)) if complete else (),
        facts=tuple(facts),
        confidence="supported" if complete else "suspected",
        stream="host",
        collective=collective(waiting[0]) if waiting else None,
        family="decision",
        group=waiting[0].group if waiting else "",
    )


def _all_told(case: Case, found: Divergence) -> bool:
    """Every rank of the group has its record of that step, and no other rank lacks records altogether."""
    group = next(iter(found.records.values())).get("dp")
    members = {
        rank
        for rank in case.views
        if any(record.get("dp") == group for record in case.decisions(rank).values())
    }
    silent = [rank for rank in case.views if not case.decisions(rank)]
    return members == found.records.keys() and not silent


def _dropped_alone(records: Records) -> tuple[int, ...]:
    """The ranks that aborted a request, where the others of the group did not."""
    dropped = tuple(rank for rank, record in sorted(records.items()) if record.get("aborted"))
    return dropped if len(dropped) < len(records) else ()


def _dropped(record: Mapping[str, Any]) -> str:
    aborted = record.get("aborted") or ()
    return f"; it aborted {', '.join(map(str, aborted))}" if aborted else ""


def _new_order(case: Case, found: Divergence) -> tuple[int, ...]:
    """Ranks whose victims were not considered in the order of all retractions before: each record that has
    ``victims`` lists them with what they are ordered by."""
    if not all(isinstance(record.get("victims"), list | tuple) for record in found.records.values()):
        return ()
    before = [
        record["victims"]
        for rank in case.views
        for step, record in case.decisions(rank).items()
        if step < found.step and isinstance(record.get("victims"), list | tuple)
    ]
    if not before or not all(map(_in_order, before)):
        return ()
    odd = tuple(rank for rank, record in sorted(found.records.items()) if not _in_order(record["victims"]))
    return odd if len(odd) < len(found.records) else ()


def _in_order(victims: Any) -> bool:
    """Each entry is a request and what it is ordered by."""
    keys = [list(entry[1:]) for entry in victims if isinstance(entry, list | tuple) and len(entry) > 1]
    return keys == sorted(keys)


def _order_fact(case: Case, found: Divergence, rank: int) -> Fact:
    return Fact(
        f"rank {rank} considered its victims in the order {found.records[rank]['victims']}, where every retraction "
        "before went by what is beside each name, least first",
        case.decisions_path(rank),
    )
