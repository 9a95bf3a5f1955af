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
from harness.ledger_snapshot import OpRecord
from harness.lost_records import (
    DRAIN_PHASE,
    RESULT_PHASE,
    UPDATE_LABEL,
    LostRecord,
    fenced_updates,
    graph_of,
    lost_record,
    own_events,
)
from harness.waits import GRAPH_PREFIX, REPLAY_LABEL


def stream_order(case: Case) -> Cause | None:
    """The cause, or None when no rank stands in a replay short of a record."""
    short = {
        view.rank: lost for view in case.views.values() if (lost := _short_of_a_record(view)) is not None
    }
    if not short or _replay_waits_for_an_absent_rank(case):
        return None
    undoubted = {rank: lost for rank, lost in short.items() if not lost.doubt}
    short = undoubted or short
    starved = {rank: _no_update_comes(case, case.views[rank], lost) for rank, lost in short.items()}
    proven = bool(undoubted) and any(fact is not None for fact in starved.values())
    ranks = tuple(short)
    decided = case.others_known(ranks)
    facts: list[Fact] = []
    for rank, lost in short.items():
        view = case.views[rank]
        facts += _facts(view, lost)
        starving = starved[rank]
        if starving is not None:
            facts.append(starving)
        fence = _fence_words(view)
        if fence:
            facts.append(Fact(f"rank {rank}: {fence}", view.ledger_path))
        facts.append(view.host_fact())
    for view in case.views.values():
        if view.rank not in short:
            facts += _peer_facts(view)
    first = case.views[ranks[0]]
    return Cause(
        kind="hang",
        mechanism="stream-order",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence=("proven" if proven else "supported") if decided else "suspected",
        stream="compute",
        operation=first.operation("compute"),
        family=short[ranks[0]].replay.label,
    )


def _short_of_a_record(view: View) -> LostRecord | None:
    """It stands in a replay, nothing is left to come on its update stream, and some record overtook."""
    still = view.still and view.condition == "alive" and view.snapshot is not None
    return lost_record(view.snapshot) if still and view.snapshot is not None else None


def _replay_waits_for_an_absent_rank(case: Case) -> bool:
    """A member never enqueued a collective that a replay holds: the replay may stand because of that."""
    return any(wait.operation.startswith(GRAPH_PREFIX) and wait.missing for wait in case.waits())


def _facts(view: View, lost: LostRecord) -> list[Fact]:
    facts = []
    standing = view.stream_fact("compute")
    if standing is not None:
        facts.append(standing)
    event = lost.events[0]
    of = len(own_events(view.snapshot, lost.graph)) if view.snapshot is not None else 0
    alike = f" (so for {len(lost.events)} of the graph's {of} events)" if of > 1 else ""
    needs = f", so replay {lost.number} waits for a record {event.records + 1}" if lost.number else ""
    facts.append(
        Fact(
            f"rank {view.rank}: external event {event.name!r} has {event.records} records and {event.waits} "
            f"waits by completed replays; record {event.first_overtaken} was the first made before the one "
            f"before it was consumed, {event.overtaken} in all, and a record on a flag still set is lost"
            f"{needs}{alike}",
            view.ledger_path,
        )
    )
    if lost.doubt:
        facts.append(Fact(f"rank {view.rank}: but not each of them was lost: {lost.doubt}", view.ledger_path))
    return facts


def _fence_words(view: View) -> str:
    """Whether the newest updates of host arguments were fenced by the completion of the replay before."""
    fenced, judged = fenced_updates(view.snapshot) if view.snapshot is not None else (0, 0)
    if not judged:
        return ""
    how = "none" if fenced == 0 else "each" if fenced == judged else f"{fenced}"
    return f"of the last {judged} updates on the update stream {how} came after a wait for an event (a fence)"


def _operations(view: View, stream: str) -> list[OpRecord]:
    state = view.stream(stream)
    return [] if state is None else sorted(state.recent, key=lambda record: record.sequence)


def _no_update_comes(case: Case, view: View, lost: LostRecord) -> Fact | None:
    """The host is past the stuck replay's step, and where it stands brings no update of that graph."""
    if view.snapshot is None:
        return None
    replay, graph = lost.replay, lost.graph
    later = [
        record
        for record in _operations(view, "update")
        if record.label.startswith(UPDATE_LABEL) and record.step > replay.step and graph_of(record) == graph
    ]
    step = view.snapshot.host.step
    phase = view.snapshot.host.phase
    waiting = phase.startswith((RESULT_PHASE, DRAIN_PHASE))
    if phase.startswith(DRAIN_PHASE):
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
    launched = [record.label for record in _operations(view, "compute") if record.step == step]
    if not launched and not waiting:
        return None  # the host may not have come to this step's update yet
    replayed = [label for label in launched if label.startswith(REPLAY_LABEL)]
    did = (
        f"has enqueued {', '.join(replayed or launched[:3])}"
        f"{'' if replayed else f' and {len(launched) - 3} more operations' if len(launched) > 3 else ''} on "
        f"compute{'' if replayed else ', no replay'}, and"
        if launched
        else "waits for a result, with"
    )
    fact = (
        f"rank {view.rank}: step {step}, in which the host stands, {did} no update of {graph or 'the graph'} "
        f"after step {replay.step}: no further record comes"
    )
    return Fact(fact, view.ledger_path)


def _peer_facts(view: View) -> list[Fact]:
    """What a rank does whose records did not overtake: it waits with the others."""
    facts = list(view.doing())
    if view.snapshot is not None and view.snapshot.external:
        overtaken = sum(event.overtaken > 0 for event in view.snapshot.external)
        what = (
            f"records of {overtaken} events overtook another" if overtaken else "no record overtook another"
        )
        fence = _fence_words(view)
        facts.append(Fact(f"rank {view.rank}: {what}{f'; {fence}' if fence else ''}", view.ledger_path))
    return facts
