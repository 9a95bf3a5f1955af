"""Two orders of the same collectives: two groups entered in two orders, or one communicator on two streams. Pure.

Both are told by what a rank has queued. A collective that stands behind another on the same stream was not left
out, so a circle of such waits is an order; and a communicator that has unfinished collectives on two streams of a
rank has none. Which rank is odd, its own earlier steps tell, or the others where they are more.

Not here: collectives that never came (``diagnosis_collectives.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact, Mismatch, Operation, StreamName, stream_name
from harness.knots import standing_in
from harness.ledger_snapshot import OpRecord
from harness.waits import Link, Wait, cycle_in

_COMM: StreamName = "comm"
_EVENT = "event."
_SHOWN = 8
"""Most ranks beside the culprits of whom is told what they do."""


def two_orders(case: Case) -> Cause | None:
    """Ranks wait in a circle, each for one that has queued the collective behind another, and all have queued as
    many. None where it does not tell which of them left the usual order."""
    found = still_waits(case)
    links = cycle_in(found)
    circle = tuple(link.rank for link in links)
    if not links or not case.only_left(circle) or not all(case.views[rank].still for rank in circle):
        return None
    groups = {link.wait.group for link in links}
    if len(groups) < 2 or not all(link.following in link.wait.late for link in links):
        return None
    if not all(_queued_alike(case, link.wait) for link in links):
        return None  # what stands behind another is a later one: the one before was left out
    left = {rank: one for rank, view in case.views.items() if (one := _left_its_order(view)) is not None}
    odd = tuple(sorted(left)) if len(left) < len(case.views) else ()
    odd = odd or _fewer(found, groups)
    if not odd:
        return None
    facts = [_left_fact(case.views[rank], left[rank]) for rank in odd if rank in left]
    facts += [_link_fact(case, link) for link in links]
    for rank in sorted({*circle, *odd[:_SHOWN]}):
        facts += case.views[rank].doing()
    wait = next((link.wait for link in links if link.rank in odd), links[0].wait)
    return Cause(
        kind="hang",
        mechanism="collective-order",
        ranks=odd,
        facts=tuple(facts),
        confidence="proven" if left else "supported",
        stream=_COMM,
        collective=collective(wait, Mismatch("order", tuple(_side(link) for link in links))),
        family=wait.operation,
        group=wait.group,
    )


def two_streams(case: Case) -> Cause | None:
    """A rank has unfinished collectives of one group on two of its streams at once, and the group stands."""
    for wait in still_waits(case):
        snapshots = {rank: case.views[rank].snapshot for rank in wait.members if _stands(case, rank)}
        beside = standing_in({rank: one for rank, one in snapshots.items() if one is not None}, wait.group)
        if not beside:
            continue
        ranks = tuple(sorted(beside))
        facts: list[Fact] = []
        for rank, streams in beside.items():
            facts.append(
                Fact(
                    f"rank {rank}: unfinished collectives of group {wait.group} are on two of its streams, "
                    f"{' and '.join(streams)}: nothing orders them, and a peer may carry them the other way round",
                    case.views[rank].ledger_path,
                )
            )
            facts += [fact for name in streams if (fact := case.views[rank].stream_fact(name)) is not None]
        facts += wait_facts(case, wait)
        sides = wait.sides if wait.mismatched else ()
        facts += [Fact(side.words(), case.views[side.ranks[0]].ledger_path) for side in sides]
        for rank in [rank for rank in wait.waiting if rank not in beside][:_SHOWN]:
            facts += case.views[rank].doing()
        stream, operation = _side_stream(case.views[ranks[0]], beside[ranks[0]])
        decided = case.only_left(ranks)
        return Cause(
            kind="hang",
            mechanism="stream-order",
            ranks=ranks if decided else (),
            facts=tuple(facts),
            confidence="supported" if decided else "suspected",
            stream=stream_name(stream),
            operation=operation,
            collective=collective(wait),
            family=wait.operation,
            group=wait.group,
        )
    return None


def _link_fact(case: Case, link: Link) -> Fact:
    wait = link.wait
    return Fact(
        f"rank {link.rank} waits in {wait.operation} {wait.sequence} of group {wait.group} for rank "
        f"{link.following}, which queued it behind another",
        case.views[link.rank].ledger_path,
    )


def _side(link: Link) -> dict[str, object]:
    wait = link.wait
    return {"rank": link.rank, "group": wait.group, "sequence": wait.sequence, "operation": wait.operation}


def _queued_alike(case: Case, wait: Wait) -> bool:
    """The members have queued equally many of the group's collectives: by now, where their hosts are in the same
    step, else when the newest step began that all have recorded."""
    snapshots = [s for rank in wait.members if (s := case.views[rank].snapshot) is not None]
    if len(snapshots) < len(wait.members):
        return False
    if len({snapshot.host.step for snapshot in snapshots}) == 1:
        states = [snapshot.groups.get(wait.group) for snapshot in snapshots]
        return len({0 if state is None else state.enqueued for state in states}) == 1
    records = [case.decisions(rank) for rank in wait.members]
    common = max(set.intersection(*(set(found) for found in records)), default=None)
    if common is None:
        return False
    counts = [found[common].get("collectives") for found in records]
    return len({one.get(wait.group) if isinstance(one, dict) else None for one in counts}) == 1


# One rank's order ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Left:
    step: int
    did: tuple[str, ...]
    expected: tuple[str, ...]


def _left_its_order(view: View) -> _Left | None:
    """The first of the rank's newest steps whose operations on the comm stream are not those of its steps before.

    A step counts by the groups of its operations in their order: an operation and its size may vary. The newest
    step may be unfinished and is held against beginnings.
    """
    steps = _steps(view)
    if len(steps) < 4:
        return None
    numbers = sorted(steps)
    usual = [steps[number] for number in numbers[:-2]]
    for number in numbers[-2:]:
        did = steps[number]
        last = number == numbers[-1]
        if any(one[: len(did)] == did if last else one == did for one in usual):
            continue
        expected = max(usual, key=lambda one: (_common(one, did), -len(one)))
        return _Left(number, did, expected)
    return None


def _steps(view: View) -> Mapping[int, tuple[str, ...]]:
    """The comm stream's ring by step, its first step, which may be cut, left out."""
    found: dict[int, list[str]] = {}
    for record in _recent(view, _COMM):
        if not record.label.startswith(_EVENT):
            found.setdefault(record.step, []).append(record.label.split()[-1])
    first = min(found, default=0)
    return {step: tuple(groups) for step, groups in found.items() if step != first}


def _common(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _left_fact(view: View, left: _Left) -> Fact:
    return Fact(
        f"rank {view.rank}: its comm stream has the groups {', '.join(left.did)} in step {left.step}, where "
        f"its steps before had {', '.join(left.expected)}",
        view.ledger_path,
    )


def _fewer(found: tuple[Wait, ...], groups: set[str]) -> tuple[int, ...]:
    """Where each rank stands in one of the groups first: the ranks that are clearly fewer."""
    parties = sorted((wait.waiting for wait in found if wait.group in groups), key=len)
    if len(parties) != 2 or len(parties[0]) == len(parties[1]) or set(parties[0]) & set(parties[1]):
        return ()
    return parties[0]


# One communicator, two streams ---------------------------------------------------------------------------


def _stands(case: Case, rank: int) -> bool:
    return rank in case.views and case.views[rank].still


def _side_stream(view: View, streams: tuple[str, ...]) -> tuple[str, Operation | None]:
    """The one that is not the comm stream, with the operation in which it stands."""
    name = next((one for one in streams if one != _COMM), streams[0])
    return name, view.operation(name)


def _recent(view: View, stream: str) -> list[OpRecord]:
    state = view.stream(stream)
    return [] if state is None else sorted(state.recent, key=lambda record: record.sequence)
