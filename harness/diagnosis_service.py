"""Requests that stand although no rank does: the process between client and ranks that holds them up. Pure.

The ranks of a real engine go round in their loops, or wait for work, while a controller, an engine core or a
detokenizer hands nothing on; only the client sees that. Ledgers decide where the probe wrote them, else stacks
(``diagnosis_stacks.py``), which also serve an engine whose ranks have no ledger at all.
"""

from __future__ import annotations

from harness.diagnosis_case import Case, View
from harness.diagnosis_model import Cause, Fact
from harness.diagnosis_stacks import SeatStacks, stack_cause

CLIENT = "client"
_IDLE = ("idle", "recv", "schedule", "parked")
"""Phases of a rank that has no batch."""
_NEAREST = ("engine_core", "controller", "detokenizer", "server")
"""Of several that stand, whom the others wait for first."""


def held_up(case: Case) -> Cause | None:
    """The client waits for answers, and no rank works on them."""
    client = case.others.get(CLIENT)
    if client is None or not _waits(client) or not case.snapshots():
        return None
    ranks = [view for view in case.views.values() if not view.done]
    if not all(_without_work(view) for view in ranks):
        return None
    holding = [
        view
        for view in case.others.values()
        if view is not client and view.condition == "alive" and view.still and not view.parked
    ]
    facts = [_client_fact(client)]
    if not holding:
        return stack_cause(_seats(case), stalled=tuple(facts))
    holding.sort(key=lambda view: _NEAREST.index(view.role) if view.role in _NEAREST else len(_NEAREST))
    chosen = holding[0]
    facts += [chosen.host_fact()]
    facts += [view.host_fact() for view in (*holding[1:], *ranks)]
    decided = all(view.known for view in ranks)
    return Cause(
        kind="hang",
        mechanism="host-blocked",
        ranks=(chosen.seat,) if decided else (),
        facts=tuple(facts),
        confidence="supported" if decided else "suspected",
        stream="host",
        family=chosen.role,
        phase=chosen.snapshot.host.phase if chosen.snapshot is not None else "",
    )


def by_stacks(case: Case) -> Cause | None:
    """Of an engine whose ranks wrote no ledger; None where one has."""
    if case.snapshots() or not any(view.stacks is not None for view in case.everyone):
        return None
    client = case.others.get(CLIENT)
    stalled = [Fact(f"captured because: {case.evidence.reason}", "evidence/manifest.json")]
    if client is not None and _waits(client):
        stalled.insert(0, _client_fact(client))
    return stack_cause(_seats(case), stalled=tuple(stalled))


def _waits(client: View) -> bool:
    return client.still and not client.parked


def _without_work(view: View) -> bool:
    """It made no step between the samples, and stands in no step."""
    if view.snapshot is None or view.earlier is None:
        return False
    stepped = view.snapshot.host.step != view.earlier.host.step
    return view.condition == "alive" and not stepped and view.snapshot.host.phase in _IDLE


def _client_fact(client: View) -> Fact:
    host = client.snapshot.host if client.snapshot is not None else None
    if host is None or client.snapshot is None:
        return Fact("client: no readable ledger", client.condition_path)
    since_s = max(0.0, (client.snapshot.taken_ns - host.since_ns) / 1e9)
    return Fact(
        f"client: {host.step} tokens received, none for {since_s:.2f} s, with requests in flight",
        client.ledger_path,
    )


def _seats(case: Case) -> list[SeatStacks]:
    """Without the client, which is no part of the engine."""
    return [
        SeatStacks(
            seat=view.seat,
            role=view.role if view.rank < 0 else "rank",
            condition=view.condition,
            pid=view.pid,
            before=view.earlier_stacks,
            after=view.stacks,
            native=view.native,
            stopped_twice=view.stopped_twice,
            died_s=view.died_s,
            exit=view.exit,
            stacks_path=view.stacks_path,
            processes_path=view.condition_path,
        )
        for view in case.everyone
        if view.seat != CLIENT
    ]
