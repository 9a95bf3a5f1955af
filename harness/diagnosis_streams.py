"""Stream order: a replayed graph that waits for a record which was overtaken and lost (HANGS.md, D1). Pure.

What hardware lets us count: the records of each external event, the waits that completed replays imply, and
the records made before the one before was consumed (*overtaken*). A record on a flag that is still set
changes nothing, so replays run one record short, and stop at the first step that brings no update: a prefill,
an idle step, another graph. Both ranks then show an unfinished replay, because a replay holds collectives;
the culprit is the rank whose records overtook.

Not here: collectives outside graphs (``diagnosis_collectives.py``).
"""

from __future__ import annotations

from harness.diagnosis_case import Case, View
from harness.diagnosis_model import Cause, Fact
from harness.ledger_snapshot import ExternalState, OpRecord
from harness.waits import GRAPH_PREFIX, REPLAY_LABEL, waits

UPDATE_LABEL = "graph.update"
FENCE_LABEL = "event.wait"
WAIT_PHASES = ("wait", "drain")
"""How the names of phases begin in which the host waits for results: a step's launch lies before them."""
DRAIN_PHASE = "drain"
"""After the last step: no update comes any more."""


def stream_order(case: Case) -> Cause | None:
    """The cause, or None when no rank stands in a replay short of a record."""
    suspects = [view for view in case.views.values() if _short_of_a_record(view)]
    if not suspects or _replay_waits_for_an_absent_rank(case):
        return None
    ranks = tuple(view.rank for view in suspects)
    starved = {view.rank: _no_update_comes(case, view) for view in suspects}
    proven = any(fact is not None for fact in starved.values())
    decided = case.others_known(ranks)
    facts: list[Fact] = []
    for view in suspects:
        facts += _facts(view)
        starving = starved[view.rank]
        if starving is not None:
            facts.append(starving)
        facts.append(view.host_fact())
    for view in case.views.values():
        if view.rank not in ranks:
            facts += _peer_facts(view)
    first = suspects[0]
    replay = first.oldest("compute")
    return Cause(
        kind="hang",
        mechanism="stream-order",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence=("proven" if proven else "supported") if decided else "suspected",
        stream="compute",
        operation=first.operation("compute"),
        family=replay.label if replay is not None else REPLAY_LABEL,
    )


def _short_of_a_record(view: View) -> bool:
    """It stands in a replay, nothing is left to come on its update stream, and some record overtook."""
    update, oldest = view.stream("update"), view.oldest("compute")
    return (
        view.still
        and view.condition == "alive"
        and oldest is not None
        and oldest.label.startswith(REPLAY_LABEL)
        and update is not None
        and update.oldest is None
        and bool(_overtaken(view))
    )


def _overtaken(view: View) -> tuple[ExternalState, ...]:
    return () if view.snapshot is None else tuple(e for e in view.snapshot.external if e.overtaken > 0)


def _replay_waits_for_an_absent_rank(case: Case) -> bool:
    """A member never enqueued a collective that a replay holds: the replay may stand because of that."""
    return any(wait.operation.startswith(GRAPH_PREFIX) and wait.missing for wait in waits(case.snapshots()))


def _facts(view: View) -> list[Fact]:
    facts = []
    standing = view.stream_fact("compute")
    if standing is not None:
        facts.append(standing)
    event = min(_overtaken(view), key=lambda e: e.first_overtaken)
    facts.append(
        Fact(
            f"rank {view.rank}: external event {event.name!r} has {event.records} records and {event.waits} "
            f"waits by completed replays; record {event.first_overtaken} was the first made before the one "
            f"before it was consumed, {event.overtaken} in all, and a record on a flag still set is lost "
            f"({len(_overtaken(view))} events of this rank were overtaken)",
            view.ledger_path,
        )
    )
    fence = _fence_fact(view)
    if fence is not None:
        facts.append(fence)
    return facts


def _fence_fact(view: View) -> Fact | None:
    """Whether the newest update of the host arguments was fenced by the completion of the previous replay."""
    recent = _operations(view, "update")
    updates = [sequence for sequence, record in recent.items() if record.label.startswith(UPDATE_LABEL)]
    judged = [sequence for sequence in updates if sequence - 1 in recent]
    if not judged:
        return None
    fenced = sum(recent[sequence - 1].label.startswith(FENCE_LABEL) for sequence in judged)
    how = "none" if fenced == 0 else "each" if fenced == len(judged) else f"{fenced}"
    return Fact(
        f"rank {view.rank}: of the last {len(judged)} updates on the update stream {how} came after a "
        "wait for an event (a fence)",
        view.ledger_path,
    )


def _operations(view: View, stream: str) -> dict[int, OpRecord]:
    state = view.stream(stream)
    return {} if state is None else {record.sequence: record for record in state.recent}


def _no_update_comes(case: Case, view: View) -> Fact | None:
    """The host is past the stuck replay's step, and where it stands brings no update of that graph."""
    replay = view.oldest("compute")
    if replay is None or view.snapshot is None:
        return None
    graph = replay.label.removeprefix(REPLAY_LABEL).strip()
    updates = [r for r in _operations(view, "update").values() if r.label.startswith(UPDATE_LABEL)]
    later = [r for r in updates if r.step > replay.step and graph in r.label]
    step = view.snapshot.host.step
    waiting = view.snapshot.host.phase.startswith(WAIT_PHASES)
    if view.snapshot.host.phase.startswith(DRAIN_PHASE):
        return Fact(
            f"rank {view.rank}: step {step} was its last, so no further record comes", view.ledger_path
        )
    if step <= replay.step or (later and not waiting):
        return None
    if later:
        # More than one record was lost, and the host has run into the wait for the stuck replay's own result.
        fact = (
            f"rank {view.rank}: {1 + len(later)} replays had their updates and are unfinished, and the host "
            f"waits for a result in step {step}: no further record comes"
        )
        return Fact(fact, view.ledger_path)
    record = case.decisions(view.rank).get(step)
    if record is not None and record.get("update") is False:
        fact = (
            f"rank {view.rank}: step {step}, in which the host stands, is a {record.get('mode', '')} step "
            f"without an update (tokens {record.get('tokens')}), so no further record comes"
        )
        return Fact(fact, case.decisions_path(view.rank))
    launched = sorted({r.label for r in _operations(view, "compute").values() if r.step == step})
    if not launched and not waiting:
        return None  # the host may not have come to this step's update yet
    did = (
        f"has enqueued {', '.join(launched[:3])} on compute, and" if launched else "waits for a result, with"
    )
    fact = (
        f"rank {view.rank}: step {step}, in which the host stands, {did} no update of {graph or 'the graph'} "
        f"after step {replay.step}: no further record comes"
    )
    return Fact(fact, view.ledger_path)


def _peer_facts(view: View) -> list[Fact]:
    """What a rank does whose records did not overtake: it waits with the others."""
    facts = list(view.doing())
    if view.snapshot is not None and view.snapshot.external and not _overtaken(view):
        facts.append(Fact(f"rank {view.rank}: no record overtook another", view.ledger_path))
        fence = _fence_fact(view)
        if fence is not None:
            facts.append(fence)
    return facts
