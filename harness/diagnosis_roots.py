"""The rank that waits for nobody while the others wait for it, and what it does instead. Pure.

Left out here: what a rule nearer to the cause explains (``diagnose.py`` asks those first).
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, is_registration, still_waits, wait_facts
from harness.diagnosis_device import DEVICE_NEEDED
from harness.diagnosis_host import host_facts
from harness.diagnosis_model import Cause, Fact, stream_name
from harness.waits import Wait, lacking


@dataclass(frozen=True, slots=True)
class _Root:
    view: View
    wait: Wait | None
    """A collective in which others wait for it; None when the others merely have nothing to do."""


def root_cause(case: Case) -> Cause | None:
    """The cause that lies in one rank's own doing, or None."""
    found = still_waits(case)
    roots = _roots(case, found)
    if not roots:
        return None
    for rule in (_absent, _slow, _blocked, _stuck_stream):
        cause = rule(case, roots, found)
        if cause is not None:
            return cause
    return None


def waited_for(case: Case, found: tuple[Wait, ...]) -> list[View]:
    """The ranks that others wait for and that wait for nobody, whatever they do."""
    return [root.view for root in _roots(case, found)]


def _roots(case: Case, found: tuple[Wait, ...]) -> list[_Root]:
    held = {rank for wait in found for rank in wait.waiting if wait.missing or wait.late}
    roots = [
        _Root(case.views[rank], wait) for rank, wait in sorted(lacking(found).items()) if rank not in held
    ]
    if not found:
        idle = [view for view in case.views.values() if view.parked or view.done]
        resting = {view.rank for view in idle}
        busy = [view for view in case.views.values() if view.rank not in resting]
        if len(busy) == 1 and all(view.known or view.done for view in idle):
            roots = [_Root(busy[0], None)]
    return roots


def _absent(case: Case, roots: list[_Root], found: tuple[Wait, ...]) -> Cause | None:
    """A root whose task is over, that waits for the driver, or that is steps further on: it will not come."""
    gone: list[tuple[View, Wait, str]] = []
    for root in roots:
        why = _why_it_will_not_come(case, root)
        if root.wait is not None and why:
            gone.append((root.view, root.wait, why))
    if not gone:
        return None
    wait = gone[0][1]
    registering = is_registration(case, wait)
    absent = tuple(sorted({view.rank for view, _, _ in gone}))
    # Whoever grows a symmetric heap alone is odd, not those who had no reason to grow it.
    ranks = wait.waiting if registering and len(wait.waiting) <= len(wait.missing) else absent
    decided = case.only_left(absent) and all(view.known or view.done for view, _, _ in gone)
    facts = wait_facts(case, wait)
    for view, _, why in gone:
        facts += [Fact(f"rank {view.rank} {why}", view.ledger_path), view.host_fact()]
    return Cause(
        kind="hang",
        mechanism="registration-stall" if registering else "collective-skipped",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence="proven" if decided else "suspected",
        stream="host",
        collective=collective(wait),
        family=wait.operation,
        group=wait.group,
    )


def _why_it_will_not_come(case: Case, root: _Root) -> str:
    view, wait = root.view, root.wait
    if wait is None or view.rank not in wait.missing or view.moved:
        return ""
    if view.done:
        return "has ended its task without entering it"
    if view.parked:
        return "waits for the driver: it has left its steps without entering it"
    if view.snapshot is None:
        return ""
    step = view.snapshot.host.step
    behind = [case.views[rank].snapshot for rank in wait.waiting]
    latest = max((snapshot.host.step for snapshot in behind if snapshot is not None), default=step)
    return (
        f"is at step {step} already, its peers at {latest}: it left the collective out"
        if step > latest
        else ""
    )


def _slow(case: Case, roots: list[_Root], found: tuple[Wait, ...]) -> Cause | None:
    """The rank that the others wait for moves, or at least its host does."""
    moving = [root for root in roots if root.view.moved or (root.view.still and root.view.host_moved)]
    if not moving:
        return None
    ranks = tuple(root.view.rank for root in moving)
    decided = case.only_left(ranks)
    facts: list[Fact] = []
    for root in moving:
        how = "its ledger moved" if root.view.moved else "its host stack left its place"
        facts.append(Fact(f"rank {root.view.rank} goes on: {how} between the samples", root.view.ledger_path))
        facts += root.view.doing()
        facts += host_facts(root.view)
    for wait in found:
        facts += wait_facts(case, wait)
    return Cause(
        kind="slow",
        mechanism="rank-slow",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence="supported" if decided else "suspected",
        stream="host",
        collective=collective(found[0]) if found else None,
        phase=_phase(moving[0].view),
    )


def _blocked(case: Case, roots: list[_Root], found: tuple[Wait, ...]) -> Cause | None:
    """The host of the root stands, and none of its streams has anything to do."""
    blocked = [
        root.view
        for root in roots
        if root.view.still and (not root.view.unfinished() or root.view.streams_unknown())
    ]
    if not blocked:
        return None
    ranks = tuple(view.rank for view in blocked)
    decided = case.only_left(ranks) and all(view.known for view in blocked)
    facts: list[Fact] = []
    for view in blocked:
        facts.append(view.host_fact())
        facts.append(_streams_fact(view))
        facts += host_facts(view)
    for wait in found:
        facts += wait_facts(case, wait)
    registering = any(root.wait is not None and is_registration(case, root.wait) for root in roots)
    return Cause(
        kind="hang",
        mechanism="host-blocked",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence="supported" if decided else "suspected",
        stream="host",
        collective=collective(found[0]) if found else None,
        family="registration" if registering else "",
        group=found[0].group if found else "",
        phase=_phase(blocked[0]),
    )


def _stuck_stream(case: Case, roots: list[_Root], found: tuple[Wait, ...]) -> Cause | None:
    """A stream of the root has work that does not end, and no other rank is the reason."""
    stuck = [root.view for root in roots if root.view.still and root.view.unfinished()]
    if not stuck:
        return None
    ranks = tuple(view.rank for view in stuck)
    decided = case.only_left(ranks) and all(view.known for view in stuck)
    facts: list[Fact] = []
    for view in stuck:
        facts += view.doing()
        operation = view.operation(view.unfinished()[0])
        if operation is not None and view.known:
            said = f"{view.name}: what keeps {operation.label} from ending, no ledger shows. {DEVICE_NEEDED}"
            facts.append(Fact(said, view.ledger_path))
    for wait in found:
        facts += wait_facts(case, wait)
    name = stuck[0].unfinished()[0]
    operation = stuck[0].operation(name)
    return Cause(
        kind="hang",
        mechanism="unknown",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence="supported" if decided else "suspected",
        stream=stream_name(name),
        operation=operation,
        collective=collective(found[0]) if found else None,
        family=operation.label if operation is not None else "",
        group=found[0].group if found else "",
    )


def _streams_fact(view: View) -> Fact:
    if view.streams_unknown():
        fact = (
            f"rank {view.rank}: nobody has looked at its streams for a while, so their state is not "
            "known and the host is the suspect (a native call holding the interpreter lock looks like this)"
        )
    else:
        fact = f"rank {view.rank}: no stream has unfinished work"
    return Fact(fact, view.ledger_path)


def _phase(view: View) -> str:
    return view.snapshot.host.phase if view.snapshot is not None else ""
