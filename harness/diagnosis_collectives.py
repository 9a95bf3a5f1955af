"""Collectives and agreements: who waits, who is missing, and what that rank does instead. Pure.

A wait points from the rank inside a collective to every member that has not entered it. Followed from rank to
rank it ends either at a rank that waits for nobody (the root: the cause lies in what *it* does) or in a
circle (two groups entered in two orders, or a collective that was skipped on the way to the next one).

Blame needs the whole picture: where a member's ledger is missing, the wait is reported and nobody is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.diagnosis_case import Case, View
from harness.diagnosis_model import Cause, Collective, Confidence, Fact, Mismatch, Missing, StreamName
from harness.diagnosis_plans import departed
from harness.diagnosis_records import FOLLOWS_AGREEMENT, divergence_facts
from harness.diagnosis_steps import Left, left_the_pattern
from harness.ledger_snapshot import Snapshot
from harness.waits import GRAPH_PREFIX, Link, Side, Wait, by_host, cycle_in, describe, record_at

AGREEMENT_GROUPS = ("agree",)
"""Groups that every rank enters once in every step: their counts can be held against the steps."""
BEFORE_THE_AGREEMENT = ("schedule", "receive", "cache-sync")
"""Phases of a step that has begun and is not agreed on."""
REGISTRATION = ("regist", "rendezvous", "symm")
_WHO_LEFT_THE_ORDER = Missing(
    "which rank left the order of the others",
    "no earlier step, record or count of the ranks in the circle tells one from the others",
)
_BROUGHT_BEFORE = 3
"""Collectives that each rank must have brought before what is new to the group names anybody."""
_WHICH_SIDE = Missing(
    "which side brought what was due",
    "as many ranks brought one thing as the other, and no step of that kind, plan or earlier collective tells",
)


def raised(case: Case) -> Cause | None:
    """A rank's host raised, and others wait in a collective that it never entered, or had merely enqueued."""
    # An agreement comes after the collectives of the step before: who misses both left the step before that.
    for wait in sorted(still_waits(case), key=lambda wait: wait.group in AGREEMENT_GROUPS):
        outside = [case.views[rank] for rank in (*wait.missing, *wait.late)]
        absent = [view for view in outside if view.exception is not None and not view.device_fault]
        first_hand = [view for view in absent if not view.symptom]
        if not absent:
            continue
        chosen = first_hand or absent
        ranks = tuple(view.rank for view in chosen)
        decided = case.others_known(ranks)
        # Without the records of all, ranks may have gone apart before, and this one choked on what that led to.
        told = all(case.decisions(rank) for rank in case.views)
        facts = [view.raised_fact() for view in chosen]
        facts += wait_facts(case, wait)
        facts += [fact for view in chosen for fact in view.last_words()]
        return Cause(
            kind="hang",
            mechanism="collective-skipped",
            ranks=ranks if decided else (),
            facts=tuple(facts),
            confidence=("proven" if told else "supported") if first_hand and decided else "suspected",
            stream="host",
            collective=collective(wait),
            family=wait.operation,
            group=wait.group,
        )
    return None


def mismatch(case: Case) -> Cause | None:
    """Ranks entered the same collective with different things; NCCL and HCCL wait for ever then."""
    for wait in still_waits(case):
        if not wait.mismatched:
            continue
        complete = not wait.unknown and case.only_left(())
        other_plan = departed(case, wait) if complete else ()
        left = left_the_pattern(case, wait.group, wait.sequence) if complete and not other_plan else ()
        odd = tuple(one.rank for one in left) or (_deviators(case, wait) if complete else ())
        odd = tuple(one.rank for one in other_plan) or odd
        new = _never_brought(case, wait) if complete and not odd else ()
        ranks = (odd or new or _minority(wait.sides)) if complete else ()
        undecided = len(ranks) == len(wait.waiting)
        skipped = all(one.skipped for one in left) and bool(odd)
        if not left:
            skipped = bool(odd) and all(_jumped_ahead(case.views[rank], wait) for rank in odd)
        skipped = skipped and not other_plan
        facts = [one.fact for one in other_plan] + [_left_fact(case, one) for one in left]
        facts += wait_facts(case, wait)
        facts += [Fact(side.words(), case.views[side.ranks[0]].ledger_path) for side in wait.sides]
        if skipped and not left:
            facts += [
                Fact(
                    f"rank {rank} brought what in earlier rounds came after {wait.operation}",
                    _path(case, rank),
                )
                for rank in odd
            ]
        facts += [_new_fact(case, wait, rank) for rank in new]
        facts += divergence_facts(case, FOLLOWS_AGREEMENT)
        certain: Confidence = "supported" if skipped or new else "proven"
        return Cause(
            kind="hang",
            mechanism="collective-skipped" if skipped else "collective-mismatch",
            ranks=ranks,
            facts=tuple(facts),
            confidence=certain if ranks and not undecided else "suspected",
            stream=stream_of(case, wait, ranks[0] if ranks else wait.waiting[0]),
            collective=collective(wait, Mismatch(wait.mismatch_kind(), sides_of(wait))),
            family=wait.mismatch_kind(),
            group=wait.group,
            missing=(_WHICH_SIDE,) if undecided else (),
        )
    return None


def sides_of(wait: Wait) -> tuple[Mapping[str, Any], ...]:
    """What the parties brought, as the diagnosis has it."""
    return tuple(
        {"ranks": list(s.ranks), "operation": s.operation, "shape": list(s.shape), "dtype": s.dtype}
        for s in wait.sides
    )


def stream_of(case: Case, wait: Wait, rank: int) -> StreamName:
    """What carries the collective on that rank: the host, the comm stream, or a replay on compute."""
    snapshot = case.views[rank].snapshot
    state = snapshot.groups.get(wait.group) if snapshot is not None else None
    record = record_at(state, wait.sequence) if state is not None else None
    if record is None:
        return "comm"
    if record.operation.startswith(GRAPH_PREFIX):
        return "compute"
    return "host" if wait.group in AGREEMENT_GROUPS or by_host(record) else "comm"


def _left_fact(case: Case, left: Left) -> Fact:
    how = "it left one out" if left.skipped else "no earlier step did that"
    return Fact(
        f"rank {left.rank}: collective {left.position} of group {left.group} in its step {left.step} (number "
        f"{left.sequence}) is {left.did}, where whole steps that began alike went on with {left.expected}: {how}",
        _path(case, left.rank),
    )


def order(case: Case) -> Cause | None:
    """Two groups entered in two orders: the ranks wait for each other in a circle."""
    links = cycle_in(still_waits(case))
    if not links:
        return None
    circle = [link.rank for link in links]
    facts: list[Fact] = []
    for link in links:
        wait, following = link.wait, link.following
        facts.append(
            Fact(
                f"rank {link.rank} waits in {wait.operation} {wait.sequence} of group {wait.group} for rank "
                f"{following}, which "
                f"{'queued it behind another' if following in wait.late else 'has not come to it'}",
                _path(case, link.rank),
            )
        )
    behind = [rank for rank in drifted(case) if any(_lacks_in_agreement(link, rank) for link in links)]
    skipping = tuple(behind) or tuple(
        sorted({link.following for link in links if _skipped_on_the_way(case, link.following, link.wait)})
    )
    facts += [drift_fact(case, rank) for rank in behind]
    complete = case.only_left(circle) and all(case.views[rank].still for rank in circle)
    crossed = all(link.following in link.wait.late and _enqueued_alike(case, link.wait) for link in links)
    ranks = skipping or tuple(sorted(circle))
    wait = next((link.wait for link in links if link.following in skipping), links[0].wait)
    for rank in sorted(circle):
        facts += case.views[rank].doing()
    return Cause(
        kind="hang",
        mechanism="collective-skipped" if skipping else "collective-order",
        ranks=ranks if complete else (),
        facts=tuple(facts),
        confidence=("proven" if crossed else "supported") if complete else "suspected",
        stream=stream_of(case, wait, wait.waiting[0]),
        collective=collective(wait, None if skipping else _order_sides(links)),
        family=wait.operation,
        group=wait.group,
        missing=() if skipping else (_WHO_LEFT_THE_ORDER,),
    )


def _lacks_in_agreement(link: Link, rank: int) -> bool:
    return link.wait.group in AGREEMENT_GROUPS and link.following == rank and rank in link.wait.missing


def _enqueued_alike(case: Case, wait: Wait) -> bool:
    """All members have enqueued equally many of the group's collectives: none was left out so far."""
    states = [
        s.groups.get(wait.group) for rank in wait.members if (s := case.views[rank].snapshot) is not None
    ]
    return len({0 if state is None else state.enqueued for state in states}) == 1


def still_waits(case: Case) -> tuple[Wait, ...]:
    """Waits whose waiting ranks do not move, those with missing members first."""
    found = [
        wait
        for wait in case.waits()
        if not any(case.views[rank].moved or case.views[rank].condition == "dead" for rank in wait.waiting)
    ]
    return tuple(sorted(found, key=lambda wait: (not wait.missing, not wait.late, wait.group)))


def waits_of_the_living(case: Case) -> tuple[Wait, ...]:
    """Waits as those live through them that are neither gone nor stopped, whoever else is inside."""
    found = []
    for wait in case.waits():
        living = tuple(rank for rank in wait.waiting if case.views[rank].condition == "alive")
        if living and not any(case.views[rank].moved for rank in living):
            found.append(replace(wait, waiting=living))
    return tuple(found)


def collective(wait: Wait, with_mismatch: Mismatch | None = None) -> Collective:
    return Collective(
        wait.group, wait.sequence, wait.operation, wait.waiting, wait.missing, mismatch=with_mismatch
    )


def wait_facts(case: Case, wait: Wait) -> list[Fact]:
    """Who is inside, who never came, and whose ledger would tell more."""
    what = f"{wait.operation} {wait.sequence} of group {wait.group}"
    if wait.operation.startswith(GRAPH_PREFIX):
        what = f"collective {wait.sequence} of group {wait.group} (part of {wait.operation})"
    facts = [Fact(f"rank {rank} is in {what} and waits", _path(case, rank)) for rank in wait.waiting]
    for rank in wait.missing:
        snapshot = case.views[rank].snapshot
        state = snapshot.groups.get(wait.group) if snapshot is not None else None
        last = f"its last one there is {state.enqueued}" if state is not None else "it never used that group"
        facts.append(Fact(f"rank {rank} never entered {what}: {last}", _path(case, rank)))
    for rank in wait.late:
        facts.append(Fact(f"rank {rank} has enqueued {what} and not come to it", _path(case, rank)))
    for rank in wait.unknown:
        facts.append(Fact(f"rank {rank} is a member of it, but has no readable ledger", _path(case, rank)))
    return facts


def is_registration(case: Case, wait: Wait) -> bool:
    """The collective maps memory of all members: by its name, or by the phase of the ranks inside."""
    snapshots = [case.views[rank].snapshot for rank in wait.waiting]
    names = [wait.group, wait.operation, *(s.host.phase for s in snapshots if s is not None)]
    return any(part in name.lower() for name in names for part in REGISTRATION)


# Steps ---------------------------------------------------------------------------------------------------


def _steps_ahead(snapshot: Snapshot) -> int | None:
    """Steps begun beyond the agreements entered; equal on all ranks, give or take the one under way."""
    for name in AGREEMENT_GROUPS:
        if name in snapshot.groups:
            return snapshot.host.step - snapshot.groups[name].enqueued
    return None


def drifted(case: Case) -> tuple[int, ...]:
    """Ranks that entered fewer agreements for their steps than the others did."""
    ahead = {rank: _steps_ahead(snapshot) for rank, snapshot in case.snapshots().items()}
    counts = {rank: count for rank, count in ahead.items() if count is not None}
    least = max(0, min(counts.values(), default=0))
    # A rank that has begun a step and not yet agreed on it is one ahead in good health.
    allowed = {rank: least + (_phase(case, rank) in BEFORE_THE_AGREEMENT) for rank in counts}
    return tuple(sorted(rank for rank, count in counts.items() if count > allowed[rank]))


def drift_fact(case: Case, rank: int) -> Fact:
    snapshot = case.views[rank].snapshot
    ahead = _steps_ahead(snapshot) if snapshot is not None else None
    return Fact(
        f"rank {rank} has begun {ahead} steps more than it entered agreements, its peers fewer: "
        "it skipped some",
        _path(case, rank),
    )


def _phase(case: Case, rank: int) -> str:
    snapshot = case.views[rank].snapshot
    return snapshot.host.phase if snapshot is not None else ""


# Patterns ------------------------------------------------------------------------------------------------


def _never_brought(case: Case, wait: Wait) -> tuple[int, ...]:
    """Ranks whose type, or whose root, none brought to the group before, while others bring what was."""
    kind = wait.mismatch_kind()
    if kind not in ("dtype", "root"):
        return ()
    states = [s.groups[wait.group] for s in case.snapshots().values() if wait.group in s.groups]
    before = [record for state in states for record in state.recent if record.sequence < wait.sequence]
    known = {record.dtype if kind == "dtype" else record.operation for record in before}
    brought = {side: side.dtype if kind == "dtype" else side.operation for side in wait.sides}
    odd = [rank for side, what in brought.items() if what not in known for rank in side.ranks]
    enough = len(before) >= _BROUGHT_BEFORE * len(wait.waiting)
    return tuple(sorted(odd)) if enough and len(odd) < len(wait.waiting) else ()


def _new_fact(case: Case, wait: Wait, rank: int) -> Fact:
    side = next(side for side in wait.sides if rank in side.ranks)
    what = side.dtype if wait.mismatch_kind() == "dtype" else side.operation
    return Fact(
        f"rank {rank}: no collective of group {wait.group} before was {what} on any rank", _path(case, rank)
    )


def _minority(sides: tuple[Side, ...]) -> tuple[int, ...]:
    """The smaller parties' ranks; all ranks when the largest two are equally large."""
    if len(sides[0].ranks) == len(sides[1].ranks):
        return tuple(sorted(rank for side in sides for rank in side.ranks))
    return tuple(sorted(rank for side in sides[1:] for rank in side.ranks))


def _history(view: View, group: str) -> list[tuple[int, str]]:
    """(sequence, what) of the group's recent collectives in order; sizes vary with the batch, so they are
    out."""
    state = view.snapshot.groups.get(group) if view.snapshot is not None else None
    if state is None:
        return []
    return [
        (r.sequence, describe(r.operation, (), r.dtype))
        for r in sorted(state.recent, key=lambda r: r.sequence)
    ]


def _expected(view: View, wait: Wait, skip: int = 0) -> str | None:
    """What earlier rounds of this rank say comes at the wait's sequence (``skip`` 1: one later). None: no
    pattern."""
    past = [what for sequence, what in _history(view, wait.group) if sequence < wait.sequence]
    if len(past) < 3:
        return None
    for at in range(len(past) - 1 - skip, 1, -1):
        if past[at - 2 : at] == past[-2:]:
            return past[at + skip] if at + skip < len(past) else None
    return None


def _brought(view: View, wait: Wait) -> str | None:
    return next((what for sequence, what in _history(view, wait.group) if sequence >= wait.sequence), None)


def _deviators(case: Case, wait: Wait) -> tuple[int, ...]:
    """Ranks that brought something else than their own past announces, while at least one kept to it."""
    odd = []
    for rank in wait.waiting:
        expected = _expected(case.views[rank], wait)
        if expected is None:
            return ()
        if _brought(case.views[rank], wait) != expected:
            odd.append(rank)
    return tuple(odd) if len(odd) < len(wait.waiting) else ()


def _jumped_ahead(view: View, wait: Wait) -> bool:
    """It brought what in earlier rounds came one later: it left this one out."""
    following = _expected(view, wait, skip=1)
    return following is not None and following == _brought(view, wait)


def _skipped_on_the_way(case: Case, rank: int, wait: Wait) -> bool:
    """In a circle: did ``rank`` skip the collective, rather than put it after another?

    It did when it never used that group, which others did, or when it has no token in this step while others have:
    the report of every skipped collective so far begins with a rank that is empty.
    """
    snapshot = case.views[rank].snapshot
    if snapshot is None or rank in wait.late:
        return False
    state = snapshot.groups.get(wait.group)
    if state is None or state.completed == 0:
        return wait.sequence > 1
    record: Mapping[str, Any] = case.decisions(rank).get(snapshot.host.step, {})
    tokens, group = record.get("tokens"), record.get("dp", rank)
    return isinstance(tokens, list | tuple) and group < len(tokens) and tokens[group] == 0 and any(tokens)


def _order_sides(links: tuple[Link, ...]) -> Mismatch:
    sides = tuple(
        {
            "rank": link.rank,
            "group": link.wait.group,
            "sequence": link.wait.sequence,
            "operation": link.wait.operation,
        }
        for link in links
    )
    return Mismatch("order", sides)


def _path(case: Case, rank: int) -> str:
    return case.views[rank].ledger_path
