"""A rank whose streams stand in nothing but waits for each other's events: an event that does not come. Pure.

A wait for an event holds for a record that was queued before it, on the same device. So of streams that wait for
events some other always works, or the work in front of the record has ended and the record follows. Where every
stream with unfinished work stands in such a wait, and none works, the record was lost or made on another event,
or the streams wait in a circle. Whatever the peers do, that rank goes no further: it is the cause by itself.

A ledger counts no records and does not name the event. Work that it does not count, and the record itself, may
stand on a stream that looks idle; so it is never a proof of the mechanism.

Not here: replays that wait for a record on a flag (``diagnosis_streams.py``), waits between ranks.
"""

from __future__ import annotations

from harness.diagnosis_case import Case, View
from harness.diagnosis_collectives import collective, still_waits, wait_facts
from harness.diagnosis_model import Cause, Fact, stream_name
from harness.waits import EVENT_WAIT_LABEL, by_host, record_at

_SHOWN = 8
"""Most peers of whom is told what they do."""


def lost_event(case: Case) -> Cause | None:
    """None where no rank stands so, or what the others do is not known enough to exclude another cause."""
    found = {view.rank: streams for view in case.views.values() if (streams := _only_waits(case, view))}
    ranks = tuple(found)
    if not ranks:
        return None
    decided = case.others_known(ranks)
    facts: list[Fact] = []
    for rank, streams in found.items():
        view = case.views[rank]
        facts += [fact for name in streams if (fact := view.stream_fact(name)) is not None]
        idle = [name for name in (view.snapshot.streams if view.snapshot else ()) if name not in streams]
        beside = f"; idle: {', '.join(idle)}" if idle else ""
        facts.append(
            Fact(
                f"{view.name}: each of its streams with unfinished work ({', '.join(streams)}) waits for an event "
                f"and none works{beside}. An event is recorded by a stream "
                "of the same device, behind work that has ended or behind one of these waits: its record was "
                "lost, was made on another event, or the waits are a circle; not excluded: an operation that no "
                "ledger counts",
                view.ledger_path,
            )
        )
        facts.append(view.host_fact())
    waits = [wait for wait in still_waits(case) if set(ranks) & {*wait.missing, *wait.late}]
    for wait in waits:
        facts += wait_facts(case, wait)
    for view in [view for view in case.views.values() if view.rank not in found][:_SHOWN]:
        facts += view.doing()
    first = case.views[ranks[0]]
    stream = found[ranks[0]][0]
    operation = first.operation(stream)
    return Cause(
        kind="hang",
        mechanism="stream-order",
        ranks=ranks if decided else (),
        facts=tuple(facts),
        confidence="supported" if decided else "suspected",
        stream=stream_name(stream),
        operation=operation,
        collective=collective(waits[0]) if waits else None,
        family=operation.label if operation is not None else EVENT_WAIT_LABEL,
        group=waits[0].group if waits else "",
    )


def _only_waits(case: Case, view: View) -> tuple[str, ...]:
    """Its streams with unfinished work, the longest waiting first, where all of them wait for events; else none."""
    snapshot = view.snapshot
    if snapshot is None or not view.known or not view.still or view.streams_unknown() or _carries(case, view):
        return ()
    busy = {name: state for name, state in snapshot.streams.items() if state.busy}
    if not busy or not all(one.oldest is not None and _is_wait(one.oldest.label) for one in busy.values()):
        return ()
    return tuple(sorted(busy, key=lambda name: (busy[name].oldest_since_ns, name)))


def _is_wait(label: str) -> bool:
    return label == EVENT_WAIT_LABEL or label.startswith(f"{EVENT_WAIT_LABEL} ")


def _carries(case: Case, view: View) -> bool:
    """It is in a collective that its device carries: that may be on a stream of the library's own."""
    for wait in case.waits():
        state = view.snapshot.groups.get(wait.group) if view.snapshot is not None else None
        record = record_at(state, wait.sequence) if state is not None else None
        if view.rank in wait.waiting and record is not None and not by_host(record):
            return True
    return False
