"""Everybody is there and nothing moves: a collective that all members have entered, and a kernel beside it. Pure.

A collective that its members entered with the same things needs nothing more of any rank but room on its device.
Where it stands, and on the same rank another stream stands in a kernel that waits for no event, the two wait for
what both need of the device (HANGS.md, E2). On which rank that began nobody can see from outside; all that show it
are named.

Not here: members that are missing, or brought other things (``diagnosis_collectives.py``).
"""

from __future__ import annotations

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, still_waits
from harness.diagnosis_model import Cause, Fact
from harness.seats import seats_words
from harness.waits import REPLAY_LABEL, Wait, by_host, record_at

_COMM, _COMPUTE = "comm", "compute"
_EVENT = "event."
_SHOWN = 8
DEVICE_NEEDED = "Needed: what the device and its links do (the driver's log, the vendor's tools)"
"""What is missing where work stands that waits for nobody's host."""


def no_room(case: Case) -> Cause | None:
    """None where a member is missing, late or unknown, or no rank has a kernel beside the collective."""
    for wait in still_waits(case):
        if wait.missing or wait.late or wait.unknown or wait.mismatched or len(wait.members) < 2:
            continue
        beside = tuple(rank for rank in wait.waiting if _stands_beside(case.views[rank], wait))
        if not beside or not case.only_left(beside):
            continue
        what = f"{wait.operation} {wait.sequence} of group {wait.group}"
        facts = [
            Fact(
                f"{seats_words(wait.waiting)} are in {what}, entered it and brought the same: nobody is missing",
                case.views[wait.waiting[0]].ledger_path,
            )
        ]
        for rank in beside[:_SHOWN]:
            facts += [
                f for name in (_COMM, _COMPUTE) if (f := case.views[rank].stream_fact(name)) is not None
            ]
        first = case.views[beside[0]]
        operation = first.operation(_COMPUTE)
        label = operation.label if operation is not None else ""
        facts.append(
            Fact(
                f"{seats_words(beside)}: no event is between {label} on compute and the collective on comm, so "
                "each waits for what the other holds of the device (its cores); not excluded: a link that stands, "
                "and a kernel that does not end of itself",
                first.ledger_path,
            )
        )
        for rank in [rank for rank in wait.waiting if rank not in beside][:_SHOWN]:
            facts += case.views[rank].doing()
        return Cause(
            kind="hang",
            mechanism="collective-order",
            ranks=beside,
            facts=tuple(facts),
            confidence="supported" if len(beside) == len(wait.members) else "suspected",
            stream="compute",
            operation=operation,
            collective=collective(wait),
            family=label,
            group=wait.group,
        )
    return None


def nobody_missing(case: Case) -> list[Fact]:
    """What is not known of each collective in which all its members are: why it does not end."""
    return [
        Fact(
            f"nobody is missing in {wait.operation} {wait.sequence} of group {wait.group}: all its members entered "
            f"it and brought the same; whose part of it does not end, no ledger shows. {DEVICE_NEEDED}",
            case.views[wait.waiting[0]].ledger_path,
        )
        for wait in still_waits(case)
        if len(wait.members) > 1
        and set(wait.waiting) == set(wait.members)
        and not (wait.missing or wait.late or wait.unknown or wait.mismatched)
    ]


def _stands_beside(view: View, wait: Wait) -> bool:
    """Its comm stream stands in the collective, and compute in a kernel that is none and waits for no event."""
    state = view.snapshot.groups.get(wait.group) if view.snapshot is not None else None
    record = record_at(state, wait.sequence) if state is not None else None
    carried, kernel = view.oldest(_COMM), view.oldest(_COMPUTE)
    if not view.still or record is None or by_host(record) or carried is None or kernel is None:
        return False
    if carried.label.split() != [record.operation, wait.group]:
        return False
    return not kernel.label.startswith((_EVENT, REPLAY_LABEL)) and not _is_collective(view, kernel.label)


def _is_collective(view: View, label: str) -> bool:
    words = label.split()
    return len(words) > 1 and view.snapshot is not None and words[-1] in view.snapshot.groups
