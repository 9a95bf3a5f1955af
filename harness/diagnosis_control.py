"""A control message between hosts that a rank left out of its round. Pure.

Hosts exchange their messages in rounds: a broadcast, an agreement, a broadcast. A host carries each out itself, so
the order in which it entered them is known, and what it did before tells what comes after what. A rank that its
peers miss in one message, and that stands in another which never followed directly in its rounds before, left the
one between out. Its peers, which keep to their rounds, are not to blame, be it one against one.
"""

from __future__ import annotations

from itertools import pairwise

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact
from harness.waits import Wait, by_host

_TIMES_BEFORE = 2
"""Rounds in which the missing message followed, and in which the one that it is in instead was entered."""


def left_out(case: Case) -> Cause | None:
    """Hosts wait in a message for ranks that went past it."""
    for wait in still_waits(case):
        skipped = {
            rank: fact for rank in wait.missing if (fact := _went_past(case.views[rank], wait)) is not None
        }
        if not skipped:
            continue
        ranks = tuple(sorted(skipped))
        decided = case.others_known(ranks)
        facts = [skipped[rank] for rank in ranks] + wait_facts(case, wait)
        facts += [case.views[rank].host_fact() for rank in ranks]
        return Cause(
            kind="hang",
            mechanism="collective-skipped",
            ranks=ranks if decided else (),
            facts=tuple(facts),
            confidence="supported" if decided else "suspected",
            stream="host",
            collective=collective(wait),
            family=wait.operation,
            group=wait.group,
        )
    return None


def _went_past(view: View, wait: Wait) -> Fact | None:
    entered = _entered(view)
    if view.moved or view.snapshot is None or len(entered) < 2 or entered[-1] == wait.group:
        return None
    last = view.snapshot.groups[entered[-1]]
    if last.completed >= last.enqueued:
        return None  # it is through with that one, and may be on its way
    followed = list(pairwise(entered))
    usual, now = followed.count((entered[-2], wait.group)), followed.count(followed[-1])
    known = entered[:-1].count(entered[-1])
    if usual < _TIMES_BEFORE or now > 1 or known < _TIMES_BEFORE:
        return None
    return Fact(
        f"rank {view.rank} went from its {entered[-2]} to {entered[-1]}, which it never did before; {usual} times "
        f"before it entered {wait.group} next, where it is missed",
        view.ledger_path,
    )


def _entered(view: View) -> list[str]:
    """The groups of its host's messages in the order in which it entered them, as far back as all rings reach."""
    groups = view.snapshot.groups if view.snapshot is not None else {}
    hosts = {
        name: state for name, state in groups.items() if state.recent and all(map(by_host, state.recent))
    }
    since_ns = max(
        (state.recent[0].enqueued_ns for state in hosts.values() if state.enqueued > len(state.recent)),
        default=0,
    )
    times = [
        (record.enqueued_ns, name)
        for name, state in hosts.items()
        for record in state.recent
        if record.enqueued_ns >= since_ns
    ]
    return [name for _, name in sorted(times)]
