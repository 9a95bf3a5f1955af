"""Hosts that hold everything up though no collective shows who is missing. Pure.

Two ways: a rank entered the collective that all are in, and its host then keeps the interpreter's lock, so that
its own threads cannot finish it; or the hosts of all ranks stand where no collective and no stream is under way, as
when they wait for each other over a socket or for one thing outside. Asked after the rules that need to know who is
missing (`diagnosis_roots.py`); what a host is held up in, says ``diagnosis_host.py``.
"""

from __future__ import annotations

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, still_waits, wait_facts
from harness.diagnosis_host import host_facts
from harness.diagnosis_model import Cause, Fact
from harness.stillness import host_thread, host_waits


def hosts_alone(case: Case) -> Cause | None:
    """The cause that lies in hosts alone, or None."""
    views = [view for view in case.views.values() if not view.done]
    if not views or not all(view.known and view.still and not view.parked for view in views):
        return None
    if any(view.exception is not None or view.host_moved for view in views):
        return None
    return _keeps_the_interpreter(case, views) or _stand_outside(case, views)


def _keeps_the_interpreter(case: Case, views: list[View]) -> Cause | None:
    """Seen by its stacks, or because nobody in its process has looked at its streams for a while."""
    held = [view for view in views if _holds(view) or (view.streams_unknown() and not _waits(view))]
    ranks = tuple(view.rank for view in held)
    if not held or len(held) == len(views) or not case.only_left(ranks):
        return None
    facts: list[Fact] = []
    for view in held:
        facts += [*view.doing(), *host_facts(view)]
        how = (
            "is at this place in every sample, at work and with the interpreter's lock"
            if _holds(view)
            else "is suspected: no other thread of the process has looked at its streams for a while"
        )
        said = f"{view.name}: its host {how}; what its streams have begun cannot be finished meanwhile"
        facts.append(Fact(said, view.stacks_path or view.ledger_path))
    found = still_waits(case)
    for wait in found:
        facts += wait_facts(case, wait)
    return _blocked(ranks, facts, held[0], case)


def _holds(view: View) -> bool:
    """In both samples; a thread that computes in Python lets others have a turn, and is at it all the same."""
    both = [view.earlier_stacks, view.stacks]
    threads = [host_thread(stacks) for stacks in both if stacks is not None]
    return len(threads) == 2 and all(one is not None and one.owns_gil for one in threads) and not _waits(view)


def _waits(view: View) -> bool:
    return view.stacks is not None and host_waits(view.stacks)


def _stand_outside(case: Case, views: list[View]) -> Cause | None:
    """No collective is entered, no stream has work: whatever they wait for, a ledger does not know it."""
    if still_waits(case) or any(view.unfinished() or view.streams_unknown() for view in views):
        return None
    # By the ledgers alone, ranks that merely have nothing to do look the same.
    if not all(view.stacks is not None and view.earlier_stacks is not None for view in views):
        return None
    facts: list[Fact] = []
    for view in views:
        facts += [view.host_fact(), *host_facts(view)]
    facts.append(
        Fact(
            "no rank is in a collective and no stream has unfinished work: each host stands on its own, or they "
            "wait for each other, or for one thing, by a way that no ledger knows (a socket, a file, a lock)",
            views[0].ledger_path,
        )
    )
    return _blocked(tuple(view.rank for view in views), facts, views[0], case)


def _blocked(ranks: tuple[int, ...], facts: list[Fact], first: View, case: Case) -> Cause:
    found = still_waits(case)
    return Cause(
        kind="hang",
        mechanism="host-blocked",
        ranks=ranks,
        facts=tuple(facts),
        confidence="supported",
        stream="host",
        collective=collective(found[0]) if found else None,
        group=found[0].group if found else "",
        phase=first.snapshot.host.phase if first.snapshot is not None else "",
    )
